"""Ring attention: keys and values pass from block to block while every rank keeps its own queries. Any degree, any head count.

`sequence_parallel` calls it for groups of several blocks.

Documents are cut into zigzag pieces (`plan.core.sharding`), so that every rank has about equally many query-key pairs. A tile of
one query piece and one key piece is fully visible, causal (a piece with itself) or invisible. Invisible tiles are never computed,
and keys that no other block sees are never sent. Partial outputs are merged by their log-sum-exp (LSE) in at least fp32. Backward
passes keys, values and their gradients around the ring once more and uses the merged output and LSE.

If a pattern limits how far back queries see (a window), nothing is passed on. Instead, in hop h every block sends to the block h
positions ahead, directly, the keys that the receiver's queries see; backward sends them again and gets their gradients back. (In
the zigzag layout, the piece before a given one lies on the previous block in the first half of a document, and on the next block
in the second half. Passing keys on in one direction would therefore carry most of them nearly all the way around.)

Shapes: H query heads, G KV heads, T tokens of this rank's block, D head size of queries and keys, E of values, W = D + E,
U tokens of the block whose keys are in use.

Source: Ring Attention (arXiv 2310.01889) with the zigzag layout of Striped/zigzag variants, per document.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_longctx.plan.core.sharding import Piece
from hf_longctx.runtime.activations.attention_record import AttentionRecord
from hf_longctx.runtime.attention.context import DirectBlocks, Ring, sent_tokens
from hf_longctx.runtime.attention.heads import join_kv, split_kv
from hf_longctx.runtime.attention.rows import (
    AttentionRule,
    KeyPiece,
    merge_tile,
    no_keys_yet,
    rows_backward,
    sinks_backward,
    with_sinks,
)
from hf_longctx.runtime.tiles.patterns import AttentionPattern


def ring_attention(
    q_1HTD: Tensor,
    k_1GTD: Tensor,
    v_1GTE: Tensor,
    rule: AttentionRule,
    ring: Ring,
    record: AttentionRecord | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention within documents under `rule` for the tokens of this rank's block, shape [1, T, H, E].


    Each KV head travels once per hop, however many query heads read it. Every rank of the ring must call it for the layers in the
    same order; backward runs the ring once more. A replay that finds output and LSE in `record` runs no forward ring. Raises
    ValueError for a record that keeps only some of the tokens.
    """
    if record is not None and not record.is_all_or_nothing:
        raise ValueError(
            f"attention_output is to be recomputed for a share of {record.share.recompute:g} of the tokens, but a ring of "
            f"{ring.num_blocks} blocks can only recompute all or nothing; plan a share of 0 or 1, or a Ulysses group"
        )
    output: Tensor = _RingAttention.apply(
        *(q_1HTD[0], k_1GTD[0], v_1GTE[0], sinks_H, rule.chosen_TK, replace(rule, chosen_TK=None), ring, record)
    )
    return output.transpose(0, 1).unsqueeze(0)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_HTD: Tensor,
        k_GTD: Tensor,
        v_GTE: Tensor,
        sinks_H: Tensor | None,
        chosen_TK: Tensor | None,
        rule: AttentionRule,
        ring: Ring,
        record: AttentionRecord | None,
    ) -> Tensor:
        ctx.settings, rule = (rule, ring), rule.choosing(chosen_TK)
        own_kv = join_kv(k_GTD, v_GTE)
        kept = record.take() if record is not None else None
        if kept is None:
            output, lse_HT = _around_the_ring(q_HTD, own_kv, rule, ring, sinks_H)
            if record is not None:
                record.put(output.transpose(0, 1), lse_HT)
        else:
            output, lse_HT = kept.out_ShE.transpose(0, 1), kept.lse_hS
        ctx.save_for_backward(q_HTD, own_kv, output, lse_HT, sinks_H, chosen_TK)
        return output

    @staticmethod
    def backward(ctx: Any, gradient_HTE: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_HTD, own_kv, out_HTE, lse_HT, sinks_H, chosen_TK = ctx.saved_tensors
        rule, ring = ctx.settings
        rule = rule.choosing(chosen_TK)
        wide = lse_HT.dtype
        dq_HTD = torch.zeros_like(q_HTD, dtype=wide)
        own_sum = torch.zeros_like(own_kv, dtype=wide)
        travelling, direct = own_sum, ring.direct(rule.pattern)
        for hop, (source, kv) in enumerate(_around(own_kv, ring, direct)):
            # gradients of another block follow its keys and values around, starting at the first rank that receives them
            is_new = hop == 1 or direct is not None
            total = own_sum if hop == 0 else torch.zeros_like(kv, dtype=wide) if is_new else travelling
            for query, key in ring.tiles(source, rule.pattern):
                piece = _key_piece(query, key, kv, q_HTD.shape[2], rule.pattern, total)
                if piece.tiles:
                    rows = query.tokens
                    row_inputs = (gradient_HTE[:, rows], q_HTD[:, rows], out_HTE[:, rows], lse_HT[:, rows])
                    dq_HTD[:, rows] += rows_backward(*row_inputs, (piece,), rule.of_rows(rows))
            if hop and direct is not None:
                _return(total, own_sum, ring, direct, hop)
            elif hop:
                travelling = _pass_on(total, ring, source)
        if direct is None:
            # after the last hop the gradients of this block have come home
            for tokens, arrived in zip(ring.departing, ring.travelling[ring.index], strict=True):
                own_sum[:, tokens] += travelling[:, arrived.tokens]
        dk_GTD, dv_GTE = split_kv(own_sum.to(q_HTD.dtype), q_HTD.shape[2])
        dsinks_H = None if sinks_H is None else sinks_backward(gradient_HTE, out_HTE, lse_HT, sinks_H)
        return dq_HTD.to(q_HTD.dtype), dk_GTD, dv_GTE, dsinks_H, None, None, None, None


def _around_the_ring(
    q_HTD: Tensor, own_kv: Tensor, rule: AttentionRule, ring: Ring, sinks_H: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output [H, T, E] and LSE [H, T] of this rank's queries over the keys of all blocks."""
    out_HTE, lse_HT = no_keys_yet(q_HTD, own_kv.shape[2] - q_HTD.shape[2])
    for source, kv in _around(own_kv, ring, ring.direct(rule.pattern)):
        for query, key in ring.tiles(source, rule.pattern):
            piece, rows = _key_piece(query, key, kv, q_HTD.shape[2], rule.pattern), query.tokens
            for tile in piece.tiles:
                merge_tile(out_HTE[:, rows], lse_HT[:, rows], q_HTD[:, rows], piece, tile, rule.of_rows(rows))
    if sinks_H is not None:
        out_HTE, lse_HT = with_sinks(out_HTE, lse_HT, sinks_H)
    return out_HTE.to(q_HTD.dtype), lse_HT


def _key_piece(
    query: Piece, key: Piece, kv_GUW: Tensor, head_dim: int, pattern: AttentionPattern, sums_GUW: Tensor | None = None
) -> KeyPiece:
    """Tiles in which the `query` piece sees the `key` piece; `key.tokens` locates the key piece in `kv_GUW` and `sums_GUW`."""
    tiles = pattern.tiles(query.start, query.num_tokens, key.start, key.num_tokens)
    kv, sums = (() if x is None else split_kv(x[:, key.tokens], head_dim) for x in (kv_GUW, sums_GUW))
    return KeyPiece(kv, tiles, sums, key.start)


def _around(own_kv: Tensor, ring: Ring, direct: DirectBlocks | None) -> Iterator[tuple[int, Tensor]]:
    """(block, keys and values) for every block of the ring: first this rank's whole block, then what the other blocks send."""
    yield ring.index, own_kv
    kv = _gathered(own_kv, ring.departing) if direct is None else own_kv
    for hop in range(1, ring.num_blocks):
        following, source = _partners(ring, hop)
        if direct is None:
            kv = _pass_on(kv, ring, (ring.index - hop + 1) % ring.num_blocks)
        else:
            num_tokens = sent_tokens(direct.incoming[source])
            kv = _exchange(_gathered(own_kv, direct.outgoing[following]), num_tokens, following, source, ring)
        yield source, kv


def _return(total: Tensor, own_sum: Tensor, ring: Ring, direct: DirectBlocks, hop: int) -> None:
    """Sends back the gradients of the keys that came directly in this hop; adds to `own_sum` the gradients that come back."""
    following, source = _partners(ring, hop)
    sent = direct.outgoing[following]
    arrived = _exchange(total, sum(tokens.stop - tokens.start for tokens in sent), source, following, ring)
    first = 0
    for tokens in sent:
        stop = first + tokens.stop - tokens.start
        own_sum[:, tokens] += arrived[:, first:stop]
        first = stop


def _partners(ring: Ring, hop: int) -> tuple[int, int]:
    """Indices of the blocks `hop` positions after and before this rank's: where it sends to, and where it receives from."""
    return (ring.index + hop) % ring.num_blocks, (ring.index - hop) % ring.num_blocks


def _gathered(kv: Tensor, token_ranges: tuple[slice, ...]) -> Tensor:
    return torch.cat([kv[:, tokens] for tokens in token_ranges], dim=1) if token_ranges else kv[:, :0]


def _pass_on(tensor: Tensor, ring: Ring, source: int) -> Tensor:
    """Passes a tensor of block `source` to the next block, and returns the tensor that the previous block passes on."""
    num_tokens = sent_tokens(ring.travelling[(source - 1) % ring.num_blocks])
    return _exchange(tensor, num_tokens, *_partners(ring, 1), ring)


def _exchange(tensor: Tensor, num_tokens: int, to_block: int, from_block: int, ring: Ring) -> Tensor:
    """Sends a tensor to `to_block`, and returns the `num_tokens` tokens that `from_block` sends to this rank."""
    shape = list(tensor.shape)
    shape[1] = num_tokens
    received = tensor.new_empty(shape)
    operations = []
    # both ends know from the layout when there is nothing to send
    if tensor.shape[1]:
        operations.append(dist.P2POp(dist.isend, tensor.contiguous(), ring.ranks[to_block], group=ring.process_group))
    if num_tokens:
        operations.append(dist.P2POp(dist.irecv, received, ring.ranks[from_block], group=ring.process_group))
    for request in dist.batch_isend_irecv(operations) if operations else []:
        request.wait()
    return received
