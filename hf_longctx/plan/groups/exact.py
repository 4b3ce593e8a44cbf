"""Solve the grouping problem of few sequences exactly, by dynamic programming over all their partitions.

Solver "auto" uses it if `can_solve_exactly`, and tests use it as an oracle for the heuristics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hf_longctx.plan.groups.problem import Group, GroupingProblem, Layout

# most table operations that `can_solve_exactly` accepts, about a tenth of a second
_MAX_OPERATIONS = 150_000


def rank_layouts(num_ranks: int, degrees: Sequence[int]) -> list[tuple[int, ...]]:
    """Every way to divide `num_ranks` ranks into groups of the allowed degrees, largest first; some ranks may be left over."""
    layouts: list[tuple[int, ...]] = []

    def extend(chosen: tuple[int, ...], left: int) -> None:
        usable = [d for d in degrees if d <= left and (not chosen or d <= chosen[-1])]
        if not usable:
            layouts.append(chosen)
        for degree in reversed(usable):
            extend((*chosen, degree), left - degree)

    extend((), num_ranks)
    return layouts


def can_solve_exactly(problem: GroupingProblem) -> bool:
    """Whether `solve_exactly` takes at most about a tenth of a second."""
    if len(problem.lengths) > 10 or problem.num_ranks > 16:
        return False
    prefixes = {layout[:end] for layout in _layouts(problem) for end in range(1, len(layout) + 1)}
    return len(prefixes) * int(3 ** len(problem.lengths)) <= _MAX_OPERATIONS


def solve_exactly(problem: GroupingProblem) -> Layout:
    """A layout of least cost, by dynamic programming over subsets of the sequences (3^n operations per table).

    There is a table for every prefix of every division of the ranks into groups: the least makespan of each subset of the
    sequences on these groups. A step is then a cheapest partition of all sequences into subsets (micro-batches). Meant for few
    sequences: ask `can_solve_exactly` first.
    """
    full = (1 << len(problem.lengths)) - 1
    single = {degree: _subset_seconds(problem, degree) for degree in problem.degrees}
    tables: dict[tuple[int, ...], tuple[list[float], list[int]]] = {}
    best: list[float] = [math.inf] * (full + 1)
    best_layout: list[tuple[int, ...]] = [()] * (full + 1)
    for layout in _layouts(problem):
        for end in range(1, len(layout) + 1):
            prefix = layout[:end]
            if prefix not in tables:
                tables[prefix] = _add_group(tables.get(prefix[:-1]), single[prefix[-1]], full)
        for subset, seconds in enumerate(tables[layout][0]):
            if seconds < best[subset]:
                best[subset], best_layout[subset] = seconds, layout
    micro_batches = _cheapest_partition([seconds + problem.micro_batch_s for seconds in best], full)
    return [_groups_of(subset, best_layout[subset], tables) for subset in micro_batches]


def _layouts(problem: GroupingProblem) -> list[tuple[int, ...]]:
    return rank_layouts(problem.num_ranks, problem.degrees)


def _subset_seconds(problem: GroupingProblem, degree: int) -> list[float]:
    """Seconds of every subset as one group of `degree` ranks; infinite if it does not fit."""
    k = problem.degrees.index(degree)
    seconds, tokens = [problem.group_s[k]], [0]
    for i, length in enumerate(problem.lengths):
        seconds += [value + float(problem.seconds[k][i]) for value in seconds]
        tokens += [value + length for value in tokens]
    # a group without sequences takes no time
    seconds[0] = 0.0
    room = degree * problem.capacity
    return [value if count <= room else math.inf for value, count in zip(seconds, tokens, strict=True)]


def _add_group(table: tuple[list[float], list[int]] | None, single: list[float], full: int) -> tuple[list[float], list[int]]:
    """Least makespan of every subset with one more group, and the sequences (as a subset) that this group takes."""
    if table is None:
        return single, list(range(full + 1))
    before, makespan, taken = table[0], [math.inf] * (full + 1), [0] * (full + 1)
    for subset in range(full + 1):
        inner = subset
        while True:
            value = max(before[subset ^ inner], single[inner])
            if value < makespan[subset]:
                makespan[subset], taken[subset] = value, inner
            if inner == 0:
                break
            # the next smaller subset of `subset`
            inner = (inner - 1) & subset
    return makespan, taken


def _cheapest_partition(best: list[float], full: int) -> list[int]:
    """A partition of all sequences into subsets (micro-batches) with the least total seconds."""
    total, last = [math.inf] * (full + 1), [0] * (full + 1)
    total[0] = 0.0
    for subset in range(1, full + 1):
        lowest = subset & -subset
        inner = subset
        while inner:
            # `inner` must hold the lowest sequence, so that every partition is met once
            if inner & lowest and best[inner] + total[subset ^ inner] < total[subset]:
                total[subset], last[subset] = best[inner] + total[subset ^ inner], inner
            inner = (inner - 1) & subset
    micro_batches = []
    while full:
        micro_batches.append(last[full])
        full ^= last[full]
    return micro_batches


def _groups_of(subset: int, layout: tuple[int, ...], tables: dict[tuple[int, ...], tuple[list[float], list[int]]]) -> list[Group]:
    groups = []
    for end in range(len(layout), 0, -1):
        taken = tables[layout[:end]][1][subset]
        groups.append((layout[end - 1], tuple(i for i in range(taken.bit_length()) if taken >> i & 1)))
        subset ^= taken
    return groups[::-1]
