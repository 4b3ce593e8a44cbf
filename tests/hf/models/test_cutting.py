"""Stages against the whole model of transformers: logits, gradients and names, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers.models.reference import relative_error
from helpers.models.staged_models import NUM_LAYERS, cut_into_stages, even_ranges, family_model, random_inputs, run_pipeline
from torch import Tensor

from hf_longctx.hf.models.cutting import (
    check_ranges,
    cut_model,
    spread_head_problem,
    stage_model,
    stage_problems,
    stages_that_lend,
)
from hf_longctx.plan.core.types import LayerRange
from hf_longctx.runtime.execution.stage_model import StageModel

TOLERANCE = 1e-12
SPLITS = [(2, 1), (3, 1), (2, 2), (3, 2)]


def backward_of(logits: Tensor, labels: Tensor) -> None:
    F.cross_entropy(logits[0], labels[0], reduction="sum").backward()


def reference(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients of the whole model, by transformers alone."""
    model, inputs = copy.deepcopy(model), random_inputs()
    logits = model(input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False).logits
    backward_of(logits, inputs.shift_labels)
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradients(stages: list[StageModel]) -> list[tuple[str, Tensor]]:
    return [(name, p.grad) for stage in stages for name, p in stage.model.named_parameters() if p.grad is not None]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2"])
@pytest.mark.parametrize(("num_stages", "num_ranges"), SPLITS)
def test_stages_one_after_the_other_are_the_whole_model(family: str, num_stages: int, num_ranges: int) -> None:
    model, inputs = family_model(family), random_inputs()
    expected_logits, expected = reference(model)
    stages = cut_into_stages(model, num_stages, num_ranges)
    logits, between = run_pipeline(stages, inputs)
    backward_of(logits, inputs.shift_labels)
    assert relative_error(logits.detach(), expected_logits) <= TOLERANCE
    found = gradients(stages)
    assert sorted(name for name, _ in found) == sorted(expected)
    assert max(relative_error(gradient, expected[name]) for name, gradient in found) <= TOLERANCE
    for hidden in between:
        assert (hidden.shape, hidden.dtype) == ((1, 11, stages[0].hidden_size), stages[0].hidden_dtype)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2"])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_stages_of_one_whole_model_are_the_model_too(family: str, num_stages: int) -> None:
    model, inputs = family_model(family, tied=True), random_inputs()
    expected_logits, expected = reference(model)
    whole = copy.deepcopy(model)
    stages = list(stages_that_lend(whole, even_ranges(num_stages)))
    logits, _ = run_pipeline(stages, inputs)
    backward_of(logits, inputs.shift_labels)
    assert relative_error(logits.detach(), expected_logits) <= TOLERANCE
    found = {name: p.grad for name, p in whole.named_parameters()}
    assert max(relative_error(found[name], expected[name]) for name in expected) <= TOLERANCE
    # without a plan it is the model that it was
    with torch.no_grad():
        plain = whole(input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False).logits
    assert torch.equal(plain, expected_logits)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize(("num_stages", "num_ranges"), SPLITS)
def test_tied_embeddings_get_their_gradient_in_two_addends(family: str, num_stages: int, num_ranges: int) -> None:
    model, inputs = family_model(family, tied=True), random_inputs()
    _, expected = reference(model)
    stages = cut_into_stages(model, num_stages, num_ranges)
    backward_of(run_pipeline(stages, inputs)[0], inputs.shift_labels)
    found = dict(gradients(stages))
    head = found.pop("lm_head.weight")
    assert sorted(found) == sorted(expected)
    found["model.embed_tokens.weight"] = found["model.embed_tokens.weight"] + head
    assert max(relative_error(found[name], expected[name]) for name in expected) <= TOLERANCE


@pytest.mark.parametrize(("num_stages", "num_ranges"), SPLITS)
def test_every_weight_lies_on_one_stage_under_its_name(num_stages: int, num_ranges: int) -> None:
    model = family_model("llama")
    stages = cut_into_stages(model, num_stages, num_ranges)
    names = [name for stage in stages for name in stage.model.state_dict()]
    assert sorted(names) == sorted(model.state_dict())
    whole = model.state_dict()
    assert all(torch.equal(value, whole[name]) for stage in stages for name, value in stage.model.state_dict().items())


