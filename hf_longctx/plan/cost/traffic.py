"""Counts the bytes and messages that the ranks of a sequence group send each other in one pass, as the runtime sends them.

Within a block (Ulysses) a rank sends to each neighbour, for its own tokens, the heads that the neighbour computes: queries, and
keys and values of every KV head that these queries read. After attention it sends back the results of its own heads for the
neighbour's tokens. Backward does the same in the opposite direction.

Around a ring of b blocks, the keys and values that other blocks see (all but the last of the 2b zigzag pieces of a document)
are passed on b - 1 times. In the backward pass they are passed on again, together with their gradients, in at least fp32. In
layers whose window is shorter than the chunk's longest document, blocks send each other only the keys and values that are seen.
The same happens to keys and values of earlier slices for every slice that sees them; `CostModel.hidden_s` counts these.

In layers with a state, a rank of a block sends the inputs of the scan and gets its results back, likewise by heads; fp32 inputs
travel in a separate exchange. In rings, and in blocks of more ranks than heads, every rank runs all heads. It sends each rank
with later tokens of its documents, in at least fp32, the effect of its own tokens on a state; backward sends gradients back.
Before the convolution a rank sends the last tokens before the first ones of others. In a ring all of this counts for every
document, in a block once.

Spread experts get each token once for every expert that it chose, and as many rows travel back; backward does the same, and
forward first exchanges counts of rows. Their ranks are those that share one copy of sharded weights, for any sequence groups.
All experts count as equally chosen, since plans cannot depend on later choices of routers.

The cost model uses the average over ranks; a test compares it with the exact count and with the bytes that ranks send.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_longctx.plan.core.settings import ClusterSpec, GroupMethod
from hf_longctx.plan.core.sharding import head_shares, passes_states
from hf_longctx.plan.core.types import FloatArray, GroupShape
from hf_longctx.plan.model.model_spec import ModelSpec

# least bytes of one element of the key and value gradients that travel around a ring (fp32)
_LEAST_GRADIENT_BYTES = 4
# bytes of the number of rows that a rank sends for an expert
_COUNT_BYTES = 8
# exchanges of a scan that divides heads: inputs in the model's dtype, results; one more for inputs in fp32
_SHARING_EXCHANGES = 2
# exchanges of a scan that passes states on
_PASSING_EXCHANGES = 1


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one rank sends in one pass over all layers, within its node and to other nodes, and number of exchanges."""

    link_bytes: float = 0.0
    network_bytes: float = 0.0
    messages: int = 0

    @property
    def num_bytes(self) -> float:
        return self.link_bytes + self.network_bytes


@dataclass(frozen=True, slots=True)
class HeadCounts:
    """Query and KV heads that each rank of a block computes."""

    queries: tuple[int, ...]
    kv: tuple[int, ...]

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, num_ranks: int) -> HeadCounts:
        """Makes the heads of each rank by `sharding.head_shares`."""
        shares = head_shares(num_heads, num_kv_heads, num_ranks)
        return cls(tuple(share.num_q for share in shares), tuple(share.num_kv for share in shares))


def group_shapes(degree: int, method: GroupMethod, model: ModelSpec, cluster: ClusterSpec) -> tuple[GroupShape, ...]:
    """Returns the shapes that `method` ("auto": any) and the heads allow for a group of `degree` ranks.

    The blocks of a hybrid are as large as the KV heads and the node allow: the largest power of two that divides KV heads,
    degree and ranks per node. Then no KV head travels twice, and only the ring crosses nodes. Blocks are powers of two or all
    ranks because their process groups are created at start.
    """
    if degree == 1:
        return (GroupShape(1),)
    # fewest messages first, because callers take the first of equally cheap shapes
    shapes = []
    has_group = degree & (degree - 1) == 0 or degree == cluster.num_ranks
    if method in ("auto", "ulysses") and degree <= model.num_heads and has_group:
        shapes.append(GroupShape(degree, degree))
    if method in ("auto", "hybrid"):
        block = 1
        while model.num_kv_heads % (2 * block) == degree % (2 * block) == cluster.ranks_per_node % (2 * block) == 0:
            block *= 2
        shapes.append(GroupShape(degree, block))
    if method in ("auto", "ring"):
        shapes.append(GroupShape(degree))
    return tuple(dict.fromkeys(shapes))


