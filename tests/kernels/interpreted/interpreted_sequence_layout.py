"""The layout kernels in Triton's interpreter against the reference; `test_interpreted.py` runs this file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.measures.triton_runs import poisoned_memory
from torch import Tensor

from hf_longctx.kernels import reference
from hf_longctx.kernels import sequence_layout as op

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# query heads of each rank, KV heads of each rank, KV heads, tokens, head size
# the same, with parts of each rank's heads: query heads, KV heads that they read, and parts that read the same
PARTS = [
    (([0, 4, 8], [0, 1, 1, 2], 2, 5, 8), (1, 1, 4)),
    (([0, 4, 8, 12], [0, 2, 2, 4, 4, 6], 6, 33, 24), (2, 1, 1)),
    (([0, 4, 8], [0, 2, 2, 4], 4, 3, 8), (1, 1, 2)),
    (([0, 8, 16], [0, 4, 4, 8], 8, 3, 8), (4, 2, 1)),
    # ranks that read one KV head together
    (([0, 2, 4], [0, 1, 0, 1], 1, 6, 8), (1, 1, 2)),
]
SCATTERS = [
    ([0, 1], [0, 1], 1, 1, 1),
    ([0, 3, 5, 7], [0, 1, 0, 1, 1, 2], 2, 5, 8),
    ([0, 2, 4, 6], [0, 1, 0, 2, 1, 2], 3, 33, 80),
    ([0, 0, 2], [1, 1, 0, 2], 2, 70, 64),
    ([0, 4], [0, 2], 2, 3, 24),
    ([0, 1, 2], [0, 1, 0, 1], 1, 0, 8),
]
ALL = [*((case, ()) for case in SCATTERS), *PARTS]
# sizes of the blocks, rows of each part, head size
JOINS = [
    ([1], [1], 1),
    ([5, 0, 4], [3, 1, 1], 24),
    ([0, 33, 1], [2, 2, 2], 80),
    ([40, 41], [1, 2, 2], 64),
    ([3, 2, 2], [6], 8),
    ([1, 1], [70], 40),
    ([4, 3], [0], 8),
]


def with_dtypes(cases: list[Any]) -> list[tuple[Any, torch.dtype]]:
    """Every case in bf16 and in one more dtype, which rotates."""
    return [(case, dtype) for i, case in enumerate(cases) for dtype in (torch.bfloat16, DTYPES[1 + i % 3])]


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    with poisoned_memory():
        yield


def strided(rows: int, middle: int, head_dim: int, dtype: torch.dtype, seed: int) -> Tensor:
    """A random tensor [rows, middle, D] that is stored as [middle, rows, D + 1]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(middle, rows, head_dim + 1, generator=generator).to(dtype)[:, :, 1:].transpose(0, 1)


@pytest.mark.parametrize(("case", "dtype"), with_dtypes(ALL), ids=str)
def test_scatter_heads_is_the_reference(case: Any, dtype: torch.dtype) -> None:
    (q_bounds, kv_ranges, num_kv, num_tokens, head_dim), part = case
    parts = [strided(num, num_tokens, head_dim, dtype, i) for i, num in enumerate((q_bounds[-1], num_kv, num_kv))]
    found = op.launch_scatter_heads(*parts, q_bounds, kv_ranges, part)
    assert torch.equal(found, reference.scatter_heads(*parts, q_bounds, kv_ranges, part))


@pytest.mark.parametrize(("case", "dtype"), with_dtypes(ALL), ids=str)
def test_sum_heads_is_the_reference(case: Any, dtype: torch.dtype) -> None:
    (q_bounds, kv_ranges, num_kv, num_tokens, head_dim), part = case
    num_heads = q_bounds[-1] + 2 * (sum(kv_ranges[1::2]) - sum(kv_ranges[::2]))
    flat = torch.randn(num_heads * num_tokens * head_dim * 2, generator=torch.Generator().manual_seed(0)).to(dtype)[::2]
    found = op.launch_sum_heads(flat, q_bounds, kv_ranges, part, num_kv, num_tokens, head_dim)
    expected = reference.sum_heads(flat, q_bounds, kv_ranges, part, num_kv, num_tokens, head_dim)
    for one, other in zip(found, expected, strict=True):
        # equal sums in equal order; the interpreter truncates when it rounds to half precision
        rtol = torch.finfo(dtype).eps if dtype.itemsize == 2 else 0.0
        assert one.is_contiguous()
        torch.testing.assert_close(one, other, rtol=rtol, atol=0)


@pytest.mark.parametrize(("case", "dtype"), with_dtypes(JOINS), ids=str)
def test_blocks_are_the_reference_both_ways(case: tuple[list[int], list[int], int], dtype: torch.dtype) -> None:
    sizes, rows, head_dim = case
    num_values = sum(rows) * sum(sizes) * head_dim
    flat = torch.randn(num_values, generator=torch.Generator().manual_seed(0)).to(dtype)
    joined = op.launch_join_blocks(flat, sizes, rows, head_dim)
    assert [part.shape for part in joined] == [(num, sum(sizes), head_dim) for num in rows]
    for one, other in zip(joined, reference.join_blocks(flat, sizes, rows, head_dim), strict=True):
        assert one.is_contiguous() and torch.equal(one, other)
    parts = [strided(num, sum(sizes), head_dim, dtype, i) for i, num in enumerate(rows)]
    assert torch.equal(op.launch_split_blocks(parts, sizes), reference.split_blocks(parts, sizes))


def test_offsets_do_not_overflow_32_bits() -> None:
    # three rows 2**30 values apart: the product of two small integers is too large; memory in between is never touched
    torch.use_deterministic_algorithms(False)
    far = torch.empty(2**31 + 64, dtype=torch.bfloat16).as_strided((3, 3, 8), (2**30, 8, 1))
    far.copy_(torch.randn(3, 3, 8))
    assert torch.equal(op.launch_split_blocks([far], [1, 2]), reference.split_blocks([far], [1, 2]))
    arguments = (far, far[:1], far[:1], [0, 1, 3], [0, 1, 0, 1])
    assert torch.equal(op.launch_scatter_heads(*arguments), reference.scatter_heads(*arguments))
