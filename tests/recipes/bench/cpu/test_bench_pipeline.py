"""The pipeline benchmark runs what was planned on a small model, and fails if a requirement is missed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks.forked import FORKED

from hf_longctx.recipes.bench.cpu import pipeline, stage_processes


@pytest.mark.wide
@pytest.mark.slow
def test_plans_of_one_batch_agree_and_a_missed_ratio_fails(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(stage_processes.mp, "get_context", lambda _: FORKED)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64}
    for name, value in {"CONFIG": pipeline.CONFIG | sizes, "LONG_TOKENS": 200, "NUM_SHORT": 3}.items():
        monkeypatch.setattr(pipeline, name, value)
    written = tmp_path / "rows.json"
    with pytest.raises(SystemExit) as failure:
        pipeline.main(["--rounds", "1", "--json", str(written), "--require", "1000"])
    # times of so little work mean nothing, but everything else must hold
    found = [line for line in str(failure.value).splitlines() if "idle share" not in line]
    assert len(found) == 1 and found[0].endswith("required 1000.0"), found
    rows = json.loads(written.read_text())
    table = capsys.readouterr().out
    assert "layers by stage: " in table
    assert [row["plan"] for row in rows] == [pipeline.BASELINE, pipeline.JUDGED, "slices, 1f1b", "slices, gpipe"]
    for row in rows:
        assert row["executed_in_flight"] == row["planned_in_flight"] and row["executed_kv_book"] == row["planned_kv_book"]
        assert all(0 < share < 1 for share in row["measured_idle"])
        # because of noise, the fit may say that a pass of so few tokens takes no time
        assert all(-1e-9 < share < 1 + 1e-9 for share in row["predicted_idle"])
        assert f"\n{row['plan']} " in table
    assert not any(rows[0]["executed_kv_book"]) and all(rows[1]["executed_kv_book"])


def row(plan: str, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "plan": plan,
        "chunks": 4,
        "predicted_s": 1.0,
        "measured_s": 1.0,
        "rounds_s": [1.0],
        "core_share": 1.0,
        "predicted_idle": [0.2, 0.3],
        "measured_idle": [0.24, 0.26],
        "planned_in_flight": [3, 2],
        "executed_in_flight": [3, 2],
        "planned_kv_book": [8, 8],
        "executed_kv_book": [8, 8],
        "loss": 5.0,
    }
    return pipeline.Row(**fields | changes)


@pytest.mark.parametrize(
    "changes,ratio,message",
    [
        ({}, 1.2, ""),
        ({}, 1.3, "slices, elastic: 1.250 times as fast as batch-level 1F1B, required 1.3"),
        ({"measured_idle": [0.2, 0.36]}, 1.0, "slices, elastic: an idle share is 0.060 off its prediction, allowed 0.05"),
        # without --require, only results that do not depend on a quiet machine are checked
        ({"measured_idle": [0.2, 0.36]}, None, ""),
        ({"loss": 5.0001}, None, "slices, elastic: loss 5.0001000, but batch-level 1F1B has 5.0000000"),
        ({"executed_in_flight": [4, 2]}, None, "slices, elastic: [4, 2] chunks in flight, predicted [3, 2]"),
        ({"executed_kv_book": [8, 9]}, None, "slices, elastic: [8, 9] bytes of keys and values, predicted [8, 8]"),
    ],
)
def test_every_requirement_is_judged(changes: dict[str, Any], ratio: float | None, message: str) -> None:
    rows = [row(pipeline.BASELINE, measured_s=1.25), row(pipeline.JUDGED, **changes)]
    assert pipeline.missed(rows, ratio) == ([message] if message else [])


def test_the_baseline_has_every_sequence_whole_and_once() -> None:
    lengths = [50, 9, 8, 7, 3]
    for num_packs in (1, 2, 4):
        for long_first in (True, False):
            chunks = pipeline.whole(lengths, num_packs, long_first)
            spans = sorted((span.sequence, span.start, span.stop) for chunk in chunks for span in chunk.spans)
            assert spans == [(number, 0, length) for number, length in enumerate(lengths)]
            assert len(chunks) == 1 + num_packs and chunks[0 if long_first else -1].num_tokens == 50
