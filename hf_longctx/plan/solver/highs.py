"""Programs solved by HiGHS."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_longctx.plan.core.arrays import FloatArray
from hf_longctx.plan.solver.program import LinearProgram, Solution, SolverError


def _highspy() -> Any:
    import highspy

    return highspy


def solve_with_highs(
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
