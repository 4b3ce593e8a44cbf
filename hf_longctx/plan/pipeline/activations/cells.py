"""Translates between a pipeline and the joint program: makes its cells and moments, and turns its answer into policies.

Offloaded shares are spread over the first layers of a part and recomputed layers come after them, because the runtime starts to
fetch a layer's tensors when it replays the next layer: the copy back then overlaps with that layer's backward. Where no layer is
recomputed, one token of the last layer's input goes to the host, since a layer that keeps everything is not replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from hf_longctx.plan.activations.fit import with_equal_stages, with_layers
from hf_longctx.plan.activations.slots import Slot, layer_slot
from hf_longctx.plan.core.arrays import FloatArray, IntArray
from hf_longctx.plan.core.model_spec import KindShares
from hf_longctx.plan.core.sharding import shard_tokens
from hf_longctx.plan.core.types import (
    TENSOR_CLASSES,
    Chunk,
    LayerPolicy,
    LayerRange,
    SequenceGroup,
    StagePlan,
    TensorClass,
    TensorShare,
)
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.memory.layer import Load
from hf_longctx.plan.pipeline.activations.joint_program import Cells, JointChoice, Moments
from hf_longctx.plan.prediction.pipeline_run import PredictionCache


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
    ) -> None:
        """offloads: whether anything may go to the host."""
        self.group, self.costs, self.tile_tokens, self.offloads = group, costs, tile_tokens, offloads
        self.bytes, self._slots = known.byte_model(costs.model), known.seconds(group, costs)
        self._kept, self._moved = LayerPolicy(), _offloaded(1.0, costs.model.replayed_classes)
        self.recomputed = recomputed_layer(keeps_attention)
        self.num_stages, self.num_parts = len(group.stages), len(group.stages[0].parts)
        self.tokens = [max(shard_tokens(chunk, group.shape)) for chunk in group.chunks]
        # policies by layers offloaded, layers recomputed, tokens offloaded and tokens
        self._known_layers: dict[tuple[int, int, int, int], tuple[LayerPolicy, ...]] = {}
        # policies by tokens, tokens offloaded and classes
        self._known_moved: dict[tuple[int, int, tuple[TensorClass, ...]], LayerPolicy] = {}
        self.cells = self._cells()
        self._stages = self._stage_moments()

    def place(self, stage: int, chunk: int, part: int) -> int:
        """Place in `cells` of a chunk on a part of a stage."""
        return (stage * len(self.group.chunks) + chunk) * self.num_parts + part

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
        """The group with the policies of the program's answer."""
        keys = product(range(self.num_stages), range(len(self.tokens)), range(self.num_parts))
        numbers = zip(keys, self.cells.num_layers.tolist(), choice.layers, choice.offload, strict=True)
        layers = {key: self._layers(count, again, offload, self.tokens[key[1]]) for key, count, again, offload in numbers}
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

    def _cells(self) -> Cells:
        """The cells of all stages, chunks and parts, in this order.

        A layer's copy back overlaps with the backward of later layers of the part, so the last layer's cannot be hidden.
        """
        last_passes = self.group.stages[-1].actions
        backwards = [action.chunk for action in last_passes if (action.kind, action.part) == ("B", self.num_parts - 1)]
        order, last_place = np.argsort(backwards), self.num_stages * self.num_parts - 1
        parts = [(stage, part, owned) for stage in self.group.stages for part, owned in enumerate(stage.parts)]
        ways_of = {kinds: self._layer_ways(part) for kinds, part in {self._kinds(part): part for *_, part in parts}.items()}
        windows = [
            self._windows_s(stage) if self.offloads else np.zeros((len(order), self.num_parts, 2)) for stage in self.group.stages
        ]
        rate, found = self.costs.cluster.hardware.copy_bytes_per_s, []
        for stage, part, owned in parts:
            count, (out_s, backward_s) = owned.num_layers, windows[stage.stage][:, part].T
            kept, recomputed, offloaded, on_host, recompute_s, offload_s = ways_of[self._kinds(owned)]
            behind, copy_s = (count - 1) / count, count * on_host / rate
            hidden_s = np.minimum(_COPIES.link_share * out_s, _COPIES.layer_share * backward_s * behind)
            most = np.minimum(behind, np.divide(hidden_s, copy_s, out=np.zeros_like(copy_s), where=copy_s > 0))
            found.append(
                (
                    order + last_place - (part * self.num_stages + stage.stage),
                    np.full(len(order), count),
                    recompute_s,
                    kept - recomputed,
                    count * (kept - offloaded),
                    count * on_host,
                    _COPIES.idle_share * copy_s + count * offload_s,
                    most,
                )
            )
        # [stages * parts, fields, chunks] -> fields of [stages, chunks, parts]
        return Cells(
            *(
                np.stack(values).reshape(self.num_stages, self.num_parts, -1).swapaxes(1, 2).reshape(-1)
                for values in zip(*found, strict=True)
            )
        )

    def _kinds(self, part: LayerRange) -> KindShares:
        return self.costs.model.kind_shares(part)

    def _layer_ways(self, part: LayerRange) -> FloatArray:
        """Numbers of one layer of every chunk, as a mean over layers of the part, (6, chunks).

        Device bytes if it is kept, recomputed or offloaded; host bytes if it is offloaded; seconds that recomputing and that
        offloading adds.
        """
        kinds, replayed = self._kinds(part), self.costs.model.replayed_classes
        again = [share.tensor_class for share in self.recomputed.shares]
        policies = (self._kept, self.recomputed, self._moved if self.offloads else self._kept)
        found = np.empty((6, len(self.tokens)))
        for chunk, load in zip(self.group.chunks, self.bytes.loads(self.group, 0), strict=True):
            (found[0, chunk.index], _), (found[1, chunk.index], _), found[2:4, chunk.index] = (
                self._mean_held(load, policy, kinds) for policy in policies
            )
            slot = self._slot(chunk, part, kinds)
            again_s = {item.tensor_class: item.recompute_s for item in slot.saved}
            found[4:, chunk.index] = [slot.replay_s + sum(again_s[name] for name in names) for names in (again, replayed)]
        return found

    def _slot(self, chunk: Chunk, part: LayerRange, kinds: KindShares) -> Slot:
        """Slot of the mean layer of a part; predictions need those of single kinds, too."""
        if len(kinds) == 1:
            return self._slots.slot(chunk.index, kinds[0][0])
        return layer_slot(self.costs, chunk, self.group.shape, self.costs.attention_pairs((part,)), kinds)

    def _mean_held(self, load: Load, policy: LayerPolicy, kinds: KindShares) -> tuple[int, int]:
        """Bytes that a layer holds on the device and on the host, as a mean over layers of these kinds."""
        held = on_host = 0.0
        for kind, share in kinds:
            layer = self.bytes.layer(load, policy, self.tile_tokens, kind)
            held += share * layer.held
            on_host += share * layer.held_host
        return round(held), round(on_host)

    def _windows_s(self, stage: StagePlan) -> FloatArray:
        """Seconds of every chunk and part, (chunks, parts, 2).

        From a forward's end to the next one's, while copies out are hidden, and of the backward. The last forward has a window of
        0 s: no later forward needs its memory, so it stays on the device.
        """
        passes, seconds = self.bytes.passes(stage), np.empty((len(self.tokens), self.num_parts, 2))
        for part, owned in enumerate(stage.parts):
            pairs = self.costs.attention_pairs((owned,))
            for is_backward in (False, True):
                layer_s, head_s, _ = self._slots.passes(is_backward, 0, pairs).T
                has_head = (stage.stage, part) == (self.num_stages - 1, self.num_parts - 1)
                seconds[:, part, int(is_backward)] = layer_s * owned.num_layers + (head_s if has_head else 0.0)
        found = seconds.reshape(-1, 2).copy()
        ends_s = np.cumsum(found[passes.cells, 1 - passes.is_forward])[passes.is_forward]
        found[passes.cells[passes.is_forward], 0] = np.append(np.diff(ends_s), 0.0)
        return found.reshape(seconds.shape)

    def _stage_moments(self) -> list[Moments]:
        """Moments of every stage with a room of 0 bytes: `excess_bytes` are then all bytes on the device if everything is kept.

        Workspace beside saved tensors hardly depends on the policy; the larger of two counts, with everything kept or recomputed.
        """
        layers = {count: (self.recomputed,) * count for count in set(self.cells.num_layers.tolist())}
        least = with_equal_stages(self.group, lambda _, num_layers: layers[num_layers], self.tile_tokens)
        found = []
        for stages in zip(self.group.stages, least.stages, strict=True):
            kept, replayed = (self.bytes.moments(self.group, stage) for stage in stages)
            peak = kept.saved + np.maximum(kept.peak - kept.saved, replayed.peak - replayed.saved)
            found.append(self._with_ends(stages[0], peak))
        return found

    def _with_ends(self, stage: StagePlan, num_bytes: IntArray) -> Moments:
        passes = self.bytes.passes(stage)
        cells, is_forward = passes.cells, passes.is_forward
        forwards, backwards = np.flatnonzero(is_forward), np.flatnonzero(~is_forward)
        first, stop, away, back = (np.empty(len(forwards), dtype=np.int64) for _ in range(4))
        first[cells[forwards]], stop[cells[backwards]] = forwards, backwards + 1
        # the two newest chunks stay on the device, and so does the next one to run backward
        away[cells[forwards]] = np.append(forwards[2:], [len(cells)] * min(2, len(forwards)))
        back[cells[backwards]] = np.append([0], backwards[:-1] + 1)
        away = np.minimum(away, stop)
        return Moments(num_bytes.astype(np.float64), first, stop, away, np.maximum(away, np.minimum(back, stop)))
