"""Finds the family of a class or of a model type, and gathers facts about module classes from all families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hf_longctx.families.causal import CAUSAL
from hf_longctx.families.family import Family, Mixer, Modules, OwnAttention, Traits
from hf_longctx.families.multimodal import MULTIMODAL
from hf_longctx.families.refused import REFUSED

FAMILIES: tuple[Family, ...] = (*CAUSAL, *MULTIMODAL, *REFUSED)

# causal language models that run exactly
TESTED_MODELS: tuple[str, ...] = tuple(family.causal for family in FAMILIES if family.causal)
# multimodal class that runs rows of text -> the text model with which it is tested
WRAPPED_MODELS: dict[str, str] = {family.wrapper: family.text for family in FAMILIES if family.wrapper}
# class of a mixer -> how plans run it
MIXERS: dict[str, Mixer] = {mixer.name: mixer for family in FAMILIES for mixer in family.mixers}
# causal language model that writes its attention out itself -> how plans run it
OWN_ATTENTION: dict[str, OwnAttention] = {family.causal: family.own_attention for family in FAMILIES if family.own_attention}

# a family without facts
_UNKNOWN = Family("")
_BY_TYPE = {name: family for family in FAMILIES for name in family.model_types}
_BY_CLASS = {name: family for family in FAMILIES for name in (family.causal, family.wrapper, *family.refused) if name}


def _joined(name: str) -> Any:
    """The field `name` of `Modules` over all families."""
    values = [getattr(family.modules, name) for family in FAMILIES]
    if isinstance(values[0], Mapping):
        return {module: fact for each in values for module, fact in each.items()}
    return tuple(module for each in values for module in each)


# facts of module classes of all families
MODULES = Modules(**{each.name: _joined(each.name) for each in fields(Modules)})


def family_of(class_name: str) -> Family:
    """The family of a model class by its name; one without facts for a class that is not listed."""
    return _BY_CLASS.get(class_name, _UNKNOWN)


def family_of_type(model_type: object) -> Family:
    """The family of a config's `model_type`; one without facts for an unknown type."""
    return _BY_TYPE.get(str(model_type), _UNKNOWN)


def traits_of(config: Mapping[str, Any]) -> Traits:
    """Traits of the decoder of this config, those of Llama for an unknown `model_type`."""
    return family_of_type(config.get("model_type")).traits
