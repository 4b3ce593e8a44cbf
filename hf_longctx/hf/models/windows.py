"""Finds the decoder layers of a model, and how many tokens the attention of each layer sees."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_longctx.hf.models.adapters import base_of
from hf_longctx.hf.models.cutting import Pieces, find_pieces
from hf_longctx.hf.models.states.functions import FAMILIES
from hf_longctx.plan.model.layers import Windows, plain_windows

# settings of layers and of configs that hide some earlier tokens from attention
WINDOW_FIELDS = ("sliding_window", "attention_chunk_size")
# layers that have a window setting, but use it neither in their masks nor in an attention function
_UNUSED_WINDOWS = ("MoshiDecoderLayer",)
_STATE_LAYERS = tuple(family.layer_type for family in FAMILIES)


def decoder_layers(model: Any) -> tuple[Pieces | None, list[nn.Module]]:
    """The pieces into which the model can be cut (None if it cannot, so that all layers are needed), and its layers in order."""
    try:
        pieces = find_pieces(model)
    except ValueError:
        # layers of an image or audio encoder do not count
        lists = [module for module in base_of(model).get_decoder().children() if isinstance(module, nn.ModuleList)]
        own: list[nn.Module] = [layer for each in lists for layer in each if isinstance(layer, GradientCheckpointingLayer)]
        return None, own or [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    return pieces, list(getattr(pieces.decoder, pieces.layers))


def layer_types(model: Any, num_layers: int) -> list[str]:
    """Type of each layer, from the config's `layer_types`; empty strings if the config does not list these layers."""
    types = getattr(base_of(model).config.get_text_config(), "layer_types", None) or ()
    return list(types) if len(types) == num_layers else [""] * num_layers


def layer_window(layer: nn.Module, config: Any, layer_type: str) -> int:
    """The most tokens that the layer's attention sees; 0: all of them."""
    if layer_type.startswith("full") or layer_type in _STATE_LAYERS or type(layer).__name__ in _UNUSED_WINDOWS:
        return 0
    own = [vars(module)[name] for module in layer.modules() for name in WINDOW_FIELDS if name in vars(module)]
    if own:
        return max(int(value or 0) for value in own)
    name = WINDOW_FIELDS[1] if layer_type.startswith("chunked") else WINDOW_FIELDS[0]
    # configs may carry fields that the model class ignores
    return int(getattr(config, name, None) or 0) if hasattr(type(config), name) else 0


def layer_windows(model: Any) -> Windows:
    """The window of every layer that the config counts; a layer that calls attention n times counts as n layers."""
    _, layers = decoder_layers(model)
    config = base_of(model).config.get_text_config()
    types = layer_types(model, len(layers))
    windows = [layer_window(layer, config, kind) or None for layer, kind in zip(layers, types, strict=True)]
    times, rest = divmod(config.num_hidden_layers, max(1, len(windows)))
    # a rest means that the decoder is not a plain chain of its layers
    return () if rest else plain_windows([window for window in windows for _ in range(times)])
