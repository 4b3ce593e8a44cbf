"""Attention of one chunk over a sequence group: Ulysses inside a block of ranks, a ring across blocks, or one of the two.

Shapes: H query heads, G KV heads, T tokens of this rank, S tokens of its block, D head size of queries and keys, E of
values and outputs, h and g the query and KV heads that this rank computes. Heads and tokens may be spread unevenly; nothing
has to divide anything. Every rank of a block receives exactly the KV heads that its query heads read; a KV head that several
ranks read is sent to each of them, and its gradients are summed by the owner of the tokens.

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
from hf_longctx.plan.core.sharding import HeadShare, head_shares
from hf_longctx.runtime.attention.chunk import ChunkAttention, Document, documents_of
from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.attention.heads import KVReaders
from hf_longctx.runtime.attention.lent_slice import SharedAttention
from hf_longctx.runtime.attention.ring import ring_attention
from hf_longctx.runtime.tiles.patterns import CAUSAL, AttentionPattern
from hf_longctx.runtime.tiles.plain import Scores


def sequence_parallel_attention(
    q_1HTD: Tensor,
    k_1GTD: Tensor,
    v_1GTE: Tensor,
    scale: float,
    context: GroupContext,
    layer: Hashable = None,
    pattern: AttentionPattern = CAUSAL,
    sinks_H: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Attention within documents, causal and as `pattern` says, for this rank's tokens, shape [1, T, H, E].

    Every rank of the context's group must call it in the same order of layers; backward repeats the exchanges reversed.
    layer: which attention layer calls, so that slices find the keys and values of earlier ones. sinks: of each head the score
    of one more key, of no value, that every token sees. softcap: see `plain_tiles.Scores`.
    """
    context.calls.count += 1
    num_heads, num_kv_heads = q_1HTD.shape[1], k_1GTD.shape[1]
    if q_1HTD.shape[0] != 1 or q_1HTD.shape[2] != context.num_tokens:
        raise ValueError(
            f"attention got batch {q_1HTD.shape[0]} of {q_1HTD.shape[2]} tokens, the plan gives this rank one row of "
            f"{context.num_tokens}"
        )
    # autocast leaves q and k in fp32 behind the rotary embedding; attention would round them anyway, so round before sending
    q_1HTD, k_1GTD = q_1HTD.to(v_1GTE.dtype), k_1GTD.to(v_1GTE.dtype)
    shares = head_shares(num_heads, num_kv_heads, context.block.num_ranks)
    readers = context.readers(shares[context.block.index], num_heads // num_kv_heads, q_1HTD.device)
    sinks_h = None
    if sinks_H is not None:
        mine = shares[context.block.index]
        sinks_h = sinks_H[mine.q_start : mine.q_stop].to(torch.promote_types(v_1GTE.dtype, torch.float32))
    scores = Scores(scale, softcap)
    if context.block.num_ranks == 1:
        return _attention(q_1HTD, k_1GTD, v_1GTE, sinks_h, readers, scores, context, layer, pattern)
    q_1hSD, k_1gSD, v_1gSE = _scatter_heads(q_1HTD, k_1GTD, v_1GTE, shares, context)
    out_1ShE = _attention(q_1hSD, k_1gSD, v_1gSE, sinks_h, readers, scores, context, layer, pattern)
    return _gather_heads(out_1ShE, shares, context)


def _attention(
    q_1hSD: Tensor,
    k_1gSD: Tensor,
    v_1gSE: Tensor,
    sinks_h: Tensor | None,
    readers: KVReaders,
    scores: Scores,
    context: GroupContext,
    layer: Hashable,
    pattern: AttentionPattern,
) -> Tensor:
    """Attention of this rank's heads over its block's tokens, shape [1, S, h, E]: around the ring if there are other blocks."""
    if context.shared is not None:
        attend_shared = SharedAttention(readers, scores, context.shared, context.book, layer, pattern)
        return attend_shared(q_1hSD[0], k_1gSD[0], v_1gSE[0], sinks_h).unsqueeze(0)
    if context.ring.num_blocks > 1:
        return ring_attention(q_1hSD, k_1gSD, v_1gSE, readers, scores, context.ring, context.kept, pattern, sinks_h)
    # values of another size would make torch's own attention use matrices
    is_plain = pattern == CAUSAL and sinks_h is None and not scores.softcap and q_1hSD.shape[3] == v_1gSE.shape[3]
    if not context.slices and context.kept is None and is_plain:
        return packed_attention(q_1hSD, k_1gSD, v_1gSE, readers, scores.scale, context.cu_seqlens)
    documents = documents_of(context.cu_seqlens, context.slices)
    if context.kept is not None or not is_plain:
        attend = ChunkAttention(readers, scores, documents, context.kept, context.book, layer, pattern)
        return attend(q_1hSD[0], k_1gSD[0], v_1gSE[0], sinks_h).unsqueeze(0)
    outputs = []
    for document in documents:
        q, k, v = (x[:, :, document.tokens] for x in (q_1hSD, k_1gSD, v_1gSE))
        num_tokens = document.stop - document.start
        if document.part is None:
            outputs.append(packed_attention(q, k, v, readers, scores.scale, (0, num_tokens)))
        else:
            alone = (Document(0, num_tokens, document.part),)
            outputs.append(ChunkAttention(readers, scores, alone, None, context.book, layer)(q[0], k[0], v[0]).unsqueeze(0))
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
    q_1HTD: Tensor, k_1GTD: Tensor, v_1GTE: Tensor, shares: tuple[HeadShare, ...], context: GroupContext
) -> tuple[Tensor, Tensor, Tensor]:
    """One exchange: all heads of this rank's tokens in, this rank's heads of all tokens out."""
    if q_1HTD.shape[3] != v_1GTE.shape[3]:
        return _scatter_heads_of_two_sizes(q_1HTD[0], k_1GTD[0], v_1GTE[0], shares, context)
    head_dim, num_own, mine = q_1HTD.shape[3], context.num_tokens, shares[context.block.index]
    q_bounds = [0, *(share.q_stop for share in shares)]
    kv_ranges = [bound for share in shares for bound in (share.kv_start, share.kv_stop)]
    send = scatter_heads(q_1HTD[0], k_1GTD[0], v_1GTE[0], q_bounds, kv_ranges)
    send_sizes = [(share.num_q + 2 * share.num_kv) * num_own * head_dim for share in shares]
    receive_sizes = [(mine.num_q + 2 * mine.num_kv) * tokens * head_dim for tokens in context.block.tokens]
    received = _exchange(send, send_sizes, receive_sizes, context)
    q_hSD, k_gSD, v_gSE = join_tokens(received, context.block.tokens, mine.num_q, mine.num_kv, head_dim)
    return q_hSD.unsqueeze(0), k_gSD.unsqueeze(0), v_gSE.unsqueeze(0)


