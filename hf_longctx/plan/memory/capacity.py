"""Finds the most tokens of one rank, and the longest document, that fit in memory."""

from __future__ import annotations

from dataclasses import replace

from hf_longctx.plan.core.model_spec import ModelSpec
from hf_longctx.plan.core.types import (
    ActivationPolicy,
    LayerPolicy,
    TensorShare,
)
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.layer import Load
from hf_longctx.plan.memory.saved_tensors import class_bytes


def lean_policy(
    model: ModelSpec,
    num_tokens: int,
    host_bytes: int,
    tile_tokens: int,
    num_layers: int = 0,
    keeps_attention: bool = False,
) -> ActivationPolicy:
    """The policy with the least device memory for a chunk with `num_tokens` tokens on a rank: only layer inputs are kept.

    As many inputs as fit go to the host, those of the first layers first, since their backward runs last. keeps_attention:
    attention outputs are kept and offloaded with the inputs, so that attention is not run again.
    """
    num_layers = num_layers or model.num_layers
    input_bytes = class_bytes(model, "layer_input") * num_tokens
    if keeps_attention:
        input_bytes += class_bytes(model, "attention_output") * num_tokens
    shares = (min(1.0, max(0.0, host_bytes / input_bytes - i)) if input_bytes else 0.0 for i in range(num_layers))
    # shares are rounded down to whole tokens, so that they never exceed the limit
    parts = [int(share * num_tokens) / max(1, num_tokens) for share in shares]
    recomputed = TensorShare("attention_output", recompute=1.0)
    # equal layers share one object, which is counted once
    known = {
        part: LayerPolicy(
            (
                TensorShare("layer_input", host=part, device=1 - part),
                TensorShare("attention_output", host=part, device=1 - part) if keeps_attention else recomputed,
                TensorShare("qkv", recompute=1.0),
                TensorShare("mlp", recompute=1.0),
            )
        )
        for part in set(parts)
    }
    layers = [known[part] for part in parts]
    return ActivationPolicy(0, 0, tuple(layers), tile_tokens)


def most_tokens(
    model: ModelSpec,
    device_bytes: int,
    host_bytes: int,
    tile_tokens: int,
    trains_weights: bool = True,
    is_shared: bool = False,
    groups_heads: bool = False,
) -> int:
    """The longest document that one rank can train with `lean_policy`; 0 if not even a token fits.

    device_bytes: bytes of the device that weights, gradients and optimizer states leave free. is_shared: the rank belongs to a
    group, whose exchanges take memory, and the result is its share of the document. groups_heads: see `Load`.
    """

    def policies(num_tokens: int) -> tuple[ActivationPolicy, ...]:
        # copies that come back from the host take device memory too, so with few layers offloading may not pay
        return tuple(lean_policy(model, num_tokens, limit, tile_tokens) for limit in {0, host_bytes})

    like = replace(Load.document(1, model.num_layers, trains_weights), is_shared=is_shared, groups_heads=groups_heads)
    return ByteModel(model).longest(device_bytes, host_bytes, policies, like)
