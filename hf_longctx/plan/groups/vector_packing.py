"""Pack sequences into groups under limits of time and memory (vector bin packing), many trials at once.

The greedy planner tests with this whether a makespan T is feasible. A trial packs one set of sequences, longest first, within T.
A sequence joins the open group that fits it best, or else a new group of the smallest degree that finishes it within T. Trials
differ in T and in their rule: the meaning of "best", whether new groups are larger than needed, and whether all remaining ranks
are opened as equal groups at once. All trials place one sequence per turn as rows (lanes) of the same arrays, so a turn of all
trials costs little more than a turn of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_longctx.plan.core.arrays import FloatArray, IntArray
from hf_longctx.plan.groups.problem import Group, GroupingProblem

# tolerances as shares of the time limit and of a group's memory, so that rounding never makes a makespan that was reached, or a
# full group, infeasible; 1e-11 of a group's memory is less than a token
_TIME_TOLERANCE = 1e-9
_ROOM_TOLERANCE = 1e-11
# share of failed lanes at which they are removed from the arrays
_DEAD_SHARE = 0.3
# attributes of `_Lanes` with one row per lane
_ROW_STATE = [
    "lanes",
    "counts",
    "sequences",
    "limits",
    "free_ranks",
    "time_weights",
    "room_weights",
    "dot_weights",
    "larger",
    "equal",
    "only_equal",
    "smallest",
    "kinds",
    "time_left",
    "room_left",
    "rooms_inverse",
    "num_open",
    "is_alive",
]


@dataclass(frozen=True, slots=True)
class Rule:
    """How a trial places sequences. The open group with the lowest score fits a sequence best.

    time_weight, room_weight: weights of the time and memory that the group has left after the sequence joins. dot_weight:
    weight, subtracted, of the sequence's time and memory multiplied by what the group has left of each. larger: open new groups
    this many degrees larger than needed. equal_degree: index of a degree; as soon as it is enough for the next sequence, all
    remaining ranks are opened as groups of this degree (-1: never). only_equal: open no other groups.
    """

    time_weight: float = 1.0
    room_weight: float = 1.0
    dot_weight: float = 0.0
    larger: int = 0
    equal_degree: int = -1
    only_equal: bool = False


@dataclass(frozen=True, slots=True)
class Trial:
    """One packing to try: sequences, longest first, within `limit_s` on `num_ranks` ranks by `rule`."""

    sequences: IntArray
    limit_s: float
    num_ranks: int
    rule: Rule


@dataclass(frozen=True, slots=True)
class Packed:
    """Result of a trial. makespan_s: seconds of its slowest group; infinite if a sequence fitted no group.

    columns: group of each of its sequences. kinds: degree index of each group.
    """

    trial: Trial
    makespan_s: float
    columns: IntArray
    kinds: IntArray

    def groups(self, problem: GroupingProblem) -> list[Group]:
        """The groups with their sequences; none if the trial failed."""
        if not np.isfinite(self.makespan_s):
            return []
        order = np.argsort(self.columns, kind="stable")
        cuts = np.flatnonzero(np.diff(self.columns[order])) + 1
        return [
            (problem.degrees[self.kinds[self.columns[indices[0]]]], tuple(self.trial.sequences[indices].tolist()))
            for indices in np.split(order, cuts)
        ]


def pack_trials(problem: GroupingProblem, trials: Sequence[Trial]) -> list[Packed]:
    """Carry out all trials; results in the same order."""
    if not trials:
        return []
    lanes = _Lanes(problem, trials)
    for turn in range(lanes.num_turns):
        lanes.place(turn)
    makespans = lanes.makespans_s()
    results = []
    for lane, trial in enumerate(trials):
        columns = lanes.chosen[lane, : len(trial.sequences)]
        results.append(Packed(trial, float(makespans[lane]), columns, lanes.final_kinds[lane]))
    return results


class _Lanes:
    """State of all trials that still have sequences to place, one row each, most sequences first.

    So trials that have finished are always the last rows. Groups are columns; a column that is not open has negative time left.
    lanes: number of the trial in each row.
    """

    def __init__(self, problem: GroupingProblem, trials: Sequence[Trial]) -> None:
        self.problem = problem
        self.lanes = np.array(sorted(range(len(trials)), key=lambda lane: -len(trials[lane].sequences)))
        ordered = [trials[lane] for lane in self.lanes]
        rules = [trial.rule for trial in ordered]
        self.counts = np.array([len(trial.sequences) for trial in ordered])
        self.num_turns = int(self.counts[0])
        self.degrees = np.array(problem.degrees)
        self.rooms = self.degrees * float(problem.capacity)
        self.group_s = np.array(problem.group_s)
        self.lengths = np.array(problem.lengths, dtype=np.float64)
        # one row per sequence, so that a single gather finds the seconds of a lane's sequence at all degrees
        self.seconds = np.ascontiguousarray(problem.seconds.T)
        self.sequences = np.zeros((len(trials), self.num_turns), dtype=np.int64)
        for row, trial in enumerate(ordered):
            self.sequences[row, : len(trial.sequences)] = trial.sequences
        self.limits = np.array([trial.limit_s for trial in ordered]) * (1 + _TIME_TOLERANCE)
        self.free_ranks = np.array([trial.num_ranks for trial in ordered])
        self.time_weights = np.array([[rule.time_weight] for rule in rules]) / self.limits[:, None]
        self.room_weights = np.array([[rule.room_weight] for rule in rules])
        self.dot_weights = np.array([[rule.dot_weight] for rule in rules])
        self.larger = np.array([rule.larger for rule in rules])
        self.equal = np.array([rule.equal_degree for rule in rules])
        self.only_equal = np.array([rule.only_equal for rule in rules])
        self.smallest = self._smallest_degrees()
        shape = (len(trials), int(self.free_ranks.max()) // int(self.degrees[0]))
        self.kinds = np.zeros(shape, dtype=np.int64)
        self.time_left, self.room_left = np.full(shape, -1.0), np.full(shape, -1.0)
        self.rooms_inverse = np.ones(shape)
        self.num_open = np.zeros(len(trials), dtype=np.int64)
        self.is_alive = np.ones(len(trials), dtype=bool)
        # results by trial, which remain when a lane's row is removed
        self.chosen = np.full((len(trials), self.num_turns), -1, dtype=np.int64)
        self.final_kinds = np.zeros(shape, dtype=np.int64)
        self.longest_s = np.full(len(trials), np.inf)

    def place(self, turn: int) -> None:
        """Place the next sequence of every lane."""
        working = int(np.searchsorted(-self.counts, -turn, side="left"))
        if working < len(self.lanes):
            self._keep(np.arange(len(self.lanes)) < working)
        if not len(self.lanes):
            return
        sequences, smallest = self.sequences[:, turn], self.smallest[:, turn]
        tokens, times = self.lengths[sequences], self.seconds[sequences]
        self._open_equal_groups(smallest)
        columns = self._best_open(times, tokens)
        missing = np.flatnonzero((columns < 0) & self.is_alive)
        if len(missing):
            columns[missing] = self._open(missing, smallest[missing])
            self.is_alive[missing[columns[missing] < 0]] = False
        rows = np.flatnonzero(self.is_alive & (columns >= 0))
        columns = columns[rows]
        kinds = self.kinds[rows, columns]
        self.time_left[rows, columns] -= times[rows, kinds]
        self.room_left[rows, columns] -= tokens[rows] * self.rooms_inverse[rows, columns]
        self.chosen[self.lanes[rows], turn] = columns
        if len(rows) < (1 - _DEAD_SHARE) * len(self.lanes):
            self._keep(self.is_alive)

    def makespans_s(self) -> FloatArray:
        """Seconds of every trial's slowest group, after all turns."""
        self._keep(np.zeros(len(self.lanes), dtype=bool))
        return self.longest_s

    def _smallest_degrees(self) -> IntArray:
        """Index of the smallest degree that holds a lane's sequence and finishes it in time [row, turn]; len(degrees) if none."""
        smallest = np.full(self.sequences.shape, len(self.degrees))
        for k in reversed(range(len(self.degrees))):
            fits = self.seconds[:, k][self.sequences] + self.group_s[k] <= self.limits[:, None]
            fits &= self.lengths[self.sequences] <= self.rooms[k]
            smallest[fits] = k
        return smallest

    def _best_open(self, times: FloatArray, tokens: FloatArray) -> IntArray:
        """The open group that fits each lane's sequence best; -1 if it fits none."""
        width = int(self.num_open.max())
        if not width:
            return np.full(len(self.lanes), -1)
        rows = np.arange(len(self.lanes))[:, None]
        time_left, room_left = self.time_left[:, :width], self.room_left[:, :width]
        time = np.take(times, self.kinds[:, :width] + rows * len(self.degrees))
        room = tokens[:, None] * self.rooms_inverse[:, :width]
        time_slack, room_slack = time_left - time, room_left - room
        scores = self.time_weights * time_slack
        scores += self.room_weights * room_slack
        if self.dot_weights.any():
            share = 1 / self.limits[:, None]
            scores -= self.dot_weights * (time * share * (time_left * share) + room * room_left)
        scores[(time_slack < 0) | (room_slack < -_ROOM_TOLERANCE)] = np.inf
        best = scores.argmin(axis=1)
        return np.where(scores[rows[:, 0], best] < np.inf, best, -1)

    def _open(self, rows: IntArray, smallest: IntArray) -> IntArray:
        """Open a new group for each row; -1 if no degree finishes in time or too few ranks are left."""
        last = len(self.degrees) - 1
        kinds = np.minimum(smallest, last)
        larger = np.minimum(kinds + self.larger[rows], last)
        kinds = np.where(self.degrees[larger] <= self.free_ranks[rows], larger, kinds)
        can = (smallest <= last) & (self.degrees[kinds] <= self.free_ranks[rows]) & ~self.only_equal[rows]
        columns = np.where(can, self.num_open[rows], -1)
        self._add(rows[can], columns[can], kinds[can])
        self.num_open[rows[can]] += 1
        self.free_ranks[rows[can]] -= self.degrees[kinds[can]]
        return columns

    def _open_equal_groups(self, smallest: IntArray) -> None:
        due = (self.equal >= 0) & (smallest <= self.equal)
        for row in np.flatnonzero(due).tolist():
            kind = int(self.equal[row])
            number = int(self.free_ranks[row] // self.degrees[kind])
            self._add(row, slice(self.num_open[row], self.num_open[row] + number), kind)
            self.num_open[row] += number
            self.free_ranks[row] -= number * self.degrees[kind]
            self.equal[row] = -1

    def _add(self, rows: IntArray | int, columns: IntArray | slice, kinds: IntArray | int) -> None:
        self.kinds[rows, columns] = kinds
        self.time_left[rows, columns] = self.limits[rows] - self.group_s[kinds]
        self.room_left[rows, columns] = 1.0
        self.rooms_inverse[rows, columns] = 1 / self.rooms[kinds]

    def _keep(self, kept: NDArray[np.bool_]) -> None:
        """Remove all other rows; those that placed all their sequences store their result."""
        done = np.flatnonzero(~kept & self.is_alive)
        if len(done):
            lanes = self.lanes[done]
            self.final_kinds[lanes] = self.kinds[done]
            # a group opened together with others may have stayed empty; it takes no time
            taken = (self.room_left[done] < 1.0) & (np.arange(self.kinds.shape[1]) < self.num_open[done, None])
            self.longest_s[lanes] = np.where(taken, self.limits[done, None] - self.time_left[done], 0.0).max(axis=1)
        for name in _ROW_STATE:
            setattr(self, name, getattr(self, name)[kept])
