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


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Sizes of layers that carry a state along the sequence in place of attention, all of one shape; empty: there are none.

    layers: for each layer of the model whether it carries a state. parameters: matrix parameters of its mixer. heads: heads with
    a state of their own (0: the layer only convolves). head_elements: fp32 elements of one head's state. tail_elements: elements
    of the tokens that the convolution reads before a slice. scan_products: multiplications of the scan for a token.

    Sent per token in a Ulysses group: read_size elements of each of read_heads heads, which several heads with a state read;
    own_size elements and own_wide fp32 elements of each head with a state; and back out_size elements of each.

    Where ranks pass states on: carry_elements, fp32 elements for each head that say how tokens change an earlier state. For a
    token whose document begins on another rank: carry_products, multiplications more of the scan; carry_wide, fp32 elements more
    that are saved.

    Saved per token for backward, by transformers' own torch functions, which plans run: saved_elements in the model's format,
    saved_wide in fp32, and copied_wide more in a model of fp32. work_wide: fp32 elements per token that are alive at once inside
    the forward of the scan. tile_tokens: the scan fills each document up to a multiple of these.
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
    carry_elements: int = 0
    carry_products: int = 0
    carry_wide: int = 0
    saved_elements: int = 0
    saved_wide: int = 0
    copied_wide: int = 0
    work_wide: int = 0
    tile_tokens: int = 1

    @property
    def is_empty(self) -> bool:
        return not any(self.layers)

    @property
    def share(self) -> float:
        """Share of the model's layers that carry a state."""
        return sum(self.layers) / len(self.layers) if self.layers else 0.0

    def saved_bytes(self, bytes_per_element: int) -> int:
        """Bytes per token that the mixer saves for backward."""
        wide = self.saved_wide + (self.copied_wide if bytes_per_element == 4 else 0)
        return bytes_per_element * self.saved_elements + 4 * wide

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
    """The layers of a config that carry a state along the sequence, by its model type or else by the first row of `_STATES` whose
    field it has.

    Empty for other configs, and for mixers that run beside attention in one layer, which no row describes.
    """
    if (sizes := _STATES_OF_TYPES.get(config.get("model_type", ""))) is not None:
        # without a period, no layer has attention
        period, offset = int(config.get("attn_layer_period") or 0), int(config.get("attn_layer_offset") or 0)
        return replace(sizes(config), layers=tuple(not period or layer % period != offset for layer in range(num_layers)))
    for field, (layer_type, sizes) in _STATES.items():
        if config.get(field):
            every = int(config.get("full_attention_interval") or 4)
            kinds = config.get("layer_types") or [layer_type if (layer + 1) % every else "" for layer in range(num_layers)]
            layers = tuple(kind == layer_type for kind in kinds)
            return replace(sizes(config), layers=layers) if len(layers) == num_layers and any(layers) else NO_STATES
    return NO_STATES


# tokens that transformers' torch code of the gated delta rule computes at once
_DELTA_TILE = 64


def _gated_delta_net(config: Mapping[str, Any]) -> StateSpec:
    """Sizes of a gated delta net, of whose tensors `test_saved_bytes.py` proves the sums.

    Saved per value head, with keys of k and values of v elements and tiles of t tokens. In the model's format: input and output
    of the convolution; input, product and output of the gated norm. In fp32: queries and keys before and after their norm, with
    their decays and inside the solved system, 8 k; values, solved values, new values, output, gate and its activation, 6 v; five
    t x t matrices of a tile, 5 t; a state for each tile, k v / t; nine numbers. Kernels of flash-linear-attention would save
    queries, keys, values and outputs alone; no plan runs them yet.
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
        saved_wide=heads * (8 * key + 6 * value + 5 * tile + key * value // tile + 9),
        copied_wide=4 * heads * key,
        work_wide=heads * (7 * key + 6 * value + 4 * tile),
        tile_tokens=tile,
    )


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
        saved_elements=6 * channels,
        saved_wide=channels * (3 * size + 2),
        work_wide=2 * channels * size,
    )


def _mamba2(config: Mapping[str, Any]) -> StateSpec:
    """Sizes of a Mamba 2 mixer of h heads with p channels and states of p x n elements, and tiles of t tokens.

    Saved outside the scan. In the model's format: input and output of the convolution; gate, its activation and input of the last
    matrix. In the scan, in fp32 for each head: tokens, 5 p; what takes them into the state and out of it, 5 n; three t x t
    matrices of a tile, 3 t; two states for each tile, 2 p n / t; seven numbers.
    """
    hidden, heads, head = int(config["hidden_size"]), int(config["num_heads"]), int(config["head_dim"])
    size, groups, tile = int(config["state_size"]), int(config["n_groups"]), int(config["chunk_size"])
    values = heads * head
    channels = values + 2 * groups * size
    return StateSpec(
        parameters=hidden * (values + channels + heads) + values * hidden,
        heads=heads,
        head_elements=head * size,
        tail_elements=(int(config.get("conv_kernel") or 4) - 1) * channels,
        # within a tile: scores of tokens and their products with values; with the state: into it and out of it
        scan_products=heads * (tile * (size + head) + 2 * head * size),
        read_heads=groups,
        read_size=2 * size,
        own_size=head + 1,
        out_size=head,
        carry_elements=1,
        carry_products=heads * head * size,
        saved_elements=2 * channels + 3 * values + heads,
        saved_wide=heads * (5 * head + 5 * size + 3 * tile + 2 * head * size // tile + 7) + 2 * values,
        work_wide=heads * (3 * head + 3 * size + 3 * tile),
        tile_tokens=tile,
    )


# value of `model_type` -> sizes of its mixers
_STATES_OF_TYPES: dict[str, Callable[[Mapping[str, Any]], StateSpec]] = {
    **dict.fromkeys(("falcon_mamba", "jamba", "mamba"), _mamba1),
    "mamba2": _mamba2,
}
# field that only configs of one family have -> name of its layers in `layer_types`, and sizes of their mixer
_STATES: dict[str, tuple[str, Callable[[Mapping[str, Any]], StateSpec]]] = {
    "linear_num_value_heads": ("linear_attention", _gated_delta_net),
}
