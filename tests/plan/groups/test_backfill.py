"""Backfill moves a donor's sequences into groups with time left; it never slows a step, loses a sequence or overfills memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.plans.grouping_problems import check_problem_layout, flexsp_problem, odd_problems, problems_and_layouts
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.types import GroupShape
from hf_longctx.plan.groups.backfill import _fill, _first_fitting, backfill, group_some
from hf_longctx.plan.groups.greedy import group_pieces
from hf_longctx.plan.groups.problem import Group, GroupingProblem, Layout


def alone(problem: GroupingProblem) -> list[Group]:
    """A grouper that puts everything into one group of the largest degree."""
    assert list(problem.lengths) == sorted(problem.lengths, reverse=True)
    group = (problem.degrees[-1], tuple(range(len(problem.lengths))))
    return [group] if problem.fits(group) else []


def by_pieces(problem: GroupingProblem) -> list[Group]:
    return group_pieces(problem, [(0, len(problem.lengths))])[0]


def nothing(problem: GroupingProblem) -> list[Group]:
    return []


@pytest.mark.wide
@settings(derandomize=True, deadline=None, max_examples=120)
@given(problems_and_layouts(), st.sampled_from([alone, by_pieces, nothing]), st.integers(0, 3))
def test_backfill_never_worsens_and_keeps_everything(case: tuple[GroupingProblem, Layout], regroup: object, passes: int) -> None:
    problem, layout = case
    before = [list(groups) for groups in layout]
    filled = backfill(problem, layout, regroup, passes)  # type: ignore[arg-type]
    check_problem_layout(filled, problem)
    assert problem.step_seconds(filled) <= problem.step_seconds(layout)
    assert layout == before
    assert passes or filled == layout


@pytest.mark.wide
@settings(derandomize=True, deadline=None, max_examples=120)
@given(problems_and_layouts())
def test_filling_costs_nothing_and_takes_what_a_second_look_could_take(case: tuple[GroupingProblem, Layout]) -> None:
    problem, layout = case
    if len(layout) < 2:
        return
    *others, donor = layout
    donated = sorted(i for _, part in donor for i in part)
    filled, left = _fill(problem, others, donated)
    assert sorted([i for groups in filled for _, part in groups for i in part] + list(left)) == sorted(
        range(len(problem.lengths))
    )
    for before, after in zip(others, filled, strict=True):
        makespan_s = problem.micro_batch_seconds(before)
        assert problem.micro_batch_seconds(after) <= makespan_s * (1 + 1e-9)
        assert [degree for degree, _ in before] == [degree for degree, _ in after]
        for (_, had), group in zip(before, after, strict=True):
            assert group[1][: len(had)] == had
            assert problem.fits(group)
            # none of the remaining sequences would still fit
            for i in left:
                larger = (group[0], (*group[1], i))
                assert not problem.fits(larger) or problem.group_seconds(larger) > makespan_s * (1 - 1e-9)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(odd_problems(most=10), st.randoms(use_true_random=False))
def test_the_first_that_fits_equals_a_plain_search(problem: GroupingProblem, draw: object) -> None:
    generator = np.random.default_rng(draw.randint(0, 10**6))  # type: ignore[attr-defined]
    left = np.flatnonzero(generator.uniform(size=len(problem.lengths)) < 0.7)
    kinds = generator.integers(0, len(problem.degrees), 5)
    # half of the limits are exactly what some sequence takes
    some = generator.integers(0, len(problem.lengths), 5)
    time_left = problem.seconds[kinds, some] * generator.choice([0.5, 1.0, 1.5], 5)
    room_left = np.array(problem.lengths)[generator.permutation(some)] + generator.integers(-1, 2, 5)
    found = _first_fitting(problem, left, np.array(problem.lengths)[left], kinds, time_left, room_left)
    for kind, time_s, room, first in zip(kinds, time_left, room_left, found, strict=True):
        fitting = [p for p, i in enumerate(left) if problem.lengths[i] <= room and problem.seconds[kind][i] <= time_s]
        assert min(first, len(left)) == min(fitting, default=len(left))


def test_a_long_sequences_slack_takes_a_whole_micro_batch() -> None:
    # 10 s on one rank leave the other one idle; six of 1 s, three on each rank, take 3 s and fit beside it
    lengths = (100, *[10] * 6)
    problem = GroupingProblem(
        lengths=lengths,
        num_ranks=2,
        capacity=200,
        degrees=(1,),
        shapes={1: GroupShape(1)},
        seconds=np.array([[10.0, *[1.0] * 6]]),
        group_s=(0.5,),
    )
    layout: Layout = [[(1, (0,)), (1, (1,))], [(1, (2, 3)), (1, (4, 5, 6))]]
    [groups] = backfill(problem, layout, nothing, 1)
    assert sorted((degree, tuple(sorted(part))) for degree, part in groups) == [(1, (0,)), (1, (1, 2, 3, 4, 5, 6))]
    # memory for three sequences more: two remain, and a donor whose rest cannot be grouped keeps all its sequences
    tight = replace(problem, capacity=100, lengths=(100, *[25] * 6))
    assert backfill(tight, layout, nothing, 1) == layout
    [_, rest] = sorted(backfill(tight, layout, alone, 1), key=len, reverse=True)
    assert len(rest) == 1 and len(rest[0][1]) == 2


def test_what_is_left_of_a_donor_may_not_cost_more_than_the_move_saves() -> None:
    # one of the donor's four fits beside the long one; three in one group take 8 s, where two groups of two took 5.5
    problem = GroupingProblem(
        lengths=(100, *[25] * 7),
        num_ranks=2,
        capacity=100,
        degrees=(1,),
        shapes={1: GroupShape(1)},
        seconds=np.array([[10.0, *[2.5] * 7]]),
        group_s=(0.5,),
    )
    layout: Layout = [[(1, (0,)), (1, (1, 2, 3))], [(1, (4, 5)), (1, (6, 7))]]
    filled, left = _fill(problem, layout[:1], [4, 5, 6, 7])
    assert (filled, left) == ([[(1, (0,)), (1, (1, 2, 3, 4))]], {5, 6, 7})
    # the time alone does not allow two either
    assert _fill(replace(problem, capacity=1000), layout[:1], [4, 5, 6, 7]) == (filled, left)
    assert backfill(problem, layout, alone, 1) == layout


def test_a_part_is_grouped_in_its_own_numbers_and_comes_back_in_the_steps() -> None:
    problem, _ = flexsp_problem((500, 400, 300, 200, 100)).longest_first()
    seen: list[GroupingProblem] = []

    def note(part: GroupingProblem) -> list[Group]:
        seen.append(part)
        return [(2, (0, 2)), (1, (1,))]

    assert group_some(problem, [1, 3, 4], note) == [(2, (1, 4)), (1, (3,))]
    assert seen[0].lengths == (400, 200, 100)
    assert seen[0].seconds[1].tolist() == problem.seconds[1][[1, 3, 4]].tolist()
    assert pytest.approx(problem.group_seconds((2, (1, 4)))) == seen[0].group_seconds((2, (0, 2)))
