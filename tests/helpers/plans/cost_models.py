"""Cost models of small models: some in which one kind of work dominates, and one whose seconds can be computed by hand."""

from __future__ import annotations

from dataclasses import replace

from hf_longctx.plan.core.settings import ClusterSpec, HardwareSpec
from hf_longctx.plan.cost.cost_model import CostCoefficients, CostModel, PassCoefficients
from hf_longctx.plan.model.model_spec import ModelSpec

MODEL = ModelSpec(
    num_layers=4,
    hidden_size=64,
    intermediate_size=128,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=100,
    max_positions=1 << 20,
)


HARDWARE = HardwareSpec("test", 1e12, 5e11, 1 << 30, 1e9, 2.5e8, 1e-4)


# kind of work -> coefficients with which it dominates a step on a few ranks with sequences of some hundred tokens
_FORWARD = {
    "attention": PassCoefficients(1e-6, 1e-5, 1e-3, 1e-4, 1e-10, 1e-10),
    "exchange": PassCoefficients(1e-9, 1e-5, 1e-3, 6e-4, 8e-9, 2.5e-8),
    "fixed": PassCoefficients(1e-8, 1e-5, 1e-1, 6e-3, 1e-10, 1e-10),
    "linear": PassCoefficients(0.0, 1e-5, 0.0),
    # attention, in a model where most layers have windows
    "windows": PassCoefficients(1e-6, 1e-5, 1e-3, 1e-4, 1e-10, 1e-10),
}


WINDOWED = replace(MODEL, windows=(100, 30, None, 100))


COST_KINDS = tuple(_FORWARD)


def cost_model(kind: str, num_ranks: int) -> CostModel:
    """A cost model in which `kind` dominates; backward is not just a multiple of forward."""
    forward = _FORWARD[kind]
    backward = replace(forward, pair_s=2.5 * forward.pair_s, token_s=2 * forward.token_s, chunk_s=1.5 * forward.chunk_s)
    coefficients = CostCoefficients(forward, backward, step_s=0.25, source="test")
    # if exchanges dominate, nodes have two ranks, so that larger groups pay more for theirs
    cluster = ClusterSpec(num_ranks, 2 if kind == "exchange" else num_ranks, HARDWARE)
    return CostModel(WINDOWED if kind == "windows" else MODEL, cluster, coefficients, method="ulysses")


# forward: a second per token and rank, 10 per chunk, 100 more in a group (two exchanges in 4 layers); backward: 2, 20, 200
FORWARD = PassCoefficients(0.0, 1.0, 10.0, 12.5)


BACKWARD = PassCoefficients(0.0, 2.0, 20.0, 25.0)


def counted_costs(num_ranks: int, step_s: float = 0.0) -> CostModel:
    return CostModel(MODEL, ClusterSpec(num_ranks, num_ranks, HARDWARE), CostCoefficients(FORWARD, BACKWARD, step_s, "test"))
