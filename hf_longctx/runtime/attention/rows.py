"""Attention of query rows of one document, and its gradients: tiles of a pattern, merged by their log-sum-exp (LSE).

`chunk`, `ring` and `execution.lending` call it. The backward of every tile uses the merged output and LSE. Keys and values come
in pieces: those of the rows' own tokens, and those of their front, the earlier tokens. A piece is copied only if a tile has
several blocks or is in reverse order.

Shapes: h query heads and g KV heads of this rank, T rows, U keys of a piece, D head size of queries and keys,
E of values, W = D + E; a tile of n blocks has N rows in each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_longctx.kernels.merge_attention import accumulate_attention_
from hf_longctx.runtime.attention.heads import KVReaders, split_kv
from hf_longctx.runtime.attention.kv_book import KeyRun
from hf_longctx.runtime.tiles.packs import PackBounds
from hf_longctx.runtime.tiles.patterns import CAUSAL, AttentionPattern, PatternTile
from hf_longctx.runtime.tiles.plain import Scores, TileInputs, WeightDropout
from hf_longctx.runtime.tiles.stacks import StackChecks
from hf_longctx.runtime.tiles.tile import plan_keys, tile_backward, tile_forward


@dataclass(frozen=True, slots=True)
class KeyPiece:
    """Keys [g, U, D] and values [g, U, E], and the tiles in which rows see them.

    sums: buffers to which gradients are added. first: position of the first key in its document.
    """

    kv: Sequence[Tensor]
    tiles: tuple[PatternTile, ...]
    sums: Sequence[Tensor] = ()
    first: int = 0


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """Rule of one layer's attention on this rank: KV head of each query head, scores, visible keys."""

    readers: KVReaders
    scores: Scores
    pattern: AttentionPattern = CAUSAL
    # positions, in each row's document, of the keys that an index has chosen for it; -1 for no key. None: all keys that the
    # pattern shows. Requires a causal pattern. At first for this rank's own tokens; `gather`, a collective over the block,
    # returns those for all tokens of the block
    chosen_TK: Tensor | None = None
    gather: Callable[[Tensor], Tensor] | None = None
    # document boundaries of the chunk, if the device has an operator that takes several documents and obeys the rule
    bounds: PackBounds | None = None
    # the device's verdicts on long documents of one length in one call; None: they have a call each
    stacks: StackChecks | None = None
    # dropout of attention weights, if any
    dropout: WeightDropout | None = None
    # for each document of the chunk its ranges of tokens that see each other both ways; (): none in any document
    blocks: tuple[tuple[tuple[int, int], ...], ...] = ()

    @property
    def needs_positions(self) -> bool:
        """Whether the positions of rows and keys matter beyond the pattern."""
        return self.chosen_TK is not None or self.dropout is not None or bool(self.blocks)

    def choosing(self, chosen_TK: Tensor | None) -> AttentionRule:
        """Returns the rule for all tokens of the block, given the keys chosen for this rank's tokens."""
        return replace(self, chosen_TK=None if chosen_TK is None or self.gather is None else self.gather(chosen_TK))

    def of_rows(self, rows: slice, document: int, start: int) -> AttentionRule:
        """Returns the rule for a range of rows, which begins at position `start` of the chunk's document with this index."""
        if not self.needs_positions:
            return self
        chosen_TK = None if self.chosen_TK is None else self.chosen_TK[rows]
        dropout = None if self.dropout is None else self.dropout.of_rows(document, start)
        # dummy tokens come after all documents
        blocks = self.blocks[document] if document < len(self.blocks) else ()
        pattern = replace(self.pattern, blocks=blocks) if blocks else self.pattern
        return replace(self, chosen_TK=chosen_TK, dropout=dropout, pattern=pattern)


