"""Packs all sequences of a step at once into groups of all its micro-batches, each of which has a limit of seconds.

The greedy planner does this where micro-batches hold many sequences. Grouping one range of similar lengths after the other leaves
ranks waiting where a few long sequences fill a micro-batch badly; here short sequences fill what long ones leave, in every
micro-batch. Sequences go longest first, each to the open group that it fits best, or else into a new group with the fewest
rank-seconds, which count its share of the fixed cost.

How long each micro-batch may take is found by trial: from the seconds that a cut by cost expects, and from those with one
micro-batch fewer, on to limits that are a little lower in sum and differ a little more or less from each other. Where a trial
succeeds, the next one asks for more. Trials end by their number, and their factors are fixed, so that equal lengths give equal
layouts.
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

    first_factors: factors on expected seconds, tried until all sequences fit. spreads: by how much the limits of a trial differ
    from those found so far, in turn. first_gain: how much lower their sum is in the first trial, as a share; it is multiplied by
    `after_success` or `after_failure`. trials: number of trials from each start, and further ones from the best of them; one that
    fails counts by the sequences that it placed. least_placed: sequences that they place at least, so that small steps have more.
    """

    first_factors: tuple[float, ...] = (1.0, 1.05, 1.1)
    spreads: tuple[float, ...] = (0.07, 0.035, 0.018)
    first_gain: float = 0.025
    after_success: float = 1.5
    after_failure: float = 0.8
    trials: tuple[int, int] = (2, 7)
    least_placed: tuple[int, int] = (1536, 5120)


_LIMITS = _LimitSearch()


