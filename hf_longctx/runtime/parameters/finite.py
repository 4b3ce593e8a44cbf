"""Finds gradients and weights that are not finite; the executor counts them before the optimizer may use them.

Finite gradients whose norm is infinite count as well: clipping would divide them by it, and the step would be lost in silence.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hf_longctx.runtime.parameters.gradients import local_shard


@torch.no_grad()
def has_nonfinite_gradient(parameters: Iterable[nn.Parameter], device: torch.device, num_ranks: int = 1) -> Tensor:
    """1 if gradients on this rank have a NaN or infinite element, or too large a norm; else 0. An fp64 scalar.

    A norm is too large if its square, summed over `num_ranks` ranks like this one, is infinite in fp32, or in the gradients' own
    type if that is wider. Does not wait for the device.
    """
    gradients = [local_shard(parameter.grad) for parameter in parameters if parameter.grad is not None]
    gradients = [gradient for gradient in gradients if gradient.numel()]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    # NaN if an element is
    norm = torch.nn.utils.get_total_norm(gradients)
    square = norm.to(torch.promote_types(norm.dtype, torch.float32)).square() * num_ranks
    return (~torch.isfinite(square)).double()


@torch.no_grad()
def nonfinite_names(model: nn.Module, of_gradients: bool = False) -> list[str]:
    """Names of the parameters with a NaN or infinite element on this rank, or of those whose gradient has one; in order."""
    names = []
    for name, parameter in model.named_parameters():
        tensor = parameter.grad if of_gradients else parameter
        if tensor is not None and tensor.is_floating_point() and not bool(torch.isfinite(local_shard(tensor)).all()):
            names.append(name)
    return names
