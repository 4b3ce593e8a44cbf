"""Finds gradients and weights that are not finite; the executor counts them before the optimizer may use them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hf_longctx.runtime.parameters.gradients import local_shard


@torch.no_grad()
def has_nonfinite_gradient(parameters: Iterable[nn.Parameter], device: torch.device) -> Tensor:
    """1 if some gradient on this rank has a NaN or infinite element, else 0, as an fp64 scalar. Does not wait for the device."""
    gradients = [local_shard(parameter.grad) for parameter in parameters if parameter.grad is not None]
    gradients = [gradient for gradient in gradients if gradient.numel()]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    # the largest absolute value is NaN if any is
    largest = torch.nn.utils.get_total_norm(gradients, norm_type=math.inf)
    return (~torch.isfinite(largest)).double()


@torch.no_grad()
def nonfinite_names(model: nn.Module, of_gradients: bool = False) -> list[str]:
    """Names of the parameters with a NaN or infinite element on this rank, or of those whose gradient has one; in order."""
    names = []
    for name, parameter in model.named_parameters():
        tensor = parameter.grad if of_gradients else parameter
        if tensor is not None and tensor.is_floating_point() and not bool(torch.isfinite(local_shard(tensor)).all()):
            names.append(name)
    return names
