"""Decides which sequences make a step: an index of sequences with their lengths, and global batches drawn from it.

Every rank draws the same batches, because they depend on lengths, seed and epoch alone. Used by the trainer; the plan, not
the sampler, places sequences on ranks.
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

    Holds arrays only, and uses the array of row lengths itself as `stops` if no row is cut: 16 bytes per row until rows are
    split.
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
    def build(cls, row_lengths: IntArray, limit: int, long_sequences: str) -> SequenceIndex:
        """Makes one sequence per row; longer rows are truncated to `limit` tokens or split into sequences of at most `limit`.

        With long_sequences="error" no row may have more than `limit` tokens: check with `too_long` first.
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
    """Draws global batches of sequence numbers, equal on all ranks, from lengths, seed and epoch alone.

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
        """Index in `order` at which each step ends."""
        count = len(order)
        if self.tokens_per_step is None:
            return (min((step + 1) * self.sequences_per_step, count) for step in range(self._num_steps))
        sums = np.cumsum(self.lengths[order])
        steps = np.arange(self._num_steps)
        ends = np.searchsorted(sums, sums[-1] * (steps + 1) / self._num_steps - 1e-6) + 1
        # every step needs a sequence, even next to one that is longer than several budgets: so each step ends after the
        # one before it, and leaves at least one sequence for each step to come
        increasing = np.maximum(np.maximum.accumulate(ends - steps), 1) + steps
        return map(int, np.minimum(increasing, count - (self._num_steps - 1 - steps)))
