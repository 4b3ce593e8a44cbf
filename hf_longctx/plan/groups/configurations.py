"""Solver "lp": bounds the time of a micro-batch by the configuration LP, and rounds its configurations to groups.

Benchmarks also report the bound. A configuration is a degree and a multiset of lengths that one group can run within T seconds.
If covering every sequence with fractions of configurations needs more ranks than there are, no grouping ends within T, and T is a
lower bound (Gilmore and Gomory, 1961, for cutting stock). Configurations are added to the LP as its duals ask for them (pricing).
Farley's bound (1990) holds at any moment: if the duals value every configuration of degree d at most at r * d, for all d, then
duals / r are feasible and prove that sum(duals * counts) / r ranks are needed. So stopping early weakens the bound but keeps it
valid.

The pricing step of the LP is a knapsack with two constraints, time and tokens. Usually it is enough to fill groups greedily in
several orders, or to run a dynamic program over one weighted sum (mixture) of both constraints. The integer program decides only
if these leave a doubt.

Groups come from the configurations that the LP found (a restricted master heuristic). For a makespan T, an integer program covers
all sequences with known configurations that end within T, on the fewest ranks; bisection on T finds the shortest T that fits the
ranks. Sequences that are covered twice are removed from their slowest group. The LP also gives a lower bound on any grouping.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_longctx.plan.core.types import FloatArray
from hf_longctx.plan.groups.flexsp import GroupedMicroBatch, GroupedStep, LengthClasses, draw_groups, plan_by_micro_batches
from hf_longctx.plan.groups.problem import Group, GroupingProblem, Layout, fluid_bound_s
from hf_longctx.plan.solver import LinearProgram, SearchLimits, SolverError, solve_integer_program, solve_linear_program


@dataclass(frozen=True, slots=True)
class _PricingSearch:
    """Constants of the search; repeat the table problems of `recipes/bench/cpu/planner.py` when one changes."""

    # mixtures of time and tokens that bound the worth, evenly spaced from tokens alone to time alone
    num_mixtures: int = 9
    # cells into which the dynamic program divides the mixed constraint
    cells: int = 20_000
    # mixtures that `on_grid` tries
    most_trials: int = 4
    # further fillings that one dynamic program returns
    most_fillings: int = 30
    # relative gap at which the integer program stops
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
    """The knapsacks of all K degrees for one T."""

    classes: LengthClasses
    degrees: FloatArray
    fixed_s: FloatArray
    # shares of a group's time and tokens that one sequence of each of n classes takes (K x n)
    time_share: FloatArray
    token_share: FloatArray
    # most sequences of each class in a group (K x n)
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


# most length classes of a configuration LP
MAX_CLASSES = 64


@dataclass(frozen=True, slots=True)
class _BoundSearch:
    """Constants of the search, chosen with `recipes/bench/cpu/planner.py` (table problems)."""

    # relative precision of the bound
    tolerance: float = 5e-4
    # share by which a configuration must be worth more than its ranks to enter the LP
    least_gain: float = 1e-6
    # most LPs for one T
    most_iterations: int = 200
    # share within which seconds count as equal
    time_rounding: float = 1e-8
    # time limit of one integer program
    pricing_s: float = 2.0
    # share of the remaining time for one T
    time_share: float = 0.6
    # share of the best proof's duals that is mixed into the next duals, to keep them from jumping
    smoothing: float = 0.5
    # share of the ranks below which a gap is not worth an integer program
    doubt: float = 2e-3


_BOUND = _BoundSearch()


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """Whether T is proven too short, and all configurations known so far.

    used_s: seconds of the slowest configuration in the LP's solution. duals: the duals that prove the most ranks.
    """

    is_excluded: bool
    pool: Configurations
    used_s: float
    duals: FloatArray


def _fewest_ranks(
    problem: GroupingProblem, classes: LengthClasses, limit_s: float, pool: Configurations, old_duals: FloatArray, stop_s: float
) -> _Answer:
    """Decide whether fractions of configurations can end within `limit_s`; if undecided at time `stop_s`, the answer is yes.

    old_duals: duals that excluded a shorter T; they often exclude this one as well.
    """
    pricing = Pricing.at(problem, classes, limit_s)
    ranks_limit = problem.num_ranks * (1 + 1e-9)
    if not (pricing.most > 0).any(axis=0).all() or _needs_more(pricing, old_duals, ranks_limit):
        return _Answer(True, pool, math.inf, old_duals)
    pool = pool.joined(pricing.runs())
    best_bound, best_duals = 0.0, np.zeros(len(classes.counts))
    for iteration in range(_BOUND.most_iterations):
        within = pool.seconds <= limit_s * (1 + _BOUND.time_rounding)
        usable = pool.chosen(within)
        solved = solve_linear_program(_master(usable, pricing.degrees, classes), max(0.0, stop_s - time.perf_counter()))
        if solved.status != "optimal":
            break
        if solved.objective <= ranks_limit * (1 + _BOUND.doubt / 2):
            return _Answer(False, pool, float(usable.seconds[solved.values > 1e-9].max()), old_duals)
        duals = np.maximum(solved.duals, 0.0)
        smooth = _BOUND.smoothing * best_duals + (1 - _BOUND.smoothing) * duals if iteration else duals
        more, bound, proven = _price(pricing, smooth, duals, ranks_limit, stop_s)
        if bound > best_bound:
            best_bound, best_duals = bound, proven
        if best_bound > ranks_limit:
            return _Answer(True, pool, math.inf, best_duals)
        grown = pool.joined(more)
        if len(grown) == len(pool):
            break
        pool = grown
    return _Answer(False, pool, limit_s, old_duals)


def _master(usable: Configurations, degrees: FloatArray, classes: LengthClasses) -> LinearProgram:
    """The LP that covers every sequence with fractions of configurations on the fewest ranks."""
    counts = classes.counts.astype(np.float64)
    return LinearProgram.dense(degrees[usable.kinds], usable.contents.T, counts, np.full(len(counts), np.inf))


def _price(
    pricing: Pricing, smooth: FloatArray, duals: FloatArray, enough: float, stop_s: float
) -> tuple[Configurations, float, FloatArray]:
    """Configurations worth more than their ranks, and the best bound on the ranks found meanwhile, with its duals."""
    more = Configurations.none(len(duals))
    bound, proven = 0.0, duals
    for candidate in (smooth, duals):
        ceilings = pricing.ceilings(candidate)
        proof = _farley(pricing, candidate, ceilings)
        if proof > bound:
            bound, proven = proof, candidate
        more = more.joined(_worthwhile(pricing, pricing.promising(candidate), duals))
    if len(more):
        return more, bound, proven
    objective = float(duals @ pricing.classes.counts)
    for exactly in (False, True):
        for kind in np.flatnonzero(ceilings > pricing.degrees * (1 + _BOUND.least_gain)).tolist():
            if exactly:
                found, ceiling = pricing.best(kind, duals, min(_BOUND.pricing_s, stop_s - time.perf_counter()))
            else:
                found, ceiling = pricing.on_grid(kind, duals)
            ceilings[kind] = min(ceilings[kind], ceiling)
            more = more.joined(_worthwhile(pricing, found, duals))
        proof = _farley(pricing, duals, ceilings)
        if proof > bound:
            bound, proven = proof, duals
        if len(more) or bound > enough or bound >= objective * (1 - _BOUND.doubt):
            break
    return more, bound, proven


def _worthwhile(pricing: Pricing, found: Configurations, duals: FloatArray) -> Configurations:
    return found.chosen(found.contents @ duals > pricing.degrees[found.kinds] * (1 + _BOUND.least_gain))


def _farley(pricing: Pricing, duals: FloatArray, ceilings: FloatArray) -> float:
    """Number of ranks that these duals prove to be needed (Farley's bound), optimal or not."""
    ratio = float((ceilings / pricing.degrees).max())
    return float(duals @ pricing.classes.counts) / ratio if ratio > 0 else 0.0


def _needs_more(pricing: Pricing, duals: FloatArray, ranks: float) -> bool:
    """Whether these duals prove, without integer programs, that more than `ranks` are needed."""
    worth = float(duals @ pricing.classes.counts)
    ceilings = pricing.ceilings(duals)
    for kind in np.flatnonzero(ceilings * ranks >= worth * pricing.degrees).tolist():
        if pricing.on_grid(kind, duals)[1] * ranks >= worth * pricing.degrees[kind]:
            return False
    return True


@dataclass(frozen=True, slots=True, eq=False)
class Search:
    """Result of a bisection: no grouping ends within `low_s`, but one within `high_s` is not excluded.

    pool: all configurations found on the way.
    """

    low_s: float
    high_s: float
    pool: Configurations


def bisect(problem: GroupingProblem, classes: LengthClasses, low_s: float, high_s: float, stop_s: float) -> Search:
    """Find the shortest time that the configuration LP does not exclude, starting from a proven bound `low_s`.

    The search goes down from `high_s` if it is finite, because a known grouping is usually near the bound, else up from `low_s`.
    """
    pool, duals = Configurations.none(len(classes.counts)), np.zeros(len(classes.counts))
    step = 4 * _BOUND.tolerance
    try:
        while high_s - low_s > _BOUND.tolerance * low_s and time.perf_counter() < stop_s:
            middle = low_s * (1 + step) if math.isinf(high_s) else max(high_s * (1 - step), (low_s + high_s) / 2)
            # a T that is hard to decide must not use up the time of others that are easy to exclude
            now_s = time.perf_counter()
            answer = _fewest_ranks(problem, classes, middle, pool, duals, now_s + _BOUND.time_share * (stop_s - now_s))
            pool, duals = answer.pool, answer.duals
            if answer.is_excluded:
                low_s = middle
            else:
                high_s = min(middle, answer.used_s)
            step *= 3
    except SolverError:
        # the bound proven so far remains valid
        pass
    return Search(low_s, high_s, pool)


def configuration_bound_s(problem: GroupingProblem, time_limit_s: float = 10.0, known_s: float = math.inf) -> float:
    """Lower bound on the seconds of a micro-batch with all sequences; infinite if memory rules out a single micro-batch.

    At least `fluid_bound_s`, and equal to it if time is too short or the solver fails. With more than 64 distinct lengths, some
    are rounded down, which keeps the bound valid. known_s: seconds of a known grouping of all sequences, which saves time.
    """
    stop_s = time.perf_counter() + time_limit_s
    low_s = fluid_bound_s(problem)
    if not problem.lengths or math.isinf(low_s):
        return low_s
    classes = LengthClasses.of(problem, MAX_CLASSES, rounded_up=False)
    return bisect(problem, classes, low_s, known_s, stop_s).low_s


@dataclass(frozen=True, slots=True)
class _RoundingSearch:
    """Constants of the search, chosen with `recipes/bench/cpu/planner.py` (table problems)."""

    # share of the time for configurations and bound
    pricing_share: float = 0.5
    # share of the remaining time for one T
    one_share: float = 0.34
    # relative precision of T
    tolerance: float = 1e-3


_ROUNDS = _RoundingSearch()


def plan_by_configurations(problem: GroupingProblem, seed: Sequence[Group], time_limit_s: float = 10.0) -> GroupedMicroBatch:
    """Groups for all sequences in one micro-batch, never slower than `seed`, and a lower bound on any grouping."""
    start_s = time.perf_counter()
    stop_s = start_s + time_limit_s
    best, best_s = tuple(seed), problem.micro_batch_seconds(seed)
    classes = LengthClasses.of(problem, MAX_CLASSES, rounded_up=True)
    low_s = fluid_bound_s(problem)
    search = bisect(problem, classes, low_s, best_s, start_s + _ROUNDS.pricing_share * time_limit_s)
    is_exact = np.array_equal(classes.seconds, LengthClasses.of(problem, MAX_CLASSES, rounded_up=False).seconds)
    bound_s = search.low_s if is_exact else configuration_bound_s(problem, (stop_s - time.perf_counter()) / 2, best_s)
    pool, failed_s = search.pool, search.low_s
    while best_s - failed_s > _ROUNDS.tolerance * best_s and time.perf_counter() < stop_s:
        limit_s = (failed_s + best_s) / 2
        now_s = time.perf_counter()
        try:
            chosen = _round(problem, classes, pool, limit_s, _ROUNDS.one_share * (stop_s - now_s))
        except SolverError:
            break
        groups = () if chosen is None else draw_groups(problem, classes, chosen.kinds, chosen.contents)
        if groups and problem.micro_batch_seconds(groups) < best_s:
            best, best_s = groups, problem.micro_batch_seconds(groups)
        else:
            failed_s = limit_s
    is_unproven = best_s - bound_s > 2 * _ROUNDS.tolerance * best_s
    return GroupedMicroBatch(best, min(bound_s, best_s), is_fallback=best == tuple(seed) and is_unproven)


def _round(
    problem: GroupingProblem, classes: LengthClasses, pool: Configurations, limit_s: float, time_limit_s: float
) -> Configurations | None:
    """Configurations that cover every sequence within `limit_s` and fit the ranks, with repeats; None if none were found."""
    pricing = Pricing.at(problem, classes, limit_s)
    pool = pool.joined(pricing.runs())
    usable = pool.chosen(pool.seconds <= limit_s)
    if not len(usable):
        return None
    counts = classes.counts.astype(np.float64)
    degrees = np.array(problem.degrees, dtype=np.float64)[usable.kinds]
    program = LinearProgram.dense(degrees, usable.contents.T, counts, np.full(len(counts), np.inf))
    limits = SearchLimits(time_limit_s, target=problem.num_ranks + 0.5)
    found = solve_integer_program(program, np.ones(len(usable), dtype=bool), limits)
    if not found.has_values or found.objective > problem.num_ranks + 0.5:
        return None
    copies = np.repeat(np.arange(len(usable)), found.values.astype(np.int64))
    return Configurations(usable.kinds[copies], usable.contents[copies], usable.seconds[copies])


def plan_lp(problem: GroupingProblem, trials: int, time_limit_s: float, seed: Layout) -> GroupedStep:
    """Plan a step with price and round for every micro-batch of the blaster's cuts and of `seed`; never slower than `seed`."""
    return plan_by_micro_batches(problem, trials, time_limit_s, seed, plan_by_configurations)
