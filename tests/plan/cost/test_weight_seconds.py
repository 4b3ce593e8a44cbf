"""Seconds that count for gathers and reduce-scatters, beside a queue that runs them layer by layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.measures.round_traffic import round_traffic
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx.plan.core.settings import GENERIC_GPU, ClusterSpec
from hf_longctx.plan.core.types import Parameters
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.cost.weight_traffic import (
    SLOWED_SHARE,
    Collectives,
    StageGathers,
    StageWeights,
    counted_passes_s,
)

MODEL = named_model("llama-3.2-1b")
PART = MODEL.num_layers, True, True


def costs_of(parameters: Parameters, memory: float = 0.0, per_node: int = 8) -> CostModel:
    hardware = replace(GENERIC_GPU, memory_bytes_per_s=memory)
    cluster = ClusterSpec(8, per_node, hardware)
    return CostModel(MODEL, cluster, default_coefficients(MODEL, cluster), parameters=parameters, shard_ranks=8)


@given(st.floats(0, 10), st.floats(0, 10), st.integers(1, 40))
def test_a_pass_takes_as_long_as_a_queue_of_its_layers(layer_s: float, compute_s: float, num_layers: int) -> None:
    # the first layer is gathered before it computes, and each next one while the layer before it computes
    clock_s = layer_s
    for _ in range(num_layers - 1):
        clock_s += max(layer_s, compute_s)
    clock_s += compute_s
    found = float(Collectives(num_layers, layer_s).counted_s(num_layers * compute_s))
    hidden_s = (num_layers - 1) * min(layer_s, compute_s)
    assert found - SLOWED_SHARE * hidden_s == pytest.approx(clock_s - num_layers * compute_s, abs=1e-9)


@given(st.floats(0, 10), st.integers(1, 40), st.lists(st.floats(0, 100), min_size=2, max_size=2))
def test_more_computing_never_counts_more_and_at_least_the_least(layer_s: float, num_layers: int, beside: list[float]) -> None:
    each = Collectives(num_layers, layer_s, 0.5, 0.25)
    less, more = map(float, each.counted_s(sorted(beside)))
    assert less >= more - 1e-9 and more >= float(each.counted_s()) - 1e-9
    assert float(each.counted_s(0.0)) == pytest.approx(each.links_s + each.copies_s)


@pytest.mark.parametrize("parameters", ["sharded", "gathered_per_round", "gathered_per_step"])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_passes_have_the_traffic_of_a_micro_batch(parameters: Parameters, num_stages: int) -> None:
    costs, num_chunks = costs_of(parameters), 3
    gathers = StageGathers.of(costs, 8, PART, num_stages)
    found = sum(each.links_s for each in (*gathers.in_round(num_chunks), gathers.once))
    traffic = round_traffic(StageWeights.of(MODEL, *PART), costs.cluster, parameters, 8, num_chunks, num_stages)
    assert found == pytest.approx(costs.coefficients.forward.exchange_s(traffic))


def test_copies_pass_all_gathered_weights_and_summed_gradients_through_memory() -> None:
    rate, model = 1e12, MODEL
    gathers = StageGathers.of(costs_of("gathered_per_step", rate), 8, PART, 2)
    bytes_of_weights = 2 * model.num_parameters
    assert gathers.once.copies_s == pytest.approx(2 * bytes_of_weights / rate, rel=1e-3)
    # read in two bytes and written in four, after every backward
    _, _, backward, last = gathers.passes
    assert backward == last
    assert backward.copies_s == pytest.approx((2 + 4) * model.num_parameters / rate, rel=1e-3)


def test_ends_of_a_group_have_the_collectives_of_a_micro_batch() -> None:
    gathers = StageGathers.of(costs_of("gathered_per_round"), 8, PART, 2)
    compute_s = np.zeros((1, 1, 3, 2))
    found = counted_passes_s([[gathers]], compute_s, [1])
    assert found[0, 0, 0, 0] == pytest.approx(gathers.passes[1].links_s) and not found[0, 0, 1:, 0].any()
    assert found[0, 0, 1, 1] == pytest.approx(gathers.passes[3].links_s) and not found[0, 0, [0, 2], 1].any()


def test_blocks_that_do_not_tile_nodes_leave_as_many_as_the_worst_of_them() -> None:
    weights = StageWeights(1, 800, 0, 0)
    # ranks 3 to 5 leave a node once and come back; ranks 0 to 2 do not
    found = round_traffic(weights, ClusterSpec(12, 4, GENERIC_GPU), "gathered_per_round", 3, 1)
    assert found.network_bytes == pytest.approx(found.num_bytes * 2 / 3)
    aligned = round_traffic(weights, ClusterSpec(8, 4, GENERIC_GPU), "gathered_per_round", 2, 1)
    assert aligned.network_bytes == 0
