"""Seconds and bytes of a chunk on a sequence group, forward and backward apart.

The time of one pass over n tokens with c query-key pairs on d ranks (FlexSP, arXiv 2412.01523, section 4.1, with the mean
over layers of what they see, see `attention_pairs.py`, for its s^2, and its all-to-all term split into what a rank sends over
which links, see `traffic.py`):

    pair_s * c / d  +  token_s * n / d  +  chunk_s
        +  link_byte_s * link_bytes  +  network_byte_s * network_bytes  +  message_s * messages  +  tile_s * tiles

So one set of coefficients prices every method, and a degree's method in a step is the cheapest of those that the heads allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from hf_longctx.plan.core.arrays import FloatArray
from hf_longctx.plan.core.attention_pairs import AttentionPairs
from hf_longctx.plan.core.cluster_spec import ClusterSpec
from hf_longctx.plan.core.model_spec import ModelSpec
from hf_longctx.plan.core.planner_config import GroupMethod
from hf_longctx.plan.core.types import Chunk, GroupShape, Parameters
from hf_longctx.plan.cost.traffic import Traffic, group_shapes, mean_traffic

# how much dearer exchanges are made in groups that exploration wants to avoid
_AVOIDED = 1e3


@dataclass(frozen=True, slots=True)
class PassCoefficients:
    """One pass (forward or backward) over all layers of the model on one rank.

    pair_s: per query-key pair, of which layers have so many on average. token_s: per token. chunk_s: per chunk. message_s: per
    exchange. link_byte_s, network_byte_s: per byte sent inside a node and to another one. tile_s: per tile of attention that a
    ring makes of a document beyond what one call for the whole chunk would cost. head_factor: how many times the output head's
    share of the matrix products is its share of token_s, since the loss is more than products and layers have norms; a pipeline
    shows it.
    """

    pair_s: float
    token_s: float
    chunk_s: float
    message_s: float = 0.0
    link_byte_s: float = 0.0
    network_byte_s: float = 0.0
    tile_s: float = 0.0
    head_factor: float = 1.0

    @property
    def rates(self) -> tuple[float, ...]:
        """Every field that is seconds of something, in order."""
        return (
            *(self.pair_s, self.token_s, self.chunk_s, self.message_s),
            *(self.link_byte_s, self.network_byte_s, self.tile_s),
        )

    def exchange_s(self, traffic: Traffic) -> float:
        """Seconds of what one rank sends in one pass."""
        return (
            self.message_s * traffic.messages
            + self.link_byte_s * traffic.link_bytes
            + self.network_byte_s * traffic.network_bytes
        )


@dataclass(frozen=True, slots=True)
class ModelPart:
    """What a pass ran of the model: a share of its layers, and its output head or not.

    head_share: the head's share of the matrix products of a token in the whole model; no matter where all of it ran.
    """

    layers: float = 1.0
    has_head: bool = True
    head_share: float = 0.0

    @property
    def is_whole(self) -> bool:
        return self.layers == 1 and self.has_head


WHOLE_MODEL = ModelPart()


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


def num_tiles(shape: GroupShape, num_documents: float) -> float:
    """Tiles that a rank of a ring computes for so many documents in one layer; groups of one block need none."""
    return num_documents * shape.num_blocks if shape.num_blocks > 1 else 0.0


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicts chunks of `model` on groups of `cluster`.

    method: how groups share attention, "auto" for the cheapest of each degree. favoured_degree: larger groups are priced as if
    their exchanges took a thousand times as long, so that only sequences that need them get them (0: none is). parameters: how
    weights live in every plan. shard_ranks: how many ranks share one copy of sharded ones.
    """

    model: ModelSpec
    cluster: ClusterSpec
    coefficients: CostCoefficients
    method: GroupMethod = "auto"
    favoured_degree: int = 0
    parameters: Parameters = "replicated"
    shard_ranks: int = 1

    @property
    def shards(self) -> int:
        """How many consecutive ranks share one copy of sharded parameters, where these are fewer than all; else 0."""
        is_split = self.parameters != "replicated" and 1 < self.shard_ranks < self.cluster.num_ranks
        return self.shard_ranks if is_split else 0

    def best_shape(self, degree: int, num_tokens: float, num_documents: float = 1.0) -> GroupShape:
        """The shape in which `degree` ranks lose the fewest seconds by sharing a chunk of so many tokens in documents.

        Raises ValueError when the method has none for this degree.
        """
        shapes = group_shapes(degree, self.method, self.model, self.cluster)
        if not shapes:
            raise ValueError(
                f"groups of {degree} ranks cannot share {self.model.num_heads} heads by method {self.method!r}; use 'auto'"
            )
        # the first of equals, so that every caller finds the same one
        return min(shapes, key=partial(self._sharing_s, num_tokens, num_documents))

    def forward_s(
        self, chunk: Chunk, shape: GroupShape, num_layers: int, near_ranks: int = 0, pairs: AttentionPairs | None = None
    ) -> float:
        """Seconds of one forward of `chunk` over `num_layers` layers on a group of `shape`.

        near_ranks: the fewest ranks of the group that share a node; 0 for the most that any place allows. pairs: of these
        layers; None for what all layers have on average.
        """
        return self._pass_s(chunk, shape, num_layers, False, near_ranks, pairs)

    def backward_s(
        self, chunk: Chunk, shape: GroupShape, num_layers: int, near_ranks: int = 0, pairs: AttentionPairs | None = None
    ) -> float:
        """Seconds of one backward of `chunk`, as for `forward_s`."""
        return self._pass_s(chunk, shape, num_layers, True, near_ranks, pairs)

    def local_s(self, chunk: Chunk, shape: GroupShape, is_backward: bool, pairs: AttentionPairs | None = None) -> float:
        """Seconds of one pass of `chunk` over all layers that are not communication, if all had `pairs` (None: as they are)."""
        pairs = self.model.attention_pairs() if pairs is None else pairs
        costs = self.coefficients.backward if is_backward else self.coefficients.forward
        tokens = float(max(chunk.num_tokens, shape.degree))
        seconds = (costs.pair_s * pairs.of_chunk(chunk) + costs.token_s * tokens) / shape.degree + costs.chunk_s
        return seconds + costs.tile_s * num_tiles(shape, len(chunk.spans))

    def part_s(
        self,
        chunk: Chunk,
        shape: GroupShape,
        is_backward: bool,
        num_layers: int,
        has_head: bool,
        near_ranks: int = 0,
        pairs: AttentionPairs | None = None,
    ) -> float:
        """Seconds of one pass of `chunk` over `num_layers` layers of a pipeline stage, with output head and loss or without.

        A token's seconds in the head are a share of `token_s`, so that all parts add up to the model. pairs: of these layers;
        None for what all layers have on average.
        """
        exchange_s = self._pass_exchange_s(float(max(chunk.num_tokens, shape.degree)), shape, is_backward, near_ranks)
        layer_s, head_s = self.layer_and_head_s(chunk, shape, is_backward, exchange_s, pairs)
        return layer_s * num_layers + (head_s if has_head else 0.0)

    def layer_and_head_s(
        self, chunk: Chunk, shape: GroupShape, is_backward: bool, exchange_s: float, pairs: AttentionPairs | None = None
    ) -> tuple[float, float]:
        """Seconds of one pass of `chunk` over one layer, and over output head and loss; exchange_s: of all layers together.

        pairs: of the layer; None for what all layers have on average.
        """
        costs = self.coefficients.backward if is_backward else self.coefficients.forward
        head_s = costs.token_s * self.head_share(is_backward) * max(chunk.num_tokens, shape.degree) / shape.degree
        layers_s = self.local_s(chunk, shape, is_backward, pairs) + exchange_s - head_s
        return layers_s / self.model.num_layers, head_s

    def head_share(self, is_backward: bool) -> float:
        """The output head's share of a token's seconds in a pass."""
        costs = self.coefficients.backward if is_backward else self.coefficients.forward
        return min(1.0, self.model.head_share * costs.head_factor)

    def hop_s(self, num_tokens: int, leaves_node: bool) -> float:
        """Seconds in which a rank's `num_tokens` hidden states, or their gradients, reach the next stage."""
        costs = self.coefficients.forward
        byte_s = costs.network_byte_s if leaves_node else costs.link_byte_s
        return costs.message_s + byte_s * num_tokens * self.model.hidden_size * self.model.bytes_per_element

    def exchange_line(self, shape: GroupShape, is_backward: bool, near_ranks: int = 0) -> tuple[float, float]:
        """Seconds of communication in one pass over all layers: whatever the tokens of the group, and for each of them."""
        fixed_s, one_s = (self._pass_exchange_s(tokens, shape, is_backward, near_ranks) for tokens in (0.0, 1.0))
        return fixed_s, one_s - fixed_s

    def sequences_s(self, lengths: Sequence[int] | FloatArray, shape: GroupShape) -> FloatArray:
        """Seconds that each whole sequence adds to a group of `shape`, forward plus backward, without `group_s`."""
        tokens = np.asarray(lengths, dtype=np.float64)
        total, seen = np.zeros_like(tokens), self.model.attention_pairs().seen(np.zeros_like(tokens), tokens)
        for costs in (self.coefficients.forward, self.coefficients.backward):
            total += (costs.pair_s * tokens * seen + costs.token_s * tokens) / shape.degree
        # what a rank sends is linear in tokens, and neither messages nor tiles depend on them
        fixed_s = self._exchange_s(0.0, shape)
        total += (self._exchange_s(1.0, shape) - fixed_s) * tokens + self._sharing_s(0.0, 1.0, shape) - fixed_s
        return total

    def group_s(self, shape: GroupShape) -> float:
        """Seconds that a group of `shape` spends on a chunk whatever its tokens, forward plus backward."""
        chunk_s = self.coefficients.forward.chunk_s + self.coefficients.backward.chunk_s
        return chunk_s + self._exchange_s(0.0, shape)

    @property
    def state_bytes(self) -> int:
        """Bytes on a rank of weights, gradients and two fp32 Adam moments."""
        return self.model.state_bytes(self.parameters, self.shard_ranks)

    def _exchange_s(self, num_tokens: float, shape: GroupShape) -> float:
        return sum(self._pass_exchange_s(num_tokens, shape, is_backward) for is_backward in (False, True))

    def _sharing_s(self, num_tokens: float, num_documents: float, shape: GroupShape) -> float:
        """What forward and backward of a chunk cost because ranks share it: exchanges, and a ring's tiles."""
        tile_s = self.coefficients.forward.tile_s + self.coefficients.backward.tile_s
        return self._exchange_s(num_tokens, shape) + tile_s * num_tiles(shape, num_documents)

    def _pass_exchange_s(self, num_tokens: float, shape: GroupShape, is_backward: bool, near_ranks: int = 0) -> float:
        costs = self.coefficients.backward if is_backward else self.coefficients.forward
        seconds = costs.exchange_s(mean_traffic(self.model, self.cluster, shape, num_tokens, is_backward, near_ranks))
        if 0 < self.favoured_degree < shape.degree:
            return _AVOIDED * (seconds + costs.token_s * num_tokens / shape.degree)
        return seconds

    def _pass_s(
        self,
        chunk: Chunk,
        shape: GroupShape,
        num_layers: int,
        is_backward: bool,
        near_ranks: int,
        pairs: AttentionPairs | None,
    ) -> float:
        tokens = float(max(chunk.num_tokens, shape.degree))
        seconds = self.local_s(chunk, shape, is_backward, pairs) + self._pass_exchange_s(tokens, shape, is_backward, near_ranks)
        return seconds * num_layers / self.model.num_layers


