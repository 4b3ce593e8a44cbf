"""A plan of two micro-batches with hand-written intervals, and intervals that a true cost model would give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helpers.plans.layouts import plan_of

from hf_longctx.hf.planning.step_record import StepRecord
from hf_longctx.plan.core.types import Estimate, StepPlan
from hf_longctx.plan.cost.cost_model import CostCoefficients, CostModel, PassCoefficients
from hf_longctx.plan.predict.evaluate import evaluate_plan
from hf_longctx.runtime.core.clock import Interval

# <2> of 12 tokens, then <1,1> of 5 tokens and of a dummy
LAYOUT = [[(2, (0, 2))], [(1, (1,))]]
LENGTHS = [9, 5, 3]

# rank 1: both rounds, some waiting in between, and the reduction
INTERVALS = (
    Interval(0, "F", "0F0", 0.0, 0.1),
    Interval(0, "B", "0B0", 0.1, 0.3),
    Interval(1, "F", "0F0", 0.35, 0.4),
    Interval(1, "B", "0B0", 0.4, 0.42),
    Interval(-1, "reduce", "gradients", 0.42, 0.5),
)


def step_plan(**estimate: Any) -> StepPlan:
    """The plan with this estimate."""
    return replace(plan_of(LAYOUT, LENGTHS, 2), estimate=Estimate(**estimate))


def step_record(**estimate: Any) -> StepRecord:
    """Measurements of rank 1 for the plan with this estimate."""
    return StepRecord(step_plan(**estimate), rank=1, loss=2.5, intervals=INTERVALS)


TRUTH = CostCoefficients(
    forward=PassCoefficients(3e-6, 4e-4, 0.02, 3e-3, 4e-7),
    backward=PassCoefficients(7e-6, 9e-4, 0.03, 5e-3, 5e-7),
    step_s=0.05,
    source="truth",
)


def intervals_of(plan: StepPlan, costs: CostModel, rank: int) -> tuple[Interval, ...]:
    """Measurements of `rank` if `costs` were the truth: it waits in the reduction for the rank that comes last."""
    events = [event for event in evaluate_plan(plan, costs).events if event.rank == rank and event.kind in ("F", "B")]
    rounds = [index for index in range(len(plan.micro_batches)) for _ in range(2)]
    intervals = [Interval(r, e.kind, e.name, e.start_s, e.stop_s) for r, e in zip(rounds, events, strict=True)]
    end_s = max(event.stop_s for event in events)
    return (*intervals, Interval(-1, "reduce", "gradients", end_s, evaluate_plan(plan, costs).step_s))
