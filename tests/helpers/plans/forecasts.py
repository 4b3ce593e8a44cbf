"""Forecasts of a model whose bytes and seconds can be computed by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hf_longctx.plan.core.settings import ClusterSpec, HardwareSpec, PlannerConfig
from hf_longctx.plan.cost.cost_model import CostCoefficients, CostModel, PassCoefficients
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.setup import DeviceMemory, Placement, Setup
from hf_longctx.sim.forecast import Forecast, make_forecast
from hf_longctx.sim.scenario import Scenario
from hf_longctx.sim.workloads import Workload

# a layer: 8 * 2 * (2 * 4 + 2 * 2) + 3 * 8 * 16 = 576 parameters; all: 2 * 576 + 2 * 10 * 8 = 1312
# a layer saves for each token 24 * 8 + 8 in norms, 4 * (8 + 8 + 8) + 4 * 4 in attention and 4 * 4 * 16 in the MLP: 568 bytes;
# the model saves 2 * 568, and 10 * (4 + 3 * 4) for the loss: 1296. With workspace a token takes 1516 bytes (`TOKEN_BYTES`) in
# the backward of the loss: each layer also has keys and values once for each query head, and its output once more (64 bytes);
# rotary embeddings, ids and labels take 32, the last norm and its output 68 + 32, and three fp32 tensors of logits 120
MODEL = ModelSpec(
    num_layers=2,
    hidden_size=8,
    intermediate_size=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    vocab_size=10,
    max_positions=100,
)
TOKEN_BYTES = 1516
HARDWARE = HardwareSpec("test", 1e12, 1e12, 100_000, 1e9, 1e9, 0.0)
# four fifths of the 100,000 bytes are usable
MEMORY = DeviceMemory.by_formula(MODEL, HARDWARE.device_bytes)

# costs on each rank: 1 ms per token (backward 2 ms), 10 ms per chunk, 1 us per byte sent; 250 ms once per step
_FORWARD = PassCoefficients(0.0, 1e-3, 1e-2, 0.0, 1e-6, 1e-6)
_BACKWARD = PassCoefficients(0.0, 2e-3, 1e-2, 0.0, 1e-6, 1e-6)
COEFFICIENTS = CostCoefficients(_FORWARD, _BACKWARD, step_s=0.25, source="test")


def cost_model(num_ranks: int) -> CostModel:
    """A cost model with Ulysses groups and sharded parameters on one node."""
    cluster = ClusterSpec(num_ranks, num_ranks, HARDWARE)
    return CostModel(MODEL, cluster, COEFFICIENTS, method="ulysses", parameters="sharded", shard_ranks=num_ranks)


def scenario(num_ranks: int = 4, tokens_per_rank: int = 0) -> Scenario:
    """A scenario with the cost model above and degrees 1, 2 and 4."""
    degrees = tuple(degree for degree in (1, 2, 4) if degree <= num_ranks)
    placement = Placement(num_ranks, "sharded", num_ranks, degrees, "ulysses", tokens_per_rank)
    return Scenario("toy", "test", Setup.of(cost_model(num_ranks), MEMORY, placement, PlannerConfig(1, degrees)))


def changed(
    own: Scenario, costs: CostModel | None = None, memory: DeviceMemory | None = None, placement: Placement | None = None
) -> Scenario:
    """The scenario with other costs, another memory, or another placement."""
    setup = Setup.of(costs or own.costs, memory or own.memory, placement or own.placement, own.setup.planner)
    return replace(own, setup=setup)


LENGTHS = (120, 60, 40, 33, 20, 16, 15, 9, 8, 4, 3, 2, 2, 1)


def workload(lengths: tuple[int, ...] = LENGTHS) -> Workload:
    values, counts = np.unique(np.array(lengths), return_counts=True)
    return Workload("test", values, counts, int(values[-1]))


def forecast(lengths: tuple[int, ...] = LENGTHS, num_steps: int = 1, batch: int = 0, of: Scenario | None = None) -> Forecast:
    return make_forecast(of or scenario(), workload(lengths), num_steps, batch or len(lengths), seed=0)
