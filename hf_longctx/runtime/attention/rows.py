"""Attention of some rows of one document, and its gradients: the tiles of a pattern, merged by their log-sum-exp (LSE).

Backward of every tile uses the merged output and LSE. Keys and values come in pieces (a document's own, its front), of which
copies are made only of what a tile of several blocks, or in reverse order, reads.

Shapes: h query heads and g KV heads of this rank, T rows, U keys of a piece, D head size of queries and keys,
E of values, W = D + E; a tile of n blocks has N rows in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_longctx.kernels.merge_attention import accumulate_attention_
from hf_longctx.runtime.attention.heads import KVReaders, split_kv
from hf_longctx.runtime.attention.kv_book import KeyRun
from hf_longctx.runtime.tiles.patterns import CAUSAL, AttentionPattern, PatternTile
from hf_longctx.runtime.tiles.plain import Scores, TileInputs
from hf_longctx.runtime.tiles.tile import tile_backward, tile_forward


@dataclass(frozen=True, slots=True)
class KeyPiece:
    """Keys [g, U, D] and values [g, U, E], and the tiles in which rows see them. sums: where their gradients are added."""

    kv: Sequence[Tensor]
    tiles: tuple[PatternTile, ...]
    sums: Sequence[Tensor] = ()


def rows_forward(
    q_hTD: Tensor,
    k_gTD: Tensor,
    v_gTE: Tensor,
    front: Sequence[KeyRun],
    readers: KVReaders,
    scores: Scores,
    pattern: AttentionPattern = CAUSAL,
    start: int = 0,
    sinks_h: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [h, T, E] and LSE [h, T] of the first rows of a document, whose keys and values may be more.

    front: keys and values before them. start: where in its document the first row is. sinks: see `with_sinks`.
    """
    num_rows = q_hTD.shape[1]
    pieces = [KeyPiece((k_gTD, v_gTE), pattern.own_tiles(start, num_rows))]
    pieces += [front_piece(run, pattern, start, num_rows, q_hTD.shape[2]) for run in front]
    (own, first), *rest = [(piece, tile) for piece in pieces for tile in piece.tiles]
    if first.num_rows == num_rows:
        out_hTE, lse_hT = _forward(q_hTD, own, first, readers, scores)
        if not rest and sinks_h is None:
            return out_hTE, lse_hT
        out_hTE = out_hTE.to(lse_hT.dtype)
    else:
        out_hTE, lse_hT = no_keys_yet(q_hTD, v_gTE.shape[2])
        rest = [(own, first), *rest]
    for piece, tile in rest:
        merge_tile(out_hTE, lse_hT, q_hTD, piece, tile, readers, scores)
    if sinks_h is not None:
        out_hTE, lse_hT = with_sinks(out_hTE, lse_hT, sinks_h)
    return out_hTE.to(q_hTD.dtype), lse_hT


def front_piece(
    run: KeyRun, pattern: AttentionPattern, start: int, num_rows: int, head_dim: int, sums_gUW: Tensor | None = None
) -> KeyPiece:
    """What so many rows from position `start` on see of a run in front of them. sums: for the gradients of the run."""
    tiles = pattern.front_tiles(start, num_rows, run.first, run.kv_GUW.shape[1])
    return KeyPiece(split_kv(run.kv_GUW, head_dim), tiles, () if sums_gUW is None else split_kv(sums_gUW, head_dim))


def front_pieces(
    front: Sequence[KeyRun], sums_gUW: Tensor, end: int, pattern: AttentionPattern, start: int, num_rows: int, head_dim: int
) -> list[KeyPiece]:
    """`front_piece` of every run, whose gradients have a place in `sums_gUW`, of the tokens before position `end`."""
    first = end - sums_gUW.shape[1]
    return [
        front_piece(run, pattern, start, num_rows, head_dim, sums_gUW[:, run.first - first : run.stop - first]) for run in front
    ]


def with_sinks(out_hTE: Tensor, lse_hT: Tensor, sinks_h: Tensor) -> tuple[Tensor, Tensor]:
    """Output and LSE as if every row of a head saw one more key, of this score and of no value.

    The gradients of tiles that use this output and LSE are right as they are.
    """
    total_hT = torch.logaddexp(lse_hT, sinks_h.unsqueeze(1))
    return out_hTE * (lse_hT - total_hT).exp().unsqueeze(2), total_hT


def sinks_backward(gradient_hTE: Tensor, out_hTE: Tensor, lse_hT: Tensor, sinks_h: Tensor) -> Tensor:
    """Gradient of the sinks, [h], from the output and LSE that `with_sinks` made."""
    weights_hT = (sinks_h.unsqueeze(1) - lse_hT).exp()
    return -(weights_hT * (gradient_hTE.to(lse_hT.dtype) * out_hTE).sum(2)).sum(1)


