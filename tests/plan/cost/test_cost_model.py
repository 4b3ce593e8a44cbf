"""The cost model compared with numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.plans.cost_models import COST_KINDS, HARDWARE, MODEL, cost_model

from hf_longctx.plan.core.settings import ClusterSpec, PlannerConfig
from hf_longctx.plan.core.types import Chunk, GroupShape, Span
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.cost.cost_model import (
    SLOWED_SHARE,
    CostCoefficients,
    CostModel,
    PassCoefficients,
    block_sizes,
    default_coefficients,
)
from hf_longctx.plan.cost.profiles import read_profile
from hf_longctx.plan.cost.traffic import mean_traffic
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.stage import part_state_bytes
from hf_longctx.plan.model.attention_pairs import FULL
from hf_longctx.plan.model.config import ExpertSpec
from hf_longctx.plan.model.model_spec import AdapterSpec, ModelSpec
from hf_longctx.plan.planner import plan_step

# a model of one layer with 4 query heads and 2 KV heads of size 1, and one byte per element, so that bytes are
# elements; heads are exchanged at once
TINY = ModelSpec(1, 4, 8, 4, 2, 1, 10, 100, bytes_per_element=1, exchange_parts=1)
FORWARD = PassCoefficients(2.0, 10.0, 100.0, 1000.0, 7.0, 70.0)
BACKWARD = PassCoefficients(5.0, 20.0, 300.0, 4000.0, 9.0, 90.0)
COEFFICIENTS = CostCoefficients(FORWARD, BACKWARD, 0.0, "test")
COSTS = CostModel(TINY, ClusterSpec(4, 4, HARDWARE), COEFFICIENTS)
ONE, TWO, FOUR = GroupShape(1), GroupShape(2, 2), GroupShape(4, 4)


def test_one_rank_pays_pairs_tokens_and_the_chunk() -> None:
    # 10 tokens: 50 pairs, so 2 * 50 + 10 * 10 + 100
    assert COSTS.forward_s(Chunk(0, (Span(0, 0, 10),)), ONE, 1) == 300
    assert COSTS.backward_s(Chunk(0, (Span(0, 0, 10),)), ONE, 1) == 250 + 200 + 300


def test_a_slice_pays_for_its_prefix() -> None:
    # 4 tokens after 6: 4 * (6 + 2) = 32 pairs
    assert COSTS.forward_s(Chunk(1, (Span(0, 6, 10),)), ONE, 1) == 64 + 40 + 100


def test_a_pack_pays_pairs_per_sequence_and_the_chunk_once() -> None:
    # two sequences of 4 and 6: 8 + 18 pairs, 10 tokens
    assert COSTS.forward_s(Chunk(0, (Span(0, 0, 4), Span(1, 0, 6))), ONE, 1) == 52 + 100 + 100


def test_a_ulysses_group_divides_the_work_and_pays_for_two_exchanges() -> None:
    # 20 tokens with 200 pairs on 2 ranks take (400 + 200) / 2 + 100. Each rank has 10 tokens, exchanges 4 + 2 * 2 heads before
    # attention and 4 after it, and sends half of them away: 10 * 12 / 2 = 60 bytes in 2 messages
    assert COSTS.forward_s(Chunk(0, (Span(0, 0, 20),)), TWO, 1) == 300 + 100 + 7 * 60 + 2 * 1000
    # on 4 ranks every query head needs its own copy of a KV head: 4 + 2 * 4 heads in, 4 out, and 3 / 4 of 5 tokens leave
    assert COSTS.forward_s(Chunk(0, (Span(0, 0, 20),)), FOUR, 1) == 150 + 100 + 7 * 5 * 16 * 3 / 4 + 2 * 1000


def test_a_ring_pays_for_keys_and_values_that_others_see_and_in_backward_for_fp32_gradients() -> None:
    # 10 tokens per rank, of which 3 / 4 travel, with keys and values of 2 KV heads: one hop of 30 bytes, which take 210. Half of
    # the 2 * 200 / 2 of attention hides 100 of them
    assert COSTS.forward_s(Chunk(0, (Span(0, 0, 20),)), GroupShape(2), 1) == 300 + 100 + 7 * 30 + 1000 - 100
    # backward: one hop of keys and values, of whose 270 half of 5 * 200 / 2 hides 250, and one of their gradients with four
    # bytes per element, which nothing hides
    expected = (5 * 200 + 20 * 20) / 2 + 300 + 9 * (30 + 4 * 30) + 2 * 4000 - 250
    assert COSTS.backward_s(Chunk(0, (Span(0, 0, 20),)), GroupShape(2), 1) == expected


def test_a_hybrid_pays_for_both_with_fewer_heads_around_the_ring() -> None:
    # blocks of 2: 5 tokens per rank, 5 * 12 / 2 bytes within a block; around the two blocks 7.5 tokens of one KV head: 15 bytes,
    # of whose 105 half of the 100 of attention are hidden
    shape = GroupShape(4, 2)
    assert COSTS.forward_s(Chunk(0, (Span(0, 0, 20),)), shape, 1) == 150 + 100 + 7 * (30 + 15) + 3 * 1000 - 50


def round_by_round(num_blocks: int, tile_s: float, keys_s: float, gradients_s: float) -> float:
    """Seconds of a ring in which every round computes one block's tiles, if there are any, while its messages travel."""
    total_s = 0.0
    for hop in range(num_blocks + 1):
        computed = tile_s if hop < num_blocks else 0.0
        sent = (keys_s if hop + 1 < num_blocks else 0.0) + (gradients_s if hop >= 2 else 0.0)
        total_s += max(computed, sent)
    return total_s


