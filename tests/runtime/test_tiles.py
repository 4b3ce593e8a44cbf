"""Tiles: every operator has the output, LSE and gradients of plain matrices; those of CUDA are called as torch declares them."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_longctx.runtime import tiles
from hf_longctx.runtime.tiles import tile_backend, tile_backward, tile_forward

SCALE = 0.3


def tile(num_queries: int, num_keys: int, dtype: torch.dtype) -> list[Tensor]:
    """Gradient, q, k and v of one tile of three heads of size 8."""
    generator = torch.Generator().manual_seed(num_queries * num_keys)
    sizes = (num_queries, num_queries, num_keys, num_keys)
    return [torch.randn(3, size, 8, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


@pytest.mark.parametrize("num_queries,num_keys,causal", [(7, 7, True), (7, 7, False), (1, 1, True), (5, 9, False), (9, 1, False)])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=str)
def test_operator_of_the_cpu_is_plain_matrices(
    num_queries: int, num_keys: int, causal: bool, dtype: torch.dtype, tolerance: float
) -> None:
    gradient, q, k, v = tile(num_queries, num_keys, dtype)
    assert tile_backend(q) == "cpu_flash"

    def run() -> list[Tensor]:
        out, lse = tile_forward(q, k, v, SCALE, causal)
        # as if another tile had been merged in: the sum over keys is larger, the output another
        merged_out, merged_lse = (out * 0.7 + 0.1).to(dtype), lse + 0.3
        return [out, lse, *tile_backward(gradient, q, k, v, merged_out, merged_lse, SCALE, causal)]

    found = run()
    with patch.object(tiles, "tile_backend", lambda queries: "plain"):
        expected = run()
    for ours, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), plain.double(), rtol=tolerance, atol=tolerance)


def test_plain_matrices_are_autograd_over_one_softmax() -> None:
    gradient, *inputs = tile(6, 6, torch.float64)
    q, k, v = (x.requires_grad_() for x in inputs)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    scores = (q @ k.transpose(1, 2) * SCALE).masked_fill(~mask, float("-inf"))
    expected = scores.softmax(-1) @ v
    expected.backward(gradient)
    with patch.object(tiles, "tile_backend", lambda queries: "plain"):
        out, lse = tile_forward(q.detach(), k.detach(), v.detach(), SCALE, causal=True)
        found = tile_backward(gradient, q.detach(), k.detach(), v.detach(), out, lse, SCALE, causal=True)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-12)
    for ours, leaf in zip(found, (q, k, v), strict=True):
        torch.testing.assert_close(ours, leaf.grad, rtol=1e-12, atol=1e-12)


def test_operators_of_cuda_are_called_as_torch_declares_them() -> None:
    # meta tensors run no kernel: they check names, numbers and types of arguments, and give shapes
    gradient, q, k, v = (torch.empty(4, size, 64, dtype=torch.bfloat16, device="meta") for size in (16, 16, 24, 24))
    with patch.object(tiles, "tile_backend", lambda queries: "cuda_flash"):
        out, lse = tile_forward(q, k, v, SCALE, causal=False)
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, q.shape[:2], torch.float32)
        found = tile_backward(gradient, q, k, v, out, lse, SCALE, causal=False)
        assert [x.shape for x in found] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize(
    "dtype,head_dim,backend",
    [
        (torch.bfloat16, 128, "cuda_flash"),
        (torch.float16, 64, "cuda_flash"),
        (torch.float32, 128, "plain"),
        (torch.bfloat16, 60, "plain"),
        (torch.bfloat16, 512, "plain"),
    ],
)
def test_cuda_falls_back_to_plain_matrices_where_flash_cannot(dtype: torch.dtype, head_dim: int, backend: str) -> None:
    with FakeTensorMode():
        assert tile_backend(torch.empty(2, 4, head_dim, dtype=dtype, device="cuda")) == backend
