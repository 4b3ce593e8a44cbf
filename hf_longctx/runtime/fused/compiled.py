"""Runs an elementwise function of tokens as one compiled kernel forward and one backward, by torch.compile.

The derivative is traced by `torch.func.vjp`, so each function is written once. The autograd node saves inputs alone, never an
intermediate result, and its backward may run twice (retain_graph). The dimension of tokens stays a symbol, so one compilation
serves every number of tokens from 2 on: tiles, their last one, slices and packs. A single token, which torch would compile
anew, runs the function itself.

In half precision a compiled function rounds once, at its end, where the function itself rounds after every operation.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Function = Callable[..., Any]


class CompiledFunction:
    """A function of tensors that are contiguous in memory, forward and backward each compiled when first called.

    token_dims: the dimension of tokens of every input; None for weights, which have none. The first `num_linear` inputs enter the
    outputs linearly, one by one, and each has the shape of its output: their values are not saved, since no gradient depends on
    them. The first `num_gradients` inputs can have gradients. backend: that of torch.compile.
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
        # keyed by all that torch would compile anew for, since it allows few compilations of one code object
        self._compiled: dict[tuple[Any, ...], Function] = {}

    def __call__(self, *inputs: Tensor) -> Any:
        """The function of `inputs`, whose outputs have the shapes and dtypes of the function's own."""
        place = next(index for index, dim in enumerate(self.token_dims) if dim is not None)
        if inputs[place].shape[self.token_dims[place] or 0] < 2:
            return self.function(*inputs)
        return _Compiled.apply(self, *inputs)

    @property
    def num_compiled(self) -> int:
        """Number of kernels so far: two for every combination of dtypes, feature sizes and inputs that need a gradient."""
        return len(self._compiled)

    def forward(self, inputs: tuple[Tensor, ...]) -> Any:
        """Runs the forward kernel, without a graph."""
        with torch.autocast(inputs[0].device.type, enabled=False):
            return self._kernel(self.function, inputs, ())(*self._marked(inputs, self.token_dims))

    def backward(self, saved: tuple[Tensor, ...], gradients: tuple[Tensor, ...], needs: tuple[bool, ...]) -> tuple[Tensor, ...]:
        """Gradients of the inputs that need one, by the backward kernel; `saved`: the inputs after the linear ones."""
        # the derivative of a linear input does not depend on its value, so any tensor of its shape stands for it
        inputs = (*gradients[: self.num_linear], *saved)
        tensors, dims = (*inputs, *gradients), (*self.token_dims, *(self.token_dims[0] for _ in gradients))
        derivative = _derivative(self.function, len(gradients), needs)
        with torch.autocast(inputs[0].device.type, enabled=False):
            found: tuple[Tensor, ...] = self._kernel(derivative, tensors, needs)(*self._marked(tensors, dims))
        return found

    def _kernel(self, function: Function, tensors: tuple[Tensor, ...], needs: tuple[bool, ...]) -> Function:
        """`function` compiled for tensors like these."""
        dims = (*self.token_dims, *(self.token_dims[0] for _ in tensors[len(self.token_dims) :]))
        sizes = [tuple(size for place, size in enumerate(x.shape) if place != dim) for x, dim in zip(tensors, dims, strict=True)]
        key = (needs, tensors[0].device.type, *((x.dtype, size) for x, size in zip(tensors, sizes, strict=True)))
        if key not in self._compiled:
            # code of its own, on which torch keeps what it compiled
            code = function.__code__.replace()
            own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
            self._compiled[key] = torch.compile(own, dynamic=False, fullgraph=True, backend=self._backend)
        return self._compiled[key]

    @staticmethod
    def _marked(tensors: tuple[Tensor, ...], dims: tuple[int | None, ...]) -> list[Tensor]:
        """The tensors, detached, with their dimension of tokens marked as one of any size."""
        marked = [tensor.detach() for tensor in tensors]
        for tensor, dim in zip(marked, dims, strict=True):
            if dim is not None:
                torch._dynamo.mark_dynamic(tensor, dim)
        return marked


def _derivative(function: Function, num_outputs: int, needs: tuple[bool, ...]) -> Function:
    """A function of inputs and gradients of outputs that returns the gradients of the inputs that need one."""

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
