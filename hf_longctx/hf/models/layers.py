"""Finds a model's decoder layers, their MLPs, norms and projections, and its output head, for the activation engine."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hf_longctx.families.registry import MODULES
from hf_longctx.hf.models.adapters import (
    base_of,
    copies_input,
    cut_bytes,
    hidden_dtype,
    is_adapted,
    largest_adapters,
    lora_layers,
    read_projection,
    saved_bytes,
    sum_adapters,
    tile_bytes,
    trained_sizes,
)
from hf_longctx.hf.models.expert_adapters import expert_adapter_spec, merged_router_bytes, split_experts
from hf_longctx.hf.models.heads import head_of
from hf_longctx.hf.models.kernel_places import KERNEL_NORMS, runs_heads_alike
from hf_longctx.hf.models.packed_experts import packed_weights
from hf_longctx.hf.models.states import mixers_of, num_calls
from hf_longctx.hf.models.towers import text_layers, text_part
from hf_longctx.plan.model.model_spec import AdapterSpec
from hf_longctx.runtime.activations.engine import LayerModules
from hf_longctx.runtime.activations.head_pieces import PROJECTIONS, pieces_problem
from hf_longctx.runtime.core.binding import is_written_by, own_forward
from hf_longctx.runtime.core.products import FP8Linear
from hf_longctx.runtime.execution.experts import spread_group

# attributes of a layer that may hold its MLP; a layer adds the outputs of several
_MLPS = ("mlp", "feed_forward", "mlp_block", "block_sparse_moe", "shared_mlp", "mixer")
_NORMS = ("input_layernorm", "post_attention_layernorm", "norm", "norm_1", "norm_2")
# attributes of the model around the layers: the norm of the last layer's output
_FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")
# attributes of `self_attn` that project to queries, keys and values: three modules, or one module for all three
_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
# names of matrices outside MLPs -> fields of `AdapterSpec` for what an adapter on them reads; any other may read everything
_READS = {
    **{name: {"reads_first_norm"} for names in _PROJECTIONS for name in names},
    "o_proj": {"reads_attention"},
}
_UNKNOWN_READS = {"reads_first_norm", "reads_attention", "reads_second_norm", "reads_product"}


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
    return tuple(map(_modules_of, layers))


def tiles_mlps(model: nn.Module) -> bool:
    """Whether the MLPs of all layers run alone: in token tiles and kept for some tokens, unless their experts are packed."""
    return not any(modules.whole_mlp and not modules.mlps for modules in map(_modules_of, text_layers(model)))


def tiles_norms(model: nn.Module) -> bool:
    """Whether norms of all layers run in token tiles."""
    return all(any(True for _ in _norms(layer)) for layer in text_layers(model))


def adapter_spec(model: nn.Module, is_autocast: bool = False) -> AdapterSpec:
    """Sizes that adapters add: the most of any layer of `model`, and those of embedding and head; zeros without adapters.

    `model` may be one pipeline stage. is_autocast: matrices are multiplied in bf16 for any dtype of the weights.
    """
    spec = trained_sizes(model)
    if not is_adapted(model):
        return spec
    config = base_of(model).config.get_text_config()
    hidden, num_hidden = hidden_dtype(model), config.hidden_size
    num_chosen = int(getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None) or 0)
    layers = [_layer_adapters(each, hidden, num_hidden, is_autocast, num_chosen) for each in text_layers(model)]
    found = largest_adapters([spec, *layers])
    # copies of routers are few bytes: all layers hold them, and one makes what is added to its copy, or the copy's gradient
    routers = [merged_router_bytes(each) for each in text_layers(model)]
    return replace(found, copied_bytes=found.copied_bytes + sum(routers) + max(routers, default=0))


def _layer_adapters(layer: nn.Module, hidden: torch.dtype, num_hidden: int, is_autocast: bool, num_chosen: int) -> AdapterSpec:
    """Sizes that the adapters of one layer save, and inputs that they read without a copy, by names and places of projections.

    num_hidden: elements of a hidden state. num_chosen: experts of a token.
    """
    modules = _modules_of(layer)
    in_mlps = {id(each): each for mlp in modules.mlps for each in lora_layers(mlp).values()}
    outside = {name: each for name, each in lora_layers(layer).items() if id(each) not in in_mlps}
    reads: set[str] = set()
    outer_bytes = 0
    for name, each in outside.items():
        read = _READS.get(name.rpartition(".")[2], _UNKNOWN_READS)
        # under autocast, outputs of attention are in bf16, as its matrices made them
        given = torch.bfloat16 if is_autocast and read == {"reads_attention"} else hidden
        outer_bytes += saved_bytes(each, given, is_autocast)
        if not copies_input(each, given, is_autocast):
            reads |= read
    for each in in_mlps.values():
        if not copies_input(each, hidden, is_autocast):
            first = {"reads_second_norm"} if each.in_features == num_hidden else set()
            last = {"reads_product"} if each.out_features == num_hidden else set()
            reads |= first | last or _UNKNOWN_READS
    if merged_router_bytes(layer):
        reads |= {"reads_second_norm"}
    beside = AdapterSpec(
        attention_saved_bytes=outer_bytes,
        mlp_saved_bytes=sum(saved_bytes(each, hidden, is_autocast) for each in in_mlps.values()),
        cut_bytes=cut_bytes([each for name, each in _named(modules.attention) if name in PROJECTIONS]),
        tile_bytes=tile_bytes(list(in_mlps.values()), hidden, is_autocast),
        **dict.fromkeys(reads, True),
    )
    return sum_adapters([beside, *(expert_adapter_spec(each, num_chosen) for each in split_experts(layer))])


def _named(module: nn.Module | None) -> list[tuple[str, nn.Module]]:
    return [] if module is None else list(module.named_children())


def _modules_of(layer: nn.Module) -> LayerModules:
    mlps, whole_mlp = _mlps(layer)
    return LayerModules(
        layer,
        mlps,
        # kernels save no more of a whole norm than tiles do
        tuple(norm for norm in _norms(layer) if norm not in KERNEL_NORMS),
        _projections(layer),
        whole_mlp,
        mlp_gives_more=any(type(mlp).__name__ in MODULES.mlps_of_two for mlp in mlps),
        meets_ranks=spread_group(layer) is not None,
        attention=_cuttable_attention(layer),
        read_projection=read_projection,
    )


def _norms(layer: nn.Module) -> Iterator[nn.Module]:
    """Norms of a layer that may run in tiles."""
    return (norm for name in _NORMS if isinstance(norm := getattr(layer, name, None), nn.Module))


def _mlps(layer: nn.Module) -> tuple[tuple[nn.Module, ...], str]:
    """MLPs of a layer that may run alone, and why they never run in tiles, or why there are none (else empty)."""
    named = (getattr(layer, name, None) for name in _MLPS)
    # an MLP that reads earlier tokens is a mixer
    mlps = tuple(module for module in named if isinstance(module, nn.Module) and not num_calls(module))
    for mlp in mlps:
        inputs = list(inspect.signature(type(mlp).forward).parameters.values())[1:]
        needed = [each for each in inputs if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
        if len(needed) > 1 or type(mlp).__name__ in MODULES.mlps_of_more:
            return (), f"{type(mlp).__name__} takes more than hidden states"
    if not mlps and _has_other_matrices(layer):
        return (), f"{type(layer).__name__} has no module that is its MLP"
    is_packed = any(True for mlp in mlps for _ in packed_weights(mlp))
    return mlps, "its experts are unpacked anew for every tile" if is_packed else ""


def _has_other_matrices(layer: nn.Module) -> bool:
    """Whether a layer multiplies tokens by matrices outside its attention and its mixers."""
    return any(True for _ in other_matrices(layer))


def other_matrices(layer: nn.Module) -> Iterator[nn.Parameter]:
    """Matrices by which a layer multiplies tokens outside its attention and its mixers."""
    mixing = (each for each in layer.modules() if type(each).__name__.endswith("Attention") or "" in mixers_of(each))
    inside = {id(parameter) for module in mixing for parameter in module.parameters()}
    return (parameter for parameter in layer.parameters() if parameter.dim() > 1 and id(parameter) not in inside)


def output_head(model: nn.Module) -> nn.Module:
    """The module of `model` whose output is the logits, even inside wrappers; raises ValueError if there is none."""
    head = head_of(model)
    if head is None:
        raise ValueError(
            f"{type(base_of(model)).__name__} has no output embeddings, so its loss cannot be computed in tiles; use a causal "
            f"language model of transformers"
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
    if not isinstance(attention, nn.Module) or not runs_heads_alike(attention) or pieces_problem(attention, read_projection):
        return None
    drops = getattr(attention, "attention_dropout", 0.0) > 0
    return None if drops or own_forward(attention) is not None else attention


def _plain_linear(module: nn.Module | None) -> nn.Linear | None:
    """The linear module with its class's forward, perhaps inside an adapter; None for others, such as four-bit ones."""
    inner: Any = getattr(module, "base_layer", module)
    is_plain = type(inner) in (nn.Linear, FP8Linear) and own_forward(inner) is None and is_written_by(nn.Linear.forward, "torch")
    return inner if is_plain else None
