"""Triton's decorator and helpers for the kernels of this package, with a stand-in on machines without Triton.

CPU builds of torch come without Triton: a kernel's module can then be imported, and raises ImportError when a kernel is launched.
"""

# arguments of Triton kernels have no Python types
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

try:
    import triton
    import triton.language as tl
except ImportError as error:
    triton, tl, _missing = None, None, error


# device types on which kernels are launched without torch's dispatcher
DIRECT_DEVICES = ("cuda",)


class _Unavailable:
    """Stand-in for a kernel on a machine without Triton."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        raise ImportError(f"kernel {self.name} needs triton, which is not installed here: pip install triton") from _missing


def jit(*unspecialized: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorates a Triton kernel; new values of the arguments named in `unspecialized` never cause another compilation."""

    def decorate(function: Callable[..., Any]) -> Any:
        if triton is None:
            return _Unavailable(function.__name__)
        return triton.jit(function, do_not_specialize=list(unspecialized))

    return decorate


def pack(values: Sequence[int]) -> tuple[int, ...]:
    """Packs integers as a kernel argument whose values never cause another compilation; the kernel reads them with `unpack`.

    Triton compiles special variants for integers that are 1 or a multiple of 16, which cannot be switched off inside a tuple: a
    table of 8 sizes would have thousands of variants. So integers are mapped to odd numbers from 3 on, which share one variant.
    """
    return tuple(2 * value + 3 for value in values)


@jit()
def unpack(value):
    """Inverts `pack` for one value, as int64."""
    return (value.to(tl.int64) - 3) >> 1


def next_power_of_2(number: int) -> int:
    """Returns the smallest power of two that is at least `number` and at least 1."""
    return 1 << max(number - 1, 0).bit_length()


def device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Context in which kernels are launched on the tensor's device; does nothing for CPU tensors (Triton's interpreter)."""
    return torch.cuda.device_of(tensor)


def launches_directly(tensor: Tensor) -> bool:
    """Whether a kernel may be launched on `tensor` without torch's dispatcher, which costs more host time than the launch.

    False while torch traces a graph, and under a mode that watches or replaces operators, which would miss the kernel.
    """
    return (
        not torch.compiler.is_compiling()
        and tensor.device.type in DIRECT_DEVICES
        and type(tensor) in (Tensor, nn.Parameter)
        and torch._C._len_torch_dispatch_stack() == 0
    )


def wide_type(dtype: torch.dtype) -> Any:
    """Returns the Triton dtype in which values of `dtype` are summed."""
    return tl.float64 if dtype == torch.float64 else tl.float32
