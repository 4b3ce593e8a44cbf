"""Candidates for pipelines: their seconds are the judge's, and what cannot be kept is known before the judge says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.plans.cost_models import MODEL, cost_model
from helpers.plans.grouping_problems import lognormal_lengths
from helpers.plans.pipeline_plans import stage_ranges

from hf_longctx.plan.core.settings import GENERIC_GPU, ClusterSpec, PlannerConfig
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.groups.placement import PlacedGroup
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.pipeline import staged_step
from hf_longctx.plan.pipeline.candidates import Candidates, dealt_layouts
from hf_longctx.plan.pipeline.staged_step import CUTS, StagedStep
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


def slow_network(device_gib: float) -> tuple[StagedStep, Candidates, PlacedGroup]:
    """A step of four stages of one group whose messages take long, with so much memory of a device and 8 GiB of the host."""
    model, hardware = named_model("llama-3.1-8b"), replace(GENERIC_GPU, network_bytes_per_s=3e8)
    cluster, lengths = ClusterSpec(8, 2, hardware), lognormal_lengths(3, 32, 60_000, 20_000.0)
    costs = CostModel(
        model, cluster, default_coefficients(model, cluster), "ulysses", parameters="gathered_per_step", shard_ranks=2
    )
    room = ByteModel(model).budget(int(device_gib * 2**30), 8 << 30, 1024)
    staged = StagedStep(lengths, costs, PlannerConfig(100_000, (2,), stages=stage_ranges(model, 4), activations=room))
    (group,) = next(dealt_layouts(staged, range(len(lengths))))
    return staged, Candidates(staged), group


def test_chunks_get_smaller_while_that_is_faster_on_a_slow_network() -> None:
    """Slow messages keep more chunks in flight, which estimates of cuts do not count: no further cut is faster."""
    staged, candidates, group = slow_network(4)
    ways = [replace(cut, growth=growth) for cut in staged.cuts(group)[:10] for growth in (0.0, staged.growth)]
    runs = [staged.fastest_run({group: candidates._chunks(group, cut)}, lead) for cut in ways for lead in CUTS.leads]
    fastest = candidates.fastest(tuple(range(len(staged.lengths))))
    assert fastest[0].seconds <= 1.001 * min(run.seconds for run in runs if run is not None)


@pytest.mark.parametrize("device_gib", [1.0, 2.0, 4.0, 40.0])
def test_the_fastest_lead_is_found_from_every_other_one(device_gib: float, monkeypatch: pytest.MonkeyPatch) -> None:
    staged, candidates, group = slow_network(device_gib)
    for cut in staged.cuts(group)[:4]:
        chunks = {group: candidates._chunks(group, cut)}
        found = [staged.fastest_run(chunks, lead) for lead in CUTS.leads]
        with monkeypatch.context() as patch:
            alone = []
            for lead in CUTS.leads:
                patch.setattr(staged_step, "CUTS", replace(CUTS, leads=(lead,)))
                alone.append(staged.fastest_run(chunks, lead))
        if not any(alone):
            assert not any(found)
            continue
        least_s = min(run.seconds for run in alone if run is not None)
        assert all(run is not None and run.seconds <= (1 + CUTS.least_gain) * least_s for run in found)
