"""Deals sequences to the concurrent groups of a micro-batch by predicted time; groups may be equal or of different degrees.

Sequences go longest first, each to the group that would finish it first (Graham 1969, section 4: within 4/3 - 1/(3m) of the
optimum for m equal groups). Faster groups thus get more work, and a group never gets a sequence that is too long for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace

import numpy as np
from numpy.typing import ArrayLike

from hf_longctx.plan.core.arrays import FloatArray, IntArray


def deal_sequences(
    lengths: Sequence[int] | IntArray,
    seconds: ArrayLike,
    longest: Sequence[int],
    capacity: Sequence[int] | None = None,
) -> tuple[tuple[int, ...], ...]:
    """Sequences of every group, longest first, dealt so that the slowest group finishes early.

    seconds[g][i]: seconds that sequence i adds to group g. longest[g]: the most tokens of one sequence that group g can run.
    capacity[g]: the most tokens of all its sequences (None: any number). Raises ValueError for a sequence without a place.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    seconds_GN = np.asarray(seconds, dtype=np.float64).reshape(len(longest), len(tokens))
    order = np.lexsort((np.arange(len(tokens)), -tokens)).tolist()
    room = list(capacity) if capacity is not None else [int(tokens.sum())] * len(longest)
    is_equal = len(set(longest)) == 1 and capacity is None and bool((seconds_GN == seconds_GN[:1]).all())
    if is_equal and (not len(tokens) or tokens.max() <= longest[0]):
        return _deal_equal(order, seconds_GN[0], len(longest))
    columns = seconds_GN.T.tolist()
    done_s = [0.0] * len(longest)
    taken: list[list[int]] = [[] for _ in longest]
    for i in order:
        length = int(tokens[i])
        fitting = [g for g, most in enumerate(longest) if length <= most and length <= room[g]]
        if not fitting:
            raise ValueError(
                f"sequence {i} has {length} tokens, but of {len(longest)} groups side by side none takes more than "
                f"{max(map(min, longest, room))}; allow larger groups or plan several micro-batches"
            )
        # ties go to the group that takes least time for the sequence: a larger one may lose time by sharing
        group = min(fitting, key=lambda g: (done_s[g] + columns[i][g], columns[i][g], g))
        done_s[group] += columns[i][group]
        room[group] -= length
        taken[group].append(i)
    return tuple(map(tuple, taken))


def _deal_equal(order: Sequence[int], seconds_N: FloatArray, num_groups: int) -> tuple[tuple[int, ...], ...]:
    """Deals sequences to equal groups; a heap finds the next group without comparing all of them."""
    taken: list[list[int]] = [[] for _ in range(num_groups)]
    heap = [(0.0, group) for group in range(num_groups)]
    seconds = seconds_N.tolist()
    for i in order:
        done_s, group = heap[0]
        taken[group].append(i)
        heapreplace(heap, (done_s + seconds[i], group))
    return tuple(map(tuple, taken))
