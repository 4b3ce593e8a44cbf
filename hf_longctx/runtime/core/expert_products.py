"""Products of tokens with the frozen matrices of their experts and with low-rank adapters beside these, as autograd nodes.

Rows are the copies of a token that its experts read, sorted by expert. For the rows of expert e

    y = x W_e + b_e + scaling * (x A_e') B_e'

so no sum W + scaling * B A is made. An MLP of experts is two nodes with the class's activation between them. `enter` gathers the
rows and multiplies them: it saves hidden states as the layer has them, not gathered. `leave` multiplies, weighs and adds up the
k rows of a token: it saves its input, not the k outputs that the gradient of a routing weight w seems to need. For with a row's
output z = i W + b + scaling * (i A') B' and y = sum of w z, that gradient is

    <dy, z> = <i, dy W' + scaling * (dy B) A> + <dy, b> = <i, d> + <dy, b>

where w d is the gradient of i, which backward makes anyway. Both nodes save the rows' products with A. They save no copies of A
and B: backward rounds and rearranges the weights again.

An adapter lies in memory as PEFT has it. A is [E r, K], expert by expert. B is [N, r E], and its fastest index is the expert.
Experts without rows get gradients of zeros.

Shapes: T tokens, k experts of each, S = T k rows, E experts whose rows there are, K inputs and N outputs of a matrix, r features
of an adapter, R = r rounded up to 16 bytes, as CUDA's grouped products need.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_longctx.plan.core.sharding import RANK_BYTES, UNPACKED_AT_ONCE, UNPACKED_BYTES


class Rows:
    """Rows of the experts that tokens have chosen, sorted by expert, tokens in order.

    chosen_Tk: experts of every token. is_grouped: whether the device's grouped products are right (`grouped_problem`); otherwise
    there is one product for each expert, and the host waits once for their numbers of rows.
    """

    def __init__(self, chosen_Tk: Tensor, num_experts: int, is_grouped: bool) -> None:
        self.num_tokens, self.num_chosen, self.is_grouped = *chosen_Tk.shape, is_grouped
        self.experts_S, order_S = torch.sort(chosen_Tk.reshape(-1), stable=True)
        counts_E = torch.zeros(num_experts, dtype=torch.int64, device=order_S.device)
        counts_E.scatter_add_(0, self.experts_S, torch.ones_like(self.experts_S))
        self.ends_E = counts_E.cumsum(0).to(torch.int32)
        # token of a row, and the rows of a token
        self.tokens_S = order_S // self.num_chosen
        self.rows_Tk = torch.empty_like(order_S)
        self.rows_Tk[order_S] = torch.arange(len(order_S), device=order_S.device)
        self.rows_Tk = self.rows_Tk.view(-1, self.num_chosen)

    @cached_property
    def bounds(self) -> list[int]:
        """First row of every expert, and the number of rows, on the host."""
        return [0, *self.ends_E.tolist()]

    def bounds_of(self, experts: slice) -> list[int]:
        """First row of some experts, and the number of their rows, counted from the first of them, on the host."""
        bounds = self.bounds[experts.start or 0 : None if experts.stop is None else experts.stop + 1]
        return [bound - bounds[0] for bound in bounds]

    def ends_of(self, experts: slice) -> Tensor:
        """Ends of the rows of some experts, counted from the first of them."""
        return self.ends_E[experts] - self.bounds[experts.start] if experts.start else self.ends_E[experts]

    def summed(self, values_SN: Tensor, weights_Tk: Tensor | None = None) -> Tensor:
        """Returns the weighted sums [T, N] of the rows of each token, in at least fp32."""
        wide = torch.promote_types(values_SN.dtype, torch.float32)
        sums_TN = values_SN.new_zeros(self.num_tokens, values_SN.shape[1], dtype=wide)
        for choice in range(self.num_chosen):
            of_choice_TN = values_SN[self.rows_Tk[:, choice]]
            if weights_Tk is None:
                sums_TN += of_choice_TN
            else:
                sums_TN.addcmul_(of_choice_TN.to(wide), weights_Tk[:, choice, None].to(wide))
        return sums_TN


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
FOUR_BIT_BLOCKS = {"mxfp4": 32, "nf4": 64}
FourBits = Literal["mxfp4", "nf4"]


@dataclass(frozen=True, slots=True)
class PackedMatrices:
    """Matrices of experts in four bits, which are unpacked some at a time, in forward and again in backward."""

    # two codes to a byte along the inputs, the first in the lower half; H = K / 2
    codes_ENH: Tensor
    # scales of equal blocks of inputs as bytes: powers of two with a bias of 127 for MXFP4, bf16 for NF4
    scales_ENG: Tensor
    kind: FourBits
    # experts to unpack at a time
    at_once: int = UNPACKED_AT_ONCE

    def __len__(self) -> int:
        return len(self.codes_ENH)

    @property
    def unpacked_bytes(self) -> int:
        """Most bytes that a product holds of them: unpacked ones in two bytes, as made, scaled and indexed."""
        _, outputs, half = self.codes_ENH.shape
        return min(self.at_once, len(self)) * outputs * 2 * half * UNPACKED_BYTES

    def unpacked(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Returns the matrices [stop - start, K, N] of some experts."""
        codes_ENH, scales_ENG = self.codes_ENH[start:stop], self.scales_ENG[start:stop]
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