def block_sizes(degrees: Sequence[int], costs: CostModel) -> tuple[int, ...]:
    """Sizes of all blocks of two or more ranks that groups of these degrees may have: what a group pool must hold."""
    shapes = [shape for degree in degrees for shape in group_shapes(degree, costs.method, costs.model, costs.cluster)]
    return tuple(sorted({shape.ulysses for shape in shapes} - {1}))


def default_coefficients(model: ModelSpec, cluster: ClusterSpec) -> CostCoefficients:
    """Coefficients from operation counts and the hardware's rates: enough to rank plans before a run measures its own.

    Forward: 2 operations per matrix parameter and token, 4 per head element and query-key pair, 20 kernels per layer and
    chunk, 4 per layer and tile of a ring. Backward: as the hardware's ratios say, twice the kernels.
    """
    hardware = cluster.hardware
    matrix = model.num_layers * model.layer_parameters + model.vocab_size * model.hidden_size
    token_s = 2 * matrix / hardware.matmul_flops_per_s
    pair_s = model.num_layers * model.pair_operations / hardware.attention_flops_per_s
    kernels_s = model.num_layers * hardware.kernel_s
    exchange = (hardware.message_s, 1 / hardware.link_bytes_per_s, 1 / hardware.network_bytes_per_s)
    return CostCoefficients(
        forward=PassCoefficients(pair_s, token_s, 20 * kernels_s, *exchange, 4 * kernels_s),
        backward=PassCoefficients(
            hardware.backward_attention * pair_s, hardware.backward_matmul * token_s, 40 * kernels_s, *exchange, 8 * kernels_s
        ),
        step_s=0.0,
        source=hardware.source or "default",
    )
