"""Draws long-context evaluations: the needle grid as heat maps, the loss by position as lines.

Needs matplotlib (the extra `plot`). Called by `LongContextEvaluation` when it writes its files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_longctx.hf.evaluation.findings import EvaluationRun, LossBucket, NeedleCell

# line colours: named models, the first evaluation of the training, the last one, and those in between
_NAMED, _FIRST, _LAST, _BETWEEN = "#d1495b", "#f58518", "#4c78a8", "#c8c8c8"
_DPI = 110


def save_png_needles(runs: Sequence[EvaluationRun], path: Path) -> None:
    """Draws the share of right answer tokens by length and depth, for the named, the first and the last evaluation."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = _shown(runs)
    lengths, depths = _axis(shown[0].cells, "length"), _axis(shown[0].cells, "depth")
    width, height = 1.6 + max(2.4, 0.75 * len(lengths)) * len(shown), 1.5 + max(1.6, 0.42 * len(depths))
    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("needle in long documents: % of answer tokens right", fontsize=11)
    grid = figure.subplots(1, len(shown), squeeze=False, sharey=True)[0]
    image: Any = None
    for axes, run in zip(grid, shown, strict=True):
        shares = {(cell.length, cell.depth): cell.share_right * 100 for cell in run.cells}
        table = [[shares[length, depth] for length in lengths] for depth in depths]
        image = axes.imshow(table, cmap="YlGnBu", vmin=0, vmax=100, aspect="auto")
        for row, line in enumerate(table):
            for column, share in enumerate(line):
                colour = "white" if share > 55 else "#222222"
                axes.text(column, row, f"{share:.0f}", ha="center", va="center", fontsize=9, color=colour)
        mean = sum(shares.values()) / len(shares)
        axes.set_title(f"{run.title}: mean {mean:.0f}%", fontsize=10)
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=8)
        axes.set_xlabel("tokens of the document", fontsize=9)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    grid[0].set_yticks(range(len(depths)), [f"{depth * 100:g}%" for depth in depths], fontsize=8)
    grid[0].set_ylabel("depth of the needle", fontsize=9)
    figure.colorbar(image, ax=list(grid), shrink=0.9).ax.tick_params(labelsize=8)
    figure.savefig(path)


def save_png_loss(runs: Sequence[EvaluationRun], path: Path) -> None:
    """Draws the mean loss of every bucket of positions on a logarithmic axis, one line per evaluation."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_title("held-out loss by position in the document", fontsize=11, loc="left")
    shown = _shown(runs)
    # last evaluation of the trained model; an evaluation of a named model may come after it
    last = [run for run in shown if not run.name][-1:]
    for run in runs:
        colour = _BETWEEN if run not in shown else _NAMED if run.name else _LAST if run in last else _FIRST
        label = run.title if run in shown else None
        order = 2 if label else 1
        for place, bucket in enumerate(run.buckets):
            edges = [_left(bucket), bucket.last + 1]
            name = label if not place else None
            axes.plot(edges, [bucket.loss] * 2, color=colour, linewidth=2.5, zorder=order, label=name, solid_capstyle="butt")
        middles = [(_left(bucket) * (bucket.last + 1)) ** 0.5 for bucket in run.buckets]
        losses = [bucket.loss for bucket in run.buckets]
        axes.plot(middles, losses, color=colour, linewidth=1, linestyle=":", zorder=order)
    axes.set_xscale("log", base=2)
    names = {place: f"{name:,}" for run in runs for one in run.buckets for place, name in _ticks(one)}
    axes.set_xticks(list(names), list(names.values()), fontsize=8)
    axes.set_xticks([], minor=True)
    axes.set_xlabel("position of the predicted token")
    axes.set_ylabel("mean loss (nats)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#eeeeee")
    axes.legend(fontsize=9, frameon=False)
    figure.savefig(path)


def _shown(runs: Sequence[EvaluationRun]) -> list[EvaluationRun]:
    """Selects the runs that pictures label: those with a name, and the first and the last of the training."""
    steps = [run for run in runs if not run.name]
    return [run for run in runs if run.name or run in steps[:1] + steps[-1:]]


def _left(bucket: LossBucket) -> int:
    """Left edge of a bucket in the picture, which draws the first bucket as wide as the second."""
    return max(bucket.first, (bucket.last + 1) // 2)


def _ticks(bucket: LossBucket) -> tuple[tuple[int, int], tuple[int, int]]:
    """Positions of a bucket's two edges in the picture, each with the position that labels it."""
    return (_left(bucket), bucket.first), (bucket.last + 1, bucket.last + 1)


def _axis(cells: Sequence[NeedleCell], name: str) -> list[Any]:
    return sorted({getattr(cell, name) for cell in cells})
