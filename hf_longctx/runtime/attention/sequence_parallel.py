"""Attention of one chunk over its sequence group: Ulysses inside a block of ranks, a ring across blocks, or both.

The attention function registered with transformers (`hf.models.attention`) calls it for every layer.

Heads and tokens may be divided unevenly: no number has to divide another. Every rank of a block receives exactly the KV heads
that its query heads read. A KV head read by several ranks is sent to each of them, and the owner of the tokens sums gradients.

If exchanges take long enough, they run beside attention: every rank's heads are cut into parts, and those of one part are
exchanged while attention of another runs (`exchanges.PartExchange`).

Shapes: H query heads, G KV heads, T tokens of this rank, S tokens of its block, D head size of queries and keys, E of
values and outputs, h and g the query and KV heads that this rank computes.

Source: DeepSpeed-Ulysses (arXiv 2309.14509), with uneven shards and one fused exchange for q, k and v; combined with a ring as
in USP (arXiv 2405.07719).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hf_longctx.kernels.sequence_layout import join_heads, join_tokens, scatter_heads, scatter_tokens
from hf_longctx.plan.core.sharding import HeadParts, HeadShare, head_parts, head_shares
from hf_longctx.runtime.activations.records import AttentionRecord
from hf_longctx.runtime.attention.chunk import ChunkAttention, Document, SharedKeys, documents_of
from hf_longctx.runtime.attention.context import Block, GroupContext
from hf_longctx.runtime.attention.exchanges import PartExchange
from hf_longctx.runtime.attention.heads import KVReaders
from hf_longctx.runtime.attention.ring import RingAttention
from hf_longctx.runtime.attention.rows import AttentionRule
from hf_longctx.runtime.tiles.packs import takes_packs
from hf_longctx.runtime.tiles.patterns import CAUSAL, AttentionPattern
from hf_longctx.runtime.tiles.plain import Scores


@dataclass(frozen=True, slots=True)
class LayerCall:
    """Settings of one attention layer."""

    # see `tiles.plain.Scores`
    scale: float
    # the calling layer, the key of its entries in the K/V book
    layer: Hashable = None
    # which earlier tokens are visible
    pattern: AttentionPattern = CAUSAL
    # per head, the score of an extra key that every token sees and whose value is zero
    sinks_H: Tensor | None = None
    softcap: float = 0.0
    # keys that an index has chosen for this rank's tokens, see `rows.AttentionRule`
    chosen_TK: Tensor | None = None
    # share of the attention weights that are dropped
    dropout: float = 0.0
    # name of the layer in the model, which seeds dropout masks
    name: str = ""
    # whether the context's `blocks` see each other both ways
    sees_both_ways: bool = False


def sequence_parallel_attention(q_1HTD: Tensor, k_1GTD: Tensor, v_1GTE: Tensor, call: LayerCall, context: GroupContext) -> Tensor:
    """Returns causal attention within documents under the layer's pattern, for this rank's tokens, [1, T, H, E].

    Every rank of the context's group must call it for layers in the same order; backward repeats the exchanges in reverse.
    """
    context.calls.count += 1
    num_heads, num_kv_heads = q_1HTD.shape[1], k_1GTD.shape[1]
    if q_1HTD.shape[0] != 1 or q_1HTD.shape[2] != context.num_tokens:
        raise ValueError(
            f"attention got a batch of {q_1HTD.shape[0]} rows with {q_1HTD.shape[2]} tokens each, but the plan gives this rank "
            f"one row of {context.num_tokens} tokens; run the model through the plan's executor only"
        )
    # autocast leaves q and k in fp32 after the rotary embedding; attention would round them anyway, so round before sending
    q_1HTD, k_1GTD = q_1HTD.to(v_1GTE.dtype), k_1GTD.to(v_1GTE.dtype)
    shares = head_shares(num_heads, num_kv_heads, context.block.num_ranks)
    mine = shares[context.block.index]
    if call.sees_both_ways and context.blocks and context.ring.num_blocks > 1:
        raise ValueError(
            "tokens of images see each other both ways, which rings do not compute; let groups divide heads (Ulysses)"
        )
    rule = partial(_rule, q_1HTD, k_1GTD, v_1GTE, call, context)
    if context.block.num_ranks == 1:
        inputs = q_1HTD, k_1GTD, v_1GTE, _sinks(call, mine, v_1GTE)
        return _attention(*inputs, rule(mine), context, call.layer, record=context.attention_record)
    if (parts := _parts(q_1HTD, k_1GTD, v_1GTE, call, context)) is not None:
        return _in_parts(q_1HTD[0], k_1GTD[0], v_1GTE[0], parts, call, context, rule)
    q_1hSD, k_1gSD, v_1gSE = _scatter_heads(q_1HTD, k_1GTD, v_1GTE, shares, context)
    inputs = q_1hSD, k_1gSD, v_1gSE, _sinks(call, mine, v_1GTE)
    out_1ShE = _attention(*inputs, rule(mine), context, call.layer, record=context.attention_record)
    return gather_heads(out_1ShE, shares, context)


def _rule(
    q_1HTD: Tensor, k_1GTD: Tensor, v_1GTE: Tensor, call: LayerCall, context: GroupContext, share: HeadShare
) -> AttentionRule:
    """Returns the rule of attention of these heads; q, k and v: of all heads of the layer."""
    readers = context.readers(share, q_1HTD.shape[1] // k_1GTD.shape[1], q_1HTD.device)
    head_dim = max(q_1HTD.shape[3], v_1GTE.shape[3])
    blocks = context.blocks if call.sees_both_ways else ()
    shares_calls = not _is_masked(call, context) and takes_packs(v_1GTE.device, v_1GTE.dtype, head_dim, call.softcap > 0)
    bounds, gather = context.bounds if shares_calls else None, partial(gather_tokens, block=context.block)
    dropout = context.weight_dropout(call.dropout, call.name, share)
    scores = Scores(call.scale, call.softcap)
    return AttentionRule(readers, scores, call.pattern, call.chosen_TK, gather, bounds, context.stacks, dropout, blocks)


def _is_masked(call: LayerCall, context: GroupContext) -> bool:
    """Whether attention is masked by more than its pattern: by chosen keys, dropout, or images that see both ways."""
    return call.chosen_TK is not None or call.dropout > 0 or (call.sees_both_ways and bool(context.blocks))


def _sinks(call: LayerCall, share: HeadShare, values: Tensor) -> Tensor | None:
    """Returns the sinks of these heads in fp32 or wider; None if there are none."""
    if call.sinks_H is None:
        return None
    return call.sinks_H[share.q_start : share.q_stop].to(torch.promote_types(values.dtype, torch.float32))


def _parts(q_1HTD: Tensor, k_1GTD: Tensor, v_1GTE: Tensor, call: LayerCall, context: GroupContext) -> HeadParts | None:
    """Returns the parts in which heads are exchanged beside attention; None for one exchange before it and one after it.

    The same on all ranks of the block, and for all chunks of a group, whose slices share keys in the K/V book; runs with images
    that see both ways have no parts at all. Rings hide their own messages, and lent slices have exchanges of their own.
    """
    record = context.attention_record
    is_plain = context.ring.num_blocks == 1 and context.lent_slice is None and not _is_masked(call, context)
    if not is_plain or q_1HTD.shape[3] != v_1GTE.shape[3] or (record is not None and not record.takes_parts):
        return None
    num_heads, num_kv_heads, num_ranks = q_1HTD.shape[1], k_1GTD.shape[1], context.block.num_ranks
    token_bytes = 2 * (num_heads + num_kv_heads) * q_1HTD.shape[3] * q_1HTD.element_size()
    sent = (context.mean_tokens or max(context.block.tokens)) * token_bytes
    return head_parts(num_heads, num_kv_heads, num_ranks, min(context.exchange_parts, sent // context.part_bytes))


def _in_parts(
    q_HTD: Tensor,
    k_GTD: Tensor,
    v_GTE: Tensor,
    parts: HeadParts,
    call: LayerCall,
    context: GroupContext,
    rule: Callable[[HeadShare], AttentionRule],
) -> Tensor:
    """Returns attention of all heads for this rank's tokens, [1, T, H, E], with exchanges of parts beside attention of others."""
    block, num_own, head_dim, record = context.block, context.num_tokens, q_HTD.shape[2], context.attention_record
    shares = head_shares(q_HTD.shape[0], k_GTD.shape[0], block.num_ranks)
    flat = scatter_heads(q_HTD, k_GTD, v_GTE, *_bounds(shares), (parts.num_q, parts.num_kv, parts.per_kv))
    # KV heads that each part brings: later parts that read the same bring none
    num_sent = [parts.num_kv * (part % parts.per_kv == 0) for part in range(parts.count)]
    # elements of a token in each part, and in its output
    inputs, output = [(parts.num_q + 2 * num) * head_dim for num in num_sent], parts.num_q * head_dim
    own, others = [num_own] * block.num_ranks, block.tokens
    to_heads = PartExchange(
        [([x * count for count in own], [x * count for count in others]) for x in inputs], block.process_group
    )
    back = [output * count for count in others], [output * count for count in own]
    to_tokens = PartExchange([back] * parts.count, block.process_group)
    arriving, leaving = to_heads.start_all(flat), []
    # messages free it when all parts have arrived
    del flat
    for part, (ticket, num_kv) in enumerate(zip(arriving, num_sent, strict=True)):
        q_hSD, k_gSD, v_gSD = join_tokens(to_heads.arrived(part, ticket), block.tokens, parts.num_q, num_kv, head_dim)
        if num_kv:
            k_1gSE, v_1gSE, shared = k_gSD[None], v_gSD[None], SharedKeys(parts.per_kv) if parts.per_kv > 1 else None
        share = parts.share(shares[block.index], part)
        out_1ShE = _attention(
            *(q_hSD[None], k_1gSE, v_1gSE, _sinks(call, share, v_GTE)),
            *(rule(share), context, (call.layer, part // parts.per_kv)),
            record=record and record.part(part),
            shared=shared,
            is_first=num_kv > 0,
        )
        leaving.append(to_tokens.start(part, scatter_tokens(out_1ShE[0], block.tokens)))
    whole = to_tokens.all_arrived(leaving).view(parts.count, block.num_ranks, num_own, parts.num_q, head_dim)
    return whole.permute(2, 1, 0, 3, 4).reshape(1, num_own, -1, head_dim)


def _bounds(shares: Sequence[HeadShare]) -> tuple[list[int], list[int]]:
    """Returns bounds of the query heads of ranks, and starts and stops of their KV heads, for `scatter_heads`."""
    return [0, *(share.q_stop for share in shares)], [x for share in shares for x in (share.kv_start, share.kv_stop)]


def _attention(
    q_1hSD: Tensor,
    k_1gSD: Tensor,
    v_1gSE: Tensor,
    sinks_h: Tensor | None,
    rule: AttentionRule,
    context: GroupContext,
    layer: Hashable,
    *,
    record: AttentionRecord | None,
    shared: SharedKeys | None = None,
    is_first: bool = True,
) -> Tensor:
    """Returns attention of this rank's heads for its block's tokens, [1, S, h, E]; a ring if the group has several blocks.

    record, shared, is_first: see `ChunkAttention`.
    """
    if context.lent_slice is not None:
        assert rule.chosen_TK is None
        own = q_1hSD[0], k_1gSD[0], v_1gSE[0]
        return context.lent_slice.attend(*own, sinks_h, rule, context.kv_book, layer).unsqueeze(0)
    if context.ring.num_blocks > 1:
        attend_around = RingAttention(rule, context.ring, record, context.kv_book, layer)
        return attend_around(q_1hSD, k_1gSD, v_1gSE, sinks_h)
    # with values of another head size, torch's own attention would fall back to plain matrices; and it would save keys and values
    # once per query head, while operators for several documents save them once
    has_one_size = q_1hSD.shape[3] == v_1gSE.shape[3]
    sees_all = rule.pattern == CAUSAL and not rule.needs_positions
    is_plain = rule.bounds is None and sees_all and sinks_h is None and not rule.scores.softcap and has_one_size
    if not context.slices and record is None and is_plain:
        return packed_attention(q_1hSD, k_1gSD, v_1gSE, rule.readers, rule.scores.scale, context.cu_seqlens)
    documents = documents_of(context.cu_seqlens, context.slices)
    if record is not None or not is_plain:
        attend = ChunkAttention(rule, documents, record, context.kv_book, layer, shared, is_first)
        return attend(q_1hSD[0], k_1gSD[0], v_1gSE[0], sinks_h).unsqueeze(0)
    outputs = []
    for document in documents:
        q, k, v = (x[:, :, document.tokens] for x in (q_1hSD, k_1gSD, v_1gSE))
        num_tokens = document.stop - document.start
        if document.as_slice is None:
            outputs.append(packed_attention(q, k, v, rule.readers, rule.scores.scale, (0, num_tokens)))
        else:
            alone = (Document(0, num_tokens, document.as_slice),)
            attend = ChunkAttention(rule, alone, None, context.kv_book, layer, shared, is_first)
            outputs.append(attend(q[0], k[0], v[0]).unsqueeze(0))
    # torch.cat would copy the output of a lone slice, and both would be kept for backward
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def packed_attention(
    q_1hSD: Tensor, k_1gSD: Tensor, v_1gSD: Tensor, readers: KVReaders, scale: float, cu_seqlens: tuple[int, ...]
) -> Tensor:
    """Returns causal attention inside each document of a packed row, [1, S, h, D], by torch's own operator.

    cu_seqlens: document boundaries from 0 to S.
    """
    k_1gSD, v_1gSD = readers.expand(k_1gSD, 1), readers.expand(v_1gSD, 1)
    lengths = [stop - start for start, stop in itertools.pairwise(cu_seqlens)]
    documents = zip(q_1hSD.split(lengths, dim=2), k_1gSD.split(lengths, dim=2), v_1gSD.split(lengths, dim=2), strict=True)
    outputs = [F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale) for q, k, v in documents]
    return torch.cat([output.transpose(1, 2) for output in outputs], dim=1)


def _scatter_heads(
    q_1HTD: Tensor, k_1GTD: Tensor, v_1GTE: Tensor, shares: tuple[HeadShare, ...], context: GroupContext
) -> tuple[Tensor, Tensor, Tensor]:
    """Sends all heads of this rank's tokens and receives this rank's heads of all tokens of the block, in one exchange."""
    if q_1HTD.shape[3] != v_1GTE.shape[3]:
        return _scatter_heads_of_two_sizes(q_1HTD[0], k_1GTD[0], v_1GTE[0], shares, context)
    head_dim, num_own, mine = q_1HTD.shape[3], context.num_tokens, shares[context.block.index]
    send_sizes = [(share.num_q + 2 * share.num_kv) * num_own * head_dim for share in shares]
    receive_sizes = [(mine.num_q + 2 * mine.num_kv) * tokens * head_dim for tokens in context.block.tokens]
    # nothing holds what was sent while heads are joined
    received = _exchange(scatter_heads(q_1HTD[0], k_1GTD[0], v_1GTE[0], *_bounds(shares)), send_sizes, receive_sizes, context)
    q_hSD, k_gSD, v_gSE = join_tokens(received, context.block.tokens, mine.num_q, mine.num_kv, head_dim)
    return q_hSD.unsqueeze(0), k_gSD.unsqueeze(0), v_gSE.unsqueeze(0)


def _scatter_heads_of_two_sizes(
    q_HTD: Tensor, k_GTD: Tensor, v_GTE: Tensor, shares: tuple[HeadShare, ...], context: GroupContext
) -> tuple[Tensor, Tensor, Tensor]:
    """Does `_scatter_heads` by torch's copies if keys and values differ in head size, since the kernel takes one size."""
    heads = [(slice(share.q_start, share.q_stop), kv, kv) for share in shares for kv in (slice(share.kv_start, share.kv_stop),)]
    q_hSD, k_gSD, v_gSE = (x.unsqueeze(0) for x in spread_heads((q_HTD, k_GTD, v_GTE), heads, context))
    return q_hSD, k_gSD, v_gSE


def spread_heads(tensors_HT: Sequence[Tensor], heads: Sequence[Sequence[slice]], context: GroupContext) -> list[Tensor]:
    """Exchanges tensors [H, T, ...] of all heads and this rank's tokens for [h, S, ...] of its heads and all tokens of the block.

    Tensors may differ in heads, sizes and dtypes. heads: for each rank, its heads of every tensor.
    """
    found: dict[int, Tensor] = {}
    # one exchange for each dtype
    for dtype in dict.fromkeys(x.dtype for x in tensors_HT):
        places = [place for place, x in enumerate(tensors_HT) if x.dtype == dtype]
        blocks = [[tensors_HT[place][rank_heads[place]].reshape(-1) for place in places] for rank_heads in heads]
        send = [torch.cat(block) for block in blocks]
        mine = heads[context.block.index]
        # arriving shape of each tensor for one token
        layout = [(mine[place].stop - mine[place].start, *tensors_HT[place].shape[2:]) for place in places]
        receive_sizes = [tokens * sum(map(math.prod, layout)) for tokens in context.block.tokens]
        received = _exchange(torch.cat(send), [len(flat) for flat in send], receive_sizes, context)
        by_rank = []
        for tokens, flat in zip(context.block.tokens, received.split(receive_sizes), strict=True):
            flats = flat.split([tokens * math.prod(shape) for shape in layout])
            by_rank.append([x.view(num, tokens, *sizes) for x, (num, *sizes) in zip(flats, layout, strict=True)])
        found |= {place: torch.cat(shards, dim=1) for place, *shards in zip(places, *by_rank, strict=True)}
    return [found[place] for place in range(len(tensors_HT))]


def gather_heads(out_1ShE: Tensor, shares: tuple[HeadShare, ...], context: GroupContext) -> Tensor:
    """Sends this rank's heads of all tokens back and receives all heads of this rank's tokens, [1, T, H, E]."""
    num_own_heads, value_dim = out_1ShE.shape[2], out_1ShE.shape[3]
    send_sizes = [tokens * num_own_heads * value_dim for tokens in context.block.tokens]
    receive_sizes = [context.num_tokens * share.num_q * value_dim for share in shares]
    received = _exchange(scatter_tokens(out_1ShE[0], context.block.tokens), send_sizes, receive_sizes, context)
    return join_heads(received, [share.num_q for share in shares], context.num_tokens, value_dim).unsqueeze(0)


def gather_tokens(x_TK: Tensor, block: Block) -> Tensor:
    """Gathers rows [S, K] for all tokens of the block from the ranks, which have those of their own tokens; no gradients."""
    tokens, width = block.tokens, x_TK.shape[1]
    if len(tokens) == 1:
        return x_TK
    sizes = [count * width for count in tokens]
    sends = [sizes[block.index]] * len(tokens)
    return all_to_all(x_TK.reshape(-1).repeat(len(tokens)), sends, sizes, block.process_group).view(-1, width)


def _exchange(send: Tensor, send_sizes: list[int], receive_sizes: list[int], context: GroupContext) -> Tensor:
    """All-to-all of a flat buffer over the ranks of the block, differentiable."""
    return all_to_all(send, send_sizes, receive_sizes, context.block.process_group)


def all_to_all(send: Tensor, send_sizes: list[int], receive_sizes: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """All-to-all of a flat buffer over the ranks of `group`, differentiable; every rank must run it forward and backward."""
    received: Tensor = _AllToAll.apply(send, send_sizes, receive_sizes, group)
    return received


class _AllToAll(torch.autograd.Function):
    """Sends block i of `send` to rank i of the group; backward sends gradients back the same way."""

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
