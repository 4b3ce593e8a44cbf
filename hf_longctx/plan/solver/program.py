"""Types of the solver: linear and integer programs as numpy arrays, limits of a search, and solutions.

The planner builds `LinearProgram`s, `solve.py` hands them to a backend and checks the `Solution` against them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hf_longctx.plan.core.arrays import FloatArray

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
    """When a solver may stop before it has proved an optimum.

    relative_gap: stop within this fraction of the optimum. target: stop at an objective of at most this (HiGHS only).
    most_nodes: stop after this many nodes (0: no limit); unlike a time limit it gives the same result on every machine.
    presolve: let HiGHS first remove redundant rows and columns, which wastes time if there are none.
    """

    time_limit_s: float = math.inf
    relative_gap: float = 0.0
    target: float = -math.inf
    most_nodes: int = 0
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
