"""Counts bytes saved for backward, per token and layer: plain Hugging Face, checkpointed, and under each policy.

With d hidden, a all query heads, k all KV heads, f intermediate, h heads, e bytes per element and l = max(4, e) of an LSE, a
decoder layer of plain Hugging Face around fused attention saves

    2 (4 + 2 e) d + 8    two norms: fp32 input, product before the weight, output; fp32 root mean square
    2 e a + 2 e k + l h  rotated queries and keys, values, output, LSE
    4 e f                gate, its activation, up, product

which is 16 d + 4 a + 4 k + 8 f + 4 h + 8 at two bytes per element. Norms of queries and keys add (4 + e) (a + k) + 4 (h + h_kv),
experts e times the elements that routing keeps. If heads of values have another size than those of keys, outputs have that size
too; tensors of low-rank projections come on top. Wide norms keep the product in fp32, 8 + e in place of 4 + 2 e and 8 in place of
4 + e; a gate on the output adds 2 e a. A layer with a state has its mixer's tensors in place of heads or in addition
(`StateSpec`); one that mixes no tokens has neither.

Frozen matrices save no inputs, and frozen norms no product before their weight. Under adapters, which freeze all weights of the
layers, the same layer saves

    2 * 4 d + 8          two norms: fp32 input, fp32 root mean square
    2 s a + 2 s k + l h  as above; s: bytes per element of outputs of matrices, fewer than e under autocast
    3 s f                gate, its activation, up

and what the adapters save (`AdapterSpec`), including every input that one of them reads without a copy.
"""

from __future__ import annotations

from hf_longctx.plan.core.types import TENSOR_CLASSES, ActivationPolicy, LayerPolicy, LayerRange, TensorClass
from hf_longctx.plan.model.layers import ATTENTION, LayerKind
from hf_longctx.plan.model.model_spec import ModelSpec


def class_bytes(model: ModelSpec, tensor_class: TensorClass, kind: LayerKind = ATTENTION, num_tokens: int | None = None) -> int:
    """Returns bytes of one class per token and layer in the activation engine.

    kind: kind of the layer. num_tokens: tokens of the chunk on the rank, if few (`StateSpec.saved_bytes`). Under autocast the
    outputs of matrices have fewer bytes per element than the hidden states between layers. Copies of weights that a kept MLP then
    holds are not counted.
    """
    e, model = model.bytes_per_element, model.of_kind(kind)
    if tensor_class == "layer_input":
        return model.input_bytes
    if tensor_class == "mlp":
        # the input of the first matrices, and inner tensors
        entered = e * model.hidden_size if saves_second_norm(model) else 0
        return entered + inner_bytes(model)
    s = model.bytes_sent_per_element or e
    if tensor_class == "qkv":
        # a mixer's tensors are kept only by a layer that keeps everything
        mixer = _mixer_bytes(model, num_tokens) if kind.has_state else 0
        return mixer + (s * (model.query_size + model.kv_size) if kind.attends else 0)
    if tensor_class == "attention_output":
        return s * model.output_size + max(4, s) * model.num_heads if kind.attends else 0
    raise KeyError(tensor_class)


def layer_class_bytes(model: ModelSpec) -> int:
    """Returns bytes of all classes per token and layer in the activation engine; the mean over layers."""
    return round(sum(share * class_bytes(model, name, kind) for kind, share in model.kind_shares() for name in TENSOR_CLASSES))


def matrix_bytes(model: ModelSpec) -> int:
    """Returns bytes of one output element of a layer's matrix: fewer than of hidden states under autocast with frozen weights.

    Trained matrices count as if there were no autocast; rounded copies of their inputs take less than this adds.
    """
    e = model.bytes_per_element
    return e if model.trains_layers else model.bytes_sent_per_element or e


def saves_first_norm(model: ModelSpec) -> bool:
    """Whether a layer that keeps everything saves the output of the norm before attention."""
    return model.trains_layers or model.adapters.reads_first_norm


def saves_second_norm(model: ModelSpec) -> bool:
    """Whether a layer that keeps everything saves the output of the norm before the MLP."""
    return model.trains_layers or model.adapters.reads_second_norm


