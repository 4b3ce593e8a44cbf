"""Packs all sequences of a step at once into groups of all its micro-batches, each of which has a limit of seconds.

The greedy planner does this where micro-batches hold many sequences. Grouping one range of similar lengths after the other leaves
ranks waiting where a few long sequences fill a micro-batch badly; here short sequences fill what long ones leave, in every
micro-batch. Sequences go longest first, each to the open group that it fits best, or else into a new group with the fewest
rank-seconds, in the micro-batch with the lowest limit where that is possible.

How long each micro-batch may take is found by trial: from the seconds that a cut by cost expects, on to limits that are a little
lower in sum and differ a little more or less from each other. Trials end by their number, and their factors are fixed, so that
equal lengths give equal layouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hf_longctx.plan.core.arrays import FloatArray
from hf_longctx.plan.groups.problem import GroupingProblem, Layout

# share by which rounding may put a group above its limit
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class _LimitSearch:
    """Constants of the search for limits, chosen with `recipes/bench/cpu/planner.py` (table times).

    first_factors: factors on expected seconds, tried until all sequences fit. spreads, gains: by how much the limits of a trial
    differ from those found so far, and how much lower their sum is, in turn. trials: number of such trials.
    """

    first_factors: tuple[float, ...] = (1.0, 1.02, 1.04, 1.07, 1.1)
    spreads: tuple[float, ...] = (0.06, 0.03, 0.01)
    gains: tuple[float, ...] = (0.01, 0.005, 0.002)
    trials: int = 12


_SEARCH = _LimitSearch()


@dataclass(frozen=True, eq=False)
class JointPacking:
    """Packs the sequences of a step, sorted longest first, into all of its micro-batches at once."""

    problem: GroupingProblem

    def first(self, expected_s: Iterable[Sequence[float]], below_s: float = math.inf) -> Layout | None:
        """The fastest layout within multiples of expected seconds, in less than `below_s`; None if there is none.

        expected_s: seconds of all micro-batches, without `micro_batch_s`, for every cut to try.
        """
        best: Layout | None = None
        for each in expected_s:
            for factor in _SEARCH.first_factors:
                if factor * sum(each) + self.problem.micro_batch_s * len(each) >= below_s:
                    break
                found = self.pack(factor * np.array(each))
                if found is not None:
                    seconds = self.problem.step_seconds(found)
                    if seconds < below_s:
                        best, below_s = found, seconds
                    break
        return best

    def with_lower_limits(self, layout: Layout) -> Layout:
        """A layout that is at least as fast, packed within lower and lower limits, of which `layout` gives the first."""
        # the legacy generator's numbers are the same in every version of numpy
        random = np.random.RandomState(0)
        best, best_s, limits = layout, *self._seconds(layout)
        for trial in range(_SEARCH.trials):
            spread, gain = (options[trial % len(options)] for options in (_SEARCH.spreads, _SEARCH.gains))
            changed = limits * np.exp(spread * random.standard_normal(len(limits)))
            found = self.pack(changed * (float(limits.sum()) * (1 - gain) / float(changed.sum())))
            if found is not None:
                found_s, own_limits = self._seconds(found)
                if found_s < best_s:
                    best, best_s, limits = found, found_s, own_limits
        return best

    def pack(self, limits_s: FloatArray) -> Layout | None:
        """Groups in micro-batches that end within these seconds; None where a sequence fits none.

        Of the open groups, a sequence joins the one that has the least time and memory left afterwards, as shares of the limit
        and of the group's memory.
        """
        problem, num_micro_batches, limits = self.problem, len(limits_s), limits_s * (1 + _ROUNDING)
        # shares of limit and of memory that each sequence takes in each kind of group: its degree and its micro-batch
        shares = (problem.seconds.T[:, :, None] / limits).reshape(len(self._lengths), -1)
        fixed = (np.array(problem.group_s)[:, None] / limits).ravel().tolist()
        inverse = np.repeat(1 / self._rooms, num_micro_batches)
        opening = _Opening(problem, limits, self._ends_s, self._work)
        most = problem.num_ranks // problem.degrees[0] * num_micro_batches
        kinds, time_left, room_left, room_shares = np.zeros(most, dtype=np.int64), np.empty(most), np.empty(most), np.empty(most)
        members: list[list[int]] = []
        count = 0
        for i, (length, row) in enumerate(zip(self._lengths, shares, strict=True)):
            group = -1
            if count:
                time = time_left[:count] - row.take(kinds[:count])
                room = room_left[:count] - length * room_shares[:count]
                scores = time + room
                np.minimum(time, room, out=time)
                np.putmask(scores, time < -_ROUNDING, np.inf)
                best = int(scores.argmin())
                group = best if scores[best] < math.inf else -1
            if group < 0:
                kind = opening.open(i)
                if kind < 0:
                    return None
                group, kinds[count] = count, kind
                time_left[count], room_left[count], room_shares[count] = 1 - fixed[kind], 1.0, inverse[kind]
                members.append([])
                count += 1
            members[group].append(i)
            time_left[group] -= row[kinds[group]]
            room_left[group] -= length * room_shares[group]
        layout: Layout = [[] for _ in range(num_micro_batches)]
        for kind, sequences in zip(kinds.tolist(), members, strict=False):
            k, home = divmod(kind, num_micro_batches)
            layout[home].append((problem.degrees[k], tuple(sequences)))
        return [groups for groups in layout if groups]

    def _seconds(self, layout: Layout) -> tuple[float, FloatArray]:
        """Seconds of the step, and those of every micro-batch without `micro_batch_s`."""
        own = np.array([self.problem.micro_batch_seconds(groups) for groups in layout])
        return float(own.sum()) + self.problem.micro_batch_s * len(layout), own

    @cached_property
    def _lengths(self) -> list[float]:
        return [float(length) for length in self.problem.lengths]

    @cached_property
    def _rooms(self) -> FloatArray:
        return np.array(self.problem.degrees) * float(self.problem.capacity)

    @cached_property
    def _ends_s(self) -> FloatArray:
        """Seconds of a group with each sequence alone [sequence, degree]; infinite where it does not fit."""
        problem = self.problem
        fits = np.array(self._lengths)[:, None] <= self._rooms
        return np.where(fits, problem.seconds.T + np.array(problem.group_s), np.inf)

    @cached_property
    def _work(self) -> list[list[float]]:
        """Rank-seconds of every sequence at every degree."""
        work: list[list[float]] = (self.problem.seconds.T * np.array(self.problem.degrees)).tolist()
        return work


class _Opening:
    """Ranks that no group has taken yet, in every micro-batch, and the choice of the next group to open."""

    def __init__(self, problem: GroupingProblem, limits_s: FloatArray, ends_s: FloatArray, work: list[list[float]]) -> None:
        """ends_s, work: see `JointPacking`."""
        self.degrees, self.work = problem.degrees, work
        in_time = ends_s[:, :, None] <= limits_s
        # index of the smallest degree that ends in time [sequence, micro-batch]; -1: none
        self.smallest: list[list[int]] = np.where(in_time.any(axis=1), in_time.argmax(axis=1), -1).tolist()
        self.free = [problem.num_ranks] * len(limits_s)
        self.shortest_first: list[int] = np.argsort(limits_s, kind="stable").tolist()

    def open(self, i: int) -> int:
        """Kind of a new group for sequence i, with the fewest rank-seconds; -1 where none holds it in time."""
        least, chosen_k, chosen = math.inf, -1, -1
        for home in self.shortest_first:
            k = self.smallest[i][home]
            if k >= 0 and self.work[i][k] < least and self.degrees[k] <= self.free[home]:
                least, chosen_k, chosen = self.work[i][k], k, home
        if chosen_k < 0:
            return -1
        self.free[chosen] -= self.degrees[chosen_k]
        return chosen_k * len(self.free) + chosen
