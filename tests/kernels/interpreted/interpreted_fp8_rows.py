"""The kernel that rounds rows to fp8, in Triton's interpreter, against plain torch; `test_interpreted.py` runs this file.

The interpreter truncates to bf16, and does not carry where it rounds to fp8, so these casts are torch's here.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_longctx.kernels import fp8_rows as op
from hf_longctx.kernels import reference

INTERPRETER = importlib.import_module("triton.runtime.interpreter")
TL = importlib.import_module("triton.language")
# rows, and columns of every part: one block, several, sizes that fill none; three siblings as queries, keys and values
SHAPES = [(1, [16]), (5, [48]), (3, [4096 + 80]), (2, [64, 16, 32]), (4, [4096, 8192 + 16])]


@pytest.fixture(autouse=True)
def casts(monkeypatch: pytest.MonkeyPatch) -> None:
    convert = INTERPRETER._convert_float

    def rounding(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if source != TL.float32 or target not in (TL.bfloat16, TL.float8e4nv):
            return convert(data, source, target, mode)
        given = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
        if target == TL.bfloat16:
            return given.bfloat16().view(torch.int16).numpy().view(np.uint16)
        return given.to(reference.FP8).view(torch.uint8).numpy()

    monkeypatch.setattr(INTERPRETER, "_convert_float", rounding)


def drawn(num_rows: int, sizes: list[int], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Parts, whose rows differ in size by orders of magnitude, and factors."""
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.logspace(0, -25, num_rows)[:, None]
    parts = [(torch.randn(num_rows, size, generator=generator) * rows).to(dtype) for size in sizes]
    return parts, [torch.rand(size, 1, generator=generator) * 1e-3 for size in sizes]


def assert_equal(parts: list[Tensor], factors: list[Tensor]) -> None:
    sizes = len(parts[0]), sum(part.shape[1] for part in parts)
    (values, scale), (expected, scales) = (
        (torch.full(sizes, 3.0).to(reference.FP8), torch.full((sizes[0], 1), torch.nan)) for _ in range(2)
    )
    op.launch_round_rows(parts, factors, values, scale)
    reference.round_rows_(parts, factors, expected, scales)
    assert torch.equal(scale.view(torch.int32), scales.view(torch.int32))
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("has_factors", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_those_of_plain_torch_bit_for_bit(shape: tuple[int, list[int]], dtype: torch.dtype, has_factors: bool) -> None:
    parts, factors = drawn(*shape, dtype)
    assert_equal(parts, factors if has_factors else [])


def test_values_half_way_between_two_numbers_go_to_the_even_one() -> None:
    # with a largest element of 448 the scale is one
    row = torch.tensor([448.0, *(1 + (2 * n + 1) / 16 for n in range(8)), *(n * 2.0**-10 for n in range(7))])
    assert_equal([torch.stack([row, -row]).float()], [])


def test_zeros_infinity_and_nan_stay_in_their_rows() -> None:
    parts, _ = drawn(6, [32, 16], torch.float32)
    for part in parts:
        part[1] = 0.0
    parts[0][2, 5], parts[1][3, 7], parts[0][4, 0] = float("nan"), float("nan"), float("inf")
    sizes = 6, 48
    values, scale = torch.empty(sizes, dtype=reference.FP8), torch.empty(6, 1)
    op.launch_round_rows(parts, [], values, scale)
    expected, scales = torch.empty(sizes, dtype=reference.FP8), torch.empty(6, 1)
    reference.round_rows_(parts, [], expected, scales)
    assert scale.isnan().flatten().tolist() == scales.isnan().flatten().tolist() == [False, False, True, True, False, False]
    # the sign of NaN has no meaning
    assert torch.equal(values.float().nan_to_num(1e9), expected.float().nan_to_num(1e9))
    assert torch.equal(scale.nan_to_num(1e9), scales.nan_to_num(1e9))


def test_parts_may_be_cut_from_wider_rows() -> None:
    wide, factors = drawn(3, [96], torch.bfloat16)[0][0], drawn(3, [32, 16], torch.float32)[1]
    assert_equal([wide[:, 16:48], wide[:, 80:]], factors)