def saves_attention(model: ModelSpec) -> bool:
    """Whether the last projection saves attention's output, in addition to what attention saves."""
    return model.trains_layers or model.adapters.reads_attention or model.gates_output


def saves_product(model: ModelSpec) -> bool:
    """Whether an MLP saves its last matrix's input."""
    return model.trains_layers or model.adapters.reads_product


def norm_bytes(model: ModelSpec, saves_output: bool) -> int:
    """Returns bytes per token that one norm of hidden states saves, with or without its output."""
    e, d = model.bytes_per_element, model.hidden_size
    if model.fuses_norms:
        return (2 if saves_output else 1) * e * d
    if model.trains_layers:
        inside = 8 if model.has_wide_norms else 4 + e
    else:
        # the input, in the dtype of hidden states for torch's own operator
        inside = max(4, e)
    return (inside + (e if saves_output else 0)) * d + 4


def inner_bytes(model: ModelSpec) -> int:
    """Returns bytes per token that an MLP saves besides its input: inner tensors, routing, and tensors of its adapters."""
    # a kernel of a gate keeps no activation
    count = (1 if not model.gated_mlp else 2 if model.fuses_gates else 3) + saves_product(model)
    own = matrix_bytes(model) * count * model.whole_size
    # experts that run apart keep outputs of their first matrices
    apart = model.bytes_per_element * (2 if model.gated_mlp else 1) * model.split_size
    return own + apart + model.routed_bytes + model.adapters.mlp_saved_bytes


def scale_bytes(model: ModelSpec) -> int:
    """Returns bytes per token that the scales of one residual save: the residual and what is added to it."""
    e = model.bytes_per_element
    return ((max(4, e) if model.has_wide_hidden else e) + e) * model.hidden_size if model.scales_residuals else 0


def shared_kv_bytes(model: ModelSpec) -> int:
    """Returns bytes per token of keys and values for later layers, with gradients if some read them.

    They come from the last layer of every window that makes its own.
    """
    if not model.hands_kv_on:
        return 0
    sizes = {(window, own.kv_size) for window, own in zip(model.windows, model.heads, strict=True) if own.num_made}
    count = 2 if all(own.num_made for own in model.heads) else 4
    return sum(count * model.bytes_per_element * size for _, size in sizes)


def head_norm_bytes(model: ModelSpec) -> int:
    """Returns bytes per token that norms of queries and keys save."""
    if model.fuses_norms and not model.norms_values:
        heads = model.num_heads + (model.num_kv_heads if model.num_made else 0)
        return matrix_bytes(model) * model.head_dim * heads if model.qk_norms else 0
    width = 8 if model.has_wide_norms else 4 + model.bytes_per_element
    if not model.trains_layers:
        width = max(4, model.bytes_per_element)
    num_kv = model.num_kv_heads if model.num_made else 0
    # values are normalized without a weight, which saves their fp32 input
    values = num_kv * (max(4, model.bytes_per_element) * model.head_dim + 4) if model.norms_values else 0
    return (width * model.head_dim + 4) * (model.num_heads + num_kv) + values if model.qk_norms else 0


def gate_bytes(model: ModelSpec) -> int:
    """Returns bytes per token that a gate on attention's output saves: gate, product, and fp32 queries before their norm."""
    e = model.bytes_per_element
    count = 2 if model.trains_layers or model.adapters.reads_attention else 1
    return (count * e + (4 if e == 4 else 0)) * model.output_size if model.gates_output else 0


def outer_bytes(model: ModelSpec) -> int:
    """Returns bytes per token that a layer saves outside attention or mixer: of two norms and scales, MLP and adapters."""
    norms = norm_bytes(model, saves_first_norm(model)) + norm_bytes(model, saves_second_norm(model))
    return norms + 2 * scale_bytes(model) + inner_bytes(model) + model.adapters.attention_saved_bytes + result_bytes(model)


def result_norm_bytes(model: ModelSpec) -> int:
    """Returns bytes per token that the norm of attention's or the MLP's result saves, in models that have one."""
    return norm_bytes(model, saves_output=False) if model.norms_results else 0


