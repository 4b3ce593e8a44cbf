"""Lets a model that classifies documents return the logits of all tokens under a plan.

The forward of its class applies the head to every token, then picks the last token of each row that is no padding. A row of a
plan holds many documents, or a slice of one, so that under a plan the forward returns the logits before the choice. The choice is
then made by labels: the collator puts the label of a document on the token that transformers would pick.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from hf_longctx.hf.models.heads import backbone_of, head_kind, head_of, inner_model
from hf_longctx.hf.models.patch import holds, is_made_by


def serve_head(model: nn.Module) -> None:
    """Lets a model that classifies documents return the logits of all tokens under plans. Idempotent; ignores other models."""
    base = inner_model(model)
    if head_kind(base) != "document":
        return
    own = vars(base).get("forward")
    if own is None:
        # a plain method, so that it works on a copy of the model too
        vars(base)["forward"] = MethodType(_served(type(base)), base)
    elif not holds(_served, own):
        raise ValueError(
            f"the forward of {type(base).__name__} was replaced, which plans of a model that classifies documents would leave "
            f"out; remove it (del model.forward), even if mixed precision of an earlier training has done it"
        )


def restore_head(model: nn.Module) -> None:
    """Undoes `serve_head`. Idempotent; does nothing where accelerate has wrapped the forward in the meantime."""
    base = inner_model(model)
    if is_made_by(_served, vars(base).get("forward")):
        del vars(base)["forward"]


def _served(kind: Any) -> Callable[..., Any]:
    """`_forward` with name and signature of the class's own forward, which trainers read."""

    @wraps(kind.forward)
    def forward(model: Any, *args: Any, **keywords: Any) -> Any:
        return _forward(model, *args, **keywords)

    return forward


def _forward(model: Any, *args: Any, **keywords: Any) -> Any:
    """The forward of the model's class; under a plan the logits of all tokens."""
    if keywords.get("longctx") is None:
        return type(model).forward(model, *args, **keywords)
    head: Any = head_of(model)
    return SequenceClassifierOutputWithPast(logits=head(backbone_of(model)(*args, **keywords).last_hidden_state))
