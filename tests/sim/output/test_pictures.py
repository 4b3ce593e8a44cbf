"""The files of a forecast are complete and readable, and its pictures have a reasonable size."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from helpers.plans.forecasts import cost_model, forecast, scenario

from hf_longctx.plan.core.serialize import plan_digest
from hf_longctx.sim.execution import execute_plan
from hf_longctx.sim.forecast import make_forecast
from hf_longctx.sim.output import pictures
from hf_longctx.sim.output.json_records import read_plan_file
from hf_longctx.sim.output.pictures import check_pictures, write_execution, write_forecast

pytest.importorskip("matplotlib")


def png_size(path: Path) -> tuple[int, int]:
    """Width and height from the header of a PNG file."""
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


@pytest.mark.wide
def test_a_forecast_is_written_with_its_pictures(tmp_path: Path) -> None:
    found = forecast()
    write_forecast(found, tmp_path / "deep" / "folder")
    folder = tmp_path / "deep" / "folder"
    assert {path.name for path in folder.iterdir()} == {"plan.json", "report.txt", "timeline.png", "trace.json", "lengths.png"}
    file = read_plan_file((folder / "plan.json").read_text())
    assert plan_digest(file.plan) == plan_digest(found.steps[0].plan)
    assert "STEP" in (folder / "report.txt").read_text()
    trace = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert len(trace) == len(found.steps[0].execution.events)
    assert max(event["ts"] + event["dur"] for event in trace) == pytest.approx(found.step_s * 1e6)
    for name in ("timeline.png", "lengths.png"):
        width, height = png_size(folder / name)
        assert 800 <= width <= 2000 and 200 <= height <= 1400


def test_missing_matplotlib_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    check_pictures()
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install matplotlib, or leave --output out"):
        check_pictures()


def test_without_lengths_only_text_is_written(tmp_path: Path) -> None:
    write_forecast(make_forecast(scenario(), None, 1, 1, 0), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"plan.json", "report.txt"}


def test_a_simulation_is_written_with_its_timeline(tmp_path: Path) -> None:
    plan = forecast().steps[0].plan
    write_execution(plan, execute_plan(plan, cost_model(4)), "the text", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"report.txt", "timeline.png", "trace.json"}
    assert (tmp_path / "report.txt").read_text() == "the text\n"
