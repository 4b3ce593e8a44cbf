"""CBC: whole solutions equal brute force, and what its files cannot say is filled in."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers.plans.linear_programs import check_against_brute_force, program, programs
from hypothesis import given, settings

from hf_longctx.plan.solver import LinearProgram, SearchLimits, solve_with_cbc


@settings(derandomize=True, deadline=None, max_examples=15)
@given(programs())
def test_whole_solutions_of_cbc_equal_brute_force(given_program: LinearProgram) -> None:
    check_against_brute_force(given_program, "cbc")


def test_variables_in_no_row_take_a_value_within_their_bounds() -> None:
    # the last three: one is cheap at its bound above, one at its bound below, one costs nothing but must not be zero
    case = program([1, -2, 3, 0], [[1, 0, 0, 0]], [1], [2])
    case.lower[2], case.lower[3] = -1, 2
    found = solve_with_cbc(case, None, SearchLimits(), None)
    assert found.status == "optimal"
    assert found.values[:3] == pytest.approx([1, 4, -1]) and 2 <= found.values[3] <= 4
    assert found.objective == pytest.approx(1 - 8 - 3)


@pytest.mark.parametrize(("cost", "value", "dual"), [(2.0, 1.0, 2.0), (-3.0, 4.0, -3.0)])
def test_a_row_of_two_bounds_has_the_dual_of_the_one_that_binds(cost: float, value: float, dual: float) -> None:
    case = program([cost], [[1]], [1], [4], upper=9)
    found = solve_with_cbc(case, None, SearchLimits(), None)
    assert (found.values, found.duals) == (pytest.approx([value]), pytest.approx([dual]))


def test_a_gap_ends_the_search_with_the_bound_that_cbc_logs() -> None:
    draw = np.random.default_rng(3)
    costs, matrix = draw.integers(100, 999, 12).tolist(), draw.integers(1, 50, (4, 12)).tolist()
    case = program(costs, matrix, [500] * 4, [math.inf] * 4, math.inf)
    whole = np.ones(12, dtype=bool)
    exact, rough = (solve_with_cbc(case, whole, SearchLimits(relative_gap=gap), None) for gap in (0.0, 0.2))
    assert exact.status == rough.status == "optimal"
    assert rough.bound <= exact.objective * (1 + 1e-9) and exact.objective <= rough.objective * (1 + 1e-9)


def test_an_infeasible_program_is_told_from_one_without_end() -> None:
    # x - y >= 1 and y - x >= 1 (or -4), beside a variable that lowers the costs without end
    no_way = program([-1, 0, 0], [[0, 1, -1], [0, -1, 1]], [1, 1], [math.inf] * 2, upper=math.inf)
    no_end = program([-1, 0, 0], [[0, 1, -1], [0, -1, 1]], [1, -4], [math.inf] * 2, upper=math.inf)
    assert solve_with_cbc(no_way, None, SearchLimits(), None).status == "infeasible"
    assert solve_with_cbc(no_end, None, SearchLimits(), None).status == "unbounded"
