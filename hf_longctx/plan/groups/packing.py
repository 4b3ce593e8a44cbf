"""Packs sequences into groups under limits of time and memory (vector bin packing), many trials at once.

`pack_trials` tests for the greedy planner whether a makespan T is feasible. A trial packs one set of sequences, longest first,
within T. A sequence joins the open group that fits it best, or else a new group of the smallest degree that finishes it within T.
Trials differ in T and in their rule: the meaning of "best", whether new groups are larger than needed, and whether all remaining
ranks are opened as equal groups at once. All trials place one sequence per turn as rows (lanes) of the same arrays, so a turn of
all trials costs little more than a turn of one.

`group_runs` finds the groups of consecutive sequences with the least makespan, from which the search starts, by bisection with an
exact dynamic program. Sequences are sorted longest first, a micro-batch (piece) is a range [start, stop) of them, and each of its
groups is a run, that is, a range within the piece. For a makespan T let next_d(i) be the end of the longest run from sequence i
that fits d ranks within T and memory; it never decreases with i. So the furthest sequence that r ranks can serve is

    reach(0) = start,   reach(r) = max over degrees d of next_d(reach(r - d)),

and T is feasible if reach(all ranks) is the end of the piece. A lane is one piece with one T; all lanes go through the recurrence
as one array.

`JointPacking` packs all sequences of a step at once into groups of all its micro-batches, each with a limit of seconds, if
micro-batches hold many sequences. Grouping one range of similar lengths after the other leaves ranks waiting if a few long
sequences fill a micro-batch badly; here short sequences fill the gaps of long ones, in every micro-batch. Sequences go longest
first, each to the open group that it fits best, or else into a new group with the fewest rank-seconds, including its share of the
fixed cost. Limits are found by trial: they start from the seconds that a cut by cost expects, and from those with one micro-batch
fewer, and then get a little lower in sum and differ a little more or less from each other. After a success, the next trial is
more ambitious. Trials end by their number, and their factors are fixed, so that equal lengths give equal layouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hf_longctx.plan.core.types import FloatArray, IntArray
from hf_longctx.plan.groups.problem import Group, GroupingProblem, Layout, Piece

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
    """Scores by which a trial places sequences. The open group with the lowest score fits a sequence best."""

    # weights of the time and memory that the group has left after the sequence joins
    time_weight: float = 1.0
    room_weight: float = 1.0
    # weight, subtracted, of the sequence's time and memory times those that the group has left
    dot_weight: float = 0.0
    # open new groups this many degrees larger than needed
    larger: int = 0
    # index of a degree; as soon as it is enough for the next sequence, all remaining ranks are opened as groups of this
    # degree (-1: never)
    equal_degree: int = -1
    # open no other groups
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
    """Result of a trial."""

    trial: Trial
    # seconds of its slowest group; infinite if a sequence fitted no group
    makespan_s: float
    # group of each of its sequences
    columns: IntArray
    # degree index of each group
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


@dataclass(frozen=True, slots=True)
class _MakespanSearch:
    """Constants of the search; repeat the tables times and problems of `recipes/bench/cpu/planner.py` when one changes.

    first_factors: makespans tried first, as multiples of the fluid bound; the last one allows any makespan. most_limits:
    makespans tried per piece in every later iteration.
    """

    first_factors: tuple[float, ...] = (1.02, 1.06, 1.12, 1.25, 1.5, 2.0, 4.0, np.inf)
    most_limits: int = 6


_MAKESPAN = _MakespanSearch()


def group_runs(
    problem: GroupingProblem, pieces: Sequence[Piece], bounds_s: FloatArray, num_ranks: int, tolerance: float = 2e-3
) -> list[list[Group]]:
    """Groups of least makespan among all groups of consecutive sequences, for every piece; empty if memory allows none.

    The sequences of `problem` are sorted longest first. bounds_s: a lower bound on the makespan of each piece. Makespans are
    within `tolerance` of the best.
    """
    tables = _Tables(problem, pieces, num_ranks)
    limits = np.maximum(bounds_s, 1e-12)[:, None] * np.array(_MAKESPAN.first_factors)
    # per piece: the least feasible makespan found, and the choices of degrees that reach it
    kept: dict[int, tuple[float, NDArray[np.int16]]] = {}
    low, high = bounds_s.astype(np.float64), np.full(len(pieces), np.inf)
    open_pieces = np.arange(len(pieces))
    while len(open_pieces):
        reached, choices = tables.reach(open_pieces, limits)
        for row, piece in enumerate(open_pieces.tolist()):
            feasible = np.flatnonzero(reached[row])
            first = int(feasible[0]) if len(feasible) else len(limits[row])
            if first > 0:
                low[piece] = max(low[piece], limits[row][first - 1])
            if len(feasible):
                kept[piece] = limits[row][first], choices[:, row, first]
                is_any = np.isinf(limits[row][first])
                high[piece] = problem.micro_batch_seconds(tables.groups(piece, *kept[piece])) if is_any else limits[row][first]
        # pieces that fit within no limit are given up; the others are refined until their gap is small
        open_pieces = np.array([p for p in kept if high[p] - low[p] > tolerance * high[p]], dtype=np.int64)
        shares = np.arange(1, _MAKESPAN.most_limits + 1) / (_MAKESPAN.most_limits + 1)
        limits = low[open_pieces, None] + (high[open_pieces] - low[open_pieces])[:, None] * shares
    return [tables.groups(piece, *kept[piece]) if piece in kept else [] for piece in range(len(pieces))]


class _Tables:
    """Tables that do not depend on the makespan: sums over the sorted sequences, and the ends of runs that memory allows."""

    def __init__(self, problem: GroupingProblem, pieces: Sequence[Piece], num_ranks: int) -> None:
        self.problem, self.pieces, self.num_ranks = problem, pieces, num_ranks
        zero = np.zeros((len(problem.degrees), 1))
        self.seconds = np.concatenate([zero, np.cumsum(problem.seconds, axis=1)], axis=1)
        tokens = np.concatenate([[0], np.cumsum(problem.lengths)])
        rooms = [degree * problem.capacity for degree in problem.degrees]
        self.by_memory = np.stack([np.searchsorted(tokens, tokens + room, side="right") - 1 for room in rooms])

    def reach(self, chosen: IntArray, limits_s: FloatArray) -> tuple[NDArray[np.bool_], NDArray[np.int16]]:
        """Whether all ranks together reach the end of each chosen piece within each limit (array [piece, limit]).

        Also the degree index of the last group with which each number of ranks reaches furthest (array [ranks, piece, limit];
        -1: one rank fewer reaches as far).
        """
        degrees = [degree for degree in self.problem.degrees if degree <= self.num_ranks]
        starts, stops = np.array([self.pieces[piece] for piece in chosen], dtype=np.int64).T
        num_limits = limits_s.shape[1]
        table, offsets = self._next(starts, stops, limits_s, len(degrees))
        shape = (self.num_ranks + 1, len(chosen) * num_limits)
        reached, choices = np.zeros(shape, dtype=np.int64), np.full(shape, -1, dtype=np.int16)
        # indices count within the lane's own range of the table, so that one gather serves all lanes
        ends = np.repeat(stops - starts, num_limits)
        rows = np.arange(len(degrees))[:, None] * table.shape[1] + offsets
        flat, sizes = table.ravel(), np.array(degrees)
        for ranks in range(degrees[0], self.num_ranks + 1):
            usable = int(np.searchsorted(sizes, ranks, side="right"))
            candidates = flat[rows[:usable] + reached[ranks - sizes[:usable]]]
            best = candidates.argmax(axis=0)
            furthest = candidates.max(axis=0)
            before = reached[ranks - 1]
            reached[ranks] = np.maximum(furthest, before)
            choices[ranks] = np.where(furthest > before, best, -1)
            if (reached[ranks] == ends).all():
                reached[ranks + 1 :] = ends
                break
        done = (reached[-1] == ends).reshape(len(chosen), num_limits)
        return done, choices.reshape(-1, len(chosen), num_limits)

    def groups(self, piece: int, limit_s: float, choices: NDArray[np.int16]) -> list[Group]:
        """The groups that the choices of one lane describe, longest sequences first."""
        start, stop = self.pieces[piece]
        degrees, by_rank = self.problem.degrees, choices.tolist()
        ranks, chain = self.num_ranks, []
        while ranks > 0:
            if by_rank[ranks] >= 0:
                chain.append(by_rank[ranks])
                ranks -= degrees[chain[-1]]
            else:
                ranks -= 1
        ends = self._ends(np.arange(start, stop), np.full(stop - start, limit_s))
        groups, first = [], start
        for k in reversed(chain):
            end = min(int(ends[k, first - start]), stop) if first < stop else stop
            if end > first:
                groups.append((degrees[k], tuple(range(first, end))))
                first = end
        assert first == stop, "the runs that were found do not cover their piece"
        return groups

    def _next(self, starts: IntArray, stops: IntArray, limits_s: FloatArray, num_degrees: int) -> tuple[IntArray, IntArray]:
        """Ends of the longest runs from every sequence of every lane [degree, sequence], and where each lane begins.

        Ends count from the start of the piece.
        """
        num_limits = limits_s.shape[1]
        counts = np.repeat(stops - starts + 1, num_limits)
        offsets = np.concatenate([[0], np.cumsum(counts)[:-1]])
        lane_starts = np.repeat(starts, num_limits)
        firsts = np.arange(counts.sum()) - np.repeat(offsets - lane_starts, counts)
        ends = self._ends(firsts, np.repeat(limits_s.ravel(), counts))[:num_degrees]
        last = np.repeat(np.repeat(stops, num_limits), counts)
        return np.minimum(ends, last) - np.repeat(lane_starts, counts), offsets

    def _ends(self, firsts: IntArray, limits_s: FloatArray) -> IntArray:
        """Ends of the longest runs from each of `firsts` within time limit and memory, for every degree; an empty run if none."""
        ends = np.empty((len(self.seconds), len(firsts)), dtype=np.int64)
        for k, sums in enumerate(self.seconds):
            # slightly more than the limit, so that a limit taken from a layout admits this layout despite rounding
            targets = sums[firsts] + (limits_s - self.problem.group_s[k]) * (1 + 1e-12)
            by_time = np.searchsorted(sums, targets, side="right") - 1
            ends[k] = np.maximum(np.minimum(by_time, self.by_memory[k][firsts]), firsts)
        return ends


# share by which rounding may put a group above its limit
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class _LimitSearch:
    """Constants of the search for limits, chosen with `recipes/bench/cpu/planner.py` (table times)."""

    # factors on expected seconds, tried until all sequences fit
    first_factors: tuple[float, ...] = (1.0, 1.05, 1.1)
    # differences of a trial's limits from those found so far, in turn
    spreads: tuple[float, ...] = (0.07, 0.035, 0.018)
    # share by which their sum is lower in the first trial; multiplied by `after_success` or `after_failure`
    first_gain: float = 0.025
    after_success: float = 1.5
    after_failure: float = 0.8
    # trials from each start, and further ones from the best of them; one that fails counts by the sequences that it placed
    trials: tuple[int, int] = (2, 7)
    # sequences that these trials place at least, so that small steps have more trials
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
