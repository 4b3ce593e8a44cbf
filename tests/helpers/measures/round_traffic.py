"""Count the bytes of weights and gradients that a rank sends in a micro-batch: the oracle for `StageGathers`."""

from __future__ import annotations

from hf_longctx.plan.core.settings import ClusterSpec
from hf_longctx.plan.core.types import Parameters, sums_every_backward
from hf_longctx.plan.cost.traffic import Traffic
from hf_longctx.plan.cost.weight_traffic import StageWeights, ring_traffic

# exchanges of the gradients of a layer, and of those of embedding and head
EXCHANGES, EXCHANGES_OUTSIDE = 6, 3


def round_traffic(
    weights: StageWeights,
    cluster: ClusterSpec,
    parameters: Parameters,
    shard_ranks: int,
    num_chunks: int,
    num_stages: int = 1,
    is_first: bool = True,
    turns: int = 0,
) -> Traffic:
    """Returns traffic of a rank in a micro-batch of `num_chunks` chunks: gathers of weights, sums of gradients.

    shard_ranks: consecutive ranks that share one copy of the weights. is_first: of the step's micro-batches. turns:
    passes that begin with the layer with which the one before ended, which stays gathered. No traffic if weights are replicated.
    """
    if parameters == "replicated" or shard_ranks == 1:
        return Traffic()
    once = 0 if sums_every_backward(parameters, num_stages) and not is_first else 1
    of_layers = 2 * num_chunks if parameters == "sharded" else once
    of_outside = int(is_first)
    units, has_outside = weights.num_layers, weights.outside > 0
    num_gathers = of_layers * units - (turns if parameters == "sharded" else 0)
    gathered = num_gathers / units * weights.layers + of_outside * weights.outside
    gathers = ring_traffic(gathered, shard_ranks, 1, num_gathers + of_outside * has_outside, cluster)
    each = sums_every_backward(parameters, num_stages)
    num_sums = num_chunks if each else 1
    # gradients of several backwards, of any rank, add up in fp32 before they are sent
    is_own = each or (num_chunks == 1 and parameters == "sharded")
    own = weights.own_gradients if is_own else weights.gradients
    link, network, exchanges = _summed(num_sums * own, num_sums * weights.gradients, shard_ranks, cluster)
    messages = exchanges * num_sums * (units * EXCHANGES + has_outside * EXCHANGES_OUTSIDE) * (weights.gradients > 0)
    return Traffic(gathers.link_bytes + link, gathers.network_bytes + network, gathers.messages + messages)


def _summed(own: float, wide: float, num_ranks: int, cluster: ClusterSpec) -> tuple[float, float, int]:
    """Counts bytes rank by rank: (within a node, to others, exchanges of one gradient) of a mean rank of the first group.

    own, wide: bytes of a gradient as it is, and in fp32.
    """
    per_node = cluster.ranks_per_node
    link = network = 0.0
    pairs = [(a, b) for a in range(num_ranks) for b in range(num_ranks) if a != b]
    if per_node == 1 or num_ranks % per_node:
        near = sum(a // per_node == b // per_node for a, b in pairs)
        sent = own / num_ranks
        return near * sent / num_ranks, (len(pairs) - near) * sent / num_ranks, 1
    num_nodes = num_ranks // per_node
    for a, b in pairs:
        if a // per_node == b // per_node:
            # rows that one share of all ranks will keep
            link += own / per_node
        if num_nodes > 1 and b // num_nodes == a % per_node:
            is_near = a // per_node == b // per_node
            link, network = link + is_near * wide / num_ranks, network + (not is_near) * wide / num_ranks
    return link / num_ranks, network / num_ranks, 2 if num_nodes > 1 else 1
