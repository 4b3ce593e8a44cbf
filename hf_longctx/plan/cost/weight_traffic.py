"""Counts the bytes of weights and gradients that a rank sends: gathers of sharded weights, and sums of gradients.

FSDP2 gathers each layer for every forward and again for every backward of a chunk (`sharded`), or once per micro-batch
(`gathered_per_round`). Embedding and head are one unit with the final norm, and stay gathered from a forward to the backward
after it. Weights that autocast rounds are gathered in two bytes. The last backward of a micro-batch reduce-scatters all
gradients, half-precision ones, and those of rounded weights, in fp32. Ranks with equal shards, or with whole weights, sum their
gradients once per step.

Every collective counts as a ring: of n ranks, each sends (n - 1) / n of the gathered tensor to the next, and only the hops
between nodes use the network. Norms and biases, which have few elements, are not counted, as in `ModelSpec`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_longctx.plan.core.settings import ClusterSpec
from hf_longctx.plan.core.types import Parameters
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.cost.traffic import Traffic
from hf_longctx.plan.model.model_spec import ModelSpec

# share of the seconds of gathers that plans count: between none, if all run beside computing, and all. The first gather of a
# pass, copies into and out of buffers, and slower kernels beside them always remain.
COUNTED_SHARE = 0.5

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


def round_traffic(
    weights: StageWeights, cluster: ClusterSpec, parameters: Parameters, shard_ranks: int, num_chunks: int
) -> Traffic:
    """Returns traffic of a rank in a micro-batch of `num_chunks` chunks: gathers of weights, reduce-scatter of gradients.

    shard_ranks: consecutive ranks that share one copy of the weights. No traffic if weights are replicated.
    """
    if parameters == "replicated" or shard_ranks == 1:
        return Traffic()
    is_kept = parameters == "gathered_per_round"
    of_layers, of_outside = (1, 1) if is_kept else (2 * num_chunks, num_chunks)
    num_bytes = of_layers * weights.layers + of_outside * weights.outside + weights.gradients
    units, has_outside = weights.num_layers, weights.outside > 0
    messages = (of_layers * units + of_outside * has_outside) + (units + has_outside) * (weights.gradients > 0)
    return _around_ring(num_bytes, shard_ranks, 1, messages, cluster)


def copies_traffic(weights: StageWeights, cluster: ClusterSpec, shard_ranks: int, num_copies: int) -> Traffic:
    """Returns traffic of a rank in the sum of gradients over `num_copies` copies of the weights, once per step.

    shard_ranks: consecutive ranks of one copy, and so the distance of equal shards; 1 if weights are replicated.
    """
    if num_copies == 1:
        return Traffic()
    shard_bytes = (weights.gradients + weights.spread_gradients) / shard_ranks
    # an all-reduce is a reduce-scatter and a gather
    return _around_ring(2 * shard_bytes, num_copies, shard_ranks, 2, cluster)


def round_gather_s(costs: CostModel, num_chunks: int = 1) -> float:
    """Returns seconds of the gathers and the reduce-scatter of a micro-batch on one stage, as if nothing else ran.

    0 if weights are replicated, or if coefficients were measured, since these include them.
    """
    if costs.parameters == "replicated" or costs.coefficients != default_coefficients(costs.model, costs.cluster):
        return 0.0
    weights = StageWeights.of(costs.model, costs.model.num_layers, True, True)
    traffic = round_traffic(weights, costs.cluster, costs.parameters, costs.shards or costs.cluster.num_ranks, num_chunks)
    return costs.coefficients.forward.exchange_s(traffic)


def _around_ring(num_bytes: float, num_ranks: int, stride: int, messages: int, cluster: ClusterSpec) -> Traffic:
    """Returns mean traffic of a rank in collectives of `num_bytes` over a ring of ranks that are `stride` apart."""
    sent = num_bytes * (num_ranks - 1) / num_ranks
    num_nodes = -(-num_ranks // max(1, cluster.ranks_per_node // stride))
    far_share = 0.0 if num_nodes == 1 else num_nodes / num_ranks
    return Traffic(sent * (1 - far_share), sent * far_share, messages)
