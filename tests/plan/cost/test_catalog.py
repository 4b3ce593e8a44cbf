"""Named models have the fields, shapes and parameters of transformers' own classes, and unknown names get the nearest ones."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, replace

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

from hf_longctx.families.registry import family_of_type
from hf_longctx.hf.models.spec import config_spec, model_spec
from hf_longctx.plan.cost.catalog import (
    model_names,
    named_config,
    named_model,
    named_type,
    nearest_names,
    spec_name,
    with_kernels,
)
from hf_longctx.plan.cost.public_configs import ALIASES, CONFIGS
from hf_longctx.plan.memory.saved_tensors import saved_token_bytes
from hf_longctx.plan.model.config import kernel_fields
from hf_longctx.sim.models import kernels_of, read_model

# fields of a config.json that its class translates: into a config for every layer, into layer types, or into other names
TRANSLATED = {
    "gemma4_text": {"global_head_dim", "num_global_key_value_heads"},
    "gemma4_unified_text": {"global_head_dim", "num_global_key_value_heads"},
    "qwen3_moe": {"head_dim"},
    "glm4_moe": {"head_dim"},
    "granitemoehybrid": {"layer_types"},
    "nemotron_h": {"num_hidden_layers", "layers_block_type"},
    "glm4_moe_lite": {"first_k_dense_replace"},
    "kimi_linear": {"linear_attn_config", "n_routed_experts", "first_k_dense_replace"},
    "minimax_m2": {"use_qk_norm"},
}


@pytest.mark.daily(
    "llama-2-7b",
    "llama-3.1-8b",
    "llama-3.2-1b",
    "llama-3.2-3b",
    "smollm2-135m",
    "smollm2-360m",
    "qwen2.5-0.5b",
    "qwen2.5-1.5b",
    "qwen2.5-7b",
    "deepseek-r1-distill-qwen-1.5b",
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-8b",
    "qwen3.5-0.8b",
    "qwen3.5-2b",
    "qwen3.5-4b",
    "qwen3.5-9b",
    "gemma-2b",
    "gemma-7b",
    "gemma-2-2b",
    "gemma-3-270m",
    "gemma-3-1b",
    "gpt-oss-20b",
    "deepseek-v2-lite",
    "nemotron-nano-9b-v2",
    "nemotron-nano-12b-v2",
    "nemotron-3-nano-4b",
    "nemotron-3-nano-30b-a3b",
    "granite-4.0-350m",
    "granite-4.0-h-350m",
    "lfm2-350m",
    "lfm2-1.2b",
    "lfm2.5-2.6b",
    "lfm2-8b-a1b",
    "lfm2.5-8b-a1b",
    "phi-3-mini",
    "phi-3-mini-4k",
    "phi-3-medium",
    "phi-3-medium-4k",
    "phi-4",
    "phi-4-mini",
    "mistral-7b-v0.1",
    "mistral-7b",
    "ministral-3-3b",
    "ministral-3-8b",
    "ministral-3-14b",
    "mixtral-8x7b",
    "olmo-2-7b",
    "olmo-3-7b",
    "smollm3-3b",
)
@pytest.mark.parametrize("name", CONFIGS)
def test_fields_and_shapes_are_those_of_the_class(name: str) -> None:
    fields, named = dict(CONFIGS[name]), named_model(name)
    kind = fields.pop("model_type")
    config = CONFIG_MAPPING[kind](**fields)
    # a field that is written wrong would be an attribute that no code reads
    known = {field.name for field in dataclasses.fields(type(config))} | set(config.attribute_map)
    kept = {**config.to_dict(), **{new: config.to_dict().get(old) for new, old in config.attribute_map.items()}}
    assert {field for field, value in fields.items() if field not in known or kept[field] != value} <= TRANSLATED.get(kind, set())
    assert config_spec(config, 2) == named
    with torch.device("meta"):
        model = getattr(transformers, family_of_type(kind).causal)(config).to(torch.bfloat16)
    # whether the norm before the head is found by its name decides on memory alone, and no config says it
    assert asdict(replace(model_spec(model), tiles_final_norm=True)) == asdict(named)
    # norms and biases are not counted
    assert sum(weight.numel() for weight in model.parameters()) == pytest.approx(named.num_parameters, rel=2e-3)


# billions on model cards, in technical reports and safetensors indices; text decoders alone, without layers that predict further
# tokens; for gpt-* from FlexSP's artefact, at 192K positions
PUBLISHED = {
    **{"gpt-7b": 7.642, "gpt-13b": 14.083, "gpt-30b": 33.850},
    **{"llama-2-7b": 6.74, "llama-2-13b": 13.02, "llama-2-70b": 68.98, "llama-3.1-8b": 8.03, "llama-3.1-70b": 70.55},
    **{"llama-3.1-405b": 405.9, "llama-3.2-1b": 1.236, "llama-3.2-3b": 3.213, "llama-4-scout": 109, "llama-4-maverick": 400},
    **{"smollm2-135m": 0.135, "smollm2-360m": 0.362, "smollm2-1.7b": 1.71, "smollm3-3b": 3.08},
    **{"qwen2.5-0.5b": 0.49, "qwen2.5-1.5b": 1.54, "qwen2.5-3b": 3.09, "qwen2.5-7b": 7.616, "qwen2.5-14b": 14.7},
    **{"qwen2.5-32b": 32.5, "qwen2.5-72b": 72.7, "deepseek-r1-distill-qwen-1.5b": 1.78},
    **{"qwen3-0.6b": 0.596, "qwen3-1.7b": 1.721, "qwen3-4b": 4.022, "qwen3-8b": 8.191, "qwen3-14b": 14.77, "qwen3-32b": 32.76},
    **{"qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235, "qwen3-coder-480b-a35b": 480, "qwen3-next-80b-a3b": 80},
    # some names of Qwen 3.5 count images and further tokens; these are decoders in the sizes of the public configs
    **{"qwen3.5-0.8b": 0.752, "qwen3.5-2b": 1.88, "qwen3.5-4b": 4.21, "qwen3.5-9b": 8.954, "qwen3.5-27b": 26.9},
    **{"qwen3.5-35b-a3b": 35, "qwen3.5-122b-a10b": 122, "qwen3.5-397b-a17b": 397},
    **{"gemma-2b": 2.51, "gemma-7b": 8.538, "gemma-2-2b": 2.61, "gemma-2-9b": 9.24, "gemma-2-27b": 27.2},
    **{"gemma-3-270m": 0.268, "gemma-3-1b": 1.0, "gemma-3-4b": 3.88, "gemma-3-12b": 11.77, "gemma-3-27b": 27.01},
    **{"gemma-4-e2b": 4.6286, "gemma-4-e4b": 7.463, "gemma-4-12b": 12, "gemma-4-26b-a4b": 25.2331, "gemma-4-31b": 30.6973},
    **{"gpt-oss-20b": 20.915, "gpt-oss-120b": 116.829, "minimax-m2": 230, "seed-oss-36b": 36},
    **{"glm-4-9b": 9.4, "glm-4-32b": 32.6, "glm-4.5-air": 106, "glm-4.5": 355, "glm-4.7-flash": 30, "glm-5": 744, "glm-5.2": 744},
    **{"deepseek-v2-lite": 15.7, "deepseek-v3": 671, "deepseek-v3.2": 671, "deepseek-v4-flash": 284},
    **{"kimi-k2": 1040, "kimi-linear-48b-a3b": 49.1},
    **{"nemotron-nano-9b-v2": 8.89, "nemotron-nano-12b-v2": 12.31, "nemotron-3-nano-4b": 3.97, "nemotron-3-nano-30b-a3b": 31.6},
    **{"nemotron-3-super-120b-a12b": 120.6, "nemotron-3-ultra-550b-a55b": 550},
    **{"granite-3.3-2b": 2.53, "granite-3.3-8b": 8.17, "granite-4.1-3b": 3.4, "granite-4.1-8b": 8.4, "granite-4.1-30b": 28.9},
    **{"granite-4.0-350m": 0.35, "granite-4.0-1b": 1.6, "granite-4.0-micro": 3.4, "granite-4.0-h-350m": 0.34},
    **{"granite-4.0-h-1b": 1.46, "granite-4.0-h-micro": 3.19, "granite-4.0-h-tiny": 6.94, "granite-4.0-h-small": 32.2},
    **{"lfm2-350m": 0.354, "lfm2-1.2b": 1.17, "lfm2.5-2.6b": 2.7, "lfm2-8b-a1b": 8.34, "lfm2.5-8b-a1b": 8.47},
    **{"phi-3-mini": 3.82, "phi-3-medium": 14, "phi-3-mini-4k": 3.82, "phi-3-medium-4k": 14, "phi-4": 14.7, "phi-4-mini": 3.84},
    **{
        "mistral-7b-v0.1": 7.24,
        "mistral-7b-v0.2": 7.24,
        "mistral-7b": 7.248,
        "mistral-nemo-12b": 12.2,
        "mistral-small-24b": 23.6,
    },
    **{"mistral-small-4-119b": 119, "mistral-large-123b": 123, "codestral-22b": 22.2, "mixtral-8x7b": 46.7, "mixtral-8x22b": 141},
    **{"ministral-8b": 8.02, "ministral-3-3b": 3.4, "ministral-3-8b": 8.4, "ministral-3-14b": 13.5},
    **{"olmo-2-7b": 7.3, "olmo-2-13b": 13.7, "olmo-3-7b": 7.3, "olmo-3-32b": 32.2, "olmo-hybrid-7b": 7.43},
}


@pytest.mark.parametrize("name", model_names())
def test_parameters_are_the_published_ones(name: str) -> None:
    found, (shape, _) = named_model(name), ALIASES.get(name, (name, 0))
    assert found.num_parameters == pytest.approx(PUBLISHED[shape] * 1e9, rel=0.02)


# `max_position_embeddings` of config.json files on the hub
POSITIONS = {
    **{"llama-2-7b": 4096, "llama-3-8b": 8192, "llama-3.1-8b": 131072, "llama-3.2-1b": 131072, "llama-3.3-70b": 131072},
    **{"llama-4-scout": 10485760, "llama-4-maverick": 1048576, "smollm2-1.7b": 8192, "smollm3-3b": 65536},
    **{"qwen2.5-0.5b": 32768, "qwen2.5-7b": 131072, "qwq-32b": 40960, "qwen3-8b": 40960, "qwen3-30b-a3b-2507": 262144},
    **{"qwen3-coder-480b-a35b": 262144, "qwen3-next-80b-a3b": 262144, "gemma-2-9b": 8192, "gemma-3-1b": 32768},
    **{"gemma-3-27b": 131072, "gpt-oss-20b": 131072, "glm-4-9b-0414": 32768, "glm-4.5-air": 131072, "glm-4.6": 202752},
    **{"deepseek-v3": 163840, "deepseek-r1": 163840, "kimi-k2": 131072, "kimi-k2-0905": 262144, "kimi-k2-thinking": 262144},
    **{"granite-4.0-350m": 32768, "granite-4.0-h-350m": 32768, "granite-4.0-h-small": 131072, "phi-3-mini-4k": 4096},
    **{"phi-3-medium-4k": 4096, "phi-3-mini-128k": 131072, "phi-4": 16384, "phi-4-mini": 131072, "mistral-7b-v0.1": 32768},
    **{"mistral-7b-v0.3": 32768, "mixtral-8x22b": 65536, "olmo-2-7b": 4096, "olmo-3-7b": 65536},
}


@pytest.mark.parametrize("name,positions", POSITIONS.items())
def test_positions_are_the_published_ones(name: str, positions: int) -> None:
    assert named_model(name).max_positions == positions


@pytest.mark.parametrize("size", ["mini", "medium"])
def test_short_versions_of_phi_3_have_windows(size: str) -> None:
    short, long = named_model(f"phi-3-{size}-4k"), named_model(f"phi-3-{size}-128k")
    assert set(short.windows) == {2047} and not any(long.windows)
    assert replace(short, windows=(), max_positions=0) == replace(long, windows=(), max_positions=0)


# billions of parameters that a token passes, in names or on model cards, with its row of the embedding
@pytest.mark.parametrize(
    "name,active",
    [
        *[("qwen3-30b-a3b", 3.3), ("qwen3-235b-a22b", 22), ("qwen3-coder-480b-a35b", 35), ("qwen3-next-80b-a3b", 3.9)],
        *[("glm-4.5-air", 12), ("glm-4.5", 32), ("glm-5", 40), ("deepseek-v3", 37), ("kimi-k2", 32), ("minimax-m2", 10)],
        *[("nemotron-3-nano-30b-a3b", 3.5), ("nemotron-3-super-120b-a12b", 12), ("nemotron-3-ultra-550b-a55b", 55)],
        *[("kimi-linear-48b-a3b", 3), ("qwen3.5-122b-a10b", 10), ("qwen3.5-397b-a17b", 17), ("lfm2-8b-a1b", 1.5)],
        *[("granite-4.0-h-small", 9), ("mistral-small-4-119b", 6.5), ("deepseek-v4-flash", 13)],
    ],
)
def test_a_token_passes_as_many_parameters_as_published(name: str, active: float) -> None:
    spec = named_model(name)
    passed = spec.num_layers * spec.layer_parameters + spec.head_outputs * spec.hidden_size
    assert passed / 1e9 == pytest.approx(active, rel=0.12)


@pytest.mark.parametrize("name,params_gi", [("gpt-7b", 7.8498687744), ("gpt-13b", 14.0315818787), ("gpt-30b", 32.7153244019)])
def test_position_embeddings_grow_with_the_context(name: str, params_gi: float) -> None:
    assert replace(named_model(name), max_positions=384_000).num_parameters == pytest.approx(params_gi * 2**30, rel=1e-3)


def test_an_mlp_without_a_gate_by_hand() -> None:
    # 4 * 4096^2 parameters in attention and 2 * 4096 * 16384 in the MLP, which saves input and output of its activation
    model = named_model("gpt-7b")
    assert model.layer_parameters == 4 * 4096**2 + 2 * 4096 * 16384
    gated = replace(model, gated_mlp=True)
    assert gated.layer_parameters - model.layer_parameters == 4096 * 16384
    assert saved_token_bytes(gated) - saved_token_bytes(model) == 32 * 4 * 16384


def test_names_are_read_in_any_spelling() -> None:
    assert named_model("Llama 3.1 8B") == named_model("llama_3.1_8b") == named_model("llama-3.1-8b")
    assert named_model("qwen3-8b").bytes_per_element == 2
    assert named_model("qwen3-8b", bytes_per_element=4).bytes_per_element == 4


def test_names_of_the_hub_stand_for_their_shapes() -> None:
    for name in ("Qwen3-8B-Base", "qwen3-8b"):
        assert named_model(name) == named_model("qwen3-8b")
    assert named_model("Meta-Llama-3.1-8B-Instruct") == named_model("llama-3.1-8b")
    assert named_model("NVIDIA-Nemotron-Nano-9B-v2") == named_model("nemotron-nano-9b-v2")
    assert named_model("Qwen3-30B-A3B-Instruct-2507") == replace(named_model("qwen3-30b-a3b"), max_positions=262144)
    assert named_model("Meta-Llama-3-8B").max_positions == 8192 and named_type("Meta-Llama-3-8B-Instruct") == "llama"
    assert named_model("gemma-3-12b-it") == named_model("gemma-3-12b")
    assert named_type("DeepSeek-R1") == "deepseek_v3" and named_type("QwQ-32B") == "qwen2"


@pytest.mark.parametrize(
    "name,known",
    [
        ("Olmo-3-7B-Think", "olmo-3-7b"),
        ("Olmo-3-32B-Think", "olmo-3-32b"),
        ("Ministral-3-8B-Reasoning-2512", "ministral-3-8b"),
        ("Codestral-22B-v0.1", "codestral-22b"),
        ("DeepSeek-V3.2-Exp", "deepseek-v3.2"),
        ("DeepSeek-V3.1-Terminus", "deepseek-v3.1"),
        ("Devstral-Small-2505", "devstral-small"),
        ("Mistral-Large-Instruct-2407", "mistral-large-2411"),
        ("Qwen2.5-Coder-3B-Instruct", "qwen2.5-3b"),
        ("Qwen3-8B-unsloth-bnb-4bit", "qwen3-8b"),
        ("Qwen2.5-32B-Instruct-AWQ", "qwen2.5-32b"),
    ],
)
def test_releases_and_packed_files_of_a_model_have_its_shape(name: str, known: str) -> None:
    assert replace(named_model(name), max_positions=1) == replace(named_model(known), max_positions=1)


def test_a_named_model_is_read_as_its_config_json() -> None:
    assert read_model("Qwen/Qwen3-8B", 2) == named_model("qwen3-8b")
    assert named_config("gpt-7b") is None and named_config("nonesuch") is None
    assert kernels_of("Qwen/Qwen3-8B") == kernel_fields("qwen3") and kernels_of("gpt-7b") == kernel_fields("")


@pytest.mark.parametrize(
    "name,nearest",
    [
        # the size counts, not the letters of its name
        ("qwen3-40b-a4b", "qwen3-30b-a3b"),
        ("qwen3-30b", "qwen3-30b-a3b"),
        ("qwen3-7b", "qwen3-8b"),
        ("Qwen3.7-27B", "qwen3.5-27b"),
        ("gemma-4-27b", "gemma-4-26b-a4b"),
        ("llama-3.1-9b", "llama-3.1-8b"),
        ("lama-3.1-8b", "llama-3.1-8b"),
        ("qwen3-coder-32b", "qwen3-coder-30b-a3b"),
        ("mistral-8b", "mistral-7b"),
        ("kimi-k3", "kimi-k2"),
        ("mixtral-8x8b", "mixtral-8x7b"),
        # a million tokens is no size
        ("Qwen2.5-7B-Instruct-1M", "qwen2.5-7b"),
        # another brand is further away than another size
        ("Devstral-Small-2-24B-Instruct-2512", "devstral-small"),
    ],
)
def test_the_nearest_name_is_of_the_same_family_then_of_the_nearest_version_and_size(name: str, nearest: str) -> None:
    assert nearest_names(name)[0] == nearest
    with pytest.raises(ValueError, match=rf"'{name}' is not known; the nearest known names are {nearest}, .*config\.json"):
        named_model(name)


@pytest.mark.parametrize("name", ["zzz", "", "8b", "***"])
def test_a_name_of_no_known_family_gets_the_list(name: str) -> None:
    assert nearest_names(name) == ()
    with pytest.raises(ValueError, match=r"--list models.*config\.json"):
        named_model(name)


@pytest.mark.wide
def test_shapes_of_the_catalogue_have_its_name_whatever_their_positions() -> None:
    equal = {"granite-4.0-micro": "granite-4.1-3b"}
    for name in model_names():
        shape = ALIASES.get(name, (name, 0))[0]
        assert spec_name(named_model(name)) in (shape, equal.get(shape))
    assert spec_name(replace(named_model("qwen3-4b"), max_positions=1000)) == "qwen3-4b"


def test_models_that_cost_differently_are_called_differently() -> None:
    spec = named_model("llama-3.2-1b", bytes_per_element=4)
    changed = {"num_layers": 15, "hidden_size": 1, "intermediate_size": 2, "num_heads": 16, "num_kv_heads": 1, "head_dim": 2}
    changed |= {
        "vocab_size": 9,
        "tied_embeddings": False,
        "bytes_per_element": 8,
        "bytes_sent_per_element": 2,
        "gated_mlp": False,
    }
    names = [spec_name(spec), *(spec_name(replace(spec, **{field: value})) for field, value in changed.items())]
    assert len(set(names)) == 1 + len(changed)
    assert names[0] == "16 layers of 2048 and 8192, 32/8 heads of 64, vocabulary 128256 tied, 4 bytes"


def test_functions_that_run_as_kernels_are_in_the_name() -> None:
    spec = named_model("qwen3-8b")
    names = {spec_name(replace(spec, **kernel_fields(kind))) for kind in ("", "qwen3", "qwen3_moe", "cohere")}
    assert names == {
        "qwen3-8b",
        "qwen3-8b, norms and gates and rotary embeddings as kernels",
        "qwen3-8b, norms and rotary embeddings as kernels",
        "qwen3-8b, gates as kernels",
    }
    assert with_kernels("qwen3-8b", kernel_fields("cohere")) == "qwen3-8b, gates as kernels"


def test_windows_are_in_the_name_by_their_size_and_number() -> None:
    spec = replace(named_model("mistral-7b"), windows=(4096, None) * 8 + (1024,) * 16)
    assert ", windows of 1024 in 16 layers, windows of 4096 in 8 layers, vocabulary 32768" in spec_name(spec)
