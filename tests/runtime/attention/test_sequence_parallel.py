"""Attention over a group of ranks equals the plain reference, values and gradients, for any heads and any shards."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.models.reference import relative_error
from helpers.ranks.rank_steps import group_pool
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_longctx.plan.core.sharding import HEAD_PART_BYTES, HeadShare, head_parts, head_shares
from hf_longctx.recipes.bench.gpu.packed_reference import packed_causal_attention
from hf_longctx.runtime.attention import sequence_parallel
from hf_longctx.runtime.attention.context import Block, GroupContext, Ring
from hf_longctx.runtime.attention.heads import KVReaders
from hf_longctx.runtime.attention.sequence_parallel import LayerCall, packed_attention, sequence_parallel_attention

# H query heads, G KV heads, S tokens of the chunk, D head size; both sides in fp64 with sums of at most some 30 terms
TOLERANCE = 1e-13
HEAD_DIM = 5
SCALE = 0.3


@st.composite
def heads_and_degree(draw: st.DrawFn) -> tuple[int, int, int]:
    num_kv_heads, per_kv = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    return num_kv_heads * per_kv, num_kv_heads, draw(st.integers(1, num_kv_heads * per_kv))


@given(heads_and_degree())
def test_shares_cover_the_query_heads_evenly_in_order(case: tuple[int, int, int]) -> None:
    num_heads, num_kv_heads, degree = case
    shares = head_shares(num_heads, num_kv_heads, degree)
    assert [head for share in shares for head in range(share.q_start, share.q_stop)] == list(range(num_heads))
    counts = [share.num_q for share in shares]
    assert len(counts) == degree and max(counts) - min(counts) <= 1 and min(counts) >= 1


@given(heads_and_degree())
def test_each_rank_gets_exactly_the_kv_heads_that_its_query_heads_read(case: tuple[int, int, int]) -> None:
    num_heads, num_kv_heads, degree = case
    for share in head_shares(num_heads, num_kv_heads, degree):
        read = {head * num_kv_heads // num_heads for head in range(share.q_start, share.q_stop)}
        assert read == set(range(share.kv_start, share.kv_stop)) and share.num_kv == len(read)


def test_six_heads_of_two_kv_heads_on_four_ranks_by_hand() -> None:
    shares = head_shares(6, 2, 4)
    assert [(s.q_start, s.q_stop, s.kv_start, s.kv_stop) for s in shares] == [
        (0, 2, 0, 1),
        (2, 4, 0, 2),
        (4, 5, 1, 2),
        (5, 6, 1, 2),
    ]


def test_kv_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="6 query heads are not a multiple of 4 KV heads"):
        head_shares(6, 4, 2)


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="8 ranks share 6 heads, but Ulysses needs at least one head per rank"):
        head_shares(6, 3, 8)


def random_inputs(num_heads: int, num_kv_heads: int, num_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [H, S, D], k and v [G, S, D], and the gradient of the output [S, H, D]."""
    generator = torch.Generator().manual_seed(num_heads * 100 + num_tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, HEAD_DIM, dtype=torch.float64, generator=generator)

    return (*(draw(n, num_tokens) for n in (num_heads, num_kv_heads, num_kv_heads)), draw(num_tokens, num_heads))


def reference(num_heads: int, num_kv_heads: int, bounds: tuple[int, ...]) -> list[Tensor]:
    """Output [S, H, D] and the gradients of q, k and v, all heads and tokens at once."""
    *inputs, output_gradient = random_inputs(num_heads, num_kv_heads, bounds[-1])
    inputs = [t.requires_grad_() for t in inputs]
    output = packed_causal_attention(*inputs, torch.tensor(bounds), SCALE).transpose(0, 1)
    output.backward(output_gradient)
    return [output.detach(), *(t.grad for t in inputs)]


