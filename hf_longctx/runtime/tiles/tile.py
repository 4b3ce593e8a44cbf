"""Attention of one tile (a piece of queries times a piece of keys) with its log-sum-exp, and its gradients.

`attention.rows` and `attention.chunk` compose every attention of a plan from tiles. Merging tiles needs a function that torch's
autograd does not expose: the gradient of one tile, given the merged output and LSE of all tiles of its queries. `BACKENDS` lists
operators that provide it, fastest first; the first that accepts a tile computes it, forward and backward:

    cudnn              bf16 and fp16 on CUDA of compute capability 9 and 10, head sizes of 8, 16 ... 128, two keys or more; it
                       plans for every new length, so tiles that do not repay this go to the next backend that takes them
    flash_attention_2  bf16 and fp16 on CUDA from compute capability 8.0, head sizes of 8, 16 ... 256; before cudnn if the user
                       has activated another FlashAttention in torch, which must agree with `plain` (`packages.py`)
    flash_attn_4       the package flash-attn-4, bf16 and fp16 on CUDA from compute capability 9.0, capped scores too
    flash_attn_2       the package flash-attn, bf16 and fp16 on CUDA from compute capability 8.0, capped scores too
    cpu_flash          any float dtype on CPU
    plain              matrices over blocks of queries (`tiles.plain`), correct everywhere; capped scores, chosen keys, dropout

The two packages are used if they are installed and agree with `plain` (`tiles.packages`).

Every backend returns its LSE as a natural logarithm, so results of different backends can be merged. Values may differ from
queries and keys in head size: for a backend that needs one size, narrower tensors are padded with columns of zeros, which do not
change the result.

Shapes: H query heads, G KV heads (H is a multiple of G; neighbouring query heads read one KV head), T query tokens, U key tokens,
D head size of queries and keys, E of values; inside the backends' own functions E = D.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_longctx.plan.core.sharding import heads_at_once
from hf_longctx.runtime.core.host_copies import dense_channels
from hf_longctx.runtime.tiles.cuda import (
    cudnn_backward,
    cudnn_forward,
    device_capability,
    flash_backward,
    flash_forward,
    planned_keys,
    repays_plan,
)
from hf_longctx.runtime.tiles.packages import FLASH_2, FLASH_4, REGISTERED_CUDNN, REGISTERED_TILES, active_flash
from hf_longctx.runtime.tiles.plain import Backward, Forward, TileInputs, as_heads, as_queries, plain_backward, plain_forward

# device type, compute capability ((0, 0) without CUDA), dtype, head size -> whether the backend computes such tiles
Takes = Callable[[str, tuple[int, int], torch.dtype, int], bool]

# most heads of one call: grids of CUDA kernels count heads in a dimension of 16 bits
MOST_HEADS = 2**16 - 1


@dataclass(frozen=True, slots=True)
class TileBackend:
    """One operator that computes tiles."""

    name: str
    takes: Takes
    forward: Forward
    backward: Backward
    # several query heads may read one KV head; for other backends KV heads are repeated, one per query head
    groups_heads: bool = False
    # fewest keys of a tile that the operator accepts
    min_keys: int = 1
    # supports a softcap
    caps: bool = False
    # accepts values whose head size differs from that of queries and keys
    any_width: bool = False
    # can leave out single weights, by chosen keys or dropout
    masks: bool = False
    # makes a plan for every new length and layout, which takes long
    plans: bool = False


def accepting(
    device_type: str,
    capability: tuple[int, int],
    dtype: torch.dtype,
    head_dim: int,
    num_keys: int = 2,
    is_capped: bool = False,
    is_masked: bool = False,
) -> Iterator[TileBackend]:
    """Returns backends that accept such a tile. head_dim: the larger of the head sizes of queries and values."""
    for backend in BACKENDS:
        is_possible = num_keys >= backend.min_keys and (backend.caps or not is_capped) and (backend.masks or not is_masked)
        if is_possible and backend.takes(device_type, capability, dtype, head_dim):
            yield backend


def first_of(backends: Iterable[TileBackend], is_planned: bool = True) -> TileBackend:
    """Chooses among the backends that accept a tile: the first, except as follows.

    is_planned: whether a plan for the tile's lengths is worth making; if not, a backend that plans is chosen only if there is no
    other but the last. A FlashAttention that the user has activated also comes before such a backend.
    """
    spare: TileBackend | None = None
    for backend in backends:
        if backend.plans and (not is_planned or active_flash()):
            spare = backend
        elif spare is None or backend is not BACKENDS[-1]:
            return backend
    assert spare is not None, "the last backend accepts every tile"
    return spare


def choose_backend(
    device_type: str,
    capability: tuple[int, int],
    dtype: torch.dtype,
    head_dim: int,
    num_keys: int = 2,
    is_capped: bool = False,
    is_masked: bool = False,
) -> TileBackend:
    """Returns the first backend that accepts such a tile, if its lengths are worth a plan; see `accepting`."""
    return first_of(accepting(device_type, capability, dtype, head_dim, num_keys, is_capped, is_masked))


def plan_keys(tile: TileInputs) -> int:
    """Returns the number of a tile's first keys to run in a separate call, so that a plan fits them; 0 for no such call."""
    num_queries, num_keys = tile.q.shape[1], tile.k.shape[1]
    front = 0 if tile.causal else planned_keys(num_keys)
    if front in (0, num_keys) or not repays_plan(num_queries, front, causal=False):
        return 0
    device, head_dim = tile.q.device, max(tile.q.shape[-1], tile.v.shape[-1])
    is_capped, is_masked = tile.scores.softcap > 0, tile.is_masked
    capability = device_capability(device)
    return front if choose_backend(device.type, capability, tile.q.dtype, head_dim, front, is_capped, is_masked).plans else 0


