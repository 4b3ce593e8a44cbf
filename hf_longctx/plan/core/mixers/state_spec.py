"""Describes layers that carry a state along the sequence: what they compute, save, send and leave at the end of a slice."""

from __future__ import annotations

from dataclasses import dataclass

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
    """Sizes of layers that carry a state along the sequence, all of one shape; empty: there are none.

    layers: for each layer of the model whether it carries a state. attends: for each layer whether it has attention; empty: those
    without a state have it. parameters: matrix parameters of the mixer. heads: heads with a state of their own (0: the layer only
    convolves). scans: calls of the scan in a layer, among which the heads are shared out. convolutions: calls of functions that
    read tokens before a slice. head_elements: fp32 elements of one head's state. tail_elements: elements of the tokens that the
    convolutions read before a slice. scan_products: multiplications of the scan for a token.

    Sent per token in a Ulysses group: read_size elements of each of read_heads heads, which several heads with a state read;
    own_size elements and own_wide fp32 elements of each head with a state; and back out_size and out_wide of each.

    Where ranks pass states on: carry_elements, fp32 elements for each head that say how tokens change an earlier state. For a
    token whose document begins on another rank: carry_products, multiplications more of the scan; carry_wide, fp32 elements more
    that are saved, and carry_copied more of them in a model of 16 bits. slice_wide: fp32 elements more that are saved for a token
    of a slice after the first, where ranks do not pass states on.

    Saved per token for backward, by transformers' own torch functions, which plans run: saved_elements in the model's format and
    saved_wide in fp32 outside the scan. A scan in one piece saves scan_elements of each head and runs tile_tokens at once
    (`ScanSize`), and saves copied_wide more in a model of fp32. A scan in blocks saves what ranks would be sent, and the states
    between blocks. work_wide: fp32 elements per token that are alive at once inside the forward of the scan.
    """

    layers: tuple[bool, ...] = ()
    attends: tuple[bool, ...] = ()
    parameters: int = 0
    heads: int = 0
    scans: int = 1
    convolutions: int = 1
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
    carry_copied: int = 0
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
    def attending(self) -> tuple[bool, ...]:
        """For each layer of the model whether it has attention."""
        return self.attends or tuple(not has_state for has_state in self.layers)

    @property
    def block_tokens(self) -> int:
        """Most tokens of a chunk on a rank whose scan runs in one piece; a rank that runs a part of the heads has more tokens."""
        return ScanSize(self.scan_elements, self.tile_tokens).block_tokens(self.heads // self.scans)

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
