"""Input tensors of one chunk on one rank: made by the collators of `hf`, run by the executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ChunkInputs:
    """This rank's shard of one chunk, each of shape [1, T] and type int64: token ids, positions, next-token labels.

    loss_weights: the weight of each next-token label in the loss, fp64; None if every label weighs 1. label_values: values [N, K]
    in fp32, if labels are numbers of its rows instead of classes; else None.
    For a head that classifies documents or tokens, `shift_labels` are the labels of the tokens themselves.
    """

    input_ids: Tensor
    position_ids: Tensor
    shift_labels: Tensor
    loss_weights: Tensor | None = None
    label_values: Tensor | None = None

    def pin_memory(self) -> ChunkInputs:
        """Copies the shard into pinned memory; called by the loader's pinning thread."""
        return self.mapped(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device) -> ChunkInputs:
        """Copies the shard to `device`; copies from pinned memory do not block the host."""
        return self.mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> ChunkInputs:
        """Applies `change` to every tensor."""
        ids, positions, labels = map(change, (self.input_ids, self.position_ids, self.shift_labels))
        weights, values = (None if each is None else change(each) for each in (self.loss_weights, self.label_values))
        return ChunkInputs(ids, positions, labels, weights, values)
