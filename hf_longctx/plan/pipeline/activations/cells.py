"""Translates between a pipeline and the joint program: makes its cells and moments, and turns its answer into policies.

Offloaded shares are spread over the first layers of a part and recomputed layers come after them, because the runtime starts to
fetch a layer's tensors when it replays the next layer: the copy back then overlaps with that layer's backward. Where no layer is
recomputed, one token of the last layer's input goes to the host, since a layer that keeps everything is not replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_longctx.plan.activations.fit import with_equal_stages, with_layers
from hf_longctx.plan.activations.slots import layer_slot
from hf_longctx.plan.core.arrays import IntArray
from hf_longctx.plan.core.attention_pairs import AttentionPairs
from hf_longctx.plan.core.model_spec import KindShares
from hf_longctx.plan.core.sharding import shard_tokens
from hf_longctx.plan.core.types import (
    TENSOR_CLASSES,
    Action,
    Chunk,
    LayerPolicy,
    SequenceGroup,
    StagePlan,
    TensorClass,
    TensorShare,
)
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.layer import Load
from hf_longctx.plan.pipeline.activations.joint_program import Cell, JointChoice, Moments


@dataclass(frozen=True, slots=True)
class _CopyConstants:
    """Constants with which copies to the host are priced.

    link_share: largest share of the time beside it that a copy may fill, since copies share a link with messages and start late.
    layer_share: largest share of one layer's backward that a layer's copy back may take. idle_share: share of its time that a
    hidden copy costs, a tie-breaker so that nothing moves for nothing.
    """

    link_share: float = 0.9
    layer_share: float = 0.95
    idle_share: float = 1e-4


# repeat `recipes/bench/papers/infinipipe.py` and the stages table of `recipes/bench/cpu/planner.py` when one of these changes
_COPIES = _CopyConstants()


def recomputed_layer(keeps_attention: bool) -> LayerPolicy:
    """Policy of a layer that keeps its input, and the attention output if `keeps_attention`, and recomputes the rest."""
    again: tuple[TensorClass, ...] = ("qkv", "mlp") if keeps_attention else ("attention_output", "qkv", "mlp")
    return LayerPolicy(tuple(TensorShare(name, recompute=1.0) for name in again))


def _offloaded(share: float, replayed: tuple[TensorClass, ...], classes: tuple[TensorClass, ...] = TENSOR_CLASSES) -> LayerPolicy:
    """Policy of a layer that offloads this share of its tokens, for these tensor classes. replayed: classes that none keeps."""
    moved = {name: TensorShare(name, host=share, device=1 - share) for name in classes}
    moved |= {name: TensorShare(name, recompute=1.0) for name in replayed}
    return LayerPolicy(tuple(moved[name] for name in TENSOR_CLASSES if name in moved))


@dataclass(frozen=True, slots=True)
class _LayerWays:
    """Device bytes of one layer of a chunk if it is kept, recomputed or offloaded, and its host bytes if offloaded.

    recompute_s, offload_s: seconds that recomputing or offloading the layer adds.
    """

    kept_bytes: int
    recomputed_bytes: int
    offloaded_bytes: int
    host_bytes: int
    recompute_s: float
    offload_s: float


class GroupCells:
    """Makes the cells and moments of one group whose policies have tiles and nothing else yet."""

    def __init__(
        self,
        group: SequenceGroup,
        costs: CostModel,
        tile_tokens: int,
        keeps_attention: bool,
        byte_model: ByteModel,
        offloads: bool = True,
    ) -> None:
        """offloads: whether anything may go to the host."""
        self.group, self.costs, self.tile_tokens, self.bytes, self.offloads = group, costs, tile_tokens, byte_model, offloads
        self._kept, self._moved = LayerPolicy(), _offloaded(1.0, costs.model.replayed_classes)
        self.recomputed = recomputed_layer(keeps_attention)
        self.num_stages, self.num_parts = len(group.stages), len(group.stages[0].parts)
        self.tokens = [max(shard_tokens(chunk, group.shape)) for chunk in group.chunks]
        self.pairs = {part: costs.attention_pairs((part,)) for stage in group.stages for part in stage.parts}
        self.kinds = {part: costs.model.kind_shares(part) for part in self.pairs}
        # place in `cells` by stage, chunk and part
        self.places: dict[tuple[int, int, int], int] = {}
        self.cells: list[Cell] = []
        self._known_s: dict[tuple[int, str, AttentionPairs], tuple[float, float]] = {}
        # policies by layers offloaded, layers recomputed, tokens offloaded and tokens
        self._known_layers: dict[tuple[int, int, int, int], tuple[LayerPolicy, ...]] = {}
        # policies by tokens, tokens offloaded and classes
        self._known_moved: dict[tuple[int, int, tuple[TensorClass, ...]], LayerPolicy] = {}
        self._exchanges = [costs.exchange_line(group.shape, is_backward) for is_backward in (False, True)]
        self._add_cells()
        self._stages = self._stage_moments()

    def moments(self, room_bytes: Sequence[float]) -> Moments:
        """Moments (forwards and backwards) of every stage; `room_bytes`: each stage's bytes for saved tensors and workspace."""
        starts = np.cumsum([0, *(len(stage.excess_bytes) for stage in self._stages)])
        excess = [stage.excess_bytes - room for stage, room in zip(self._stages, room_bytes, strict=True)]
        ends = (
            np.concatenate([getattr(stage, name) + start for stage, start in zip(self._stages, starts, strict=False)])
            for name in ("first", "stop", "away", "back")
        )
        return Moments(np.concatenate(excess), *ends)

    def under(self, choice: JointChoice) -> SequenceGroup:
        layers = {
            key: self._layers(self.cells[place].num_layers, choice.layers[place], choice.offload[place], self.tokens[key[1]])
            for key, place in self.places.items()
        }
        return with_layers(self.group, layers, self.tile_tokens)

    def _layers(self, num_layers: int, num_recomputed: int, offload: float, num_tokens: int) -> tuple[LayerPolicy, ...]:
        """Policies of a cell's first layers; layers without one keep everything. Equal policies share one object."""
        # the layer after those that offload is replayed, so that their copies back start in time
        is_topped = offload > 0 and not num_recomputed and num_layers > 1
        count = num_layers - num_recomputed - is_topped
        # rounded down to whole tokens
        moved = int(min(1.0, offload * num_layers / count) * num_tokens) if count else 0
        key = (count, num_recomputed, moved, num_tokens) if moved else (0, num_recomputed, 0, 0)
        if key not in self._known_layers:
            top = (self.recomputed,) * num_recomputed
            if moved and is_topped:
                top = (self._moved_layer(num_tokens, 1, ("layer_input",)),)
            front = (self._moved_layer(num_tokens, moved, TENSOR_CLASSES),) * count if moved else ()
            self._known_layers[key] = (*front, *top)
        return self._known_layers[key]

    def _moved_layer(self, num_tokens: int, moved: int, classes: tuple[TensorClass, ...]) -> LayerPolicy:
        """Policy of a layer that offloads `moved` of its tokens, for these tensor classes."""
        key = num_tokens, moved, classes
        if key not in self._known_moved:
            self._known_moved[key] = _offloaded(moved / num_tokens, self.costs.model.replayed_classes, classes)
        return self._known_moved[key]

    def _add_cells(self) -> None:
        last_passes = self.group.stages[-1].actions
        backwards = (action.chunk for action in last_passes if (action.kind, action.part) == ("B", self.num_parts - 1))
        order = {chunk: place for place, chunk in enumerate(backwards)}
        last_place = self.num_stages * self.num_parts - 1
        loads = self.bytes.loads(self.group, 0)
        ways = {
            (chunk.index, kinds): self._layer_ways(chunk, load, pairs, kinds)
            for chunk, load in zip(self.group.chunks, loads, strict=True)
            for kinds, pairs in {self.kinds[part]: pairs for part, pairs in self.pairs.items()}.items()
        }
        for stage in self.group.stages:
            windows = self._windows_s(stage)
            for chunk in self.group.chunks:
                for part, owned in enumerate(stage.parts):
                    diagonal = order[chunk.index] + last_place - (part * self.num_stages + stage.stage)
                    self.places[stage.stage, chunk.index, part] = len(self.cells)
                    way = ways[chunk.index, self.kinds[owned]]
                    self.cells.append(self._cell(diagonal, owned.num_layers, way, windows[chunk.index, part]))

    def _layer_ways(self, chunk: Chunk, load: Load, pairs: AttentionPairs, kinds: KindShares) -> _LayerWays:
        model = self.costs.model
        policies = (self._kept, self.recomputed, self._moved if self.offloads else self._kept)
        kept, recomputed, offloaded = (self._mean_held(load, policy, kinds) for policy in policies)
        slot = layer_slot(self.costs, chunk, self.group.shape, pairs, kinds)
        again_s = {item.tensor_class: item.recompute_s for item in slot.saved}
        return _LayerWays(
            kept[0],
            recomputed[0],
            *offloaded,
            slot.replay_s + sum(again_s[share.tensor_class] for share in self.recomputed.shares),
            slot.replay_s + sum(again_s[name] for name in model.replayed_classes),
        )

    def _mean_held(self, load: Load, policy: LayerPolicy, kinds: KindShares) -> tuple[int, int]:
        """Bytes that a layer holds on the device and on the host, as a mean over layers of these kinds."""
        held = on_host = 0.0
        for kind, share in kinds:
            layer = self.bytes.layer(load, policy, self.tile_tokens, kind)
            held += share * layer.held
            on_host += share * layer.held_host
        return round(held), round(on_host)

    def _cell(self, diagonal: int, num_layers: int, ways: _LayerWays, windows_s: tuple[float, float]) -> Cell:
        """Makes a cell. windows_s: see `_windows_s`.

        A layer's copy back overlaps with the backward of later layers of the part, so the last layer's cannot be hidden.
        """
        out_s, backward_s = windows_s
        behind = (num_layers - 1) / num_layers
        copy_s = num_layers * ways.host_bytes / self.costs.cluster.hardware.copy_bytes_per_s
        hidden_s = min(_COPIES.link_share * out_s, _COPIES.layer_share * backward_s * behind)
        return Cell(
            diagonal,
            num_layers,
            ways.recompute_s,
            ways.kept_bytes - ways.recomputed_bytes,
            num_layers * (ways.kept_bytes - ways.offloaded_bytes),
            num_layers * ways.host_bytes,
            _COPIES.idle_share * copy_s + num_layers * ways.offload_s,
            min(behind, hidden_s / copy_s) if copy_s else 0.0,
        )

    def _windows_s(self, stage: StagePlan) -> dict[tuple[int, int], tuple[float, float]]:
        """Seconds by chunk and part: from a forward's end to the next one's, while copies out are hidden, and of its backward.

        The last forward has a window of 0 s: no later forward needs its memory, so it stays on the device.
        """
        passes = [action for action in stage.actions if action.kind in ("F", "B")]
        windows: dict[tuple[int, int], tuple[float, float]] = {}
        backward_s: dict[tuple[int, int], float] = {}
        until_s, has_next = 0.0, False
        for action in reversed(passes):
            key, seconds = (action.chunk, action.part), self._seconds(stage, action)
            if action.kind == "B":
                backward_s[key] = seconds
                until_s += seconds
            else:
                windows[key] = (until_s if has_next else 0.0), backward_s[key]
                until_s, has_next = seconds, True
        return windows

    def _seconds(self, stage: StagePlan, action: Action) -> float:
        pairs = self.pairs[stage.parts[action.part]]
        key = action.chunk, action.kind, pairs
        if key not in self._known_s:
            chunk, is_backward, shape = self.group.chunks[action.chunk], action.kind == "B", self.group.shape
            fixed_s, token_s = self._exchanges[is_backward]
            exchange_s = fixed_s + token_s * max(chunk.num_tokens, shape.degree)
            self._known_s[key] = self.costs.layer_and_head_s(chunk, shape, is_backward, exchange_s, pairs)
        layer_s, head_s = self._known_s[key]
        has_head = (stage.stage, action.part) == (self.num_stages - 1, self.num_parts - 1)
        return layer_s * stage.parts[action.part].num_layers + (head_s if has_head else 0.0)

    def _stage_moments(self) -> list[Moments]:
        """Moments of every stage with a room of 0 bytes: `excess_bytes` are then all bytes on the device if everything is kept.

        Workspace beside saved tensors hardly depends on the policy; the larger of two counts, with everything kept or recomputed.
        """
        layers = {cell.num_layers: (self.recomputed,) * cell.num_layers for cell in self.cells}
        least = with_equal_stages(self.group, lambda _, num_layers: layers[num_layers], self.tile_tokens)
        found = []
        for stages in zip(self.group.stages, least.stages, strict=True):
            kept, replayed = (self.bytes.moments(self.group, stage) for stage in stages)
            peak = kept.saved + np.maximum(kept.peak - kept.saved, replayed.peak - replayed.saved)
            found.append(self._with_ends(stages[0], peak))
        return found

    def _with_ends(self, stage: StagePlan, num_bytes: IntArray) -> Moments:
        passes = [action for action in stage.actions if action.kind in ("F", "B")]
        cells = np.array([action.chunk * self.num_parts + action.part for action in passes])
        is_forward = np.array([action.kind == "F" for action in passes])
        forwards, backwards = np.flatnonzero(is_forward), np.flatnonzero(~is_forward)
        first, stop, away, back = (np.empty(len(forwards), dtype=np.int64) for _ in range(4))
        first[cells[forwards]], stop[cells[backwards]] = forwards, backwards + 1
        # the two newest chunks stay on the device, and so does the next one to run backward
        away[cells[forwards]] = np.append(forwards[2:], [len(passes)] * min(2, len(forwards)))
        back[cells[backwards]] = np.append([0], backwards[:-1] + 1)
        away = np.minimum(away, stop)
        return Moments(num_bytes.astype(np.float64), first, stop, away, np.maximum(away, np.minimum(back, stop)))
