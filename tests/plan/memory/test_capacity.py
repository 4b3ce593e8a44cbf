"""The byte model by hand and at random: held bytes, the book, what more tokens and less keeping do, the longest document."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.measures.calls import counted_calls
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.settings import GENERIC_CPU, ActivationBudget, ClusterSpec, PlannerConfig
from hf_longctx.plan.core.types import (
    Action,
    ActivationPolicy,
    Chunk,
    GroupShape,
    LayerPolicy,
    LayerRange,
    SequenceGroup,
    Span,
    StagePlan,
    TensorShare,
)
from hf_longctx.plan.cost.catalog import model_names, named_model
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.capacity import least_memory_policy, most_tokens
from hf_longctx.plan.memory.layer import LayerBytes, Load
from hf_longctx.plan.memory.saved_tensors import class_bytes, held_bytes
from hf_longctx.plan.memory.stage import LAYER_NUMBERS
from hf_longctx.plan.model.layers import IndexSpec
from hf_longctx.plan.model.model_spec import AdapterSpec, ModelSpec
from hf_longctx.plan.planner import plan_step

# Llama-3.1-8B, and a small model with half as many KV heads as heads
LLAMA = ModelSpec(32, 4096, 14336, 32, 8, 128, 128256, 131072, bytes_per_element=2)
SMALL = ModelSpec(4, 64, 128, 4, 2, 16, 256, 4096, bytes_per_element=4)
GIB = 2**30


def group_of(chunks: list[list[tuple[int, int, int]]], words: str, degree: int = 1, policies: tuple = ()) -> SequenceGroup:
    stage = StagePlan(0, (LayerRange(0, 4),), tuple(map(Action.parse, words.split())), policies)
    spans = tuple(Chunk(index, tuple(Span(*span) for span in chunk)) for index, chunk in enumerate(chunks))
    return SequenceGroup(tuple(range(degree)), "ulysses" if degree > 1 else "local", spans, (stage,))


def test_recomputed_bytes_by_hand() -> None:
    # fp32 head: hidden input, product and output of the last norm with its root, log-probabilities; rotary tables, ids, labels
    policy = least_memory_policy(SMALL, 1000, 0, 0)
    found = ByteModel(SMALL).chunk(Load.document(1000, 4), policy)
    assert found.device == 1000 * (4 * 4 * 64 + (3 * 4 * 64 + 4) + 4 * 256 + (2 * 4 * 16 + 16))
    assert found.host == 0
    # in tiles: no log-probabilities, of the norm its input alone, but the gradient of the last hidden states and that of the
    # matrix in fp32
    tiled = ByteModel(SMALL).chunk(Load.document(1000, 4), replace(policy, tile_tokens=100))
    assert tiled.device == found.device - 1000 * (4 * 256 + 4 * 64 + 4) + 4 * 256 * 64
    # a norm that is not found runs whole
    whole = ByteModel(replace(SMALL, tiles_final_norm=False)).chunk(Load.document(1000, 4), replace(policy, tile_tokens=100))
    assert whole.device == tiled.device + 1000 * (4 * 64 + 4)
    assert tiled.workspace < found.workspace


def test_frozen_weights_need_no_gradients_of_the_head() -> None:
    policy = least_memory_policy(SMALL, 1000, 0, 100)
    adapters = AdapterSpec(layer_parameters=10, layer_bytes=40)
    trained, frozen, above = (
        ByteModel(replace(SMALL, adapters=each)).chunk(Load.document(1000, 4), policy)
        for each in (AdapterSpec(), adapters, replace(adapters, attention_saved_bytes=12))
    )
    assert trained.device - frozen.device == 4 * 256 * 64
    # tensors that a layer's adapters keep are there while the layer is recomputed
    assert (above.device, above.workspace) == (frozen.device, frozen.workspace + 12 * 1000)
    # with few tokens in tiles, the gradients of the MLP's matrices are the largest
    trained_few, frozen_few = (
        ByteModel(replace(SMALL, vocab_size=1, adapters=each)).chunk(Load.document(10, 4), least_memory_policy(SMALL, 10, 0, 5))
        for each in (AdapterSpec(), adapters)
    )
    matrices = 3 * SMALL.intermediate_size * SMALL.hidden_size
    assert trained_few.workspace > frozen_few.workspace + 4 * matrices
    # a head that is trained beside the frozen one has gradients
    head = replace(adapters, last_parameters=256 * 64, last_bytes=4 * 256 * 64)
    assert ByteModel(replace(SMALL, adapters=head)).chunk(Load.document(1000, 4), policy).device == trained.device


def test_slices_by_hand() -> None:
    # 300 tokens in three slices on four layers; a layer's book: 2 * 32 * 4 bytes a token, as much again in front of the last
    chunks = [[(0, start, start + 100)] for start in (0, 100, 200)]
    group = group_of(chunks, "0F0 0F1 0F2 0B2 0B1 0B0")
    found = ByteModel(SMALL).moments(group, group.stages[0]).most
    assert found.book == 4 * 256 * (300 + 200)
    single = group_of([[(0, 0, 100)]], "0F0 0B0")
    alone = ByteModel(SMALL).moments(single, single.stages[0]).most
    # keys and values expanded to all heads are saved with a sequence that runs whole, those of slices lie in the book
    assert found.saved == 3 * (alone.saved - 100 * 4 * 2 * 4 * 64)
    assert found.peak <= found.saved + found.book + found.workspace


def test_two_ranks_hold_half_each() -> None:
    chunks = [[(0, 0, 128)], [(0, 128, 256)]]
    one, two = (group_of(chunks, "0F0 0F1 0B1 0B0", degree) for degree in (1, 2))
    whole, half = (ByteModel(SMALL).moments(group, group.stages[0]).most for group in (one, two))
    assert half.book == whole.book / 2 and half.saved == whole.saved / 2


def test_chunks_that_run_one_by_one_are_not_in_flight_together() -> None:
    chunks = [[(0, 0, 100)], [(1, 0, 100)]]
    stages = [group_of(chunks, words) for words in ("0F0 0B0 0F1 0B1", "0F0 0F1 0B1 0B0")]
    apart, together = (ByteModel(SMALL).moments(group, group.stages[0]).most for group in stages)
    assert together.saved == 2 * apart.saved and apart.workspace == together.workspace
    assert together.peak - apart.peak == apart.saved


@st.composite
def policies(draw: st.DrawFn) -> LayerPolicy:
    if draw(st.booleans()):
        return LayerPolicy()
    parts = st.sampled_from([0.0, 0.25, 0.5, 1.0])
    host, recompute, mlp = draw(parts), draw(parts), draw(parts)
    kept = 1 - recompute
    return LayerPolicy(
        (
            TensorShare("layer_input", host=host, device=1 - host),
            TensorShare("attention_output", recompute=recompute, host=host * kept, device=(1 - host) * kept),
            TensorShare("qkv", recompute=1.0),
            TensorShare("mlp", recompute=mlp, device=1 - mlp),
        )
    )


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(policies(), min_size=4, max_size=4), st.sampled_from([0, 64]), st.integers(1, 400), st.sampled_from([2, 4, 8]))
def test_held_bytes_are_those_of_the_engine_and_more_tokens_never_need_less(
    layers: list[LayerPolicy], tile_tokens: int, num_tokens: int, bytes_per_element: int
) -> None:
    model = replace(SMALL, bytes_per_element=bytes_per_element)
    policy = ActivationPolicy(0, 0, tuple(layers), tile_tokens)
    found, more = (ByteModel(model).chunk(Load.document(tokens, 4), policy) for tokens in (num_tokens, num_tokens + 8))
    none, _ = held_bytes(model, ActivationPolicy(0, 0, tuple(layers)), 4, num_tokens)
    head = ByteModel(model).chunk(Load.document(num_tokens, 4), least_memory_policy(model, num_tokens, 0, tile_tokens))
    inputs = 4 * class_bytes(model, "layer_input") * num_tokens
    # plain layers save keys and values once per query head, and attention's output once more
    plain = sum(layer.keeps_everything for layer in layers) * num_tokens * bytes_per_element * (2 * 32 + 64)
    assert found.device == none + plain + head.device - inputs
    assert found.host == held_bytes(model, policy, 4, num_tokens)[1]
    assert more.device + more.workspace >= found.device + found.workspace
    assert more.host >= found.host


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(1, 500), st.integers(0, 1 << 20))
def test_the_lean_policy_holds_its_host_limit_and_the_least_on_the_device(num_tokens: int, host_bytes: int) -> None:
    load = Load.document(num_tokens, 4)
    found = ByteModel(SMALL).chunk(load, least_memory_policy(SMALL, num_tokens, host_bytes, 16))
    assert found.host <= host_bytes
    inputs = 4 * class_bytes(SMALL, "layer_input") * num_tokens
    assert found.host >= min(inputs, host_bytes) - 2 * class_bytes(SMALL, "layer_input")
    without = ByteModel(SMALL).chunk(load, least_memory_policy(SMALL, num_tokens, 0, 16))
    assert found.device == without.device - found.host
    kept = ByteModel(SMALL).chunk(load, least_memory_policy(SMALL, num_tokens, 0, 16, keeps_attention=True))
    assert without.device < kept.device


def test_the_longest_document_is_the_last_that_fits() -> None:
    for host_bytes in (0, GIB):
        tokens = most_tokens(SMALL, GIB, host_bytes, 256)
        fits = [
            min(
                found.device + found.workspace
                for limit in (0, host_bytes)
                for found in [ByteModel(SMALL).chunk(Load.document(count, 4), least_memory_policy(SMALL, count, limit, 256))]
            )
            <= GIB
            for count in (tokens, tokens + 1)
        ]
        assert fits == [True, False]
    assert most_tokens(SMALL, 0, GIB, 256) == 0
    assert ByteModel(SMALL).kept_tokens(GIB) < most_tokens(SMALL, GIB, 0, 256)


def test_an_8b_model_on_one_h200_by_hand() -> None:
    # 16 GB of frozen weights; 256 KiB a token for the inputs, and the worst moment of one layer, that of attention's backward
    device = int(136 * GIB - 2 * LLAMA.num_parameters)
    model = replace(LLAMA, adapters=AdapterSpec(1, 2))
    tokens = most_tokens(model, device, 0, 2048)
    a, d, k = 2 * 4096, 2 * 4096, 2 * 1024
    # per token: queries, keys, values, output with LSE; the residual's and the output's gradient; sums of keys' and values' in
    # fp32; gradients of the queries; and of four heads of 32: expanded keys and values, dense queries, output and gradient, three
    # gradients, one in fp32. Frozen projections do not save the first norm's output
    layer = a + 2 * k + (a + 4 * 32) + (d + a) + 2 * 2 * k + a + (2 * a + 8 * a) / 8
    outside = 2 * 2 * 128 + 16
    assert tokens == pytest.approx(device / (32 * d + layer + outside), rel=1e-3)
    assert most_tokens(model, device, 112 * GIB, 2048) > 1.7 * tokens


@pytest.mark.parametrize("name", model_names())
@pytest.mark.parametrize("is_shared", [False, True])
def test_the_most_tokens_that_are_kept_fill_the_room_with_their_workspace(name: str, is_shared: bool) -> None:
    byte_model = ByteModel(named_model(name))
    num_tokens = byte_model.kept_tokens(40 * GIB, is_shared)
    found = byte_model.chunk(replace(Load.document(num_tokens, byte_model.model.num_layers), is_shared=is_shared))
    assert found.workspace > 0 and found.device + found.workspace == byte_model.kept_bytes(num_tokens, is_shared)
    assert byte_model.kept_bytes(num_tokens, is_shared) <= 40 * GIB < byte_model.kept_bytes(num_tokens + 1, is_shared)
    counted = {"llama-3.1-8b": 4962, "llama-3.1-70b": 1126}
    assert num_tokens == counted.get(name, num_tokens)


def test_no_room_keeps_no_token() -> None:
    assert ByteModel(SMALL).kept_tokens(0) == ByteModel(SMALL).kept_tokens(-GIB) == 0


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 400), max_size=4),
    st.sampled_from([GroupShape(1), GroupShape(2, 2), GroupShape(4, 2), GroupShape(3, 1)]),
    st.sampled_from(
        [
            {},
            {"caps_scores": True},
            {"drops_weights": True},
            {"value_head_dim": 8},
            {"bytes_per_element": 2, "qk_norms": True},
            {"saves_kv_once": True},
            {"index": IndexSpec(64, 4, 16, 4, 4)},
        ]
    ),
)
def test_a_kept_chunk_is_counted_like_any_other_and_its_first_rank_holds_the_most(
    lengths: list[int], shape: GroupShape, changes: dict[str, Any]
) -> None:
    byte_model = ByteModel(replace(SMALL, **changes))
    spans = tuple(Span(index, 0, length) for index, length in enumerate(lengths))
    stage = StagePlan(0, (LayerRange(0, 4),), (Action("F", 0, 0), Action("B", 0, 0)))
    group = SequenceGroup.of(shape, range(shape.degree), (Chunk(0, spans),), (stage,))
    peaks = [byte_model.moments(group, stage, position).most.peak for position in range(shape.degree)]
    assert byte_model.kept_peak(group) == peaks[0] == max(peaks)


def test_layers_that_are_one_object_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[LayerPolicy] = []

    def counting(model: ModelSpec, load: Load, policy: LayerPolicy, tile_tokens: int, known: Any) -> LayerBytes:
        made.append(policy)
        return LayerBytes(model, load, policy, tile_tokens, known)

    monkeypatch.setattr("hf_longctx.plan.memory.byte_model.LayerBytes", counting)
    model = named_model("llama-3.1-70b")
    ByteModel(model).chunk(Load.document(100, model.num_layers))
    assert len(made) == 1
    half = LayerPolicy((TensorShare("mlp", recompute=0.5, device=0.5),))
    ByteModel(model).chunk(Load.document(100, model.num_layers), ActivationPolicy(0, layers=(half,) * 40))
    assert len(made) == 3


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_layers_of_a_load_share_what_no_policy_changes(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(("llama-3.1-70b", "qwen3.5-9b", "gemma-4-31b", "deepseek-v3.2", "gpt-oss-20b")))
    model = replace(named_model(name), adapters=data.draw(st.sampled_from((AdapterSpec(), AdapterSpec(10, 40, 12, 20)))))
    tokens, front = data.draw(st.tuples(st.integers(1, 9000), st.integers(0, 9000)))
    load = Load(tokens, (tokens,), 3, front, data.draw(st.integers(0, tokens)), num_blocks=2, is_shared=True)
    shares = st.floats(0.0, 1.0).map(lambda again: TensorShare("mlp", again, 0.0, 1 - again))
    policies = st.one_of(st.just(LayerPolicy()), shares.map(lambda share: LayerPolicy((share,))))
    together = ByteModel(model)
    for policy in data.draw(st.lists(policies, min_size=2, max_size=4)):
        for kind in sorted(together.kinds(), key=repr):
            for tile_tokens in (0, 2048):
                found, alone = (each.layer(load, policy, tile_tokens, kind) for each in (together, ByteModel(model)))
                assert LAYER_NUMBERS(found) == LAYER_NUMBERS(alone)


def test_a_layer_under_another_policy_counts_only_what_depends_on_it() -> None:
    byte_model, load = ByteModel(named_model("llama-3.1-70b")), Load.document(100, 80)

    def calls(share: float) -> int:
        policy = LayerPolicy((TensorShare("mlp", recompute=share, device=1 - share),))
        return counted_calls(lambda: byte_model.layer(load, policy, 2048))[1]

    assert calls(0.25) > 2 * calls(0.5) >= 2 * calls(0.75)


def test_pieces_of_heads_make_room_for_longer_documents() -> None:
    model = replace(named_model("llama-3.2-1b"), vocab_size=1000)
    whole, pieces = (most_tokens(model, 8 * GIB, 64 * GIB, 2048, head_pieces=count) for count in (1, 8))
    assert pieces > 1.2 * whole


def test_adapters_wider_than_the_model_leave_most_of_their_bytes_away_in_pieces_and_tiles() -> None:
    # rank 16, in fp32, on all matrices: copies of every input in fp32, and products of the first matrices
    heads, mlp = 4 * (4 * 2048 + 4 * 16), 4 * (2 * 2048 + 8192 + 3 * 16)
    parts = {"cut_bytes": 4 * 3 * 4 * 16, "tile_bytes": 2 * mlp}
    model = replace(named_model("llama-3.2-1b"), vocab_size=1000)
    room = 8 * GIB, 64 * GIB, 2048
    found = [
        most_tokens(replace(model, adapters=AdapterSpec(1, 4, heads, mlp, **cut)), *room, head_pieces=pieces)
        for cut, pieces in (({"tile_bytes": 2**40}, 1), (parts, 1), (parts, 8))
    ]
    without = most_tokens(replace(model, adapters=AdapterSpec(1, 4)), *room, head_pieces=8)
    assert found[2] > 1.3 * found[1] > 1.3 * 1.3 * found[0]
    assert 0.95 * without < found[2] < without * 1.05


def test_plans_cut_heads_only_where_nothing_else_fits() -> None:
    model, cluster = replace(named_model("llama-3.2-1b"), vocab_size=1000), ClusterSpec(1, 1, GENERIC_CPU)
    costs = CostModel(model, cluster, default_coefficients(model, cluster))
    room = 8 * GIB, 64 * GIB, 2048
    whole, most = (most_tokens(model, *room, head_pieces=count) for count in (1, 8))
    budget = ActivationBudget(1, *room)
    counts = []
    for tokens in (whole - 100, (whole + most) // 2):
        plan = plan_step(0, (tokens,), costs, PlannerConfig(tokens, (1,), activations=budget))
        (policy,) = plan.micro_batches[0].groups[0].stages[0].activations
        counts.append({layer.head_pieces for layer in policy.layers})
        assert plan.estimate.peak_bytes - ByteModel(model).states() <= 8 * GIB
    assert counts == [{1}, {8}]
