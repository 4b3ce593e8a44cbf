"""Facts of a model, which a run reads once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_longctx.hf.models.adapters import base_of
from hf_longctx.hf.models.cutting import loaded_ranges
from hf_longctx.hf.models.heads import HeadKind, head_kind, num_outputs
from hf_longctx.hf.models.quantised import four_bit_layers
from hf_longctx.plan.core.types import Ranges


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a model as a run gets it: read without collectives, before plans patch, cut or shard it.

    For an object that is no model of transformers, `base` is that object, and other fields have the values of a causal language
    model without outputs. The facts hold no layers, since a cut model must not keep the weights of other stages.
    """

    # the model with its adapters and other wrappers, and the model of transformers inside them
    model: Any
    base: Any
    # name of the class of `base`; sharding puts a class of torch in front
    name: str
    head_kind: HeadKind
    # entries of the logits of one token; 0 for an object that is no model of transformers
    num_outputs: int
    has_four_bits: bool
    # layer ranges of all stages if the model was loaded as one stage alone
    loaded_ranges: Ranges | None

    @classmethod
    def of(cls, model: Any) -> ModelFacts:
        """Reads the facts of `model`, which may be any object."""
        base = base_of(model)
        is_module = isinstance(model, nn.Module)
        return cls(
            model=model,
            base=base,
            name=type(base).__name__,
            head_kind=head_kind(model) if is_module else "next_token",
            num_outputs=num_outputs(model),
            has_four_bits=is_module and bool(four_bit_layers(model)),
            loaded_ranges=loaded_ranges(model),
        )
