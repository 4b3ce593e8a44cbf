"""Takes RMSNorm and gated activations from the package liger-kernel, in the forms that are exact under plans.

Liger's norm may write the gradient of its input over that of its output, which layers with a norm behind attention share with
their residual: it is told not to. Its gated activations write their gradients over the inputs that they saved. These belong to
one node each, unless a hook keeps them, so they may be overwritten once: a second backward (retain_graph) raises an error.
Liger's rotary embedding writes over queries and keys, which plans keep for replays, so it is left out.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

# dtypes that Liger's kernels know
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_GATES = {"silu": "LigerSiLUMulFunction", "gelu_tanh": "LigerGELUMulFunction"}


def is_installed() -> bool:
    """Whether the package liger-kernel is installed."""
    return importlib.util.find_spec("liger_kernel") is not None


def has_gate(activation: str) -> bool:
    """Whether Liger multiplies by this activation."""
    return activation in _GATES


def norm(x_NC: Tensor, weight_C: Tensor, eps: float, is_centred: bool) -> Tensor:
    """RMSNorm of rows; `is_centred`: weights count from 1 and multiply before the result is rounded, as Gemma's do."""
    function = getattr(importlib.import_module("liger_kernel.ops"), "LigerRMSNormFunction")  # noqa: B009
    result: Tensor = function.apply(x_NC, weight_C, eps, float(is_centred), "gemma" if is_centred else "llama", False, None)
    return result


def gated(activation: str, gate_NI: Tensor, up_NI: Tensor) -> Tensor:
    """activation(gate) * up; backward writes over both inputs."""
    result: Tensor = _gate_function(activation).apply(gate_NI, up_NI)
    return result


@cache
def _gate_function(activation: str) -> Any:
    """Liger's function, whose backward runs only once."""
    function: Any = getattr(importlib.import_module("liger_kernel.ops"), _GATES[activation])

    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if getattr(ctx, "was_run", False):
            raise RuntimeError(
                "a second backward ran through Liger's gated activation, which overwrites what it saved; do not set "
                "retain_graph, or leave use_liger_kernel out (LongContextConfig(compile_layers=True) allows it)"
            )
        ctx.was_run = True
        return function.backward(ctx, *gradients)

    return type(f"Once{function.__name__}", (function,), {"backward": staticmethod(backward)})
