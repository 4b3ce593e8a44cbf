"""Counts bytes of a layer whose attention runs in pieces of its heads (`runtime/activations/head_pieces.py`).

Queries, keys, values and the work of attention exist for one piece at a time; outputs of all heads stay beside it, and so
do the module's input and the sum over pieces. Of adapters on the projections, the products of their first matrices stay. Letters
as in `layer.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from hf_longctx.plan.core.model_spec import ModelSpec
from hf_longctx.plan.core.sharding import ADAPTER_ELEMENTS, head_shares
from hf_longctx.plan.memory.layer import LayerBytes
from hf_longctx.plan.memory.saved_tensors import class_bytes, head_norm_bytes


class PiecedLayerBytes(LayerBytes):
    """Bytes of one layer under a policy with several pieces of heads; fields as in `LayerBytes`."""

    @cached_property
    def _piece(self) -> LayerBytes:
        """The bytes of a layer that has the heads of one piece alone."""
        model = piece_model(self.model, self.policy.head_pieces, max(1, self.load.block_ranks))
        return LayerBytes(model, self.load, replace(self.policy, head_pieces=1), self.tile)

    def _adapters(self) -> int:
        adapters, model = self.model.adapters, self.model
        if adapters.is_empty:
            return 0
        saved = super()._adapters() + (adapters.cut_bytes - adapters.attention_saved_bytes) * self.tokens
        # inputs and outputs in at least fp32, before and after dropout, and their gradients, for some tokens at a time
        width = max(model.hidden_size, model.query_size, model.output_size)
        return saved + 4 * max(4, model.bytes_per_element) * min(self.tokens * width, ADAPTER_ELEMENTS)

    @property
    def _saves_first_norm(self) -> bool:
        # the node that runs the pieces keeps the module's input
        return True

    @property
    def _replayed_mixing(self) -> int:
        # a replay saves the outputs of all pieces, and no queries, keys or values
        return class_bytes(self.model, "attention_output") * self._recomputed("attention_output")

    @property
    def _outputs(self) -> int:
        """Bytes of outputs and LSEs of all pieces."""
        return class_bytes(self.model, "attention_output") * self.tokens

    def _mixing_forward(self) -> int:
        # while the last piece runs: the outputs of those before it, and the sum over them, which is the layer's output
        d, *_ = self._sizes
        others = self._outputs - class_bytes(self._piece.model, "attention_output") * self.tokens
        host_start, host_stop = self._cuts["attention_output"]
        if host_stop > host_start:
            # they are on their way to the host, which `sent` counts
            others = 0
        return self._piece._mixing_forward() + d * self.tokens + max(0, others) + self._cut_bytes - self._piece._cut_bytes

    def _attention_backward(self) -> int:
        piece, (d, *_) = self._piece, self._sizes
        _, a, k, _ = piece._sizes
        # gradients of the layer's output and of the module's input, and of all its weights
        outside = self._replayed_attention - self._held_mlp + 2 * d * self.tokens
        if self.model.trains_layers:
            outside += (self.model.query_size + self.model.kv_size + self.model.output_size) * d
        kv = 2 * k * (self.tokens - self.load.sliced_tokens)
        made = a * self.tokens + kv + head_norm_bytes(piece.model) * self.tokens
        # projections before they are rotated, and what that makes
        rotation = (2 * k + max(4 * a, 2 * a + 3 * k)) * self.tokens
        # the gradient of the piece's output, of its queries, keys and values
        is_lone = len(self.load.documents) == 1 and not self.load.sliced_tokens
        gradients = (a + (piece._lone_sums if is_lone else a + 2 * k)) * self.tokens
        work = max(rotation, made + gradients + piece._exchange + piece._operator_backward())
        # before, the replay makes the outputs
        return max(outside + work, self._mixing_forward())


def piece_model(model: ModelSpec, head_pieces: int, block_ranks: int) -> ModelSpec:
    """The model with the heads of one piece: those of the rank with the most, times the ranks of a block.

    Several ranks may read one KV head, which all of them receive.
    """
    num_heads, num_kv = model.num_heads // head_pieces, model.num_kv_heads // head_pieces
    if block_ranks > 1:
        shares = head_shares(num_heads, num_kv, block_ranks)
        num_heads = block_ranks * max(share.num_q for share in shares)
        num_kv = max(num_kv, block_ranks * max(share.num_kv for share in shares))
    return replace(model, num_heads=num_heads, num_kv_heads=num_kv)
