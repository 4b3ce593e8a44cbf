"""Bytes of a rank: what chunks hold between their forward and their backward, and what works beside it.

A chunk's *held* bytes wait from its forward for its backward, on the device or on the host. Its *workspace* is the most that
one of its passes needs beyond all that is held when the forward is complete: a layer's replay and backward, or the loss
(`layer_memory.py`). A round adds up the chunks in flight, keys and values of slices (`book_memory.py`), and the workspace of the
running action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter

import numpy as np

from hf_longctx.plan.core.arrays import BoolArray, IntArray
from hf_longctx.plan.core.model_spec import ModelSpec
from hf_longctx.plan.core.sharding import shard_tokens
from hf_longctx.plan.core.types import (
    Action,
    ActivationPolicy,
    Chunk,
    GroupShape,
    LayerPolicy,
    SequenceGroup,
    StagePlan,
)
from hf_longctx.plan.memory.kv_book import BookKinds, book_kinds, book_moments, group_ends
from hf_longctx.plan.memory.layer import LayerBytes, Load, OutsideBytes

_KEEPS_EVERYTHING = LayerPolicy()


@dataclass(frozen=True, slots=True)
class ChunkBytes:
    """One chunk on one rank. device, host: held from its forward to its backward; the workspaces come on top of `device`.

    ending: all of the chunk that is on the device in the backward of its first layer.
    """

    device: int
    host: int
    forward_workspace: int
    backward_workspace: int
    ending: int

    @property
    def workspace(self) -> int:
        return max(self.forward_workspace, self.backward_workspace)


class Passes:
    """The forwards and backwards of a stage: where they stand among its actions, and what of."""

    def __init__(self, stage: StagePlan) -> None:
        self.places = [place for place, action in enumerate(stage.actions) if action.kind in ("F", "B")]
        self.actions = tuple(stage.actions[place] for place in self.places)
        self.is_forward: BoolArray = np.array([action.kind == "F" for action in self.actions], dtype=bool)
        self.chunks: IntArray = np.array([action.chunk for action in self.actions], dtype=np.int64)
        parts: IntArray = np.array([action.part for action in self.actions], dtype=np.int64)
        # chunk times parts, plus part
        self.cells: IntArray = self.chunks * len(stage.parts) + parts
        # cells whose backward follows their forward
        behind = self.cells[1:] == self.cells[:-1]
        self.at_once = frozenset(self.cells[:-1][behind & self.is_forward[:-1]].tolist())


# what a chunk's bytes take of a layer, and of what is outside of them
_LAYER_NUMBERS = attrgetter("held", "held_host", "forward", "backward", "input_host")
_OUTSIDE_NUMBERS = attrgetter("shared", "head", "forward", "backward")


class KnownBytes:
    """Bytes of chunks that were counted before for one model, so that runs of the same chunks do not count them again.

    Everything is known by identity and kept alive: to compare documents and shares would take longer than to count.
    """

    def __init__(self) -> None:
        self._layers: dict[tuple[int, int, int], LayerBytes] = {}
        # a group under other policies has the same
        self._loads: dict[tuple[int, GroupShape, int, bool, bool], tuple[tuple[Chunk, ...], list[Load]]] = {}
        self._passes: dict[int, tuple[tuple[Action, ...], Passes]] = {}
        self._books: dict[tuple[int, GroupShape, int], tuple[tuple[Chunk, ...], BookKinds]] = {}
        # of chunks on one part of a stage, by what they are of
        self.parts: dict[object, IntArray] = {}
        # of layers, each in a row of a table
        self._places: dict[int, int] = {}
        self._numbers: list[tuple[int, ...]] = []
        self._table: IntArray = np.empty((0, 5), dtype=np.int64)
        self._rows: dict[tuple[int, int, int], tuple[tuple[LayerPolicy, ...], list[int], int]] = {}
        self._outside: dict[tuple[int, bool, bool, int], tuple[int, ...]] = {}

    def book(self, model: ModelSpec, group: SequenceGroup, position: int) -> BookKinds:
        """What the group's chunks change in the K/V book."""
        key = id(group.chunks), group.shape, position
        if key not in self._books:
            self._books[key] = group.chunks, book_kinds(model, group, position)
        return self._books[key][1]

    def passes(self, stage: StagePlan) -> Passes:
        """Of the stage's actions, which are the same under other policies."""
        if id(stage.actions) not in self._passes:
            self._passes[id(stage.actions)] = stage.actions, Passes(stage)
        return self._passes[id(stage.actions)][1]

    def loads(self, group: SequenceGroup, position: int, trains_weights: bool = True, tiles_loss: bool = True) -> list[Load]:
        """The loads of the group's chunks, whatever part of the model they are on."""
        key = id(group.chunks), group.shape, position, trains_weights, tiles_loss
        if key not in self._loads:
            common, ends = Load(0, (), 0, trains_weights=trains_weights, tiles_loss=tiles_loss), group_ends(group)
            found = [chunk_load(group, chunk, position, common, ends) for chunk in group.chunks]
            self._loads[key] = group.chunks, found
        return self._loads[key][1]

    def layers(
        self, model: ModelSpec, load: Load, layers: tuple[LayerPolicy, ...], num_layers: int, tile_tokens: int
    ) -> list[int]:
        """Rows of `numbers` of all layers of a load of `loads`, those without a policy too."""
        key = id(load), id(layers), tile_tokens
        if key not in self._rows:
            found = [self._row(model, load, layer, tile_tokens) for layer in layers]
            self._rows[key] = layers, found, self._row(model, load, _KEEPS_EVERYTHING, tile_tokens)
        _, found, kept = self._rows[key]
        return (found + [kept] * (num_layers - len(found)))[:num_layers]

    def numbers(self, rows: Sequence[Sequence[int]]) -> IntArray:
        """`_LAYER_NUMBERS` of these rows, (len(rows), layers, 5)."""
        if len(self._table) < len(self._numbers):
            self._table = np.array(self._numbers, dtype=np.int64)
        found: IntArray = self._table[np.array(rows, dtype=np.int64)]
        return found

    def outside(self, model: ModelSpec, load: Load, has_head: bool, keeps_gradients: bool, loss_tile: int) -> tuple[int, ...]:
        """`_OUTSIDE_NUMBERS` of a load of `loads`."""
        key = id(load), has_head, keeps_gradients, loss_tile
        if key not in self._outside:
            own = replace(load, has_head=has_head, keeps_gradients=keeps_gradients)
            self._outside[key] = _OUTSIDE_NUMBERS(OutsideBytes(model, own, loss_tile))
        return self._outside[key]

    def _row(self, model: ModelSpec, load: Load, policy: LayerPolicy, tile_tokens: int) -> int:
        found = self.layer(model, load, policy, tile_tokens)
        if id(found) not in self._places:
            self._places[id(found)] = len(self._numbers)
            self._numbers.append(_LAYER_NUMBERS(found))
        return self._places[id(found)]

    def layer(self, model: ModelSpec, load: Load, policy: LayerPolicy, tile_tokens: int) -> LayerBytes:
        """One layer of a load of `loads`."""
        policy = policy if policy.shares else _KEEPS_EVERYTHING
        key = id(load), id(policy), tile_tokens
        if key not in self._layers:
            self._layers[key] = LayerBytes(model, load, policy, tile_tokens)
        return self._layers[key]


