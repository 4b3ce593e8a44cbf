"""Process groups across pipeline stages, and what ranks of several stages have in common: tied weights and one norm.

Within a stage gradients are summed as without stages. Across stages a rank shares with the ranks at its position alone: they
hold the same shards of a tied weight, and one of each stage makes the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class StageGroups:
    """pipe: the ranks at this position of all stages. ends: of them those of the first and the last; None on other stages."""

    stage: int
    num_stages: int
    pipe: dist.ProcessGroup
    ends: dist.ProcessGroup | None


def stage_groups(num_stages: int, timeout_s: float) -> StageGroups:
    """The groups of this rank; `rank = stage * ranks_per_stage + position`.

    Collective over all ranks, which create all groups in one order. Raises ValueError unless the stages divide the ranks.
    """
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    if num_stages < 2 or num_ranks % num_stages:
        raise ValueError(f"{num_stages} stages do not divide the {num_ranks} ranks of the run; choose a divisor from 2 on")
    ranks_per_stage = num_ranks // num_stages
    stage, position = divmod(rank, ranks_per_stage)
    timeout = timedelta(seconds=timeout_s)
    pipes = [dist.new_group(list(range(place, num_ranks, ranks_per_stage)), timeout=timeout) for place in range(ranks_per_stage)]
    if num_stages == 2:
        ends = pipes
    else:
        last = num_ranks - ranks_per_stage
        ends = [dist.new_group([place, last + place], timeout=timeout) for place in range(ranks_per_stage)]
    return StageGroups(stage, num_stages, pipes[position], ends[position] if stage in (0, num_stages - 1) else None)


@dataclass(frozen=True, slots=True)
class TiedWeight:
    """A parameter that lies on the first and on the last stage, and the group of the two ranks that hold the same of it."""

    parameter: nn.Parameter
    group: dist.ProcessGroup

    def sum(self, gradient: Tensor) -> None:
        """Leaves in `gradient` the sum of this end's and the other's. Collective over both, behind their stages' sums."""
        dist.all_reduce(_local(gradient), group=self.group)


@torch.no_grad()
def clip_stage_gradients(
    parameters: Sequence[nn.Parameter], max_norm: float, groups: StageGroups, tied: nn.Parameter | None = None
) -> Tensor:
    """The norm of the whole model's gradient (fp64 scalar, the same on every rank); gradients shrink to `max_norm` above it.

    `parameters` are all of this stage, with gradients already summed over its ranks; `tied` is the one that another stage has
    too, and is counted on the first alone. Squares add up in fp64. Collective over all ranks.
    """
    gradients = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    counted = [gradient for parameter, gradient in gradients if parameter is not tied or not groups.stage]
    square = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    for gradient in counted:
        square += torch.linalg.vector_norm(_local(gradient), dtype=torch.float64).square()
    if isinstance(parameters[0], DTensor):
        # all parameters of a stage have shards on the same ranks
        dist.all_reduce(square, group=parameters[0].device_mesh.get_group())
    dist.all_reduce(square, group=groups.pipe)
    norm = square.sqrt()
    # as torch's clip_grad_norm_
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for _, gradient in gradients:
        _local(gradient).mul_(scale.to(gradient.dtype))
    return norm


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
