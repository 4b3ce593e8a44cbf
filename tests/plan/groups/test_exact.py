"""The exact solver equals a plain enumeration of all layouts, and takes only problems that are small enough."""

from __future__ import annotations

import itertools
import random

import pytest
from helpers.plans.cost_models import COST_KINDS, cost_model
from helpers.plans.grouping_problems import (
    FIRST_DEGREES,
    check_layout,
    cost_kinds,
    layout_seconds,
    least_seconds,
    lengths_of_five,
    lognormal_lengths,
    priced_problem,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.groups.exact import can_solve_exactly, rank_layouts, solve_exactly


@settings(derandomize=True, deadline=None, max_examples=60)
@given(lengths_of_five, cost_kinds, st.sampled_from([400, 800, 2000]))
def test_the_exact_solver_equals_brute_force(lengths: list[int], kind: str, capacity: int) -> None:
    problem = priced_problem(lengths, kind, capacity=capacity)
    layout = solve_exactly(problem)
    check_layout(layout, lengths, FIRST_DEGREES, 4, capacity)
    best_s = least_seconds(lengths, cost_model(kind, 4), FIRST_DEGREES, 4, capacity)
    assert layout_seconds(layout, lengths, cost_model(kind, 4)) == pytest.approx(best_s, rel=1e-9)


@pytest.mark.wide("4-8-1000-attention", "4-8-1000-exchange", "4-8-1000-windows")
@pytest.mark.parametrize("kind", COST_KINDS)
@pytest.mark.parametrize(("seed", "count", "capacity"), [(0, 6, 250), (1, 7, 300), (2, 7, 500), (3, 8, 300), (4, 8, 1000)])
def test_the_exact_solver_equals_brute_force_on_skewed_lengths(kind: str, seed: int, count: int, capacity: int) -> None:
    lengths = lognormal_lengths(seed, count, 4 * capacity)
    layout = solve_exactly(priced_problem(lengths, kind, capacity=capacity))
    check_layout(layout, lengths, FIRST_DEGREES, 4, capacity)
    best_s = least_seconds(lengths, cost_model(kind, 4), FIRST_DEGREES, 4, capacity)
    assert layout_seconds(layout, lengths, cost_model(kind, 4)) == pytest.approx(best_s, rel=1e-9)


@pytest.mark.parametrize("kind", COST_KINDS)
@pytest.mark.parametrize(
    ("num_ranks", "degrees"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (2, (2,)),
        (3, (1, 2, 3)),
        (5, (1, 2, 4, 5)),
        (6, (1, 2, 4, 6)),
        (4, (2, 4)),
        (3, (2,)),
        (5, (2, 4)),
    ],
)
def test_the_exact_solver_equals_brute_force_in_odd_worlds(kind: str, num_ranks: int, degrees: tuple[int, ...]) -> None:
    for seed in range(3):
        lengths = lognormal_lengths(seed, 5, degrees[-1] * 400)
        layout = solve_exactly(priced_problem(lengths, kind, num_ranks, 400, degrees))
        check_layout(layout, lengths, degrees, num_ranks, 400)
        best_s = least_seconds(lengths, cost_model(kind, num_ranks), degrees, num_ranks, 400)
        assert layout_seconds(layout, lengths, cost_model(kind, num_ranks)) == pytest.approx(best_s, rel=1e-9)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.lists(st.integers(4, 1600), min_size=2, max_size=6), cost_kinds, st.randoms(use_true_random=False))
def test_the_exact_cost_does_not_depend_on_the_order_of_sequences(lengths: list[int], kind: str, draw: random.Random) -> None:
    shuffled = list(lengths)
    draw.shuffle(shuffled)
    costs = cost_model(kind, 4)
    first, second = (layout_seconds(solve_exactly(priced_problem(case, kind)), case, costs) for case in (lengths, shuffled))
    assert first == pytest.approx(second, rel=1e-9)


@pytest.mark.parametrize("num_ranks", range(1, 9))
@pytest.mark.parametrize("degrees", [(1,), (1, 2), (1, 2, 4), (2, 4), (1, 3), (2,), (1, 2, 4, 8)])
def test_rank_layouts_are_all_multisets_that_leave_no_usable_rank(num_ranks: int, degrees: tuple[int, ...]) -> None:
    usable = [degree for degree in degrees if degree <= num_ranks]
    expected = {
        tuple(sorted(chosen, reverse=True))
        for count in range(num_ranks + 1)
        for chosen in itertools.combinations_with_replacement(usable, count)
        if sum(chosen) <= num_ranks and not any(sum(chosen) + degree <= num_ranks for degree in usable)
    }
    found = rank_layouts(num_ranks, degrees)
    assert len(found) == len(set(found))
    # the search goes down in degree, so it may also list a layout that a larger degree would still extend
    assert expected <= set(found)
    assert all(list(layout) == sorted(layout, reverse=True) and sum(layout) <= num_ranks for layout in found)


def test_only_small_problems_are_solved_exactly() -> None:
    assert can_solve_exactly(priced_problem([100] * 8))
    assert not can_solve_exactly(priced_problem([100] * 11))
    assert not can_solve_exactly(priced_problem([100], num_ranks=32, degrees=(1, 2, 4, 8)))
