"""Small models of a checkpoint's shape, for calibration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen3Config

from hf_longctx.hf.models.attention import patch_model
from hf_longctx.hf.start.model_checks import model_problems
from hf_longctx.plan.core.model_spec import ModelSpec
from hf_longctx.plan.cost.catalog import model_names, named_model

# a model with no more layers than this is measured whole
FEW_LAYERS = 6


def model_config(name: str) -> PretrainedConfig:
    """The config of a name of the catalogue (a Llama of its shapes), of a config.json or a folder with one.

    Raises ValueError for anything else, or a config that transformers does not know.
    """
    path = Path(name) / "config.json" if name and Path(name).is_dir() else Path(name)
    if name and path.is_file():
        try:
            return AutoConfig.for_model(**json.loads(path.read_text()))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}: this is no config.json of a causal language model: {error}") from None
    if not name:
        return shaped_config(_SMALL)
    try:
        spec = named_model(name)
    except ValueError:
        raise ValueError(
            f"model {name!r} is neither a config.json, nor a folder with one, nor one of {', '.join(model_names())}"
        ) from None
    if not spec.gated_mlp or spec.learned_positions:
        raise ValueError(f"model {name!r} has no Llama's layers, and its own cannot be built here; give a config.json instead")
    return shaped_config(spec)


# a few milliseconds a chunk on one core, and enough layers for attention and matrices to be told apart
_SMALL = ModelSpec(4, 256, 704, 8, 4, 32, vocab_size=1024, max_positions=8192)


def shaped_config(spec: ModelSpec) -> PretrainedConfig:
    """A Llama with the shapes of `spec`; a Qwen3 if queries and keys have norms, and with its windows then."""
    sizes = {window for window in spec.windows if window is not None}
    if len(sizes) > spec.qk_norms:
        raise ValueError(f"no layers with windows of {sorted(sizes)} can be built for these shapes; give a config.json instead")
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
    """A model of random weights that runs plans. Raises ValueError for one whose attention would be silently wrong."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    if getattr(config, "output_router_logits", False):
        # a balance of experts is no part of what a chunk costs
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


def set_layers(config: PretrainedConfig, num_layers: int) -> None:
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:num_layers]
