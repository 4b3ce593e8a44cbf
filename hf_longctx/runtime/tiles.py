"""Attention of one tile (query piece times key piece) with its log-sum-exp, and its gradients from merged results.

A backward from outside needs what torch's autograd hides: the gradient of one tile given the output and LSE of all tiles.
`BACKENDS` lists what offers it, the fastest first; the first row that takes a tile computes it, forward and backward:

    cudnn              bf16 and fp16 on CUDA of compute capability 9.0 on, head sizes of 8, 16 ... 128, two keys or more
    flash_attention_2  bf16 and fp16 on CUDA of compute capability 8.0 on, head sizes of 8, 16 ... 256
    cpu_flash          any float dtype on CPU
    plain              matrices in at least fp32, T x U of them per head; correct everywhere, meant for tests and odd heads

Every row's LSE is a natural logarithm, so results of different rows may be merged.

Shapes: H query heads, G KV heads (H is a multiple of G, neighbours read the same one), T query tokens, U key tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# device type, compute capability ((0, 0) without CUDA), dtype, head size
Takes = Callable[[str, tuple[int, int], torch.dtype, int], bool]
# q, k, v, scale, causal -> output, LSE
Forward = Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]
# gradient, q, k, v, output, LSE, scale, causal -> gradients of q, k and v
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor, Tensor]]

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class TileBackend:
    """One way to compute a tile. groups_heads: whether it reads a KV head for many query heads; else it is given one each.

    min_keys: the fewest keys of a tile that it takes.
    """

    name: str
    takes: Takes
    forward: Forward
    backward: Backward
    groups_heads: bool = False
    min_keys: int = 1


def choose_backend(
    device_type: str, capability: tuple[int, int], dtype: torch.dtype, head_dim: int, num_keys: int = 2
) -> TileBackend:
    """The first row that takes such a tile."""
    rows = (row for row in BACKENDS if num_keys >= row.min_keys and row.takes(device_type, capability, dtype, head_dim))
    return next(rows)


def attention_backend(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """The name of the row that computes tiles of such queries, but for tiles of a single key, which may need another."""
    return choose_backend(device.type, _capability(device), dtype, head_dim).name


def tile_forward(
    q_HTD: Tensor, k_GUD: Tensor, v_GUD: Tensor, scale: float, causal: bool, backend: str = ""
) -> tuple[Tensor, Tensor]:
    """Output [H, T, D] and LSE [H, T] of one tile; `causal` tiles are square, with the first key at the first query.

    backend: the name of the row to use, for tests and measurements; empty chooses.
    """
    row = _row_for(q_HTD, k_GUD, backend)
    per_kv = q_HTD.shape[0] // k_GUD.shape[0]
    if per_kv == 1 or row.groups_heads:
        return row.forward(q_HTD, k_GUD, v_GUD, scale, causal)
    if causal:
        return row.forward(q_HTD, _repeated(k_GUD, per_kv), _repeated(v_GUD, per_kv), scale, causal)
    out_GRD, lse_GR = row.forward(_as_queries(q_HTD, per_kv), k_GUD, v_GUD, scale, causal)
    return _as_heads(out_GRD, per_kv), _as_heads(lse_GR, per_kv)


def tile_backward(
    gradient_HTD: Tensor,
    q_HTD: Tensor,
    k_GUD: Tensor,
    v_GUD: Tensor,
    out_HTD: Tensor,
    lse_HT: Tensor,
    scale: float,
    causal: bool,
    backend: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from one tile, given the merged output and LSE of all tiles of these queries.

    Those of k and v are sums over the query heads that read a KV head, in at least fp32 where the sum is made here.
    """
    row = _row_for(q_HTD, k_GUD, backend)
    per_kv = q_HTD.shape[0] // k_GUD.shape[0]
    if per_kv == 1 or row.groups_heads:
        return row.backward(gradient_HTD, q_HTD, k_GUD, v_GUD, out_HTD, lse_HT, scale, causal)
    if causal:
        k_HUD, v_HUD = _repeated(k_GUD, per_kv), _repeated(v_GUD, per_kv)
        dq, dk_HUD, dv_HUD = row.backward(gradient_HTD, q_HTD, k_HUD, v_HUD, out_HTD, lse_HT, scale, causal)
        return dq, _summed(dk_HUD, per_kv), _summed(dv_HUD, per_kv)
    gradient, q, out, lse = (_as_queries(x, per_kv) for x in (gradient_HTD, q_HTD, out_HTD, lse_HT))
    dq_GRD, dk, dv = row.backward(gradient, q, k_GUD, v_GUD, out, lse, scale, causal)
    return _as_heads(dq_GRD, per_kv), dk, dv


def _row_for(q_HTD: Tensor, k_GUD: Tensor, name: str) -> TileBackend:
    if not name:
        capability = _capability(q_HTD.device)
        return choose_backend(q_HTD.device.type, capability, q_HTD.dtype, q_HTD.shape[-1], k_GUD.shape[1])
    for row in BACKENDS:
        if row.name == name:
            return row
    raise ValueError(f"there is no attention backend {name!r}; choose one of {', '.join(row.name for row in BACKENDS)}")


