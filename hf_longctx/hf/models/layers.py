"""Finds a model's decoder layers, their MLPs, norms and projections, and its output head, for the activation engine."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from hf_longctx.hf.models.adapters import base_of
from hf_longctx.hf.models.fused.find import runs_heads_alike
from hf_longctx.hf.models.heads.kinds import head_kind, head_of
from hf_longctx.hf.models.states.patching import family_of_mixer, mixers_of
from hf_longctx.hf.models.wrapped.text import text_layers, text_part
from hf_longctx.runtime.activations.engine import LayerModules
from hf_longctx.runtime.activations.head_pieces import pieces_problem
from hf_longctx.runtime.core.binding import is_bound
from hf_longctx.runtime.execution.spread_experts import spread_group

# words in names of config fields that make some class change its logits after the head
_LOGIT_WORDS = ("logit", "softcap", "lm_head_multiplier", "output_multiplier", "unpadded_vocab_size")
# words in names of similar fields about other things: logits of attention, of a router or of a contrastive model, token counts
_OTHER_WORDS = ("attn", "attention", "router", "auxiliary", "contrastive", "init_value", "mlp", "lsd", "to_keep")
_MLPS = ("mlp", "feed_forward", "mlp_block")
# MLP classes that return two values; the layer drops the second one
_MLPS_OF_TWO = ("GptOssMLP", "Llama4TextMoe")
# MLP classes that get more than hidden states, by an argument with a default
_MLPS_OF_MORE = ("Ernie4_5_VLMoeMoeBlock", "ZayaSparseMoeBlock")
_NORMS = ("input_layernorm", "post_attention_layernorm")
# attributes of the model around the layers: the norm of the last layer's output
_FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")
# attributes of `self_attn` that project to queries, keys and values: three modules, or one module for all three
_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))


def has_plain_projections(model: nn.Module) -> bool:
    """Whether every layer has projections that `layer_modules` finds, so that plans may keep queries, keys and values."""
    layers = text_layers(model)
    return bool(layers) and all(_projections(layer) for layer in layers)


def cuts_heads(model: nn.Module) -> bool:
    """Whether attention of every layer may run in pieces of its heads."""
    layers = text_layers(model)
    return bool(layers) and all(_cuttable_attention(layer) is not None for layer in layers)


def layer_modules(model: nn.Module) -> tuple[LayerModules, ...]:
    """All decoder layers of `model` in order, even inside wrappers; raises ValueError for a model without such layers."""
    layers = text_layers(model)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layer of class GradientCheckpointingLayer, so nothing in it can be recomputed or "
            f"offloaded; use a model class of transformers"
        )
    return tuple(
        LayerModules(
            layer,
            mlp,
            tuple(layer.get_submodule(name) for name in _NORMS if hasattr(layer, name)),
            _projections(layer),
            mlp_gives_more=type(mlp).__name__ in _MLPS_OF_TWO,
            meets_ranks=mlp is not None and spread_group(mlp) is not None,
            attention=_cuttable_attention(layer),
        )
        for layer, mlp in ((layer, _mlp(layer)) for layer in layers)
    )


def _mlp(layer: nn.Module) -> nn.Module | None:
    # an MLP that reads earlier tokens is a mixer
    name = next((name for name in _MLPS if hasattr(layer, name) and not mixers_of(layer.get_submodule(name))), None)
    if name is None and any(not family_of_mixer(mixer).has_mlp for mixer in mixers_of(layer).values()):
        return None
    if name is None:
        raise ValueError(
            f"{type(layer).__name__} has no module `mlp` or `feed_forward`, which activation policies divide into tiles; use "
            f"activations='keep'"
        )
    mlp = layer.get_submodule(name)
    inputs = list(inspect.signature(type(mlp).forward).parameters.values())[1:]
    needed = [each for each in inputs if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    if len(needed) > 1 or type(mlp).__name__ in _MLPS_OF_MORE:
        raise ValueError(
            f"{type(mlp).__name__} takes more than hidden states, so activation policies cannot divide it into tiles; use "
            f"activations='keep'"
        )
    return mlp


def output_head(model: nn.Module) -> nn.Module:
    """The module of `model` whose output is the logits, even inside wrappers; raises ValueError if there is none."""
    inner = base_of(model)
    head = head_of(model)
    if head is None:
        raise ValueError(
            f"{type(inner).__name__} has no output embeddings, so its loss cannot be computed in tiles; use a causal language "
            f"model of transformers"
        )
    return head


def final_norm(model: nn.Module) -> nn.Module | None:
    """The norm between the last layer and the output head of `model`; None if it is not found by its name."""
    layers = {id(layer) for layer in text_layers(model)}
    bodies = [module for module in text_part(model).modules() if any(id(child) in layers for child in _listed(module))]
    found = [getattr(body, name, None) for body in bodies for name in _FINAL_NORMS]
    norms = [norm for norm in found if isinstance(norm, nn.Module)]
    return norms[0] if len(norms) == 1 else None


def _listed(module: nn.Module) -> list[nn.Module]:
    """Modules in the lists that a module holds."""
    return [each for child in module.children() if isinstance(child, nn.ModuleList) for each in child]


def head_problem(model: nn.Module) -> str:
    """Why the loss of `model` cannot be computed in tiles: a setting changes logits after the head. Empty if it can be."""
    inner = base_of(model)
    config = getattr(inner, "config", None)
    if not isinstance(config, PretrainedConfig):
        return f"{type(inner).__name__} has no config of transformers, which would tell whether it changes its logits"
    if head_kind(model) != "next_token":
        # only language models obey such settings
        return ""
    for each in {id(each): each for each in (config, config.get_text_config())}.values():
        for name, value in sorted(each.to_dict().items()):
            is_ours = any(word in name for word in _LOGIT_WORDS) and not any(word in name for word in _OTHER_WORDS)
            if is_ours and not isinstance(value, bool) and isinstance(value, int | float | str):
                return f"{type(inner).__name__} changes its logits after the head ({name}={value})"
    return ""


def _projections(layer: nn.Module) -> tuple[nn.Linear, ...]:
    """Linear modules that make queries, keys and values; empty unless all are plain and their outputs stay unchanged."""
    attention = getattr(layer, "self_attn", None)
    if getattr(getattr(attention, "config", None), "clip_qkv", None) is not None:
        # the layer clips the outputs in place, which would change the kept ones
        return ()
    for names in _PROJECTIONS:
        found = [_plain_linear(getattr(attention, name, None)) for name in names]
        linears = tuple(linear for linear in found if linear is not None)
        if len(linears) == len(names):
            return linears
    return ()


def _cuttable_attention(layer: nn.Module) -> nn.Module | None:
    """The attention module of a layer if it may run in pieces of its heads: code and projections as `head_pieces` needs them."""
    attention: Any = getattr(layer, "self_attn", None)
    if not isinstance(attention, nn.Module) or not runs_heads_alike(attention) or pieces_problem(attention):
        return None
    own = vars(attention).get("forward")
    drops = getattr(attention, "attention_dropout", 0.0) > 0
    return None if drops or (own is not None and not is_bound(own)) else attention


def _plain_linear(module: nn.Module | None) -> nn.Linear | None:
    """The linear module with torch's own forward, perhaps inside an adapter; None for others, such as quantised ones."""
    inner = getattr(module, "base_layer", module)
    return inner if type(inner) is nn.Linear and "forward" not in vars(inner) else None
