"""Positions of models that count from the number of their padding token, such as RoBERTa.

Their first position is the id of the padding token + 1, and they number the tokens of a row themselves, without padding tokens.
The embeddings keep the id with which they were made, even if `Trainer.train` sets the config's id to that of a tokenizer. Plans
number the tokens of every document from 0 and never pad. So with `PaddingPatch` the module around the embeddings adds the first
position to the positions that it gets with a plan. A row with a padding token inside would be numbered differently, so such rows
are refused when data is read (`absent_token_ids`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from hf_longctx.families.registry import family_of_type
from hf_longctx.hf.models.towers import placeholder_ids, text_part
from hf_longctx.plan.model.config import NO_POSITIONS

# fields with the number of positions
_LIMITS = ("max_position_embeddings", "max_seq_len")
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
    found = (each.padding_idx for each in modules if hasattr(each, "position_embeddings") and hasattr(each, "padding_idx"))
    return int(next(found, _config(owner).get_text_config().pad_token_id))
