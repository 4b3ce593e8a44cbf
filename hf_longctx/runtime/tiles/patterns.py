"""Which keys a query sees, and the tiles that any pattern is made of.

Query i sees key j of its document where j <= i and, with a window of W, j > i - W; with chunks of C, where both lie between the
same multiples of C. A band of W is cut into causal squares and squares of the window's far edge, which are causal squares too
once queries and keys are in reverse order: with keys from i - W + 1 on, row r of the square sees its keys from r on. What is left
over are rectangles that are seen wholly. So the operators of `tiles` do every pattern exactly, and none computes what is masked.

Blocks of W (or C) tokens are one tile together: as many squares, each with heads of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# every key; keys up to the query's place; keys from the query's place on
Mask = Literal["full", "causal", "reversed"]


@dataclass(frozen=True, slots=True)
class PatternTile:
    """Queries `rows` and keys `keys`, and what these see of those; masked tiles are square.

    With several blocks, `rows` and `keys` are the first one's, and each of the others lies `stride` tokens behind the last.
    """

    rows: slice
    keys: slice
    mask: Mask
    num_blocks: int = 1
    stride: int = 0

    @property
    def num_rows(self) -> int:
        """Of one block."""
        return int(self.rows.stop - self.rows.start)


@dataclass(frozen=True, slots=True)
class AttentionPattern:
    """What attention inside a document is besides causal. 0: without it.

    window: tokens that a query sees, its own included. chunk: a query sees its document's tokens from the last multiple of this
    position on.
    """

    window: int = 0
    chunk: int = 0

    def __post_init__(self) -> None:
        if self.window and self.chunk:
            raise ValueError(
                f"attention has a window of {self.window} tokens and chunks of {self.chunk}; it may have one of them"
            )
        if min(self.window, self.chunk) < 0:
            raise ValueError(f"{self} has a negative setting; leave out what does not apply")

    def first_seen(self, position: int) -> int:
        """The first key that the query at `position` of its document sees; none that a later one sees lies before it."""
        if self.chunk:
            return position - position % self.chunk
        return max(0, position - self.window + 1) if self.window else 0

    def tiles(self, start: int, num_tokens: int, first_key: int, num_keys: int) -> tuple[PatternTile, ...]:
        """Tokens from position `start` of their document on, and keys that are their own or all before them; may be empty."""
        if first_key == start:
            return self.own_tiles(start, num_tokens)
        return self.front_tiles(start, num_tokens, first_key, num_keys)

    def own_tiles(self, start: int, num_tokens: int) -> tuple[PatternTile, ...]:
        """Tokens from position `start` of their document on, among themselves. Every row's first tile is a causal one."""
        size = self.window or self.chunk
        # windows are cut from the first row on, chunks where they begin
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
            # the last row of a block sees nothing of the block before, whose first key is seen by none
            tiles.append(PatternTile(slice(size, 2 * size - 1), slice(1, size), "reversed", num_blocks - 1, size))
        if self.window and rest:
            tiles += [
                PatternTile(_moved(tile.rows, end), _moved(tile.keys, end - size), tile.mask)
                for tile in self.front_tiles(end, rest, end - size, size)
            ]
        return tuple(tiles)

    def front_tiles(self, start: int, num_tokens: int, first_key: int, num_keys: int) -> tuple[PatternTile, ...]:
        """Tokens from position `start` on, and the keys from position `first_key` on, all of them before `start`."""
        if not num_keys:
            return ()
        stop = first_key + num_keys
        if self.chunk:
            begin = max(first_key, start - start % self.chunk)
            rows = slice(0, min(num_tokens, -start % self.chunk))
            return (PatternTile(rows, slice(begin - first_key, num_keys), "full"),) if begin < stop else ()
        # the first key that row 0 sees; row r sees keys from r behind it on
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


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)