BOUNDS = {"one document": (0, 23), "documents": (0, 1, 9, 10, 23), "dummies at the end": (0, 20, 21, 22, 23)}


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize(
    "num_heads,num_kv_heads,first,last",
    [(4, 4, 0, 4), (4, 2, 0, 4), (6, 2, 2, 4), (6, 2, 4, 6), (6, 3, 1, 4), (6, 1, 3, 5), (4, 4, 2, 3)],
)
def test_packed_attention_of_some_heads_is_the_reference(
    name: str, num_heads: int, num_kv_heads: int, first: int, last: int
) -> None:
    bounds, per_kv = BOUNDS[name], num_heads // num_kv_heads
    kv_first, kv_last = first // per_kv, (last - 1) // per_kv + 1
    *inputs, output_gradient = random_inputs(num_heads, num_kv_heads, bounds[-1])
    # the reference on the whole model, with no gradient from other heads
    whole = [t.clone().requires_grad_() for t in inputs]
    expected = packed_causal_attention(*whole, torch.tensor(bounds), SCALE)[first:last].transpose(0, 1)
    expected.backward(output_gradient[:, first:last])
    cut = [slice(first, last), slice(kv_first, kv_last), slice(kv_first, kv_last)]
    mine = [t[part].clone().requires_grad_() for t, part in zip(inputs, cut, strict=True)]
    readers = KVReaders.of(HeadShare(first, last, kv_first, kv_last), per_kv, torch.device("cpu"))
    found = packed_attention(*(t[None] for t in mine), readers, SCALE, bounds)
    found.backward(output_gradient[None, :, first:last])
    assert found.shape == (1, bounds[-1], last - first, HEAD_DIM)
    assert relative_error(found[0].detach(), expected.detach()) <= TOLERANCE
    for ours, theirs, part in zip(mine, whole, cut, strict=True):
        assert relative_error(ours.grad, theirs.grad[part]) <= TOLERANCE


def block_context(
    group: Any, index: int, shards: tuple[int, ...], bounds: tuple[int, ...], part_bytes: int = HEAD_PART_BYTES
) -> GroupContext:
    """A context of one block whose ranks hold `shards` tokens each, with documents at `bounds`."""
    return GroupContext(Block(group, index, shards), Ring(None, 0, (0,), ((),), ((),)), bounds, part_bytes=part_bytes)


