"""How ranks of a stage share parameters, if that is open, is the fastest of all ways that fit for a step, gathers counted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from helpers.plans.grouping_problems import lognormal_lengths

from hf_longctx.plan.core.settings import GENERIC_GPU, ClusterSpec, PlannerConfig
from hf_longctx.plan.core.types import Parameters
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.planner import plan_step
from hf_longctx.plan.predict.planning import weight_seconds
from hf_longctx.plan.setup import DeviceMemory, Lengths, Measured, Placement, Setup, Wishes, build_setup
from hf_longctx.sim.scenario import Request, build_scenario

MODEL = replace(named_model("llama-3.2-1b"), bytes_per_element=2)
STEP = lognormal_lengths(3, 24, 30_000, 6_000.0)
WAYS: tuple[Parameters, ...] = ("replicated", "gathered_per_round", "gathered_per_step", "sharded")


def setup_of(
    device_gib: float,
    link: float,
    stages: int,
    parameters: Parameters | None,
    step: Sequence[int] = STEP,
    num_nodes: int = 2,
    network: float = GENERIC_GPU.network_bytes_per_s,
) -> Setup:
    """A setup of nodes of four ranks. parameters: None leaves the choice open."""
    num_ranks = 4 * num_nodes
    hardware = replace(GENERIC_GPU, device_bytes=int(device_gib * 2**30), link_bytes_per_s=link, memory_bytes_per_s=1e12)
    hardware = replace(hardware, network_bytes_per_s=network)
    cluster = ClusterSpec(num_ranks, 4, hardware)
    costs = CostModel(MODEL, cluster, default_coefficients(MODEL, cluster))
    memory = replace(DeviceMemory.by_formula(MODEL, hardware.device_bytes), keeps_everything=False)
    degrees = (1, 2, 4)
    placement = Placement(num_ranks, parameters or "replicated", 0, degrees, "auto", ranks_per_node=4)
    wishes = Wishes(PlannerConfig(1, degrees), placement, may_shard=parameters is None, stages=stages)
    lengths = Lengths(lambda: max(step, default=0), lambda: step, list)
    return build_setup(Measured(costs, memory), wishes, lengths, lambda *_: None)


def counted_s(setup: Setup) -> float:
    """Seconds with gathers, sums and updates."""
    plan = plan_step(0, STEP, setup.costs, setup.planner)
    return plan.estimate.counted_s + weight_seconds(plan, setup.costs).left_s


@pytest.mark.wide
@pytest.mark.parametrize("device_gib", [12, 40])
@pytest.mark.parametrize("link", [1e11, 2e9])
def test_no_way_that_fits_is_faster(device_gib: float, link: float) -> None:
    found = setup_of(device_gib, link, 2, None)
    seconds = {}
    for way in WAYS:
        try:
            seconds[way] = counted_s(setup_of(device_gib, link, 2, way))
        except ValueError:
            continue
    assert found.placement.parameters in seconds
    assert counted_s(found) <= 1.01 * min(seconds.values())
    if device_gib == 12:
        assert "replicated" not in seconds
    if device_gib == 40 and link < 1e10:
        # gathers over slow links in every pass cost more than the room that they leave
        assert found.placement.parameters != "sharded"
    assert any("fastest for a step" in note for note in found.notes)


@pytest.mark.wide
def test_without_lengths_of_a_step_shards_are_chosen_by_memory_alone() -> None:
    found = setup_of(12, 1e11, 2, None, ())
    assert found.placement.parameters == "sharded" and found.placement.shard_ranks == 4


def test_a_note_says_that_no_way_holds_the_longest_sequence() -> None:
    found = setup_of(9, 1e11, 2, None, (3000, 60_000))
    assert found.placement.parameters == "sharded"
    (note,) = found.notes
    assert note.startswith("parameters of stages of 4 ranks are sharded, which leaves most room; no way")
    assert "60,000 tokens" in note


@pytest.mark.wide
def test_a_note_says_that_a_stage_of_one_rank_shares_nothing() -> None:
    found = setup_of(40, 1e11, 8, None)
    assert found.notes == ("parameters are whole: a stage is one rank, which shares them with no other",)
    assert setup_of(40, 1e11, 8, "replicated").notes == ()


@pytest.mark.wide
def test_stages_of_several_nodes_shard_inside_a_node_if_the_network_is_slow() -> None:
    few = STEP[:8]
    found = setup_of(12, 1e11, 2, None, few, num_nodes=4, network=5e8)
    assert found.placement.ranks_per_stage == 8 and found.placement.shard_ranks == 4 == found.costs.shard_ranks
    assert any("over 4 ranks each" in note for note in found.notes)
    whole = setup_of(12, 1e11, 2, found.placement.parameters, few, num_nodes=4, network=5e8)
    assert whole.placement.shard_ranks == 8
    slow, fast = (plan_step(0, few, each.costs, each.planner).estimate.counted_s for each in (whole, found))
    assert fast < slow


def test_nodes_keep_copies_if_only_the_network_is_slow() -> None:
    """Neither all states of a stage fit on one node, nor all weights on a rank."""
    sizes = {"num_nodes": 4, "network": 1e9}
    found = setup_of(10, 1e11, 2, None, **sizes)
    assert found.placement.parameters == "gathered_per_node" and found.placement.shard_ranks == 8
    assert found.costs.node_ranks == 4 and any("gathered per node" in note for note in found.notes)
    seconds = {}
    for way in ("gathered_per_node", "gathered_per_step", "sharded"):
        setup = setup_of(10, 1e11, 2, way, **sizes)
        plan = plan_step(0, STEP, setup.costs, setup.planner)
        assert plan.node_ranks == 4 * (way == "gathered_per_node")
        seconds[way] = plan.estimate.counted_s
    assert seconds.pop("gathered_per_node") < 0.8 * min(seconds.values())


def test_nodes_keep_copies_without_stages() -> None:
    plans = {}
    for way in ("gathered_per_node", "sharded"):
        setup = setup_of(14, 1e11, 1, way, STEP[:8], network=2e8)
        plans[way] = plan_step(0, STEP[:8], setup.costs, setup.planner)
    assert plans["gathered_per_node"].estimate.counted_s < 0.8 * plans["sharded"].estimate.counted_s


@pytest.mark.parametrize(("stages", "num_nodes", "shared"), [(1, 1, 4), (2, 2, 4), (4, 2, 2)])
def test_copies_of_a_node_that_shares_all_weights_are_refused(stages: int, num_nodes: int, shared: int) -> None:
    message = f"the {shared} rank.s. that share them are not several whole nodes of 4 rank.s.; use 'sharded'"
    with pytest.raises(ValueError, match=message):
        setup_of(40, 1e11, stages, "gathered_per_node", num_nodes=num_nodes)


@pytest.mark.wide
def test_waits_of_unequal_groups_count_even_if_gathers_take_no_time() -> None:
    """Gathers of adapted weights take less than 1 % of the step, but each of them makes groups wait for one another."""
    generator = random.Random(14)
    lengths = tuple(min(131_072, int(generator.lognormvariate(9.5, 1.3)) + 64) for _ in range(40))
    request = Request("llama-3.1-8b", "h100", 8, step_lengths=lengths, longest_tokens=max(lengths), lora_rank=16)
    seconds, setups = dict[str, float](), dict[str, Setup]()
    for way in ("replicated", "sharded", "auto"):
        setups[way] = build_scenario(replace(request, parameters=way), must_fit=False).setup
        plan = plan_step(0, lengths, setups[way].costs, setups[way].planner)
        assert plan.estimate.gathers_s < 0.01 * plan.estimate.counted_s
        seconds[way] = plan.estimate.counted_s + weight_seconds(plan, setups[way].costs).left_s
    assert seconds["replicated"] < 0.998 * seconds["sharded"]
    assert setups["auto"].placement.parameters == "replicated" and seconds["auto"] == seconds["replicated"]