def test_adapters_stay_on_the_layers_of_their_stage() -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(family_model("qwen3"), config, autocast_adapter_dtype=False).double()
    expected_logits, expected = reference(model)
    inputs = random_inputs()
    stages = cut_into_stages(model, 3)
    logits, _ = run_pipeline(stages, inputs)
    backward_of(logits, inputs.shift_labels)
    found = gradients(stages)
    assert relative_error(logits.detach(), expected_logits) <= TOLERANCE
    assert sorted(name for name, _ in found) == sorted(expected)
    assert len(found) == NUM_LAYERS * 4
    assert max(relative_error(gradient, expected[name]) for name, gradient in found) <= TOLERANCE


def test_a_model_without_a_pipeline_plan_is_cut_by_what_its_modules_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = family_model("llama")
    expected_logits, _ = reference(model)
    monkeypatch.setattr(transformers.LlamaConfig, "base_model_pp_plan", None)
    logits, _ = run_pipeline(cut_into_stages(model, 2), random_inputs())
    assert relative_error(logits.detach(), expected_logits) <= TOLERANCE


def test_hidden_states_of_half_precision_weights_travel_in_half_precision() -> None:
    model = family_model("llama", dtype=torch.bfloat16)
    inputs = random_inputs()
    for stage in cut_into_stages(model, 2)[:1]:
        assert stage.hidden_dtype == torch.bfloat16
        # accelerate wraps a model's forward like this under bf16=True
        stage.model.forward = lambda *args, whole=stage.model.forward, **keywords: widened(whole(*args, **keywords))
        assert stage.forward(0, inputs, None, None, None).dtype == torch.bfloat16


def widened(output: Any) -> Any:
    output.last_hidden_state = output.last_hidden_state.float()
    return output


def test_a_stage_alone_refuses_to_be_run_as_a_model() -> None:
    stage = cut_into_stages(family_model("llama"), 2)[0]
    with pytest.raises(RuntimeError, match="holds only stage 0 of 2 of LlamaForCausalLM"):
        stage.model(input_ids=random_inputs().input_ids)


def test_more_stages_than_layers_are_refused_with_both_numbers() -> None:
    ranges = tuple((LayerRange(min(stage, 6), 1),) for stage in range(8))
    with pytest.raises(ValueError, match=r"8 stages of 1 layer ranges need 8 layers, but the model has 7"):
        cut_model(family_model("llama"), ranges, 0)


@pytest.mark.parametrize(
    "ranges",
    [
        ((LayerRange(0, 3),), (LayerRange(4, 3),)),
        ((LayerRange(0, 3),), (LayerRange(3, 3),)),
        ((LayerRange(0, 7),), (LayerRange(7, 0),)),
        # stage by stage instead of range by range
        ((LayerRange(0, 2), LayerRange(2, 2)), (LayerRange(4, 2), LayerRange(6, 1))),
    ],
)
def test_ranges_that_are_not_the_layers_in_order_are_refused(ranges: Any) -> None:
    with pytest.raises(ValueError, match="do not cover the 7 layers in order"):
        check_ranges(ranges, 7)


def tiny(config_class: Any, model_class: Any, **settings: Any) -> Any:
    return model_class(config_class(**settings)).eval()


def gpt2() -> Any:
    return tiny(transformers.GPT2Config, transformers.GPT2LMHeadModel, n_layer=2, n_embd=16, n_head=2, vocab_size=32)


def opt() -> Any:
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "ffn_dim": 16, "num_attention_heads": 2, "vocab_size": 32}
    return tiny(transformers.OPTConfig, transformers.OPTForCausalLM, word_embed_proj_dim=16, **sizes)


def t5() -> Any:
    sizes = {"num_layers": 2, "d_model": 16, "d_ff": 16, "num_heads": 2, "d_kv": 8, "vocab_size": 32}
    return tiny(transformers.T5Config, transformers.T5ForConditionalGeneration, **sizes)


def granite() -> Any:
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 32}
    config = {"num_key_value_heads": 2, "embedding_multiplier": 12.0, "pad_token_id": 0}
    return tiny(transformers.GraniteConfig, transformers.GraniteForCausalLM, **sizes, **config)


def gemma3n() -> Any:
    sizes = {"num_hidden_layers": 4, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 32}
    config = {"num_key_value_heads": 1, "head_dim": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 32}
    more = {"num_kv_shared_layers": 2, "laurel_rank": 4, "pad_token_id": 0, "layer_types": ["full_attention"] * 4}
    more["activation_sparsity_pattern"] = [0.0] * 4
    return tiny(transformers.Gemma3nTextConfig, transformers.Gemma3nForCausalLM, **sizes, **config, **more)


