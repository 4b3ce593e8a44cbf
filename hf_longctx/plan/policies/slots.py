"""Slots of a policy program: tensors that a layer saves for a chunk, with the seconds to move or recompute them.

`SlotTable` has all slots of a program as arrays, computed once for all amounts of memory that are tried with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hf_longctx.plan.core.types import Chunk, FloatArray, GroupShape, IntArray, LayerRange, TensorClass
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.memory.saved_tensors import class_bytes
from hf_longctx.plan.model.attention_pairs import FULL, AttentionPairs
from hf_longctx.plan.model.layers import ATTENTION, LayerKind
from hf_longctx.plan.model.model_spec import KindShares
from hf_longctx.plan.solver import LinearProgram

# number of equal segments in a class's curve of recomputation seconds; ends of documents add more
_SEGMENTS = 8


@dataclass(frozen=True, slots=True)
class SavedClass:
    """Tensors of one class that one slot saves, and whether they may be recomputed, offloaded or kept."""

    tensor_class: TensorClass
    num_bytes: float
    # seconds to recompute all tokens; a partial recompute takes the first tokens
    recompute_s: float
    can_recompute: bool = True
    can_offload: bool = True
    can_keep: bool = True
    # (earlier tokens, tokens) of each document, in order, if seconds are proportional to query-key `pairs`; () if all
    # tokens cost the same
    documents: tuple[tuple[int, int], ...] = ()
    pairs: AttentionPairs = FULL

    def recompute_part_s(self, share: float) -> float:
        """Exact seconds to recompute the first `share` of the tokens."""
        if not self.documents:
            return share * self.recompute_s
        whole = _front_pairs(self, sum(tokens for _, tokens in self.documents))
        rows = share * sum(tokens for _, tokens in self.documents)
        return self.recompute_s * _front_pairs(self, rows) / whole if whole else 0.0

    def segments(self) -> tuple[tuple[float, float], ...]:
        """Returns (width, seconds) of the convex curve's segments in order: widths sum to 1, seconds to `recompute_s`."""
        if not self.documents or not self.recompute_s:
            return ((1.0, self.recompute_s),)
        total = sum(tokens for _, tokens in self.documents)
        ends = itertools.accumulate(tokens / total for _, tokens in self.documents)
        places = {index / _SEGMENTS for index in range(_SEGMENTS)} | ({*ends} if len(self.documents) <= _SEGMENTS else set())
        hull: list[tuple[float, float]] = []
        for place in sorted(place for place in places | {1.0} if place <= 1.0):
            point = (place, self.recompute_part_s(place))
            while len(hull) > 1 and _is_above(hull[-1], hull[-2], point):
                hull.pop()
            hull.append(point)
        return tuple((b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(hull))


@dataclass(frozen=True, slots=True)
class Slot:
    """One layer of one chunk: seconds of its forward and of its backward without recomputation, and its saved tensors.

    replay_s: seconds that every policy adds, even without recomputation.
    """

    forward_s: float
    backward_s: float
    saved: tuple[SavedClass, ...]
    replay_s: float = 0.0


def _front_pairs(saved: SavedClass, num_rows: float) -> float:
    """Counts query-key pairs of the first `num_rows` rows of the documents; each document's earlier tokens are keys too."""
    pairs = 0.0
    for start, tokens in saved.documents:
        rows = min(num_rows, tokens)
        pairs += saved.pairs.of_span(start, start + rows)
        num_rows -= rows
    return pairs


def _is_above(point: tuple[float, float], left: tuple[float, float], right: tuple[float, float]) -> bool:
    """Whether a point lies on or above the line from one on its left to one on its right."""
    return (point[1] - left[1]) * (right[0] - left[0]) >= (right[1] - left[1]) * (point[0] - left[0])


def layer_slots(costs: CostModel, chunk: Chunk, shape: GroupShape) -> tuple[Slot, ...]:
    """Makes one slot per layer of `chunk`, for one rank of a group; each class says what the runtime may do with it."""
    num_layers = costs.model.num_layers
    kinds = costs.model.layer_kinds(LayerRange(0, num_layers)) or (ATTENTION,) * num_layers
    slots = {kind: kind_slot(costs, chunk, shape, kind) for kind in dict.fromkeys(kinds)}
    return tuple(slots[kind] for kind in kinds)


def kind_slot(
    costs: CostModel, chunk: Chunk, shape: GroupShape, kind: LayerKind, seconds: tuple[float, float] | None = None
) -> Slot:
    """Makes the slot of one layer of this kind. seconds: of its forward and its backward, for callers that know them."""
    return layer_slot(costs, chunk, shape, costs.pairs_of((kind,)), ((kind, 1.0),), seconds)


def layer_slot(
    costs: CostModel,
    chunk: Chunk,
    shape: GroupShape,
    pairs: AttentionPairs,
    kinds: KindShares = ((ATTENTION, 1.0),),
    seconds: tuple[float, float] | None = None,
) -> Slot:
    """Makes the slot of a layer whose attention has these pairs; pairs may be a mean over layers of these `kinds`.

    Recomputing a class takes as long as its part of the forward: for attention by exact pairs, for other classes by their share
    of the products of the layer's parameters. The MLP's seconds include its elementwise operations, the travel of tokens to
    spread experts, and the output projection, since the MLP's replay runs through it. The output head belongs to no layer, so its
    share of a token's seconds is left out. Programs recompute no layer input. A layer with a state keeps no attention output, and
    its mixer is recomputed as a whole, with the share that attention's projections have in the mean layer.
    """
    model, forward = costs.model, costs.coefficients.forward
    tokens = max(chunk.num_tokens, shape.degree) / shape.degree
    (products_s, inner_s, replay_s), qkv_part = costs.replay_parts_s(tokens), model.mixing_share
    recompute_s: dict[TensorClass, float] = {
        "attention_output": forward.pair_s * pairs.of_chunk(chunk) / shape.degree / model.num_layers,
        "qkv": qkv_part * products_s,
        "mlp": (1 - qkv_part) * products_s + inner_s + costs.expert_exchange_s(tokens) / model.num_layers,
    }
    # another run of a whole layer makes the input of the next one
    recompute_s = {"layer_input": sum(recompute_s.values()), **recompute_s}
    saved = tuple(
        SavedClass(
            name,
            sum(share * class_bytes(model, name, kind, round(tokens)) for kind, share in kinds) * tokens,
            again_s,
            can_recompute=name != "layer_input",
            can_offload=name not in model.replayed_classes,
            can_keep=name not in model.replayed_classes,
            documents=tuple((span.start, span.num_tokens) for span in chunk.spans) if name == "attention_output" else (),
            pairs=pairs,
        )
        for name, again_s in recompute_s.items()
    )
    ways = (False, True)
    forward_s, backward_s = seconds or (costs.part_s(chunk, shape, is_backward, 1, False, pairs=pairs) for is_backward in ways)
    return Slot(forward_s, backward_s, saved, replay_s)


def chunk_slot(costs: CostModel, chunk: Chunk, shape: GroupShape) -> Slot:
    """Makes one slot of all layers of `chunk`."""
    num_layers, kinds = costs.model.num_layers, costs.model.kind_shares()
    layer = layer_slot(costs, chunk, shape, costs.attention_pairs(), kinds)
    saved = (
        replace(item, num_bytes=item.num_bytes * num_layers, recompute_s=item.recompute_s * num_layers) for item in layer.saved
    )
    return Slot(layer.forward_s * num_layers, layer.backward_s * num_layers, tuple(saved), layer.replay_s * num_layers)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Equally urgent pieces of classes: the same seconds to recompute per byte, and the same permissions."""

    # for each piece the index of its class among all classes of all slots, the latest slot first; its slot
    places: IntArray
    slots: IntArray
    # its size, and the seconds to recompute it
    num_bytes: FloatArray
    seconds: FloatArray
    can_recompute: bool
    can_offload: bool
    can_keep: bool

    @property
    def visits_slots_once(self) -> bool:
        return bool((self.slots[1:] < self.slots[:-1]).all())


class SlotTable:
    """Classes of all slots in order. num_bytes, owner: bytes of each class, and its slot; can_keep: see `SavedClass`.

    Equal layers share their slot, so whatever depends on a class alone is computed once for each object.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = tuple(slots)
        self.items = [(n, item) for n, slot in enumerate(self.slots) for item in slot.saved]
        self.num_bytes = np.array([item.num_bytes for _, item in self.items], dtype=np.float64)
        self.can_keep = np.array([item.can_keep for _, item in self.items], dtype=np.bool_)
        self.owner: IntArray = np.array([n for n, _ in self.items], dtype=np.int64)
        # seconds after which the copies of a slot are exposed, out and back
        self.windows_s = tuple(
            np.array([*(getattr(slot, way) for slot in self.slots[1:]), 0.0][: len(self.slots)], dtype=np.float64)
            for way in ("forward_s", "backward_s")
        )
        self.recompute_s = np.array([item.recompute_s for _, item in self.items], dtype=np.float64)
        self._curved = [place for place, (_, item) in enumerate(self.items) if item.documents]
        self._again_s: dict[tuple[int, float], float] = {}
        # linear programs that `fill` has made of these slots, by bytes per second of the link
        self.programs: dict[float, LinearProgram] = {}

    @classmethod
    def of(cls, slots: Sequence[Slot] | SlotTable) -> SlotTable:
        """The table of these slots, or the table itself."""
        return slots if isinstance(slots, SlotTable) else cls(slots)

    @cached_property
    def segments(self) -> list[tuple[tuple[float, float], ...]]:
        """Segments of every class, see `SavedClass.segments`."""
        known = {id(item): item for _, item in self.items}
        segments = {key: item.segments() for key, item in known.items()}
        return [segments[id(item)] for _, item in self.items]

    @property
    def work_s(self) -> float:
        """Seconds of all slots without policies."""
        return sum(slot.forward_s + slot.backward_s for slot in self.slots)

    def again_s(self, recomputed: FloatArray) -> FloatArray:
        """Exact seconds to recompute these shares of all classes."""
        seconds: FloatArray = recomputed * self.recompute_s
        for place in self._curved:
            if 0 < (share := float(recomputed[place])) < 1:
                item = self.items[place][1]
                key = id(item), share
                if key not in self._again_s:
                    self._again_s[key] = item.recompute_part_s(share)
                seconds[place] = self._again_s[key]
        return seconds

    @cached_property
    def batches(self) -> list[Batch]:
        """Pieces of all classes with bytes, the most urgent first: those that cannot be recomputed, then by seconds per byte.

        Among equals the latest slots come first, because their tensors stay for the shortest time.
        """
        # equal layers share their classes, so that the pieces of each are made once for all of its places
        places: dict[int, list[int]] = {}
        for place in reversed(range(len(self.items))):
            places.setdefault(id(self.items[place][1]), []).append(place)
        found: dict[tuple[bool, float, bool, bool], list[tuple[IntArray, float, float]]] = {}
        for own in places.values():
            item, indices = self.items[own[0]][1], np.array(own, dtype=np.int64)
            for width, seconds in self.segments[own[0]] if item.num_bytes else ():
                num_bytes = width * item.num_bytes
                urgency = -seconds / num_bytes if num_bytes and item.can_recompute else 0.0
                key = item.can_recompute, urgency, item.can_offload, item.can_keep
                found.setdefault(key, []).append((indices, num_bytes, seconds))
        return [self._batch(found[key], key) for key in sorted(found)]

    def _batch(self, pieces: list[tuple[IntArray, float, float]], key: tuple[bool, float, bool, bool]) -> Batch:
        can_recompute, _, can_offload, can_keep = key
        if len(pieces) == 1:
            ((places, num_bytes, seconds),) = pieces
            sizes, again_s = np.full(len(places), num_bytes), np.full(len(places), seconds)
            return Batch(places, self.owner[places], sizes, again_s, can_recompute, can_offload, can_keep)
        counts = [len(places) for places, _, _ in pieces]
        places = np.concatenate([places for places, _, _ in pieces])
        sizes = np.repeat([num_bytes for _, num_bytes, _ in pieces], counts)
        again_s = np.repeat([seconds for _, _, seconds in pieces], counts)
        # pieces of one class keep their order
        order = np.argsort(-places, kind="stable")
        places = places[order]
        return Batch(places, self.owner[places], sizes[order], again_s[order], can_recompute, can_offload, can_keep)

    def least_cost_s(self, device_bytes: float, host_bytes: float, copy_s: float) -> float:
        """Lower bound on the seconds that any shares add, by the segments of the classes.

        Bytes that stay on the device or belong to one of the last two slots need the device in the backward of the last slot.
        Bytes of earlier slots cost nothing on the host as far as the following slot hides their copies. All others cost a copy
        (`copy_s` per byte) or their recomputation, the lesser of the two; in the best case these are the bytes that cost least.
        """
        hidden = np.minimum(self.windows_s[0], self.windows_s[1])[:-2] / copy_s
        offloaded = np.zeros(len(self.slots))
        forced_s = 0.0
        costs: list[tuple[float, float]] = []
        for batch in self.batches:
            if batch.can_offload:
                np.add.at(offloaded, batch.slots, batch.num_bytes)
            if not batch.can_keep:
                forced_s += 0.0 if batch.can_offload else float(batch.seconds.sum())
                continue
            num_bytes, seconds = float(batch.num_bytes.sum()), float(batch.seconds.sum())
            again_s = seconds / num_bytes if batch.can_recompute and num_bytes else np.inf
            costs.append((min(again_s, copy_s) if batch.can_offload else again_s, num_bytes))
        free = device_bytes + min(host_bytes, float(np.minimum(hidden, offloaded[:-2]).sum()))
        bound_s = forced_s
        for byte_s, num_bytes in sorted(costs, reverse=True):
            left = max(0.0, num_bytes - free)
            free = max(0.0, free - num_bytes)
            bound_s += left * byte_s if left else 0.0
        return bound_s

    def hull_s(self, recomputed: FloatArray) -> float:
        """Seconds to recompute these shares of all classes, by their segments."""
        seconds = recomputed * self.recompute_s
        known: dict[tuple[int, float], float] = {}
        for place in self._curved:
            key = id(self.items[place][1]), float(recomputed[place])
            if key not in known:
                known[key] = _along(self.segments[place], key[1])
            seconds[place] = known[key]
        return float(seconds.sum())


def _along(segments: tuple[tuple[float, float], ...], share: float) -> float:
    """Seconds of the first `share` of a curve of segments."""
    ends = itertools.accumulate((width for width, _ in segments), initial=0.0)
    return sum(
        seconds * min(1.0, max(0.0, (share - start) / width))
        for start, (width, seconds) in zip(ends, segments, strict=False)
        if width
    )
