"""Attention of one chunk's documents as one autograd node, whether they are whole sequences or slices, recorded or not.

A document that is a slice finds the keys and values of earlier slices, its front, in the K/V book. Its queries see the front
wholly and the slice itself causally: two tiles, merged by their log-sum-exp (LSE); backward of both uses the merged output
and LSE. No copy of the front is made. A whole document is one causal tile. Other patterns are other tiles of the same keys,
and of a front that the book holds in a run per slice.

With an `AttentionRecord` attention runs forward once under checkpointing: the first run leaves output and LSE there, the
replay takes them back. The replay recomputes queries, keys and values, which backward needs anyway, and rebuilds the node on
them. Of an output that is kept in part the *front rows* are dropped: they are the cheapest to recompute, and in every
document their own keys are its first ones, so that they need no more than causal squares beside the fronts.

The node saves queries, output, LSE, and keys and values of whole documents; those of slices are read from the book, so that
they are kept once. It saves the same recording and replaying: checkpointing compares number, shapes and dtypes.

Shapes: h query heads and g KV heads of this rank, S tokens of its block, T tokens of one document, U of its front, D head size of
queries and keys, E of values, W = D + E.

Source of slices: Seq1F1B (arXiv 2406.03488), whose prefix is a list of slices, concatenated for every call.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_longctx.runtime.activations.attention_record import AttentionRecord
from hf_longctx.runtime.attention.heads import KVReaders, split_kv
from hf_longctx.runtime.attention.kv_book import KeyRun, KVBook, Slice
from hf_longctx.runtime.attention.rows import KeyPiece, front_pieces, rows_backward, rows_forward, sinks_backward
from hf_longctx.runtime.tiles.patterns import CAUSAL, AttentionPattern
from hf_longctx.runtime.tiles.plain import Scores, TileInputs
from hf_longctx.runtime.tiles.tile import tile_backward


@dataclass(frozen=True, slots=True)
class Document:
    """Tokens [start, stop) of a chunk's row: the slice `part` of a sequence, or without one a whole sequence."""

    start: int
    stop: int
    part: Slice | None = None

    @property
    def tokens(self) -> slice:
        return slice(self.start, self.stop)


def documents_of(cu_seqlens: tuple[int, ...], slices: tuple[Slice, ...]) -> tuple[Document, ...]:
    """The documents of a packed row with these boundaries, of which `slices` are some."""
    parts = {part.document: part for part in slices}
    bounds = enumerate(itertools.pairwise(cu_seqlens))
    return tuple(Document(start, stop, parts.get(index)) for index, (start, stop) in bounds)


@dataclass(frozen=True, slots=True)
class ChunkAttention:
    """How one layer attends within one chunk. layer: the same object in every chunk; record: None outside replayed layers."""

    readers: KVReaders
    scores: Scores
    documents: tuple[Document, ...]
    record: AttentionRecord | None
    book: KVBook
    layer: Hashable
    pattern: AttentionPattern = CAUSAL

    def __call__(self, q_hSD: Tensor, k_gSD: Tensor, v_gSE: Tensor, sinks_h: Tensor | None = None) -> Tensor:
        """Attention inside each document, shape [S, h, E], differentiable. sinks: of one more key's scores, in fp32 or fp64."""
        output: Tensor = _ChunkAttention.apply(q_hSD, k_gSD, v_gSE, sinks_h, self)
        return output


