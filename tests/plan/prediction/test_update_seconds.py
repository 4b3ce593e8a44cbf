"""Seconds of the optimizer are those of the bytes that it reads and writes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_longctx.plan.core.cluster_spec import GENERIC_GPU, ClusterSpec
from hf_longctx.plan.core.planner_config import PlannerConfig
from hf_longctx.plan.core.types import Parameters
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.planner import plan_step
from hf_longctx.plan.prediction.weight_seconds import weight_seconds

SPEC = replace(named_model("llama-3.2-1b"), has_master_weights=True)
HARDWARE = replace(GENERIC_GPU, memory_bytes_per_s=1e12)


@pytest.mark.parametrize("parameters", ["replicated", "sharded"])
def test_the_optimizer_reads_and_writes_all_states_once(parameters: Parameters) -> None:
    share = 1 if parameters == "replicated" else 4

    def update_s(spec: object = SPEC, hardware: object = HARDWARE) -> float:
        cluster = ClusterSpec(4, 4, hardware)  # type: ignore[arg-type]
        coefficients = default_coefficients(spec, cluster)  # type: ignore[arg-type]
        costs = CostModel(SPEC, cluster, coefficients, parameters=parameters, shard_ranks=share)
        plan = plan_step(0, (4000, 2000, 1000), costs, PlannerConfig(4000, (1, 2, 4)))
        return weight_seconds(plan, replace(costs, model=spec)).update_s  # type: ignore[arg-type]

    # 20 bytes a parameter, read and written at 1 TB/s
    assert update_s() == pytest.approx(2 * 20 * SPEC.num_parameters / share / 1e12, rel=1e-6)
    assert update_s(hardware=GENERIC_GPU) == 0
    # on the host, 16 bytes a parameter move at the rate of copies; 6 stay on the device
    on_host = 2 * 16 / GENERIC_GPU.copy_bytes_per_s + 2 * 6 / 1e12
    assert update_s(replace(SPEC, updates_on_host=True)) == pytest.approx(on_host * SPEC.num_parameters / share, rel=1e-6)
