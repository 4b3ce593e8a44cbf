"""What one rank of a pipeline allocates in a step, as torch's profiler records it."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from helpers.measures.allocations import measure
from helpers.plans.pipelines import CPU, stage_pool
from helpers.plans.sliced import Rows
from helpers.plans.steps import rank_inputs

from hf_longctx.hf.calibration.shapes import shaped_config
from hf_longctx.hf.models.attention import patch_model
from hf_longctx.hf.models.cutting import cut_model, stage_model
from hf_longctx.hf.models.layers import layer_modules, output_head
from hf_longctx.plan.core.model_spec import ModelSpec
from hf_longctx.plan.core.serialize import plan_from_json
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.activations.output_head import OutputHead
from hf_longctx.runtime.execution.executor import StepExecutor


def build_llama(spec: ModelSpec) -> Any:
    """A Llama in fp32 with these shapes, patched, whose gradients are there already."""
    model = transformers.AutoModelForCausalLM.from_config(shaped_config(spec), attn_implementation="sdpa").train()
    patch_model(model)
    return model


def stage_peak_on_rank(spec: ModelSpec, plan_json: str, rows: Rows) -> tuple[int, Any]:
    """The most bytes that a second step adds on this rank, and the step's own account."""
    plan = plan_from_json(plan_json)
    pool = stage_pool(plan.num_stages)
    model = build_llama(spec)
    ranges = [stage.parts for stage in plan.micro_batches[0].groups[0].stages]
    cut_model(model, ranges, pool.stage)
    for parameter in model.parameters():
        # gradients are states, not workspace
        parameter.grad = torch.zeros_like(parameter)
    has_policies = any(each.activations for b in plan.micro_batches for group in b.groups for each in group.stages)
    head = OutputHead(output_head(model)) if has_policies and pool.stage == plan.num_stages - 1 else None
    engine = ActivationEngine(layer_modules(model), HostTier.on(CPU, 2**26), head) if has_policies else None
    executor = StepExecutor(stage_model(model, ranges, pool.stage), pool, CPU)
    rank_plan, inputs = plan.for_rank(pool.rank), rank_inputs(plan, rows, pool.rank)["chunks"]
    executor.run(rank_plan, inputs, 1, engine=engine)
    peak, _, result = measure(lambda: executor.run(rank_plan, inputs, 1, engine=engine))
    return peak, result.memory
