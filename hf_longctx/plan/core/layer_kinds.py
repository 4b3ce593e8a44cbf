"""Read from a model's `config.json` what each layer mixes tokens with: full attention, a sliding window, or a state.

Called for plans from a `config.json` (`plan/core/model_spec.py`) and from a loaded config (`hf/models/spec.py`). Windows follow
the rules of transformers. Layers with a state along the sequence follow `_STATES`: a further family is one more row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

# window in tokens of each layer, None for full attention, 0 for a layer without attention; empty if all have full attention
Windows = tuple[int | None, ...]

# name of a layer type in a config -> field with the most tokens that attention of such a layer sees
_FIELDS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
# model types whose `sliding_window` counts only if `use_sliding_window` is set
_SWITCHED = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")
# model types without `layer_types` -> n: every n-th layer has full attention, unless `sliding_window_pattern` gives another n
_EVERY = {
    **{"gemma2": 2, "gpt_oss": 2, "vaultgemma": 2, "cohere2": 4, "exaone4": 4, "olmo3": 4},
    **{"gemma3n_text": 5, "gemma3_text": 6, "gemma4_text": 6},
}
# model types whose layers have a window from layer `max_window_layers` on
_FROM_A_LAYER_ON = ("dots1", "qwen2", "qwen3")
# model types in which every layer has a window
_ALL_LAYERS = ("minimax", "ministral3", "mistral", "mixtral", "phi3", "phimoe", "qwen3_moe", "starcoder2")


def config_windows(config: Mapping[str, Any], num_layers: int) -> Windows:
    """Most tokens that attention of each layer sees, a token itself included.

    If neither `layer_types` nor the model type says which layers have the window, none is taken to have it.
    """
    kinds = config.get("layer_types") or _kinds(config, num_layers)
    sizes = {kind: config.get(field) for kind, field in _FIELDS.items()}
    if not config.get("use_sliding_window", config.get("model_type") not in _SWITCHED):
        del sizes["sliding_attention"]
    return plain_windows([int(sizes.get(kind) or 0) or None for kind in kinds]) if len(kinds) == num_layers else ()


def plain_windows(windows: list[int | None]) -> Windows:
    """The windows as a tuple, empty if no layer has one."""
    return tuple(windows) if any(windows) else ()


def _kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Layer types that transformers derives from a config without `layer_types`."""
    kind, layers = config.get("model_type"), range(num_layers)
    if kind in _ALL_LAYERS:
        is_sliding = [True for _ in layers]
    elif kind in _EVERY:
        every = int(config.get("sliding_window_pattern") or _EVERY[kind])
        is_sliding = [bool((layer + 1) % every) for layer in layers]
    elif kind in _FROM_A_LAYER_ON:
        is_sliding = [layer >= int(config.get("max_window_layers") or 0) for layer in layers]
    elif kind == "smollm3":
        every = int(config.get("no_rope_layer_interval") or 4)
        rotated = config.get("no_rope_layers") or [(layer + 1) % every for layer in layers]
        is_sliding = [not each for each in rotated]
    else:
        is_sliding = [False for _ in layers]
    return ["sliding_attention" if each else "full_attention" for each in is_sliding]