def packed(weight_EKN: Tensor, kind: FourBits) -> tuple[Tensor, Tensor]:
    """Returns codes and scales (`PackedMatrices`) of the nearest values; exact for weights that were unpacked from MXFP4.

    Blocks are smaller if the inputs are no multiple of them. Raises ValueError for an odd number of inputs.
    """
    num_inputs = weight_EKN.shape[1]
    if num_inputs % 2:
        raise ValueError(f"two codes of four bits share a byte, but experts have {num_inputs} inputs; keep them in bfloat16")
    block = math.gcd(FOUR_BIT_BLOCKS[kind], num_inputs)
    blocks = weight_EKN.transpose(1, 2).float().unflatten(-1, (-1, block))
    largest = blocks.abs().amax(-1)
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

    # whole, with any strides, or in four bits
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


def enter(x_TK: Tensor, matrices: ExpertMatrices, rows: Rows) -> Tensor:
    """Returns the products [S, N] of the rows of tokens, in the dtype of the frozen weights."""
    result: Tensor = _Enter.apply(x_TK.to(matrices.dtype), matrices.first, matrices.second, *_held(matrices), rows)
    return result


def leave(x_SK: Tensor, weights_Tk: Tensor, matrices: ExpertMatrices, rows: Rows) -> Tensor:
    """Returns the weighted sum [T, N] of the products of every token's rows, in the dtype of the frozen weights."""
    x_SK = x_SK.to(matrices.dtype)
    result: Tensor = _Leave.apply(x_SK, weights_Tk, matrices.first, matrices.second, *_held(matrices), rows)
    return result


