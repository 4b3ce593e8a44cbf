"""Facts of a model, which a run reads once."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

from hf_longctx.families.family import Family, Mixer
from hf_longctx.families.registry import family_of
from hf_longctx.hf.models.adapters import base_of
from hf_longctx.hf.models.cutting import loaded_ranges
from hf_longctx.hf.models.heads import HeadKind, head_kind, is_generic, num_outputs
from hf_longctx.hf.models.media import sees_images_both_ways
from hf_longctx.hf.models.packed_experts import packed_weights
from hf_longctx.hf.models.quantised import block_layers, four_bit_layers, fp8_layers
from hf_longctx.hf.models.towers import text_class, text_family, text_part
from hf_longctx.plan.core.types import Ranges

# column with a type for each token, and when a model without it computes the same
TOKEN_TYPES = "token_type_ids"
TokenTypes = Literal["always", "if all are 0", "never"]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a model as a run gets it: read without collectives, before plans patch, cut or shard it.

    For an object that is no model of transformers, `base` and `text` are that object, and other fields have the values of a
    causal language model of an unknown class without outputs. The facts hold no layers, since a cut model must not keep the
    weights of other stages.
    """

    # the model with its adapters and other wrappers, the model of transformers inside them, and the text model in that
    model: Any
    base: Any
    text: Any
    # name of the class of `base`; sharding puts a class of torch in front
    name: str
    # name of the causal language model with the same text model, and its family
    text_class: str
    family: Family
    head_kind: HeadKind
    # entries of the logits of one token; 0 for an object that is no model of transformers
    num_outputs: int
    has_four_bits: bool
    has_fp8: bool
    has_packed_experts: bool
    # layer ranges of all stages if the model was loaded as one stage alone
    loaded_ranges: Ranges | None

    @classmethod
    def of(cls, model: Any) -> ModelFacts:
        """Reads the facts of `model`, which may be any object."""
        base = base_of(model)
        is_module, is_known = isinstance(model, nn.Module), isinstance(base, PreTrainedModel)
        kind = head_kind(base) if is_module else "next_token"
        # other classifiers, which are refused, may have no text model
        has_text = is_known and (kind == "next_token" or is_generic(base))
        name = text_class(base) if has_text else type(base).__name__
        return cls(
            model=model,
            base=base,
            text=text_part(base) if is_known else base,
            name=type(base).__name__,
            text_class=name,
            family=text_family(base) if has_text else family_of(name),
            head_kind=kind,
            num_outputs=num_outputs(model),
            has_four_bits=is_module and bool(four_bit_layers(model)),
            has_fp8=is_module and bool(fp8_layers(model) or block_layers(model)),
            has_packed_experts=is_module and any(packed_weights(model)),
            loaded_ranges=loaded_ranges(model),
        )

    @property
    def packs_weights(self) -> bool:
        """Whether frozen weights are in four bits, of linear modules or of experts."""
        return self.has_four_bits or self.has_packed_experts

    @property
    def token_types(self) -> TokenTypes:
        """Whether a row with `token_type_ids` gives the model's class the loss that plans compute without them."""
        is_known = isinstance(self.base, PreTrainedModel)
        if not is_known or TOKEN_TYPES not in inspect.signature(type(self.base).forward).parameters:
            return "always"
        # types of images, which plans find by their tokens
        if sees_images_both_ways(self.base):
            return "always"
        has_types = any(name.endswith("token_type_embeddings") for name, _ in self.base.named_modules())
        return "if all are 0" if has_types else "never"

    @property
    def mixer(self) -> Mixer | None:
        """Record of the mixers that the model's class has, those first in its layers; None for classes without a state."""
        return next(iter(self.family.mixers), None)
