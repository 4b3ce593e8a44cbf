"""Price and round: the configurations that the LP priced, chosen in whole numbers (a restricted master heuristic).

For a makespan T the integer program takes the fewest ranks of known configurations that end within T; bisection on T finds
the shortest one that fits the ranks. Sequences covered twice leave their slowest group. The LP's bound comes with the groups.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from hf_longctx.plan.groups.bounds import fluid_bound_s
from hf_longctx.plan.groups.problem import Group, GroupingProblem, Layout
from hf_longctx.plan.groups.programs.configurations import MAX_CLASSES, bisect, configuration_bound_s
from hf_longctx.plan.groups.programs.length_classes import LengthClasses, draw_groups
from hf_longctx.plan.groups.programs.micro_batches import GroupedMicroBatch, GroupedStep, plan_by_chunks
from hf_longctx.plan.groups.programs.pricing import Configurations, Pricing
from hf_longctx.plan.solver.program import LinearProgram, SearchLimits, SolverError
from hf_longctx.plan.solver.solve import solve_integer_program

# of the time: for the configurations and their bound, and of the rest for one T
_PRICING_SHARE = 0.5
_ROUNDING_SHARE = 0.34
_TOLERANCE = 1e-3


def plan_by_configurations(problem: GroupingProblem, seed: Sequence[Group], time_limit_s: float = 10.0) -> GroupedMicroBatch:
    """Groups for all sequences in one micro-batch, never slower than the groups of `seed`, and the bound on any."""
    start_s = time.perf_counter()
    stop_s = start_s + time_limit_s
    best, best_s = tuple(seed), problem.micro_batch_seconds(seed)
    classes = LengthClasses.of(problem, MAX_CLASSES, rounded_up=True)
    low_s = fluid_bound_s(problem)
    search = bisect(problem, classes, low_s, best_s, start_s + _PRICING_SHARE * time_limit_s)
    is_exact = np.array_equal(classes.seconds, LengthClasses.of(problem, MAX_CLASSES, rounded_up=False).seconds)
    bound_s = search.low_s if is_exact else configuration_bound_s(problem, (stop_s - time.perf_counter()) / 2, best_s)
    pool, failed_s = search.pool, search.low_s
    while best_s - failed_s > _TOLERANCE * best_s and time.perf_counter() < stop_s:
        limit_s = (failed_s + best_s) / 2
        now_s = time.perf_counter()
        try:
            chosen = _round(problem, classes, pool, limit_s, _ROUNDING_SHARE * (stop_s - now_s))
        except SolverError:
            break
        groups = () if chosen is None else draw_groups(problem, classes, chosen.kinds, chosen.contents)
        if groups and problem.micro_batch_seconds(groups) < best_s:
            best, best_s = groups, problem.micro_batch_seconds(groups)
        else:
            failed_s = limit_s
    is_unproven = best_s - bound_s > 2 * _TOLERANCE * best_s
    return GroupedMicroBatch(best, min(bound_s, best_s), is_fallback=best == tuple(seed) and is_unproven)


def _round(
    problem: GroupingProblem, classes: LengthClasses, pool: Configurations, limit_s: float, time_limit_s: float
) -> Configurations | None:
    """Whole configurations that hold every sequence within `limit_s` on all ranks; None if none were found."""
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
    """The step by price and round in every micro-batch of the blaster's cuts and of `seed`; never slower than `seed`."""
    return plan_by_chunks(problem, trials, time_limit_s, seed, plan_by_configurations)
