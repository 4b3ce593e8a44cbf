"""Solver "milp": groups a micro-batch with FlexSP's integer program (arXiv 2412.01523, sections 4.2 and 4.3).

For every degree there are as many virtual groups as fit the ranks. A binary variable says whether a virtual group is used, an
integer variable how many sequences of each length bucket it takes, and the time of the slowest group is minimized. The program is
tighter than the paper's: an unused group has no memory, used groups of a degree come first, the makespan is at least the fluid
bound, and only used groups pay their fixed cost. Ranks may stay idle. The paper's artefact forbids that to keep groups aligned,
which our placement does in any case.

Sequences of similar length form few classes, the buckets of FlexSP's program (section 4.3). Integer programs count sequences per
class instead of naming each; `draw_groups` turns their answer back into real sequences.

Both "milp" and "lp" (`configurations.py`) cut a step as FlexSP's blaster does (section 4.2). Sequences are sorted by length, so
that a micro-batch holds similar ones, and cut into consecutive micro-batches with balanced tokens. Several numbers of
micro-batches are tried, and also the micro-batches of a seed layout; the cut with the least total time wins.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hf_longctx.plan.core.types import FloatArray
from hf_longctx.plan.groups.cuts import micro_batch_ends
from hf_longctx.plan.groups.greedy import group_micro_batch
from hf_longctx.plan.groups.problem import Group, GroupingProblem, Layout, fluid_bound_s
from hf_longctx.plan.solver import Backend, LinearProgram, SearchLimits, SolverError, solve_integer_program


def bucket_ends(lengths: Sequence[int], counts: Sequence[int], num_buckets: int) -> list[int]:
    """Ends of at most `num_buckets` buckets of consecutive lengths that minimize the tokens added by rounding up.

    Every length is rounded up to the largest of its bucket. lengths: ascending, without repeats; counts: number of sequences of
    each length. Exact, by dynamic programming over the last bucket.
    """
    values, number = np.array(lengths, dtype=np.float64), len(lengths)
    if number <= num_buckets:
        return list(range(1, number + 1))
    sequences = np.concatenate([[0.0], np.cumsum(counts)])
    tokens = np.concatenate([[0.0], np.cumsum(values * np.array(counts))])
    # added[j, i]: tokens added by a bucket of lengths j to i (inclusive)
    added = values * (sequences[1:] - sequences[:-1, None]) - (tokens[1:] - tokens[:-1, None])
    added[np.tril_indices(number, -1)] = np.inf
    least, starts = added[0], []
    for _ in range(num_buckets - 1):
        # the buckets before a bucket that starts at length j end at length j - 1
        totals = np.concatenate([[np.inf], least[:-1]])[:, None] + added
        starts.append(totals.argmin(axis=0))
        least = totals.min(axis=0)
    ends = [number]
    for start in reversed(starts):
        ends.append(int(start[ends[-1] - 1]))
    return ends[::-1]


@dataclass(frozen=True, slots=True, eq=False)
class LengthClasses:
    """Classes of sequences with one length, or with similar lengths treated as one, from short to long."""

    # sequences of every class, and tokens of one of them
    counts: NDArray[np.int64]
    tokens: FloatArray
    # seconds[k]: seconds that one sequence of every class adds to a group of the k-th degree
    seconds: FloatArray
    # numbers of the sequences of every class
    members: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, problem: GroupingProblem, most: int, rounded_up: bool) -> LengthClasses:
        """At most `most` classes; each takes tokens and seconds of its largest sequence if `rounded_up`, else of its smallest.

        Groups that hold classes rounded up also hold their sequences. A bound for classes rounded down is a bound for their
        sequences.
        """
        lengths = np.array(problem.lengths, dtype=np.int64)
        order = np.argsort(lengths, kind="stable")
        values, firsts, counts = np.unique(lengths[order], return_index=True, return_counts=True)
        ends = bucket_ends(values.tolist(), counts.tolist(), most)
        cuts = [0, *[int(firsts[end]) if end < len(firsts) else len(lengths) for end in ends]]
        runs = [order[start:stop] for start, stop in itertools.pairwise(cuts)]
        pick = np.max if rounded_up else np.min
        return cls(
            counts=np.array([len(run) for run in runs], dtype=np.int64),
            tokens=np.array([pick(lengths[run]) for run in runs], dtype=np.float64),
            seconds=np.stack([pick(problem.seconds[:, run], axis=1) for run in runs], axis=1),
            members=tuple(tuple(run.tolist()) for run in runs),
        )


def draw_groups(
    problem: GroupingProblem, classes: LengthClasses, kinds: NDArray[np.int64], contents: FloatArray
) -> tuple[Group, ...]:
    """Groups of real sequences, given contents[g, j] sequences of class j for group g of degree index kinds[g].

    Long classes come first; within a class the longest sequence goes to the group with the most time left. If the groups have
    more slots for a class than it has sequences, the slowest groups lose slots. Memory is kept if classes are rounded up and
    the contents fit. Empty if ranks, memory or slots do not suffice.
    """
    slots = contents.astype(np.int64)
    planned = np.array(problem.group_s)[kinds] + (classes.seconds[kinds] * contents).sum(axis=1)
    members: list[list[int]] = [[] for _ in kinds]
    for j in range(len(classes.counts) - 1, -1, -1):
        for _ in range(int(slots[:, j].sum() - classes.counts[j])):
            g = int(np.where(slots[:, j] > 0, planned, -np.inf).argmax())
            slots[g, j] -= 1
            planned[g] -= classes.seconds[kinds[g], j]
        for i in sorted(classes.members[j], key=lambda i: (-problem.lengths[i], i)):
            if not slots[:, j].any():
                return ()
            g = int(np.where(slots[:, j] > 0, planned, np.inf).argmin())
            slots[g, j] -= 1
            planned[g] += problem.seconds[kinds[g], i] - classes.seconds[kinds[g], j]
            members[g].append(i)
    groups = tuple((problem.degrees[k], tuple(some)) for k, some in zip(kinds.tolist(), members, strict=True) if some)
    fits = sum(degree for degree, _ in groups) <= problem.num_ranks and all(problem.fits(group) for group in groups)
    return groups if fits else ()


@dataclass(frozen=True, slots=True)
class _TimeShares:
    """Constants that divide the time limit, chosen with `recipes/bench/cpu/planner.py` (table problems)."""

    # share of the seconds by which a layout must be faster to replace another
    least_gain: float = 1e-9
    # a micro-batch this close to its bound is not solved again
    proven: float = 2e-3
    # least time for solving a micro-batch again, as a share of an equal share
    worth_again: float = 0.2


_SHARES = _TimeShares()


@dataclass(frozen=True, slots=True)
class GroupedMicroBatch:
    """Groups of one micro-batch, and a lower bound on the seconds of any grouping of its sequences.

    is_fallback: the groups are those of the seed, because the solver failed, or neither beat nor proved them in time.
    """

    groups: tuple[Group, ...]
    bound_s: float
    is_fallback: bool


@dataclass(frozen=True, slots=True)
class GroupedStep:
    """A layout, and the number of its micro-batches that are taken from the seed without improvement or proof."""

    layout: Layout
    num_fallbacks: int


# arguments: problem of one micro-batch, groups to beat, time limit in seconds
MicroBatchSolver = Callable[[GroupingProblem, Sequence[Group], float], GroupedMicroBatch]


@dataclass(frozen=True, slots=True)
class _MicroBatch:
    """One micro-batch to solve."""

    # the subproblem of its sequences
    problem: GroupingProblem
    # number of each of them in the step
    members: tuple[int, ...]
    bound_s: float
    # groups to beat, in numbers of the subproblem; if empty, the greedy planner makes them when the micro-batch is solved
    seed: tuple[Group, ...] = ()

    @classmethod
    def of(cls, problem: GroupingProblem, members: Sequence[int], seed: Sequence[Group] = ()) -> _MicroBatch:
        """The micro-batch of these sequences; `seed` is in numbers of the step."""
        subproblem = replace(
            problem,
            lengths=tuple(problem.lengths[i] for i in members),
            seconds=problem.seconds[:, np.array(members, dtype=np.int64)],
        )
        number = {i: index for index, i in enumerate(members)}
        groups = tuple((degree, tuple(number[i] for i in group)) for degree, group in seed if group)
        return cls(subproblem, tuple(members), fluid_bound_s(subproblem), groups)

    @classmethod
    def around(cls, problem: GroupingProblem, groups: Sequence[Group]) -> _MicroBatch:
        """The micro-batch of the sequences in these groups, with the groups as its seed."""
        return cls.of(problem, sorted(i for _, members in groups for i in members), groups)

    def solve(self, solver: MicroBatchSolver, time_limit_s: float) -> GroupedMicroBatch | None:
        """The solver's groups in numbers of the step; None if neither solver nor greedy planner finds any."""
        seed = self.seed or tuple(group_micro_batch(self.problem))
        if not seed:
            return None
        solved = GroupedMicroBatch(seed, self.bound_s, is_fallback=True)
        if time_limit_s > 0:
            solved = solver(self.problem, seed, time_limit_s)
        return replace(solved, groups=tuple((degree, tuple(self.members[i] for i in group)) for degree, group in solved.groups))


