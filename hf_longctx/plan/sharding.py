"""Which token of a chunk lies at which position of its group: one rule for collator, runtime and simulator.

Ulysses: tokens are laid out in span order and cut into contiguous shards that differ by at most one token, longer shards
first. Ring: every document is cut into 2d pieces for d ranks, and one rank holds pieces i and 2d - 1 - i (zigzag), so that
all ranks have about the same number of causal query-key pairs in every document.

A rank without a token would crash HF layers (they reject empty tensors), so it gets a dummy token: a document of its own,
without loss, behind the real tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from hf_longctx.plan.types import Chunk, Method


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, stop) of a chunk's document, lying from `first` on among the tokens of one rank.

    Documents are numbered as the chunk's spans; dummy tokens are the documents behind them. `start` counts from the start
    of the document's span.
    """

    document: int
    start: int
    stop: int
    first: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def tokens(self) -> slice:
        """The piece among the tokens of its rank."""
        return slice(self.first, self.first + self.num_tokens)


def rank_pieces(chunk: Chunk, degree: int, method: Method) -> tuple[tuple[Piece, ...], ...]:
    """What every rank of a group holds of the padded chunk, in the order of its tokens; never nothing."""
    if method == "ring":
        return _zigzag_pieces(chunk, degree)
    bounds = document_bounds(chunk, degree)
    ranks = []
    for index in range(degree):
        start, stop = shard_bounds(chunk.num_tokens, degree, index)
        ranks.append(
            tuple(
                Piece(document, max(start, low) - low, min(stop, high) - low, max(start, low) - start)
                for document, (low, high) in enumerate(pairwise(bounds))
                if low < stop and start < high
            )
        )
    return tuple(ranks)


def _zigzag_pieces(chunk: Chunk, degree: int) -> tuple[tuple[Piece, ...], ...]:
    ranks: list[list[Piece]] = [[] for _ in range(degree)]
    held = [0] * degree
    for document, span in enumerate(chunk.spans):
        cuts = [span.num_tokens * place // (2 * degree) for place in range(2 * degree + 1)]
        for pair in range(degree):
            # from document to document another rank gets the odd tokens, else many short ones would pile up on one rank
            index = (pair + document) % degree
            for place in (pair, 2 * degree - 1 - pair):
                if cuts[place] < cuts[place + 1]:
                    ranks[index].append(Piece(document, cuts[place], cuts[place + 1], held[index]))
                    held[index] += cuts[place + 1] - cuts[place]
    dummy = len(chunk.spans)
    for index in range(degree):
        if not held[index]:
            ranks[index].append(Piece(dummy, 0, 1, 0))
            dummy += 1
    return tuple(map(tuple, ranks))


def held_tokens(pieces: tuple[tuple[Piece, ...], ...]) -> tuple[int, ...]:
    """Tokens of every rank, dummy tokens included."""
    return tuple(sum(piece.num_tokens for piece in rank) for rank in pieces)


def num_dummy_tokens(num_tokens: int, degree: int) -> int:
    """Dummy tokens that bring a chunk of `num_tokens` tokens to at least one token per rank."""
    return max(0, degree - num_tokens)


def shard_tokens(num_tokens: int, degree: int) -> tuple[int, ...]:
    """Tokens of every rank of a group of `degree` ranks, dummy tokens included; never zero."""
    total = num_tokens + num_dummy_tokens(num_tokens, degree)
    base, remainder = divmod(total, degree)
    return tuple(base + (index < remainder) for index in range(degree))


def shard_bounds(num_tokens: int, degree: int, index: int) -> tuple[int, int]:
    """Half-open range of the padded chunk that the rank at place `index` of the group holds."""
    shards = shard_tokens(num_tokens, degree)
    start = sum(shards[:index])
    return start, start + shards[index]


def document_bounds(chunk: Chunk, degree: int) -> tuple[int, ...]:
    """Cumulative document lengths of the padded chunk (`cu_seqlens`), starting at 0; dummy tokens stand alone."""
    lengths = [span.num_tokens for span in chunk.spans] + [1] * num_dummy_tokens(chunk.num_tokens, degree)
    return (0, *accumulate(lengths))
