"""Splits the predicted seconds of a step on several stages into a lower bound and the causes of what lies above it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hf_longctx.plan.core.types import SequenceGroup, StepPlan
from hf_longctx.plan.predict.pipeline_run import StageSeconds
from hf_longctx.plan.predict.planning import Planning


@dataclass(frozen=True, slots=True)
class StepParts:
    """Seconds of a step, which sum to its counted seconds, on the ranks that work longest."""

    # least of any plan, with what a step spends once
    bound_s: float
    # mean over all ranks of exchanges in groups, and of what every chunk costs
    groups_s: float
    # work beyond that of the mean rank: stages and groups of unequal work, such as the one with the output head
    uneven_s: float
    # recomputed layers
    recompute_s: float
    # gathers of weights and sums of gradients that computing does not hide
    gathers_s: float
    # stages that fill and drain, wait for chunks of others, or for copies to the host
    idle_s: float


def step_parts(plan: StepPlan, planning: Planning, bound_s: float) -> StepParts:
    """Splits the seconds of a plan of several stages without lent ranks. bound_s: lower bound on the seconds of any plan."""
    work, again, gathers = np.zeros((3, plan.num_stages, plan.ranks_per_stage))
    for micro_batch in plan.micro_batches:
        for group in micro_batch.groups:
            places = list(group.positions)
            kept, under = (StageSeconds(plan, each, planning.costs, planning.known) for each in (_kept(group), group))
            work_s = kept.on_stages(kept.table - kept.counted_gathers)
            work[:, places] += work_s[:, None]
            again[:, places] += (under.on_stages(under.table - under.counted_gathers) - work_s)[:, None]
            gathers[:, places] += under.on_stages(under.counted_gathers)[:, None]
    busiest = np.unravel_index(np.argmax(work + again + gathers), work.shape)
    run, mean_s = planning.predict(plan), float(work.mean())
    gathers_s = float(gathers[busiest]) + run.gathers_s
    above_s = run.once_s + mean_s - bound_s, float(work[busiest]) - mean_s, float(again[busiest]), gathers_s
    return StepParts(bound_s, *above_s, planning.counted_s(plan) - bound_s - sum(above_s))


def _kept(group: SequenceGroup) -> SequenceGroup:
    return replace(group, stages=tuple(replace(stage, activations=()) for stage in group.stages))
