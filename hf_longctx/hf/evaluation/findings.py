"""Results of one long-context evaluation: the loss by position and the needle grid, summed over ranks.

`LongContextEvaluation` makes them; `pictures` draws them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_longctx.hf.trainer.tokens.row_scores import RowScores

# number of position buckets; each is twice as wide as the one before, so that these cover any document
_NUM_BUCKETS = 64


@dataclass(frozen=True, slots=True)
class LossBucket:
    """The mean loss of the `num_tokens` tokens at positions `first` to `last`, both included."""

    first: int
    last: int
    loss: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class NeedleCell:
    """The result of all documents of one length and depth.

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
        """Metrics for the log, for example `eval_loss_at_4096_8191` and `eval_needle_8192_50` (depth in percent)."""
        logs = {f"eval_loss_at_{bucket.first}_{bucket.last}": bucket.loss for bucket in self.buckets}
        logs |= {f"eval_needle_{cell.length}_{cell.depth * 100:g}": cell.share_right for cell in self.cells}
        if self.cells:
            # all cells have equally many documents, so their plain mean is the mean over documents
            logs["eval_needle"] = math.fsum(cell.share_right for cell in self.cells) / len(self.cells)
            logs["eval_needle_loss"] = math.fsum(cell.loss for cell in self.cells) / len(self.cells)
        return logs

    def record(self) -> dict[str, Any]:
        """This run as JSON values."""
        return asdict(self)

    @classmethod
    def of(cls, record: dict[str, Any]) -> EvaluationRun:
        """Reads what `record` wrote; raises TypeError or KeyError for anything else."""
        buckets = tuple(LossBucket(**each) for each in record["buckets"])
        return cls(record["step"], buckets, tuple(NeedleCell(**each) for each in record["cells"]), record["name"])


def bucket_sums(scores: RowScores, first_bucket: int) -> NDArray[np.float64]:
    """Summed loss and number of tokens of every bucket of positions, shape [buckets, 2].

    The first bucket holds the positions below `first_bucket`; each other bucket holds those from one power of two to the next.
    """
    # frexp's exponent of 2^k is k + 1
    numbers = np.frexp(scores.positions.astype(np.float64))[1] - int(math.log2(first_bucket))
    return _sums(np.maximum(numbers, 0), [scores.losses, np.ones_like(scores.losses)], _NUM_BUCKETS)


def cell_sums(scores: RowScores, num_documents: int, num_cells: int) -> NDArray[np.float64]:
    """Number of right tokens, summed loss and number of tokens of every cell, shape [cells, 3]; rows must come cell by cell."""
    columns = [scores.is_right.astype(np.float64), scores.losses, np.ones_like(scores.losses)]
    return _sums(scores.rows // num_documents, columns, num_cells)


def loss_buckets(sums: NDArray[np.float64], first_bucket: int) -> tuple[LossBucket, ...]:
    """Makes the buckets that have tokens, from the sums over all ranks."""
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
