"""Solves linear and integer programs: states them as numpy arrays, hands them to HiGHS or CBC, and checks the answers.

HiGHS runs if highspy is installed, otherwise CBC, which comes with PuLP. Both are imported only when a program is solved, and a
`Solution` names its backend. Returned values are checked against the program, so a wrong answer is a `SolverError` and never a
wrong plan.
"""

from __future__ import annotations

import importlib.util
import math
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hf_longctx.plan.core.types import FloatArray

IndexArray = NDArray[np.int64]

# "feasible": a limit ended the search before optimality was proved. "timed out": no solution was found in time
Status = Literal["optimal", "feasible", "infeasible", "unbounded", "timed out"]

# largest allowed violation of a row or bound, relative to the size of its terms; solvers work to 1e-6 and 1e-7
TOLERANCE = 1e-5


class SolverError(RuntimeError):
    """A solver failed, or returned values that do not solve the program."""


@dataclass(frozen=True, slots=True, eq=False)
class LinearProgram:
    """Minimize costs @ x so that row_lower <= A @ x <= row_upper and lower <= x <= upper.

    A is sparse: values[e] at (rows[e], columns[e]), each entry at most once, and zeros elsewhere. Bounds may be infinite.
    """

    costs: FloatArray
    lower: FloatArray
    upper: FloatArray
    rows: IndexArray
    columns: IndexArray
    values: FloatArray
    row_lower: FloatArray
    row_upper: FloatArray

    @classmethod
    def dense(
        cls, costs: FloatArray, matrix: FloatArray, row_lower: FloatArray, row_upper: FloatArray, upper: FloatArray | None = None
    ) -> LinearProgram:
        """A program with non-negative variables, from A as a full matrix."""
        rows, columns = np.nonzero(matrix)
        upper = np.full(len(costs), np.inf) if upper is None else upper
        return cls(costs, np.zeros(len(costs)), upper, rows, columns, matrix[rows, columns], row_lower, row_upper)

    def activity(self, values: FloatArray) -> FloatArray:
        """A @ values, the activity of every row."""
        return _sums(self.rows, self.values * values[self.columns], len(self.row_lower))

    def violation(self, values: FloatArray) -> float:
        """The largest violation of a row or bound, relative to the size of its terms if that exceeds one."""
        activity = self.activity(values)
        size = np.maximum(1.0, _sums(self.rows, np.abs(self.values * values[self.columns]), len(activity)))
        row = np.maximum(self.row_lower - activity, activity - self.row_upper) / size
        column = np.maximum(self.lower - values, values - self.upper) / np.maximum(1.0, np.abs(values))
        return float(max(row.max(initial=0.0), column.max(initial=0.0)))

    def dual_bound(self, duals: FloatArray) -> float:
        """Lower bound on the objective that any row duals prove (weak duality); -inf if they prove none.

        Reduced costs within the solvers' tolerance of zero count as zero.
        """
        duals = np.where(duals > 0, np.where(np.isfinite(self.row_lower), duals, 0.0), duals)
        duals = np.where(duals < 0, np.where(np.isfinite(self.row_upper), duals, 0.0), duals)
        reduced = self.costs - _sums(self.columns, self.values * duals[self.rows], len(self.costs))
        reduced = np.where(np.abs(reduced) <= 1e-7 * np.maximum(1.0, np.abs(self.costs)), 0.0, reduced)
        return _at_the_cheap_side(duals, self.row_upper, self.row_lower) + _at_the_cheap_side(reduced, self.upper, self.lower)


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """Limits at which a solver may stop before it has proved an optimum."""

    time_limit_s: float = math.inf
    # stop within this fraction of the optimum
    relative_gap: float = 0.0
    # stop at an objective of at most this (HiGHS only)
    target: float = -math.inf
    # stop after this many nodes (0: no limit); unlike a time limit it gives the same result on every machine
    most_nodes: int = 0
    # let HiGHS first remove redundant rows and columns, which wastes time if there are none
    presolve: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """Result of a solver; `values` solve the program if status is "optimal" or "feasible", and are empty otherwise.

    bound: no solution has a lower objective. duals: for each row of a linear program, the cost of one more unit in it.
    """

    status: Status
    backend: str
    values: FloatArray = field(default_factory=lambda: np.empty(0))
    objective: float = math.inf
    bound: float = -math.inf
    duals: FloatArray = field(default_factory=lambda: np.empty(0))

    @property
    def has_values(self) -> bool:
        return self.status in ("optimal", "feasible")


def _sums(indices: IndexArray, amounts: FloatArray, count: int) -> FloatArray:
    """Sum of the amounts at each index below `count`."""
    return np.bincount(indices, weights=amounts, minlength=count).astype(np.float64)


