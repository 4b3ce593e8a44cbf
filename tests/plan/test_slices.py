"""Slices take equal time and cover the sequence, sliced groups are valid plans in one order, and SPPO's numbers are met."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from helpers.plans.sliced_plans import gathers_of
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx.plan.chunks import cut_evenly, even_slice, slice_bounds, slice_counts, sliced_in_step
from hf_longctx.plan.core.sharding import length_step
from hf_longctx.plan.core.types import Action, Chunk, GroupShape, LayerRange, MicroBatch, SequenceGroup, Span, StagePlan, StepPlan
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.plan.model.attention_pairs import SpanRates

K = 1024
# seconds per pair or token: zero, or a value that some device may have
SECONDS = st.just(0.0) | st.floats(1e-15, 1e-3)


def seconds(start: int, stop: int, pair_s: float, token_s: float) -> float:
    return pair_s * (stop * stop - start * start) / 2 + token_s * (stop - start)


@given(st.integers(1, 200_000), st.integers(1, 20), SECONDS, SECONDS, st.booleans())
def test_bounds_cover_the_sequence_and_balance_seconds(
    num_tokens: int, count: int, pair_s: float, token_s: float, rounds: bool
) -> None:
    bounds = slice_bounds(num_tokens, count, SpanRates(pair_s, token_s), rounds)
    assert bounds[0] == 0 and bounds[-1] == num_tokens and list(bounds) == sorted(set(bounds))
    assert len(bounds) == min(count, num_tokens) + 1 or num_tokens < 50 * count
    share_s = seconds(0, num_tokens, pair_s, token_s) / count
    # a bound lies at most one token, or with rounds a sixty-fourth of a long slice, from where the seconds are equal
    token_s_at_most = pair_s * num_tokens + token_s
    if len(bounds) == count + 1:
        longest = max(stop - start for start, stop in pairwise(bounds))
        num_off = longest / 60 if rounds and longest >= 4000 else 1
        for start, stop in pairwise(bounds):
            assert abs(seconds(start, stop, pair_s, token_s) - share_s) <= 2 * num_off * token_s_at_most * (1 + 1e-6)


def test_long_slices_have_lengths_for_which_operators_plan_at_less_than_a_hundredth_of_a_step() -> None:
    # Llama-3.1-8B on a device of 600 TFLOP/s
    rates = SpanRates(4 * 4096 * 32 / 6e14, 16e9 / 6e14)
    for num_tokens in range(60_000, 520_000, 7777):
        bounds = slice_bounds(num_tokens, num_tokens // 8192, rates, rounds=True)
        lengths = [stop - start for start, stop in pairwise(bounds)]
        assert all(length % length_step(length) == 0 for length in lengths[:-1] if length >= 4096)
        times = [rates.of_span(start, stop) for start, stop in pairwise(bounds)]
        # a pipeline of four stages takes the time of all slices once, and three times that of the longest
        loss = (sum(times) + 3 * max(times)) / (sum(times) * (1 + 3 / len(times))) - 1
        assert max(times) / min(times) < 1.1 and loss < 0.01


def test_slices_get_shorter_where_attention_counts_and_stay_equal_where_it_does_not() -> None:
    # only pairs cost time: equal areas of a triangle
    assert slice_bounds(1000, 4, SpanRates(1.0, 0.0)) == (0, 500, 707, 866, 1000)
    assert slice_bounds(1000, 4, SpanRates(0.0, 1.0)) == (0, 250, 500, 750, 1000)


def test_no_slices_of_nothing() -> None:
    with pytest.raises(ValueError, match="0 tokens cannot be cut into 2 slices"):
        slice_bounds(0, 2, SpanRates(1.0, 1.0))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.integers(1, 6))
def test_a_sliced_group_is_a_valid_plan_of_the_same_tokens(lengths: list[int], count: int) -> None:
    spans = tuple(Span(i, 0, length) for i, length in enumerate(lengths))
    stage = StagePlan(0, (LayerRange(0, 2),), (Action("F", 0, 0), Action("B", 0, 0)))
    (group,) = sliced_in_step([SequenceGroup((0,), "local", (Chunk(0, spans),), (stage,))], count, SpanRates(1e-9, 1e-6))
    validate_plan(StepPlan(0, tuple(lengths), 1, 1, "replicated", (MicroBatch((group,)),)))
    longest = max(range(len(lengths)), key=lambda i: lengths[i])
    slices = [chunk for chunk in group.chunks if chunk.spans[0].sequence == longest]
    room = max(chunk.num_tokens for chunk in slices)
    assert len(slices) <= count
    assert all(chunk.num_tokens <= room or len(chunk.spans) == 1 for chunk in group.chunks)


def test_slices_run_backward_last_first_and_packs_behind_them() -> None:
    stage = StagePlan(0, (LayerRange(0, 2),), (Action("F", 0, 0), Action("B", 0, 0)))
    chunk = Chunk(0, (Span(0, 0, 7), Span(1, 0, 100), Span(2, 0, 30)))
    (group,) = sliced_in_step([SequenceGroup((0,), "local", (chunk,), (stage,))], 2, SpanRates(0.0, 1.0))
    assert [c.spans for c in group.chunks] == [
        (Span(1, 0, 50),),
        (Span(1, 50, 100),),
        (Span(0, 0, 7), Span(2, 0, 30)),
    ]
    assert " ".join(map(str, group.stages[0].actions)) == "0F0 0F1 0B1 0B0 0F2 0B2"


@st.composite
def micro_batches(draw: st.DrawFn) -> tuple[list[int], list[SequenceGroup]]:
    """Lengths, and groups of one chunk each, some of them without sequences."""
    degrees = draw(st.lists(st.sampled_from([1, 1, 2, 4]), min_size=1, max_size=4))
    lengths = draw(st.lists(st.one_of(st.integers(1, 30), st.integers(1, 9000)), min_size=1, max_size=8))
    owners = [draw(st.integers(0, len(degrees) - 1)) for _ in lengths]
    groups, first = [], 0
    for number, degree in enumerate(degrees):
        spans = tuple(Span(i, 0, length) for i, length in enumerate(lengths) if owners[i] == number)
        stage = StagePlan(0, (LayerRange(0, 2),), (Action("F", 0, 0), Action("B", 0, 0)))
        shape = GroupShape(degree, degree)
        groups.append(SequenceGroup.of(shape, range(first, first + degree), (Chunk(0, spans),), (stage,)))
        first += degree
    return lengths, groups


@given(micro_batches(), st.integers(1, 8), st.sampled_from([0.0, 1e-9]))
def test_groups_cut_in_step_run_one_order_over_the_same_tokens(
    drawn: tuple[list[int], list[SequenceGroup]], count: int, pair_s: float
) -> None:
    lengths, groups = drawn
    cut = sliced_in_step(groups, count, SpanRates(pair_s, 1e-6))
    num_ranks = sum(group.degree for group in groups)
    plan = StepPlan(0, tuple(lengths), 1, num_ranks, "sharded", (MicroBatch(cut),), shard_ranks=num_ranks)
    validate_plan(plan)
    rounds = [plan.for_rank(rank).rounds for rank in range(num_ranks)]
    assert all(gathers_of(own) == gathers_of(rounds[0]) for own in rounds)
    # groups keep their ranks and sequences
    for group, made in zip(groups, cut, strict=True):
        assert (made.positions, made.shape, made.num_tokens) == (group.positions, group.shape, group.num_tokens)
    # on no rank is a cut sequence in shares above those of the largest slice, nor is a pack, unless one sequence is more
    shares = [(made.degree, chunk) for made in cut for chunk in made.chunks if chunk.spans]
    slices = [chunk.num_tokens / degree for degree, chunk in shares if is_slice(chunk.spans[0], lengths)]
    room = max(slices, default=math.inf)
    assert all(chunk.num_tokens <= room * degree for degree, chunk in shares if len(chunk.spans) > 1)
    for made in cut:
        first, *_ = sorted((span for chunk in made.chunks for span in chunk.spans), key=lambda s: -lengths[s.sequence]) or [None]
        if first is not None and lengths[first.sequence] > (room + 1) * made.degree:
            assert is_slice(first, lengths)


def is_slice(span: Span, lengths: list[int]) -> bool:
    return span.num_tokens < lengths[span.sequence]


def test_a_group_beside_slices_runs_packs_where_others_do_and_dummies_elsewhere() -> None:
    stage = StagePlan(0, (LayerRange(0, 2),), (Action("F", 0, 0), Action("B", 0, 0)))

    def group(first: int, lengths: dict[int, int]) -> SequenceGroup:
        return SequenceGroup((first,), "local", (Chunk(0, tuple(Span(i, 0, n) for i, n in lengths.items())),), (stage,))

    groups = [group(0, {0: 90, 1: 30}), group(1, {2: 20, 3: 20, 4: 20}), group(2, {5: 40, 6: 40})]
    cut = sliced_in_step([*groups, group(3, {})], 3, SpanRates(0.0, 1.0))
    sequences = [[tuple(span.sequence for span in chunk.spans) for chunk in each.chunks] for each in cut]
    assert sequences == [
        [(0,), (0,), (0,), (1,)],
        [(), (3,), (4,), (2,)],
        [(5,), (5,), (5,), (6,)],
        [(), (), (), ()],
    ]
    assert {" ".join(map(str, each.stages[0].actions)) for each in cut} == {"0F0 0F1 0F2 0B2 0B1 0B0 0F3 0B3"}


@pytest.mark.parametrize(
    ("num_tokens", "degree", "count"),
    # SPPO's choices for 7B on 8 x 4 and 65B on 16 x 8 devices
    [(512 * K, 8, 32), (1024 * K, 16, 32), (512 * K, 16, 8)],
)
def test_the_paper_s_numbers_of_slices_are_within_its_bounds(num_tokens: int, degree: int, count: int) -> None:
    assert count in slice_counts(num_tokens, degree)


def test_slice_counts_by_hand() -> None:
    # 64K tokens on two ranks: 32K each, in slices of 16K down to 2K
    assert slice_counts(64 * K, 2) == range(2, 17)
    assert slice_counts(64 * K + 1, 2) == range(3, 17)
    assert list(slice_counts(K, 1)) == [1]


@given(st.integers(1, 1 << 22), st.integers(1, 64))
def test_slices_have_workable_sizes(num_tokens: int, degree: int) -> None:
    for count in slice_counts(num_tokens, degree):
        size = num_tokens / count / degree
        assert size <= 16 * K
        assert size >= 2 * K or count == -(-num_tokens // (16 * K * degree))


@pytest.mark.parametrize("call", [lambda: slice_counts(0, 1), lambda: slice_counts(1, 0)])
def test_nothing_cannot_be_split(call) -> None:
    with pytest.raises(ValueError, match="both must be at least 1"):
        call()


@given(st.integers(1, 300_000), st.integers(1, 64), st.integers(0, 500))
def test_equal_slices_are_as_many_as_asked_for_and_never_shorter_for_more_tokens(num_tokens: int, count: int, more: int) -> None:
    size = even_slice(num_tokens, count)
    assert -(-num_tokens // size) <= count and size <= even_slice(num_tokens + more, count)
    assert size < 4096 or size % length_step(size) == 0
    stage = StagePlan(0, (LayerRange(0, 2),), (Action("F", 0, 0), Action("B", 0, 0)))
    busy = SequenceGroup.of(GroupShape(2, 2), (0, 1), (Chunk(0, (Span(0, 0, num_tokens),)),), (stage,))
    idle = SequenceGroup.of(GroupShape(1), (2,), (Chunk(0, ()),), (stage,))
    cut = cut_evenly([busy, idle], count)
    plan = StepPlan(0, (num_tokens,), 1, 3, "sharded", (MicroBatch(cut),), shard_ranks=3)
    validate_plan(plan)
    assert [chunk.num_tokens for chunk in cut[0].chunks[:-1]] == [size] * (len(cut[0].chunks) - 1)
