"""Chooses how many pipeline stages a run has, and layer ranges of each, by planning one step's lengths for every number."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hf_longctx.plan.core.planner_config import PlannerConfig
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.planner import plan_step


@dataclass(frozen=True, slots=True)
class StageSetup:
    """Costs and settings to plan with at one number of stages. Sequences of more than `longest_tokens` count as that long."""

    costs: CostModel
    config: PlannerConfig
    longest_tokens: int = sys.maxsize


@dataclass(frozen=True, slots=True)
class StageOption:
    """A number of stages, of layer ranges in each, and the plan of the step with them."""

    num_stages: int
    num_parts: int
    plan: StepPlan

    @property
    def step_s(self) -> float:
        return self.plan.estimate.step_s


def stage_options(
    lengths: Sequence[int],
    counts: Sequence[int],
    setup_of: Callable[[int, int], StageSetup],
    most_slower: int = 0,
    interleave: int = 1,
) -> list[StageOption]:
    """The numbers of stages among `counts` for which a plan of `lengths` exists, the quickest first, of equals the fewest.

    setup_of: for a number of stages and of layer ranges in each; ValueError where it cannot be had. most_slower: so many in a row
    that are slower than the best end the search (0: all are tried). interleave: layer ranges per stage that are tried beside a
    single one; they count where no sequence has to be shorter for them. Deterministic. Raises the first ValueError if nothing
    fits.
    """
    found: list[StageOption] = []
    unfit, num_slower = ValueError("no number of stages to choose from"), 0
    for count in counts:
        options: list[StageOption] = []
        needed = 0
        for num_parts in (1,) if count == 1 else dict.fromkeys((1, interleave)):
            try:
                setup = setup_of(count, num_parts)
                if num_parts > 1 and setup.longest_tokens < needed:
                    continue
                fitting = [min(length, setup.longest_tokens) for length in lengths]
                options.append(StageOption(count, num_parts, plan_step(0, fitting, setup.costs, setup.config)))
                needed = max(fitting)
            except ValueError as error:
                unfit = error if count == counts[0] and num_parts == 1 else unfit
        if not options:
            continue
        best_s = min(option.step_s for option in options)
        num_slower = num_slower + 1 if found and best_s >= min(one.step_s for one in found) else 0
        found += options
        if most_slower and num_slower == most_slower:
            break
    if not found:
        raise unfit
    return sorted(found, key=lambda option: (option.step_s, option.num_stages, option.num_parts))


def stage_counts(num_ranks: int, num_layers: int, degrees: Sequence[int]) -> list[int]:
    """Numbers of pipeline stages that divide the ranks, leave room for some degree, and have a layer each."""
    counts = range(1, min(num_ranks, num_layers) + 1)
    return [count for count in counts if num_ranks % count == 0 and min(degrees) <= num_ranks // count]
