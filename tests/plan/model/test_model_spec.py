"""A config.json is enough for a model's spec, sizes match numbers worked out by hand, and a missing field is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.memory.saved_tensors import plain_layer_bytes, saved_token_bytes
from hf_longctx.plan.model.model_spec import ModelSpec

LLAMA_7B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def test_a_config_without_key_value_heads_has_as_many_as_heads() -> None:
    spec = ModelSpec.from_config(LLAMA_7B)
    assert (spec.num_kv_heads, spec.head_dim, spec.bytes_per_element) == (32, 128, 4)
    assert not spec.tied_embeddings


def test_grouped_heads_and_an_explicit_head_dim_are_read() -> None:
    config = LLAMA_7B | {"num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True}
    spec = ModelSpec.from_config(config, bytes_per_element=2)
    assert (spec.num_kv_heads, spec.head_dim, spec.tied_embeddings, spec.bytes_per_element) == (8, 64, True, 2)


def test_the_names_of_gpt2_are_read() -> None:
    config = {"n_layer": 12, "n_embd": 768, "n_inner": 3072, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
    spec = ModelSpec.from_config(config)
    assert (spec.num_layers, spec.hidden_size, spec.intermediate_size, spec.num_heads) == (12, 768, 3072, 12)
    assert (spec.head_dim, spec.max_positions) == (64, 1024)


@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"])
def test_a_missing_field_is_named(field: str) -> None:
    config: dict[str, Any] = {name: value for name, value in LLAMA_7B.items() if name != field}
    with pytest.raises(ValueError, match=field):
        ModelSpec.from_config(config)
    with pytest.raises(ValueError, match=field):
        ModelSpec.from_config(config | {field: None})


def test_llama_7b_has_6_74_billion_parameters() -> None:
    # 4 * 4096^2 + 3 * 4096 * 11008 per layer, two embeddings of 32000 * 4096; the norms are no matrices
    spec = ModelSpec.from_config(LLAMA_7B)
    assert spec.layer_parameters == 67_108_864 + 135_266_304
    assert spec.num_parameters == 32 * 202_375_168 + 2 * 131_072_000
    assert spec.num_parameters == pytest.approx(6.74e9, rel=1e-3)


def test_tied_embeddings_count_once() -> None:
    spec = ModelSpec.from_config(LLAMA_7B | {"tie_word_embeddings": True})
    assert spec.num_parameters == 32 * 202_375_168 + 131_072_000


def test_grouped_heads_shrink_keys_and_values_only() -> None:
    # q and o: 2 * 4096 * 4096; k and v: 2 * 4096 * 1024
    spec = ModelSpec.from_config(LLAMA_7B | {"num_key_value_heads": 8})
    assert spec.layer_parameters == 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 11008


def test_saved_bytes_of_a_tiny_model_by_hand() -> None:
    spec = ModelSpec(2, 8, 16, 4, 2, 2, 10, 100, bytes_per_element=2)
    # per layer 16 * 8 + 8 in norms, 4 * 8 + 4 * 4 + 4 * 4 in attention, 8 * 16 in the MLP; logits: 10 * (2 + 3 * 4)
    assert saved_token_bytes(spec) == 2 * 328 + 140
    # a norm's input is fp32 in any format: 24 * 8 + 8, 8 * 8 + 8 * 4 + 4 * 4, 16 * 16
    wide = ModelSpec(2, 8, 16, 4, 2, 2, 10, 100, bytes_per_element=4)
    assert saved_token_bytes(wide) == 2 * 568 + 160
    # 40 * 8 + 8, 16 * 8 + 16 * 4 + 8 * 4, 32 * 16
    double = ModelSpec(2, 8, 16, 4, 2, 2, 10, 100, bytes_per_element=8)
    assert saved_token_bytes(double) == 2 * 1064 + 320


MIXTRAL_8X7B = LLAMA_7B | {"intermediate_size": 14336, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_30B_A3B = {
    **{"model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128},
    **{"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1},
    **{"num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936, "max_position_embeddings": 40960},
}
GPT_OSS_20B = {
    **{"model_type": "gpt_oss", "num_hidden_layers": 24, "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64},
    **{"num_local_experts": 32, "num_experts_per_tok": 4, "num_attention_heads": 64, "num_key_value_heads": 8},
    **{"vocab_size": 201088, "max_position_embeddings": 131072},
}
DEEPSEEK_V3 = {
    **{"model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18432},
    **{"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
    **{"first_k_dense_replace": 3, "num_attention_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280},
    "max_position_embeddings": 163840,
}
PUBLISHED = [(MIXTRAL_8X7B, 46.7, 12.9), (QWEN3_30B_A3B, 30.5, 3.3), (GPT_OSS_20B, 20.9, 4.2), (DEEPSEEK_V3, 671, 37)]


# published numbers in billions: all parameters, and those that a token uses, with one embedding or two
@pytest.mark.parametrize("config,total,active", PUBLISHED)
def test_experts_count_whole_as_weights_and_by_choice_as_work(config: dict[str, Any], total: float, active: float) -> None:
    spec = ModelSpec.from_config(config)
    assert spec.num_parameters / 1e9 == pytest.approx(total, rel=0.01)
    tables = 2 * spec.vocab_size * spec.hidden_size
    assert (spec.num_layers * spec.layer_parameters + tables) / 1e9 == pytest.approx(active, rel=0.02)


def test_layers_without_experts_are_weighed_in() -> None:
    # two of four layers have 2 of 8 experts of size 8, and one of 16 for all tokens; the others have one of 64
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 16}
    layers = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64}
    spec = ModelSpec.from_config(LLAMA_7B | experts | layers | {"mlp_only_layers": [0, 2]})
    assert spec == ModelSpec.from_config(LLAMA_7B | experts | layers | {"decoder_sparse_step": 2})
    kinds = ["dense", "sparse", "dense", "sparse"]
    assert spec == ModelSpec.from_config(LLAMA_7B | experts | layers | {"mlp_layer_types": kinds})
    assert spec.intermediate_size == (2 * (2 * 8 + 16) + 2 * 64) / 4
    assert spec.idle_parameters == (3 * 6 * 32 * 8 + 8 * 32) / 2
    assert spec.routed_elements == 2 * 2 * 32 / 2


def test_windows_that_do_not_fit_the_layers_are_refused() -> None:
    sizes = (2, 8, 16, 4, 2, 2, 10, 100)
    with pytest.raises(ValueError, match="3 entries for 2 layers"):
        ModelSpec(*sizes, windows=(4, None, 4))
    with pytest.raises(ValueError, match="at least one token"):
        ModelSpec(*sizes, windows=(0, None))


def test_the_index_of_sparse_attention_is_counted() -> None:
    config = {
        **{"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 64},
        **{"max_position_embeddings": 4096, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4},
        **{"v_head_dim": 8, "index_topk": 512, "index_n_heads": 2, "index_head_dim": 16},
    }
    dense, every = (ModelSpec.from_config({**config, "index_topk": most}) for most in (None, 512))
    assert dense.index.is_empty and (every.index.num_chosen, every.index.num_indexes) == (4, 4)
    # attention computes all pairs, and the index 2 * 2 * 16 more operations of each
    assert every.pair_operations == dense.pair_operations + 64
    # queries from the latent, one key, a weight for each head
    assert every.layer_parameters == dense.layer_parameters + 12 * 32 + 64 * (16 + 2)
    assert plain_layer_bytes(every) == plain_layer_bytes(dense) + 4 * 512
    windowed = {"layer_types": ["indexed_attention", "sliding_attention"] * 2, "sliding_window": 6}
    half = ModelSpec.from_config({**config, **windowed})
    assert (half.index.num_chosen, half.index.num_indexes, half.windows) == (2, 2, (None, 6, None, 6))
    shared = ModelSpec.from_config({**config, "indexer_types": ["full", "shared", "shared", "shared"]})
    assert (shared.index.num_chosen, shared.index.num_indexes, shared.index.passed_bytes) == (4, 1, 512)
    assert shared.pair_operations == dense.pair_operations + 16


@pytest.mark.parametrize("block_ranks,pieces", [(1, 8), (2, 8), (4, 8), (8, 4), (16, 2), (32, 1), (3, 1)])
def test_pieces_of_heads_are_as_many_as_ranks_share_evenly(block_ranks: int, pieces: int) -> None:
    assert named_model("llama-3.1-8b").head_pieces(block_ranks) == pieces
    assert replace(named_model("llama-3.1-8b"), cuts_heads=False).head_pieces(block_ranks) == 1
