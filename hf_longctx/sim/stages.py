"""Compares numbers of pipeline stages for one step: seconds, waiting, recomputation and bytes of each, and why others do not fit.

Called for the tables of `hf-longctx plan --details` and its JSON. Plans come from the setup, which chose among them.
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_longctx.plan.core.types import Parameters, StepPlan, sums_every_backward
from hf_longctx.plan.predict.evaluate import evaluate_plan
from hf_longctx.plan.predict.planning import weight_seconds
from hf_longctx.plan.stage_count import StageOption, StageOptions
from hf_longctx.sim.memory_use import recomputed_share


@dataclass(frozen=True, slots=True)
class StageRow:
    """One number of stages: how its plan runs the step, or (step_s 0) why it does not fit."""

    num_stages: int
    ranks_per_stage: int
    parameters: Parameters = "replicated"
    shard_ranks: int = 1
    # predicted seconds, and those with what counts of gathers, sums and updates, by which numbers of stages are compared
    step_s: float = 0.0
    counted_s: float = 0.0
    # gathers, sums of gradients and the optimizer beside `step_s`, none hidden
    most_s: float = 0.0
    # seconds in which no plan of these stages can be faster
    lower_bound_s: float = 0.0
    # share of rank-seconds in which ranks wait, and share of the layers' MLPs that run again
    idle_share: float = 0.0
    recomputed_share: float = 0.0
    peak_bytes: int = 0
    # why it does not fit, or why its stages run one after the other; empty for most
    detail: str = ""

    @property
    def is_possible(self) -> bool:
        return self.step_s > 0


def stage_rows(options: StageOptions, num_ranks: int) -> tuple[StageRow, ...]:
    """Returns a row for each number of stages that was tried, by number."""
    rows = [_row(option) for option in options.fitting]
    rows += [StageRow(count, num_ranks // count, detail=reason) for count, reason in options.unfit]
    slower = "slower than other stages: at least {:.4g} s"
    rows += [StageRow(count, num_ranks // count, detail=slower.format(least_s)) for count, least_s in options.slower]
    return tuple(sorted(rows, key=lambda row: row.num_stages))


def _row(option: StageOption) -> StageRow:
    plan, costs = option.plan, option.setup.costs
    run = evaluate_plan(plan, costs, with_events=False)
    busy_s = run.step_s * plan.num_ranks
    return StageRow(
        option.num_stages,
        plan.ranks_per_stage,
        plan.parameters,
        plan.block_ranks,
        run.step_s,
        option.counted_s,
        weight_seconds(plan, costs).step_bounds_s(run.step_s, run.once_s, run.ranks)[1],
        plan.estimate.lower_bound_s,
        sum(rank.idle_s for rank in run.ranks) / busy_s if busy_s else 0.0,
        recomputed_share(plan),
        max(run.peak_bytes),
        turns_reason(plan),
    )


def turns_reason(plan: StepPlan) -> str:
    """Says that stages run one after the other, and why: most micro-batches have one chunk. Empty if they work at one time."""
    if plan.num_stages == 1 or plan.turns or not _takes_turns(plan):
        return ""
    if not (sums_every_backward(plan.parameters, plan.num_stages) or plan.parameters == "replicated"):
        why = "whole gradients of a stage leave no room for several chunks"
    elif len(plan.micro_batches) == 1:
        why = "slices, which hold keys, values and gradients for one another, take longer or do not fit"
    else:
        why = "most micro-batches have one chunk of these sequences at a time"
    return f"stages run one after the other: {why}"


def _takes_turns(plan: StepPlan) -> bool:
    chunks = [max(len(group.chunks) for group in micro_batch.groups) for micro_batch in plan.micro_batches]
    return sum(count == 1 for count in chunks) > len(chunks) / 2
