"""Keys that an index chooses are those of plain transformers: ties, short documents, shared choices, groups, and no plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.measures.class_sweep import (
    LENGTHS,
    SLICES,
    WHOLE,
    group_step,
    lone_step,
    patched,
    recomputed_step,
    reference_step,
    rows,
    self_tested,
    worst,
)
from helpers.models.any_model import build_any, wide_floats
from helpers.models.reference import TOLERANCE
from helpers.models.tiny_models import adapted
from helpers.plans.sliced_plans import sliced_plan
from torch import Tensor

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.models.cutting import stage_problems
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.patch import patch_model, restore_attention
from hf_longctx.hf.rules.arguments import setup_problems
from hf_longctx.hf.self_test.reduced_copy import ChosenLayers, reduced_copy
from hf_longctx.runtime.states import chosen_keys


def sharing(*indexers: str) -> dict[str, Any]:
    """Settings of a model in which some layers take the choice of the layer before."""
    count = len(indexers)
    kinds = {"layer_types": ["indexed_attention"] * count, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * (count - 2)}
    return {"num_hidden_layers": count, "indexer_types": list(indexers)} | kinds


CASES: dict[str, dict[str, Any]] = {
    "ties": {"name": "DeepseekV32ForCausalLM"},
    "shared": {"name": "GlmMoeDsaForCausalLM", **sharing("full", "shared", "full", "shared")},
    "more keys than tokens": {"name": "GlmMoeDsaForCausalLM", "index_topk": 64},
    "one key": {"name": "DeepseekV32ForCausalLM", "index_topk": 1},
}


def build(case: str) -> Any:
    settings = dict(CASES[case])
    model = build_any(settings.pop("name"), **settings)
    if case == "ties":
        for layer in model.model.layers:
            # all scores are zero, so that the order of the keys alone decides
            layer.self_attn.indexer.weights_proj.weight.data.zero_()
    return model


def expected_step(case: str) -> tuple[float, dict[str, Tensor]]:
    with wide_floats():
        return reference_step(build(case), rows())


@pytest.mark.daily("packed-more keys than tokens")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chunks", [WHOLE, SLICES], ids=["packed", "slices"])
def test_documents_get_the_keys_of_plain_transformers(case: str, chunks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # several blocks of rows for each document
    monkeypatch.setattr(chosen_keys, "BLOCK_SCORES", 200)
    expected = expected_step(case)
    with wide_floats():
        assert worst(lone_step(patched(build(case)), sliced_plan(LENGTHS, chunks)), expected) <= TOLERANCE


@pytest.mark.daily("ties")
@pytest.mark.parametrize("case", ["ties", "shared"])
def test_a_replay_chooses_the_same_keys(case: str) -> None:
    expected = expected_step(case)
    with wide_floats():
        assert worst(recomputed_step(patched(build(case))), expected) <= TOLERANCE


def error_on_ranks(case: str, ulysses: int, is_sharded: bool, loss: float, gradients: dict[str, Any]) -> float:
    with wide_floats():
        found = group_step(patched(build(case)), ulysses, is_sharded, num_ranks=torch.distributed.get_world_size())
    return worst(found, (loss, {key: torch.from_numpy(gradient) for key, gradient in gradients.items()}))


@pytest.mark.daily("2-2-False-ties")
@pytest.mark.parametrize("case", ["ties", "shared"])
@pytest.mark.parametrize(
    "num_ranks,ulysses,is_sharded", [(2, 2, False), (2, 1, False), (2, 2, True), (4, 2, False), (4, 4, False)]
)
def test_ranks_of_a_group_choose_among_all_keys_of_a_document(
    ranks, case: str, num_ranks: int, ulysses: int, is_sharded: bool
) -> None:
    loss, gradients = expected_step(case)
    arrays = {key: gradient.numpy() for key, gradient in gradients.items()}
    assert max(ranks(num_ranks).run(error_on_ranks, case, ulysses, is_sharded, loss, arrays)) <= TOLERANCE


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_without_a_plan_is_bit_equal(attention: str) -> None:
    # in fp64 the mask of transformers' own eager attention would overflow in its softmax
    plain, ours = (build_any("DeepseekV32ForCausalLM", attention).float() for _ in range(2))
    patch_model(ours)
    input_ids = torch.arange(24).view(2, 12) % 16 + 1
    mask = torch.ones_like(input_ids)
    mask[1, :4] = 0
    for model in (plain, ours):
        model(input_ids=input_ids, attention_mask=mask, labels=input_ids).loss.backward()
        assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())
    assert all(
        (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)
        for a, b in zip(plain.parameters(), ours.parameters(), strict=True)
    )
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    assert torch.equal(plain.eval().generate(input_ids, **options), ours.eval().generate(input_ids, **options))
    restore_attention(ours, attention)
    assert not [module for module in ours.modules() if "forward" in vars(module)]


def test_the_weights_of_an_index_get_no_gradient() -> None:
    model = patched(build("ties"))
    _, gradients = lone_step(model, sliced_plan(LENGTHS, WHOLE))
    assert gradients and not [name for name in gradients if ".indexer." in name]


def test_a_replaced_forward_or_a_hook_on_an_indexer_is_refused_by_name() -> None:
    def problems(model: Any) -> list[str]:
        return setup_problems(ModelFacts.of(model), None, LongContextConfig(), 2, (1, 2))

    model = build("shared")
    assert problems(model) == []
    indexer = model.model.layers[2].self_attn.indexer
    handle = indexer.register_forward_hook(lambda *_: None)
    assert "model.layers.2.self_attn.indexer (GlmMoeDsaIndexer) has a hook" in "".join(problems(model))
    handle.remove()
    indexer.forward = indexer.forward
    assert "the forward of model.layers.2.self_attn.indexer (GlmMoeDsaIndexer) was replaced" in "".join(problems(model))
    with pytest.raises(ValueError, match="was replaced"):
        patch_model(model)


@pytest.mark.parametrize(
    "name,target,where",
    [
        ("DeepseekV4ForCausalLM", "gate_proj", "model.layers.1.self_attn.compressor (DeepseekV4CSACompressor)"),
        ("DeepseekV32ForCausalLM", "wk", "model.layers.0.self_attn.indexer (DeepseekV32Indexer)"),
    ],
)
def test_dropout_of_adapters_in_an_index_or_a_compressor_is_refused_by_name(name: str, target: str, where: str) -> None:
    for rate, count in ((0.0, 0), (0.25, 1)):
        settings = {"target_modules": f".*(indexer|compressor).*{target}", "lora_dropout": rate}
        model = adapted(build_any(name), **settings)
        problems = setup_problems(ModelFacts.of(model), None, LongContextConfig(), 2, (1, 2))
        assert len(problems) == count
        assert all(f"{where} has dropout inside (" in each and "rate 0.25" in each for each in problems)
        assert all(each.endswith(f"set lora_dropout=0, or leave {target} out of target_modules") for each in problems)


def test_stages_and_lent_ranks_are_refused_where_choices_would_have_to_travel() -> None:
    (problem,) = stage_problems(build("shared"))
    assert problem.startswith("GlmMoeDsaForCausalLM cannot be cut into pipeline stages: layers with indexer_types='shared' take")
    alone = build("ties")
    assert stage_problems(alone) == []
    config = LongContextConfig(stages=2, lend_stages=True)
    assert [
        each
        for each in setup_problems(ModelFacts.of(alone), None, config, 2, (1,))
        if "the indexes of DeepseekV32ForCausalLM" in each
    ]


def test_the_copy_of_the_self_test_chooses_fewer_keys_than_its_documents_have_and_passes_choices_on() -> None:
    model = build_any("GlmMoeDsaForCausalLM", index_topk=100, **sharing("full", "full", "shared", "shared", "full"))
    copied = reduced_copy(ChosenLayers.of(model, (0,)), 40, torch.float64)
    # the third layer takes what the first has chosen, through the second, which is left out
    assert sorted(copied.layers) == [0, 2, 4]
    assert {layer.self_attn.indexer.index_topk for layer in copied.layers.values() if layer.self_attn.indexer} == {40}
    assert copied.was_shortened and copied.most_chosen == 40
    assert self_tested(patched(model)).startswith("self-test passed")
