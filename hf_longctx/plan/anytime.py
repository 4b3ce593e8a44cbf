"""Improves a step's plan by the linear program for as long as there is time, in a process of its own.

The process of `COMMAND` reads one `Question` from standard input and writes every better plan to standard output as soon as it is
found, both as pickles. It ends by itself after the last time limit, and may be killed at any moment: the plans that were
written until then are whole.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hf_longctx.plan.core.planner_config import PlannerConfig
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.planner import plan_step

# not `-m`, for pickles name the module of a question
COMMAND = (sys.executable, "-c", "from hf_longctx.plan.anytime import main; main()")

# the first time limit of the program in seconds; every further one is twice as long
_FIRST_LIMIT_S = 0.25
# share of the seconds that a plan must save to replace another
_LEAST_GAIN = 1e-3


@dataclass(frozen=True, slots=True)
class Question:
    """A step to plan again: its lengths, costs and settings, and the plan to beat."""

    plan: StepPlan
    costs: CostModel
    config: PlannerConfig


def improved_plans(question: Question) -> Iterator[StepPlan]:
    """Yields ever better plans of the step, each by a program with twice the time, up to `solver_time_limit_s` in all."""
    best, config = question.plan, question.config
    limit_s, left_s = _FIRST_LIMIT_S, config.solver_time_limit_s
    while left_s > 0:
        own = replace(config, solver="lp", solver_time_limit_s=min(limit_s, left_s))
        found = plan_step(best.step, best.lengths, question.costs, own)
        if found.estimate.counted_s < best.estimate.counted_s * (1 - _LEAST_GAIN):
            best = found
            yield found
        left_s -= limit_s
        limit_s *= 2


def main() -> None:
    """Answers the question on standard input."""
    question = pickle.load(sys.stdin.buffer)
    assert isinstance(question, Question)
    for plan in improved_plans(question):
        sys.stdout.buffer.write(pickle.dumps(plan))
        sys.stdout.buffer.flush()
