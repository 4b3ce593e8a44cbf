"""Bytes of a teacher against those that ranks and torch's record of allocations count."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transformers
from helpers.measures.allocations import measure
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model, tiny_llama
from helpers.models.token_losses import DISTANCES
from helpers.plans.cost_models import counted_costs
from helpers.plans.layouts import plan_of
from helpers.plans.sliced_plans import cut, sliced_plan
from helpers.ranks.rank_steps import group_pool, rank_inputs
from torch.distributed.tensor import DTensor

from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.layers import output_head
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.hf.models.spec import model_spec
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.plan.cost.cost_model import teacher_costs
from hf_longctx.plan.memory.teacher import TeacherBytes, beside_teacher
from hf_longctx.plan.predict.planning import teacher_seconds
from hf_longctx.runtime.activations.output_head import OutputHead, _closed_form, _slope_by_autograd
from hf_longctx.runtime.core.loss import AtTeacher, Targets
from hf_longctx.runtime.execution.executor import StepExecutor, Teacher
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.parameters.sharded import shard_mesh, shard_model
from hf_longctx.runtime.process_groups import GroupPool

WIDE = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "max_position_embeddings": 4096}


def teacher_of(model: torch.nn.Module, pool: GroupPool) -> Teacher:
    stage = whole_model(model, num_attention_layers(model))
    return Teacher(StepExecutor(stage, pool, torch.device("cpu")), OutputHead(output_head(model)))


def weights_on_rank(parameters: str) -> int:
    """Bytes of a teacher's weights on this rank while the plan of the other model runs."""
    model = build_model(ModelCase(num_layers=3, dtype=torch.float32)).eval().requires_grad_(False)
    patch_model(model)
    if parameters != "replicated":
        shard_model(model, model._no_split_modules, shard_mesh("cpu", 2, 60.0))
    pool, lengths = group_pool(), [9, 14]
    plan = plan_of([[(1, (0,)), (1, (1,))]], lengths, 2, parameters=parameters)
    rows = random_rows(lengths)
    with teacher_of(model, pool).taught(plan.for_rank(pool.rank), rank_inputs(plan, rows, pool.rank)["chunks"]):
        inside = [weight for weight in model.parameters() if not isinstance(weight, DTensor)]
        gathered = sum(weight.nbytes for weight in inside)
        shards = sum(weight.to_local().nbytes for weight in model.parameters() if isinstance(weight, DTensor))
    if parameters == "replicated":
        return gathered
    # shards of what is gathered are there, too
    return gathered + shards + gathered // 2


@pytest.mark.parametrize("parameters", ["replicated", "sharded", "gathered_per_step"])
def test_bytes_of_weights_are_those_on_a_rank(ranks, parameters: str) -> None:
    spec = model_spec(build_model(ModelCase(num_layers=3, dtype=torch.float32)))
    predicted = TeacherBytes(spec, parameters, 1 if parameters == "replicated" else 2).held()
    for found in ranks(2).run(weights_on_rank, parameters):
        assert found == pytest.approx(predicted, rel=0.01)


def run_of(plan: StepPlan, model: torch.nn.Module) -> Callable[[], None]:
    pool = GroupPool((1,), 60.0)
    teacher, rows = teacher_of(model, pool), random_rows(list(plan.lengths))
    inputs = rank_inputs(plan, rows, 0)["chunks"]

    def run() -> None:
        with teacher.taught(plan.for_rank(0), inputs):
            return

    return run


PLANS = {
    "a document": lambda: plan_of([[(1, (0,))]], [2048], 1),
    "packs": lambda: plan_of([[(1, (0, 1))], [(1, (2,))]], [700, 600, 900], 1),
    "slices": lambda: sliced_plan([2048], [[span] for span in cut(0, [512] * 4)], num_ranks=1),
}


@pytest.mark.daily("llama-packs")
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bytes_of_forwards_hold_what_torch_allocates(family: str, name: str) -> None:
    """Never fewer than are there, and at most half as many more: what is kept for a graph counts, and is not made here."""
    kinds = {"llama": tiny_llama, "qwen3": lambda **own: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**own))}
    sizes = {**WIDE, "vocab_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    plan, model = PLANS[name](), kinds[family](**sizes).eval().requires_grad_(False)
    spec = model_spec(model)
    patch_model(model)
    run = run_of(plan, model)
    run()
    gc.collect()
    peak, left, _ = measure(run)
    taught = TeacherBytes(spec, "replicated", 1)
    predicted = max(taught.forward(group) for micro_batch in plan.micro_batches for group in micro_batch.groups)
    # on a CPU the states stay on the device
    states = sum(plan.lengths) * 4 * spec.hidden_size
    assert predicted >= peak - states
    assert predicted <= 1.5 * peak
    # the sum of losses
    assert left <= 64


@pytest.mark.parametrize("name", DISTANCES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_of_logits_hold_what_the_loss_of_a_tile_allocates(dtype: torch.dtype, name: str) -> None:
    loss, tokens, entries = DISTANCES[name], 32, 8192
    logits, hidden, weight = (
        torch.randn(1, tokens, entries).to(dtype),
        torch.randn(1, tokens, 8).to(dtype),
        torch.randn(entries, 8),
    )
    labels, own = torch.randint(entries, (1, tokens)), weight.to(dtype)
    taught = Targets(labels, None, AtTeacher(loss, hidden, lambda each: each @ own.T))
    plain, _, _ = measure(lambda: _closed_form(logits, Targets(labels)))
    peak, _, _ = measure(lambda: _slope_by_autograd(logits, taught))
    spec = replace(model_spec(tiny_llama()), bytes_per_element=dtype.itemsize)
    added = beside_teacher(spec, loss.beta, loss.top_k).capped_bytes - spec.capped_bytes
    assert (peak - plain) / (tokens * entries) <= added * 1.01
    assert (peak - plain) / (tokens * entries) >= 0.8 * added


def test_seconds_of_a_teacher_are_those_of_its_forwards() -> None:
    ranks = counted_costs(2).cluster
    costs = teacher_costs(model_spec(tiny_llama()), ranks)
    taught = replace(costs, teacher=teacher_costs(model_spec(tiny_llama(**WIDE)), ranks))
    plan = plan_of([[(2, (0,))], [(1, (1,)), (1, (2,))]], [2000, 700, 900], 2)
    teacher = taught.teacher
    assert teacher is not None and teacher_seconds(plan, costs) == 0.0
    (whole,), (first, second) = (micro_batch.groups for micro_batch in plan.micro_batches)
    seconds = [teacher.forward_s(group.chunks[0], group.shape, 4) for group in (whole, first, second)]
    assert teacher_seconds(plan, taught) == pytest.approx(seconds[0] + max(seconds[1:]))
