"""Writes the page of a run: one HTML file that contains plotly and all data, so that it opens anywhere and can be sent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from hf_longctx.journal import JOURNAL, Journal, Line, read_journal
from hf_longctx.page.charts import (
    Chart,
    Rates,
    bytes_chart,
    layout_chart,
    length_chart,
    loss_chart,
    needle_charts,
    operations_chart,
    position_chart,
    seconds_chart,
    share_chart,
    speed_chart,
    timeline_chart,
    where_chart,
)
from hf_longctx.page.history import Step, steps_of, thinned
from hf_longctx.plan.cost.cost_model import OPERATIONS_FORMULA
from hf_longctx.plan.cost.profiles import peak_of_device

PAGE = "report.html"
_EVALUATIONS = "long_evaluation.json"


def write_page(folder: Path, output: Path | None = None, peak_flops: float | None = None) -> tuple[Path, dict[str, Any]]:
    """Writes the page of the run in `folder`; returns its path, and the run's main numbers.

    peak_flops: FLOP/s of one device, for MFU; None: by the device's name. Raises ValueError if the folder has no run, OSError if
    the page cannot be written.
    """
    if not (folder / JOURNAL).is_file():
        raise ValueError(f"{folder} has no {JOURNAL}, which every training writes; give the output_dir of a training")
    journal = read_journal(folder, is_full=True)
    steps = steps_of(journal)
    if not steps:
        raise ValueError(f"{folder / JOURNAL} has no finished step yet; wait for the first one")
    path = output or folder / PAGE
    start = journal.of("start")[-1]
    rates = _rates(start, peak_flops)
    numbers = main_numbers(journal, steps, rates)
    evaluations = _evaluations(folder)
    charts = charts_of(journal, steps, evaluations, rates)
    path.write_text(_rendered(folder, journal, charts, numbers), encoding="utf-8")
    return path, numbers


def charts_of(journal: Journal, steps: Sequence[Step], evaluations: list[dict[str, Any]], rates: Rates) -> list[Chart]:
    """Makes all charts for which the run has data, in the page's order."""
    start, shown = journal.of("start")[-1], thinned(steps)
    ends = journal.of("end")
    found = [
        loss_chart(shown, journal),
        speed_chart(shown),
        seconds_chart(shown),
        bytes_chart(shown, start["machine"]),
        operations_chart(shown, rates),
        share_chart(shown),
        layout_chart(shown),
        length_chart(journal),
        *needle_charts(evaluations),
        position_chart(evaluations),
        where_chart(shown),
        timeline_chart(ends[-1] if ends else None),
    ]
    return [chart for chart in found if chart is not None]


def main_numbers(journal: Journal, steps: Sequence[Step], rates: Rates) -> dict[str, Any]:
    """Returns the run's main numbers, for the page and `--json`."""
    seconds = sum(step.wall_s or step.measured_s for step in steps)
    tokens = sum(step.tokens for step in steps)
    errors = [abs(step.error) for step in steps if step.error is not None]
    labels = [step.labels for step in steps]
    evaluations = [line["logs"]["eval_loss"] for line in journal.of("log") if "eval_loss" in line["logs"]]
    per_rank = sum(step.operations for step in steps) / seconds / rates.num_ranks
    return {
        "steps": int(steps[-1].step),
        "loss": steps[-1].loss,
        "eval_loss": evaluations[-1] if evaluations else None,
        "tokens": int(tokens),
        "label_tokens": sum(int(label) for label in labels if label) if None not in labels else None,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "model_flops_per_s_per_rank": per_rank,
        "mfu": per_rank / rates.peak if rates.peak else None,
        "median_prediction_error": median(errors) if errors else None,
        "plan_wait_s": sum(step.plan_wait_s for step in steps),
        "padding_share": 1 - tokens / (sum(step.tokens / (1 - step.padding_share) for step in steps) or 1),
    }


def _rates(start: Line, peak_flops: float | None) -> Rates:
    machine = start["machine"]
    if peak_flops is not None:
        return Rates(machine["ranks"], peak_flops, "as given by --peak-tflops")
    return Rates(machine["ranks"], peak_of_device(machine["device"]), f"dense bf16, {machine['device']}")


def _evaluations(folder: Path) -> list[dict[str, Any]]:
    """Reads the evaluations written by `LongContextEvaluation`; empty if there are none."""
    path = folder / _EVALUATIONS
    if not path.is_file():
        return []
    try:
        runs: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["runs"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); move it away to make the page without evaluations") from error
    return runs


def _rendered(folder: Path, journal: Journal, charts: list[Chart], numbers: dict[str, Any]) -> str:
    from jinja2 import Environment
    from plotly.offline import get_plotlyjs

    start = journal.of("start")[-1]
    figures = json.dumps({chart.name: chart.figure() for chart in charts}, allow_nan=False).replace("</", "<\\/")
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        Path(__file__).with_name("page.html.jinja").read_text(encoding="utf-8")
    )
    return template.render(
        title=f"Run {folder.name or folder.resolve().name}",
        begun=datetime.fromtimestamp(start["time"]).strftime("%Y-%m-%d %H:%M"),
        start=start,
        tiles=_tiles(numbers),
        charts=charts,
        figures=figures,
        plotly=get_plotlyjs(),
        formula=OPERATIONS_FORMULA,
        tables={
            "Settings that were changed": {name: value for name, value in start["settings"].items() if name in start["changed"]},
            "Other settings": {name: value for name, value in start["settings"].items() if name not in start["changed"]},
            "Training arguments": start["arguments"],
        },
        num_resumed=sum(bool(line["step"]) for line in journal.of("start")),
        has_ended=journal.lines[-1]["step"] <= max((line["step"] for line in journal.of("end")), default=-1),
        num_unreadable=journal.num_unreadable,
    )


def _tiles(numbers: dict[str, Any]) -> list[tuple[str, str]]:
    """Formats the main numbers, without unknown ones."""
    tiles = [
        ("steps", f"{numbers['steps']:,}"),
        ("last loss", f"{numbers['loss']:.4g}" if numbers["loss"] is not None else ""),
        ("held-out loss", f"{numbers['eval_loss']:.4g}" if numbers["eval_loss"] is not None else ""),
        ("tokens/s", f"{numbers['tokens_per_s']:,.0f}"),
        ("MFU", f"{numbers['mfu']:.1%}" if numbers["mfu"] is not None else ""),
        ("tokens", f"{numbers['tokens']:,}"),
        ("label tokens", f"{numbers['label_tokens']:,}" if numbers["label_tokens"] is not None else ""),
        ("time in steps", _duration(numbers["seconds"])),
        (
            "prediction error",
            f"{numbers['median_prediction_error']:.1%}" if numbers["median_prediction_error"] is not None else "",
        ),
        ("padding", f"{numbers['padding_share']:.1%}"),
    ]
    return [(name, text) for name, text in tiles if text]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
