"""Translates a loaded model or its config to the planner's `ModelSpec`, and the machine to a `ClusterSpec`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from hf_longctx.families.registry import MIXERS, MODULES
from hf_longctx.hf.models.adapters import base_of, hidden_dtype, is_adapted
from hf_longctx.hf.models.compressed import COMPRESSED_LAYERS
from hf_longctx.hf.models.cutting import RANGES, Pieces, find_pieces
from hf_longctx.hf.models.heads import head_kind, head_of, num_outputs
from hf_longctx.hf.models.layers import adapter_spec, cuts_heads, final_norm, has_plain_projections, tiles_mlps, tiles_norms
from hf_longctx.hf.models.logits import logit_change
from hf_longctx.hf.models.positions import first_position, max_positions
from hf_longctx.hf.models.quantised import own_elements, packed_layers, packed_spec
from hf_longctx.hf.models.towers import num_text_layers, text_layers, text_part, tower_names, tower_parameters, wrapper_of
from hf_longctx.plan.core.settings import GENERIC_CPU, GENERIC_GPU, USABLE_SHARE, ClusterSpec
from hf_longctx.plan.core.types import Parameters
from hf_longctx.plan.cost.profiles import profile_of_device
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.model.config import config_fields
from hf_longctx.plan.model.layers import Windows, config_states, config_windows, plain_windows, with_states
from hf_longctx.plan.model.mixers import StateSpec
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.model.towers import TowerSpec
from hf_longctx.runtime.parameters.rounded import rounded_weights

# settings of layers and of configs that hide some earlier tokens from attention
WINDOW_FIELDS = ("sliding_window", "attention_chunk_size")
_STATE_LAYERS = tuple(mixer.layer_type for mixer in MIXERS.values())


def decoder_layers(model: Any) -> tuple[Pieces | None, list[nn.Module]]:
    """The pieces into which the model can be cut (None if it cannot, so that all layers are needed), and its layers in order."""
    try:
        pieces = find_pieces(model)
    except ValueError:
        # layers of an image or audio encoder do not count
        decoder = text_part(base_of(model)).get_decoder()
        lists = [module for module in decoder.children() if isinstance(module, nn.ModuleList)]
        own = {id(layer) for each in lists for layer in each}
        layers = text_layers(model)
        return None, [layer for layer in layers if id(layer) in own] or layers
    if num_text_layers(base_of(model)) < pieces.num_layers:
        return None, text_layers(model)
    return pieces, list(getattr(pieces.decoder, pieces.layers))


def layer_types(config: Any, num_layers: int) -> list[str]:
    """Type of each layer, from a text config's `layer_types`; empty strings if the config does not list these layers."""
    types = getattr(config, "layer_types", None) or ()
    return list(types) if len(types) == num_layers else [""] * num_layers


def layer_window(layer: nn.Module, config: Any, layer_type: str) -> int:
    """The most tokens that the layer's attention sees; 0: all of them."""
    if (
        layer_type.startswith("full")
        or layer_type in (*_STATE_LAYERS, *COMPRESSED_LAYERS)
        or type(layer).__name__ in MODULES.unused_windows
    ):
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
    types = layer_types(config, len(layers))
    windows = [layer_window(layer, config, kind) or None for layer, kind in zip(layers, types, strict=True)]
    times, rest = divmod(num_text_layers(base_of(model)), max(1, len(windows)))
    # a rest means that the decoder is not a plain chain of its layers
    return () if rest else plain_windows([window for window in windows for _ in range(times)])


# largest share of parameters by which a model and its config may differ, since the config's count leaves out norms and biases
_AGREES = 0.05
# parts of the names of weights that adapters add, and of routed experts
_ADDED = ("lora_", "modules_to_save")
_EXPERTS = ".experts."
# parts of the names of weights before the layers of towers
_EMBEDDINGS = ("embed", "patch_conv")
_QK_NORMS = (".q_norm", ".q_layernorm", ".qk_norm")


