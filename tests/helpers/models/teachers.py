"""Teachers of tiny models: other families, layers, heads and sizes, with the same tokens."""

from __future__ import annotations

from typing import Any

import torch
from helpers.models.tiny_models import OTHER_FAMILIES, ModelCase, build_model

from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.cutting import cut_model, stage_model
from hf_longctx.hf.models.layers import output_head
from hf_longctx.hf.models.logits import logit_change
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.plan.pipeline.stages import layer_ranges
from hf_longctx.runtime.activations.output_head import OutputHead
from hf_longctx.runtime.execution.executor import StepExecutor, Teacher
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.parameters.sharded import shard_mesh, shard_model
from hf_longctx.runtime.process_groups import GroupPool


def build_teacher(case: ModelCase) -> Any:
    """The teacher of a case, frozen: wider and deeper than the model, and of another seed; None without one."""
    if not case.teacher:
        return None
    # configs of other families list the kinds of their layers
    num_layers = 2 if case.teacher in OTHER_FAMILIES else 4
    sizes = {"num_heads": 6, "num_kv_heads": 3, "num_layers": num_layers}
    teacher = build_model(ModelCase(case.teacher, **sizes, seed=7, dtype=case.dtype, promoted=True))
    return teacher.eval().requires_grad_(False)


def teacher_beside(case: ModelCase, plan: StepPlan, pool: GroupPool) -> Teacher | None:
    """The teacher of a case, cut and sharded as the plan says."""
    if (model := build_teacher(case)) is None:
        return None
    cpu, num_stages = torch.device("cpu"), plan.num_stages
    patch_model(model)
    units = model._no_split_modules
    if num_stages > 1:
        first = plan.micro_batches[0].groups[0].stages[0]
        ranges = layer_ranges(model.config.num_hidden_layers, num_stages, len(first.layer_ranges))
        cut_model(model, ranges, pool.stage)
        stage = stage_model(model, ranges, pool.stage)
    else:
        stage = whole_model(model, num_attention_layers(model))
    if plan.parameters != "replicated":
        mesh = shard_mesh("cpu", plan.block_ranks, 60.0, num_stages, plan.node_ranks)
        shard_model(model, units, mesh, node_ranks=plan.node_ranks)
    is_last = pool.stage == num_stages - 1
    head = OutputHead(output_head(model), change=logit_change(model)) if is_last else None
    return Teacher(StepExecutor(stage, pool, cpu), head)
