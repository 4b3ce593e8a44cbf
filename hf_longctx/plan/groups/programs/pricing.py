"""Configurations, the sets of sequences that one group can run within a given time, and the search for those worth most.

This pricing step of the configuration LP is a knapsack with two constraints, time and tokens. Usually it is enough to fill groups
greedily in several orders, or to run a dynamic program over one weighted sum (mixture) of both constraints. The integer program
decides only if these leave a doubt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_longctx.plan.core.arrays import FloatArray
from hf_longctx.plan.groups.problem import GroupingProblem
from hf_longctx.plan.groups.programs.length_classes import LengthClasses
from hf_longctx.plan.solver.program import LinearProgram, SearchLimits
from hf_longctx.plan.solver.solve import solve_integer_program


@dataclass(frozen=True, slots=True)
class _PricingSearch:
    """Constants of the search; repeat the table problems of `recipes/bench/cpu/planner.py` when one changes.

    num_mixtures: mixtures of time and tokens that bound the worth, evenly spaced from tokens alone to time alone. cells:
    cells into which the dynamic program divides the mixed constraint. most_trials: mixtures that `on_grid` tries. most_fillings:
    further fillings that one dynamic program returns. gap: relative gap at which the integer program stops.
    """

    num_mixtures: int = 9
    cells: int = 20_000
    most_trials: int = 4
    most_fillings: int = 30
    gap: float = 1e-3


_PRICING = _PricingSearch()
# weights of time in the mixtures; 0 is tokens alone, 1 is time alone
_MIXTURES = np.linspace(0.0, 1.0, _PRICING.num_mixtures)
# relative tolerance of a constraint, for sums that fill it exactly
_SLACK = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class Configurations:
    """Groups that can be run: degree index, number of sequences of each class, and seconds including the fixed cost."""

    kinds: NDArray[np.int64]
    contents: FloatArray
    seconds: FloatArray

    @classmethod
    def none(cls, num_classes: int) -> Configurations:
        return cls(np.empty(0, dtype=np.int64), np.empty((0, num_classes)), np.empty(0))

    def __len__(self) -> int:
        return len(self.kinds)

    def joined(self, more: Configurations) -> Configurations:
        """Configurations of both, without duplicates."""
        kinds = np.concatenate([self.kinds, more.kinds])
        contents = np.concatenate([self.contents, more.contents])
        _, first = np.unique(np.column_stack([kinds, contents]), axis=0, return_index=True)
        first.sort()
        return Configurations(kinds[first], contents[first], np.concatenate([self.seconds, more.seconds])[first])

    def chosen(self, which: NDArray[np.bool_]) -> Configurations:
        return Configurations(self.kinds[which], self.contents[which], self.seconds[which])


@dataclass(frozen=True, slots=True, eq=False)
class Pricing:
    """The knapsacks of all K degrees for one T.

    time_share, token_share: shares of a group's time and tokens that one sequence of each of n classes takes (K x n). most: most
    sequences of each class in a group (K x n).
    """

    classes: LengthClasses
    degrees: FloatArray
    fixed_s: FloatArray
    time_share: FloatArray
    token_share: FloatArray
    most: FloatArray

    @classmethod
    def at(cls, problem: GroupingProblem, classes: LengthClasses, limit_s: float) -> Pricing:
        degrees, fixed_s = np.array(problem.degrees, dtype=np.float64), np.array(problem.group_s)
        room_s = limit_s - fixed_s
        # a small tolerance, so that groups that end exactly at the limit are in time
        room_s = np.where(room_s > 0, room_s * (1 + _SLACK), np.nan)
        time_share = np.where(np.isnan(room_s)[:, None], np.inf, classes.seconds / room_s[:, None])
        token_share = classes.tokens / (degrees[:, None] * problem.capacity)
        most = np.floor(1 / np.maximum(np.maximum(time_share, token_share), 1e-12) + 1e-9)
        return cls(classes, degrees, fixed_s, time_share, token_share, np.minimum(most, classes.counts))

    def fill(self, kinds: NDArray[np.int64], orders: NDArray[np.int64]) -> Configurations:
        """Fill one group per row r, of degree index kinds[r], with as many of each class as fit, in the order orders[r]."""
        rows = np.arange(len(kinds))
        free_time, free_tokens = np.ones(len(kinds)), np.ones(len(kinds))
        contents = np.zeros((len(kinds), len(self.classes.counts)))
        for step in range(orders.shape[1]):
            j = orders[:, step]
            times, tokens, most = self.time_share[kinds, j], self.token_share[kinds, j], self.most[kinds, j]
            open_rows = most > 0
            times, tokens = np.where(open_rows, times, 1.0), np.where(open_rows, tokens, 1.0)
            taken = np.minimum(most, np.floor(np.minimum(free_time / np.maximum(times, 1e-12), free_tokens / tokens) + 1e-9))
            contents[rows, j] = taken
            free_time -= taken * times
            free_tokens -= taken * tokens
        seconds = self.fixed_s[kinds] + (self.classes.seconds[kinds] * contents).sum(axis=1)
        return Configurations(kinds, contents, seconds).chosen(contents.sum(axis=1) > 0)

    def runs(self) -> Configurations:
        """Groups of similar lengths: one for every degree and class, filled from that class downwards."""
        number, count = len(self.degrees), len(self.classes.counts)
        order = (np.arange(count)[:, None] - np.arange(count)) % count
        return self.fill(np.repeat(np.arange(number), count), np.tile(order, (number, 1)))

    def promising(self, duals: FloatArray) -> Configurations:
        """Groups filled in order of a class's worth per share of the mixed constraint, for several mixtures."""
        worth = self._worth_per_share(duals)
        number, num_mixtures, count = worth.shape
        orders = np.argsort(-worth, axis=2, kind="stable").reshape(-1, count)
        return self.fill(np.repeat(np.arange(number), num_mixtures), orders)

    def ceilings(self, duals: FloatArray) -> FloatArray:
        """Upper bound on the worth of any configuration of each degree (K)."""
        ceilings: FloatArray = self._ceilings_by_mixture(duals).min(axis=1)
        return ceilings

    def _ceilings_by_mixture(self, duals: FloatArray) -> FloatArray:
        """Upper bounds from the fractional knapsack of every mixture (K x mixtures)."""
        worth = self._worth_per_share(duals)
        order = np.argsort(-worth, axis=2, kind="stable")
        shares = np.take_along_axis(self._mixed() * self.most[:, None, :], order, axis=2)
        before = np.cumsum(shares, axis=2) - shares
        fraction = np.clip((1 - before) / np.maximum(shares, 1e-300), 0.0, 1.0)
        value = np.take_along_axis(np.broadcast_to((duals * self.most)[:, None, :], worth.shape), order, axis=2)
        ceilings: FloatArray = (fraction * value).sum(axis=2)
        return ceilings

    def best(self, kind: int, duals: FloatArray, time_limit_s: float) -> tuple[Configurations, float]:
        """The most valuable configuration of a degree, and an upper bound on the worth of any, by an integer program."""
        useful = (self.most[kind] > 0) & (duals > 0)
        shares = np.stack([self.time_share[kind, useful], self.token_share[kind, useful]])
        program = LinearProgram.dense(
            -duals[useful], shares, np.full(2, -np.inf), np.ones(2), upper=self.most[kind, useful].astype(np.float64)
        )
        limits = SearchLimits(time_limit_s, _PRICING.gap)
        found = solve_integer_program(program, np.ones(int(useful.sum()), dtype=bool), limits)
        if not found.has_values:
            return Configurations.none(len(duals)), math.inf
        contents = np.zeros((1, len(duals)))
        contents[0, useful] = found.values
        seconds = self.fixed_s[kind] + contents @ self.classes.seconds[kind]
        return Configurations(np.array([kind]), contents, seconds), -found.bound

    def on_grid(self, kind: int, duals: FloatArray) -> tuple[Configurations, float]:
        """Valuable configurations of a degree and an upper bound on their worth, by dynamic programming over a mixture.

        The mixed constraint is divided into cells and shares are rounded down, so the result is an upper bound. Its filling
        becomes a configuration once the sequences that break a constraint are removed.
        """
        ceilings = self._ceilings_by_mixture(duals)[kind]
        least, mixture = float(ceilings.min()), float(_MIXTURES[ceilings.argmin()])
        low, high = 0.0, 1.0
        found = Configurations.none(len(duals))
        times = np.where(self.most[kind] > 0, self.time_share[kind], 0.0)
        for _ in range(_PRICING.most_trials):
            mixed = mixture * times + (1 - mixture) * self.token_share[kind]
            ceiling, fillings = _fill_grid(mixed, duals, self.most[kind], float(self.degrees[kind]))
            least = min(least, ceiling)
            found = found.joined(self._within_rows(kind, fillings, duals))
            over_time, over_tokens = float(times @ fillings[0]) > 1, float(self.token_share[kind] @ fillings[0]) > 1
            if over_time == over_tokens:
                break
            low, high = (mixture, high) if over_time else (low, mixture)
            mixture = (low + high) / 2
        return found, least

    def _within_rows(self, kind: int, fillings: FloatArray, duals: FloatArray) -> Configurations:
        """The fillings that keep both constraints; from the first, the least valuable sequences are removed until it does."""
        times = np.where(self.most[kind] > 0, self.time_share[kind], 0.0)
        shares = np.stack([times, self.token_share[kind]])
        worth = np.where(fillings[0] > 0, duals / np.maximum(shares.sum(axis=0), 1e-300), np.inf)
        for j in np.argsort(worth, kind="stable"):
            while fillings[0, j] > 0 and (shares @ fillings[0]).max() > 1 + _SLACK:
                fillings[0, j] -= 1
        fillings = fillings[(fillings @ shares.T).max(axis=1) <= 1 + _SLACK]
        seconds = self.fixed_s[kind] + fillings @ self.classes.seconds[kind]
        return Configurations(np.full(len(fillings), kind), fillings, seconds)

    def _mixed(self) -> FloatArray:
        """Shares of each mixed constraint that one sequence of each class takes (K x mixtures x n)."""
        times = np.where(self.most > 0, self.time_share, 1.0)[:, None, :]
        mixed: FloatArray = _MIXTURES[:, None] * times + (1 - _MIXTURES[:, None]) * self.token_share[:, None, :]
        return mixed

    def _worth_per_share(self, duals: FloatArray) -> FloatArray:
        worth: FloatArray = np.where(self.most[:, None, :] > 0, duals / np.maximum(self._mixed(), 1e-300), -1.0)
        return worth