@dataclass(frozen=True, slots=True, eq=False)
class RoundMoments:
    """What `RoundBytes` says, of each pass of a round."""

    saved: IntArray
    host: IntArray
    book: IntArray
    workspace: IntArray
    peak: IntArray


@dataclass(frozen=True, slots=True)
class RoundBytes:
    """One round on one rank. saved, host: the most that chunks in flight hold; book: the most of keys, values and their
    gradients; workspace: the largest of an action; peak: the most on the device at one moment, less than their sum.
    """

    saved: int
    host: int
    book: int
    workspace: int
    peak: int


def chunk_bytes(model: ModelSpec, load: Load, policy: ActivationPolicy | None = None, loss_tile_tokens: int = 0) -> ChunkBytes:
    """What one chunk holds and works with under `policy`; without one everything is kept.

    loss_tile_tokens: a tile of the loss alone, where the policy has none.
    """
    tile_tokens = policy.tile_tokens if policy else 0
    policies = [*(policy.layers if policy else ()), *[_KEEPS_EVERYTHING] * load.num_layers][: load.num_layers]
    # layers alike are counted once
    counted = {id(layer): _LAYER_NUMBERS(LayerBytes(model, load, layer, tile_tokens)) for layer in policies}
    outside = OutsideBytes(model, load, (tile_tokens or loss_tile_tokens) if load.tiles_loss else 0)
    found = _summed(
        np.array([[counted[id(layer)] for layer in policies]], dtype=np.int64),
        np.array([_OUTSIDE_NUMBERS(outside)], dtype=np.int64),
        np.array([load.receives]),
    )
    return ChunkBytes(*found[0].tolist())


