"""Micro-batches of single chunks: planned at once where waiting gradients fill the room, and only there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.measures.calls import counted_calls
from helpers.plans.grouping_problems import lognormal_lengths, plan_stages

from hf_longctx.plan.core.settings import ClusterSpec, HardwareSpec, PlannerConfig
from hf_longctx.plan.core.types import Parameters, StepPlan
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.memory.byte_model import ByteModel

GPU = HardwareSpec("gpu", 2e14, 1.5e14, 80 << 30, 2e11, 2.5e10, 3e-5)
LENGTHS = lognormal_lengths(2, 60, 65536, median=3000.0, sigma=1.2)
STAGES = 4


def planned(device_gib: float, parameters: Parameters = "gathered_per_round") -> tuple[StepPlan, int]:
    """The plan of a step on four stages of four ranks, and the calls that it took."""
    model, cluster = named_model("llama-3.1-8b"), ClusterSpec(16, 8, GPU)
    costs = CostModel(model, cluster, default_coefficients(model, cluster), "ulysses", parameters=parameters)
    room = ByteModel(model).budget(int(device_gib * 2**30), 0, 1024)
    return counted_calls(lambda: plan_stages(0, LENGTHS, costs, STAGES, PlannerConfig(32768, (1, 2, 4), activations=room)))


def most_waiting(plan: StepPlan) -> int:
    stages = plan.micro_batches[0].groups[0].stages
    return max(ByteModel(named_model("llama-3.1-8b")).stage_waiting(stage, plan) for stage in stages)


def test_gradients_that_leave_no_room_for_several_chunks_mean_one_chunk_for_each_group() -> None:
    plan, num_calls = planned(4.5)
    # the first stage, whose states leave least, fits with no more than one backward, whatever it recomputes
    first = plan.micro_batches[0].groups[0].stages[0]
    assert ByteModel(named_model("llama-3.1-8b")).stage_waiting(first, plan) > 4.5 * 2**30
    assert most_waiting(plan) > 6 << 30
    assert {len(group.chunks) for each in plan.micro_batches for group in each.groups} == {1}
    # each of the others, alone in a micro-batch, would take longer
    assert len(plan.micro_batches) < len(LENGTHS) / 2
    # the search used to split off the longest again and again, for a minute
    assert num_calls < 1_000_000


@pytest.mark.wide
def test_sequences_that_fit_in_several_chunks_stay_in_pipelines() -> None:
    plan, _ = planned(12)
    assert most_waiting(plan) < 12 << 30
    assert len(plan.micro_batches) == 1
    assert all(len(group.chunks) >= STAGES for group in plan.micro_batches[0].groups)


@pytest.mark.parametrize("device_gib", [1.0, 2.5])
def test_what_fits_no_single_chunk_either_is_refused_at_once(device_gib: float) -> None:
    def refused() -> None:
        with pytest.raises(ValueError, match=r"sequence \d+ has \d+ tokens and fits no pipeline of 4 stages"):
            planned(device_gib)

    assert counted_calls(refused)[1] < 20_000


@pytest.mark.wide
def test_nothing_waits_where_every_rank_has_all_weights() -> None:
    plan, _ = planned(6, "replicated")
    assert most_waiting(replace(plan, parameters="replicated")) == 0
    assert all(len(group.chunks) > 1 for each in plan.micro_batches for group in each.groups)


def test_sequences_that_share_weights_run_in_a_pipeline_since_every_backward_sums() -> None:
    model, cluster = named_model("llama-3.1-8b"), ClusterSpec(16, 8, GPU)
    costs = CostModel(model, cluster, default_coefficients(model, cluster), "ulysses", parameters="sharded", shard_ranks=4)
    # if gradients waited whole for the last backward, stages would run these one after the other
    limits = PlannerConfig(16000, (1, 2), activations=ByteModel(model).budget(8 << 30, 0, 1024))
    plan = plan_stages(0, [*[16000] * 3, *[800] * 6], costs, STAGES, limits)
    assert len(plan.micro_batches) == 1 and most_waiting(plan) == 0
    assert all(len(group.chunks) > 1 for group in plan.micro_batches[0].groups)
