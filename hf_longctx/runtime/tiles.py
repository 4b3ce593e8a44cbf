"""Attention of one tile (query piece times key piece) with its log-sum-exp, and its gradients from merged results.

A backward from outside needs what torch's autograd hides: the gradient of one tile given the output and LSE of all tiles.
The operators of torch that offer it, by device:

    CPU: its flash operator, any float dtype.   CUDA, bf16 or fp16, head size a multiple of 8 up to 256: FlashAttention-2.
    Else: plain matrices in at least fp32, T x U of them per head; correct everywhere, meant for tests and odd heads.

Shapes: H query heads (keys and values expanded to as many), T query tokens, U key tokens, D head size.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

TileBackend = Literal["cpu_flash", "cuda_flash", "plain"]

_FLASH_DTYPES = (torch.bfloat16, torch.float16)


def tile_backend(q_HTD: Tensor) -> TileBackend:
    """Which operator computes tiles of these queries."""
    if q_HTD.device.type == "cpu":
        return "cpu_flash"
    head_dim = q_HTD.shape[-1]
    is_flash = q_HTD.device.type == "cuda" and q_HTD.dtype in _FLASH_DTYPES and head_dim % 8 == 0 and head_dim <= 256
    return "cuda_flash" if is_flash else "plain"


def tile_forward(q_HTD: Tensor, k_HUD: Tensor, v_HUD: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Output [H, T, D] and LSE [H, T] of one tile; `causal` tiles are square, with the first key at the first query."""
    backend = tile_backend(q_HTD)
    if backend == "plain":
        scores = _scores(q_HTD, k_HUD, scale, causal)
        lse = scores.logsumexp(-1)
        return (scores - lse.unsqueeze(-1)).exp().to(v_HUD.dtype) @ v_HUD, lse
    q, k, v = (x.unsqueeze(0) for x in (q_HTD, k_HUD, v_HUD))
    if backend == "cpu_flash":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
    return out[0], lse[0]


def tile_backward(
    gradient_HTD: Tensor,
    q_HTD: Tensor,
    k_HUD: Tensor,
    v_HUD: Tensor,
    out_HTD: Tensor,
    lse_HT: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from one tile, given the merged output and LSE of all tiles of these queries."""
    backend = tile_backend(q_HTD)
    if backend == "plain":
        return _plain_backward(gradient_HTD, q_HTD, k_HUD, v_HUD, out_HTD, lse_HT, scale, causal)
    # keys and values may be a long part of a buffer; operators need their last dimension dense, not a copy
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k_HUD, v_HUD))
    gradient, q, out, lse = (x.contiguous() for x in (gradient_HTD, q_HTD, out_HTD, lse_HT))
    inputs = [x.unsqueeze(0) for x in (gradient, q, k, v, out, lse)]
    if backend == "cpu_flash":
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, 0.0, causal, scale=scale)
    else:
        # read only with dropout
        seed = torch.empty(2, dtype=torch.uint64, device=q_HTD.device)
        sizes = (None, None, q_HTD.shape[1], k_HUD.shape[1])
        found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *inputs, *sizes, 0.0, causal, seed, seed[0], scale=scale
        )
    return found[0][0], found[1][0], found[2][0]


def _plain_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    weights = (_scores(q, k, scale, causal) - lse.unsqueeze(-1)).exp()
    wide_gradient = gradient.to(weights.dtype)
    delta = (wide_gradient * out).sum(-1, keepdim=True)
    ds = weights * (wide_gradient @ v.to(weights.dtype).transpose(1, 2) - delta) * scale
    return ds @ k.to(ds.dtype), ds.transpose(1, 2) @ q.to(ds.dtype), weights.transpose(1, 2) @ wide_gradient


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).transpose(1, 2) * scale
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores
