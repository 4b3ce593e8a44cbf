"""Linear and integer programs as arrays, and their solutions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hf_longctx.plan.core.arrays import FloatArray

IndexArray = NDArray[np.int64]


# "feasible": a limit ended the search before the proof. "timed out": no solution was found in time
Status = Literal["optimal", "feasible", "infeasible", "unbounded", "timed out"]


# how far a row or a bound may be off, relative to the size of its terms; solvers work to 1e-6 and 1e-7
TOLERANCE = 1e-5


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


def _sums(places: IndexArray, amounts: FloatArray, count: int) -> FloatArray:
    """What falls on each of `count` places."""
    return np.bincount(places, weights=amounts, minlength=count).astype(np.float64)


def _at_the_cheap_side(prices: FloatArray, upper: FloatArray, lower: FloatArray) -> float:
    """The least of prices @ x over a box; a price of zero takes any side, infinite or not."""
    chosen = prices != 0
    sides = np.where(prices > 0, lower, upper)
    return float((prices[chosen] * sides[chosen]).sum())
