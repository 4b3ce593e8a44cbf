"""Sums of gradients that start early hide behind the last backward as a queue of layers on one link would."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx.plan.core.settings import GENERIC_GPU, ClusterSpec, PlannerConfig
from hf_longctx.plan.core.types import Parameters, StepPlan
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.cost.weight_traffic import StageWeights
from hf_longctx.plan.planner import plan_step
from hf_longctx.plan.predict.evaluate import evaluate_plan
from hf_longctx.plan.predict.planning import hidden_sums_s, weight_seconds

SPEC = named_model("llama-3.2-1b")


@given(st.floats(0, 10), st.floats(0, 10), st.integers(1, 40))
def test_they_hide_what_a_queue_of_layers_hides(sums_s: float, backward_s: float, num_layers: int) -> None:
    ready_s = done_s = 0.0
    for _ in range(num_layers):
        ready_s += backward_s / num_layers
        done_s = max(ready_s, done_s) + sums_s / num_layers
    assert hidden_sums_s(sums_s, backward_s, num_layers) == pytest.approx(sums_s - (done_s - ready_s), abs=1e-9)


def planned(parameters: Parameters, shard_ranks: int) -> tuple[StepPlan, CostModel]:
    cluster = ClusterSpec(4, 4, GENERIC_GPU)
    coefficients = default_coefficients(SPEC, cluster)
    costs = CostModel(SPEC, cluster, coefficients, parameters=parameters, shard_ranks=shard_ranks)
    return plan_step(0, (4000, 2000, 1000), costs, PlannerConfig(4000, (1, 2, 4))), costs


def test_the_last_backward_hides_sums_of_replicated_weights() -> None:
    plan, costs = planned("replicated", 1)
    found, run = weight_seconds(plan, costs), evaluate_plan(plan, costs)
    backward_s = max(costs.backward_s(group.chunks[-1], group.shape, SPEC.num_layers) for group in plan.micro_batches[-1].groups)
    of_layers, of_all = (StageWeights.of(SPEC, SPEC.num_layers, *ends).gradients for ends in ((False, False), (True, True)))
    layers_s = found.sum_s * of_layers / of_all
    assert found.hidden_s == pytest.approx(hidden_sums_s(layers_s, backward_s, SPEC.num_layers))
    assert 0 < found.hidden_s < found.sum_s
    least, most = found.step_bounds_s(run.step_s, run.once_s, run.ranks)
    assert most - least == pytest.approx(found.hidden_s) and least >= run.step_s


def test_sums_over_copies_of_shards_hide_nothing() -> None:
    found = weight_seconds(*planned("sharded", 2))
    assert found.hidden_s == 0 < found.sum_s