# bytes that a scan may save for backward at a time; one that would save more runs in blocks, each recomputed in backward
BLOCK_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class ScanSize:
    """Elements that transformers' torch code of a scan saves for backward, which decide how many tokens plans run at once.

    token_elements: fp32 elements of one token and head. tile_tokens: tokens that the scan computes at once.
    """

    token_elements: int
    tile_tokens: int

    def block_tokens(self, num_heads: int) -> int:
        """Most tokens for which a scan of `num_heads` heads saves no more than `BLOCK_BYTES`, in whole tiles; at least one."""
        tile_bytes = 4 * self.token_elements * num_heads * self.tile_tokens
        return max(1, BLOCK_BYTES // max(1, tile_bytes)) * self.tile_tokens


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Sizes of layers that carry a state along the sequence in place of attention, all of one shape; empty: there are none.

    layers: for each layer of the model whether it carries a state. parameters: matrix parameters of its mixer. heads: heads with
    a state of their own (0: the layer only convolves). head_elements: fp32 elements of one head's state. tail_elements: elements
    of the tokens that the convolution reads before a slice. scan_products: multiplications of the scan for a token.

    Sent per token in a Ulysses group: read_size elements of each of read_heads heads, which several heads with a state read;
    own_size elements and own_wide fp32 elements of each head with a state; and back out_size and out_wide of each.

    Where ranks pass states on: carry_elements, fp32 elements for each head that say how tokens change an earlier state. For a
    token whose document begins on another rank: carry_products, multiplications more of the scan; carry_wide, fp32 elements more
    that are saved. slice_wide: fp32 elements more that are saved for a token of a slice after the first, where ranks do not pass
    states on.

    Saved per token for backward, by transformers' own torch functions, which plans run: saved_elements in the model's format and
    saved_wide in fp32 outside the scan. A scan in one piece saves scan_elements of each head and runs tile_tokens at once
    (`ScanSize`), and saves copied_wide more in a model of fp32. A scan in blocks saves what ranks would be sent, and the states
    between blocks. work_wide: fp32 elements per token that are alive at once inside the forward of the scan.
    """

    layers: tuple[bool, ...] = ()
    parameters: int = 0
    heads: int = 0
    head_elements: int = 0
    tail_elements: int = 0
    scan_products: int = 0
    read_heads: int = 0
    read_size: int = 0
    own_size: int = 0
    own_wide: int = 0
    out_size: int = 0
    out_wide: int = 0
    carry_elements: int = 0
    carry_products: int = 0
    carry_wide: int = 0
    slice_wide: int = 0
    saved_elements: int = 0
    saved_wide: int = 0
    copied_wide: int = 0
    work_wide: int = 0
    scan_elements: int = 0
    tile_tokens: int = 1

    @property
    def is_empty(self) -> bool:
        return not any(self.layers)

    @property
    def share(self) -> float:
        """Share of the model's layers that carry a state."""
        return sum(self.layers) / len(self.layers) if self.layers else 0.0

    @property
    def block_tokens(self) -> int:
        """Most tokens of a chunk on a rank whose scan runs in one piece; a rank that runs a part of the heads has more tokens."""
        return ScanSize(self.scan_elements, self.tile_tokens).block_tokens(self.heads)

    def saved_bytes(self, bytes_per_element: int, num_tokens: int | None = None) -> int:
        """Bytes per token that the mixer saves for backward in a chunk of `num_tokens` on a rank (None: a long one)."""
        if num_tokens is not None and num_tokens <= self.block_tokens:
            return self.outside_bytes(bytes_per_element) + self.scan_bytes(bytes_per_element)
        between = -(-max(4, bytes_per_element) * self.heads * self.head_elements // self.block_tokens)
        return self.outside_bytes(bytes_per_element) + self.input_bytes(bytes_per_element) + between

    def outside_bytes(self, bytes_per_element: int) -> int:
        """Bytes per token that the mixer saves outside its scan."""
        return bytes_per_element * self.saved_elements + max(4, bytes_per_element) * self.saved_wide

    def scan_bytes(self, bytes_per_element: int) -> int:
        """Bytes per token that a scan in one piece saves."""
        copied = self.copied_wide if bytes_per_element == 4 else 0
        return 4 * (self.heads * self.scan_elements + copied)

    def input_bytes(self, bytes_per_element: int) -> int:
        """Bytes per token that a scan reads."""
        elements = self.read_heads * self.read_size + self.heads * self.own_size
        return bytes_per_element * elements + max(4, bytes_per_element) * self.heads * self.own_wide

    def output_bytes(self, bytes_per_element: int) -> int:
        """Bytes per token that a scan makes."""
        return self.heads * (bytes_per_element * self.out_size + max(4, bytes_per_element) * self.out_wide)

    def boundary_bytes(self, num_heads: int, bytes_per_element: int) -> int:
        """Bytes of one layer's state at the end of a slice, on a rank that computes `num_heads` heads; it has all channels."""
        return max(4, bytes_per_element) * num_heads * self.head_elements + bytes_per_element * self.tail_elements


NO_STATES = StateSpec()


def with_states(windows: Windows, states: StateSpec) -> Windows:
    """The windows, with 0 for every layer that carries a state in place of attention."""
    if states.is_empty:
        return windows
    own = windows or (None,) * len(states.layers)
    return tuple(0 if has_state else window for window, has_state in zip(own, states.layers, strict=True))


def config_states(config: Mapping[str, Any], num_layers: int) -> StateSpec:
    """The layers of a config that carry a state along the sequence, by its model type or else by the first row of `_STATES` with
    one of its fields.

    Empty for other configs, for mixers that run beside attention in one layer, and for layers that mix no tokens.
    """
    if (sizes := _STATES_OF_TYPES.get(config.get("model_type", ""))) is not None:
        # without a period, no layer has attention
        period, offset = int(config.get("attn_layer_period") or 0), int(config.get("attn_layer_offset") or 0)
        return replace(sizes(config), layers=tuple(not period or layer % period != offset for layer in range(num_layers)))
    for row in _STATES:
        if any(config.get(field) is not None for field in row.fields):
            kinds = config.get("layer_types") or config.get("layers_block_type") or row.default_kinds(config, num_layers)
            layers = tuple(kind in row.kinds for kind in kinds)
            return replace(row.sizes(config), layers=layers) if len(layers) == num_layers and any(layers) else NO_STATES
    return NO_STATES


# tokens that transformers' torch code of the gated delta rule and of Kimi delta attention computes at once
_DELTA_TILE = 64


def delta_scan(key_size: int, value_size: int) -> ScanSize:
    """Elements that the scan of a gated delta net saves, with keys of k and values of v elements and tiles of t tokens.

    Queries and keys before and after their norm, with their decays and inside the solved system, 8 k; values, solved values and
    new values, 3 v; five t x t matrices of a tile, 5 t; a state for each tile, k v / t; seven numbers.
    """
    k, v, t = key_size, value_size, _DELTA_TILE
    return ScanSize(8 * k + 3 * v + 5 * t + k * v // t + 7, t)


def kimi_scan(key_size: int, value_size: int) -> ScanSize:
    """Elements that the scan of Kimi delta attention saves, with keys of k and values of v elements and tiles of t tokens.

    Decays per channel between every two tokens of a tile, and their products with keys twice, 3 t k; queries and keys with their
    decays, 12 k; values, 3 v; rows of a system that is solved in a loop, t t / 3; two more matrices of a tile, 2 t; a state for
    each tile, k v / t; five numbers.
    """
    k, v, t = key_size, value_size, _DELTA_TILE
    return ScanSize(3 * t * k + 12 * k + 3 * v + t * t // 3 + 2 * t + k * v // t + 5, t)


def mamba_scan(head_size: int, state_size: int, tile_tokens: int) -> ScanSize:
    """Elements that the scan of Mamba 2 saves, with heads of p and states of p x n elements and tiles of t tokens.

    Tokens, 5 p; what takes them into the state and out of it, 5 n; three t x t matrices of a tile, 3 t; two states for each tile,
    2 p n / t; seven numbers.
    """
    p, n, t = head_size, state_size, tile_tokens
    return ScanSize(5 * p + 5 * n + 3 * t + 2 * p * n // t + 7, t)


def _gated_delta_net(config: Mapping[str, Any]) -> StateSpec:
    """Sizes of a gated delta net; `test_state_layers.py` compares the sums with what torch allocates.

    Saved outside the scan, for values of v elements. In the model's format: input and output of the convolution; input, product
    and output of the gated norm. In fp32: output, gate and its activation, 3 v; two numbers. Kernels of flash-linear-attention
    save less: queries, keys, values and a tile's matrix. Plans count the torch code there too.
    """
    heads, read_heads = int(config["linear_num_value_heads"]), int(config["linear_num_key_heads"])
    key, value, hidden = int(config["linear_key_head_dim"]), int(config["linear_value_head_dim"]), int(config["hidden_size"])
    channels, values, tile = 2 * read_heads * key + heads * value, heads * value, _DELTA_TILE
    return StateSpec(
        # projections to queries, keys, values, gate, decay and strength; and back
        parameters=hidden * (channels + values + 2 * heads) + values * hidden,
        heads=heads,
        head_elements=key * value,
        tail_elements=(int(config.get("linear_conv_kernel_dim") or 4) - 1) * channels,
        # within a tile: two products of keys, two solved systems, one product with values; with the state: three products
        scan_products=heads * (tile * (5 * key + 3 * value) // 2 + 3 * key * value),
        read_heads=read_heads,
        read_size=2 * key,
        own_size=value + 1,
        own_wide=1,
        out_size=value,
        # values get one more column for each element of a key
        carry_elements=key * key,
        carry_products=heads * (3 * tile * key // 2 + 3 * key * key),
        # values three times, a state for each tile, and outputs with a copy
        carry_wide=heads * (5 * key + key * key // tile),
        saved_elements=2 * channels + 3 * values + heads,
        saved_wide=heads * (3 * value + 2),
        copied_wide=4 * heads * key,
        work_wide=heads * (7 * key + 6 * value + 4 * tile),
        scan_elements=delta_scan(key, value).token_elements,
        tile_tokens=tile,
    )


def _kimi_delta(config: Mapping[str, Any]) -> StateSpec:
    """Sizes of Kimi delta attention, whose decay has one number per channel; keys and values are of one size.

    Saved outside the scan, for n elements of all heads. In the model's format: input and output of the convolution, input of the
    last matrix, 7 n. In fp32: output before and after its norm and its weight, and its gate, 4 n; then what decays are made of.
    """
    nested = config.get("linear_attn_config") or {}
    is_bailing = _is_bailing(config)
    heads = int(nested.get("num_heads") or config.get("linear_num_heads") or config["num_attention_heads"])
    size = int(nested.get("head_dim") or config.get("linear_head_dim") or config["head_dim"])
    width = nested.get("short_conv_kernel_size") or config.get("linear_conv_kernel_dim") or config.get("short_conv_kernel_size")
    hidden, all_heads, tile = int(config["hidden_size"]), heads * size, _DELTA_TILE
    # decay and gate are projected at once, or through as many elements as a head has
    gates = 2 * hidden * all_heads if is_bailing else 2 * size * (hidden + all_heads)
    return StateSpec(
        parameters=4 * hidden * all_heads + hidden * heads + gates,
        heads=heads,
        head_elements=size * size,
        tail_elements=(int(width or 4) - 1) * 3 * all_heads,
        # within a tile: decays of keys and queries by channel, the solved system, products with values; with the state: three
        scan_products=heads * (tile * (4 * size + 2 * size) + 3 * size * size),
        read_heads=heads,
        read_size=2 * size,
        own_size=(2 if is_bailing else 1) * size + 1,
        own_wide=0 if is_bailing else size,
        out_size=size,
        # values get one more column for each element of a key
        carry_elements=size * size,
        carry_products=heads * (2 * tile * size + 3 * size * size),
        carry_wide=heads * (5 * size + size * size // tile),
        saved_elements=7 * all_heads + heads + (0 if is_bailing else 2 * size),
        saved_wide=(6 if is_bailing else 7) * all_heads + (0 if is_bailing else all_heads // 4) + 2 * heads,
        work_wide=heads * (3 * tile * size + 12 * size),
        scan_elements=kimi_scan(size, size).token_elements,
        tile_tokens=tile,
    )


def _is_bailing(config: Mapping[str, Any]) -> bool:
    return config.get("kda_safe_gate") is not None


def _kimi_kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Layer types of a config without `layer_types`; a checkpoint of Kimi Linear numbers its layers from 1."""
    if _is_bailing(config):
        every = int(config.get("layer_group_size") or 6)
        return ["" if (layer + 1) % every == 0 else "linear_attention" for layer in range(num_layers)]
    named = (config.get("linear_attn_config") or {}).get("kda_layers")
    if named is not None:
        return ["linear_attention" if layer + 1 in named else "" for layer in range(num_layers)]
    return ["" if layer and layer % 4 == 0 else "linear_attention" for layer in range(num_layers)]


def _short_convolution(config: Mapping[str, Any]) -> StateSpec:
    """Sizes of a gated short convolution, which has no scan.

    Saved: its three projections, the product of two of them, the convolution's output, and the input of the last matrix.
    """
    hidden = int(config["hidden_size"])
    return StateSpec(
        parameters=4 * hidden * hidden,
        tail_elements=(int(config["conv_L_cache"]) - 1) * hidden,
        saved_elements=6 * hidden,
    )


def _convolution_kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Layer types of a config without `layer_types`."""
    if config.get("model_type") == "lfm3":
        return ["" if layer % 4 == 2 or (layer and layer % 4 == 0) else "conv" for layer in range(num_layers)]
    attending = config.get("full_attn_idxs")
    return ["" if attending is None or layer in attending else "conv" for layer in range(num_layers)]


def _mamba1(config: Mapping[str, Any]) -> StateSpec:
    """Sizes of a Mamba 1 mixer, in which every channel is a head, with a state of n elements.

    Saved per channel. In the model's format: input and output of the convolution, steps, gate and its activation, input of the
    last matrix. In fp32: decays, inputs of the state and states, 3 n; output, and its product with the gate.
    """
    hidden, size = int(config["hidden_size"]), int(config.get("state_size") or config["mamba_d_state"])
    channels = int(config.get("expand") or config["mamba_expand"]) * hidden
    rank = config.get("time_step_rank") or config.get("mamba_dt_rank") or "auto"
    rank = -(-hidden // 16) if rank == "auto" else int(rank)
    width = int(config.get("conv_kernel") or config.get("mamba_d_conv") or 4)
    return StateSpec(
        # to tokens and gate; to steps and to what takes tokens into the state and out of it; and back
        parameters=3 * hidden * channels + channels * (2 * rank + 2 * size),
        heads=channels,
        head_elements=size,
        tail_elements=(width - 1) * channels,
        # decay, step and token into the state, state times decay, state into the output
        scan_products=5 * channels * size,
        read_heads=1,
        read_size=2 * size,
        own_size=2,
        out_size=1,
        carry_elements=size,
        carry_products=3 * channels * size,
        # remains of a state, and these times the state; steps before they are activated, and their sum
        carry_wide=channels * (2 * size + 2),
        slice_wide=channels * (2 * size + 2),
        saved_elements=6 * channels,
        saved_wide=channels * (3 * size + 2),
        work_wide=2 * channels * size,
    )


def _mamba2(config: Mapping[str, Any]) -> StateSpec:
    """Sizes of a Mamba 2 mixer with heads of p and states of p x n elements.

    Saved outside the scan, for v elements of all heads. In the model's format: what the first matrix makes, output of the
    convolution, three tensors behind the norm. In fp32: output of the scan, gate, its activation, their product, 4 v.
    """
    heads, hidden = int(config.get("mamba_n_heads") or config["num_heads"]), int(config["hidden_size"])
    size = int(config.get("mamba_d_state") or config["state_size"])
    values = int(config.get("mamba_expand") or config.get("expand") or 2) * hidden
    groups = int(config.get("mamba_n_groups") or config.get("n_groups") or 1)
    head, channels, tile = (
        values // heads,
        values + 2 * groups * size,
        int(config.get("mamba_chunk_size") or config.get("chunk_size") or 256),
    )
    return StateSpec(
        parameters=hidden * (values + channels + heads) + values * hidden,
        heads=heads,
        head_elements=head * size,
        tail_elements=(int(config.get("mamba_d_conv") or config.get("conv_kernel") or 4) - 1) * channels,
        # within a tile: scores of tokens, and their products with values; with the state: into it and out of it
        scan_products=heads * (tile * (size + head) + 2 * head * size),
        read_heads=groups,
        read_size=2 * size,
        own_size=head + 1,
        out_wide=head,
        carry_elements=1,
        carry_products=heads * head * size,
        # additions to outputs; steps and decays in five forms; in 16 bits, a copy of the weights that read the state
        carry_wide=values + 5 * heads + groups * size,
        saved_elements=2 * channels + 4 * values + heads,
        saved_wide=4 * values,
        # in a model of fp32 the scan's inputs are saved with the tensor that they are parts of, and three casts make no copy
        copied_wide=channels - 3 * values,
        work_wide=heads * (3 * head + 4 * size + 4 * tile),
        scan_elements=mamba_scan(head, size, tile).token_elements,
        tile_tokens=tile,
    )


def _mamba2_kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Layer types of a config without `layer_types`."""
    attending = config.get("attn_layer_indices") or ()
    return ["" if layer in attending else "mamba" for layer in range(num_layers)]


def _every_kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Layer types of a config without `layer_types`: every n-th layer has attention."""
    every = int(config.get("full_attention_interval") or 4)
    return ["linear_attention" if (layer + 1) % every else "" for layer in range(num_layers)]


@dataclass(frozen=True, slots=True)
class _StateRow:
    """Layers with a state of one family of model classes.

    fields: fields that only configs of the family have, any of them. kinds: names of its layers in `layer_types`. sizes: sizes of
    their mixer. default_kinds: layer types of a config that does not list them, given the number of layers.
    """

    fields: tuple[str, ...]
    kinds: tuple[str, ...]
    sizes: Callable[[Mapping[str, Any]], StateSpec]
    default_kinds: Callable[[Mapping[str, Any], int], list[str]]


# value of `model_type` -> sizes of its mixers
_STATES_OF_TYPES: dict[str, Callable[[Mapping[str, Any]], StateSpec]] = {
    **dict.fromkeys(("falcon_mamba", "jamba", "mamba"), _mamba1),
    "mamba2": _mamba2,
}
_STATES = (
    _StateRow(("linear_num_value_heads",), ("linear_attention",), _gated_delta_net, _every_kinds),
    _StateRow(("linear_attn_config", "linear_num_heads", "kda_safe_gate"), ("linear_attention",), _kimi_delta, _kimi_kinds),
    _StateRow(("conv_L_cache",), ("conv",), _short_convolution, _convolution_kinds),
    # the mixers of FalconH1 (`mamba_d_ssm`) run beside attention
    _StateRow(("mamba_d_ssm",), (), _mamba2, _mamba2_kinds),
    _StateRow(("mamba_n_heads",), ("linear_attention", "mamba"), _mamba2, _mamba2_kinds),
)
