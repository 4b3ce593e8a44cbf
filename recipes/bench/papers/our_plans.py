"""Plans a paper's workload as a run or `hf-longctx plan` would, on a cluster that is described by rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hf_longctx.plan.core.settings import ClusterSpec, PlannerConfig, default_degrees
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.planner import plan_step
from hf_longctx.plan.predict.planning import Planning
from hf_longctx.plan.setup import DeviceMemory, Lengths, Measured, Placement, Setup, Wishes, build_setup


def our_plan(
    model: ModelSpec, cluster: ClusterSpec, lengths: Sequence[int], num_stages: int, keeps_everything: bool = False
) -> tuple[StepPlan, Setup]:
    """Plans one step of sequences of `lengths` tokens, with sharded parameters, and returns its setup, too.

    keeps_everything: nothing is recomputed or offloaded. Raises ValueError if nothing fits.
    """
    hardware = cluster.hardware
    memory = DeviceMemory.by_formula(model, hardware.device_bytes)
    memory = replace(memory, host_bytes=hardware.host_bytes, keeps_everything=keeps_everything)
    measured = Measured(CostModel(model, cluster, default_coefficients(model, cluster)), memory)
    degrees = default_degrees(cluster.num_ranks, model.num_heads)
    placement = Placement(
        cluster.num_ranks, "sharded", 0, degrees, "auto", ranks_per_node=cluster.ranks_per_node, max_length=max(lengths)
    )
    known = Lengths(lambda: max(lengths), lambda: lengths, lambda sample: sample)
    wishes = Wishes(PlannerConfig(1, degrees), placement, stages=num_stages)
    setup = build_setup(measured, wishes, known, lambda setup, measured: None)
    return plan_step(0, lengths, setup.costs, setup.planner), setup


def counted_s(plan: StepPlan, costs: CostModel) -> float:
    """Predicted seconds of `plan` with the gathers that count."""
    return Planning(costs, PlannerConfig(1, (1,))).counted_s(plan)


def on_gpus(model: ModelSpec) -> ModelSpec:
    """The model with kernels for norms, gates and rotary embeddings, as runs on GPUs have them."""
    return replace(
        model, saves_kv_once=True, fuses_norms=True, fuses_gates=model.gated_mlp, fuses_rotary=not model.learned_positions
    )