def result_bytes(model: ModelSpec) -> int:
    """Returns bytes per token that a layer saves after attention and MLP: norms of their results, and its own input.

    A gate maps hidden states to the size of the input, an activation and the input multiply the result, and a matrix and a norm
    map it back to hidden states. The input itself is outside the layers.
    """
    if not model.own_input_size:
        return 2 * result_norm_bytes(model)
    e, count = model.bytes_per_element, 3 if model.trains_layers else 1
    entered = e * model.hidden_size if model.trains_layers else 0
    return 3 * result_norm_bytes(model) + entered + count * e * model.own_input_size


def own_input_bytes(model: ModelSpec) -> int:
    """Returns bytes per token of layers' own inputs, outside the layers; if trained, with their norm in fp32 and its product."""
    e = model.bytes_per_element
    return (8 + e if model.trains_layers else e) * model.num_layers * model.own_input_size


def own_input_gradients(model: ModelSpec) -> int:
    """Returns bytes per token of gradients of these inputs in backward, where every layer adds one to the sum of all."""
    return 2 * model.bytes_per_element * model.num_layers * model.own_input_size if model.trains_layers else 0


def attention_bytes(model: ModelSpec) -> int:
    """Returns bytes per token that attention saves for backward if nothing is recomputed."""
    e, h = matrix_bytes(model), model.num_heads
    heads = e * (model.query_size + model.kv_size + model.output_size) + max(4, e) * h
    return head_norm_bytes(model) + heads + gate_bytes(model) + model.latent_saved_bytes + model.choice_bytes


def plain_layer_bytes(model: ModelSpec, kind: LayerKind = ATTENTION, num_tokens: int | None = None) -> int:
    """Returns bytes per token that one layer saves for backward if nothing is recomputed. num_tokens: see `class_bytes`."""
    attention = attention_bytes(model.of_kind(kind)) if kind.attends else 0
    mixer = _mixer_bytes(model, num_tokens) if kind.has_state else 0
    return outer_bytes(model) + attention + mixer


def saved_token_bytes(model: ModelSpec) -> int:
    """Returns bytes per token that all layers and the loss save for backward if nothing is recomputed.

    The loss in one piece keeps logits, their fp32 copy, its log-probabilities and a gradient of these, and capped logits.
    """
    e, num_states = model.bytes_per_element, sum(model.states.layers)
    layers = model.num_layers * outer_bytes(model)
    layers += sum(count * attention_bytes(of_size) for of_size, count in model.head_counts())
    layers += num_states * _mixer_bytes(model, None)
    return layers + model.head_outputs * (e + 3 * max(4, e) + model.capped_bytes)


def held_bytes(
    model: ModelSpec, policy: ActivationPolicy, num_layers: int, num_tokens: int, first_layer: int = 0, counts_kept: bool = True
) -> tuple[int, int]:
    """Returns (device, host) bytes held for backward after one forward of `num_tokens` tokens on a rank under `policy`.

    num_layers, first_layer: layers that run. counts_kept: whether to count layers that keep everything, which the activation
    engine does not handle.
    """
    layers = [*policy.layers, *[LayerPolicy()] * (num_layers - len(policy.layers))]
    on_device = on_host = 0
    kinds = model.layer_kinds(LayerRange(first_layer, num_layers)) or (ATTENTION,) * num_layers
    for layer, kind in zip(layers, kinds, strict=True):
        if layer.keeps_everything:
            on_device += plain_layer_bytes(model, kind, num_tokens) * num_tokens * counts_kept
            continue
        for name in TENSOR_CLASSES:
            token_bytes = class_bytes(model, name, kind, num_tokens)
            host_start, host_stop = layer.share(name).cuts(num_tokens)
            on_host += (host_stop - host_start) * token_bytes
            on_device += (num_tokens - host_stop) * token_bytes
    return on_device, on_host


def _mixer_bytes(model: ModelSpec, num_tokens: int | None) -> int:
    """Bytes of a token that a mixer saves, see `StateSpec.saved_bytes`."""
    return model.states.saved_bytes(model.bytes_per_element, num_tokens, model.fuses_gated_norms, model.fuses_convolutions)
