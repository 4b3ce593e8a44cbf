"""Solver "milp": group a micro-batch with FlexSP's integer program (arXiv 2412.01523, sections 4.2 and 4.3).

For every degree there are as many virtual groups as fit the ranks. A binary variable says whether a virtual group is used, an
integer variable how many sequences of each length bucket it takes, and the time of the slowest group is minimized. The program is
tighter than the paper's: an unused group has no memory, used groups of a degree come first, the makespan is at least the fluid
bound, and only used groups pay their fixed cost. Ranks may stay idle. The paper's artefact forbids that to keep groups aligned,
which our placement does in any case.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hf_longctx.plan.core.arrays import FloatArray
from hf_longctx.plan.groups.bounds import fluid_bound_s
from hf_longctx.plan.groups.problem import Group, GroupingProblem, Layout
from hf_longctx.plan.groups.programs.length_classes import LengthClasses, draw_groups
from hf_longctx.plan.groups.programs.micro_batches import GroupedMicroBatch, GroupedStep, plan_by_micro_batches
from hf_longctx.plan.solver.program import LinearProgram, SearchLimits, SolverError
from hf_longctx.plan.solver.solve import Backend, solve_integer_program

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