def plan_by_micro_batches(
    problem: GroupingProblem, trials: int, time_limit_s: float, seed: Layout, solver: MicroBatchSolver
) -> GroupedStep:
    """The fastest layout that `solver` finds in time for any of the cuts, never slower than `seed`.

    The time is shared evenly by the micro-batches of cuts that may still win. Time that is left goes to micro-batches of the
    winning cut that are not yet proven optimal.
    """
    stop_s = time.perf_counter() + time_limit_s
    cuts = _cuts(problem, trials, seed)
    best = [GroupedMicroBatch(tuple(groups), 0.0, is_fallback=True) for groups in seed]
    best_s = problem.step_seconds(seed)
    for index, cut in enumerate(cuts):
        num_waiting = sum(len(later) for later in cuts[index + 1 :] if _bound_s(later) < best_s)
        # the first cut is the seed's, which is always finished
        solved = _solve_cut(problem, cut, solver, stop_s, num_waiting, best_s if index else math.inf)
        total_s = _total_s(problem, solved)
        if len(solved) == len(cut) and (total_s < best_s * (1 - _SHARES.least_gain) or not index):
            best, best_s = solved, total_s
    best = _solve_again(problem, best, solver, stop_s, time_limit_s)
    return GroupedStep([list(found.groups) for found in best], sum(found.is_fallback for found in best))


