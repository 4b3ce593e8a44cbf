"""A planner whose slow solver does what a test says: it plans, fails, or waits for a signal."""

from __future__ import annotations

import threading
from dataclasses import replace

from hf_longctx.plan.core.planner_config import PlannerConfig
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.planner import plan_step


def slow_config(tokens_per_rank: int, degrees: tuple[int, ...]) -> PlannerConfig:
    """Limits with a solver named "slow", which the planner does not count among its fast ones."""
    config = PlannerConfig(tokens_per_rank, degrees)
    object.__setattr__(config, "solver", "slow")
    return config


class ScriptedPlanner:
    """Stand-in for `plan_step` with a solver "slow", which plans one degree for all groups and says so in the estimate.

    late: steps in which the slow solver waits for `go`. failing: step -> exception that the slow solver raises in it.
    fast_failing: step -> exception that the fast planner raises in it.
    """

    def __init__(
        self,
        late: tuple[int, ...] = (),
        failing: dict[int, Exception] | None = None,
        fast_failing: dict[int, Exception] | None = None,
    ) -> None:
        self.late, self.failing, self.fast_failing = late, failing or {}, fast_failing or {}
        self.go = threading.Event()
        self.calls: list[tuple[int, str]] = []

    def __call__(self, step: int, lengths: list[int], costs: CostModel, config: PlannerConfig) -> StepPlan:
        self.calls.append((step, config.solver))
        if config.solver != "slow":
            if step in self.fast_failing:
                raise self.fast_failing[step]
            return plan_step(step, lengths, costs, config)
        if step in self.late:
            self.go.wait(30.0)
        if step in self.failing:
            raise self.failing[step]
        degree = config.degrees[-1]
        plan = plan_step(step, lengths, costs, replace(config, solver="static", static_degree=degree))
        return replace(plan, estimate=replace(plan.estimate, solver="slow"))
