"""The norm of a gradient whose parameters lie on several pipeline stages, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_stage_gradients(
    parameters: Sequence[nn.Parameter], max_norm: float, pipe: dist.ProcessGroup, twin: nn.Parameter | None = None
) -> Tensor:
    """The norm of the whole model's gradient (fp64 scalar, the same on every rank); gradients shrink to `max_norm` above it.

    `parameters` are all of this stage, with gradients already summed over its ranks; `pipe` holds the ranks at this position of
    all stages. `twin` is a parameter that an earlier stage has too, and counts there. Squares add up in fp64. Collective over
    all ranks.
    """
    gradients = [(parameter, _local(parameter.grad)) for parameter in parameters if parameter.grad is not None]
    square = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    for parameter, gradient in gradients:
        if parameter is not twin:
            square += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
    if isinstance(parameters[0], DTensor):
        # all parameters of a stage have their shards on the same ranks
        dist.all_reduce(square, group=parameters[0].device_mesh.get_group())
    dist.all_reduce(square, group=pipe)
    norm = square.sqrt()
    # as torch's clip_grad_norm_
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for _, gradient in gradients:
        gradient.mul_(scale.to(gradient.dtype))
    return norm


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