def plainest_shape(degree: int, method: GroupMethod, model: ModelSpec, cluster: ClusterSpec) -> GroupShape:
    """Returns the shape for counting a run's longest sequence: Ulysses if heads and method allow it, else a ring of blocks."""
    return next(iter(group_shapes(degree, method, model, cluster)), GroupShape(degree, degree))


def mean_traffic(
    model: ModelSpec,
    cluster: ClusterSpec,
    shape: GroupShape,
    num_tokens: float,
    is_backward: bool,
    near_ranks: int = 0,
    num_documents: float = 1.0,
) -> Traffic:
    """Returns traffic of a rank in one pass of a chunk of `num_tokens` evenly divided tokens, averaged over the group.

    In rings every layer counts as if it had full attention. The bytes that a window saves depend on the documents and are not
    linear in tokens; `CostModel.hidden_s` subtracts them.

    near_ranks: number of the group's ranks on its emptiest node; 0 for the best placement. A ring that leaves a node runs at
    the speed of the network, because all of its ranks wait for the slowest hop. If the hardware has a measured rate for blocks
    of this size, bytes are scaled so that they take the measured time at the nominal rate. num_documents: documents within which
    a ring passes on states.
    """
    to_experts = expert_traffic(model, cluster, num_tokens / shape.degree, is_backward)
    if shape.degree == 1:
        return to_experts
    num_states = sum(model.states.layers)
    num_attending = model.num_attending
    own = num_tokens / shape.degree
    neighbours = shape.ulysses - 1
    exchanged = _head_bytes(model, shape, own)
    chosen, index_keys = _index_bytes_sent(model, shape, own, is_backward)
    exchanged += chosen + (index_keys if neighbours else 0)
    near_ranks = near_ranks or _most_near_ranks(shape.degree, cluster)
    is_ring = shape.num_blocks > 1
    passed_on = num_states * _state_bytes_sent(model, shape, own)
    link, network = _by_links(exchanged + (0 if is_ring else passed_on), shape.ulysses, near_ranks, cluster)
    messages = 2 * num_attending * (neighbours > 0) + num_states * _state_exchanges(model, shape)
    messages += model.index.num_chosen * (neighbours > 0) + (0 if is_backward else model.index.num_indexes)
    hops = shape.num_blocks - 1
    if hops:
        keys, gradients = hop_bytes(model, shape, num_tokens)
        ring = hops * keys + num_documents * passed_on + (0 if neighbours else index_keys)
        messages += hops * num_attending
        if is_backward:
            ring += hops * gradients
            messages += hops * num_attending
        if shape.degree > near_ranks:
            network += ring
        else:
            link += ring
    return Traffic(link + to_experts.link_bytes, network + to_experts.network_bytes, messages + to_experts.messages)


def head_traffic(model: ModelSpec, cluster: ClusterSpec, shape: GroupShape, num_tokens: float) -> Traffic:
    """Returns traffic of a rank that exchanges heads in one pass of all layers, on the best placement, without messages."""
    near_ranks = _most_near_ranks(shape.degree, cluster)
    return Traffic(*_by_links(_head_bytes(model, shape, num_tokens / shape.degree), shape.ulysses, near_ranks, cluster))


def _head_bytes(model: ModelSpec, shape: GroupShape, own_tokens: float) -> float:
    """Returns bytes that a rank sends to exchange heads of its tokens in one pass of all layers, on average."""
    exchanged = 0.0
    for of_size, count in model.head_counts():
        heads, element = HeadCounts.of(model.num_heads, of_size.num_kv_heads, shape.ulysses), _value_bytes(model)[0] * count
        exchanged += (sum(heads.queries) + sum(heads.kv)) * of_size.kv_head_size * element
    return own_tokens * (shape.ulysses - 1) / shape.ulysses * exchanged


