"""Packing by length classes equals best fit decreasing: every bin is as full as if sequences were placed one by one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import hf_longctx
from hf_longctx.plan.groups.best_fit import MAX_CAPACITY, fewest_bins, pack_sequences


def best_fit_decreasing(lengths: list[int], capacity: int) -> list[int]:
    """Tokens in every bin after placing one sequence at a time."""
    fills: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [place for place, fill in enumerate(fills) if fill + length <= capacity]
        if fitting:
            fills[max(fitting, key=lambda place: fills[place])] += length
        else:
            fills.append(length)
    return sorted(fills)


def fewest_by_trying(lengths: list[int], capacity: int, fills: tuple[int, ...] = ()) -> int:
    """The fewest bins, found by trying all packings."""
    if not lengths:
        return len(fills)
    first, *rest = lengths
    ways = [(*fills[:i], fill + first, *fills[i + 1 :]) for i, fill in enumerate(fills) if fill + first <= capacity]
    return min(fewest_by_trying(rest, capacity, way) for way in [*ways, (*fills, first)])


@st.composite
def packings(draw: st.DrawFn, max_size: int = 80) -> tuple[list[int], int]:
    """Lengths with repeats, from narrow to full range, and a capacity."""
    capacity = draw(st.integers(1, 60))
    longest = draw(st.integers(1, capacity))
    return draw(st.lists(st.integers(1, longest), max_size=max_size)), capacity


@given(packings())
@example(([7] * 5 + [3] * 9, 10))
@example(([1] * 7, 3))
def test_bins_are_as_full_as_those_of_best_fit_decreasing(packing: tuple[list[int], int]) -> None:
    lengths, capacity = packing
    packed = pack_sequences(lengths, capacity)
    assert sorted(i for members in packed.bins() for i in members) == list(range(len(lengths)))
    assert sorted(sum(lengths[i] for i in members) for members in packed.bins()) == best_fit_decreasing(lengths, capacity)


@pytest.mark.parametrize("capacity", [100, 100_000])
def test_thousands_of_sequences_are_packed_like_one_by_one(capacity: int) -> None:
    # lengths below and above 16 bits
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(np.log(capacity / 8), 1.5, 3000).astype(int), 1, capacity)
    packed = pack_sequences(lengths, capacity)
    assert np.array_equal(np.sort(packed.order), np.arange(3000))
    fills = [int(lengths[members].sum()) for members in packed]
    assert sorted(fills) == best_fit_decreasing(lengths.tolist(), capacity)
    assert packed.efficiency == pytest.approx(sum(fills) / (len(fills) * capacity))


def test_a_bin_lists_the_longest_first_and_equal_ones_in_the_order_given() -> None:
    lengths = [4, 9, 4, 1, 4, 1, 4]
    packed = pack_sequences(lengths, 10)
    assert packed.bins() == [[1, 3], [0, 2, 5], [4, 6]]
    assert [members.tolist() for members in packed] == packed.bins() and len(packed) == 3
    assert packed[-1].tolist() == [4, 6]
    assert packed.num_tokens == 27 and packed.efficiency == 27 / 30
    # long enough that an unstable sort would swap equal lengths
    assert pack_sequences([3] * 1000 + [2] * 1000, 5).bins() == [[i, 1000 + i] for i in range(1000)]


@given(packings(), st.randoms(use_true_random=False))
def test_the_order_of_the_sequences_does_not_change_how_full_bins_are(packing: tuple[list[int], int], random: Any) -> None:
    lengths, capacity = packing
    shuffled = random.sample(lengths, len(lengths))
    fills = [sorted(sum(some[i] for i in members) for members in pack_sequences(some, capacity)) for some in (lengths, shuffled)]
    assert fills[0] == fills[1]


@pytest.mark.quick
@given(packings(max_size=7))
@example(([6, 6, 6, 5, 5], 10))
def test_no_packing_needs_fewer_bins_than_the_bound(packing: tuple[list[int], int]) -> None:
    lengths, capacity = packing
    assert -(-sum(lengths) // capacity) <= fewest_bins(lengths, capacity) <= fewest_by_trying(lengths, capacity)


def test_the_bound_counts_sequences_that_cannot_share() -> None:
    # 33 tokens would fit into 4 bins of 10, but each 6 needs its own bin, and the three 5s need two more
    assert fewest_bins([6, 6, 6, 5, 5, 5], 10) == 5
    # only a 1 would fit next to a 9
    assert fewest_bins([9, 9, 2, 2], 10) == 3


def test_a_million_sequences_fill_their_bins() -> None:
    lengths = np.clip(np.random.default_rng(1).lognormal(7.0, 1.3, 1_000_000).astype(int), 16, 8192)
    packed = pack_sequences(lengths, 8192)
    assert packed.efficiency >= 0.999
    fills = np.add.reduceat(lengths[packed.order], packed.offsets[:-1])
    assert fills.max() <= 8192 and fills.sum() == lengths.sum()
    assert len(packed) <= fewest_bins(lengths, 8192) + 1


def test_no_sequences_need_no_bins() -> None:
    packed = pack_sequences([], 10)
    assert (len(packed), packed.bins(), packed.efficiency, fewest_bins([], 10)) == (0, [], 1.0, 0)


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.uint64, object])
def test_any_kind_of_integers_will_do(kind: Any) -> None:
    assert pack_sequences(np.array([3, 5, 2], dtype=kind), 5).bins() == [[1], [0, 2]]


def test_the_largest_capacity_takes_lengths_to_the_brim() -> None:
    lengths = [MAX_CAPACITY - 1, 1, MAX_CAPACITY]
    assert pack_sequences(lengths, MAX_CAPACITY).bins() == [[2], [0, 1]]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("lengths", "capacity", "message"),
    [
        ([5, 12, 30], 10, "sequence 2 has 30 tokens, but a bin holds 10; raise capacity to 30 or cut"),
        ([5, 0, 3], 10, "sequence 1 has 0 tokens"),
        ([5, 3, -2], 10, "sequence 2 has -2 tokens"),
        ([5, 2.5], 10, "the length of sequence 0 is 5.0; give whole numbers"),
        ([5, None], 10, "the length of sequence 1 is None"),
        (["5"], 10, "the length of sequence 0 is '5'"),
        ([True], 10, "the length of sequence 0 is True"),
        ([5, 2**70], 10, f"the length of sequence 1 is {2**70}"),
        (np.array([2**63], dtype=np.uint64), 10, f"sequence 0 has {2**63} tokens, but a bin holds 10"),
        ([[1, 2], [3]], 10, "lengths has 2 dimensions; give one number per sequence"),
        (7, 10, "lengths has 0 dimensions"),
        ([5], 0, "capacity is 0; give 1 to"),
        ([5], MAX_CAPACITY + 1, f"capacity is {MAX_CAPACITY + 1}; give 1 to {MAX_CAPACITY}"),
        ([5], 10.0, "capacity is 10.0; give a whole number"),
        ([5], True, "capacity is True"),
    ],
)
def test_bad_input_is_named_with_what_is_allowed(lengths: Any, capacity: Any, message: str) -> None:
    for function in (pack_sequences, fewest_bins):
        with pytest.raises(ValueError) as caught:
            function(lengths, capacity)
        assert message in str(caught.value)


def test_a_packing_cannot_be_changed() -> None:
    packed = pack_sequences([3, 5, 2], 5)
    assert packed.offsets[-1] == 3 and all(start < stop for start, stop in pairwise(packed.offsets))
    with pytest.raises(ValueError, match="read-only"):
        packed.order[0] = 1


def test_pack_sequences_is_public() -> None:
    assert hf_longctx.pack_sequences is pack_sequences
