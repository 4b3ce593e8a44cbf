"""Translates between a pipeline and `policies/levels.py`: makes cells and moments, and turns layers and shares into policies.

Offloaded shares are spread over all layers of a range but the last, because the copies of a layer overlap with the layer after
it: out with its forward, and back with its backward. If the pass after a forward is the backward of another chunk, copies out go
on beside that, so that several layers may leave at once. The last layer is the first to be recomputed; the others follow
together, each for an equal share of its tokens, beside those that it offloads. Where tokens of a layer cannot be split, whole
layers are recomputed, from the last one on, and those below them offload.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np

from hf_longctx.plan.core.types import (
    TENSOR_CLASSES,
    ActivationPolicy,
    Chunk,
    FloatArray,
    IntArray,
    LayerPolicy,
    LayerRange,
    SequenceGroup,
    StagePlan,
    TensorClass,
    TensorShare,
)
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.memory.layer import Load
from hf_longctx.plan.model.model_spec import KindShares
from hf_longctx.plan.policies.levels import Cells, Moments, hosted_shares
from hf_longctx.plan.policies.slots import Slot, layer_slot
from hf_longctx.plan.predict.pipeline_run import PredictionCache


@dataclass(frozen=True, slots=True)
class _PolicyConstants:
    """Constants of copies to the host and of recomputed tokens."""

    # largest share of a layer's pass that the copy beside it may take, since copies share a link with messages and start late
    link_share: float = 0.9
    # parts of a layer's tokens, and fewest of a cell's, in which recomputed ones are counted, so that few policies differ
    steps: int = 8
    least_steps: int = 24


# repeat `recipes/bench/papers/infinipipe.py` and the stages table of `recipes/bench/cpu/planner.py` when one of these changes
_POLICIES = _PolicyConstants()


# classes that a recomputed layer needs: its input, and the attention output unless attention runs again
_NEEDED: tuple[TensorClass, ...] = ("layer_input", "attention_output")


def recomputed_layer(keeps_attention: bool) -> LayerPolicy:
    """Policy of a layer that keeps its input, and the attention output if `keeps_attention`, and recomputes the rest."""
    return _mixed_layer(1.0, 0.0, keeps_attention, ())


def _mixed_layer(
    recompute: float, host: float, keeps_attention: bool, replayed: tuple[TensorClass, ...], moves_needed: bool = False
) -> LayerPolicy:
    """Policy of a layer that recomputes and offloads these shares of its tokens. replayed: classes that no policy keeps.

    moves_needed: what recomputed tokens need goes to the host, too.
    """
    needed = _NEEDED if keeps_attention else _NEEDED[:1]
    shares = []
    for name in TENSOR_CLASSES:
        again, moved = recompute, host
        if name in replayed:
            again, moved = 1.0, 0.0
        elif name in needed:
            again, moved = 0.0, host + (recompute if moves_needed else 0.0)
        shares.append(TensorShare(name, again, moved, max(0.0, 1 - again - moved)))
    return LayerPolicy(tuple(share for share in shares if share.device < 1))


def _leaving_layers(num_layers: int, offload: float, beside_own: float) -> int:
    """Returns `ActivationPolicy.leaving_layers` of a cell that offloads this share, of which its own passes hide `beside_own`.

    Counts the layers for whose copies the forward is too short, and the one whose copy runs when it ends. All layers but the last
    are taken to offload equal shares.
    """
    if offload <= beside_own * (1 + 1e-9):
        return 1
    return 1 + math.ceil((num_layers - 1) * (1 - beside_own / offload))


class GroupCells:
    """Makes the cells and moments of one group whose policies have tiles and nothing else yet."""

    def __init__(
        self,
        group: SequenceGroup,
        costs: CostModel,
        tile_tokens: int,
        keeps_attention: bool,
        known: PredictionCache,
        *,
        host_bytes: float = math.inf,
        kept: Collection[int] = (),
        moves_needed: bool = False,
    ) -> None:
        """Makes all cells.

        host_bytes: of the host, for saved tensors; 0: nothing goes there. kept: stages that fit and so keep everything.
        moves_needed: whether what recomputed layers need is offloaded, too.
        """
        self.group, self.costs, self.tile_tokens, self.host_bytes, self.kept = group, costs, tile_tokens, host_bytes, kept
        self.bytes, self._slots = known.byte_model(costs.model), known.seconds(group, costs)
        model = costs.model
        self.keeps_attention, self.moves_needed, self.replayed = keeps_attention, moves_needed, model.replayed_classes
        # scans, spread experts and the attention of slices run again for all tokens of a layer
        self.splits_tokens = keeps_attention and model.states.is_empty and not model.experts.are_spread
        self._moved = _mixed_layer(0.0, 1.0, True, self.replayed)
        self.num_stages, self.num_ranges = len(group.stages), len(group.stages[0].layer_ranges)
        self.tokens = self._slots.tokens
        self._known_stages: dict[tuple[int, tuple[tuple[int, float], ...]], StagePlan] = {}
        # policies of all layers of a cell by number of layers, steps recomputed, share offloaded and tokens
        self._known_cells: dict[tuple[int, int, float, int], tuple[LayerPolicy, ...]] = {}
        # policies of a layer by tokens recomputed, offloaded and all
        self._known_layers: dict[tuple[int, int, int], LayerPolicy] = {}
        self.cells, beside_own = self._cells()
        # for every stage, the shares of its cells whose copies out hide beside their own forward
        self._beside_own: list[list[float]] = beside_own.reshape(self.num_stages, -1).tolist()
        self._kept_moments = [self.bytes.moments(group, stage) for stage in group.stages]

    def least_moments(self, room_bytes: Sequence[float]) -> Moments:
        """Moments as in `moments` without workspace of policies."""
        return self._moments([kept.peak for kept in self._kept_moments], room_bytes)

    def moments(self, room_bytes: Sequence[float]) -> Moments:
        """Moments (forwards and backwards) of every stage; `room_bytes`: each stage's bytes for saved tensors and workspace."""
        return self._moments(self._most_bytes, room_bytes)

    def _moments(self, num_bytes: Sequence[IntArray], room_bytes: Sequence[float]) -> Moments:
        """Moments of all stages that hold so many bytes if everything is kept; those of `kept` need no room."""
        excess, first, stop, start = [], [], [], 0
        for stage, own, room in zip(self.group.stages, num_bytes, room_bytes, strict=True):
            passes = self.bytes.passes(stage)
            forwards, backwards = np.flatnonzero(passes.is_forward), np.flatnonzero(~passes.is_forward)
            ends = np.empty((2, len(forwards)), dtype=np.int64)
            ends[0, passes.cells[forwards]], ends[1, passes.cells[backwards]] = forwards, backwards + 1
            excess.append(np.full(len(own), -np.inf) if stage.stage in self.kept else own - room)
            first.append(ends[0] + start)
            stop.append(ends[1] + start)
            start += len(own)
        return Moments(np.concatenate(excess), np.concatenate(first), np.concatenate(stop))

    def under(self, layers: FloatArray, offload: FloatArray) -> SequenceGroup:
        """The group whose cells recompute so many layers, in steps, and offload these shares."""
        cells = list(zip(self._units(layers), offload.tolist(), strict=True))
        count = len(cells) // self.num_stages
        stages = (
            stage if stage.stage in self.kept else self._stage(stage, tuple(cells[place * count : (place + 1) * count]))
            for place, stage in enumerate(self.group.stages)
        )
        return replace(self.group, stages=tuple(stages))

    def _stage(self, stage: StagePlan, cells: tuple[tuple[int, float], ...]) -> StagePlan:
        """The stage whose cells recompute so many steps of layers and offload these shares; equal ones are one object."""
        key = stage.stage, cells
        if key not in self._known_stages:
            places, beside_own = product(range(len(self.tokens)), enumerate(stage.layer_ranges)), self._beside_own[stage.stage]
            policies = (
                ActivationPolicy(
                    chunk,
                    layer_range,
                    self._cell(owned.num_layers, *cell, self.tokens[chunk]),
                    self.tile_tokens,
                    _leaving_layers(owned.num_layers, cell[1], hidden),
                )
                for (chunk, (layer_range, owned)), cell, hidden in zip(places, cells, beside_own, strict=True)
            )
            self._known_stages[key] = replace(stage, activations=tuple(policies))
        return self._known_stages[key]

    def _steps(self, num_layers: int) -> int:
        """Parts of a layer in which recomputed ones are counted."""
        return max(_POLICIES.steps, _POLICIES.least_steps // num_layers) if self.splits_tokens else 1

    @cached_property
    def _cell_steps(self) -> IntArray:
        """`_steps` of every cell."""
        return np.array([self._steps(count) for count in self.cells.num_layers.tolist()])

    def _units(self, layers: FloatArray) -> list[int]:
        """Steps of layers that every cell recomputes.

        What one chunk rounds up is taken off the next one of its stage and range, since they are in flight together.
        """
        steps = self._cell_steps
        wanted = (layers * steps).reshape(self.num_stages, -1, self.num_ranges)
        upto = np.ceil(np.cumsum(wanted, axis=1) - 1e-6)
        units = np.diff(upto, axis=1, prepend=0.0).reshape(-1)
        return np.minimum(units, self.cells.num_layers * steps).astype(np.int64).tolist()  # type: ignore[no-any-return]

    def _cell(self, num_layers: int, units: int, offload: float, num_tokens: int) -> tuple[LayerPolicy, ...]:
        """Policies of a cell's layers; () if all keep everything. Equal policies share one object."""
        key = num_layers, units, offload, num_tokens
        if key not in self._known_cells:
            self._known_cells[key] = self._layers(num_layers, units, offload * num_layers, num_tokens)
        return self._known_cells[key]

    def _layers(self, num_layers: int, units: int, offload: float, num_tokens: int) -> tuple[LayerPolicy, ...]:
        """Policies of layers that together recompute so many steps, and offload so many layers."""
        steps = self._steps(num_layers)
        moved = int(min(1.0, offload / max(1, num_layers - 1)) * num_tokens + 1e-6)
        if not units and not moved:
            return ()
        last = min(units, steps)
        if moved and self.splits_tokens:
            # equal shares of all layers but the last
            each, more = divmod(units - last, num_layers - 1)
            shares = [each + (place >= num_layers - 1 - more) for place in range(num_layers - 1)]
        else:
            shares = [min(steps, max(0, units - last - place * steps)) for place in reversed(range(num_layers - 1))]
        if moved and not self.splits_tokens and (others := shares.count(0)):
            moved = int(min(1.0, offload / others) * num_tokens + 1e-6)
        # few of these shares differ
        front = {share: self._layer(share, steps, moved, num_tokens) for share in dict.fromkeys(shares)}
        return (*map(front.__getitem__, shares), *([self._layer(last, steps, 0, num_tokens)] if last else []))

    def _layer(self, units: int, steps: int, moved: int, num_tokens: int) -> LayerPolicy:
        """Policy of a layer that recomputes this many of its tokens' steps and offloads `moved` tokens, or what is left."""
        again = math.ceil(units * num_tokens / steps)
        moved = min(num_tokens - again, moved)
        key = again, moved, num_tokens
        if key not in self._known_layers:
            shares = again / num_tokens, moved / num_tokens
            self._known_layers[key] = _mixed_layer(*shares, self.keeps_attention, self.replayed, self.moves_needed)
        return self._known_layers[key]

    def _cells(self) -> tuple[Cells, FloatArray]:
        """The cells of all stages, chunks and layer ranges, in this order, and the shares that their own passes hide alone.

        A layer's copies overlap with the layer after it, so nothing hides those of a range's last layer.
        """
        layer_ranges = [
            (stage, layer_range, owned) for stage in self.group.stages for layer_range, owned in enumerate(stage.layer_ranges)
        ]
        ways_of = {
            kinds: self._layer_ways(layer_range)
            for kinds, layer_range in {self._kinds(layer_range): layer_range for *_, layer_range in layer_ranges}.items()
        }
        rate, found = self.costs.cluster.hardware.copy_bytes_per_s, []
        for stage, layer_range, owned in layer_ranges:
            count, (own_s, others_s) = owned.num_layers, self._hiding_s(stage, layer_range)
            kept, recomputed, again_on_host, offloaded, on_host, recompute_s = ways_of[self._kinds(owned)]
            behind, copy_s = (count - 1) / count, count * on_host / rate
            # copies out run beside the layers above, and beside the whole pass that follows
            out_s, back_s = behind * own_s[0], behind * own_s[1]
            hiding_s = np.minimum(back_s, np.stack([out_s, out_s + others_s]))
            hidden_s = _POLICIES.link_share * hiding_s * (self.host_bytes > 0)
            most = np.minimum(behind, np.divide(hidden_s, copy_s, out=np.zeros_like(hidden_s), where=copy_s > 0))
            # shares of less than a token move nothing
            beside_own, most = np.where(most * self.tokens < 1, 0.0, most)
            found.append(
                (
                    np.full(len(self.tokens), count),
                    recompute_s,
                    kept - recomputed,
                    again_on_host,
                    count * (kept - offloaded),
                    count * on_host,
                    most,
                    beside_own,
                )
            )
        # [stages * layer ranges, fields, chunks] -> fields of [stages, chunks, layer ranges]
        *fields, beside_own = (
            np.stack(values).reshape(self.num_stages, self.num_ranges, -1).swapaxes(1, 2).reshape(-1)
            for values in zip(*found, strict=True)
        )
        return Cells(*fields), beside_own

    def _kinds(self, layer_range: LayerRange) -> KindShares:
        return self.costs.model.kind_shares(layer_range)

    def _layer_ways(self, layer_range: LayerRange) -> FloatArray:
        """Numbers of one layer of every chunk, as a mean over layers of the range, (6, chunks).

        Device bytes if it is kept; device and host bytes if it is recomputed, and if it is offloaded; seconds that recomputing
        adds.
        """
        kinds = self._kinds(layer_range)
        recomputed = _mixed_layer(1.0, 0.0, self.keeps_attention, self.replayed, self.moves_needed)
        again = [share.tensor_class for share in recomputed.shares if share.recompute]
        policies = (LayerPolicy(), recomputed, self._moved)
        found = np.empty((6, len(self.tokens)))
        for chunk, load in zip(self.group.chunks, self.bytes.loads(self.group, 0), strict=True):
            (found[0, chunk.index], _), found[1:3, chunk.index], found[3:5, chunk.index] = (
                self._mean_held(load, policy, kinds) for policy in policies
            )
            slot = self._slot(chunk, layer_range, kinds)
            again_s = {item.tensor_class: item.recompute_s for item in slot.saved}
            found[5, chunk.index] = slot.replay_s + sum(again_s[name] for name in again)
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

    def _hiding_s(self, stage: StagePlan, layer_range: int) -> tuple[tuple[FloatArray, FloatArray], FloatArray]:
        """Seconds of computation beside which each chunk's copies run: of its own passes, and of a backward after its forward.

        The latter are 0 for a chunk whose next pass is another forward, or its own backward, which needs the tensors at once.
        """
        passes = self.bytes.passes(stage)
        own_s, after_s = self._passes_s(stage, layer_range), np.zeros(len(self.tokens))
        backwards_s = np.stack([self._passes_s(stage, each)[1] for each in range(self.num_ranges)], axis=1).reshape(-1)
        cells, others = passes.cells[:-1], passes.cells[1:]
        goes_on = passes.is_forward[:-1] & ~passes.is_forward[1:] & (cells != others) & (cells % self.num_ranges == layer_range)
        after_s[cells[goes_on] // self.num_ranges] = backwards_s[others[goes_on]]
        return own_s, after_s

    def _passes_s(self, stage: StagePlan, layer_range: int) -> tuple[FloatArray, FloatArray]:
        """Seconds of each chunk's forward and backward over a layer range.

        Seconds of the head count, too: it is better if copies take a little longer than if a whole layer runs again.
        """
        owned, has_head = (
            stage.layer_ranges[layer_range],
            (stage.stage, layer_range) == (self.num_stages - 1, self.num_ranges - 1),
        )
        pairs = self.costs.attention_pairs((owned,))
        away = self.group.head_stages if has_head else {}
        own_head = np.array([has_head and chunk not in away for chunk in range(len(self.group.chunks))])
        forward_s, backward_s = (
            layer_s * owned.num_layers + own_head * head_s
            for layer_s, head_s, _ in (self._slots.passes(is_backward, 0, pairs).T for is_backward in (False, True))
        )
        return forward_s, backward_s

    @cached_property
    def _most_bytes(self) -> list[IntArray]:
        """Bytes of every stage in each of its moments if everything is kept, with the largest workspace.

        Workspace beside saved tensors hardly depends on the policy; the largest of counts with everything kept, with everything
        recomputed, and with all copies that hide and the rest recomputed.
        """
        every = self.cells.num_layers.astype(np.float64)
        # tensors that leave beside the next pass take room there, which none need that the host does not take
        most = hosted_shares(self.cells, self.least_moments([0.0] * self.num_stages), self.host_bytes)
        ways = [self.under(every, np.zeros(len(every)))]
        if self.host_bytes:
            ways.append(self.under(every * (1 - most), most))
        found = []
        for kept, *stages in zip(self._kept_moments, *(way.stages for way in ways), strict=True):
            is_kept = stages[0].stage in self.kept
            counts = [kept, *([] if is_kept else [self.bytes.moments(self.group, each) for each in stages])]
            found.append(kept.saved + np.max([each.peak - each.saved for each in counts], axis=0))
        return found
