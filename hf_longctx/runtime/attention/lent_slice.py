"""Attention of a slice whose tokens are divided among ranks of several pipeline stages, because idle stages lend theirs.

`sequence_parallel` calls it for slices of lent micro-batches (SPPO's multiplexed sequence partitioning).

Every rank computes queries, keys and values of its own tokens. One exchange gives all ranks the keys and values of the whole
slice; each rank writes them into its own K/V book, as if it had run the slice alone. Its queries then see the front and,
causally, the slice. Lent ranks that begin to help with the last slices of a sequence do not have the front; they receive it from
the slice's own stage.

In backward every rank adds the gradients from its queries to those in its own K/V book. Gradients of the slice's own keys and
values are summed over the ranks, and each rank gets those of its tokens. Gradients of a front that was sent go back to the stage
that sent it. (The paper does not describe these exchanges; they are our design.)

Shapes: h query heads and g KV heads of this rank, S tokens of its block, P tokens of one piece of it, T tokens of the slice, U of
its front, D head size of queries and keys, E of values, W = D + E.

Source: SPPO (arXiv 2503.10377, section 6).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_longctx.plan.core.sharding import Piece
from hf_longctx.runtime.attention.heads import join_kv, split_kv
from hf_longctx.runtime.attention.kv_book import KeyRun, KVBook, Slice
from hf_longctx.runtime.attention.rows import (
    AttentionRule,
    KeyPiece,
    front_piece,
    front_pieces,
    rows_backward,
    rows_forward,
    sinks_backward,
)


@dataclass(frozen=True, slots=True)
class LentSlice:
    """A slice and the ranks that run it: one rank of every stage, all at one position, in `process_group`'s order."""

    process_group: dist.ProcessGroup
    # this rank's index in the group
    index: int
    # index of the rank of the slice's own stage
    owner: int
    # pieces of every rank; `start` counts from the start of the slice, `first` within the rank's block
    blocks: tuple[tuple[Piece, ...], ...]
    # the slice as in this rank's K/V book, where the sequence ends with the last slice that the rank runs
    slice_: Slice
    # only the owner has the front, and sends it to the others
    moves_front: bool

    @property
    def is_owner(self) -> bool:
        return self.index == self.owner

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Pieces of the slice on this rank."""
        return self.blocks[self.index]

    @property
    def block_tokens(self) -> tuple[int, ...]:
        """Number of tokens on every rank."""
        return tuple(sum(piece.num_tokens for piece in block) for block in self.blocks)


@dataclass(frozen=True, slots=True)
class LentAttention:
    """Attention of one layer within a lent slice. layer: its key in the K/V book, the same object in every chunk."""

    rule: AttentionRule
    lent: LentSlice
    kv_book: KVBook
    layer: Hashable

    def __call__(self, q_hSD: Tensor, k_gSD: Tensor, v_gSE: Tensor, sinks_h: Tensor | None = None) -> Tensor:
        """Returns attention of this rank's tokens, [S, h, E], differentiable.

        All ranks of the slice must call it for layers in the same order, and run backward in reverse order.
        """
        output: Tensor = _LentAttention.apply(q_hSD, k_gSD, v_gSE, sinks_h, self)
        return output


class _LentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_hSD: Tensor, k_gSD: Tensor, v_gSE: Tensor, sinks_h: Tensor | None, call: LentAttention) -> Tensor:
        slice_, head_dim = call.lent.slice_, q_hSD.shape[2]
        kv_gTW = _whole_slice(join_kv(k_gSD, v_gSE), call.lent)
        if call.lent.moves_front and not call.lent.is_owner:
            _receive_front(kv_gTW, head_dim, call)
        front = call.kv_book.write(call.layer, slice_, *split_kv(kv_gTW, head_dim), pattern=call.rule.pattern)
        if call.lent.moves_front and call.lent.is_owner:
            _send_front(front, call)
        out_ShE = q_hSD.new_empty(q_hSD.shape[1], q_hSD.shape[0], v_gSE.shape[2])
        lses = []
        for piece in call.lent.pieces:
            start = slice_.start + piece.start
            own = split_kv(kv_gTW[:, piece.start : piece.stop], head_dim)
            rows = (q_hSD[:, piece.tokens], *own, (*front, KeyRun(slice_.start, kv_gTW[:, : piece.start])))
            rule = call.rule.of_rows(piece.tokens, slice_.document, start)
            out_hPE, lse_hP = rows_forward(*rows, rule, start, sinks_h)
            out_ShE[piece.tokens] = out_hPE.transpose(0, 1)
            lses.append(lse_hP)
        ctx.save_for_backward(q_hSD, out_ShE, torch.cat(lses, dim=1), sinks_h)
        ctx.call = call
        return out_ShE

    @staticmethod
    def backward(ctx: Any, gradient_ShE: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_hSD, out_ShE, lse_hS, sinks_h = ctx.saved_tensors
        call: LentAttention = ctx.call
        lent, slice_, head_dim = call.lent, call.lent.slice_, q_hSD.shape[2]
        front, kv_gTW = call.kv_book.read(call.layer, slice_)
        front_sum_gUW, own_sum_gTW = call.kv_book.gradients(call.layer, slice_)
        dq_hSD = torch.empty_like(q_hSD)
        for piece in lent.pieces:
            rows = piece.tokens
            gradient_hPE, out_hPE = gradient_ShE[rows].transpose(0, 1), out_ShE[rows].transpose(0, 1)
            start, num_rows = slice_.start + piece.start, piece.num_tokens
            own, own_sum = (split_kv(x[:, piece.start : piece.stop], head_dim) for x in (kv_gTW, own_sum_gTW))
            before = KeyRun(slice_.start, kv_gTW[:, : piece.start])
            key_pieces = [
                KeyPiece(own, call.rule.pattern.own_tiles(start, num_rows), own_sum, start),
                front_piece(before, call.rule.pattern, start, num_rows, head_dim, own_sum_gTW[:, : piece.start]),
                *front_pieces(front, front_sum_gUW, slice_.start, call.rule.pattern, start, num_rows, head_dim),
            ]
            lse_hP, rule = lse_hS[:, rows], call.rule.of_rows(rows, slice_.document, start)
            dq_hSD[:, rows] = rows_backward(gradient_hPE, q_hSD[:, rows], out_hPE, lse_hP, key_pieces, rule)
        dsinks_h = None
        if sinks_h is not None:
            dsinks_h = sinks_backward(gradient_ShE.transpose(0, 1), out_ShE.transpose(0, 1), lse_hS, sinks_h)
        dk_gSD, dv_gSE = split_kv(_own_tokens(own_sum_gTW, lent).to(q_hSD.dtype), head_dim)
        if lent.moves_front:
            _return_front(front_sum_gUW, lent)
        call.kv_book.backward_done(call.layer, slice_)
        return dq_hSD, dk_gSD, dv_gSE, dsinks_h, None


def _whole_slice(own_gSW: Tensor, lent: LentSlice) -> Tensor:
    """Gathers keys and values of all tokens of the slice, [g, T, W], from the ranks that hold the tokens."""
    num_kv, num_own, width = own_gSW.shape
    token_values = num_kv * width
    counts = lent.block_tokens
    receive_sizes = [token_values * count for count in counts]
    received = own_gSW.new_empty(sum(receive_sizes))
    send_sizes = [token_values * num_own] * len(counts)
    dist.all_to_all_single(received, own_gSW.reshape(-1).repeat(len(counts)), receive_sizes, send_sizes, group=lent.process_group)
    whole_gTW = own_gSW.new_empty(num_kv, sum(counts), width)
    for block, count, flat in zip(lent.blocks, counts, received.split(receive_sizes), strict=True):
        block_gSW = flat.view(num_kv, count, width)
        for piece in block:
            whole_gTW[:, piece.start : piece.stop] = block_gSW[:, piece.tokens]
    return whole_gTW


def _own_tokens(whole_gTW: Tensor, lent: LentSlice) -> Tensor:
    """Sums gradients of this rank's tokens over all ranks, [g, S, W]: the backward of `_whole_slice`."""
    num_kv, _, width = whole_gTW.shape
    token_values = num_kv * width
    counts = lent.block_tokens
    blocks = [torch.cat([whole_gTW[:, piece.start : piece.stop] for piece in block], dim=1).reshape(-1) for block in lent.blocks]
    num_own = counts[lent.index]
    receive_sizes = [token_values * num_own] * len(counts)
    received = whole_gTW.new_empty(sum(receive_sizes))
    send_sizes = [token_values * count for count in counts]
    dist.all_to_all_single(received, torch.cat(blocks), receive_sizes, send_sizes, group=lent.process_group)
    return received.view(len(counts), num_kv, num_own, width).sum(0)


