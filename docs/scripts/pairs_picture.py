"""Draws which rank computes which query-key pairs of a pack of documents: `python docs/scripts/pairs_picture.py`.

Tokens lie on ranks as in a run. Needs matplotlib (the extra `plot`).
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from numpy.typing import NDArray

from hf_longctx.plan.core.sharding import rank_pieces
from hf_longctx.plan.core.types import Chunk, GroupShape, Span

FILE = Path(__file__).parents[1] / "img" / "pairs.png"
_LENGTHS = (64, 40, 24)
_COLOURS = ("#4c78a8", "#f58518", "#72b7b2", "#d1495b")


def ranks_of_pairs(num_ranks: int) -> NDArray[np.int64]:
    """The rank that computes each pair of a query (row) and a key (column) in a ring of so many ranks; -1 for no pair."""
    firsts = (0, *accumulate(_LENGTHS))
    chunk = Chunk(0, tuple(Span(sequence, 0, length) for sequence, length in enumerate(_LENGTHS)))
    pairs = np.full((firsts[-1], firsts[-1]), -1)
    for rank, pieces in enumerate(rank_pieces(chunk, GroupShape(num_ranks, 1))):
        for piece in pieces:
            first = firsts[piece.document]
            for query in range(first + piece.start, first + piece.stop):
                pairs[query, first : query + 1] = rank
    return pairs


def main() -> None:
    figure = Figure(figsize=(9, 3.7), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    ends = list(accumulate(_LENGTHS))
    for axes, num_ranks in zip(figure.subplots(1, 2), (1, 4), strict=True):
        pairs = ranks_of_pairs(num_ranks)
        axes.imshow(np.ma.masked_less(pairs, 0), cmap=ListedColormap(_COLOURS), vmin=0, vmax=3, interpolation="nearest")
        shares = [int((pairs == rank).sum()) for rank in range(num_ranks)]
        each = f"{min(shares):,}" if min(shares) == max(shares) else f"{min(shares):,} to {max(shares):,}"
        who = f"a ring of {num_ranks} ranks, each" if num_ranks > 1 else "one rank,"
        axes.set_title(f"{who} {each} pairs", loc="left", fontsize=11)
        axes.set_xlabel("key")
        axes.set_ylabel("query")
        axes.set_xticks([end - 0.5 for end in ends], [str(end) for end in ends])
        axes.set_yticks([end - 0.5 for end in ends], [str(end) for end in ends])
        for place, (end, length) in enumerate(zip(ends, _LENGTHS, strict=True)):
            axes.text(end, end - length / 2, f" document {place + 1}", va="center", fontsize=9)
        axes.set_xlim(-0.5, ends[-1] + 36)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(FILE)
    print(FILE)


if __name__ == "__main__":
    main()
