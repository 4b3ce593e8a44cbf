"""Lower bounds on the seconds of a micro-batch ("fluid" bounds: sequences may be split freely over a pool of ranks).

The solvers stop at these bounds, and the plan's estimate reports them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hf_longctx.plan.core.arrays import FloatArray
from hf_longctx.plan.groups.problem import GroupingProblem, Piece

# share by which rounding may put a finish time above its limit
_ROUNDING = 1e-12
# relative precision of the bound of one micro-batch, and of the bounds of many
_TOLERANCE, _CRUDE_TOLERANCE = 1e-9, 1e-3


def fluid_bound_s(problem: GroupingProblem) -> float:
    """Lower bound on the seconds of a micro-batch with all sequences; infinite if memory rules out a single micro-batch.

    A group of d ranks that ends within T seconds has d * (T - group_s) rank-seconds for its sequences. So a sequence needs at
    least work / (T - group_s) ranks, at the best degree among those that hold it and end in time. The bound is the smallest T
    at which these needs add up to no more than the ranks. It grows with every sequence and falls with every rank.
    """
    if not problem.lengths:
        return 0.0
    longest, tokens = max(problem.lengths), sum(problem.lengths)
    if longest > problem.degrees[-1] * problem.capacity or tokens > problem.num_ranks * problem.capacity:
        return math.inf
    return float(_bounds_s(problem, problem.group_s, [(0, len(problem.lengths))], problem.num_ranks, _TOLERANCE)[0])


def fluid_bounds_s(problem: GroupingProblem, pieces: Sequence[Piece], num_ranks: int) -> FloatArray:
    """Lower bounds on the seconds of many micro-batches, less tight than `fluid_bound_s`.

    Memory is not checked, all degrees have the smallest fixed cost, and each bound is found to a thousandth.
    """
    return _bounds_s(problem, (min(problem.group_s),) * len(problem.degrees), pieces, num_ranks, _CRUDE_TOLERANCE)


def _bounds_s(
    problem: GroupingProblem, group_s: Sequence[float], pieces: Sequence[Piece], num_ranks: int, tolerance: float
) -> FloatArray:
    work, fixed_s = least_work(problem), min(group_s)
    # from here on the least fixed cost is subtracted from all seconds
    extra_s = np.array(group_s)[:, None] - fixed_s
    ends_s = np.where(np.isfinite(work), problem.seconds + extra_s, np.inf)
    least = np.concatenate([[0.0], np.cumsum(work.min(axis=0))])
    earliest_s = ends_s.min(axis=0)
    bounds_s = np.empty(len(pieces))
    for index, (start, stop) in enumerate(pieces):
        low = max(float(earliest_s[start:stop].max()), float(least[stop] - least[start]) / num_ranks)
        measures = ends_s[:, start:stop], work[:, start:stop], extra_s
        high = _needed(low, *measures) / num_ranks
        # more time never needs more rank-seconds, so the answer lies between
        while high - low > tolerance * high:
            middle = (low + high) / 2
            low, high = (middle, high) if _needed(middle, *measures) > num_ranks * middle else (low, middle)
        bounds_s[index] = low + fixed_s
    return bounds_s


def least_work(problem: GroupingProblem) -> FloatArray:
    """Rank-seconds of every sequence at every degree [degree, sequence]; infinite if it does not fit even alone."""
    degrees = np.array(problem.degrees, dtype=np.float64)[:, None]
    fits = np.array(problem.lengths) <= degrees * problem.capacity
    return np.where(fits, problem.seconds * degrees, np.inf)


def _needed(limit_s: float, ends_s: FloatArray, work: FloatArray, extra_s: FloatArray) -> float:
    """Rank-seconds that sequences need, with their share of the groups' fixed cost, if all groups end within `limit_s`."""
    room_s = limit_s - extra_s
    # if the fixed cost leaves no time, only sequences without work end in time
    busy = work * np.divide(limit_s, room_s, out=np.ones_like(room_s), where=room_s > 0)
    return float(np.where(ends_s <= limit_s * (1 + _ROUNDING), busy, np.inf).min(axis=0).sum())