def hop_bytes(model: ModelSpec, shape: GroupShape, num_tokens: float) -> tuple[float, float]:
    """Returns bytes that a rank of a ring sends in one hop over all layers: keys and values, and their gradients."""
    travelling = num_tokens / shape.num_blocks * (1 - 1 / (2 * shape.num_blocks))
    values = 0.0
    for of_size, count in model.head_counts():
        heads = HeadCounts.of(model.num_heads, of_size.num_kv_heads, shape.ulysses)
        values += travelling * sum(heads.kv) * of_size.kv_head_size / shape.ulysses * count
    element, gradient = _value_bytes(model)
    return values * element, values * gradient


def window_tokens(lengths: FloatArray, window: int, num_blocks: int, earlier: FloatArray | float = 0.0) -> FloatArray:
    """Counts tokens of documents of these lengths whose keys other blocks of a ring see through a window, summed over blocks.

    Every block has two of a document's `2 * num_blocks` equal pieces, one from either end. lengths: [n]; returns [n].
    earlier: tokens of slices before these, of which every block has an equal share.
    """
    size = np.asarray(lengths, dtype=np.float64) / (2 * num_blocks)
    first = np.arange(num_blocks)[:, None] * size
    second = (2 * num_blocks - 1 - np.arange(num_blocks))[:, None] * size
    # a query sees itself and the window - 1 tokens before it
    before_first, before_second = np.minimum(window - 1, earlier + first), np.minimum(window - 1, earlier + second)
    start = second - before_second
    seen_twice = np.maximum(0.0, first - np.maximum(start, first - before_first))
    own = np.maximum(0.0, first + size - np.maximum(first, start))
    own = own + np.maximum(0.0, before_first - first) / num_blocks
    total: FloatArray = (before_first + before_second - seen_twice - own).sum(axis=0)
    return total


def ring_leaves_node(shape: GroupShape, cluster: ClusterSpec) -> bool:
    """Whether hops of a ring of this shape go to other nodes for any placement."""
    return shape.degree > _most_near_ranks(shape.degree, cluster)


def feature_traffic(num_bytes: float, degree: int, cluster: ClusterSpec) -> Traffic:
    """Returns traffic of a rank that sends so many bytes of features, or of their gradients, to the others of its group."""
    link, network = _by_links(num_bytes, degree, _most_near_ranks(degree, cluster), cluster)
    return Traffic(link, network, 1)


def expert_traffic(model: ModelSpec, cluster: ClusterSpec, own_tokens: float, is_backward: bool) -> Traffic:
    """Returns traffic of a rank in one pass of `own_tokens` tokens to spread experts with a balanced load."""
    experts = model.experts
    if experts.num_ranks == 1:
        return Traffic()
    others = experts.num_ranks - 1
    rows = 2 * own_tokens * experts.token_rows * others / experts.num_ranks
    counts = 0 if is_backward else _COUNT_BYTES * experts.num_layers * others * experts.num_experts // experts.num_ranks
    sent = rows * model.hidden_size * model.bytes_per_element + counts
    near_ranks = _most_near_ranks(experts.num_ranks, cluster)
    link, network = _by_links(sent, experts.num_ranks, near_ranks, cluster)
    return Traffic(link, network, (2 if is_backward else 3) * experts.num_layers)


def _index_bytes_sent(model: ModelSpec, shape: GroupShape, own_tokens: float, is_backward: bool) -> tuple[float, float]:
    """Returns bytes of indexes that a rank sends in one pass of all layers: chosen keys to its block, index keys to its group.

    Backward gathers the chosen keys again. In documents of fewer tokens than an index may choose, fewer bytes are sent.
    """
    index = model.index
    chosen = own_tokens * index.token_bytes * (shape.ulysses - 1) * index.num_chosen
    keys = own_tokens * (shape.degree - 1) * index.head_dim * index.num_indexes * model.bytes_per_element
    return chosen, 0.0 if is_backward else keys


def may_pass_states(degrees: Sequence[int], method: GroupMethod, model: ModelSpec, cluster: ClusterSpec) -> bool:
    """Whether ranks of any group of these degrees pass the states of a layer on."""
    shapes = (shape for degree in degrees for shape in group_shapes(degree, method, model, cluster))
    return model.states.heads > 0 and any(_passes_states(model, shape) for shape in shapes)


