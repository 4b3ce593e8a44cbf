"""cuDNN's attention as torch 2.11 to 2.13 calls it, with its traps, computed on the CPU by plain matrices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from hf_longctx.runtime.core.host_copies import dense_strides, has_strides
from hf_longctx.runtime.tiles import cuda
from hf_longctx.runtime.tiles import tile as tile_module
from hf_longctx.runtime.tiles.plain import Scores, TileInputs, plain_backward, plain_forward

_MOST_HEADS = 2**16 - 1


class CudnnPlans:
    """Plans by layouts of queries, keys and values; a backward plan reads output and gradient as they lay at its first call.

    calls: forward and backward calls. misread: backward calls whose output or gradient lay otherwise than at the first. layouts:
    (shape, strides) of q, k and v of every backward plan.
    """

    def __init__(self) -> None:
        self.calls = self.misread = 0
        self._backward: dict[Any, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._forward: set[Any] = set()

    @property
    def num_layouts(self) -> int:
        return len(self._forward)

    @property
    def layouts(self) -> list[Any]:
        return [key[:3] for key in self._backward]

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: None,
        has_lse: bool,
        dropout: float = 0.0,
        is_causal: bool = False,
        debug: bool = False,
        *,
        scale: float,
    ) -> tuple[Any, ...]:
        """torch's `_scaled_dot_product_cudnn_attention`."""
        _refuse(q, k)
        self.calls += 1
        self._forward.add(_layout(q, k, v, is_causal))
        out, lse = plain_forward(TileInputs(q[0], k[0], v[0], Scores(scale), is_causal))
        # the output lies in memory as the queries do
        out_1HTD = torch.empty_strided(q.shape, dense_strides(q), dtype=q.dtype).copy_(out.unsqueeze(0))
        lse_1HT1 = lse.to(torch.promote_types(q.dtype, torch.float32)).contiguous().unsqueeze(0).unsqueeze(-1)
        unused = torch.empty(0)
        return out_1HTD, lse_1HT1, unused, unused, q.shape[2], k.shape[2], unused, unused, unused

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: float
    ) -> Any:
        """torch's `_scaled_dot_product_cudnn_attention_backward`."""
        is_causal = rest[-1]
        _refuse(q, k)
        self.calls += 1
        built = self._backward.setdefault(_layout(q, k, v, is_causal), (out.stride(), gradient.stride()))
        self.misread += not (has_strides(out, built[0]) and has_strides(gradient, built[1]))
        out, gradient = _read_as(out, built[0]), _read_as(gradient, built[1])
        inputs = TileInputs(q[0], k[0], v[0], Scores(scale), is_causal)
        found = plain_backward(gradient[0], inputs, out[0], lse.squeeze(-1)[0])
        return tuple(x.to(q.dtype).unsqueeze(0) for x in found)


@contextmanager
def cudnn_on_the_cpu(least_pairs: int = 0) -> Iterator[CudnnPlans]:
    """Context in which cuDNN's operators are computed on the CPU and get every tile of `least_pairs` pairs that repays a plan.

    By default they get every tile.
    """
    plans, library = CudnnPlans(), torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_cudnn_attention", plans.forward, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention_backward", plans.backward, "CPU")
    cudnn, *others = tile_module.BACKENDS
    try:
        mine = replace(cudnn, takes=lambda *tile: True, plans=least_pairs > 0)
        with patch.object(tile_module, "BACKENDS", (mine, *others)), patch.object(cuda, "_LEAST_PAIRS", least_pairs):
            yield plans
    finally:
        library._destroy()


def _layout(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Any:
    return (*((x.shape, x.stride()) for x in (q, k, v)), is_causal, q.dtype)


def _refuse(q: Tensor, k: Tensor) -> None:
    assert max(q.shape[1], k.shape[1]) <= _MOST_HEADS, "the grid of a CUDA kernel has too many heads"
    assert k.shape[2] > 1, "cuDNN takes no single key"
    assert all(x.stride(-1) == 1 for x in (q, k))


def _read_as(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """`x` read from its memory with other strides."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True))
    if x.storage_offset() + last >= x.untyped_storage().nbytes() // x.element_size():
        return torch.full_like(x, float("nan"))
    return x.as_strided(x.shape, strides)
