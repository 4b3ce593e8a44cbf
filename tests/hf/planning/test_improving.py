"""Solver "auto" improves a plan in a process of its own where the bound leaves room, and says what that gained."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from helpers.plans.cost_models import cost_model
from helpers.plans.grouping_problems import lognormal_lengths

from hf_longctx.hf.planning import improving
from hf_longctx.hf.planning.ahead import Draft, DraftPlanner
from hf_longctx.hf.planning.improving import Improving, is_improved, is_worth_improving
from hf_longctx.plan.core.planner_config import PlannerConfig
from hf_longctx.plan.planner import plan_step

COSTS = replace(cost_model("exchange", 8), parameters="sharded", shard_ranks=8)
CONFIG = PlannerConfig(400, (1, 2, 4, 8))
# a plan of one degree leaves much to gain
PLAN = plan_step(7, lognormal_lengths(3, 24, 1500, 150.0), COSTS, replace(CONFIG, solver="static"))


def test_only_a_gap_by_measured_costs_is_worth_it() -> None:
    wide, narrow, short = (
        replace(PLAN, estimate=replace(PLAN.estimate, step_s=factor * bound_s, lower_bound_s=bound_s))
        for factor, bound_s in ((1.03, 10.0), (1.01, 10.0), (1.03, 0.1))
    )
    assert is_worth_improving(wide, CONFIG)
    assert not is_worth_improving(narrow, CONFIG)
    assert not is_worth_improving(short, CONFIG)
    assert not is_worth_improving(wide, replace(CONFIG, solver="greedy"))
    assert not is_worth_improving(wide, replace(CONFIG, one_micro_batch=True))
    guessed = replace(wide, estimate=replace(wide.estimate, cost_source="default"))
    assert not is_worth_improving(guessed, CONFIG)


def test_the_best_plan_so_far_runs_and_says_what_it_gained() -> None:
    work = Improving(PLAN, COSTS, CONFIG)
    stop_s = time.monotonic() + 120
    while work._best is PLAN and time.monotonic() < stop_s:
        time.sleep(0.05)
    found = DraftPlanner(plan_step, None).chosen(Draft(PLAN, improving=work))
    assert found.estimate.counted_s < PLAN.estimate.counted_s
    assert is_improved(found)
    gain = PLAN.estimate.counted_s / found.estimate.counted_s - 1
    assert found.estimate.solver.endswith(f"{gain:.1%} faster than static")
    assert work._process is not None and work._process.returncode is not None


def test_a_plan_that_is_needed_at_once_is_the_fast_one() -> None:
    assert Improving(PLAN, COSTS, CONFIG).stop() is PLAN


def test_a_machine_without_room_for_a_process_keeps_the_fast_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(improving.subprocess, "Popen", fails)
    assert Improving(PLAN, COSTS, CONFIG).stop() is PLAN
