"""A model cut into stages on a pool of ranks: this rank's stage, its groups, and optimizer steps with given gradients."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from helpers.models.staged_models import even_ranges, family_model
from helpers.ranks.pipeline_steps import stage_mesh, stage_pool
from helpers.ranks.rank_steps import whole
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from hf_longctx.hf.models.cutting import cut_model, stage_model
from hf_longctx.hf.ranks.agreement import control_group
from hf_longctx.runtime.execution.stage_model import StageModel
from hf_longctx.runtime.parameters.gradients import GradientSum, TiedWeight, clip_stage_gradients
from hf_longctx.runtime.parameters.sharded import shard_model
from hf_longctx.runtime.process_groups import GroupPool

_CONTROL: list[dist.ProcessGroup] = []


@dataclass
class RankStage:
    """The stage, pool and control group of one rank; `tied` is None if no other stage shares a weight with this one."""

    stage: StageModel
    pool: GroupPool
    control: dist.ProcessGroup
    tied: TiedWeight | None

    @property
    def parameters(self) -> list[Any]:
        return list(self.stage.model.parameters())

    def weights(self) -> dict[str, Tensor]:
        """Whole weights by name."""
        return {name: whole(p.detach()).clone() for name, p in self.stage.model.named_parameters()}


def rank_stage(
    num_stages: int,
    is_tied: bool,
    is_sharded: bool,
    build: Any = family_model,
    num_ranges: int = 1,
    heads: tuple[int, ...] = (),
) -> RankStage:
    """This rank's stage of a tiny model (default: a Llama); its process groups last as long as the process.

    heads: stages before the last that have the output head too.
    """
    pool = stage_pool(num_stages, heads=heads)
    if not _CONTROL:
        _CONTROL.append(control_group(60.0))
    model = build("llama", is_tied)
    ranges = even_ranges(num_stages, num_ranges)
    cut_model(model, ranges, pool.stage, head_stages=heads)
    stage = stage_model(model, ranges, pool.stage, heads)
    if is_sharded:
        shard_model(model, tuple(model._no_split_modules), stage_mesh(num_stages, pool.ranks_per_stage))
    tied = TiedWeight(model.get_parameter(stage.tied), pool.links.shared[stage.tied_stages]) if stage.tied else None
    return RankStage(stage, pool, _CONTROL[0], tied)


def random_gradient(name: str, shape: Any, step: int) -> Tensor:
    """The gradient that the parameter of this name gets in a step, the same on every rank that holds it."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def sharded_like(parameter: Any, value: Tensor) -> Tensor:
    """`value`, which is equal on all ranks, sharded as the parameter is."""
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def set_gradients(own: RankStage, step: int) -> None:
    """Gives this stage's parameters their gradients, as if its ranks had summed them, and sums those of tied weights."""
    for name, parameter in own.stage.model.named_parameters():
        if parameter.requires_grad:
            parameter.grad = sharded_like(parameter, random_gradient(name, parameter.shape, step))
    GradientSum(own.parameters).reduce(None, own.tied)


def set_whole_gradients(model: Any, step: int, is_tied: bool, num_heads: int = 1) -> None:
    """Gives the parameters of the whole model their gradients; a tied weight gets the sum of both its gradients.

    num_heads: number of stages on which the head has a gradient of its own.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = random_gradient(name, parameter.shape, step)
            if is_tied and name == "model.embed_tokens.weight":
                gradient += num_heads * random_gradient("lm_head.weight", parameter.shape, step)
            if name == "lm_head.weight":
                gradient *= num_heads
            parameter.grad = sharded_like(parameter, gradient)


def whole_training(
    steps: range, is_tied: bool, max_norm: float, build: Any = family_model, weight_decay: float = 0.1, num_heads: int = 1
) -> tuple[Any, list[float]]:
    """Trains the whole model by AdamW in one process, clipped by torch; returns it and the norms before clipping."""
    model = build("llama", is_tied)
    optimizer = new_optimizer(model.parameters(), weight_decay)
    norms = []
    for step in steps:
        set_whole_gradients(model, step, is_tied, num_heads)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
    return model, norms


def train_stage(own: RankStage, optimizer: torch.optim.Optimizer, steps: range, max_norm: float) -> list[float]:
    """Trains this rank's stage by AdamW; returns the gradient norms over all stages before clipping."""
    norms = []
    for step in steps:
        set_gradients(own, step)
        twin = own.tied.parameter if own.tied is not None and own.stage.copied else None
        norms.append(float(clip_stage_gradients(own.parameters, max_norm, own.pool.links.pipe, twin)))
        optimizer.step()
    return norms


def new_optimizer(parameters: Any, weight_decay: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2, weight_decay=weight_decay)
