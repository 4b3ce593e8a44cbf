"""The MLP of a layer's experts as one autograd node: products with frozen matrices, and with low-rank adapters beside these.

Rows are the copies of a token that its experts read, sorted by expert. For the rows of expert e, a matrix gives

    y = x W_e + b_e + scaling * (x A_e') B_e'

so no sum W + scaling * B A is made. Rows are gathered and multiplied by the first matrices, the class's activation follows, then
the last matrices, and the k outputs of a token are weighed and added up. Packed matrices are unpacked for some experts at a
time, and the rows of these run from gathering to adding before the next experts are unpacked. So gathered rows, inner tensors
and outputs of all experts never exist at once. Whole matrices run all rows at once, since token tiles bound their number.

The node saves hidden states as the layer has them, not gathered, outputs of the first matrices, and products with their A. What
follows is made again in backward, but for outputs of the last matrices: with a row's output z = i W + b + scaling * (i A') B'
and y = sum of w z, the gradient of a routing weight w is

    <dy, z> = <i, dy W' + scaling * (dy B) A> + <dy, b> = <i, d> + <dy, b>

where w d is the gradient of i, which backward makes anyway. If nothing reads y (`products.Maker`), as in a replay for gradients,
the node makes and saves nothing in forward, and backward makes outputs of the first matrices for some experts at a time, too.

An adapter lies in memory as PEFT has it. A is [E r, K], expert by expert. B is [N, r E], and its fastest index is the expert.
Experts without rows get gradients of zeros.

Shapes: T tokens, k experts of each, S = T k rows, M rows that run at once, E experts whose rows there are, C features of hidden
states, K inputs and N outputs of a matrix, F inner features, r features of an adapter, R = r rounded up to 16 bytes, as CUDA's
grouped products need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_longctx.plan.core.sharding import RANK_BYTES, UNPACKED_AT_ONCE, UNPACKED_BYTES, expert_rows
from hf_longctx.runtime.core import fp8
from hf_longctx.runtime.core.products import Maker, computed


class Rows:
    """Rows of the experts that tokens have chosen, sorted by expert, tokens in order.

    chosen_Tk: experts of every token. is_grouped: whether the device's grouped products are right (`grouped_problem`); otherwise
    there is one product for each expert, and the host waits once for their numbers of rows.
    """

    def __init__(self, chosen_Tk: Tensor, num_experts: int, is_grouped: bool) -> None:
        self.num_chosen, self.num_experts, self.is_grouped = chosen_Tk.shape[1], num_experts, is_grouped
        experts_S, order_S = torch.sort(chosen_Tk.reshape(-1), stable=True)
        counts_E = torch.zeros(num_experts, dtype=torch.int64, device=order_S.device)
        counts_E.scatter_add_(0, experts_S, torch.ones_like(experts_S))
        self.ends_E = counts_E.cumsum(0).to(torch.int32)
        # place of every row among the choices of all tokens
        self.order_S = order_S.to(torch.int32)

    @cached_property
    def bounds(self) -> list[int]:
        """First row of every expert, and the number of rows, on the host."""
        return [0, *self.ends_E.tolist()]

    @property
    def all(self) -> Part:
        """All rows at once."""
        return Part(self, slice(0, self.num_experts), slice(0, len(self.order_S)))

    def ranges(self, at_once: int) -> Iterator[tuple[slice, list[Part]]]:
        """Yields ranges of at most `at_once` experts that have rows, and their rows in parts that run one after the other.

        However unevenly experts are chosen, a part has no more rows than a range would have if they were chosen equally often.
        """
        if at_once >= self.num_experts:
            yield slice(0, self.num_experts), [self.all]
            return
        most = expert_rows(len(self.order_S), self.num_experts, at_once)
        for first in range(0, self.num_experts, at_once):
            experts = slice(first, min(first + at_once, self.num_experts))
            start, stop = self.bounds[experts.start], self.bounds[experts.stop]
            if start < stop:
                num_parts = -(-(stop - start) // most)
                cuts = [start + (stop - start) * number // num_parts for number in range(num_parts + 1)]
                yield experts, [Part(self, experts, slice(*cut)) for cut in pairwise(cuts)]


class Part:
    """Rows in a row, of some experts; products are made of all of them at once."""

    def __init__(self, rows: Rows, experts: slice, places: slice) -> None:
        self._rows, self._experts, self.places, self.is_grouped = rows, experts, places, rows.is_grouped
        self.is_all = places.stop - places.start == len(rows.order_S)
        self._order_M = rows.order_S[places].long()

    @property
    def _tokens_M(self) -> Tensor:
        return self._order_M // self._rows.num_chosen

    def of_tokens(self, values_TC: Tensor) -> Tensor:
        """Gathers what the rows' tokens have."""
        return values_TC[self._tokens_M]

    def of_choices(self, values_Tk: Tensor) -> Tensor:
        """Gathers what the rows' choices have, [M, 1]."""
        return values_Tk.reshape(-1, 1)[self._order_M]

    def of_experts(self, values_EN: Tensor) -> Tensor:
        """Gathers what the rows' experts have."""
        places_M = torch.arange(self.places.start, self.places.stop, dtype=torch.int32, device=self._order_M.device)
        return values_EN[torch.bucketize(places_M, self._rows.ends_E, right=True)]

    def put(self, values_Tk: Tensor, values_M: Tensor) -> None:
        """Writes values of the rows to their choices."""
        values_Tk.view(-1)[self._order_M] = values_M

    @cached_property
    def ends_E(self) -> Tensor:
        """Ends of the rows of every expert, counted from the first row of the part."""
        return (self._rows.ends_E[self._experts] - self.places.start).clamp(0, self.places.stop - self.places.start)

    @cached_property
    def bounds(self) -> list[int]:
        """First row of every expert, counted from the first of the part, and the number of rows, on the host."""
        bounds = self._rows.bounds[self._experts.start : self._experts.stop + 1]
        return [min(max(self.places.start, bound), self.places.stop) - self.places.start for bound in bounds]

    def add_to(self, sums_TN: Tensor, values_MN: Tensor, weights_Tk: Tensor | None = None) -> None:
        """Adds the values of the rows, weighed, to the sums of their tokens, in the dtype of the sums and in a fixed order."""
        wide = sums_TN.dtype
        if not self.is_all:
            tokens_M, weights_M1 = self._tokens_M, None if weights_Tk is None else self.of_choices(weights_Tk).to(wide)
            # an expert has a token once, so that no two rows are added to one sum at a time
            for start, stop in pairwise(self.bounds):
                values = values_MN[start:stop].to(wide)
                sums_TN.index_add_(0, tokens_M[start:stop], values if weights_M1 is None else values * weights_M1[start:stop])
            return
        rows_S = torch.empty_like(self._order_M)
        rows_S[self._order_M] = torch.arange(len(rows_S), device=rows_S.device)
        rows_Tk = rows_S.view(-1, self._rows.num_chosen)
        for choice in range(self._rows.num_chosen):
            of_choice_TN = values_MN[rows_Tk[:, choice]]
            if weights_Tk is None:
                sums_TN += of_choice_TN
            else:
                sums_TN.addcmul_(of_choice_TN.to(wide), weights_Tk[:, choice, None].to(wide))


