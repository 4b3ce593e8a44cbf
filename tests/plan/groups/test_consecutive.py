"""Groups of consecutive sequences are as fast as plain enumeration finds, for any degrees, memory and costs."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from helpers.plans.cost_models import cost_model
from helpers.plans.grouping_problems import check_layout, flexsp_problem, lognormal_lengths, odd_problems
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.settings import PlannerConfig
from hf_longctx.plan.core.types import GroupShape
from hf_longctx.plan.groups.greedy import plan_greedy
from hf_longctx.plan.groups.packing import group_runs
from hf_longctx.plan.groups.problem import Group, GroupingProblem, fluid_bounds_s

TOLERANCE = 2e-3


def least_by_runs_s(problem: GroupingProblem, start: int, stop: int, num_ranks: int) -> float:
    """Least makespan of consecutive groups of [start, stop), by trying every first group with the best of the rest."""

    @cache
    def least_s(place: int, ranks: int) -> float:
        if place == stop:
            return 0.0
        best_s = math.inf
        for k, degree in enumerate(problem.degrees):
            for end in range(place + 1, stop + 1):
                if degree <= ranks and sum(problem.lengths[place:end]) <= degree * problem.capacity:
                    seconds = problem.group_s[k] + float(sum(problem.seconds[k][place:end]))
                    best_s = min(best_s, max(seconds, least_s(end, ranks - degree)))
        return best_s

    return least_s(start, num_ranks)


def check_runs(problem: GroupingProblem, groups: list[Group], start: int, stop: int, num_ranks: int) -> None:
    """Assert that the groups are consecutive runs of [start, stop), and within `TOLERANCE` of the best."""
    best_s = least_by_runs_s(problem, start, stop, num_ranks)
    assert bool(groups) == math.isfinite(best_s)
    if groups:
        assert [i for _, part in groups for i in part] == list(range(start, stop))
        assert sum(degree for degree, _ in groups) <= num_ranks
        assert all(problem.fits(group) for group in groups)
        seconds = problem.micro_batch_seconds(groups)
        assert best_s * (1 - 1e-9) <= seconds <= best_s / (1 - TOLERANCE) * (1 + 1e-9)


@pytest.mark.wide
@settings(derandomize=True, deadline=None, max_examples=150)
@given(odd_problems(), st.booleans())
def test_runs_are_as_good_as_brute_force_in_every_piece(problem: GroupingProblem, has_bounds: bool) -> None:
    count = len(problem.lengths)
    pieces = [(start, stop) for start in range(count) for stop in range(start + 1, count + 1)]
    bounds_s = fluid_bounds_s(problem, pieces, problem.num_ranks) if has_bounds else np.zeros(len(pieces))
    found = group_runs(problem, pieces, bounds_s, problem.num_ranks, TOLERANCE)
    for piece, groups in zip(pieces, found, strict=True):
        check_runs(problem, groups, *piece, problem.num_ranks)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(odd_problems(), st.integers(1, 8))
def test_runs_use_no_more_ranks_than_they_are_given(problem: GroupingProblem, num_ranks: int) -> None:
    num_ranks = min(num_ranks, problem.num_ranks)
    piece = (0, len(problem.lengths))
    if num_ranks >= problem.degrees[0]:
        [groups] = group_runs(problem, [piece], np.zeros(1), num_ranks, TOLERANCE)
        check_runs(problem, groups, *piece, num_ranks)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(odd_problems(most=12))
def test_a_piece_has_the_same_groups_alone_and_among_others(problem: GroupingProblem) -> None:
    count = len(problem.lengths)
    pieces = [(start, stop) for start in range(count) for stop in range(start + 1, count + 1)]
    bounds_s = fluid_bounds_s(problem, pieces, problem.num_ranks)
    together = group_runs(problem, pieces, bounds_s, problem.num_ranks, TOLERANCE)
    for place in range(0, len(pieces), 7):
        assert group_runs(problem, pieces[place : place + 1], bounds_s[place : place + 1], problem.num_ranks) == [together[place]]


def test_many_degrees_are_told_apart() -> None:
    # more degrees than a byte can count; the first sequence needs at least 150 ranks, the second at least 140
    degrees = tuple(range(1, 301))
    problem = GroupingProblem(
        lengths=(150, 140, 1),
        num_ranks=300,
        capacity=1,
        degrees=degrees,
        shapes={degree: GroupShape(degree) for degree in degrees},
        seconds=np.array([[150.0, 140.0, 1.0]]) / np.array(degrees)[:, None],
        group_s=(0.0,) * 300,
    )
    [groups] = group_runs(problem, [(0, 3)], np.zeros(1), 300, TOLERANCE)
    check_runs(problem, groups, 0, 3, 300)


@pytest.mark.parametrize("ratio", [1e9, 1e15, 1e17])
def test_the_search_ends_where_rounding_hides_short_sequences_behind_long_ones(ratio: float) -> None:
    lengths = (100, 100, 3, 2, 2, 2, 1, 1, 1)
    added_s = np.where(np.array(lengths) > 50, ratio, np.array(lengths) / 3)
    problem = replace(
        flexsp_problem(lengths), num_ranks=2, degrees=(1, 2), seconds=np.stack([added_s, added_s / 2]), group_s=(0.0, 0.0)
    )
    for groups in group_runs(problem, [(2, 9), (4, 9), (0, 9)], np.zeros(3), 2, 1e-4):
        assert groups


@pytest.mark.parametrize("degrees", [(2, 4, 8), (4, 8), (8,)])
def test_a_pool_without_single_ranks_is_planned(degrees: tuple[int, ...]) -> None:
    lengths = lognormal_lengths(0, 40, longest=3000)
    problem = GroupingProblem.build(lengths, cost_model("attention", 8), PlannerConfig(500, degrees))
    check_layout(plan_greedy(problem, 5), lengths, degrees, 8, 500)
