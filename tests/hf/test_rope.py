"""Extended positions: the frequencies are the published ones, and a model that does not have its config's is noticed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.models import ModelCase, build_model
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PhiConfig,
    PretrainedConfig,
    Qwen3Config,
)

from hf_longctx.hf.compat import model_problems
from hf_longctx.hf.rope import extend_positions, rope_problems

SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "head_dim": 16}
TRAINED = 512


def config_of(kind: type[PretrainedConfig] = LlamaConfig, **changes: Any) -> PretrainedConfig:
    return kind(**(SIZES | {"num_hidden_layers": 2, "max_position_embeddings": TRAINED} | changes))


def model_of(config: PretrainedConfig, **settings: Any) -> Any:
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", **settings)


def yarn_by_hand(dim: int, theta: float, factor: float, trained: int) -> list[float]:
    """Section 3.2 of the paper, number by number: alpha 1 and beta 32 rotations within the trained length."""
    result = []
    bounds = [dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta)) for rotations in (32, 1)]
    low, high = max(math.floor(bounds[0]), 0), min(math.ceil(bounds[1]), dim - 1)
    for index in range(dim // 2):
        plain = theta ** (-2 * index / dim)
        interpolated = min(1.0, max(0.0, (index - low) / max(high - low, 1e-3)))
        result.append(plain * (1 - interpolated) + plain / factor * interpolated)
    return result


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config, PhiConfig])
@pytest.mark.parametrize("scaling", ["yarn", "linear"])
def test_frequencies_are_the_published_ones(kind: type[PretrainedConfig], scaling: Any) -> None:
    config = config_of(kind, **({"partial_rotary_factor": 0.5} if kind is PhiConfig else {}))
    extended = extend_positions(config, 4 * TRAINED, scaling)
    assert extended.max_position_embeddings == 4 * TRAINED and config.max_position_embeddings == TRAINED
    plain, model = model_of(config), model_of(extended)
    dim = 2 * len(plain.model.rotary_emb.inv_freq)
    theta = config.rope_parameters["rope_theta"]
    by_hand = yarn_by_hand(dim, theta, 4, TRAINED) if scaling == "yarn" else (plain.model.rotary_emb.inv_freq / 4).tolist()
    assert model.model.rotary_emb.inv_freq.tolist() == pytest.approx(by_hand, rel=1e-5)
    assert not torch.equal(model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)
    if scaling == "yarn":
        assert model.model.rotary_emb.attention_scaling == pytest.approx(0.1 * math.log(4) + 1)
    assert rope_problems(model) == []


def test_what_was_extended_before_counts_from_the_trained_length() -> None:
    for scaling in ("yarn", "linear"):
        twice = extend_positions(extend_positions(config_of(), 2 * TRAINED, scaling), 8 * TRAINED, scaling)
        once = extend_positions(config_of(), 8 * TRAINED, scaling)
        assert twice.rope_parameters == once.rope_parameters and once.rope_parameters["factor"] == 8


def test_layers_with_windows_keep_their_frequencies() -> None:
    types = ["sliding_attention", "full_attention"]
    config = config_of(Gemma3TextConfig, layer_types=types, num_key_value_heads=1, sliding_window=64)
    extended = extend_positions(config, 2 * TRAINED)
    assert extended.rope_parameters["sliding_attention"] == config.rope_parameters["sliding_attention"]
    assert extended.rope_parameters["full_attention"]["rope_type"] == "yarn"
    model = model_of(extended)
    assert rope_problems(model) == []
    model.config.rope_parameters = config.rope_parameters
    (problem,) = rope_problems(model)
    assert problem.startswith("model.rotary_emb has rotary frequencies of rope_type 'yarn'")


def test_nothing_changes_where_there_is_room_or_nothing_is_scaled(caplog) -> None:
    config = config_of()
    assert extend_positions(config, TRAINED) is config and not caplog.text
    further = extend_positions(config, 2 * TRAINED, "none")
    assert further.rope_parameters == config.rope_parameters and further.max_position_embeddings == 2 * TRAINED
    assert "positions up to 1024 are used without rope_scaling, where the checkpoint knows 512" in caplog.text


@pytest.mark.parametrize(
    "config, scaling, message",
    [
        (config_of(), "dynamic", "rope_scaling is 'dynamic'; choose one of yarn, linear, none"),
        (GPT2Config(n_positions=TRAINED), "yarn", "GPT2Config has no rotary position embeddings to scale"),
        (
            config_of(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
            "yarn",
            "scales its positions by rope_type 'linear' already; use rope_scaling='none'",
        ),
    ],
)
def test_what_cannot_be_extended_is_named(config: PretrainedConfig, scaling: Any, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        extend_positions(config, 4 * TRAINED, scaling)
    assert message in str(refused.value)


def test_a_config_changed_after_the_model_was_built_is_refused() -> None:
    model = build_model(ModelCase())
    assert rope_problems(model) == []
    model.config.rope_parameters = extend_positions(model.config, 1 << 20).rope_parameters
    (problem,) = model_problems(model)
    assert "differ by" in problem and "the config was changed after the model was built" in problem
    assert "(rope_type 'yarn')" in problem


def test_a_model_that_was_cast_as_a_whole_is_refused_and_one_loaded_in_half_precision_is_not() -> None:
    assert rope_problems(model_of(config_of(), dtype=torch.bfloat16)) == []
    assert len(rope_problems(model_of(config_of()).to(torch.bfloat16))) == 1
    assert rope_problems(model_of(config_of()).to(torch.float64)) == []
