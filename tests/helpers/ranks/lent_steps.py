"""Steps of pipelines whose idle stages are lent to the first and last slices, on a pool of gloo ranks."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from helpers.models.tiny_models import ModelCase, build_model, with_lora
from helpers.models.token_losses import TOKEN_LOSSES, total_weight
from helpers.plans.sliced_plans import Rows
from helpers.ranks.pipeline_steps import CPU
from helpers.ranks.rank_pool import lasting
from helpers.ranks.rank_steps import rank_inputs
from torch import Tensor

from hf_longctx.hf.models.cutting import stages_that_lend
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.plan.core.serialize import plan_from_json
from hf_longctx.plan.core.sharding import Piece
from hf_longctx.plan.core.types import MicroBatch, StepPlan
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.plan.predict.lending import lent_group
from hf_longctx.runtime.core.chunk_inputs import ChunkInputs
from hf_longctx.runtime.execution import lending
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.lending import LentSlice
from hf_longctx.runtime.execution.round import StepResult
from hf_longctx.runtime.process_groups import GroupPool

_POOLS: dict[int, GroupPool] = {}


def _own_alone(whole_gTW: Tensor, lent: LentSlice) -> Tensor:
    return torch.cat([whole_gTW[:, piece.start : piece.stop] for piece in lent.pieces], dim=1)


def _in_order_of_ranks(own_gSW: Tensor, lent: LentSlice) -> Tensor:
    counts = [0, *accumulate(lent.block_tokens)]
    blocks = tuple((Piece(0, start, stop, 0),) for start, stop in pairwise(counts))
    return _WHOLE_SLICE(own_gSW, replace(lent, blocks=blocks))


def _other_labels(rows: Any, inputs: ChunkInputs) -> ChunkInputs:
    own = _OF_INPUTS(rows, inputs)
    return replace(own, shift_labels=inputs.shift_labels[:, : own.input_ids.shape[1]])


_WHOLE_SLICE, _OF_INPUTS = lending._whole_slice, lending._Rows.of_inputs


# name of a bug -> (module or class, function of the runtime, wrong function that replaces it)
BUGS: dict[str, tuple[Any, str, Any]] = {
    "a front's gradients stay with the lenders": (lending, "_return_front", lambda *_: None),
    "lenders' gradients of keys and values are left out": (lending, "_own_tokens", _own_alone),
    "tokens of a slice come in the order of ranks": (lending, "_whole_slice", _in_order_of_ranks),
    "a rank's weights get its own gradients alone": (StepExecutor, "_reduce", lambda self: self.parameters.reduce(None)),
    "labels of the whole shard": (lending._Rows, "of_inputs", _other_labels),
}


def lent_plan(plan: StepPlan, front: bool = True, back: bool = True) -> StepPlan:
    """The plan with lent ranks in every group."""
    batches = tuple(MicroBatch(tuple(lent_group(group, front, back) for group in each.groups)) for each in plan.micro_batches)
    return validate_plan(replace(plan, micro_batches=batches))


def lending_pool(num_stages: int) -> GroupPool:
    """This rank's pool for `num_stages` stages that are lent, made once per process."""
    if num_stages not in _POOLS:
        degrees = tuple(range(1, dist.get_world_size() + 1))
        _POOLS[num_stages] = lasting(lambda: GroupPool(degrees, 60.0, num_stages=num_stages, lends=True))
    return _POOLS[num_stages]


def lent_step_on_rank(
    case: ModelCase, plan_json: str, rows: Rows, lora: bool = True, num_steps: int = 1, bug: str = ""
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Runs `num_steps` optimizer steps on this rank; returns losses, the last gradients, trained weights, and the last actions.

    The first loss comes from an evaluation before the steps.
    """
    with patch.object(*BUGS[bug]) if bug else nullcontext():
        return _steps(case, plan_json, rows, lora, num_steps)


def _steps(
    case: ModelCase, plan_json: str, rows: Rows, lora: bool, num_steps: int
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], list[str]]:
    plan = plan_from_json(plan_json)
    pool = lending_pool(plan.num_stages)
    model = with_lora(build_model(case)) if lora else build_model(case)
    patch_model(model)
    stages = stages_that_lend(model, [stage.layer_ranges for stage in plan.micro_batches[0].groups[0].stages])
    token_loss = TOKEN_LOSSES[case.loss]
    executor = StepExecutor(stages[pool.stage], pool, CPU, case.fp32_gradients, all_stages=stages, token_loss=token_loss)
    chunks = rank_inputs(plan, rows, pool.rank)["chunks"]
    weight = total_weight(rows)
    optimizer = new_optimizer(model)
    losses = [float(executor.evaluate(plan.for_rank(pool.rank), chunks)) / (weight or 1)]
    result: StepResult
    for _ in range(num_steps):
        optimizer.zero_grad()
        result = executor.run(plan.for_rank(pool.rank), chunks, weight)
        losses.append(float(result.loss))
        optimizer.step()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    words = [interval.name for interval in result.intervals() if interval.round >= 0]
    gradients = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
    return losses, gradients, {name: p.detach() for name, p in trained.items()}, words


def new_optimizer(model: Any) -> torch.optim.Optimizer:
    """Optimizer for the run under plans and for its reference."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
