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

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_longctx.kernels.fp8_rows import round_rows
from hf_longctx.kernels.reference import FP8, row_blocks
from hf_longctx.runtime.core.torch_versions import fp8_product

DTYPE = FP8
# elements of gradients that are multiplied at once, and that are unpacked at once, which takes copies
MULTIPLIED, UNPACKED = 2**27, 2**24
# operators take matrices whose sizes are multiples of this
SIZES = 16
# dtypes of inputs and results of products in fp8
RESULTS = (torch.bfloat16, torch.float32)


def rows_in_fp8(x_TC: Tensor) -> tuple[Tensor, Tensor]:
    """Returns rows rounded to fp8 [T, C], and their scales [T, 1] in fp32, as `round_rows` does."""
    return round_rows([x_TC])


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
    for tokens in row_blocks(num_tokens, sum(sizes), MULTIPLIED):
        values_TN, scale_T1 = round_rows([each[tokens] for each in gradients], scales)
        dx_TC[tokens] = multiply(values_TN, scale_T1, turned_CN, ones_C1, dtype)
    return dx_TC


def unpacked(bytes_NC: Tensor, scale: Tensor, block: tuple[int, int] | None, dtype: torch.dtype) -> Tensor:
    """Returns a matrix of bytes [N, C] in `dtype`; scale: of rows [N, 1], or of blocks [ceil(N / rows), ceil(C / columns)]."""
    num_rows, num_columns = bytes_NC.shape
    height, width = block or (1, num_columns)
    result_NC = torch.empty(bytes_NC.shape, dtype=dtype, device=bytes_NC.device)
    # some bands of blocks at a time, in at least fp32
    band = max(1, UNPACKED // (height * num_columns)) * height
    for start in range(0, num_rows, band):
        rows = slice(start, min(start + band, num_rows))
        scales_nb = scale[start // height : -(-rows.stop // height)].repeat_interleave(height, 0)[: rows.stop - start]
        values_nC = bytes_NC[rows].view(DTYPE).to(torch.promote_types(dtype, torch.float32))
        result_NC[rows] = values_nC * scales_nb.repeat_interleave(width, 1)[:, :num_columns]
    return result_NC