def _solve_cut(
    problem: GroupingProblem, cut: list[_MicroBatch], solver: MicroBatchSolver, stop_s: float, num_waiting: int, beat_s: float
) -> list[GroupedMicroBatch]:
    """Solve the micro-batches of a cut one by one until they can no longer be faster than `beat_s` seconds in total.

    num_waiting: number of micro-batches in later cuts that need time too.
    """
    solved: list[GroupedMicroBatch] = []
    for index, micro_batch in enumerate(cut):
        if _total_s(problem, solved) + _bound_s(cut[index:]) >= beat_s:
            break
        num_left = len(cut) - index + num_waiting
        found = micro_batch.solve(solver, (stop_s - time.perf_counter()) / num_left)
        if found is None:
            break
        solved.append(found)
    return solved


def _solve_again(
    problem: GroupingProblem, best: list[GroupedMicroBatch], solver: MicroBatchSolver, stop_s: float, time_limit_s: float
) -> list[GroupedMicroBatch]:
    """Solve the micro-batches that are not proven optimal once more, if enough time is left."""
    result = list(best)
    within = 1 + _SHARES.proven
    doubts = [m for m, found in enumerate(best) if problem.micro_batch_seconds(found.groups) > found.bound_s * within]
    for index, m in enumerate(doubts):
        share_s = (stop_s - time.perf_counter()) / (len(doubts) - index)
        if share_s <= _SHARES.worth_again * time_limit_s / len(doubts):
            continue
        again = _MicroBatch.around(problem, best[m].groups).solve(solver, share_s)
        if again is not None:
            result[m] = replace(again, is_fallback=again.is_fallback and best[m].is_fallback)
    return result


def _total_s(problem: GroupingProblem, solved: list[GroupedMicroBatch]) -> float:
    return sum(problem.micro_batch_seconds(micro_batch.groups) + problem.micro_batch_s for micro_batch in solved)


def _bound_s(cut: Sequence[_MicroBatch]) -> float:
    return sum(micro_batch.bound_s + micro_batch.problem.micro_batch_s for micro_batch in cut)


