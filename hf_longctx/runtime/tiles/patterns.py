"""Attention patterns (causal, windows, chunks), cut into tiles that are either fully visible or causal squares.

`attention.rows` gets the tiles of its rows from a pattern; `tiles.tile` then computes each tile exactly. Masked scores are
computed in causal squares only.

Query i sees key j of its document if j <= i. With a window W, j > i - W must hold too; with attention chunks of C, both i and j
must lie between the same two multiples of C. The band of a window is cut into causal squares on the diagonal, squares on the far
edge of the window, and fully visible rectangles for the rest. A far-edge square becomes causal if its queries and keys are
reversed: with keys from i - W + 1 on for its first query i, its row r sees keys r and later.

Tokens of an image may see each other both ways (`blocks`): query i then also sees the later keys of its block, in one more
square, whose row r sees keys r + 1 and later. A window hides none of them.

Squares of W (or C) tokens at regular distances form one tile of several blocks, computed as if each block were a set of heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# full: every key; causal: row r sees keys 0 to r; reversed: row r sees keys r and later
Mask = Literal["full", "causal", "reversed"]


@dataclass(frozen=True, slots=True)
class PatternTile:
    """A tile's queries (`rows`), its keys, and its mask; tiles with a mask are square.

    `rows` and `keys` are those of the first block; each further block starts `stride` tokens after the one before.
    """

    rows: slice
    keys: slice
    mask: Mask
    num_blocks: int = 1
    stride: int = 0

    @property
    def num_rows(self) -> int:
        """Number of query rows of one block."""
        return int(self.rows.stop - self.rows.start)


@dataclass(frozen=True, slots=True)
class AttentionPattern:
    """Restriction of causal attention inside a document, or an exception from it; 0 and () mean none."""

    # most tokens that a query sees, including its own
    window: int = 0
    # a query sees the tokens of its document from the last multiple of `chunk` positions on (the attention chunks of Llama 4, not
    # the chunks of a plan)
    chunk: int = 0
    # ascending ranges [begin, end) of the document whose tokens see each other both ways
    blocks: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.window and self.chunk:
            raise ValueError(
                f"attention has a window of {self.window} tokens and chunks of {self.chunk} tokens; only one of them is supported"
            )
        if self.chunk and self.blocks:
            raise ValueError(
                f"attention has chunks of {self.chunk} tokens and tokens that see later ones; only one of them is supported"
            )
        if min(self.window, self.chunk) < 0:
            raise ValueError(f"{self} has a negative setting; use 0 for no window or no chunks")

    def first_seen(self, position: int) -> int:
        """Returns the first key that the query at `position` in its document sees; later queries see no earlier key."""
        if self.chunk:
            return position - position % self.chunk
        return max(0, position - self.window + 1) if self.window else 0

    def tiles(self, start: int, num_tokens: int, first_key: int, num_keys: int) -> tuple[PatternTile, ...]:
        """Returns tiles of `num_tokens` queries from position `start` with `num_keys` keys from position `first_key`, or none.

        The keys are either those of the queries' own tokens, or all of them come before the queries.
        """
        if first_key == start:
            return self.own_tiles(start, num_tokens)
        return self.front_tiles(start, num_tokens, first_key, num_keys)

    def own_tiles(self, start: int, num_tokens: int) -> tuple[PatternTile, ...]:
        """Returns tiles of `num_tokens` queries from position `start` with their own keys; every row's first tile is causal.

        A block in which the queries end has later keys behind theirs. Raises ValueError if they begin inside a block.
        """
        return self._backward_tiles(start, num_tokens) + self._block_tiles(start, num_tokens)

    def _block_tiles(self, start: int, num_tokens: int) -> tuple[PatternTile, ...]:
        """Returns tiles of queries with the later keys of their blocks."""
        tiles = []
        for begin, end in ((begin - start, end - start) for begin, end in self.blocks):
            if begin < 0 < end:
                raise ValueError(f"tokens from {start} on begin inside a block whose tokens see each other both ways")
            # the last token of a block sees no later one
            last = min(num_tokens, end - 1)
            if 0 <= begin < last:
                tiles.append(PatternTile(slice(begin, last), slice(begin + 1, last + 1), "reversed"))
                if last + 1 < end:
                    tiles.append(PatternTile(slice(begin, last), slice(last + 1, end), "full"))
        return tuple(tiles)

    def _backward_tiles(self, start: int, num_tokens: int) -> tuple[PatternTile, ...]:
        """Returns tiles of queries with their own and earlier keys."""
        size = self.window or self.chunk
        # windows are cut from the first row on, attention chunks at their boundaries
        head = min(num_tokens, -start % self.chunk) if self.chunk else 0
        if not size or num_tokens <= (size if self.window else head or size):
            return (_square(0, num_tokens),)
        num_blocks, rest = divmod(num_tokens - head, size)
        end = head + num_blocks * size
        tiles = [_square(0, head)] if head else []
        if num_blocks:
            tiles.append(PatternTile(slice(head, head + size), slice(head, head + size), "causal", num_blocks, size))
        if rest:
            tiles.append(_square(end, rest))
        if self.window > 1 and num_blocks > 1:
            # the last row of a block sees nothing of the previous block, and no row sees that block's first key
            tiles.append(PatternTile(slice(size, 2 * size - 1), slice(1, size), "reversed", num_blocks - 1, size))
        if self.window and rest:
            tiles += [
                PatternTile(_moved(tile.rows, end), _moved(tile.keys, end - size), tile.mask)
                for tile in self.front_tiles(end, rest, end - size, size)
            ]
        return tuple(tiles)

    def front_tiles(self, start: int, num_tokens: int, first_key: int, num_keys: int) -> tuple[PatternTile, ...]:
        """Returns tiles of `num_tokens` queries from position `start` with `num_keys` earlier keys from `first_key` on."""
        if not num_keys:
            return ()
        stop = first_key + num_keys
        if self.chunk:
            begin = max(first_key, start - start % self.chunk)
            rows = slice(0, min(num_tokens, -start % self.chunk))
            return (PatternTile(rows, slice(begin - first_key, num_keys), "full"),) if begin < stop else ()
        # first key that row 0 sees; row r sees keys from seen + r on
        seen = start - self.window + 1 if self.window else first_key - num_tokens
        num_whole = min(num_tokens, max(0, first_key - seen + 1))
        num_rows = min(num_tokens, stop - seen)
        tiles = [PatternTile(slice(0, num_whole), slice(0, num_keys), "full")] if num_whole else []
        if num_rows > num_whole:
            rows, edge = slice(num_whole, num_rows), slice(seen + num_whole - first_key, seen + num_rows - first_key)
            tiles.append(PatternTile(rows, edge, "reversed"))
            if edge.stop < num_keys:
                tiles.append(PatternTile(rows, slice(edge.stop, num_keys), "full"))
        return tuple(tiles)


CAUSAL = AttentionPattern()


def _square(first: int, num_tokens: int) -> PatternTile:
    return PatternTile(slice(first, first + num_tokens), slice(first, first + num_tokens), "causal")


def _moved(tokens: slice, by: int) -> slice:
    return slice(tokens.start + by, tokens.stop + by)
