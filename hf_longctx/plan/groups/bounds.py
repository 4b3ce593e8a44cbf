"""Fluid bounds of micro-batches: sequences as liquid, ranks as one pool."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hf_longctx.plan.core.arrays import FloatArray
from hf_longctx.plan.groups.problem import GroupingProblem, Piece

_ROUNDING = 1e-12
_TOLERANCE, _CRUDE_TOLERANCE = 1e-9, 1e-3


def fluid_bound_s(problem: GroupingProblem) -> float:
    """Seconds that no single micro-batch of all sequences beats; infinite where memory rules out a single one.

    A group of d ranks that ends within T seconds gives its sequences d * (T - group_s) rank-seconds. So a sequence needs at
    least work / (T - group_s) ranks, on the degree where that is least among those which hold it and end in time, and the
    bound is the smallest T at which these needs fit the ranks. It grows with every sequence and falls with every rank.
    """
    if not problem.lengths:
        return 0.0
    longest, tokens = max(problem.lengths), sum(problem.lengths)
    if longest > problem.degrees[-1] * problem.capacity or tokens > problem.num_ranks * problem.capacity:
        return math.inf
    return float(_bounds_s(problem, problem.group_s, [(0, len(problem.lengths))], problem.num_ranks, _TOLERANCE)[0])


def fluid_bounds_s(problem: GroupingProblem, pieces: Sequence[Piece], num_ranks: int) -> FloatArray:
    """The same for many micro-batches at once, cruder, and as if memory had room for each.

    All degrees count with the least fixed cost, and the bound is found to a thousandth.
    """
    return _bounds_s(problem, (min(problem.group_s),) * len(problem.degrees), pieces, num_ranks, _CRUDE_TOLERANCE)


def _bounds_s(
    problem: GroupingProblem, group_s: Sequence[float], pieces: Sequence[Piece], num_ranks: int, tolerance: float
) -> FloatArray:
    work, fixed_s = least_work(problem), min(group_s)
    # all seconds from here on are those beyond the least fixed cost
    extra_s = np.array(group_s)[:, None] - fixed_s
    ends_s = np.where(np.isfinite(work), problem.seconds + extra_s, np.inf)
    least = np.concatenate([[0.0], np.cumsum(work.min(axis=0))])
    earliest_s = ends_s.min(axis=0)
    bounds_s = np.empty(len(pieces))
    for place, (start, stop) in enumerate(pieces):
        low = max(float(earliest_s[start:stop].max()), float(least[stop] - least[start]) / num_ranks)
        measures = ends_s[:, start:stop], work[:, start:stop], extra_s
        high = _needed(low, *measures) / num_ranks
        # more time never needs more rank-seconds, so the answer lies between
        while high - low > tolerance * high:
            middle = (low + high) / 2
            low, high = (middle, high) if _needed(middle, *measures) > num_ranks * middle else (low, middle)
        bounds_s[place] = low + fixed_s
    return bounds_s


def least_work(problem: GroupingProblem) -> FloatArray:
    """Rank-seconds of every sequence at every degree [degree, sequence]; infinite where it does not fit alone."""
    degrees = np.array(problem.degrees, dtype=np.float64)[:, None]
    fits = np.array(problem.lengths) <= degrees * problem.capacity
    return np.where(fits, problem.seconds * degrees, np.inf)


def _needed(limit_s: float, ends_s: FloatArray, work: FloatArray, extra_s: FloatArray) -> float:
    """Rank-seconds that sequences keep ranks busy, or waiting for a group's fixed cost, if all end within `limit_s`."""
    room_s = limit_s - extra_s
    # where nothing is left beside the fixed cost, only sequences without work end in time
    busy = work * np.divide(limit_s, room_s, out=np.ones_like(room_s), where=room_s > 0)
    return float(np.where(ends_s <= limit_s * (1 + _ROUNDING), busy, np.inf).min(axis=0).sum())
