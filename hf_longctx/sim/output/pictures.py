"""Writes forecasts and simulations as files in a folder: JSON, text, traces and pictures (matplotlib, the extra `plot`).

Called by the command line for option --output.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_longctx.plan.core.types import StepPlan
from hf_longctx.sim.execution import Execution
from hf_longctx.sim.forecast import Forecast
from hf_longctx.sim.output.json_records import forecast_record
from hf_longctx.sim.output.text import LengthBin, forecast_text, length_bins
from hf_longctx.timeline import chrome_trace, save_png_timeline

# colours of the degrees, from one rank (light) to the largest groups (dark)
_SHADES = ("#d0e1f2", "#a6cbe3", "#6eaed6", "#4292c6", "#2171b5", "#0b559f", "#08306b", "#041a3d")


def write_forecast(forecast: Forecast, folder: Path) -> None:
    """Writes plan.json and report.txt, and for steps timeline.png, trace.json and lengths.png; creates the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(forecast_record(forecast), indent=2) + "\n")
    (folder / "report.txt").write_text(forecast_text(forecast) + "\n")
    if forecast.steps:
        first = forecast.steps[0]
        scenario = forecast.scenario
        title = f"{scenario.model_name} on {first.plan.num_ranks} x {scenario.costs.cluster.hardware.name}, first step"
        write_timeline(first.plan, first.execution, title, folder)
        save_png_lengths(forecast, folder / "lengths.png")


def write_execution(plan: StepPlan, execution: Execution, text: str, folder: Path) -> None:
    """Writes report.txt, timeline.png and trace.json of a simulated plan; creates the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.txt").write_text(text + "\n")
    title = f"step {plan.step}: {len(plan.lengths):,} sequences, {sum(plan.lengths):,} tokens on {plan.num_ranks} ranks"
    write_timeline(plan, execution, title, folder)


def write_timeline(plan: StepPlan, execution: Execution, title: str, folder: Path) -> None:
    """Writes timeline.png and trace.json, which chrome://tracing and Perfetto open, by stage and rank."""
    ranks_per_stage = plan.ranks_per_stage if plan.num_stages > 1 else 0
    (folder / "trace.json").write_text(chrome_trace(execution.events, ranks_per_stage))
    save_png_timeline({"predicted": execution.events}, title, folder / "timeline.png", ranks_per_stage=ranks_per_stage)


def save_png_lengths(forecast: Forecast, path: Path) -> None:
    """Writes bar charts of sequences and tokens by length (logarithmic axis), with bars split by degree."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bins = length_bins(forecast)
    figure = Figure(figsize=(10, 6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    source = forecast.workload.source if forecast.workload else ""
    steps = f"{len(forecast.steps)} steps" if len(forecast.steps) > 1 else "one step"
    figure.suptitle(f"{source}: {sum(one.num_sequences for one in bins):,} sequences of {steps}", fontsize=11)
    grid = figure.subplots(2, 1, sharex=True)
    _draw_shares(grid[0], bins, "sequences")
    _draw_shares(grid[1], bins, "tokens")
    grid[0].legend(title="ranks of the group", fontsize=8, title_fontsize=8)
    grid[1].set_xlabel("tokens of a sequence")
    figure.savefig(path)


def _draw_shares(axes: Any, bins: tuple[LengthBin, ...], what: str) -> None:
    """Draws each bin's share of all sequences or tokens as a bar, stacked by degree."""
    degrees = sorted({degree for one in bins for degree, _, _ in one.by_degree})
    column = 1 if what == "sequences" else 2
    total = sum(entry[column] for one in bins for entry in one.by_degree)
    bottoms = [0.0] * len(bins)
    for index, degree in enumerate(degrees):
        heights = [sum(entry[column] for entry in one.by_degree if entry[0] == degree) / total * 100 for one in bins]
        shade = _SHADES[index * (len(_SHADES) - 1) // max(1, len(degrees) - 1)]
        axes.bar(range(len(bins)), heights, bottom=bottoms, width=0.92, color=shade, label=str(degree), linewidth=0)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_ylabel(f"% of {what}")
    # the edges of bins, powers of two, are between the bars
    edges = [*(one.low for one in bins), bins[-1].high]
    axes.set_xticks([index - 0.5 for index in range(len(edges))], [_power(edge) for edge in edges], fontsize=8)
    axes.set_xlim(-0.6, len(bins) - 0.4)
    axes.spines[["top", "right"]].set_visible(False)


def _power(number: int) -> str:
    """Formats a power of two: 1024 as 1K, 2^20 as 1M."""
    for unit, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if number >= unit:
            return f"{number // unit}{letter}"
    return str(number)


def check_pictures() -> None:
    """Raises ValueError if matplotlib is not installed; cheap, so that it can be called before a long run."""
    if find_spec("matplotlib") is None:
        raise ValueError("pictures need matplotlib, which is not installed; pip install matplotlib, or leave --output out")
