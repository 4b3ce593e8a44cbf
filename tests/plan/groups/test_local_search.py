"""Local search prices moves and swaps exactly, and never slows a layout, loses a sequence or overfills memory."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.plans.grouping_problems import check_problem_layout, odd_problems, problems_and_layouts
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.types import GroupShape
from hf_longctx.plan.groups.local_search import _State, improve, use_spare_ranks
from hf_longctx.plan.groups.problem import GroupingProblem, Layout

MUCH = 10**9
layouts = problems_and_layouts()


def homes(layout: Layout) -> list[list[int]]:
    return sorted(sorted(i for _, part in groups for i in part) for groups in layout)


@pytest.mark.wide
@settings(derandomize=True, deadline=None, max_examples=120)
@given(layouts, st.sampled_from([0, 5_000, MUCH]), st.booleans())
def test_improve_never_worsens_and_keeps_everything(case: tuple[GroupingProblem, Layout], budget: int, across: bool) -> None:
    problem, layout = case
    before = [list(groups) for groups in layout]
    better, left = improve(problem, layout, budget, across)
    check_problem_layout(better, problem)
    assert problem.step_seconds(better) <= problem.step_seconds(layout)
    assert left <= budget
    assert layout == before
    assert (better, left) == improve(problem, layout, budget, across)
    if not across:
        assert homes(better) == homes(layout)


def moved(groups: list[list[int]], i: int, source: int, target: int, back: int) -> list[list[int]]:
    """Members of all groups after sequence i has moved and another one has come back."""
    after = [list(part) for part in groups]
    after[source].remove(i)
    after[target].append(i)
    if back >= 0:
        after[target].remove(back)
        after[source].append(back)
    return after


def seconds_of(state: _State, groups: list[list[int]]) -> float:
    """Seconds of the step if the groups of `state` held these sequences; infinite if they do not fit the memory."""
    problem, makespans_s = state.problem, dict.fromkeys(range(state.num_homes), 0.0)
    for kind, home, part in zip(state.kinds.tolist(), state.homes.tolist(), groups, strict=True):
        group = (problem.degrees[kind], tuple(part))
        if not problem.fits(group):
            return float("inf")
        makespans_s[home] = max(makespans_s[home], problem.group_seconds(group))
    return sum(makespans_s.values())


@settings(derandomize=True, deadline=None, max_examples=80)
@given(layouts, st.booleans())
def test_the_best_move_is_found_and_priced_as_it_turns_out(case: tuple[GroupingProblem, Layout], across: bool) -> None:
    problem, layout = case
    state = _State(problem, layout, MUCH, across)
    now_s = seconds_of(state, state.members)
    for home in range(state.num_homes):
        source = state._slowest(home)
        gain, i, target, _ = state._best_move(source)
        gains = [
            now_s - seconds_of(state, moved(state.members, j, source, other, -1))
            for j in state.members[source]
            for other in range(len(state.members))
            if other != source and (across or state.homes[other] == home)
        ]
        best = max(gains, default=0.0)
        if i >= 0 and np.isfinite(gain):
            assert gain == pytest.approx(best, abs=1e-9 * now_s)
            assert gain == pytest.approx(now_s - seconds_of(state, moved(state.members, i, source, target, -1)), abs=1e-9 * now_s)
        else:
            assert not np.isfinite(best) or not gains


@pytest.mark.wide
@settings(derandomize=True, deadline=None, max_examples=80)
@given(layouts, st.booleans())
def test_the_best_swap_gains_what_it_says_and_inside_a_micro_batch_none_gains_more(
    case: tuple[GroupingProblem, Layout], across: bool
) -> None:
    problem, layout = case
    state = _State(problem, layout, MUCH, across)
    now_s = seconds_of(state, state.members)
    hair_s = 1e-9 * now_s
    for home in range(state.num_homes):
        source = state._slowest(home)
        gain, i, target, back = state._best_swap(source)
        if i >= 0 and np.isfinite(gain):
            # the search ignores that another micro-batch may end sooner without the sequence that comes back
            assert gain <= now_s - seconds_of(state, moved(state.members, i, source, target, back)) + hair_s
            assert across or state.homes[target] == home
        for j in state.members[source]:
            for other in np.flatnonzero(state.homes == home):
                for returned in state.members[other] if other != source else ():
                    after_s = seconds_of(state, moved(state.members, j, source, int(other), returned))
                    assert now_s - after_s <= max(gain, 0.0) + hair_s


@settings(derandomize=True, deadline=None, max_examples=60)
@given(layouts)
def test_the_search_ends_where_no_move_out_of_a_slowest_group_helps(case: tuple[GroupingProblem, Layout]) -> None:
    problem, layout = case
    state = _State(problem, layout, MUCH, across=True)
    while state.improve_once():
        pass
    now_s, longest_s = seconds_of(state, state.members), float(state.loads.max())
    assert now_s == pytest.approx(problem.step_seconds(state.layout()))
    for home in range(state.num_homes):
        source = state._slowest(home)
        for i in state.members[source]:
            for target in range(len(state.members)):
                if target != source:
                    after_s = seconds_of(state, moved(state.members, i, source, target, -1))
                    assert now_s - after_s <= 1e-5 * longest_s * (1 + 1e-6)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(layouts)
def test_state_is_the_same_after_many_steps_as_from_scratch(case: tuple[GroupingProblem, Layout]) -> None:
    problem, layout = case
    state = _State(problem, layout, MUCH, across=True)
    while state.improve_once():
        for group, part in enumerate(state.members):
            load_s = problem.group_seconds((problem.degrees[state.kinds[group]], tuple(part)))
            assert state.loads[group] == pytest.approx(load_s, rel=1e-12)
            assert state.tokens[group] == sum(problem.lengths[i] for i in part)
            assert all(state.owner[i] == group for i in part)
            assert state.entry[group] == (0.0 if part else problem.group_s[state.kinds[group]])


@pytest.mark.wide
@settings(derandomize=True, deadline=None, max_examples=100)
@given(layouts)
def test_spare_ranks_make_the_slowest_group_larger_as_long_as_that_helps(case: tuple[GroupingProblem, Layout]) -> None:
    problem, layout = case
    for groups in layout:
        widened = use_spare_ranks(problem, groups)
        assert [part for _, part in widened] == [part for _, part in groups]
        assert all(after >= before for (after, _), (before, _) in zip(widened, groups, strict=True))
        used = sum(degree for degree, _ in widened)
        assert used <= problem.num_ranks
        slowest_s = problem.micro_batch_seconds(widened)
        assert slowest_s <= problem.micro_batch_seconds(groups)
        degree, part = max(widened, key=problem.group_seconds)
        larger = [d for d in problem.degrees if degree < d <= degree + problem.num_ranks - used]
        assert all(problem.group_seconds((d, part)) >= slowest_s * (1 - 1e-5) for d in larger)


def even_problem(num_ranks: int, seconds: tuple[float, ...], fixed_s: float) -> GroupingProblem:
    return GroupingProblem(
        lengths=tuple(range(len(seconds), 0, -1)),
        num_ranks=num_ranks,
        capacity=100,
        degrees=(1,),
        shapes={1: GroupShape(1)},
        seconds=np.array([seconds]),
        group_s=(fixed_s,),
    )


def test_a_swap_evens_out_what_no_move_can() -> None:
    # 5 + 4 and 3 + 2: no move helps, but swapping 5 with 3 (or 4 with 2) makes 7 and 7
    problem = even_problem(2, (5.0, 4.0, 3.0, 2.0), 1.0)
    better, _ = improve(problem, [[(1, (0, 1)), (1, (2, 3))]], MUCH)
    assert problem.step_seconds(better) == pytest.approx(8.0)


def test_a_micro_batch_empties_into_the_slack_of_another() -> None:
    # 1 s beside 5 s costs nothing, and its own micro-batch with its fixed second is gone
    problem = even_problem(2, (5.0, 1.0), 1.0)
    better, _ = improve(problem, [[(1, (0,))], [(1, (1,))]], MUCH)
    assert homes(better) == [[0, 1]]
    assert problem.step_seconds(better) == pytest.approx(6.0)
    apart, _ = improve(problem, [[(1, (0,))], [(1, (1,))]], MUCH, across=False)
    assert homes(apart) == [[0], [1]]


def test_a_micro_batch_that_had_no_move_gets_one_when_others_changed() -> None:
    # the second one evens out, which must wake the first
    problem = even_problem(2, (8.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0), 0.0)
    state = _State(problem, [[(1, (0, 5)), (1, (1, 6))], [(1, (2, 3, 4)), (1, ())]], MUCH, across=True)
    state.is_stuck[0] = True
    assert state.improve_once()
    assert not state.is_stuck[0]


def test_without_a_budget_nothing_is_moved() -> None:
    problem = even_problem(2, (5.0, 1.0), 1.0)
    layout: Layout = [[(1, (0, 1))]]
    assert improve(problem, layout, 0) == (layout, 0)


@settings(derandomize=True, deadline=None, max_examples=10)
@given(odd_problems(most=1))
def test_one_sequence_is_left_in_peace(problem: GroupingProblem) -> None:
    best = min(
        ((degree, (0,)) for degree in problem.degrees if problem.lengths[0] <= degree * problem.capacity),
        key=problem.group_seconds,
    )
    better, _ = improve(problem, [[best]], MUCH)
    assert problem.step_seconds(better) == problem.group_seconds(best)
