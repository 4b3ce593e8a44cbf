"""Attention of one chunk over a sequence group: Ulysses inside a block of ranks, a ring across blocks, or one of the two.

Shapes: H query heads, G KV heads, T tokens of this rank, S tokens of its block, D head size, h and g the query and KV
heads that this rank computes. Heads and tokens may be spread unevenly; nothing has to divide anything. Every rank of a
block receives exactly the KV heads that its query heads read; a KV head that several ranks read is sent to each of them,
and its gradients are summed by the owner of the tokens.

Source: DeepSpeed-Ulysses (arXiv 2309.14509), with uneven shards and one fused exchange for q, k and v; inside a ring as in
USP (arXiv 2405.07719).
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hf_longctx.kernels.sequence_layout import join_heads, join_tokens, scatter_heads, scatter_tokens
from hf_longctx.plan.sharding import HeadShare, head_shares
from hf_longctx.runtime.chunk_attention import ChunkAttention, Document, documents_of
from hf_longctx.runtime.context import GroupContext
from hf_longctx.runtime.heads import KVReaders
from hf_longctx.runtime.patterns import CAUSAL, AttentionPattern
from hf_longctx.runtime.ring import ring_attention
from hf_longctx.runtime.shared_attention import SharedAttention


def sequence_parallel_attention(
    q_1HTD: Tensor,
    k_1GTD: Tensor,
    v_1GTD: Tensor,
    scale: float,
    context: GroupContext,
    layer: Hashable = None,
    pattern: AttentionPattern = CAUSAL,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention within documents, causal and as `pattern` says, for this rank's tokens, shape [1, T, H, D].

    Every rank of the context's group must call it in the same order of layers; backward repeats the exchanges reversed.
    layer: which attention layer calls, so that slices find the keys and values of earlier ones. sinks: of each head the score
    of one more key, of no value, that every token sees.
    """
    context.calls.count += 1
    num_heads, num_kv_heads = q_1HTD.shape[1], k_1GTD.shape[1]
    if q_1HTD.shape[0] != 1 or q_1HTD.shape[2] != context.num_tokens:
        raise ValueError(
            f"attention got batch {q_1HTD.shape[0]} of {q_1HTD.shape[2]} tokens, the plan gives this rank one row of "
            f"{context.num_tokens}"
        )
    if v_1GTD.shape[-1] != q_1HTD.shape[-1]:
        raise ValueError(
            f"{type(layer).__name__} has heads of {q_1HTD.shape[-1]} for queries and of {v_1GTD.shape[-1]} for values, which is "
            f"not supported yet; use a model whose heads are of one size"
        )
    # autocast leaves q and k in fp32 behind the rotary embedding; attention would round them anyway, so round before sending
    q_1HTD, k_1GTD = q_1HTD.to(v_1GTD.dtype), k_1GTD.to(v_1GTD.dtype)
    shares = head_shares(num_heads, num_kv_heads, context.block.num_ranks)
    readers = context.readers(shares[context.block.index], num_heads // num_kv_heads, q_1HTD.device)
    sinks_h = None
    if sinks_H is not None:
        mine = shares[context.block.index]
        sinks_h = sinks_H[mine.q_start : mine.q_stop].to(torch.promote_types(v_1GTD.dtype, torch.float32))
    if context.block.num_ranks == 1:
        return _attention(q_1HTD, k_1GTD, v_1GTD, sinks_h, readers, scale, context, layer, pattern)
    q_1hSD, k_1gSD, v_1gSD = _scatter_heads(q_1HTD, k_1GTD, v_1GTD, shares, context)
    out_1ShD = _attention(q_1hSD, k_1gSD, v_1gSD, sinks_h, readers, scale, context, layer, pattern)
    return _gather_heads(out_1ShD, shares, context)


def _attention(
    q_1hSD: Tensor,
    k_1gSD: Tensor,
    v_1gSD: Tensor,
    sinks_h: Tensor | None,
    readers: KVReaders,
    scale: float,
    context: GroupContext,
    layer: Hashable,
    pattern: AttentionPattern,
) -> Tensor:
    """Attention of this rank's heads over its block's tokens, shape [1, S, h, D]: around the ring if there are other blocks."""
    if context.shared is not None:
        attend_shared = SharedAttention(readers, scale, context.shared, context.book, layer, pattern)
        return attend_shared(q_1hSD[0], k_1gSD[0], v_1gSD[0], sinks_h).unsqueeze(0)
    if context.ring.num_blocks > 1:
        return ring_attention(q_1hSD, k_1gSD, v_1gSD, readers, scale, context.ring, context.kept, pattern, sinks_h)
    is_plain = pattern == CAUSAL and sinks_h is None
    if not context.slices and context.kept is None and is_plain:
        return packed_attention(q_1hSD, k_1gSD, v_1gSD, readers, scale, context.cu_seqlens)
    documents = documents_of(context.cu_seqlens, context.slices)
    if context.kept is not None or not is_plain:
        attend = ChunkAttention(readers, scale, documents, context.kept, context.book, layer, pattern)
        return attend(q_1hSD[0], k_1gSD[0], v_1gSD[0], sinks_h).unsqueeze(0)
    outputs = []
    for document in documents:
        q, k, v = (x[:, :, document.tokens] for x in (q_1hSD, k_1gSD, v_1gSD))
        num_tokens = document.stop - document.start
        if document.part is None:
            outputs.append(packed_attention(q, k, v, readers, scale, (0, num_tokens)))
        else:
            alone = (Document(0, num_tokens, document.part),)
            outputs.append(ChunkAttention(readers, scale, alone, None, context.book, layer)(q[0], k[0], v[0]).unsqueeze(0))
    # a copy of a lone slice would be kept for backward beside the output itself
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def packed_attention(
    q_1hSD: Tensor, k_1gSD: Tensor, v_1gSD: Tensor, readers: KVReaders, scale: float, cu_seqlens: tuple[int, ...]
) -> Tensor:
    """Causal attention inside each document of a packed row, shape [1, S, h, D].

    cu_seqlens: document boundaries, starting at 0, ending at S.
    """
    k_1gSD, v_1gSD = readers.expand(k_1gSD, 1), readers.expand(v_1gSD, 1)
    lengths = [stop - start for start, stop in itertools.pairwise(cu_seqlens)]
    documents = zip(q_1hSD.split(lengths, dim=2), k_1gSD.split(lengths, dim=2), v_1gSD.split(lengths, dim=2), strict=True)
    outputs = [F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale) for q, k, v in documents]
    return torch.cat([output.transpose(1, 2) for output in outputs], dim=1)


