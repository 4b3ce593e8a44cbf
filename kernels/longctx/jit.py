"""Triton where it is installed. CPU builds of torch come without it; a kernel then imports, and raises when launched."""

# arguments of Triton kernels have no Python types
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError as error:
    triton, tl, _missing = None, None, error


class _Unavailable:
    """Stands for a kernel on a machine without Triton."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        raise ImportError(f"kernel {self.name} needs triton, which this machine does not have: pip install triton") from _missing


def jit(*unspecialized: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorates a Triton kernel; a new value of an argument named in `unspecialized` never compiles it again."""

    def decorate(function: Callable[..., Any]) -> Any:
        if triton is None:
            return _Unavailable(function.__name__)
        return triton.jit(function, do_not_specialize=list(unspecialized))

    return decorate


def pack(values: Sequence[int]) -> tuple[int, ...]:
    """Integers as a kernel argument whose values never compile the kernel again; the kernel reads them by `unpack`.

    Triton compiles anew for an integer that is 1 or a multiple of 16, and inside a tuple nothing can switch that off:
    a table of 8 sizes would have thousands of variants. Odd numbers from 3 on have one.
    """
    return tuple(2 * value + 3 for value in values)


@jit()
def unpack(value):
    """The integer that `pack` made `value` of, as int64."""
    return (value.to(tl.int64) - 3) >> 1


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number` and 1."""
    return 1 << max(number - 1, 0).bit_length()


def device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Launches inside go to the tensor's device; nothing to do for a CPU tensor (Triton's interpreter)."""
    return torch.cuda.device_of(tensor)


def wide_type(dtype: torch.dtype) -> Any:
    """Triton's name of the dtype in which values of `dtype` are summed."""
    return tl.float64 if dtype == torch.float64 else tl.float32
