"""Every rank gets its rows of the sum of all gradients, exactly, nodes send each sum once, and their copies are whole."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx.plan.core.sharding import node_part, sum_bytes
from hf_longctx.runtime.core.torch_versions import gather_tensors
from hf_longctx.runtime.parameters import sums
from hf_longctx.runtime.parameters.sharded import node_group
from hf_longctx.runtime.parameters.sums import exchanging_ranks, gather_part, joined_blocks, sum_blocks

# sizes of gradients: divisible by the ranks, with a short last shard, with ranks without rows, without rows at all
SHAPES = (8, 3), (7, 2), (5,), (3, 2, 2), (1,), (0, 4)


def gradient_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Numbers of very different sizes, whose sum in half precision would lose the small ones."""
    generator = torch.Generator().manual_seed(rank)
    scales = 2.0 ** torch.randint(-8, 8, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * scales).to(dtype)


def sums_on_rank(dtype: torch.dtype, node_ranks: int, apart_bytes: int) -> tuple[list[torch.Tensor], Counter[str]]:
    """This rank's rows of the sum of each shape, flat and filled up, and the bytes that it sends in its node and to others."""
    sent: Counter[str] = Counter()
    rank, exchange, group = dist.get_rank(), dist.all_to_all_single, dist.group.WORLD

    def counting(received: torch.Tensor, flat: torch.Tensor, receives: list[int], sends: list[int], **others: Any) -> None:
        for peer, size in enumerate(sends):
            is_near = not node_ranks or peer // node_ranks == rank // node_ranks
            sent["near" if is_near else "far"] += size * (peer != rank)
        exchange(received, flat, receives, sends, **others)

    found: dict[int, torch.Tensor] = {}
    with patch.object(dist, "all_to_all_single", counting), patch.object(sums, "APART_BYTES", apart_bytes):
        per_node = exchanging_ranks(group, node_ranks)
        gradients = [gradient_of(rank, shape, dtype) for shape in SHAPES]
        for blocks_RK, places in joined_blocks(gradients, group.size()):
            sizes = [-(-len(gradients[place]) // group.size()) * gradients[place][:1].numel() for place in places]
            found |= dict(zip(places, sum_blocks(blocks_RK, group, per_node).split(sizes), strict=True))
    return [found[place] for place in range(len(SHAPES))], sent


@pytest.mark.parametrize("apart_bytes", [0, 2**20], ids=["apart", "joined"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("num_ranks,node_ranks", [(4, 0), (4, 1), (4, 3), (6, 3)])
def test_ranks_get_their_rows_of_the_sum(ranks, num_ranks: int, node_ranks: int, dtype: torch.dtype, apart_bytes: int) -> None:
    found = ranks(num_ranks).run(sums_on_rank, dtype, node_ranks, apart_bytes)
    wide = torch.promote_types(dtype, torch.float32)
    for place, shape in enumerate(SHAPES):
        whole = torch.cat([sums[place] for sums, _ in found])
        expected = torch.stack([gradient_of(rank, shape, dtype).double() for rank in range(num_ranks)]).sum(0).flatten()
        assert whole.dtype == wide and len({len(sums[place]) for sums, _ in found}) == 1
        tolerance = 1e-4 if wide == torch.float32 else 1e-13
        torch.testing.assert_close(whole[: len(expected)].double(), expected, rtol=0, atol=tolerance)
        assert not whole[len(expected) :].any()


def test_nodes_send_every_sum_once(ranks) -> None:
    """Two nodes of three ranks: gradients travel inside a node in two bytes, and each node's sums cross once, in four."""
    near, far = 0, 0
    for _, sent in ranks(6).run(sums_on_rank, torch.bfloat16, 3, 0):
        near, far = near + sent["near"], far + sent["far"]
    elements = sum(6 * -(-shape[0] // 6) * torch.Size(shape[1:]).numel() for shape in SHAPES)
    # each node sends the other half of its sum
    assert far == 2 * 4 * elements / 2
    assert (near, far) == tuple(6 * each for each in sum_bytes(2 * elements, 4 * elements, 6, 3))


@given(st.integers(1, 9), st.integers(1, 9))
def test_parts_of_a_node_are_all_shards_in_order(num_nodes: int, node_ranks: int) -> None:
    num_ranks = num_nodes * node_ranks
    parts = [node_part(rank, num_ranks, node_ranks) for rank in range(num_ranks)]
    for node in range(num_nodes):
        own = parts[node * node_ranks : (node + 1) * node_ranks]
        assert [owner for owners, _ in own for owner in owners] == [*range(num_ranks)]
    for rank, (_, holders) in enumerate(parts):
        # one of every node
        assert [holder // node_ranks for holder in holders] == [*range(num_nodes)]
        assert [*holders] == [holder for holder, (owners, _) in enumerate(parts) if rank in owners]


def copies_on_rank(node_ranks: int, shards: list[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's part of its node's copy of these shards, of which it has its own; and the copy, gathered in the node."""
    part = gather_part(shards[dist.get_rank()], dist.group.WORLD, node_ranks)
    whole = part.new_empty(node_ranks * len(part))
    gather_tensors([whole], [part], node_group(node_ranks, 60.0))
    return [part, whole]


@pytest.mark.daily("4-2-bf16-5", "4-2-fp64-1")
@pytest.mark.parametrize("size", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
@pytest.mark.parametrize(("num_ranks", "node_ranks"), [(4, 2), (6, 2), (6, 3)])
def test_nodes_gather_copies_of_all_shards(ranks, num_ranks: int, node_ranks: int, dtype: torch.dtype, size: int) -> None:
    shards = [gradient_of(rank, (size,), dtype) for rank in range(num_ranks)]
    for rank, (part, whole) in enumerate(ranks(num_ranks).run(copies_on_rank, node_ranks, shards)):
        owners, _ = node_part(rank, num_ranks, node_ranks)
        assert part.dtype == dtype and torch.equal(part, torch.cat([shards[owner] for owner in owners]))
        assert torch.equal(whole, torch.cat(shards))
