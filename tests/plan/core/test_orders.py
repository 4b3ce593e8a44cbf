"""Schedules: valid for every mix of chunks, with the closed forms of their papers, and written out by hand for small cases."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from helpers.plans.stage_orders import chunks_of, family_shapes, makespan, plan_of, without_messages
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.orders import (
    SCHEDULES,
    Schedule,
    compute_actions,
    compute_orders,
    families,
    pipelined,
)
from hf_longctx.plan.core.types import Action, Chunk, LayerRange, MicroBatch, SequenceGroup, Span
from hf_longctx.plan.core.validate import schedule_grid, validate_plan
from hf_longctx.plan.memory.stage import most_in_flight
from hf_longctx.plan.pipeline.stages import layer_ranges
from hf_longctx.plan.predict.event_loop import Wiring

FORWARD_S, BACKWARD_S = 1.0, 2.0


def seconds(action: Action) -> float:
    return FORWARD_S if action.kind == "F" else BACKWARD_S


def in_flight_of(stages: tuple[tuple[Action, ...], ...]) -> list[int]:
    return [most_in_flight(actions) for actions in stages]


def words(actions: tuple[Action, ...]) -> str:
    """Compute actions without their stage, for example "F0 B0"."""
    return " ".join(re.sub(r"^\d+", "", str(action)) for action in actions)


# families


def test_slices_of_one_sequence_are_a_family_and_a_hybrid_ends_it() -> None:
    assert families(chunks_of([(3, 0), (0, 2), (2, 1), (1, 0), (0, 0)])) == ((0, 1, 2), (3,), (4, 5), (6,), (7,))


def test_a_pack_between_two_slices_belongs_to_their_family() -> None:
    chunks = (Chunk(0, (Span(0, 0, 9),)), Chunk(1, (Span(1, 0, 4),)), Chunk(2, (Span(0, 9, 12),)), Chunk(3, (Span(2, 0, 4),)))
    assert families(chunks) == ((0, 1, 2), (3,))


# written by hand


@pytest.mark.parametrize("schedule", ["1f1b", "elastic"])
def test_two_sequences_of_three_slices_on_two_stages(schedule: Schedule) -> None:
    # warm-up of Seq1F1B: P - p - 2 + k = 3 forwards on stage 0, 2 on stage 1
    expected = [
        "F0 F1 F2 F3 B2 F4 B1 F5 B0 B5 B4 B3",
        "F0 F1 F2 B2 F3 B1 F4 B0 F5 B5 B4 B3",
    ]
    assert list(map(words, compute_actions(chunks_of([(3, 0), (3, 0)]), 2, schedule))) == expected


def test_packs_around_a_sequence_of_three_slices_with_the_elastic_window() -> None:
    chunks = chunks_of([(3, 0), (0, 1), (0, 1), (0, 1)])
    # forwards before each backward on stage 1: 3 3 3 4 5 6, one more on stage 0; the long sequence retires without new chunks
    assert list(map(words, compute_actions(chunks, 2, "elastic"))) == [
        "F0 F1 F2 F3 B2 B1 B0 F4 B3 F5 B4 B5",
        "F0 F1 F2 B2 B1 B0 F3 B3 F4 B4 F5 B5",
    ]
    assert list(map(words, compute_actions(chunks, 2, "1f1b"))) == [
        "F0 F1 F2 F3 B2 F4 B1 F5 B0 B3 B4 B5",
        "F0 F1 F2 B2 F3 B1 F4 B0 F5 B3 B4 B5",
    ]


def test_four_packs_with_two_layer_ranges_on_two_stages() -> None:
    # warm-up (V - 1) P + 2 (P - 1 - p) + k - 1 = 4 on stage 0 and 2 on stage 1, ranges change every two chunks
    chunks = chunks_of([(0, 1)] * 4)
    assert list(map(words, compute_actions(chunks, 2, "interleaved", 2))) == [
        "F0 F1 .1F0 .1F1 F2 .1B0 F3 .1B1 .1F2 B0 .1F3 B1 .1B2 .1B3 B2 B3",
        "F0 F1 .1F0 .1B0 .1F1 .1B1 F2 B0 F3 B1 .1F2 .1B2 .1F3 .1B3 B2 B3",
    ]


def test_the_messages_of_a_pipelined_group() -> None:
    group = SequenceGroup((0,), "local", chunks_of([(2, 0), (0, 1)]), ())
    ranges = ((LayerRange(0, 3),), (LayerRange(3, 2),))
    done = pipelined(group, ranges, "1f1b")
    assert schedule_grid(done) == (
        "  stage 0: 0F0 0SF0 0F1 0SF1 0F2 0SF2 0RB1 0B1 0RB0 0B0 0RB2 0B2\n"
        "  stage 1: 1RF0 1F0 1RF1 1F1 1B1 1SB1 1RF2 1F2 1B0 1SB0 1B2 1SB2"
    )
    assert tuple(stage.layer_ranges for stage in done.stages) == ranges
    assert group.stages == ()


def test_heads_of_three_chunks_in_turn_on_three_stages() -> None:
    # chunk 0 stays on the last stage, 1 goes to the stage before it, 2 to the first; all stages are one more forward ahead, and
    # the last one gets the gradients of slices from behind
    plan = plan_of(chunks_of([(3, 0)]), 3, "elastic", output_shares=(1, 1, 1))
    assert schedule_grid(plan.micro_batches[0].groups[0]) == (
        "  stage 0: 0F0 0SF0 0F1 0SF1 0F2 0SF2 0.1RF2 0.1H2 0.1SB2 0RB2 0B2 0RB1 0B1 0RB0 0B0\n"
        "  stage 1: 1RF0 1F0 1SF0 1RF1 1F1 1SF1 1RF2 1F2 1SF2 1.1RF1 1.1H1 1.1SB1 1RB2 1B2 1SB2 1RB1 1B1 1SB1 1RB0 1B0 1SB0\n"
        "  stage 2: 2RF0 2F0 2RF1 2F1 2SF1 2RF2 2F2 2SF2 2RB2 2B2 2SB2 2RB1 2B1 2SB1 2B0 2SB0"
    )


def test_a_further_forward_hides_the_head_on_another_stage() -> None:
    plain, spread = (
        [words(tuple(each for each in stage.actions if each.kind in "FB")) for stage in plan.micro_batches[0].groups[0].stages]
        for plan in (plan_of(chunks_of([(0, 1)] * 4), 2, "elastic", output_shares=shares) for shares in ((), (1, 0)))
    )
    assert plain == ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]
    assert spread == ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3"]


@pytest.mark.parametrize(("num_ranges", "shares"), [(2, (1, 1)), (1, (1, 1, 1))])
def test_heads_are_shared_by_stages_of_one_layer_range(num_ranges: int, shares: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=rf"{len(shares)} shares of the output head for 2 stages of {num_ranges} layer range"):
        plan_of(chunks_of([(0, 1)] * 4), 2, "interleaved" if num_ranges > 1 else "elastic", num_ranges, shares)


# every mix


@settings(max_examples=150, deadline=None)
@given(family_shapes(), st.integers(1, 6), st.sampled_from(["1f1b", "elastic", "gpipe"]))
def test_every_schedule_of_any_families_is_valid(shapes: list[tuple[int, int]], num_stages: int, schedule: Schedule) -> None:
    validate_plan(plan_of(chunks_of(shapes), num_stages, schedule))


@settings(max_examples=150, deadline=None)
@given(family_shapes(), st.integers(1, 6), st.integers(2, 4))
def test_every_interleaving_of_any_families_is_valid(shapes: list[tuple[int, int]], num_stages: int, num_ranges: int) -> None:
    validate_plan(plan_of(chunks_of(shapes), num_stages, "interleaved", num_ranges))


@settings(max_examples=150, deadline=None)
@given(
    family_shapes(),
    st.integers(2, 6).flatmap(lambda count: st.lists(st.sampled_from([0.0, 0.3, 1.0, 2.0]), min_size=count, max_size=count)),
    st.sampled_from(["1f1b", "elastic", "gpipe"]),
    st.sampled_from([1.0, 1.5, 2.0]),
)
def test_shared_heads_of_any_families_are_valid_and_follow_the_shares(
    shapes: list[tuple[int, int]], shares: list[float], schedule: Schedule, lead: float
) -> None:
    chunks = chunks_of(shapes)
    (micro_batch,) = validate_plan(plan_of(chunks, len(shares), schedule, 1, shares, lead)).micro_batches
    (group,) = micro_batch.groups
    heads = group.head_stages
    assert sum(action.kind == "H" for stage in group.stages for action in stage.actions) == len(heads)
    found = [sum(stage == each for stage in heads.values()) for each in range(len(shares))]
    found[-1] += len(chunks) - len(heads)
    expected = [share * len(chunks) / sum(shares) for share in shares] if sum(shares[:-1]) else [0.0] * (len(shares) - 1)
    # no stage is a whole head behind its share, or two ahead
    assert all(-1 < own - share < 2 for own, share in zip(found, expected, strict=False))


@settings(max_examples=150, deadline=None)
@given(family_shapes(), st.integers(1, 6))
def test_families_retire_in_order_and_from_behind(shapes: list[tuple[int, int]], num_stages: int) -> None:
    chunks = chunks_of(shapes)
    expected = [place for family in families(chunks) for place in reversed(family)]
    for schedule in ("1f1b", "elastic"):
        for actions in compute_actions(chunks, num_stages, schedule):
            assert [action.chunk for action in actions if action.kind == "B"] == expected


@settings(max_examples=150, deadline=None)
@given(family_shapes(), st.integers(1, 6))
def test_the_elastic_window_never_holds_more_than_1f1b_and_takes_no_longer(
    shapes: list[tuple[int, int]], num_stages: int
) -> None:
    chunks = chunks_of(shapes)
    fixed, elastic = (compute_actions(chunks, num_stages, schedule) for schedule in ("1f1b", "elastic"))
    assert all(mine <= other for mine, other in zip(in_flight_of(elastic), in_flight_of(fixed), strict=True))
    assert makespan(elastic, seconds) <= makespan(fixed, seconds) + 1e-9


@settings(max_examples=100, deadline=None)
@given(family_shapes(), st.integers(1, 5), st.sampled_from([1.0, 1.25, 1.5, 2.0]))
def test_the_elastic_window_is_its_formula(shapes: list[tuple[int, int]], num_stages: int, lead: float) -> None:
    chunks = chunks_of(shapes)
    # forwards that backward j needs on the last stage, counted from 1
    needs = [family[-1] + 1 for family in families(chunks) for _ in family]
    for stage, (order, _, _) in enumerate(compute_orders(chunks, num_stages, "elastic", lead=lead)):
        kinds = ["FB"[kind] for kind in order]
        places = [place for place, kind in enumerate(kinds) if kind == "B"]
        for i, place in enumerate(places):
            ahead = max(needs[j] - (j - i) for j in range(i, len(needs)))
            assert kinds[:place].count("F") == min(len(chunks), ahead + math.ceil(lead * (num_stages - 1 - stage)))


@settings(max_examples=100, deadline=None)
@given(family_shapes(), st.integers(1, 6), st.sampled_from([1.25, 1.5, 2.0, 3.0]))
def test_every_lead_is_valid_and_makes_equal_chunks_no_slower(
    shapes: list[tuple[int, int]], num_stages: int, lead: float
) -> None:
    chunks = chunks_of(shapes)
    group = pipelined(SequenceGroup((0,), "local", chunks, ()), layer_ranges(num_stages, num_stages), lead=lead)
    validate_plan(replace(plan_of(chunks, num_stages, "elastic"), micro_batches=(MicroBatch((group,)),)))
    elastic = compute_actions(chunks, num_stages, "elastic")
    assert makespan([stage.actions for stage in without_messages(group).stages], seconds) <= makespan(elastic, seconds) + 1e-9


def test_a_lead_hides_that_chunks_take_unequal_seconds() -> None:
    chunks = chunks_of([(1, 0)] * 40)
    # every third chunk takes half of the others' seconds
    units = np.array([[1.0, 2.0], [1.0, 2.0], [0.5, 1.0]])[np.arange(40) % 3]
    took = {}
    for lead in (1.0, 1.5, 2.0):
        orders = compute_orders(chunks, 4, "elastic", lead=lead)
        wiring = Wiring(*zip(*orders, strict=True), 1)
        took[lead] = wiring.stop_s(wiring.seconds(np.stack([units] * 4)), [0.0] * 320)
    # one stage works for 100 seconds, and the others begin and end 9 seconds earlier or later
    assert took[1.0] > 120 and took[2.0] < 111


# closed forms


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("num_slices", [1, 2, 4, 7])
@pytest.mark.parametrize("num_sequences", [1, 2, 5])
def test_seq1f1b_keeps_its_closed_forms(num_stages: int, num_slices: int, num_sequences: int) -> None:
    num_chunks = num_sequences * num_slices
    stages = compute_actions(chunks_of([(num_slices, 0)] * num_sequences), num_stages, "1f1b")
    for stage, actions in enumerate(stages):
        kinds = "".join(action.kind for action in actions)
        warm_up = min(num_stages - stage - 2 + num_slices, num_chunks)
        # warm-up, then a forward and a backward in turns, then backwards
        assert kinds == "F" * warm_up + "FB" * (num_chunks - warm_up) + "B" * warm_up
        backwards = [action.chunk for action in actions if action.kind == "B"]
        assert backwards == [i // num_slices * num_slices + num_slices - 1 - i % num_slices for i in range(num_chunks)]
    most = [min(num_chunks, num_stages - stage - 1 + num_slices) for stage in range(num_stages)]
    assert in_flight_of(stages) == most
    assert makespan(stages, seconds) == (num_chunks + num_stages - 1) * (FORWARD_S + BACKWARD_S)
    # equal families leave the elastic window nothing to shrink but the end
    assert in_flight_of(compute_actions(chunks_of([(num_slices, 0)] * num_sequences), num_stages, "elastic")) == most


@settings(max_examples=60, deadline=None)
@given(family_shapes(), st.integers(1, 6))
def test_gpipe_runs_all_forwards_first_and_takes_the_closed_form(shapes: list[tuple[int, int]], num_stages: int) -> None:
    chunks = chunks_of(shapes)
    stages = compute_actions(chunks, num_stages, "gpipe")
    for actions in stages:
        assert "".join(action.kind for action in actions) == "F" * len(chunks) + "B" * len(chunks)
    assert makespan(stages, seconds) == (len(chunks) + num_stages - 1) * (FORWARD_S + BACKWARD_S)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("num_ranges", [2, 3])
@pytest.mark.parametrize("num_rounds", [1, 2, 3])
def test_interleaving_families_that_fill_a_round_has_seq1f1bs_warm_up(num_stages: int, num_ranges: int, num_rounds: int) -> None:
    for num_slices in (d for d in range(1, num_stages + 1) if num_stages % d == 0):
        shapes = [(num_slices, 0)] * (num_rounds * num_stages // num_slices)
        num_units = num_rounds * num_stages * num_ranges
        for stage, actions in enumerate(compute_actions(chunks_of(shapes), num_stages, "interleaved", num_ranges)):
            warm_up = min((num_ranges - 1) * num_stages + 2 * (num_stages - 1 - stage) + num_slices - 1, num_units)
            kinds = "".join(action.kind for action in actions)
            assert kinds == "F" * warm_up + "FB" * (num_units - warm_up) + "B" * warm_up


@settings(max_examples=200, deadline=None)
@given(family_shapes(), st.integers(1, 5), st.integers(2, 4))
def test_interleaving_at_least_as_many_chunks_as_stages_leaves_only_the_ramps_idle(
    shapes: list[tuple[int, int]], num_stages: int, num_ranges: int
) -> None:
    chunks = chunks_of(shapes)
    stages = compute_actions(chunks, num_stages, "interleaved", num_ranges)
    taken_s = makespan(stages, seconds, num_ranges)
    if len(chunks) >= num_stages:
        assert taken_s == (len(chunks) * num_ranges + num_stages - 1) * (FORWARD_S + BACKWARD_S)


# refused


@pytest.mark.parametrize(
    ("num_stages", "schedule", "num_ranges", "message"),
    [
        (2, "2f2b", 1, "schedule '2f2b' is not one of 1f1b, elastic, gpipe, interleaved"),
        (0, "1f1b", 1, "at least one chunk and one stage, not 2 and 0"),
        (2, "interleaved", 1, r"'interleaved' cannot run 1 layer range\(s\) per stage; 'interleaved' needs at least 2"),
        (2, "elastic", 2, r"'elastic' cannot run 2 layer range\(s\) per stage"),
        (2, "elastic", 0, r"'elastic' cannot run 0 layer range\(s\) per stage"),
    ],
)
def test_a_schedule_that_does_not_exist_is_refused(num_stages: int, schedule: Schedule, num_ranges: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_actions(chunks_of([(2, 0)]), num_stages, schedule, num_ranges)


def test_a_group_without_chunks_or_with_uneven_layer_ranges_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one chunk and one stage, not 0 and 2"):
        compute_actions((), 2)
    group = SequenceGroup((0,), "local", chunks_of([(2, 0)]), ())
    with pytest.raises(ValueError, match=r"same number of layer ranges, at least one stage; found \[1, 2\]"):
        pipelined(group, ((LayerRange(0, 1),), (LayerRange(1, 1), LayerRange(2, 1))))
    with pytest.raises(ValueError, match=r"at least one stage; found \[\]"):
        pipelined(group, ())


def test_all_schedules_are_named() -> None:
    assert SCHEDULES == ("1f1b", "elastic", "gpipe", "interleaved")
