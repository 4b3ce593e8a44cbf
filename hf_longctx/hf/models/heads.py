"""Finds the output head of a model, and whether it predicts next tokens or classifies documents or tokens.

A causal language model predicts next tokens. `...ForSequenceClassification` reads one token of every document, and
`...ForTokenClassification` reads every token. Both are a text model, perhaps a dropout, and one linear module. This holds for the
classes that transformers derives from its generic ones, and for those in `Modules.like_generic`, whose forwards were compared.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from hf_longctx.families.registry import MODULES

HeadKind = Literal["next_token", "document", "token"]

# endings of class names
CLASSIFIERS: dict[str, HeadKind] = {"ForSequenceClassification": "document", "ForTokenClassification": "token"}
_GENERIC: dict[HeadKind, type] = {"document": GenericForSequenceClassification, "token": GenericForTokenClassification}
# names of the head in these classes
_HEADS = ("score", "classifier")


def inner_model(model: nn.Module) -> Any:
    """The transformers model inside adapters and other wrappers; `model` itself if there is none."""
    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)


def head_kind(model: nn.Module) -> HeadKind:
    """Kind of the output head of a model, by its class, even inside wrappers; "next_token" for all unknown classes."""
    return _kind_of(inner_model(model))


def _kind_of(base: nn.Module) -> HeadKind:
    # the class that sharding puts in front of the model's own has the same ending
    return next((kind for ending, kind in CLASSIFIERS.items() if type(base).__name__.endswith(ending)), "next_token")


def is_generic(model: nn.Module) -> bool:
    """Whether a classifier is a text model, perhaps a dropout, and one linear module, with the forward that plans know."""
    base = inner_model(model)
    is_known = isinstance(base, _GENERIC.get(_kind_of(base), ())) or type(base).__name__ in MODULES.like_generic
    return is_known and _classifier(base) is not None


def head_of(model: nn.Module) -> nn.Module | None:
    """The module whose output is the logits, even inside wrappers; None if there is none."""
    base = inner_model(model)
    if _kind_of(base) != "next_token":
        return _classifier(base)
    head = base.get_output_embeddings() if isinstance(base, PreTrainedModel) else None
    return head if isinstance(head, nn.Module) else None


def backbone_of(classifier: Any) -> Any:
    """The text model of a classifier."""
    return getattr(classifier, classifier.base_model_prefix)


def num_outputs(model: nn.Module) -> int:
    """Entries of the logits of one token; 0 for an object that is no model of transformers."""
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        return 0
    is_classifier = isinstance(model, nn.Module) and head_kind(model) != "next_token"
    found = config.num_labels if is_classifier else getattr(config.get_text_config(), "vocab_size", 0)
    return int(found or 0)


def is_tied(model: nn.Module) -> bool:
    """Whether the config ties the head to the embedding; a classifier's head never is."""
    base = inner_model(model)
    return _kind_of(base) == "next_token" and bool(getattr(base.config, "tie_word_embeddings", False))


def _classifier(base: nn.Module) -> nn.Module | None:
    found = [getattr(base, name) for name in _HEADS if isinstance(getattr(base, name, None), nn.Module)]
    return found[0] if len(found) == 1 else None
