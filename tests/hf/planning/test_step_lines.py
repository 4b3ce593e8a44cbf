"""The line of the steps between two logs: means and sums worked out by hand from hand-written intervals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.plans.layouts import plan_of
from helpers.plans.measured_plans import INTERVALS, step_record

from hf_longctx.hf.planning.report import record_parts
from hf_longctx.hf.planning.step_record import StepRecord
from hf_longctx.plan.core.types import Estimate
from hf_longctx.runtime.execution.round import StepMemory

pytestmark = pytest.mark.quick


def test_one_step_before_calibration_has_no_prediction() -> None:
    assert record_parts([step_record(step_s=9.0)], 0.0) == [
        *(" 500 ms", "     34 tokens/s", "padding 5.6%", "2 micro-batches <2> <1x2>"),
    ]
    assert record_parts([], 0.0) == []


def test_a_step_counts_with_all_its_seconds_and_tells_those_of_its_plan_where_they_are_fewer() -> None:
    record = step_record(step_s=0.45, cost_source="measured")
    assert record_parts([record], 0.51)[:2] == [" 510 ms (predicted 450 ms)", "     33 tokens/s"]
    assert record_parts([record], 1.0)[:2] == [" 1.00 s (plan 500 ms, predicted 450 ms)", "     17 tokens/s"]


def test_several_steps_are_means_over_them_and_tokens_over_all_their_seconds() -> None:
    short = StepRecord(plan_of([[(1, (0,)), (1, (1,))]], [6, 7], 2), 1, 2.0, INTERVALS[:2])
    # 17 tokens and a dummy in 0.5 s, and 13 in 0.3 s
    assert record_parts([step_record(), short], 0.9) == [
        *(" 450 ms a step (plan 400 ms)", "     33 tokens/s", "padding 3.2%", "1.5 micro-batches a step"),
    ]
    # one of them has no prediction
    predicted = step_record(step_s=0.45, cost_source="measured")
    assert "predicted" not in record_parts([predicted, short], 0.8)[0]
    assert record_parts([predicted, predicted], 0.0)[0] == " 500 ms a step (predicted 450 ms)"


def test_plans_of_one_step_are_added_up() -> None:
    first, last = (replace(step_record(step_s=0.45, cost_source="measured"), place=place, count=2) for place in (0, 1))
    assert record_parts([first, last], 0.0) == [
        *(" 1.00 s (predicted 900 ms)", "     34 tokens/s", "padding 5.6%", "4 micro-batches"),
    ]


def test_how_far_measured_plans_are_from_the_bound() -> None:
    bounded = {"step_s": 0.45, "lower_bound_s": 0.36}
    far = step_record(**bounded, cost_source="measured")
    assert record_parts([far], 0.0)[-1] == "within 25.0% of optimal"
    # 0.9 s over bounds of 0.36 and 0.45 s
    assert record_parts([far, step_record(step_s=0.45, lower_bound_s=0.45, cost_source="measured")], 0.0)[-1] == (
        "within 11.1% of optimal"
    )
    # one rank has no choice, and one micro-batch is what it always has
    alone = replace(plan_of([[(1, (0,))]], [9], 1), estimate=Estimate(**bounded, cost_source="measured"))
    assert len(record_parts([StepRecord(alone, 0, 0.0, INTERVALS)], 0.0)) == 2
    # guessed costs say nothing, and no bound is no gap
    for estimate in (bounded, {"step_s": 0.45, "cost_source": "measured"}):
        assert record_parts([step_record(**estimate)], 0.0)[-1].endswith("<2> <1x2>")


def test_memory_is_that_of_the_fullest_plan() -> None:
    mib = 2**20
    few, many = (
        replace(step_record(), memory=StepMemory(saved=saved * mib), predicted_memory=StepMemory(saved=2 * saved * mib))
        for saved in (3, 5)
    )
    assert record_parts([few, many, few], 0.0)[-1] == "held 10.0 MiB predicted, 5.0 MiB measured"
