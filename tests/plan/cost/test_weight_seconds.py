"""Seconds that count for gathers and reduce-scatters, beside a queue that runs them layer by layer."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from helpers.measures.round_traffic import EXCHANGES, round_traffic
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx.plan.core.settings import GENERIC_GPU, ClusterSpec
from hf_longctx.plan.core.types import Parameters
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.cost.traffic import Traffic
from hf_longctx.plan.cost.weight_traffic import (
    NEXT_SHARE,
    SLOWED_SHARE,
    Collectives,
    StageGathers,
    StageWeights,
    counted_passes_s,
    ends_s,
    keeping_passes,
    to_nodes_s,
)

MODEL = named_model("llama-3.2-1b")
PART = MODEL.num_layers, True, True


def costs_of(parameters: Parameters, memory: float = 0.0, per_node: int = 8) -> CostModel:
    hardware = replace(GENERIC_GPU, memory_bytes_per_s=memory)
    cluster, model = ClusterSpec(8, per_node, hardware), replace(MODEL, node_ranks=per_node)
    return CostModel(model, cluster, default_coefficients(model, cluster), parameters=parameters, shard_ranks=8)


def queue_s(num_layers: int, gather_s: float, sum_s: float, compute_s: float, is_ahead: bool) -> float:
    """Seconds of a pass on a queue of links: the next gather and the last layer's sum run while a layer computes."""
    clock_s = 0.0 if is_ahead else gather_s
    for layer in range(num_layers):
        gathers_next = is_ahead or layer < num_layers - 1
        clock_s += max(compute_s, gathers_next * gather_s + (layer > 0) * sum_s)
    return clock_s


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 10), st.integers(1, 40), st.booleans())
def test_a_pass_takes_as_long_as_a_queue_of_its_layers(
    gather_s: float, sum_s: float, compute_s: float, num_layers: int, is_ahead: bool
) -> None:
    clock_s = queue_s(num_layers, gather_s, sum_s, compute_s, is_ahead)
    each = Collectives(num_layers, gather_s, sum_s, is_ahead=is_ahead)
    found = float(each.counted_s(num_layers * compute_s))
    # the last sum counts as far as the next pass's first layer does not hide it beside a gather
    last_s = sum_s - min(sum_s, max(0.0, NEXT_SHARE * compute_s - gather_s))
    exposed_s = clock_s - num_layers * compute_s + last_s
    hidden_s = each.links_s - exposed_s
    # layers that gather nothing, at the ends, cannot hide sums of others
    assert found >= exposed_s + SLOWED_SHARE * hidden_s - 1e-6
    if min(gather_s, sum_s) == 0 or gather_s + sum_s <= compute_s:
        assert found == pytest.approx(exposed_s + SLOWED_SHARE * hidden_s, abs=1e-6)


@given(st.floats(0, 10), st.floats(0, 10), st.integers(1, 40))
def test_a_layer_that_stays_gathered_takes_as_long_as_none(layer_s: float, compute_s: float, num_layers: int) -> None:
    each = Collectives(num_layers, layer_s, layer_s / 2, is_ahead=True)
    kept = replace(each, keeps_first=True)
    assert kept.links_s == pytest.approx(each.links_s - layer_s)
    # the part that the pass before hid counted for the share by which kernels slow down
    hidden_s = min(layer_s, compute_s)
    seconds = [float(one.counted_s(num_layers * compute_s)) for one in (kept, each)]
    assert seconds[0] == pytest.approx(seconds[1] - (layer_s - (1 - SLOWED_SHARE) * hidden_s), abs=1e-6)


def test_passes_keep_the_layer_with_which_the_one_before_ended() -> None:
    # F0 F1 B1 F2 B2 B0: only B1, F2 and B2 begin where the pass before ended
    is_forward, chunks = np.array([True, True, False, True, False, False]), np.array([0, 1, 1, 2, 2, 0])
    found = keeping_passes([(is_forward, chunks, np.zeros(6, dtype=np.int64))], 1, 3)
    assert found[0, 0].tolist() == [[False, False], [False, True], [True, True]]
    # with two layer ranges, the last layer of one is not the first of the other
    found = keeping_passes([(is_forward, chunks, np.array([0, 0, 1, 1, 1, 0]))], 2, 3)
    assert not found[0].any() and found[1, 0].tolist() == [[False, False], [False, False], [True, True]]


