"""Steps of a plan on the fake devices of several ranks, which `mail.begin` has prepared; compared with one plain process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from fake_cuda.machine.computing import Computing
from fake_cuda.machine.mail import Mailed
from fake_cuda.machine.removals import Removal, removed
from helpers.models.reference import reference_step, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.token_losses import total_weight
from helpers.ranks.rank_pool import lasting
from helpers.ranks.rank_steps import rank_inputs
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.cutting import cut_model, stage_model
from hf_longctx.hf.models.layers import layer_modules, output_head
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.plan.core.serialize import plan_from_json
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.activations.output_head import OutputHead
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.parameters import gradients as early_sums
from hf_longctx.runtime.parameters.sharded import shard_mesh, shard_model
from hf_longctx.runtime.process_groups import GroupPool

CUDA = torch.device("cuda", 0)
_POOLS: dict[int, GroupPool] = {}


@dataclass(frozen=True, slots=True)
class Found:
    """Findings of a rank. errors: relative error of each step's worst gradient, not a number if that is none.

    num_early: sums over ranks that started inside the last backward of the last step.
    """

    errors: tuple[float, ...]
    num_early: int


def group_pool(num_stages: int) -> GroupPool:
    """This rank's pool, made once per process; heads are exchanged in parts."""
    if num_stages not in _POOLS:
        degrees = tuple(range(1, dist.get_world_size() // num_stages + 1))
        _POOLS[num_stages] = lasting(
            lambda: GroupPool(degrees, 60.0, dist.new_group(backend="gloo"), num_stages=num_stages, sums_early=True)
        )
        _POOLS[num_stages].part_bytes = 1
    return _POOLS[num_stages]


def steps_on_device(
    case: ModelCase,
    plan_json: str,
    rows: list[dict[str, list[int]]],
    removals: tuple[Removal, ...] = (),
    drains: bool = False,
    layers_on_host: bool = False,
) -> Found:
    """Runs two steps on this rank's device, with lines of the package taken out; must run on every rank.

    drains: in each step, the first run of every operation waits for an idle device. layers_on_host: shards of layers lie on the
    host meanwhile.
    """
    computing = _get_current_dispatch_mode()
    assert isinstance(computing, Computing)
    plan = plan_from_json(plan_json)
    pool = group_pool(plan.num_stages)
    # the reference first, since it draws the same weights
    _, expected = reference_step(build_model(case), rows)
    model, executor, engine = _prepared(case, plan, pool, layers_on_host)
    inputs = rank_inputs(plan, rows, pool.rank)["chunks"]
    errors = []
    num_early, start_all = [0], early_sums.EarlySums.start_all

    def counted(sums: Any) -> Any:
        num_early.append(len(sums._started))
        return start_all(sums)

    # small sums, so that there are several
    with (
        removed(*removals),
        patch.object(early_sums, "_BUCKET_BYTES", 4096),
        patch.object(early_sums.EarlySums, "start_all", counted),
    ):
        for _ in range(2):
            computing.forget_loaded(drains)
            model.zero_grad(set_to_none=True)
            executor.run(plan.for_rank(pool.rank), inputs, total_weight(rows), engine=engine)
            errors.append(max(_error(weight, expected[name], pool) for name, weight in model.named_parameters()))
        # no message stays under way, and all that stays is taken out of the device's memory
        torch.cuda.synchronize()
    computing.forget_loaded(False)
    if engine is not None:
        engine.unbind()
    return Found(tuple(errors), num_early[-1])


def _prepared(
    case: ModelCase, plan: StepPlan, pool: GroupPool, layers_on_host: bool
) -> tuple[nn.Module, StepExecutor, ActivationEngine | None]:
    model = build_model(case)
    patch_model(model)
    model.to(CUDA)
    if plan.parameters != "replicated":
        mesh = shard_mesh("cuda", pool.num_ranks, 60.0)
        shard_model(model, model._no_split_modules, mesh, case.fp32_gradients, layers_on_host)
    if plan.num_stages > 1:
        ranges = [stage.layer_ranges for stage in plan.micro_batches[0].groups[0].stages]
        cut_model(model, ranges, pool.stage)
        stage = stage_model(model, ranges, pool.stage)
    else:
        stage = whole_model(model, num_attention_layers(model))
    has_policies = any(stage.activations for batch in plan.micro_batches for group in batch.groups for stage in group.stages)
    tier = HostTier.on(CUDA, 2**22) if has_policies else None
    engine = ActivationEngine(layer_modules(model), tier, OutputHead(output_head(model))) if has_policies else None
    return model, StepExecutor(stage, pool, CUDA, case.fp32_gradients), engine


def _error(weight: Tensor, expected: Tensor, pool: GroupPool) -> float:
    """Relative error of a weight's gradient, or of this rank's shard of it; infinite if it is not a number."""
    if weight.grad is None:
        return float("inf")
    gradient = weight.grad
    if isinstance(gradient, DTensor):
        parts = expected.chunk(pool.num_ranks)
        expected = parts[pool.rank] if pool.rank < len(parts) else expected[:0]
        gradient = gradient.to_local()[: len(expected)]
        if not len(expected):
            return 0.0
    error = relative_error(gradient.cpu(), expected)
    return error if error == error else float("inf")


def unwaited() -> int:
    """Messages and collectives of this process that nobody waited for."""
    return Mailed.num_posted - Mailed.num_waits
