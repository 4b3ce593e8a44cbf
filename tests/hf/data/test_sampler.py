"""Sampler and index: every sequence once per epoch, equal steps on every rank, near the token budget; rows split into pieces."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers.measures.calls import counted_calls
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx.hf.data.sampler import LengthAwareSampler, SequenceIndex

LENGTHS = st.lists(st.one_of(st.integers(1, 20), st.integers(1, 5000)), min_size=1, max_size=60)


def array(lengths: list[int]) -> np.ndarray:
    return np.array(lengths, dtype=np.int64)


def epoch_of(sampler: LengthAwareSampler, epoch: int) -> list[list[int]]:
    sampler.set_epoch(epoch)
    return list(sampler)


@given(LENGTHS, st.integers(1, 70), st.integers(0, 3), st.booleans())
def test_every_sequence_once_per_epoch(lengths: list[int], per_step: int, epoch: int, shuffle: bool) -> None:
    steps = epoch_of(LengthAwareSampler(array(lengths), per_step, seed=5, shuffle=shuffle), epoch)
    assert sorted(i for step in steps for i in step) == list(range(len(lengths)))
    assert [len(step) for step in steps[:-1]] == [per_step] * (len(steps) - 1)
    assert 1 <= len(steps[-1]) <= per_step


@given(LENGTHS, st.integers(1, 70))
def test_drop_last_gives_whole_batches_only(lengths: list[int], per_step: int) -> None:
    sampler = LengthAwareSampler(array(lengths), per_step, drop_last=True)
    steps = list(sampler)
    assert [len(step) for step in steps] == [per_step] * (len(lengths) // per_step)
    placed = [i for step in steps for i in step]
    assert len(set(placed)) == len(placed)


def test_drop_last_of_fewer_sequences_than_a_batch_is_an_empty_epoch() -> None:
    sampler = LengthAwareSampler(array([3, 4]), 3, drop_last=True)
    assert len(sampler) == 0 and list(sampler) == []


@given(LENGTHS, st.integers(1, 20_000), st.integers(0, 3))
def test_with_a_budget_every_sequence_once_and_no_step_empty(lengths: list[int], budget: int, epoch: int) -> None:
    steps = epoch_of(LengthAwareSampler(array(lengths), 8, tokens_per_step=budget), epoch)
    assert sorted(i for step in steps for i in step) == list(range(len(lengths)))
    assert all(steps)


@given(LENGTHS, st.integers(1, 20_000), st.integers(0, 3))
def test_budget_is_met_within_the_sequence_at_each_end(lengths: list[int], budget: int, epoch: int) -> None:
    sampler = LengthAwareSampler(array(lengths), 8, tokens_per_step=budget)
    steps = epoch_of(sampler, epoch)
    share = sum(lengths) / len(sampler)
    # a sequence above the budget makes its neighbours lighter; the test below bounds those
    if max(lengths) > share:
        return
    for before, step in zip([None, *steps], steps, strict=False):
        tokens = sum(lengths[i] for i in step)
        taken_before = lengths[before[-1]] if before else 0
        assert share - taken_before - 1e-3 <= tokens <= share + lengths[step[-1]] + 1e-3


@given(LENGTHS, st.integers(1, 20_000))
def test_no_step_exceeds_its_share_by_more_than_its_last_sequence(lengths: list[int], budget: int) -> None:
    sampler = LengthAwareSampler(array(lengths), 8, tokens_per_step=budget)
    share = sum(lengths) / len(sampler)
    for step in sampler:
        assert sum(lengths[i] for i in step[:-1]) <= share + 1e-3


@given(st.lists(st.integers(50, 150), min_size=20, max_size=60), st.integers(300, 1000))
def test_the_mean_step_has_the_budget(lengths: list[int], budget: int) -> None:
    sampler = LengthAwareSampler(array(lengths), 8, tokens_per_step=budget)
    # the budget is not met exactly, because the number of steps is rounded
    assert abs(sum(lengths) / budget - len(sampler)) <= 0.5


def test_a_sequence_longer_than_many_budgets_has_a_step_of_its_own() -> None:
    sampler = LengthAwareSampler(array([10, 10, 1000, 10, 10, 10]), 1, tokens_per_step=20, shuffle=False)
    steps = list(sampler)
    # 1050 tokens would be 52 steps of 20, but there are only six sequences
    assert steps == [[0], [1], [2], [3], [4], [5]]


def test_around_a_huge_sequence_the_rest_is_still_spread() -> None:
    lengths = [1] * 10 + [20] + [1] * 10
    steps = list(LengthAwareSampler(array(lengths), 1, tokens_per_step=10, shuffle=False))
    # worked out by hand for a budget of 10: ten ones; then 20, which reaches both 20 and 30 tokens; then the rest
    assert steps == [list(range(10)), [10], [11], list(range(12, 21))]


@pytest.mark.parametrize("budget", [None, 1, 7, 10_000])
def test_one_sequence_is_one_step(budget: int | None) -> None:
    sampler = LengthAwareSampler(array([7]), 4, tokens_per_step=budget)
    assert len(sampler) == 1 and list(sampler) == [[0]]


@given(LENGTHS, st.integers(1, 20), st.one_of(st.none(), st.integers(1, 9000)), st.booleans(), st.integers(0, 5))
def test_steps_of_every_epoch_are_the_promised_number(
    lengths: list[int], per_step: int, budget: int | None, drop_last: bool, epoch: int
) -> None:
    sampler = LengthAwareSampler(array(lengths), per_step, budget, drop_last=drop_last)
    promised = len(sampler)
    assert len(epoch_of(sampler, epoch)) == promised == len(sampler)


@given(LENGTHS, st.integers(1, 20), st.one_of(st.none(), st.integers(1, 9000)), st.integers(0, 9), st.integers(0, 9))
def test_equal_arguments_give_equal_steps(lengths: list[int], per_step: int, budget: int | None, seed: int, epoch: int) -> None:
    # two ranks have separate objects, and one was used before
    here, there = (LengthAwareSampler(array(lengths), per_step, budget, seed=seed) for _ in range(2))
    list(there)
    assert epoch_of(here, epoch) == epoch_of(there, epoch) == list(here)


@pytest.mark.parametrize("budget", [None, 50])
def test_seed_and_epoch_each_change_the_order(budget: int | None) -> None:
    lengths = array([3, 5, 8, 13, 21] * 10)
    base = LengthAwareSampler(lengths, 5, budget, seed=0)
    first, second = epoch_of(base, 0), epoch_of(base, 1)
    other = epoch_of(LengthAwareSampler(lengths, 5, budget, seed=77), 0)
    assert first != second and first != other
    assert epoch_of(base, 0) == first


def test_without_shuffle_every_epoch_is_in_the_order_of_the_set() -> None:
    sampler = LengthAwareSampler(array([3, 5, 8, 13, 21]), 2, shuffle=False)
    for epoch in (0, 1):
        assert epoch_of(sampler, epoch) == [[0, 1], [2, 3], [4]]


def test_steps_hold_plain_integers() -> None:
    # they become part of plans, which are JSON
    (step, *_) = LengthAwareSampler(array([3, 5, 8]), 2, tokens_per_step=8)
    assert all(type(i) is int for i in step)


def test_drawing_steps_leaves_the_global_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    list(LengthAwareSampler(array([3, 5, 8]), 2))
    assert torch.equal(before, torch.random.get_rng_state())


@given(LENGTHS, st.integers(1, 6000))
def test_split_covers_every_row_exactly_in_pieces_up_to_the_limit(lengths: list[int], limit: int) -> None:
    index = SequenceIndex.build(array(lengths), limit, "split")
    pieces: dict[int, list[tuple[int, int]]] = {}
    for row, start, stop in zip(index.rows, index.starts, index.stops, strict=True):
        assert 1 <= stop - start <= limit
        pieces.setdefault(int(row), []).append((int(start), int(stop)))
    assert sorted(pieces) == list(range(len(lengths)))
    for row, spans in pieces.items():
        assert spans[0][0] == 0 and spans[-1][1] == lengths[row]
        assert all(left[1] == right[0] for left, right in pairwise(spans))
        assert len(spans) == -(-lengths[row] // limit)
    assert len(index) == len(index.lengths) == sum(map(len, pieces.values()))


@given(LENGTHS, st.integers(1, 6000))
def test_truncate_keeps_the_head_of_every_row(lengths: list[int], limit: int) -> None:
    index = SequenceIndex.build(array(lengths), limit, "truncate")
    assert index.rows.tolist() == list(range(len(lengths)))
    assert index.starts.tolist() == [0] * len(lengths)
    assert index.stops.tolist() == index.lengths.tolist() == [min(length, limit) for length in lengths]


@pytest.mark.parametrize("long_sequences", ["error", "truncate", "split"])
def test_rows_at_the_limit_are_left_whole(long_sequences: str) -> None:
    index = SequenceIndex.build(array([8, 1, 8]), 8, long_sequences)
    assert (index.rows.tolist(), index.starts.tolist(), index.stops.tolist()) == ([0, 1, 2], [0, 0, 0], [8, 1, 8])


def test_split_by_hand() -> None:
    index = SequenceIndex.build(array([7, 3, 6]), 3, "split")
    assert index.rows.tolist() == [0, 0, 0, 1, 2, 2]
    assert index.starts.tolist() == [0, 3, 6, 0, 0, 3]
    assert index.stops.tolist() == [3, 6, 7, 3, 3, 6]


@pytest.mark.parametrize("budget", [None, 8192])
def test_millions_of_lengths_cost_some_arrays_and_little_time(budget: int | None) -> None:
    lengths = np.random.default_rng(0).integers(1, 200, 2_000_000)
    tracemalloc.start()

    def first_step() -> tuple[SequenceIndex, list[list[int]]]:
        index = SequenceIndex.build(lengths, 1000, "split")
        return index, next(iter(LengthAwareSampler(index.lengths, 64, budget)))

    (_index, first), num_calls = counted_calls(first_step)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # a Python list would take 36 bytes per sequence, more than three arrays
    assert len(first) > 10 and num_calls < 10_000
    assert peak_bytes <= (18 if budget is None else 42) * len(lengths)


def test_a_set_without_long_rows_shares_its_lengths() -> None:
    lengths = array([3, 5])
    for long_sequences in ("error", "truncate", "split"):
        index = SequenceIndex.build(lengths, 5, long_sequences)
        assert index.lengths is lengths
        assert (index.rows.tolist(), index.starts.tolist(), index.stops.tolist()) == ([0, 1], [0, 0], [3, 5])
