"""Chooses the numbers of pipeline stages and of layer ranges per stage, by planning one step's lengths for each choice."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hf_longctx.plan.core.settings import PlannerConfig
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.pipeline.search import NotFaster
from hf_longctx.plan.planner import plan_step
from hf_longctx.plan.predict.planning import counted_step_s


@dataclass(frozen=True, slots=True)
class StageSetup:
    """Costs and settings to plan with at one number of stages. Sequences of more than `longest_tokens` count as that long."""

    costs: CostModel
    config: PlannerConfig
    longest_tokens: int = sys.maxsize
    # the plan of the step, if it is known
    plan: StepPlan | None = None


@dataclass(frozen=True, slots=True)
class StageOption:
    """A number of stages, a number of layer ranges per stage, and the plan of the step with them."""

    num_stages: int
    num_ranges: int
    plan: StepPlan
    setup: StageSetup

    @property
    def counted_s(self) -> float:
        """Seconds with what counts of gathers, sums and updates of weights."""
        return counted_step_s(self.plan, self.setup.costs)


@dataclass(frozen=True, slots=True)
class StageOptions:
    """The numbers of stages that were planned for a step."""

    # fastest first
    fitting: tuple[StageOption, ...] = ()
    # a number of stages that does not fit, and why
    unfit: tuple[tuple[int, str], ...] = ()
    # a number of stages that is slower than another one of several, and its least seconds
    slower: tuple[tuple[int, float], ...] = ()


def stage_options(
    lengths: Sequence[int],
    counts: Sequence[int],
    setup_of: Callable[[int, int, float], StageSetup],
    most_slower: int = 0,
    interleave: int = 1,
    num_nodes: int = 1,
    prunes: bool = True,
) -> StageOptions:
    """Plans `lengths` for each number of stages in `counts`; those that fit come fastest first, ties by fewest stages.

    setup_of: makes the setup for (stages, layer ranges per stage, seconds that a plan must beat), or raises ValueError, or
    NotFaster. One stage must beat nothing, and several the fastest several so far, if `prunes`. most_slower: end the search after
    this many counts in a row that are no faster than the count before them (0: try all), but not before a stage lies within one
    of `num_nodes` nodes. interleave: layer ranges per stage to try besides a single one, unless sequences would have to be
    shorter for them. Deterministic. If nothing fits, raises the first count's ValueError.
    """
    found: list[StageOption] = []
    unfit: dict[int, ValueError] = {}
    slower: dict[int, float] = {}
    num_slower, last_s, staged_s = 0, math.inf, math.inf
    for count in counts:
        options: list[StageOption] = []
        needed = 0
        most_s = staged_s if prunes and count > 1 else math.inf
        for num_ranges in (1,) if count == 1 else dict.fromkeys((1, interleave)):
            try:
                setup = setup_of(count, num_ranges, most_s)
                if num_ranges > 1 and setup.longest_tokens < needed:
                    continue
                fitting = [min(length, setup.longest_tokens) for length in lengths]
                # seconds of other lengths are no measure
                limit_s = most_s if fitting == list(lengths) else math.inf
                plan = setup.plan or plan_step(0, fitting, setup.costs, setup.config, limit_s)
                options.append(StageOption(count, num_ranges, plan, setup))
                needed = max(fitting)
            except NotFaster as bound:
                slower[count] = min(slower.get(count, math.inf), bound.least_s)
            except ValueError as error:
                unfit.setdefault(count, error)
        if not options and count not in slower:
            continue
        unfit.pop(count, None)
        # the seconds of a number that was dropped are a bound only, which says nothing about the next one
        best_s = min((option.counted_s for option in options), default=math.inf)
        num_slower, last_s = num_slower + 1 if best_s >= last_s else 0, best_s if options else last_s
        whole = [option.counted_s for option in options if count > 1 and option.plan.lengths == tuple(lengths)]
        staged_s = min([staged_s, *whole])
        found += options
        if options:
            slower.pop(count, None)
        if most_slower and num_slower >= most_slower and count >= num_nodes:
            break
    if not found:
        raise next(iter(unfit.values()), ValueError("no number of stages to choose from"))
    ordered = sorted(found, key=lambda option: (option.counted_s, option.num_stages, option.num_ranges))
    return StageOptions(tuple(ordered), tuple((count, str(error)) for count, error in unfit.items()), tuple(slower.items()))


def stage_counts(num_ranks: int, num_layers: int, degrees: Sequence[int]) -> list[int]:
    """Returns numbers of stages that divide the ranks, leave each stage enough ranks for some degree, and one layer at least."""
    counts = range(1, min(num_ranks, num_layers) + 1)
    return [count for count in counts if num_ranks % count == 0 and min(degrees) <= num_ranks // count]