class JointPacking:
    """Packs the sequences of a step, sorted longest first, into all of its micro-batches at once.

    num_placed: how many sequences were placed so far, over all calls, which counts the work.
    """

    def __init__(self, problem: GroupingProblem) -> None:
        self.problem, self.num_placed = problem, 0

    def first(self, expected_s: Iterable[Sequence[float]], below_s: float = math.inf) -> Layout | None:
        """The fastest layout within multiples of expected seconds, in less than `below_s`; None if there is none.

        expected_s: seconds of all micro-batches, without `micro_batch_s`, for every cut to try.
        """
        best: Layout | None = None
        for each in expected_s:
            for factor in _LIMITS.first_factors:
                if factor * sum(each) + self.problem.micro_batch_s * len(each) >= below_s:
                    break
                found = self.pack(factor * np.array(each))
                if found is not None:
                    seconds = self.problem.step_seconds(found)
                    if seconds < below_s:
                        best, below_s = found, seconds
                    break
        return best

    def best(self, starts_s: Iterable[Iterable[Sequence[float]]]) -> Layout | None:
        """The fastest layout found by trials from `first` of any of these expected seconds; None if there is none."""
        firsts = [self.first(expected_s) for expected_s in starts_s]
        descents = [_Descent(self, layout) for layout in firsts if layout is not None]
        if not descents:
            return None
        placed = [max(n * len(self._lengths), least) for n, least in zip(_LIMITS.trials, _LIMITS.least_placed, strict=True)]
        for descent in descents:
            descent.run(placed[0])
        best = min(descents, key=lambda descent: descent.best_s)
        best.run(placed[1])
        return best.layout

    def pack(self, limits_s: FloatArray) -> Layout | None:
        """Groups in micro-batches that end within these seconds; None where a sequence fits none.

        Of the open groups, a sequence joins the one that has the least time or memory left afterwards, as shares of the limit
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
        opened = kinds[:0], time_left[:0], room_left[:0], room_shares[:0]
        for i, (length, row) in enumerate(zip(self._lengths, shares, strict=True)):
            if members:
                own_time = opened[1] - row.take(opened[0])
                own_room = opened[2] - length * opened[3]
                least = np.minimum(own_time, own_room)
                # numbers below zero are the largest if their bits are read as whole numbers
                group = int(least.view(np.uint64).argmin())
                if least[group] >= 0:
                    members[group].append(i)
                    time_left[group], room_left[group] = own_time[group], own_room[group]
                    continue
            kind = opening.open(i)
            if kind < 0:
                # at least one, so that trials end
                self.num_placed += i + 1
                return None
            group = len(members)
            kinds[group], room_shares[group] = kind, inverse[kind]
            time_left[group] = 1 + _ROUNDING - fixed[kind] - row[kind]
            room_left[group] = 1 + _ROUNDING - length * inverse[kind]
            members.append([i])
            opened = kinds[: group + 1], time_left[: group + 1], room_left[: group + 1], room_shares[: group + 1]
        self.num_placed += len(self._lengths)
        layout: Layout = [[] for _ in range(num_micro_batches)]
        for kind, sequences in zip(kinds.tolist(), members, strict=False):
            k, home = divmod(kind, num_micro_batches)
            layout[home].append((problem.degrees[k], tuple(sequences)))
        return [groups for groups in layout if groups]

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
        # the fixed cost takes a smaller share of longer micro-batches
        room_s = limits_s - min(problem.group_s)
        self.weights: list[float] = np.divide(limits_s, room_s, out=np.ones_like(limits_s), where=room_s > 0).tolist()

    def open(self, i: int) -> int:
        """Kind of a new group for sequence i, with the fewest rank-seconds, fixed ones included; -1 where none ends in time."""
        least, chosen_k, chosen = math.inf, -1, -1
        for home, (k, weight) in enumerate(zip(self.smallest[i], self.weights, strict=True)):
            rank_seconds = self.work[i][k] * weight
            if k >= 0 and rank_seconds < least and self.degrees[k] <= self.free[home]:
                least, chosen_k, chosen = rank_seconds, k, home
        if chosen_k < 0:
            return -1
        self.free[chosen] -= self.degrees[chosen_k]
        return chosen_k * len(self.free) + chosen


class _Descent:
    """Trials of lower and lower limits, of which a layout gives the first."""

    def __init__(self, packing: JointPacking, layout: Layout) -> None:
        self.packing, self.layout = packing, layout
        self.best_s, self.limits_s = self._seconds(layout)
        self.gain, self.tried = _LIMITS.first_gain, 0
        # the legacy generator's numbers are the same in every version of numpy
        self.random = np.random.RandomState(0)

    def run(self, num_placed: int) -> None:
        """Tries limits until trials have placed `num_placed` sequences; the layout gets no slower."""
        packing = self.packing
        most = packing.num_placed + num_placed
        while packing.num_placed < most:
            spread = _LIMITS.spreads[self.tried % len(_LIMITS.spreads)]
            changed = self.limits_s * np.exp(spread * self.random.standard_normal(len(self.limits_s)))
            found = packing.pack(changed * (float(self.limits_s.sum()) * (1 - self.gain) / float(changed.sum())))
            self.tried += 1
            self.gain *= _LIMITS.after_failure
            if found is not None:
                found_s, limits_s = self._seconds(found)
                if found_s < self.best_s:
                    self.layout, self.best_s, self.limits_s = found, found_s, limits_s
                    self.gain *= _LIMITS.after_success / _LIMITS.after_failure

    def _seconds(self, layout: Layout) -> tuple[float, FloatArray]:
        """Seconds of the step, and those of every micro-batch without `micro_batch_s`."""
        problem = self.packing.problem
        own = np.array([problem.micro_batch_seconds(groups) for groups in layout])
        return float(own.sum()) + problem.micro_batch_s * len(layout), own


def one_fewer_s(problem: GroupingProblem, expected_s: Sequence[float]) -> FloatArray:
    """Expected seconds without the shortest micro-batch, whose sequences lengthen the next longer ones to one length."""
    ascending, fixed_s = np.sort(expected_s), min(problem.group_s)
    rest = ascending[1:]
    # the level of the n shortest that take its seconds, for every n; the lowest level is the right one
    levels = (np.cumsum(rest) + ascending[0] - fixed_s) / np.arange(1, len(rest) + 1)
    fewer_s: FloatArray = np.maximum(rest, levels.min(initial=math.inf))[::-1]
    return fewer_s
