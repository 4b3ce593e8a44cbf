"""Memory layouts of tensors: which of them operators and copies take as they are."""

from __future__ import annotations

import torch
from torch import Tensor


def dense_channels(x: Tensor) -> Tensor:
    """Makes the last dimension dense, which is all that attention operators require of a layout.

    Views of a long buffer in which only the heads are strided, such as keys and values, are not copied.
    """
    return x if x.stride(-1) == 1 else x.contiguous()


def dense_strides(x: Tensor) -> tuple[int, ...]:
    """Strides of a tensor without gaps whose dimensions lie in memory in the order of those of `x`."""
    return torch.empty_like(x, device="meta").stride()


def has_strides(x: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether `x` lies in memory as `strides` say; strides of dimensions of size 1 do not count."""
    return all(size == 1 or own == stride for size, own, stride in zip(x.shape, x.stride(), strides, strict=True))


def laid_out(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """`x` itself if it has these strides, else a copy that has them."""
    if has_strides(x, strides):
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