@pytest.mark.parametrize("shape", [GroupShape(2), GroupShape(3), GroupShape(4), GroupShape(8), GroupShape(8, 2)], ids=str)
@pytest.mark.parametrize("num_tokens", [16, 160, 400, 1600, 8000])
def test_each_hop_takes_the_longer_of_its_tiles_and_its_messages(shape: GroupShape, num_tokens: int) -> None:
    costs = replace(
        COSTS,
        cluster=ClusterSpec(8, 4, HARDWARE),
        coefficients=CostCoefficients(replace(FORWARD, pair_s=0.02), replace(BACKWARD, pair_s=0.05), 0.0, "test"),
    )
    chunk, blocks = Chunk(0, (Span(0, 0, num_tokens),)), shape.num_blocks
    for is_backward, rates in ((False, costs.coefficients.forward), (True, costs.coefficients.backward)):
        byte_s = rates.network_byte_s if shape.degree > 4 else rates.link_byte_s
        # keys and values of the KV heads that a rank runs, of all but the last of the zigzag pieces
        keys_s = byte_s * num_tokens / blocks * (1 - 1 / (2 * blocks)) * 4 / shape.ulysses
        gradients_s = 4 * keys_s if is_backward else 0.0
        tile_s = rates.pair_s * num_tokens**2 / 2 / shape.degree / blocks
        one_by_one = blocks * tile_s + (blocks - 1) * (keys_s + gradients_s)
        hidden_s = one_by_one - round_by_round(blocks, tile_s, keys_s, gradients_s)
        assert costs.chunk_hidden_s(chunk, shape, is_backward) == pytest.approx(hidden_s, rel=1e-9, abs=1e-9)
        assert costs.without_overlap(1.0, chunk, shape, is_backward) >= 1.0


