"""Results of long-context evaluations, loss by position and needle grid, and their pictures.

`LongContextEvaluation` makes and draws them; pictures need matplotlib (the extra `plot`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_longctx.hf.trainer.row_scores import RowScores

# number of position buckets; each is twice as wide as the one before, so that they cover any document
_NUM_BUCKETS = 64


@dataclass(frozen=True, slots=True)
class LossBucket:
    """Mean loss of the `num_tokens` tokens at positions `first` to `last`, inclusive."""

    first: int
    last: int
    loss: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class NeedleCell:
    """Result of all documents of one length and depth.

    share_right: share of answer tokens that the model found likeliest. loss: mean loss of the answer tokens.
    """

    length: int
    depth: float
    share_right: float
    loss: float


@dataclass(frozen=True, slots=True)
class EvaluationRun:
    """One evaluation: of the trained model after optimizer step `step`, or of another model called `name`."""

    step: int
    buckets: tuple[LossBucket, ...]
    cells: tuple[NeedleCell, ...]
    name: str = ""

    @property
    def title(self) -> str:
        """Name in pictures."""
        return self.name or f"step {self.step}"

    def metrics(self) -> dict[str, float]:
        """Returns metrics for the log, such as `eval_loss_at_4096_8191` and `eval_needle_8192_50` (depth in percent)."""
        logs = {f"eval_loss_at_{bucket.first}_{bucket.last}": bucket.loss for bucket in self.buckets}
        logs |= {f"eval_needle_{cell.length}_{cell.depth * 100:g}": cell.share_right for cell in self.cells}
        if self.cells:
            # all cells have equally many documents, so their plain mean is the mean over documents
            logs["eval_needle"] = math.fsum(cell.share_right for cell in self.cells) / len(self.cells)
            logs["eval_needle_loss"] = math.fsum(cell.loss for cell in self.cells) / len(self.cells)
        return logs

    def record(self) -> dict[str, Any]:
        """Returns the run as JSON values."""
        return asdict(self)

    @classmethod
    def of(cls, record: dict[str, Any]) -> EvaluationRun:
        """Reads the result of `record`; raises TypeError or KeyError for anything else."""
        buckets = tuple(LossBucket(**each) for each in record["buckets"])
        return cls(record["step"], buckets, tuple(NeedleCell(**each) for each in record["cells"]), record["name"])


def bucket_sums(scores: RowScores, first_bucket: int) -> NDArray[np.float64]:
    """Returns summed loss and number of tokens of every bucket of positions, shape [buckets, 2].

    The first bucket has the positions below `first_bucket`; each other bucket those from one power of two to the next.
    """
    # frexp's exponent of 2^k is k + 1
    numbers = np.frexp(scores.positions.astype(np.float64))[1] - int(math.log2(first_bucket))
    return _sums(np.maximum(numbers, 0), [scores.losses, np.ones_like(scores.losses)], _NUM_BUCKETS)


def cell_sums(scores: RowScores, num_documents: int, num_cells: int) -> NDArray[np.float64]:
    """Returns right tokens, summed loss and number of tokens of every cell, shape [cells, 3]; rows must come cell by cell."""
    columns = [scores.is_right.astype(np.float64), scores.losses, np.ones_like(scores.losses)]
    return _sums(scores.rows // num_documents, columns, num_cells)


def loss_buckets(sums: NDArray[np.float64], first_bucket: int) -> tuple[LossBucket, ...]:
    """Makes the buckets with tokens, from the sums over all ranks."""
    buckets = []
    for number, (loss, count) in enumerate(sums.tolist()):
        if count:
            first = first_bucket << (number - 1) if number else 1
            buckets.append(LossBucket(first, (first_bucket << number) - 1, loss / count, int(count)))
    return tuple(buckets)


def needle_cells(sums: NDArray[np.float64], cells: Sequence[tuple[int, float]]) -> tuple[NeedleCell, ...]:
    """Makes the needle grid from the sums over all ranks."""
    return tuple(
        NeedleCell(length, depth, right / count, loss / count)
        for (length, depth), (right, loss, count) in zip(cells, sums.tolist(), strict=True)
    )


def _sums(numbers: NDArray[Any], columns: Sequence[NDArray[np.float64]], num: int) -> NDArray[np.float64]:
    return np.stack([np.bincount(numbers, weights=column, minlength=num) for column in columns], axis=1)


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
    """Selects the runs to label in pictures: those with a name, and the first and the last of the training."""
    steps = [run for run in runs if not run.name]
    return [run for run in runs if run.name or run in steps[:1] + steps[-1:]]


def _left(bucket: LossBucket) -> int:
    """Returns the left edge of a bucket in the picture, which draws the first bucket as wide as the second."""
    return max(bucket.first, (bucket.last + 1) // 2)


def _ticks(bucket: LossBucket) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns a bucket's two edges in the picture, each with the position that labels it."""
    return (_left(bucket), bucket.first), (bucket.last + 1, bucket.last + 1)


def _axis(cells: Sequence[NeedleCell], name: str) -> list[Any]:
    return sorted({getattr(cell, name) for cell in cells})