def _cuts(problem: GroupingProblem, trials: int, seed: Layout) -> list[list[_MicroBatch]]:
    """The micro-batches of the seed, then the blaster's cuts into `trials` numbers of micro-batches, most promising first."""
    room = problem.num_ranks * problem.capacity
    order = sorted(range(len(problem.lengths)), key=lambda i: (-problem.lengths[i], i))
    lengths = [problem.lengths[i] for i in order]
    found: list[list[_MicroBatch]] = []
    for number in range(max(1, math.ceil(sum(lengths) / room)), len(lengths) + 1):
        if len(found) == trials:
            break
        ends = micro_batch_ends(lengths, number)
        cut = [order[start:end] for start, end in itertools.pairwise([0, *ends])]
        if len(cut) == number and all(sum(problem.lengths[i] for i in members) <= room for members in cut):
            found.append([_MicroBatch.of(problem, members) for members in cut])
    return [[_MicroBatch.around(problem, groups) for groups in seed], *sorted(found, key=_bound_s)]


# fewest length buckets, as in FlexSP's artefact
_NUM_BUCKETS = 16


def plan_milp(problem: GroupingProblem, trials: int, time_limit_s: float, seed: Layout) -> GroupedStep:
    """Plan a step with one integer program per micro-batch of the blaster's cuts and of `seed`; never slower than `seed`."""
    return plan_by_micro_batches(problem, trials, time_limit_s, seed, group_by_milp)


def group_by_milp(
    problem: GroupingProblem, seed: Sequence[Group], time_limit_s: float = 10.0, backend: Backend = "auto"
) -> GroupedMicroBatch:
    """Groups for all sequences in one micro-batch, never slower than `seed`.

    The result's bound is the fluid bound, because the program, whose buckets round lengths up, proves none.
    """
    bound_s, seed_s = fluid_bound_s(problem), problem.micro_batch_seconds(seed)
    fallback = GroupedMicroBatch(tuple(seed), min(bound_s, seed_s), is_fallback=True)
    classes = _buckets(problem)
    kinds = _virtual_groups(problem)
    start = _best_start(problem, classes, kinds, seed)
    program, is_integer = _program(problem, classes, kinds, bound_s)
    try:
        solved = solve_integer_program(program, is_integer, SearchLimits(time_limit_s), start, backend)
    except SolverError:
        return fallback
    if not solved.has_values:
        return fallback
    contents = solved.values[1 + len(kinds) :].reshape(len(kinds), -1)
    groups = draw_groups(problem, classes, kinds, contents)
    if groups and problem.micro_batch_seconds(groups) < seed_s:
        return GroupedMicroBatch(groups, bound_s, is_fallback=False)
    return GroupedMicroBatch(tuple(seed), fallback.bound_s, is_fallback=solved.status != "optimal")


def _buckets(problem: GroupingProblem) -> LengthClasses:
    """At least 16 buckets, and more until rounding lengths up takes at most half of the free memory."""
    tokens, room = sum(problem.lengths), problem.num_ranks * problem.capacity
    number = _NUM_BUCKETS
    while True:
        classes = LengthClasses.of(problem, number, rounded_up=True)
        if classes.counts @ classes.tokens <= (tokens + room) / 2 or number >= len(problem.lengths):
            return classes
        number += 4