@pytest.mark.parametrize("pair_s", [1e-13, 4e-13, 1e-9])
@pytest.mark.parametrize("most,exposed", [(1, 1.0), (2, 1 / 2), (3, 1 / 2), (4, (2 * 4 + 2) / 36), (9, (2 * 2 + 2) / 36)])
def test_exchanges_of_parts_hide_behind_attention_of_others(most: int, exposed: float, pair_s: float) -> None:
    # 8 query heads for each of 8 KV heads. On 4 ranks, 16 query heads and 2 KV heads: two halves have a KV head each, a quarter
    # has half of the readers of one, an eighth a quarter of them
    model = replace(named_model("llama-3.1-70b"), exchange_parts=most)
    rates = PassCoefficients(pair_s, 1e-6, 0.0, 1e-5, 1e-11, 1e-10)
    coefficients = CostCoefficients(rates, rates, 0.0, "test")
    costs = CostModel(model, ClusterSpec(8, 4, HARDWARE), coefficients, "ulysses")
    num_tokens, shape = 40_000, GroupShape(4, 4)
    chunk, whole = Chunk(0, (Span(0, 0, num_tokens),)), replace(costs, model=replace(model, exchange_parts=1))
    # queries, keys, values and outputs of all layers, of which a rank keeps a quarter
    sent_s = 80 * 0.75 * num_tokens / 4 * 2 * 128 * (2 * 64 + 2 * 8) * 1e-11
    attention_s = pair_s * num_tokens**2 / 2 / 4
    count = {1: 1, 2: 2, 3: 2, 4: 4, 9: 8}[most]
    hidden_s = (1 - SLOWED_SHARE) * min((1 - exposed) * sent_s, (1 - 1 / count) * attention_s)
    for is_backward in (False, True):
        assert costs.chunk_hidden_s(chunk, shape, is_backward) == pytest.approx(hidden_s)
        assert whole.chunk_hidden_s(chunk, shape, is_backward) == 0.0
    assert whole.forward_s(chunk, shape, 80) - costs.forward_s(chunk, shape, 80) == pytest.approx(hidden_s)
    assert whole.sequences_s([num_tokens], shape)[0] - costs.sequences_s([num_tokens], shape)[0] == pytest.approx(2 * hidden_s)
    # ranks that divide heads unevenly, and models whose attention is masked by more than its pattern, exchange all at once
    for other, of_shape in ((costs, GroupShape(3, 3)), (replace(costs, model=replace(model, drops_weights=True)), shape)):
        assert other.chunk_hidden_s(chunk, of_shape, False) == 0.0


