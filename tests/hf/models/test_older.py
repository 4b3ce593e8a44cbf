"""Model classes older than transformers' common interfaces; the sweep compares their losses and gradients."""

from __future__ import annotations

import pytest
from helpers.measures.class_sweep import patched, self_tested
from helpers.models.any_model import VOCAB_SIZE, build_any
from transformers import RobertaConfig

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.data.scan import scan_dataset
from hf_longctx.hf.models.attention import attention_name, patch_model, restore_attention
from hf_longctx.hf.models.older import positions
from hf_longctx.hf.models.older.positions import absent_token_ids, first_position, max_positions
from hf_longctx.hf.models.spec import model_spec
from hf_longctx.hf.start.arguments import setup_problems


def test_positions_after_the_padding_token_limit_the_length() -> None:
    # the config of roberta-base, which takes 512 tokens
    config = RobertaConfig(max_position_embeddings=514, pad_token_id=1)
    assert (first_position(config), max_positions(config), absent_token_ids(config)) == (2, 512, (1,))
    model = build_any("RobertaForCausalLM")
    left = 128 - VOCAB_SIZE - 1
    assert model_spec(model).max_positions == left
    assert not setup_problems(model, None, LongContextConfig(max_length=left), 1, (1,))
    (problem,) = setup_problems(model, None, LongContextConfig(max_length=left + 1), 1, (1,))
    assert problem.startswith(f"max_length {left + 1} is above the model's max_position_embeddings {left} (those after the one")
    llama = build_any("LlamaForCausalLM").config
    assert (first_position(llama), max_positions(llama), absent_token_ids(llama)) == (0, 128, ())


def test_a_row_with_the_padding_token_is_refused() -> None:
    rows = [{"input_ids": [3, VOCAB_SIZE, 4], "labels": [3, VOCAB_SIZE, 4]}]
    (problem,) = scan_dataset(
        rows, "d", VOCAB_SIZE + 1, placeholders=absent_token_ids(build_any("RobertaForCausalLM").config)
    ).problems
    assert f"d row 0 has token {VOCAB_SIZE}, which stands for an image, sound or video, or for padding" in problem


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