def rows_forward(
    q_hTD: Tensor,
    k_gTD: Tensor,
    v_gTE: Tensor,
    front: Sequence[KeyRun],
    rule: AttentionRule,
    start: int = 0,
    sinks_h: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns output [h, T, E] and LSE [h, T] of consecutive rows.

    k, v: begin with the rows' own tokens; may have later tokens too. front: earlier keys and values. start: position of the first
    row in its document. sinks_h: see `with_sinks`.
    """
    num_rows = q_hTD.shape[1]
    pieces = [KeyPiece((k_gTD, v_gTE), rule.pattern.own_tiles(start, num_rows), first=start)]
    pieces += [front_piece(run, rule.pattern, start, num_rows, q_hTD.shape[2]) for run in front]
    (own, first), *rest = [(piece, tile) for piece in pieces for tile in piece.tiles]
    if first.num_rows == num_rows:
        out_hTE, lse_hT = _forward(q_hTD, own, first, rule)
        if not rest and sinks_h is None:
            return out_hTE, lse_hT
        out_hTE = out_hTE.to(lse_hT.dtype)
    else:
        out_hTE, lse_hT = no_keys_yet(q_hTD, v_gTE.shape[2])
        rest = [(own, first), *rest]
    for piece, tile in rest:
        merge_tile(out_hTE, lse_hT, q_hTD, piece, tile, rule)
    if sinks_h is not None:
        out_hTE, lse_hT = with_sinks(out_hTE, lse_hT, sinks_h)
    return out_hTE.to(q_hTD.dtype), lse_hT


def front_piece(
    run: KeyRun, pattern: AttentionPattern, start: int, num_rows: int, head_dim: int, sums_gUW: Tensor | None = None
) -> KeyPiece:
    """Returns the tiles of `num_rows` rows from position `start` with an earlier run of keys. sums_gUW: its gradients."""
    tiles = pattern.front_tiles(start, num_rows, run.first, run.kv_GUW.shape[1])
    return KeyPiece(split_kv(run.kv_GUW, head_dim), tiles, () if sums_gUW is None else split_kv(sums_gUW, head_dim), run.first)


def front_pieces(
    front: Sequence[KeyRun], sums_gUW: Tensor, end: int, pattern: AttentionPattern, start: int, num_rows: int, head_dim: int
) -> list[KeyPiece]:
    """Returns the key piece of every run, see `front_piece`. sums_gUW: gradients of the U tokens before position `end`."""
    first = end - sums_gUW.shape[1]
    return [
        front_piece(run, pattern, start, num_rows, head_dim, sums_gUW[:, run.first - first : run.stop - first]) for run in front
    ]


def with_sinks(out_hTE: Tensor, lse_hT: Tensor, sinks_h: Tensor) -> tuple[Tensor, Tensor]:
    """Returns output and LSE as if every row of a head saw one more key with score `sinks_h` and value zero.

    Tiles whose backward uses this output and LSE need no further changes.
    """
    total_hT = torch.logaddexp(lse_hT, sinks_h.unsqueeze(1))
    return out_hTE * (lse_hT - total_hT).exp().unsqueeze(2), total_hT


def sinks_backward(gradient_hTE: Tensor, out_hTE: Tensor, lse_hT: Tensor, sinks_h: Tensor) -> Tensor:
    """Returns the gradient of the sinks, [h], given output and LSE from `with_sinks`."""
    weights_hT = (sinks_h.unsqueeze(1) - lse_hT).exp()
    return -(weights_hT * (gradient_hTE.to(lse_hT.dtype) * out_hTE).sum(2)).sum(1)


def no_keys_yet(q_hTD: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    """Returns output [h, T, E] and LSE [h, T] of rows without keys, in at least fp32, into which tiles are merged."""
    wide = torch.promote_types(q_hTD.dtype, torch.float32)
    # the output stays uninitialised: merging ignores it where the LSE is -inf
    return q_hTD.new_empty((*q_hTD.shape[:2], value_dim), dtype=wide), q_hTD.new_full(q_hTD.shape[:2], float("-inf"), dtype=wide)


def merge_tile(out_hTE: Tensor, lse_hT: Tensor, q_hTD: Tensor, piece: KeyPiece, tile: PatternTile, rule: AttentionRule) -> None:
    """Computes one tile of a piece and merges it into the output and LSE of its rows, in place."""
    for part in _parts(q_hTD, piece, tile, rule):
        _merge_part(out_hTE, lse_hT, q_hTD, piece, part, rule)


def _merge_part(out_hTE: Tensor, lse_hT: Tensor, q_hTD: Tensor, piece: KeyPiece, tile: PatternTile, rule: AttentionRule) -> None:
    found = _forward(q_hTD, piece, tile, rule)
    targets = [_tile_tokens(x, tile.rows, tile) for x in (out_hTE, lse_hT)]
    # for one block or a single head these are views of the targets, otherwise copies
    merged = [_as_heads(x, tile) for x in targets]
    accumulate_attention_(*merged, *found)
    for target, x in zip(targets, merged, strict=True):
        if x.data_ptr() != target.data_ptr():
            target.copy_(_as_blocks(x, tile))


def rows_backward(
    gradient_hTE: Tensor,
    q_hTD: Tensor,
    out_hTE: Tensor,
    lse_hT: Tensor,
    pieces: Sequence[KeyPiece],
    rule: AttentionRule,
) -> Tensor:
    """Returns the gradient of the rows' queries, [h, T, D], in at least fp32; adds those of keys and values to the sums."""
    dq_hTD: Tensor | None = None
    for piece, tile in [(keys, part) for keys in pieces for each in keys.tiles for part in _parts(q_hTD, keys, each, rule)]:
        dq, dk, dv = _backward(gradient_hTE, q_hTD, out_hTE, lse_hT, piece, tile, rule)
        if dq_hTD is None and tile.num_rows == q_hTD.shape[1]:
            dq_hTD = dq.to(lse_hT.dtype)
        else:
            dq_hTD = torch.zeros_like(q_hTD, dtype=lse_hT.dtype) if dq_hTD is None else dq_hTD
            _tile_tokens(dq_hTD, tile.rows, tile).add_(_as_blocks(dq, tile))
        for total, gradient in zip(piece.sums, (dk, dv), strict=True):
            rule.readers.fold_into(_tile_tokens(total, tile.keys, tile), _as_blocks(gradient, tile))
    assert dq_hTD is not None
    return dq_hTD


def _parts(q_hTD: Tensor, piece: KeyPiece, tile: PatternTile, rule: AttentionRule) -> tuple[PatternTile, ...]:
    """Splits a tile into one or two parts with the same rows, so that a backend can reuse its plans; see `tile.plan_keys`."""
    if tile.mask != "full" or tile.num_blocks > 1:
        return (tile,)
    k, v = (x[:, tile.keys] for x in piece.kv)
    num_keys = plan_keys(TileInputs(q_hTD[:, tile.rows], k, v, rule.scores, causal=False, chosen=rule.chosen_TK))
    if not num_keys:
        return (tile,)
    middle = tile.keys.start + num_keys
    return replace(tile, keys=slice(tile.keys.start, middle)), replace(tile, keys=slice(middle, tile.keys.stop))


def _forward(q_hTD: Tensor, piece: KeyPiece, tile: PatternTile, rule: AttentionRule) -> tuple[Tensor, Tensor]:
    """Returns output and LSE of a tile."""
    out, lse = tile_forward(_tile_inputs(q_hTD, piece, tile, rule))
    return _ordered(out, tile), _ordered(lse, tile)


def _backward(
    gradient_hTE: Tensor,
    q_hTD: Tensor,
    out_hTE: Tensor,
    lse_hT: Tensor,
    piece: KeyPiece,
    tile: PatternTile,
    rule: AttentionRule,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of a tile's queries, keys and values."""
    gradient, out, lse = (_read(x, tile.rows, tile) for x in (gradient_hTE, out_hTE, lse_hT))
    dq, dk, dv = tile_backward(gradient, _tile_inputs(q_hTD, piece, tile, rule), out, lse)
    return _ordered(dq, tile), _ordered(dk, tile), _ordered(dv, tile)


def _tile_inputs(q_hTD: Tensor, piece: KeyPiece, tile: PatternTile, rule: AttentionRule) -> TileInputs:
    q = _read(q_hTD, tile.rows, tile)
    k, v = (_ordered(_as_heads(rule.readers.gather(_tile_tokens(x, tile.keys, tile)), tile), tile) for x in piece.kv)
    dropout = None if rule.dropout is None else rule.dropout.of_tile(tile, piece.first)
    return TileInputs(q, k, v, rule.scores, causal=tile.mask != "full", chosen=_chosen(piece, tile, rule), dropout=dropout)


def _chosen(piece: KeyPiece, tile: PatternTile, rule: AttentionRule) -> Tensor | None:
    """Returns the chosen keys of a tile's rows, counted from the tile's first key; None without a choice."""
    if rule.chosen_TK is None:
        return None
    assert tile.num_blocks == 1 and tile.mask != "reversed"
    return rule.chosen_TK[tile.rows] - (piece.first + tile.keys.start)


def _read(x_HTX: Tensor, tokens: slice, tile: PatternTile) -> Tensor:
    """Returns rows or keys of a tile for its backend: blocks as heads, in the order in which the mask is causal."""
    return _ordered(_as_heads(_tile_tokens(x_HTX, tokens, tile), tile), tile)


def _tile_tokens(x_HTX: Tensor, tokens: slice, tile: PatternTile) -> Tensor:
    """Returns a view of a tile's rows or keys: [H, N, ...], or [H, n, N, ...] for several blocks."""
    if tile.num_blocks == 1:
        return x_HTX[:, tokens]
    # the tensor may end before the last block's stride does
    blocks = x_HTX[:, tokens.start :].unfold(1, tokens.stop - tokens.start, tile.stride)[:, : tile.num_blocks]
    return blocks if x_HTX.dim() == 2 else blocks.movedim(-1, 2)


def _as_heads(x: Tensor, tile: PatternTile) -> Tensor:
    """Turns blocks into heads, [H, n, N, ...] to [n * H, N, ...]; neighbouring query heads still read one KV head."""
    return x if tile.num_blocks == 1 else x.transpose(0, 1).flatten(0, 1)


def _as_blocks(x: Tensor, tile: PatternTile) -> Tensor:
    """Inverse of `_as_heads`."""
    return x if tile.num_blocks == 1 else x.unflatten(0, (tile.num_blocks, -1)).transpose(0, 1)


def _ordered(x: Tensor, tile: PatternTile) -> Tensor:
    """Puts tokens into the order in which the tile's mask is causal, or back: reversed for a "reversed" mask."""
    return x.flip(1) if tile.mask == "reversed" else x
