"""Linear and integer programs: arrays in, arrays out. The only file that imports a solver, and only when one is called.

HiGHS solves where highspy is installed, CBC (which comes with pulp) elsewhere; a solution says which. Whatever a solver
returns is checked here against the program itself, so that a wrong answer is a `SolverError` and never a wrong plan.
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
from hf_longctx.plan.solver.program import TOLERANCE, LinearProgram, Solution, SolverError

Backend = Literal["auto", "highs", "cbc"]


def solve_linear_program(
    program: LinearProgram, time_limit_s: float = math.inf, backend: Backend = "auto", presolve: bool = True
) -> Solution:
    """The solution of a linear program; optimal, infeasible, unbounded or timed out. Raises SolverError if that is wrong.

    presolve: whether HiGHS first looks for rows and columns that it can do without, which takes time where there are none.
    """
    solved = _solve(program, None, time_limit_s, 0.0, None, -math.inf, backend, 0, presolve)
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
    time_limit_s: float = math.inf,
    relative_gap: float = 0.0,
    start: FloatArray | None = None,
    target: float = -math.inf,
    backend: Backend = "auto",
    most_nodes: int = 0,
) -> Solution:
    """The best solution with whole numbers where `is_integer` that is found in time.

    Ends early within `relative_gap` of the optimum, or (HiGHS) at an objective of at most `target`, or after `most_nodes` nodes
    (0: any number), which unlike time is the same on every machine. start: a solution to begin with. It is kept if nothing
    better is found, but must be feasible: ValueError. Raises SolverError as above.
    """
    if start is not None and program.violation(start) > TOLERANCE:
        raise ValueError(f"the start violates the program by {program.violation(start):.3g}; give a feasible one or none")
    solved = _solve(program, is_integer, time_limit_s, relative_gap, start, target, backend, most_nodes)
    if solved.has_values:
        values = np.where(is_integer, np.round(solved.values), solved.values)
        if np.abs(values - solved.values).max(initial=0.0) > TOLERANCE:
            raise SolverError(f"{solved.backend} returned fractions for whole numbers; try another backend")
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
    """The solvers that this machine has, the preferred one first."""
    names = {"highs": "highspy", "cbc": "pulp"}
    return tuple(name for name, module in names.items() if importlib.util.find_spec(module) is not None)


def _check(program: LinearProgram, solved: Solution) -> None:
    violation = program.violation(solved.values)
    if not violation <= TOLERANCE:
        raise SolverError(
            f"{solved.backend} returned values that violate the program by {violation:.3g} ({TOLERANCE:g} is allowed); scale "
            f"the program or try another backend"
        )


def _solve(
    program: LinearProgram,
    is_integer: NDArray[np.bool_] | None,
    time_limit_s: float,
    relative_gap: float,
    start: FloatArray | None,
    target: float,
    backend: Backend,
    most_nodes: int,
    presolve: bool = True,
) -> Solution:
    """Hands the program to a backend, unverified. Raises ValueError for a backend that is not there."""
    have = available_backends()
    chosen = have[0] if backend == "auto" and have else backend
    if chosen not in have:
        raise ValueError(f"solver backend {chosen!r} is not among the installed {have}; install highspy (HiGHS) or pulp (CBC)")
    if not len(program.costs):
        if program.violation(np.empty(0)) > TOLERANCE:
            return Solution("infeasible", chosen)
        return Solution("optimal", chosen, objective=0.0, bound=0.0, duals=np.zeros(len(program.row_lower)))
    if time_limit_s <= 0:
        return Solution("timed out", chosen)
    if chosen == "highs":
        return solve_with_highs(program, is_integer, time_limit_s, relative_gap, start, target, most_nodes, presolve)
    return solve_with_cbc(program, is_integer, time_limit_s, relative_gap, start, most_nodes)