class _ChunkAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_hSD: Tensor, k_gSD: Tensor, v_gSE: Tensor, sinks_h: Tensor | None, how: ChunkAttention) -> Tensor:
        kept = None if how.record is None else how.record.take()
        num_rows = q_hSD.shape[1] if kept is None else kept.start
        outs, lses = [], []
        for document in how.documents:
            k, v = k_gSD[:, document.tokens], v_gSE[:, document.tokens]
            # a replay writes what is there: later slices that ran since have not changed it
            front = () if document.part is None else _front(document.part, k, v, how, any(ctx.needs_input_grad))
            rows = slice(document.start, min(document.stop, num_rows))
            if rows.start < rows.stop:
                start = 0 if document.part is None else document.part.start
                settings = (how.readers, how.scores, how.pattern, start, sinks_h)
                out_hTE, lse_hT = rows_forward(q_hSD[:, rows], k, v, front, *settings)
                outs.append(out_hTE.transpose(0, 1))
                lses.append(lse_hT)
        if kept is not None:
            outs, lses = [*outs, kept.out_ShE], [*lses, kept.lse_hS]
        out_ShE, lse_hS = _joined(outs, 0), _joined(lses, 1)
        if kept is None and how.record is not None:
            how.record.put(out_ShE, lse_hS)
        ctx.save_for_backward(q_hSD, out_ShE, lse_hS, sinks_h, *_whole_documents(k_gSD, v_gSE, how.documents))
        ctx.how = how
        return out_ShE

    @staticmethod
    def backward(ctx: Any, gradient_ShE: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_hSD, out_ShE, lse_hS, sinks_h, *whole_kv = ctx.saved_tensors
        how: ChunkAttention = ctx.how
        of_sinks = None
        if sinks_h is not None:
            of_sinks = sinks_backward(gradient_ShE.transpose(0, 1), out_ShE.transpose(0, 1), lse_hS, sinks_h)
        # unfilled, and not made for a lone document, whose gradients are all there is
        num_made = q_hSD.shape[1] if len(how.documents) > 1 else 0
        num_kv, head_dim, value_dim = how.readers.num_kv, q_hSD.shape[2], out_ShE.shape[2]
        shapes = ((q_hSD.shape[0], head_dim), (num_kv, head_dim), (num_kv, value_dim))
        dq_hSD, dk_gSD, dv_gSE = (q_hSD.new_empty(heads, num_made, size) for heads, size in shapes)
        num_whole = 0
        for document in how.documents:
            tokens = document.tokens
            gradient_hTE, out_hTE = gradient_ShE[tokens].transpose(0, 1), out_ShE[tokens].transpose(0, 1)
            q_hTD, lse_hT = q_hSD[:, tokens], lse_hS[:, tokens]
            if document.part is not None:
                found = _slice_backward(gradient_hTE, q_hTD, out_hTE, lse_hT, document.part, how)
            else:
                places = slice(num_whole, num_whole + document.stop - document.start)
                k, v = (x[:, places] for x in whole_kv)
                found = _document_backward(gradient_hTE, q_hTD, out_hTE, lse_hT, k, v, how)
                num_whole = places.stop
            if len(how.documents) == 1:
                dq, dk, dv = (x.to(q_hSD.dtype) for x in found)
                return dq, dk, dv, of_sinks, None
            for gradients, part in zip((dq_hSD, dk_gSD, dv_gSE), found, strict=True):
                gradients[:, tokens] = part
        return dq_hSD, dk_gSD, dv_gSE, of_sinks, None


def _front(part: Slice, k_gTD: Tensor, v_gTE: Tensor, how: ChunkAttention, has_gradient: bool) -> tuple[KeyRun, ...]:
    """What a slice sees in front of it; its own keys and values go into the book."""
    keeps_own = has_gradient and (how.record is None or how.record.is_replay)
    return how.book.write(how.layer, part, k_gTD, v_gTE, pattern=how.pattern, keeps_own=keeps_own)


def _document_backward(
    gradient_hTE: Tensor, q_hTD: Tensor, out_hTE: Tensor, lse_hT: Tensor, k_gTD: Tensor, v_gTE: Tensor, how: ChunkAttention
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a whole document's queries, keys and values."""
    tiles = how.pattern.own_tiles(0, q_hTD.shape[1])
    if len(tiles) == 1 and tiles[0].num_blocks == 1:
        k, v = map(how.readers.gather, (k_gTD, v_gTE))
        dq, dk, dv = tile_backward(gradient_hTE, TileInputs(q_hTD, k, v, how.scores, causal=True), out_hTE, lse_hT)
        return dq, how.readers.fold(dk), how.readers.fold(dv)
    dk_gTD, dv_gTE = (torch.zeros(x.shape, dtype=lse_hT.dtype, device=x.device) for x in (k_gTD, v_gTE))
    own = KeyPiece((k_gTD, v_gTE), tiles, (dk_gTD, dv_gTE))
    dq_hTD = rows_backward(gradient_hTE, q_hTD, out_hTE, lse_hT, (own,), how.readers, how.scores)
    return dq_hTD, dk_gTD, dv_gTE


def _slice_backward(
    gradient_hTE: Tensor, q_hTD: Tensor, out_hTE: Tensor, lse_hT: Tensor, part: Slice, how: ChunkAttention
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a slice's queries, and of its keys and values with what later slices left for them.

    Adds to the gradients of its front.
    """
    (front, own_gTW), num_tokens, head_dim = how.book.read(how.layer, part), part.stop - part.start, q_hTD.shape[2]
    front_sum_gUW, own_sum_gTW = how.book.gradients(how.layer, part)
    own_sum = split_kv(own_sum_gTW, head_dim)
    pieces = [
        KeyPiece(split_kv(own_gTW, head_dim), how.pattern.own_tiles(part.start, num_tokens), own_sum),
        *front_pieces(front, front_sum_gUW, part.start, how.pattern, part.start, num_tokens, head_dim),
    ]
    dq_hTD = rows_backward(gradient_hTE, q_hTD, out_hTE, lse_hT, pieces, how.readers, how.scores)
    how.book.backward_done(how.layer, part)
    dk_gTD, dv_gTE = own_sum
    return dq_hTD, dk_gTD, dv_gTE


def _whole_documents(k_gSD: Tensor, v_gSE: Tensor, documents: tuple[Document, ...]) -> tuple[Tensor, ...]:
    """Keys and values of the documents that are not slices, behind each other; nothing if there are none."""
    whole = [document.tokens for document in documents if document.part is None]
    if len(whole) == len(documents):
        return k_gSD, v_gSE
    # copies, since views would hold those of the slices too
    return tuple(torch.cat([x[:, tokens] for tokens in whole], dim=1) for x in (k_gSD, v_gSE)) if whole else ()


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
