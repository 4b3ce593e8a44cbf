"""Builds the models that calibration measures: few layers, random weights, the shapes of a named model or a config.json.

Called by `calibrate`, and by benchmarks that need a model of a given shape.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen3Config

from hf_longctx.hf.models.attention import patch_model
from hf_longctx.hf.rules.models import model_problems
from hf_longctx.plan.cost.catalog import named_model, no_model
from hf_longctx.plan.model.model_spec import ModelSpec

# most layers that are measured; a model with no more of them is measured whole
FEW_LAYERS = 6


def model_config(name: str) -> PretrainedConfig:
    """Config of a catalogue name (a Llama with its shapes), of a config.json, or of a folder with one; "" is a small Llama.

    Raises ValueError for anything else, and for a config that transformers does not know.
    """
    path = Path(name) / "config.json" if name and Path(name).is_dir() else Path(name)
    if name and path.is_file():
        try:
            return AutoConfig.for_model(**json.loads(path.read_text()))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(
                f"{path} is not the config.json of a causal language model ({error}); give one of a class that "
                f"docs/models.md calls exact"
            ) from None
    if not name:
        return shaped_config(_SMALL)
    try:
        spec = named_model(name)
    except ValueError:
        raise ValueError(no_model(name)) from None
    if not spec.gated_mlp or spec.learned_positions or not spec.states.is_empty or spec.norms_results:
        raise ValueError(
            f"model {name!r} does not have the layers of a Llama, so it cannot be built from its shapes; give its config.json"
        )
    return shaped_config(spec)


# default model: a chunk takes a few milliseconds on one core, in enough layers to tell the cost of attention from matrices
_SMALL = ModelSpec(4, 256, 704, 8, 4, 32, vocab_size=1024, max_positions=8192)


def shaped_config(spec: ModelSpec) -> PretrainedConfig:
    """Config of a Llama with the shapes of `spec`, or of a Qwen3 (with its windows) if queries and keys have norms."""
    sizes = {window for window in spec.windows if window is not None}
    if len(sizes) > spec.qk_norms:
        raise ValueError(f"layers with windows of {sorted(sizes)} cannot be built from these shapes; give a config.json instead")
    config_class = Qwen3Config if spec.qk_norms else LlamaConfig
    windows: dict[str, Any] = {}
    if sizes:
        kinds = ["full_attention" if window is None else "sliding_attention" for window in spec.windows]
        windows = {"use_sliding_window": True, "sliding_window": sizes.pop(), "layer_types": kinds}
    return config_class(
        **windows,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_positions,
        tie_word_embeddings=spec.tied_embeddings,
    )


def build_model(config: PretrainedConfig, device: torch.device, precision: str) -> PreTrainedModel:
    """Builds a model with random weights, patched to run plans.

    Raises ValueError for a model whose attention would be silently wrong.
    """
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    if getattr(config, "output_router_logits", False):
        # the experts' balance loss is not part of a chunk's cost
        config.output_router_logits = False
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    if problems := model_problems(model):
        raise ValueError("; ".join(problems))
    patch_model(model)
    if precision == "autocast":
        plain: Any = model
        plain.forward = torch.autocast(device.type, dtype=torch.bfloat16)(plain.forward)
    return model.train()


def few_layers(config: PretrainedConfig) -> int:
    """Number of layers to measure: at most `FEW_LAYERS`, with the model's share of layers with attention where one has it."""
    num_layers, types = config.num_hidden_layers, list(getattr(config, "layer_types", None) or ())
    counts = range(min(num_layers, FEW_LAYERS), 1, -1)
    alike = (
        n
        for n in counts
        if len(types) == num_layers and all(types[:n].count(kind) * num_layers == types.count(kind) * n for kind in set(types))
    )
    return next(alike, counts.start)


def set_layers(config: PretrainedConfig, num_layers: int) -> None:
    """Shortens `config`, in place, to its first `num_layers` decoder layers."""
    config.num_hidden_layers = num_layers
    field = config.attribute_map.get("layer_types", "layer_types")
    # some configs, such as Bamba's, make the types from the number of layers
    if not isinstance(getattr(type(config), field, None), property) and getattr(config, field, None) is not None:
        setattr(config, field, getattr(config, field)[:num_layers])
