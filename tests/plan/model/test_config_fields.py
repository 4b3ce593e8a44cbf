"""A model's `config.json` tells the planner what its config tells a run, for every class that runs; real models agree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_longctx.families.registry import TESTED_MODELS, WRAPPED_MODELS
from hf_longctx.hf.models.positions import has_limit, max_positions
from hf_longctx.hf.models.spec import config_spec, model_spec
from hf_longctx.plan.model.config import has_position_table
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.sim.models import read_model


def default_configs() -> Iterator[tuple[str, PretrainedConfig]]:
    """The default config of every class that runs, with the name of the class."""
    for name in (*TESTED_MODELS, *WRAPPED_MODELS):
        yield name, getattr(transformers, name).config_class()


@pytest.mark.wide
def test_the_file_of_every_class_gives_the_spec_of_a_run(tmp_path: Path) -> None:
    wrong: dict[str, Any] = {}
    for name, config in default_configs():
        expected = config_spec(config, 2)
        config.save_pretrained(tmp_path)
        for found in (ModelSpec.from_config(config.to_dict(), 2), read_model(str(tmp_path), 2)):
            if found != expected:
                wrong[name] = found
        text = config.get_text_config()
        # numbers of transformers itself, by the class's own names and properties
        num_layers = getattr(text, "decoder_layers", text.num_hidden_layers) - len(getattr(text, "cross_attention_layers", ()))
        stated = (num_layers, text.hidden_size, text.vocab_size)
        counted = (expected.num_layers, expected.hidden_size, expected.vocab_size)
        attends = any(expected.states.attending) or expected.states.is_empty
        if counted != stated or (attends and expected.max_positions != max_positions(config)):
            wrong[name] = counted, stated, expected.max_positions, max_positions(config)
    assert not wrong


def test_of_an_encoder_and_a_decoder_the_decoder_is_read(tmp_path: Path) -> None:
    sizes = {"decoder_layers": 4, "decoder_attention_heads": 8, "decoder_ffn_dim": 96}
    config = transformers.BartConfig(d_model=64, encoder_layers=32, encoder_attention_heads=4, encoder_ffn_dim=32, **sizes)
    config.save_pretrained(tmp_path)
    # an encoder's depth may stand under the name that decoders have elsewhere
    stated = ModelSpec.from_config({**config.to_dict(), "num_hidden_layers": 32, "num_attention_heads": 4}, 2)
    for found in (config_spec(config, 2), read_model(str(tmp_path), 2), stated):
        assert (found.num_layers, found.num_heads, found.intermediate_size) == (4, 8, 96)


@pytest.mark.wide
def test_forecasts_know_the_classes_whose_positions_nothing_extends() -> None:
    """A run refuses a `max_length` above their positions, and there is no rotary embedding to scale."""
    fixed, tables = set(), set()
    for _, config in default_configs():
        text = config.get_text_config()
        fixed |= {text.model_type} if has_limit(config) and not getattr(text, "rope_parameters", None) else set()
        tables |= {text.model_type} if has_position_table(config.to_dict()) else set()
    # the others state a number of positions, but need none, so that their config may state another
    assert tables <= fixed and {"gpt2", "gptj", "opt", "biogpt", "bert", "roberta", "mpt"} <= tables
    assert not {name for name in fixed - tables if any(word in name for word in ("gpt", "bert", "opt", "former"))}


# state families, and classes whose sizes have names of their own, lie in properties, or are shared by layers
COUNTED = (
    *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2"),
    *("lfm3", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    *("recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2", "zaya"),
    *("afmoe", "ernie4_5_moe", "exaone_moe", "hy_v3", "kolibri1", "solar_open"),
)


@pytest.mark.wide("kimi_linear", "kolibri1", "zamba")
@pytest.mark.parametrize("model_type", COUNTED)
def test_parameters_of_a_file_are_those_of_the_default_model(model_type: str) -> None:
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] in TESTED_MODELS
    config = CONFIG_MAPPING[model_type]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    held = sum(parameter.numel() for parameter in model.parameters())
    assert ModelSpec.from_config(config.to_dict()).num_parameters == pytest.approx(held, rel=0.05)


# classes without a default model, or with tables that take minutes to make
_SIZES = {
    "qwen4_exp_text": {
        **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 2048},
        **{"indexer_compress_ratio": 4, "ple_layer_ids": [2], "eos_token_id": 7},
        **{"ngram_vocab_size_base": 200_000, "num_hidden_layers": 8},
    },
}


@pytest.mark.daily("qwen4_exp_text")
@pytest.mark.parametrize("model_type", ["deepseek_v4", "qwen4_exp_text"])
def test_a_config_tells_all_that_a_run_reads_from_the_model(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type](**_SIZES.get(model_type, {}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    held = sum(parameter.numel() for parameter in model.parameters())
    # matrices that mix streams of hidden states are not counted
    assert config_spec(config).num_parameters == pytest.approx(held, rel=1e-2)
    # whether the norm before the head is found by its name no config says
    assert asdict(replace(model_spec(model), tiles_final_norm=True)) == asdict(config_spec(config))


def test_compression_is_read_from_the_file_on_the_hub() -> None:
    ratios = [0, 0, *[4, 128] * 20, 4, 0]
    loaded = CONFIG_MAPPING["deepseek_v4"](compress_ratios=ratios)
    derived = ("layer_types", "compress_rates", "mlp_layer_types")
    file = {name: value for name, value in loaded.to_dict().items() if name not in derived}
    spec = ModelSpec.from_config({**file, "compress_ratios": ratios, "num_hash_layers": 3})
    assert spec == config_spec(loaded) and spec.windows == (128, 128, *[None] * 41) and spec.index.is_empty


def test_layers_of_an_unknown_kind_are_refused_by_name() -> None:
    config = CONFIG_MAPPING["deepseek_v4"]().to_dict()
    with pytest.raises(ValueError, match="mlp_layer_types has 'soft_moe'"):
        ModelSpec.from_config({**config, "mlp_layer_types": ["soft_moe"] * 43})


def test_names_of_other_files_are_read() -> None:
    """Files on the hub may use names that transformers translates when it loads them."""
    llama = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    dbrx = {"d_model": 64, "n_heads": 4, "n_layers": 4, "vocab_size": 64, "max_seq_len": 512, "attn_config": {"kv_n_heads": 2}}
    spec = ModelSpec.from_config({**dbrx, "ffn_config": {"ffn_hidden_size": 32}, "model_type": "dbrx"})
    assert (spec.num_layers, spec.num_kv_heads, spec.intermediate_size, spec.max_positions) == (4, 2, 32, 512)
    nemotron = {**llama, "model_type": "nemotron_h", "hybrid_override_pattern": "M-*M", "num_hidden_layers": None}
    nemotron |= {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8}
    assert ModelSpec.from_config(nemotron).states.layers == (True, False, False, True)
    # a multimodal model's decoder, whatever towers lie beside it
    wrapped = {"model_type": "other", "text_config": llama, "vision_config": {"hidden_size": 8}}
    assert ModelSpec.from_config(json.loads(json.dumps(wrapped))) == ModelSpec.from_config(llama)
    assert ModelSpec.from_config({**llama, "intermediate_size": [96, 128, 96]}).intermediate_size == 128
    assert ModelSpec.from_config({**llama, "intermediate_size": None, "n_inner": None}).intermediate_size == 256
    with pytest.raises(ValueError, match="no intermediate_size"):
        ModelSpec.from_config({**llama, "intermediate_size": None})


@pytest.mark.parametrize("name", ["linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads"])
def test_a_hybrid_config_without_a_field_of_its_states_is_refused_with_the_fields_name(name: str) -> None:
    config = transformers.AutoConfig.for_model("qwen3_next").to_dict()
    del config[name]
    with pytest.raises(ValueError, match=f"the model config has no {name}; the config of a decoder-only model is needed"):
        ModelSpec.from_config(config)
