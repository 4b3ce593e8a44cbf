"""Sizes of every kind of mixer with a state along the sequence, from the fields of a model's config.

They say how much a mixer computes, saves, sends and leaves at the end of a slice. Tests compare saved bytes, parameters and bytes
sent with those of torch. In RWKV and xLSTM the MLPs count as parts of the mixers, since no layer of these models has attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# bytes that a scan may save for backward at a time; one that would save more runs in blocks, each recomputed in backward
BLOCK_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class ScanSize:
    """Elements that transformers' torch code of a scan saves for backward, which decide how many tokens plans run at once."""

    # fp32 elements of one token and head
    token_elements: int
    # tokens that the scan computes at once
    tile_tokens: int

    def block_tokens(self, num_heads: int) -> int:
        """Most tokens for which a scan of `num_heads` heads saves no more than `BLOCK_BYTES`, in whole tiles; at least one."""
        tile_bytes = 4 * self.token_elements * num_heads * self.tile_tokens
        return max(1, BLOCK_BYTES // max(1, tile_bytes)) * self.tile_tokens


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Sizes of layers that carry a state along the sequence, all of one shape; empty if there are none.

    Saved elements are those of transformers' own torch functions, which plans run. A scan in one piece saves `scan_elements` of
    each head; a scan in blocks saves its inputs and the states between blocks.
    """

    # for each layer of the model whether it carries a state
    layers: tuple[bool, ...] = ()
    # for each layer whether it has attention; empty: those without a state have it
    attends: tuple[bool, ...] = ()
    # matrix parameters of the mixer
    parameters: int = 0
    # heads with their own state (0: the layer only convolves)
    heads: int = 0
    # calls of the scan in a layer, which share out the heads
    scans: int = 1
    # calls of functions that read tokens before a slice
    convolutions: int = 1
    # fp32 elements of one head's state
    head_elements: int = 0
    # elements of the tokens that the convolutions read before a slice
    tail_elements: int = 0
    # multiplications of the scan for a token
    scan_products: int = 0
    # sent per token in a Ulysses group: elements of each of the heads that several heads with a state read
    read_heads: int = 0
    read_size: int = 0
    # sent there for each head with a state: elements, and fp32 elements
    own_size: int = 0
    own_wide: int = 0
    # sent back for each head with a state: elements, and fp32 elements
    out_size: int = 0
    out_wide: int = 0
    # if ranks pass states on: fp32 elements for each head by which tokens change an earlier state
    carry_elements: int = 0
    # for a token whose document begins on another rank: further multiplications of the scan, further fp32 elements saved,
    # and more of them in a model of 16 bits
    carry_products: int = 0
    carry_wide: int = 0
    carry_copied: int = 0
    # fp32 elements saved besides for a token of a slice after the first, if ranks do not pass states on
    slice_wide: int = 0
    # saved per token outside the scan, in the model's format and in fp32
    saved_elements: int = 0
    saved_wide: int = 0
    # those in the model's format and in fp32 that a kernel of the mixer's gated norm does not save, and those of them that the
    # torch code does not save in a model of fp32, where casts make no copy
    norm_elements: int = 0
    norm_wide: int = 0
    norm_copied: int = 0
    # those in the model's format that a kernel of the convolution and its activation does not save
    convolution_elements: int = 0
    # values of the gated norm, and channels of a convolution with an activation
    norm_values: int = 0
    channels: int = 0
    # bytes that a token and head read and write in the scan's forward and backward, by the torch code, and by a package's kernel
    # in a model of 16 bits; zeros if they are not counted
    torch_moves: tuple[int, int] = (0, 0)
    kernel_moves: tuple[int, int] = (0, 0)
    # fp32 elements that a scan in one piece saves besides in a model of fp32
    copied_wide: int = 0
    # fp32 elements per token that are alive at once inside the forward of the scan
    work_wide: int = 0
    # elements and tokens as in `ScanSize`
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
    def attending(self) -> tuple[bool, ...]:
        """For each layer of the model whether it has attention."""
        return self.attends or tuple(not has_state for has_state in self.layers)

    @property
    def block_tokens(self) -> int:
        """Most tokens of a chunk on a rank whose scan runs in one piece; a rank that runs a part of the heads has more tokens."""
        return ScanSize(self.scan_elements, self.tile_tokens).block_tokens(self.heads // self.scans)

    def saved_bytes(
        self,
        bytes_per_element: int,
        num_tokens: int | None = None,
        fuses_norm: bool = False,
        fuses_convolution: bool = False,
    ) -> int:
        """Bytes per token that the mixer saves for backward in a chunk of `num_tokens` on a rank (None: a long one).

        fuses_norm, fuses_convolution: its gated norm, or its convolution with the activation, runs as a kernel.
        """
        outside = self.outside_bytes(bytes_per_element, fuses_norm, fuses_convolution)
        if num_tokens is not None and num_tokens <= self.block_tokens:
            return outside + self.scan_bytes(bytes_per_element)
        between = -(-max(4, bytes_per_element) * self.heads * self.head_elements // self.block_tokens)
        return outside + self.input_bytes(bytes_per_element) + between

    def outside_bytes(self, bytes_per_element: int, fuses_norm: bool = False, fuses_convolution: bool = False) -> int:
        """Bytes per token that the mixer saves outside its scan."""
        elements, wide = self.saved_elements, self.saved_wide
        if fuses_norm:
            elements -= self.norm_elements
            wide -= self.norm_wide - (self.norm_copied if bytes_per_element >= 4 else 0)
        # in fp32, a gate that is a part of what the first matrix makes keeps the whole, unless a kernel of the norm copies it
        if fuses_convolution and (fuses_norm or bytes_per_element < 4 or not self.norm_elements):
            elements -= self.convolution_elements
        return bytes_per_element * elements + max(4, bytes_per_element) * wide

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


# tokens that transformers' torch code of the gated delta rule and of Kimi delta attention computes at once
_DELTA_TILE = 64


def delta_scan(key_size: int, value_size: int) -> ScanSize:
    """Elements that the scan of a gated delta net saves, with keys of k and values of v elements and tiles of t tokens.

    Queries and keys before and after their norm, with their decays and inside the solved system, 8 k; values, solved values and
    new values, 3 v; five t x t matrices of a tile, 5 t; a state for each tile, k v / t; seven numbers.
    """
    k, v, t = key_size, value_size, _DELTA_TILE
    return ScanSize(8 * k + 3 * v + 5 * t + k * v // t + 7, t)


def delta_moves(key_size: int, value_size: int) -> tuple[int, int]:
    """Returns bytes that transformers' torch code of a gated delta net moves for a token and head, forward and backward.

    Counted by `test_elementwise_bytes.py`, products apart, for tiles of t tokens. Backward is that of few tiles: the torch code
    writes every tile into one tensor, whose gradient backward copies for each tile, so with heads of 128 it moves 165 bytes more
    for each token that is scanned at once. These, and the starts of kernels, are not counted.
    """
    k, v, t = key_size, value_size, _DELTA_TILE
    forward = 124 * k + 84 * v + 54 * t + 41 * k * v // (2 * t)
    return forward, 328 * k + 90 * v + 145 * t + 36 * k * v // t


def delta_kernel_moves(key_size: int, value_size: int, readers: int) -> tuple[int, int]:
    """Returns bytes that `chunk_gated_delta_rule` of flash-linear-attention moves in 16 bits for a token and head of values.

    readers: heads with a state that share a query and a key. Forward, with tiles of t tokens: norms of queries and keys; products
    of keys, and their solved system (in fp32 in between); keys and values by this system; states of tiles and new values;
    outputs. Backward makes the last three again, and gradients of values within tiles, of states, of queries and keys, and of
    the system. For 32 heads of 128 and 32,768 tokens these are 2.3 and 5.3 ms at the rate of the profile `h200`; FlashQLA's
    benchmark on an H200 (`benchmark_results_H200.txt`) says 1.89 and 5.70 ms, and 0.88 and 2.52 ms for its own kernel.
    """
    k, v, t = key_size, value_size, _DELTA_TILE
    state = k * v // t
    forward = 4 * k // readers + 7 * k + 6 * v + 2 * state + 2 * t
    backward = 8 * k // readers + 23 * k + 15 * v + 4 * state + 2 * t
    return 2 * forward + 8 * t, 2 * backward


def kimi_scan(key_size: int, value_size: int) -> ScanSize:
    """Elements that the scan of Kimi delta attention saves, with keys of k and values of v elements and tiles of t tokens.

    Decays per channel between every two tokens of a tile, and their products with keys twice, 3 t k; queries and keys with their
    decays, 12 k; values, 3 v; rows of a system that is solved in a loop, t t / 3; two more matrices of a tile, 2 t; a state for
    each tile, k v / t; five numbers.
    """
    k, v, t = key_size, value_size, _DELTA_TILE
    return ScanSize(3 * t * k + 12 * k + 3 * v + t * t // 3 + 2 * t + k * v // t + 5, t)


def kimi_moves(key_size: int, value_size: int) -> tuple[int, int]:
    """Returns bytes that transformers' torch code of Kimi delta attention moves for a token and head, forward and backward.

    Counted by `test_elementwise_bytes.py` like `delta_moves`, with keys of k elements and tiles of t tokens. Decays between
    every two tokens of a tile by channel, t k fp32 numbers for a token, are read and written about ten times in forward; a loop
    over the rows of a tile copies half of its t x t matrix each time, and backward copies that matrix's gradient.
    """
    k, v, t = key_size, value_size, _DELTA_TILE
    forward = 63 * t * k + 25 * k + 80 * v + 41 * k * v // (2 * t) + 477 * t
    return forward, 144 * t * k + 40 * k + 74 * v + 36 * k * v // t + 3426 * t


def kimi_kernel_moves(key_size: int, value_size: int) -> tuple[int, int]:
    """Returns bytes that `chunk_kda` of flash-linear-attention moves in 16 bits for a token and head, forward and backward.

    Counted from its kernels like `delta_kernel_moves`; most of them read fp32 decays of every channel. Forward: norms of queries
    and keys; sums of decays; blocks on the diagonal; the solved system and scores; keys and values by this system; states of
    tiles and new values; outputs. Backward makes keys, values and states again, and gradients of scores and values within tiles,
    of states, of all inputs through states, then within tiles, their sums, and those of norms. For 64 heads of 128 and 16,384
    tokens forward is 4.0 ms at the rate of the profile `h200`; cuLA's benchmark on an H200 (`BENCHMARK_H200.md`) says 3.6 for
    it. Its backward has twice the bytes, and takes three times as long on a Blackwell (cuLA#54).
    """
    k, v, t = key_size, value_size, _DELTA_TILE
    state = k * v // t
    forward = 26 * k + 6 * v + 2 * state + 25 * t // 4
    return 2 * forward, 2 * (50 * k + 15 * v + 4 * state + 11 * t)


def mamba_scan(head_size: int, state_size: int, tile_tokens: int) -> ScanSize:
    """Elements that the scan of Mamba 2 saves, with heads of p and states of p x n elements and tiles of t tokens.

    Tokens, 5 p; vectors that take them into the state and out of it, 5 n; three t x t matrices of a tile, 3 t; two states for
    each tile, 2 p n / t; seven numbers.
    """
    p, n, t = head_size, state_size, tile_tokens
    return ScanSize(5 * p + 5 * n + 3 * t + 2 * p * n // t + 7, t)


def mamba_moves(head_size: int, state_size: int, tile_tokens: int, readers: int) -> tuple[int, int]:
    """Returns bytes that transformers' torch code of Mamba 2 moves for a token and head, forward and backward.

    Counted by `test_elementwise_bytes.py` like `delta_moves`. readers: heads that share what takes tokens into the state and out.
    """
    p, n, t = head_size, state_size, tile_tokens
    forward = 94 * p + 71 * n + 44 * t + 20 * p * n // t + 13 * n // readers + 135
    return forward, 142 * p + 88 * n + 80 * t + 50 * p * n // t + 20 * n // readers + 243


def mamba_kernel_moves(head_size: int, state_size: int, tile_tokens: int, readers: int) -> tuple[int, int]:
    """Returns bytes that `mamba_chunk_scan_combined` of mamba-ssm moves in 16 bits for a token and head, forward and backward.

    Counted from its kernels like `delta_kernel_moves`; readers: as in `mamba_moves`. Forward: sums of decays; states of tiles in
    fp32, and their sums over tiles; scores of groups in fp32; outputs. Backward makes all but outputs again, and gradients of
    states and their sums, of tokens, of what takes them into states and out, of scores, and of decays, for which tokens are read
    once more. For 128 heads of 64 with states of 128 forward is 40 ns a token at the rate of the profile `h200`, beside 24 for
    products; vLLM measured 93 in all on an H100 (vllm#27299), which reads 0.7 times as fast.
    """
    p, n, t = head_size, state_size, tile_tokens
    state = p * n // t
    forward = 3 * p + 6 * state + (4 * n + 4 * t) // readers + 13
    return 2 * forward, 2 * (11 * p + 17 * state + (27 * n + 16 * t) // readers + 66)


def gated_delta_net(config: Mapping[str, Any]) -> StateSpec:
    """Sizes of a gated delta net; `test_state_layers.py` compares the sums with what torch allocates.

    Saved outside the scan, for values of v elements. In the model's format: input and output of the convolution; input, product
    and output of the gated norm. In fp32: output, gate and its activation, 3 v; two numbers. A kernel of the norm saves its input
    and gate in the model's format, and none of these but a number. Kernels of flash-linear-attention
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
        norm_wide=heads * (3 * value + 1),
        convolution_elements=channels,
        norm_values=values,
        channels=channels,
        torch_moves=delta_moves(key, value),
        kernel_moves=delta_kernel_moves(key, value, heads // read_heads),
        copied_wide=4 * heads * key,
        work_wide=heads * (7 * key + 6 * value + 4 * tile),
        scan_elements=delta_scan(key, value).token_elements,
        tile_tokens=tile,
    )


def kimi_delta(config: Mapping[str, Any]) -> StateSpec:
    """Sizes of Kimi delta attention, whose decay has one number per channel; keys and values are of one size.

    Saved outside the scan, for n elements of all heads. In the model's format: input and output of the convolution, input of the
    last matrix, 7 n. In fp32: output before and after its norm and its weight, and its gate, 4 n; then what decays are made of.
    """
    nested = config.get("linear_attn_config") or {}
    has_safe_gate = is_bailing(config)
    heads = int(nested.get("num_heads") or config.get("linear_num_heads") or config["num_attention_heads"])
    size = int(nested.get("head_dim") or config.get("linear_head_dim") or config["head_dim"])
    width = nested.get("short_conv_kernel_size") or config.get("linear_conv_kernel_dim") or config.get("short_conv_kernel_size")
    hidden, all_heads, tile = int(config["hidden_size"]), heads * size, _DELTA_TILE
    # decay and gate are projected at once, or through as many elements as a head has
    gates = 2 * hidden * all_heads if has_safe_gate else 2 * size * (hidden + all_heads)
    return StateSpec(
        parameters=4 * hidden * all_heads + hidden * heads + gates,
        heads=heads,
        head_elements=size * size,
        tail_elements=(int(width or 4) - 1) * 3 * all_heads,
        # within a tile: decays of keys and queries by channel, the solved system, products with values; with the state: three
        scan_products=heads * (tile * (4 * size + 2 * size) + 3 * size * size),
        read_heads=heads,
        read_size=2 * size,
        own_size=(2 if has_safe_gate else 1) * size + 1,
        own_wide=0 if has_safe_gate else size,
        out_size=size,
        # values get one more column for each element of a key
        carry_elements=size * size,
        carry_products=heads * (2 * tile * size + 3 * size * size),
        carry_wide=heads * (5 * size + size * size // tile),
        saved_elements=7 * all_heads + heads + (0 if has_safe_gate else 2 * size),
        saved_wide=(6 if has_safe_gate else 7) * all_heads + (0 if has_safe_gate else all_heads // 4) + 2 * heads,
        norm_wide=heads * (3 * size + 1),
        norm_copied=all_heads,
        convolution_elements=3 * all_heads,
        norm_values=all_heads,
        channels=3 * all_heads,
        torch_moves=kimi_moves(size, size),
        kernel_moves=kimi_kernel_moves(size, size),
        work_wide=heads * (3 * tile * size + 12 * size),
        scan_elements=kimi_scan(size, size).token_elements,
        tile_tokens=tile,
    )


def is_bailing(config: Mapping[str, Any]) -> bool:
    return config.get("kda_safe_gate") is not None


def short_convolution(config: Mapping[str, Any]) -> StateSpec:
    """Sizes of a gated short convolution, which has no scan.

    Saved: its three projections, the product of two of them, the convolution's output, and the input of the last matrix.
    """
    hidden = int(config["hidden_size"])
    return StateSpec(
        parameters=4 * hidden * hidden,
        tail_elements=(int(config["conv_L_cache"]) - 1) * hidden,
        saved_elements=6 * hidden,
    )


def channel_scan(state_size: int) -> ScanSize:
    """Elements that the scan of Mamba 1 saves for one channel, with a state of n elements; it runs token by token.

    Decays, inputs of the state and states, 3 n; in a model of 16 bits a copy of the states in these, n / 2; the step before and
    after its activation, and what passes by the state, 3.
    """
    return ScanSize(3 * state_size + state_size // 2 + 3, 1)


def mamba1(config: Mapping[str, Any]) -> StateSpec:
    """Sizes of a Mamba 1 mixer, in which every channel is a head, with a state of n elements.

    Saved per channel outside the scan, in the model's format: what the first matrix makes, 2; input of the convolution, and its
    output before and after the activation; output of the scan, activated gate, input of the last matrix. Zamba scans some of its
    channels at a time, with steps and states of their own.
    """
    hidden, size = int(config["hidden_size"]), int(config.get("state_size") or config["mamba_d_state"])
    channels = int(config.get("expand") or config["mamba_expand"]) * hidden
    scans = int(config.get("n_mamba_heads") or 1)
    rank = config.get("time_step_rank") or config.get("mamba_dt_rank") or "auto"
    rank = -(-hidden // 16) if rank == "auto" else int(rank)
    width = int(config.get("conv_kernel") or config.get("mamba_d_conv") or 4)
    return StateSpec(
        # to tokens and gate; to steps and to what takes tokens into the state and out of it; and back
        parameters=3 * hidden * channels + channels * (2 * rank + 2 * size),
        heads=channels,
        scans=scans,
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
        saved_elements=8 * channels + scans * (rank + 2 * size),
        # others copy what it reads, of which the gate keeps the whole
        convolution_elements=channels if config.get("n_mamba_heads") else 0,
        channels=channels,
        # decays, inputs of the state before and after they are multiplied by tokens, states
        work_wide=channels * (4 * size + 6) // scans,
        scan_elements=channel_scan(size).token_elements,
        # in a model of fp32, states and tokens are saved once
        copied_wide=-channels * (size // 2 + 1),
    )


def mamba2(config: Mapping[str, Any]) -> StateSpec:
    """Sizes of a Mamba 2 mixer with heads of p and states of p x n elements.

    Saved outside the scan, for v elements of all heads. In the model's format: what the first matrix makes, output of the
    convolution, three tensors behind the norm. In fp32: output of the scan, gate, its activation, their product, 4 v. A FalconH1
    has no such norm as a rule, and keeps its input and gate in the model's format instead.
    """
    is_falcon, hidden = config.get("mamba_d_ssm") is not None, int(config["hidden_size"])
    heads = _first(config, "mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "num_heads")
    size = _first(config, "mamba_d_state", "ssm_state_size", "state_size")
    values = int(config.get("mamba_expand") or config.get("expand") or 2) * hidden
    if is_falcon:
        values = int(config["mamba_d_ssm"])
    elif config.get("mamba_head_dim"):
        values = heads * int(config["mamba_head_dim"])
    groups = _first(config, "mamba_n_groups", "mamba_ngroups", "n_groups", default=1)
    tile = _first(config, "mamba_chunk_size", "chunk_size", default=256)
    head, channels = values // heads, values + 2 * groups * size
    has_norm = not is_falcon or bool(config.get("mamba_rms_norm"))
    return StateSpec(
        parameters=hidden * (values + channels + heads) + values * hidden,
        heads=heads,
        head_elements=head * size,
        tail_elements=(_first(config, "mamba_d_conv", "conv_kernel", default=4) - 1) * channels,
        # within a tile: scores of tokens, and their products with values; with the state: into it and out of it
        scan_products=heads * (tile * (size + head) + 2 * head * size),
        read_heads=groups,
        read_size=2 * size,
        own_size=head + 1,
        out_wide=head,
        carry_elements=1,
        carry_products=heads * head * size,
        # additions to outputs; steps and decays in four forms; in 16 bits one less, and a copy of what reads the state
        carry_wide=values + 4 * heads,
        carry_copied=groups * size - heads,
        saved_elements=2 * channels + (4 if has_norm else 3) * values + heads + is_falcon * hidden,
        saved_wide=(4 if has_norm else 1) * values,
        norm_elements=values * has_norm,
        norm_wide=(3 * values + groups) * has_norm,
        norm_copied=2 * values * has_norm,
        # outputs of the first matrix, and of the convolution, whose input is copied
        convolution_elements=(values + channels + heads) * has_norm,
        norm_values=values * has_norm,
        channels=channels,
        torch_moves=mamba_moves(head, size, tile, heads // groups),
        kernel_moves=mamba_kernel_moves(head, size, tile, heads // groups),
        # in a model of fp32 the scan's inputs are saved with the tensor that they are parts of, and casts make no copy
        copied_wide=channels - (3 if has_norm else 1) * values,
        work_wide=heads * (3 * head + 4 * size + 4 * tile),
        scan_elements=mamba_scan(head, size, tile).token_elements,
        tile_tokens=tile,
    )


def _first(config: Mapping[str, Any], *names: str, default: int = 0) -> int:
    """The first of these fields that a config has; raises ValueError if it has none and there is no default."""
    found = next((config[name] for name in names if config.get(name) is not None), default)
    if not found:
        raise ValueError(f"the model config has no {names[0]}; a config with {' or '.join(names)} is needed")
    return int(found)


def lightning(config: Mapping[str, Any]) -> StateSpec:
    """Sizes of lightning attention (MiniMax), with heads of d elements and blocks of t tokens; it computes in the model's format.

    Saved for n elements of all heads: queries, keys and values before and after their activation, 6 n; queries and keys with
    their decays, 2 n; scores of each block, t for each head; a state for each block; output before its norm and after, its gate
    and the input of the last matrix, 4 n. In fp32: the norm's input, n.
    """
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    size, tile = int(config.get("head_dim") or hidden // heads), int(config.get("block_size") or 256)
    values = heads * size
    return StateSpec(
        parameters=5 * hidden * values,
        heads=heads,
        head_elements=size * size,
        # scores of earlier tokens of the block, and their products with values; into the state, and out of it
        scan_products=heads * (2 * tile * size + 2 * size * size),
        own_size=3 * size,
        out_size=size,
        carry_elements=1,
        carry_products=heads * size * size,
        carry_wide=2 * values + heads,
        saved_elements=12 * values + heads * tile + heads * size * size // tile,
        saved_wide=values + 1,
        work_wide=9 * values,
        tile_tokens=tile,
    )


def gated_lru(config: Mapping[str, Any]) -> StateSpec:
    """Sizes of a recurrent block of RecurrentGemma, in which every one of w channels is a head with one number as its state.

    Saved: fourteen tensors of w in the model's format, of branches, convolution, gates and products; gates and states in fp32.
    """
    hidden = int(config["hidden_size"])
    width = int(config.get("lru_width") or hidden)
    return StateSpec(
        # two branches, two gates for each block of channels, and back
        parameters=3 * hidden * width + 2 * width * (width // int(config["num_attention_heads"])),
        heads=width,
        head_elements=1,
        tail_elements=(int(config.get("conv1d_width") or 4) - 1) * width,
        scan_products=width,
        own_size=2,
        out_size=1,
        carry_elements=1,
        carry_products=width,
        # logarithms of gates, their sum and its exponential, and what is added to the output
        carry_wide=4 * width,
        saved_elements=14 * width,
        saved_wide=2 * width,
        # in fp32, gates and states of the scan are tensors that are saved anyway
        copied_wide=-2 * width,
        # most of what is saved, since the forward of the class keeps its tensors until it ends
        work_wide=11 * width,
    )


def mixed_projections(config: Mapping[str, Any]) -> StateSpec:
    """Sizes of Zaya's mixing before attention: two convolutions of queries and keys, and values of the token before.

    Saved: inputs of both convolutions.
    """
    size, heads, read = int(config["head_dim"]), int(config["num_attention_heads"]), int(config["num_key_value_heads"])
    channels, widths = (heads + read) * size, (int(config.get("cca_time0") or 2), int(config.get("cca_time1") or 2))
    return StateSpec(
        # one weight for each tap of a channel, and a matrix for each tap of a head
        parameters=channels * (widths[0] + size * widths[1]),
        convolutions=2,
        tail_elements=(sum(widths) - 2) * channels + read * size // 2,
        saved_elements=2 * channels,
    )


# elements that RWKV's attention saves, in blocks of 16 tokens: 17 x 17 weights, which the state is one of, and their logarithms;
# three numbers
MEANS_SCAN = ScanSize(39, 16)


def mlstm_scan(key_size: int, value_size: int, tile_tokens: int) -> ScanSize:
    """Elements that the scan of an mLSTM saves, with keys of k and values of v elements and tiles of t tokens.

    Four t x t matrices of a tile, 4 t; queries, keys and keys with their weights, 3 k; values, what queries read and the outputs,
    3 v; a memory for each tile, k (v + 1) / t; thirteen numbers and two for each tile. A mask that all heads share is left out.
    """
    k, v, t = key_size, value_size, tile_tokens
    return ScanSize(4 * t + 3 * k + 3 * v + -(-(k * (v + 1) + 2) // t) + 13, t)


def rwkv(config: Mapping[str, Any]) -> StateSpec:
    """Sizes of a layer of RWKV, whose MLP reads the token before each token, so that it counts as a part of the mixer.

    Saved, for a attention channels and m channels of the MLP. In the model's format: the tokens before, and the mixes of both, of
    attention and of the MLP, 7 hidden sizes; the MLP's value and gate, 2 more; means, gate and their product, 3 a; the MLP's
    activation and its square, 2 m.
    """
    hidden = int(config["hidden_size"])
    channels = int(config.get("attention_hidden_size") or hidden)
    inner = int(config.get("intermediate_size") or 4 * hidden)
    return StateSpec(
        # key, value, gate and back; the MLP's key, value and gate
        parameters=4 * hidden * channels + 2 * hidden * inner + hidden * hidden,
        heads=channels,
        convolutions=2,
        head_elements=2,
        tail_elements=2 * hidden,
        # a weight, and its product with a value, for each token of a block and the state
        scan_products=2 * channels * (MEANS_SCAN.tile_tokens + 1),
        read_heads=channels,
        own_size=2,
        out_size=1,
        carry_elements=1,
        carry_products=4 * channels,
        # two sums for each channel, and two numbers that all of them share
        carry_wide=2 * channels + 2,
        saved_elements=9 * hidden + 3 * channels + 2 * inner,
        work_wide=4 * channels,
        scan_elements=MEANS_SCAN.token_elements,
        tile_tokens=MEANS_SCAN.tile_tokens,
    )


def xlstm(config: Mapping[str, Any]) -> StateSpec:
    """Sizes of a layer of xLSTM, whose MLP counts as a part of the mixer, since no layer has attention.

    Saved outside the scan, for v elements of all values and m of the MLP. In the model's format: output of the scan, its norm,
    the gate and their product, 4 v; gates of the memory; the MLP's input and its gate, activation, value and product, 4 m. In
    fp32: the norm's input and output, 2 v, and a number for each head.
    """
    hidden, heads, tile = int(config["hidden_size"]), int(config["num_heads"]), int(config.get("chunk_size") or 64)
    keys, values = int(hidden * config.get("qk_dim_factor", 0.5)), int(hidden * config.get("v_dim_factor", 1.0))
    multiple = int(config.get("ffn_round_up_to_multiple_of") or 64)
    inner = int((hidden * config.get("ffn_proj_factor", 2.667) + multiple - 1) // multiple) * multiple
    key, value = keys // heads, values // heads
    return StateSpec(
        # queries, keys, values, gate and back, gates of the memory; and the MLP
        parameters=hidden * (2 * keys + 3 * values + 2 * heads) + 3 * hidden * inner,
        heads=heads,
        convolutions=0,
        head_elements=(key + 1) * (value + 1),
        scan_products=heads * (tile * (key + value + 1) + 2 * key * (value + 1)),
        read_heads=heads,
        own_size=2 * key + value + 2,
        out_size=value,
        carry_elements=1,
        carry_products=heads * key * (value + 1),
        # queries; outputs before they are divided, and what queries read from an earlier state; decays and largest weights
        carry_wide=keys + 2 * values + 7 * heads,
        carry_copied=heads,
        saved_elements=4 * values + 2 * heads + hidden + 4 * inner,
        saved_wide=2 * values + heads,
        work_wide=heads * (2 * key + value + 4 * tile),
        scan_elements=mlstm_scan(key, value, tile).token_elements,
        tile_tokens=tile,
    )
