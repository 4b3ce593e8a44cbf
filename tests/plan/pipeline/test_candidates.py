"""Candidates for pipelines: their seconds are the judge's, and what cannot be kept is known before the judge says so."""

from __future__ import annotations

import pytest
from helpers.plans.cost_models import MODEL, cost_model
from helpers.plans.grouping_problems import lognormal_lengths

from hf_longctx.plan.core.settings import PlannerConfig
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.plan.pipeline.candidates import Candidates
from hf_longctx.plan.pipeline.staged_step import StagedStep
from hf_longctx.plan.pipeline.stages import layer_ranges
from hf_longctx.plan.predict.evaluate import evaluate_plan

LENGTHS = lognormal_lengths(2, 30, 4000)


def test_candidates_come_in_the_order_of_the_judges_seconds_and_fit() -> None:
    costs, ranges = cost_model("attention", 8), layer_ranges(MODEL.num_layers, 2)
    staged = StagedStep(LENGTHS, costs, PlannerConfig(1200, (1, 2, 4), stages=ranges))
    candidates = Candidates(staged).fastest(tuple(range(len(LENGTHS))))
    assert len(candidates) > 1
    assert [each.seconds for each in candidates] == sorted(each.seconds for each in candidates)
    for candidate in candidates:
        plan = StepPlan(0, LENGTHS, 2, 4, costs.parameters, (candidate.micro_batch,))
        run = evaluate_plan(plan, costs)
        assert candidate.seconds == pytest.approx(run.step_s - run.once_s, rel=1e-9)
        # half of the layers, so twice the tokens
        assert max(rank.peak_tokens for rank in run.ranks) <= 2 * 1200


def test_a_part_of_the_sequences_can_be_planned() -> None:
    staged = StagedStep(LENGTHS, cost_model("linear", 4), PlannerConfig(9000, (1, 2), stages=layer_ranges(4, 2)))
    candidates = Candidates(staged)
    for candidate in [*candidates.fastest((3, 7)), *candidates.least_memory((3, 7))]:
        groups = candidate.micro_batch.groups
        assert {span.sequence for group in groups for chunk in group.chunks for span in chunk.spans} == {3, 7}


def test_candidates_of_least_memory_have_the_largest_groups_and_ever_more_slices() -> None:
    staged = StagedStep([1600, 10], cost_model("linear", 8), PlannerConfig(9000, (1, 2), stages=layer_ranges(4, 2)))
    found = [candidate.micro_batch.groups for candidate in Candidates(staged).least_memory((0, 1))]
    assert all([group.degree for group in groups] == [2, 2] for groups in found)
    assert [max(len(group.chunks) for group in groups) for groups in found] == [1, 2, 4, 8, 16]
