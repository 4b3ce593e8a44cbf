"""Improve a layout by moving or swapping single sequences between groups, within or across micro-batches.

The greedy planner ends with this search. A move takes a sequence out of the slowest group of its micro-batch; a swap also brings
another sequence back. Moves to other micro-batches use the time that their faster groups would wait. First, unused ranks make the
slowest group larger; those still unused become empty groups that a move may fill.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hf_longctx.plan.core.types import FloatArray, IntArray
from hf_longctx.plan.groups.problem import Group, GroupingProblem, Layout


@dataclass(frozen=True, slots=True)
class _MoveSearch:
    """Constants of the search, chosen with `recipes/bench/cpu/planner.py` (table times).

    call_cost: fixed cost of evaluating one matrix of moves, counted in entries of the budget. least_gain: share of the seconds
    that a move must save.
    """

    call_cost: int = 3_000
    least_gain: float = 1e-5


_MOVES = _MoveSearch()


def improve(problem: GroupingProblem, layout: Layout, budget: int, across: bool = True) -> tuple[Layout, int]:
    """A layout that is at least as fast, and the rest of `budget`, the number of matrix entries that may be looked at.

    The search ends by this budget and not by time, so that it gives the same result on every machine. across: whether
    sequences may move to other micro-batches.
    """
    start = [use_spare_ranks(problem, groups) for groups in layout]
    state = _State(problem, start, budget, across)
    while state.budget > 0 and state.improve_once():
        pass
    return min(layout, state.layout(), key=problem.step_seconds), state.budget


def use_spare_ranks(problem: GroupingProblem, groups: list[Group]) -> list[Group]:
    """Enlarge the slowest group of a micro-batch as long as that helps and there are unused ranks."""
    groups = list(groups)
    seconds = [problem.group_seconds(group) for group in groups]
    spare = problem.num_ranks - sum(degree for degree, _ in groups)
    while spare and groups:
        slowest = max(range(len(groups)), key=seconds.__getitem__)
        degree, members = groups[slowest]
        larger = [(size, members) for size in problem.degrees if degree < size <= degree + spare]
        best = min(larger, key=problem.group_seconds, default=groups[slowest])
        if problem.group_seconds(best) >= seconds[slowest] * (1 - _MOVES.least_gain):
            break
        groups[slowest], seconds[slowest] = best, problem.group_seconds(best)
        spare -= best[0] - degree
    return groups


class _State:
    """A layout during the search, as arrays over groups, ordered by micro-batch; the micro-batch of a group is its home."""

    def __init__(self, problem: GroupingProblem, layout: Layout, budget: int, across: bool) -> None:
        self.problem, self.budget, self.across = problem, budget, across
        self.lengths = np.array(problem.lengths)
        degrees, kinds, homes = problem.degrees, [], []
        self.members: list[list[int]] = []
        for home, groups in enumerate(layout):
            spare = problem.num_ranks - sum(degree for degree, _ in groups)
            for degree, members in [*groups, *_empty_groups(degrees, spare)]:
                kinds.append(degrees.index(degree))
                homes.append(home)
                self.members.append(list(members))
        self.kinds, self.homes = np.array(kinds), np.array(homes)
        self.first_of_home = np.flatnonzero(np.diff(self.homes, prepend=-1))
        self.num_homes = len(self.first_of_home)
        self.owner = np.zeros(len(problem.lengths), dtype=np.int64)
        for group, sequences in enumerate(self.members):
            self.owner[sequences] = group
        self.fixed = np.array(problem.group_s)[self.kinds]
        # an empty group costs nothing; its fixed cost comes with its first sequence
        self.entry = np.where([bool(sequences) for sequences in self.members], 0.0, self.fixed)
        own_seconds = problem.seconds[self.kinds[self.owner], np.arange(len(self.lengths))]
        self.loads = np.bincount(self.owner, own_seconds, len(kinds)) + self.fixed - self.entry
        self.tokens = np.bincount(self.owner, self.lengths, len(kinds)).astype(np.int64)
        self.rooms = np.array(degrees)[self.kinds] * problem.capacity
        # a micro-batch without an improving move is skipped until some move has changed the layout
        self.is_stuck = np.zeros(self.num_homes, dtype=bool)

    def layout(self) -> Layout:
        """The current layout without empty groups and micro-batches."""
        result: Layout = [[] for _ in range(self.num_homes)]
        for kind, sequences, home in zip(self.kinds, self.members, self.homes, strict=True):
            if sequences:
                result[home].append((self.problem.degrees[kind], tuple(sequences)))
        return [groups for groups in result if groups]

    def improve_once(self) -> bool:
        """Make the best move, or else the best swap, out of the slowest group of every micro-batch; False if none helps."""
        improved = False
        for home in range(self.num_homes):
            if self.is_stuck[home] or self.budget <= 0:
                continue
            least = _MOVES.least_gain * float(self.loads.max())
            source = self._slowest(home)
            gain, i, target, back = self._best_move(source)
            if gain <= least:
                gain, i, target, back = self._best_swap(source)
            if gain <= least:
                self.is_stuck[home] = True
                continue
            self._shift(i, target)
            if back >= 0:
                self._shift(back, source)
            self.is_stuck[:] = False
            improved = True
        return improved

    def _slowest(self, home: int) -> int:
        start = self.first_of_home[home]
        stop = self.first_of_home[home + 1] if home + 1 < self.num_homes else len(self.loads)
        return int(start + self.loads[start:stop].argmax())

    def _best_move(self, source: int) -> tuple[float, int, int, int]:
        """(gain in seconds, sequence, target group, -1) of the best move out of `source`."""
        chosen = np.array(self.members[source], dtype=np.int64)
        targets = self._targets(source)
        if not len(chosen) or not len(targets):
            return 0.0, -1, -1, -1
        self.budget -= _MOVES.call_cost + len(chosen) * len(targets)
        seconds = self.problem.seconds[:, chosen]
        rest = self.loads[source] - seconds[self.kinds[source]] if len(chosen) > 1 else np.zeros(1)
        loads = (self.loads + self.entry)[targets, None] + seconds[self.kinds[targets]]
        fits = self.tokens[targets, None] + self.lengths[chosen] <= self.rooms[targets, None]
        gains = np.where(fits, self._gains(source, rest[None, :], targets[:, None], loads), -np.inf)
        row, column = divmod(int(gains.argmax()), len(chosen))
        return float(gains[row, column]), int(chosen[column]), int(targets[row]), -1

    def _best_swap(self, source: int) -> tuple[float, int, int, int]:
        """(gain in seconds, sequence, target group, sequence that comes back) of the best swap out of `source`."""
        problem = self.problem
        chosen = np.array(self.members[source], dtype=np.int64)
        allowed = np.zeros(len(self.loads), dtype=bool)
        allowed[self._targets(source)] = True
        others = np.flatnonzero(allowed[self.owner])
        if not len(chosen) or not len(others):
            return 0.0, -1, -1, -1
        self.budget -= _MOVES.call_cost + len(chosen) * len(others)
        targets, kind = self.owner[others], self.kinds[source]
        kinds = self.kinds[targets]
        grows = self.lengths[chosen] - self.lengths[others][:, None]
        fits = (grows <= (self.rooms - self.tokens)[targets, None]) & (-grows <= self.rooms[source] - self.tokens[source])
        rest = self.loads[source] - problem.seconds[kind, chosen] + problem.seconds[kind, others][:, None]
        loads = (self.loads[targets] - problem.seconds[kinds, others])[:, None] + problem.seconds[:, chosen][kinds]
        gains = np.where(fits, self._gains(source, rest, targets[:, None], loads), -np.inf)
        row, column = divmod(int(gains.argmax()), len(chosen))
        return float(gains[row, column]), int(chosen[column]), int(targets[row]), int(others[row])

    def _targets(self, source: int) -> IntArray:
        """Groups that may take a sequence from `source`."""
        allowed = np.ones(len(self.loads), dtype=bool) if self.across else self.homes == self.homes[source]
        allowed[source] = False
        targets: IntArray = np.flatnonzero(allowed)
        return targets

    def _gains(self, source: int, rest: FloatArray, targets: IntArray, loads: FloatArray) -> FloatArray:
        """Seconds that the step saves if `source`, the slowest of its home, falls to `rest` and a target grows to `loads`."""
        home = self.homes[source]
        makespans = np.maximum.reduceat(self.loads, self.first_of_home)
        others = self.loads[self.homes == home]
        # the source is the slowest of its home, so without it the second slowest decides, or a target that gets more
        others[others.argmax()] = 0.0
        second = float(others.max())
        elsewhere = -np.maximum(rest, second) + np.minimum(0.0, makespans[self.homes[targets]] - loads)
        within = -np.maximum(np.maximum(rest, loads), second)
        gains: FloatArray = makespans[home] + np.where(self.homes[targets] == home, within, elsewhere)
        return gains

    def _shift(self, i: int, target: int) -> None:
        source = int(self.owner[i])
        self.members[source].remove(i)
        self.members[target].append(i)
        self.owner[i] = target
        for group in (source, target):
            chosen, kind = self.members[group], self.kinds[group]
            # sum anew, so that rounding errors do not add up
            self.loads[group] = self.fixed[group] + self.problem.seconds[kind, chosen].sum() if chosen else 0.0
            self.entry[group] = 0.0 if chosen else self.fixed[group]
            self.tokens[group] = self.lengths[chosen].sum()


def _empty_groups(degrees: tuple[int, ...], spare: int) -> list[Group]:
    """Unused ranks as empty groups, as large as possible."""
    groups: list[Group] = []
    for degree in reversed(degrees):
        groups += [(degree, ())] * (spare // degree)
        spare %= degree
    return groups
