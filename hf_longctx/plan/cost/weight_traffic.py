"""Counts the bytes of weights and gradients that a rank sends, and the seconds that a step counts for them.

FSDP2 gathers each layer for every forward and again for every backward of a chunk (`sharded`), once per micro-batch
(`gathered_per_round`), or once per step (`gathered_per_step`). Embedding and head are one unit with the final norm, and stay
gathered from a forward to the backward after it; on several stages, to the end of the step. Weights that autocast rounds are
gathered in two bytes. The last backward of a micro-batch, or every backward (`sums_every_backward`), reduce-scatters gradients;
those of half-precision and rounded weights are sent in fp32. Ranks with equal shards, or with whole weights, sum their gradients
once per step.

Every collective counts as a ring: of n ranks, each sends (n - 1) / n of the gathered tensor to the next, and only the hops
between nodes use the network. Norms and biases, which have few elements, are not counted, as in `ModelSpec`.

While a layer computes, FSDP2 gathers the next one and sums the gradients of the one before. A pass of n layers, each of which
computes for k seconds and keeps links busy for c, takes c + n k + (n - 1) max(0, c - k): nothing hides the first gather and the
last sum, and each pass begins when the one before has ended. Three more terms count (`Collectives.counted_s`): collectives of
embedding and head, which stand at both ends of a pass; copies into and out of the buffers of collectives, which run on the stream
that computes; and a share of the hidden seconds, in which kernels have fewer processors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from hf_longctx.plan.core.settings import ClusterSpec
from hf_longctx.plan.core.types import FloatArray, frees_every_round, gathers_every_pass, sums_every_backward
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.cost.traffic import Traffic
from hf_longctx.plan.model.model_spec import ModelSpec

# share of the seconds of hidden collectives by which the kernels beside them take longer: NCCL's rings and trees run at least 16
# blocks of threads, each of which takes one of the 108 processors of an A100, or of the 132 of an H100, while it sends
SLOWED_SHARE = 0.125

# least bytes of one element of a gradient that ranks sum (fp32)
_LEAST_GRADIENT_BYTES = 4


@dataclass(frozen=True, slots=True)
class StageWeights:
    """Bytes of the weights and gradients of one stage, before they are sharded."""

    # number of layers
    num_layers: int
    # weights to gather: those of the layers, and those of embedding and head if the stage has them
    layers: int
    outside: int
    # gradients of gathered trained weights, in fp32 or wider
    gradients: int
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
        trained, _ = model.adapters.sizes(num_layers, is_first, is_last)
        spread = spread if model.trains_layers else 0
        if model.adapters.is_empty:
            trained = model.part_parameters(num_layers, is_first, is_last) - spread
        element = max(_LEAST_GRADIENT_BYTES, model.bytes_per_element)
        return cls(num_layers, layers, outside, trained * element, spread * element)


def copies_traffic(weights: StageWeights, cluster: ClusterSpec, shard_ranks: int, num_copies: int) -> Traffic:
    """Returns traffic of a rank in the sum of gradients over `num_copies` copies of the weights, once per step.

    shard_ranks: consecutive ranks of one copy, and so the distance of equal shards; 1 if weights are replicated.
    """
    if num_copies == 1:
        return Traffic()
    shard_bytes = (weights.gradients + weights.spread_gradients) / shard_ranks
    # an all-reduce is a reduce-scatter and a gather
    return ring_traffic(2 * shard_bytes, num_copies, shard_ranks, 2, cluster)


@dataclass(frozen=True, slots=True)
class Collectives:
    """Seconds of the collectives of one forward or backward of a chunk on a stage."""

    num_layers: int = 0
    # seconds of one layer on links
    layer_s: float = 0.0
    # seconds of embedding and head on links
    outside_s: float = 0.0
    # seconds of copies between weights or gradients and the buffers of collectives
    copies_s: float = 0.0

    @property
    def links_s(self) -> float:
        """Seconds for which the collectives keep links busy."""
        return self.num_layers * self.layer_s + self.outside_s

    def counted_s(self, compute_s: ArrayLike | None = None) -> FloatArray:
        """Returns seconds that a pass counts beside `compute_s` of its layers, elementwise; None: the least, beside any."""
        others = max(0, self.num_layers - 1)
        hidden_s: FloatArray = np.asarray(others * self.layer_s)
        if compute_s is not None:
            hidden_s = np.minimum(hidden_s, others / max(1, self.num_layers) * np.asarray(compute_s, dtype=np.float64))
        return self.links_s + self.copies_s - (1 - SLOWED_SHARE) * hidden_s


@dataclass(frozen=True, slots=True)
class StageGathers:
    """Collectives in every pass of a stage, or of one layer range of it."""

    # those of a forward, the first forward of a micro-batch, a backward, and its last backward; empty if there are none
    passes: tuple[Collectives, ...] = ()
    # the gather with which a step begins, of weights that are gathered once per step
    once: Collectives = Collectives()

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
        host before every gather. Empty if weights are replicated, or if coefficients were measured, since these include what is
        counted here.
        """
        parameters, model, cluster = costs.parameters, costs.model, costs.cluster
        if parameters == "replicated" or shard_ranks == 1 or costs.coefficients != default_coefficients(model, cluster):
            return cls()
        num_layers, exchange_s, hardware = part[0], costs.coefficients.forward.exchange_s, cluster.hardware
        both, layers = StageWeights.of(model, *part), StageWeights.of(model, num_layers, False, False)
        host_s = host_bytes / hardware.copy_bytes_per_s

        def collectives(of_layers: float, of_outside: float, copied: float, host_s: float = 0.0) -> Collectives:
            layer_s, outside_s = (
                exchange_s(ring_traffic(num_bytes, shard_ranks, 1, 1, cluster)) if num_bytes else 0.0
                for num_bytes in (of_layers / max(1, num_layers), of_outside)
            )
            copies_s = copied / hardware.memory_bytes_per_s if hardware.memory_bytes_per_s else 0.0
            return Collectives(num_layers, layer_s + host_s / max(1, num_layers), outside_s, copies_s)

        # weights are read from a buffer and written once more; gradients are read, and written in fp32 or wider
        element = max(_LEAST_GRADIENT_BYTES, model.bytes_per_element)
        gather = collectives(both.layers, both.outside, 2 * (both.layers + both.outside), host_s)
        read_and_written = (1 + model.bytes_per_element / element) * both.gradients
        add = collectives(layers.gradients, both.gradients - layers.gradients, read_and_written)
        # embedding and head stay gathered from a forward to its backward, on several stages to the end of the step
        of_layers = replace(gather, outside_s=0.0, copies_s=gather.copies_s * both.layers / max(1, both.layers + both.outside))
        of_outside = Collectives(outside_s=gather.outside_s, copies_s=gather.copies_s - of_layers.copies_s)
        nothing = Collectives(num_layers)
        sums_each = sums_every_backward(parameters, num_stages)
        forward, backward = nothing, nothing
        if gathers_every_pass(parameters):
            forward, backward = of_layers if sums_each else gather, of_layers
        first = gather if frees_every_round(parameters) else forward
        summed = _both(backward, add)
        passes = forward, first, summed if sums_each else backward, summed
        if not sums_each:
            return cls(passes)
        return cls(passes, gather if parameters == "gathered_per_step" else of_outside)

    @property
    def once_s(self) -> float:
        """Seconds of `once`, which nothing hides."""
        return self.once.links_s + self.once.copies_s

    def of_pass(self, is_backward: bool, is_end: bool) -> Collectives:
        """Returns the collectives of a forward or backward. is_end: the first forward or last backward of a micro-batch."""
        return self.passes[2 * is_backward + is_end] if self.passes else Collectives()

    def counted_s(self, passes: Sequence[tuple[bool, float]]) -> float:
        """Returns seconds that a micro-batch counts beside its passes. passes: is it a backward, and seconds that it computes."""
        last = len(passes) - 1
        ends = ((place == (last if each[0] else 0), each) for place, each in enumerate(passes))
        return sum(float(self.of_pass(is_back, is_end).counted_s(compute_s)) for is_end, (is_back, compute_s) in ends)

    def in_round(self, num_chunks: int) -> Sequence[Collectives]:
        """Returns the collectives of all passes of a micro-batch of `num_chunks` chunks."""
        forward, first, backward, last = self.passes or 4 * (Collectives(),)
        return [first, *(num_chunks - 1) * (forward, backward), last]

    def least_s(self, num_chunks: int = 1) -> float:
        """Returns the least seconds that a micro-batch of so many chunks counts, beside any computing."""
        return sum(float(each.counted_s()) for each in self.in_round(num_chunks)) if self.passes else 0.0


