"""A slow or failing solver costs a step no more than a better plan could save: the fast planner stands in, said and counted."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import replace

import pytest
from helpers.plans.layouts import tiny_costs
from helpers.plans.scripted_planner import ScriptedPlanner, slow_config

from hf_longctx.hf.planning.ahead import Draft, DraftPlanner, is_stand_in
from hf_longctx.hf.planning.source import PlanSource
from hf_longctx.plan.core.planner_config import PlannerConfig
from hf_longctx.plan.core.schedule import PlanError
from hf_longctx.plan.core.types import Estimate
from hf_longctx.plan.planner import plan_step
from hf_longctx.runtime.process_groups.pool import GroupPool

LENGTHS = [40, 7, 9, 30]
FAST = plan_step(0, LENGTHS, tiny_costs(4), PlannerConfig(64, (1, 2, 4), solver="greedy"))


def slow_source(planner: ScriptedPlanner, late_s: float | None = None) -> PlanSource:
    return PlanSource(GroupPool((1,), timeout_s=1.0), tiny_costs(4), slow_config(64, (1, 2, 4)), late_s=late_s, planner=planner)


def solvers_of(source: PlanSource, num_steps: int, explore: bool = False) -> list[str]:
    steps = [(step, LENGTHS) for step in range(num_steps)]
    return [plan.estimate.solver for plan in source.plans(steps, explore)]


def test_a_solver_that_is_in_time_gives_the_plans() -> None:
    source = slow_source(ScriptedPlanner(), late_s=60.0)
    assert solvers_of(source, 4) == ["slow"] * 4
    assert (source.drafts.late_plans, source.drafts.failed_plans) == (0, 0)


def test_late_plans_are_the_fast_planners_and_said_once(caplog) -> None:
    planner = ScriptedPlanner(late=(1,))
    source = slow_source(planner, late_s=0.2)
    plans = source.plans([(step, LENGTHS) for step in range(6)], explore=False)
    with caplog.at_level(logging.WARNING):
        first, *stand_ins = [next(plans) for _ in range(4)]
    assert first.estimate.solver == "slow"
    for plan in stand_ins:
        assert plan.micro_batches == FAST.micro_batches
        assert plan.estimate.solver == "greedy in place of a late one" and is_stand_in(plan)
    assert source.drafts.late_plans == 3
    assert [record.message.split(":")[0] for record in caplog.records] == ["step 1"]
    assert "late_plans" in caplog.text
    # steps 2 and 3 were planned behind the late one, and not solved any more once nobody waited for them
    planner.go.set()
    source.drafts.late_s = 60.0
    behind = source.drafts.draft(9, LENGTHS, source.costs, source.config).slow
    assert behind is not None and behind.result().step == 9
    assert [plan.estimate.solver for plan in plans] == ["slow", "slow"]
    assert [step for step, solver in planner.calls if solver == "slow" and step < 9] == [0, 1, 4, 5]


def test_nobody_waits_while_the_solver_is_busy_with_a_plan_that_was_given_up() -> None:
    planner = ScriptedPlanner(late=(0,))
    source = slow_source(planner, late_s=0.1)
    assert len(solvers_of(source, 1)) == 1
    draft = source.drafts.draft(1, LENGTHS, source.costs, source.config)
    assert source.drafts.patience_s(draft) == 0
    planner.go.set()
    assert draft.slow is not None and draft.slow.result().step == 1
    assert source.drafts.patience_s(draft) == 0.1


def test_a_step_waits_no_longer_than_the_plan_could_save() -> None:
    drafts, slow = DraftPlanner(plan_step, late_s=None), Future()
    fast = replace(FAST, estimate=Estimate(step_s=7.0, lower_bound_s=4.5))
    assert drafts.patience_s(Draft(fast, slow)) == 2.5
    # the bound counts gathers, so the plan's seconds must
    gathering = replace(FAST, estimate=Estimate(step_s=7.0, lower_bound_s=8.5, gathers_s=3.0))
    assert drafts.patience_s(Draft(gathering, slow)) == 1.5
    # a plan at the bound cannot be beaten
    at_bound = replace(FAST, estimate=Estimate(step_s=7.0, lower_bound_s=7.0))
    assert drafts.patience_s(Draft(at_bound, slow)) < 0.1


@pytest.mark.parametrize("error", [RuntimeError("boom"), MemoryError("boom"), PlanError("boom"), ValueError("boom")])
def test_a_failed_solver_is_replaced_and_said_once(caplog, error: Exception) -> None:
    source = slow_source(ScriptedPlanner(failing={1: error, 2: error}), late_s=60.0)
    with caplog.at_level(logging.WARNING):
        solvers = solvers_of(source, 4)
    assert solvers == ["slow", *["greedy in place of a failed one"] * 2, "slow"]
    assert (source.drafts.late_plans, source.drafts.failed_plans) == (0, 2)
    (record,) = caplog.records
    assert record.message.startswith("step 1: the solver failed") and record.message.endswith(f"{type(error).__name__}: boom")


def test_lengths_that_nobody_can_plan_are_an_error_without_a_slow_attempt() -> None:
    planner = ScriptedPlanner()
    with pytest.raises(ValueError, match="1000 tokens"):
        list(slow_source(planner, late_s=60.0).plans([(0, [1000])], explore=False))
    assert planner.calls == [(0, "greedy")]


def test_a_slow_plan_is_waited_for_where_the_fast_planner_failed() -> None:
    planner = ScriptedPlanner(fast_failing={0: RuntimeError("no fast plan")})
    source = slow_source(planner, late_s=0.0)
    assert solvers_of(source, 1) == ["slow"] and source.drafts.failed_plans == 0


def test_the_fast_planners_error_is_raised_where_both_failed() -> None:
    slow, fast = RuntimeError("no slow plan"), RuntimeError("no fast plan")
    with pytest.raises(RuntimeError, match="no fast plan") as caught:
        solvers_of(slow_source(ScriptedPlanner(failing={0: slow}, fast_failing={0: fast})), 1)
    assert caught.value.__cause__ is slow


def test_exploring_steps_are_left_to_the_fast_planner() -> None:
    planner = ScriptedPlanner()
    assert solvers_of(slow_source(planner, late_s=60.0), 7, explore=True)[5:] == ["slow", "slow"]
    assert [solver for step, solver in planner.calls if step < 5] == ["greedy"] * 5


@pytest.mark.parametrize("solver", ["auto", "greedy", "static"])
def test_fast_solvers_plan_once(solver: str) -> None:
    planner = ScriptedPlanner()
    source = slow_source(planner)
    source.config = PlannerConfig(64, (1, 2, 4), solver=solver)
    solvers_of(source, 2)
    assert planner.calls == [(0, solver), (1, solver)]
