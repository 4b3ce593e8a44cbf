"""Finds the longest sequence that a group of ranks holds alone, as it is or in slices: a number that every later plan can keep.

One chunk of a sequence may be too large for a device, although slices of it would fit: then a layer works on fewer tokens at a
time. Packs of short sequences gain nothing, so a plan may hold more tokens of one sequence than of several.

Ways to run a sequence are counted here whose bytes depend on lengths alone, and not on seconds, which are measured anew while a
run trains: one chunk, or slices of equal tokens, that keep no more than layer inputs. Within a *piece* of lengths, a way needs
more bytes for more tokens, so that the end of a piece tells of all its lengths. A piece ends where a slice is full, and where
with more tokens attention's backward would take fewer heads at once, a scan would run in blocks, or a window would not reach to
the start. So every length up to the one that is found fits in one of the ways, on which `RoomMaker` falls back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from hf_longctx.plan.activations.fit import lean_group
from hf_longctx.plan.chunks.slices import LEAST_SLICE_TOKENS, SLICE_COUNTS, cut_evenly, even_slice
from hf_longctx.plan.core.model_spec import ModelSpec
from hf_longctx.plan.core.planner_config import ActivationBudget
from hf_longctx.plan.core.sharding import PART_ELEMENTS
from hf_longctx.plan.core.types import Action, Chunk, GroupShape, LayerRange, Parameters, SequenceGroup, Span, StagePlan
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.round_bytes import RoundBytes
from hf_longctx.plan.memory.saved_tensors import class_bytes

# numbers of slices of the ways; 1: the sequence as it is
WAYS = (1, *SLICE_COUNTS)
# stop bisecting a piece at one part in so many of its lengths, and searching where a way adds less than that
_PRECISION = 256


def in_equal_slices(
    groups: Sequence[SequenceGroup], model: ModelSpec, budget: ActivationBudget, num_slices: int
) -> list[SequenceGroup]:
    """Groups of at most one sequence each, cut into equal slices that run in step, under policies that keep layer inputs alone.

    Inputs lie whole on one side: on the host those of the first slices and layers, as far as it has room.
    """
    cut = cut_evenly(groups, num_slices) if num_slices > 1 else groups
    return [_lean(group, model, budget) for group in cut]


def _lean(group: SequenceGroup, model: ModelSpec, budget: ActivationBudget) -> SequenceGroup:
    left_bytes, token_bytes = budget.host_bytes, class_bytes(model, "layer_input")

    def host_share(num_tokens: int, num_layers: int) -> int:
        nonlocal left_bytes
        layer_bytes = num_tokens * token_bytes
        share = min(num_layers, left_bytes // layer_bytes) * layer_bytes
        # once a layer finds no room, no later one looks for it
        left_bytes = left_bytes - share if share == num_layers * layer_bytes else 0
        return share

    return lean_group(group, model, budget.tile_tokens, host_share)


# a forecast asks for the same few models and devices several times
@lru_cache(maxsize=256)
def longest_alone(
    model: ModelSpec, budget: ActivationBudget, shape: GroupShape, parameters: Parameters, shard_ranks: int, known: int, most: int
) -> int:
    """Tokens up to which every sequence fits a group of this shape alone, at most `most`. known: those that fit in one chunk.

    Rings get no more than that: how evenly they share out tokens changes from length to length.
    """
    if shape.num_blocks > 1:
        return min(known, most)
    return _LoneSequences(model, budget, shape, parameters, shard_ranks).longest(known, most)


@dataclass(frozen=True)
class _LoneSequences:
    """Sequences that are alone on the ranks of a group, and their bytes."""

    model: ModelSpec
    budget: ActivationBudget
    shape: GroupShape
    parameters: Parameters
    shard_ranks: int
    _known: dict[tuple[int, int], RoundBytes] = field(default_factory=dict)

    def longest(self, known: int, most: int) -> int:
        """See `longest_alone`."""
        length = begun = known
        while length < most:
            for num_slices in WAYS:
                length, is_hopeless = self._reach(length, num_slices, most)
                if is_hopeless:
                    break
            if length - begun <= begun // _PRECISION:
                break
            begun = length
        return min(length, most)

    def _reach(self, length: int, num_slices: int, most: int) -> tuple[int, bool]:
        """The length up to which every one above `length` fits in so many slices; whether more slices cannot fit above it.

        More slices leave more gradients of keys and values.
        """
        while length < most:
            end = min(most, self._piece_end(length, num_slices))
            if self._fits(end, num_slices):
                length = end
                continue
            while end - length > max(1, length // _PRECISION):
                middle = (length + end) // 2
                length, end = (middle, end) if self._fits(middle, num_slices) else (length, middle)
            return length, num_slices > 1 and self._counted(end, num_slices).book > self.budget.device_bytes
        return length, True

    def _piece_end(self, length: int, num_slices: int) -> int:
        """The last length of the piece that begins after `length`."""
        size = even_slice(length + 1, num_slices)
        # tokens of the last slice begin here; it is full at the end
        start = length // size * size if num_slices > 1 else 0
        degree = self.shape.degree
        ends = [start + degree * (keys // degree - -(-start // degree)) for keys in self._most_keys]
        ends += [start + degree * self.model.states.block_tokens, *(window or 0 for window in self.model.windows)]
        ends += [start + size] if num_slices > 1 else []
        return min((end for end in ends if end > length), default=2 * length + 1)

    @cached_property
    def _most_keys(self) -> list[int]:
        """Most keys for which attention's backward takes so many heads at once, for every number of heads."""
        head_dims = {own.head_dim for own in self.model.heads} | {self.model.head_dim}
        return sorted({PART_ELEMENTS // (heads * dim) for dim in head_dims for heads in range(1, self.model.num_heads + 1)})

    def _fits(self, length: int, num_slices: int) -> bool:
        if num_slices > 1 and even_slice(length, num_slices) < LEAST_SLICE_TOKENS * self.shape.degree:
            return False
        found, waiting = self._counted(length, num_slices), self._waiting if num_slices > 1 else 0
        return found.peak + waiting <= self.budget.device_bytes and found.host <= self.budget.host_bytes

    def _counted(self, length: int, num_slices: int) -> RoundBytes:
        if (length, num_slices) not in self._known:
            stage = StagePlan(0, (LayerRange(0, self.model.num_layers),), (Action("F", 0, 0), Action("B", 0, 0)))
            chunk = Chunk(0, (Span(0, 0, length),))
            group = SequenceGroup.of(self.shape, range(self.shape.degree), (chunk,), (stage,))
            (sliced,) = in_equal_slices([group], self.model, self.budget, num_slices)
            self._known[length, num_slices] = self._byte_model.moments(sliced, sliced.stages[0]).most
        return self._known[length, num_slices]

    @cached_property
    def _byte_model(self) -> ByteModel:
        return ByteModel(self.model)

    @cached_property
    def _waiting(self) -> int:
        """Bytes of gradients that wait whole until the last of several backwards."""
        return self._byte_model.accumulated(self.parameters, self.shard_ranks)
