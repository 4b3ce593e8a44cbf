"""How many pipeline stages a run should have: one step's lengths are planned for every number of them."""

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
    """What steps are planned with at one number of stages. Sequences of more than `longest_tokens` count as that long."""

    costs: CostModel
    config: PlannerConfig
    longest_tokens: int = sys.maxsize


@dataclass(frozen=True, slots=True)
class StageOption:
    """A number of stages, and its plan of the step."""

    num_stages: int
    plan: StepPlan

    @property
    def step_s(self) -> float:
        return self.plan.estimate.step_s


def stage_options(
    lengths: Sequence[int], counts: Sequence[int], setup_of: Callable[[int], StageSetup], most_slower: int = 0
) -> list[StageOption]:
    """The numbers of stages among `counts` for which a plan of `lengths` exists, the quickest first, of equals the fewest.

    setup_of: of a number of stages; ValueError where it cannot be had. most_slower: so many in a row that are slower than the
    best end the search (0: all are tried). Deterministic. Raises the first ValueError if nothing fits.
    """
    found: list[StageOption] = []
    unfit, num_slower = ValueError("no number of stages to choose from"), 0
    for count in counts:
        try:
            setup = setup_of(count)
            fitting = [min(length, setup.longest_tokens) for length in lengths]
            option = StageOption(count, plan_step(0, fitting, setup.costs, setup.config))
        except ValueError as error:
            unfit = error if count == counts[0] else unfit
            continue
        num_slower = num_slower + 1 if found and option.step_s >= min(one.step_s for one in found) else 0
        found.append(option)
        if most_slower and num_slower == most_slower:
            break
    if not found:
        raise unfit
    return sorted(found, key=lambda option: (option.step_s, option.num_stages))


def stage_counts(num_ranks: int, num_layers: int, degrees: Sequence[int]) -> list[int]:
    """Numbers of pipeline stages that divide the ranks, leave room for some degree, and have a layer each."""
    counts = range(1, min(num_ranks, num_layers) + 1)
    return [count for count in counts if num_ranks % count == 0 and min(degrees) <= num_ranks // count]
