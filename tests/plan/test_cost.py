"""Promises of the cost model, each against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_cases import COST_KINDS, HARDWARE, MODEL, cost_model

from hf_longctx.plan.cost import CostCoefficients, CostModel, PassCoefficients, default_coefficients
from hf_longctx.plan.specs import ClusterSpec, ModelSpec
from hf_longctx.plan.types import Chunk, Span

FORWARD = PassCoefficients(pair_s=2.0, token_s=10.0, chunk_s=100.0, exchange_chunk_s=1000.0, exchange=((2, 7.0), (4, 3.0)))
BACKWARD = PassCoefficients(pair_s=5.0, token_s=20.0, chunk_s=300.0, exchange_chunk_s=4000.0, exchange=((2, 9.0),))
COSTS = CostModel(MODEL, ClusterSpec(4, 4, HARDWARE), CostCoefficients(FORWARD, BACKWARD, 0.0, "test"))


def test_one_rank_pays_pairs_tokens_and_the_chunk() -> None:
    # 10 tokens: 50 pairs, so 2 * 50 + 10 * 10 + 100
    assert COSTS.forward_s(Chunk(0, (Span(0, 0, 10),)), 1, 4) == 300
    assert COSTS.backward_s(Chunk(0, (Span(0, 0, 10),)), 1, 4) == 250 + 200 + 300


def test_a_slice_pays_for_its_prefix() -> None:
    # 4 tokens after 6: 4 * (6 + 2) = 32 pairs
    assert COSTS.forward_s(Chunk(1, (Span(0, 6, 10),)), 1, 4) == 64 + 40 + 100


def test_a_pack_pays_pairs_per_sequence_and_the_chunk_once() -> None:
    # two sequences of 4 and 6: 8 + 18 pairs, 10 tokens
    assert COSTS.forward_s(Chunk(0, (Span(0, 0, 4), Span(1, 0, 6))), 1, 4) == 52 + 100 + 100


def test_a_group_divides_the_work_and_pays_for_the_exchange() -> None:
    # 20 tokens, 200 pairs on 2 ranks: (400 + 200) / 2 + 100; each rank keeps half of its 10 tokens: 7 * 5, and 1000
    assert COSTS.forward_s(Chunk(0, (Span(0, 0, 20),)), 2, 4) == 300 + 100 + 35 + 1000
    # on 4 ranks: (400 + 200) / 4 + 100; 3 / 4 of 5 tokens leave each rank: 3 * 3.75
    assert COSTS.forward_s(Chunk(0, (Span(0, 0, 20),)), 4, 4) == 150 + 100 + 11.25 + 1000


def test_layers_scale_the_whole_chunk() -> None:
    chunk = Chunk(0, (Span(0, 0, 20),))
    assert COSTS.forward_s(chunk, 2, 1) == COSTS.forward_s(chunk, 2, 4) / 4
    assert COSTS.backward_s(chunk, 2, 3) == COSTS.backward_s(chunk, 2, 4) * 3 / 4


def test_a_chunk_with_too_few_tokens_costs_one_token_per_rank() -> None:
    assert COSTS.forward_s(Chunk(0), 1, 4) == 10 + 100
    # 4 padded tokens on 4 ranks, 3 / 4 of one token leaves each; the pairs are those of the real token
    assert COSTS.forward_s(Chunk(0, (Span(0, 0, 1),)), 4, 4) == (2 * 0.5 + 10 * 4) / 4 + 100 + 3 * 0.75 + 1000


@pytest.mark.parametrize(("degree", "seconds"), [(1, 7.0), (2, 7.0), (3, 7.0), (4, 3.0), (8, 3.0)])
def test_a_degree_between_two_measured_ones_uses_the_smaller(degree: int, seconds: float) -> None:
    assert FORWARD.exchange_token_s(degree) == seconds


def test_without_a_measured_exchange_it_is_free() -> None:
    assert PassCoefficients(1.0, 1.0, 1.0, 1.0, ()).exchange_token_s(4) == 0


def test_sequences_and_group_seconds_by_hand() -> None:
    # one rank: (2 + 5) * n^2 / 2 + (10 + 20) * n
    assert COSTS.sequences_s([10, 2], 1).tolist() == [350 + 300, 14 + 60]
    # two ranks: half of that, and (7 + 9) * n / 4
    assert COSTS.sequences_s([10, 2], 2).tolist() == [325 + 40, 37 + 8]
    # four ranks: a quarter, and (3 + 9) * (n / 4) * 3 / 4
    assert COSTS.sequences_s([16], 4).tolist() == [(7 * 128 + 30 * 16) / 4 + 36]
    assert COSTS.group_s(1) == 400
    assert COSTS.group_s(2) == COSTS.group_s(4) == 5400


@pytest.mark.parametrize("kind", COST_KINDS)
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_a_packed_chunk_costs_its_sequences_and_its_group(kind: str, degree: int) -> None:
    costs, lengths = cost_model(kind, 4), [40, 700, 4, 93]
    chunk = Chunk(0, tuple(Span(i, 0, length) for i, length in enumerate(lengths)))
    whole = costs.forward_s(chunk, degree, MODEL.num_layers) + costs.backward_s(chunk, degree, MODEL.num_layers)
    assert whole == pytest.approx(costs.sequences_s(lengths, degree).sum() + costs.group_s(degree), rel=1e-12)


def test_a_rank_holds_weights_gradients_moments_and_saved_tensors() -> None:
    # weights and gradients of 4 bytes, two moments of 4 bytes
    assert COSTS.rank_bytes(0) == 16 * MODEL.num_parameters
    assert COSTS.rank_bytes(7) - COSTS.rank_bytes(0) == 7 * MODEL.saved_bytes_per_token


def test_shards_are_divided_and_what_is_gathered_is_not() -> None:
    # 10 layers of 8 * 2 * (8 + 4) + 3 * 8 * 16 = 576 parameters, embedding and head of 80 each
    model = ModelSpec(10, 8, 16, 4, 2, 2, 10, 100, bytes_per_element=4)
    assert model.state_bytes() == model.state_bytes("replicated", 4) == 16 * 5920
    # beside a quarter of all states: weights and gradients of two layers and the embeddings
    assert model.state_bytes("sharded", 4) == 4 * 5920 + 2 * 4 * (2 * 576 + 160)
    # or all weights, and the gradients of two layers and the embeddings
    assert model.state_bytes("gathered_per_round", 4) == 4 * 5920 + 4 * 5920 + 4 * (2 * 576 + 160)
    costs = replace(COSTS, model=model, parameters="sharded", shard_ranks=4)
    assert costs.rank_bytes(3) == model.state_bytes("sharded", 4) + 3 * model.saved_bytes_per_token


def test_default_coefficients_count_operations() -> None:
    model = ModelSpec(2, 8, 16, 4, 2, 2, 10, 100, bytes_per_element=2)
    costs = default_coefficients(model, ClusterSpec(4, 4, HARDWARE))
    # a layer: 8 * 2 * (8 + 4) + 3 * 8 * 16 = 576 parameters; the head: 80
    assert costs.forward.token_s == pytest.approx(2 * (2 * 576 + 80) / 1e12)
    # 4 operations per element of a head and pair: 2 layers * 4 heads * 2 elements
    assert costs.forward.pair_s == pytest.approx(4 * 16 / 5e11)
    assert costs.backward.token_s == pytest.approx(2 * costs.forward.token_s)
    assert costs.backward.pair_s == pytest.approx(2.5 * costs.forward.pair_s)
    # q, k, v and the output: (8 + 4) * 2 elements... of 2 bytes in 2 layers over 1e9 bytes a second
    assert costs.forward.exchange == ((2, pytest.approx(2 * 24 * 2 / 1e9)),)
    assert (costs.source, costs.is_measured) == ("default", False)
    assert CostCoefficients(FORWARD, BACKWARD, 0.0, "run 3").is_measured
