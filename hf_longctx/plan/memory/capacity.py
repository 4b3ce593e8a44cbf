"""Finds the most tokens of one rank, and the longest document, that fit in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from hf_longctx.plan.core.types import TENSOR_CLASSES, ActivationPolicy, LayerPolicy, Parameters, TensorShare, small_tile
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.layer import Load
from hf_longctx.plan.memory.saved_tensors import class_bytes
from hf_longctx.plan.model.model_spec import ModelSpec


def least_memory_policy(
    model: ModelSpec,
    num_tokens: int,
    host_bytes: int,
    tile_tokens: int,
    num_layers: int = 0,
    keeps_attention: bool = False,
    reruns: bool = False,
) -> ActivationPolicy:
    """Makes the policy with the least device memory for a chunk with `num_tokens` tokens on a rank: it keeps layer inputs only.

    Tiles are small (`small_tile`). As many inputs as fit go to the host, first those of the first layers, whose backward runs
    last. keeps_attention: keep and offload attention outputs with the inputs, so that attention is not run again. reruns: only
    every second layer keeps its input, and runs once more to make the input of the next one.
    """
    num_layers = num_layers or model.num_layers
    input_bytes = class_bytes(model, "layer_input") * num_tokens
    if keeps_attention:
        input_bytes += class_bytes(model, "attention_output") * num_tokens
    places = (layer // 2 if reruns else layer for layer in range(num_layers))
    shares = (min(1.0, max(0.0, host_bytes / input_bytes - place)) if input_bytes else 0.0 for place in places)
    # shares are rounded down to whole tokens, so that they never exceed the limit
    parts = [int(share * num_tokens) / max(1, num_tokens) for share in shares]
    return ActivationPolicy(0, 0, _least_memory_layers(tuple(parts), keeps_attention, reruns), small_tile(tile_tokens))


# most chunks have all inputs on the device or all on the host, so that their policies are equal
@lru_cache(maxsize=256)
def _least_memory_layers(host_parts: tuple[float, ...], keeps_attention: bool, reruns: bool) -> tuple[LayerPolicy, ...]:
    """Makes the layers of a `least_memory_policy` with these shares of their inputs on the host."""
    again = [TensorShare(name, recompute=1.0) for name in TENSOR_CLASSES]
    # equal layers share one object, which is counted once
    known = {
        part: LayerPolicy(
            (
                TensorShare("layer_input", host=part, device=1 - part),
                TensorShare("attention_output", host=part, device=1 - part) if keeps_attention else again[1],
                *again[2:],
            )
        )
        for part in set(host_parts)
    }
    layers = [known[part] for part in host_parts]
    if reruns:
        layers[1::2] = [LayerPolicy(tuple(again))] * (len(layers) // 2)
    return tuple(layers)


def in_pieces(policy: ActivationPolicy, head_pieces: int) -> ActivationPolicy:
    """Returns the policy of a lean chunk with attention in this many pieces of heads in every layer."""
    if head_pieces == 1:
        return policy
    # equal layers share one object
    known = {id(layer): replace(layer, head_pieces=head_pieces) for layer in policy.layers}
    return replace(policy, layers=tuple(known[id(layer)] for layer in policy.layers))


def may_rerun(model: ModelSpec, parameters: Parameters) -> bool:
    """Whether layers of a run without stages may run once more to make the next layer's input: if that needs no messages."""
    is_plain = model.states.is_empty and model.index.is_empty and not model.experts.num_experts
    return is_plain and parameters == "replicated" and model.num_layers > 1


# a forecast uses the same few models and devices some forty times
@lru_cache(maxsize=256)
def most_tokens(
    model: ModelSpec,
    device_bytes: int,
    host_bytes: int,
    tile_tokens: int,
    reruns: bool = False,
    head_pieces: int = 1,
    **load: Any,
) -> int:
    """Returns the longest document that one rank can train with `least_memory_policy`; 0 if not even a token fits.

    device_bytes: bytes of the device besides weights, gradients and optimizer states. reruns: layers may run once more to make
    the next layer's input, see `may_rerun`. head_pieces: most pieces of heads in which attention may run. load: fields of `Load`
    such as is_shared, with which the result is a rank's share of the document.
    """

    def policies(num_tokens: int) -> Iterator[ActivationPolicy]:
        # the first that fits is enough, and the leanest come first; copies from the host take device memory too, so with few
        # layers offloading may not pay
        for again in dict.fromkeys((reruns, False)):
            for limit in dict.fromkeys((host_bytes, 0)):
                lean = least_memory_policy(model, num_tokens, limit, tile_tokens, reruns=again)
                yield from (in_pieces(lean, pieces) for pieces in dict.fromkeys((head_pieces, 1)))

    like = replace(Load.document(1, model.num_layers), **load)
    return ByteModel(model).longest(device_bytes, host_bytes, policies, like)