def _virtual_groups(problem: GroupingProblem) -> NDArray[np.int64]:
    """Degree indices of all virtual groups, ascending.

    One group must hold the longest sequence, which leaves fewer ranks for groups of smaller degrees.
    """
    longest = max(problem.lengths)
    needed = next(degree for degree in problem.degrees if longest <= degree * problem.capacity)
    number = [
        min((problem.num_ranks - (needed if degree < needed else 0)) // degree, len(problem.lengths))
        for degree in problem.degrees
    ]
    return np.repeat(np.arange(len(number)), number)


def _program(
    problem: GroupingProblem, classes: LengthClasses, kinds: NDArray[np.int64], bound_s: float
) -> tuple[LinearProgram, NDArray[np.bool_]]:
    """The integer program, and which of its variables are integers.

    Columns: the makespan, whether each group is used, then the contents group by group. Rows: time and memory of each group,
    order of equal groups, ranks, and sequences of each bucket.
    """
    num_groups, num_classes = len(kinds), len(classes.counts)
    degrees = np.array(problem.degrees, dtype=np.float64)[kinds]
    group, bucket = np.repeat(np.arange(num_groups), num_classes), np.tile(np.arange(num_classes), num_groups)
    used, content = 1 + np.arange(num_groups), 1 + num_groups + np.arange(num_groups * num_classes)
    room = degrees * problem.capacity
    follows = 1 + np.flatnonzero(kinds[1:] == kinds[:-1])
    order = 2 * num_groups + np.arange(len(follows))
    ranks_row = 2 * num_groups + len(follows)
    bucket_row = ranks_row + 1 + bucket
    entries: list[tuple[NDArray[np.int64], NDArray[np.int64], FloatArray]] = [
        (group, content, classes.seconds[kinds].ravel()),
        (np.arange(num_groups), used, np.array(problem.group_s)[kinds]),
        (np.arange(num_groups), np.zeros(num_groups, dtype=np.int64), np.full(num_groups, -1.0)),
        (num_groups + group, content, classes.tokens[bucket]),
        (num_groups + np.arange(num_groups), used, -room),
        (order, used[follows], np.ones(len(follows))),
        (order, used[follows - 1], np.full(len(follows), -1.0)),
        (np.full(num_groups, ranks_row), used, degrees),
        (bucket_row, content, np.ones(len(content))),
    ]
    rows, columns, values = (np.concatenate(arrays) for arrays in zip(*entries, strict=True))
    counts = classes.counts.astype(np.float64)
    most = np.minimum(counts, np.floor(room[:, None] / classes.tokens)).ravel()
    program = LinearProgram(
        costs=np.concatenate([[1.0], np.zeros(len(used) + len(content))]),
        lower=np.concatenate([[bound_s], np.zeros(len(used) + len(content))]),
        upper=np.concatenate([[np.inf], np.ones(num_groups), most]),
        rows=rows,
        columns=columns,
        values=values,
        row_lower=np.concatenate([np.full(ranks_row + 1, -np.inf), counts]),
        row_upper=np.concatenate([np.zeros(ranks_row), [problem.num_ranks], counts]),
    )
    return program, np.arange(len(program.costs)) > 0


def _best_start(
    problem: GroupingProblem, classes: LengthClasses, kinds: NDArray[np.int64], seed: Sequence[Group]
) -> FloatArray | None:
    """The fastest of the seed and one balanced solution per degree, as values of the program; None if none fits the buckets."""
    bucket_of = {i: j for j, members in enumerate(classes.members) for i in members}
    options = [np.array([[bucket_of[i] for i in group].count(j) for j in range(len(classes.counts))]) for _, group in seed]
    candidates = [
        _as_values(problem, classes, kinds, [(problem.degrees.index(d), o) for (d, _), o in zip(seed, options, strict=True)])
    ]
    candidates += [_as_values(problem, classes, kinds, _one_degree(problem, classes, k)) for k in range(len(problem.degrees))]
    return min((values for values in candidates if values is not None), key=lambda values: float(values[0]), default=None)


def _one_degree(problem: GroupingProblem, classes: LengthClasses, kind: int) -> list[tuple[int, NDArray[np.int64]]]:
    """Put each sequence, longest first, into the least busy group of one degree that has room; empty if one fits nowhere."""
    degree = problem.degrees[kind]
    number = problem.num_ranks // degree
    contents = np.zeros((number, len(classes.counts)), dtype=np.int64)
    busy_s, tokens = np.zeros(number), np.zeros(number)
    for j in range(len(classes.counts) - 1, -1, -1):
        for _ in range(int(classes.counts[j])):
            ends = np.where(tokens + classes.tokens[j] <= degree * problem.capacity, busy_s, np.inf)
            g = int(ends.argmin())
            if np.isinf(ends[g]):
                return []
            contents[g, j] += 1
            busy_s[g] += classes.seconds[kind, j]
            tokens[g] += classes.tokens[j]
    return [(kind, row) for row in contents if row.any()]


def _as_values(
    problem: GroupingProblem,
    classes: LengthClasses,
    kinds: NDArray[np.int64],
    groups: Sequence[tuple[int, NDArray[np.int64]]],
) -> FloatArray | None:
    """Values of the program for groups with these bucket contents; None if they break memory, ranks or buckets."""
    contents, used = np.zeros((len(kinds), len(classes.counts))), np.zeros(len(kinds))
    for kind, content in groups:
        free = np.flatnonzero((kinds == kind) & (used == 0))
        if not len(free) or content @ classes.tokens > problem.degrees[kind] * problem.capacity:
            return None
        used[free[0]], contents[free[0]] = 1, content
    if not np.array_equal(contents.sum(axis=0), classes.counts):
        return None
    if used @ np.array(problem.degrees)[kinds] > problem.num_ranks:
        return None
    seconds = np.array(problem.group_s)[kinds] * used + (classes.seconds[kinds] * contents).sum(axis=1)
    return np.concatenate([[seconds.max()], used, contents.ravel()])
