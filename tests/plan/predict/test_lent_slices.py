"""Lent stages: the paper's table, the hand-written plan, and an order in which nobody waits for a rank that waits for it."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from helpers.plans.fixture_plans import fixture
from helpers.plans.stage_orders import chunks_of, plan_of, without_messages
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.lending import lent_order
from hf_longctx.plan.core.types import Action, MicroBatch, SequenceGroup
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.plan.predict.lending import lent_group, stages_of_slice


def sliced(num_stages: int, num_slices: int) -> SequenceGroup:
    return plan_of(chunks_of([(num_slices, 0)]), num_stages, "elastic").micro_batches[0].groups[0]


def test_eight_slices_on_four_stages_are_the_papers_table() -> None:
    # arXiv 2503.10377, table 3: the slices that each stage shares, and with which stages
    front = {0: ([0, 1, 2], [0, 1, 2, 3]), 1: ([0, 1], [1, 2, 3]), 2: ([0], [2, 3]), 3: ([], [])}
    back = {0: ([], []), 1: ([7], [0, 1]), 2: ([6, 7], [0, 1, 2]), 3: ([5, 6, 7], [0, 1, 2, 3])}
    for stage, chunk in itertools.product(range(4), range(8)):
        expected = [stage]
        for chunks, stages in (front[stage], back[stage]):
            expected = stages if chunk in chunks else expected
        assert list(stages_of_slice(stage, chunk, 4, 8)) == expected
    group = lent_group(sliced(4, 8))
    for stage in group.stages:
        for action in stage.actions:
            stages = stages_of_slice(stage.stage, action.chunk, 4, 8) if action.kind in ("F", "B") else [stage.stage]
            assert [lender for lender, _ in action.lenders] == [other for other in stages if other != stage.stage]


def test_the_hand_written_plan_comes_out() -> None:
    plan = fixture("lent")
    (group,) = plan.micro_batches[0].groups
    bare = tuple(
        dataclasses.replace(stage, actions=tuple(dataclasses.replace(action, lenders=()) for action in stage.actions))
        for stage in group.stages
    )
    assert lent_group(dataclasses.replace(group, stages=bare)) == group


# whether the first and whether the last slices are shared
SIDES = st.sampled_from([(True, True), (True, False), (False, True)])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.integers(0, 8), SIDES)
def test_every_lent_plan_is_valid_and_keeps_its_own_order(num_stages: int, more: int, sides: tuple[bool, bool]) -> None:
    num_slices = max(1, num_stages - 1 + more)
    plan = plan_of(chunks_of([(num_slices, 0)]), num_stages, "elastic")
    group = lent_group(plan.micro_batches[0].groups[0], *sides)
    helped = {(a.stage, a.chunk, s) for stage in group.stages for a in stage.actions for s, _ in a.lenders}
    both = {(a.stage, a.chunk, s) for stage in lent_group(group).stages for a in stage.actions for s, _ in a.lenders}
    assert helped == {one for one in both if sides[one[2] < one[0]]}
    validate_plan(dataclasses.replace(plan, micro_batches=(MicroBatch((group,)),)))
    rows = lent_order(group)
    for stage, row in zip(without_messages(group).stages, rows, strict=True):
        assert tuple(action for action in row if action.stage == stage.stage) == stage.actions
        assert len(set(row)) == len(row)
    everything = {action for stage in without_messages(group).stages for action in stage.actions}
    for action in everything:
        running = {action.stage, *(lender for lender, _ in action.lenders)}
        assert {stage for stage, row in enumerate(rows) if action in row} == running


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.integers(0, 8), SIDES, st.randoms(use_true_random=False))
def test_no_action_waits_for_a_rank_that_waits_for_it(num_stages: int, more: int, sides: tuple[bool, bool], draw: object) -> None:
    group = lent_group(sliced(num_stages, max(1, num_stages - 1 + more)), *sides)
    rows = [list(row) for row in lent_order(group)]
    done: set[tuple[str, int, int]] = set()

    def is_ready(action: Action) -> bool:
        source = action.stage + (-1 if action.kind == "F" else 1)
        has_source = not 0 <= source < num_stages or (action.kind, source, action.chunk) in done
        running = (action.stage, *(lender for lender, _ in action.lenders))
        return has_source and all(rows[stage][:1] == [action] for stage in running)

    while any(rows):
        ready = sorted({row[0] for row in rows if row and is_ready(row[0])}, key=str)
        assert ready, f"stages wait for each other: {[str(row[0]) if row else 'done' for row in rows]}"
        action = draw.choice(ready)  # type: ignore[attr-defined]
        for row in rows:
            if row and row[0] == action:
                row.pop(0)
        done.add((action.kind, action.stage, action.chunk))


@pytest.mark.parametrize(
    ("shapes", "num_stages", "message"),
    [
        ([(4, 0), (0, 1)], 2, r"5 chunks of 2 sequence\(s\) on 2 stages cannot lend ranks"),
        ([(2, 0)], 4, r"2 chunks of 1 sequence\(s\) on 4 stages .* at least 3 slices"),
    ],
)
def test_only_one_sequence_in_enough_slices_is_lent_ranks(shapes: list[tuple[int, int]], num_stages: int, message: str) -> None:
    (group,) = plan_of(chunks_of(shapes), num_stages, "elastic").micro_batches[0].groups
    with pytest.raises(ValueError, match=message):
        lent_group(group)


def test_several_layer_ranges_are_not_lent() -> None:
    (group,) = plan_of(chunks_of([(4, 0)]), 2, "interleaved", 2).micro_batches[0].groups
    with pytest.raises(ValueError, match="several layer ranges cannot lend ranks; use a schedule other than 'interleaved'"):
        lent_group(group)
