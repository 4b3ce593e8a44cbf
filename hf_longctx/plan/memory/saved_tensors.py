"""Counts bytes saved for backward, per token and layer: plain Hugging Face, checkpointed, and under each policy.

With d hidden, a all query heads, k all KV heads, f intermediate, h heads, e bytes per element and l = max(4, e) of an LSE, a
decoder layer of plain Hugging Face around fused attention saves

    2 (4 + 2 e) d + 8    two norms: fp32 input, product before the weight, output; fp32 root mean square
    2 e a + 2 e k + l h  rotated queries and keys, values, output, LSE
    4 e f                gate, its activation, up, product

which is 16 d + 4 a + 4 k + 8 f + 4 h + 8 at two bytes an element. Norms of queries and keys add (4 + e) (a + k) + 4 (h + h_kv),
experts e times the elements that routing keeps. Where heads of values have another size than those of keys, outputs have that
size too; tensors that low-rank projections keep come on top. Wide norms keep the product in fp32, 8 + e in place of 4 + 2 e and 8
in place of 4 + e; a gate on the output adds 2 e a. A layer with a state has its mixer's tensors in place of heads (`StateSpec`).
"""

from __future__ import annotations

from hf_longctx.plan.core.model_spec import ModelSpec
from hf_longctx.plan.core.types import TENSOR_CLASSES, ActivationPolicy, LayerPolicy, TensorClass


def class_bytes(model: ModelSpec, tensor_class: TensorClass, has_state: bool = False, num_tokens: int | None = None) -> int:
    """Bytes of one class per token and layer, as the activation engine holds it.

    has_state: the layer has one, and no attention. num_tokens: tokens of the chunk on the rank, if few (`StateSpec.saved_bytes`).
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
        # only a layer that keeps everything keeps what its mixer saves
        return model.states.saved_bytes(e, num_tokens) if has_state else s * (model.query_size + model.kv_size)
    if tensor_class == "attention_output":
        return 0 if has_state else s * model.output_size + max(4, s) * model.num_heads
    raise KeyError(tensor_class)


def layer_class_bytes(model: ModelSpec) -> int:
    """Bytes of all classes per token and layer, as the activation engine holds them; the mean over layers."""
    heads, states = (sum(class_bytes(model, name, has_state) for name in TENSOR_CLASSES) for has_state in (False, True))
    return heads + round(model.states.share * (states - heads))


def norm_bytes(model: ModelSpec) -> int:
    """Bytes per token that one norm of hidden states saves, its output included."""
    e, d = model.bytes_per_element, model.hidden_size
    return (8 + e if model.has_wide_norms else 4 + 2 * e) * d + 4


def head_norm_bytes(model: ModelSpec) -> int:
    """Bytes per token that norms of queries and keys save."""
    width = 8 if model.has_wide_norms else 4 + model.bytes_per_element
    return (width * model.head_dim + 4) * (model.num_heads + model.num_kv_heads) if model.qk_norms else 0


def gate_bytes(model: ModelSpec) -> int:
    """Bytes per token that a gate on attention's output saves: the gate, the product, and in fp32 queries before their norm."""
    e = model.bytes_per_element
    return (2 * e + (4 if e == 4 else 0)) * model.output_size if model.gates_output else 0


def outer_bytes(model: ModelSpec) -> int:
    """Bytes per token that one layer saves for backward outside attention or mixer: of two norms, MLP and adapters."""
    inner = (4 if model.gated_mlp else 2) * model.intermediate_size
    mlp = model.bytes_per_element * (inner + model.routed_elements)
    return 2 * norm_bytes(model) + mlp + model.adapters.layer_saved_bytes


def plain_layer_bytes(model: ModelSpec) -> int:
    """Bytes per token that one layer with attention saves for backward when nothing is recomputed."""
    e, h = model.bytes_per_element, model.num_heads
    heads = e * (model.query_size + model.kv_size + model.output_size) + max(4, e) * h
    return outer_bytes(model) + head_norm_bytes(model) + heads + gate_bytes(model) + model.latent_saved_bytes


def state_layer_bytes(model: ModelSpec, num_tokens: int | None = None) -> int:
    """Bytes per token that one layer with a state saves when nothing is recomputed. num_tokens: see `class_bytes`."""
    return outer_bytes(model) + model.states.saved_bytes(model.bytes_per_element, num_tokens)


def saved_token_bytes(model: ModelSpec) -> int:
    """Bytes per token that all layers and the loss save for backward when nothing is recomputed.

    The loss in one piece keeps logits, their fp32 copy, its log-probabilities and a gradient of these.
    """
    e, num_states = model.bytes_per_element, sum(model.states.layers)
    layers = (model.num_layers - num_states) * plain_layer_bytes(model) + num_states * state_layer_bytes(model)
    return layers + model.head_outputs * (e + 3 * max(4, e))


def held_bytes(
    model: ModelSpec, policy: ActivationPolicy, num_layers: int, num_tokens: int, first_layer: int = 0, counts_kept: bool = True
) -> tuple[int, int]:
    """(device, host) bytes that wait for backward after one forward of `num_tokens` tokens on a rank under `policy`.

    num_layers, first_layer: layers that run. counts_kept: whether layers that keep everything count, which the activation engine
    does not see.
    """
    layers = [*policy.layers, *[LayerPolicy()] * (num_layers - len(policy.layers))]
    on_device = on_host = 0
    states = model.states.layers[first_layer:][:num_layers] or (False,) * num_layers
    for layer, has_state in zip(layers, states, strict=True):
        if layer.keeps_everything:
            kept = state_layer_bytes(model, num_tokens) if has_state else plain_layer_bytes(model)
            on_device += kept * num_tokens * counts_kept
            continue
        for name in TENSOR_CLASSES:
            token_bytes = class_bytes(model, name, has_state, num_tokens)
            host_start, host_stop = layer.share(name).cuts(num_tokens)
            on_host += (host_stop - host_start) * token_bytes
            on_device += (num_tokens - host_stop) * token_bytes
    return on_device, on_host
