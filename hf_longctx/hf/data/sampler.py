"""Chooses the sequences of each step: an index of sequences with their lengths, and global batches drawn from it.

Every rank draws the same batches, because they depend only on lengths, seed and epoch. The plan, not the sampler, places
sequences on ranks.
"""

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
    """The sequences of a dataset: sequence i is tokens [starts[i], stops[i]) of row rows[i], trained as one document.

    Contains only arrays, and uses the array of row lengths as `stops` if no row is cut: 16 bytes per row until rows are split.
    """

    rows: IntArray
    starts: IntArray
    stops: IntArray

    @cached_property
    def lengths(self) -> IntArray:
        """Number of tokens of every sequence."""
        return self.stops - self.starts if self.starts.any() else self.stops

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def build(cls, row_lengths: IntArray, limit: int, long_sequences: str, documents: IntArray | None = None) -> SequenceIndex:
        """Makes one sequence per row; longer rows are truncated to `limit` tokens or split into sequences of at most `limit`.

        documents: lengths of the documents in packed rows, row by row; each document is then treated like a row. With
        long_sequences="error" none may have more than `limit` tokens: check with `too_long` first.
        """
        lengths = row_lengths if documents is None else documents
        rows, begins = document_places(row_lengths, documents)
        is_cut = len(lengths) > 0 and int(lengths.max()) > limit
        if long_sequences != "split" or not is_cut:
            kept = np.minimum(lengths, limit) if is_cut else lengths
            return cls(rows, begins, kept if documents is None else begins + kept)
        num_pieces = -(-lengths // limit)
        pieces = np.repeat(np.arange(len(lengths)), num_pieces)
        first_piece = np.cumsum(num_pieces) - num_pieces
        starts = begins[pieces] + (np.arange(len(pieces)) - first_piece[pieces]) * limit
        return cls(rows[pieces], starts, np.minimum(starts + limit, (begins + lengths)[pieces]))


def document_places(row_lengths: IntArray, documents: IntArray | None) -> tuple[IntArray, IntArray]:
    """Returns the row of every document and its first token in the row; rows are documents if `documents` is None."""
    if documents is None:
        rows = np.arange(len(row_lengths), dtype=np.int64)
        return rows, np.broadcast_to(np.int64(0), len(rows))
    row_ends, begins = np.cumsum(row_lengths), np.cumsum(documents) - documents
    rows = np.searchsorted(row_ends, begins, side="right").astype(np.int64)
    return rows, begins - (row_ends - row_lengths)[rows]


class LengthAwareSampler:
    """Draws global batches of sequence numbers, equal on all ranks, from lengths, seed and epoch.

    A batch has `sequences_per_step` sequences, or about `tokens_per_step` tokens if that is given. With `tokens_per_step`, the
    shuffled epoch is cut into steps of equal token counts. So every epoch has the same number of steps, and a step misses its
    budget by no more than the sequences at its two ends. (Around a sequence that is longer than the budget, steps get one
    sequence each.)
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
        """Chooses the order of `epoch`."""
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
        """Returns the index in `order` at which each step ends."""
        count = len(order)
        if self.tokens_per_step is None:
            return (min((step + 1) * self.sequences_per_step, count) for step in range(self._num_steps))
        sums = np.cumsum(self.lengths[order])
        steps = np.arange(self._num_steps)
        ends = np.searchsorted(sums, sums[-1] * (steps + 1) / self._num_steps - 1e-6) + 1
        # every step needs a sequence, even next to one longer than several budgets: so each step ends after the one
        # before, and leaves at least one sequence for each later step
        increasing = np.maximum(np.maximum.accumulate(ends - steps), 1) + steps
        return map(int, np.minimum(increasing, count - (self._num_steps - 1 - steps)))
