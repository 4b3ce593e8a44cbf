"""Computes tiles with torch's own attention operators for CUDA: cuDNN and FlashAttention 2, called without autograd.

Traps of cuDNN behind torch 2.11 to 2.13, each guarded here:

- torch caches a plan for each layout of queries, keys and values, and a backward plan also remembers how the output and its
  gradient lay in memory at its first call, without comparing that later. So both are always given in the queries' layout.
- Versions up to 9.15.0 compute lengths wrongly that 128 does not divide; torch itself refuses them.
- Making a plan takes tenths of a second, so causal tiles of many tokens are filled up with zeros to one of 16 lengths between two
  powers of two. Tokens at the end change nothing: no other token sees their keys, and their own gradients are zero.
- TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1 in the environment changes the layout of the LSE, so cuDNN is left out.

Shapes are those of `tiles.plain`.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from torch import Tensor

from hf_longctx.runtime.core.strides import dense_channels, dense_strides, laid_out
from hf_longctx.runtime.tiles.plain import TileInputs

_HALF = (torch.bfloat16, torch.float16)
# last version of cuDNN whose results are wrong for some lengths; majors of the compute capabilities that torch prefers it on
_LAST_BAD_CUDNN, _CUDNN_MAJORS = 91500, (9, 10)
_RAGGED = "TORCH_CUDNN_SDPA_AVOID_RECOMPILE"
# causal tiles of more tokens get one of few lengths
_LEAST_ROUNDED, _LENGTHS_PER_OCTAVE = 2048, 16


def device_capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a device; (0, 0) without CUDA."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return (0, 0)
    return torch.cuda.get_device_capability(device)


def cudnn_version() -> int:
    """The version of cuDNN as one number, such as 91600 for 9.16.0; 0 without it."""
    return torch.backends.cudnn.version() or 0


def takes_cudnn(device_type: str, capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> bool:
    """Whether cuDNN computes such tiles; `head_dim`: the larger of the head sizes of queries and values."""
    # AMD devices report capabilities from 9.0 on too; torch's own attention also refuses cuDNN under these two conditions
    is_offered = torch.version.hip is None and torch.backends.cuda.cudnn_sdp_enabled()
    if not is_offered or torch.are_deterministic_algorithms_enabled() or os.environ.get(_RAGGED, "0") not in ("", "0"):
        return False
    is_right = device_type == "cuda" and capability[0] in _CUDNN_MAJORS and cudnn_version() > _LAST_BAD_CUDNN
    return is_right and is_half(dtype, head_dim, 128)


def takes_flash(device_type: str, capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> bool:
    """Whether torch's FlashAttention 2 computes such tiles."""
    return device_type == "cuda" and capability >= (8, 0) and is_half(dtype, head_dim, 256)


def is_half(dtype: torch.dtype, head_dim: int, largest_head: int) -> bool:
    """Whether the dtype has 16 bits and the head size is a multiple of 8 up to `largest_head`."""
    return dtype in _HALF and head_dim % 8 == 0 and head_dim <= largest_head


