"""Input tensors of one chunk on one rank: made by the collators of `hf`, run by the executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TowerInputs:
    """Inputs of a model's towers for one image or video."""

    kind: Literal["image", "video"]
    # by the names of the arguments that towers take
    tensors: Mapping[str, Tensor]
    # number of features that towers return
    num_features: int
    # whether the graph of trained towers waits for the backward, or is made again there; None: whatever there is room for
    keeps: bool | None = None


@dataclass(frozen=True, slots=True)
class FeatureExchange:
    """Features of images that the ranks of a group run for each other."""

    # for each rank, rows of this rank's table that it needs, int64
    sends: tuple[Tensor, ...]
    # for each rank, number of rows that it sends here
    receives: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChunkMedia:
    """Images and videos with tokens in this rank's shard of a chunk of T tokens, M of which stand for a feature. All int64."""

    # those that this rank runs; their features form one table, one after another
    media: tuple[TowerInputs, ...]
    # [M], ascending, tokens whose embeddings features replace
    places: Tensor
    # [M], row for each of these tokens: of the table or, with an exchange, of all that arrives, rank after rank
    rows: Tensor
    # [3, T], positions of all tokens in time, height and width; None for a model that counts tokens
    positions: Tensor | None = None
    # whether the backward must reach all trained weights of the towers, even without an image: ranks that share weights in shards
    # sum gradients of the same ones
    reaches_all: bool = False
    # None if every rank of the group runs the images of its own tokens
    exchange: FeatureExchange | None = None

    def mapped(self, change: Callable[[Tensor], Tensor]) -> ChunkMedia:
        """Applies `change` to every tensor."""
        media = tuple(
            replace(each, tensors={name: change(tensor) for name, tensor in each.tensors.items()}) for each in self.media
        )
        positions = None if self.positions is None else change(self.positions)
        exchange = self.exchange and replace(self.exchange, sends=tuple(map(change, self.exchange.sends)))
        return ChunkMedia(media, change(self.places), change(self.rows), positions, self.reaches_all, exchange)


@dataclass(frozen=True, slots=True)
class ChunkInputs:
    """This rank's shard of one chunk, each of shape [1, T] and type int64: token ids, positions, next-token labels.

    For a head that classifies documents or tokens, `shift_labels` are the labels of the tokens themselves.
    """

    input_ids: Tensor
    position_ids: Tensor
    shift_labels: Tensor
    # weight of each next-token label in the loss, fp64; None if every label weighs 1
    loss_weights: Tensor | None = None
    # values [N, K] in fp32, if labels are numbers of its rows instead of classes; else None
    label_values: Tensor | None = None
    # None if the documents of the chunk have no images or videos
    media: ChunkMedia | None = None
    # hidden states [1, T, C] before the head of a teacher, on the host or a device; None without a teacher
    teacher_1TC: Tensor | None = None

    def pin_memory(self) -> ChunkInputs:
        """Copies the shard into pinned memory; called by the loader's pinning thread."""
        return self.mapped(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device) -> ChunkInputs:
        """Copies the shard to `device`, except for a teacher's states; copies from pinned memory do not block the host."""
        return self.mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> ChunkInputs:
        """Applies `change` to every tensor but a teacher's states, of which only tiles are moved."""
        ids, positions, labels = map(change, (self.input_ids, self.position_ids, self.shift_labels))
        weights, values = (None if each is None else change(each) for each in (self.loss_weights, self.label_values))
        media = None if self.media is None else self.media.mapped(change)
        return ChunkInputs(ids, positions, labels, weights, values, media, self.teacher_1TC)
