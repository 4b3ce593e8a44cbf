"""Pack whole sequences into bins by best fit decreasing: `pack_sequences`, a public function for offline data preparation.

Best fit decreasing takes sequences longest first and puts each into the fullest bin that still has room for it. If several
sequences have equal lengths, the bin that just took one of them is the fullest bin with room for the next, as long as it has room
at all. So a whole run of equal sequences is placed at once into bins with equal space, as many sequences per bin as fit, and the
work grows with the number of distinct lengths instead of the number of sequences. The choice between bins with equal space does
not change how full bins get.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_longctx.plan.core.types import IntArray

# largest capacity of a bin; the tokens of any number of sequences that fits into memory then add up in 64 bits
MAX_CAPACITY = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Bins of sequences: bin b holds the sequences numbered `order[offsets[b]:offsets[b + 1]]`, longest first.

    Every sequence is in one bin. Bins come in the order in which they were opened, those with the longest sequences first, so
    shuffle them before training. The arrays are read-only.
    """

    order: IntArray
    offsets: IntArray
    num_tokens: int
    capacity: int

    @property
    def efficiency(self) -> float:
        """Tokens of all sequences divided by the capacity of all bins; 1 if there is no bin."""
        return self.num_tokens / (len(self) * self.capacity) if len(self) else 1.0

    def __len__(self) -> int:
        """The number of bins."""
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> IntArray:
        """The sequences of one bin, as a view."""
        index = range(len(self))[number]
        return self.order[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[IntArray]:
        return (self[number] for number in range(len(self)))

    def bins(self) -> list[list[int]]:
        """All bins as lists of sequence numbers."""
        order, offsets = self.order.tolist(), self.offsets.tolist()
        return [order[start:stop] for start, stop in pairwise(offsets)]


def pack_sequences(lengths: Sequence[int] | NDArray[Any], capacity: int) -> Packing:
    """Pack sequences of `lengths` tokens into bins of at most `capacity` tokens by best fit decreasing, without cutting any.

    The result is deterministic; sequences of equal length are placed in the order of `lengths`. Raises ValueError for a
    sequence that no bin can hold: cut it first; for example, `numpy.minimum(lengths, capacity)` drops the excess.

    Example:

        packing = pack_sequences([30, 60, 40, 70], capacity=100)
        packing.bins()      # [[3, 0], [1, 2]]
        packing.efficiency  # 1.0
    """
    capacity = _checked_capacity(capacity)
    lengths_N = _checked_lengths(lengths, capacity)
    # longest first
    sequences_N = _stable_order(capacity - lengths_N, capacity)
    bins_N = _bins_of_sorted(lengths_N[sequences_N], capacity)
    num_bins = int(bins_N.max(initial=-1)) + 1
    order = sequences_N[_stable_order(bins_N, num_bins)]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(bins_N, minlength=num_bins))]).astype(np.int64)
    for array in (order, offsets):
        array.flags.writeable = False
    return Packing(order, offsets, int(lengths_N.sum()), capacity)


