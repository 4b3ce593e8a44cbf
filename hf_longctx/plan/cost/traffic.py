"""What the ranks of a sequence group send each other: bytes and messages of a pass, counted as the runtime sends them.

Inside a block (Ulysses) a rank sends each neighbour that neighbour's heads of its own tokens (queries, and every KV head
that these read, in keys and values), and after attention its own heads of the neighbour's tokens; backward the same the
other way round. Around the ring, b blocks pass on b - 1 times the keys and values that other blocks see (all but the last
of the 2b zigzag pieces of a document), in backward again, and as often their gradients, in at least fp32. In layers whose
window is shorter than the chunk's longest document, blocks instead send each other what is seen and no more.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hf_longctx.plan.core.cluster_spec import ClusterSpec
from hf_longctx.plan.core.model_spec import ModelSpec
from hf_longctx.plan.core.planner_config import GroupMethod
from hf_longctx.plan.core.sharding import (
    Piece,
    block_pieces,
    head_shares,
    held_tokens,
    longest_document,
    rank_pieces,
    seen_pieces,
    travelling_pieces,
)
from hf_longctx.plan.core.types import Chunk, GroupShape

_LEAST_GRADIENT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one rank sends in one pass over all layers, inside its node and to other nodes, and in how many exchanges."""

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
        """Those of `sharding.head_shares`."""
        shares = head_shares(num_heads, num_kv_heads, num_ranks)
        return cls(tuple(share.num_q for share in shares), tuple(share.num_kv for share in shares))


def group_shapes(degree: int, method: GroupMethod, model: ModelSpec, cluster: ClusterSpec) -> tuple[GroupShape, ...]:
    """The shapes that a group of `degree` ranks may take, "auto" all that the model's heads allow; empty if none.

    A hybrid's blocks have as many ranks as KV heads can be dealt out to, gcd(KV heads, degree), as far as they fit into a
    node: then no KV head travels twice, and only the ring crosses nodes. Blocks are powers of two or all ranks, since
    their process groups are made at start.
    """
    if degree == 1:
        return (GroupShape(1),)
    # fewest messages first: callers take the first of equals
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


def sent_bytes(model: ModelSpec, shape: GroupShape, chunk: Chunk) -> tuple[tuple[int, int], ...]:
    """Bytes that every rank of a group sends to others in one forward and one backward of a chunk over all layers, exactly."""
    element, gradient = _value_bytes(model)
    heads = HeadCounts.of(model.num_heads, model.num_kv_heads, shape.ulysses)
    tokens, blocks = held_tokens(rank_pieces(chunk, shape)), block_pieces(chunk, shape)
    # elements of a token: what a rank gets of queries, keys and values, and what it returns
    sent = [q * model.head_dim + kv * model.kv_head_size for q, kv in zip(heads.queries, heads.kv, strict=True)]
    returned_heads = [q * (model.kv_head_size - model.head_dim) for q in heads.queries]
    block_tokens = held_tokens(blocks)
    passed, returned = _ring_tokens(model, blocks)
    result = []
    for rank, own in enumerate(tokens):
        block, inside = divmod(rank, shape.ulysses)
        others = block_tokens[block] - own
        forward = (own * (sum(sent) - sent[inside]) + others * returned_heads[inside]) * element * model.num_layers
        backward = (others * sent[inside] + own * (sum(returned_heads) - returned_heads[inside])) * element * model.num_layers
        values = heads.kv[inside] * model.kv_head_size
        forward += passed[block] * values * element
        backward += (passed[block] * element + returned[block] * gradient) * values
        result.append((forward, backward))
    return tuple(result)


def _ring_tokens(model: ModelSpec, blocks: tuple[tuple[Piece, ...], ...]) -> tuple[list[int], list[int]]:
    """Tokens whose keys and values, and of whose gradients, every block sends around in one pass, added up over all layers."""
    passed, returned = [0] * len(blocks), [0] * len(blocks)
    for window, num_layers in Counter(model.windows or (None,) * model.num_layers).items():
        if window and window < longest_document(blocks):
            sent = [[0 if q is k else _seen_tokens(k, q, window) for q in blocks] for k in blocks]
            counts = [(sum(row), sum(column)) for row, column in zip(sent, zip(*sent, strict=True), strict=True)]
        else:
            # a block passes on keys and values of all blocks but the one it gets last, and gradients of all but its own
            travelling = held_tokens(travelling_pieces(blocks))
            counts = [
                (sum(travelling) - travelling[(block + 1) % len(blocks)], sum(travelling) - own)
                for block, own in enumerate(travelling)
            ]
        for block, (keys, gradients) in enumerate(counts):
            passed[block] += num_layers * keys
            returned[block] += num_layers * gradients
    return passed, returned


