"""Clips gradients by the norm over all pipeline stages; the trainer calls it in place of `clip_grad_norm_` on staged models."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_longctx.runtime.parameters.gradients import local_shard


@torch.no_grad()
def clip_stage_gradients(
    parameters: Sequence[nn.Parameter], max_norm: float, pipe: dist.ProcessGroup, twin: nn.Parameter | None = None
) -> Tensor:
    """Norm of the whole model's gradient, an equal fp64 scalar on every rank; scales gradients down if it exceeds `max_norm`.

    parameters: all parameters of this stage, with gradients already summed over the stage's ranks. pipe: group of the ranks at
    this position of all stages. twin: a tied parameter that an earlier stage holds too; only that stage counts its gradient.
    Squares are summed in fp64. Collective over all ranks.
    """
    gradients = [(parameter, local_shard(parameter.grad)) for parameter in parameters if parameter.grad is not None]
    square = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    for parameter, gradient in gradients:
        if parameter is not twin:
            square += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
    if isinstance(parameters[0], DTensor):
        # the first parameter's mesh will do, since all parameters of a stage are sharded over the same ranks
        dist.all_reduce(square, group=parameters[0].device_mesh.get_group())
    dist.all_reduce(square, group=pipe)
    norm = square.sqrt()
    # the formula of torch's clip_grad_norm_
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for _, gradient in gradients:
        gradient.mul_(scale.to(gradient.dtype))
    return norm
