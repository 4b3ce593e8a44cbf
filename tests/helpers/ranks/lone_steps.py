"""Runs a step of a one-rank plan in this process, through collator and executor, and counts the attention pairs that it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from helpers.models.reference import TOLERANCE, random_rows, reference_step, worst_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.sliced_plans import Rows
from helpers.ranks.rank_steps import rank_inputs
from torch import Tensor

from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.layers import layer_modules
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.attention import rows as rows_module
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.round import StepResult
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.process_groups import GroupPool
from hf_longctx.runtime.tiles.plain import TileInputs

CPU = torch.device("cpu")


def patched_model(case: ModelCase, use_reentrant: bool | None = None) -> Any:
    """The patched model of a case; its layers are checkpointed unless `use_reentrant` is None."""
    model = build_model(case)
    patch_model(model)
    if use_reentrant is not None:
        model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    return model


def lone_step(case: ModelCase, plan: StepPlan, rows: Rows, model: Any = None) -> tuple[StepResult, dict[str, Tensor]]:
    """Runs a step of a one-rank plan in this process, through collator and executor."""
    model = model if model is not None else patched_model(case)
    num_labels = sum(label != -100 for row in rows for label in row["labels"][1:])
    executor = StepExecutor(whole_model(model, num_attention_layers(model)), GroupPool((1,), 1.0), CPU)
    result = executor.run(plan.for_rank(0), rank_inputs(plan, rows, 0)["chunks"], num_labels)
    return result, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def fp32_step(case: ModelCase, plan: StepPlan) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a case's model in fp32 under a one-rank plan, for random rows."""
    result, gradients = lone_step(case, plan, random_rows(list(plan.lengths)), patched_model(case).float())
    return float(result.loss), gradients


def check_lone_step(case: ModelCase, plan: StepPlan, rows: Rows, model: Any = None) -> StepResult:
    """Asserts that a one-rank plan gives the loss and gradients of one plain process."""
    result, gradients = lone_step(case, plan, rows, model)
    assert worst_error((float(result.loss), gradients), reference_step(build_model(case), rows)) <= TOLERANCE
    return result


@contextmanager
def counted_pairs() -> Iterator[list[int]]:
    """Context that collects the number of query-key pairs, for one head, of every attention tile that runs inside."""
    pairs: list[int] = []
    original = rows_module.tile_forward

    def tile_forward(tile: TileInputs) -> Any:
        num_queries, num_keys = tile.q.shape[1], tile.k.shape[1]
        pairs.append(num_queries * (num_queries + 1) // 2 if tile.causal else num_queries * num_keys)
        return original(tile)

    with patch.object(rows_module, "tile_forward", tile_forward):
        yield pairs


def policy_step(model: Any, plan: StepPlan, rows: list[dict[str, list[int]]]) -> tuple[StepResult, dict[str, Tensor], int]:
    """Runs a step of a one-rank plan in this process; returns its result, its gradients, and the number of pairs that ran."""
    tier = HostTier.on(CPU, 2**24)
    engine = ActivationEngine(layer_modules(model), tier)
    executor = StepExecutor(whole_model(model, num_attention_layers(model)), GroupPool((1,), 1.0), CPU)
    num_labels = sum(label != -100 for row in rows for label in row["labels"][1:])
    with counted_pairs() as pairs:
        result = executor.run(plan.for_rank(0), rank_inputs(plan, rows, 0)["chunks"], num_labels, engine=engine)
    assert tier.stored_bytes == 0
    return result, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, sum(pairs)
