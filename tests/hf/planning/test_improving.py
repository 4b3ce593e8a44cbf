"""Solver "auto" improves a plan in a process of its own where the bound leaves room, and says what that gained."""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import replace
from typing import Any

import pytest
from helpers.plans.cost_models import cost_model
from helpers.plans.grouping_problems import lognormal_lengths

from hf_longctx.hf.planning import improving, source
from hf_longctx.hf.planning.ahead import Draft, DraftPlanner
from hf_longctx.hf.planning.improving import Improving, is_improved, is_worth_improving
from hf_longctx.hf.planning.source import PlanSource
from hf_longctx.plan.core.planner_config import PlannerConfig
from hf_longctx.plan.planner import plan_step
from hf_longctx.runtime.process_groups.pool import GroupPool

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


def test_a_plan_that_no_step_runs_is_not_improved_on(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Improving] = []

    def begin(*args: Any) -> Improving:
        begun.append(Improving(*args))
        return begun[-1]

    monkeypatch.setattr(source, "is_worth_improving", lambda plan, config: True)
    monkeypatch.setattr(source, "Improving", begin)
    plans = PlanSource(GroupPool((1,), timeout_s=1.0), COSTS, CONFIG, explore_steps=0)
    drawn = plans.plans([(step, PLAN.lengths) for step in range(3)], explore=True)
    next(drawn)
    drawn.close()
    # behind the last draft in the same thread
    plans.drafts.submit(lambda: Draft(PLAN)).result()
    assert len(begun) == 2
    for each in begun:
        assert each._process is not None and each._process.returncode == -signal.SIGKILL


def test_a_program_that_fails_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(improving, "COMMAND", (sys.executable, "-c", "import a_package_that_is_not_there"))
    monkeypatch.setattr(Improving, "_has_failed", False)
    for _ in range(2):
        work = Improving(PLAN, COSTS, CONFIG)
        assert work._process is not None and work._process.wait(120) == 1
        assert work.stop() is PLAN
    (record,) = caplog.records
    assert "ended with status 1: ModuleNotFoundError: No module named 'a_package_that_is_not_there'" in record.message
