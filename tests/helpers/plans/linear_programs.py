"""Small programs for solvers: by hand, at random with all their whole points, and one that no solver proves in a second."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import strategies as st

from hf_longctx.plan.solver import Backend, LinearProgram, solve_integer_program

small = st.integers(-5, 9)


def program(
    costs: list[float], matrix: list[list[float]], low: list[float], high: list[float], upper: float = 4
) -> LinearProgram:
    """A program with variables in [0, upper]."""
    return LinearProgram.dense(
        np.array(costs, dtype=float),
        np.array(matrix, dtype=float).reshape(len(low), len(costs)),
        np.array(low, dtype=float),
        np.array(high, dtype=float),
        np.full(len(costs), float(upper)),
    )


@st.composite
def programs(draw: st.DrawFn) -> LinearProgram:
    """Programs with two or three variables in [0, 4] and up to three rows of random kinds."""
    count, num_rows = draw(st.integers(2, 3)), draw(st.integers(1, 3))
    matrix = [[float(draw(small)) for _ in range(count)] for _ in range(num_rows)]
    low = [draw(st.one_of(st.just(-math.inf), st.integers(-9, 12).map(float))) for _ in range(num_rows)]
    high = [draw(st.one_of(st.just(math.inf), st.integers(0, 9).map(lambda more, lo=lo: max(lo, -9.0) + more))) for lo in low]
    return program([float(draw(small)) for _ in range(count)], matrix, low, high)


def best_of_all(given_program: LinearProgram) -> float:
    """Least objective over all integer points of the box; infinite if none is feasible."""
    points = itertools.product(range(5), repeat=len(given_program.costs))
    matrix = np.zeros((len(given_program.row_lower), len(given_program.costs)))
    matrix[given_program.rows, given_program.columns] = given_program.values
    found = math.inf
    for point in points:
        activity = matrix @ np.array(point)
        if (activity >= given_program.row_lower).all() and (activity <= given_program.row_upper).all():
            found = min(found, float(given_program.costs @ np.array(point)))
    return found


def hard_program(seed: int = 0) -> tuple[LinearProgram, np.ndarray]:
    """A market split problem, which no solver proves within a second, and a solution of it (x = 0 with full slacks)."""
    draw = np.random.default_rng(seed)
    matrix = draw.integers(0, 100, (5, 40)).astype(float)
    slack = np.concatenate([np.eye(5), -np.eye(5)], axis=1)
    share = np.floor(matrix.sum(axis=1) / 2)
    case = program([0.0] * 40 + [1.0] * 10, np.hstack([matrix, slack]).tolist(), share.tolist(), share.tolist(), math.inf)
    case.upper[:40] = 1
    return case, np.concatenate([np.zeros(40), share, np.zeros(5)])


def check_against_brute_force(given_program: LinearProgram, backend: Backend) -> None:
    solved = solve_integer_program(given_program, np.ones(len(given_program.costs), dtype=bool), backend=backend)
    best = best_of_all(given_program)
    assert solved.backend == backend
    if math.isinf(best):
        assert solved.status == "infeasible"
        assert not solved.has_values and solved.objective == math.inf
        return
    assert solved.status == "optimal"
    assert solved.objective == pytest.approx(best, abs=1e-6)
    assert solved.bound == pytest.approx(best, abs=1e-4)
    assert (solved.values == np.round(solved.values)).all()
