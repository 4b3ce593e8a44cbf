"""Seconds and bytes of a chunk on a sequence group, forward and backward apart.

The time of one pass over n tokens with c causal pairs on d ranks (FlexSP, arXiv 2412.01523, section 4.1, with causal
pairs n^2 / 2 for its s^2 and the exchange reduced to the tokens m(n, d) that leave a rank, see `tokens_moved`):

    pair_s * c / d  +  token_s * n / d  +  chunk_s  +  [d > 1] (exchange_s(d) * m(n, d) + exchange_chunk_s)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_longctx.plan.specs import ClusterSpec, GroupMethod, ModelSpec
from hf_longctx.plan.types import Chunk, Parameters

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PassCoefficients:
    """One pass (forward or backward) over all layers of the model on one rank.

    pair_s: per causal query-key pair. token_s: per token. chunk_s: per chunk. exchange_chunk_s: per chunk of a group of
    two or more. exchange: (degree, seconds per token that leaves a rank), ascending; a degree in between uses the next
    smaller entry.
    """

    pair_s: float
    token_s: float
    chunk_s: float
    exchange_chunk_s: float
    exchange: tuple[tuple[int, float], ...]

    def exchange_token_s(self, degree: int) -> float:
        """Seconds per token that leaves a rank in a group of `degree`."""
        known = [seconds for limit, seconds in self.exchange if limit <= degree]
        return known[-1] if known else (self.exchange[0][1] if self.exchange else 0.0)


@dataclass(frozen=True, slots=True)
class CostCoefficients:
    """What was measured, fitted or assumed: both passes, the seconds a step adds once, and where the numbers come from."""

    forward: PassCoefficients
    backward: PassCoefficients
    step_s: float
    source: str

    @property
    def is_measured(self) -> bool:
        return self.source != "default"


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicts chunks of `model` on groups of `cluster` that share attention by `method`.

    `parameters` says how weights live in every plan, `shard_ranks` how many ranks share one copy of sharded ones.
    """

    model: ModelSpec
    cluster: ClusterSpec
    coefficients: CostCoefficients
    method: GroupMethod = "ulysses"
    parameters: Parameters = "replicated"
    shard_ranks: int = 1

    def forward_s(self, chunk: Chunk, degree: int, num_layers: int) -> float:
        """Seconds of one forward of `chunk` over `num_layers` layers on a group of `degree` ranks.

        Attention is counted over the causal area: n * (prefix + n / 2) token pairs for n new tokens.
        """
        return self._pass_s(self.coefficients.forward, chunk, degree, num_layers)

    def backward_s(self, chunk: Chunk, degree: int, num_layers: int) -> float:
        """Seconds of one backward of `chunk`, as for `forward_s`."""
        return self._pass_s(self.coefficients.backward, chunk, degree, num_layers)

    def sequences_s(self, lengths: Sequence[int] | FloatArray, degree: int) -> FloatArray:
        """Seconds that each whole sequence adds to a group of `degree` ranks, forward plus backward, without `group_s`."""
        tokens = np.asarray(lengths, dtype=np.float64)
        total = np.zeros_like(tokens)
        for costs in (self.coefficients.forward, self.coefficients.backward):
            total += (costs.pair_s * tokens * tokens / 2 + costs.token_s * tokens) / degree
            total += costs.exchange_token_s(degree) * tokens_moved(tokens, degree, self.method)
        return total

    def group_s(self, degree: int) -> float:
        """Seconds that a group of `degree` ranks spends on a chunk whatever its tokens, forward plus backward."""
        passes = (self.coefficients.forward, self.coefficients.backward)
        return sum(costs.chunk_s + (costs.exchange_chunk_s if degree > 1 else 0.0) for costs in passes)

    def rank_bytes(self, num_tokens: int) -> int:
        """Bytes on a rank that holds `num_tokens` tokens: weights, gradients, two fp32 Adam moments and saved tensors."""
        states = self.model.state_bytes(self.parameters, self.shard_ranks)
        return states + num_tokens * self.model.saved_bytes_per_token

    def _pass_s(self, costs: PassCoefficients, chunk: Chunk, degree: int, num_layers: int) -> float:
        tokens = float(max(chunk.num_tokens, degree))
        seconds = (costs.pair_s * chunk.num_pairs + costs.token_s * tokens) / degree + costs.chunk_s
        if degree > 1:
            moved = float(tokens_moved(np.asarray(tokens), degree, self.method))
            seconds += costs.exchange_token_s(degree) * moved + costs.exchange_chunk_s
        return seconds * num_layers / self.model.num_layers


def default_coefficients(model: ModelSpec, cluster: ClusterSpec) -> CostCoefficients:
    """Coefficients from operation counts and the hardware's rates: enough to rank plans, not to promise seconds.

    Forward: 2 operations per matrix parameter and token, 4 per head element and causal pair. Backward: twice the linear
    part, 2.5 times attention.
    """
    hardware = cluster.hardware
    matrix = model.num_layers * model.layer_parameters + model.vocab_size * model.hidden_size
    token_s = 2 * matrix / hardware.matmul_flops_per_s
    pair_s = 4 * model.num_layers * model.num_heads * model.head_dim / hardware.attention_flops_per_s
    exchange = ((2, model.exchange_bytes_per_token / hardware.link_bytes_per_s),)
    # a chunk costs at least the launch of its kernels: about 20 per layer and pass at 10 microseconds
    chunk_s = model.num_layers * 20 * 1e-5
    return CostCoefficients(
        forward=PassCoefficients(pair_s, token_s, chunk_s, chunk_s / 4, exchange),
        backward=PassCoefficients(2.5 * pair_s, 2 * token_s, 2 * chunk_s, chunk_s / 4, exchange),
        step_s=0.0,
        source="default",
    )


def tokens_moved(tokens: FloatArray, degree: int, method: GroupMethod) -> FloatArray:
    """Tokens that leave each rank of a group in one exchange: all but its own share of its shard under Ulysses, a shard a
    hop in a ring.
    """
    hops = degree - 1 if method == "ring" else (degree - 1) / degree
    return np.asarray(tokens / degree * hops, dtype=np.float64)
