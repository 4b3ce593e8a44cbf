"""Dropout outside of plans: off in evaluation, torch's own at rest, an error during a training, and undone at the end."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.models.tiny_models import ModelCase, build_model

from hf_longctx.hf.models.attention import attention_name
from hf_longctx.hf.models.dropout import check_rates
from hf_longctx.hf.models.patch import patch_model, restore_attention
from hf_longctx.runtime.core.dropout import DropoutKeys, keys_of

CASE = ModelCase(lora=(("r", 2), ("lora_dropout", 0.5), ("target_modules", ["q_proj"])))
IDS = torch.arange(20).unsqueeze(0)


def patched() -> tuple[Any, DropoutKeys]:
    model = build_model(CASE)
    patch_model(model)
    keys = keys_of(model)
    assert keys is not None
    return model, keys


def logits(model: Any, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def test_without_a_plan_dropout_is_torchs_or_an_error_by_name() -> None:
    model, keys = patched()
    plain = build_model(CASE)
    assert torch.equal(logits(model), logits(plain)) and not torch.equal(logits(model), logits(model, seed=1))
    keys.begin_step(0, {})
    with pytest.raises(RuntimeError, match=r"dropout model.layers.0.self_attn.q_proj.lora_dropout.default ran outside of a plan"):
        logits(model)
    assert torch.equal(logits(model.eval()), logits(plain.eval()))
    # a copy has keys of its own
    copied = copy.deepcopy(model.train())
    assert keys_of(copied) is not keys
    keys.rest()
    assert torch.equal(logits(model), logits(plain.train()))
    with pytest.raises(RuntimeError, match="ran outside of a plan"):
        logits(copied)


def test_tokens_drop_the_same_values_in_copies_and_nothing_in_evaluation() -> None:
    model, keys = patched()
    tokens = keys.of_pieces([(20, 0)], IDS)
    with tokens.part().running():
        found = logits(model)
    with tokens.part().running():
        assert torch.equal(logits(model, seed=1), found)
        assert torch.equal(logits(model.eval()), logits(build_model(CASE).eval()))
    assert keys.tokens is None


def test_the_modules_are_given_back() -> None:
    model, name = build_model(CASE), attention_name(build_model(CASE))
    own = {key: set(vars(module)) for key, module in model.named_modules()}
    patch_model(model)
    restore_attention(model, name)
    assert keys_of(model) is None
    assert {key: set(vars(module)) for key, module in model.named_modules()} == own


def test_a_second_run_on_one_model_shares_its_keys() -> None:
    model, keys = patched()
    patch_model(model)
    assert keys_of(model) is keys


def test_a_rate_raised_later_is_refused_by_name() -> None:
    model, _ = patched()
    check_rates(model)
    layer = model.get_submodule("base_model.model.model.layers.1.mlp")
    layer.late = torch.nn.Dropout(0.2)
    with pytest.raises(ValueError, match=r"dropout model.layers.1.mlp.late drops now, but dropped nothing when the run started"):
        check_rates(model)
