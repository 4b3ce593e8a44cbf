"""Solve linear and integer programs with HiGHS (package highspy), the preferred backend; called by `solve.py` only."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_longctx.plan.core.arrays import FloatArray
from hf_longctx.plan.solver.program import LinearProgram, SearchLimits, Solution, SolverError


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