def attend(context: GroupContext, num_heads: int, num_kv_heads: int, num_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """This rank's output [T, H, D] and gradients of its shards of q, k and v."""
    start = sum(context.block.tokens[: context.block.index])
    cut = slice(start, start + context.num_tokens)
    *inputs, output_gradient = random_inputs(num_heads, num_kv_heads, num_tokens)
    shards = [t[:, cut].clone().requires_grad_() for t in inputs]
    output = sequence_parallel_attention(*(t[None] for t in shards), LayerCall(SCALE), context)
    output.backward(output_gradient[None, cut])
    return (output[0].detach(), *(t.grad for t in shards))


def check_shards(parts: list[tuple[Tensor, ...]], expected: list[Tensor]) -> None:
    """Asserts that the shards of all ranks, in order, make up the reference."""
    output = torch.cat([part[0] for part in parts])
    gradients = [torch.cat([part[i] for part in parts], dim=1) for i in (1, 2, 3)]
    for name, found, reference_tensor in zip(("output", "q", "k", "v"), [output, *gradients], expected, strict=True):
        assert found.shape == reference_tensor.shape
        assert relative_error(found, reference_tensor) <= TOLERANCE, name


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("num_heads,num_kv_heads", [(4, 4), (4, 2), (6, 1)])
def test_one_rank_is_the_reference(name: str, num_heads: int, num_kv_heads: int) -> None:
    bounds = BOUNDS[name]
    context = block_context(None, 0, (bounds[-1],), bounds)
    check_shards([attend(context, num_heads, num_kv_heads, bounds[-1])], reference(num_heads, num_kv_heads, bounds))


def attend_on_rank(
    positions: tuple[int, ...],
    shards: tuple[int, ...],
    bounds: tuple[int, ...],
    heads: list[tuple[int, int]],
    part_bytes: int = HEAD_PART_BYTES,
) -> list[tuple[Tensor, ...]] | None:
    """`attend` for every pair of head counts on the group at `positions`; None outside it."""
    pool = group_pool()
    if pool.rank not in positions:
        return None
    index, group = positions.index(pool.rank), pool.group(positions)
    return [attend(block_context(group, index, shards, bounds, part_bytes), *pair, bounds[-1]) for pair in heads]


# head counts that divide the ranks and that do not, multi-query and grouped
HEADS = {2: [(4, 4), (4, 2), (4, 1), (3, 3), (6, 2), (5, 1)], 4: [(4, 4), (4, 2), (4, 1), (6, 6), (6, 3), (6, 2), (6, 1), (7, 1)]}
SHARDS = {
    2: [(12, 11), (22, 1), (1, 22), (7, 16)],
    4: [(6, 6, 6, 5), (20, 1, 1, 1), (1, 1, 1, 20), (3, 9, 4, 7)],
}


@pytest.mark.wide(
    "(6, 6, 6, 5)-one document",
    "(20, 1, 1, 1)-one document",
    "(1, 1, 1, 20)-one document",
    "(3, 9, 4, 7)-one document",
)
@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("shards", [shards for several in SHARDS.values() for shards in several], ids=str)
def test_all_ranks_together_are_the_reference(ranks, name: str, shards: tuple[int, ...]) -> None:
    num_ranks, bounds = len(shards), BOUNDS[name]
    results = ranks(num_ranks).run(attend_on_rank, tuple(range(num_ranks)), shards, bounds, HEADS[num_ranks])
    for number, (num_heads, num_kv_heads) in enumerate(HEADS[num_ranks]):
        check_shards([rank[number] for rank in results], reference(num_heads, num_kv_heads, bounds))


# heads that ranks divide evenly: parts with KV heads of their own, parts that share them, and both
PARTED = {2: [(8, 8), (8, 4), (8, 2), (6, 2), (12, 4), (8, 1)], 4: [(16, 16), (16, 8), (16, 4), (16, 2), (24, 4)]}


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_parts_are_all_heads_of_a_rank_with_what_they_read(num_kv: int, per_kv: int, num_ranks: int, most: int) -> None:
    num_heads = num_kv * per_kv
    parts = head_parts(num_heads, num_kv, num_ranks, most)
    if parts is None:
        return
    assert 1 < parts.count <= most and 0 < parts.exposed < 1
    for share in head_shares(num_heads, num_kv, num_ranks):
        own = [parts.share(share, part) for part in range(parts.count)]
        assert [head for each in own for head in range(each.q_start, each.q_stop)] == list(range(share.q_start, share.q_stop))
        for place, each in enumerate(own):
            read = {head // per_kv for head in range(each.q_start, each.q_stop)}
            assert read == set(range(each.kv_start, each.kv_stop)) and each.num_kv == parts.num_kv
            # neighbours read the same keys until they have `per_kv` parts
            is_new = place == 0 or own[place - 1].kv_start != each.kv_start
            assert is_new == (place % parts.per_kv == 0)
        sent = 2 * share.num_q + 2 * share.num_kv
        assert parts.exposed == pytest.approx((own[0].num_q + 2 * own[0].num_kv + own[-1].num_q) / sent)


@pytest.mark.parametrize("shards", [(12, 11), (22, 1), (6, 6, 6, 5), (3, 9, 4, 7)], ids=str)
def test_exchanges_in_parts_beside_attention_are_the_reference(ranks, shards: tuple[int, ...]) -> None:
    num_ranks, bounds = len(shards), BOUNDS["documents"]
    assert all((parts := head_parts(*heads, num_ranks, 4)) and parts.count > 1 for heads in PARTED[num_ranks])
    found, whole = (
        ranks(num_ranks).run(attend_on_rank, tuple(range(num_ranks)), shards, bounds, PARTED[num_ranks], part_bytes)
        for part_bytes in (1, HEAD_PART_BYTES)
    )
    for number, heads in enumerate(PARTED[num_ranks]):
        check_shards([rank[number] for rank in found], reference(*heads, bounds))
        # each head is computed as in one exchange; some processors sum fewer heads at once in another order
        assert all(relative_error(mine[number][0], other[number][0]) <= 1e-14 for mine, other in zip(found, whole, strict=True))


@pytest.mark.parametrize("positions", [(0, 1), (2, 3)])
def test_a_group_of_some_ranks_is_the_reference(ranks, positions: tuple[int, int]) -> None:
    results = ranks(4).run(attend_on_rank, positions, (9, 14), BOUNDS["documents"], [(6, 2)])
    members = [rank[0] for rank in results if rank is not None]
    assert [rank is not None for rank in results] == [rank in positions for rank in range(4)]
    check_shards(members, reference(6, 2, BOUNDS["documents"]))


def sent_on_rank(num_heads: int, num_kv_heads: int, shards: tuple[int, ...]) -> list[Counter[int]]:
    """Number of elements of each head that this rank sends to each rank in the first exchange.

    Query head h holds h everywhere, KV head g holds 100 + g in k and 200 + g in v.
    """
    pool = group_pool()
    context = block_context(pool.everyone, pool.rank, shards, (0, sum(shards)))
    num_own = shards[pool.rank]

    def marked(first: int, count: int) -> Tensor:
        heads = torch.arange(first, first + count, dtype=torch.float64)
        return heads[None, :, None, None].expand(1, count, num_own, HEAD_DIM)

    sent: list[tuple[Tensor, list[int]]] = []
    original = sequence_parallel._exchange

    def recording(send: Tensor, send_sizes: list[int], *rest: Any) -> Tensor:
        sent.append((send, send_sizes))
        return original(send, send_sizes, *rest)

    with patch.object(sequence_parallel, "_exchange", recording):
        q, k, v = marked(0, num_heads), marked(100, num_kv_heads), marked(200, num_kv_heads)
        sequence_parallel_attention(q, k, v, LayerCall(SCALE), context)
    (send, send_sizes), _ = sent
    assert send.numel() == sum(send_sizes)
    return [Counter(block.int().tolist()) for block in send.split(send_sizes)]


@pytest.mark.parametrize("num_heads,num_kv_heads", [(4, 4), (4, 2), (4, 1), (6, 2), (6, 3), (8, 2)])
def test_each_head_is_sent_once_to_every_rank_that_reads_it_and_to_no_other(ranks, num_heads: int, num_kv_heads: int) -> None:
    shards = (6, 1, 4, 3)
    for sender, blocks in enumerate(ranks(4).run(sent_on_rank, num_heads, num_kv_heads, shards)):
        elements = shards[sender] * HEAD_DIM
        # heads spread one by one over the ranks, the first ranks taking the rest
        owners = sorted(head % 4 for head in range(num_heads))
        for receiver, found in enumerate(blocks):
            queries = [head for head in range(num_heads) if owners[head] == receiver]
            keys = {head * num_kv_heads // num_heads for head in queries}
            expected = [*queries, *(100 + g for g in keys), *(200 + g for g in keys)]
            assert found == Counter({head: elements for head in expected})


def test_every_call_is_counted() -> None:
    context = block_context(None, 0, (23,), (0, 23))
    for count in (1, 2):
        attend(context, 4, 2, 23)
        assert context.calls.count == count


@pytest.mark.parametrize("batch,num_tokens", [(1, 7), (1, 9), (2, 8)])
def test_a_shard_other_than_the_plans_is_refused(batch: int, num_tokens: int) -> None:
    heads = torch.zeros(batch, 2, num_tokens, HEAD_DIM)
    with pytest.raises(
        ValueError, match=f"got a batch of {batch} rows with {num_tokens} tokens each, but the plan gives this rank one row of 8"
    ):
        sequence_parallel_attention(heads, heads, heads, LayerCall(SCALE), block_context(None, 0, (8,), (0, 8)))
