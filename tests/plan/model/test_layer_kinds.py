"""Layers with a state along the sequence are found in configs, and cost and hold what they should beside attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx.plan.core.settings import ClusterSpec, HardwareSpec, PlannerConfig
from hf_longctx.plan.core.sharding import rank_pieces, runs_of, state_readers
from hf_longctx.plan.core.types import Action, Chunk, GroupShape, SequenceGroup, Span
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.cost.traffic import added_products, group_shapes, runs_and_messages
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.kv_book import book_kinds, book_moments
from hf_longctx.plan.memory.saved_tensors import layer_class_bytes, saved_token_bytes
from hf_longctx.plan.model.attention_pairs import AttentionPairs, SpanRates
from hf_longctx.plan.model.config import NO_POSITIONS
from hf_longctx.plan.model.layers import LayerKind, config_states, config_windows, with_states
from hf_longctx.plan.model.mixers import BLOCK_BYTES, ScanSize, StateSpec
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.planner import plan_step
from hf_longctx.plan.predict.evaluate import evaluate_plan

GPU = HardwareSpec("gpu", 2e14, 1.5e14, 80 << 30, 2e11, 2.5e10, 3e-5)
QWEN = named_model("qwen3.5-9b")


def costs_of(model: ModelSpec, num_ranks: int = 8) -> CostModel:
    cluster = ClusterSpec(num_ranks, 8, GPU)
    return CostModel(model, cluster, default_coefficients(model, cluster), "ulysses")


def with_kinds(layers: tuple[bool, ...]) -> ModelSpec:
    """The 9B shape with states in these of its layers."""
    states = replace(QWEN.states, layers=layers)
    return replace(QWEN, num_layers=len(layers), windows=with_states((), states), states=states)


def seconds(model: ModelSpec, num_tokens: int, degree: int = 1) -> float:
    chunk, costs = Chunk(0, (Span(0, 0, num_tokens),)), costs_of(model)
    shape = GroupShape(degree, degree)
    return costs.forward_s(chunk, shape, model.num_layers) + costs.backward_s(chunk, shape, model.num_layers)


def test_the_9b_shape_is_that_of_transformers_config_class() -> None:
    config = transformers.Qwen3_5TextConfig().to_dict()
    # checkpoints have more positions
    assert replace(ModelSpec.from_config(config, 2), max_positions=QWEN.max_positions) == QWEN
    # 32 heads of 128 x 128, and three tokens of 2 x 16 x 128 + 32 x 128 channels
    states = QWEN.states
    assert sum(states.layers) == 24 and not states.layers[3] and QWEN.windows[:4] == (0, 0, 0, None)
    assert states.boundary_bytes(32, 2) == 32 * 128 * 128 * 4 + 3 * 8192 * 2
    # without `layer_types`, every fourth layer has attention
    del config["layer_types"]
    assert config_states(config, 32) == states


@pytest.mark.parametrize("name", ["Qwen3_5", "Qwen3Next", "Qwen3_5Moe", "OlmoHybrid"])
def test_parameters_are_those_of_the_model(name: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    config_class = getattr(transformers, f"{name}TextConfig" if "3_5" in name else f"{name}Config")
    extra: dict[str, Any] = {"head_dim": 64, "pad_token_id": 0}
    if name in ("Qwen3Next", "Qwen3_5Moe"):
        extra |= {"num_experts": 4, "num_experts_per_tok": 2}
    config = config_class(vocab_size=64, num_hidden_layers=3, layer_types=kinds, **sizes, **extra)
    spec = ModelSpec.from_config(config.to_dict() | {"intermediate_size": getattr(config, "intermediate_size", 512)})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    assert spec.num_parameters == pytest.approx(sum(weight.numel() for weight in model.parameters()), rel=0.02)
    assert spec.states.layers == (True, True, False)


@pytest.mark.parametrize("name", ["Mamba2", "Mamba", "FalconMamba", "Jamba"])
def test_models_without_attention_or_with_a_period_of_it_have_the_models_parameters(name: str) -> None:
    extra: dict[str, Any] = {"num_heads": 32, "head_dim": 16} if name == "Mamba2" else {}
    if name == "Jamba":
        extra = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512, "attn_layer_period": 2}
        extra |= {"attn_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2, "mamba_dt_rank": "auto"}
    config = getattr(transformers, f"{name}Config")(vocab_size=64, hidden_size=256, num_hidden_layers=4, **extra)
    spec, num_attention = ModelSpec.from_config(config.to_dict()), 2 if name == "Jamba" else 0
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    assert spec.num_parameters == pytest.approx(sum(weight.numel() for weight in model.parameters()), rel=0.05)
    assert 4 - sum(spec.states.layers) == num_attention == sum(window is None for window in spec.windows)
    # such models number no positions, and every channel or head has a state of its own
    channels = {"Mamba2": 32, "Jamba": 4}.get(name, 512)
    assert spec.num_heads == channels and (spec.max_positions == NO_POSITIONS) == (not num_attention)
    plan_seconds = seconds(spec, 2000), seconds(spec, 4000)
    assert plan_seconds[0] < plan_seconds[1] <= 2 * plan_seconds[0] or num_attention


# configs as checkpoints have them, without the fields that transformers derives, and the layers with a state
_MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16, "hidden_size": 64}
_NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "hidden_size": 64}
_ZAMBA = {"n_mamba_heads": 8, "mamba_d_state": 16, "hidden_size": 64}
RAW: list[tuple[dict[str, Any], str]] = [
    ({"linear_attn_config": {"kda_layers": [1, 3], "num_heads": 2, "head_dim": 8}, "hidden_size": 64}, "SASA"),
    ({"linear_num_heads": 2, "linear_head_dim": 8, "hidden_size": 64}, "SSSSASSS"),
    ({"kda_safe_gate": True, "layer_group_size": 3, "num_attention_heads": 2, "head_dim": 8, "hidden_size": 64}, "SSASSA"),
    ({"conv_L_cache": 3, "full_attn_idxs": [2], "hidden_size": 64}, "SSAS"),
    ({"conv_L_cache": 3, "hidden_size": 64}, "AAAA"),
    ({"model_type": "lfm3", "conv_L_cache": 7, "hidden_size": 64}, "SSASASA"),
    ({**_MAMBA, "attn_layer_indices": [1]}, "SASS"),
    ({**_MAMBA, "layer_types": ["mamba", "attention"]}, "SA"),
    # B: both, N: neither
    ({**_MAMBA, "mamba_d_ssm": 64}, "BBBB"),
    ({"model_type": "nemotron_h", "hybrid_override_pattern": "MEM*-", **_NEMOTRON}, "SNSAN"),
    ({"model_type": "zamba", "mamba_d_state": 16, "mamba_expand": 2, "hidden_size": 64}, "SSBSSSSBS"),
    ({"model_type": "zamba2", **_ZAMBA, "layers_block_type": ["mamba", "hybrid"]}, "SB"),
    ({"model_type": "minimax", "num_attention_heads": 4, "hidden_size": 64}, "ASAS"),
    ({"model_type": "recurrent_gemma", "num_attention_heads": 4, "hidden_size": 64, "attention_window_size": 8}, "SSASS"),
    ({"model_type": "zaya", "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}, "BBB"),
]
_LETTERS = {(True, False): "A", (False, True): "S", (True, True): "B", (False, False): "N"}


@pytest.mark.parametrize("config,kinds", RAW)
def test_layers_with_a_state_are_found_in_the_configs_of_checkpoints(config: dict[str, Any], kinds: str) -> None:
    states = config_states(config, len(kinds))
    windows = with_states(config_windows(config, len(kinds)), states) or (None,) * len(kinds)
    has_state = states.layers or (False,) * len(kinds)
    assert "".join(_LETTERS[window != 0, has] for window, has in zip(windows, has_state, strict=True)) == kinds
    # attention of RecurrentGemma sees a window
    assert {window for window in windows if window} == ({8} if "attention_window_size" in config else set())


def test_blocks_of_a_scan_are_whole_tiles_that_save_no_more_than_allowed() -> None:
    size = ScanSize(100, 64)
    for num_heads in (1, 3, 32):
        tokens = size.block_tokens(num_heads)
        assert tokens % 64 == 0 and 400 * num_heads * tokens <= BLOCK_BYTES < 400 * num_heads * (tokens + 64)
    # a tile is the least
    assert ScanSize(2**30, 64).block_tokens(2) == 64
    # a chunk in blocks saves less per token than one that is as long as a block
    whole, cut = (QWEN.states.saved_bytes(2, tokens) for tokens in (4160, 4161))
    assert cut == QWEN.states.saved_bytes(2) < whole / 2


def test_backward_runs_a_scan_in_blocks_forward_again() -> None:
    costs, shape = costs_of(QWEN, 1), GroupShape(1)
    block = QWEN.states.block_tokens

    def added_s(num_tokens: int) -> float:
        chunk, none = Chunk(0, (Span(0, 0, num_tokens),)), replace(QWEN.states, scan_elements=0)
        plain = replace(costs, model=replace(QWEN, states=none))
        forward_s = [each.forward_s(chunk, shape, 32) for each in (costs, plain)]
        assert forward_s[0] == forward_s[1]
        alone = costs.sequences_s([num_tokens], shape)[0] - plain.sequences_s([num_tokens], shape)[0]
        found = costs.backward_s(chunk, shape, 32) - plain.backward_s(chunk, shape, 32)
        assert alone == pytest.approx(found, rel=1e-6, abs=1e-12)
        return found

    assert added_s(block) == 0
    # 24 layers, two operations for each product
    products = 24 * QWEN.states.scan_products * 2 * block
    assert added_s(2 * block) == pytest.approx(2 * products / GPU.matmul_flops_per_s, rel=1e-6)
    # ranks of a group share the tokens
    chunk = Chunk(0, (Span(0, 0, 2 * block),))
    none = replace(costs_of(QWEN), model=replace(QWEN, states=replace(QWEN.states, scan_elements=0)))
    assert costs_of(QWEN).local_s(chunk, GroupShape(2, 2), True) == none.local_s(chunk, GroupShape(2, 2), True)


@given(st.integers(10**4, 10**6), st.integers(1, 100))
def test_a_model_without_attention_takes_linear_time(num_tokens: int, times: int) -> None:
    model = with_kinds((True,) * 4)
    fixed_s = 2 * seconds(model, 10**6) - seconds(model, 2 * 10**6)
    once_s, more_s = (seconds(model, count) - fixed_s for count in (num_tokens, times * num_tokens))
    assert more_s == pytest.approx(times * once_s, rel=1e-6)
    assert model.attention_pairs().of_span(0, num_tokens) == 0
    # slices of equal seconds then have equal tokens
    assert SpanRates(2.0, 3.0, AttentionPairs.of((0, 0))).tokens_in(12.0) == 4.0


@given(st.lists(st.booleans(), min_size=2, max_size=6), st.integers(0, 5), st.sampled_from([1, 2, 8]))
def test_a_state_in_place_of_attention_never_adds_seconds_to_long_documents(layers: list[bool], place: int, degree: int) -> None:
    less = tuple(layers)
    more = tuple(has or index == place % len(less) for index, has in enumerate(less))
    for num_tokens in (2**16, 2**20):
        assert seconds(with_kinds(more), num_tokens, degree) <= seconds(with_kinds(less), num_tokens, degree)


def test_slices_of_layers_with_states_leave_a_book_that_does_not_grow() -> None:
    config = PlannerConfig(2**20, (1,), solver="greedy")
    peaks = {}
    for layers in ((True,) * 4, (True, True, True, False), (False,) * 4):
        model = with_kinds(layers) if any(layers) else replace(with_kinds((True,) * 4), windows=(), states=StateSpec())
        for num_tokens in (2**16, 2**18):
            plan = plan_step(0, [num_tokens], costs_of(model, 1), config)
            (group,) = plan.micro_batches[0].groups
            half = num_tokens // 2
            chunks = (Chunk(0, (Span(0, 0, half),)), Chunk(1, (Span(0, half, num_tokens),)))
            sliced = replace(group, chunks=chunks)
            stage, byte_model = group.stages[0], ByteModel(model)
            stage = replace(stage, actions=(Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 1), Action("B", 0, 0)))
            passes = byte_model.passes(stage)
            kinds = book_kinds(model, sliced, 0)
            moments = book_moments(model, stage, kinds, 2, passes.cells, passes.is_forward)
            peaks[sum(layers), num_tokens] = int(moments.most.max())
    # four layers have a state and its gradient
    boundary = QWEN.states.boundary_bytes(32, 2)
    assert peaks[4, 2**16] == peaks[4, 2**18] == 4 * boundary + 4 * boundary
    # keys and values of four heads of 256 in bf16, and gradients of half of them in fp32
    assert peaks[0, 2**18] == 4 * 2048 * (2 * 2**18 + 4 * 2**17) == 4 * peaks[0, 2**16]
    assert peaks[3, 2**18] == pytest.approx(peaks[0, 2**18] / 4 + 6 * boundary, rel=1e-3)


def test_states_run_in_all_shapes_and_share_out_heads_while_that_is_cheaper() -> None:
    cluster = ClusterSpec(64, 8, GPU)
    assert group_shapes(8, "auto", QWEN, cluster) == (GroupShape(8, 8), GroupShape(8, 4), GroupShape(8))
    # 16 attention heads, 32 with a state
    assert group_shapes(32, "auto", QWEN, cluster) == (GroupShape(32, 4), GroupShape(32))
    costs = CostModel(QWEN, cluster, default_coefficients(QWEN, cluster))
    assert costs.best_shape(8, 2.0**14) == GroupShape(8, 8) and costs.best_shape(6, 2.0**14).num_blocks == 3
    # states of every document travel around a ring, and share out no heads
    one, two = (
        costs.forward_s(Chunk(0, spans), GroupShape(8), 32) for spans in ((Span(0, 0, 64),), (Span(0, 0, 32), Span(1, 0, 32)))
    )
    assert costs.document_s(GroupShape(8), False) > 24 * 7 * 32 * 2 * 128 * 128 * 4 / GPU.link_bytes_per_s and two > one
    assert costs.document_s(GroupShape(8, 8), False) == 0
    # a scan of all heads finds what earlier states add, too: 32 heads of 128 x 128 in 24 layers
    added = added_products(QWEN, GroupShape(8))
    assert added == 24 * 32 * (3 * 64 * 128 // 2 + 3 * 128 * 128) * 15 / 16
    assert 0 < added < 0.1 * QWEN.token_products and added_products(QWEN, GroupShape(8, 8)) == 0


@pytest.mark.parametrize("shape", [GroupShape(2), GroupShape(5), GroupShape(8, 4), GroupShape(4, 4), GroupShape(8, 2)], ids=str)
def test_runs_and_messages_of_a_document_are_those_of_its_layout(shape: GroupShape) -> None:
    runs = tuple(runs_of(pieces) for pieces in rank_pieces(Chunk(0, (Span(0, 0, 16 * shape.degree),)), shape))
    num_messages = sum(len(readers) for rank in state_readers(runs) for readers in rank)
    assert runs_and_messages(shape) == (sum(map(len, runs)), num_messages)
    # a document that goes on is told to all
    assert all(len(readers) == shape.degree - 1 for rank in state_readers(runs, (0,)) for readers in rank)


def test_plans_of_a_hybrid_are_priced_as_they_are_evaluated_and_books_of_bytes_agree() -> None:
    costs = costs_of(QWEN)
    plan = plan_step(0, [30000, 9000, 4000, 100], costs, PlannerConfig(40000, (1, 2, 4, 8), solver="greedy"))
    assert plan.estimate is not None
    assert plan.estimate.step_s == pytest.approx(evaluate_plan(plan, costs).step_s)
    # the mean over layers that the planner's estimates use is the sum over layers
    per_token = saved_token_bytes(replace(QWEN, vocab_size=0))
    assert per_token > 24 * QWEN.states.saved_bytes(2) and layer_class_bytes(QWEN) < per_token / 32


def test_a_layer_that_only_convolves_leaves_a_tail_and_has_no_heads_to_share() -> None:
    states = StateSpec(layers=(True, False), parameters=3 * 64 * 64, tail_elements=2 * 64, saved_elements=4 * 64)
    model = ModelSpec(2, 64, 128, 8, 2, 8, 100, 512, windows=with_states((), states), states=states)
    assert states.boundary_bytes(0, 2) == 256
    assert 0 < ByteModel(model).kept_bytes(100) < ByteModel(replace(model, windows=(), states=StateSpec())).kept_bytes(100) * 2
    assert seconds(model, 1000, 4) > 0


def test_windows_and_states_must_agree() -> None:
    with pytest.raises(ValueError, match="layers without attention"):
        replace(QWEN, windows=())
    with pytest.raises(ValueError, match="at least one token"):
        replace(QWEN, windows=(0,) * 32, states=StateSpec())


def test_ranks_that_pass_states_on_keep_those_of_all_heads() -> None:
    few = replace(QWEN, states=replace(QWEN.states, heads=4, read_heads=4))
    chunks = tuple(Chunk(index, (Span(0, 512 * index, 512 * index + 512),)) for index in range(2))

    def boundary(degree: int) -> int:
        book = book_kinds(few, SequenceGroup.of(GroupShape(degree, degree), range(degree), chunks), 0)
        return int(book.changes[2 * book.kinds.index(LayerKind(0, True))].written[0])

    states = few.states
    assert boundary(8) == boundary(1) == states.boundary_bytes(4, 2) and boundary(4) == states.boundary_bytes(1, 2)
