"""Violations of a program by hand, and bounds that any duals prove."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers.plans.linear_programs import best_of_all, program, programs
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.solver import LinearProgram, Solution


def test_activities_are_those_of_the_full_matrix() -> None:
    matrix = np.array([[2.0, 0.0, -1.0], [0.0, 0.0, 0.0], [1.0, 3.0, 0.0]])
    case = program([1, 1, 1], matrix.tolist(), [0] * 3, [9] * 3)
    # zeros are not stored
    assert len(case.values) == 4
    assert case.activity(np.array([1.0, 2.0, 3.0])) == pytest.approx(matrix @ [1, 2, 3])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([2.0, 2.0], 0.0),
        # the row has 3 of 6, as much as its terms
        ([1.0, 1.0], 1.0),
        # the row has 15 of 12: its terms are 15
        ([3.0, 6.0], 3 / 15),
        # the row holds, but the first variable is 4 above its bound of 4
        ([8.0, 0.0], 4 / 8),
        # below zero by half a unit, which counts in full below a size of one
        ([-0.5, 4.0], 0.5),
    ],
)
def test_a_violation_is_a_share_of_its_terms(values: list[float], expected: float) -> None:
    # 6 <= x + 2 y <= 12 with x <= 4 and y <= 9
    case = program([1, 1], [[1, 2]], [6], [12], upper=9)
    case.upper[0] = 4
    assert case.violation(np.array(values)) == pytest.approx(expected)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(programs(), st.lists(st.floats(-4, 4), min_size=3, max_size=3))
def test_any_duals_prove_a_bound(given_program: LinearProgram, duals: list[float]) -> None:
    bound = given_program.dual_bound(np.array(duals[: len(given_program.row_lower)]))
    assert bound <= best_of_all(given_program) + 1e-6


def test_a_dual_of_a_side_without_a_bound_proves_nothing_wrong() -> None:
    # min 2 x with x + y >= 3: the row's price of 2 proves 6 - 2 * 4, as y is free up to 4; a negative price has no side
    case = program([2, 0], [[1, 1]], [3], [math.inf])
    assert case.dual_bound(np.array([2.0])) == 6 - 2 * 4
    assert case.dual_bound(np.array([-5.0])) == case.dual_bound(np.array([0.0])) == 0


def test_a_reduced_cost_within_the_solvers_tolerance_does_not_meet_an_infinite_bound() -> None:
    case = program([1], [[1]], [2], [math.inf], upper=math.inf)
    assert case.dual_bound(np.array([1 + 1e-9])) == pytest.approx(2)
    assert case.dual_bound(np.array([1.1])) == -math.inf


def test_solutions_have_values_when_they_solve_the_program() -> None:
    has_values = {status: Solution(status, "highs").has_values for status in ("optimal", "feasible", "infeasible", "timed out")}
    assert has_values == {"optimal": True, "feasible": True, "infeasible": False, "timed out": False}
