"""Move many sequences of one micro-batch (the donor) at once into groups of other micro-batches that have time left.

The greedy planner does this before its local search. If a long sequence decides how long its micro-batch takes, the other groups
of that micro-batch wait. Each of them repeatedly takes the longest sequence of the donor that still fits its time and memory, and
the remaining sequences of the donor are grouped anew. Moves of single sequences cannot achieve this, because the donor gets
faster only if all of its groups lose sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hf_longctx.plan.core.types import FloatArray, IntArray
from hf_longctx.plan.groups.problem import Group, GroupingProblem, Layout

Grouper = Callable[[GroupingProblem], list[Group]]


@dataclass(frozen=True, slots=True)
class _BackfillSearch:
    """Constants of the search, chosen with `recipes/bench/cpu/planner.py` (table times)."""

    # times that every group may take one more sequence
    most_iterations: int = 64
    # share of the step's seconds that a change must save
    least_gain: float = 1e-4
    # share of the donor's seconds that others must take, else the donor is not grouped again
    least_moved: float = 0.01


_BACKFILL = _BackfillSearch()


def backfill(problem: GroupingProblem, layout: Layout, regroup: Grouper, passes: int) -> Layout:
    """A layout that is at least as fast, after every micro-batch has been the donor `passes` times, the fastest first.

    The sequences of `problem` are sorted longest first. regroup: finds groups for all sequences of a (sub)problem in one
    micro-batch, or none.
    """
    layout = list(layout)
    for _ in range(passes):
        improved = False
        for turn in range(len(layout)):
            by_time = sorted(range(len(layout)), key=lambda index: problem.micro_batch_seconds(layout[index]))
            if turn >= len(by_time) or len(by_time) < 2:
                break
            donor = layout[by_time[turn]]
            others = [groups for groups in layout if groups is not donor]
            filled, rest = _fill(problem, others, sorted(i for _, members in donor for i in members))
            moved_s = sum(float(problem.seconds[:, i].min()) for _, members in donor for i in members if i not in rest)
            whole_s = sum(float(problem.seconds[:, i].min()) for _, members in donor for i in members)
            if moved_s < _BACKFILL.least_moved * whole_s:
                continue
            groups = group_some(problem, sorted(rest), regroup) if rest else []
            if rest and not groups:
                continue
            candidate = [*filled, groups] if groups else filled
            if problem.step_seconds(candidate) < problem.step_seconds(layout) * (1 - _BACKFILL.least_gain):
                layout, improved = candidate, True
        if not improved:
            break
    return layout


def group_some(problem: GroupingProblem, sequences: Sequence[int], regroup: Grouper) -> list[Group]:
    """Groups that `regroup` finds for these sequences (sorted longest first), in the numbers of `problem`."""
    chosen = list(sequences)
    return [(degree, tuple(chosen[i] for i in members)) for degree, members in regroup(problem.subproblem(chosen))]


def _fill(problem: GroupingProblem, layout: Layout, donated: list[int]) -> tuple[Layout, set[int]]:
    """Add as many `donated` sequences (longest first) to the layout as fit without slowing it, and return it with the rest."""
    flat = [(home, degree, list(members)) for home, groups in enumerate(layout) for degree, members in groups]
    kinds = np.array([problem.degrees.index(degree) for _, degree, _ in flat])
    loads = np.array([problem.group_seconds((degree, tuple(members))) for _, degree, members in flat])
    makespans = np.array([problem.micro_batch_seconds(groups) for groups in layout])
    time_left = makespans[[home for home, _, _ in flat]] - loads
    room_left = np.array(
        [degree * problem.capacity - sum(problem.lengths[i] for i in members) for _, degree, members in flat], dtype=np.int64
    )
    left = np.array(donated, dtype=np.int64)
    lengths = np.array(problem.lengths)
    for _ in range(_BACKFILL.most_iterations):
        if not len(left):
            break
        first = _first_fitting(problem, left, lengths[left], kinds, time_left, room_left)
        # the group that can take the longest sequence chooses first, and no two groups take the same one
        order = np.argsort(first, kind="stable")
        index = np.arange(len(order))
        chosen = index + np.maximum.accumulate(first[order] - index)
        usable = chosen < len(left)
        groups, taken = order[usable], left[chosen[usable]]
        if not len(taken):
            break
        time_left[groups] -= problem.seconds[kinds[groups], taken]
        room_left[groups] -= lengths[taken]
        for group, i in zip(groups.tolist(), taken.tolist(), strict=True):
            flat[group][2].append(i)
        left = np.delete(left, chosen[usable])
    filled: Layout = [[] for _ in layout]
    for home, degree, members in flat:
        filled[home].append((degree, tuple(members)))
    return filled, set(left.tolist())


def _first_fitting(
    problem: GroupingProblem, left: IntArray, tokens: IntArray, kinds: IntArray, time_left: FloatArray, room_left: IntArray
) -> IntArray:
    """For every group the index in `left` of the longest sequence that fits it; len(left) if none does."""
    by_room = np.searchsorted(-tokens, -room_left, side="left")
    by_time = np.empty(len(kinds), dtype=np.int64)
    for kind in np.unique(kinds):
        rows = kinds == kind
        by_time[rows] = np.searchsorted(-problem.seconds[kind, left], -time_left[rows], side="left")
    return np.maximum(by_room, by_time)
