"""Model classes older than transformers' common interfaces; the sweep compares their losses and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.measures.class_sweep import LENGTHS, SLICES, WHOLE, lone_step, patched, rows, self_tested, worst
from helpers.models.any_model import VOCAB_SIZE, build_any, wide_floats
from helpers.models.reference import TOLERANCE, reference_step
from helpers.plans.sliced_plans import sliced_plan
from torch import Tensor
from transformers import RobertaConfig

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.data.scan import scan_dataset
from hf_longctx.hf.models import own_attention, positions
from hf_longctx.hf.models.attention import attention_name, runs_plans
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.own_attention import _with_bias
from hf_longctx.hf.models.patch import patch_model, restore_attention
from hf_longctx.hf.models.positions import absent_token_ids, first_position, max_positions
from hf_longctx.hf.models.spec import model_spec
from hf_longctx.hf.rules.arguments import setup_problems
from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.tiles.patterns import CAUSAL


def test_positions_after_the_padding_token_limit_the_length() -> None:
    # the config of roberta-base, which takes 512 tokens
    config = RobertaConfig(max_position_embeddings=514, pad_token_id=1)
    assert (first_position(config), max_positions(config), absent_token_ids(config)) == (2, 512, (1,))
    model = build_any("RobertaForCausalLM")
    left = 128 - VOCAB_SIZE - 1
    assert model_spec(model).max_positions == left
    assert not setup_problems(ModelFacts.of(model), None, LongContextConfig(max_length=left), 1, (1,))
    (problem,) = setup_problems(ModelFacts.of(model), None, LongContextConfig(max_length=left + 1), 1, (1,))
    assert problem.startswith(f"max_length {left + 1} is above the model's max_position_embeddings {left} (those after the one")
    llama = build_any("LlamaForCausalLM").config
    assert (first_position(llama), max_positions(llama), absent_token_ids(llama)) == (0, 128, ())


def test_positions_are_counted_from_the_padding_token_of_the_embeddings() -> None:
    with wide_floats():
        expected = reference_step(build_any("RobertaForCausalLM"), rows())
        model = patched(build_any("RobertaForCausalLM"))
        # `Trainer.train` gives the config the padding token of the tokenizer
        model.config.pad_token_id = 5
        assert worst(lone_step(model, sliced_plan(LENGTHS, SLICES)), expected) <= TOLERANCE
        again = build_any("RobertaForCausalLM")
        again.config.pad_token_id = 5
        assert worst(lone_step(patched(again), sliced_plan(LENGTHS, SLICES)), expected) <= TOLERANCE
    left = 128 - VOCAB_SIZE - 1
    assert (max_positions(again), absent_token_ids(again), model_spec(again).max_positions) == (left, (VOCAB_SIZE,), left)


def test_a_row_with_the_padding_token_is_refused() -> None:
    rows = [{"input_ids": [3, VOCAB_SIZE, 4], "labels": [3, VOCAB_SIZE, 4]}]
    (problem,) = scan_dataset(
        rows, "d", VOCAB_SIZE + 1, placeholders=absent_token_ids(build_any("RobertaForCausalLM").config)
    ).problems
    assert f"d row 0 has token {VOCAB_SIZE}, which stands for an image, sound or video, or for padding" in problem


@pytest.mark.wide
def test_positions_counted_from_zero_fail_the_self_test_and_the_model_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_any("RobertaForCausalLM")
    name = attention_name(model)
    patch_model(model)
    patch_model(model)
    assert len(model.roberta._forward_pre_hooks) == 1
    restore_attention(model, name)
    assert not model.roberta._forward_pre_hooks
    monkeypatch.setattr(positions, "_shift", lambda *_: None)
    with pytest.raises(ValueError, match="self-test"):
        self_tested(patched(build_any("RobertaForCausalLM")))


FALCONS: dict[str, tuple[str, dict[str, Any]]] = {
    "torch's own attention": ("sdpa", {}),
    "grouped heads": ("eager", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "biases by position": ("eager", {"alibi": True, "multi_query": False, "num_kv_heads": 4}),
    "biases by position in a mask, one key head": ("sdpa", {"alibi": True}),
}


@pytest.mark.parametrize("name", FALCONS)
def test_every_way_of_attention_in_falcon_matches(name: str) -> None:
    attention, changes = FALCONS[name]
    with wide_floats():
        expected = reference_step(build_any("FalconForCausalLM", attention, **changes), rows())
        model = build_any("FalconForCausalLM", attention, **changes)
        patch_model(model)
        for chunks in (WHOLE, SLICES):
            model.zero_grad()
            assert worst(lone_step(model, sliced_plan(LENGTHS, chunks)), expected) <= TOLERANCE


def test_bugs_in_attention_written_out_by_a_class_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(chunks: Any) -> float:
        with wide_floats():
            expected = reference_step(build_any("BloomForCausalLM"), rows())
            return worst(lone_step(patched(build_any("BloomForCausalLM")), sliced_plan(LENGTHS, chunks)), expected)

    def by_row(bias_H1N: Tensor, context: GroupContext) -> Tensor:
        return bias_H1N[..., : context.num_tokens]

    with monkeypatch.context() as patch:
        patch.setattr(own_attention, "AttentionPattern", lambda window: CAUSAL)
        with pytest.raises(ValueError, match="self-test"):
            self_tested(patched(build_any("GPTNeoForCausalLM")))
    monkeypatch.setattr(own_attention, "_by_position", by_row)
    assert step([[(number, 0, length)] for number, length in enumerate(LENGTHS)]) <= TOLERANCE
    assert step(SLICES) > 1e-4


@pytest.mark.parametrize("name", ["BloomForCausalLM", "MptForCausalLM"])
def test_biases_match_between_slices_beside_documents_of_other_lengths(name: str) -> None:
    chunks = [[(0, 0, 1)], [(0, 1, 29)], [(0, 29, 30), (3, 0, 1)], [(1, 0, 1)], [(1, 1, 7), (2, 0, 17)]]
    with wide_floats():
        expected = reference_step(build_any(name), rows())
        assert worst(lone_step(patched(build_any(name)), sliced_plan(LENGTHS, chunks)), expected) <= TOLERANCE


def test_an_unknown_operation_on_scores_is_refused() -> None:
    model = patched(build_any("MegatronBertForCausalLM"))
    attention = model.bert.encoder.layer[0].attention.self
    attention.dropout = torch.nn.ReLU()
    with pytest.raises(ValueError, match="MegatronBertSelfAttention applies relu to its attention weights"):
        lone_step(model, sliced_plan(LENGTHS, WHOLE))
    attention.dropout = torch.nn.Dropout(0.5)
    with pytest.raises(ValueError, match=r"drops attention weights at a rate of 0\.5, but its config did not say so"):
        lone_step(model, sliced_plan(LENGTHS, WHOLE))


def test_biases_of_far_tokens_keep_their_digits_in_half_precision() -> None:
    bias_HT = torch.tensor([0.5, 2**-0.37]).unsqueeze(1) * torch.arange(60_000, 60_064)
    query, key = torch.zeros(1, 2, 64, 8, dtype=torch.bfloat16), torch.zeros(1, 1, 64, 8, dtype=torch.bfloat16)
    query, key = _with_bias(query, key, bias_HT, torch.bfloat16)
    scores_HTT = (query.float() @ key.float().transpose(-1, -2)).squeeze(0)
    assert query.dtype == key.dtype == torch.bfloat16
    assert torch.allclose(scores_HTT, bias_HT.unsqueeze(1).expand(-1, 64, -1), rtol=1e-6)


def test_a_model_with_its_own_attention_is_restored_and_generates_as_before() -> None:
    model, plain = build_any("BloomForCausalLM").eval(), build_any("BloomForCausalLM").eval()
    name, ids = attention_name(model), torch.arange(9).unsqueeze(0) + 3
    patch_model(model)
    assert runs_plans(model) and torch.equal(model(ids).logits, plain(ids).logits)
    assert torch.equal(model.generate(ids, max_new_tokens=3), plain.generate(ids, max_new_tokens=3))
    restore_attention(model, name)
    assert not runs_plans(model) and not any("forward" in vars(module) for module in model.modules())
    assert "build_alibi_tensor" not in vars(model.transformer)
    model.forward = lambda **keywords: None
    with pytest.raises(ValueError, match="the forward of BloomForCausalLM was replaced"):
        patch_model(model)
