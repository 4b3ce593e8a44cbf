"""Inputs of every pass of the planner besides the plan: costs, settings, and the predictions made so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_longctx.plan.activations.fit import FittedGroups
from hf_longctx.plan.core.planner_config import PlannerConfig
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.prediction.evaluate import Evaluation, evaluate_plan, state_bytes
from hf_longctx.plan.prediction.pipeline_run import PredictionCache


@dataclass(frozen=True, slots=True)
class Planning:
    """Inputs for planning one step, and two caches that all plans of the step share.

    known: bytes and runs of groups predicted so far. fitted: groups that were made to fit.
    """

    costs: CostModel
    config: PlannerConfig
    known: PredictionCache = field(default_factory=PredictionCache)
    fitted: FittedGroups = field(default_factory=FittedGroups)

    def predict(self, plan: StepPlan) -> Evaluation:
        """Predicts the plan's run, without events."""
        return evaluate_plan(plan, self.costs, with_events=False, known=self.known)

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