def shared_layer() -> Any:
    model = family_model("llama")
    model.model.layers[3].mlp = model.model.layers[1].mlp
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (gpt2, "GPT2LMHeadModel cannot be cut"),
        (opt, "OPTForCausalLM cannot be cut"),
        (granite, "GraniteForCausalLM cannot be cut .* changes hidden states"),
        (t5, "T5ForConditionalGeneration is an encoder-decoder"),
        (gemma3n, "num_kv_shared_layers=2"),
        (shared_layer, "layers 1 and 3 share the weight mlp.gate_proj.weight"),
    ],
)
def test_models_that_cannot_be_cut_are_refused_by_name(build: Any, message: str) -> None:
    model = build()
    layers = even_ranges(2, num_layers=model.config.num_hidden_layers)
    with pytest.raises(ValueError, match=message):
        cut_model(model, layers, 1)
        stage_model(model, layers, 1)


def test_models_that_can_be_cut_have_no_problems() -> None:
    assert not stage_problems(family_model("gemma2", tied=True))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_a_head_alone_on_an_earlier_stage_gives_the_logits_of_the_model(family: str, tied: bool) -> None:
    model, inputs, ranges = family_model(family, tied), random_inputs(), even_ranges(3)
    expected_logits, expected = reference(model)
    stages = []
    for stage in range(3):
        own = copy.deepcopy(model)
        cut_model(own, ranges, stage, head_stages=(0, 1))
        stages.append(stage_model(own, ranges, stage, (0, 1)))
    hidden: Any = None
    for stage in stages:
        hidden = stage.forward(0, inputs, hidden, None, None, has_head=stage.stage < 2)
    for head in stages[:2]:
        logits = head.forward(1, inputs, hidden, None, None)
        assert relative_error(logits.detach(), expected_logits) <= TOLERANCE
    # by the head of the second stage
    backward_of(logits, inputs.shift_labels)
    found = dict(gradients(stages))
    if tied:
        head_gradient = found.pop("lm_head.weight")
        found["model.embed_tokens.weight"] = found["model.embed_tokens.weight"] + head_gradient
    assert found.keys() == expected.keys()
    assert max(relative_error(found[name], expected[name]) for name in expected) <= TOLERANCE


def adapted_llama(tied: bool = False, **settings: Any) -> Any:
    config = peft.LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM", **settings)
    return peft.get_peft_model(family_model("llama", tied), config, autocast_adapter_dtype=False)


def classifier() -> Any:
    return transformers.LlamaForSequenceClassification(family_model("llama").config)


def with_head_in(dtype: torch.dtype) -> Any:
    model = family_model("llama", dtype=torch.bfloat16)
    model.lm_head.to(dtype)
    return model


def with_bias() -> Any:
    model = family_model("llama")
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(model.lm_head.out_features, dtype=torch.float64))
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: adapted_llama(target_modules=["lm_head"]), "its head is a Linear with an adapter, a bias or packed weights"),
        (lambda: adapted_llama(target_modules=["q_proj"], modules_to_save=["lm_head"]), "its head is a ModulesToSaveWrapper"),
        (lambda: adapted_llama(True, target_modules=["embed_tokens"]), "shares the weight of a Embedding with an adapter"),
        (with_bias, "a bias or packed weights"),
        (lambda: with_head_in(torch.float32), "in torch.float32, unlike its layers"),
        (classifier, "its head is that of a classifier"),
    ],
)
def test_heads_that_only_the_last_stage_can_run_are_refused_by_name(build: Any, message: str) -> None:
    model = build()
    assert message in spread_head_problem(model)
    cut_model(model, even_ranges(2), 0, head_stages=(0,))
    with pytest.raises(ValueError, match=f"cannot be spread: .*{message}.*; set spread_head=False"):
        stage_model(model, even_ranges(2), 0, (0,))


def test_heads_that_all_stages_can_run_have_no_problem() -> None:
    models = [family_model("gemma2", tied=True), adapted_llama(target_modules=["q_proj"]), family_model("llama")]
    assert [spread_head_problem(model) for model in models] == ["", "", ""]


def test_heads_of_stages_of_several_layer_ranges_are_refused() -> None:
    model = family_model("llama")
    cut_model(model, even_ranges(2, 2), 0, head_stages=(0,))
    with pytest.raises(ValueError, match=r"it was cut into 2 stage\(s\) of 2 layer range\(s\)"):
        stage_model(model, even_ranges(2, 2), 0, (0,))
