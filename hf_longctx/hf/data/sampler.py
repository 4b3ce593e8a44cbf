"""Which sequences make a step: an index of pieces with their lengths, and deterministic global batches over it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class SequenceIndex:
    """Pieces of dataset rows: sequence i is tokens [starts[i], stops[i]) of row rows[i]; each is a document of its own.

    Arrays only, and shared where they are equal: 16 bytes per row as long as no row is split.
    """

    rows: IntArray
    starts: IntArray
    stops: IntArray

    @cached_property
    def lengths(self) -> IntArray:
        """Tokens of every sequence."""
        return self.stops - self.starts if self.starts.any() else self.stops

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def build(cls, row_lengths: IntArray, limit: int, long_sequences: str) -> SequenceIndex:
        """One sequence per row; rows above `limit` tokens are truncated, or split into pieces of at most `limit`.

        With long_sequences "error" no row may be above `limit`: check with `too_long` first.
        """
        rows = np.arange(len(row_lengths), dtype=np.int64)
        is_cut = len(row_lengths) > 0 and int(row_lengths.max()) > limit
        if long_sequences != "split" or not is_cut:
            no_start = np.broadcast_to(np.int64(0), len(rows))
            return cls(rows, no_start, np.minimum(row_lengths, limit) if is_cut else row_lengths)
        num_pieces = -(-row_lengths // limit)
        piece_rows = np.repeat(rows, num_pieces)
        first_piece = np.cumsum(num_pieces) - num_pieces
        starts = (np.arange(len(piece_rows)) - first_piece[piece_rows]) * limit
        return cls(piece_rows, starts, np.minimum(starts + limit, row_lengths[piece_rows]))


class LengthAwareSampler:
    """Global batches of sequence indices, equal on all ranks: a function of lengths, seed and epoch alone.

    A batch has `sequences_per_step` sequences, or about `tokens_per_step` tokens: the shuffled epoch is cut at equal
    shares of its tokens, so the number of steps is the same in every epoch and a step is off by at most the sequence at
    each of its ends. (Beside a sequence longer than a budget, steps get one sequence each.) Placement on ranks is the
    plan's business.
    """

    def __init__(
        self,
        lengths: IntArray,
        sequences_per_step: int,
        tokens_per_step: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        self.lengths, self.seed, self.shuffle, self.epoch = lengths, seed, shuffle, 0
        self.tokens_per_step, self.sequences_per_step = tokens_per_step, sequences_per_step
        if tokens_per_step is not None:
            self._num_steps = min(len(lengths), max(1, round(int(lengths.sum()) / tokens_per_step)))
        elif drop_last:
            self._num_steps = len(lengths) // sequences_per_step
        else:
            self._num_steps = -(-len(lengths) // sequences_per_step)

    def set_epoch(self, epoch: int) -> None:
        """Selects the shuffle of `epoch`."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Iterator[list[int]]:
        order = np.arange(len(self.lengths))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(len(self.lengths), generator=generator).numpy()
        start = 0
        for end in self._ends(order):
            yield order[start:end].tolist()
            start = end

    def _ends(self, order: IntArray) -> Iterator[int]:
        """Where each step ends in `order`."""
        count = len(order)
        if self.tokens_per_step is None:
            return (min((step + 1) * self.sequences_per_step, count) for step in range(self._num_steps))
        sums = np.cumsum(self.lengths[order])
        steps = np.arange(self._num_steps)
        ends = np.searchsorted(sums, sums[-1] * (steps + 1) / self._num_steps - 1e-6) + 1
        # one sequence at least for every step, also around a sequence longer than several budgets: each end lies behind
        # the one before it, and leaves a sequence for every step to come
        behind = np.maximum(np.maximum.accumulate(ends - steps), 1) + steps
        return map(int, np.minimum(behind, count - (self._num_steps - 1 - steps)))
