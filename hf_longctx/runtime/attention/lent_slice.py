"""Attention of a slice whose tokens the ranks of several pipeline stages share (SPPO's multiplexed sequence partitioning).

Every rank computes queries, keys and values of its own tokens. One exchange gives all of them the keys and values of the whole
slice, which each writes into its own K/V book, as if it had run the slice alone; its queries then see the front and the slice
up to themselves. Ranks that have not seen the front (the lent ones of a sequence's last slices, at the first of these) are
sent it by the slice's own stage.

In backward every rank adds what its queries leave to the gradients in its own book. Those of the slice's own keys and values
are summed over the ranks, each getting its tokens'; those of a front that was sent go back to the stage that sent it.
(Exchanges are ours; the paper gives none.)

Shapes: h query heads and g KV heads of this rank, S tokens of its block, T tokens of the slice, U of its front, N = U + T, D head
size of queries and keys, E of values, W = D + E.

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
from hf_longctx.runtime.attention.heads import KVReaders, join_kv, split_kv
from hf_longctx.runtime.attention.kv_book import KeyRun, KVBook, Slice
from hf_longctx.runtime.attention.rows import KeyPiece, front_piece, front_pieces, rows_backward, rows_forward, sinks_backward
from hf_longctx.runtime.tiles.patterns import CAUSAL, AttentionPattern
from hf_longctx.runtime.tiles.plain import Scores


@dataclass(frozen=True, slots=True)
class SharedSlice:
    """A slice and the ranks that share it, one of every sharing stage at equal positions, as `process_group` has them in order.

    index: this rank's place in the group. owner: that of the slice's own stage. blocks: what every stage holds of the slice,
    `start` from the slice's start, `first` in its block. part: the slice in this rank's book, for which the sequence ends with
    the last slice that it runs. moves_front: whether the owner alone has the front.
    """

    process_group: dist.ProcessGroup
    index: int
    owner: int
    blocks: tuple[tuple[Piece, ...], ...]
    part: Slice
    moves_front: bool

    @property
    def is_owner(self) -> bool:
        return self.index == self.owner

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What this rank's stage holds."""
        return self.blocks[self.index]

    @property
    def block_tokens(self) -> tuple[int, ...]:
        return tuple(sum(piece.num_tokens for piece in block) for block in self.blocks)


@dataclass(frozen=True, slots=True)
class SharedAttention:
    """How one layer attends within a shared slice. layer: the same object in every chunk."""

    readers: KVReaders
    scores: Scores
    shared: SharedSlice
    book: KVBook
    layer: Hashable
    pattern: AttentionPattern = CAUSAL

    def __call__(self, q_hSD: Tensor, k_gSD: Tensor, v_gSE: Tensor, sinks_h: Tensor | None = None) -> Tensor:
        """Attention of this rank's tokens, shape [S, h, E], differentiable.

        Every sharing rank must call it in the same order of layers, and run backward in the reverse one.
        """
        output: Tensor = _SharedAttention.apply(q_hSD, k_gSD, v_gSE, sinks_h, self)
        return output


