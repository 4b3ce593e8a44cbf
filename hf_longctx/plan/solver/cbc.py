"""Solve linear and integer programs with CBC, which comes with PuLP, if HiGHS is not installed; called by `solve.py` only."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_longctx.plan.core.arrays import FloatArray
from hf_longctx.plan.solver.program import TOLERANCE, LinearProgram, SearchLimits, Solution, SolverError

_CBC_BOUND = re.compile(r"^(?:Lower bound|Best possible):?\s+([-+.\deE]+)", re.MULTILINE)


def _pulp() -> Any:
    import pulp

    return pulp


def solve_with_cbc(
    program: LinearProgram, is_integer: NDArray[np.bool_] | None, limits: SearchLimits, start: FloatArray | None
) -> Solution:
    """The solution that CBC returns, unchecked. is_integer: None for a linear program. start: a feasible solution, or None."""
    pulp = _pulp()
    problem, variables = _pulp_problem(pulp, program, is_integer)
    if start is not None:
        for variable, value in zip(variables, start.tolist(), strict=True):
            variable.setInitialValue(value, check=False)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "cbc.log")
        solver = pulp.PULP_CBC_CMD(
            msg=False,
            timeLimit=limits.time_limit_s if math.isfinite(limits.time_limit_s) else None,
            gapRel=limits.relative_gap or None,
            maxNodes=limits.most_nodes or None,
            threads=1,
            logPath=str(log),
            warmStart=start is not None,
        )
        try:
            problem.solve(solver)
        except pulp.PulpSolverError as error:
            raise SolverError(f"CBC failed: {error}; install highspy") from error
        text = log.read_text(errors="replace") if log.exists() else ""
    return _cbc_solution(pulp, problem, variables, program, is_integer, text)


def _pulp_problem(pulp: Any, program: LinearProgram, is_integer: NDArray[np.bool_] | None) -> tuple[Any, list[Any]]:
    """The program and its variables in PuLP; row i becomes r<i>l and r<i>u for its two bounds, or r<i>l if they are equal."""
    integers = [False] * len(program.costs) if is_integer is None else is_integer.tolist()
    bounds = zip(program.lower.tolist(), program.upper.tolist(), integers, strict=True)
    variables = [
        pulp.LpVariable(f"x{j}", _finite(low), _finite(high), "Integer" if is_whole else "Continuous")
        for j, (low, high, is_whole) in enumerate(bounds)
    ]
    problem = pulp.LpProblem("program", pulp.LpMinimize)
    problem += pulp.LpAffineExpression(zip(variables, program.costs.tolist(), strict=True))
    terms: list[list[tuple[Any, float]]] = [[] for _ in program.row_lower]
    for i, j, value in zip(program.rows.tolist(), program.columns.tolist(), program.values.tolist(), strict=True):
        terms[i].append((variables[j], value))
    for i, (low, high) in enumerate(zip(program.row_lower.tolist(), program.row_upper.tolist(), strict=True)):
        # a row without terms may still be infeasible; a variable of weight zero keeps it in the file for CBC
        row = pulp.LpAffineExpression(terms[i] or [(variables[0], 0.0)])
        if low == high:
            problem += row == low, f"r{i}l"
            continue
        if math.isfinite(low):
            problem += row >= low, f"r{i}l"
        if math.isfinite(high):
            problem += row <= high, f"r{i}u"
    return problem, variables


def _finite(bound: float) -> float | None:
    return bound if math.isfinite(bound) else None


def _cbc_solution(
    pulp: Any,
    problem: Any,
    variables: list[Any],
    program: LinearProgram,
    is_integer: NDArray[np.bool_] | None,
    log: str,
) -> Solution:
    if problem.sol_status == pulp.LpSolutionInfeasible:
        # CBC also reports "infeasible" if its presolve or dual simplex finds the program unbounded
        return _infeasible_or_unbounded(program, is_integer)
    if problem.sol_status == pulp.LpSolutionUnbounded:
        return Solution("unbounded", "cbc")
    found = [variable.value() for variable in variables]
    stated = _CBC_BOUND.search(log)
    bound = float(stated.group(1)) if stated else -math.inf
    # CBC's answer has no value for variables in no row; they take the cheaper of their bounds
    values = np.array([_unused_value(program, j) if value is None else value for j, value in enumerate(found)])
    if problem.sol_status == pulp.LpSolutionOptimal:
        objective = float(program.costs @ values)
        duals = _row_duals(problem, len(program.row_lower)) if is_integer is None else np.empty(0)
        return Solution("optimal", "cbc", values, objective, bound if stated else objective, duals)
    if problem.sol_status == pulp.LpSolutionIntegerFeasible and program.violation(values) <= TOLERANCE:
        return Solution("feasible", "cbc", values, float(program.costs @ values), bound)
    return Solution("timed out", "cbc", bound=bound)


def _infeasible_or_unbounded(program: LinearProgram, is_integer: NDArray[np.bool_] | None) -> Solution:
    """Decide between the two by solving without costs: if that has a solution, the program is unbounded."""
    if not program.costs.any():
        return Solution("infeasible", "cbc")
    without_costs = solve_with_cbc(replace(program, costs=np.zeros(len(program.costs))), is_integer, SearchLimits(), None)
    return Solution("unbounded" if without_costs.has_values else "infeasible", "cbc")


def _unused_value(program: LinearProgram, column: int) -> float:
    low, high, cost = float(program.lower[column]), float(program.upper[column]), float(program.costs[column])
    sides: Iterable[float] = (high, low) if cost < 0 else (low, high)
    return next((side for side in sides if math.isfinite(side)), 0.0)


def _row_duals(problem: Any, num_rows: int) -> FloatArray:
    """Dual of every row, summed over its two bounds; PuLP gives it as the cost of one more unit in the row."""
    duals = np.zeros(num_rows)
    for name, constraint in problem.constraints.items():
        duals[int(name[1:-1])] += constraint.pi or 0.0
    return duals