def _both(one: Collectives, other: Collectives) -> Collectives:
    """Returns the collectives of a pass that has both."""
    return Collectives(
        one.num_layers, one.layer_s + other.layer_s, one.outside_s + other.outside_s, one.copies_s + other.copies_s
    )


def counted_passes_s(gathers: Sequence[Sequence[StageGathers]], compute_s: FloatArray, last_chunks: Sequence[int]) -> FloatArray:
    """Returns seconds that every pass of a group's pipeline counts, shape (layer ranges, stages, chunks, F/B), as `compute_s`.

    gathers: of every layer range of every stage. last_chunks: chunk of every stage's last backward. Chunk 0 runs forward first.
    """
    found = np.empty_like(compute_s)
    for stage, own in enumerate(gathers):
        for place, each in enumerate(own):
            for is_backward, end in ((0, 0), (1, last_chunks[stage])):
                beside_s = compute_s[place, stage, :, is_backward]
                found[place, stage, :, is_backward] = each.of_pass(bool(is_backward), False).counted_s(beside_s)
                found[place, stage, end, is_backward] = each.of_pass(bool(is_backward), True).counted_s(beside_s[end])
    return found


def whole_gathers(costs: CostModel) -> StageGathers:
    """Returns the collectives of a model on one stage."""
    return StageGathers.of(costs, costs.shards or costs.cluster.num_ranks, (costs.model.num_layers, True, True))


def ring_traffic(num_bytes: float, num_ranks: int, stride: int, messages: int, cluster: ClusterSpec) -> Traffic:
    """Returns mean traffic of a rank in collectives of `num_bytes` over a ring of ranks that are `stride` apart."""
    sent = num_bytes * (num_ranks - 1) / num_ranks
    per_node = max(1, cluster.ranks_per_node // stride)
    # blocks that do not tile nodes may start in the middle of one; the worst of them counts
    starts = range(0, per_node * num_ranks, num_ranks)
    num_nodes = 1 + max((first + num_ranks - 1) // per_node - first // per_node for first in starts)
    far_share = 0.0 if num_nodes == 1 else num_nodes / num_ranks
    return Traffic(sent * (1 - far_share), sent * far_share, messages)