def fewest_bins(lengths: Sequence[int] | NDArray[Any], capacity: int) -> int:
    """Lower bound on the number of bins of any packing: the bound L2 of Martello and Toth (1990, section 8.3).

    Every sequence longer than half a bin (a big one) needs its own bin. For a threshold, consider the shorter sequences that
    reach it: they fit only into bins of their own, or next to a big sequence that leaves at least the threshold. The bound is
    the largest over all thresholds; threshold 0 counts all tokens.
    """
    capacity = _checked_capacity(capacity)
    values, counts = np.unique(_checked_lengths(lengths, capacity), return_counts=True)
    is_big = 2 * values > capacity
    num_big = int(counts[is_big].sum())
    num_from = np.append(np.cumsum(counts[::-1])[::-1], 0)
    tokens_from = np.append(np.cumsum((values * counts)[::-1])[::-1], 0)
    small = int(np.count_nonzero(~is_big))
    thresholds = values[:small]
    # big sequences that leave less than the threshold are alone in their bins; the others share theirs
    first_alone = np.searchsorted(values, capacity - thresholds, side="right")
    num_shared = num_from[small] - num_from[first_alone]
    room = num_shared * capacity - (tokens_from[small] - tokens_from[first_alone])
    excess = tokens_from[:small] - tokens_from[small] - room
    return num_big + int((-(-excess // capacity)).max(initial=0))


def _bins_of_sorted(lengths_N: IntArray, capacity: int) -> IntArray:
    """Index of the bin of every sequence, for lengths in descending order."""
    if not len(lengths_N):
        return np.zeros(0, dtype=np.int64)
    starts = np.concatenate([[0], np.flatnonzero(np.diff(lengths_N)) + 1])
    classes = (lengths_N[starts], np.diff(starts, append=len(lengths_N)))
    first_R, bin_R, per_bin_R = _place_classes(*classes, capacity).T
    # spread every run of sequences over its bins
    repeats = np.diff(first_R, append=len(lengths_N))
    within_run_N = np.arange(len(lengths_N)) - np.repeat(first_R, repeats)
    bins_N: IntArray = np.repeat(bin_R, repeats) + within_run_N // np.repeat(per_bin_R, repeats)
    return bins_N


def _place_classes(lengths_C: IntArray, counts_C: IntArray, capacity: int) -> IntArray:
    """Runs (first sequence, first bin, sequences per bin) for `counts_C` sequences of each length, lengths descending."""
    # every sequence longer than half a bin opens a bin
    num_big = int(np.searchsorted(-lengths_C, -(capacity // 2)))
    sequence = num_bins = int(counts_C[:num_big].sum())
    open_bins = _OpenBins(capacity - lengths_C[:num_big], counts_C[:num_big], int(lengths_C[-1]))
    take, add = open_bins.take, open_bins.add
    runs = [0, 0, 1] if num_big else []
    for length, count in zip(lengths_C[num_big:].tolist(), counts_C[num_big:].tolist(), strict=True):
        while count:
            space, first, number = take(length)
            if not space:
                space, first, number = capacity, num_bins, -(-count // (capacity // length))
                num_bins += number
            per_bin = space // length
            if num_full := min(number, count // per_bin):
                runs += (sequence, first, per_bin)
                add(space - per_bin * length, first, num_full)
                sequence += num_full * per_bin
                count -= num_full * per_bin
            if number > num_full:
                first += num_full
                number -= num_full
                if count:
                    # too few sequences are left to fill another bin
                    runs += (sequence, first, count)
                    add(space - count * length, first, 1)
                    sequence += count
                    count = 0
                    first += 1
                    number -= 1
                if number:
                    add(space, first, number)
    return np.array(runs, dtype=np.int64).reshape(-1, 3)


class _OpenBins:
    """Bins that still have room for `shortest` tokens, stored as runs (first bin, number of bins) of equal space.

    At the start there are `counts_C` bins of each space, spaces ascending, numbered from 0. Runs of equal space form a linked
    list of integers, because one Python list per space would keep the garbage collector busy.
    """

    def __init__(self, spaces_C: IntArray, counts_C: IntArray, shortest: int) -> None:
        self.shortest = shortest
        self._firsts: list[int] = (np.cumsum(counts_C) - counts_C).tolist()
        self._numbers: list[int] = counts_C.tolist()
        self._next = [-1] * len(spaces_C)
        num_full = int(np.searchsorted(spaces_C, shortest))
        self._spaces: list[int] = spaces_C[num_full:].tolist()
        self._run_of_space = dict(zip(self._spaces, range(num_full, len(spaces_C)), strict=True))

    def take(self, length: int) -> tuple[int, int, int]:
        """Remove a run of the fullest bins with room for `length`: (space, first bin, number of bins); zeros if there is none."""
        spaces = self._spaces
        index = bisect_left(spaces, length)
        if index == len(spaces):
            return 0, 0, 0
        space = spaces[index]
        run = self._run_of_space[space]
        following = self._next[run]
        if following < 0:
            del self._run_of_space[space], spaces[index]
        else:
            self._run_of_space[space] = following
        return space, self._firsts[run], self._numbers[run]

    def add(self, space: int, first: int, number: int) -> None:
        """Add `number` bins from `first` on, each with `space` tokens left."""
        if space < self.shortest:
            return
        following = self._run_of_space.get(space, -1)
        if following < 0:
            insort(self._spaces, space)
        self._run_of_space[space] = len(self._next)
        self._firsts.append(first)
        self._numbers.append(number)
        self._next.append(following)


def _stable_order(keys_N: IntArray, largest: int) -> IntArray:
    """Indices that sort keys of 0 to `largest` stably; 16 bits at a time, because numpy sorts those by counting."""
    order = np.argsort((keys_N & 0xFFFF).astype(np.uint16), kind="stable")
    if largest > 0xFFFF:
        order = order[np.argsort((keys_N >> 16).astype(np.uint16)[order], kind="stable")]
    return order


def _checked_capacity(capacity: int) -> int:
    try:
        tokens = operator.index(capacity)
    except TypeError:
        raise ValueError(f"capacity is {capacity!r}; give a whole number of tokens, for example 8192") from None
    if isinstance(capacity, bool) or not 1 <= tokens <= MAX_CAPACITY:
        raise ValueError(f"capacity is {capacity!r}; give 1 to {MAX_CAPACITY} tokens, for example 8192")
    return tokens


def _checked_lengths(lengths: Sequence[int] | NDArray[Any], capacity: int) -> IntArray:
    try:
        lengths_N = np.asarray(lengths)
    except ValueError:
        # rows of different lengths
        lengths_N = np.asarray(lengths, dtype=object)[..., None]
    if lengths_N.ndim != 1:
        raise ValueError(
            f"lengths has {lengths_N.ndim} dimensions; give one number per sequence, its length in "
            f"tokens, for example [len(row) for row in rows]"
        )
    if not lengths_N.size:
        return np.zeros(0, dtype=np.int64)
    if lengths_N.dtype.kind not in "iu":
        lengths_N = _whole_numbers(lengths_N.tolist(), capacity)
    if lengths_N[shortest := int(lengths_N.argmin())] < 1:
        raise ValueError(f"sequence {shortest} has {lengths_N[shortest]} tokens; remove sequences without tokens before packing")
    if lengths_N[longest := int(lengths_N.argmax())] > capacity:
        raise ValueError(
            f"sequence {longest} has {lengths_N[longest]} tokens, but a bin holds {capacity}; raise capacity to "
            f"{lengths_N[longest]} or cut longer sequences, for example with numpy.minimum(lengths, {capacity})"
        )
    return lengths_N.astype(np.int64)


def _whole_numbers(values: list[Any], capacity: int) -> IntArray:
    """An integer array from Python values, which must all be integers."""
    for i, value in enumerate(values):
        if type(value) is not int or value.bit_length() > 63:
            raise ValueError(
                f"the length of sequence {i} is {value!r}; give whole numbers of tokens from 1 to the capacity of {capacity}"
            )
    return np.array(values, dtype=np.int64)