def _state_exchanges(model: ModelSpec, shape: GroupShape) -> int:
    """Returns the exchanges of one layer with a state in one pass."""
    states = model.states
    if not states.heads:
        return states.convolutions
    of_scan = _PASSING_EXCHANGES if _passes_states(model, shape) else _SHARING_EXCHANGES + (states.own_wide > 0)
    return states.convolutions + states.scans * of_scan


def _passes_states(model: ModelSpec, shape: GroupShape) -> bool:
    return passes_states(shape.num_blocks, shape.ulysses, model.states.heads // model.states.scans)


def _state_bytes_sent(model: ModelSpec, shape: GroupShape, own_tokens: float) -> float:
    """Returns bytes that a rank sends in one pass of one layer with a state, on average."""
    states, (element, _) = model.states, _value_bytes(model)
    num_runs, num_messages = runs_and_messages(shape)
    # the tokens before every run but the first
    tails = element * states.tail_elements * (num_runs - 1) / shape.degree
    if not states.heads:
        return tails
    if _passes_states(model, shape):
        # the first run sends only its state to the other ranks
        numbers = num_messages * (states.head_elements + states.carry_elements) - (shape.degree - 1) * states.carry_elements
        return tails + max(_LEAST_GRADIENT_BYTES, element) * states.heads * numbers / shape.degree
    own = states.heads // states.scans
    heads = HeadCounts.of(own, states.read_heads or own, shape.ulysses)
    narrow = states.scans * sum(heads.kv) * states.read_size + states.heads * states.own_size
    wide = max(_LEAST_GRADIENT_BYTES, element) * states.heads * states.own_wide
    token_bytes = element * narrow + wide + states.output_bytes(element)
    return own_tokens * token_bytes * (shape.ulysses - 1) / shape.ulysses + tails


def runs_and_messages(shape: GroupShape) -> tuple[int, int]:
    """Returns the runs of consecutive tokens of one document on a group's ranks, and the messages that pass on its states.

    A rank has one run, and sends to every rank with a later one. In a ring of single ranks, all but one have two.
    """
    degree = shape.degree
    if shape.ulysses == 1:
        return 2 * degree - 1, degree * (degree - 1) + (degree - 1) * (degree - 2) // 2
    return degree, degree * (degree - 1) // 2


def added_products(model: ModelSpec, shape: GroupShape) -> float:
    """Returns the additional multiplications per token, over all layers, if ranks pass on states: the mean of a document."""
    if shape.degree == 1 or not _passes_states(model, shape):
        return 0.0
    first_share = 1 / (2 * shape.degree if shape.ulysses == 1 else shape.degree)
    return sum(model.states.layers) * model.states.carry_products * (1 - first_share)


def _most_near_ranks(degree: int, cluster: ClusterSpec) -> int:
    """Returns ranks on the emptiest node of a group on as few nodes as possible (a group of all ranks has no choice)."""
    per_node = cluster.ranks_per_node
    if degree == cluster.num_ranks and degree > per_node:
        return degree % per_node or per_node
    return degree // -(-degree // per_node)


def _by_links(num_bytes: float, block: int, near_ranks: int, cluster: ClusterSpec) -> tuple[float, float]:
    """Returns bytes of an all-to-all of `block` ranks within the node and to others, scaled from measured to nominal rates."""
    if block == 1:
        return 0.0, 0.0
    far_share = max(0, block - near_ranks) / (block - 1)
    measured = dict(cluster.hardware.exchange_bytes_per_s).get(block)
    # the rate was measured for a block on as few nodes as possible
    if measured is None or near_ranks < min(block, cluster.ranks_per_node):
        return num_bytes * (1 - far_share), num_bytes * far_share
    hardware = cluster.hardware
    if far_share:
        return 0.0, num_bytes * hardware.network_bytes_per_s / measured
    return num_bytes * hardware.link_bytes_per_s / measured, 0.0


def _value_bytes(model: ModelSpec) -> tuple[int, int]:
    """Returns bytes of one element, and of its gradient in a ring's messages."""
    element = model.bytes_sent_per_element or model.bytes_per_element
    return element, max(_LEAST_GRADIENT_BYTES, element)
