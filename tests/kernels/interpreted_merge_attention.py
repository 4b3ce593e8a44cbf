"""The merge kernels in Triton's interpreter against the reference; `test_interpreted.py` runs this file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers.measures.triton_runs import poisoned_memory
from torch import Tensor

from hf_longctx.kernels import merge_attention as op
from hf_longctx.kernels import reference

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# heads, tokens, head size, parts: one of everything, sizes that are no power of two, more tokens than one program takes
SHAPES = [(1, 1, 1, 1), (3, 5, 8, 2), (2, 7, 24, 3), (7, 1, 64, 2), (1, 33, 80, 4), (2, 70, 40, 2)]


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    with poisoned_memory():
        yield


def parts_of(shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Random outputs as transposed views of [T, H, D], and LSEs cut from longer rows; some parts saw no key."""
    num_heads, num_tokens, head_dim, num_parts = shape
    generator = torch.Generator().manual_seed(sum(shape))
    wide = reference.wide_dtype(dtype)
    outputs, lses = [], []
    for i in range(num_parts):
        output = torch.randn(num_tokens, num_heads, head_dim, generator=generator, dtype=wide).to(dtype).transpose(0, 1)
        lse = 3 * torch.randn(num_heads, num_tokens + 3, generator=generator, dtype=wide)[:, 2 : 2 + num_tokens]
        lse[:, i::5] = float("-inf")
        lse[:, 4::5] = float("-inf")
        output.masked_fill_((lse == float("-inf")).unsqueeze(-1), float("nan"))
        outputs.append(output)
        lses.append(lse)
    return outputs, lses


def assert_close(found: Tensor, expected: Tensor) -> None:
    # sums of at most four terms in another order, then one rounding, for which the interpreter truncates
    assert found.dtype == expected.dtype and not found.isnan().any()
    torch.testing.assert_close(found, expected, rtol=4 * torch.finfo(found.dtype).eps, atol=8 * torch.finfo(found.dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_merge_is_the_reference(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    outputs, lses = parts_of(shape, dtype)
    for found, expected in zip(op.launch_merge(outputs, lses), reference.merge_attention(outputs, lses), strict=True):
        assert found.is_contiguous()
        assert_close(found, expected)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_the_reference(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    outputs, lses = parts_of(shape, dtype)
    _, lse = reference.merge_attention(outputs, lses)
    # the gradient of a sum is expanded from one number
    gradient, lse_gradient = torch.full((), 0.7, dtype=dtype).expand(shape[:3]), torch.rand_like(lse)
    arguments = (gradient, lse_gradient, outputs, lses, lse)
    for found, expected in zip(op.launch_merge_backward(*arguments), reference.merge_attention_backward(*arguments), strict=True):
        for one, other in zip(found, expected, strict=True):
            # products are sums over the head size
            scale = max(1.0, float(other.abs().max()))
            assert_close(one / scale, other / scale)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64), ids=str)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[3] > 1], ids=str)
def test_accumulation_is_the_reference_and_touches_nothing_else(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    (first, other), (first_lse, other_lse) = (pair[:2] for pair in parts_of(shape, dtype))
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


def test_a_broken_part_shows() -> None:
    outputs, lses = parts_of((1, 3, 4, 2), torch.float32)
    lses[0][0, 0] = float("nan")
    merged, lse = op.launch_merge(outputs, lses)
    assert merged[0, 0].isnan().all() and lse[0, 0].isnan() and not merged[0, 1].isnan().any()


def test_offsets_do_not_overflow_32_bits() -> None:
    # three heads 2**30 values apart: the product of two small integers is too large; memory in between is never touched
    torch.use_deterministic_algorithms(False)
    far = torch.empty(2**31 + 16, dtype=torch.bfloat16).as_strided((3, 2, 8), (2**30, 8, 1))
    far.copy_(torch.randn(3, 2, 8))
    merged, _ = op.launch_merge([far], [torch.zeros(3, 2)])
    assert torch.equal(merged, far)
