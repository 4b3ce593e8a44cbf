"""What every pass of the planner reads beside a plan: costs, settings, and the predictions made so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hf_longctx.plan.core.planner_config import PlannerConfig
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.memory.saved_tensors import saved_token_bytes
from hf_longctx.plan.prediction.evaluate import Evaluation, evaluate_plan, state_bytes
from hf_longctx.plan.prediction.pipeline_run import PredictionCache


@dataclass(frozen=True, slots=True)
class Planning:
    """The planning of one step. known: bytes and runs of groups that were predicted before; all plans of the step share them."""

    costs: CostModel
    config: PlannerConfig
    known: PredictionCache = field(default_factory=PredictionCache)

    def predict(self, plan: StepPlan) -> Evaluation:
        """The plan's predicted run, without events."""
        return evaluate_plan(plan, self.costs, with_events=False, known=self.known)

    def limit_bytes(self, plan: StepPlan) -> int:
        """Most bytes that a rank may hold: the largest states of any stage and the budget beside them; 0 without a budget."""
        budget = self.config.activations
        if budget is None:
            return 0
        beside = budget.device_bytes
        if plan.num_stages == 1:
            # how many tokens can be wholly kept may have been measured, and is then more than the formula says
            beside = max(beside, budget.kept_tokens * saved_token_bytes(self.costs.model))
        return beside + max(state_bytes(plan, self.costs))


# One step of planning from plan to plan. Raises ValueError where the plan cannot be made to fit.
Pass = Callable[[StepPlan, Planning], StepPlan]
