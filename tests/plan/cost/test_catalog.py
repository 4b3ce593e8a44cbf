"""Named models have their published parameter counts, are found in any spelling, and unknown names get a hint."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import CONFIG_MAPPING

from hf_longctx.plan.cost.catalog import model_names, named_model, named_type, spec_name, with_kernels
from hf_longctx.plan.cost.public_configs import ALIASES
from hf_longctx.plan.memory.saved_tensors import saved_token_bytes
from hf_longctx.plan.model.config import kernel_fields

# parameter counts from model cards and safetensors indices; for gpt-* from FlexSP's artefact, at 192K positions
PUBLISHED = {
    "gpt-7b": 7.1174468994 * 2**30,
    "gpt-13b": 13.1160545349 * 2**30,
    "gpt-30b": 31.5251388550 * 2**30,
    "llama-3.1-8b": 8.030e9,
    "llama-3.1-70b": 70.554e9,
    "llama-3.2-1b": 1.236e9,
    "llama-3.2-3b": 3.213e9,
    "qwen3-0.6b": 0.596e9,
    "qwen3-1.7b": 1.721e9,
    "qwen3-4b": 4.022e9,
    "qwen3-8b": 8.191e9,
    "qwen3-14b": 14.768e9,
    "qwen3-32b": 32.762e9,
    # all weights of transformers' `Qwen3_5ForCausalLM` with the defaults of its config
    "qwen3.5-9b": 8.954e9,
    "qwen2.5-7b": 7.616e9,
    "mistral-7b": 7.248e9,
    "gemma-7b": 8.538e9,
    # without the vision encoder
    "gemma-3-1b": 1.000e9,
    "gemma-3-12b": 11.77e9,
    "gemma-3-27b": 27.01e9,
    # all weights of transformers' `Gemma4ForCausalLM` in the sizes of the public configs
    "gemma-4-e2b": 4.6286e9,
    "gemma-4-e4b": 7.4630e9,
    "gemma-4-26b-a4b": 25.2331e9,
    "gemma-4-31b": 30.6973e9,
    "gpt-oss-20b": 20.915e9,
    "gpt-oss-120b": 116.829e9,
}
# billions on model cards and in technical reports; text decoders alone, without layers that predict further tokens
ROUNDED = {
    **{"llama-2-7b": 6.74, "llama-2-13b": 13.02, "llama-2-70b": 68.98, "llama-3.1-405b": 405.9},
    **{"llama-4-scout": 109, "llama-4-maverick": 400},
    **{"qwen2.5-0.5b": 0.49, "qwen2.5-1.5b": 1.54, "qwen2.5-3b": 3.09, "qwen2.5-14b": 14.7, "qwen2.5-32b": 32.5},
    **{"qwen2.5-72b": 72.7, "deepseek-r1-distill-qwen-1.5b": 1.78},
    **{"qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235, "qwen3-coder-480b-a35b": 480, "qwen3-next-80b-a3b": 80},
    # those of transformers' classes in these sizes, 35, 122 and 397 in their names
    **{"qwen3.5-0.8b": 0.752, "qwen3.5-2b": 1.88, "qwen3.5-4b": 4.21, "qwen3.5-27b": 26.9},
    **{"qwen3.5-35b-a3b": 35, "qwen3.5-122b-a10b": 122, "qwen3.5-397b-a17b": 397},
    **{"glm-4-9b": 9.4, "glm-4-32b": 32.6, "glm-4.5-air": 106, "glm-4.5": 355, "glm-4.7-flash": 30},
    **{"deepseek-v2-lite": 15.7, "deepseek-v3": 671, "kimi-k2": 1040, "kimi-linear-48b-a3b": 49.1, "minimax-m2": 230},
    **{"nemotron-nano-9b-v2": 8.89, "nemotron-nano-12b-v2": 12.31, "nemotron-3-nano-30b-a3b": 31.6},
    **{"phi-3-mini": 3.82, "phi-3-medium": 14, "phi-4": 14.7, "phi-4-mini": 3.84},
    **{"gemma-2b": 2.51, "gemma-2-2b": 2.61, "gemma-2-9b": 9.24, "gemma-2-27b": 27.2},
    **{"mistral-nemo-12b": 12.2, "mistral-small-24b": 23.6, "mistral-large-123b": 123, "codestral-22b": 22.2},
    **{"ministral-8b": 8.02, "ministral-3-3b": 3.4, "ministral-3-8b": 8.4, "ministral-3-14b": 13.5},
    **{"mixtral-8x7b": 46.7, "mixtral-8x22b": 141, "smollm3-3b": 3.08, "olmo-3-7b": 7.3, "olmo-3-32b": 32.2, "seed-oss-36b": 36},
}


@pytest.mark.parametrize("name", model_names())
def test_parameters_are_the_published_ones(name: str) -> None:
    found, (shape, positions) = named_model(name), ALIASES.get(name, (name, 0))
    assert found.max_positions == (positions or found.max_positions)
    # norms and biases are not counted; they are far below a thousandth
    published, tolerance = (PUBLISHED[shape], 1e-3) if shape in PUBLISHED else (ROUNDED[shape] * 1e9, 0.02)
    assert found.num_parameters == pytest.approx(published, rel=tolerance)


# billions of parameters that a token passes, in names or on model cards, with its row of the embedding
@pytest.mark.parametrize(
    "name,active",
    [
        *[("qwen3-30b-a3b", 3.3), ("qwen3-235b-a22b", 22), ("qwen3-coder-480b-a35b", 35), ("qwen3-next-80b-a3b", 3.9)],
        *[("glm-4.5-air", 12), ("glm-4.5", 32), ("deepseek-v3", 37), ("kimi-k2", 32), ("minimax-m2", 10)],
        *[("nemotron-3-nano-30b-a3b", 3.5), ("kimi-linear-48b-a3b", 3), ("qwen3.5-122b-a10b", 10), ("qwen3.5-397b-a17b", 17)],
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


@pytest.mark.parametrize("name,hint", [("qwen3-7b", "qwen3-"), ("llama-3.1-9b", "llama-3.1-8b"), ("zzz", "--list models")])
def test_an_unknown_name_gets_close_ones_or_all(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=rf"'{name}'.*{hint}.*config\.json"):
        named_model(name)


def test_shapes_of_the_catalogue_have_its_name_whatever_their_positions() -> None:
    for name in model_names():
        assert spec_name(named_model(name)) == ALIASES.get(name, (name, 0))[0]
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


def test_named_shapes_have_the_type_of_their_class() -> None:
    types = {name: named_type(name) for name in model_names()}
    assert types["qwen3-8b"] == "qwen3" and types["qwen3.5-9b"] == "qwen3_5_text" and types["gemma-7b"] == "gemma"
    assert {name for name, kind in types.items() if not kind} == {"gpt-7b", "gpt-13b", "gpt-30b"}
    # a type that no class has would have no kernels
    texts = {"gemma3_text", "qwen3_5_text", "qwen3_5_moe_text", "gemma4_text", "llama4_text"}
    assert set(types.values()) - {""} <= {*CONFIG_MAPPING, *texts}


def test_windows_are_in_the_name_by_their_size_and_number() -> None:
    spec = replace(named_model("mistral-7b"), windows=(4096, None) * 8 + (1024,) * 16)
    assert ", windows of 1024 in 16 layers, windows of 4096 in 8 layers, vocabulary 32768" in spec_name(spec)
