"""Linear and integer programs: arrays in, arrays out. The only file that imports a solver, and only when one is called.

HiGHS solves where highspy is installed, CBC (which comes with pulp) elsewhere; a solution says which. Whatever a solver
returns is checked here against the program itself, so that a wrong answer is a `SolverError` and never a wrong plan.
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

from hf_longctx.plan.cost.cost_model import FloatArray

IndexArray = NDArray[np.int64]
Backend = Literal["auto", "highs", "cbc"]
# "feasible": a limit ended the search before the proof. "timed out": no solution was found in time
Status = Literal["optimal", "feasible", "infeasible", "unbounded", "timed out"]

# how far a row or a bound may be off, relative to the size of its terms; solvers work to 1e-6 and 1e-7
_TOLERANCE = 1e-5
_CBC_BOUND = re.compile(r"^(?:Lower bound|Best possible):?\s+([-+.\deE]+)", re.MULTILINE)


class SolverError(RuntimeError):
    """A solver failed or returned what does not solve the program."""


@dataclass(frozen=True, slots=True, eq=False)
class LinearProgram:
    """Minimize costs @ x so that row_lower <= A @ x <= row_upper and lower <= x <= upper.

    A has values[e] at (rows[e], columns[e]) and zeros elsewhere; no place may be named twice. Bounds may be infinite.
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
        """A program of non-negative variables with A as a full matrix."""
        rows, columns = np.nonzero(matrix)
        upper = np.full(len(costs), np.inf) if upper is None else upper
        return cls(costs, np.zeros(len(costs)), upper, rows, columns, matrix[rows, columns], row_lower, row_upper)

    def activity(self, values: FloatArray) -> FloatArray:
        """A @ values."""
        return _sums(self.rows, self.values * values[self.columns], len(self.row_lower))

    def violation(self, values: FloatArray) -> float:
        """The worst violation of a row or a bound, relative to the size of its terms where these exceed one."""
        activity = self.activity(values)
        size = np.maximum(1.0, _sums(self.rows, np.abs(self.values * values[self.columns]), len(activity)))
        row = np.maximum(self.row_lower - activity, activity - self.row_upper) / size
        column = np.maximum(self.lower - values, values - self.upper) / np.maximum(1.0, np.abs(values))
        return float(max(row.max(initial=0.0), column.max(initial=0.0)))

    def dual_bound(self, duals: FloatArray) -> float:
        """The bound on the objective that row duals of any kind prove (weak duality); -inf where they prove none.

        Reduced costs of the wrong sign within solvers' tolerance count as zero.
        """
        duals = np.where(duals > 0, np.where(np.isfinite(self.row_lower), duals, 0.0), duals)
        duals = np.where(duals < 0, np.where(np.isfinite(self.row_upper), duals, 0.0), duals)
        reduced = self.costs - _sums(self.columns, self.values * duals[self.rows], len(self.costs))
        reduced = np.where(np.abs(reduced) <= 1e-7 * np.maximum(1.0, np.abs(self.costs)), 0.0, reduced)
        return _at_the_cheap_side(duals, self.row_upper, self.row_lower) + _at_the_cheap_side(reduced, self.upper, self.lower)


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """What a solver found: `values` solve the program where status is "optimal" or "feasible" and are empty elsewhere.

    bound: no solution costs less. duals: of the rows of a linear program, what one more unit of a row would cost.
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
    if start is not None and program.violation(start) > _TOLERANCE:
        raise ValueError(f"the start violates the program by {program.violation(start):.3g}; give a feasible one or none")
    solved = _solve(program, is_integer, time_limit_s, relative_gap, start, target, backend, most_nodes)
    if solved.has_values:
        values = np.where(is_integer, np.round(solved.values), solved.values)
        if np.abs(values - solved.values).max(initial=0.0) > _TOLERANCE:
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


def _sums(places: IndexArray, amounts: FloatArray, count: int) -> FloatArray:
    """What falls on each of `count` places."""
    return np.bincount(places, weights=amounts, minlength=count).astype(np.float64)


def _at_the_cheap_side(prices: FloatArray, upper: FloatArray, lower: FloatArray) -> float:
    """The least of prices @ x over a box; a price of zero takes any side, infinite or not."""
    chosen = prices != 0
    sides = np.where(prices > 0, lower, upper)
    return float((prices[chosen] * sides[chosen]).sum())


def _check(program: LinearProgram, solved: Solution) -> None:
    violation = program.violation(solved.values)
    if not violation <= _TOLERANCE:
        raise SolverError(
            f"{solved.backend} returned values that violate the program by {violation:.3g} ({_TOLERANCE:g} is allowed); scale "
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
        if program.violation(np.empty(0)) > _TOLERANCE:
            return Solution("infeasible", chosen)
        return Solution("optimal", chosen, objective=0.0, bound=0.0, duals=np.zeros(len(program.row_lower)))
    if time_limit_s <= 0:
        return Solution("timed out", chosen)
    if chosen == "highs":
        return _solve_with_highs(program, is_integer, time_limit_s, relative_gap, start, target, most_nodes, presolve)
    return _solve_with_cbc(program, is_integer, time_limit_s, relative_gap, start, most_nodes)


def _highspy() -> Any:
    import highspy

    return highspy


def _pulp() -> Any:
    import pulp

    return pulp


def _solve_with_highs(
    program: LinearProgram,
    is_integer: NDArray[np.bool_] | None,
    time_limit_s: float,
    relative_gap: float,
    start: FloatArray | None,
    target: float,
    most_nodes: int,
    presolve: bool,
) -> Solution:
    highspy = _highspy()
    highs = highspy.Highs()
    options: dict[str, Any] = {"output_flag": False, "threads": 1, "mip_rel_gap": relative_gap, "mip_abs_gap": 1e-9}
    if math.isfinite(time_limit_s):
        options["time_limit"] = float(time_limit_s)
    if math.isfinite(target):
        options["objective_target"] = float(target)
    if most_nodes:
        options["mip_max_nodes"] = most_nodes
    if not presolve:
        options["presolve"] = "off"
    for name, value in options.items():
        if highs.setOptionValue(name, value) != highspy.HighsStatus.kOk:
            raise SolverError(f"this HiGHS refuses the option {name}={value}; install highspy 1.9 or later, or use CBC")
    if highs.passModel(_highs_model(highspy, program, is_integer)) == highspy.HighsStatus.kError:
        raise SolverError("HiGHS refuses the program; are all its costs and values finite?")
    if start is not None:
        guess = highspy.HighsSolution()
        guess.col_value = start.tolist()
        highs.setSolution(guess)
    highs.run()
    return _highs_solution(highspy, highs, program, is_integer)


def _highs_model(highspy: Any, program: LinearProgram, is_integer: NDArray[np.bool_] | None) -> Any:
    """The program row by row, as HiGHS takes it."""
    order = np.lexsort((program.columns, program.rows))
    counts = np.bincount(program.rows, minlength=len(program.row_lower))
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(program.costs), len(program.row_lower)
    model.col_cost_, model.col_lower_, model.col_upper_ = program.costs, program.lower, program.upper
    model.row_lower_, model.row_upper_ = program.row_lower, program.row_upper
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    model.a_matrix_.index_ = program.columns[order].astype(np.int32)
    model.a_matrix_.value_ = program.values[order].astype(np.float64)
    if is_integer is not None:
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        model.integrality_ = [kinds[int(whole)] for whole in is_integer]
    return model


def _highs_solution(highspy: Any, highs: Any, program: LinearProgram, is_integer: NDArray[np.bool_] | None) -> Solution:
    status, kinds, info = highs.getModelStatus(), highspy.HighsModelStatus, highs.getInfo()
    if status == kinds.kInfeasible:
        return Solution("infeasible", "highs")
    if status in (kinds.kUnbounded, kinds.kUnboundedOrInfeasible):
        # presolve tells these apart no further; without costs nothing is unbounded
        highs.changeColsCost(len(program.costs), np.arange(len(program.costs), dtype=np.int32), np.zeros(len(program.costs)))
        highs.run()
        return Solution("infeasible" if highs.getModelStatus() == kinds.kInfeasible else "unbounded", "highs")
    ended = (kinds.kTimeLimit, kinds.kIterationLimit, kinds.kSolutionLimit, kinds.kObjectiveTarget, kinds.kInterrupt)
    if status not in (kinds.kOptimal, *ended):
        raise SolverError(f"HiGHS ended with {highs.modelStatusToString(status)!r}; scale the program or use CBC")
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


def _solve_with_cbc(
    program: LinearProgram,
    is_integer: NDArray[np.bool_] | None,
    time_limit_s: float,
    relative_gap: float,
    start: FloatArray | None,
    most_nodes: int,
) -> Solution:
    pulp = _pulp()
    problem, variables = _pulp_problem(pulp, program, is_integer)
    if start is not None:
        for variable, value in zip(variables, start.tolist(), strict=True):
            variable.setInitialValue(value, check=False)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "cbc.log")
        solver = pulp.PULP_CBC_CMD(
            msg=False,
            timeLimit=time_limit_s if math.isfinite(time_limit_s) else None,
            gapRel=relative_gap or None,
            maxNodes=most_nodes or None,
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
    """The program as pulp takes it: rows r<i>l and r<i>u for its two sides, one of both where they are equal."""
    whole = [False] * len(program.costs) if is_integer is None else is_integer.tolist()
    bounds = zip(program.lower.tolist(), program.upper.tolist(), whole, strict=True)
    variables = [
        pulp.LpVariable(f"x{j}", _finite(low), _finite(high), "Integer" if kind else "Continuous")
        for j, (low, high, kind) in enumerate(bounds)
    ]
    problem = pulp.LpProblem("program", pulp.LpMinimize)
    problem += pulp.LpAffineExpression(zip(variables, program.costs.tolist(), strict=True))
    terms: list[list[tuple[Any, float]]] = [[] for _ in program.row_lower]
    for i, j, value in zip(program.rows.tolist(), program.columns.tolist(), program.values.tolist(), strict=True):
        terms[i].append((variables[j], value))
    for i, (low, high) in enumerate(zip(program.row_lower.tolist(), program.row_upper.tolist(), strict=True)):
        # a row without terms: a variable of weight zero keeps it in the file, so that it can be infeasible
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
        # CBC calls an unbounded program infeasible when its presolve or its dual simplex finds out
        return _told_apart(program, is_integer)
    if problem.sol_status == pulp.LpSolutionUnbounded:
        return Solution("unbounded", "cbc")
    found = [variable.value() for variable in variables]
    stated = _CBC_BOUND.search(log)
    bound = float(stated.group(1)) if stated else -math.inf
    # a variable in no row is missing from the answer: it takes its cheap side, which pulp leaves to its bounds
    values = np.array([_unused_value(program, j) if value is None else value for j, value in enumerate(found)])
    if problem.sol_status == pulp.LpSolutionOptimal:
        objective = float(program.costs @ values)
        duals = _row_duals(problem, len(program.row_lower)) if is_integer is None else np.empty(0)
        return Solution("optimal", "cbc", values, objective, bound if stated else objective, duals)
    if problem.sol_status == pulp.LpSolutionIntegerFeasible and program.violation(values) <= _TOLERANCE:
        return Solution("feasible", "cbc", values, float(program.costs @ values), bound)
    return Solution("timed out", "cbc", bound=bound)


def _told_apart(program: LinearProgram, is_integer: NDArray[np.bool_] | None) -> Solution:
    if not program.costs.any():
        return Solution("infeasible", "cbc")
    without_costs = _solve_with_cbc(replace(program, costs=np.zeros(len(program.costs))), is_integer, math.inf, 0.0, None, 0)
    return Solution("unbounded" if without_costs.has_values else "infeasible", "cbc")


def _unused_value(program: LinearProgram, column: int) -> float:
    low, high, cost = float(program.lower[column]), float(program.upper[column]), float(program.costs[column])
    sides: Iterable[float] = (high, low) if cost < 0 else (low, high)
    return next((side for side in sides if math.isfinite(side)), 0.0)


def _row_duals(problem: Any, num_rows: int) -> FloatArray:
    """The duals of both sides of every row together; pulp gives them as what one more unit costs."""
    duals = np.zeros(num_rows)
    for name, constraint in problem.constraints.items():
        duals[int(name[1:-1])] += constraint.pi or 0.0
    return duals
