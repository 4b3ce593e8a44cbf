"""More memory for activations never makes a planned step of several stages slower."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.settings import ClusterSpec, PlannerConfig
from hf_longctx.plan.core.types import Parameters, StepPlan
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.cost.profiles import read_profile
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.pipeline.stages import balanced_ranges
from hf_longctx.plan.planner import plan_step
from hf_longctx.sim.scenario import Request, build_scenario
from hf_longctx.sim.workloads import read_workload

# factor by which a step may be slower than one with less room: candidates and programs are searched, not proven
EQUAL = 1.015


def steps_s(
    gib: tuple[float, ...], seed: int, count: int, num_ranks: int, num_stages: int, host_gib: int, parameters: Parameters
) -> list[float]:
    """Predicted seconds of the step of `count` sequences under each of these GiB on the device, from the least that fits on."""
    model, cluster = named_model("llama-3.1-8b"), ClusterSpec(num_ranks, 8, read_profile("h100").spec)
    costs = CostModel(model, cluster, default_coefficients(model, cluster), "ulysses", parameters=parameters)
    lengths = np.clip(np.random.default_rng(seed).lognormal(np.log(1500.0), 1.3, count), 16, 32_768).astype(int).tolist()
    stages, found = balanced_ranges(costs, num_stages, lengths), []
    for each in gib:
        room = ByteModel(model).budget(int(each * 2**30), host_gib << 30, 1024)
        try:
            plan = plan_step(0, lengths, costs, PlannerConfig(32_768, (1, 2, 4, 8), activations=room, stages=stages))
        except ValueError:
            assert not found, f"{each} GiB are refused, and less was not"
            continue
        assert plan.estimate is not None
        found.append(plan.estimate.step_s)
    return found


def worst_rise(seconds: list[float]) -> float:
    """Largest factor from an entry to a later one."""
    return max((later / former for place, former in enumerate(seconds) for later in seconds[place + 1 :]), default=1.0)


@pytest.mark.wide
@pytest.mark.parametrize(("seed", "host_gib"), [(1, 0), (1, 32), (2, 32)])
def test_rows_at_the_edge_of_memory_fall(seed: int, host_gib: int) -> None:
    found = steps_s((2.5, 3.5, 4, 5, 6), seed, 48, 16, 4, host_gib, "replicated")
    assert len(found) == 5
    assert worst_rise(found) <= EQUAL


@pytest.mark.wide
def test_sequences_split_often_still_run_in_pipelines() -> None:
    """Stages that run one after the other would need 14 s: most sets of these do not fit, and in few do pipelines pay."""
    model, cluster = named_model("llama-3.1-8b"), ClusterSpec(8, 8, read_profile("h100").spec)
    costs = CostModel(model, cluster, default_coefficients(model, cluster), "ulysses", parameters="gathered_per_round")
    lengths = np.clip(np.random.default_rng(100).lognormal(np.log(20_000), 1.0, 8), 16, 32_768).astype(int).tolist()
    room = ByteModel(model).budget(int(10.36 * 2**30), 32 << 30, 1024)
    config = PlannerConfig(32_768, (1, 2), activations=room, stages=balanced_ranges(costs, 4, lengths))
    plan = plan_step(0, lengths, costs, config)
    assert plan.estimate is not None and plan.estimate.step_s < 6.5


@settings(max_examples=4, derandomize=True, deadline=None)
@given(
    st.lists(st.floats(2, 9), min_size=2, max_size=3),
    st.integers(0, 1000),
    st.integers(4, 40),
    st.sampled_from([(8, 2), (8, 4), (16, 4)]),
    st.sampled_from([0, 32]),
    st.sampled_from(["replicated", "gathered_per_round"]),
)
def test_more_room_never_makes_a_step_slower(
    gib: list[float], seed: int, count: int, ranks: tuple[int, int], host_gib: int, parameters: Parameters
) -> None:
    assert worst_rise(steps_s(tuple(sorted(gib)), seed, count, *ranks, host_gib, parameters)) <= EQUAL


def cluster_step(model: str, stages: int, shard_ranks: int) -> StepPlan:
    """A step of 256 long sequences on eight nodes of a slow network, with sharded stages."""
    workload = read_workload("lognormal:10.5,0.6", 184_000, 256, 0, None)
    lengths = workload.draw_steps(1, 256, 0)[0]
    how: dict[str, Any] = {"stages": stages, "parameters": "sharded", "shard_ranks": shard_ranks, "network_gbit": 100.0}
    how |= {"longest_tokens": workload.longest, "step_lengths": tuple(lengths)}
    setup = build_scenario(Request(model, "h100", 64, **how), must_fit=False).setup
    return plan_step(0, lengths, setup.costs, setup.planner)


@pytest.mark.wide
def test_whole_sequences_run_on_small_groups_where_slices_do_not_fit() -> None:
    """Groups over all ranks of a stage exchange over the network, and would need six times the bound."""
    found = cluster_step("qwen3-32b", 2, 8)
    assert found.estimate.counted_s < 1.35 * found.estimate.lower_bound_s
    assert {group.degree for micro_batch in found.micro_batches for group in micro_batch.groups} == {8}


@pytest.mark.wide
def test_stages_with_room_recompute_no_more_because_others_recompute_everything() -> None:
    found = cluster_step("llama-3.1-70b", 16, 4)
    (group,) = found.micro_batches[0].groups

    def recomputed(place: int) -> int:
        layers = [layer for policy in group.stages[place].activations for layer in policy.layers]
        return sum(any(share.recompute for share in layer.shares) for layer in layers)

    assert recomputed(15) < recomputed(0) / 2
    assert found.estimate.counted_s < 1.35 * found.estimate.lower_bound_s
