"""Products of linear modules as autograd nodes, alone or with low-rank adapters, whose outputs need not be computed.

The gradients of y = x W' + b need x and W, not y. So the node of a product saves only these, and its backward is that of the
whole product, however the output was made (`Maker`): computed, taken from a first run, or uninitialised if nothing reads it.

A low-rank adapter adds scaling * (x A') B' to the product of a frozen matrix. Projections that read one input are one node
(`adapted_products`): it reads x once for all A, writes each adapter's output first and adds the frozen product to it, inside that
product. Backward makes the gradient of x in the same way, in one tensor for all projections. So outputs, their gradients and that
of x pass through memory fewer times than with one node for each matrix, and no sum of gradients remains. In half precision
sums are rounded in another order than PEFT's; the adapter's output is rounded before the larger one is added.

Beside other modules (in four bits, with hooks, with trained weights) an adapter's output is added afterwards, by one accumulating
product, which rounds once where PEFT rounds three times and saves nothing of the output's width (`add_low_rank`).

Shapes: T tokens of this rank, C input features, N output features, r features of an adapter, R of all adapters of an input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hf_longctx.runtime.core import fp8
from hf_longctx.runtime.core.binding import bound, bound_function, put
from hf_longctx.runtime.core.fp8 import RoundedInput, input_gradient, unpacked

# returns the output of a module [T, N], given its input [T, C], N, and a function that computes the output of the first tokens
Maker = Callable[[Tensor, int, Callable[[int], Tensor]], Tensor]
# attribute of a forward from `make_products`: returns its maker
_MAKER = "_longctx_maker"
# attribute of a module that is not linear, but makes its output by what this returns
MAKER = "longctx_maker"


def computed(x_TC: Tensor, num_features: int, first: Callable[[int], Tensor]) -> Tensor:
    """Computes the output of all tokens."""
    return first(len(x_TC))


class FP8Linear(nn.Linear):
    """A linear module whose weight is frozen and stored as bytes, [N, C], with scales; it has its bias as it is.

    block: rows and columns that share a scale, in a matrix that is unpacked for its products; None: each row has its own, [N, 1],
    and products run in fp8. Bytes in place of fp8 pass collectives of every backend.
    """

    def __init__(
        self, bytes_NC: Tensor, scale: Tensor, block: tuple[int, int] | None = None, bias_N: nn.Parameter | None = None
    ) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = bytes_NC.shape
        self.block = block
        self.weight = nn.Parameter(bytes_NC, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.register_parameter("bias", bias_N)

    @classmethod
    def rounded(cls, weight_NC: Tensor, bias_N: nn.Parameter | None = None) -> FP8Linear:
        """Makes the module of a weight in another precision, each row rounded with its own scale."""
        values_NC, scale_N1 = fp8.rows_in_fp8(weight_NC.detach())
        return cls(values_NC.view(torch.uint8), scale_N1, None, bias_N)

    def forward(self, x: Tensor) -> Tensor:
        return _frozen_product(self, x, computed)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FP8Linear:
        # casts of the model leave scales in fp32
        def moved(tensor: Tensor) -> Tensor:
            is_scale = tensor is self.scale and type(tensor) is nn.Parameter
            return fn(tensor.view(torch.int32)).view(tensor.dtype) if is_scale else fn(tensor)

        super()._apply(moved, recurse)
        return self

    def extra_repr(self) -> str:
        has_bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={has_bias}, block={self.block}"


def _frozen_product(linear: FP8Linear, x: Tensor, make: Maker) -> Tensor:
    """Returns linear(x), [..., C] to [..., N], as made by `make`; under autocast in its dtype."""
    device = x.device.type
    x = _cast(x, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
    # outside the node, so that autograd casts the gradient back
    bias_N = None if linear.bias is None else linear.bias.to(x.dtype)
    y_TN: Tensor = _FrozenProduct.apply(x.flatten(0, -2), linear.weight, linear.scale, linear.block, bias_N, make)
    return y_TN.view(*x.shape[:-1], y_TN.shape[-1])


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TC: Tensor,
        bytes_NC: Tensor,
        scale: Tensor,
        block: tuple[int, int] | None,
        bias_N: Tensor | None,
        make: Maker,
    ) -> Tensor:
        ctx.block, ctx.makers = block, (make,)
        ctx.save_for_backward(bytes_NC, scale)
        if block is None:
            rounded = RoundedInput(x_TC)
            return make(x_TC, len(bytes_NC), lambda count: rounded.times(bytes_NC, scale, bias_N, count))
        return make(
            x_TC, len(bytes_NC), lambda count: F.linear(x_TC[:count], unpacked(bytes_NC, scale, block, x_TC.dtype), bias_N)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TN: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        bytes_NC, scale = ctx.saved_tensors
        dx_TC: Tensor | None = None
        if ctx.needs_input_grad[0] and ctx.block is None:
            dx_TC = input_gradient([gradient_TN], [bytes_NC], [scale])
        elif ctx.needs_input_grad[0]:
            dx_TC = gradient_TN @ unpacked(bytes_NC, scale, ctx.block, gradient_TN.dtype)
        return dx_TC, None, None, None, gradient_TN.sum(0) if ctx.needs_input_grad[4] else None, None


def make_products(module: nn.Module, current: Callable[[], Maker | None]) -> Callable[[], None]:
    """Lets `module` make its outputs by what `current` returns, until the returned function undoes this.

    module: a linear one, alone or in an adapter, or one with the attribute `MAKER`. It runs its own forward if `current` returns
    None.
    """
    if MAKER in vars(module):
        own, before = vars(module), vars(module)[MAKER]
        own[MAKER] = current
        return lambda: own.update({MAKER: before})
    assert isinstance(module, nn.Linear)
    linear, run = module, module.forward

    def forward(x: Tensor) -> Tensor:
        make = current()
        return run(x) if make is None else product(linear, x, make)

    vars(forward)[_MAKER] = current
    return put(linear, "forward", bound(linear, forward))


def maker_of(linear: nn.Linear) -> Maker | None:
    """Returns how the running forward makes the output of a linear module; None if its forward is of another kind."""
    if "forward" not in vars(linear):
        return computed
    current = getattr(bound_function(linear), _MAKER, None)
    return None if current is None else current() or computed


def product(linear: nn.Linear, x: Tensor, make: Maker) -> Tensor:
    """Returns linear(x), [..., C] to [..., N], as made by `make`."""
    if isinstance(linear, FP8Linear):
        return _frozen_product(linear, x, make)
    x, weight_NC, bias_N = autocast_operands(linear, x)
    y_TN: Tensor = _Product.apply(x.flatten(0, -2), weight_NC, bias_N, make)
    return y_TN.view(*x.shape[:-1], y_TN.shape[-1])


def autocast_operands(linear: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns input, weight and bias, cast if autocast is on; outside a node, so that autograd casts gradients back."""
    weight: Tensor = linear.weight
    bias: Tensor | None = linear.bias
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return _cast(x, dtype), _cast(weight, dtype), None if bias is None else _cast(bias, dtype)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts as autocast does, which leaves fp64 alone."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)