def _at_the_cheap_side(prices: FloatArray, upper: FloatArray, lower: FloatArray) -> float:
    """The minimum of prices @ x over a box; variables with price zero do not count, even if their bounds are infinite."""
    chosen = prices != 0
    sides = np.where(prices > 0, lower, upper)
    return float((prices[chosen] * sides[chosen]).sum())


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


def _highspy() -> Any:
    import highspy

    return highspy


def solve_with_highs(
    program: LinearProgram, is_integer: NDArray[np.bool_] | None, limits: SearchLimits, start: FloatArray | None
) -> Solution:
    """The solution that HiGHS returns, unchecked. is_integer: None for a linear program. start: a feasible solution, or None."""
    highspy = _highspy()
    highs = highspy.Highs()
    options: dict[str, Any] = {"output_flag": False, "threads": 1, "mip_rel_gap": limits.relative_gap, "mip_abs_gap": 1e-9}
    if math.isfinite(limits.time_limit_s):
        options["time_limit"] = float(limits.time_limit_s)
    if math.isfinite(limits.target):
        options["objective_target"] = float(limits.target)
    if limits.most_nodes:
        options["mip_max_nodes"] = limits.most_nodes
    if not limits.presolve:
        options["presolve"] = "off"
    for name, value in options.items():
        if highs.setOptionValue(name, value) != highspy.HighsStatus.kOk:
            raise SolverError(f"this HiGHS rejects the option {name}={value}; install highspy 1.9 or later, or use CBC")
    if _pass_model(highspy, highs, program, is_integer) == highspy.HighsStatus.kError:
        raise SolverError("HiGHS rejects the program; check that all its costs and values are finite")
    if start is not None:
        guess = highspy.HighsSolution()
        guess.col_value = start.tolist()
        highs.setSolution(guess)
    highs.run()
    return _highs_solution(highspy, highs, program, is_integer)


def _pass_model(highspy: Any, highs: Any, program: LinearProgram, is_integer: NDArray[np.bool_] | None) -> Any:
    """Gives HiGHS the program, row by row, as arrays, which it copies faster than fields of a model."""
    order = np.lexsort((program.columns, program.rows))
    starts = np.searchsorted(program.rows[order], np.arange(len(program.row_lower)))
    whole = np.zeros(len(program.costs), dtype=np.int32) if is_integer is None else is_integer.astype(np.int32)
    return highs.passModel(
        len(program.costs),
        len(program.row_lower),
        len(program.values),
        int(highspy.MatrixFormat.kRowwise),
        int(highspy.ObjSense.kMinimize),
        0.0,
        program.costs.astype(np.float64),
        program.lower.astype(np.float64),
        program.upper.astype(np.float64),
        program.row_lower.astype(np.float64),
        program.row_upper.astype(np.float64),
        starts.astype(np.int32),
        program.columns[order].astype(np.int32),
        program.values[order].astype(np.float64),
        whole,
    )


def _highs_solution(highspy: Any, highs: Any, program: LinearProgram, is_integer: NDArray[np.bool_] | None) -> Solution:
    status, kinds, info = highs.getModelStatus(), highspy.HighsModelStatus, highs.getInfo()
    if status == kinds.kInfeasible:
        return Solution("infeasible", "highs")
    if status in (kinds.kUnbounded, kinds.kUnboundedOrInfeasible):
        # presolve may not tell the two apart; without costs a program cannot be unbounded, so solve it again without
        highs.changeColsCost(len(program.costs), np.arange(len(program.costs), dtype=np.int32), np.zeros(len(program.costs)))
        highs.run()
        return Solution("infeasible" if highs.getModelStatus() == kinds.kInfeasible else "unbounded", "highs")
    ended = (kinds.kTimeLimit, kinds.kIterationLimit, kinds.kSolutionLimit, kinds.kObjectiveTarget, kinds.kInterrupt)
    if status not in (kinds.kOptimal, *ended):
        raise SolverError(f"HiGHS ended with status {highs.modelStatusToString(status)!r}; scale the program or use CBC")
    bound = float(info.mip_dual_bound) if is_integer is not None else -math.inf
    if math.isnan(bound):
        bound = -math.inf
    if info.primal_solution_status != int(highspy.SolutionStatus.kSolutionStatusFeasible):
        return Solution("timed out", "highs", bound=bound)
    found = highs.getSolution()
    return Solution(
        "optimal" if status == kinds.kOptimal else "feasible",
        "highs",
        np.array(found.col_value, dtype=np.float64),
        float(info.objective_function_value),
        bound,
        np.array(found.row_dual if is_integer is None else [], dtype=np.float64),
    )


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