def _seen_tokens(keys: tuple[Piece, ...], queries: tuple[Piece, ...], window: int) -> int:
    """Tokens of a block that another one's queries see through a window."""
    return sum(piece.num_tokens for piece in seen_pieces(keys, queries, lambda position: max(0, position - window + 1)))


def mean_traffic(
    model: ModelSpec, cluster: ClusterSpec, shape: GroupShape, num_tokens: float, is_backward: bool, near_ranks: int = 0
) -> Traffic:
    """What a rank sends on average in one pass of a chunk of `num_tokens` tokens spread evenly: `sent_bytes`, smoothed.

    In rings no less than that: all layers count as if they saw all tokens, since what a window lets travel is not linear in
    tokens but a matter of documents.

    `near_ranks`: the fewest ranks of the group that share a node; 0 for the most that any place allows. A ring that leaves a
    node runs at the speed of the network, because all of its ranks wait for the slowest hop. Where the hardware's rate for a
    block of so many ranks was measured, bytes are counted as so many at the nominal rate.
    """
    if shape.degree == 1:
        return Traffic()
    element, gradient = (num_bytes * model.num_layers for num_bytes in _value_bytes(model))
    heads = HeadCounts.of(model.num_heads, model.num_kv_heads, shape.ulysses)
    own = num_tokens / shape.degree
    neighbours = shape.ulysses - 1
    exchanged = own * neighbours / shape.ulysses * (sum(heads.queries) + sum(heads.kv)) * model.kv_head_size * element
    near_ranks = near_ranks or _most_near_ranks(shape.degree, cluster)
    link, network = _by_links(exchanged, shape.ulysses, near_ranks, cluster)
    messages = 2 * model.num_layers * (neighbours > 0)
    hops = shape.num_blocks - 1
    if hops:
        travelling = num_tokens / shape.num_blocks * (1 - 1 / (2 * shape.num_blocks))
        passed = travelling * sum(heads.kv) * model.kv_head_size / shape.ulysses
        ring = hops * passed * element
        messages += hops * model.num_layers
        if is_backward:
            ring += hops * passed * gradient
            messages += hops * model.num_layers
        if shape.degree > near_ranks:
            network += ring
        else:
            link += ring
    return Traffic(link, network, messages)


def _most_near_ranks(degree: int, cluster: ClusterSpec) -> int:
    """Ranks on the emptiest node of a group that leaves as few nodes as it can, spread evenly; all ranks have no choice."""
    per_node = cluster.ranks_per_node
    if degree == cluster.num_ranks and degree > per_node:
        return degree % per_node or per_node
    return degree // -(-degree // per_node)


def _by_links(num_bytes: float, block: int, near_ranks: int, cluster: ClusterSpec) -> tuple[float, float]:
    """Bytes of an all-to-all of `block` ranks inside the node and to other nodes, as so many at the nominal rates."""
    if block == 1:
        return 0.0, 0.0
    far_share = max(0, block - near_ranks) / (block - 1)
    measured = dict(cluster.hardware.exchange_bytes_per_s).get(block)
    # the rate was measured with a block that leaves no node without need
    if measured is None or near_ranks < min(block, cluster.ranks_per_node):
        return num_bytes * (1 - far_share), num_bytes * far_share
    hardware = cluster.hardware
    if far_share:
        return 0.0, num_bytes * hardware.network_bytes_per_s / measured
    return num_bytes * hardware.link_bytes_per_s / measured, 0.0


def _value_bytes(model: ModelSpec) -> tuple[int, int]:
    """Bytes of one element, and of its gradient around a ring."""
    element = model.bytes_sent_per_element or model.bytes_per_element
    return element, max(_LEAST_GRADIENT_BYTES, element)