def _multiply(x_TC: Tensor, weight_NC: Tensor, bias_N: Tensor | None) -> Tensor:
    return F.linear(x_TC, weight_NC, bias_N)


class _Product(torch.autograd.Function):
    # saves the same tensors in first run and replay, because checkpointing compares their number, shapes and dtypes
    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, weight_NC: Tensor, bias_N: Tensor | None, make: Maker) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x_TC if needs_weight else None, weight_NC if needs_x else None)
        ctx.makers = (make,)
        return make(x_TC, len(weight_NC), lambda count: _multiply(x_TC[:count], weight_NC, bias_N))

    @staticmethod
    def backward(ctx: Any, gradient_TN: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:  # type: ignore[override]
        x_TC, weight_NC = ctx.saved_tensors
        dx_TC = None if weight_NC is None else gradient_TN @ weight_NC
        dw_NC = None if x_TC is None else gradient_TN.T @ x_TC
        return dx_TC, dw_NC, gradient_TN.sum(0) if ctx.needs_input_grad[2] else None, None


@dataclass(frozen=True, slots=True)
class AdaptedProduct:
    """A frozen matrix, its frozen bias, and the adapter whose output is added: x W' + b + scaling * (x A') B'.

    scale_N1: of the rows of a matrix that is stored as bytes in fp8.
    """

    weight_NC: Tensor
    bias_N: Tensor | None
    first_rC: Tensor
    second_Nr: Tensor
    scaling: float
    make: Maker = computed
    scale_N1: Tensor | None = None


def adapted_products(x: Tensor, products: Sequence[AdaptedProduct]) -> list[Tensor]:
    """Returns the outputs [..., N] of products of one input [..., C], all of one dtype, as one autograd node.

    Their frozen matrices are all in fp8, or none is.
    """
    matrices = [getattr(each, name) for name in ("weight_NC", "scale_N1", "first_rC", "second_Nr") for each in products]
    fixed = [(each.bias_N, each.scaling, each.make) for each in products]
    outputs: tuple[Tensor, ...] = _AdaptedProducts.apply(x.flatten(0, -2), fixed, *matrices)
    return [y_TN.view(*x.shape[:-1], y_TN.shape[-1]) for y_TN in outputs]


class _AdaptedProducts(torch.autograd.Function):
    # matrices: all W, all scales of W, all A, all B
    @staticmethod
    def forward(
        ctx: Any, x_TC: Tensor, fixed: Sequence[tuple[Tensor | None, float, Maker]], *matrices: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, scales, firsts, seconds = _quarters(matrices)
        rounded = None if scales[0] is None else RoundedInput(x_TC)
        needs_x, _, needs_firsts, needs_seconds = _needs(ctx)
        low_TR = F.linear(x_TC, _stacked(firsts))
        ctx.set_materialize_grads(False)
        ctx.scalings, ctx.makers = [scaling for _, scaling, _ in fixed], [make for _, _, make in fixed]
        ctx.ranks = list(map(len, firsts))
        ctx.save_for_backward(
            x_TC if any(needs_firsts) else None,
            low_TR if any(needs_seconds) else None,
            *(each if needs_x else None for each in (*weights, *scales, *firsts)),
            *(each if needs_x or any(needs_firsts) else None for each in seconds),
        )
        lows = low_TR.split(ctx.ranks, 1)
        return tuple(
            make(
                x_TC,
                len(weight_NC),
                partial(_first_outputs, x_TC, low_Tr, weight_NC, second_Nr, bias_N, scaling)
                if rounded is None
                else partial(_first_of_rounded, rounded, low_Tr, weight_NC, scale_N1, second_Nr, bias_N=bias_N, scaling=scaling),
            )
            for low_Tr, weight_NC, scale_N1, second_Nr, (bias_N, scaling, make) in zip(
                lows, weights, scales, seconds, fixed, strict=True
            )
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_TC, low_TR, *matrices = ctx.saved_tensors
        weights, scales, firsts, seconds = _quarters(matrices)
        needs_x, _, needs_firsts, needs_seconds = _needs(ctx)
        places = [slice(start, stop) for start, stop in pairwise(accumulate(ctx.ranks, initial=0))]
        given = [(place, each) for place, each in enumerate(gradients) if each is not None]
        dfirsts: list[Tensor | None] = [None] * len(gradients)
        dseconds: list[Tensor | None] = [None] * len(gradients)
        dlow_TR: Tensor | None = None
        if given and (needs_x or any(needs_firsts)):
            dlow_TR = given[0][1].new_zeros(len(given[0][1]), sum(ctx.ranks))
        for place, gradient_TN in given:
            if dlow_TR is not None:
                dlow_TR[:, places[place]].addmm_(gradient_TN, seconds[place], beta=0, alpha=ctx.scalings[place])
            if needs_seconds[place]:
                dseconds[place] = _scaled_product(ctx.scalings[place], gradient_TN.T, low_TR[:, places[place]])
        if dlow_TR is not None and any(needs_firsts):
            # copies, since gradients of several weights must not share memory
            of_all = (dlow_TR.T @ x_TC).split(ctx.ranks)
            dfirsts = [each.clone() if needs else None for each, needs in zip(of_all, needs_firsts, strict=True)]
        dx_TC: Tensor | None = None
        if dlow_TR is not None and needs_x and scales[0] is not None:
            found = [(each, weights[place], scales[place]) for place, each in given]
            dx_TC = input_gradient(*zip(*found, strict=True)).addmm_(dlow_TR, _stacked(firsts))
        elif dlow_TR is not None and needs_x:
            dx_TC = dlow_TR @ _stacked(firsts)
            for place, gradient_TN in given:
                dx_TC.addmm_(gradient_TN, weights[place])
        return dx_TC, None, *(None for _ in (*weights, *scales)), *dfirsts, *dseconds


def _first_outputs(
    x_TC: Tensor, low_Tr: Tensor, weight_NC: Tensor, second_Nr: Tensor, bias_N: Tensor | None, scaling: float, count: int
) -> Tensor:
    """Returns x W' + b + scaling * low B' of the first `count` tokens."""
    start = low_Tr.new_empty(len(second_Nr)) if bias_N is None else bias_N
    y_TN = torch.addmm(start, low_Tr[:count], second_Nr.T, beta=0 if bias_N is None else 1, alpha=scaling)
    return y_TN.addmm_(x_TC[:count], weight_NC.T)


def _first_of_rounded(
    rounded: RoundedInput,
    low_Tr: Tensor,
    bytes_NC: Tensor,
    scale_N1: Tensor,
    second_Nr: Tensor,
    count: int,
    *,
    bias_N: Tensor | None,
    scaling: float,
) -> Tensor:
    """Returns x W' + b + scaling * low B' of the first `count` tokens.

    Products in fp8 cannot add to a matrix, so they come first.
    """
    return rounded.times(bytes_NC, scale_N1, bias_N, count).addmm_(low_Tr[:count], second_Nr.T, alpha=scaling)


def _quarters(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    count = len(values) // 4
    return (values[start : start + count] for start in range(0, 4 * count, count))


def _needs(ctx: Any) -> tuple[bool, Sequence[bool], Sequence[bool], Sequence[bool]]:
    """Returns whether x, and each W, A and B, need a gradient."""
    weights, _, firsts, seconds = _quarters(ctx.needs_input_grad[2:])
    return ctx.needs_input_grad[0], weights, firsts, seconds


def _stacked(firsts: Sequence[Tensor]) -> Tensor:
    return firsts[0] if len(firsts) == 1 else torch.cat(tuple(firsts))


def add_low_rank(y: Tensor, low: Tensor, second_Nr: Tensor, scaling: float, in_place: bool) -> Tensor:
    """Returns y + scaling * low second', [..., N], from y of that shape and low [..., r], all of one dtype.

    in_place: overwrites y, which must be contiguous, no view, and not read elsewhere.
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
    """Returns scaling * left @ right, rounded once."""
    unread = left.new_empty(left.shape[0], right.shape[1])
    return torch.addmm(unread, left, right, beta=0, alpha=scaling)
