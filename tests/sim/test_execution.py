"""The seconds of a simulated plan, rank by rank, compared with numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.plans.forecasts import cost_model

from hf_longctx.plan.core.types import GroupShape, StepPlan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.groups.placement import place_layout
from hf_longctx.plan.groups.problem import Layout
from hf_longctx.plan.planner import build_plan
from hf_longctx.sim.execution import execute_plan

pytestmark = pytest.mark.quick

SHAPES = {1: GroupShape(1), 2: GroupShape(2, 2)}
LENGTHS = (100, 30, 10)
# a pair of ranks with one sequence of 100 tokens, then two single ranks with 30 and 10 tokens
LAYOUT: Layout = [[(2, (0,))], [(1, (1,)), (1, (2,))]]
# each rank of the pair sends half of its 50 tokens: 4 query heads before and after attention and 2 heads of keys and values, of 2
# numbers of 4 bytes in 2 layers, which makes 25 * (2 * 4 + 2 * 2) * 16 bytes at 1 us each
EXCHANGE_S = 25 * 12 * 16 * 1e-6
FORWARD_S, BACKWARD_S = 50 * 1e-3 + 0.01, 50 * 2e-3 + 0.01


def hand_plan(costs: CostModel, layout: Layout = LAYOUT) -> StepPlan:
    placed = place_layout(layout, costs.cluster.num_ranks, costs.cluster.ranks_per_node, node_aligned=True)
    return build_plan(0, LENGTHS, placed, SHAPES, costs)


def test_ranks_compute_communicate_and_wait_as_worked_by_hand() -> None:
    costs = cost_model(2)
    run = execute_plan(hand_plan(costs), costs)
    pair_s = FORWARD_S + BACKWARD_S + 2 * EXCHANGE_S
    long_s, short_s = 30 * 3e-3 + 0.02, 10 * 3e-3 + 0.02
    assert run.step_s == pytest.approx(pair_s + long_s + 0.25)
    assert run.once_s == 0.25
    first, second = run.ranks
    assert (first.rank, second.rank) == (0, 1)
    assert (first.compute_s, second.compute_s) == pytest.approx(
        (FORWARD_S + BACKWARD_S + long_s, FORWARD_S + BACKWARD_S + short_s)
    )
    assert (first.exchange_s, second.exchange_s) == pytest.approx((2 * EXCHANGE_S, 2 * EXCHANGE_S))
    assert (first.idle_s, second.idle_s) == pytest.approx((0.0, long_s - short_s))
    assert (first.peak_tokens, second.peak_tokens) == (50, 50)
    for rank in run.ranks:
        assert rank.busy_s == pytest.approx(rank.compute_s + rank.exchange_s)
        assert rank.busy_s + rank.idle_s + run.once_s == pytest.approx(run.step_s)


def test_shares_are_of_all_rank_seconds() -> None:
    costs = cost_model(2)
    run = execute_plan(hand_plan(costs), costs)
    assert run.share("exchange_s") == pytest.approx(4 * EXCHANGE_S / (2 * run.step_s))
    total = sum(run.share(name) for name in ("compute_s", "exchange_s", "idle_s"))
    assert total == pytest.approx(1 - run.once_s / run.step_s)


def test_events_of_a_rank_follow_each_other_and_show_communication_apart() -> None:
    costs = cost_model(2)
    run = execute_plan(hand_plan(costs), costs)
    events = sorted((event for event in run.events if event.rank == 0), key=lambda event: event.start_s)
    assert [event.kind for event in events] == ["F", "exchange", "B", "exchange", "F", "B", "step"]
    stops = [event.stop_s for event in events]
    assert [event.start_s for event in events] == pytest.approx([0.0, *stops[:-1]])
    assert stops[:4] == pytest.approx(
        [FORWARD_S, FORWARD_S + EXCHANGE_S, FORWARD_S + EXCHANGE_S + BACKWARD_S, FORWARD_S + BACKWARD_S + 2 * EXCHANGE_S]
    )
    assert stops[-1] == pytest.approx(run.step_s)


def test_sums_of_events_are_the_ranks_seconds() -> None:
    costs = cost_model(2)
    run = execute_plan(hand_plan(costs), costs)
    for rank in run.ranks:
        spent = {kind: 0.0 for kind in ("F", "B", "exchange", "step")}
        for event in (event for event in run.events if event.rank == rank.rank):
            spent[event.kind] += event.stop_s - event.start_s
        assert spent["F"] + spent["B"] == pytest.approx(rank.compute_s)
        assert spent["exchange"] == pytest.approx(rank.exchange_s)


def test_the_peak_is_the_fullest_micro_batch_of_each_rank() -> None:
    costs = cost_model(2)
    run = execute_plan(hand_plan(costs, [[(1, (1,)), (1, (2,))], [(1, (0,))]]), costs)
    assert sorted(rank.peak_tokens for rank in run.ranks) == [10, 100]


def test_another_number_of_ranks_or_layers_is_refused() -> None:
    plan = hand_plan(cost_model(2))
    with pytest.raises(ValueError, match="the plan is for 2 ranks, but the cost model is for 4"):
        execute_plan(plan, cost_model(4))
    costs = cost_model(2)
    with pytest.raises(ValueError, match="a model of 2 layers, but the cost model is for 3"):
        execute_plan(plan, replace(costs, model=replace(costs.model, num_layers=3)))