def planned_tokens(num_tokens: int) -> int:
    """Number of tokens to which cuDNN's causal tiles of `num_tokens` tokens are filled up: at most a sixteenth more."""
    if num_tokens <= _LEAST_ROUNDED:
        return num_tokens
    step = 2 ** ((num_tokens - 1).bit_length() - 1) // _LENGTHS_PER_OCTAVE
    return -(-num_tokens // step) * step


def cudnn_forward(tile: TileInputs) -> tuple[Tensor, Tensor]:
    """Output and LSE of a tile; the output lies in memory as the queries do."""
    num_tokens, tile = tile.q.shape[1], _filled_tile(tile)
    out, lse = _cudnn_forward(tile)
    return _first(out, num_tokens), _first(lse, num_tokens)


def cudnn_backward(gradient: Tensor, tile: TileInputs, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    num_queries, num_keys, tile = tile.q.shape[1], tile.k.shape[1], _filled_tile(tile)
    gradient, out, lse = (_filled(x, tile.q.shape[1]) for x in (gradient, out, lse))
    dq, dk, dv = _cudnn_backward(gradient, tile, out, lse)
    return _first(dq, num_queries), _first(dk, num_keys), _first(dv, num_keys)


def _filled_tile(tile: TileInputs) -> TileInputs:
    """A causal tile with tokens of zeros at its end, as many as its plan needs; other tiles as they are."""
    planned = planned_tokens(tile.q.shape[1])
    if not tile.causal or planned == tile.q.shape[1]:
        return tile
    return replace(tile, q=_filled(tile.q, planned), k=_filled(tile.k, planned), v=_filled(tile.v, planned))


def _filled(x: Tensor, num_tokens: int) -> Tensor:
    """`x` [H, T, ...] with tokens of zeros at its end, which lies in memory as before."""
    if x.shape[1] == num_tokens:
        return x
    tokens_first = x.dim() == 3 and x.stride(1) > x.stride(0)
    shape = (num_tokens, x.shape[0], *x.shape[2:]) if tokens_first else (x.shape[0], num_tokens, *x.shape[2:])
    filled = x.new_empty(shape)
    filled = filled.transpose(0, 1) if tokens_first else filled
    filled[:, : x.shape[1]] = x
    filled[:, x.shape[1] :] = 0
    return filled


def _first(x: Tensor, num_tokens: int) -> Tensor:
    return x if x.shape[1] == num_tokens else x[:, :num_tokens]


def _cudnn_forward(tile: TileInputs) -> tuple[Tensor, Tensor]:
    inputs = (dense_channels(x).unsqueeze(0) for x in (tile.q, tile.k, tile.v))
    # no bias, with LSE, no dropout
    out, lse_1HT1, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *inputs, None, True, 0.0, tile.causal, False, scale=tile.scores.scale
    )
    return out.squeeze(0), lse_1HT1.view(tile.q.shape[:2])


def _cudnn_backward(gradient: Tensor, tile: TileInputs, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (dense_channels(x) for x in (tile.q, tile.k, tile.v))
    strides = dense_strides(q)
    inputs = [x.unsqueeze(0) for x in (laid_out(gradient, strides), q, k, v, laid_out(out, strides))]
    # read only with dropout
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    # the operator wants the LSE as [B, H, T, 1]; no bias, no packed documents
    lse_1HT1 = lse.contiguous().unsqueeze(0).unsqueeze(-1)
    rest = (seed, seed, None, None, None, q.shape[1], k.shape[1], 0.0, tile.causal)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(*inputs, lse_1HT1, *rest, scale=tile.scores.scale)
    return dq.squeeze(0), dk.squeeze(0), dv.squeeze(0)


def flash_forward(tile: TileInputs) -> tuple[Tensor, Tensor]:
    """Output and LSE of a tile."""
    inputs = (dense_channels(x).unsqueeze(0) for x in (tile.q, tile.k, tile.v))
    attention = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *_ = attention(*inputs, 0.0, tile.causal, False, scale=tile.scores.scale)
    return out.squeeze(0), lse.squeeze(0)


def flash_backward(gradient: Tensor, tile: TileInputs, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    inputs = [dense_channels(x).unsqueeze(0) for x in (gradient, tile.q, tile.k, tile.v, out)]
    # read only with dropout
    device = tile.q.device
    seed, unused = torch.empty(2, dtype=torch.uint64, device=device), torch.empty((), dtype=torch.uint64, device=device)
    rest = (None, None, tile.q.shape[1], tile.k.shape[1], 0.0, tile.causal, seed, unused)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *inputs, lse.contiguous().unsqueeze(0), *rest, scale=tile.scores.scale
    )
    return dq.squeeze(0), dk.squeeze(0), dv.squeeze(0)