def _summed(layers: IntArray, outside: IntArray, receives: BoolArray) -> IntArray:
    """The numbers of `ChunkBytes` of many chunks on a part of the model, (chunks, 5).

    layers: `_LAYER_NUMBERS` of every layer, (chunks, layers, 5). outside: `_OUTSIDE_NUMBERS`, (chunks, 4). receives: see `Load`.
    """
    held, host, forward, backward, input_host = np.moveaxis(layers, 2, 0)
    shared, head, loss_forward, loss_backward = outside.T
    # the model's forward holds the embeddings to its end, wherever the first layer's input lies; hidden states of another part
    # wait for their gradient, the model's own embeddings are gone with the forward
    waiting, embeddings = np.where(receives, input_host[:, 0], 0), np.where(receives, 0, input_host[:, 0])
    under = (shared + waiting)[:, None]
    upto = under + np.cumsum(held, axis=1)
    # what was held of a layer is part of its backward, and the next one's comes from the host meanwhile
    arriving = host.copy()
    arriving[:, 1:] += host[:, :-1]
    most_forward = np.max(upto - held + forward, axis=1)
    most_backward = np.max(upto + arriving + backward, axis=1)
    below = upto[:, -1]
    device = below + head
    most_forward = np.maximum(most_forward, below + loss_forward) + embeddings
    most_backward = np.maximum(most_backward, below + loss_backward)
    ending = under[:, 0] + held[:, 0] + host[:, 0] + backward[:, 0]
    work = (np.maximum(0, most - device) for most in (most_forward, most_backward))
    return np.stack([device, host.sum(axis=1), *work, ending], axis=1)


def round_bytes(
    model: ModelSpec,
    group: SequenceGroup,
    stage: StagePlan,
    position: int = 0,
    trains_weights: bool = True,
    tiles_loss: bool = True,
    copying: Sequence[int] = (),
    known: KnownBytes | None = None,
) -> RoundBytes:
    """What the rank at `position` of the group holds and works with in one round of the stage, whose F and B are walked.

    copying: for each F and B in order, bytes that are on their way to the host and still on the device. known: what calls for
    the same model share, so that chunks alike are counted once.
    """
    moments = round_moments(model, group, stage, position, trains_weights, tiles_loss, copying, known)
    return RoundBytes(*(int(getattr(moments, field.name).max(initial=0)) for field in fields(RoundMoments)))


