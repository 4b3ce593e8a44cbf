"""Translates between a pipeline and the joint program: makes cells and moments, and turns the program's answer into policies.

Offloaded shares are spread over the first layers of a range, below recomputed layers and at least one that moves nothing, because
the copies of a layer overlap with the layer after it: out with its forward, and back with its backward.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from hf_longctx.plan.core.types import (
    TENSOR_CLASSES,
    Chunk,
    FloatArray,
    LayerPolicy,
    LayerRange,
    SequenceGroup,
    StagePlan,
    TensorClass,
    TensorShare,
)
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.memory.layer import Load
from hf_longctx.plan.memory.saved_tensors import layer_class_bytes
from hf_longctx.plan.model.model_spec import KindShares
from hf_longctx.plan.policies.fit import with_layers, with_stages_of
from hf_longctx.plan.policies.joint_program import Cells, Moments
from hf_longctx.plan.policies.slots import Slot, layer_slot
from hf_longctx.plan.predict.pipeline_run import PredictionCache


@dataclass(frozen=True, slots=True)
class _CopyConstants:
    """Constants with which copies to the host are priced.

    link_share: largest share of a layer's pass that the copy beside it may take, since copies share a link with messages and
    start late. idle_share: share of its time that a hidden copy costs, a tie-breaker against useless copies.
    """

    link_share: float = 0.9
    idle_share: float = 1e-4


# repeat `recipes/bench/papers/infinipipe.py` and the stages table of `recipes/bench/cpu/planner.py` when one of these changes
_COPIES = _CopyConstants()


def recomputed_layer(keeps_attention: bool) -> LayerPolicy:
    """Policy of a layer that keeps its input, and the attention output if `keeps_attention`, and recomputes the rest."""
    again: tuple[TensorClass, ...] = ("qkv", "mlp") if keeps_attention else ("attention_output", "qkv", "mlp")
    return LayerPolicy(tuple(TensorShare(name, recompute=1.0) for name in again))


def _offloaded(share: float, replayed: tuple[TensorClass, ...]) -> LayerPolicy:
    """Policy of a layer that offloads this share of its tokens. replayed: classes that no policy keeps."""
    kept, again = {"host": share, "device": 1 - share}, {"recompute": 1.0}
    return LayerPolicy(tuple(TensorShare(name, **(again if name in replayed else kept)) for name in TENSOR_CLASSES))


def hidden_share(group: SequenceGroup, costs: CostModel, known: PredictionCache) -> float:
    """Largest share of the group's saved tensors whose copies to the host hide behind the shorter passes of layers."""
    layer_ranges, seconds = group.stages[0].layer_ranges, known.seconds(group, costs)
    most = max(layer_range.num_layers for stage in group.stages for layer_range in stage.layer_ranges)
    passes = (seconds.passes(is_backward, 0, costs.attention_pairs(layer_ranges))[:, 0] for is_backward in (False, True))
    copy_s = np.array(seconds.tokens) * layer_class_bytes(costs.model) / costs.cluster.hardware.copy_bytes_per_s
    hidden_s = np.minimum(copy_s, _COPIES.link_share * np.minimum(*passes))
    # nothing hides the copies of a range's last layer
    return float(hidden_s.sum() / max(copy_s.sum(), 1e-300)) * (most - 1) / most


