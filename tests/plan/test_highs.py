"""HiGHS: whole solutions equal brute force, every limit ends a search, and what it rejects is an error with a remedy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers.plans.linear_programs import check_against_brute_force, hard_program, program, programs
from hypothesis import given, settings

from hf_longctx.plan.solver import LinearProgram, SearchLimits, SolverError, solve_integer_program, solve_with_highs


@settings(derandomize=True, deadline=None, max_examples=60)
@given(programs())
def test_whole_solutions_equal_brute_force(given_program: LinearProgram) -> None:
    check_against_brute_force(given_program, "highs")


def test_a_target_ends_the_search() -> None:
    case, start = hard_program()
    reached = solve_integer_program(case, np.arange(50) < 40, SearchLimits(20.0, target=1e4), start)
    assert reached.status == "feasible" and reached.objective <= 1e4


def test_a_limit_of_nodes_ends_the_search_where_it_did_before() -> None:
    case, start = hard_program()
    whole = np.arange(50) < 40
    first, second = (solve_with_highs(case, whole, SearchLimits(60.0, most_nodes=1), start) for _ in range(2))
    assert first.status == "feasible"
    assert first.bound < first.objective
    assert (first.objective, first.bound, first.values.tolist()) == (second.objective, second.bound, second.values.tolist())


def test_rows_may_come_in_any_order() -> None:
    # the model is stored row by row, the program's entries are not
    # min 2 a + 3 b, a + b >= 4, 2 a <= 6
    ordered = program([2, 3], [[1, 1], [2, 0]], [4, -math.inf], [math.inf, 6], upper=math.inf)
    back = slice(None, None, -1)
    mixed = LinearProgram(
        ordered.costs, ordered.lower, ordered.upper, ordered.rows[back], ordered.columns[back], ordered.values[back],
        ordered.row_lower, ordered.row_upper,
    )  # fmt: skip
    for case in (ordered, mixed):
        found = solve_with_highs(case, None, SearchLimits(), None)
        assert (found.status, found.objective) == ("optimal", pytest.approx(9))
        assert found.values == pytest.approx([3, 1]) and found.duals == pytest.approx([3, -0.5])


def test_what_highs_rejects_is_an_error_with_a_remedy() -> None:
    case = program([1], [[1]], [1], [2])
    with pytest.raises(SolverError, match=r"rejects the option mip_rel_gap=-1.*install highspy 1\.9 or later, or use CBC"):
        solve_with_highs(case, None, SearchLimits(relative_gap=-1), None)
    case.values[0] = math.inf
    with pytest.raises(SolverError, match="check that all its costs and values are finite"):
        solve_with_highs(case, None, SearchLimits(), None)
