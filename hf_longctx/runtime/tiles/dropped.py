"""Dropout of the attention weights of a tile: which query, key and head each weight belongs to, whatever tile it is in.

Scores, their log-sum-exp and so the weights are those without dropout. The output sums only the weights that stay, times
1 / (1 - rate). So outputs of tiles are merged as ever, and the gradient of a score is weight * (mask * (dO . v) / (1 - rate) -
dO . O) with the merged output O: the sum over all keys of the first term's weighted part is dO . O, as without dropout.

A mask is drawn for one block of queries at a time, in the forward and again in the backward, and never kept.

Shapes: H query heads of a tile, R rows and U keys of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_longctx.kernels.weight_mask import dropped_weights
from hf_longctx.runtime.tiles.patterns import PatternTile


@dataclass(frozen=True, slots=True)
class WeightDropout:
    """Dropout of the weights of one layer in one chunk, and the rows of one document to which it is applied.

    rate: share of the weights that are dropped. key: 64 bits of the layer and the seed. step: optimizer step. numbers: those of
    the chunk's documents among the sequences of the step. first_head, num_heads: this rank's query heads among the layer's.
    document: index of the rows' document in the chunk. first_row: position of the first row in its document.
    """

    rate: float
    key: int
    step: int
    numbers: tuple[int, ...]
    first_head: int
    num_heads: int
    document: int = 0
    first_row: int = 0

    def of_rows(self, document: int, first_row: int) -> WeightDropout:
        """Dropout of rows from position `first_row` of a document of the chunk."""
        return replace(self, document=document, first_row=first_row)

    def of_tile(self, tile: PatternTile, first_key: int) -> TileDropout:
        """Dropout of a tile of these rows and of keys whose first one is at position `first_key` of the document."""
        first_row, first_key = self.first_row + tile.rows.start, first_key + tile.keys.start
        sizes = tile.num_rows, tile.keys.stop - tile.keys.start
        return TileDropout(self, first_row, first_key, *sizes, tile.num_blocks, tile.stride, tile.mask == "reversed")

    @property
    def scale(self) -> float:
        """Factor of the weights that stay."""
        return 1 / (1 - self.rate) if self.rate < 1 else 0.0


@dataclass(frozen=True, slots=True)
class TileDropout:
    """Dropout of the weights of a tile.

    first_row, first_key: positions in the document of its first query and key. num_blocks: blocks that are computed as if each
    were a set of heads, which start `stride` tokens apart. num_rows, num_keys: of each block. is_reversed: its tokens are in
    reverse order. first: the first of the tile's heads and blocks that this part of it has.
    """

    dropout: WeightDropout
    first_row: int
    first_key: int
    num_rows: int
    num_keys: int
    num_blocks: int = 1
    stride: int = 0
    is_reversed: bool = False
    first: int = 0

    @property
    def scale(self) -> float:
        """Factor of the weights that stay."""
        return self.dropout.scale

    def of_heads(self, heads: slice) -> TileDropout:
        """Dropout of some of the tile's heads."""
        return replace(self, first=self.first + heads.start)

    def mask(self, rows: slice, keys: slice, num_heads: int, device: torch.device) -> Tensor:
        """True for weights that are dropped, [H, R, U], of a range of the tile's rows and keys."""
        drop = self.dropout
        # dummy tokens are further documents, without a number
        number = drop.numbers[drop.document] if drop.document < len(drop.numbers) else -1
        first, skipped = divmod(self.first, drop.num_heads)
        blocks = range(first, -(-(self.first + num_heads) // drop.num_heads))
        rows_NR = self._positions(self.first_row, self.num_rows, blocks, device)[:, rows]
        keys_NU = self._positions(self.first_key, self.num_keys, blocks, device)[:, keys]
        heads = drop.first_head, drop.num_heads
        dropped = dropped_weights(rows_NR, keys_NU, heads, number, drop.step, drop.key, drop.rate)
        return dropped[skipped:][:num_heads]

    def _positions(self, first: int, count: int, blocks: range, device: torch.device) -> Tensor:
        """Positions in the document of the tokens of some blocks, in the order of the tile."""
        tokens = torch.arange(count, device=device)
        starts = first + self.stride * torch.arange(blocks.start, blocks.stop, device=device)
        return starts.unsqueeze(1) + (tokens.flip(0) if self.is_reversed else tokens)
