"""The decoder layers and the output head of a model as the activation engine takes them."""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_longctx.runtime.activations.engine import LayerModules

# words in names of config fields by which some class changes its logits behind the head
_LOGIT_WORDS = ("logit", "softcap", "lm_head_multiplier", "output_multiplier", "unpadded_vocab_size")
# words in names of fields about something else: logits of attention, of a router, of a contrastive model, a count of tokens
_OTHER_WORDS = ("attn", "attention", "router", "auxiliary", "contrastive", "init_value", "mlp", "lsd", "to_keep")
_MLPS = ("mlp", "feed_forward")
# of layers that drop the second value
_MLPS_OF_TWO = ("GptOssMLP", "Llama4TextMoe")
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
    return tuple(
        LayerModules(
            layer,
            mlp,
            tuple(layer.get_submodule(name) for name in _NORMS if hasattr(layer, name)),
            _projections(layer),
            mlp_gives_more=type(mlp).__name__ in _MLPS_OF_TWO,
        )
        for layer, mlp in ((layer, _mlp(layer)) for layer in layers)
    )


def _mlp(layer: nn.Module) -> nn.Module:
    name = next((name for name in _MLPS if hasattr(layer, name)), None)
    if name is None:
        raise ValueError(f"{type(layer).__name__} has no module `mlp`, which activation policies split; keep everything")
    return layer.get_submodule(name)


def output_head(model: nn.Module) -> nn.Module:
    """The module of `model` whose output is the logits, whatever the model is wrapped in; ValueError if there is none."""
    inner = _unwrapped(model)
    head = inner.get_output_embeddings() if isinstance(inner, PreTrainedModel) else None
    if not isinstance(head, nn.Module):
        raise ValueError(
            f"{type(inner).__name__} has no output embeddings, so its loss cannot be taken in tiles; use a causal language model "
            f"of transformers"
        )
    return head


def head_problem(model: nn.Module) -> str:
    """Why the loss of `model` needs its logits, by the name of what is done to them behind the head; empty if it does not."""
    inner = _unwrapped(model)
    config = getattr(inner, "config", None)
    if not isinstance(config, PretrainedConfig):
        return f"{type(inner).__name__} has no config of transformers that tells what it does to its logits"
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for name, value in sorted(part.to_dict().items()):
            is_ours = any(word in name for word in _LOGIT_WORDS) and not any(word in name for word in _OTHER_WORDS)
            if is_ours and not isinstance(value, bool) and isinstance(value, int | float | str):
                return f"{type(inner).__name__} changes its logits behind the head ({name}={value})"
    return ""


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model of transformers inside wrappers (DDP, adapters); sharded models are their own."""
    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)


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
