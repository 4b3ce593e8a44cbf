"""Solver "lp": group a micro-batch with configurations that the configuration LP found (a restricted master heuristic).

For a makespan T, an integer program covers all sequences with known configurations that end within T, on the fewest ranks;
bisection on T finds the shortest T that fits the ranks. Sequences that are covered twice are removed from their slowest group.
The LP also gives a lower bound on any grouping.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_longctx.plan.groups.bounds import fluid_bound_s
from hf_longctx.plan.groups.problem import Group, GroupingProblem, Layout
from hf_longctx.plan.groups.programs.configurations import MAX_CLASSES, bisect, configuration_bound_s
from hf_longctx.plan.groups.programs.length_classes import LengthClasses, draw_groups
from hf_longctx.plan.groups.programs.micro_batches import GroupedMicroBatch, GroupedStep, plan_by_micro_batches
from hf_longctx.plan.groups.programs.pricing import Configurations, Pricing
from hf_longctx.plan.solver.program import LinearProgram, SearchLimits, SolverError
from hf_longctx.plan.solver.solve import solve_integer_program


@dataclass(frozen=True, slots=True)
class _RoundingSearch:
    """Constants of the search, chosen with `recipes/bench/cpu/planner.py` (table problems).

    pricing_share: share of the time for configurations and bound. one_share: share of the remaining time for one T. tolerance:
    relative precision of T.
    """

    pricing_share: float = 0.5
    one_share: float = 0.34
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
