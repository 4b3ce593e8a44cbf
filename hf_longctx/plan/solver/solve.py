"""Solve linear and integer programs: the functions that the planner calls.

HiGHS is used if highspy is installed, else CBC, which comes with pulp; both are imported only when called, and a solution names
its backend. Values that a solver returns are checked against the program, so that a wrong answer is a `SolverError` and never
a wrong plan.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hf_longctx.plan.core.arrays import FloatArray
from hf_longctx.plan.solver.cbc import solve_with_cbc
from hf_longctx.plan.solver.highs import solve_with_highs
from hf_longctx.plan.solver.program import TOLERANCE, LinearProgram, SearchLimits, Solution, SolverError

Backend = Literal["auto", "highs", "cbc"]

_NO_LIMITS = SearchLimits()


def solve_linear_program(
    program: LinearProgram, time_limit_s: float = math.inf, backend: Backend = "auto", presolve: bool = True
) -> Solution:
    """Solve a linear program; the status is optimal, infeasible, unbounded or timed out.

    presolve: let HiGHS first remove redundant rows and columns, which wastes time if there are none. Raises SolverError if the
    solver fails or its answer is wrong.
    """
    solved = _solve(program, None, SearchLimits(time_limit_s, presolve=presolve), None, backend)
    if not solved.has_values:
        return solved
    if solved.status != "optimal":
        return Solution("timed out", solved.backend)
    _check(program, solved)
    bound = min(solved.objective, program.dual_bound(solved.duals))
    return Solution("optimal", solved.backend, solved.values, solved.objective, bound, solved.duals)


def solve_integer_program(
    program: LinearProgram,
    is_integer: NDArray[np.bool_],
    limits: SearchLimits = _NO_LIMITS,
    start: FloatArray | None = None,
    backend: Backend = "auto",
) -> Solution:
    """Find the best solution within `limits` in which the variables marked in `is_integer` are integers.

    start: a feasible solution to begin with, which is returned if nothing better is found; ValueError if it is not feasible.
    Raises SolverError if the solver fails or its answer is wrong.
    """
    if start is not None and program.violation(start) > TOLERANCE:
        raise ValueError(f"the start violates the program by {program.violation(start):.3g}; give a feasible one or none")
    solved = _solve(program, is_integer, limits, start, backend)
    if solved.has_values:
        values = np.where(is_integer, np.round(solved.values), solved.values)
        if np.abs(values - solved.values).max(initial=0.0) > TOLERANCE:
            raise SolverError(f"{solved.backend} returned fractions for integer variables; try another backend")
        objective = float(program.costs @ values)
        bound = min(objective, solved.bound)
        solved = Solution(solved.status, solved.backend, values, objective, bound)
        _check(program, solved)
    if start is not None and solved.status in ("timed out", "feasible"):
        objective = float(program.costs @ start)
        if objective < solved.objective:
            return Solution("feasible", solved.backend, start.copy(), objective, min(objective, solved.bound))
    return solved


def available_backends() -> tuple[str, ...]:
    """Solvers installed on this machine, the preferred one first."""
    names = {"highs": "highspy", "cbc": "pulp"}
    return tuple(name for name, module in names.items() if importlib.util.find_spec(module) is not None)


def _check(program: LinearProgram, solved: Solution) -> None:
    violation = program.violation(solved.values)
    if not violation <= TOLERANCE:
        raise SolverError(
            f"{solved.backend} returned values that violate the program by {violation:.3g}, but only {TOLERANCE:g} is allowed; "
            f"scale the program or try another backend"
        )


def _solve(
    program: LinearProgram,
    is_integer: NDArray[np.bool_] | None,
    limits: SearchLimits,
    start: FloatArray | None,
    backend: Backend,
) -> Solution:
    """Solve with a backend without checking its answer; raises ValueError if the backend is not installed."""
    installed = available_backends()
    chosen = installed[0] if backend == "auto" and installed else backend
    if chosen not in installed:
        raise ValueError(
            f"solver backend {chosen!r} is not among the installed {installed}; install highspy (HiGHS) or pulp (CBC)"
        )
    if not len(program.costs):
        if program.violation(np.empty(0)) > TOLERANCE:
            return Solution("infeasible", chosen)
        return Solution("optimal", chosen, objective=0.0, bound=0.0, duals=np.zeros(len(program.row_lower)))
    if limits.time_limit_s <= 0:
        return Solution("timed out", chosen)
    if chosen == "highs":
        return solve_with_highs(program, is_integer, limits, start)
    return solve_with_cbc(program, is_integer, limits, start)