def model_spec(model: PreTrainedModel, is_autocast: bool = False) -> ModelSpec:
    """The shapes of `model` for the planner. is_autocast: whether attention runs in bf16 for any dtype of the weights."""
    element = hidden_dtype(model).itemsize
    spec = config_spec(base_of(model).config, element)
    if head_kind(model) != "next_token":
        spec = replace(spec, num_labels=num_outputs(base_of(model)), tied_embeddings=False)
    if first_position(model):
        # the model's embeddings may have been made with another padding token than the config's
        spec = replace(spec, max_positions=max_positions(model))
    return replace(
        spec,
        idle_parameters=spec.idle_parameters + _uncounted_parameters(model, spec),
        bytes_sent_per_element=min(2, element) if is_autocast else 0,
        qk_norms=any(name.endswith(_QK_NORMS) for layer in text_layers(model) for name, _ in layer.named_modules()),
        can_keep_qkv=has_plain_projections(model),
        cuts_heads=cuts_heads(model),
        tiles_mlps=tiles_mlps(model),
        tiles_norms=tiles_norms(model),
        tiles_final_norm=final_norm(model) is not None,
        adapters=adapter_spec(model, is_autocast),
        packed=packed_spec(model),
        capped_bytes=_capped_bytes(model, spec),
        windows=with_states(layer_windows(model), spec.states),
        frozen_parameters=frozen_parameters(model),
        **_fp32_sizes(model),
        **_rounded_sizes(model, spec),
        tower_parameters=_tower_elements(model),
    )


def _fp32_sizes(model: PreTrainedModel) -> dict[str, Any]:
    """Fields of a spec for weights that the class keeps in fp32; means over the loaded layers if this rank loaded one stage."""
    if hidden_dtype(model).itemsize >= 4:
        return {}
    layers = [layer for layer in text_layers(model) if any(True for _ in layer.parameters())]
    packed = {id(weight) for layer in packed_layers(model).values() for weight in layer.parameters()}
    named = [(name, weight) for layer in layers for name, weight in layer.named_parameters() if id(weight) not in packed]
    weights = [(name, weight) for name, weight in named if weight.dtype == torch.float32]
    count = sum(weight.numel() for name, weight in weights if not any(word in name for word in _ADDED))
    head = head_of(model)
    own_head = getattr(head, "weight", None)
    return {
        "fp32_parameters": count // max(1, len(layers)),
        "fp32_head": own_head is not None and own_head.dtype == torch.float32,
    }


def _rounded_sizes(model: PreTrainedModel, spec: ModelSpec) -> dict[str, Any]:
    """Fields of `spec` for weights that are gathered in bf16; means over the loaded layers if this rank loaded one stage."""
    rounded = rounded_weights(model)
    if not rounded:
        return {}
    _, layers = decoder_layers(model)
    layers = [layer for layer in layers if any(True for _ in layer.parameters())]
    ids = {id(weight): _EXPERTS in name for name, weight in rounded.items() if not any(word in name for word in _ADDED)}
    counts = {True: 0, False: 0}
    for layer in layers:
        for weight in layer.parameters():
            if (is_expert := ids.get(id(weight))) is not None:
                counts[is_expert] += weight.numel()
    own = spec.layer_weights - spec.experts.parameters
    head = head_of(model)
    return {
        "rounded_parameters": min(own, counts[False] // max(1, len(layers))),
        "experts": replace(spec.experts, are_rounded=counts[True] > 0),
        "rounds_head": id(getattr(head, "weight", None)) in ids,
    }


def frozen_parameters(model: PreTrainedModel, has_stages: bool = False) -> int:
    """Frozen parameters of a layer if others are trained: the mean over the layers that this rank loaded.

    has_stages: the layer with the fewest instead, since with the mean a stage whose layers are all trained would count too few
    gradients and states. Zero under adapters, where all weights of the layers count as frozen.
    """
    layers = [layer for layer in text_layers(model) if any(True for _ in layer.parameters())]
    if is_adapted(model) or not layers:
        return 0
    counts = [sum(weight.numel() for weight in layer.parameters() if not weight.requires_grad) for layer in layers]
    return min(counts) if has_stages else sum(counts) // len(layers)


def _capped_bytes(model: PreTrainedModel, spec: ModelSpec) -> int:
    """Bytes of one logit that the model's cap keeps; by the config alone if the model's change to its logits is unknown."""
    try:
        change = logit_change(model)
    except ValueError:
        return spec.capped_bytes
    wide = spec.bytes_per_element if change.dtype is None else change.dtype.itemsize
    return wide if change.is_cap else 0


def config_spec(config: PretrainedConfig, bytes_per_element: int = 4) -> ModelSpec:
    """The shapes of a model from its loaded config; `ModelSpec.from_config` reads the same from its file."""
    spec, tower = ModelSpec.from_config(_fields(config), bytes_per_element), TowerSpec.from_config(config.to_dict())
    return replace(spec, tower=tower, tower_parameters=tower.num_parameters)


def windows_of(config: PretrainedConfig) -> Windows:
    """The windows of a model's layers, read from its config alone, for use without the model."""
    return config_windows(config_fields(_fields(config)), config.get_text_config().num_hidden_layers)


def states_of(config: PretrainedConfig) -> StateSpec:
    """Layers with a state along the sequence, read from a config."""
    return config_states(config_fields(_fields(config)), config.get_text_config().num_hidden_layers)


def _uncounted_parameters(model: PreTrainedModel, spec: ModelSpec) -> int:
    """Parameters per layer that `model` has and `spec` does not count; negative if `spec` counts too many.

    Parameters outside the layers, such as further embeddings, are spread over the layers. Zero for a model that agrees with its
    config up to norms and biases, and for a model that this rank loaded as one stage only.
    """
    if hasattr(model, RANGES):
        return 0
    held = sum(count for name, count in own_elements(model).items() if not any(word in name for word in _ADDED))
    held -= _tower_elements(model)
    missing = held - spec.num_parameters
    return round(missing / spec.num_layers) if abs(missing) > _AGREES * spec.num_parameters else 0


def _tower_elements(model: PreTrainedModel) -> int:
    """Parameters of a multimodal model's towers; zero for a model that this rank loaded as one stage only."""
    towers = {id(parameter) for parameter in tower_parameters(model)}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in towers and "lora_" not in name}
    return 0 if hasattr(model, RANGES) else sum(count for name, count in own_elements(model).items() if name in names)


