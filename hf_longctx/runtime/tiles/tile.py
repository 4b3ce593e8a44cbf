"""Attention of one tile (query piece times key piece) with its log-sum-exp, and its gradients from merged results.

A backward from outside needs what torch's autograd hides: the gradient of one tile given the output and LSE of all tiles.
`BACKENDS` lists what offers it, the fastest first; the first row that takes a tile computes it, forward and backward:

    cudnn              bf16 and fp16 on CUDA of compute capability 9.0 on, head sizes of 8, 16 ... 128, two keys or more
    flash_attention_2  bf16 and fp16 on CUDA of compute capability 8.0 on, head sizes of 8, 16 ... 256
    flash_attn_4       the package flash-attn-4, bf16 and fp16 on CUDA of compute capability 9.0 on, capped scores too
    flash_attn_2       the package flash-attn, bf16 and fp16 on CUDA of compute capability 8.0 on, capped scores too
    cpu_flash          any float dtype on CPU
    plain              matrices over blocks of queries (`plain_tiles`), correct everywhere, capped scores too

The rows of packages are there where these are installed and pass a comparison with `plain` (`package_tiles`).

Every row's LSE is a natural logarithm, so results of different rows may be merged. Values may have heads of another size than
queries and keys: the narrower ones get columns of zeros for a row that wants one size, which change nothing.

Shapes: H query heads, G KV heads (H is a multiple of G, neighbours read the same one), T query tokens, U key tokens, D head size
of queries and keys, E of values; in the rows' own functions both are D.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_longctx.runtime.tiles.packages import FLASH_2, FLASH_4
from hf_longctx.runtime.tiles.plain import Scores, as_heads, as_queries, plain_backward, plain_forward

# device type, compute capability ((0, 0) without CUDA), dtype, head size
Takes = Callable[[str, tuple[int, int], torch.dtype, int], bool]
# q, k, v, scores, causal -> output, LSE
Forward = Callable[[Tensor, Tensor, Tensor, Scores, bool], tuple[Tensor, Tensor]]
# gradient, q, k, v, output, LSE, scores, causal -> gradients of q, k and v
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Scores, bool], tuple[Tensor, Tensor, Tensor]]

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class TileBackend:
    """One way to compute a tile. groups_heads: whether it reads a KV head for many query heads; else it is given one each.

    min_keys: the fewest keys of a tile that it takes. caps: whether it knows a softcap. any_width: whether values may have
    heads of another size than queries and keys.
    """

    name: str
    takes: Takes
    forward: Forward
    backward: Backward
    groups_heads: bool = False
    min_keys: int = 1
    caps: bool = False
    any_width: bool = False


def choose_backend(
    device_type: str, capability: tuple[int, int], dtype: torch.dtype, head_dim: int, num_keys: int = 2, is_capped: bool = False
) -> TileBackend:
    """The first row that takes such a tile; `head_dim`: the larger one of queries' and values'."""
    for row in BACKENDS:
        knows = num_keys >= row.min_keys and (row.caps or not is_capped)
        if knows and row.takes(device_type, capability, dtype, head_dim):
            return row
    raise AssertionError("the last row takes all")


def attention_backend(device: torch.device, dtype: torch.dtype, head_dim: int, is_capped: bool = False) -> str:
    """The name of the row that computes tiles of such queries, but for tiles of a single key, which may need another."""
    return choose_backend(device.type, _capability(device), dtype, head_dim, is_capped=is_capped).name


def tile_forward(
    q_HTD: Tensor, k_GUD: Tensor, v_GUE: Tensor, scores: Scores, causal: bool, backend: str = ""
) -> tuple[Tensor, Tensor]:
    """Output [H, T, E] and LSE [H, T] of one tile; `causal` tiles are square, with the first key at the first query.

    backend: the name of the row to use, for tests and measurements; empty chooses.
    """
    row = _row_for(q_HTD, k_GUD, v_GUE, scores, backend)
    q, k, v = _of_one_width(row, q_HTD, k_GUD, v_GUE)
    out, lse = _forward(row, q, k, v, scores, causal)
    return _narrowed(out, v_GUE.shape[-1]), lse


def tile_backward(
    gradient_HTE: Tensor,
    q_HTD: Tensor,
    k_GUD: Tensor,
    v_GUE: Tensor,
    out_HTE: Tensor,
    lse_HT: Tensor,
    scores: Scores,
    causal: bool,
    backend: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from one tile, given the merged output and LSE of all tiles of these queries.

    Those of k and v are sums over the query heads that read a KV head, in at least fp32 where the sum is made here.
    """
    row = _row_for(q_HTD, k_GUD, v_GUE, scores, backend)
    q, k, v = _of_one_width(row, q_HTD, k_GUD, v_GUE)
    gradient, out = (x if row.any_width else _widened(x, v.shape[-1]) for x in (gradient_HTE, out_HTE))
    dq, dk, dv = _backward(row, gradient, q, k, v, out, lse_HT, scores, causal)
    head_dim, value_dim = q_HTD.shape[-1], v_GUE.shape[-1]
    return _narrowed(dq, head_dim), _narrowed(dk, head_dim), _narrowed(dv, value_dim)


def _of_one_width(row: TileBackend, *parts: Tensor) -> tuple[Tensor, ...]:
    width = max(part.shape[-1] for part in parts)
    return parts if row.any_width else tuple(_widened(part, width) for part in parts)


