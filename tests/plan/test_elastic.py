"""Chunks for pipelines hold every token once, at most one tail slice each, balanced seconds, and packs near the optimum."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import pairwise

import pytest
from helpers.measures.calls import counted_calls
from helpers.plans.grouping_problems import lognormal_lengths, set_partitions
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx.plan.chunks import aligned_chunks, elastic_chunks, fixed_chunks
from hf_longctx.plan.core.orders import families
from hf_longctx.plan.core.types import Chunk, Span
from hf_longctx.plan.model.attention_pairs import FULL, SpanRates

RATES = st.sampled_from([(0.0, 1.0), (1.0, 0.0), (1e-3, 1.0), (0.1, 1.0), (1e-15, 1e-9)])
LENGTHS = st.dictionaries(st.integers(0, 50), st.integers(1, 60) | st.integers(1, 3000), max_size=25)


def seconds(chunk: Chunk, pair_s: float, token_s: float) -> float:
    return pair_s * FULL.of_chunk(chunk) + token_s * chunk.num_tokens


def check_chunks(chunks: Sequence[Chunk], lengths: dict[int, int], capacity: int) -> None:
    """Assert that chunks cover every token once, with slices in order and whole sequences after them."""
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    pieces: dict[int, list[tuple[int, int, int]]] = {sequence: [] for sequence in lengths}
    for chunk in chunks:
        assert 0 < chunk.num_tokens <= capacity
        for place, span in enumerate(chunk.spans):
            pieces[span.sequence].append((chunk.index, span.start, span.stop))
            # a slice comes first in its chunk, so that a chunk has at most one
            assert place == 0 or (span.start, span.stop) == (0, lengths[span.sequence])
        if chunk.spans[0].stop < lengths[chunk.spans[0].sequence]:
            # short sequences follow tails only, the last slices of their sequences
            assert len(chunk.spans) == 1
    for sequence, found in pieces.items():
        assert found[0][1] == 0 and found[-1][2] == lengths[sequence]
        for (index, _, stop), (next_index, start, _) in pairwise(found):
            assert stop == start and next_index == index + 1


@given(LENGTHS, st.integers(1, 9), RATES, st.integers(1, 4000))
def test_elastic_chunks_hold_every_token_once_and_are_no_longer_than_a_slice(
    lengths: dict[int, int], num_slices: int, rates: tuple[float, float], capacity: int
) -> None:
    chunks = elastic_chunks(lengths, num_slices, SpanRates(*rates), capacity)
    check_chunks(chunks, lengths, capacity)
    if not chunks:
        return
    longest = min(lengths, key=lambda sequence: (-lengths[sequence], sequence))
    slices = [chunk for chunk in chunks if chunk.spans[0].sequence == longest]
    assert len(slices) >= min(num_slices, lengths[longest]) or lengths[longest] < 50 * num_slices
    mesh = [chunk.spans[0].stop for chunk in slices]
    cell_s = max(seconds(Chunk(0, chunk.spans[:1]), *rates) for chunk in slices)
    assert max(seconds(chunk, *rates) for chunk in chunks) <= 1.05 * cell_s * (1 + 1e-9)
    # every long sequence is cut at the bounds of the longest
    for span in (span for chunk in chunks for span in chunk.spans):
        assert span.start in (0, *mesh) and (span.stop in mesh or span.stop == lengths[span.sequence])
        assert span.stop - span.start == lengths[span.sequence] or lengths[span.sequence] > mesh[0]
    counts = [sum(1 for _ in run) for _, run in itertools.groupby(chunk.spans[0].sequence for chunk in chunks)]
    assert counts == sorted(counts, reverse=True)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=12), st.integers(500, 900), RATES)
def test_one_slice_keeps_sequences_whole(lengths: list[int], capacity: int, rates: tuple[float, float]) -> None:
    chunks = elastic_chunks(dict(enumerate(lengths)), 1, SpanRates(*rates), capacity)
    spans = {span for chunk in chunks for span in chunk.spans}
    assert spans == {Span(i, 0, n) for i, n in enumerate(lengths)}


def test_a_sequence_above_the_capacity_is_cut_whatever_is_asked_for() -> None:
    chunks = elastic_chunks({0: 1000}, 1, SpanRates(0.0, 1.0), 300)
    assert [chunk.num_tokens for chunk in chunks] == [250, 250, 250, 250]
    # if only pairs cost time, the first slice is the longest
    sizes = [chunk.num_tokens for chunk in elastic_chunks({0: 1000}, 1, SpanRates(1.0, 0.0), 300)]
    assert max(sizes) == sizes[0] <= 300 and len(sizes) == 12


def test_packs_end_at_the_capacity_where_there_is_time_for_more() -> None:
    # the long sequence takes 5100 s, a short one 1.5
    chunks = elastic_chunks({0: 100, **dict.fromkeys(range(1, 301), 1)}, 1, SpanRates(1.0, 1.0), 100)
    assert [chunk.num_tokens for chunk in chunks] == [100] * 4


def test_packs_may_take_longer_than_the_longest_sequence_where_that_is_asked_for() -> None:
    lengths = dict.fromkeys(range(40), 10)
    assert len(elastic_chunks(lengths, 1, SpanRates(0.0, 1.0), 1000)) == 40
    chunks = elastic_chunks(lengths, 1, SpanRates(0.0, 1.0), 1000, target_s=100.0)
    assert [chunk.num_tokens for chunk in chunks] == [100] * 4
    # the remainder is spread over all packs, not left in a small last one
    chunks = elastic_chunks(dict.fromkeys(range(42), 10), 1, SpanRates(0.0, 1.0), 1000, target_s=100.0)
    assert [chunk.num_tokens for chunk in chunks] == [90, 90, 80, 80, 80]


def test_a_long_sequence_of_the_batch_decides_what_the_others_look_like() -> None:
    # worked out by hand: 400 tokens in 4 slices of 100, 250 on the same mesh, and 200 tokens of short ones, of which the
    # buckets that are least dense (all are equal here) take the longest
    chunks = elastic_chunks({7: 400, 3: 250, 1: 60, 2: 60, 4: 40, 5: 40}, 4, SpanRates(0.0, 1.0), 1000)
    assert [[(s.sequence, s.start, s.stop) for s in chunk.spans] for chunk in chunks] == [
        [(7, 0, 100)],
        [(7, 100, 200)],
        [(7, 200, 300)],
        [(7, 300, 400)],
        [(3, 0, 100)],
        [(3, 100, 200)],
        [(3, 200, 250), (4, 0, 40)],
        [(1, 0, 60), (5, 0, 40)],
        [(2, 0, 60)],
    ]


def least_makespan(sizes: Sequence[float], num_bins: int) -> float:
    """The least possible maximum over bins, by plain enumeration."""
    partitions = set_partitions(tuple(range(len(sizes))))
    return min(max(sum(sizes[i] for i in part) for part in parts) for parts in partitions if len(parts) <= num_bins)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=6), st.integers(101, 150), st.sampled_from([(0.0, 1.0), (0.02, 1.0)]))
def test_packs_are_close_to_the_best_ones_in_as_many_buckets(short: list[int], longest: int, rates: tuple[float, float]) -> None:
    lengths = {0: longest, **{1 + i: n for i, n in enumerate(short)}}
    chunks = elastic_chunks(lengths, 1, SpanRates(*rates), 10_000)
    sizes = [seconds(Chunk(0, (Span(0, 0, n),)), *rates) for n in short]
    longest_s = seconds(Chunk(0, (Span(0, 0, longest),)), *rates)
    best_s = least_makespan([*sizes, longest_s], len(chunks))
    assert max(seconds(chunk, *rates) for chunk in chunks) <= 4 / 3 * best_s
    # the number of buckets exceeds the fewest possible for this limit by at most a third
    fewest = next(count for count in range(1, 9) if least_makespan([*sizes, longest_s], count) <= longest_s * (1 + 1e-9))
    assert len(chunks) <= max(fewest + 1, 4 / 3 * fewest)


@pytest.mark.parametrize("num_slices", [2, 8, 16])
def test_real_mixtures_are_even_and_quick(num_slices: int) -> None:
    lengths = dict(enumerate(lognormal_lengths(num_slices, 512, 98304, median=1500.0, sigma=1.3)))
    pair_s, token_s = 4e-5, 1.0
    chunks, num_calls = counted_calls(lambda: elastic_chunks(lengths, num_slices, SpanRates(pair_s, token_s), 1 << 20))
    check_chunks(chunks, lengths, 1 << 20)
    times = [seconds(chunk, pair_s, token_s) for chunk in chunks]
    assert max(times) <= 1.1 * sum(times) / len(times)
    fixed = [seconds(chunk, pair_s, token_s) for chunk in fixed_chunks(lengths, chunks[0].num_tokens)]
    assert max(fixed) > 1.5 * sum(fixed) / len(fixed)
    assert num_calls < 10_000


@pytest.mark.wide
@given(LENGTHS, st.integers(1, 9), RATES, st.integers(1, 4000), st.sampled_from([1.05, 1.3, 2.0]))
def test_chunks_grow_at_the_beginning_and_shrink_at_the_end(
    lengths: dict[int, int], num_slices: int, rates: tuple[float, float], capacity: int, growth: float
) -> None:
    chunks = elastic_chunks(lengths, num_slices, SpanRates(*rates), capacity, growth=growth)
    pieces: dict[int, int] = dict.fromkeys(lengths, 0)
    for chunk in chunks:
        assert 0 < chunk.num_tokens <= capacity
        for span in chunk.spans:
            assert span.start == pieces[span.sequence]
            pieces[span.sequence] = span.stop
    assert pieces == lengths
    plain = elastic_chunks(lengths, num_slices, SpanRates(*rates), capacity)
    most_s = max((seconds(chunk, *rates) for chunk in plain), default=0.0)
    assert max((seconds(chunk, *rates) for chunk in chunks), default=0.0) <= most_s * (1.05 + 1e-9)


def test_the_shortest_sequences_make_chunks_of_few_tokens_at_both_ends() -> None:
    lengths = {0: 100, 1: 100, 2: 100, **{place: 10 for place in range(3, 33)}}
    chunks = elastic_chunks(lengths, 1, SpanRates(0.0, 1.0), 1000, growth=1.5)
    sizes = [chunk.num_tokens for chunk in chunks]
    ramp = [20, 30, 50, 80]
    assert sizes[:3] == ramp[:3] and sizes[-3:] == ramp[2::-1] and max(sizes) <= 105


@given(st.lists(LENGTHS, min_size=1, max_size=4), st.integers(1, 9), RATES, st.sampled_from([0.0, 1.3]))
def test_groups_side_by_side_have_slices_in_the_same_slots(
    groups: list[dict[int, int]], num_slices: int, rates: tuple[float, float], growth: float
) -> None:
    longest = max((length for lengths in groups for length in lengths.values()), default=0)
    how = num_slices, SpanRates(*rates), 1 << 20, 0.0, growth, longest
    own = [elastic_chunks({100 * place + i: n for i, n in group.items()}, *how) for place, group in enumerate(groups)]
    slots = aligned_chunks(own)
    assert len({len(chunks) for chunks in slots}) == 1
    for chunks, before in zip(slots, own, strict=True):
        assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
        assert {chunk.spans for chunk in chunks if chunk.spans} == {chunk.spans for chunk in before}
        for sequence in {span.sequence for chunk in before for span in chunk.spans}:
            spans = [span for chunk in chunks for span in chunk.spans if span.sequence == sequence]
            assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    if slots[0]:
        # no more slots are in flight together than slices of the sequence with the most
        longest_family = max(len(family) for chunks in own if chunks for family in families(chunks))
        assert max(map(len, families(*slots))) == longest_family
    # slots are few: a group has a dummy chunk only where another group has slices that it lacks sequences for
    assert len(slots[0]) <= sum(map(len, own))


def test_sequences_of_other_groups_are_cut_at_the_bounds_of_the_longest() -> None:
    rates = SpanRates(1e-3, 1.0)
    whole, other = elastic_chunks({0: 1000}, 4, rates, 1000), elastic_chunks({1: 700}, 4, rates, 1000, longest=1000)
    bounds = [chunk.spans[0].stop for chunk in whole]
    assert [chunk.spans[0].stop for chunk in other] == [*(bound for bound in bounds if bound < 700), 700]


@pytest.mark.wide
@given(LENGTHS, st.integers(1, 1000))
def test_fixed_chunks_hold_every_token_once(lengths: dict[int, int], chunk_tokens: int) -> None:
    chunks = fixed_chunks(lengths, chunk_tokens)
    check_chunks(chunks, lengths, chunk_tokens)
    # two packs that fit into one would have become one
    packs = [chunk.num_tokens for chunk in chunks if chunk.num_tokens == sum(lengths[s.sequence] for s in chunk.spans)]
    assert all(one + other > chunk_tokens for one, other in itertools.combinations(packs, 2))


def test_fixed_chunks_cut_evenly_by_tokens() -> None:
    chunks = fixed_chunks({0: 5, 1: 10, 2: 3, 3: 1}, 4)
    assert [[(s.sequence, s.start, s.stop) for s in chunk.spans] for chunk in chunks] == [
        [(1, 0, 3)],
        [(1, 3, 6)],
        [(1, 6, 10)],
        [(0, 0, 2)],
        [(0, 2, 5)],
        [(2, 0, 3), (3, 0, 1)],
    ]


def test_bad_numbers_are_named() -> None:
    with pytest.raises(ValueError, match="num_slices is 0; it must be at least 1"):
        elastic_chunks({0: 5}, 0, SpanRates(1.0, 1.0), 10)
    with pytest.raises(ValueError, match="capacity_tokens is 0; it must be at least 1"):
        elastic_chunks({0: 5}, 1, SpanRates(1.0, 1.0), 0)
    with pytest.raises(ValueError, match="sequence 3 has 0 tokens"):
        fixed_chunks({3: 0}, 5)
