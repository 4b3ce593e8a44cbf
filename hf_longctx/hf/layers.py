"""The decoder layers of a model as the activation engine takes them."""

from __future__ import annotations

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_longctx.runtime.checkpointing import LayerModules

_NORMS = ("input_layernorm", "post_attention_layernorm")
# of `self_attn`: three modules, or one that makes all three
_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))


def has_plain_projections(model: nn.Module) -> bool:
    """Whether `layer_modules` would find projections in every layer, so that queries, keys and values may be kept."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    return bool(layers) and all(_projections(layer) for layer in layers)


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
            layer,
            layer.get_submodule("mlp"),
            tuple(layer.get_submodule(name) for name in _NORMS if hasattr(layer, name)),
            _projections(layer),
        )
        for layer in layers
    )


def _projections(layer: nn.Module) -> tuple[nn.Linear, ...]:
    """The linear modules that make queries, keys and values; none unless all are plain and left as they are."""
    attention = getattr(layer, "self_attn", None)
    if getattr(getattr(attention, "config", None), "clip_qkv", None) is not None:
        # clipped in place, so what was kept would change
        return ()
    for names in _PROJECTIONS:
        found = [_plain_linear(getattr(attention, name, None)) for name in names]
        linears = tuple(linear for linear in found if linear is not None)
        if len(linears) == len(names):
            return linears
    return ()


def _plain_linear(module: nn.Module | None) -> nn.Linear | None:
    """A linear module whose forward is torch's, or that an adapter adds to; subclasses, as of quantisation, are none."""
    inner = getattr(module, "base_layer", module)
    return inner if type(inner) is nn.Linear and "forward" not in vars(inner) else None
