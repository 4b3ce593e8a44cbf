"""The tensors a rank feeds its model for one chunk: made by the collators of `hf`, run by the executor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ChunkInputs:
    """This rank's shard of one chunk, each of shape [1, T] and type int64: token ids, positions, next-token labels."""

    input_ids: Tensor
    position_ids: Tensor
    shift_labels: Tensor

    def pin_memory(self) -> ChunkInputs:
        """Copy of the shard in pinned memory; called by the loader's pinning thread."""
        return ChunkInputs(*(t.pin_memory() for t in (self.input_ids, self.position_ids, self.shift_labels)))

    def to(self, device: torch.device) -> ChunkInputs:
        """Copy of the shard on `device`; from pinned memory the copies do not block the host."""
        return ChunkInputs(*(t.to(device, non_blocking=True) for t in (self.input_ids, self.position_ids, self.shift_labels)))
