"""The linear program improves a plan step by step, also from a process of its own that is stopped at any moment."""

from __future__ import annotations

import pickle
import subprocess
from dataclasses import replace
from itertools import pairwise

from helpers.plans.cost_models import cost_model
from helpers.plans.grouping_problems import lognormal_lengths

from hf_longctx.plan.anytime import COMMAND, Question, improved_plans
from hf_longctx.plan.core.planner_config import PlannerConfig
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.plan.planner import plan_step


def question(limit_s: float = 0.5) -> Question:
    """A step under the plan of one degree, which wastes much of it."""
    costs = replace(cost_model("exchange", 8), parameters="sharded", shard_ranks=8)
    config = PlannerConfig(400, (1, 2, 4, 8), solver_time_limit_s=limit_s)
    lengths = lognormal_lengths(3, 24, 1500, 150.0)
    return Question(plan_step(7, lengths, costs, replace(config, solver="static")), costs, config)


def check(plans: list[StepPlan], asked: Question) -> None:
    seconds = [asked.plan.estimate.counted_s, *(plan.estimate.counted_s for plan in plans)]
    assert len(plans) >= 1
    assert all(later < earlier for earlier, later in pairwise(seconds))
    for plan in plans:
        validate_plan(plan)
        assert (plan.step, plan.lengths) == (7, asked.plan.lengths)
        assert "lp" in plan.estimate.solver


def test_plans_get_ever_better() -> None:
    asked = question()
    check(list(improved_plans(asked)), asked)


def test_a_process_answers_the_question() -> None:
    asked = question()
    answer = subprocess.run(COMMAND, input=pickle.dumps(asked), capture_output=True, check=True, timeout=120).stdout
    plans = []
    while answer:
        plans.append(pickle.loads(answer))
        answer = answer[len(pickle.dumps(plans[-1])) :]
    check(plans, asked)