def _send_front(front: tuple[KeyRun, ...], call: LentAttention) -> None:
    """Sends the keys and values of the front that the slice sees, if any; their number follows from the plan."""
    if front:
        front_gUW = torch.cat([run.kv_GUW for run in front], dim=1)
        dist.broadcast(front_gUW, group=call.lent.process_group, group_src=call.lent.owner)


def _receive_front(kv_gTW: Tensor, head_dim: int, call: LentAttention) -> None:
    """Receives the front from the owner and writes it into this rank's K/V book."""
    slice_ = call.lent.slice_
    num_seen = slice_.start - call.rule.pattern.first_seen(slice_.start)
    front_gUW = kv_gTW.new_empty(kv_gTW.shape[0], num_seen, kv_gTW.shape[2])
    if num_seen:
        dist.broadcast(front_gUW, group=call.lent.process_group, group_src=call.lent.owner)
    if slice_.start:
        earlier = replace(slice_, start=0, stop=slice_.start)
        call.kv_book.write(call.layer, earlier, *split_kv(front_gUW, head_dim), pattern=call.rule.pattern, keeps_own=False)


def _return_front(front_sum_gUW: Tensor, lent: LentSlice) -> None:
    """Adds the other ranks' gradients of the front to the owner's."""
    if not front_sum_gUW.shape[1]:
        return
    total_gUW = front_sum_gUW.contiguous()
    dist.reduce(total_gUW, group=lent.process_group, group_dst=lent.owner)
    if lent.is_owner:
        front_sum_gUW.copy_(total_gUW)
