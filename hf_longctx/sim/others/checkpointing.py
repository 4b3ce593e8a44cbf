"""Activation checkpointing as other systems have it: one setting for a whole run, the same in every layer.

    everything kept           no checkpointing
    selective checkpointing   layer inputs and attention's outputs are kept, everything else is run again (`selective` of TRL,
                              "selective" of NeMo and axolotl)
    full checkpointing        layer inputs alone are kept (`gradient_checkpointing=True`)

Seconds and bytes are those of the models that price our own plans: a backward runs the layers' forward again, without attention
where its outputs are kept, and without the exchanges that a replay repeats. The loss runs in tiles (`LEAST_TILE_TOKENS`) where
that takes fewer bytes, since users of these systems would take Liger's fused loss or cut cross entropy; norms and MLPs run whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from hf_longctx.plan.core.types import (
    LEAST_TILE_TOKENS,
    ActivationPolicy,
    Chunk,
    FloatArray,
    GroupShape,
    LayerPolicy,
    SequenceGroup,
    TensorClass,
    TensorShare,
)
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.layer import Load
from hf_longctx.plan.memory.stage import chunk_load
from hf_longctx.plan.model.attention_pairs import AttentionPairs


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """Classes of saved tensors that the backward of every layer computes again, and what tables call that."""

    name: str
    recomputed: tuple[TensorClass, ...] = ()

    @property
    def replays_attention(self) -> bool:
        return "attention_output" in self.recomputed

    def policy(self, num_layers: int, tile_tokens: int = 0) -> ActivationPolicy:
        """The policy of a chunk; without tiles of its own, the loss is tiled by whoever counts its bytes."""
        layer = LayerPolicy(tuple(TensorShare(name, recompute=1.0) for name in self.recomputed))
        return ActivationPolicy(0, 0, (layer,) * num_layers if self.recomputed else (), tile_tokens)


KEPT = Checkpointing("everything kept")
SELECTIVE = Checkpointing("selective checkpointing", ("qkv", "mlp"))
FULL = Checkpointing("full checkpointing", ("attention_output", "qkv", "mlp"))
# the quickest first, which is also the one that takes the most memory
CHECKPOINTINGS = (KEPT, SELECTIVE, FULL)
# tiles sum the gradient of the head in fp32, which may take more than the logits of few tokens
_LOSS_TILES = (0, LEAST_TILE_TOKENS)


@dataclass(frozen=True)
class CheckpointedCosts(CostModel):
    """Costs of chunks whose backward runs the forward of all layers again, as `checkpointing` says."""

    checkpointing: Checkpointing = KEPT

    @classmethod
    def of(cls, costs: CostModel, checkpointing: Checkpointing) -> CheckpointedCosts:
        """Costs of the same model and cluster with these replays."""
        values = {field.name: getattr(costs, field.name) for field in fields(CostModel)}
        return cls(**values, checkpointing=checkpointing)

    def local_s(self, chunk: Chunk, shape: GroupShape, is_backward: bool, pairs: AttentionPairs | None = None) -> float:
        """Seconds of one pass of `chunk`, with the replay that its backward begins with."""
        seconds = super().local_s(chunk, shape, is_backward, pairs)
        if not is_backward or not self.checkpointing.recomputed:
            return seconds
        pairs = self.attention_pairs() if pairs is None else pairs
        num_tokens = float(max(chunk.num_tokens, shape.degree))
        return seconds + self._replay_group_s + float(self.replay_s(num_tokens, pairs.of_chunk(chunk), shape))

    def sequences_s(self, lengths: Sequence[int] | FloatArray, shape: GroupShape) -> FloatArray:
        """Seconds that each whole sequence adds to a group of `shape`, forward plus backward, with its replay."""
        seconds = super().sequences_s(lengths, shape)
        if not self.checkpointing.recomputed:
            return seconds
        tokens = np.asarray(lengths, dtype=np.float64)
        pairs = tokens * self.attention_pairs().seen(np.zeros_like(tokens), tokens)
        return seconds + self.replay_s(tokens, pairs, shape)

    def group_s(self, shape: GroupShape) -> float:
        """Seconds that a group of `shape` spends on any chunk, forward plus backward, with its replay."""
        return super().group_s(shape) + (self._replay_group_s if self.checkpointing.recomputed else 0.0)

    @property
    def _replay_group_s(self) -> float:
        """Seconds of messages to spread experts in a replay, however few the tokens."""
        return self.expert_exchange_s(0.0) if self.model.experts.are_spread else 0.0

    def replay_s(self, num_tokens: float | FloatArray, num_pairs: float | FloatArray, shape: GroupShape) -> FloatArray:
        """Seconds that tokens and pairs take when a group of `shape` runs all layers forward again, as in `layer_slot`."""
        forward = self.coefficients.forward
        own_tokens = np.asarray(num_tokens, dtype=np.float64) / shape.degree
        seconds = forward.token_s * (1 - self.head_share(is_backward=False)) * own_tokens
        if self.model.experts.are_spread:
            # tokens travel to experts once more
            seconds = seconds + (self.expert_exchange_s(1.0) - self.expert_exchange_s(0.0)) * own_tokens
        if self.checkpointing.replays_attention:
            seconds = seconds + forward.pair_s * np.asarray(num_pairs, dtype=np.float64) / shape.degree
        return seconds


def most_tokens(byte_model: ByteModel, device_bytes: int, checkpointing: Checkpointing, like: Load) -> int:
    """Most tokens of one document on a rank, in `device_bytes` besides the states. like: how its group shares it."""
    policy = checkpointing.policy(byte_model.model.num_layers)
    return max(byte_model.longest(device_bytes, 0, lambda _: (policy,), like, tile) for tile in _LOSS_TILES)


def group_bytes(byte_model: ByteModel, group: SequenceGroup, checkpointing: Checkpointing) -> int:
    """Most bytes besides the states on the first rank of a group with one chunk, which has the most."""
    (chunk,) = group.chunks
    num_layers = byte_model.model.num_layers
    load = chunk_load(group, chunk, 0, Load(0, (), num_layers))
    found = (byte_model.chunk(load, checkpointing.policy(num_layers), tile) for tile in _LOSS_TILES)
    return min(one.device + one.workspace for one in found)


def document_load(num_layers: int, shape: GroupShape) -> Load:
    """Load of a rank's share of a document in a group of this shape; its tokens are the caller's."""
    document = Load.document(1, num_layers)
    return replace(document, is_shared=shape.degree > 1, num_blocks=shape.num_blocks, block_ranks=shape.ulysses)
