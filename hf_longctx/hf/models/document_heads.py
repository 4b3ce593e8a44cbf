"""Lets a model that classifies documents return the logits of all tokens under a plan.

The forward of its class applies the head to every token, then picks the last token of each row that is no padding. A row of a
plan holds many documents, or a slice of one, so under a plan the forward returns the logits of all tokens. Labels then make the
choice: the collator puts the label of a document on the token that transformers would pick.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from hf_longctx.hf.models.forwards import give, has, take
from hf_longctx.hf.models.heads import backbone_of, head_kind, head_of, inner_model


class HeadPatch:
    """Lets a model that classifies documents return the logits of all tokens under plans."""

    def needed(self, model: nn.Module) -> bool:
        """Whether `model` classifies documents."""
        return head_kind(model) == "document"

    def apply(self, model: nn.Module) -> None:
        """Raises ValueError for a forward of others."""
        base = inner_model(model)
        if "forward" in vars(base) and not has(base, _forward):
            raise ValueError(
                f"the forward of {type(base).__name__} was replaced, which plans of a model that classifies documents would "
                f"leave out; remove it (del model.forward), even if mixed precision of an earlier training has done it"
            )
        give(base, _forward)

    def undo(self, model: nn.Module) -> None:
        """Leaves a forward that accelerate has wrapped, which then runs that of the class."""
        take(inner_model(model), _forward)


def _forward(model: Any, *args: Any, **keywords: Any) -> Any:
    """The forward of the model's class; under a plan the logits of all tokens."""
    if keywords.get("longctx") is None:
        return type(model).forward(model, *args, **keywords)
    head: Any = head_of(model)
    return SequenceClassifierOutputWithPast(logits=head(backbone_of(model)(*args, **keywords).last_hidden_state))
