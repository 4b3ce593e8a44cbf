"""Adds the product of two small matrices to what a linear module returned: the output of a low-rank adapter (LoRA).

PEFT makes the adapter's output, scales it and adds it to that of the frozen module: three tensors as large as the output, each
rounded to its dtype. One matrix product that accumulates does all of it, rounds once, and saves nothing as wide as the output.

Shapes: T tokens of this rank, N output features, r features of the adapter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def add_low_rank(y: Tensor, low: Tensor, second_Nr: Tensor, scaling: float, in_place: bool) -> Tensor:
    """y + scaling * low second', [..., N], from y of that shape and low [..., r], all of one dtype.

    in_place: y, which is contiguous and no view, is overwritten, so nobody else may read it.
    """
    result: Tensor = _AddLowRank.apply(y, low, second_Nr, scaling, in_place)
    return result


class _AddLowRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, low: Tensor, second_Nr: Tensor, scaling: float, in_place: bool) -> Tensor:
        low_Tr = low.flatten(0, -2)
        ctx.scaling = scaling
        ctx.save_for_backward(low_Tr, second_Nr)
        if in_place:
            ctx.mark_dirty(y)
            y.flatten(0, -2).addmm_(low_Tr, second_Nr.T, alpha=scaling)
            return y
        return torch.addmm(y.flatten(0, -2), low_Tr, second_Nr.T, alpha=scaling).view(y.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        low_Tr, second_Nr = ctx.saved_tensors
        _, needs_low, needs_second = ctx.needs_input_grad[:3]
        gradient_TN = gradient.flatten(0, -2)
        dlow = dsecond_Nr = None
        if needs_low:
            dlow = _scaled_product(ctx.scaling, gradient_TN, second_Nr).view(*gradient.shape[:-1], low_Tr.shape[1])
        if needs_second:
            dsecond_Nr = _scaled_product(ctx.scaling, gradient_TN.T, low_Tr)
        return gradient, dlow, dsecond_Nr, None, None


def _scaled_product(scaling: float, left: Tensor, right: Tensor) -> Tensor:
    """scaling * left @ right, rounded once."""
    unread = left.new_empty(left.shape[0], right.shape[1])
    return torch.addmm(unread, left, right, beta=0, alpha=scaling)
