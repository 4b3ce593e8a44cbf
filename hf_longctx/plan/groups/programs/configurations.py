"""Bound the time of a micro-batch by the configuration LP, and collect configurations that come close to the bound.

Solver "lp" rounds these configurations to groups, and benchmarks report the bound. A configuration is a degree and a multiset of
lengths that one group can run within T seconds. If covering every sequence with fractions of configurations needs more ranks
than there are, no grouping ends within T, and T is a lower bound (Gilmore and Gomory, 1961, for cutting stock). Configurations
are added to the LP as its duals ask for them (pricing). Farley's bound (1990) holds at any moment: if the duals value every
configuration of degree d at most at r * d, for all d, then duals / r are feasible and prove that sum(duals * counts) / r ranks
are needed. So stopping early weakens the bound but keeps it valid.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from hf_longctx.plan.core.arrays import FloatArray
from hf_longctx.plan.groups.bounds import fluid_bound_s
from hf_longctx.plan.groups.problem import GroupingProblem
from hf_longctx.plan.groups.programs.length_classes import LengthClasses
from hf_longctx.plan.groups.programs.pricing import Configurations, Pricing
from hf_longctx.plan.solver.program import LinearProgram, SolverError
from hf_longctx.plan.solver.solve import solve_linear_program

# most length classes of a configuration LP
MAX_CLASSES = 64


@dataclass(frozen=True, slots=True)
class _BoundSearch:
    """Constants of the search, chosen with `recipes/bench/cpu/planner.py` (table problems).

    tolerance: relative precision of the bound. least_gain: share by which a configuration must be worth more than its ranks to
    enter the LP. most_iterations: most LPs for one T. time_rounding: seconds this close, as a share, count as equal. pricing_s:
    time limit of one integer program. time_share: share of the remaining time for one T. smoothing: share of the best proof's
    duals that is mixed into the next duals, to keep them from jumping. doubt: share of the ranks below which a gap is not
    worth an integer program.
    """

    tolerance: float = 5e-4
    least_gain: float = 1e-6
    most_iterations: int = 200
    time_rounding: float = 1e-8
    pricing_s: float = 2.0
    time_share: float = 0.6
    smoothing: float = 0.5
    doubt: float = 2e-3


_BOUND = _BoundSearch()


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """Whether T is proven too short, and all configurations known so far.

    used_s: seconds of the slowest configuration that the LP uses. duals: those that prove the most ranks.
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
            # a T that is hard to decide must not take the time of those that are easy to exclude
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
