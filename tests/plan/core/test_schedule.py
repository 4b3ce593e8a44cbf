"""The printed grid reads back as the actions it shows, and counts of chunks in flight are the closed forms."""

from __future__ import annotations

import pytest
from helpers.plans.pipeline_cases import chunks_of, plan_of
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.schedule import in_flight, parse_grid, schedule_grid
from hf_longctx.plan.core.types import ACTION_KINDS, Action, SequenceGroup, StagePlan


@st.composite
def stage_actions(draw: st.DrawFn, stage: int) -> tuple[Action, ...]:
    """Any actions of a stage, in any order."""
    helpers = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), max_size=2).map(tuple)
    action = st.builds(Action, st.sampled_from(ACTION_KINDS), st.just(stage), st.integers(0, 12), st.integers(0, 3), helpers)
    return tuple(draw(st.lists(action, max_size=6)))


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(0, 12))
def test_a_grid_reads_back_as_its_actions_marked_or_not(data: st.DataObject, num_stages: int) -> None:
    stages = tuple(StagePlan(stage, (), data.draw(stage_actions(stage))) for stage in range(num_stages))
    group = SequenceGroup((0,), "local", (), stages)
    actions = tuple(stage.actions for stage in stages)
    assert parse_grid(schedule_grid(group)) == actions
    for stage in stages:
        for place in range(len(stage.actions)):
            assert parse_grid(schedule_grid(group, (stage.stage, place))) == actions


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("  stage 1: 1F0", "is not line 0 of a schedule grid; write 'stage 0: ACTION ...'"),
        ("  stage 0: 0F0\n  stage 2: 2F0", "is not line 1 of a schedule grid"),
        ("0F0 0B0", "is not line 0 of a schedule grid"),
        ("  stage 0: 0F0 >0B0", "'>0B0' is not an action"),
        ("  stage 0: 0F", "'0F' is not an action"),
    ],
)
def test_what_is_no_grid_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_grid(text)


def test_chunks_in_flight_are_counted_between_forward_and_backward() -> None:
    def count(text: str) -> int:
        return in_flight(StagePlan(0, (), tuple(map(Action.parse, text.split()))))

    assert count("") == 0
    assert count("0F0 0B0 0F1 0B1") == 1
    assert count("0F0 0SF0 0F1 0SF1 0RB1 0B1 0F2 0RB0 0B0 0B2") == 2
    assert count("0F0 0.1F0 0F1 0.1B0 0B0 0B1") == 3


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("num_slices", [1, 3, 4])
def test_messages_do_not_change_what_is_in_flight(num_stages: int, num_slices: int) -> None:
    # P - p - 1 + k of Seq1F1B
    plan = plan_of(chunks_of([(num_slices, 0)] * 4), num_stages, "1f1b")
    for stage in plan.micro_batches[0].groups[0].stages:
        assert in_flight(stage) == min(4 * num_slices, num_stages - stage.stage - 1 + num_slices)
