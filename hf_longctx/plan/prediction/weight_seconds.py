"""Predicts the seconds in which ranks gather sharded weights and sum gradients, beside the chunks that `evaluate` predicts.

They stand apart because FSDP2 gathers the next layer while the present one computes, so that only a part of these seconds
lengthens a step, and because coefficients that were measured in a run contain that part already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_longctx.plan.core.types import StagePlan, StepPlan
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.cost.weight_traffic import StageWeights, copies_traffic, round_traffic
from hf_longctx.plan.prediction.evaluate import RankUse


@dataclass(frozen=True, slots=True)
class WeightSeconds:
    """Seconds of a step in which ranks move weights and gradients, as if nothing else ran meanwhile.

    gathers_s: for every rank, gathers of sharded weights and reduce-scatters of their gradients in all micro-batches. sum_s: the
    sum of gradients over copies, once after the last backward. Empty and 0 if the cost model was measured.
    """

    gathers_s: tuple[float, ...] = ()
    sum_s: float = 0.0

    @property
    def gather_s(self) -> float:
        """Seconds of the gathers and reduce-scatters of the rank that has most of them."""
        return max(self.gathers_s, default=0.0)

    def range_s(self, step_s: float, once_s: float, ranks: Sequence[RankUse]) -> tuple[float, float]:
        """Least and most seconds of a step that takes `step_s` without these.

        Least: gathers run beside all computing, but share links with the exchanges of sequence groups and experts. Most: nothing
        runs beside them. The sum over copies runs alone in both.
        """
        if not self.gathers_s:
            return step_s + self.sum_s, step_s + self.sum_s
        on_links_s = max(rank.exchange_s + gather_s for rank, gather_s in zip(ranks, self.gathers_s, strict=True))
        return max(step_s, once_s + on_links_s) + self.sum_s, step_s + self.gather_s + self.sum_s


def weight_seconds(plan: StepPlan, costs: CostModel) -> WeightSeconds:
    """Seconds in which the ranks of `plan` gather weights and sum gradients; none if the coefficients of `costs` were measured.

    Coefficients that follow from the hardware's rates contain neither. Measured ones contain what their measurement had, and are
    not told apart from it.
    """
    if not plan.micro_batches or costs.coefficients != default_coefficients(costs.model, costs.cluster):
        return WeightSeconds()
    found = [_of_stage(plan, place, costs) for place in range(plan.num_stages)]
    return WeightSeconds(tuple(s for each in found for s in each.gathers_s), max(each.sum_s for each in found))


def _of_stage(plan: StepPlan, place: int, costs: CostModel) -> WeightSeconds:
    cluster, block = costs.cluster, plan.block_ranks
    stage = plan.micro_batches[0].groups[0].stages[place]
    weights = StageWeights.of(costs.model, stage.num_layers, place == 0, place == plan.num_stages - 1)
    gathers = [0.0] * (plan.ranks_per_stage // block)
    for micro_batch in plan.micro_batches:
        # blocks may leave out micro-batches; all groups of a block run equally many chunks
        chunks = {
            position // block: _num_forwards(group.stages[place]) for group in micro_batch.groups for position in group.positions
        }
        for index, num_chunks in chunks.items():
            traffic = round_traffic(weights, cluster, plan.parameters, block, num_chunks)
            gathers[index] += costs.coefficients.forward.exchange_s(traffic)
    to_copies = copies_traffic(weights, cluster, block, plan.ranks_per_stage // block)
    gathers_s = tuple(gathers[position // block] for position in range(plan.ranks_per_stage))
    return WeightSeconds(gathers_s, costs.coefficients.forward.exchange_s(to_copies))


def _num_forwards(stage: StagePlan) -> int:
    return sum(action.kind == "F" for action in stage.actions)