def attention_backend(
    device: torch.device, dtype: torch.dtype, head_dim: int, is_capped: bool = False, is_masked: bool = False
) -> str:
    """Returns the name of the backend for this dtype and head size; tiles with a single key may need another one."""
    return choose_backend(device.type, device_capability(device), dtype, head_dim, is_capped=is_capped, is_masked=is_masked).name


def tile_forward(tile: TileInputs, backend: str = "") -> tuple[Tensor, Tensor]:
    """Returns output [H, T, E] and LSE [H, T] of one tile.

    backend: name of the backend to use, for tests and measurements; by default the first that accepts the tile.
    """
    chosen = _backend_for(tile, backend)
    out, lse = _forward(chosen, _of_one_width(chosen, tile))
    return _narrowed(out, tile.v.shape[-1]), lse


def tile_backward(
    gradient_HTE: Tensor, tile: TileInputs, out_HTE: Tensor, lse_HT: Tensor, backend: str = ""
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns gradients of one tile's q, k and v, given the merged output and LSE of all tiles of these queries.

    Gradients of k and v are summed over the query heads that read a KV head, in at least fp32 unless the backend itself sums.
    Long tiles run a few heads at a time (`heads_at_once`).
    """
    num_heads, per_kv = tile.q.shape[0], tile.q.shape[0] // tile.k.shape[0]
    at_once = heads_at_once(num_heads, per_kv, max(tile.q.shape[1], tile.k.shape[1]), tile.q.shape[2])
    if at_once < num_heads:
        return _backward_by_heads(gradient_HTE, tile, out_HTE, lse_HT, backend, at_once)
    chosen = _backend_for(tile, backend)
    padded = _of_one_width(chosen, tile)
    gradient, out = (x if chosen.any_width else _widened(x, padded.v.shape[-1]) for x in (gradient_HTE, out_HTE))
    dq, dk, dv = _backward(chosen, gradient, padded, out, lse_HT)
    head_dim, value_dim = tile.q.shape[-1], tile.v.shape[-1]
    return _narrowed(dq, head_dim), _narrowed(dk, head_dim), _narrowed(dv, value_dim)


def _backward_by_heads(
    gradient_HTE: Tensor, tile: TileInputs, out_HTE: Tensor, lse_HT: Tensor, backend: str, at_once: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns gradients of a tile, `at_once` query heads at a time; those of a KV head add up over parts of its readers."""
    per_kv = tile.q.shape[0] // tile.k.shape[0]
    sums: list[Tensor] = []
    for start in range(0, tile.q.shape[0], at_once):
        heads = slice(start, min(start + at_once, tile.q.shape[0]))
        kv = slice(start // per_kv, -(-heads.stop // per_kv))
        part = _of_heads(tile, heads, kv)
        found = tile_backward(gradient_HTE[heads], part, out_HTE[heads], lse_HT[heads], backend)
        if not sums:
            # parts of a KV head's readers add up in at least fp32
            wide = torch.promote_types(tile.k.dtype, torch.float32) if at_once < per_kv else found[1].dtype
            dtypes = found[0].dtype, wide, wide
            sums = [torch.empty_like(x, dtype=dtype) for x, dtype in zip((tile.q, tile.k, tile.v), dtypes, strict=True)]
        sums[0][heads] = found[0]
        for total, gradient in zip(sums[1:], found[1:], strict=True):
            if start % per_kv:
                total[kv] += gradient
            else:
                total[kv] = gradient
    dq, dk, dv = sums
    return dq, dk, dv


def _of_one_width(backend: TileBackend, tile: TileInputs) -> TileInputs:
    """Pads q, k and v to one head size, if the backend needs that."""
    if backend.any_width or tile.q.shape[-1] == tile.v.shape[-1]:
        return tile
    width = max(x.shape[-1] for x in (tile.q, tile.k, tile.v))
    return replace(tile, q=_widened(tile.q, width), k=_widened(tile.k, width), v=_widened(tile.v, width))


def _widened(x: Tensor, width: int) -> Tensor:
    """Pads `x` with columns of zeros up to `width`; returns `x` itself if it has that width."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _narrowed(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else x[..., :width]


def _forward(backend: TileBackend, tile: TileInputs) -> tuple[Tensor, Tensor]:
    """Returns output and LSE of a tile, with KV heads repeated or query heads folded for backends that do not group heads."""
    per_kv = tile.q.shape[0] // tile.k.shape[0]
    if tile.q.shape[0] > MOST_HEADS:
        found = [_forward(backend, part) for _, part in _parts(tile)]
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])
    if per_kv == 1 or backend.groups_heads:
        return backend.forward(tile)
    if tile.causal:
        return backend.forward(_with_repeated_kv(tile, per_kv))
    out_GRD, lse_GR = backend.forward(replace(tile, q=as_queries(tile.q, per_kv)))
    return as_heads(out_GRD, per_kv), as_heads(lse_GR, per_kv)


def _backward(
    backend: TileBackend, gradient: Tensor, tile: TileInputs, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns gradients of a tile, with KV heads repeated or query heads folded as in `_forward`."""
    per_kv = tile.q.shape[0] // tile.k.shape[0]
    if tile.q.shape[0] > MOST_HEADS:
        found = [_backward(backend, gradient[heads], part, out[heads], lse[heads]) for heads, part in _parts(tile)]
        dq, dk, dv = (torch.cat(parts) for parts in zip(*found, strict=True))
        return dq, dk, dv
    if per_kv == 1 or backend.groups_heads:
        return backend.backward(gradient, tile, out, lse)
    if tile.causal:
        dq, dk_HUD, dv_HUD = backend.backward(gradient, _with_repeated_kv(tile, per_kv), out, lse)
        return dq, _summed(dk_HUD, per_kv), _summed(dv_HUD, per_kv)
    gradient, q, out, lse = (as_queries(x, per_kv) for x in (gradient, tile.q, out, lse))
    dq_GRD, dk, dv = backend.backward(gradient, replace(tile, q=q), out, lse)
    return as_heads(dq_GRD, per_kv), dk, dv


def _parts(tile: TileInputs) -> list[tuple[slice, TileInputs]]:
    """Cuts the tile by heads into as few parts as `MOST_HEADS` allows, each with the range of its query heads."""
    per_kv, num_kv = tile.q.shape[0] // tile.k.shape[0], tile.k.shape[0]
    most_kv = max(1, MOST_HEADS // per_kv)
    parts = []
    for first in range(0, num_kv, most_kv):
        kv = slice(first, min(first + most_kv, num_kv))
        heads = slice(kv.start * per_kv, kv.stop * per_kv)
        parts.append((heads, _of_heads(tile, heads, kv)))
    return parts


def _of_heads(tile: TileInputs, heads: slice, kv: slice) -> TileInputs:
    """Returns the part of a tile with some query heads and the KV heads that they read."""
    dropout = None if tile.dropout is None else tile.dropout.of_heads(heads)
    return replace(tile, q=tile.q[heads], k=tile.k[kv], v=tile.v[kv], dropout=dropout)


def _backend_for(tile: TileInputs, name: str) -> TileBackend:
    """Returns the backend with this name, or for an empty name the first that accepts the tile."""
    is_capped, is_masked = tile.scores.softcap > 0, tile.is_masked
    if not name:
        device, head_dim = tile.q.device, max(tile.q.shape[-1], tile.v.shape[-1])
        capability = device_capability(device)
        num_queries, num_keys = tile.q.shape[1], tile.k.shape[1]
        is_planned = repays_plan(num_queries, num_keys, tile.causal)
        found = accepting(device.type, capability, tile.q.dtype, head_dim, num_keys, is_capped, is_masked)
        return first_of(found, is_planned)
    for backend in BACKENDS:
        if backend.name == name:
            if is_capped and not backend.caps:
                raise ValueError(f"attention backend {name!r} does not support capped scores; leave `backend` empty")
            if is_masked and not backend.masks:
                raise ValueError(f"attention backend {name!r} does not support chosen keys and dropout; leave `backend` empty")
            return backend
    raise ValueError(f"there is no attention backend {name!r}; choose one of {', '.join(each.name for each in BACKENDS)}")


def _with_repeated_kv(tile: TileInputs, per_kv: int) -> TileInputs:
    """Repeats every KV head for each query head that reads it."""
    return replace(tile, k=tile.k.repeat_interleave(per_kv, 0), v=tile.v.repeat_interleave(per_kv, 0))


def _summed(x_HUD: Tensor, per_kv: int) -> Tensor:
    """Sums over the query heads of each KV head, in at least fp32: [H, U, D] to [G, U, D]."""
    return x_HUD.unflatten(0, (-1, per_kv)).sum(1, dtype=torch.promote_types(x_HUD.dtype, torch.float32))


def _takes_cpu(device_type: str, capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> bool:
    return device_type == "cpu"


def _takes_all(device_type: str, capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> bool:
    return True


def _cpu_forward(tile: TileInputs) -> tuple[Tensor, Tensor]:
    inputs = (x.unsqueeze(0) for x in (tile.q, tile.k, tile.v))
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = attention(*inputs, 0.0, tile.causal, scale=tile.scores.scale)
    return out.squeeze(0), lse.squeeze(0)


def _cpu_backward(gradient: Tensor, tile: TileInputs, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gradient, q, out, lse = (x.contiguous() for x in (gradient, tile.q, out, lse))
    inputs = [x.unsqueeze(0) for x in (gradient, q, dense_channels(tile.k), dense_channels(tile.v), out, lse)]
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = backward(*inputs, 0.0, tile.causal, scale=tile.scores.scale)
    return dq.squeeze(0), dk.squeeze(0), dv.squeeze(0)


BACKENDS = (
    TileBackend("cudnn", REGISTERED_CUDNN.takes, cudnn_forward, cudnn_backward, groups_heads=True, min_keys=2, plans=True),
    TileBackend("flash_attention_2", REGISTERED_TILES.takes, flash_forward, flash_backward, groups_heads=True),
    # the packages come after torch's own operators, and so compute only capped scores, until they have been measured
    TileBackend("flash_attn_4", FLASH_4.takes, FLASH_4.forward, FLASH_4.backward, groups_heads=True, caps=True),
    TileBackend("flash_attn_2", FLASH_2.takes, FLASH_2.forward, FLASH_2.backward, groups_heads=True, caps=True),
    # groups_heads is off: the operator would sum over the query heads of a KV head in the keys' dtype, narrower than `_summed`
    TileBackend("cpu_flash", _takes_cpu, _cpu_forward, _cpu_backward),
    TileBackend("plain", _takes_all, plain_forward, plain_backward, groups_heads=True, caps=True, any_width=True, masks=True),
)
