"""Promises of the one rule that says which token lies where: nothing lost, nobody empty, nobody far ahead."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.sharding import document_bounds, num_dummy_tokens, shard_bounds, shard_tokens
from hf_longctx.plan.types import Chunk, Span

token_counts = st.one_of(st.integers(0, 40), st.integers(0, 10**7))
degrees = st.integers(1, 70)


@settings(derandomize=True, deadline=None)
@given(token_counts, degrees)
def test_shards_cover_the_chunk_and_differ_by_at_most_one_token(num_tokens: int, degree: int) -> None:
    shards = shard_tokens(num_tokens, degree)
    assert len(shards) == degree
    assert sum(shards) == num_tokens + num_dummy_tokens(num_tokens, degree)
    assert max(shards) - min(shards) <= 1
    assert list(shards) == sorted(shards, reverse=True)


@settings(derandomize=True, deadline=None)
@given(token_counts, degrees)
def test_no_rank_is_ever_empty(num_tokens: int, degree: int) -> None:
    assert min(shard_tokens(num_tokens, degree)) >= 1


@settings(derandomize=True, deadline=None)
@given(token_counts, degrees)
def test_bounds_are_contiguous_and_end_with_the_padded_chunk(num_tokens: int, degree: int) -> None:
    bounds = [shard_bounds(num_tokens, degree, index) for index in range(degree)]
    assert bounds[0][0] == 0
    assert [start for start, _ in bounds[1:]] == [stop for _, stop in bounds[:-1]]
    assert bounds[-1][1] == max(num_tokens, degree)
    assert tuple(stop - start for start, stop in bounds) == shard_tokens(num_tokens, degree)


@settings(derandomize=True, deadline=None)
@given(token_counts, degrees)
def test_a_chunk_is_padded_only_up_to_one_token_per_rank(num_tokens: int, degree: int) -> None:
    dummies = num_dummy_tokens(num_tokens, degree)
    assert dummies == (degree - num_tokens if num_tokens < degree else 0)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 9), max_size=6), st.integers(1, 9))
def test_dummy_tokens_lie_last_and_each_is_a_document_of_its_own(lengths: list[int], degree: int) -> None:
    chunk = Chunk(0, tuple(Span(i, 5 * (i == 0), 5 * (i == 0) + length) for i, length in enumerate(lengths)))
    bounds = document_bounds(chunk, degree)
    documents = [stop - start for start, stop in itertools.pairwise(bounds)]
    assert bounds[0] == 0
    assert documents[: len(lengths)] == lengths
    assert documents[len(lengths) :] == [1] * num_dummy_tokens(sum(lengths), degree)
    assert bounds[-1] == sum(shard_tokens(chunk.num_tokens, degree))


@pytest.mark.parametrize(
    ("num_tokens", "degree", "shards"),
    [(10, 4, (3, 3, 2, 2)), (3, 4, (1, 1, 1, 1)), (0, 1, (1,)), (0, 3, (1, 1, 1)), (7, 1, (7,)), (8, 4, (2, 2, 2, 2))],
)
def test_small_cases_by_hand(num_tokens: int, degree: int, shards: tuple[int, ...]) -> None:
    assert shard_tokens(num_tokens, degree) == shards


def test_the_dummy_chunk_is_one_document_per_rank() -> None:
    assert document_bounds(Chunk(0), 1) == (0, 1)
    assert document_bounds(Chunk(0), 3) == (0, 1, 2, 3)
    assert document_bounds(Chunk(0, (Span(0, 0, 2),)), 4) == (0, 2, 3, 4)
    assert document_bounds(Chunk(0, (Span(0, 0, 2), Span(1, 0, 5))), 4) == (0, 2, 7)