def _scatter_heads(
    q_1HTD: Tensor, k_1GTD: Tensor, v_1GTD: Tensor, shares: tuple[HeadShare, ...], context: GroupContext
) -> tuple[Tensor, Tensor, Tensor]:
    """One exchange: all heads of this rank's tokens in, this rank's heads of all tokens out."""
    head_dim, num_own, mine = q_1HTD.shape[3], context.num_tokens, shares[context.block.index]
    q_bounds = [0, *(share.q_stop for share in shares)]
    kv_ranges = [bound for share in shares for bound in (share.kv_start, share.kv_stop)]
    send = scatter_heads(q_1HTD[0], k_1GTD[0], v_1GTD[0], q_bounds, kv_ranges)
    send_sizes = [(share.num_q + 2 * share.num_kv) * num_own * head_dim for share in shares]
    receive_sizes = [(mine.num_q + 2 * mine.num_kv) * tokens * head_dim for tokens in context.block.tokens]
    received = _exchange(send, send_sizes, receive_sizes, context)
    q_hSD, k_gSD, v_gSD = join_tokens(received, context.block.tokens, mine.num_q, mine.num_kv, head_dim)
    return q_hSD.unsqueeze(0), k_gSD.unsqueeze(0), v_gSD.unsqueeze(0)


def _gather_heads(out_1ShD: Tensor, shares: tuple[HeadShare, ...], context: GroupContext) -> Tensor:
    """One exchange back: this rank's heads of all tokens in, all heads of this rank's tokens out, shape [1, T, H, D]."""
    num_own_heads, head_dim = out_1ShD.shape[2], out_1ShD.shape[3]
    send_sizes = [tokens * num_own_heads * head_dim for tokens in context.block.tokens]
    receive_sizes = [context.num_tokens * share.num_q * head_dim for share in shares]
    received = _exchange(scatter_tokens(out_1ShD[0], context.block.tokens), send_sizes, receive_sizes, context)
    return join_heads(received, [share.num_q for share in shares], context.num_tokens, head_dim).unsqueeze(0)


def _exchange(send: Tensor, send_sizes: list[int], receive_sizes: list[int], context: GroupContext) -> Tensor:
    """All-to-all of flat parts over the ranks of the block, differentiable."""
    received: Tensor = _AllToAll.apply(send, send_sizes, receive_sizes, context.block.process_group)
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
