"""Extended positions: the frequencies are the published ones, and a model that does not have its config's is noticed."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import transformers
from helpers.models.tiny_models import ModelCase, build_model
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    JambaConfig,
    LlamaConfig,
    MambaConfig,
    MiniCPM3Config,
    MptConfig,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    Qwen3Config,
    RwkvConfig,
)

from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.positions import max_positions
from hf_longctx.hf.models.rope import extend_positions, rope_problems
from hf_longctx.hf.rules.models import model_problems

SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "head_dim": 16}
TRAINED = 512
LISTS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": TRAINED, **LISTS}
# Phi 3 has the trained length beside its rope parameters, and more positions
PHI3 = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128, "pad_token_id": 0}
MINICPM3 = {"rope_parameters": LONGROPE, "qk_rope_head_dim": 16}


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


def test_dynamic_scales_each_document_by_its_own_length(caplog) -> None:
    extended = extend_positions(config_of(), 4 * TRAINED, "dynamic")
    assert extended.max_position_embeddings == TRAINED and extended.rope_parameters["factor"] == 4
    # beyond its factor it is extended once more, and without scaling it grows by itself
    assert extend_positions(extended, 4 * TRAINED, "dynamic") is extended
    assert extend_positions(extended, 8 * TRAINED, "dynamic").rope_parameters["factor"] == 8
    assert extend_positions(extended, 8 * TRAINED, "none") is extended and not caplog.text
    embedding = model_of(extended).model.rotary_emb
    cosines, _ = embedding(torch.zeros(1), torch.arange(2 * TRAINED)[None])
    # factor * length / trained - (factor - 1) at twice the trained length, to the power of dim / (dim - 2)
    theta = 1e4 * (4 * 2 - 3) ** (16 / 14)
    assert cosines[0, 1, :8].tolist() == pytest.approx([math.cos(theta ** (-2 * index / 16)) for index in range(8)], rel=1e-5)
    assert rope_problems(model_of(extended)) == []


@pytest.mark.parametrize("kind", [Phi3Config, MiniCPM3Config])
def test_longrope_keeps_the_lists_and_takes_its_factor_from_the_trained_length(kind: type[PretrainedConfig]) -> None:
    config = config_of(kind, **copy.deepcopy(PHI3 if kind is Phi3Config else MINICPM3))
    extended = extend_positions(config, 16 * TRAINED, "longrope")
    trained = config.rope_parameters["original_max_position_embeddings"]
    assert trained == (128 if kind is Phi3Config else TRAINED)
    assert extended.rope_parameters == {**config.rope_parameters, "factor": 16 * TRAINED / trained}
    embedding = model_of(extended).model.rotary_emb
    # section 3.3 of the paper
    scale = math.sqrt(1 + math.log(16 * TRAINED / trained) / math.log(trained))
    for length, factor in ((trained, 1), (trained + 1, 2)):
        cosines, _ = embedding(torch.zeros(1), torch.arange(length)[None])
        by_hand = [scale * math.cos(1e4 ** (-2 * index / 16) / factor) for index in range(8)]
        assert cosines[0, 1, :8].tolist() == pytest.approx(by_hand, rel=1e-5)
    assert rope_problems(model_of(extended)) == []


def test_longrope_beyond_its_positions_as_it_is_keeps_its_scale(caplog) -> None:
    config = config_of(Phi3Config, **copy.deepcopy(PHI3))
    further = extend_positions(config, 16 * TRAINED, "none")
    plain, model = model_of(config).model.rotary_emb, model_of(further).model.rotary_emb
    assert further.max_position_embeddings == 16 * TRAINED and "but the checkpoint was trained on 512 only" in caplog.text
    assert model.attention_scaling == plain.attention_scaling > 1 and torch.equal(model.inv_freq, plain.inv_freq)


@pytest.mark.parametrize(
    "kind, rope_type, change",
    [
        (LlamaConfig, "dynamic", lambda config: config.rope_parameters.update(factor=9.0)),
        (LlamaConfig, "dynamic", lambda config: setattr(config, "max_position_embeddings", 2 * TRAINED)),
        (Phi3Config, "longrope", lambda config: config.rope_parameters.update(long_factor=[3.0] * 8)),
        (Phi3Config, "longrope", lambda config: config.rope_parameters.update(factor=99.0)),
        (Phi3Config, "longrope", lambda config: setattr(config, "original_max_position_embeddings", 64)),
        # whose scale does not depend on it
        (MiniCPM3Config, "longrope", lambda config: config.rope_parameters.update(original_max_position_embeddings=64)),
    ],
)
def test_frequencies_beyond_the_trained_length_are_those_of_the_config(kind: Any, rope_type: str, change: Any) -> None:
    settings = {Phi3Config: PHI3, MiniCPM3Config: {**MINICPM3, "rope_parameters": {**LONGROPE, "attention_factor": 1.2}}}
    config = config_of(kind, **copy.deepcopy(settings.get(kind, {})))
    model = model_of(extend_positions(config, 16 * TRAINED, rope_type))
    assert rope_problems(model) == []
    # its own state is that of the last forward, which is no problem
    model.model.rotary_emb(torch.zeros(1), torch.arange(8 * TRAINED)[None])
    assert rope_problems(model) == []
    model.config = copy.deepcopy(model.config)
    change(model.config)
    (problem,) = rope_problems(model)
    assert "the config was changed after the model was built" in problem


def test_nothing_changes_where_there_is_room_or_nothing_is_scaled(caplog) -> None:
    config = config_of()
    assert extend_positions(config, TRAINED) is config and not caplog.text
    further = extend_positions(config, 2 * TRAINED, "none")
    assert further.rope_parameters == config.rope_parameters and further.max_position_embeddings == 2 * TRAINED
    assert "positions up to 1024 are used without rope_scaling, but the checkpoint was trained on 512 only" in caplog.text


@pytest.mark.parametrize(
    "config, scaling, message",
    [
        (config_of(), "su", "rope_scaling is 'su'; choose one of yarn, linear, dynamic, longrope, none"),
        (
            config_of(),
            "longrope",
            "LlamaConfig has no short_factor and no long_factor in its rope_parameters, which longrope takes from",
        ),
        (
            config_of(rope_parameters={**LONGROPE, "long_factor": [1.0] * 8}),
            "longrope",
            "long_factor of LlamaConfig is the same as its short_factor, so that longrope would change no frequency",
        ),
        (
            config_of(rope_parameters=dict(LONGROPE)),
            "yarn",
            "by rope_type 'longrope' already; use rope_scaling='longrope', or 'none' to train beyond its 512 positions",
        ),
        (config_of(Phi3Config, pad_token_id=0), "dynamic", "Phi3Config does not take rope_scaling='dynamic'"),
        (GPT2Config(n_positions=TRAINED), "yarn", "GPT2Config has 512 positions and no rotary position embeddings to scale"),
        (MptConfig(max_seq_len=TRAINED), "none", "MptConfig has 512 positions and no rotary position embeddings to scale"),
        (
            config_of(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
            "yarn",
            "scales its positions by rope_type 'linear' already; use rope_scaling='linear', or 'none'",
        ),
    ],
)
def test_what_cannot_be_extended_is_named(config: PretrainedConfig, scaling: Any, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        extend_positions(config, 4 * TRAINED, scaling)
    assert message in str(refused.value)


@pytest.mark.parametrize("config_class,field", [(JambaConfig, "max_position_embeddings"), (RwkvConfig, "context_length")])
def test_a_model_that_needs_no_positions_gets_another_limit(config_class: Any, field: str, caplog: Any) -> None:
    config = config_class(**{field: TRAINED})
    extended = extend_positions(config, 4 * TRAINED)
    assert max_positions(extended) == getattr(extended, field) == 4 * TRAINED and getattr(config, field) == TRAINED
    assert f"needs no positions, so rope_scaling='yarn' scales nothing; its limit of {TRAINED} tokens" in caplog.text
    changed = {name for name, value in extended.to_dict().items() if value != config.to_dict()[name]}
    assert changed == {field}
    # one that states no limit has none
    mamba = MambaConfig()
    assert extend_positions(mamba, 1 << 20) is mamba


def test_a_config_changed_after_the_model_was_built_is_refused() -> None:
    model = build_model(ModelCase())
    assert rope_problems(model) == []
    model.config.rope_parameters = extend_positions(model.config, 1 << 20).rope_parameters
    (problem,) = model_problems(ModelFacts.of(model))
    assert "differ by" in problem and "the config was changed after the model was built" in problem
    assert "(rope_type 'yarn')" in problem


def test_a_model_that_was_cast_as_a_whole_is_refused_and_one_loaded_in_half_precision_is_not() -> None:
    assert rope_problems(model_of(config_of(), dtype=torch.bfloat16)) == []
    assert len(rope_problems(model_of(config_of()).to(torch.bfloat16))) == 1
    assert rope_problems(model_of(config_of()).to(torch.float64)) == []


@pytest.mark.parametrize("family", ["GPTNeoX", "Phi"])
def test_a_rotated_share_of_no_dimension_is_no_problem(family: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    share = {"rotary_pct": 0.1} if family == "GPTNeoX" else {"partial_rotary_factor": 0.1}
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**sizes, **share))
    assert rope_problems(model) == []
