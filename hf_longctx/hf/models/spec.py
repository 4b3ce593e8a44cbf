"""Translates a loaded model or its config to the planner's `ModelSpec`, and the machine to a `ClusterSpec`."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from hf_longctx.hf.models.adapters import adapter_spec, base_of, hidden_dtype
from hf_longctx.hf.models.cutting import RANGES
from hf_longctx.hf.models.heads.kinds import head_kind, num_outputs
from hf_longctx.hf.models.layers import cuts_heads, final_norm, has_plain_projections
from hf_longctx.hf.models.older.positions import first_position, has_limit, max_positions
from hf_longctx.hf.models.quantised import own_elements, packed_spec
from hf_longctx.hf.models.windows import layer_windows
from hf_longctx.hf.models.wrapped.text import text_part, tower_parameters
from hf_longctx.plan.core.cluster_spec import GENERIC_CPU, GENERIC_GPU, USABLE_SHARE, ClusterSpec
from hf_longctx.plan.core.layer_kinds import Windows, config_states, config_windows, with_states
from hf_longctx.plan.core.mixers.state_spec import StateSpec
from hf_longctx.plan.core.model_spec import ModelSpec
from hf_longctx.plan.core.types import Parameters
from hf_longctx.plan.memory.byte_model import ByteModel

# config fields that may hold the MLP's width, and nested configs that may hold the sizes of layers
_WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "moe_intermediate_size")
_NESTED = ("attn_config", "ffn_config")
# largest share of parameters by which a model and its config may differ, since the config's count leaves out norms and biases
_AGREES = 0.05
_QK_NORMS = (".q_norm", ".q_layernorm", ".qk_norm")


def model_spec(model: PreTrainedModel, is_autocast: bool = False) -> ModelSpec:
    """The shapes of `model` for the planner. is_autocast: whether attention runs in bf16, whatever the dtype of the weights."""
    element = hidden_dtype(model).itemsize
    spec = ModelSpec.from_config(_fields(model), bytes_per_element=element)
    if head_kind(model) != "next_token":
        spec = replace(spec, num_labels=num_outputs(base_of(model)), tied_embeddings=False)
    return replace(
        spec,
        idle_parameters=spec.idle_parameters + _uncounted_parameters(model, spec),
        bytes_sent_per_element=min(2, element) if is_autocast else 0,
        qk_norms=any(name.endswith(_QK_NORMS) for name, _ in text_part(model).named_modules()),
        can_keep_qkv=has_plain_projections(model),
        cuts_heads=cuts_heads(model),
        tiles_final_norm=final_norm(model) is not None,
        adapters=adapter_spec(model),
        packed=packed_spec(model),
        windows=with_states(layer_windows(model), spec.states),
        tower_parameters=_tower_elements(model),
    )


def windows_of(config: PretrainedConfig) -> Windows:
    """The windows of a model's layers, read from its config alone, for use without the model."""
    return config_windows(_fields(config), config.get_text_config().num_hidden_layers)


def states_of(config: PretrainedConfig) -> StateSpec:
    """The layers with a state along the sequence, read from a config."""
    return config_states(_fields(config), config.get_text_config().num_hidden_layers)


def _uncounted_parameters(model: PreTrainedModel, spec: ModelSpec) -> int:
    """Parameters per layer that `model` has and `spec` does not count; negative if `spec` counts too many.

    Parameters outside the layers, such as further embeddings, are spread over the layers. Zero for a model that agrees with its
    config up to norms and biases, and for a model that this rank loaded as one stage only.
    """
    if hasattr(model, RANGES):
        return 0
    added = ("lora_", "modules_to_save")
    held = sum(count for name, count in own_elements(model).items() if not any(word in name for word in added))
    held -= _tower_elements(model)
    missing = held - spec.num_parameters
    return round(missing / spec.num_layers) if abs(missing) > _AGREES * spec.num_parameters else 0


def _tower_elements(model: PreTrainedModel) -> int:
    """Parameters of a multimodal model's towers; zero for a model that this rank loaded as one stage only."""
    towers = {id(parameter) for parameter in tower_parameters(model)}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in towers and "lora_" not in name}
    return 0 if hasattr(model, RANGES) else sum(count for name, count in own_elements(model).items() if name in names)


def _fields(owner: PreTrainedModel | PretrainedConfig) -> dict[str, Any]:
    """The fields of a model's config, or of a config, under the names that most classes use."""
    config = owner if isinstance(owner, PretrainedConfig) else owner.config
    text = config.get_text_config()
    fields = text.to_dict()
    nested = {name: value for part in _NESTED for name, value in (fields.get(part) or {}).items()}
    mapped = {name: getattr(text, name, None) for name in text.attribute_map}
    fields = {**nested, **fields, **{name: value for name, value in mapped.items() if value is not None}}
    widths = [fields[name] for name in _WIDTHS if fields.get(name) is not None]
    # transformers' default width is four times the hidden size
    width = widths[0] if widths else 4 * fields["hidden_size"]
    if isinstance(experts := fields.get("moe_intermediate_size"), list):
        # Ernie 4.5 VL has experts for text, and others for images
        fields["moe_intermediate_size"] = experts[0]
    # some configs compute this number in a property, which to_dict leaves out
    fields["num_hidden_layers"] = text.num_hidden_layers
    if first_position(owner) or not has_limit(text) or "max_seq_len" in fields:
        fields["max_position_embeddings"] = max_positions(owner)
    return {**fields, **_most_kv(text), "intermediate_size": max(width) if isinstance(width, list) else width}


def _most_kv(text: Any) -> dict[str, int]:
    """KV heads and head size of the layer with the most keys and values, if layers differ or the config states too few heads.

    MiMo has twice as many KV heads in layers with a window. JetMoe copies keys and values for every expert of a token.
    """
    if text.model_type == "jetmoe":
        return {"num_key_value_heads": text.num_attention_heads}
    if text.model_type == "mimo_v2_flash" and "sliding_attention" in text.layer_types:
        return {"num_key_value_heads": 2 * text.num_key_value_heads}
    if "head_dim" not in (getattr(text, "per_layer_attributes", None) or ()):
        return {}
    layers = [text.per_layer_config[number] for number in range(text.num_hidden_layers)]
    sizes = [(layer.num_key_value_heads, layer.head_dim) for layer in layers]
    return dict(zip(("num_key_value_heads", "head_dim"), max(sizes, key=math.prod), strict=True))


def cluster_spec(device: torch.device, num_ranks: int, ranks_per_node: int) -> ClusterSpec:
    """The ranks of this run, with a generic device of this rank's kind that has the real device's memory."""
    if device.type == "cuda":
        hardware = replace(GENERIC_GPU, device_bytes=torch.cuda.get_device_properties(device).total_memory)
    else:
        machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        hardware = replace(GENERIC_CPU, device_bytes=machine_bytes // ranks_per_node)
    return ClusterSpec(num_ranks=num_ranks, ranks_per_node=ranks_per_node, hardware=hardware)


def usable_device_bytes(cluster: ClusterSpec) -> int:
    """Bytes of a rank's device that the planner's formulas may use."""
    return int(cluster.hardware.device_bytes * USABLE_SHARE)


def tokens_that_fit(spec: ModelSpec, cluster: ClusterSpec, parameters: Parameters = "replicated", shard_ranks: int = 1) -> int:
    """Number of tokens that one rank can keep everything of, beside the model's states; 0 if not even one fits."""
    byte_model = ByteModel(spec)
    return byte_model.kept_tokens(usable_device_bytes(cluster) - byte_model.states(parameters, shard_ranks))