def trained_tower(model: PreTrainedModel, spec: TowerSpec) -> TowerSpec:
    """Returns the tower with what is trained of it, by steps with images; `model_spec` counts it as frozen."""
    trained = sum(weight.numel() for weight in tower_parameters(model) if weight.requires_grad)
    return replace(spec, trained_parameters=trained, graph_layers=_graph_layers(model, spec))


def _graph_layers(model: PreTrainedModel, spec: TowerSpec) -> int:
    """Number of layers of a tower from the first trained one on; all of them if their embeddings are trained."""
    wrapper = wrapper_of(model)
    if wrapper is None:
        return 0
    for name in tower_names(wrapper):
        tower = wrapper.get_submodule(name)
        lists = (module for module in tower.modules() if isinstance(module, nn.ModuleList) and len(module) == spec.num_layers)
        if (layers := next(lists, None)) is None:
            continue
        before = [weight for path, weight in tower.named_parameters() if any(word in path for word in _EMBEDDINGS)]
        parts: list[Iterable[nn.Parameter]] = [before, *(layer.parameters() for layer in layers)]
        first = next((place for place, part in enumerate(parts) if any(each.requires_grad for each in part)), len(parts))
        return spec.num_layers - max(0, first - 1)
    return 0


def _fields(config: PretrainedConfig) -> dict[str, Any]:
    """The fields of the config of a model's decoder, with those that its class renames or computes in a property."""
    text = config.get_text_config()
    mapped = {name: getattr(text, name, None) for name in (*text.attribute_map, "num_hidden_layers")}
    return {**text.to_dict(), **{name: value for name, value in mapped.items() if value is not None}}


def cluster_spec(device: torch.device, num_ranks: int, ranks_per_node: int) -> ClusterSpec:
    """The ranks of this run, with this rank's memory, and rates of the shipped profile for its device or of a generic one."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        profile = profile_of_device(properties.name, properties.total_memory)
        hardware = replace(profile.spec if profile else GENERIC_GPU, device_bytes=properties.total_memory)
    else:
        machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        hardware = replace(GENERIC_CPU, device_bytes=machine_bytes // ranks_per_node)
    return ClusterSpec(num_ranks=num_ranks, ranks_per_node=ranks_per_node, hardware=hardware)


def usable_device_bytes(cluster: ClusterSpec) -> int:
    """Bytes of a rank's device that the planner's formulas may use."""
    return int(cluster.hardware.device_bytes * USABLE_SHARE)


def tokens_that_fit(spec: ModelSpec, cluster: ClusterSpec, parameters: Parameters = "replicated", shard_ranks: int = 1) -> int:
    """Number of tokens for which one rank can keep everything beside the model's states; 0 if not even one fits."""
    byte_model = ByteModel(spec)
    return byte_model.kept_tokens(usable_device_bytes(cluster) - byte_model.states(parameters, shard_ranks))