def no_keys_yet(q_hTD: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    """Output [h, T, E] and LSE [h, T] of rows that have seen no key, in at least fp32, to merge tiles into."""
    wide = torch.promote_types(q_hTD.dtype, torch.float32)
    # unfilled: where the LSE is -inf the merge does not look at it
    return q_hTD.new_empty((*q_hTD.shape[:2], value_dim), dtype=wide), q_hTD.new_full(q_hTD.shape[:2], float("-inf"), dtype=wide)


def merge_tile(
    out_hTE: Tensor, lse_hT: Tensor, q_hTD: Tensor, piece: KeyPiece, tile: PatternTile, readers: KVReaders, scores: Scores
) -> None:
    """Merges what the rows see in a tile of a piece into their output and LSE, in place."""
    found = _forward(q_hTD, piece, tile, readers, scores)
    places = [_places(x, tile.rows, tile) for x in (out_hTE, lse_hT)]
    # the places themselves of one block or of a lone head, else copies
    merged = [_as_heads(x, tile) for x in places]
    accumulate_attention_(*merged, *found)
    for place, x in zip(places, merged, strict=True):
        if x.data_ptr() != place.data_ptr():
            place.copy_(_as_blocks(x, tile))


def rows_backward(
    gradient_hTE: Tensor,
    q_hTD: Tensor,
    out_hTE: Tensor,
    lse_hT: Tensor,
    pieces: Sequence[KeyPiece],
    readers: KVReaders,
    scores: Scores,
) -> Tensor:
    """Gradient of the rows' queries, [h, T, D], in at least fp32; those of keys and values are added to the pieces' sums."""
    dq_hTD: Tensor | None = None
    for piece, tile in [(keys, tile) for keys in pieces for tile in keys.tiles]:
        dq, dk, dv = _backward(gradient_hTE, q_hTD, out_hTE, lse_hT, piece, tile, readers, scores)
        if dq_hTD is None and tile.num_rows == q_hTD.shape[1]:
            dq_hTD = dq.to(lse_hT.dtype)
        else:
            dq_hTD = torch.zeros_like(q_hTD, dtype=lse_hT.dtype) if dq_hTD is None else dq_hTD
            _places(dq_hTD, tile.rows, tile).add_(_as_blocks(dq, tile))
        for total, part in zip(piece.sums, (dk, dv), strict=True):
            readers.fold_into(_places(total, tile.keys, tile), _as_blocks(part, tile))
    assert dq_hTD is not None
    return dq_hTD


def _forward(q_hTD: Tensor, piece: KeyPiece, tile: PatternTile, readers: KVReaders, scores: Scores) -> tuple[Tensor, Tensor]:
    """Output and LSE of a tile."""
    q, (k, v) = _read(q_hTD, tile.rows, tile), _read_keys(piece, tile, readers)
    out, lse = tile_forward(TileInputs(q, k, v, scores, causal=tile.mask != "full"))
    return _turned(out, tile), _turned(lse, tile)


def _backward(
    gradient_hTE: Tensor,
    q_hTD: Tensor,
    out_hTE: Tensor,
    lse_hT: Tensor,
    piece: KeyPiece,
    tile: PatternTile,
    readers: KVReaders,
    scores: Scores,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a tile's queries, keys and values."""
    gradient, q, out, lse = (_read(x, tile.rows, tile) for x in (gradient_hTE, q_hTD, out_hTE, lse_hT))
    k, v = _read_keys(piece, tile, readers)
    dq, dk, dv = tile_backward(gradient, TileInputs(q, k, v, scores, causal=tile.mask != "full"), out, lse)
    return _turned(dq, tile), _turned(dk, tile), _turned(dv, tile)


def _read(x_HTX: Tensor, part: slice, tile: PatternTile) -> Tensor:
    return _turned(_as_heads(_places(x_HTX, part, tile), tile), tile)


def _read_keys(piece: KeyPiece, tile: PatternTile, readers: KVReaders) -> tuple[Tensor, Tensor]:
    k, v = (_turned(_as_heads(readers.gather(_places(x, tile.keys, tile)), tile), tile) for x in piece.kv)
    return k, v


def _places(x_HTX: Tensor, part: slice, tile: PatternTile) -> Tensor:
    """The queries or keys of a tile, as views: [H, N, ...], of several blocks [H, n, N, ...]."""
    if tile.num_blocks == 1:
        return x_HTX[:, part]
    # the last block may end before its stride does
    blocks = x_HTX[:, part.start :].unfold(1, part.stop - part.start, tile.stride)[:, : tile.num_blocks]
    return blocks if x_HTX.dim() == 2 else blocks.movedim(-1, 2)


def _as_heads(x: Tensor, tile: PatternTile) -> Tensor:
    """[H, n, N, ...] as [n * H, N, ...], so that neighbouring query heads still read one KV head; one block as it is."""
    return x if tile.num_blocks == 1 else x.transpose(0, 1).flatten(0, 1)


def _as_blocks(x: Tensor, tile: PatternTile) -> Tensor:
    """The inverse of `_as_heads`."""
    return x if tile.num_blocks == 1 else x.unflatten(0, (tile.num_blocks, -1)).transpose(0, 1)


def _turned(x: Tensor, tile: PatternTile) -> Tensor:
    """In the order in which a tile's mask is causal, or back."""
    return x.flip(1) if tile.mask == "reversed" else x
