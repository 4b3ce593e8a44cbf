"""FlexSP's integer program of one micro-batch (arXiv 2412.01523, section 4.2 and 4.3), and the step by its blaster.

For every degree there are as many virtual groups as fit the ranks; whether one is used is a binary, how many sequences of a
length bucket it takes an integer, and the slowest one is minimized. Against the paper's form it is tightened: memory is
linked to use, used groups of a degree come first, the makespan is at least the fluid bound, and only a group in use pays its
fixed cost. Ranks may stay idle; the paper's artefact forbids that for the sake of alignment, which our placement has anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hf_longctx.plan.core.arrays import FloatArray
from hf_longctx.plan.groups.bounds import fluid_bound_s
from hf_longctx.plan.groups.problem import Group, GroupingProblem, Layout
from hf_longctx.plan.groups.programs.length_classes import LengthClasses, draw_groups
from hf_longctx.plan.groups.programs.micro_batches import GroupedMicroBatch, GroupedStep, plan_by_chunks
from hf_longctx.plan.solver.program import LinearProgram, SearchLimits, SolverError
from hf_longctx.plan.solver.solve import Backend, solve_integer_program

_NUM_BUCKETS = 16


def plan_milp(problem: GroupingProblem, trials: int, time_limit_s: float, seed: Layout) -> GroupedStep:
    """The step by one integer program per micro-batch of the blaster's cuts and of `seed`; never slower than `seed`."""
    return plan_by_chunks(problem, trials, time_limit_s, seed, group_by_milp)


def group_by_milp(
    problem: GroupingProblem, seed: Sequence[Group], time_limit_s: float = 10.0, backend: Backend = "auto"
) -> GroupedMicroBatch:
    """Groups for all sequences in one micro-batch, never slower than the groups of `seed`.

    bound_s is the fluid bound: the program proves nothing about lengths that its buckets rounded up.
    """
    bound_s, seed_s = fluid_bound_s(problem), problem.micro_batch_seconds(seed)
    given = GroupedMicroBatch(tuple(seed), min(bound_s, seed_s), is_fallback=True)
    classes = _buckets(problem)
    kinds = _virtual_groups(problem)
    start = _best_start(problem, classes, kinds, seed)
    program, is_integer = _program(problem, classes, kinds, bound_s)
    try:
        solved = solve_integer_program(program, is_integer, SearchLimits(time_limit_s), start, backend)
    except SolverError:
        return given
    if not solved.has_values:
        return given
    contents = solved.values[1 + len(kinds) :].reshape(len(kinds), -1)
    groups = draw_groups(problem, classes, kinds, contents)
    if groups and problem.micro_batch_seconds(groups) < seed_s:
        return GroupedMicroBatch(groups, bound_s, is_fallback=False)
    return GroupedMicroBatch(tuple(seed), given.bound_s, is_fallback=solved.status != "optimal")


def _buckets(problem: GroupingProblem) -> LengthClasses:
    """At least 16 buckets, and as many as leave half of the free memory free when all lengths are rounded up."""
    tokens, room = sum(problem.lengths), problem.num_ranks * problem.capacity
    number = _NUM_BUCKETS
    while True:
        classes = LengthClasses.of(problem, number, rounded_up=True)
        if classes.counts @ classes.tokens <= (tokens + room) / 2 or number >= len(problem.lengths):
            return classes
        number += 4


def _virtual_groups(problem: GroupingProblem) -> NDArray[np.int64]:
    """Degree indices of all groups that a grouping may need, degree by degree.

    The longest sequence occupies a group that holds it, which leaves fewer ranks to smaller groups.
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
    """Columns: the makespan, use of every group, then contents group by group. Rows: time, memory, order, ranks, buckets."""
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
    rows, columns, values = (np.concatenate(parts) for parts in zip(*entries, strict=True))
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
    """The fastest of the seed and one balanced solution per degree, as values of the program; None if none fits buckets."""
    bucket_of = {i: j for j, members in enumerate(classes.members) for i in members}
    options = [np.array([[bucket_of[i] for i in group].count(j) for j in range(len(classes.counts))]) for _, group in seed]
    candidates = [
        _as_values(problem, classes, kinds, [(problem.degrees.index(d), o) for (d, _), o in zip(seed, options, strict=True)])
    ]
    candidates += [_as_values(problem, classes, kinds, _one_degree(problem, classes, k)) for k in range(len(problem.degrees))]
    return min((values for values in candidates if values is not None), key=lambda values: float(values[0]), default=None)


def _one_degree(problem: GroupingProblem, classes: LengthClasses, kind: int) -> list[tuple[int, NDArray[np.int64]]]:
    """Longest first, each into the group of one degree that is the least busy among those with room; empty if one fits none."""
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
    """Groups of bucket contents as values of the program; None where they break memory, ranks or buckets."""
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
