"""`pack_sequences`: whole sequences into as few bins as best fit decreasing needs, by lengths alone.

Best fit decreasing takes sequences longest first and puts each into the fullest bin that still has room for it. A bin that
just took one of several equal sequences is the fullest that has room for the next, as long as it has room at all. So bins of
equal space take a whole run of equal sequences at once, each as many as fit, and the work grows with the distinct lengths, not
with the sequences. Which of several bins with equal space is taken changes no bin's fill.
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

IntArray = NDArray[np.int64]

# tokens of any number of sequences that fits into memory then add up in 64 bits
MAX_CAPACITY = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Which sequences share a bin: bin b holds `order[offsets[b]:offsets[b + 1]]`, numbers of sequences, longest first.

    Every sequence is in one bin. Bins come in the order in which they were opened, those with the longest sequences first:
    shuffle them before training. The arrays are read-only.
    """

    order: IntArray
    offsets: IntArray
    num_tokens: int
    capacity: int

    @property
    def efficiency(self) -> float:
        """Tokens of all sequences per token of all bins; 1 where there is no bin."""
        return self.num_tokens / (len(self) * self.capacity) if len(self) else 1.0

    def __len__(self) -> int:
        """The number of bins."""
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> IntArray:
        """The sequences of one bin, as a view."""
        place = range(len(self))[number]
        return self.order[self.offsets[place] : self.offsets[place + 1]]

    def __iter__(self) -> Iterator[IntArray]:
        return (self[number] for number in range(len(self)))

    def bins(self) -> list[list[int]]:
        """All bins as lists, one Python object per sequence."""
        order, offsets = self.order.tolist(), self.offsets.tolist()
        return [order[start:stop] for start, stop in pairwise(offsets)]


def pack_sequences(lengths: Sequence[int] | NDArray[Any], capacity: int) -> Packing:
    """Bins of at most `capacity` tokens for sequences of `lengths` tokens, none cut: best fit decreasing.

    Deterministic; of equal sequences the first in `lengths` is placed first. Raises ValueError for a sequence that no bin can
    hold: cut it before, `numpy.minimum(lengths, capacity)` for example drops the tails.

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
    """A number of bins below which no packing gets: the bound L2 of Martello and Toth (1990, section 8.3).

    For every threshold, a sequence above half a bin needs its own, and shorter ones above the threshold fit only into what
    these leave, where those too long to share with any of them leave nothing. Threshold 0 gives the tokens over the capacity.
    """
    capacity = _checked_capacity(capacity)
    values, counts = np.unique(_checked_lengths(lengths, capacity), return_counts=True)
    is_big = 2 * values > capacity
    num_big = int(counts[is_big].sum())
    num_from = np.append(np.cumsum(counts[::-1])[::-1], 0)
    tokens_from = np.append(np.cumsum((values * counts)[::-1])[::-1], 0)
    small = int(np.count_nonzero(~is_big))
    thresholds = values[:small]
    # big sequences that leave less than the threshold are alone in their bins, the others share
    first_alone = np.searchsorted(values, capacity - thresholds, side="right")
    num_shared = num_from[small] - num_from[first_alone]
    room = num_shared * capacity - (tokens_from[small] - tokens_from[first_alone])
    excess = tokens_from[:small] - tokens_from[small] - room
    return num_big + int((-(-excess // capacity)).max(initial=0))


def _bins_of_sorted(lengths_N: IntArray, capacity: int) -> IntArray:
    """The bin of every sequence, for lengths in descending order."""
    if not len(lengths_N):
        return np.zeros(0, dtype=np.int64)
    starts = np.concatenate([[0], np.flatnonzero(np.diff(lengths_N)) + 1])
    classes = (lengths_N[starts], np.diff(starts, append=len(lengths_N)))
    first_R, bin_R, per_bin_R = _place_classes(*classes, capacity).T
    # every run of sequences over its bins
    repeats = np.diff(first_R, append=len(lengths_N))
    places_N = np.arange(len(lengths_N)) - np.repeat(first_R, repeats)
    bins_N: IntArray = np.repeat(bin_R, repeats) + places_N // np.repeat(per_bin_R, repeats)
    return bins_N


def _place_classes(lengths_C: IntArray, counts_C: IntArray, capacity: int) -> IntArray:
    """Runs of sequences [(first sequence, first bin, sequences per bin)] for `counts_C` sequences of each descending length."""
    # above half a bin, every sequence opens one
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
                    # too few are left to fill another bin
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
    """Bins that still have room for `shortest` tokens, as runs (first bin, number of bins) of equal space.

    Starts with bins numbered from 0, `counts_C` of each ascending space. Runs of one space are chained through integers: one
    list per space would keep the garbage collector busy.
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
        """Takes out a run of the fullest bins with room for `length`: (space, first bin, number of bins); zeros without any."""
        spaces = self._spaces
        place = bisect_left(spaces, length)
        if place == len(spaces):
            return 0, 0, 0
        space = spaces[place]
        run = self._run_of_space[space]
        following = self._next[run]
        if following < 0:
            del self._run_of_space[space], spaces[place]
        else:
            self._run_of_space[space] = following
        return space, self._firsts[run], self._numbers[run]

    def add(self, space: int, first: int, number: int) -> None:
        """Bins from `first` on, all with `space` tokens left."""
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
    """The order that sorts keys of 0 to `largest`, equal ones as they stand; 16 bits at a time, for which numpy counts."""
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
        raise ValueError(f"sequence {shortest} has {lengths_N[shortest]} tokens; a sequence has at least 1, leave this one out")
    if lengths_N[longest := int(lengths_N.argmax())] > capacity:
        raise ValueError(
            f"sequence {longest} has {lengths_N[longest]} tokens, but a bin holds {capacity}; raise capacity to "
            f"{lengths_N[longest]} or cut what is longer, for example with numpy.minimum(lengths, {capacity})"
        )
    return lengths_N.astype(np.int64)


def _whole_numbers(values: list[Any], capacity: int) -> IntArray:
    """Python integers that came in an array of something else."""
    for i, value in enumerate(values):
        if type(value) is not int or value.bit_length() > 63:
            raise ValueError(
                f"the length of sequence {i} is {value!r}; give whole numbers of tokens from 1 to the capacity of {capacity}"
            )
    return np.array(values, dtype=np.int64)
