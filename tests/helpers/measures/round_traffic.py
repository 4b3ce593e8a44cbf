"""Count the bytes of weights and gradients that a rank sends in a micro-batch: the oracle for `StageGathers`."""

from __future__ import annotations

from hf_longctx.plan.core.settings import ClusterSpec
from hf_longctx.plan.core.types import Parameters, sums_every_backward
from hf_longctx.plan.cost.traffic import Traffic
from hf_longctx.plan.cost.weight_traffic import StageWeights, ring_traffic


def round_traffic(
    weights: StageWeights,
    cluster: ClusterSpec,
    parameters: Parameters,
    shard_ranks: int,
    num_chunks: int,
    num_stages: int = 1,
    is_first: bool = True,
) -> Traffic:
    """Returns traffic of a rank in a micro-batch of `num_chunks` chunks: gathers of weights, reduce-scatters of gradients.

    shard_ranks: consecutive ranks that share one copy of the weights. is_first: of the step's micro-batches. No traffic if
    weights are replicated.
    """
    if parameters == "replicated" or shard_ranks == 1:
        return Traffic()
    once = 0 if sums_every_backward(parameters, num_stages) and not is_first else 1
    of_layers = 2 * num_chunks if parameters == "sharded" else once
    of_outside = int(is_first)
    sums = num_chunks if sums_every_backward(parameters, num_stages) else 1
    num_bytes = of_layers * weights.layers + of_outside * weights.outside + sums * weights.gradients
    units, has_outside = weights.num_layers, weights.outside > 0
    messages = (of_layers * units + of_outside * has_outside) + sums * (units + has_outside) * (weights.gradients > 0)
    return ring_traffic(num_bytes, shard_ranks, 1, messages, cluster)
