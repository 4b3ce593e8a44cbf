"""The most chunks in flight, counted from a stage's actions, equals counts by hand and Seq1F1B's closed form."""

from __future__ import annotations

import pytest
from helpers.plans.stage_orders import chunks_of, plan_of

from hf_longctx.plan.core.types import Action
from hf_longctx.plan.memory.stage import most_in_flight


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("0F0 0B0 0F1 0B1", 1),
        ("0F0 0SF0 0F1 0SF1 0RB1 0B1 0F2 0RB0 0B0 0B2", 2),
        ("0F0 0.1F0 0F1 0.1B0 0B0 0B1", 3),
    ],
)
def test_chunks_in_flight_are_counted_between_forward_and_backward(text: str, count: int) -> None:
    assert most_in_flight(map(Action.parse, text.split())) == count


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("num_slices", [1, 3, 4])
def test_messages_do_not_change_what_is_in_flight(num_stages: int, num_slices: int) -> None:
    # P - p - 1 + k chunks on stage p of P (Seq1F1B, arXiv 2406.03488)
    plan = plan_of(chunks_of([(num_slices, 0)] * 4), num_stages, "1f1b")
    for stage in plan.micro_batches[0].groups[0].stages:
        assert most_in_flight(stage.actions) == min(4 * num_slices, num_stages - stage.stage - 1 + num_slices)