def _fill_grid(shares: FloatArray, duals: FloatArray, most: FloatArray, least_worth: float) -> tuple[float, FloatArray]:
    """The largest worth that fits one constraint of equal cells, shares rounded down, and fillings (sequences per class).

    The first filling is the best; after it come the best ones with fewer cells, as long as they are worth more than
    `least_worth`.
    """
    cells = np.floor(shares * _PRICING.cells * (1 - _SLACK)).astype(np.int64)
    # bundles of 1, 2, 4, ... sequences of a class add up to every number up to `most`
    bundles: list[tuple[int, int]] = []
    for j in np.flatnonzero((most > 0) & (duals > 0)).tolist():
        left, size = int(most[j]), 1
        while left > 0:
            bundles.append((j, min(size, left)))
            left, size = left - size, 2 * size
    value = np.zeros(_PRICING.cells + 1)
    is_taken = np.zeros((len(bundles), _PRICING.cells + 1), dtype=bool)
    for row, (j, size) in enumerate(bundles):
        width = int(cells[j]) * size
        if width <= _PRICING.cells:
            candidate = value[: _PRICING.cells + 1 - width] + duals[j] * size
            np.greater(candidate, value[width:], out=is_taken[row, width:])
            value[width:] = np.maximum(candidate, value[width:])
    # the first cell at each level of worth, highest first
    levels = np.flatnonzero(np.diff(value, prepend=-1.0) > 1e-9)[::-1]
    last_cells = [_PRICING.cells, *[int(cell) for cell in levels[: _PRICING.most_fillings] if value[cell] > least_worth]]
    fillings = np.zeros((len(last_cells), len(duals)))
    for filling, cell in zip(fillings, last_cells, strict=True):
        for row in range(len(bundles) - 1, -1, -1):
            if is_taken[row, cell]:
                j, size = bundles[row]
                filling[j] += size
                cell -= int(cells[j]) * size
    return float(value[_PRICING.cells]), fillings