def round_moments(
    model: ModelSpec,
    group: SequenceGroup,
    stage: StagePlan,
    position: int = 0,
    trains_weights: bool = True,
    tiles_loss: bool = True,
    copying: Sequence[int] = (),
    known: KnownBytes | None = None,
) -> RoundMoments:
    """As `round_bytes`, for each F and B of the stage in order. Slices run forward in their order, backward in reverse."""
    known = KnownBytes() if known is None else known
    passes = known.passes(stage)
    chunks = _part_chunks(model, group, stage, passes, position, trains_weights, tiles_loss, known)
    place, is_forward = passes.cells, passes.is_forward
    device, host, forward_workspace, backward_workspace, ending = chunks[place].T
    work = np.where(is_forward, forward_workspace, backward_workspace)
    # a chunk is held from its forward on, and in its own backward still
    saved, on_host = (np.cumsum(np.where(is_forward, each, -each)) + np.where(is_forward, 0, each) for each in (device, host))
    kinds = known.book(model, group, position)
    first, last, most, others = book_moments(model, stage, kinds, len(group.chunks), place, is_forward)
    peak = np.maximum(saved + work + first, saved - device + ending + last) + others
    if len(copying):
        peak += np.array(copying, dtype=np.int64)
    return RoundMoments(saved, on_host, most + others, work, peak)


def _part_chunks(
    model: ModelSpec,
    group: SequenceGroup,
    stage: StagePlan,
    passes: Passes,
    position: int,
    trains_weights: bool,
    tiles_loss: bool,
    known: KnownBytes,
) -> IntArray:
    """The numbers of `ChunkBytes` of every chunk on every part of a stage, (chunks * parts, 5).

    Output head and loss are on the last part of the last stage.
    """
    policies = {(policy.chunk, policy.part): policy for policy in stage.activations}
    num_parts, is_last = len(stage.parts), stage.stage == len(group.stages) - 1
    loads = known.loads(group, position, trains_weights, tiles_loss)
    found = np.empty((len(loads), num_parts, 5), dtype=np.int64)
    for part, owned in enumerate(stage.parts):
        has_head = is_last and part == num_parts - 1
        own = [policies.get((chunk.index, part)) for chunk in group.chunks]
        under = tuple((policy.layers, policy.tile_tokens) if policy else ((), 0) for policy in own)
        at_once = tuple(has_head and chunk.index * num_parts + part in passes.at_once for chunk in group.chunks)
        is_first = (stage.stage, part) == (0, 0)
        # stages alike have the same
        by_identity = tuple((id(layers), tile_tokens) for layers, tile_tokens in under)
        key = id(loads), owned.num_layers, has_head, at_once, is_first, by_identity
        if key not in known.parts:
            rows = [
                known.layers(model, load, layers, owned.num_layers, tile_tokens)
                for load, (layers, tile_tokens) in zip(loads, under, strict=True)
            ]
            outside = [
                known.outside(model, load, has_head, keeps_gradients, tile_tokens if tiles_loss else 0)
                for load, (_, tile_tokens), keeps_gradients in zip(loads, under, at_once, strict=True)
            ]
            # all the same where nothing moves
            receives = np.array([bool(layers) and not is_first for layers, _ in under])
            known.parts[key] = _summed(known.numbers(rows), np.array(outside, dtype=np.int64), receives)
        found[:, part] = known.parts[key]
    return found.reshape(-1, 5)


def chunk_load(group: SequenceGroup, chunk: Chunk, position: int, like: Load, ends: Mapping[int, int] | None = None) -> Load:
    """The rank's load of one chunk of its group, in the settings of `like`. Documents are shared evenly.

    ends: where every sequence of the group ends, for a caller with many chunks.
    """
    degree = group.degree
    ends = group_ends(group) if ends is None else ends
    tokens = shard_tokens(chunk, group.shape)[position]
    slices = [span for span in chunk.spans if span.start or span.stop < ends[span.sequence]]
    return replace(
        like,
        num_tokens=tokens,
        documents=tuple(-(-span.num_tokens // degree) for span in chunk.spans) or (1,),
        front_tokens=-(-max((span.start for span in slices), default=0) // degree),
        sliced_tokens=min(tokens, sum(-(-span.num_tokens // degree) for span in slices)),
        is_shared=degree > 1,
    )
