"""Counts bytes saved for backward, per token and layer: plain Hugging Face, checkpointed, and under each policy.

With d hidden, a all query heads, k all KV heads, f intermediate, h heads, e bytes per element and l = max(4, e) of an LSE, a
decoder layer of plain Hugging Face around fused attention saves

    2 (4 + 2 e) d + 8    two norms: fp32 input, product before the weight, output; fp32 root mean square
    2 e a + 2 e k + l h  rotated queries and keys, values, output, LSE
    4 e f                gate, its activation, up, product

which is 16 d + 4 a + 4 k + 8 f + 4 h + 8 at two bytes an element. Norms of queries and keys add (4 + e) (a + k) + 4 (h + h_kv),
experts e times the elements that routing keeps. Where heads of values have another size than those of keys, outputs have that
size too; tensors that low-rank projections keep come on top.
"""

from __future__ import annotations

from hf_longctx.plan.core.model_spec import ModelSpec
from hf_longctx.plan.core.types import TENSOR_CLASSES, ActivationPolicy, LayerPolicy, TensorClass


def class_bytes(model: ModelSpec, tensor_class: TensorClass) -> int:
    """Bytes of one class per token and layer, as the activation engine holds it.

    Under autocast the outputs of matrices have fewer bytes per element than the hidden states between layers. Copies of weights
    that a kept MLP then holds are not counted.
    """
    e = model.bytes_per_element
    if tensor_class == "layer_input":
        return e * model.hidden_size
    if tensor_class == "mlp":
        inner = (4 if model.gated_mlp else 2) * model.intermediate_size
        # inner tensors, and the input of the first matrices
        return e * (model.hidden_size + inner + model.routed_elements)
    s = model.bytes_sent_per_element or e
    if tensor_class == "qkv":
        return s * (model.query_size + model.kv_size)
    if tensor_class == "attention_output":
        return s * model.output_size + max(4, s) * model.num_heads
    raise KeyError(tensor_class)


def layer_class_bytes(model: ModelSpec) -> int:
    """Bytes of all classes per token and layer, as the activation engine holds them."""
    return sum(class_bytes(model, name) for name in TENSOR_CLASSES)


def plain_layer_bytes(model: ModelSpec) -> int:
    """Bytes per token that one layer saves for backward when nothing is recomputed."""
    e, d, h = model.bytes_per_element, model.hidden_size, model.num_heads
    inner = (4 if model.gated_mlp else 2) * model.intermediate_size
    norms = 2 * (4 + 2 * e) * d + 8
    num_normed = h + model.num_kv_heads
    qk_norms = ((4 + e) * model.head_dim + 4) * num_normed if model.qk_norms else 0
    heads = e * (model.query_size + model.kv_size + model.output_size) + max(4, e) * h
    mlp = e * (inner + model.routed_elements)
    return norms + qk_norms + heads + mlp + model.latent_saved_bytes + model.adapters.layer_saved_bytes


def saved_token_bytes(model: ModelSpec) -> int:
    """Bytes per token that all layers and the loss save for backward when nothing is recomputed.

    The loss in one piece keeps logits, their fp32 copy, its log-probabilities and a gradient of these.
    """
    e = model.bytes_per_element
    return model.num_layers * plain_layer_bytes(model) + model.vocab_size * (e + 3 * max(4, e))


def held_bytes(model: ModelSpec, policy: ActivationPolicy, num_layers: int, num_tokens: int) -> tuple[int, int]:
    """(device, host) bytes that wait for backward after one forward of `num_tokens` tokens on a rank under `policy`."""
    layers = [*policy.layers, *[LayerPolicy()] * (num_layers - len(policy.layers))]
    on_device = on_host = 0
    for layer in layers:
        if layer.keeps_everything:
            on_device += plain_layer_bytes(model) * num_tokens
            continue
        for name in TENSOR_CLASSES:
            token_bytes = class_bytes(model, name)
            host_start, host_stop = layer.share(name).cuts(num_tokens)
            on_host += (host_stop - host_start) * token_bytes
            on_device += (num_tokens - host_stop) * token_bytes
    return on_device, on_host
