"""Reads low-bit moments from shards that end inside their blocks, which torch.distributed.checkpoint cannot cut.

If every piece of a shard consists of whole blocks, codes and scales are copied unchanged. Otherwise, as when a run of two ranks
continues on three, stored shards are read whole and dequantised, cut, and rounded again on the blocks of the new shard.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from hf_longctx.runtime.parameters.low_bit import BLOCK_ELEMENTS, is_low_bit


class BlockReads:
    """Replaces the reads of a plan that cut blocks, and gives a planner the tensors to read into.

    target_of: finds this rank's tensor, perhaps low-bit, in the state to load for a read.
    """

    def __init__(self, metadata: Metadata, target_of: Callable[[MetadataIndex], Tensor]) -> None:
        self._metadata, self._target_of = metadata, target_of
        # widened read -> requested read
        self._asked: dict[ReadItem, ReadItem] = {}
        # plain values of targets that cannot be filled piece by piece, and reads still missing for each
        self._plain: dict[MetadataIndex, Tensor] = {}
        self._left: Counter[MetadataIndex] = Counter()

    def widen(self, plan: LoadPlan) -> LoadPlan:
        """Returns the plan with every read that cuts blocks widened to a whole stored shard."""
        cut = {item.dest_index for item in plan.items if self._cuts(item)}
        items = [self._widened(item) if item.dest_index in cut else item for item in plan.items]
        return replace(plan, items=items)

    def scratch(self, item: ReadItem) -> Tensor | None:
        """Allocates a tensor for a whole stored shard; returns None if the read can go directly into its target."""
        if item not in self._asked:
            return None
        return torch.empty(item.lengths, dtype=_wide_type(self._target_of(item.dest_index)))

    def take(self, item: ReadItem, found: Tensor) -> None:
        """Puts the wanted part of a stored shard into its target, which is rounded after its last part."""
        if item not in self._asked:
            return
        asked = self._asked[item]
        index, target = asked.dest_index, self._target_of(asked.dest_index)
        if is_low_bit(target) and index not in self._plain:
            self._plain[index] = torch.zeros(target.shape, dtype=_wide_type(target))
        held = self._plain.get(index, target)
        _part(held, asked.dest_offsets, asked.lengths).copy_(_part(found, asked.storage_offsets, asked.lengths))
        self._left[index] -= 1
        if not self._left[index] and index in self._plain:
            target.copy_(self._plain.pop(index).to(target.device))

    def _cuts(self, item: ReadItem) -> bool:
        if item.type != LoadItemType.TENSOR or len(item.lengths) == 0:
            return False
        target, stored = self._target_of(item.dest_index), self._sizes(item)
        is_whole = item.lengths == stored and item.lengths == target.shape
        row = math.prod(stored[1:])
        ends = [first * row for first in (item.dest_offsets[0], item.storage_offsets[0], item.lengths[0])]
        # only moments are low-bit; a plain target may have low-bit shards, and reading shards whole is always correct
        return not is_whole and any(end % BLOCK_ELEMENTS for end in ends) and target.is_floating_point()

    def _widened(self, item: ReadItem) -> ReadItem:
        sizes = self._sizes(item)
        widened = replace(
            item,
            storage_offsets=torch.Size([0] * len(sizes)),
            dest_offsets=torch.Size([0] * len(sizes)),
            lengths=sizes,
        )
        # pieces of one stored shard may go to several targets, whose indexes distinguish the reads
        self._asked[widened] = item
        self._left[item.dest_index] += 1
        return widened

    def _sizes(self, item: ReadItem) -> torch.Size:
        stored = self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(stored, TensorStorageMetadata)
        index = item.storage_index
        return next(chunk.sizes for chunk in stored.chunks if index.offset is None or chunk.offsets == index.offset)


def _wide_type(target: Tensor) -> torch.dtype:
    return torch.promote_types(target.dtype, torch.float32)


def _part(whole: Tensor, offsets: torch.Size, lengths: torch.Size) -> Tensor:
    for dim, (first, length) in enumerate(zip(offsets, lengths, strict=True)):
        whole = whole.narrow(dim, first, length)
    return whole
