"""The decoder layers of a model as the activation engine takes them."""

from __future__ import annotations

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_longctx.runtime.checkpointing import LayerModules

_NORMS = ("input_layernorm", "post_attention_layernorm")


def layer_modules(model: nn.Module) -> tuple[LayerModules, ...]:
    """Every decoder layer of `model` in order, whatever it is wrapped in; raises ValueError for one of another make."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layer of transformers' GradientCheckpointingLayer, so nothing of it can be "
            f"recomputed or offloaded; use a model class of transformers"
        )
    missing = next((layer for layer in layers if not hasattr(layer, "mlp")), None)
    if missing is not None:
        raise ValueError(f"{type(missing).__name__} has no module `mlp`, which activation policies split; keep everything")
    return tuple(
        LayerModules(
            layer, layer.get_submodule("mlp"), tuple(layer.get_submodule(name) for name in _NORMS if hasattr(layer, name))
        )
        for layer in layers
    )
