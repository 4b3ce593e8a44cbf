"""Computes a tile by matrix products in at least fp32 (fp64 for fp64), block by block of queries.

This is the last backend of `tiles.tile`, correct for every head size and every kind of score, and the reference for checks in
`tiles.packages`.

A block has as many query rows as fit into a matrix of scores over all heads with 2^25 elements, but at least one. At most three
such matrices exist at once: 384 MiB in fp32, plus a mask of one byte per element if weights are dropped.

Dropout masks depend on query, key and head of a weight, not on its tile. Scores and their log-sum-exp are those without dropout.
The output sums only the weights that stay, times 1 / (1 - rate). So outputs of tiles are merged as usual, and the gradient of a
score is weight * (mask * (dO . v) / (1 - rate) - dO . O) with the merged output O: summed over all keys, the weighted first term
is dO . O, as without dropout. A mask is drawn for one block of queries at a time, forward and again backward, and never kept.

Shapes: H query heads, G KV heads (H is a multiple of G; neighbouring query heads read one KV head), T query tokens, U key tokens,
R = H/G * T query rows per KV head, D head size of queries and keys, E of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_longctx.kernels.weight_mask import dropped_weights
from hf_longctx.runtime.tiles.patterns import PatternTile


@dataclass(frozen=True, slots=True)
class WeightDropout:
    """Dropout of attention weights of one layer in one chunk, for rows of one document."""

    # share of the weights that are dropped
    rate: float
    # 64 bits of the layer and the seed
    key: int
    # optimizer step
    step: int
    # numbers of the chunk's documents among the sequences of the step
    numbers: tuple[int, ...]
    # this rank's query heads among the layer's
    first_head: int
    num_heads: int
    # index of the rows' document in the chunk
    document: int = 0
    # position of the first row in its document
    first_row: int = 0

    def of_rows(self, document: int, first_row: int) -> WeightDropout:
        """Returns the dropout of rows from position `first_row` of a document of the chunk."""
        return replace(self, document=document, first_row=first_row)

    def of_tile(self, tile: PatternTile, first_key: int) -> TileDropout:
        """Returns the dropout of a tile of these rows and of keys from position `first_key` of the document on."""
        first_row, first_key = self.first_row + tile.rows.start, first_key + tile.keys.start
        sizes = tile.num_rows, tile.keys.stop - tile.keys.start
        return TileDropout(self, first_row, first_key, *sizes, tile.num_blocks, tile.stride, tile.mask == "reversed")

    @property
    def scale(self) -> float:
        """Factor of the weights that stay."""
        return 1 / (1 - self.rate) if self.rate < 1 else 0.0


@dataclass(frozen=True, slots=True)
class TileDropout:
    """Dropout of attention weights of one tile."""

    dropout: WeightDropout
    # positions in the document of its first query and key
    first_row: int
    first_key: int
    # rows and keys of each block
    num_rows: int
    num_keys: int
    # blocks that are computed as if each were a set of heads; they start `stride` tokens apart
    num_blocks: int = 1
    stride: int = 0
    # tokens are in reverse order
    is_reversed: bool = False
    # the first of the tile's heads and blocks in this part of the tile
    first: int = 0

    @property
    def scale(self) -> float:
        """Factor of the weights that stay."""
        return self.dropout.scale

    def of_heads(self, heads: slice) -> TileDropout:
        """Returns the dropout of some of the tile's heads."""
        return replace(self, first=self.first + heads.start)

    def mask(self, rows: slice, keys: slice, num_heads: int, device: torch.device) -> Tensor:
        """Returns the mask [H, R, U] of a range of rows and keys; True for dropped weights."""
        drop = self.dropout
        # dummy tokens are further documents without numbers
        number = drop.numbers[drop.document] if drop.document < len(drop.numbers) else -1
        first, skipped = divmod(self.first, drop.num_heads)
        blocks = range(first, -(-(self.first + num_heads) // drop.num_heads))
        rows_NR = self._positions(self.first_row, self.num_rows, blocks, device)[:, rows]
        keys_NU = self._positions(self.first_key, self.num_keys, blocks, device)[:, keys]
        heads = drop.first_head, drop.num_heads
        dropped = dropped_weights(rows_NR, keys_NU, heads, number, drop.step, drop.key, drop.rate)
        return dropped[skipped:][:num_heads]

    def _positions(self, first: int, count: int, blocks: range, device: torch.device) -> Tensor:
        """Returns positions in the document of the tokens of some blocks, in the order of the tile."""
        tokens = torch.arange(count, device=device)
        starts = first + self.stride * torch.arange(blocks.start, blocks.stop, device=device)
        return starts.unsqueeze(1) + (tokens.flip(0) if self.is_reversed else tokens)


# most elements of one score matrix, over all heads of a block of queries
_BLOCK_VALUES = 2**25


@dataclass(frozen=True, slots=True)
class Scores:
    """Formula of scores: s = scale * (q . k); with a softcap c it is c * tanh(s / c) (c = 0: none)."""

    scale: float
    softcap: float = 0.0


@dataclass(frozen=True, slots=True)
class TileInputs:
    """One tile: q [H, T, D], k [G, U, D], v [G, U, E]. A `causal` tile is square: query i sees keys 0 to i; others see all.

    chosen: key numbers [T, K]; every query sees only these of its visible keys. Numbers outside of [0, U) choose no key of this
    tile. None: no choice. dropout: of attention weights; None: all of them stay.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scores: Scores
    causal: bool
    chosen: Tensor | None = None
    dropout: TileDropout | None = None

    @property
    def is_masked(self) -> bool:
        """Whether single weights are left out."""
        return self.chosen is not None or self.dropout is not None


# tile -> output [H, T, E], LSE [H, T]
Forward = Callable[[TileInputs], tuple[Tensor, Tensor]]
# gradient of the output, tile, merged output, merged LSE -> gradients of q, k and v
Backward = Callable[[Tensor, TileInputs, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def plain_forward(tile: TileInputs) -> tuple[Tensor, Tensor]:
    """Returns output [H, T, E] and LSE [H, T] of a tile; zeros and -inf for queries that see none of its keys."""
    q, k, v = tile.q, tile.k, tile.v
    outs, lses = [], []
    for rows, keys in _blocks(q, k, tile.causal):
        raw, _ = _scored(tile, rows, keys)
        lse = raw.logsumexp(-1)
        # -inf minus -inf would be NaN
        weights = raw.sub_(lse.clamp(min=torch.finfo(lse.dtype).min).unsqueeze(-1)).exp_()
        if tile.dropout is not None:
            weights.masked_fill_(_dropped(tile, rows, keys), 0.0).mul_(tile.dropout.scale)
        out = weights.to(v.dtype) @ v[:, keys]
        per_kv = q.shape[0] // k.shape[0]
        outs.append(as_heads(out, per_kv))
        lses.append(as_heads(lse, per_kv))
        # free this block's matrices before the next block makes its own
        del raw, weights
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)


def plain_backward(gradient: Tensor, tile: TileInputs, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns gradients of q, k and v in at least fp32, from the merged output and LSE."""
    q, k, v, scores = tile.q, tile.k, tile.v, tile.scores
    per_kv, wide = q.shape[0] // k.shape[0], torch.promote_types(q.dtype, torch.float32)
    dq = torch.empty_like(q, dtype=wide)
    dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for rows, keys in _blocks(q, k, tile.causal):
        raw, slope = _scored(tile, rows, keys)
        per_query = (gradient, q, out, lse.unsqueeze(-1))
        wide_gradient, queries, wide_out, lse_GR1 = (as_queries(x[:, rows], per_kv).to(wide) for x in per_query)
        weights = raw.sub_(lse_GR1).exp_()
        delta = (wide_gradient * wide_out).sum(-1, keepdim=True)
        dropped = None
        if tile.dropout is not None:
            dropped, wide_gradient = _dropped(tile, rows, keys), wide_gradient * tile.dropout.scale
        dv[:, keys] += (weights if dropped is None else weights.masked_fill(dropped, 0.0)).transpose(1, 2) @ wide_gradient
        ds = wide_gradient @ v[:, keys].to(wide).transpose(1, 2)
        if dropped is not None:
            ds.masked_fill_(dropped, 0.0)
        ds.sub_(delta).mul_(weights).mul_(scores.scale)
        if slope is not None:
            ds.mul_(slope)
        dq[:, rows] = as_heads(ds @ k[:, keys].to(wide), per_kv)
        dk[:, keys] += ds.transpose(1, 2) @ queries
        # free this block's matrices before the next block makes its own
        del raw, slope, weights, dropped, ds
    return dq, dk, dv


def _blocks(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Yields (range of queries, range of keys that at least one of them sees) for every block."""
    num_rows = max(1, _BLOCK_VALUES // max(1, q.shape[0] * k.shape[1]))
    for start in range(0, q.shape[1], num_rows):
        stop = min(start + num_rows, q.shape[1])
        yield slice(start, stop), slice(0, stop if causal else k.shape[1])


def _scored(tile: TileInputs, rows: slice, keys: slice) -> tuple[Tensor, Tensor | None]:
    """Returns scores [G, H/G * rows, U] of a block of queries, and the softcap's derivative by raw scores (None: no cap)."""
    q, k, scores = tile.q[:, rows], tile.k[:, keys], tile.scores
    per_kv, wide = q.shape[0] // k.shape[0], torch.promote_types(q.dtype, torch.float32)
    found = (as_queries(q, per_kv).to(wide) @ k.to(wide).transpose(1, 2)).mul_(scores.scale)
    slope = None
    if scores.softcap:
        ratio = found.div_(scores.softcap).tanh_()
        slope = ratio.square().neg_().add_(1)
        found = ratio.mul_(scores.softcap)
    if tile.causal:
        seen = torch.arange(k.shape[1], device=k.device) <= torch.arange(rows.start, rows.stop, device=k.device).unsqueeze(1)
        found.masked_fill_(~seen.repeat(per_kv, 1), float("-inf"))
    if tile.chosen is not None:
        found.masked_fill_(~_is_chosen(tile.chosen[rows], k.shape[1]).repeat(per_kv, 1), float("-inf"))
    return found, slope


def _dropped(tile: TileInputs, rows: slice, keys: slice) -> Tensor:
    """Returns the mask of dropped weights of a block of queries, [G, H/G * rows, U]."""
    assert tile.dropout is not None
    num_heads, num_kv = tile.q.shape[0], tile.k.shape[0]
    return as_queries(tile.dropout.mask(rows, keys, num_heads, tile.q.device), num_heads // num_kv)


def _is_chosen(chosen_RK: Tensor, num_keys: int) -> Tensor:
    """Returns the mask of keys chosen by each query, [R, num_keys]."""
    # one more column for numbers outside of the tile
    places_RK = chosen_RK.long().where((chosen_RK >= 0) & (chosen_RK < num_keys), num_keys)
    seen = torch.zeros(chosen_RK.shape[0], num_keys + 1, dtype=torch.bool, device=chosen_RK.device)
    return seen.scatter_(1, places_RK, True)[:, :num_keys]


def as_queries(x_HTX: Tensor, per_kv: int) -> Tensor:
    """Folds the query heads of each KV head into its query rows: [H, T, ...] to [G, H/G * T, ...]. For tiles without a mask."""
    return x_HTX.unflatten(0, (-1, per_kv)).flatten(1, 2)


def as_heads(x_GRX: Tensor, per_kv: int) -> Tensor:
    """Inverse of `as_queries`: [G, H/G * T, ...] to [H, T, ...]."""
    return x_GRX.unflatten(1, (per_kv, -1)).flatten(0, 1)