class GroupCells:
    """Makes the cells and moments of one group whose policies have tiles and nothing else yet."""

    def __init__(
        self,
        group: SequenceGroup,
        costs: CostModel,
        tile_tokens: int,
        keeps_attention: bool,
        known: PredictionCache,
        offloads: bool = True,
        kept: Collection[int] = (),
    ) -> None:
        """Makes all cells. offloads: whether anything may go to the host. kept: stages that fit and so keep everything."""
        self.group, self.costs, self.tile_tokens, self.offloads, self.kept = group, costs, tile_tokens, offloads, kept
        self.bytes, self._slots = known.byte_model(costs.model), known.seconds(group, costs)
        self._kept, self._moved = LayerPolicy(), _offloaded(1.0, costs.model.replayed_classes)
        self.recomputed = recomputed_layer(keeps_attention)
        self.num_stages, self.num_ranges = len(group.stages), len(group.stages[0].layer_ranges)
        self.tokens = self._slots.tokens
        # policies by layers offloaded, layers recomputed, tokens offloaded and tokens
        self._known_layers: dict[tuple[int, int, int, int], tuple[LayerPolicy, ...]] = {}
        # policies by tokens and tokens offloaded
        self._known_moved: dict[tuple[int, int], LayerPolicy] = {}
        self.cells = self._cells()
        self._stages = self._stage_moments()

    def place(self, stage: int, chunk: int, layer_range: int) -> int:
        """Place in `cells` of a chunk on a layer range of a stage."""
        return (stage * len(self.group.chunks) + chunk) * self.num_ranges + layer_range

    def moments(self, room_bytes: Sequence[float]) -> Moments:
        """Moments (forwards and backwards) of every stage; `room_bytes`: each stage's bytes for saved tensors and workspace."""
        starts = np.cumsum([0, *(len(stage.excess_bytes) for stage in self._stages)])
        excess = [stage.excess_bytes - room for stage, room in zip(self._stages, room_bytes, strict=True)]
        ends = (
            np.concatenate([getattr(stage, name) + start for stage, start in zip(self._stages, starts, strict=False)])
            for name in ("first", "stop")
        )
        return Moments(np.concatenate(excess), *ends)

    def under(self, layers: Sequence[int], offload: Sequence[float]) -> SequenceGroup:
        """The group whose cells recompute so many layers and offload these shares."""
        keys = product(range(self.num_stages), range(len(self.tokens)), range(self.num_ranges))
        numbers = zip(keys, self.cells.num_layers.tolist(), layers, offload, strict=True)
        policies = {
            key: self._layers(count, again, share, self.tokens[key[1]])
            for key, count, again, share in numbers
            if key[0] not in self.kept
        }
        return with_stages_of(with_layers(self.group, policies, self.tile_tokens), self.group, self.kept)

    def _layers(self, num_layers: int, num_recomputed: int, offload: float, num_tokens: int) -> tuple[LayerPolicy, ...]:
        """Policies of a cell's first layers; layers without one keep everything. Equal policies share one object."""
        count = min(num_layers - num_recomputed, num_layers - 1)
        # rounded down to whole tokens
        moved = int(min(1.0, offload * num_layers / count) * num_tokens) if count else 0
        key = (count, num_recomputed, moved, num_tokens) if moved else (0, num_recomputed, 0, 0)
        if key not in self._known_layers:
            front = (self._moved_layer(num_tokens, moved),) * count if moved else ()
            self._known_layers[key] = (*front, *(self.recomputed,) * num_recomputed)
        return self._known_layers[key]

    def _moved_layer(self, num_tokens: int, moved: int) -> LayerPolicy:
        """Policy of a layer that offloads `moved` of its tokens."""
        key = num_tokens, moved
        if key not in self._known_moved:
            self._known_moved[key] = _offloaded(moved / num_tokens, self.costs.model.replayed_classes)
        return self._known_moved[key]

    def _cells(self) -> Cells:
        """The cells of all stages, chunks and layer ranges, in this order.

        A layer's copies overlap with the layer after it, so nothing hides those of a range's last layer.
        """
        last_passes = self.group.stages[-1].actions
        backwards = [action.chunk for action in last_passes if (action.kind, action.layer_range) == ("B", self.num_ranges - 1)]
        order, last_place = np.argsort(backwards), self.num_stages * self.num_ranges - 1
        layer_ranges = [
            (stage, layer_range, owned) for stage in self.group.stages for layer_range, owned in enumerate(stage.layer_ranges)
        ]
        ways_of = {
            kinds: self._layer_ways(layer_range)
            for kinds, layer_range in {self._kinds(layer_range): layer_range for *_, layer_range in layer_ranges}.items()
        }
        rate, found = self.costs.cluster.hardware.copy_bytes_per_s, []
        for stage, layer_range, owned in layer_ranges:
            count, hiding_s = owned.num_layers, self._hiding_s(stage, layer_range) if self.offloads else np.zeros(len(order))
            kept, recomputed, offloaded, on_host, recompute_s, offload_s = ways_of[self._kinds(owned)]
            behind, copy_s = (count - 1) / count, count * on_host / rate
            hidden_s = _COPIES.link_share * hiding_s * behind
            most = np.minimum(behind, np.divide(hidden_s, copy_s, out=np.zeros_like(copy_s), where=copy_s > 0))
            # shares of less than a token move nothing
            most = np.where(most * self.tokens < 1, 0.0, most)
            found.append(
                (
                    order + last_place - (layer_range * self.num_stages + stage.stage),
                    np.full(len(order), count),
                    recompute_s,
                    kept - recomputed,
                    count * (kept - offloaded),
                    count * on_host,
                    _COPIES.idle_share * copy_s + count * offload_s,
                    most,
                )
            )
        # [stages * layer ranges, fields, chunks] -> fields of [stages, chunks, layer ranges]
        return Cells(
            *(
                np.stack(values).reshape(self.num_stages, self.num_ranges, -1).swapaxes(1, 2).reshape(-1)
                for values in zip(*found, strict=True)
            )
        )

    def _kinds(self, layer_range: LayerRange) -> KindShares:
        return self.costs.model.kind_shares(layer_range)

    def _layer_ways(self, layer_range: LayerRange) -> FloatArray:
        """Numbers of one layer of every chunk, as a mean over layers of the range, (6, chunks).

        Device bytes if it is kept, recomputed or offloaded; host bytes if it is offloaded; seconds that recomputing and that
        offloading adds.
        """
        kinds, replayed = self._kinds(layer_range), self.costs.model.replayed_classes
        again = [share.tensor_class for share in self.recomputed.shares]
        policies = (self._kept, self.recomputed, self._moved if self.offloads else self._kept)
        found = np.empty((6, len(self.tokens)))
        for chunk, load in zip(self.group.chunks, self.bytes.loads(self.group, 0), strict=True):
            (found[0, chunk.index], _), (found[1, chunk.index], _), found[2:4, chunk.index] = (
                self._mean_held(load, policy, kinds) for policy in policies
            )
            slot = self._slot(chunk, layer_range, kinds)
            again_s = {item.tensor_class: item.recompute_s for item in slot.saved}
            found[4:, chunk.index] = [slot.replay_s + sum(again_s[name] for name in names) for names in (again, replayed)]
        return found

    def _slot(self, chunk: Chunk, layer_range: LayerRange, kinds: KindShares) -> Slot:
        """Slot of the mean layer of a range; predictions need those of single kinds, too."""
        if len(kinds) == 1:
            return self._slots.slot(chunk.index, kinds[0][0])
        return layer_slot(self.costs, chunk, self.group.shape, self.costs.attention_pairs((layer_range,)), kinds)

    def _mean_held(self, load: Load, policy: LayerPolicy, kinds: KindShares) -> tuple[int, int]:
        """Bytes that a layer holds on the device and on the host, as a mean over layers of these kinds."""
        held = on_host = 0.0
        for kind, share in kinds:
            layer = self.bytes.layer(load, policy, self.tile_tokens, kind)
            held += share * layer.held
            on_host += share * layer.held_host
        return round(held), round(on_host)

    def _hiding_s(self, stage: StagePlan, layer_range: int) -> FloatArray:
        """Seconds of computation beside which each chunk's copies run in each direction: of its shorter pass.

        Seconds of the head count, too: it is better if copies take a little longer than if a whole layer runs again.
        """
        owned, has_head = (
            stage.layer_ranges[layer_range],
            (stage.stage, layer_range) == (self.num_stages - 1, self.num_ranges - 1),
        )
        pairs = self.costs.attention_pairs((owned,))
        passes = (self._slots.passes(is_backward, 0, pairs).T for is_backward in (False, True))
        shorter: FloatArray = np.minimum(*(layer_s * owned.num_layers + has_head * head_s for layer_s, head_s, _ in passes))
        return shorter

    def _stage_moments(self) -> list[Moments]:
        """Moments of every stage with a room of 0 bytes: `excess_bytes` are then all bytes on the device if everything is kept.

        Workspace beside saved tensors hardly depends on the policy; the largest of counts with everything kept or recomputed, and
        with all copies that hide. Those of stages that keep everything need no room.
        """
        every, none = self.cells.num_layers.tolist(), [0] * len(self.cells.num_layers)
        ways = [self.under(every, [0.0] * len(every))]
        if self.offloads:
            ways.append(self.under(none, self.cells.most_offload.tolist()))
        found = []
        for stage, *others in zip(self.group.stages, *(way.stages for way in ways), strict=True):
            if stage.stage in self.kept:
                found.append(self._with_ends(stage, np.full(len(self.bytes.passes(stage).cells), -np.inf)))
                continue
            kept, *changed = (self.bytes.moments(self.group, each) for each in (stage, *others))
            work = np.max([each.peak - each.saved for each in (kept, *changed)], axis=0)
            found.append(self._with_ends(stage, (kept.saved + work).astype(np.float64)))
        return found

    def _with_ends(self, stage: StagePlan, num_bytes: FloatArray) -> Moments:
        """Moments of a stage with these bytes, and its cells' first and last."""
        passes = self.bytes.passes(stage)
        cells, is_forward = passes.cells, passes.is_forward
        forwards, backwards = np.flatnonzero(is_forward), np.flatnonzero(~is_forward)
        first, stop = np.empty((2, len(forwards)), dtype=np.int64)
        first[cells[forwards]], stop[cells[backwards]] = forwards, backwards + 1
        return Moments(num_bytes, first, stop)