def _widened(x: Tensor, width: int) -> Tensor:
    """With columns of zeros behind its own: a copy, unless it has all columns."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _narrowed(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else x[..., :width]


def _forward(row: TileBackend, q: Tensor, k: Tensor, v: Tensor, scores: Scores, causal: bool) -> tuple[Tensor, Tensor]:
    per_kv = q.shape[0] // k.shape[0]
    if per_kv == 1 or row.groups_heads:
        return row.forward(q, k, v, scores, causal)
    if causal:
        return row.forward(q, _repeated(k, per_kv), _repeated(v, per_kv), scores, causal)
    out_GRD, lse_GR = row.forward(as_queries(q, per_kv), k, v, scores, causal)
    return as_heads(out_GRD, per_kv), as_heads(lse_GR, per_kv)


def _backward(
    row: TileBackend,
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scores: Scores,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    per_kv = q.shape[0] // k.shape[0]
    if per_kv == 1 or row.groups_heads:
        return row.backward(gradient, q, k, v, out, lse, scores, causal)
    if causal:
        k, v = _repeated(k, per_kv), _repeated(v, per_kv)
        dq, dk_HUD, dv_HUD = row.backward(gradient, q, k, v, out, lse, scores, causal)
        return dq, _summed(dk_HUD, per_kv), _summed(dv_HUD, per_kv)
    gradient, q, out, lse = (as_queries(x, per_kv) for x in (gradient, q, out, lse))
    dq_GRD, dk, dv = row.backward(gradient, q, k, v, out, lse, scores, causal)
    return as_heads(dq_GRD, per_kv), dk, dv


def _row_for(q_HTD: Tensor, k_GUD: Tensor, v_GUE: Tensor, scores: Scores, name: str) -> TileBackend:
    is_capped = scores.softcap > 0
    if not name:
        device, head_dim = q_HTD.device, max(q_HTD.shape[-1], v_GUE.shape[-1])
        return choose_backend(device.type, _capability(device), q_HTD.dtype, head_dim, k_GUD.shape[1], is_capped)
    for row in BACKENDS:
        if row.name == name:
            if is_capped and not row.caps:
                raise ValueError(f"attention backend {name!r} does not cap scores; leave the choice to the table")
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


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores, causal: bool) -> tuple[Tensor, Tensor]:
    inputs = (_dense(x).unsqueeze(0) for x in (q, k, v))
    # no bias, with LSE, no dropout
    out, lse_1HT1, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *inputs, None, True, 0.0, causal, False, scale=scores.scale
    )
    return out.squeeze(0), lse_1HT1.view(q.shape[:2])


def _cudnn_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = [_dense(x).unsqueeze(0) for x in (gradient, q, k, v, out)]
    # read only with dropout
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    # the LSE is [B, H, T, 1] there; no bias, no packed documents
    lse_1HT1 = lse.contiguous().unsqueeze(0).unsqueeze(-1)
    rest = (seed, seed, None, None, None, q.shape[1], k.shape[1], 0.0, causal)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(*inputs, lse_1HT1, *rest, scale=scores.scale)
    return dq.squeeze(0), dk.squeeze(0), dv.squeeze(0)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores, causal: bool) -> tuple[Tensor, Tensor]:
    inputs = (_dense(x).unsqueeze(0) for x in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*inputs, 0.0, causal, False, scale=scores.scale)
    return out.squeeze(0), lse.squeeze(0)


def _flash_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = [_dense(x).unsqueeze(0) for x in (gradient, q, k, v, out)]
    # read only with dropout
    seed, unused = torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty((), dtype=torch.uint64, device=q.device)
    rest = (None, None, q.shape[1], k.shape[1], 0.0, causal, seed, unused)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *inputs, lse.contiguous().unsqueeze(0), *rest, scale=scores.scale
    )
    return dq.squeeze(0), dk.squeeze(0), dv.squeeze(0)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores, causal: bool) -> tuple[Tensor, Tensor]:
    inputs = (x.unsqueeze(0) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*inputs, 0.0, causal, scale=scores.scale)
    return out.squeeze(0), lse.squeeze(0)


def _cpu_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    gradient, q, out, lse = (x.contiguous() for x in (gradient, q, out, lse))
    inputs = [x.unsqueeze(0) for x in (gradient, q, _dense(k), _dense(v), out, lse)]
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, 0.0, causal, scale=scores.scale)
    return dq.squeeze(0), dk.squeeze(0), dv.squeeze(0)


BACKENDS = (
    TileBackend("cudnn", _takes_cudnn, _cudnn_forward, _cudnn_backward, groups_heads=True, min_keys=2),
    TileBackend("flash_attention_2", _takes_flash, _flash_forward, _flash_backward, groups_heads=True),
    # behind torch's own, so that they compute capped scores alone until they are measured
    TileBackend("flash_attn_4", FLASH_4.takes, FLASH_4.forward, FLASH_4.backward, groups_heads=True, caps=True),
    TileBackend("flash_attn_2", FLASH_2.takes, FLASH_2.forward, FLASH_2.backward, groups_heads=True, caps=True),
    # its sums over the query heads of a KV head are in the dtype of the keys, ours are wider
    TileBackend("cpu_flash", _takes_cpu, _cpu_forward, _cpu_backward),
    TileBackend("plain", _takes_all, plain_forward, plain_backward, groups_heads=True, caps=True, any_width=True),
)
