"""The layout around the Ulysses exchanges against Python loops over ranks, heads and tokens, and as a whole round trip."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from helpers.measures.triton_runs import compile_only, memory_instructions, needs_triton
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_longctx.kernels import sequence_layout as op
from hf_longctx.kernels.sequence_layout import join_heads, join_tokens, scatter_heads, scatter_tokens
from hf_longctx.runtime.attention.sequence_parallel import head_shares

# query heads, KV heads, tokens of each rank
GROUPS = [
    (1, 1, (4,)),
    (4, 4, (3, 2)),
    (4, 2, (1, 0, 5, 2)),
    (7, 7, (2, 3, 1)),
    (6, 2, (3, 3, 1, 4)),
    (6, 3, (2, 1, 2, 3)),
    (5, 1, (1, 1, 1, 1, 1)),
]
HEAD_DIM = 3


def tables(num_heads: int, num_kv: int, degree: int) -> tuple[list[int], list[int]]:
    """Bounds of the ranks' query heads, and their ranges of KV heads."""
    shares = head_shares(num_heads, num_kv, degree)
    return [0, *(share.q_stop for share in shares)], [bound for share in shares for bound in (share.kv_start, share.kv_stop)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def heads(num_heads: int, num_kv: int, num_tokens: int) -> list[Tensor]:
    """q, k, v [heads, T, D] as transposed views, the layout that a projection leaves."""
    numbers = (num_heads, num_kv, num_kv)
    return [random(num_tokens, num, HEAD_DIM, seed=i).transpose(0, 1) for i, num in enumerate(numbers)]


@pytest.mark.parametrize(("num_heads", "num_kv", "tokens"), GROUPS)
def test_scattered_heads_are_those_of_each_rank_in_turn(num_heads: int, num_kv: int, tokens: tuple[int, ...]) -> None:
    q_bounds, kv_ranges = tables(num_heads, num_kv, len(tokens))
    q, k, v = heads(num_heads, num_kv, 4)
    expected = []
    for rank in range(len(tokens)):
        per_kv = num_heads // num_kv
        queries = range(q_bounds[rank], q_bounds[rank + 1])
        read = sorted({head // per_kv for head in queries})
        for part, chosen in ((q, queries), (k, read), (v, read)):
            for head in chosen:
                for token in range(4):
                    expected += part[head, token].tolist()
    assert scatter_heads(q, k, v, q_bounds, kv_ranges).tolist() == expected


def test_first_parts_of_all_ranks_come_first_in_the_buffer() -> None:
    q, k, v = heads(4, 2, 1)
    # two ranks with two parts of one head each, which read one KV head; it travels with the first part
    flat = scatter_heads(q, k, v, [0, 2, 4], [0, 1, 1, 2], (1, 1, 2))
    in_order = [q[0], k[0], v[0], q[2], k[1], v[1], q[1], q[3]]
    assert torch.equal(flat, torch.cat(in_order).reshape(-1))
    # a rank with two parts, each with a KV head
    flat = scatter_heads(q, k, v, [0, 4], [0, 2], (2, 1, 1))
    assert torch.equal(flat, torch.cat([q[:2], k[:1], v[:1], q[2:], k[1:], v[1:]]).reshape(-1))
    for bounds, ranges, part in (([0, 1, 4], [0, 1, 0, 2], (1, 1, 2)), ([0, 2, 4], [0, 1, 1, 2], (1, 1, 1))):
        with pytest.raises(ValueError, match="not equal parts of"):
            scatter_heads(q, k, v, bounds, ranges, part)


@pytest.mark.parametrize(("num_heads", "num_kv", "tokens"), GROUPS)
def test_joined_tokens_are_in_rank_order(num_heads: int, num_kv: int, tokens: tuple[int, ...]) -> None:
    rows = num_heads + 2 * num_kv
    received = random(rows * sum(tokens) * HEAD_DIM)
    parts = join_tokens(received, tokens, num_heads, num_kv, HEAD_DIM)
    assert [part.shape[0] for part in parts] == [num_heads, num_kv, num_kv] and all(part.is_contiguous() for part in parts)
    values = iter(received.tolist())
    joined = torch.cat(parts)
    for first, stop in pairwise(accumulate(tokens, initial=0)):
        for row in range(rows):
            for token in range(first, stop):
                assert joined[row, token].tolist() == [next(values) for _ in range(HEAD_DIM)]


@pytest.mark.parametrize("shares", [(1,), (2, 1), (1, 3, 0, 2)], ids=str)
def test_joined_heads_are_in_rank_order(shares: tuple[int, ...]) -> None:
    received = random(4 * sum(shares) * HEAD_DIM)
    joined = join_heads(received, shares, 4, HEAD_DIM)
    assert joined.shape == (4, sum(shares), HEAD_DIM) and joined.is_contiguous()
    values = iter(received.tolist())
    for first, stop in pairwise(accumulate(shares, initial=0)):
        for token in range(4):
            for head in range(first, stop):
                assert joined[token, head].tolist() == [next(values) for _ in range(HEAD_DIM)]


def test_scattered_tokens_are_rows_and_copied_only_when_they_must_be() -> None:
    out = random(6, 2, HEAD_DIM)
    assert scatter_tokens(out, [4, 0, 2]).data_ptr() == out.data_ptr()
    view = out.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(scatter_tokens(view, [4, 0, 2]), out.reshape(-1))


def exchange(sent: list[Tensor], sizes: list[list[int]]) -> list[Tensor]:
    """An all-to-all among the entries of a list: sizes[i][j] values go from entry i to entry j."""
    blocks = [buffer.split(size) for buffer, size in zip(sent, sizes, strict=True)]
    return [torch.cat(received) for received in zip(*blocks, strict=True)]


@pytest.mark.parametrize(("num_heads", "num_kv", "tokens"), GROUPS)
def test_a_whole_group_gets_its_heads_of_all_tokens_and_everything_back(
    num_heads: int, num_kv: int, tokens: tuple[int, ...]
) -> None:
    q_bounds, kv_ranges = tables(num_heads, num_kv, len(tokens))
    shares = [stop - start for start, stop in pairwise(q_bounds)]
    num_read = [stop - start for start, stop in zip(kv_ranges[::2], kv_ranges[1::2], strict=True)]
    whole = [part.requires_grad_() for part in heads(num_heads, num_kv, sum(tokens))]
    shards = list(zip(*(part.split(tokens, dim=1) for part in whole), strict=True))
    sent = [scatter_heads(*shard, q_bounds, kv_ranges) for shard in shards]
    sizes = [[(num_q + 2 * num) * own * HEAD_DIM for num_q, num in zip(shares, num_read, strict=True)] for own in tokens]
    received = exchange(sent, sizes)
    returned, loss = [], torch.zeros((), dtype=torch.float64)
    for rank, buffer in enumerate(received):
        q, k, v = join_tokens(buffer, tokens, shares[rank], num_read[rank], HEAD_DIM)
        kv = slice(kv_ranges[2 * rank], kv_ranges[2 * rank + 1])
        expected = (whole[0][q_bounds[rank] : q_bounds[rank + 1]], whole[1][kv], whole[2][kv])
        assert all(torch.equal(found, right) for found, right in zip((q, k, v), expected, strict=True))
        loss = loss + (k**3).sum() + (rank + 1) * (v**2).sum()
        returned.append(scatter_tokens(q.transpose(0, 1), tokens))
    back = exchange(returned, [[own * num_q * HEAD_DIM for own in tokens] for num_q in shares])
    outputs = [join_heads(buffer, shares, own, HEAD_DIM) for buffer, own in zip(back, tokens, strict=True)]
    for output, shard in zip(outputs, shards, strict=True):
        assert torch.equal(output, shard[0].transpose(0, 1))
    (loss + sum((output**4).sum() for output in outputs)).backward()
    # each rank that reads a KV head adds a gradient
    readers = [[r for r in range(len(tokens)) if kv_ranges[2 * r] <= head < kv_ranges[2 * r + 1]] for head in range(num_kv)]
    count = torch.tensor([len(found) for found in readers]).view(-1, 1, 1)
    weight = torch.tensor([sum(found) + len(found) for found in readers]).view(-1, 1, 1)
    for part, gradient in zip(whole, (4 * whole[0] ** 3, 3 * count * whole[1] ** 2, 2 * weight * whole[2]), strict=True):
        torch.testing.assert_close(part.grad, gradient.detach(), rtol=1e-14, atol=1e-14)


def test_gradients_are_those_of_finite_differences_twice() -> None:
    q_bounds, kv_ranges = tables(3, 1, 2)
    parts = [part.requires_grad_() for part in heads(3, 1, 2)]
    flat = random(5 * 3 * HEAD_DIM).requires_grad_()
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda *parts: scatter_heads(*parts, q_bounds, kv_ranges), parts)
        assert check(lambda *parts: scatter_heads(*parts, [0, 3], [0, 1], (1, 1, 3)), parts)
        assert check(lambda flat: join_tokens(flat, [2, 0, 1], 3, 1, HEAD_DIM), flat)
        assert check(lambda flat: join_heads(flat, [2, 1], 5, HEAD_DIM), flat)
        assert check(lambda part: scatter_tokens(part, [1, 1]), parts[0].transpose(0, 1))


def test_copies_of_a_head_add_up_in_full_precision() -> None:
    # 257 copies of 1 sum to 257 in fp32, but to 256 if every sum is rounded to bf16; 256 + 4 is exact in bf16
    q_bounds, kv_ranges = list(range(261)), [0, 1] * 260
    q, k, v = torch.zeros(260, 1, 1, dtype=torch.bfloat16), *torch.zeros(2, 1, 1, 1, dtype=torch.bfloat16)
    k.requires_grad_()
    scatter_heads(q, k, v, q_bounds, kv_ranges).sum().backward()
    assert k.grad.item() == 260


@pytest.mark.wide
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_operators_keep_the_rules_of_torch(dtype: torch.dtype) -> None:
    q_bounds, kv_ranges = tables(6, 2, 4)
    parts = [part.detach().to(dtype).requires_grad_() for part in heads(6, 2, 2)]
    num_heads = 6 + 2 * (sum(kv_ranges[1::2]) - sum(kv_ranges[::2]))
    flat, joined = (random(num * 2 * HEAD_DIM).to(dtype).requires_grad_() for num in (num_heads, 10))
    torch.library.opcheck(op._scatter_heads, (*parts, q_bounds, kv_ranges, []))
    torch.library.opcheck(op._sum_heads, (flat, q_bounds, kv_ranges, [], 2, 2, HEAD_DIM))
    torch.library.opcheck(op._join_blocks, (joined, [2, 0], [6, 2, 2], HEAD_DIM))
    torch.library.opcheck(op._split_blocks, (parts, [1, 1]))


def way_there(q: Tensor, k: Tensor, v: Tensor, flat: Tensor) -> Tensor:
    """All layout operations of one layer in one function, for two ranks that are alike."""
    sent = scatter_heads(q, k, v, [0, 2, 4], [0, 1, 1, 2])
    found, *_ = join_tokens(sent, [1] * q.shape[1], 4, 2, HEAD_DIM)
    back = join_heads(flat, [1, 2], q.shape[1], HEAD_DIM)
    return (sent**2).sum() + (found**3).sum() + (back**2).sum() + scatter_tokens(back, [q.shape[1]]).sin().sum()


@pytest.mark.wide
def test_it_compiles_and_checkpoints_with_the_same_gradients() -> None:
    compiled = torch.compile(way_there, backend="aot_eager", fullgraph=True)
    for num_tokens in (3, 5):
        inputs = [part.detach().requires_grad_() for part in (*heads(4, 2, num_tokens), random(num_tokens * 3 * HEAD_DIM))]
        ways = (way_there, compiled, lambda *inputs: checkpoint(way_there, *inputs, use_reentrant=False))
        eager, *others = (torch.autograd.grad(way(*inputs), inputs) for way in ways)
        for gradients in others:
            assert all(torch.equal(found, expected) for found, expected in zip(gradients, eager, strict=True))


def test_what_does_not_fit_is_named() -> None:
    q, k, v = heads(4, 2, 3)
    for bounds, ranges, message in (
        ([0, 2, 3], [0, 1, 1, 2], "must rise from 0 to the 4"),
        ([0, 3, 2, 4], [0, 1] * 3, "must rise"),
        ([0, 2, 4], [0, 1, 1, 3], "within the 2 KV heads"),
        ([0, 2, 4], [0, 1], "each of the 2 ranks"),
    ):
        with pytest.raises(ValueError, match=message):
            scatter_heads(q, k, v, bounds, ranges)
    with pytest.raises(ValueError, match="must agree in dtype"):
        scatter_heads(q, k, v.float(), [0, 4], [0, 2])
    with pytest.raises(ValueError, match="a flat buffer of 72 values"):
        join_tokens(torch.zeros(71), [1, 2], 4, 2, HEAD_DIM)
    with pytest.raises(ValueError, match="a flat buffer of 18 values"):
        join_heads(torch.zeros(2, 9), [1, 1], 3, HEAD_DIM)
    with pytest.raises(ValueError, match="3 in total, but attention returned 4"):
        scatter_tokens(torch.zeros(4, 1, 1), [1, 2])


@needs_triton
def test_kernels_compile_for_hopper_with_wide_memory_access(monkeypatch: pytest.MonkeyPatch) -> None:
    ptx = compile_only(op, monkeypatch)
    q_bounds, kv_ranges = tables(6, 2, 4)
    parts = [torch.zeros(num, 33, 128, dtype=torch.bfloat16) for num in (6, 2, 2)]
    flat = op.launch_scatter_heads(*parts, q_bounds, kv_ranges)
    op.launch_sum_heads(flat, q_bounds, kv_ranges, [], 2, 33, 128)
    joined = op.launch_join_blocks(torch.zeros(10 * 33 * 128, dtype=torch.bfloat16), [30, 3], [6, 2, 2], 128)
    op.launch_split_blocks(joined, [30, 3])
    assert len(ptx) == 4
    for found in map(memory_instructions, ptx):
        # every access moves 16 bytes per instruction
        assert {(kind.split(".")[0], kind.split(".")[-2:] == ["v4", "b32"]) for kind in found} == {("ld", True), ("st", True)}, (
            found
        )