@given(st.floats(0, 10), st.integers(1, 40), st.lists(st.floats(0, 100), min_size=2, max_size=2), st.booleans())
def test_more_computing_never_counts_more_and_at_least_the_least(
    layer_s: float, num_layers: int, beside: list[float], is_ahead: bool
) -> None:
    each = Collectives(num_layers, layer_s, layer_s / 2, 0.5, 0.25, is_ahead)
    less, more = map(float, each.counted_s(sorted(beside)))
    assert less >= more - 1e-9 and more >= float(each.counted_s()) - 1e-9
    assert float(each.counted_s(0.0)) == pytest.approx(each.links_s + each.copies_s)


@pytest.mark.parametrize("parameters", ["sharded", "gathered_per_round", "gathered_per_step"])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_passes_have_the_traffic_of_a_micro_batch(parameters: Parameters, num_stages: int) -> None:
    costs, num_chunks = costs_of(parameters), 3
    gathers = StageGathers.of(costs, 8, PART, num_stages)
    found = sum(count * each.links_s for count, each in (*gathers.in_round(num_chunks), (1, gathers.once)))
    traffic = round_traffic(StageWeights.of(MODEL, *PART), costs.cluster, parameters, 8, num_chunks, num_stages)
    assert found == pytest.approx(costs.coefficients.forward.exchange_s(traffic))


@pytest.mark.parametrize(("per_node", "num_ranks"), [(8, 8), (4, 8)])
def test_measured_gathers_take_the_place_of_those_by_exchanges(per_node: int, num_ranks: int) -> None:
    """Rates of eight ranks count where a block crosses nodes, those of a node's ranks inside one; both with measured passes."""
    costs, inside, across, scatters = costs_of("sharded", per_node=per_node), 3e9, 1e9, 2e9
    rates = ((per_node, inside), (8, across)) if per_node < 8 else ((8, inside),)
    hardware = replace(costs.cluster.hardware, gather_bytes_per_s=rates, scatter_bytes_per_s=((per_node, scatters),))
    measured = replace(costs.coefficients, forward=replace(costs.coefficients.forward, token_s=1e-6), source="calibrated")
    known = replace(costs, coefficients=measured, cluster=replace(costs.cluster, hardware=hardware))
    assert known.counts_weights and not replace(known, parameters="replicated").counts_weights
    found, weights = StageGathers.of(known, num_ranks, PART), StageWeights.of(MODEL, *PART)
    sent = weights.layers / MODEL.num_layers * 7 / 8
    assert found.of_pass(False, False).gather_s == pytest.approx(hardware.message_s + sent / (across if per_node < 8 else inside))
    # four ranks lie on one node
    (forward, *_, last), own = StageGathers.of(known, 4, PART).passes, weights.layers / MODEL.num_layers * 3 / 4
    assert forward.gather_s == pytest.approx(hardware.message_s + own / inside)
    summed = StageWeights.of(MODEL, MODEL.num_layers, False, False).gradients / MODEL.num_layers / 2 * 3 / 4
    assert last.gather_s == forward.gather_s and last.sum_s == pytest.approx(EXCHANGES * hardware.message_s + summed / scatters)
    assert StageGathers.of(replace(known, cluster=costs.cluster), num_ranks, PART) == StageGathers()


def test_gradients_that_are_added_up_are_read_and_weights_are_not() -> None:
    rate, model = 1e12, MODEL
    gathers = StageGathers.of(costs_of("gathered_per_step", rate), 8, PART, 2)
    forward, _, backward, last, only = gathers.passes
    assert backward == last == only
    assert gathers.once.copies_s == forward.copies_s == 0
    assert backward.copies_s == pytest.approx(2 * model.num_parameters / rate, rel=1e-3)


