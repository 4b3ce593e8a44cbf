"""The decoder layers of a model and the tokens that attention of each of them sees."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_longctx.hf.models.adapters import base_of
from hf_longctx.hf.models.cutting import Pieces, find_pieces
from hf_longctx.plan.core.windows import Windows, plain_windows

# settings of layers and configs by which attention sees less than all tokens before
WINDOW_FIELDS = ("sliding_window", "attention_chunk_size")
# layers with a window that neither their masks nor any attention function gets
_UNUSED_WINDOWS = ("MoshiDecoderLayer",)


def decoder_layers(model: Any) -> tuple[Pieces | None, list[nn.Module]]:
    """Where the model could be cut (None: nowhere, so that all of its layers are needed), and its layers in order."""
    try:
        pieces = find_pieces(model)
    except ValueError:
        # not those of an encoder of pictures or sound
        lists = [module for module in base_of(model).get_decoder().children() if isinstance(module, nn.ModuleList)]
        own: list[nn.Module] = [layer for each in lists for layer in each if isinstance(layer, GradientCheckpointingLayer)]
        return None, own or [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    return pieces, list(getattr(pieces.decoder, pieces.layers))


def layer_types(model: Any, num_layers: int) -> list[str]:
    """What the config calls each layer; empty where it does not say."""
    types = getattr(base_of(model).config.get_text_config(), "layer_types", None) or ()
    return list(types) if len(types) == num_layers else [""] * num_layers


def layer_window(layer: nn.Module, config: Any, layer_type: str) -> int:
    """Tokens that the layer's attention sees at most; 0 for all."""
    if layer_type.startswith("full") or type(layer).__name__ in _UNUSED_WINDOWS:
        return 0
    own = [vars(module)[name] for module in layer.modules() for name in WINDOW_FIELDS if name in vars(module)]
    if own:
        return max(int(value or 0) for value in own)
    name = WINDOW_FIELDS[1] if layer_type.startswith("chunked") else WINDOW_FIELDS[0]
    # what a class does not declare, it does not read
    return int(getattr(config, name, None) or 0) if hasattr(type(config), name) else 0


def layer_windows(model: Any) -> Windows:
    """The windows of all layers that its config counts; layers that call attention several times count as often."""
    _, layers = decoder_layers(model)
    config = base_of(model).config.get_text_config()
    types = layer_types(model, len(layers))
    windows = [layer_window(layer, config, kind) or None for layer, kind in zip(layers, types, strict=True)]
    times, rest = divmod(config.num_hidden_layers, max(1, len(windows)))
    # a decoder that is no chain of its layers
    return () if rest else plain_windows([window for window in windows for _ in range(times)])
