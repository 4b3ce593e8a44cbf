"""The output head of a model: found inside wrappers, and refused by name where its class changes logits behind it."""

from __future__ import annotations

import pytest
import transformers
from helpers.models.tiny_models import VOCAB_SIZE, ModelCase, build_model
from torch import nn

from hf_longctx.hf.models.layers import head_problem, output_head

SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
# model class -> (config class, what the refusal says)
CHANGING = {
    "Gemma2ForCausalLM": ("Gemma2Config", "final_logit_softcapping=30.0"),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", ""),
    "CohereForCausalLM": ("CohereConfig", "logit_scale=0.0625"),
    "GraniteForCausalLM": ("GraniteConfig", "logits_scaling=1.0"),
    "LlamaForCausalLM": ("LlamaConfig", ""),
    "MistralForCausalLM": ("MistralConfig", ""),
    "Qwen2ForCausalLM": ("Qwen2Config", ""),
    "Qwen3ForCausalLM": ("Qwen3Config", ""),
    "MixtralForCausalLM": ("MixtralConfig", ""),
}


@pytest.mark.parametrize("name", CHANGING)
def test_models_that_change_their_logits_are_named(name: str) -> None:
    config_name, field = CHANGING[name]
    config = getattr(transformers, config_name)(**SIZES)
    model = getattr(transformers, name)(config)
    assert head_problem(model) == (f"{name} changes its logits behind the head ({field})" if field else "")
    assert output_head(model) is model.get_output_embeddings()


def test_a_scale_of_logits_is_named_with_its_value() -> None:
    model = transformers.GraniteForCausalLM(transformers.GraniteConfig(**SIZES, logits_scaling=4.0))
    assert head_problem(model) == "GraniteForCausalLM changes its logits behind the head (logits_scaling=4.0)"


def test_heads_are_found_inside_wrappers_or_missed_by_name() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(build_model(ModelCase()), config)
    assert output_head(adapted) is adapted.base_model.model.lm_head
    assert head_problem(adapted) == ""
    bare = build_model(ModelCase()).model
    with pytest.raises(ValueError, match="LlamaModel has no output embeddings"):
        output_head(bare)
    with pytest.raises(ValueError, match="Linear has no output embeddings"):
        output_head(nn.Linear(1, 1))
    assert "no config of transformers" in head_problem(nn.Linear(1, 1))
