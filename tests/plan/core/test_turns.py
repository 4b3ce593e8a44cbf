"""One schedule through the micro-batches of a step: random ones are valid, survive JSON, and broken ones are refused by name."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from helpers.plans.pipeline_plans import pipeline_plan, random_schedules
from hypothesis import given, settings

from hf_longctx.plan.core.orders import families, in_turns, joined_stages, pipelined, running_order
from hf_longctx.plan.core.serialize import plan_digest, plan_from_json, plan_to_json
from hf_longctx.plan.core.types import Chunk, MicroBatch, SequenceGroup, Span, StepPlan
from hf_longctx.plan.core.validate import PlanError, describe_plan, validate_plan
from hf_longctx.plan.pipeline.stages import layer_ranges


def words(plan: StepPlan) -> list[str]:
    """Passes of every stage in running order, each with the letter of its micro-batch: "aF0 bF0 aB0"."""
    found = []
    for stage, turns in enumerate(plan.turns):
        actions = [batch.groups[0].stages[stage].actions for batch in plan.micro_batches]
        order = running_order([[a for a in own if a.kind in "FB"] for own in actions], turns)
        found.append(" ".join(f"{'abc'[index]}{action.kind}{action.chunk}" for index, action in order))
    return found


def long_then_short() -> StepPlan:
    """A sequence of two slices on both ranks, then two sequences side by side, one of them after a dummy-free pack."""
    long, short = [(2, [[(0, 0, 20)], [(0, 20, 40)]])], [(1, [[(1, 0, 9)], [(2, 0, 9)]]), (1, [[(3, 0, 9)]])]
    return pipeline_plan([40, 9, 9, 9], [long, short], 2, has_turns=True)


def test_the_second_micro_batch_begins_before_the_first_has_drained() -> None:
    plan = long_then_short()
    assert words(plan) == ["aF0 aF1 bF0 aB1 aB0 bF1 bB0 bB1", "aF0 aF1 aB1 aB0 bF0 bB0 bF1 bB1"]
    assert plan.for_rank(0).turns == (0, 0, 1, 0, 0, 1, 1, 1)
    assert plan.micro_batches[1].groups[1].chunks[1] == Chunk(1)
    assert "  stage 0: 0 0 1 0 0 1 1 1" in describe_plan(plan)


@pytest.mark.parametrize("reach", [1, 2, 3])
def test_a_schedule_reaches_only_so_far_into_later_micro_batches(reach: int) -> None:
    batches = [[(1, [[(sequence, 0, 9)] for sequence in range(first, first + 4)])] for first in (0, 4)]
    plan = pipeline_plan([9] * 8, batches, 4, "1f1b", has_turns=True, reach=reach)
    for stage, order in enumerate(map(str.split, words(plan))):
        left = order[: order.index("aB3")]
        assert sum(word[0] == "b" for word in left) == min(reach, 3 - stage)


def test_slots_are_one_family_if_they_are_for_any_group() -> None:
    sliced = (Chunk(0, (Span(0, 0, 5),)), Chunk(1, (Span(0, 5, 9),)), Chunk(2, (Span(1, 0, 9),)))
    other = (Chunk(0, (Span(2, 0, 9),)), Chunk(1, (Span(3, 0, 5),)), Chunk(2, (Span(3, 5, 9),)))
    assert families(sliced) == ((0, 1), (2,)) and families(other) == ((0,), (1, 2))
    assert families(sliced, other) == ((0, 1, 2),)
    assert families(sliced, (Chunk(0), Chunk(1), Chunk(2))) == ((0, 1), (2,))


def test_one_micro_batch_of_one_group_is_pipelined_as_before() -> None:
    chunks = (Chunk(0, (Span(0, 0, 5),)), Chunk(1, (Span(0, 5, 9),)), Chunk(2, (Span(1, 0, 9),)))
    group, ranges = SequenceGroup((0,), "local", chunks, ()), layer_ranges(6, 3)
    assert in_turns([MicroBatch((group,))], ranges) == ((MicroBatch((pipelined(group, ranges),)),), ())


def test_groups_of_different_numbers_of_chunks_are_refused() -> None:
    groups = tuple(SequenceGroup((place,), "local", tuple(map(Chunk, range(place + 1))), ()) for place in (0, 1))
    with pytest.raises(ValueError, match=r"groups of micro-batch 0 have \[1, 2\] chunks; .*pad them with dummy chunks"):
        in_turns([MicroBatch(groups)], layer_ranges(4, 2))


@pytest.mark.wide
@given(random_schedules(most_stages=5))
@settings(deadline=None, max_examples=150)
def test_a_schedule_is_valid_survives_json_and_contains_every_pass(plan: StepPlan) -> None:
    # `random_schedules` validates
    assert plan_from_json(plan_to_json(plan)) == plan
    assert bool(plan.turns) == (len(plan.micro_batches) > 1)
    assert (plan_digest(replace(plan, turns=())) == plan_digest(plan)) == (not plan.turns)
    for stage, joined in enumerate(joined_stages(plan.micro_batches, plan.turns) if plan.turns else ()):
        planned = [action for batch in plan.micro_batches for action in batch.groups[0].stages[stage].actions]
        assert len(joined.actions) == len(planned)
        assert len(set(joined.actions)) == len(planned)


def refused(plan: StepPlan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        validate_plan(plan)


def test_turns_that_do_not_name_every_pass_are_refused() -> None:
    plan = long_then_short()
    first, second = plan.turns
    refused(replace(plan, turns=(first[:-1], second)), "turns of stage 0 name micro-batch 1 3 times, but it has 4 passes")
    refused(replace(plan, turns=(first, (*second, 2))), "turns of stage 1 name micro-batch 2; the plan has micro-batches 0 to 1")
    refused(replace(plan, turns=(first,)), "turns of 1 stages, but 2 stages")


def test_stages_that_would_wait_for_each_other_are_refused() -> None:
    plan = long_then_short()
    assert validate_plan(replace(plan, turns=((0, 0, 0, 0, 1, 1, 1, 1),) * 2))
    # stage 0 drains the first micro-batch before the second, stage 1 wants them the other way around
    refused(replace(plan, turns=((0, 0, 0, 0, 1, 1, 1, 1), (1, 1, 1, 1, 0, 0, 0, 0))), "both orders must be equal")
    # stage 0 runs a backward of the second before any of its backwards can have come
    stuck = re.escape("deadlock")
    deadlocked = replace(plan, turns=((1, 1, 0, 0, 0, 0, 1, 1), (0, 0, 0, 0, 1, 1, 1, 1)))
    refused(deadlocked, f"both orders must be equal|{stuck}")
    one = [(1, [[(0, 0, 9)]])]
    two = pipeline_plan([9, 9], [one, [(1, [[(1, 0, 9)]])]], 2, has_turns=True)
    assert validate_plan(replace(two, turns=((0, 1, 0, 1), (0, 1, 0, 1))))
    assert validate_plan(replace(two, turns=((0, 1, 0, 1), (0, 0, 1, 1))))
    refused(replace(two, turns=((0, 0, 1, 1), (0, 1, 0, 1))), f"1RF0.*|{stuck}")


def test_groups_in_turns_run_equal_actions_with_messages_beside_them() -> None:
    plan = long_then_short()
    first, second = plan.micro_batches
    group = second.groups[1]
    other = pipelined(replace(group, stages=()), tuple(stage.layer_ranges for stage in group.stages), "gpipe")
    refused(
        replace(plan, micro_batches=(first, MicroBatch((second.groups[0], other)))),
        "micro-batch 1: with turns all groups must run the same actions",
    )
    short = replace(group, chunks=group.chunks[:1], stages=())
    fewer = pipelined(short, tuple(stage.layer_ranges for stage in group.stages))
    refused(
        replace(plan, micro_batches=(first, MicroBatch((second.groups[0], fewer)))),
        "all groups need equally many chunks, but group .* has 2 and group .* has 1; pad groups",
    )
    stage = first.groups[0].stages[0]
    # 0F0 0SF0 0F1 0SF1 ...: both sends after both forwards
    actions = (stage.actions[0], stage.actions[2], stage.actions[1], *stage.actions[3:])
    late = replace(first.groups[0], stages=(replace(stage, actions=actions), *first.groups[0].stages[1:]))
    refused(replace(plan, micro_batches=(MicroBatch((late,)), second)), "every receive must come right before its pass")


def test_turns_are_refused_where_micro_batches_cannot_overlap() -> None:
    plan = long_then_short()
    refused(replace(plan, parameters="gathered_per_round"), "gathered weights of one micro-batch at a time; use")
    one = [(1, [[(0, 0, 9)]])], [(1, [[(1, 0, 9)]])]
    alone = pipeline_plan([9, 9], one, 1, has_turns=True)
    assert not alone.turns
    refused(replace(alone, turns=((0, 0, 1, 1),)), "turns on one stage, where nothing drains")