def test_a_step_counts_its_first_gather_and_last_sums() -> None:
    gathers = StageGathers.of(costs_of("sharded"), 8, PART, 2)
    forward, _, _, last, _ = gathers.passes
    assert forward.is_ahead and last.is_ahead
    all_s = forward.gather_s + last.sum_s + last.outside_s
    assert sum(ends_s([gathers])) == pytest.approx(gathers.once.links_s + (1 - SLOWED_SHARE) * all_s)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_nodes_that_keep_copies_run_passes_alone_and_exchange_once(num_stages: int) -> None:
    costs = costs_of("gathered_per_node", 1e12, per_node=4)
    gathers, of_node = StageGathers.of(costs, 8, PART, num_stages), costs_of("sharded", 1e12, per_node=4)
    # passes are those of one node whose ranks share the weights and sum in every backward
    assert gathers.passes == StageGathers.of(of_node, 4, PART, 2).passes
    assert gathers.once == StageGathers.of(of_node, 8, PART, 2).once
    weights, layers = StageWeights.of(costs.model, *PART), StageWeights.of(costs.model, MODEL.num_layers, False, False)
    # each rank exchanges its quarter with the same quarter of the other node: half of it leaves
    network_s = costs.coefficients.forward.exchange_s(Traffic(0.0, (weights.layers + weights.gradients) / 4 / 2, 0))
    messages = 2 * MODEL.num_layers + 1
    found = gathers.to_nodes.links_s + gathers.across_nodes.links_s
    assert found == pytest.approx(network_s + messages * costs.cluster.hardware.message_s)
    assert gathers.across_nodes.outside_s > 0 and layers.gradients < weights.gradients


def test_ranks_of_a_node_share_the_measured_rate_between_nodes() -> None:
    costs, inside, across = costs_of("gathered_per_node", per_node=4), 3e9, 1e9
    hardware = replace(costs.cluster.hardware, gather_bytes_per_s=((4, inside), (8, across)), scatter_bytes_per_s=((4, inside),))
    gathers = StageGathers.of(replace(costs, cluster=replace(costs.cluster, hardware=hardware)), 8, PART)
    layer = StageWeights.of(costs.model, *PART).layers / MODEL.num_layers
    # four ranks send an eighth of the layer each, through one network
    assert gathers.to_nodes.gather_s == pytest.approx(hardware.message_s + layer / 2 / across)
    assert gathers.passes[0].gather_s == pytest.approx(hardware.message_s + layer * 3 / 4 / inside)


def test_a_first_forward_and_a_last_backward_hide_what_crosses_nodes() -> None:
    gathers = StageGathers.of(costs_of("gathered_per_node", per_node=4), 8, PART, 2)
    to_nodes, across = gathers.to_nodes, gathers.across_nodes
    assert to_nodes_s([gathers], 0.0) == pytest.approx(to_nodes.links_s)
    share = 1 - (1 - SLOWED_SHARE) * (MODEL.num_layers - 1) / MODEL.num_layers
    assert to_nodes_s([gathers]) == pytest.approx(share * to_nodes.links_s)
    least_s, most_s = (ends_s([gathers], math.inf, last_s)[1] for last_s in (math.inf, 0.0))
    plain = ends_s([replace(gathers, across_nodes=Collectives())])[1]
    assert least_s - plain == pytest.approx(share * across.num_layers * across.sum_s + across.outside_s)
    assert most_s == pytest.approx(across.links_s)


def test_ends_of_a_group_have_the_collectives_of_a_micro_batch() -> None:
    gathers = StageGathers.of(costs_of("gathered_per_round"), 8, PART, 2)
    compute_s = np.zeros((1, 1, 3, 2))
    found = counted_passes_s([[gathers]], compute_s, [1], np.zeros_like(compute_s, dtype=bool))
    assert found[0, 0, 0, 0] == pytest.approx(gathers.passes[1].links_s) and not found[0, 0, 1:, 0].any()
    assert found[0, 0, 1, 1] == pytest.approx(gathers.passes[3].links_s) and not found[0, 0, [0, 2], 1].any()


def test_blocks_that_do_not_tile_nodes_leave_as_many_as_the_worst_of_them() -> None:
    weights = StageWeights(1, 800, 0, 0, 0)
    # ranks 3 to 5 leave a node once and come back; ranks 0 to 2 do not
    found = round_traffic(weights, ClusterSpec(12, 4, GENERIC_GPU), "gathered_per_round", 3, 1)
    assert found.network_bytes == pytest.approx(found.num_bytes * 2 / 3)
    aligned = round_traffic(weights, ClusterSpec(8, 4, GENERIC_GPU), "gathered_per_round", 2, 1)
    assert aligned.network_bytes == 0
