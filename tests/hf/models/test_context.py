"""Modules that leave a plan's context out of their calls hand it down, around a user's own forward too."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.versions import newest

from hf_longctx.hf.models.attention import attention_name
from hf_longctx.hf.models.patch import patch_model, restore_attention
from hf_longctx.hf.self_test.independent import independent_copy
from hf_longctx.plan.core.types import Chunk, SequenceGroup, Span
from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.execution.executor import no_mask
from hf_longctx.runtime.process_groups import GroupPool

IDS = torch.arange(7).unsqueeze(0) + 3


def lone_context() -> GroupContext:
    return GroupPool((1,), 1.0).context(SequenceGroup((0,), "local", (), ()), Chunk(0, (Span(0, 0, 7),)))


@newest
def test_a_users_forward_still_runs_and_comes_back() -> None:
    model, calls = build_model(ModelCase("mamba")), []
    plain, inner, name = model(IDS, use_cache=False).logits, model.forward, attention_name(model)

    def own(*args: Any, **keywords: Any) -> Any:
        calls.append(len(keywords))
        return inner(*args, **keywords)

    model.forward = own
    for _ in range(2):
        # the second time changes nothing
        patch_model(model)
    for each in (model, independent_copy(model)):
        context = lone_context()
        planned = each(IDS, attention_mask=no_mask(IDS.device), use_cache=False, longctx=context).logits
        assert torch.allclose(planned, plain, rtol=0, atol=1e-12) and context.calls.count == 2
    assert len(calls) == 2 and torch.equal(model(IDS, use_cache=False).logits, plain) and len(calls) == 3
    assert not any("forward" in vars(module) for module in model.backbone.layers[0].mixer.children())
    restore_attention(model, name)
    assert model.forward is own and not any("forward" in vars(module) for module in model.backbone.modules())


@newest
def test_a_model_keeps_the_signature_that_trainers_read() -> None:
    model = build_model(ModelCase("mamba"))
    before = inspect.signature(model.forward)
    patch_model(model)
    assert inspect.signature(model.forward) == before and "labels" in before.parameters
