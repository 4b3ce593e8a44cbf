"""Finds the output head of a model, which predicts next tokens or classifies documents or tokens, and patches that of documents.

A causal language model predicts next tokens. `...ForSequenceClassification` reads one token of every document, and
`...ForTokenClassification` reads every token. Both are a text model, perhaps a dropout, and one linear module. This holds for the
classes that transformers derives from its generic ones, and for those in `Modules.like_generic`, whose forwards were compared.

The forward of a class that classifies documents applies the head to every token, then picks the last token of each row that is no
padding. A row of a plan holds many documents, or a slice of one, so under a plan the forward returns the logits of all tokens.
Labels then make the choice: the collator puts the label of a document on the token that transformers would pick.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from hf_longctx.families.registry import MODULES, family_of_type
from hf_longctx.hf.models.forwards import give, has, take

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
    # some multimodal classes do not name the head of the language model inside
    owners = [base, *base.children()] if isinstance(base, PreTrainedModel) else []
    heads = (each.get_output_embeddings() for each in owners if isinstance(each, PreTrainedModel))
    return next((head for head in heads if isinstance(head, nn.Module)), None)


def backbone_of(classifier: Any) -> Any:
    """The text model of a classifier."""
    return getattr(classifier, classifier.base_model_prefix)


def inner_decoder(model: nn.Module) -> nn.Module | None:
    """The decoder inside `model`: its `base_model`, or its first child that is a transformers model.

    The latter if that attribute is wrong, as for Llama 4. None for a decoder itself.
    """
    base = getattr(model, "base_model", model)
    return base if base is not model else next((each for each in model.children() if isinstance(each, PreTrainedModel)), None)


def num_outputs(model: nn.Module) -> int:
    """Entries of the logits of one token; 0 for an object that is no model of transformers."""
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        return 0
    is_classifier = isinstance(model, nn.Module) and head_kind(model) != "next_token"
    return int(config.num_labels or 0) if is_classifier else num_tokens(config)


def num_tokens(config: PretrainedConfig) -> int:
    """Number of token ids that a model of this config has; 0 if the config does not say it."""
    text = config.get_text_config()
    more = family_of_type(text.model_type).traits.more_tokens_field
    return int(getattr(text, "vocab_size", 0) or 0) + int(getattr(text, more, 0) or 0 if more else 0)


def is_tied(model: nn.Module) -> bool:
    """Whether the config ties the head to the embedding; a classifier's head never is."""
    base = inner_model(model)
    return _kind_of(base) == "next_token" and bool(getattr(base.config, "tie_word_embeddings", False))


def _classifier(base: nn.Module) -> nn.Module | None:
    found = [getattr(base, name) for name in _HEADS if isinstance(getattr(base, name, None), nn.Module)]
    return found[0] if len(found) == 1 else None


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
