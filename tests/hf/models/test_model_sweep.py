"""Every `ForCausalLM` class, and every listed multimodal one, is exact under plans or refused by name, as `docs/models.md` says.

Only a few classes by default; `pytest -m sweep tests/hf/models/test_model_sweep.py` takes them all, in minutes.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from helpers.measures.class_sweep import OPTIONAL, ROADS, attention_adapters, local_outcome, reference, sweep
from helpers.measures.sweep_outcomes import ADAPTED, MODELS, REFUSED_CLASSES, WHOLE, check_outcome, pinned_outcomes
from helpers.models.any_model import build_any, class_names, kinds_of
from helpers.models.model_table import cells_of, read_page
from helpers.models.reference import TOLERANCE
from helpers.models.versions import is_newer, newest
from helpers.trainers.trainer_runs import problems_at_start
from peft import LoraConfig, get_peft_model

from hf_longctx.families.registry import FAMILIES, TESTED_MODELS, WRAPPED_MODELS
from hf_longctx.hf.models.logits import head_problem
from hf_longctx.hf.models.towers import text_part
from hf_longctx.hf.rules.classes import class_problem, layer_of, reason_of

# learned positions and biases without RoPE, a window in masks alone, sinks and experts, norms used twice, states, layers
# with neither attention nor a state, a context that layers drop, a multimodal class, no attention at all,
# keys chosen by an index, and by that of another layer
FAST = (
    *("OPTForCausalLM", "PhimoeForCausalLM", "GptOssForCausalLM", "NanoChatForCausalLM", "OlmoHybridForCausalLM"),
    *("NemotronHForCausalLM", "StableLmForCausalLM", "Gemma3ForConditionalGeneration", "Mamba2ForCausalLM"),
    *("DeepseekV32ForCausalLM", "HYV4ForCausalLM"),
)
# class that is no multimodal one -> why it is refused
REFUSED = {
    name: reason for family in FAMILIES for name in family.refused if (reason := reason_of(name)) is not None and reason.summary
}
# whose configs cannot be made small by the names of their fields
UNBUILT = (
    *("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM", "Qwen4ExpForCausalLM", "ReformerModelWithLMHead"),
)
# whose default configs transformers itself cannot build; the tiny ones have both kinds of MLP and of attention
NO_DEFAULT = (
    *("CohereCompassForCausalLM", "DbrxForCausalLM", "Dots1ForCausalLM", "HunYuanDenseV1ForCausalLM"),
    *("HunYuanMoEV1ForCausalLM", "Lfm2MoeForCausalLM", "MinistralForCausalLM", "NemotronForCausalLM", "Qwen4ExpForCausalLM"),
)
AT_LEAST_EXACT = 144


def marked(names: tuple[str, ...] | list[str], fast: tuple[str, ...] = FAST) -> list:
    return [name if name in fast else pytest.param(name, marks=pytest.mark.sweep) for name in names]


@pytest.mark.wide
@pytest.mark.parametrize("name", marked([*TESTED_MODELS, *WRAPPED_MODELS]))
def test_a_tested_class_is_exact(ranks, name: str) -> None:
    outcome = sweep(name, ranks(2))
    assert {road: error for road, error in outcome.errors.items() if not error <= TOLERANCE} == {}
    assert set(outcome.refusals) <= set(OPTIONAL) and set(outcome.errors) | set(outcome.refusals) == set(ROADS)
    assert outcome.self_test.startswith("self-test passed"), outcome.self_test
    check_outcome(MODELS, name, outcome.refusals)
    model = build_any(name)
    exact, _, wrapped = read_page()
    said = wrapped[name][2:] if name in WRAPPED_MODELS else exact[name][1:]
    assert list(cells_of(outcome, head_problem(model)).values())[1:] == said
    if name in WRAPPED_MODELS:
        assert WRAPPED_MODELS[name] == wrapped[name][0] == type(text_part(model)).__name__
    else:
        assert name in NO_DEFAULT or kinds_of(name) <= {type(module).__name__ for module in model.modules()}


# PEFT rewrites the settings of adapters for the first two; scores of low rank, one projection for queries, keys and values
FAST_ADAPTED = ("MixtralForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "GPTNeoXForCausalLM")


@pytest.mark.wide
@pytest.mark.parametrize("name", marked([*TESTED_MODELS, *WRAPPED_MODELS], FAST_ADAPTED))
def test_adapters_on_the_attention_of_a_tested_class_are_exact(ranks, name: str) -> None:
    lora, is_whole = attention_adapters(name), name in FAST_ADAPTED
    if not dict(lora)["target_modules"]:
        # its projections are transposed, and so would be those of adapters
        adapted = get_peft_model(build_any(name).float(), LoraConfig(target_modules=["c_attn"]))
        assert problems_at_start(adapted) == ["LoraConfig fan_in_fan_out=True is not in the tested list; use False"]
        return
    # the test above runs the self-test and plain slices of every class; tests of the self-test run it under adapters
    outcome = sweep(name, ranks(2), lora) if is_whole else local_outcome(name, lora, reference(name, lora), is_brief=True)
    assert {road: error for road, error in outcome.errors.items() if not error <= TOLERANCE} == {}
    assert set(outcome.refusals) <= set(OPTIONAL)
    # a packed row and slices, each in the way that most can go wrong in
    assert all(set(ways) & set(outcome.errors) for ways in (("packed", "stages"), ("slices", "recomputed")))
    assert not is_whole or outcome.self_test.startswith("self-test passed"), outcome.self_test
    local = ("recomputed", "stages")
    check_outcome(ADAPTED, name, {road: reason for road, reason in outcome.refusals.items() if road in local})


@newest
def test_every_class_is_tested_or_refused_and_the_page_says_so() -> None:
    exact, refused, wrapped = read_page()
    assert set(wrapped) == set(WRAPPED_MODELS) and sorted(wrapped) == list(wrapped)
    assert set(exact) == set(TESTED_MODELS) and len(TESTED_MODELS) >= AT_LEAST_EXACT
    assert set(pinned_outcomes()[MODELS]) == {*TESTED_MODELS, *WRAPPED_MODELS}
    assert refused == {name: reason.summary for name, reason in REFUSED.items()}
    unknown = sorted(set(class_names()) - {*exact, *refused})
    assert set(exact).isdisjoint(refused) and {*exact, *refused} <= set(class_names()) and (is_newer or not unknown)


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name in REFUSED if name not in UNBUILT])
def test_a_refused_class_is_refused_by_class_and_layer(name: str) -> None:
    reason = REFUSED[name]
    with torch.device("meta"):
        model = build_any(name, is_random=False)
    problem = class_problem(model)
    assert problem.startswith(f"model class {name} is not supported: ") and reason.text in problem and "docs/models.md" in problem
    assert bool(reason.layer) == bool(layer_of(model, reason)) and layer_of(model, reason) in problem
    check_outcome(REFUSED_CLASSES, name, {WHOLE: problem})


@pytest.mark.parametrize(
    "name,layer",
    [
        ("Inkling", "model.layers.0.self_attn.k_sconv (InklingShortConvolution)"),
    ],
)
def test_a_hybrid_model_is_refused_by_its_first_layer_with_a_state(name: str, layer: str) -> None:
    with torch.device("meta"):
        model = build_any(f"{name}ForCausalLM", is_random=False)
    assert class_problem(model) == (
        f"model class {name}ForCausalLM is not supported: {layer} carries a state from token to token (linear attention, SSM, "
        f"convolution), which plans neither reset at a new document nor pass on between ranks; they would need a record of its "
        f"mixers and, where scores get biases made from queries, attention that takes these; use a class that docs/models.md "
        f"calls exact, such as LlamaForCausalLM, MistralForCausalLM or Qwen3ForCausalLM"
    )


def test_an_unknown_class_is_refused_with_what_its_layers_do() -> None:
    class NewForCausalLM(transformers.MambaForCausalLM):
        def added(self) -> None:
            """Code of its own; a class without any is taken for the one that it inherits from."""

    model = NewForCausalLM(transformers.MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=8, state_size=4))
    problem = class_problem(model)
    assert (
        problem.startswith("model class NewForCausalLM is not in the tested list") and "backbone.layers.0 (MambaBlock)" in problem
    )
