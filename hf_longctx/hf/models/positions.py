"""Positions of models that number the tokens of a row themselves, from its start or from the number of their padding token.

Decoders of the first kind, such as BART's, take no positions. So with `RowPositionsPatch` their embeddings of positions get those
of the plan, which count from the start of every document.

Of the second kind is RoBERTa. Its first position is the id of the padding token + 1, and it numbers a row without padding tokens.
The embeddings keep the id with which they were made, even if `Trainer.train` sets the config's id to that of a tokenizer. Plans
number the tokens of every document from 0 and never pad. So with `PaddingPatch` the module around the embeddings adds the first
position to the positions that it gets with a plan. A row with a padding token inside would be numbered differently, so such rows
are refused when data is read (`absent_token_ids`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from hf_longctx.families.registry import MODULES, family_of_type
from hf_longctx.hf.models.forwards import carried, carrying
from hf_longctx.hf.models.towers import ForwardsPatch, placeholder_ids, text_part
from hf_longctx.plan.model.config import NO_POSITIONS
from hf_longctx.runtime.core.binding import class_name

# fields with the number of positions
_LIMITS = ("max_position_embeddings", "max_seq_len", "max_target_positions")
# attribute of the module around the embeddings that holds the handle of its hook
_HANDLE = "_longctx_position_handle"


def first_position(owner: Any) -> int:
    """The number that a model gives to the position of a document's first token; owner: the model, or its config."""
    text = _config(owner).get_text_config()
    return _padding_id(owner) + 1 if family_of_type(text.model_type).traits.positions == "from_padding" else 0


def max_positions(owner: Any) -> int:
    """The most tokens of a document for which a model, or the model of a config, has positions; no limit if it needs none."""
    text: Any = _config(owner).get_text_config()
    limit = next((each for name in _LIMITS if (each := getattr(text, name, None))), NO_POSITIONS)
    return int(limit) - first_position(owner)


def has_limit(config: PretrainedConfig) -> bool:
    """Whether the model has positions for a limited number of tokens only."""
    text = config.get_text_config()
    return any(getattr(text, name, None) for name in _LIMITS)


def set_limit(text: PretrainedConfig, num_tokens: int) -> None:
    """Sets the limit in a text config whose model needs no positions to `num_tokens`."""
    setattr(text, next(name for name in _LIMITS if getattr(text, name, None)), num_tokens)


def absent_token_ids(owner: Any) -> tuple[int, ...]:
    """Token ids that no row of a model may have: placeholders for images, sound and video, and padding that shifts positions.

    owner: the model, or its config.
    """
    first = first_position(owner)
    return (*placeholder_ids(_config(owner)), *([first - 1] if first else []))


class PaddingPatch:
    """Makes a model that counts positions from its padding token do so under plans too."""

    def needed(self, model: Any) -> bool:
        """Whether the text model counts positions in this way."""
        return first_position(text_part(model)) > 0

    def apply(self, model: Any) -> None:
        """Hooks the decoder, since a hook of the callback may replace the arguments of the model itself later."""
        text = text_part(model)
        inner: nn.Module = text.base_model
        if _HANDLE not in vars(inner):
            hook = partial(_shift, first_position(text))
            setattr(inner, _HANDLE, inner.register_forward_pre_hook(hook, with_kwargs=True))

    def undo(self, model: Any) -> None:
        """Removes the hook."""
        for module in model.modules():
            if (handle := vars(module).pop(_HANDLE, None)) is not None:
                handle.remove()


def row_positions(model: nn.Module) -> list[nn.Module]:
    """Embeddings of positions that a decoder numbers from the start of the row."""
    return [embedding for _, embedding in _row_positions(model)]


def _row_positions(model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Each module that numbers the positions of a row, with its embeddings of positions."""
    named = ((module, MODULES.row_positions.get(class_name(module))) for module in model.modules())
    return [(module, getattr(module, name)) for module, name in named if name is not None]


class RowPositionsPatch(ForwardsPatch):
    """Gives embeddings of positions those of a plan in place of those in the row."""

    def forwards(self, text: nn.Module) -> list[tuple[Any, Any]]:
        """Decoders and their embeddings, with their forwards."""
        pairs = _row_positions(text)
        return [each for module, own in pairs for each in ((module, _decoder_forward), (own, _embedding_forward))]


def _decoder_forward(decoder: Any, *args: Any, **keywords: Any) -> Any:
    """The forward of a decoder's class, whose embeddings find the plan's context."""
    if (context := keywords.get("longctx")) is None:
        return type(decoder).forward(decoder, *args, **keywords)
    with carrying(row_positions(decoder), context):
        return type(decoder).forward(decoder, *args, **keywords)


def _embedding_forward(embedding: Any, *args: Any, **keywords: Any) -> Tensor:
    """Embeddings of positions in documents under a plan, as of the class without one."""
    if (context := carried(embedding)) is not None:
        assert context.position_ids is not None
        keywords = keywords | {"position_ids": context.position_ids.view(-1)}
    found: Tensor = type(embedding).forward(embedding, *args, **keywords)
    return found


def _shift(
    first: int, inner: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if keywords.get("longctx") is None:
        return None
    return args, {**keywords, "position_ids": keywords["position_ids"] + first}


def _config(owner: Any) -> PretrainedConfig:
    return owner if isinstance(owner, PretrainedConfig) else owner.config


def _padding_id(owner: Any) -> int:
    """The padding token from which the embeddings count; the config's if there are none, as in a later stage."""
    modules: Any = owner.modules() if isinstance(owner, nn.Module) else ()
    numbered = (each for each in modules if hasattr(each, "position_embeddings") or "Position" in class_name(each))
    found = (each.padding_idx for each in numbered if hasattr(each, "padding_idx"))
    return int(next(found, _config(owner).get_text_config().pad_token_id))
