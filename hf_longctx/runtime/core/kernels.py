"""Kernels for functions of single tokens: compiled by torch.compile, or from the package liger-kernel.

Compiled (`CompiledFunction`): one kernel forward and one backward. The derivative is traced by `torch.func.vjp`, so each function
is written once. The autograd node saves only inputs, and its backward may run twice (retain_graph). The token dimension stays a
symbol, so one compilation serves every number of tokens from 2 on: tiles, the last tile, slices and packs. A single token, for
which torch would compile again, runs the plain function. In half precision a compiled function rounds once, at its end, while
the plain function rounds after every operation.

Liger: RMSNorm and gated activations, in the forms that are exact under plans. Its norm can write the gradient of its input over
that of its output, which layers with a norm after attention share with their residual; this is switched off. Its gated
activations write gradients over their saved inputs. These belong to one node each, unless a hook keeps them, so a second backward
(retain_graph) raises an error. Its rotary embedding overwrites queries and keys, which plans keep for replays, so it is not used.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Function = Callable[..., Any]


class CompiledFunction:
    """A function of contiguous tensors, whose forward and backward are each compiled at the first call.

    token_dims: the token dimension of every input; None for weights. num_linear: number of first inputs that enter the outputs
    linearly, one by one, each with its output's shape; their values are not saved, since no gradient depends on them.
    num_gradients: number of first inputs that can have gradients. backend: backend of torch.compile.
    """

    def __init__(
        self,
        function: Function,
        token_dims: tuple[int | None, ...],
        num_gradients: int,
        num_linear: int = 0,
        backend: str = "inductor",
    ) -> None:
        self.function, self.token_dims, self.num_linear, self._backend = function, token_dims, num_linear, backend
        self.num_gradients = num_gradients
        # keyed by everything for which torch would compile again, since it allows few compilations of one code object
        self._compiled: dict[tuple[Any, ...], Function] = {}

    def __call__(self, *inputs: Tensor) -> Any:
        """Applies the function; outputs have the shapes and dtypes of the plain function's."""
        place = next(index for index, dim in enumerate(self.token_dims) if dim is not None)
        if inputs[place].shape[self.token_dims[place] or 0] < 2:
            return self.function(*inputs)
        return _Compiled.apply(self, *inputs)

    @property
    def num_compiled(self) -> int:
        """Number of kernels so far: two per combination of dtypes, feature sizes and inputs that need a gradient."""
        return len(self._compiled)

    def forward(self, inputs: tuple[Tensor, ...]) -> Any:
        """Runs the forward kernel, without a graph."""
        with torch.autocast(inputs[0].device.type, enabled=False):
            return self._kernel(self.function, inputs, ())(*self._marked(inputs, self.token_dims))

    def backward(self, saved: tuple[Tensor, ...], gradients: tuple[Tensor, ...], needs: tuple[bool, ...]) -> tuple[Tensor, ...]:
        """Returns the gradients of inputs that need one, by the backward kernel. saved: the inputs after the linear ones."""
        # the derivative of a linear input does not depend on its value, so any tensor of its shape will do
        inputs = (*gradients[: self.num_linear], *saved)
        tensors, dims = (*inputs, *gradients), (*self.token_dims, *(self.token_dims[0] for _ in gradients))
        derivative = _derivative(self.function, len(gradients), needs)
        with torch.autocast(inputs[0].device.type, enabled=False):
            found: tuple[Tensor, ...] = self._kernel(derivative, tensors, needs)(*self._marked(tensors, dims))
        return found

    def _kernel(self, function: Function, tensors: tuple[Tensor, ...], needs: tuple[bool, ...]) -> Function:
        """Returns `function` compiled for tensors like these."""
        dims = (*self.token_dims, *(self.token_dims[0] for _ in tensors[len(self.token_dims) :]))
        sizes = [tuple(size for place, size in enumerate(x.shape) if place != dim) for x, dim in zip(tensors, dims, strict=True)]
        key = (needs, tensors[0].device.type, *((x.dtype, size) for x, size in zip(tensors, sizes, strict=True)))
        if key not in self._compiled:
            # a separate code object, by which torch stores what it compiled
            code = function.__code__.replace()
            own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
            self._compiled[key] = torch.compile(own, dynamic=False, fullgraph=True, backend=self._backend)
        return self._compiled[key]

    @staticmethod
    def _marked(tensors: tuple[Tensor, ...], dims: tuple[int | None, ...]) -> list[Tensor]:
        """Detaches the tensors and marks their token dimension as dynamic."""
        marked = [tensor.detach() for tensor in tensors]
        for tensor, dim in zip(marked, dims, strict=True):
            if dim is not None:
                torch._dynamo.mark_dynamic(tensor, dim)
        return marked


def _derivative(function: Function, num_outputs: int, needs: tuple[bool, ...]) -> Function:
    """Makes a function from inputs and gradients of outputs to the gradients of inputs that need one."""

    def derivative(*tensors: Tensor) -> tuple[Tensor, ...]:
        inputs, gradients = tensors[: len(tensors) - num_outputs], tensors[len(tensors) - num_outputs :]

        def of_needed(*needed: Tensor) -> Any:
            values = iter(needed)
            return function(*(next(values) if place < len(needs) and needs[place] else x for place, x in enumerate(inputs)))

        traced: Any = torch.func.vjp(of_needed, *(x for x, need in zip(inputs, needs, strict=False) if need))
        found: tuple[Tensor, ...] = traced[1](gradients[0] if num_outputs == 1 else gradients)
        return found

    return derivative


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, owner: CompiledFunction, *inputs: Tensor) -> Any:
        ctx.owner = owner
        ctx.save_for_backward(*inputs[owner.num_linear :])
        return owner.forward(inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        owner: CompiledFunction = ctx.owner
        needs = ctx.needs_input_grad[1 : 1 + owner.num_gradients]
        found = iter(owner.backward(ctx.saved_tensors, tuple(each.contiguous() for each in gradients), needs))
        own = [next(found) if need else None for need in needs]
        return None, *own, *(None for _ in range(len(owner.token_dims) - owner.num_gradients))


# dtypes that Liger's kernels support
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_GATES = {"silu": "LigerSiLUMulFunction", "gelu_tanh": "LigerGELUMulFunction"}


def is_installed() -> bool:
    """Whether the package liger-kernel is installed."""
    return importlib.util.find_spec("liger_kernel") is not None


def has_gate(activation: str) -> bool:
    """Whether Liger has a gated form of this activation."""
    return activation in _GATES


def norm(x_NC: Tensor, weight_C: Tensor, eps: float, is_centred: bool) -> Tensor:
    """Returns RMSNorm of rows. is_centred: weights are offsets from 1 and multiply before rounding, as in Gemma."""
    function = getattr(importlib.import_module("liger_kernel.ops"), "LigerRMSNormFunction")  # noqa: B009
    result: Tensor = function.apply(x_NC, weight_C, eps, float(is_centred), "gemma" if is_centred else "llama", False, None)
    return result


def gated(activation: str, gate_NI: Tensor, up_NI: Tensor) -> Tensor:
    """Returns activation(gate) * up; backward overwrites both inputs."""
    result: Tensor = _gate_function(activation).apply(gate_NI, up_NI)
    return result


@cache
def _gate_function(activation: str) -> Any:
    """Returns Liger's function, with a backward that can run only once."""
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
