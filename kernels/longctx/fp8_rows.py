"""Rounds rows to fp8 (e4m3), each with a scale of its own: its largest element becomes the largest number of fp8.

The kernel reads a row twice, the second time from cache, and writes it once: three bytes of memory for an element in bf16. A row
may lie in several parts, as gradients of projections of one input do, whose columns are multiplied by factors first and rounded
to the dtype of the parts. Division and all roundings are those of IEEE 754, so results equal those of plain torch, bit for bit.

Shapes: T rows, n columns of a part, N columns of all parts.
"""

# arguments of Triton kernels have no Python types
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_longctx.kernels import reference
from hf_longctx.kernels.jit import device_of, jit, launches_directly, next_power_of_2, tl

# columns that a program takes at once, at most
_COLUMNS = 4096


@jit()
def _loaded(part, factors, row, columns, size, HAS_FACTORS: tl.constexpr):
    """Columns of a row times their factors, as fp32."""
    within = columns < size
    x = tl.load(part + row * size + columns, mask=within, other=0.0)
    if HAS_FACTORS:
        scaled = x.to(tl.float32) * tl.load(factors + columns, mask=within, other=0.0)
        x = scaled.to(part.dtype.element_ty)
    return x.to(tl.float32)


@jit()
def _round_kernel(
    parts, factors, values, scales, sizes, num_columns,
    NUM_PARTS: tl.constexpr, HAS_FACTORS: tl.constexpr, LEAST: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rounds one row per program."""
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros((BLOCK,), dtype=tl.float32)
    is_nan = tl.zeros((BLOCK,), dtype=tl.int32)
    for i in tl.static_range(NUM_PARTS):
        for start in range(0, sizes[i], BLOCK):
            x = _loaded(parts[i], factors[i], row, start + tl.arange(0, BLOCK), sizes[i], HAS_FACTORS)
            most = tl.maximum(most, tl.abs(x))
            is_nan = tl.maximum(is_nan, (x != x).to(tl.int32))
    # a maximum may leave NaN out
    scale = tl.math.div_rn(tl.maximum(tl.max(most, 0), LEAST), LARGEST)
    scale = tl.where(tl.max(is_nan, 0) > 0, float("nan"), scale)
    tl.store(scales + row, scale)
    values += row * num_columns
    for i in tl.static_range(NUM_PARTS):
        for start in range(0, sizes[i], BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = _loaded(parts[i], factors[i], row, columns, sizes[i], HAS_FACTORS)
            rounded = tl.math.div_rn(x, tl.zeros((BLOCK,), dtype=tl.float32) + scale).to(tl.float8e4nv)
            tl.store(values + columns, rounded, mask=columns < sizes[i])
        values += sizes[i]


def launch_round_rows(parts: Sequence[Tensor], factors: Sequence[Tensor], values_TN: Tensor, scale_T1: Tensor) -> None:
    """Computes `reference.round_rows_` with the Triton kernel; by plain torch in fp64."""
    if not values_TN.numel() or parts[0].dtype == torch.float64:
        return reference.round_rows_(parts, factors, values_TN, scale_T1)
    sizes = tuple(part.shape[1] for part in parts)
    with device_of(values_TN):
        _round_kernel[(len(values_TN),)](
            tuple(part.contiguous() for part in parts), tuple(each.contiguous() for each in factors) or (scale_T1,) * len(parts),
            values_TN, scale_T1, sizes, values_TN.shape[1],
            NUM_PARTS=len(parts), HAS_FACTORS=bool(factors), LEAST=reference.FP8_LEAST, LARGEST=reference.FP8_LARGEST,
            BLOCK=min(_COLUMNS, next_power_of_2(max(sizes))),
        )  # fmt: skip


@torch.library.custom_op("hf_longctx::round_rows_", mutates_args=("values", "scale"), device_types="cpu")
def _round_rows(parts: Sequence[Tensor], factors: Sequence[Tensor], values: Tensor, scale: Tensor) -> None:
    reference.round_rows_(parts, factors, values, scale)


_round_rows.register_kernel("cuda")(launch_round_rows)


@_round_rows.register_fake
def _(parts: Sequence[Tensor], factors: Sequence[Tensor], values: Tensor, scale: Tensor) -> None:
    return None


@torch.no_grad()
def round_rows(parts: Sequence[Tensor], factors: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor]:
    """Returns parts [T, n] of rows side by side, rounded to fp8 [T, N], and the scales of rows [T, 1] in fp32.

    factors: of the columns of each part, [n, 1] in fp32; none without. Elements of at least 2^-14 of their row's largest have a
    relative error of at most 1/16, smaller ones an error of at most 2^-10 scales. A row with NaN or infinity becomes NaN in part,
    and changes no other row.
    """
    first = parts[0]
    values_TN = torch.empty(len(first), sum(part.shape[1] for part in parts), dtype=reference.FP8, device=first.device)
    scale_T1 = torch.empty(len(first), 1, device=first.device)
    round_ = launch_round_rows if launches_directly(first) else _round_rows
    round_(list(parts), list(factors), values_TN, scale_T1)
    return values_TN, scale_T1
