"""Both solver backends agree with brute force and each other, bounds hold, and every failure is reported."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from helpers.plans.linear_programs import best_of_all, hard_program, program, programs
from hypothesis import given, settings

from hf_longctx.plan import solver as solve
from hf_longctx.plan.solver import (
    Backend,
    LinearProgram,
    SearchLimits,
    Solution,
    SolverError,
    available_backends,
    solve_integer_program,
    solve_linear_program,
)

BACKENDS: tuple[Backend, ...] = ("highs", "cbc")
every_backend = pytest.mark.parametrize("backend", BACKENDS)


@settings(derandomize=True, deadline=None, max_examples=20)
@given(programs())
def test_backends_agree_on_linear_programs_and_their_duals_prove_the_objective(given_program: LinearProgram) -> None:
    first, second = (solve_linear_program(given_program, backend=backend) for backend in BACKENDS)
    assert first.status == second.status
    if first.has_values:
        assert first.objective == pytest.approx(second.objective, abs=1e-6)
        for solved in (first, second):
            # a dual with the wrong sign would prove less than the objective
            assert solved.bound == pytest.approx(solved.objective, abs=1e-5)
            assert solved.bound <= best_of_all(given_program) + 1e-6


@every_backend
def test_duals_are_what_one_more_unit_costs(backend: Backend) -> None:
    # min 2a + 3b, a + b >= 4, a <= 3: a = 3, b = 1; one more of the first row costs 3, of the second saves 1
    case = program([2, 3], [[1, 1], [1, 0]], [4, -math.inf], [math.inf, 3], upper=math.inf)
    solved = solve_linear_program(case, backend=backend)
    assert solved.values == pytest.approx([3, 1])
    assert solved.duals == pytest.approx([3, -1])
    assert (solved.objective, solved.bound) == (pytest.approx(9), pytest.approx(9))


@every_backend
def test_infeasible_and_unbounded_programs_are_named(backend: Backend) -> None:
    # x + y >= 9 with x, y <= 4, and max x + y without a limit
    no_way = program([1, 1], [[1, 1]], [9], [math.inf])
    no_end = program([-1, -1], [[1, -1]], [-1], [1], upper=math.inf)
    for case, status in [(no_way, "infeasible"), (no_end, "unbounded")]:
        assert solve_linear_program(case, backend=backend).status == status
        whole = solve_integer_program(case, np.array([True, True]), backend=backend)
        assert (whole.status, whole.has_values, whole.bound) == (status, False, -math.inf)


@every_backend
def test_programs_without_variables_rows_or_terms_have_answers(backend: Backend) -> None:
    nothing = program([], [], [0.0], [1.0])
    assert solve_linear_program(nothing, backend=backend).objective == 0
    assert solve_linear_program(program([], [], [1.0], [1.0]), backend=backend).status == "infeasible"
    free = program([1, -1], [], [], [])
    assert solve_linear_program(free, backend=backend).values == pytest.approx([0, 4])
    assert solve_linear_program(program([1], [[0]], [1], [2]), backend=backend).status == "infeasible"


@pytest.mark.daily("cbc")
@every_backend
def test_a_start_is_kept_when_time_is_short(backend: Backend) -> None:
    case, start = hard_program()
    whole = np.arange(50) < 40
    assert solve_integer_program(case, whole, SearchLimits(0.0), backend=backend).status == "timed out"
    kept = solve_integer_program(case, whole, SearchLimits(0.0), start, backend)
    assert kept.status == "feasible"
    assert kept.values == pytest.approx(start)
    improved = solve_integer_program(case, whole, SearchLimits(0.5), start, backend)
    assert improved.status == "feasible"
    assert improved.bound <= improved.objective <= kept.objective
    assert case.violation(improved.values) <= 1e-5


def test_a_start_that_solves_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"start violates the program by .*give a feasible one"):
        solve_integer_program(program([1], [[1]], [2], [3]), np.array([True]), start=np.array([1.0]))


@every_backend
def test_a_gap_still_gives_a_bound_below_the_optimum(backend: Backend) -> None:
    draw = np.random.default_rng(3)
    case = program(
        draw.integers(100, 999, 12).tolist(), draw.integers(1, 50, (4, 12)).tolist(), [500] * 4, [math.inf] * 4, math.inf
    )
    whole = np.ones(12, dtype=bool)
    exact = solve_integer_program(case, whole, backend=backend)
    rough = solve_integer_program(case, whole, SearchLimits(relative_gap=0.2), backend=backend)
    assert exact.status == "optimal"
    assert rough.bound <= exact.objective * (1 + 1e-9) <= rough.objective * (1 + 1e-6) + 1e-6
    assert rough.objective <= exact.objective * 1.26


def test_without_a_gap_whole_solutions_are_proven_best_by_both_backends() -> None:
    for seed in range(4):
        draw = np.random.default_rng(seed)
        costs, matrix = draw.integers(100, 999, 25).tolist(), draw.integers(1, 90, (6, 25)).tolist()
        case = program(costs, matrix, [2000] * 6, [math.inf] * 6, math.inf)
        first, second = (solve_integer_program(case, np.ones(25, dtype=bool), backend=backend) for backend in BACKENDS)
        assert first.status == second.status == "optimal"
        assert first.objective == second.objective
        assert first.bound == pytest.approx(first.objective, rel=1e-6)


def test_a_wrong_answer_of_a_backend_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that break a row, and fractions in place of integers, must be refused."""
    case = program([1, 1], [[1, 1]], [3], [math.inf])

    def answer(values: list[float]) -> None:
        found = Solution("optimal", "highs", np.array(values), sum(values), 0.0, np.zeros(1))
        monkeypatch.setattr(solve, "solve_with_highs", lambda *_: found)

    answer([1.0, 1.0])
    with pytest.raises(SolverError, match="violate the program by"):
        solve_linear_program(case)
    with pytest.raises(SolverError, match="violate the program by"):
        solve_integer_program(case, np.array([True, True]))
    answer([1.5, 1.5])
    assert solve_linear_program(case).objective == 3
    with pytest.raises(SolverError, match="fractions for integer variables"):
        solve_integer_program(case, np.array([True, True]))


def test_a_machine_without_highs_uses_cbc(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_backends() == ("highs", "cbc")
    case = program([1, 1], [[1, 1]], [3], [math.inf])
    assert solve_linear_program(case).backend == "highs"
    monkeypatch.setattr(solve, "available_backends", lambda: ("cbc",))
    assert solve_linear_program(case).backend == "cbc"
    with pytest.raises(ValueError, match=r"'highs' is not among the installed \('cbc',\); install highspy"):
        solve_linear_program(case, backend="highs")


def test_importing_the_solver_loads_no_solver() -> None:
    code = "import sys, hf_longctx.plan.solver; assert not {'pulp', 'highspy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
