"""Sequences of one micro-batch into the slack of the others, many at a time.

Where a long sequence decides how long its micro-batch takes, its other groups wait. Every such group takes the longest
sequence of the donor that still fits its time and memory, again and again; what is left of the donor is grouped anew. Moves
of single sequences cannot do this: a micro-batch gets faster only when all of its groups lose something.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hf_longctx.plan.core.arrays import FloatArray, IntArray
from hf_longctx.plan.groups.problem import Group, GroupingProblem, Layout

Grouper = Callable[[GroupingProblem], list[Group]]

_MAX_ROUNDS = 64
_LEAST_GAIN = 1e-4
_LEAST_SHARE = 0.01


def backfill(problem: GroupingProblem, layout: Layout, regroup: Grouper, passes: int) -> Layout:
    """A layout that is at least as fast, after every micro-batch was a donor `passes` times, the fastest first.

    Sequences of `problem` are in descending order. `regroup`: groups for one micro-batch of a part of the sequences, empty
    if it finds none.
    """
    layout = list(layout)
    for _ in range(passes):
        improved = False
        for turn in range(len(layout)):
            by_time = sorted(range(len(layout)), key=lambda place: problem.micro_batch_seconds(layout[place]))
            if turn >= len(by_time) or len(by_time) < 2:
                break
            donor = layout[by_time[turn]]
            others = [groups for groups in layout if groups is not donor]
            filled, rest = _fill(problem, others, sorted(i for _, part in donor for i in part))
            moved_s = sum(float(problem.seconds[:, i].min()) for _, part in donor for i in part if i not in rest)
            whole_s = sum(float(problem.seconds[:, i].min()) for _, part in donor for i in part)
            if moved_s < _LEAST_SHARE * whole_s:
                continue
            groups = group_part(problem, sorted(rest), regroup) if rest else []
            if rest and not groups:
                continue
            candidate = [*filled, groups] if groups else filled
            if problem.step_seconds(candidate) < problem.step_seconds(layout) * (1 - _LEAST_GAIN):
                layout, improved = candidate, True
        if not improved:
            break
    return layout


def group_part(problem: GroupingProblem, sequences: Sequence[int], regroup: Grouper) -> list[Group]:
    """`regroup` on some of the sequences alone, in descending order."""
    chosen = list(sequences)
    return [(degree, tuple(chosen[i] for i in members)) for degree, members in regroup(problem.part(chosen))]


def _fill(problem: GroupingProblem, layout: Layout, donated: list[int]) -> tuple[Layout, set[int]]:
    """The layout with as many of `donated` (longest first) as its slack takes at no cost, and those that are left."""
    flat = [(home, degree, list(part)) for home, groups in enumerate(layout) for degree, part in groups]
    kinds = np.array([problem.degrees.index(degree) for _, degree, _ in flat])
    loads = np.array([problem.group_seconds((degree, tuple(part))) for _, degree, part in flat])
    makespans = np.array([problem.micro_batch_seconds(groups) for groups in layout])
    time_left = makespans[[home for home, _, _ in flat]] - loads
    room_left = np.array(
        [degree * problem.capacity - sum(problem.lengths[i] for i in part) for _, degree, part in flat], dtype=np.int64
    )
    left = np.array(donated, dtype=np.int64)
    lengths = np.array(problem.lengths)
    for _ in range(_MAX_ROUNDS):
        if not len(left):
            break
        first = _first_fitting(problem, left, lengths[left], kinds, time_left, room_left)
        # the group that takes the longest chooses first, and none takes what another took
        order = np.argsort(first, kind="stable")
        place = np.arange(len(order))
        chosen = place + np.maximum.accumulate(first[order] - place)
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
    for home, degree, part in flat:
        filled[home].append((degree, tuple(part)))
    return filled, set(left.tolist())


def _first_fitting(
    problem: GroupingProblem, left: IntArray, tokens: IntArray, kinds: IntArray, time_left: FloatArray, room_left: IntArray
) -> IntArray:
    """For every group the place of the longest sequence left that fits it; beyond the end where none does."""
    by_room = np.searchsorted(-tokens, -room_left, side="left")
    by_time = np.empty(len(kinds), dtype=np.int64)
    for kind in np.unique(kinds):
        rows = kinds == kind
        by_time[rows] = np.searchsorted(-problem.seconds[kind, left], -time_left[rows], side="left")
    return np.maximum(by_room, by_time)
