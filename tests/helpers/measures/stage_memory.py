"""Memory of one rank of a pipeline: bytes that torch allocates in a step, and bytes that the runtime counts as held."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from helpers.measures.allocations import measure
from helpers.measures.late_copies import SlowlyLeaving
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.layouts import tiny_costs
from helpers.plans.pipeline_plans import planned_words
from helpers.plans.sliced_plans import Rows
from helpers.ranks.pipeline_steps import CPU, head_stages, stage_mesh, stage_pool, stage_step_on_rank
from helpers.ranks.rank_steps import rank_inputs

from hf_longctx.hf.calibration.calibrate import shaped_config
from hf_longctx.hf.models.cutting import cut_model, stage_model
from hf_longctx.hf.models.layers import layer_modules, output_head
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.hf.planning.step_record import predicted_memory
from hf_longctx.plan.core.serialize import plan_from_json, plan_to_json
from hf_longctx.plan.core.types import Action, StepPlan
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.stage import most_in_flight
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.predict.evaluate import evaluate_plan
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.activations.output_head import OutputHead
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.parameters.sharded import shard_model
from hf_longctx.runtime.process_groups import with_head


def build_llama(spec: ModelSpec) -> Any:
    """A patched Llama in fp32 or bf16 with these shapes."""
    model = transformers.AutoModelForCausalLM.from_config(shaped_config(spec), attn_implementation="sdpa").train()
    model = model.to(torch.bfloat16 if spec.bytes_per_element == 2 else torch.float32)
    patch_model(model)
    return model


def stage_peak_on_rank(spec: ModelSpec, plan_json: str, rows: Rows) -> tuple[int, Any]:
    """The most bytes that a second step allocates on this rank, and the bytes that the step itself reports."""
    plan = plan_from_json(plan_json)
    heads = head_stages(plan)
    pool = stage_pool(plan.num_stages, heads=heads)
    model = build_llama(spec)
    ranges = [stage.layer_ranges for stage in plan.micro_batches[0].groups[0].stages]
    cut_model(model, ranges, pool.stage, head_stages=heads)
    stage = stage_model(model, ranges, pool.stage, heads)
    if plan.parameters != "replicated":
        shards = stage_mesh(plan.num_stages, pool.ranks_per_stage, plan.node_ranks)
        shard_model(model, tuple(model._no_split_modules), shards, node_ranks=plan.node_ranks)
    for parameter in model.parameters():
        # gradients are states, not workspace; those in half precision add up elsewhere
        parameter.grad = torch.zeros_like(parameter) if spec.bytes_per_element > 2 else None
    has_policies = any(each.activations for b in plan.micro_batches for group in b.groups for each in group.stages)
    has_engine = has_policies or bool(heads)
    head = OutputHead(output_head(model)) if has_engine and pool.stage in with_head(plan.num_stages, heads) else None
    # sources of copies to the host stay as long as on CUDA
    tier = HostTier(2**26, SlowlyLeaving())
    engine = ActivationEngine(layer_modules(model), tier, head) if has_engine else None
    executor = StepExecutor(stage, pool, CPU)
    rank_plan, inputs = plan.for_rank(pool.rank), rank_inputs(plan, rows, pool.rank)["chunks"]
    executor.run(rank_plan, inputs, 1, engine=engine)
    if spec.bytes_per_element == 2:
        model.zero_grad()
    peak, _, result = measure(lambda: executor.run(rank_plan, inputs, 1, engine=engine))
    return peak, result.memory


def most_waiting(words: list[str]) -> int:
    """The most forwards that waited for their backward at one time, counted in the actions that a rank really ran."""
    waiting: set[tuple[int, int]] = set()
    most = 0
    for action in map(Action.parse, words):
        if action.kind == "F":
            waiting.add((action.layer_range, action.chunk))
        elif action.kind == "B":
            waiting.remove((action.layer_range, action.chunk))
        most = max(most, len(waiting))
    return most


def spec_of(case: ModelCase) -> ModelSpec:
    return ModelSpec.from_config(build_model(case).config.to_dict(), bytes_per_element=8)


def check_held_memory(pool, case: ModelCase, plan: StepPlan) -> list:
    """Asserts that every rank ran what was planned and held what was predicted; returns what the ranks held."""
    results = pool.run(stage_step_on_rank, case, plan_to_json(plan), random_rows(list(plan.lengths)))
    spec = spec_of(case)
    judged = evaluate_plan(plan, tiny_costs(plan.num_ranks, spec))
    memories = []
    for rank, (_, _, words, memory) in enumerate(results):
        stage, position = plan.place(rank)
        assert words == planned_words(plan, rank)
        expected = predicted_memory(plan, rank, spec)
        if not plan.turns:
            own = plan.for_rank(rank).rounds
            assert most_waiting(words) == max(most_in_flight(one.actions) for _, one in own)
            assert judged.in_flight[stage] >= most_waiting(words)
            book = max(ByteModel(spec).moments(group, one, group.positions.index(position)).most.book for group, one in own)
            assert expected.kv_book == book
        assert (memory.saved, memory.host, memory.kv_book) == (expected.saved, expected.host, expected.kv_book)
        assert memory.host == judged.host_bytes[rank]
        memories.append(memory)
    if plan.turns:
        return memories
    # all ranks of a stage have equal counts, so compare one of them
    per_stage = plan.ranks_per_stage
    found = [max(most_waiting(results[s * per_stage + p][2]) for p in range(per_stage)) for s in range(plan.num_stages)]
    assert tuple(found) == judged.in_flight
    return memories
