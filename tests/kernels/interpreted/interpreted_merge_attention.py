"""The merge kernel in Triton's interpreter against the reference; `test_interpreted.py` runs this file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers.measures.triton_runs import poisoned_memory
from torch import Tensor

from hf_longctx.kernels import merge_attention as op
from hf_longctx.kernels import reference

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# heads, tokens, head size: one of everything, sizes that are no power of two, more tokens than one program takes
SHAPES = [(1, 1, 1), (3, 5, 8), (2, 7, 24), (7, 1, 64), (1, 33, 80), (2, 70, 40)]


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    with poisoned_memory():
        yield


def two_results(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Two random outputs as transposed views of [T, H, D], and LSEs cut from longer rows; some tokens saw no key."""
    num_heads, num_tokens, head_dim = shape
    generator = torch.Generator().manual_seed(sum(shape))
    wide = reference.wide_dtype(dtype)
    outputs, lses = [], []
    for i in range(2):
        output = torch.randn(num_tokens, num_heads, head_dim, generator=generator, dtype=wide).to(dtype).transpose(0, 1)
        lse = 3 * torch.randn(num_heads, num_tokens + 3, generator=generator, dtype=wide)[:, 2 : 2 + num_tokens]
        lse[:, i::5] = float("-inf")
        lse[:, 4::5] = float("-inf")
        output.masked_fill_((lse == float("-inf")).unsqueeze(-1), float("nan"))
        outputs.append(output)
        lses.append(lse)
    return outputs, lses


def assert_close(found: Tensor, expected: Tensor) -> None:
    # sums of two terms in another order, then one rounding, for which the interpreter truncates
    assert found.dtype == expected.dtype and not found.isnan().any()
    torch.testing.assert_close(found, expected, rtol=4 * torch.finfo(found.dtype).eps, atol=8 * torch.finfo(found.dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_accumulation_is_the_reference_and_touches_nothing_else(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    (first, other), (first_lse, other_lse) = two_results(shape, dtype)
    wide = first_lse.dtype
    whole, whole_lse = (
        torch.full((shape[0], shape[1] + 4, shape[2]), 5.0, dtype=wide),
        torch.full((shape[0], shape[1] + 4), 6.0, dtype=wide),
    )
    out, lse = whole[:, 1:-3], whole_lse[:, 1:-3]
    out.copy_(first)
    lse.copy_(first_lse)
    expected, expected_lse = out.clone(), lse.clone()
    reference.accumulate_attention_(expected, expected_lse, other, other_lse)
    op.launch_accumulate(out, lse, other, other_lse)
    assert_close(out, expected)
    assert_close(lse, expected_lse)
    for around in (whole[:, 0], whole[:, -3:], whole_lse[:, 0] - 1, whole_lse[:, -3:] - 1):
        assert (around == 5).all()


def test_a_broken_result_shows() -> None:
    (out, other), (lse, other_lse) = two_results((1, 3, 4), torch.float32)
    out, lse = out.contiguous(), lse.contiguous()
    other_lse[0, 0] = float("nan")
    op.launch_accumulate(out, lse, other, other_lse)
    assert out[0, 0].isnan().all() and lse[0, 0].isnan() and not out[0, 1].isnan().any()


def test_offsets_do_not_overflow_32_bits() -> None:
    # three heads 2**30 values apart: the product of two small integers is too large; memory in between is never touched
    torch.use_deterministic_algorithms(False)
    far = torch.empty(2**31 + 16, dtype=torch.bfloat16).as_strided((3, 2, 8), (2**30, 8, 1))
    far.copy_(torch.randn(3, 2, 8))
    out, lse = torch.zeros(3, 2, 8), torch.full((3, 2), float("-inf"))
    op.launch_accumulate(out, lse, far, torch.zeros(3, 2))
    assert torch.equal(out, far.float())