def _scatter_heads_of_two_sizes(
    q_HTD: Tensor, k_GTD: Tensor, v_GTE: Tensor, shares: tuple[HeadShare, ...], context: GroupContext
) -> tuple[Tensor, Tensor, Tensor]:
    """The same where values have another size than keys, by torch's own copies: no kernel lays out two sizes."""
    head_dim, value_dim, mine = q_HTD.shape[2], v_GTE.shape[2], shares[context.block.index]
    heads = [(slice(share.q_start, share.q_stop), kv, kv) for share in shares for kv in (slice(share.kv_start, share.kv_stop),)]
    blocks = [[x[of_rank] for x, of_rank in zip((q_HTD, k_GTD, v_GTE), of_rank, strict=True)] for of_rank in heads]
    send = [torch.cat([part.reshape(-1) for part in block]) for block in blocks]
    parts = ((mine.num_q, head_dim), (mine.num_kv, head_dim), (mine.num_kv, value_dim))
    receive_sizes = [tokens * sum(num * size for num, size in parts) for tokens in context.block.tokens]
    received = _exchange(torch.cat(send), [len(flat) for flat in send], receive_sizes, context)
    found = []
    for tokens, flat in zip(context.block.tokens, received.split(receive_sizes), strict=True):
        flats = flat.split([tokens * num * size for num, size in parts])
        found.append([x.view(num, tokens, size) for x, (num, size) in zip(flats, parts, strict=True)])
    q_1hSD, k_1gSD, v_1gSE = (torch.cat(of_ranks, dim=1).unsqueeze(0) for of_ranks in zip(*found, strict=True))
    return q_1hSD, k_1gSD, v_1gSE


def _gather_heads(out_1ShE: Tensor, shares: tuple[HeadShare, ...], context: GroupContext) -> Tensor:
    """One exchange back: this rank's heads of all tokens in, all heads of this rank's tokens out, shape [1, T, H, E]."""
    num_own_heads, value_dim = out_1ShE.shape[2], out_1ShE.shape[3]
    send_sizes = [tokens * num_own_heads * value_dim for tokens in context.block.tokens]
    receive_sizes = [context.num_tokens * share.num_q * value_dim for share in shares]
    received = _exchange(scatter_tokens(out_1ShE[0], context.block.tokens), send_sizes, receive_sizes, context)
    return join_heads(received, [share.num_q for share in shares], context.num_tokens, value_dim).unsqueeze(0)


def _exchange(send: Tensor, send_sizes: list[int], receive_sizes: list[int], context: GroupContext) -> Tensor:
    """All-to-all of flat parts over the ranks of the block, differentiable."""
    return all_to_all(send, send_sizes, receive_sizes, context.block.process_group)


def all_to_all(send: Tensor, send_sizes: list[int], receive_sizes: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """All-to-all of flat parts over the ranks of `group`, differentiable: every rank of it calls this, and its backward."""
    received: Tensor = _AllToAll.apply(send, send_sizes, receive_sizes, group)
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
