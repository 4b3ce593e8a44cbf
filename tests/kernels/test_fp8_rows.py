"""Rows rounded to fp8: the operation that runs on every device, and the kernel compiled for Hopper."""

from __future__ import annotations

import pytest
import torch
from helpers.measures.triton_runs import compile_only, memory_instructions, needs_triton
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_longctx.kernels import fp8_rows as op
from hf_longctx.kernels import reference
from hf_longctx.kernels.fp8_rows import round_rows


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_parts_side_by_side_are_rounded_as_one_row() -> None:
    parts, factors = [drawn(5, 16), drawn(5, 48, seed=1)], [drawn(16, 1, seed=2).float(), drawn(48, 1, seed=3).float()]
    values, scale = round_rows(parts, factors)
    whole = torch.cat([(part.float() * factor.T).bfloat16() for part, factor in zip(parts, factors, strict=True)], 1)
    expected, scales = round_rows([whole])
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8)) and torch.equal(scale, scales)
    largest = whole.float().abs().amax(1, keepdim=True)
    # half of the distance between the largest numbers, which a product of fp32 may exceed by its own rounding
    off = (values.float() * scale - whole.float()).abs()
    assert torch.equal(scale, largest / 448) and off.le(largest / 28 * (1 + 1e-6)).all()


def test_tensors_without_values_have_the_same_shapes() -> None:
    with FakeTensorMode():
        values, scale = round_rows([torch.empty(3, 16), torch.empty(3, 32)])
    assert (values.shape, values.dtype, scale.shape, scale.dtype) == ((3, 48), reference.FP8, (3, 1), torch.float32)


@pytest.mark.daily("3")
@needs_triton
@pytest.mark.parametrize("num_parts", [1, 3])
def test_the_kernel_compiles_for_hopper_with_exact_roundings(monkeypatch: pytest.MonkeyPatch, num_parts: int) -> None:
    ptx = compile_only(op, monkeypatch)
    sizes = [4096, 1024, 1024][:num_parts]
    parts, factors = [drawn(2, size) for size in sizes], [torch.rand(size, 1) for size in sizes] if num_parts > 1 else []
    values, scale = torch.empty(2, sum(sizes), dtype=reference.FP8), torch.empty(2, 1)
    op.launch_round_rows(parts, factors, values, scale)
    (found,) = ptx
    assert "cvt.rn.satfinite.e4m3x2.f32" in found and "div.rn.f32" in found
    assert "div.full" not in found and "div.approx" not in found
    # sixteen bytes at a time
    assert any(".v4" in each for each in memory_instructions(found) if each.startswith("ld"))
