"""Sharding of a chunk over a group: no token is lost, no rank is empty, and no rank holds or computes much more than another."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.lending import lent_pieces
from hf_longctx.plan.core.sharding import (
    Piece,
    block_pieces,
    document_bounds,
    held_tokens,
    rank_pieces,
    seen_pieces,
    travelling_pieces,
)
from hf_longctx.plan.core.types import Chunk, GroupShape, Span

lengths_of_documents = st.lists(st.integers(1, 90), max_size=6)


def chunk_of(lengths: list[int], prefix: int = 0) -> Chunk:
    return Chunk(0, tuple(Span(i, prefix * (i == 0), prefix * (i == 0) + length) for i, length in enumerate(lengths)))


@st.composite
def shapes(draw: st.DrawFn) -> GroupShape:
    ulysses = draw(st.integers(1, 5))
    return GroupShape(ulysses * draw(st.integers(1, 5)), ulysses)


@given(lengths_of_documents, shapes())
def test_pieces_cover_every_token_once_and_no_rank_is_empty(lengths: list[int], shape: GroupShape) -> None:
    pieces = rank_pieces(chunk_of(lengths, prefix=7), shape)
    assert len(pieces) == shape.degree
    found = sorted((p.document, token) for rank in pieces for p in rank for token in range(p.start, p.stop))
    real = [(document, token) for document, length in enumerate(lengths) for token in range(length)]
    dummies = found[len(real) :]
    assert found[: len(real)] == real
    # every dummy token is a document of its own, after the real ones
    assert dummies == [(document, 0) for document in range(len(lengths), len(lengths) + len(dummies))]
    assert min(held_tokens(pieces)) >= 1
    for rank in pieces:
        assert [piece.first for piece in rank] == list(accumulate((p.num_tokens for p in rank[:-1]), initial=0))


@given(lengths_of_documents, shapes())
def test_ranks_of_a_block_hold_its_tokens_in_order_and_evenly(lengths: list[int], shape: GroupShape) -> None:
    blocks, ranks = block_pieces(chunk_of(lengths), shape), rank_pieces(chunk_of(lengths), shape)
    assert len(blocks) == shape.num_blocks
    for index, block in enumerate(blocks):
        inside = ranks[index * shape.ulysses : (index + 1) * shape.ulysses]
        tokens = [(p.document, token) for rank in inside for p in rank for token in range(p.start, p.stop)]
        assert tokens == [(p.document, token) for p in block for token in range(p.start, p.stop)]
        held = held_tokens(inside)
        assert max(held) - min(held) <= 1 and list(held) == sorted(held, reverse=True)


@given(lengths_of_documents, shapes())
def test_a_block_is_filled_only_up_to_one_token_per_rank(lengths: list[int], shape: GroupShape) -> None:
    for block in block_pieces(chunk_of(lengths), shape):
        dummies = sum(piece.num_tokens for piece in block if piece.document >= len(lengths))
        real = sum(piece.num_tokens for piece in block) - dummies
        assert dummies == max(0, shape.ulysses - real)


@given(st.lists(st.integers(64, 400), min_size=1, max_size=3), st.integers(2, 6), st.integers(1, 3))
def test_zigzag_gives_all_blocks_the_same_pairs(lengths: list[int], num_blocks: int, ulysses: int) -> None:
    blocks = block_pieces(chunk_of(lengths), GroupShape(num_blocks * ulysses, ulysses))
    pairs = [sum((p.stop + p.start + 1) * p.num_tokens / 2 for p in block) for block in blocks]
    # cuts may move by one token in every document
    assert max(pairs) - min(pairs) <= 4 * sum(lengths)


@pytest.mark.parametrize("length", [1, 3, 5, 9])
def test_many_short_documents_do_not_pile_up_on_one_rank(length: int) -> None:
    held = held_tokens(rank_pieces(chunk_of([length] * 64), GroupShape(4)))
    assert max(held) - min(held) <= 2 * length


@given(lengths_of_documents, shapes())
def test_what_travels_is_what_another_block_sees(lengths: list[int], shape: GroupShape) -> None:
    blocks = block_pieces(chunk_of(lengths), shape)
    for index, (block, travelling) in enumerate(zip(blocks, travelling_pieces(blocks), strict=True)):
        others = [query for other, queries in enumerate(blocks) if other != index for query in queries]
        seen = [k for k in block if any(q.document == k.document and q.start >= k.start for q in others)]
        assert [(p.document, p.start, p.stop) for p in travelling] == [(p.document, p.start, p.stop) for p in seen]
        assert [piece.first for piece in travelling] == list(accumulate((p.num_tokens for p in seen[:-1]), initial=0))[
            : len(seen)
        ]


@given(lengths_of_documents, shapes(), st.integers(1, 40), st.booleans())
def test_what_is_seen_through_a_window_or_chunk_is_the_end_of_a_piece(
    lengths: list[int], shape: GroupShape, size: int, has_chunks: bool
) -> None:
    def first_seen(position: int) -> int:
        return position - position % size if has_chunks else max(0, position - size + 1)

    blocks = block_pieces(chunk_of(lengths), shape)
    for index, keys in enumerate(blocks):
        for queries in (block for other, block in enumerate(blocks) if other != index):
            tokens = [(piece.document, token) for piece in queries for token in range(piece.start, piece.stop)]
            expected = [
                (key.document, token)
                for key in keys
                for token in range(key.start, key.stop)
                if any(document == key.document and first_seen(query) <= token <= query for document, query in tokens)
            ]
            seen = seen_pieces(keys, queries, first_seen)
            assert [(piece.document, token) for piece in seen for token in range(piece.start, piece.stop)] == expected
            assert {(piece.document, piece.stop) for piece in seen} <= {(piece.document, piece.stop) for piece in keys}
            assert [piece.first for piece in seen] == list(accumulate((p.num_tokens for p in seen), initial=0))[: len(seen)]


@settings(max_examples=30)
@given(st.integers(0, 10**7), st.integers(1, 70))
def test_contiguous_shards_differ_by_at_most_one_token(num_tokens: int, degree: int) -> None:
    chunk = chunk_of([num_tokens] if num_tokens else [])
    held = held_tokens(rank_pieces(chunk, GroupShape(degree, degree)))
    assert sum(held) == max(num_tokens, degree)
    assert max(held) - min(held) <= 1


def test_by_hand() -> None:
    # documents of 5 and 4 tokens on two contiguous shards of 5 and 4
    assert rank_pieces(chunk_of([5, 4]), GroupShape(2, 2)) == ((Piece(0, 0, 5, 0),), (Piece(1, 0, 4, 0),))
    # zigzag over two: rank 0 holds quarters 0 and 3 of the first document, rank 1 those of the second
    assert rank_pieces(chunk_of([8, 4]), GroupShape(2)) == (
        (Piece(0, 0, 2, 0), Piece(0, 6, 8, 2), Piece(1, 1, 2, 4), Piece(1, 2, 3, 5)),
        (Piece(0, 2, 4, 0), Piece(0, 4, 6, 2), Piece(1, 0, 1, 4), Piece(1, 3, 4, 5)),
    )
    # two blocks of two ranks: the block's four tokens are cut in the middle
    assert rank_pieces(chunk_of([8]), GroupShape(4, 2)) == (
        (Piece(0, 0, 2, 0),),
        (Piece(0, 6, 8, 0),),
        (Piece(0, 2, 4, 0),),
        (Piece(0, 4, 6, 0),),
    )


@pytest.mark.parametrize(
    ("lengths", "degree", "bounds"),
    [([], 1, (0, 1)), ([], 3, (0, 1, 2, 3)), ([2], 4, (0, 2, 3, 4)), ([2, 5], 4, (0, 2, 7))],
)
def test_document_bounds_count_dummies_as_documents(lengths: list[int], degree: int, bounds: tuple[int, ...]) -> None:
    (block,) = block_pieces(chunk_of(lengths), GroupShape(degree, degree))
    assert document_bounds(block) == bounds


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=12),
    st.sampled_from([(2, 1), (3, 1), (5, 1), (8, 1), (4, 2), (6, 2), (12, 4)]),
)
def test_no_rank_holds_more_than_an_even_share(lengths: list[int], shape: tuple[int, int]) -> None:
    degree, ulysses = shape
    pieces = rank_pieces(chunk_of(lengths), GroupShape(degree, ulysses))
    total = max(sum(lengths), degree)
    held = held_tokens(pieces)
    # with fewer tokens, dummy tokens may fill blocks that got none of the short documents
    if sum(lengths) >= 2 * degree:
        assert sum(held) == sum(lengths)
        assert max(held) <= -(-total // degree)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 60))
def test_lent_pieces_keep_every_token_at_its_position(num_positions: int, num_stages: int, more: int) -> None:
    num_tokens = num_positions * num_stages + more
    held = lent_pieces(num_tokens, num_positions, num_stages)
    alone = rank_pieces(chunk_of([num_tokens]), GroupShape(num_positions, num_positions))
    for position, (whole,) in enumerate(alone):
        found = [token for stage in held for piece in stage[position] for token in range(piece.start, piece.stop)]
        assert sorted(found) == list(range(whole.start, whole.stop))
        counts = [sum(piece.num_tokens for piece in stage[position]) for stage in held]
        assert max(counts) - min(counts) <= 1 <= min(counts)
        for stage in held:
            assert [piece.first for piece in stage[position]] == [0, *accumulate(p.num_tokens for p in stage[position])][:-1]


def test_lent_pieces_by_hand() -> None:
    # shards [0, 9) and [9, 17): the first stage holds quarters 0 and 3, the second quarters 1 and 2; the first gets the odd token
    assert lent_pieces(17, 2, 2) == (
        ((Piece(0, 0, 3, 0), Piece(0, 7, 9, 3)), (Piece(0, 9, 11, 0), Piece(0, 15, 17, 2))),
        ((Piece(0, 3, 5, 0), Piece(0, 5, 7, 2)), (Piece(0, 11, 13, 0), Piece(0, 13, 15, 2))),
    )


def test_a_slice_of_too_few_tokens_cannot_be_lent_ranks() -> None:
    with pytest.raises(ValueError, match=r"7 tokens cannot be run by 4 stages of 2 rank\(s\); give it at least 8 tokens"):
        lent_pieces(7, 2, 4)
