"""Layouts of a stage: all are found and the best kept; sequences are dealt once, within limits and near the optimum."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx.plan.pipeline.candidates import deal_sequences, promising, stage_layouts

NO_LIMIT = 1 << 40


@pytest.mark.parametrize(
    "num_ranks, degrees", [(4, (1, 2, 4)), (3, (1, 2)), (5, (2, 4)), (3, (2,)), (8, (1, 2, 4, 8)), (7, (2, 3, 5)), (2, (4,))]
)
def test_layouts_are_all_full_ones_of_up_to_three_degrees(num_ranks: int, degrees: tuple[int, ...]) -> None:
    found = stage_layouts(num_ranks, degrees)
    assert len(set(found)) == len(found)
    everything = {
        tuple(sorted(chosen, reverse=True))
        for count in range(1, num_ranks + 1)
        for chosen in itertools.combinations_with_replacement(degrees, count)
        if sum(chosen) <= num_ranks and num_ranks - sum(chosen) < degrees[0] and len(set(chosen)) <= 3
    }
    assert set(found) == everything


@pytest.mark.quick
def test_many_ranks_have_hundreds_of_layouts_not_thousands() -> None:
    assert len(stage_layouts(32, (*range(1, 9), 16, 24, 32))) < 200
    assert (8,) * 4 in stage_layouts(32, (1, 2, 4, 8, 16, 32))


def test_promising_layouts_hold_the_longest_sequence_and_those_of_one_degree_stay() -> None:
    lengths = np.array([100, 10, 10, 10])
    seconds = {degree: lengths / degree**0.9 for degree in (1, 2, 4)}
    longest = {1: 30, 2: 60, 4: 200}
    layouts = stage_layouts(8, (1, 2, 4))
    kept = promising(layouts, seconds, lengths, longest, 2)
    # 100 tokens need four ranks
    assert kept == [(4, 4), (4, 1, 1, 1, 1), (4, 2, 1, 1)]
    assert promising(layouts, seconds, lengths, {1: 30, 2: 60, 4: 90}, 2) == []


def test_layouts_in_which_the_longest_sequence_is_done_late_are_not_promising() -> None:
    lengths = np.array([100, 10, 10, 10])
    seconds = {degree: lengths / degree**0.9 for degree in (1, 2, 4)}
    # alone it takes 100 s on one rank, 54 on two, 29 on four, and all work spread over 8 ranks 16
    kept = promising(stage_layouts(8, (1, 2, 4)), seconds, lengths, {1: 200, 2: 200, 4: 200}, 2)
    assert kept == [(4, 4), (2, 2, 2, 2), (1,) * 8, (4, 1, 1, 1, 1), (4, 2, 1, 1)]


def makespan(dealt: Sequence[Sequence[int]], seconds: Sequence[Sequence[float]]) -> float:
    return max(sum(seconds[group][i] for i in members) for group, members in enumerate(dealt))


def least_makespan(seconds: Sequence[Sequence[float]]) -> float:
    """By plain enumeration of who takes what."""
    count = len(seconds[0])
    return min(
        makespan([[i for i in range(count) if choice[i] == group] for group in range(len(seconds))], seconds)
        for choice in itertools.product(range(len(seconds)), repeat=count)
    )


@pytest.mark.wide
@given(st.lists(st.integers(1, 200), min_size=1, max_size=7), st.integers(1, 4))
def test_equal_groups_are_within_a_third_of_the_optimum(lengths: list[int], num_groups: int) -> None:
    seconds = [[n + n * n / 50 for n in lengths]] * num_groups
    dealt = deal_sequences(lengths, seconds, [NO_LIMIT] * num_groups)
    assert sorted(i for members in dealt for i in members) == list(range(len(lengths)))
    bound = 4 / 3 - 1 / (3 * num_groups)
    assert makespan(dealt, seconds) <= bound * least_makespan(seconds) * (1 + 1e-9)


@pytest.mark.quick
@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=6),
    st.sampled_from([(2, 1), (4, 2, 2), (8, 1), (2, 1, 1), (3, 1)]),
    st.sampled_from([1.0, 0.9]),
)
def test_unequal_groups_are_close_to_the_optimum(lengths: list[int], degrees: tuple[int, ...], scaling: float) -> None:
    # one speed per group, so that longest first keeps 2 m / (m + 1) (Gonzalez, Ibarra and Sahni, 1977)
    seconds = [[(n + n * n / 50) / degree**scaling for n in lengths] for degree in degrees]
    dealt = deal_sequences(lengths, seconds, [NO_LIMIT] * len(degrees))
    assert sorted(i for members in dealt for i in members) == list(range(len(lengths)))
    bound = 2 * len(degrees) / (len(degrees) + 1)
    assert makespan(dealt, seconds) <= bound * least_makespan(seconds) * (1 + 1e-9)


def test_many_sequences_leave_unequal_groups_done_together() -> None:
    draw = np.random.default_rng(5)
    lengths = np.maximum(1, draw.lognormal(7, 1.2, 300)).astype(int).tolist()
    seconds = [[n / speed for n in lengths] for speed in (4, 2, 1.5, 1)]
    dealt = deal_sequences(lengths, seconds, [NO_LIMIT] * 4)
    assert makespan(dealt, seconds) <= 1.01 * sum(lengths) / 8.5


def test_the_short_way_for_equal_groups_is_the_long_one() -> None:
    lengths = [90, 30, 30, 60, 10, 50]
    seconds = [[float(n) for n in lengths]] * 3
    expected = deal_sequences(lengths, seconds, [NO_LIMIT] * 3, capacity=[NO_LIMIT] * 3)
    # by hand: 90 | 60 | 50, then 30 onto 50, 30 onto 60, 10 onto 80
    assert deal_sequences(lengths, seconds, [NO_LIMIT] * 3) == expected == ((0,), (3, 2), (5, 1, 4))


@given(st.lists(st.integers(1, 100), min_size=1, max_size=8), st.lists(st.integers(50, 200), min_size=1, max_size=3))
def test_limits_hold(lengths: list[int], longest: list[int]) -> None:
    seconds = [[n / most for n in lengths] for most in longest]
    capacity = [3 * most for most in longest]
    try:
        dealt = deal_sequences(lengths, seconds, longest, capacity)
    except ValueError as error:
        assert "allow larger groups or plan several micro-batches" in str(error)
        assert max(lengths) > max(longest) or sum(lengths) > sum(capacity) - max(lengths) * len(longest)
        return
    assert sorted(i for members in dealt for i in members) == list(range(len(lengths)))
    for members, most, room in zip(dealt, longest, capacity, strict=True):
        assert max((lengths[i] for i in members), default=0) <= most
        assert sum(lengths[i] for i in members) <= room
        assert [lengths[i] for i in members] == sorted((lengths[i] for i in members), reverse=True)


def test_a_long_sequence_goes_where_it_fits_though_another_group_is_free() -> None:
    assert deal_sequences([10, 9, 2], [[10.0, 9, 2], [1.0, 1, 1]], [20, 5]) == ((0, 1), (2,))
    with pytest.raises(ValueError, match="sequence 1 has 21 tokens, but of 2 groups side by side none takes more than 20"):
        deal_sequences([3, 21], [[3.0, 21], [3.0, 21]], [20, 5])


def test_no_sequences_leave_every_group_empty() -> None:
    assert deal_sequences([], [[], []], [5, 5]) == ((), ())
