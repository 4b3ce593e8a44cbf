"""Sizes of adapters: weights that are trained while the model's own are frozen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """Sizes of weights that are trained while the model's own are frozen; empty: all weights are trained.

    layer_parameters, layer_bytes: weights that adapters add to one layer. attention_saved_bytes, mlp_saved_bytes: bytes per token
    that adapters outside MLPs, and in them, save for backward, beside inputs that they read as they are. cut_bytes, tile_bytes:
    what these take instead where attention runs in pieces of heads, and where MLPs run in token tiles, per token of a tile.
    first_*, last_*: weights that are trained at the embedding and at the head. reads_*: whether an adapter reads, without a copy,
    what the first norm gives to attention, attention to its last projection, the second norm to the MLP, and what the last matrix
    of the MLP multiplies. Frozen matrices save no inputs, so layers save these only for adapters.
    """

    layer_parameters: int = 0
    layer_bytes: int = 0
    attention_saved_bytes: int = 0
    mlp_saved_bytes: int = 0
    first_parameters: int = 0
    first_bytes: int = 0
    last_parameters: int = 0
    last_bytes: int = 0
    cut_bytes: int = 0
    tile_bytes: int = 0
    reads_first_norm: bool = False
    reads_attention: bool = False
    reads_second_norm: bool = False
    reads_product: bool = False

    @property
    def layer_saved_bytes(self) -> int:
        """Bytes per token that the adapters of a layer save for backward."""
        return self.attention_saved_bytes + self.mlp_saved_bytes

    @property
    def is_empty(self) -> bool:
        return not (self.layer_parameters or self.first_parameters or self.last_parameters)

    def sizes(self, num_layers: int, is_first: bool, is_last: bool) -> tuple[int, int]:
        """Returns (trained parameters, bytes) of `num_layers` layers, with the embedding if first and the head if last."""
        count = num_layers * self.layer_parameters + is_first * self.first_parameters + is_last * self.last_parameters
        return count, num_layers * self.layer_bytes + is_first * self.first_bytes + is_last * self.last_bytes


# all weights of the model are trained
NO_ADAPTERS = AdapterSpec()
