"""Ring attention: keys and values pass from block to block while every rank keeps its queries. Any degree, any head count.

`sequence_parallel` calls it for groups of several blocks.

Documents are cut into zigzag pieces (`plan.core.sharding`), so that every rank has about equally many query-key pairs. A tile of
one query piece and one key piece is fully visible, causal (a piece with itself) or invisible. Invisible tiles are never computed,
and keys that no other block sees are never sent. Partial outputs are merged by their log-sum-exp (LSE) in at least fp32. Backward
passes keys, values and their gradients around the ring once more and uses the merged output and LSE. Messages travel while tiles
are computed: keys and values one hop ahead, gradients one hop behind.

If a pattern limits how far back queries see (a window), nothing is passed on. Instead, in hop h every block sends directly to the
block h positions ahead the keys that the receiver's queries see; backward sends them again and gets their gradients back. (In the
zigzag layout, the piece before a given one is on the previous block in the first half of a document, and on the next block in the
second half. Passing keys on in one direction would therefore carry most of them nearly all the way around.)

If the chunk begins with a slice, its keys are joined to those of earlier slices; each rank has those of its own block in the K/V
book. They travel like any others, once per slice, and so do their gradients, which end in the book of the rank that has the keys.
In every hop a rank attends from T tokens to U keys and sends U keys. Both take longer with more keys, so later slices hide as
large a share of their messages as the first. (Sending queries around, with outputs and LSE, would take fewer bytes only if
earlier tokens are several times as many as new ones, and layers with windows would still need keys.)

Shapes: H query heads, G KV heads, T tokens of this rank's block, D head size of queries and keys, E of values, W = D + E,
U tokens of the block whose keys are in use.

Source: Ring Attention (arXiv 2310.01889) with the zigzag layout of Striped/zigzag variants, per document.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_longctx.plan.core.sharding import Piece
from hf_longctx.runtime.activations.records import AttentionRecord
from hf_longctx.runtime.attention.context import DirectBlocks, Ring, sent_tokens
from hf_longctx.runtime.attention.heads import join_kv, split_kv
from hf_longctx.runtime.attention.kv_book import KVBook
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


@dataclass(frozen=True, slots=True)
class RingAttention:
    """Attention of one layer within one chunk, around a ring.

    layer: key of the layer in the K/V book, the same object in every chunk. record: None in layers that are not replayed.
    """

    rule: AttentionRule
    ring: Ring
    record: AttentionRecord | None
    kv_book: KVBook
    layer: Hashable

    def __call__(self, q_1HTD: Tensor, k_1GTD: Tensor, v_1GTE: Tensor, sinks_H: Tensor | None = None) -> Tensor:
        """Returns attention within documents for the tokens of this rank's block, [1, T, H, E], differentiable.

        Each KV head travels once per hop, however many query heads read it. Every rank of the ring must call it for layers in the
        same order; backward runs the ring once more. A replay that finds output and LSE in the record runs no forward ring.
        Raises ValueError for a record that keeps only some of the tokens.
        """
        if self.record is not None and not self.record.is_all_or_nothing:
            raise ValueError(
                f"attention_output is to be recomputed for a share of {self.record.share.recompute:g} of the tokens, but a ring "
                f"of {self.ring.num_blocks} blocks can only recompute all or nothing; plan a share of 0 or 1, or a Ulysses group"
            )
        # chosen keys are saved as tensors
        lean = replace(self, rule=replace(self.rule, chosen_TK=None))
        output: Tensor = _RingAttention.apply(q_1HTD[0], k_1GTD[0], v_1GTE[0], sinks_H, self.rule.chosen_TK, lean)
        return output.transpose(0, 1).unsqueeze(0)

    def write(self, k_GTD: Tensor, v_GTE: Tensor, has_gradient: bool) -> list[Tensor]:
        """Writes keys and values of the chunk's slice into the K/V book; returns the earlier ones that it sees, [G, U, W]."""
        slice_, own = self.ring.slice_, self.ring.slice_tokens
        if slice_ is None:
            return []
        keeps_own = has_gradient and (self.record is None or self.record.is_replay)
        k, v = k_GTD[:, own], v_GTE[:, own]
        runs = self.kv_book.write(self.layer, slice_, k, v, pattern=self.rule.pattern, keeps_own=keeps_own)
        return [run.kv_GUW for run in runs]

    def read(self, whole_GSW: Tensor) -> Tensor:
        """Returns keys and values of this rank's block for backward, earlier ones first, given those of whole documents."""
        if self.ring.slice_ is None:
            return whole_GSW
        runs, own_GTW = self.kv_book.read(self.layer, self.ring.slice_)
        return torch.cat([*(run.kv_GUW for run in runs), own_GTW, whole_GSW], dim=1)

    def leave(self, sum_GUW: Tensor) -> Tensor:
        """Leaves the gradients of earlier keys and values in the K/V book; returns those of the block's own, [G, T, W].

        The slice's own include what later slices left.
        """
        slice_ = self.ring.slice_
        if slice_ is None:
            return sum_GUW
        front_GUW, own_GTW = self.kv_book.gradients(self.layer, slice_)
        earlier_GUW, sum_GTW = sum_GUW.split([front_GUW.shape[1], sum_GUW.shape[1] - front_GUW.shape[1]], dim=1)
        front_GUW += earlier_GUW
        sum_GTW[:, self.ring.slice_tokens] += own_GTW
        self.kv_book.backward_done(self.layer, slice_)
        return sum_GTW


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_HTD: Tensor,
        k_GTD: Tensor,
        v_GTE: Tensor,
        sinks_H: Tensor | None,
        chosen_TK: Tensor | None,
        call: RingAttention,
    ) -> Tensor:
        ctx.call, record, rule = call, call.record, call.rule.choosing(chosen_TK)
        # a replay writes the keys and values that the K/V book already has, since no later slice has changed them
        earlier, own_kv = call.write(k_GTD, v_GTE, any(ctx.needs_input_grad)), join_kv(k_GTD, v_GTE)
        kept = record.take() if record is not None else None
        if kept is None:
            keys = torch.cat([*earlier, own_kv], dim=1) if earlier else own_kv
            output, lse_HT = _around_the_ring(q_HTD, keys, rule, call.ring, sinks_H)
        else:
            output, lse_HT = kept.out_ShE.transpose(0, 1), kept.lse_hS
        if record is not None:
            record.put(output.transpose(0, 1), lse_HT)
        # copied, since a view would also keep alive the slice's keys and values, which are in the book
        whole_kv = own_kv[:, call.ring.slice_tokens.stop :].clone() if call.ring.slice_ else own_kv
        ctx.save_for_backward(q_HTD, whole_kv, output, lse_HT, sinks_H, chosen_TK)
        return output

    @staticmethod
    def backward(ctx: Any, gradient_HTE: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_HTD, whole_kv, out_HTE, lse_HT, sinks_H, chosen_TK = ctx.saved_tensors
        call: RingAttention = ctx.call
        rule, ring = call.rule.choosing(chosen_TK), call.ring
        wide = lse_HT.dtype
        own_kv = call.read(whole_kv)
        dq_HTD = torch.zeros_like(q_HTD, dtype=wide)
        own_sum = torch.zeros_like(own_kv, dtype=wide)

        def compute(source: int, kv: Tensor) -> Tensor:
            total = own_sum if source == ring.index else torch.zeros_like(kv, dtype=wide)
            for query, key in ring.tiles(source, rule.pattern, rule.needs_positions):
                piece = _key_piece(query, key, kv, q_HTD.shape[2], rule.pattern, total)
                if piece.tiles:
                    rows = query.tokens
                    row_inputs = (gradient_HTE[:, rows], q_HTD[:, rows], out_HTE[:, rows], lse_HT[:, rows])
                    dq_HTD[:, rows] += rows_backward(*row_inputs, (piece,), rule.of_rows(rows, query.document, query.start))
            return total

        _around(own_kv, ring, rule.pattern, compute, own_sum)
        dk_GTD, dv_GTE = split_kv(call.leave(own_sum).to(q_HTD.dtype), q_HTD.shape[2])
        dsinks_H = None if sinks_H is None else sinks_backward(gradient_HTE, out_HTE, lse_HT, sinks_H)
        return dq_HTD.to(q_HTD.dtype), dk_GTD, dv_GTE, dsinks_H, None, None


def _around_the_ring(
    q_HTD: Tensor, own_kv: Tensor, rule: AttentionRule, ring: Ring, sinks_H: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns output [H, T, E] and LSE [H, T] of this rank's queries over the keys of all blocks."""
    out_HTE, lse_HT = no_keys_yet(q_HTD, own_kv.shape[2] - q_HTD.shape[2])

    def compute(source: int, kv: Tensor) -> None:
        for query, key in ring.tiles(source, rule.pattern, rule.needs_positions):
            piece, rows = _key_piece(query, key, kv, q_HTD.shape[2], rule.pattern), query.tokens
            own_rule = rule.of_rows(rows, query.document, query.start)
            for tile in piece.tiles:
                merge_tile(out_HTE[:, rows], lse_HT[:, rows], q_HTD[:, rows], piece, tile, own_rule)

    _around(own_kv, ring, rule.pattern, compute)
    if sinks_H is not None:
        out_HTE, lse_HT = with_sinks(out_HTE, lse_HT, sinks_H)
    return out_HTE.to(q_HTD.dtype), lse_HT


def _key_piece(
    query: Piece, key: Piece, kv_GUW: Tensor, head_dim: int, pattern: AttentionPattern, sums_GUW: Tensor | None = None
) -> KeyPiece:
    """Returns the tiles in which `query` sees `key`; `key.tokens` locates the key piece in `kv_GUW` and `sums_GUW`."""
    tiles = pattern.tiles(query.start, query.num_tokens, key.start, key.num_tokens)
    kv, sums = (() if x is None else split_kv(x[:, key.tokens], head_dim) for x in (kv_GUW, sums_GUW))
    return KeyPiece(kv, tiles, sums, key.start)


def _around(
    own_kv: Tensor,
    ring: Ring,
    pattern: AttentionPattern,
    compute: Callable[[int, Tensor], Tensor | None],
    own_sum: Tensor | None = None,
) -> None:
    """Calls `compute(block, keys and values)` for every block: first this rank's own, then those that other blocks send.

    own_sum: gradient sums of this rank's whole block. If given, `compute` adds the gradients of the own block to it, and returns
    those of another block in a new tensor; these travel too, and what other ranks return is added to `own_sum`.

    While a hop is computed, the keys and values of the next hop and the gradients of the hop before are being sent. Arriving
    gradients of a block are added to those that this rank has computed for it.
    """
    direct, kv, total = ring.direct(pattern), own_kv, None
    for hop in range(ring.num_blocks + (own_sum is not None)):
        messages = []
        if hop + 1 < ring.num_blocks:
            messages.append(_next_keys(own_kv, kv, ring, direct, hop + 1))
        if total is not None:
            messages.append(_gradients(total, ring, direct, hop - 1))
        transfer = _Transfer.start(messages, ring)
        del messages
        computed = compute((ring.index - hop) % ring.num_blocks, kv) if hop < ring.num_blocks else None
        arrived = transfer.finish()
        if total is not None and own_sum is not None:
            _add_arrived(arrived.pop(), own_sum, computed, ring, direct, hop - 1)
        total = computed if hop else None
        kv = arrived.pop() if arrived else own_kv
        del computed


@dataclass(frozen=True, slots=True)
class _Message:
    """A tensor for `to_block`, in exchange for one of `num_tokens` tokens from `from_block`."""

    tensor: Tensor
    num_tokens: int
    to_block: int
    from_block: int


@dataclass(slots=True)
class _Transfer:
    """Messages in flight. `sent` must not be written and `received` not be read before `finish`."""

    sent: list[Tensor]
    received: list[Tensor]
    requests: list[dist.Work]

    @classmethod
    def start(cls, messages: Sequence[_Message], ring: Ring) -> _Transfer:
        """Posts the messages; all ranks of the ring do so in the same order, without computing anything first."""
        sent, received, operations = [], [], []
        for message in messages:
            shape = list(message.tensor.shape)
            shape[1] = message.num_tokens
            received.append(message.tensor.new_empty(shape))
            # both ends compute from the layout if there is nothing to send
            if message.tensor.shape[1]:
                sent.append(message.tensor.contiguous())
                operations.append(dist.P2POp(dist.isend, sent[-1], ring.ranks[message.to_block], group=ring.process_group))
            if message.num_tokens:
                source = ring.ranks[message.from_block]
                operations.append(dist.P2POp(dist.irecv, received[-1], source, group=ring.process_group))
        return cls(sent, received, dist.batch_isend_irecv(operations) if operations else [])

    def finish(self) -> list[Tensor]:
        """Waits until all messages have left and arrived (on NCCL: lets the stream wait). Returns the tensors that arrived."""
        for request in self.requests:
            request.wait()
        self.sent, self.requests = [], []
        received, self.received = self.received, []
        return received


def _next_keys(own_kv: Tensor, kv: Tensor, ring: Ring, direct: DirectBlocks | None, hop: int) -> _Message:
    """Returns the message that brings the keys and values of `hop`, given those of the hop before."""
    following, source = _partners(ring, hop)
    if direct is not None:
        return _Message(_gathered(own_kv, direct.outgoing[following]), sent_tokens(direct.incoming[source]), following, source)
    sent = _gathered(own_kv, ring.departing) if hop == 1 else kv
    return _Message(sent, sent_tokens(ring.travelling[source]), *_partners(ring, 1))


def _gradients(total: Tensor, ring: Ring, direct: DirectBlocks | None, hop: int) -> _Message:
    """Returns the message with the gradients summed in `hop`.

    Gradients of keys that came directly go back. Others follow their keys and values around the ring to their own block.
    """
    following, source = _partners(ring, hop)
    if direct is not None:
        return _Message(total, sum(tokens.stop - tokens.start for tokens in direct.outgoing[following]), source, following)
    return _Message(total, sent_tokens(ring.travelling[(source - 1) % ring.num_blocks]), *_partners(ring, 1))


def _add_arrived(
    arrived: Tensor, own_sum: Tensor, computed: Tensor | None, ring: Ring, direct: DirectBlocks | None, hop: int
) -> None:
    """Adds the gradients that arrived in `hop` to those of this block, or to the next hop's (`computed`)."""
    if direct is not None:
        _add_tokens(own_sum, direct.outgoing[_partners(ring, hop)[0]], arrived)
    elif computed is None:
        # after the last hop, the gradients of this block have arrived
        _add_tokens(own_sum, ring.departing, arrived)
    else:
        computed += arrived


def _add_tokens(total: Tensor, token_ranges: tuple[slice, ...], arrived: Tensor) -> None:
    """Adds an arrived tensor, part by part, to ranges of tokens."""
    first = 0
    for tokens in token_ranges:
        stop = first + tokens.stop - tokens.start
        total[:, tokens] += arrived[:, first:stop]
        first = stop


def _partners(ring: Ring, hop: int) -> tuple[int, int]:
    """Returns the indices of the blocks `hop` positions after this rank's, to which it sends, and before it."""
    return (ring.index + hop) % ring.num_blocks, (ring.index - hop) % ring.num_blocks


def _gathered(kv: Tensor, token_ranges: tuple[slice, ...]) -> Tensor:
    return torch.cat([kv[:, tokens] for tokens in token_ranges], dim=1) if token_ranges else kv[:, :0]
