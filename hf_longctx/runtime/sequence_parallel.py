"""Attention of one chunk over a sequence group: Ulysses (all-to-all between tokens and heads) on any subgroup.

Shapes: H query heads, G KV heads, T tokens of this rank, S tokens of the whole chunk, D head size, h and g the query and
KV heads that this rank computes. Heads and tokens may be spread unevenly; nothing has to divide anything. Every rank
receives exactly the KV heads that its query heads read; a KV head that several ranks read is sent to each of them, and
its gradients are summed by the owner of the tokens.

Source: DeepSpeed-Ulysses (arXiv 2309.14509), with uneven shards and one fused exchange for q, k and v.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hf_longctx.runtime.context import GroupContext
from hf_longctx.runtime.ring import ring_attention


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Query heads [q_start, q_stop) of one rank and the KV heads [kv_start, kv_stop) that they read."""

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int

    @property
    def num_q(self) -> int:
        return self.q_stop - self.q_start

    @property
    def num_kv(self) -> int:
        return self.kv_stop - self.kv_start


def head_shares(num_heads: int, num_kv_heads: int, degree: int) -> tuple[HeadShare, ...]:
    """Contiguous query heads per rank, spread as evenly as possible, and their KV heads.

    Raises ValueError when KV heads do not divide query heads or a rank would get no head.
    """
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are no multiple of {num_kv_heads} KV heads")
    if degree > num_heads:
        raise ValueError(f"{degree} ranks share {num_heads} heads, but Ulysses needs at least one head per rank")
    per_kv = num_heads // num_kv_heads
    base, remainder = divmod(num_heads, degree)
    shares, start = [], 0
    for index in range(degree):
        stop = start + base + (index < remainder)
        shares.append(HeadShare(start, stop, start // per_kv, (stop - 1) // per_kv + 1))
        start = stop
    return tuple(shares)


def sequence_parallel_attention(q_1HTD: Tensor, k_1GTD: Tensor, v_1GTD: Tensor, scale: float, context: GroupContext) -> Tensor:
    """Causal attention within documents for this rank's tokens, shape [1, T, H, D].

    Every rank of the context's group must call it in the same order of layers; backward repeats the exchanges reversed.
    """
    context.calls.count += 1
    num_heads, num_kv_heads = q_1HTD.shape[1], k_1GTD.shape[1]
    if q_1HTD.shape[0] != 1 or q_1HTD.shape[2] != context.shard_tokens[context.index]:
        raise ValueError(
            f"attention got batch {q_1HTD.shape[0]} of {q_1HTD.shape[2]} tokens, the plan gives this rank one row of "
            f"{context.shard_tokens[context.index]}"
        )
    # autocast leaves q and k in fp32 behind the rotary embedding; attention would round them anyway, so round before sending
    q_1HTD, k_1GTD = q_1HTD.to(v_1GTD.dtype), k_1GTD.to(v_1GTD.dtype)
    if context.method == "ring":
        return ring_attention(q_1HTD, k_1GTD, v_1GTD, scale, context)
    if context.degree == 1:
        return packed_attention(q_1HTD, k_1GTD, v_1GTD, 0, num_heads // num_kv_heads, scale, context.cu_seqlens)
    shares = head_shares(num_heads, num_kv_heads, context.degree)
    mine = shares[context.index]
    q_1hSD, k_1gSD, v_1gSD = _scatter_heads(q_1HTD, k_1GTD, v_1GTD, shares, context)
    # query head j of this rank is head q_start + j of the model; its KV head is counted from kv_start
    offset = mine.q_start - mine.kv_start * (num_heads // num_kv_heads)
    out_1ShD = packed_attention(q_1hSD, k_1gSD, v_1gSD, offset, num_heads // num_kv_heads, scale, context.cu_seqlens)
    return _gather_heads(out_1ShD, shares, context)


def packed_attention(
    q_1hSD: Tensor, k_1gSD: Tensor, v_1gSD: Tensor, offset: int, per_kv: int, scale: float, cu_seqlens: tuple[int, ...]
) -> Tensor:
    """Causal attention inside each document of a packed row, shape [1, S, h, D].

    Query head j reads KV head (offset + j) // per_kv. cu_seqlens: document boundaries, starting at 0, ending at S.
    """
    num_heads = q_1hSD.shape[1]
    if k_1gSD.shape[1] != num_heads or offset:
        kv_head = torch.arange(offset, offset + num_heads, device=q_1hSD.device) // per_kv
        k_1gSD, v_1gSD = k_1gSD.index_select(1, kv_head), v_1gSD.index_select(1, kv_head)
    lengths = [stop - start for start, stop in itertools.pairwise(cu_seqlens)]
    documents = zip(q_1hSD.split(lengths, dim=2), k_1gSD.split(lengths, dim=2), v_1gSD.split(lengths, dim=2), strict=True)
    outputs = [F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale) for q, k, v in documents]
    return torch.cat([output.transpose(1, 2) for output in outputs], dim=1)


def _scatter_heads(
    q_1HTD: Tensor, k_1GTD: Tensor, v_1GTD: Tensor, shares: tuple[HeadShare, ...], context: GroupContext
) -> tuple[Tensor, Tensor, Tensor]:
    """One exchange: all heads of this rank's tokens in, this rank's heads of all tokens out."""
    num_heads, num_kv_heads, head_dim = q_1HTD.shape[1], k_1GTD.shape[1], q_1HTD.shape[3]
    order = tuple(
        head
        for share in shares
        for head in (
            *range(share.q_start, share.q_stop),
            *range(num_heads + share.kv_start, num_heads + share.kv_stop),
            *range(num_heads + num_kv_heads + share.kv_start, num_heads + num_kv_heads + share.kv_stop),
        )
    )
    heads_NTD = torch.cat([q_1HTD, k_1GTD, v_1GTD], dim=1)[0]
    send_NTD = heads_NTD.index_select(0, context.index_tensor(order, heads_NTD.device))
    num_own = context.shard_tokens[context.index]
    send_sizes = [(share.num_q + 2 * share.num_kv) * num_own * head_dim for share in shares]
    mine = shares[context.index]
    num_received = mine.num_q + 2 * mine.num_kv
    receive_sizes = [num_received * tokens * head_dim for tokens in context.shard_tokens]
    received = _exchange(send_NTD.reshape(-1), send_sizes, receive_sizes, context)
    blocks = [
        block.view(num_received, tokens, head_dim)
        for block, tokens in zip(received.split(receive_sizes), context.shard_tokens, strict=True)
    ]
    qkv_1nSD = torch.cat(blocks, dim=1).unsqueeze(0)
    q, k, v = qkv_1nSD.split([mine.num_q, mine.num_kv, mine.num_kv], dim=1)
    return q, k, v


def _gather_heads(out_1ShD: Tensor, shares: tuple[HeadShare, ...], context: GroupContext) -> Tensor:
    """One exchange back: this rank's heads of all tokens in, all heads of this rank's tokens out, shape [1, T, H, D]."""
    num_own_heads, head_dim = out_1ShD.shape[2], out_1ShD.shape[3]
    num_own = context.shard_tokens[context.index]
    send_sizes = [tokens * num_own_heads * head_dim for tokens in context.shard_tokens]
    receive_sizes = [num_own * share.num_q * head_dim for share in shares]
    received = _exchange(out_1ShD.reshape(-1), send_sizes, receive_sizes, context)
    blocks = [
        block.view(num_own, share.num_q, head_dim) for block, share in zip(received.split(receive_sizes), shares, strict=True)
    ]
    return torch.cat(blocks, dim=1).unsqueeze(0)


def _exchange(send: Tensor, send_sizes: list[int], receive_sizes: list[int], context: GroupContext) -> Tensor:
    """All-to-all of flat blocks over the context's group, differentiable."""
    received: Tensor = _AllToAll.apply(send, send_sizes, receive_sizes, context.process_group)
    return received


class _AllToAll(torch.autograd.Function):
    """Block i of `send` goes to the group's rank i; backward sends the gradients the same way back."""

    @staticmethod
    def forward(ctx: Any, send: Tensor, send_sizes: list[int], receive_sizes: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = (send_sizes, receive_sizes), group
        received = send.new_empty(sum(receive_sizes))
        dist.all_to_all_single(received, send.contiguous(), receive_sizes, send_sizes, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        send_sizes, receive_sizes = ctx.sizes
        returned = gradient.new_empty(sum(send_sizes))
        dist.all_to_all_single(returned, gradient.contiguous(), send_sizes, receive_sizes, group=ctx.group)
        return returned, None, None, None
