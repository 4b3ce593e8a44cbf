"""The windows that the planner counts are those of the layers, from a model and from a config alone."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.versions import is_older
from transformers import CONFIG_MAPPING

from hf_longctx.hf.models.spec import model_spec, windows_of
from hf_longctx.plan.model.model_spec import ModelSpec

SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"num_hidden_layers": 8, "max_position_embeddings": 512, "sliding_window": 16},
}
# a type of config.json, settings beside its defaults, and the layers with a window; None: as its class says
CASES: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("llama", {}, ()),
    ("mistral", {}, tuple(range(8))),
    ("mistral", {"sliding_window": None}, ()),
    ("starcoder2", {}, tuple(range(8))),
    ("phi3", {"pad_token_id": 0}, tuple(range(8))),
    ("qwen2", {}, ()),
    ("qwen3", {"use_sliding_window": True, "max_window_layers": 5, "head_dim": 8}, (5, 6, 7)),
    ("gemma2", {"head_dim": 8}, (0, 2, 4, 6)),
    ("gemma3_text", {"head_dim": 8}, (0, 1, 2, 3, 4, 6, 7)),
    ("gemma3_text", {"head_dim": 8, "sliding_window_pattern": 3}, (0, 1, 3, 4, 6, 7)),
    ("cohere2", {}, (0, 1, 2, 4, 5, 6)),
    ("olmo3", {"pad_token_id": 0}, (0, 1, 2, 4, 5, 6)),
    ("exaone4", {}, (0, 1, 2, 4, 5, 6)),
    ("smollm3", {"use_sliding_window": True, "pad_token_id": 0}, (3, 7)),
    ("gpt_oss", {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}, (0, 2, 4, 6)),
    # short convolutions have no window
    (
        "lfm3",
        {
            "head_dim": 8,
            "pad_token_id": 0,
            "conv_L_cache": 3,
            "layer_types": ["conv"] * 6 + ["sliding_attention", "full_attention"],
        },
        (6,),
    ),
    ("gpt_oss", {"head_dim": 8, "num_local_experts": 2, "layer_types": ["full_attention"] * 7 + ["sliding_attention"]}, (7,)),
]


@pytest.mark.parametrize(("kind", "settings", "windowed"), CASES)
def test_a_config_and_its_model_have_the_same_windows(kind: str, settings: dict[str, Any], windowed: tuple[int, ...]) -> None:
    bare = SIZES | settings | {"model_type": kind}
    expected = tuple(16 if layer in windowed else None for layer in range(8)) if windowed else ()
    # the spec has 0 for layers with a state in place of attention
    has_state = [kind == "conv" for kind in settings.get("layer_types", ["full_attention"] * 8)]
    spec_windows = expected and tuple(0 if state else window for state, window in zip(has_state, expected, strict=True))
    assert ModelSpec.from_config(bare).windows == spec_windows
    if is_older and kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    config = transformers.AutoConfig.for_model(kind, **SIZES | settings)
    assert windows_of(config) == expected
    assert model_spec(transformers.AutoModelForCausalLM.from_config(config)).windows == spec_windows


def test_layers_of_a_mixed_model_are_told_apart() -> None:
    assert model_spec(build_model(ModelCase("mistral_window"))).windows == (6, 6)
    assert set(model_spec(build_model(ModelCase("qwen3_window"))).windows) == {6, None}
