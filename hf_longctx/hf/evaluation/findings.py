"""What one long-context evaluation found: the loss by position and the needle grid, added up over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_longctx.hf.trainer.row_scores import RowScores

# buckets of powers of two, up to more tokens than a document has
_NUM_BUCKETS = 64


@dataclass(frozen=True, slots=True)
class LossBucket:
    """The mean loss of the `num_tokens` tokens at positions `first` to `last`, both counted in."""

    first: int
    last: int
    loss: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class NeedleCell:
    """The documents of one length and depth: the share of answer tokens that were likeliest, and their mean loss."""

    length: int
    depth: float
    share_right: float
    loss: float


@dataclass(frozen=True, slots=True)
class EvaluationRun:
    """One evaluation of the trained model behind optimizer step `step`, or of another model with a `name`."""

    step: int
    buckets: tuple[LossBucket, ...]
    cells: tuple[NeedleCell, ...]
    name: str = ""

    @property
    def title(self) -> str:
        return self.name or f"step {self.step}"

    def metrics(self) -> dict[str, float]:
        """What a log shows, for example `eval_loss_at_4096_8191` and `eval_needle_8192_50` (depth in percent)."""
        logs = {f"eval_loss_at_{bucket.first}_{bucket.last}": bucket.loss for bucket in self.buckets}
        logs |= {f"eval_needle_{cell.length}_{cell.depth * 100:g}": cell.share_right for cell in self.cells}
        if self.cells:
            # every cell has as many answers
            logs["eval_needle"] = math.fsum(cell.share_right for cell in self.cells) / len(self.cells)
            logs["eval_needle_loss"] = math.fsum(cell.loss for cell in self.cells) / len(self.cells)
        return logs

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def of(cls, record: dict[str, Any]) -> EvaluationRun:
        """The run of a `record`; TypeError or KeyError for something else."""
        buckets = tuple(LossBucket(**each) for each in record["buckets"])
        return cls(record["step"], buckets, tuple(NeedleCell(**each) for each in record["cells"]), record["name"])


def bucket_sums(scores: RowScores, first_bucket: int) -> NDArray[np.float64]:
    """[buckets, 2] the summed loss and the tokens of every bucket: below `first_bucket`, then to the next power of two..."""
    # the exponent of a power of two is one more than its logarithm
    numbers = np.frexp(scores.positions.astype(np.float64))[1] - int(math.log2(first_bucket))
    return _sums(np.maximum(numbers, 0), [scores.losses, np.ones_like(scores.losses)], _NUM_BUCKETS)


def cell_sums(scores: RowScores, num_documents: int, num_cells: int) -> NDArray[np.float64]:
    """[cells, 3] the right tokens, the summed loss and the tokens of every cell of rows that come cell by cell."""
    columns = [scores.is_right.astype(np.float64), scores.losses, np.ones_like(scores.losses)]
    return _sums(scores.rows // num_documents, columns, num_cells)


def loss_buckets(sums: NDArray[np.float64], first_bucket: int) -> tuple[LossBucket, ...]:
    """The buckets that have tokens, of the sums over all ranks."""
    buckets = []
    for number, (loss, count) in enumerate(sums.tolist()):
        if count:
            first = first_bucket << (number - 1) if number else 1
            buckets.append(LossBucket(first, (first_bucket << number) - 1, loss / count, int(count)))
    return tuple(buckets)


def needle_cells(sums: NDArray[np.float64], cells: Sequence[tuple[int, float]]) -> tuple[NeedleCell, ...]:
    """The grid, of the sums over all ranks."""
    return tuple(
        NeedleCell(length, depth, right / count, loss / count)
        for (length, depth), (right, loss, count) in zip(cells, sums.tolist(), strict=True)
    )


def _sums(numbers: NDArray[Any], columns: Sequence[NDArray[np.float64]], num: int) -> NDArray[np.float64]:
    return np.stack([np.bincount(numbers, weights=column, minlength=num) for column in columns], axis=1)