# values of a code of four bits, by kind
FOUR_BIT_VALUES = {
    "mxfp4": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
    # quantiles of a normal distribution (QLoRA, arXiv 2305.14314, appendix E)
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
        *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
}
# elements of a block that share a scale
PACKED_BLOCKS = {"mxfp4": 32, "nf4": 64, "fp8": 128}
PackedKind = Literal["mxfp4", "nf4", "fp8"]


@dataclass(frozen=True, slots=True)
class PackedMatrices:
    """Matrices of experts in four or eight bits, which are unpacked some at a time, in forward and again in backward."""

    # bytes of fp8 along the inputs, or two codes to a byte, the first in the lower half; H = K or K / 2
    codes_ENH: Tensor
    # scales of equal blocks of inputs as bytes: powers of two with a bias of 127 for MXFP4, bf16 for NF4, fp32 for fp8
    scales_ENG: Tensor
    kind: PackedKind
    # experts to unpack at a time
    at_once: int = UNPACKED_AT_ONCE

    def __len__(self) -> int:
        return len(self.codes_ENH)

    @property
    def num_inputs(self) -> int:
        return elements_of_codes(self.codes_ENH.shape[2], self.kind)

    @property
    def unpacked_bytes(self) -> int:
        """Most bytes that a product holds of them: unpacked ones in two bytes, as made, scaled and indexed."""
        return min(self.at_once, len(self)) * self.codes_ENH.shape[1] * self.num_inputs * UNPACKED_BYTES

    def unpacked(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Returns the matrices [stop - start, K, N] of some experts."""
        codes_ENH, scales_ENG = self.codes_ENH[start:stop], self.scales_ENG[start:stop]
        if self.kind == "fp8":
            scales_ENG = scales_ENG.view(torch.float32)
            wide_ENGB = (
                codes_ENH.view(fp8.DTYPE).to(torch.promote_types(dtype, torch.float32)).unflatten(-1, (scales_ENG.shape[2], -1))
            )
            return wide_ENGB.mul_(scales_ENG.unsqueeze(-1)).to(dtype).flatten(-2).transpose(1, 2)
        if self.kind == "nf4":
            scales_ENG = scales_ENG.view(torch.bfloat16)
        values = torch.tensor(FOUR_BIT_VALUES[self.kind], dtype=dtype, device=codes_ENH.device)
        weight = torch.stack((values[(codes_ENH & 15).int()], values[(codes_ENH >> 4).int()]), dim=-1)
        weight = weight.view(*scales_ENG.shape, -1)
        if self.kind == "mxfp4":
            weight = torch.ldexp(weight, scales_ENG.int().unsqueeze(-1) - 127)
        else:
            weight = weight * scales_ENG.unsqueeze(-1).to(dtype)
        return weight.flatten(-2).transpose(1, 2)


def elements_of_codes(num_bytes: int, kind: PackedKind) -> int:
    """Returns how many elements are in so many bytes of codes."""
    return num_bytes if kind == "fp8" else 2 * num_bytes


def check_inputs(num_inputs: int, kind: PackedKind) -> None:
    """Raises ValueError if matrices with this number of inputs cannot be packed."""
    if num_inputs % 2 and kind != "fp8":
        raise ValueError(f"two codes of four bits share a byte, but experts have {num_inputs} inputs; keep them in bfloat16")


def packed(weight_EKN: Tensor, kind: PackedKind) -> tuple[Tensor, Tensor]:
    """Returns codes and scales (`PackedMatrices`) of the nearest values; exact for weights that were unpacked from MXFP4.

    Blocks are smaller if the inputs are no multiple of them. Raises ValueError for an odd number of inputs in four bits.
    """
    num_inputs = weight_EKN.shape[1]
    check_inputs(num_inputs, kind)
    block = math.gcd(PACKED_BLOCKS[kind], num_inputs)
    blocks = weight_EKN.transpose(1, 2).float().unflatten(-1, (-1, block))
    largest = blocks.abs().amax(-1)
    if kind == "fp8":
        scales = (largest / torch.finfo(fp8.DTYPE).max).clamp(min=torch.finfo(torch.float32).tiny)
        return (blocks / scales.unsqueeze(-1)).to(fp8.DTYPE).flatten(-2).view(torch.uint8), scales
    values = torch.tensor(FOUR_BIT_VALUES[kind], device=blocks.device)
    if kind == "mxfp4":
        exponents = torch.floor(torch.log2(largest.clamp(min=2.0**-120))) - 2
        scales, wide = (exponents + 127).to(torch.uint8), torch.exp2(exponents)
    else:
        scales = largest.to(torch.bfloat16)
        wide = scales.float().clamp(min=torch.finfo(torch.float32).tiny)
    order = values.sort()
    middles = (order.values[1:] + order.values[:-1]) / 2
    codes = order.indices[torch.bucketize(blocks / wide.unsqueeze(-1), middles)].to(torch.uint8).flatten(-2)
    return codes[..., ::2] | (codes[..., 1::2] << 4), scales


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """One frozen matrix of every expert, and perhaps a bias and an adapter."""

    # whole, with any strides, or packed
    weight: Tensor | PackedMatrices
    # dtype of the products
    dtype: torch.dtype
    bias_EN: Tensor | None = None
    # A and B of all experts of the layer
    first: Tensor | None = None
    second: Tensor | None = None
    scaling: float = 0.0
    # number of these experts, and the first one of the weight; others belong to other ranks, and get gradients of zeros
    num_all: int = 0
    start: int = 0

    @property
    def at_once(self) -> int:
        """Experts whose matrices exist at a time."""
        return len(self.weight) if isinstance(self.weight, Tensor) else self.weight.at_once

    @property
    def num_inputs(self) -> int:
        return self.weight.shape[1] if isinstance(self.weight, Tensor) else self.weight.num_inputs

    @property
    def num_outputs(self) -> int:
        return self.weight.shape[2] if isinstance(self.weight, Tensor) else self.weight.codes_ENH.shape[1]

    @property
    def tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """A, B and a whole weight, which the node saves."""
        return self.first, self.second, self.weight if isinstance(self.weight, Tensor) else None

    def holding(self, first: Tensor | None, second: Tensor | None, weight: Tensor | None) -> ExpertMatrices:
        """Returns the same matrices with saved tensors."""
        return replace(self, first=first, second=second, weight=self.weight if weight is None else weight)


@dataclass(frozen=True, slots=True)
class ExpertMLP:
    """First and last matrices of the experts of a layer, and the activation between: inner features [M, N] to [M, F]."""

    entering: ExpertMatrices
    leaving: ExpertMatrices
    activate: Callable[[Tensor], Tensor]

    @property
    def at_once(self) -> int:
        return min(self.entering.at_once, self.leaving.at_once)


def run_experts(x_TC: Tensor, weights_Tk: Tensor, mlp: ExpertMLP, rows: Rows, make: Maker = computed) -> Tensor:
    """Returns the weighted sums [T, C] of the outputs of every token's experts, in the dtype of the frozen weights.

    make: how the output is made; if it is not computed, backward makes all that it needs.
    """
    x_TC, tensors = x_TC.to(mlp.entering.dtype), (*mlp.entering.tensors, *mlp.leaving.tensors)
    # asked here, since a node's forward never makes a graph
    keeps = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (x_TC, weights_Tk, *tensors))
    result: Tensor = _RunExperts.apply(x_TC, weights_Tk, *tensors, mlp, rows, keeps, make)
    return result


class _RunExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, weights_Tk: Tensor, *others: Any) -> Tensor:
        *tensors, mlp, rows, keeps, make = others
        inner_SN: Tensor | None = None
        low_SR: Tensor | None = None

        def outputs(count: int) -> Tensor:
            nonlocal inner_SN, low_SR
            assert count == len(x_TC)
            y_TC = x_TC.new_zeros(count, mlp.leaving.num_outputs, dtype=_wide(mlp.leaving.dtype))
            for experts, parts in rows.ranges(mlp.at_once):
                entering, leaving = _Products(mlp.entering, experts), _Products(mlp.leaving, experts)
                for part in parts:
                    inner_MN, low_MR = entering.forward(part.of_tokens(x_TC), part)
                    if keeps:
                        inner_SN, low_SR = _kept(inner_SN, inner_MN, part, rows), _kept(low_SR, low_MR, part, rows)
                    inner_MF = mlp.activate(inner_MN).to(mlp.leaving.dtype)
                    # tensors of a part are gone before the next one begins
                    del inner_MN, low_MR
                    part.add_to(y_TC, leaving.forward(inner_MF, part)[0], weights_Tk)
                    del inner_MF
            return y_TC.to(mlp.leaving.dtype)

        y_TC = make(x_TC, mlp.leaving.num_outputs, outputs)
        device = x_TC.device.type
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.mlp, ctx.rows, ctx.makers = mlp, rows, (make,)
        # an adapter of the first matrices reads x in backward, too
        needs_x = inner_SN is None or mlp.entering.first is not None
        ctx.save_for_backward(x_TC if needs_x else None, weights_Tk, inner_SN, low_SR, *tensors)
        return y_TC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TC: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_TC, weights_Tk, inner_SN, low_SR, *tensors = ctx.saved_tensors
        mlp, rows = ctx.mlp, ctx.rows
        mlp = replace(mlp, entering=mlp.entering.holding(*tensors[:3]), leaving=mlp.leaving.holding(*tensors[3:]))
        sums = _Gradients(mlp, gradient_TC, weights_Tk, ctx.needs_input_grad)
        for experts, parts in rows.ranges(mlp.at_once):
            entering, leaving = _Products(mlp.entering, experts), _Products(mlp.leaving, experts)
            for part in parts:
                kept = None if inner_SN is None else (inner_SN[part.places], None if low_SR is None else low_SR[part.places])
                # backward does not restore autocast by itself
                with torch.autocast(*ctx.autocast):
                    sums.add(part, entering, leaving, x_TC, kept)
        dx_TC = None if sums.dx_TC is None else sums.dx_TC.to(mlp.entering.dtype)
        found = [(None, None) if each is None else each.gradients() for each in (sums.of_first, sums.of_last)]
        return dx_TC, sums.dweights_Tk, *found[0], None, *found[1], None, None, None, None, None


class _Gradients:
    """Gradients of the inputs of a node, of which each part of the rows adds its own."""

    def __init__(self, mlp: ExpertMLP, gradient_TC: Tensor, weights_Tk: Tensor, needs_gradients: Sequence[bool]) -> None:
        self._mlp, self._gradient_TC, self._weights_Tk = mlp, gradient_TC, weights_Tk
        needs_x, needs_weights, first, second, _, first_of_last, second_of_last, *_ = needs_gradients
        self.of_first = _AdapterGradients(mlp.entering) if first or second else None
        self.of_last = _AdapterGradients(mlp.leaving) if first_of_last or second_of_last else None
        self.dx_TC: Tensor | None = None
        if needs_x:
            self.dx_TC = gradient_TC.new_zeros(len(gradient_TC), mlp.entering.num_inputs, dtype=_wide(mlp.entering.dtype))
        self.dweights_Tk = torch.empty_like(weights_Tk) if needs_weights else None

    def add(
        self,
        part: Part,
        entering: _Products,
        leaving: _Products,
        x_TC: Tensor | None,
        kept: tuple[Tensor, Tensor | None] | None,
    ) -> None:
        """Adds those of a part. kept: outputs of the first matrices and products with their A; None: made again from x."""
        if kept is None:
            assert x_TC is not None
            kept = entering.forward(part.of_tokens(x_TC), part)
        low_MR = kept[1]
        with torch.enable_grad():
            inner_MN = kept[0].detach().requires_grad_()
            made_MF = self._mlp.activate(inner_MN)
        del kept
        d_MF = self._add_last(part, leaving, made_MF.detach().to(leaving.matrices.dtype))
        if self.dx_TC is None and self.of_first is None:
            return
        (dinner_MN,) = torch.autograd.grad(made_MF, inner_MN, d_MF.to(made_MF.dtype))
        del made_MF, inner_MN, d_MF
        dinner_MN = dinner_MN.contiguous()
        dlow_MR = entering.low_gradient(dinner_MN, part)
        if self.of_first is not None:
            assert x_TC is not None and dlow_MR is not None and low_MR is not None
            self.of_first.add(entering, part, part.of_tokens(x_TC), dlow_MR, dinner_MN, low_MR)
        if self.dx_TC is not None:
            part.add_to(self.dx_TC, entering.input_gradient(dinner_MN, dlow_MR, part))

    def _add_last(self, part: Part, leaving: _Products, inner_MF: Tensor) -> Tensor:
        """Adds gradients of routing weights and of adapters on the last matrices; returns the gradient of their inputs."""
        bias_EN, wide = leaving.matrices.bias_EN, _wide(leaving.matrices.dtype)
        # gradient of every row's output, before it was weighed
        dy_MC = part.of_tokens(self._gradient_TC)
        dlow_MR = leaving.low_gradient(dy_MC, part)
        d_MF = leaving.input_gradient(dy_MC, dlow_MR, part)
        if self.dweights_Tk is not None:
            dweights_M = (inner_MF * d_MF).sum(1, dtype=wide)
            if bias_EN is not None:
                dweights_M += (dy_MC * part.of_experts(bias_EN)).sum(1, dtype=wide)
            part.put(self.dweights_Tk, dweights_M.to(self.dweights_Tk.dtype))
        weights_M1 = part.of_choices(self._weights_Tk).to(d_MF.dtype)
        if self.of_last is not None:
            assert dlow_MR is not None
            low_MR = leaving.low(inner_MF, part).mul_(weights_M1)
            self.of_last.add(leaving, part, inner_MF, dlow_MR.mul_(weights_M1), dy_MC, low_MR)
        return d_MF.mul_(weights_M1)


def _kept(kept_SN: Tensor | None, values_MN: Tensor | None, part: Part, rows: Rows) -> Tensor | None:
    """Returns values of all rows, with those of a part."""
    if values_MN is None or part.is_all:
        return values_MN
    if kept_SN is None:
        kept_SN = values_MN.new_empty(len(rows.order_S), values_MN.shape[1])
    kept_SN[part.places] = values_MN
    return kept_SN


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _AdapterGradients:
    """Gradients of A and B, as they lie in memory, summed over parts in at least fp32."""

    def __init__(self, matrices: ExpertMatrices) -> None:
        assert matrices.first is not None and matrices.second is not None
        self._matrices = matrices
        self._first, self._second = (
            torch.zeros_like(each, dtype=_wide(each.dtype)) for each in (matrices.first, matrices.second)
        )

    def add(self, products: _Products, part: Part, x_MK: Tensor, dlow_MR: Tensor, dy_MN: Tensor, low_MR: Tensor) -> None:
        """Adds those of the rows of a part."""
        num_all, own = self._matrices.num_all, products.own
        rank = len(self._first) // num_all
        self._first.view(num_all, rank, -1)[own] += _sums(dlow_MR, x_MK, part)[:, :rank]
        of_rows_ENR = _sums(dy_MN, low_MR, part).mul_(self._matrices.scaling)
        self._second.view(-1, rank, num_all)[..., own] += of_rows_ENR[..., :rank].permute(1, 2, 0)

    def gradients(self) -> tuple[Tensor, Tensor]:
        first, second = self._matrices.first, self._matrices.second
        assert first is not None and second is not None
        return self._first.to(first.dtype), self._second.to(second.dtype)


class _Products:
    """Products of rows of some experts with one of their matrices; weights are unpacked, cast and rearranged once."""

    def __init__(self, matrices: ExpertMatrices, experts: slice) -> None:
        self.matrices, self._experts = matrices, experts

    @property
    def own(self) -> slice:
        """Numbers of these experts among all of the layer."""
        return slice(self.matrices.start + self._experts.start, self.matrices.start + self._experts.stop)

    @cached_property
    def _weight_EKN(self) -> Tensor:
        weight = self.matrices.weight
        if isinstance(weight, Tensor):
            return weight[self._experts]
        return weight.unpacked(self._experts.start, self._experts.stop, self.matrices.dtype)

    @cached_property
    def _first_ERK(self) -> Tensor:
        first = self.matrices.first
        assert first is not None
        own_ErK = first.view(self.matrices.num_all, -1, first.shape[1])[self.own].to(self.matrices.dtype)
        return F.pad(own_ErK, (0, 0, 0, _padding(own_ErK.shape[1], own_ErK.dtype)))

    @cached_property
    def _second_ENR(self) -> Tensor:
        second = self.matrices.second
        assert second is not None
        own_ENr = second.view(len(second), -1, self.matrices.num_all)[..., self.own].permute(2, 0, 1)
        own_ENr = own_ENr.to(self.matrices.dtype)
        return F.pad(own_ENr, (0, _padding(own_ENr.shape[2], own_ENr.dtype))).contiguous()

    def forward(self, x_MK: Tensor, part: Part) -> tuple[Tensor, Tensor | None]:
        """Returns the products [M, N], and those with A, unscaled, [M, R]."""
        y_MN, low_MR = _multiply(x_MK, self._weight_EKN, part), None
        if self.matrices.first is not None:
            low_MR = self.low(x_MK, part)
            y_MN.add_(_multiply(low_MR, self._second_ENR.transpose(1, 2), part), alpha=self.matrices.scaling)
        if self.matrices.bias_EN is not None:
            y_MN += part.of_experts(self.matrices.bias_EN)
        return y_MN, low_MR

    def low(self, x_MK: Tensor, part: Part) -> Tensor:
        """Returns the products [M, R] with A."""
        return _multiply(x_MK, self._first_ERK.transpose(1, 2), part)

    def low_gradient(self, gradient_MN: Tensor, part: Part) -> Tensor | None:
        """Returns the gradient [M, R] of the products with A; None without an adapter."""
        if self.matrices.second is None:
            return None
        return _multiply(gradient_MN, self._second_ENR, part).mul_(self.matrices.scaling)

    def input_gradient(self, gradient_MN: Tensor, dlow_MR: Tensor | None, part: Part) -> Tensor:
        """Returns the gradient [M, K] of the rows."""
        dx_MK = _multiply(gradient_MN, self._weight_EKN.transpose(1, 2), part)
        return dx_MK if dlow_MR is None else dx_MK.add_(_multiply(dlow_MR, self._first_ERK, part))


def _multiply(x_MK: Tensor, weight_EKN: Tensor, part: Part) -> Tensor:
    """Returns the rows of a part times the matrices of their experts."""
    if part.is_grouped and _is_aligned(x_MK) and _is_aligned(weight_EKN):
        return F.grouped_mm(x_MK, weight_EKN, offs=part.ends_E)
    y_MN = x_MK.new_empty(len(x_MK), weight_EKN.shape[2])
    for weight_KN, (start, stop) in zip(weight_EKN, pairwise(part.bounds), strict=True):
        if stop > start:
            torch.mm(x_MK[start:stop], weight_KN, out=y_MN[start:stop])
    return y_MN


def _sums(left_MI: Tensor, right_MN: Tensor, part: Part) -> Tensor:
    """Returns the sums [E, I, N] of left' right over the rows of each expert, zeros for an expert without rows."""
    if part.is_grouped and _is_aligned(left_MI) and _is_aligned(right_MN):
        sums_EIN = F.grouped_mm(left_MI.T, right_MN, offs=part.ends_E)
        # not every version writes them for experts without rows
        has_none_E = part.ends_E.diff(prepend=part.ends_E.new_zeros(1)) == 0
        return sums_EIN.masked_fill_(has_none_E[:, None, None], 0)
    sums_EIN = left_MI.new_zeros(len(part.bounds) - 1, left_MI.shape[1], right_MN.shape[1])
    for sums_IN, (start, stop) in zip(sums_EIN, pairwise(part.bounds), strict=True):
        torch.mm(left_MI[start:stop].T, right_MN[start:stop], out=sums_IN)
    return sums_EIN


def _padding(rank: int, dtype: torch.dtype) -> int:
    return -rank % max(1, RANK_BYTES // dtype.itemsize)


def _is_aligned(tensor: Tensor) -> bool:
    strides = [each for each in tensor.stride()[-2:] if each != 1]
    outer = tensor.stride()[:-2]
    has_unit = len(strides) < 2
    return (
        has_unit
        and all(each * tensor.itemsize % RANK_BYTES == 0 for each in (*strides, *outer))
        and (tensor.data_ptr() % RANK_BYTES == 0)
    )


# experts, inputs and outputs of the products that are compared, and the rows of each expert
_PROBE_SIZES, _PROBE_ROWS = (64, 48), (0, 5, 0, 17, 1, 0)
_LARGEST_ERROR = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-2}


def grouped_problem(device: torch.device, dtype: torch.dtype) -> str:
    """Returns why grouped products of this torch cannot be used, or differ from single ones; empty if they are right.

    Some builds silently give wrong results for a transposed view (pytorch#186365).
    """
    if dtype not in _LARGEST_ERROR:
        return f"torch has no grouped products in {dtype}"
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    num_inputs, num_outputs = _PROBE_SIZES
    experts_S1 = torch.arange(len(_PROBE_ROWS)).repeat_interleave(torch.tensor(_PROBE_ROWS))[:, None].to(device)
    x_SK, dy_SN = drawn(len(experts_S1), num_inputs), drawn(len(experts_S1), num_outputs)
    adapter = drawn(len(_PROBE_ROWS) * 8, num_inputs), drawn(num_outputs, len(_PROBE_ROWS) * 8)
    plain_ENK = drawn(len(_PROBE_ROWS), num_outputs, num_inputs)
    errors = []
    for weight_EKN in (plain_ENK.transpose(1, 2), plain_ENK.transpose(1, 2).contiguous()):
        found = []
        for is_grouped in (True, False):
            rows = Rows(experts_S1, len(_PROBE_ROWS), is_grouped)
            matrices = ExpertMatrices(weight_EKN, dtype, None, *adapter, 1.0, len(_PROBE_ROWS))
            products, sums, part = _Products(matrices, slice(0, len(_PROBE_ROWS))), _AdapterGradients(matrices), rows.all
            try:
                y_SN, low_SR = products.forward(x_SK, part)
                dlow_SR = products.low_gradient(dy_SN, part)
                assert low_SR is not None and dlow_SR is not None
                dx_SK = products.input_gradient(dy_SN, dlow_SR, part)
                sums.add(products, part, x_SK, dlow_SR, dy_SN, low_SR)
                found.append((y_SN, dx_SK, *sums.gradients()))
            except (RuntimeError, NotImplementedError) as error:
                return str(error).strip().splitlines()[0][:200]
        errors += [float((ours - right).norm() / right.norm()) for ours, right in zip(*found, strict=True)]
    if not max(errors) <= _LARGEST_ERROR[dtype]:
        return f"grouped products differ from single ones by {max(errors):.1g} of a norm in {dtype}"
    return ""
