"""Inputs of every pass of the planner besides the plan: costs, settings, and the predictions made so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_longctx.plan.activations.fit import FittedGroups
from hf_longctx.plan.core.planner_config import PlannerConfig
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.prediction.evaluate import Evaluation, evaluate_plan, state_bytes
from hf_longctx.plan.prediction.pipeline_run import PredictionCache
from hf_longctx.plan.prediction.weight_seconds import weight_seconds


@dataclass(frozen=True, slots=True)
class Planning:
    """Inputs for planning one step, and two caches that all plans of the step share.

    known: bytes and runs of groups predicted so far. fitted: groups that were made to fit.
    """

    costs: CostModel
    config: PlannerConfig
    known: PredictionCache = field(default_factory=PredictionCache)
    fitted: FittedGroups = field(default_factory=FittedGroups)
    _runs: dict[int, tuple[StepPlan, Evaluation]] = field(default_factory=dict)

    def predict(self, plan: StepPlan) -> Evaluation:
        """Predicts the plan's run, without events; once for each plan."""
        if id(plan) not in self._runs:
            # the plan is stored too, so that its id is not reused
            self._runs[id(plan)] = plan, evaluate_plan(plan, self.costs, with_events=False, known=self.known)
        return self._runs[id(plan)][1]

    def gathers_s(self, plan: StepPlan) -> float:
        """Seconds of gathers of sharded weights that plans of one stage count beside their predicted seconds.

        Pipelines do not count them.
        """
        if plan.num_stages > 1 or plan.parameters == "replicated":
            return 0.0
        run = self.predict(plan)
        return weight_seconds(plan, self.costs).counted_gathers_s(run.step_s, run.once_s, run.ranks)

    def counted_s(self, plan: StepPlan) -> float:
        """Seconds by which plans are compared: predicted ones, and those of gathers that count."""
        return self.predict(plan).step_s + self.gathers_s(plan)

    def limit_bytes(self, plan: StepPlan) -> int:
        """Most bytes that a rank may hold: the largest states of any stage plus the budget; 0 means that no budget is set."""
        budget = self.config.activations
        if budget is None:
            return 0
        return budget.device_bytes + max(state_bytes(plan, self.costs, self.known.byte_model(self.costs.model)))

    @property
    def host_limit_bytes(self) -> int | None:
        """Most host bytes of a rank for saved tensors; None means that no budget is set."""
        return None if self.config.activations is None else self.config.activations.host_bytes
