"""Products with frozen matrices that are stored in eight bits: elements in fp8 (e4m3), and scales in fp32.

With one scale for each row of a matrix W, products run in fp8, forward and backward, from one copy of W:

    y  = (x8 W8') * sx * sw + b          x8, sx: x, each token rounded with a scale of its own; b: a bias, if there is one
    dx = (g8 W8) * sg                    g8, sg: dy * sw, whose tokens are rounded in the same way

In backward the scales of W lie along the summed dimension, so dy is multiplied by them before it is rounded. Hopper's operators
want the summed dimension contiguous, so the bytes of W are put into the other order, one matrix at a time; those of matrices that
read one input are stacked, which makes their sum of gradients one product.

No scale is shared by two tokens. So a token's numbers do not depend on the pack, slice or tile in which it is computed.

With one scale for each block of W, as in published checkpoints, W is unpacked to the dtype of the input, one matrix at a time:
scales by row would round it a second time.

Shapes: T tokens of this rank, C input features, N output features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_longctx.runtime.core.torch_versions import fp8_product

DTYPE = torch.float8_e4m3fn
# the largest number of the dtype
_LARGEST = torch.finfo(DTYPE).max
# least largest element of a row, below which its scale would be no normal number
_LEAST = _LARGEST * torch.finfo(torch.float32).tiny
# elements of gradients that are multiplied at once, and that are rounded or unpacked at once, which takes copies
MULTIPLIED, ROUNDED = 2**27, 2**24
# operators take matrices whose sizes are multiples of this
SIZES = 16
# dtypes of inputs and results of products in fp8
RESULTS = (torch.bfloat16, torch.float32)


def rows_in_fp8(x_TC: Tensor) -> tuple[Tensor, Tensor]:
    """Returns rows rounded to fp8 [T, C], and their scales [T, 1] in fp32: a row's largest element becomes fp8's largest number.

    Elements of at least 2^-14 of the row's largest have a relative error of at most 1/16, smaller ones an error of at most 2^-10
    scales. A row with NaN or infinity becomes NaN in part, and changes no other row.
    """
    values_TC = torch.empty(x_TC.shape, dtype=DTYPE, device=x_TC.device)
    scale_T1 = torch.empty(len(x_TC), 1, device=x_TC.device)
    for rows in _blocks(len(x_TC), x_TC.shape[1], ROUNDED):
        _round(x_TC[rows], values_TC[rows], scale_T1[rows])
    return values_TC, scale_T1


def _round(x_TC: Tensor, values_TC: Tensor, scale_T1: Tensor) -> None:
    largest_T1 = torch.linalg.vector_norm(
        x_TC, math.inf, dim=1, keepdim=True, dtype=torch.promote_types(x_TC.dtype, torch.float32)
    )
    scale_T1.copy_(largest_T1.clamp(min=_LEAST) / _LARGEST)
    torch.div(x_TC, scale_T1, out=values_TC)


def _blocks(num_rows: int, size: int, elements: int) -> Iterator[slice]:
    """Yields ranges of rows with at most so many elements, in multiples of 256 rows if that many have fewer."""
    count = max(1, elements // max(1, size))
    count -= count % 256 if count > 256 else 0
    return (slice(start, min(start + count, num_rows)) for start in range(0, num_rows, count))


def multiply(
    x8_TC: Tensor, scale_T1: Tensor, bytes_NC: Tensor, scale_N1: Tensor, dtype: torch.dtype, bias_N: Tensor | None = None
) -> Tensor:
    """Returns the product of rounded tokens with a rounded matrix, plus a bias in `dtype`: [T, N], in bf16 or fp32."""
    # the CPU's operator computes by others, in which autocast would round its products
    with torch.autocast(x8_TC.device.type, enabled=False):
        return fp8_product(x8_TC, bytes_NC.view(DTYPE).T, (scale_T1, scale_N1.T), dtype, bias_N)


class RoundedInput:
    """An input of products [T, C], which is rounded once for all of them, as far as they read it."""

    def __init__(self, x_TC: Tensor) -> None:
        if x_TC.dtype not in RESULTS:
            raise ValueError(
                f"weights in fp8 got an input in {x_TC.dtype}, but their products are in bf16 or fp32; load the model in "
                f"bfloat16, or train with bf16=True"
            )
        self.x_TC = x_TC
        self._rounded: tuple[Tensor, Tensor] | None = None

    def times(self, bytes_NC: Tensor, scale_N1: Tensor, bias_N: Tensor | None, count: int) -> Tensor:
        """Returns the output of the first `count` tokens."""
        if self._rounded is None or len(self._rounded[0]) < count:
            self._rounded = rows_in_fp8(self.x_TC[:count])
        values_TC, scale_T1 = self._rounded
        return multiply(values_TC[:count], scale_T1[:count], bytes_NC, scale_N1, self.x_TC.dtype, bias_N)


def input_gradient(gradients: Sequence[Tensor], matrices: Sequence[Tensor], scales: Sequence[Tensor]) -> Tensor:
    """Returns the gradient of the input of several products [T, C], given those of their outputs, as one product.

    The bytes of all matrices exist once more in the other order; rounded gradients exist for some tokens at a time.
    """
    (num_tokens, _), num_features, dtype = gradients[0].shape, matrices[0].shape[1], gradients[0].dtype
    sizes = [len(each) for each in matrices]
    turned_CN = torch.empty(num_features, sum(sizes), dtype=torch.uint8, device=matrices[0].device)
    for part_Cn, bytes_nC in zip(turned_CN.split(sizes, 1), matrices, strict=True):
        part_Cn.copy_(bytes_nC.T)
    ones_C1 = torch.ones(num_features, 1, device=turned_CN.device)
    dx_TC = gradients[0].new_empty(num_tokens, num_features)
    for tokens in _blocks(num_tokens, sum(sizes), MULTIPLIED):
        rounded = _rounded_gradients([each[tokens] for each in gradients], scales)
        dx_TC[tokens] = multiply(*rounded, turned_CN, ones_C1, dtype)
    return dx_TC


def _rounded_gradients(gradients: Sequence[Tensor], scales: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Rounds gradients of outputs times the scales of their matrices, side by side; some tokens at a time in their own dtype."""
    sizes = [each.shape[1] for each in gradients]
    values_TN = gradients[0].new_empty(len(gradients[0]), sum(sizes), dtype=DTYPE)
    scale_T1 = gradients[0].new_empty(len(values_TN), 1, dtype=torch.float32)
    for tokens in _blocks(len(values_TN), sum(sizes), ROUNDED):
        scaled_TN = gradients[0].new_empty(values_TN[tokens].shape)
        for part_Tn, gradient_Tn, scale_n1 in zip(scaled_TN.split(sizes, 1), gradients, scales, strict=True):
            torch.mul(gradient_Tn[tokens], scale_n1.T, out=part_Tn)
        _round(scaled_TN, values_TN[tokens], scale_T1[tokens])
    return values_TN, scale_T1


def unpacked(bytes_NC: Tensor, scale: Tensor, block: tuple[int, int] | None, dtype: torch.dtype) -> Tensor:
    """Returns a matrix of bytes [N, C] in `dtype`; scale: of rows [N, 1], or of blocks [ceil(N / rows), ceil(C / columns)]."""
    num_rows, num_columns = bytes_NC.shape
    height, width = block or (1, num_columns)
    result_NC = torch.empty(bytes_NC.shape, dtype=dtype, device=bytes_NC.device)
    # some bands of blocks at a time, in at least fp32
    band = max(1, ROUNDED // (height * num_columns)) * height
    for start in range(0, num_rows, band):
        rows = slice(start, min(start + band, num_rows))
        scales_nb = scale[start // height : -(-rows.stop // height)].repeat_interleave(height, 0)[: rows.stop - start]
        values_nC = bytes_NC[rows].view(DTYPE).to(torch.promote_types(dtype, torch.float32))
        result_NC[rows] = values_nC * scales_nb.repeat_interleave(width, 1)[:, :num_columns]
    return result_NC
