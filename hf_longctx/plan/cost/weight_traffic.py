"""Counts the bytes of weights and gradients that a rank sends, and the seconds that a step counts for them.

Each layer is gathered for every forward and again for every backward of a chunk (`sharded`, or inside a node
`gathered_per_node`), once per micro-batch (`gathered_per_round`), or once per step (`gathered_per_step`). If a pass begins with
the layer with which the one before ended, which is the usual case in a pipeline, that layer is not gathered again
(`keeps_first`). Embedding and head are one unit with the final norm, and stay gathered to the end of the step. Weights that
autocast rounds are gathered in two bytes. The last backward of a micro-batch, or every backward (`sums_every_backward`), sums
gradients: inside a node in the dtype in which backwards make them, also those of rounded weights, or in fp32 if several backwards
may have added up; across nodes in fp32 (`sum_bytes`). Ranks with equal shards, or with whole weights, sum their gradients once
per step. If nodes keep copies, weights enter each node and its sums leave it once per step.

Every gather counts as a ring: of n ranks, each sends (n - 1) / n of the gathered tensor to the next, and only the hops between
nodes use the network. A calibrated profile has the rates of gathers and sums, inside a node and over all ranks; otherwise they
are those of exchanges. Norms and biases, which have few elements, are not counted, as in `ModelSpec`.

While a layer computes, the next one is gathered, and the gradients of the one before are summed. If every pass gathers, the last
layer of a pass hides the first gather of the next pass; otherwise nothing hides the first gather of a micro-batch. The last sum
of a backward, with that of embedding and head, runs beside the first layer of the next pass, before the gather of that pass's
second layer, and lengthens the step by what this layer cannot hide (`NEXT_SHARE`). Only the first gather and the last sums of a
step hide nowhere (`ends_s`). Two more terms count: reads of gradients that are added up, as if nothing ran beside them (what is
received needs no copies); and a share of the hidden seconds, in which kernels have fewer processors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from hf_longctx.plan.core.settings import ClusterSpec
from hf_longctx.plan.core.sharding import sum_bytes
from hf_longctx.plan.core.types import (
    BoolArray,
    FloatArray,
    IntArray,
    LayerRange,
    Parameters,
    frees_every_round,
    gathers_every_pass,
    sums_every_backward,
)
from hf_longctx.plan.cost.cost_model import SLOWED_SHARE, CostModel
from hf_longctx.plan.cost.traffic import Traffic
from hf_longctx.plan.model.model_spec import ModelSpec

# least seconds of the first layer of a pass, as a share of those of a layer in the backward before it: a backward takes two to
# two and a half times as long as a forward, and up to one more if it recomputes
NEXT_SHARE = 1 / 3

# numbers of ranks, and bytes that each of them sends in a second
Rates = tuple[tuple[int, float], ...]

# exchanges that sum the gradients of a layer's matrices, as in Llama, where the two small ones share one with all others
_EXCHANGES = 6
# those of embedding, head, and final norm
_EXCHANGES_OUTSIDE = 3
# least bytes of one element of a sum of gradients (fp32)
_LEAST_GRADIENT_BYTES = 4


@dataclass(frozen=True, slots=True)
class StageWeights:
    """Bytes of the weights and gradients of one stage, before they are sharded."""

    # number of layers
    num_layers: int
    # weights to gather: those of the layers, and those of embedding and head if the stage has them
    layers: int
    outside: int
    # gradients of gathered trained weights, in fp32 or wider, and as one backward makes them
    gradients: int
    own_gradients: int
    # gradients of experts that are spread over ranks; summed over copies only
    spread_gradients: int = 0

    @classmethod
    def of(cls, model: ModelSpec, num_layers: int, is_first: bool, is_last: bool) -> StageWeights:
        """Counts weights of `num_layers` layers, with the embedding if first and the head if last."""
        if model.keeps_all_stages:
            num_layers, is_first, is_last = model.num_layers, True, True
        spread = num_layers * model.experts.spread_parameters
        _, layer_adapters = model.adapters.sizes(num_layers, False, False)
        _, outside_adapters = model.adapters.sizes(0, is_first, is_last)
        layers = model.part_weight_bytes(num_layers, False, False) - spread * model.bytes_per_element + layer_adapters
        towers = model.tower_parameters * model.bytes_per_element * is_first
        outside = model.part_weight_bytes(0, is_first, is_last) + outside_adapters + towers
        layers -= model.rounded_bytes(num_layers, False)
        outside -= model.rounded_bytes(0, is_last)
        trained, own = model.adapters.sizes(num_layers, is_first, is_last)
        spread = spread if model.trains_layers else 0
        if model.adapters.is_empty:
            trained = model.part_parameters(num_layers, is_first, is_last) - spread
            own = trained * model.bytes_per_element - model.rounded_bytes(num_layers, is_last)
        trained += model.tower.trained_parameters * is_first
        own += model.tower.trained_parameters * model.bytes_per_element * is_first
        element = max(_LEAST_GRADIENT_BYTES, model.bytes_per_element)
        return cls(num_layers, layers, outside, trained * element, own, spread * element)


def copies_traffic(weights: StageWeights, cluster: ClusterSpec, shard_ranks: int, num_copies: int) -> Traffic:
    """Returns traffic of a rank in the sum of gradients over `num_copies` copies of the weights, once per step.

    shard_ranks: consecutive ranks of one copy, and so the distance of equal shards; 1 if weights are replicated.
    """
    if num_copies == 1:
        return Traffic()
    shard_bytes = (weights.gradients + weights.spread_gradients) / shard_ranks
    # an all-reduce is a reduce-scatter and a gather
    return ring_traffic(2 * shard_bytes, num_copies, shard_ranks, 2, cluster)


def shared_head_traffic(
    model: ModelSpec, cluster: ClusterSpec, shard_ranks: int, num_stages: int, ranks_per_stage: int
) -> Traffic:
    """Returns traffic of a rank in the sum of the output head's gradient over the stages that have it, once per step.

    The first stage takes part if its embedding is the head's weight. shard_ranks: see `copies_traffic`.
    """
    num_sharing = model.num_head_stages + (model.tied_embeddings and model.num_head_stages < num_stages)
    if num_stages == 1 or num_sharing == 1:
        return Traffic()
    shard_bytes = StageWeights.of(model, 0, False, True).gradients / shard_ranks
    return ring_traffic(2 * shard_bytes, num_sharing, ranks_per_stage, 2, cluster)


@dataclass(frozen=True, slots=True)
class Collectives:
    """Seconds of the collectives of one forward or backward of a chunk on a stage."""

    num_layers: int = 0
    # seconds on links of one layer: of its gather, and of the sum of its gradients
    gather_s: float = 0.0
    sum_s: float = 0.0
    # seconds on links of embedding and head
    outside_s: float = 0.0
    # seconds in which gradients are read to add them up
    copies_s: float = 0.0
    # whether the pass before gathers the first layer, and this one the first layer of the next
    is_ahead: bool = False
    # whether the first layer stays gathered from the pass before, which ended with it
    keeps_first: bool = False

    @property
    def links_s(self) -> float:
        """Seconds for which the collectives keep links busy."""
        return self.num_layers * (self.gather_s + self.sum_s) - self.keeps_first * self.gather_s + self.outside_s

    @property
    def last_s(self) -> float:
        """Seconds of the sums with which the pass ends."""
        return self.sum_s + self.outside_s

    def counted_s(self, compute_s: ArrayLike = math.inf) -> FloatArray:
        """Returns seconds that a pass counts beside `compute_s` of its layers, elementwise; the least without an argument."""
        layer_s = np.asarray(compute_s, dtype=np.float64) / max(1, self.num_layers)
        hidden_s = self.inner_hidden_s(layer_s) + self.first_hidden_s(layer_s) + self.last_hidden_s(layer_s)
        return self.links_s + self.copies_s - (1 - SLOWED_SHARE) * hidden_s

    def inner_hidden_s(self, layer_s: FloatArray) -> FloatArray:
        """Returns seconds of gathers and sums that the pass itself hides, if a layer computes for `layer_s`."""
        return max(0, self.num_layers - 1) * np.minimum(self.gather_s + self.sum_s, layer_s)

    def first_hidden_s(self, layer_s: FloatArray) -> FloatArray:
        """Returns seconds of the first gather that the pass before hides, if a layer computes for `layer_s`."""
        return (self.is_ahead and not self.keeps_first) * np.minimum(self.gather_s, layer_s)

    def last_hidden_s(self, layer_s: FloatArray) -> FloatArray:
        """Returns seconds of the last sums that the pass after hides, if a layer computes for `layer_s`."""
        found: FloatArray = np.minimum(self.last_s, np.maximum(0, NEXT_SHARE * layer_s - self.gather_s))
        return found


@dataclass(frozen=True, slots=True)
class StageGathers:
    """Collectives in every pass of a stage, or of one layer range of it."""

    # those of a forward, the first forward of a micro-batch, a backward, its last backward, and its only one; empty without any
    passes: tuple[Collectives, ...] = ()
    # gathers once per step, before its first pass: of embedding and head, or of all weights
    once: Collectives = Collectives()
    # gathers of layers to nodes once per step, from its start on, and sums across nodes once per step, from its last backward on
    to_nodes: Collectives = Collectives()
    across_nodes: Collectives = Collectives()

    @classmethod
    def of(
        cls,
        costs: CostModel,
        shard_ranks: int,
        part: tuple[int, bool, bool],
        num_stages: int = 1,
        host_bytes: int = 0,
    ) -> StageGathers:
        """Counts the collectives of a part of the model among blocks of `shard_ranks` ranks.

        part: number of layers, and whether the embedding and the head are there. host_bytes: shards of layers that come from the
        host before every gather. Empty if weights are replicated, or if measured coefficients include what is counted here
        (`CostModel.counts_weights`).
        """
        parameters, model, hardware = costs.parameters, costs.model, costs.cluster.hardware
        if parameters == "replicated" or shard_ranks == 1 or not costs.counts_weights:
            return cls()
        num_layers, near = part[0], costs.node_ranks or shard_ranks
        both, layers = StageWeights.of(model, *part), StageWeights.of(model, num_layers, False, False)

        def gather_s(num_bytes: float, num_ranks: int = shard_ranks) -> float:
            sent = ring_traffic(num_bytes, num_ranks, 1, 1, costs.cluster)
            return _seconds_of(sent, costs, hardware.gather_bytes_per_s) if num_bytes else 0.0

        # shards come from the host before a gather reads them
        units = max(1, num_layers)
        layer_s = gather_s(both.layers / units, near) + host_bytes / hardware.copy_bytes_per_s / units
        of_outside, of_layers = Collectives(outside_s=gather_s(both.outside)), Collectives(num_layers, layer_s)
        nothing = Collectives(num_layers)
        each = replace(of_layers, is_ahead=True) if gathers_every_pass(parameters) else nothing
        first = of_layers if frees_every_round(parameters) else each

        def summing(all_bytes: int, layer_bytes: int) -> Collectives:
            """Returns those of a backward that sums gradients of so many bytes, and of so many in layers."""

            def sum_s(num_bytes: float, wide_bytes: float, num_exchanges: int) -> float:
                sent = sum_traffic(num_bytes, wide_bytes, near, num_exchanges, costs.cluster)
                return _seconds_of(sent, costs, hardware.scatter_bytes_per_s) if num_bytes else 0.0

            layer_s = sum_s(layer_bytes / units, layers.gradients / units, _EXCHANGES if model.trains_layers else 1)
            outside_s = sum_s(all_bytes - layer_bytes, both.gradients - layers.gradients, _EXCHANGES_OUTSIDE)
            copies_s = all_bytes / hardware.memory_bytes_per_s if hardware.memory_bytes_per_s else 0.0
            return replace(each, sum_s=layer_s, outside_s=outside_s, copies_s=copies_s)

        wide = summing(both.gradients, layers.gradients)
        # ranks of a block may have several backwards, or one
        only = wide if frees_every_round(parameters) else summing(both.own_gradients, layers.own_gradients)
        backwards = (only, only) if sums_every_backward(parameters, num_stages) else (each, wide)
        passes = each, first, *backwards, only
        if parameters == "gathered_per_step":
            return cls(passes, replace(of_layers, outside_s=of_outside.outside_s))
        if near < shard_ranks:

            def cross_s(num_bytes: float) -> float:
                # every rank exchanges its part of its node's copy with those that have the same part
                sent = Traffic(0.0, num_bytes * (1 / near - 1 / shard_ranks), 1)
                return _seconds_of(sent, costs, hardware.gather_bytes_per_s, near) if num_bytes else 0.0

            of_sums = cross_s(layers.gradients / units), cross_s(both.gradients - layers.gradients)
            to_nodes = Collectives(num_layers, cross_s(layers.layers / units))
            return cls(passes, of_outside, to_nodes, Collectives(num_layers, sum_s=of_sums[0], outside_s=of_sums[1]))
        return cls(passes, of_outside)

    def of_pass(self, is_backward: bool, is_end: bool, keeps_first: bool = False) -> Collectives:
        """Returns the collectives of a forward or backward. is_end: the first forward or last backward of a micro-batch."""
        if not self.passes:
            return Collectives()
        found = self.passes[2 * is_backward + is_end]
        return replace(found, keeps_first=True) if keeps_first else found

    def counted_s(self, passes: Sequence[tuple[bool, float]]) -> float:
        """Returns seconds that a micro-batch counts beside its passes. passes: is it a backward, and seconds that it computes."""
        if not self.passes:
            return 0.0
        last = len(passes) - 1
        keeps = [False, *(one != other for (one, _), (other, _) in pairwise(passes))]
        ends = [
            self.of_pass(is_back, place == (last if is_back else 0), keeps[place]) for place, (is_back, _) in enumerate(passes)
        ]
        if len(ends) == 2:
            ends[-1] = replace(self.passes[-1], keeps_first=keeps[-1])
        return sum(float(each.counted_s(compute_s)) for each, (_, compute_s) in zip(ends, passes, strict=True))

    def in_round(self, num_chunks: int) -> Sequence[tuple[int, Collectives]]:
        """Returns the collectives of the passes of a micro-batch of `num_chunks` chunks, with the number of equal passes.

        They are those of passes that gather all of their layers.
        """
        forward, first, backward, last, only = self.passes or 5 * (Collectives(),)
        return [(1, first), (num_chunks - 1, forward), (num_chunks - 1, backward), (1, last if num_chunks > 1 else only)]

    def least_s(self, num_chunks: int = 1) -> float:
        """Returns the least seconds that a micro-batch of so many chunks counts, beside any computing.

        Forwards and backwards take turns, so that all passes but the first begin with a gathered layer.
        """
        if not self.passes:
            return 0.0
        (_, first), *others = self.in_round(num_chunks)
        others_s = sum(count * float(replace(each, keeps_first=True).counted_s()) for count, each in others)
        return float(first.counted_s()) + others_s


def _seconds_of(sent: Traffic, costs: CostModel, measured: Rates, num_leaving: int = 1) -> float:
    """Returns seconds of a gather or sum.

    measured: rates by number of ranks, on one node or on several. num_leaving: ranks of a node that send to other nodes at once;
    one in the rings of these rates.
    """
    per_node, crosses_nodes = costs.cluster.ranks_per_node, sent.network_bytes > 0
    rates = [rate for num_ranks, rate in sorted(measured) if (num_ranks > per_node) == crosses_nodes]
    if not rates:
        return costs.coefficients.forward.exchange_s(sent)
    # that of most ranks
    return costs.cluster.hardware.message_s * sent.messages + sent.num_bytes * num_leaving / rates[-1]


def counted_passes_s(
    gathers: Sequence[Sequence[StageGathers]],
    compute_s: FloatArray,
    last_chunks: Sequence[int],
    keeps_first: BoolArray,
) -> FloatArray:
    """Returns seconds that every pass of a group's pipeline counts, shape (layer ranges, stages, chunks, F/B), as `compute_s`.

    gathers: of every layer range of every stage. last_chunks: chunk of every stage's last backward. Chunk 0 runs forward first.
    keeps_first: see `keeping_passes`, in the same shape.
    """
    found = np.empty_like(compute_s)
    for stage, own in enumerate(gathers):
        for place, each in enumerate(own):
            for is_backward, end in ((0, 0), (1, last_chunks[stage])):
                where, keeps = (place, stage, slice(None), is_backward), keeps_first[place, stage, :, is_backward]
                beside_s = compute_s[where]
                ways_s = [each.of_pass(bool(is_backward), False, kept).counted_s(beside_s) for kept in (False, True)]
                found[where] = np.where(keeps, ways_s[1], ways_s[0])
                last = each.of_pass(bool(is_backward), True, bool(keeps[end]))
                found[place, stage, end, is_backward] = last.counted_s(beside_s[end])
    return found


# forwards and backwards of a stage, in order: whether each is a forward, its chunk, and its layer range
StagePasses = tuple[BoolArray, IntArray, IntArray]


def keeping_passes(stages: Sequence[StagePasses], num_ranges: int, num_chunks: int) -> BoolArray:
    """Returns which passes begin with the layer with which the one before ended, (layer ranges, stages, chunks, F/B)."""
    found = np.zeros((num_ranges, len(stages), num_chunks, 2), dtype=bool)
    for stage, (is_forward, chunks, layer_ranges) in enumerate(stages):
        keeps = (is_forward[1:] != is_forward[:-1]) & (layer_ranges[1:] == layer_ranges[:-1])
        found[layer_ranges[1:], stage, chunks[1:], np.where(is_forward[1:], 0, 1)] = keeps
    return found


def stage_collectives(
    collectives: Callable[[int, bool, bool], StageGathers],
    ranges: Sequence[Sequence[LayerRange]],
    parameters: Parameters,
    model: ModelSpec,
) -> list[list[StageGathers]]:
    """Returns the collectives of every layer range of every stage.

    collectives: those of a part of the model, given the number of layers, and whether the embedding and the head are there.
    If several stages have the head (`ModelSpec.num_head_stages`) and every pass sums its own gradients, those of the head are not
    part of backwards; see `summed_head_s`.
    """
    num_stages = len(ranges)
    is_apart = model.num_head_stages > 1 and sums_every_backward(parameters, num_stages)
    found: list[list[StageGathers]] = []
    for stage, own in enumerate(ranges):
        found.append([])
        for place, layer_range in enumerate(own):
            is_last = place == len(own) - 1 and model.has_head(stage, num_stages)
            of_range = collectives(layer_range.num_layers, stage == place == 0, is_last)
            if is_last and is_apart:
                of_range = replace(of_range, passes=collectives(layer_range.num_layers, stage == place == 0, False).passes)
            found[-1].append(of_range)
    return found


def summed_head_s(head: StageGathers, parameters: Parameters) -> float:
    """Returns seconds in which a spread output head's gradients are summed after each chunk; 0 if they wait.

    head: collectives of the head alone, on one of several stages. What runs beside them does not count.
    """
    return float(head.of_pass(True, False).counted_s(0.0)) if sums_every_backward(parameters, 2) else 0.0


def ends_s(own: Sequence[StageGathers], first_s: float = math.inf, last_s: float = math.inf) -> tuple[float, float]:
    """Returns seconds that a step counts on a stage beside its passes, before the first one and after the last one.

    No pass hides the first gather and the last sums, so what those passes count as hidden counts here. So do gathers once per
    step, of which a first forward hides all layers but one, and sums that cross nodes once per step, of which a last backward
    hides all of the first layer range but one layer. own: collectives of the stage's layer ranges. first_s, last_s: seconds that
    the first forward and the last backward compute; without them the least together with the passes.
    """
    if not own or not own[0].passes:
        return 0.0, 0.0
    _, first, _, _, last = own[0].passes
    layer_s = [np.asarray(seconds / max(1, first.num_layers)) for seconds in (first_s, last_s)]
    hidden_s = sum(float(each.once.inner_hidden_s(layer_s[0])) for each in own) - float(first.first_hidden_s(layer_s[0]))
    before_s = sum(each.once.links_s for each in own) - (1 - SLOWED_SHARE) * hidden_s
    # a last backward hides what crosses nodes beside its own collectives
    across = own[0].across_nodes
    beside = replace(across, sum_s=last.gather_s + last.sum_s)
    both = replace(across, sum_s=beside.sum_s + across.sum_s)
    crossing_s = float(both.inner_hidden_s(layer_s[1])) - float(beside.inner_hidden_s(layer_s[1]))
    unhidden_s = sum(each.across_nodes.links_s for each in own) - (1 - SLOWED_SHARE) * crossing_s
    return before_s, unhidden_s + (1 - SLOWED_SHARE) * float(last.last_hidden_s(layer_s[1]))


def to_nodes_s(own: Sequence[StageGathers], first_s: float = math.inf) -> float:
    """Returns seconds from a step's start for which a stage's first pass waits for copies of its nodes, beyond its message.

    own, first_s: as for `ends_s`; the first forward hides all layers but one.
    """
    hidden_s = sum(float(each.to_nodes.inner_hidden_s(np.asarray(first_s / max(1, each.to_nodes.num_layers)))) for each in own)
    return sum(each.to_nodes.links_s for each in own) - (1 - SLOWED_SHARE) * hidden_s


def whole_gathers(costs: CostModel) -> StageGathers:
    """Returns the collectives of a model on one stage."""
    return StageGathers.of(costs, costs.shards or costs.cluster.num_ranks, (costs.model.num_layers, True, True))


def ring_traffic(num_bytes: float, num_ranks: int, stride: int, messages: int, cluster: ClusterSpec) -> Traffic:
    """Returns mean traffic of a rank in collectives of `num_bytes` over a ring of ranks that are `stride` apart."""
    sent = num_bytes * (num_ranks - 1) / num_ranks
    num_nodes = _num_nodes(num_ranks, max(1, cluster.ranks_per_node // stride))
    far_share = 0.0 if num_nodes == 1 else num_nodes / num_ranks
    return Traffic(sent * (1 - far_share), sent * far_share, messages)


def sum_traffic(num_bytes: float, wide_bytes: float, num_ranks: int, num_exchanges: int, cluster: ClusterSpec) -> Traffic:
    """Returns mean traffic of a rank that sums gradients of `num_bytes` over consecutive ranks.

    wide_bytes: of the gradients in fp32 or wider. num_exchanges: exchanges in which ranks send all gradients.
    """
    per_node = cluster.ranks_per_node
    near, far = sum_bytes(num_bytes, wide_bytes, num_ranks, per_node)
    if far:
        return Traffic(near, far, 2 * num_exchanges)
    num_nodes = _num_nodes(num_ranks, per_node)
    # share of the other ranks that are on other nodes
    far_share = 0.0 if num_nodes == 1 else (num_ranks - num_ranks / num_nodes) / (num_ranks - 1)
    return Traffic(near * (1 - far_share), near * far_share, num_exchanges)


def _num_nodes(num_ranks: int, per_node: int) -> int:
    """Returns the most nodes of one of the blocks of `num_ranks` ranks, which may start in the middle of a node."""
    starts = range(0, per_node * num_ranks, num_ranks)
    return 1 + max((first + num_ranks - 1) // per_node - first // per_node for first in starts)