class _SharedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_hSD: Tensor, k_gSD: Tensor, v_gSE: Tensor, sinks_h: Tensor | None, how: SharedAttention) -> Tensor:
        part, head_dim = how.shared.part, q_hSD.shape[2]
        kv_gTW = _whole_slice(join_kv(k_gSD, v_gSE), how.shared)
        if how.shared.moves_front and not how.shared.is_owner:
            _receive_front(kv_gTW, head_dim, how)
        front = how.book.write(how.layer, part, *split_kv(kv_gTW, head_dim), pattern=how.pattern)
        if how.shared.moves_front and how.shared.is_owner:
            _send_front(front, how)
        out_ShE = q_hSD.new_empty(q_hSD.shape[1], q_hSD.shape[0], v_gSE.shape[2])
        lses = []
        for piece in how.shared.pieces:
            start = part.start + piece.start
            own = split_kv(kv_gTW[:, piece.start : piece.stop], head_dim)
            rows = (q_hSD[:, piece.tokens], *own, (*front, KeyRun(part.start, kv_gTW[:, : piece.start])))
            out_hPE, lse_hP = rows_forward(*rows, how.readers, how.scores, how.pattern, start, sinks_h)
            out_ShE[piece.tokens] = out_hPE.transpose(0, 1)
            lses.append(lse_hP)
        ctx.save_for_backward(q_hSD, out_ShE, torch.cat(lses, dim=1), sinks_h)
        ctx.how = how
        return out_ShE

    @staticmethod
    def backward(ctx: Any, gradient_ShE: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_hSD, out_ShE, lse_hS, sinks_h = ctx.saved_tensors
        how: SharedAttention = ctx.how
        shared, part, head_dim = how.shared, how.shared.part, q_hSD.shape[2]
        front, kv_gTW = how.book.read(how.layer, part)
        front_sum_gUW, own_sum_gTW = how.book.gradients(how.layer, part)
        dq_hSD = torch.empty_like(q_hSD)
        for piece in shared.pieces:
            rows = piece.tokens
            gradient_hPE, out_hPE = gradient_ShE[rows].transpose(0, 1), out_ShE[rows].transpose(0, 1)
            start, num_rows = part.start + piece.start, piece.num_tokens
            own, own_sum = (split_kv(x[:, piece.start : piece.stop], head_dim) for x in (kv_gTW, own_sum_gTW))
            before = KeyRun(part.start, kv_gTW[:, : piece.start])
            key_pieces = [
                KeyPiece(own, how.pattern.own_tiles(start, num_rows), own_sum),
                front_piece(before, how.pattern, start, num_rows, head_dim, own_sum_gTW[:, : piece.start]),
                *front_pieces(front, front_sum_gUW, part.start, how.pattern, start, num_rows, head_dim),
            ]
            lse_hP = lse_hS[:, rows]
            dq_hPD = rows_backward(gradient_hPE, q_hSD[:, rows], out_hPE, lse_hP, key_pieces, how.readers, how.scores)
            dq_hSD[:, rows] = dq_hPD
        of_sinks = None
        if sinks_h is not None:
            of_sinks = sinks_backward(gradient_ShE.transpose(0, 1), out_ShE.transpose(0, 1), lse_hS, sinks_h)
        dk_gSD, dv_gSE = split_kv(_own_tokens(own_sum_gTW, shared).to(q_hSD.dtype), head_dim)
        if shared.moves_front:
            _return_front(front_sum_gUW, shared)
        how.book.backward_done(how.layer, part)
        return dq_hSD, dk_gSD, dv_gSE, of_sinks, None


def _whole_slice(own_gSW: Tensor, shared: SharedSlice) -> Tensor:
    """Keys and values of all tokens of the slice, [g, T, W], from those of every rank's own."""
    num_kv, num_own, width = own_gSW.shape
    token_values = num_kv * width
    counts = shared.block_tokens
    receive_sizes = [token_values * count for count in counts]
    received = own_gSW.new_empty(sum(receive_sizes))
    send_sizes = [token_values * num_own] * len(counts)
    dist.all_to_all_single(
        received, own_gSW.reshape(-1).repeat(len(counts)), receive_sizes, send_sizes, group=shared.process_group
    )
    whole_gTW = own_gSW.new_empty(num_kv, sum(counts), width)
    for block, count, flat in zip(shared.blocks, counts, received.split(receive_sizes), strict=True):
        block_gSW = flat.view(num_kv, count, width)
        for piece in block:
            whole_gTW[:, piece.start : piece.stop] = block_gSW[:, piece.tokens]
    return whole_gTW


def _own_tokens(whole_gTW: Tensor, shared: SharedSlice) -> Tensor:
    """The sum over the ranks of what they have for this rank's tokens, [g, S, W]: `_whole_slice` backward."""
    num_kv, _, width = whole_gTW.shape
    token_values = num_kv * width
    counts = shared.block_tokens
    blocks = [
        torch.cat([whole_gTW[:, piece.start : piece.stop] for piece in block], dim=1).reshape(-1) for block in shared.blocks
    ]
    num_own = counts[shared.index]
    receive_sizes = [token_values * num_own] * len(counts)
    received = whole_gTW.new_empty(sum(receive_sizes))
    send_sizes = [token_values * count for count in counts]
    dist.all_to_all_single(received, torch.cat(blocks), receive_sizes, send_sizes, group=shared.process_group)
    return received.view(len(counts), num_kv, num_own, width).sum(0)


def _send_front(front: tuple[KeyRun, ...], how: SharedAttention) -> None:
    """Of the front what the slice sees, which all of its ranks know from the pattern; none where that is nothing."""
    if front:
        front_gUW = torch.cat([run.kv_GUW for run in front], dim=1)
        dist.broadcast(front_gUW, group=how.shared.process_group, group_src=how.shared.owner)


def _receive_front(kv_gTW: Tensor, head_dim: int, how: SharedAttention) -> None:
    """Writes into the book what the owner sends."""
    part = how.shared.part
    num_seen = part.start - how.pattern.first_seen(part.start)
    front_gUW = kv_gTW.new_empty(kv_gTW.shape[0], num_seen, kv_gTW.shape[2])
    if num_seen:
        dist.broadcast(front_gUW, group=how.shared.process_group, group_src=how.shared.owner)
    if part.start:
        earlier = replace(part, start=0, stop=part.start)
        how.book.write(how.layer, earlier, *split_kv(front_gUW, head_dim), pattern=how.pattern, keeps_own=False)


def _return_front(front_sum_gUW: Tensor, shared: SharedSlice) -> None:
    """Adds to the owner's gradients of the front those of all other ranks."""
    if not front_sum_gUW.shape[1]:
        return
    total_gUW = front_sum_gUW.contiguous()
    dist.reduce(total_gUW, group=shared.process_group, group_dst=shared.owner)
    if shared.is_owner:
        front_sum_gUW.copy_(total_gUW)
