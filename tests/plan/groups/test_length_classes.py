"""Buckets equal brute force and are as close as published, and classes are rounded to the right side."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from helpers.plans.grouping_problems import flexsp_problem, flexsp_problems
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.groups.flexsp import LengthClasses, bucket_ends, draw_groups

few_lengths = st.lists(st.integers(1, 60), min_size=1, max_size=12)


def tokens_added(lengths: list[int], ends: tuple[int, ...] | list[int]) -> int:
    """Tokens that rounding up adds, where runs of the different lengths end at `ends`."""
    values = sorted(set(lengths))
    rounded = {value: values[min(end for end in ends if end > i) - 1] for i, value in enumerate(values)}
    return sum(rounded[length] - length for length in lengths)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(few_lengths, st.integers(1, 5))
def test_buckets_add_the_fewest_tokens(lengths: list[int], num_buckets: int) -> None:
    counts = Counter(lengths)
    values = sorted(counts)
    ends = bucket_ends(values, [counts[value] for value in values], num_buckets)
    assert ends == sorted(set(ends)) and ends[-1] == len(values) and len(ends) <= num_buckets
    inner = range(1, len(values))
    cuts = itertools.chain.from_iterable(itertools.combinations(inner, size) for size in range(min(num_buckets, len(values))))
    assert tokens_added(lengths, ends) == min(tokens_added(lengths, [*cut, len(values)]) for cut in cuts)


def test_sixteen_buckets_add_little_to_measured_batches() -> None:
    """FlexSP publishes at most 2.3 % for Wikipedia and 16 buckets per micro-batch (section 6.4)."""
    for name, problem, _, _ in flexsp_problems():
        classes = LengthClasses.of(problem, 16, rounded_up=True)
        assert len(classes.counts) <= 16
        assert classes.counts @ classes.tokens <= 1.023 * sum(problem.lengths), name


@settings(derandomize=True, deadline=None, max_examples=60)
@given(few_lengths, st.integers(1, 20), st.booleans())
def test_classes_hold_every_sequence_once_and_err_to_one_side(lengths: list[int], most: int, rounded_up: bool) -> None:
    problem = flexsp_problem(lengths)
    classes = LengthClasses.of(problem, most, rounded_up)
    assert sorted(i for members in classes.members for i in members) == list(range(len(lengths)))
    assert len(classes.counts) == min(most, len(set(lengths))) or len(classes.counts) < most
    sign = 1 if rounded_up else -1
    for count, tokens, seconds, members in zip(classes.counts, classes.tokens, classes.seconds.T, classes.members, strict=True):
        assert count == len(members) > 0
        for i in members:
            assert sign * (tokens - lengths[i]) >= 0
            assert (sign * (seconds - problem.seconds[:, i]) >= 0).all()
    if most >= len(set(lengths)):
        # there is no rounding if there are enough classes
        assert classes.tokens.tolist() == sorted(set(lengths))
        assert np.array_equal(classes.seconds[:, 0], problem.seconds[:, lengths.index(min(lengths))])


def test_groups_are_drawn_from_long_to_short_and_surplus_leaves_the_slowest() -> None:
    problem = flexsp_problem([1000, 1010, 1020, 3000], num_ranks=8)
    classes = LengthClasses.of(problem, 2, rounded_up=True)
    assert classes.counts.tolist() == [3, 1]
    # four slots for three short sequences: the group that also runs the long one loses its slot
    contents = np.array([[1.0, 1.0], [3.0, 0.0]])
    assert draw_groups(problem, classes, np.array([0, 0]), contents) == ((1, (3,)), (1, (2, 1, 0)))
    # the longest of a class goes to the group that has the least to do
    contents = np.array([[1.0, 0.0], [2.0, 1.0]])
    assert draw_groups(problem, classes, np.array([0, 1]), contents)[0][1] == (2,)


def test_no_groups_are_drawn_where_places_ranks_or_memory_are_short() -> None:
    problem = flexsp_problem([1000, 1010, 1020, 3000], num_ranks=8)
    classes = LengthClasses.of(problem, 2, rounded_up=True)
    everything = np.array([[3.0, 1.0]])
    assert draw_groups(problem, classes, np.array([2]), everything) == ((4, (3, 2, 1, 0)),)
    assert draw_groups(problem, classes, np.array([2]), np.array([[2.0, 1.0]])) == ()
    assert draw_groups(problem, classes, np.array([3, 3]), np.array([[3.0, 0.0], [0.0, 1.0]])) == ()
    assert draw_groups(replace(problem, capacity=1500), classes, np.array([1]), everything) == ()


def test_a_class_is_as_dear_as_its_dearest_sequence() -> None:
    problem = flexsp_problem([10, 20, 1000])
    up, down = (LengthClasses.of(problem, 2, rounded_up) for rounded_up in (True, False))
    assert (up.tokens.tolist(), down.tokens.tolist()) == ([20, 1000], [10, 1000])
    assert up.seconds[:, 0] == pytest.approx(problem.seconds[:, 1])
    assert down.seconds[:, 0] == pytest.approx(problem.seconds[:, 0])
