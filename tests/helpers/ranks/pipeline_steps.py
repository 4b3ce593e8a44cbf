"""Runs one step of a pipeline's plan on a pool of gloo ranks, and compares it with one plain process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.models.reference import TOLERANCE, random_rows, reference_step, relative_error
from helpers.models.teachers import build_teacher, teacher_beside
from helpers.models.tiny_models import ModelCase, build_model, with_lora
from helpers.models.token_losses import TOKEN_LOSSES, total_weight
from helpers.plans.pipeline_plans import planned_words
from helpers.plans.sliced_plans import Rows
from helpers.ranks.rank_pool import RankPool, lasting
from helpers.ranks.rank_steps import rank_inputs, whole
from torch.distributed.device_mesh import DeviceMesh

from hf_longctx.hf.models.cutting import cut_model, stage_model
from hf_longctx.hf.models.experts import router_balance, spread_experts_of
from hf_longctx.hf.models.kernels import FusedLayers
from hf_longctx.hf.models.layers import layer_modules, output_head
from hf_longctx.hf.models.logits import logit_change
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.plan.core.serialize import plan_from_json, plan_to_json
from hf_longctx.plan.core.types import Action, StepPlan
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.activations.output_head import OutputHead
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.experts import spread_experts, spread_group
from hf_longctx.runtime.parameters.sharded import block_mesh, shard_mesh, shard_model
from hf_longctx.runtime.process_groups import GroupPool

CPU = torch.device("cpu")
# group pools of this process, made once for each number of stages and the stages with output heads
_POOLS: dict[tuple[int, tuple[int, ...]], GroupPool] = {}


def stage_pool(num_stages: int, timeout_s: float = 60.0, heads: tuple[int, ...] = ()) -> GroupPool:
    """This rank's group pool for `num_stages` stages, made once per process; heads are exchanged in parts if they can be.

    heads: stages before the last that run output heads.
    """
    key = num_stages, heads
    if key not in _POOLS:
        degrees = tuple(range(1, dist.get_world_size() + 1))
        _POOLS[key] = lasting(lambda: GroupPool(degrees, timeout_s, num_stages=num_stages, head_stages=heads))
        _POOLS[key].part_bytes = 1
    return _POOLS[key]


def stage_mesh(num_stages: int, shard_ranks: int, node_ranks: int = 0) -> DeviceMesh:
    """The mesh over which a stage's parameters are sharded. node_ranks: those of the plan."""
    return shard_mesh("cpu", shard_ranks, 60.0, num_stages, node_ranks)


def head_stages(plan: StepPlan) -> tuple[int, ...]:
    """The stages before the last that run an output head."""
    groups = [group for micro_batch in plan.micro_batches for group in micro_batch.groups]
    return tuple(sorted({stage for group in groups for stage in group.head_stages.values()}))


def stage_executor(case: ModelCase, plan: StepPlan, lora: bool = False) -> tuple[StepExecutor, ActivationEngine | None]:
    """An executor of this rank's stage, cut and sharded as the plan says, and the engine for the plan's activation policies."""
    heads = head_stages(plan)
    pool = stage_pool(plan.num_stages, heads=heads)
    model = with_lora(build_model(case)) if lora else build_model(case)
    patch_model(model)
    ranges = [stage.layer_ranges for stage in plan.micro_batches[0].groups[0].stages]
    cut_model(model, ranges, pool.stage, head_stages=heads)
    stage = stage_model(model, ranges, pool.stage, heads)
    if plan.parameters != "replicated":
        mesh = stage_mesh(plan.num_stages, plan.block_ranks, plan.node_ranks)
        if case.spread:
            spread_experts(spread_experts_of(model), block_mesh(mesh), CPU)
        shard_model(model, build_model(case)._no_split_modules, mesh, node_ranks=plan.node_ranks)
    # adapters run as in trainings
    FusedLayers("").bind(model)
    has_policies = any(each.activations for b in plan.micro_batches for group in b.groups for each in group.stages)
    is_last = pool.stage == plan.num_stages - 1
    has_head = has_policies and (is_last or pool.stage in heads)
    head = OutputHead(output_head(model), change=logit_change(model)) if has_head else None
    tier, partners = HostTier.on(CPU, 2**24), spread_group(model)
    engine = ActivationEngine(layer_modules(model), tier, head, partners) if has_policies else None
    routers = router_balance(model, CPU)
    executor = StepExecutor(stage, pool, CPU, case.fp32_gradients, routers=routers, token_loss=TOKEN_LOSSES[case.loss])
    executor.teacher = teacher_beside(case, plan, pool)
    return executor, engine


def stage_step_on_rank(
    case: ModelCase, plan_json: str, rows: Rows, lora: bool = False
) -> tuple[float, dict[str, torch.Tensor], list[str], Any]:
    """Runs one step on this rank; returns loss, gradients of its stage, forwards and backwards in order, and memory."""
    plan = plan_from_json(plan_json)
    executor, engine = stage_executor(case, plan, lora)
    batch = rank_inputs(plan, rows, executor.pool.rank)
    result = executor.run(plan.for_rank(executor.pool.rank), batch["chunks"], total_weight(rows), engine=engine)
    gradients = {name: whole(p.grad) for name, p in executor.model.named_parameters() if p.grad is not None}
    words = [interval.name for interval in result.intervals() if interval.round >= 0]
    return float(result.loss), gradients, words, result.memory


def computed(actions: Sequence[Action]) -> list[str]:
    """The forwards and backwards among the actions, as words."""
    return [str(action) for action in actions if action.kind in "FB"]


def check_pipeline(pool: RankPool, case: ModelCase, plan: StepPlan, lora: bool = False, rows: Rows | None = None) -> list:
    """Asserts that every rank has the reference's loss and gradients and ran what was planned; returns the ranks' results."""
    rows = random_rows(list(plan.lengths)) if rows is None else rows
    reference = with_lora(build_model(case)) if lora else build_model(case)
    expected_loss, expected = reference_step(reference, rows, case.loss, build_teacher(case))
    results = pool.run(stage_step_on_rank, case, plan_to_json(plan), rows, lora)
    found = set()
    for rank, (loss, gradients, words, _) in enumerate(results):
        assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
        if "lm_head.weight" not in expected and "lm_head.weight" in gradients:
            gradients["model.embed_tokens.weight"] = gradients.pop("lm_head.weight")
        errors = {name: relative_error(gradients[name], expected[name]) for name in gradients}
        assert max(errors.values()) <= TOLERANCE, (rank, errors)
        found |= gradients.keys()
        assert words == planned_words(plan, rank)
    assert found >= expected.keys()
    return results
