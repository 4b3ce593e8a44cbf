"""Candidates for pipelines: their seconds are the judge's, and what cannot be kept is known before the judge says so."""

from __future__ import annotations

import math

import pytest
from helpers.plans.cost_models import MODEL, cost_model
from helpers.plans.grouping_problems import lognormal_lengths

from hf_longctx.plan.core.planner_config import ActivationBudget, PlannerConfig
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.plan.pipeline.candidates import PipelineStep, StageRoom
from hf_longctx.plan.pipeline.orders import layer_ranges
from hf_longctx.plan.prediction.evaluate import evaluate_plan

LENGTHS = lognormal_lengths(2, 30, 4000)


def test_candidates_come_in_the_order_of_the_judges_seconds_and_fit() -> None:
    costs, parts = cost_model("attention", 8), layer_ranges(MODEL.num_layers, 2)
    config = PlannerConfig(1200, (1, 2, 4))
    step = PipelineStep(LENGTHS, costs, parts, config, "elastic")
    candidates = step.candidates(tuple(range(len(LENGTHS))))
    assert len(candidates) > 1
    assert [each.seconds for each in candidates] == sorted(each.seconds for each in candidates)
    for candidate in candidates:
        plan = StepPlan(0, LENGTHS, 2, 4, costs.parameters, (step.micro_batch(candidate),))
        run = evaluate_plan(plan, costs)
        assert candidate.seconds == pytest.approx(run.step_s - run.once_s, rel=1e-9)
        # half of the layers, so twice the tokens
        assert max(rank.peak_tokens for rank in run.ranks) <= 2 * 1200


def test_a_part_of_the_sequences_can_be_planned() -> None:
    step = PipelineStep(LENGTHS, cost_model("linear", 4), layer_ranges(4, 2), PlannerConfig(9000, (1, 2)), "elastic")
    for candidate in [*step.candidates((3, 7)), *step.lean_candidates((3, 7))]:
        assert {span.sequence for chunks in candidate.chunks for chunk in chunks for span in chunk.spans} == {3, 7}


def test_lean_candidates_have_the_largest_groups_and_ever_more_slices() -> None:
    step = PipelineStep([1600, 10], cost_model("linear", 8), layer_ranges(4, 2), PlannerConfig(9000, (1, 2)), "elastic")
    found = step.lean_candidates((0, 1))
    assert all([group.degree for group in candidate.groups] == [2, 2] for candidate in found)
    assert [max(map(len, candidate.chunks)) for candidate in found] == [1, 4, 16]


def test_room_is_counted_in_tokens_or_in_bytes_of_layers() -> None:
    costs, parts = cost_model("linear", 4), layer_ranges(4, 2)
    kept = StageRoom(costs, parts, PlannerConfig(100, (1,)))
    assert kept.longest_tokens == 200
    assert kept.added_s([200, 200], 9.0) == 0.0 and math.isinf(kept.added_s([201, 0], 9.0))
    budget = ActivationBudget(0, 1 << 20)
    roomy = StageRoom(costs, parts, PlannerConfig(100, (1,), activations=budget))
    most = roomy.room / 2
    assert roomy.added_s([most, most], 9.0) == 0.0
    # half has to be recomputed, and forward is a third of forward and backward
    assert roomy.added_s([2 * most, most], 9.0) == pytest.approx(1.5)