def _capability(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda" or not torch.cuda.is_available():
        return (0, 0)
    return torch.cuda.get_device_capability(device)


def _repeated(x_GUD: Tensor, per_kv: int) -> Tensor:
    return x_GUD.repeat_interleave(per_kv, 0)


def _summed(x_HUD: Tensor, per_kv: int) -> Tensor:
    """Over the query heads of each KV head, in at least fp32."""
    return x_HUD.unflatten(0, (-1, per_kv)).sum(1, dtype=torch.promote_types(x_HUD.dtype, torch.float32))


def _as_queries(x_HTX: Tensor, per_kv: int) -> Tensor:
    """Query heads of one KV head behind each other as its queries: [H, T, ...] to [G, H/G * T, ...]. Only without a mask."""
    return x_HTX.unflatten(0, (-1, per_kv)).flatten(1, 2)


def _as_heads(x_GRX: Tensor, per_kv: int) -> Tensor:
    """The inverse of `_as_queries`."""
    return x_GRX.unflatten(1, (per_kv, -1)).flatten(0, 1)


def _dense(x: Tensor) -> Tensor:
    """Keys and values may be a part of a long buffer, heads lie in strides: operators need the last dimension dense, no copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _takes_cudnn(device_type: str, capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> bool:
    # capabilities of AMD's devices count from 9.0 too; torch's own attention refuses cuDNN for the same two switches
    is_offered = torch.version.hip is None and torch.backends.cuda.cudnn_sdp_enabled()
    is_allowed = is_offered and not torch.are_deterministic_algorithms_enabled()
    return is_allowed and device_type == "cuda" and capability >= (9, 0) and _is_half(dtype, head_dim, 128)


def _takes_flash(device_type: str, capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> bool:
    return device_type == "cuda" and capability >= (8, 0) and _is_half(dtype, head_dim, 256)


def _takes_cpu(device_type: str, capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> bool:
    return device_type == "cpu"


def _takes_all(device_type: str, capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> bool:
    return True


def _is_half(dtype: torch.dtype, head_dim: int, most: int) -> bool:
    return dtype in _HALF and head_dim % 8 == 0 and head_dim <= most


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    inputs = (_dense(x).unsqueeze(0) for x in (q, k, v))
    # no bias, with LSE, no dropout
    out, lse_1HT1, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*inputs, None, True, 0.0, causal, False, scale=scale)
    return out.squeeze(0), lse_1HT1.view(q.shape[:2])


def _cudnn_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = [_dense(x).unsqueeze(0) for x in (gradient, q, k, v, out)]
    # read only with dropout
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    # the LSE is [B, H, T, 1] there; no bias, no packed documents
    lse_1HT1 = lse.contiguous().unsqueeze(0).unsqueeze(-1)
    rest = (seed, seed, None, None, None, q.shape[1], k.shape[1], 0.0, causal)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(*inputs, lse_1HT1, *rest, scale=scale)
    return dq.squeeze(0), dk.squeeze(0), dv.squeeze(0)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    inputs = (_dense(x).unsqueeze(0) for x in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*inputs, 0.0, causal, False, scale=scale)
    return out.squeeze(0), lse.squeeze(0)


def _flash_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = [_dense(x).unsqueeze(0) for x in (gradient, q, k, v, out)]
    # read only with dropout
    seed, unused = torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty((), dtype=torch.uint64, device=q.device)
    rest = (None, None, q.shape[1], k.shape[1], 0.0, causal, seed, unused)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *inputs, lse.contiguous().unsqueeze(0), *rest, scale=scale
    )
    return dq.squeeze(0), dk.squeeze(0), dv.squeeze(0)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    inputs = (x.unsqueeze(0) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*inputs, 0.0, causal, scale=scale)
    return out.squeeze(0), lse.squeeze(0)


def _cpu_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    gradient, q, out, lse = (x.contiguous() for x in (gradient, q, out, lse))
    inputs = [x.unsqueeze(0) for x in (gradient, q, _dense(k), _dense(v), out, lse)]
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, 0.0, causal, scale=scale)
    return dq.squeeze(0), dk.squeeze(0), dv.squeeze(0)


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, scale, causal)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp().to(v.dtype) @ v, lse


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


BACKENDS = (
    TileBackend("cudnn", _takes_cudnn, _cudnn_forward, _cudnn_backward, groups_heads=True, min_keys=2),
    TileBackend("flash_attention_2", _takes_flash, _flash_forward, _flash_backward, groups_heads=True),
    # its sums over the query heads of a KV head are in the dtype of the keys, ours are wider
    TileBackend("cpu_flash", _takes_cpu, _cpu_forward, _cpu_backward),
    TileBackend("plain", _takes_all, _plain_forward, _plain_backward),
)
