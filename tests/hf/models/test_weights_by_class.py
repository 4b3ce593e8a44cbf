"""Dropout of attention weights in classes of every kind: packed, in slices and recomputed it drops what the class would drop.

The reference is the class's eager code on one document at a time, with masks from numpy.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers.measures.class_sweep import LENGTHS, SLICES, WHOLE, lone_step, patched, recomputed_step, rows, worst
from helpers.models.any_model import build_any, wide_floats
from helpers.models.reference import TOLERANCE, reference_step
from helpers.plans.sliced_plans import sliced_plan
from helpers.trainers.trainer_runs import problems_at_start

from hf_longctx.runtime.core.dropout import keys_of

# class -> its field
FIELDS = {
    "LlamaForCausalLM": "attention_dropout",
    "Qwen3ForCausalLM": "attention_dropout",
    "GPTBigCodeForCausalLM": "attn_pdrop",
    "ElectraForCausalLM": "attention_probs_dropout_prob",
    "RobertaForCausalLM": "attention_probs_dropout_prob",
    # states along the sequence between layers of attention
    "Qwen3_5ForCausalLM": "attention_dropout",
    "MixtralForCausalLM": "attention_dropout",
    # capped scores, windows
    "Gemma2ForCausalLM": "attention_dropout",
    # sinks
    "GptOssForCausalLM": "attention_dropout",
    # chosen keys
    "DeepseekV32ForCausalLM": "attention_dropout",
    # attention that the class writes out, with biases and without
    "BloomForCausalLM": "attention_dropout",
    "GPTJForCausalLM": "attn_pdrop",
    "RoFormerForCausalLM": "attention_probs_dropout_prob",
}


@pytest.mark.daily("RoFormerForCausalLM")
@pytest.mark.parametrize("name", FIELDS)
def test_weights_of_a_class_are_dropped_as_in_its_eager_code(name: str) -> None:
    rate = {FIELDS[name]: 0.3}
    assert not problems_at_start(build_any(name, **rate))

    def model() -> Any:
        return patched(build_any(name, **rate))

    with wide_floats():
        expected = reference_step(build_any(name, **rate), rows())
        assert worst(reference_step(build_any(name), rows()), expected) > 1e-3, "nothing was dropped"
        found = [lone_step(model(), sliced_plan(LENGTHS, parts)) for parts in (WHOLE, SLICES)]
        found.append(recomputed_step(model()))
        assert max(worst(each, expected) for each in found) <= TOLERANCE


def test_layers_of_a_nested_text_config_drop_too() -> None:
    text = {"model_type": "persimmon", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "vocab_size": 64, "pad_token_id": 0}

    def model(rate: float) -> Any:
        return build_any("FuyuForCausalLM", text_config={**text, "attention_dropout": rate})

    with wide_floats():
        expected = reference_step(model(0.3), rows())
        assert worst(reference_step(model(0.0), rows()), expected) > 1e-3, "nothing was dropped"
        assert worst(lone_step(patched(model(0.3)), sliced_plan(LENGTHS, SLICES)), expected) <= TOLERANCE


def test_evaluation_drops_nothing_and_a_forward_of_one_document_what_its_plan_drops() -> None:
    model, plain = patched(build_any("LlamaForCausalLM", attention_dropout=0.3)), build_any("LlamaForCausalLM")
    ids = torch.arange(20).unsqueeze(0)
    keys = keys_of(model)
    assert keys is not None
    with torch.no_grad():
        with keys.of_pieces([(20, 0)], ids).running():
            dropped = model(input_ids=ids, use_cache=False).logits
            model.eval()
            assert torch.equal(model(input_ids=ids, use_cache=False).logits, plain(input_ids=ids, use_cache=False).logits)
        assert not torch.allclose(dropped, plain(input_ids=ids, use_cache=False).logits)
        keys.begin_step(0, {})
        with pytest.raises(RuntimeError, match=r"model\.layers\.0\.self_attn weights ran outside of a plan during a training"):
            model.train()(input_ids=ids, use_cache=False)


def test_a_backward_that_attends_again_by_itself_is_refused() -> None:
    model = patched(build_any("LlamaForCausalLM", attention_dropout=0.3))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(RuntimeError, match=r"self_attn weights are dropped outside of the forward of a plan"):
        lone_step(model, sliced_plan(LENGTHS, WHOLE))


@pytest.mark.parametrize(
    ("name", "rate", "message"),
    [
        ("LlamaForCausalLM", 1.5, r"attention_dropout is 1\.5, but must be from 0 to 1"),
        ("GraniteSWAForCausalLM", 0.3, r"attention_dropout is 0\.3; set it to 0\.0"),
    ],
)
def test_rates_that_plans_cannot_keep_are_refused_with_their_value(name: str, rate: float, message: str) -> None:
    problems = problems_at_start(build_any(name, attention_dropout=rate))
    assert any(re.search(message, problem) for problem in problems), problems


def test_an_attention_module_of_two_layers_is_refused() -> None:
    model: Any = build_any("LlamaForCausalLM", attention_dropout=0.3)
    model.model.layers[1].self_attn = model.model.layers[0].self_attn
    message = "model.layers.1.self_attn and model.layers.0.self_attn are one attention layer, so layers would share masks"
    assert any(message in problem for problem in problems_at_start(model))
