"""Named models have their published parameter counts, are found in any spelling, and unknown names get a hint."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import CONFIG_MAPPING

from hf_longctx.plan.core.configs.kernels import kernel_fields
from hf_longctx.plan.cost.catalog import model_names, named_model, named_type, spec_name, with_kernels
from hf_longctx.plan.memory.saved_tensors import saved_token_bytes

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


@pytest.mark.parametrize("name", model_names())
def test_parameters_are_the_published_ones(name: str) -> None:
    # norms and biases are not counted; they are far below a thousandth
    assert named_model(name).num_parameters == pytest.approx(PUBLISHED[name], rel=1e-3)


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


@pytest.mark.parametrize("name,hint", [("qwen3-7b", "qwen3-"), ("llama3-8b", "llama-3.1-8b"), ("zzz", "gpt-7b")])
def test_an_unknown_name_gets_close_ones_or_all(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=rf"'{name}'.*{hint}.*config\.json"):
        named_model(name)


def test_shapes_of_the_catalogue_have_its_name_whatever_their_positions() -> None:
    for name in model_names():
        assert spec_name(named_model(name)) == name
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
    assert set(types.values()) - {""} <= {*CONFIG_MAPPING, "gemma3_text", "qwen3_5_text", "gemma4_text"}


def test_windows_are_in_the_name_by_their_size_and_number() -> None:
    spec = replace(named_model("mistral-7b"), windows=(4096, None) * 8 + (1024,) * 16)
    assert ", windows of 1024 in 16 layers, windows of 4096 in 8 layers, vocabulary 32768" in spec_name(spec)
