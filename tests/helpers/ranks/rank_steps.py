"""Runs one step of a plan on a pool of ranks, through the package's own path: index, collator, group pool, executor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.measures.planted import plant
from helpers.models.reference import TOLERANCE, random_rows, reference_step, relative_error
from helpers.models.teachers import build_teacher, teacher_beside
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.token_losses import TOKEN_LOSSES, total_weight
from helpers.plans.layouts import plan_of
from helpers.ranks.rank_pool import RankPool, lasting
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hf_longctx.hf.data.collator import LongContextCollator, PlannedDataset, PlannedStep
from hf_longctx.hf.data.sampler import SequenceIndex
from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.experts import router_balance, spread_experts_of
from hf_longctx.hf.models.kernels import FusedLayers
from hf_longctx.hf.models.layers import layer_modules, output_head
from hf_longctx.hf.models.logits import logit_change
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.hf.self_test.rounded import find_rounded
from hf_longctx.plan.core.serialize import plan_from_json, plan_to_json
from hf_longctx.plan.core.settings import default_degrees
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.plan.groups.problem import Layout
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.activations.output_head import OutputHead
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.experts import spread_experts, spread_group
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.parameters.rounded import note_rounded
from hf_longctx.runtime.parameters.sharded import block_mesh, shard_mesh, shard_model
from hf_longctx.runtime.process_groups import GroupPool

_POOLS: dict[tuple[int, float], GroupPool] = {}


def group_pool(timeout_s: float = 60.0) -> GroupPool:
    """This rank's group pool with every possible degree, made once per process."""
    num_ranks = dist.get_world_size()
    key = (num_ranks, timeout_s)
    if key not in _POOLS:
        degrees = default_degrees(num_ranks, num_ranks)
        _POOLS[key] = lasting(lambda: GroupPool(degrees, timeout_s, dist.new_group(backend="gloo")))
    return _POOLS[key]


def rank_inputs(plan: StepPlan, rows: list[dict[str, list[int]]], rank: int) -> dict[str, Any]:
    """The batch that this rank's collator makes for the plan; sequence i of the plan is row i."""
    lengths = np.array([len(row["input_ids"]) for row in rows])
    dataset = PlannedDataset(rows, SequenceIndex.build(lengths, int(lengths.max()), "error"))
    return LongContextCollator()([dataset[PlannedStep(plan, tuple(range(len(rows))), rank)]])


def step_on_rank(
    case: ModelCase,
    plan_json: str,
    rows: list[dict[str, list[int]]],
    bug: str = "",
    timeout_s: float = 60.0,
    shard_ranks: int = 0,
) -> tuple[float, dict[str, torch.Tensor]]:
    """Runs one step on this rank, and must run on every rank of a pool; returns the loss and the whole reduced gradients.

    Unless the plan's parameters are replicated, the model is sharded over `shard_ranks` ranks (0: all).
    """
    pool, plan = group_pool(timeout_s), plan_from_json(plan_json)
    with plant(bug, pool.rank, pool.num_ranks):
        model = build_model(case)
        patch_model(model)
        wrapped = model
        if plan.parameters != "replicated":
            note_case(model, case)
            if case.spread:
                spread_experts(spread_experts_of(model), block_mesh(mesh(shard_ranks or pool.num_ranks)), torch.device("cpu"))
            own = mesh(shard_ranks or pool.num_ranks, plan.node_ranks)
            shard_model(model, model._no_split_modules, own, case.fp32_gradients, node_ranks=plan.node_ranks)
        elif pool.num_ranks > 1:
            wrapped = DistributedDataParallel(model)
        # adapters run as in trainings
        FusedLayers("").bind(model)
        has_policies = any(stage.activations for b in plan.micro_batches for group in b.groups for stage in group.stages)
        tier = HostTier.on(torch.device("cpu"), 2**24)
        head, partners = OutputHead(output_head(model), change=logit_change(model)), spread_group(model)
        engine = ActivationEngine(layer_modules(model), tier, head, partners) if has_policies else None
        cpu = torch.device("cpu")
        layers, routers = num_attention_layers(model), router_balance(model, cpu)
        executor = StepExecutor(
            whole_model(wrapped, layers), pool, cpu, case.fp32_gradients, routers=routers, token_loss=TOKEN_LOSSES[case.loss]
        )
        executor.teacher = teacher_beside(case, plan, pool)
        batch = rank_inputs(plan, rows, pool.rank)
        result = executor.run(plan.for_rank(pool.rank), batch["chunks"], total_weight(rows), engine=engine)
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return float(result.loss), gradients


def note_case(model: Any, case: ModelCase) -> None:
    """Notes which weights autocast rounds, as a run does."""
    if case.autocast:
        note_rounded(model, find_rounded(model, torch.device("cpu"), None))


def run_step(
    pool: Any, case: ModelCase, plan: StepPlan, rows: list[dict[str, list[int]]], bug: str = "", shard_ranks: int = 0
) -> list[Any]:
    """Runs `step_on_rank` on every rank of a pool."""
    return pool.run(step_on_rank, case, plan_to_json(plan), rows, bug, 60.0, shard_ranks)


def mesh(shard_ranks: int, node_ranks: int = 0) -> DeviceMesh:
    """The mesh whose blocks of `shard_ranks` ranks hold one copy of the parameters each. node_ranks: see `shard_mesh`."""
    return shard_mesh("cpu", shard_ranks, 60.0, 1, node_ranks)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on this rank; collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_step(
    pool: RankPool,
    case: ModelCase,
    plan: StepPlan,
    lengths: list[int],
    shard_ranks: int = 0,
    masked: tuple[int, ...] = (),
    bug: str = "",
    rows: Any = None,
) -> None:
    """Asserts that every rank ends with the loss and gradients of one plain process. rows: None for random ones of `lengths`."""
    rows = random_rows(lengths, masked=masked) if rows is None else rows
    expected_loss, expected = reference_step(build_model(case), rows, case.loss, build_teacher(case))
    for loss, gradients in run_step(pool, case, plan, rows, bug, shard_ranks):
        assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
        assert gradients.keys() == expected.keys()
        errors = {name: relative_error(gradients[name], expected[name]) for name in expected}
        assert max(errors.values()) <= TOLERANCE, errors


def check_layout_step(
    pool: RankPool,
    case: ModelCase,
    layout: Layout,
    lengths: list[int],
    masked: tuple[int, ...] = (),
    bug: str = "",
    **plan_settings: Any,
) -> None:
    """Asserts that a hand-written layout gives the loss and gradients of one plain process."""
    check_step(pool, case, plan_of(layout, lengths, pool.num_ranks, **plan_settings), lengths, masked=masked, bug=bug)