def _held(matrices: ExpertMatrices) -> tuple[Tensor | None, ExpertMatrices]:
    """Returns a whole weight, which the node saves, and the matrices."""
    return matrices.weight if isinstance(matrices.weight, Tensor) else None, matrices


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TK: Tensor, first: Tensor | None, second: Tensor | None, weight: Any, matrices: ExpertMatrices, rows: Rows
    ) -> Tensor:
        products = _Products(weight, first, second, matrices, rows)
        y_SN, low_SR = products.forward(x_TK[rows.tokens_S])
        ctx.matrices, ctx.rows = matrices, rows
        ctx.save_for_backward(x_TK if low_SR is not None else None, low_SR, first, second, weight)
        return y_SN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_SN: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_TK, low_SR, first, second, weight = ctx.saved_tensors
        needs_x, *needs_adapter = ctx.needs_input_grad[:3]
        rows, products = ctx.rows, _Products(weight, first, second, ctx.matrices, ctx.rows)
        gradient_SN = gradient_SN.contiguous()
        dlow_SR = products.low_gradient(gradient_SN)
        dx_TK = rows.summed(products.input_gradient(gradient_SN, dlow_SR)).to(gradient_SN.dtype) if needs_x else None
        dfirst = dsecond = None
        if dlow_SR is not None and any(needs_adapter):
            dfirst, dsecond = products.adapter_gradients(x_TK[rows.tokens_S], dlow_SR, gradient_SN, low_SR)
        return dx_TK, dfirst, dsecond, None, None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_SK: Tensor,
        weights_Tk: Tensor,
        first: Tensor | None,
        second: Tensor | None,
        weight: Tensor | None,
        matrices: ExpertMatrices,
        rows: Rows,
    ) -> Tensor:
        y_SN, low_SR = _Products(weight, first, second, matrices, rows).forward(x_SK)
        ctx.matrices, ctx.rows = matrices, rows
        needs_x = low_SR is not None or ctx.needs_input_grad[1]
        ctx.save_for_backward(x_SK if needs_x else None, low_SR, first, second, weight, weights_Tk)
        return rows.summed(y_SN, weights_Tk).to(matrices.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TN: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_SK, low_SR, first, second, weight, weights_Tk = ctx.saved_tensors
        needs_x, needs_weights, *needs_adapter = ctx.needs_input_grad[:4]
        rows, products = ctx.rows, _Products(weight, first, second, ctx.matrices, ctx.rows)
        weights_S1 = weights_Tk.new_empty(len(rows.tokens_S), 1)
        weights_S1[rows.rows_Tk.view(-1)] = weights_Tk.reshape(-1, 1)
        weights_S1 = weights_S1.to(ctx.matrices.dtype)
        # gradient of every row's output, before it was weighed
        gradient_SN = gradient_TN[rows.tokens_S]
        dlow_SR = products.low_gradient(gradient_SN)
        dweights_Tk = dfirst = dsecond = None
        dx_SK = products.input_gradient(gradient_SN, dlow_SR)
        if needs_weights:
            wide = torch.promote_types(dx_SK.dtype, torch.float32)
            dweights_S = (x_SK * dx_SK).sum(1, dtype=wide)
            if ctx.matrices.bias_EN is not None:
                dweights_S += (gradient_SN * ctx.matrices.bias_EN[rows.experts_S]).sum(1, dtype=wide)
            dweights_Tk = dweights_S[rows.rows_Tk].to(weights_Tk.dtype)
        if dlow_SR is not None and any(needs_adapter):
            dlow_SR, low_SR = dlow_SR * weights_S1, low_SR * weights_S1
            dfirst, dsecond = products.adapter_gradients(x_SK, dlow_SR, gradient_SN, low_SR)
        return dx_SK.mul_(weights_S1) if needs_x else None, dweights_Tk, dfirst, dsecond, None, None, None


class _Products:
    """The products of one call, forward and backward; weights of the adapter are cast and rearranged once for each."""

    def __init__(
        self, weight: Tensor | None, first: Tensor | None, second: Tensor | None, matrices: ExpertMatrices, rows: Rows
    ) -> None:
        self.weight: Tensor | PackedMatrices = matrices.weight if weight is None else weight
        self.first, self.second, self.matrices, self.rows = first, second, matrices, rows

    @property
    def _own(self) -> slice:
        return slice(self.matrices.start, self.matrices.start + len(self.weight))

    @cached_property
    def _first_ERK(self) -> Tensor:
        assert self.first is not None
        own_ErK = self.first.view(self.matrices.num_all, -1, self.first.shape[1])[self._own].to(self.matrices.dtype)
        return F.pad(own_ErK, (0, 0, 0, _padding(own_ErK.shape[1], own_ErK.dtype)))

    @cached_property
    def _second_ENR(self) -> Tensor:
        assert self.second is not None
        own_ENr = self.second.view(len(self.second), -1, self.matrices.num_all)[..., self._own].permute(2, 0, 1)
        own_ENr = own_ENr.to(self.matrices.dtype)
        return F.pad(own_ENr, (0, _padding(own_ENr.shape[2], own_ENr.dtype))).contiguous()

    def forward(self, x_SK: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the products [S, N], and those with A, unscaled, [S, R]."""
        y_SN, low_SR = self._multiply_frozen(x_SK, is_backward=False), None
        if self.first is not None:
            low_SR = self._multiply(x_SK, self._first_ERK.transpose(1, 2))
            y_SN.add_(self._multiply(low_SR, self._second_ENR.transpose(1, 2)), alpha=self.matrices.scaling)
        if self.matrices.bias_EN is not None:
            y_SN += self.matrices.bias_EN[self.rows.experts_S]
        return y_SN, low_SR

    def low_gradient(self, gradient_SN: Tensor) -> Tensor | None:
        """Returns the gradient [S, R] of the products with A; None without an adapter."""
        return None if self.second is None else self._multiply(gradient_SN, self._second_ENR).mul_(self.matrices.scaling)

    def input_gradient(self, gradient_SN: Tensor, dlow_SR: Tensor | None) -> Tensor:
        """Returns the gradient [S, K] of the rows."""
        dx_SK = self._multiply_frozen(gradient_SN, is_backward=True)
        return dx_SK if dlow_SR is None else dx_SK.add_(self._multiply(dlow_SR, self._first_ERK))

    def adapter_gradients(self, x_SK: Tensor, dlow_SR: Tensor, gradient_SN: Tensor, low_SR: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradients of A and B as they lie in memory."""
        assert self.first is not None and self.second is not None
        num_all, rank = self.matrices.num_all, len(self.first) // self.matrices.num_all
        dfirst, dsecond = torch.zeros_like(self.first), torch.zeros_like(self.second)
        dfirst.view(num_all, rank, -1)[self._own] = self._sums(dlow_SR, x_SK)[:, :rank]
        of_rows_ENR = self._sums(gradient_SN, low_SR).mul_(self.matrices.scaling)
        dsecond.view(-1, rank, num_all)[..., self._own] = of_rows_ENR[..., :rank].permute(1, 2, 0)
        return dfirst, dsecond

    def _multiply_frozen(self, x_SK: Tensor, is_backward: bool) -> Tensor:
        """Returns the rows of each expert times its frozen matrix, or its transpose in backward."""
        if isinstance(self.weight, Tensor):
            return self._multiply(x_SK, self.weight.transpose(1, 2) if is_backward else self.weight)
        parts, bounds = [], self.rows.bounds
        for first in range(0, len(self.weight), self.weight.at_once):
            last = min(first + self.weight.at_once, len(self.weight))
            if (start := bounds[first]) == (stop := bounds[last]):
                continue
            weight = self.weight.unpacked(first, last, self.matrices.dtype)
            weight, own = weight.transpose(1, 2) if is_backward else weight, slice(first, last)
            parts.append(self._multiply(x_SK[start:stop], weight, own))
        return torch.cat(parts)

    def _multiply(self, x_SK: Tensor, weight_EKN: Tensor, own: slice = slice(None)) -> Tensor:
        """Returns the rows of some experts (all by default) times their matrices."""
        if self.rows.is_grouped and _is_aligned(x_SK) and _is_aligned(weight_EKN):
            return F.grouped_mm(x_SK, weight_EKN, offs=self.rows.ends_of(own))
        y_SN = x_SK.new_empty(len(x_SK), weight_EKN.shape[2])
        for weight_KN, (start, stop) in zip(weight_EKN, pairwise(self.rows.bounds_of(own)), strict=True):
            if stop > start:
                torch.mm(x_SK[start:stop], weight_KN, out=y_SN[start:stop])
        return y_SN

    def _sums(self, left_SM: Tensor, right_SN: Tensor) -> Tensor:
        """Returns the sums [E, M, N] of left' right over the rows of each expert, zeros for an expert without rows."""
        if self.rows.is_grouped and _is_aligned(left_SM) and _is_aligned(right_SN):
            sums_EMN = F.grouped_mm(left_SM.T, right_SN, offs=self.rows.ends_E)
            # not every version writes them for experts without rows
            has_none_E = self.rows.ends_E.diff(prepend=self.rows.ends_E.new_zeros(1)) == 0
            return sums_EMN.masked_fill_(has_none_E[:, None, None], 0)
        sums_EMN = left_SM.new_zeros(len(self.weight), left_SM.shape[1], right_SN.shape[1])
        for sums_MN, (start, stop) in zip(sums_EMN, pairwise(self.rows.bounds), strict=True):
            torch.mm(left_SM[start:stop].T, right_SN[start:stop], out=sums_MN)
        return sums_EMN


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
            products = _Products(weight_EKN, *adapter, matrices, rows)
            try:
                y_SN, low_SR = products.forward(x_SK)
                dlow_SR = products.low_gradient(dy_SN)
                assert low_SR is not None and dlow_SR is not None
                dx_SK = products.input_gradient(dy_SN, dlow_SR)
                found.append((y_SN, dx_SK, *products.adapter_gradients(x_SK, dlow_SR, dy_SN, low_SR)))
            except (RuntimeError, NotImplementedError) as error:
                return str(error).strip().splitlines()[0][:200]
        errors += [float((ours - right).norm() / right.norm()) for ours, right in zip(*found, strict=True)]
    if not max(errors) <= _LARGEST_ERROR[dtype]:
        return f"grouped products differ from single ones by {max(errors):.1g} of a norm in {dtype}"
    return ""