def test_layers_with_windows_hide_no_more_than_their_own_attention() -> None:
    full = replace(named_model("gemma-3-12b"), windows=())
    windows = tuple([512, None] * (full.num_layers // 2))
    rates = PassCoefficients(1e-11, 1e-6, 0.0, 0.0, 1e-11, 1e-10)
    chunk, shape, hidden = Chunk(0, (Span(0, 0, 40_000),)), GroupShape(4, 4), []
    for model in (full, replace(full, windows=windows), replace(full, windows=(512,) * full.num_layers)):
        costs = CostModel(model, ClusterSpec(4, 4, HARDWARE), CostCoefficients(rates, rates, 0.0, "test"), "ulysses")
        hidden.append(costs.chunk_hidden_s(chunk, shape, False))
    all_full, half, none_full = hidden
    assert half == pytest.approx((all_full + none_full) / 2) and none_full < all_full / 2


@pytest.mark.parametrize("lengths", [[6_000] * 8, [4_000] * 16, [30_000, *[3_000] * 10]], ids=str)
def test_sequences_that_hide_more_together_take_no_less_than_the_bound(lengths: list[int]) -> None:
    # alone, each sequence would be exchanged at once or in few parts; packed they have four
    model, cluster = named_model("llama-3.1-8b"), ClusterSpec(8, 8, read_profile("a100-40g").spec)
    costs = CostModel(model, cluster, default_coefficients(model, cluster), "ulysses")
    plan = plan_step(0, lengths, costs, PlannerConfig(8_192, (8,)))
    assert any(costs.chunk_hidden_s(chunk, GroupShape(8, 8), False) for b in plan.micro_batches for chunk in b.groups[0].chunks)
    assert plan.estimate.lower_bound_s <= plan.estimate.step_s


def test_bytes_to_other_nodes_go_over_the_network() -> None:
    nodes = replace(COSTS, cluster=ClusterSpec(4, 2, HARDWARE))
    chunk = Chunk(0, (Span(0, 0, 20),))
    # two of three neighbours are on the other node
    assert nodes.forward_s(chunk, FOUR, 1) == pytest.approx(150 + 100 + (7 * 1 + 70 * 2) / 3 * 60 + 2000)
    # a ring across nodes runs at the speed of the network, a block inside a node at that of its links
    assert nodes.forward_s(chunk, GroupShape(4, 2), 1) == 150 + 100 + 7 * 30 + 70 * 15 + 3000 - 50
    assert nodes.forward_s(chunk, GroupShape(2), 1) == COSTS.forward_s(chunk, GroupShape(2), 1)


def test_layers_scale_the_whole_chunk() -> None:
    costs, chunk = cost_model("exchange", 4), Chunk(0, (Span(0, 0, 20),))
    assert costs.forward_s(chunk, TWO, 1) == costs.forward_s(chunk, TWO, 4) / 4
    assert costs.backward_s(chunk, TWO, 3) == pytest.approx(costs.backward_s(chunk, TWO, 4) * 3 / 4)


def test_a_chunk_with_too_few_tokens_costs_one_token_per_rank() -> None:
    assert COSTS.forward_s(Chunk(0), ONE, 1) == 10 + 100
    # 4 padded tokens on 4 ranks; the pairs are those of the real token
    assert COSTS.forward_s(Chunk(0, (Span(0, 0, 1),)), FOUR, 1) == (2 * 0.5 + 10 * 4) / 4 + 100 + 7 * 12 + 2000


def test_sequences_and_group_seconds_by_hand() -> None:
    # one rank: (2 + 5) * n^2 / 2 + (10 + 20) * n
    assert COSTS.sequences_s([10, 2], ONE).tolist() == [350 + 300, 14 + 60]
    # two ranks: half of that, and (7 + 9) * n / 2 * 12 / 2 bytes
    assert COSTS.sequences_s([10, 2], TWO).tolist() == [325 + 480, 37 + 96]
    assert COSTS.group_s(ONE) == 400
    assert COSTS.group_s(TWO) == COSTS.group_s(FOUR) == 400 + 2 * 5000
    assert COSTS.group_s(GroupShape(4)) == 400 + 3 * 1000 + 6 * 4000


@pytest.mark.parametrize("kind", COST_KINDS)
@pytest.mark.parametrize("shape", [ONE, TWO, FOUR, GroupShape(3), GroupShape(4, 2)], ids=str)
def test_a_packed_chunk_costs_its_sequences_and_its_group(kind: str, shape: GroupShape) -> None:
    costs, lengths = cost_model(kind, 4), [40, 700, 4, 93]
    chunk = Chunk(0, tuple(Span(i, 0, length) for i, length in enumerate(lengths)))
    whole = costs.forward_s(chunk, shape, MODEL.num_layers) + costs.backward_s(chunk, shape, MODEL.num_layers)
    assert whole == pytest.approx(costs.sequences_s(lengths, shape).sum() + costs.group_s(shape), rel=1e-12)


# 8 query heads and 2 KV heads of size 8 in 4 layers
@pytest.mark.parametrize(
    ("degree", "ranks_per_node", "coefficients", "method"),
    [
        # with few KV heads a ring passes on fewer bytes than Ulysses exchanges for all query heads
        (2, 8, {"link_byte_s": 1e-9}, "ring"),
        # more ranks than query heads: no Ulysses
        (16, 16, {"link_byte_s": 1e-9}, "hybrid"),
        # if only the network costs, a hybrid is best: only keys and values cross it, each once
        (8, 2, {"network_byte_s": 1e-9}, "hybrid"),
        # if no exchange has a known cost, the shape with the fewest messages
        (8, 8, {}, "ulysses"),
        # only the number of messages counts
        (8, 8, {"message_s": 1e-3}, "ulysses"),
        # three ranks cannot be divided into blocks of two, and Ulysses needs a power of two
        (3, 8, {"link_byte_s": 1e-9}, "ring"),
        (1, 8, {"link_byte_s": 1e-9}, "local"),
    ],
)
def test_the_method_follows_heads_degree_and_links(degree: int, ranks_per_node: int, coefficients: dict, method: str) -> None:
    one_pass = PassCoefficients(1.0, 1.0, 1.0, **coefficients)
    cluster = ClusterSpec(32, ranks_per_node, HARDWARE)
    costs = CostModel(MODEL, cluster, CostCoefficients(one_pass, one_pass, 0.0, "test"))
    assert costs.best_shape(degree, 1000.0 * degree).method == method


def test_with_as_many_kv_heads_as_query_heads_ulysses_sends_the_least() -> None:
    one_pass = PassCoefficients(1.0, 1.0, 1.0, link_byte_s=1e-9)
    coefficients = CostCoefficients(one_pass, one_pass, 0.0, "test")
    costs = CostModel(replace(MODEL, num_kv_heads=8), ClusterSpec(32, 8, HARDWARE), coefficients)
    assert costs.best_shape(4, 4000.0).method == "ulysses"


def test_a_method_can_be_asked_for() -> None:
    for method, shape in (("ulysses", FOUR), ("ring", GroupShape(4)), ("hybrid", GroupShape(4, 2))):
        assert replace(COSTS, method=method).best_shape(4, 100.0) == shape
    with pytest.raises(ValueError, match="groups of 8 ranks cannot share 4 heads by method 'ulysses'; use 'auto'"):
        replace(COSTS, method="ulysses").best_shape(8, 100.0)


def test_block_sizes_are_what_a_pool_must_hold() -> None:
    cluster = ClusterSpec(8, 8, HARDWARE)
    for method, sizes in (("auto", (2, 4)), ("ulysses", (2, 4)), ("hybrid", (2,)), ("ring", ())):
        assert block_sizes((1, 2, 3, 4, 6), CostModel(TINY, cluster, COEFFICIENTS, method)) == sizes


def test_groups_above_the_favoured_degree_are_avoided() -> None:
    dear = replace(COSTS, favoured_degree=2)
    assert dear.group_s(TWO) == COSTS.group_s(TWO)
    assert dear.group_s(FOUR) > 100 * COSTS.group_s(FOUR)
    assert dear.sequences_s([10], FOUR)[0] > 100 * COSTS.sequences_s([10], FOUR)[0]


def test_a_rank_holds_weights_gradients_and_moments() -> None:
    costs = cost_model("linear", 4)
    # weights and gradients of 4 bytes, two moments of 4 bytes
    assert ByteModel(costs.model).states(costs.parameters, costs.shard_ranks) == 16 * MODEL.num_parameters


def test_shards_are_divided_and_what_is_gathered_is_not() -> None:
    # 10 layers of 8 * 2 * (8 + 4) + 3 * 8 * 16 = 576 parameters; embedding and head have 80 each
    model = ModelSpec(10, 8, 16, 4, 2, 2, 10, 100, bytes_per_element=4)
    assert ByteModel(model).states() == ByteModel(model).states("replicated", 4) == 16 * 5920
    # gradients of the head and of two layers, what other ranks send of the largest matrix of 8 * 16, and a quarter of a sum
    in_flight = 4 * (80 + 2 * 576 + 128 + 576 // 4)
    # a quarter of all states, plus gathered weights of two layers and the embeddings, or all weights
    assert ByteModel(model).states("sharded", 4) == 4 * 5920 + 4 * (2 * 576 + 160) + in_flight
    assert ByteModel(model).states("gathered_per_round", 4) == 4 * 5920 + 4 * 5920 + in_flight
    costs = replace(COSTS, model=model, parameters="sharded", shard_ranks=4)
    assert ByteModel(costs.model).states(costs.parameters, costs.shard_ranks) == ByteModel(model).states("sharded", 4)


def test_frozen_weights_have_neither_gradients_nor_moments() -> None:
    # weights of 2 bytes as above, 10 adapters of 100 in 4 bytes, and a copy of the head of 80 in 2 bytes
    adapters = AdapterSpec(layer_parameters=100, layer_bytes=400, last_parameters=80, last_bytes=160)
    model = ModelSpec(10, 8, 16, 4, 2, 2, 10, 100, bytes_per_element=2, adapters=adapters)
    trained, states = 10 * 100 + 80, 10 * 400 + 160
    whole = 2 * 5920 + 2 * states + 8 * trained
    assert ByteModel(model).states() == whole
    # a quarter of it without gradients in half precision, weights of two layers, embedding and head, and gradients in flight: of
    # the head and two layers, what others send of them, and a quarter of a sum
    unit, share = 2 * (2 * 576 + 160) + 2 * 400 + 160, (whole - 160) // 4
    in_flight = 160 + 3 * 400 + 400 // 4
    assert ByteModel(model).states("sharded", 4) == share + unit + in_flight
    assert ByteModel(model).states("gathered_per_round", 4) == share + (2 * 5920 + states) + in_flight
    # the first of two stages has no head
    assert part_state_bytes(model, 5, True, False, "replicated", 1) == 2 * (5 * 576 + 80) + 5 * (800 + 800)
    assert part_state_bytes(model, 5, False, True, "replicated", 1) == whole - 2 * (5 * 576 + 80) - 5 * (800 + 800)


def test_weights_that_autocast_rounds_are_gathered_in_half_the_bytes() -> None:
    # a layer of 576 parameters, embedding and head of 80 each; all of a layer but 76, and the head, are rounded
    wide = ModelSpec(5, 8, 16, 4, 2, 2, 10, 100, bytes_per_element=4)
    model = replace(wide, rounded_parameters=500, rounds_head=True)
    assert ByteModel(wide).states("replicated", 1) == ByteModel(model).states("replicated", 1)
    for parameters, num_layers in (("sharded", 2), ("gathered_per_round", 5)):
        saved = ByteModel(wide).states(parameters, 4) - ByteModel(model).states(parameters, 4)
        # gradients in flight: of the head and two layers, and what others send of the largest matrix; those that a micro-batch
        # adds up are sent in fp32
        sent = 500 + 128 if parameters == "sharded" else 0
        assert saved == 2 * (num_layers * 500 + 80) + 2 * (500 + 80 + sent)
    # experts that are spread over ranks are not gathered at all
    experts = ExpertSpec(parameters=300, token_rows=1, num_layers=5, num_experts=4, are_rounded=True)
    assert replace(model, experts=experts).rounded_bytes(5, False) == 2 * 5 * (500 + 300)
    assert replace(model, experts=replace(experts, num_ranks=2)).rounded_bytes(5, False) == 2 * 5 * 500
    # nothing is left to round in weights of two bytes
    assert replace(model, bytes_per_element=2).rounded_bytes(5, True) == 0


def test_default_coefficients_count_operations() -> None:
    model = ModelSpec(2, 8, 16, 4, 2, 2, 10, 100, bytes_per_element=2)
    costs = default_coefficients(model, ClusterSpec(4, 4, HARDWARE))
    # a layer: 8 * 2 * (8 + 4) + 3 * 8 * 16 = 576 parameters; the head: 80
    assert costs.forward.token_s == pytest.approx(2 * (2 * 576 + 80) / 1e12)
    # 4 operations per element of a head and pair: 2 layers * 4 heads * 2 elements
    assert costs.forward.pair_s == pytest.approx(4 * 16 / 5e11)
    assert costs.backward.token_s == pytest.approx(2 * costs.forward.token_s)
    assert costs.backward.pair_s == pytest.approx(2.5 * costs.forward.pair_s)
    for one_pass in (costs.forward, costs.backward):
        assert (one_pass.message_s, one_pass.link_byte_s, one_pass.network_byte_s) == (1e-4, 1e-9, 4e-9)
    assert (costs.source, costs.is_measured) == ("default", False)
    assert CostCoefficients(FORWARD, BACKWARD, 0.0, "run 3").is_measured


def test_a_group_across_nodes_pays_the_network_though_it_would_fit_into_one() -> None:
    one_pass = PassCoefficients(1.0, 1.0, 1.0, link_byte_s=1e-9, network_byte_s=1e-8)
    costs = CostModel(MODEL, ClusterSpec(8, 4, HARDWARE), CostCoefficients(one_pass, one_pass, 0.0, "test"))
    chunk, shape = Chunk(0, (Span(0, 0, 4000),)), GroupShape(4, 4)
    sent = mean_traffic(MODEL, costs.cluster, shape, 4000.0, is_backward=False).num_bytes
    inside, across = (costs.forward_s(chunk, shape, MODEL.num_layers, near) for near in (4, 2))
    # two of three neighbours are on the other node
    assert across - inside == pytest.approx(sent * 2 / 3 * (1e-8 - 1e-9))
    assert costs.forward_s(chunk, shape, MODEL.num_layers) == inside


def test_a_measured_rate_of_an_exchange_replaces_what_links_and_network_would_say() -> None:
    hardware = replace(HARDWARE, exchange_bytes_per_s=((4, 4e8), (8, 1e8)))
    cluster = ClusterSpec(16, 4, hardware)
    costs = CostModel(MODEL, cluster, default_coefficients(MODEL, cluster), "ulysses")
    for degree, rate in ((4, 4e8), (8, 1e8)):
        shape = GroupShape(degree, degree)
        sent = mean_traffic(MODEL, ClusterSpec(16, 4, HARDWARE), shape, 1000.0, is_backward=False).num_bytes
        exchange_s = replace(costs.coefficients.forward, pair_s=0.0, token_s=0.0, chunk_s=0.0, message_s=0.0, tile_s=0.0)
        free = replace(costs, coefficients=replace(costs.coefficients, forward=exchange_s))
        assert free.forward_s(Chunk(0, (Span(0, 0, 1000),)), shape, MODEL.num_layers) == pytest.approx(sent / rate)


def test_many_short_documents_make_a_ring_dear() -> None:
    one_pass = PassCoefficients(1e-9, 1e-9, 0.0, message_s=1e-4, tile_s=1e-3)
    costs = CostModel(replace(MODEL, num_kv_heads=8), ClusterSpec(4, 4, HARDWARE), CostCoefficients(one_pass, one_pass, 0.0, "t"))
    ring, ulysses = GroupShape(4), GroupShape(4, 4)
    pack = Chunk(0, tuple(Span(i, 0, 10) for i in range(100)))
    long = Chunk(0, (Span(0, 0, 1000),))
    for shape, tiles in ((ring, 4 * 100), (ulysses, 0)):
        difference = costs.forward_s(pack, shape, MODEL.num_layers) - costs.forward_s(long, shape, MODEL.num_layers)
        pairs_s = 1e-9 * (FULL.of_chunk(pack) - FULL.of_chunk(long)) / 4
        assert difference == pytest.approx(pairs_s + tiles * 1e-3 - (4e-3 if tiles else 0.0))
        alone = costs.sequences_s([10.0] * 100, shape).sum() + costs.group_s(shape)
        both = sum(one(pack, shape, MODEL.num_layers) for one in (costs.forward_s, costs.backward_s))
        assert alone == pytest.approx(both)
    assert costs.best_shape(4, 1000.0, 100.0) == ulysses


def test_stages_add_up_to_the_model_and_only_the_last_pays_for_the_head() -> None:
    costs, chunk, shape = cost_model("exchange", 8), Chunk(0, (Span(0, 30, 90), Span(1, 0, 20))), GroupShape(2, 2)
    layers = costs.model.num_layers
    for is_backward, whole in ((False, costs.forward_s), (True, costs.backward_s)):
        parts = [costs.part_s(chunk, shape, is_backward, count, has_head) for count, has_head in ((1, False), (layers - 1, True))]
        assert sum(parts) == pytest.approx(whole(chunk, shape, layers))
    # 40 tokens on each of two ranks pay 10 s each for the head's share of the products
    head_s = COSTS.part_s(chunk, TWO, False, 0, True)
    assert head_s == pytest.approx(40 * 10 * 40 / (TINY.layer_parameters + 40))


def test_a_hop_moves_hidden_states_over_the_link_or_the_network() -> None:
    assert COSTS.hop_s(5, leaves_node=False) == 1000 + 7 * 5 * 4
    assert COSTS.hop_s(5, leaves_node=True) == 1000 + 70 * 5 * 4


def test_a_head_that_takes_longer_than_its_products_leaves_less_for_the_layers() -> None:
    chunk, share = Chunk(0, (Span(0, 0, 80),)), 40 / (TINY.layer_parameters + 40)
    costs = replace(COSTS, coefficients=replace(COEFFICIENTS, forward=replace(FORWARD, head_factor=2.0)))
    assert costs.part_s(chunk, TWO, False, 0, True) == pytest.approx(2 * 40 * 10 * share)
    # the model as a whole takes as long as before, and the backward pass has its own factor
    assert costs.part_s(chunk, TWO, False, 1, True) == pytest.approx(COSTS.forward_s(chunk, TWO, 1))
    assert costs.part_s(chunk, TWO, True, 0, True) == COSTS.part_s(chunk, TWO, True, 0, True)
    # the head never takes more than all seconds of a token
    endless = replace(costs, coefficients=replace(COEFFICIENTS, forward=replace(FORWARD, head_factor=1e6)))
    assert endless.head_share(is_backward=False) == 1.0
