"""The configuration LP of one micro-batch: a proof of how fast it can be, and the groups that come close to it.

A configuration is a degree and a multiset of lengths that one group can run within T seconds. If even fractions of
configurations that together hold every sequence need more ranks than there are, no grouping ends within T, and T is a
lower bound (Gilmore and Gomory, 1961, for cutting stock). Configurations are priced into the program as its duals ask for
them. At any moment Farley's bound (1990) holds: if the duals value the best configuration of degree d at most at r * d, for
all d, then duals / r are feasible and prove sum(duals * counts) / r ranks. So an early end weakens the bound, never voids it.
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

MAX_CLASSES = 64
_TOLERANCE = 5e-4
# by how much a configuration must be worth more than its ranks to enter the program
_LEAST_GAIN = 1e-6
_MAX_ROUNDS = 200
# seconds this close, as a share, are the same
_SAME = 1e-8
_PRICING_S = 2.0
_SHARE_OF_TIME = 0.6
# how much of the best proof's duals is mixed into the next ones, against their jumping
_SMOOTHING = 0.5
# a doubt about fewer ranks than this share is not worth an integer program
_DOUBT = 2e-3


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """Whether T is proven too short, and all configurations known by now.

    used_s: the slowest configuration that the LP uses. duals: the best proof of needed ranks.
    """

    is_excluded: bool
    pool: Configurations
    used_s: float
    duals: FloatArray


def _fewest_ranks(
    problem: GroupingProblem, classes: LengthClasses, limit_s: float, pool: Configurations, old_duals: FloatArray, stop_s: float
) -> _Answer:
    """Decides whether fractions of configurations can end within `limit_s`; undecided at time `stop_s` counts as yes.

    old_duals: of a shorter T, whose proof often reaches further.
    """
    pricing = Pricing.at(problem, classes, limit_s)
    ranks_limit = problem.num_ranks * (1 + 1e-9)
    if not (pricing.most > 0).any(axis=0).all() or _needs_more(pricing, old_duals, ranks_limit):
        return _Answer(True, pool, math.inf, old_duals)
    pool = pool.joined(pricing.runs())
    best_bound, best_duals = 0.0, np.zeros(len(classes.counts))
    for round_number in range(_MAX_ROUNDS):
        within = pool.seconds <= limit_s * (1 + _SAME)
        usable = pool.chosen(within)
        solved = solve_linear_program(_master(usable, pricing.degrees, classes), max(0.0, stop_s - time.perf_counter()))
        if solved.status != "optimal":
            break
        if solved.objective <= ranks_limit * (1 + _DOUBT / 2):
            return _Answer(False, pool, float(usable.seconds[solved.values > 1e-9].max()), old_duals)
        duals = np.maximum(solved.duals, 0.0)
        smooth = _SMOOTHING * best_duals + (1 - _SMOOTHING) * duals if round_number else duals
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
    """The fewest ranks of fractions of configurations that hold every sequence."""
    counts = classes.counts.astype(np.float64)
    return LinearProgram.dense(degrees[usable.kinds], usable.contents.T, counts, np.full(len(counts), np.inf))


def _price(
    pricing: Pricing, smooth: FloatArray, duals: FloatArray, enough: float, stop_s: float
) -> tuple[Configurations, float, FloatArray]:
    """Configurations worth more than their ranks, and the best bound on the ranks found on the way with its duals."""
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
        for kind in np.flatnonzero(ceilings > pricing.degrees * (1 + _LEAST_GAIN)).tolist():
            if exactly:
                found, ceiling = pricing.best(kind, duals, min(_PRICING_S, stop_s - time.perf_counter()))
            else:
                found, ceiling = pricing.on_grid(kind, duals)
            ceilings[kind] = min(ceilings[kind], ceiling)
            more = more.joined(_worthwhile(pricing, found, duals))
        proof = _farley(pricing, duals, ceilings)
        if proof > bound:
            bound, proven = proof, duals
        if len(more) or bound > enough or bound >= objective * (1 - _DOUBT):
            break
    return more, bound, proven


def _worthwhile(pricing: Pricing, found: Configurations, duals: FloatArray) -> Configurations:
    return found.chosen(found.contents @ duals > pricing.degrees[found.kinds] * (1 + _LEAST_GAIN))


def _farley(pricing: Pricing, duals: FloatArray, ceilings: FloatArray) -> float:
    """Ranks that these duals prove to be needed, however good they are."""
    ratio = float((ceilings / pricing.degrees).max())
    return float(duals @ pricing.classes.counts) / ratio if ratio > 0 else 0.0


def _needs_more(pricing: Pricing, duals: FloatArray, ranks: float) -> bool:
    """Whether these duals prove that more than `ranks` are needed; without integer programs."""
    worth = float(duals @ pricing.classes.counts)
    ceilings = pricing.ceilings(duals)
    for kind in np.flatnonzero(ceilings * ranks >= worth * pricing.degrees).tolist():
        if pricing.on_grid(kind, duals)[1] * ranks >= worth * pricing.degrees[kind]:
            return False
    return True


@dataclass(frozen=True, slots=True, eq=False)
class Search:
    """No grouping ends within `low_s`; none within `high_s` is excluded. pool: the configurations met on the way."""

    low_s: float
    high_s: float
    pool: Configurations


def bisect(problem: GroupingProblem, classes: LengthClasses, low_s: float, high_s: float, stop_s: float) -> Search:
    """Narrows the seconds that the configuration LP allows, from a proven bound.

    From `high_s` downwards if that is finite, since a known grouping is mostly near the bound, else from `low_s` upwards.
    """
    pool, duals = Configurations.none(len(classes.counts)), np.zeros(len(classes.counts))
    step = 4 * _TOLERANCE
    try:
        while high_s - low_s > _TOLERANCE * low_s and time.perf_counter() < stop_s:
            middle = low_s * (1 + step) if math.isinf(high_s) else max(high_s * (1 - step), (low_s + high_s) / 2)
            # an undecided T must not take the time of those that are easy to exclude
            now_s = time.perf_counter()
            answer = _fewest_ranks(problem, classes, middle, pool, duals, now_s + _SHARE_OF_TIME * (stop_s - now_s))
            pool, duals = answer.pool, answer.duals
            if answer.is_excluded:
                low_s = middle
            else:
                high_s = min(middle, answer.used_s)
            step *= 3
    except SolverError:
        # what is proven by now stays proven
        pass
    return Search(low_s, high_s, pool)


def configuration_bound_s(problem: GroupingProblem, time_limit_s: float = 10.0, known_s: float = math.inf) -> float:
    """Seconds that no single micro-batch of all sequences beats; infinite where memory rules out a single one.

    At least `fluid_bound_s`, and that where time is too short or a solver fails. Lengths beyond the first 64 different ones
    are rounded down, which keeps the bound a bound. known_s: seconds of some grouping of all sequences, which saves time.
    """
    stop_s = time.perf_counter() + time_limit_s
    low_s = fluid_bound_s(problem)
    if not problem.lengths or math.isinf(low_s):
        return low_s
    classes = LengthClasses.of(problem, MAX_CLASSES, rounded_up=False)
    return bisect(problem, classes, low_s, known_s, stop_s).low_s
