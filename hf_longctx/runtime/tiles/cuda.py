"""Computes tiles with torch's own attention operators for CUDA: cuDNN and FlashAttention 2, called without autograd.

Problems of cuDNN in torch 2.11 to 2.13, each avoided here in all versions:

- torch caches a plan for each layout of queries, keys and values, and a backward plan also fixes how the output and its
  gradient lay in memory at its first call, without comparing that later. So both are always given in the queries' layout.
- Versions up to 9.15.0 are wrong for lengths that are not multiples of 128; torch itself refuses them.
- Making a plan takes some 50 ms, so few lengths and layouts are used. Causal tiles and the queries of other tiles are padded
  with zeros to one of 32 lengths between two powers of two. Tokens at the end change nothing: no other token sees their keys, and
  their own gradients are zero. Keys that all queries see cannot be padded, so `attention.rows` splits such tiles: the first
  `planned_keys` go to cuDNN, the others, at most a sixteenth, to an operator without plans. Such an operator also computes
  tiles of fewer pairs of queries and keys than repay a plan. Heads of one tile lie side by side, or tokens do: their distance in
  memory would else depend on the other tokens of a chunk, and plans with it.
- TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1 in the environment changes the layout of the LSE, so cuDNN is not used then.

Shapes are those of `tiles.plain`.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from torch import Tensor

from hf_longctx.plan.core import sharding
from hf_longctx.runtime.core.host_copies import dense_channels, dense_strides, laid_out
from hf_longctx.runtime.tiles.plain import TileInputs

_HALF = (torch.bfloat16, torch.float16)
# last version of cuDNN with wrong results for some lengths; major compute capabilities on which torch prefers cuDNN
_LAST_BAD_CUDNN, _CUDNN_MAJORS = 91500, (9, 10)
_RAGGED = "TORCH_CUDNN_SDPA_AVOID_RECOMPILE"
# number of key lengths of plans between two powers of two, for tiles without a mask
_KEYS_PER_OCTAVE = 16
# pairs of queries and keys that repay a plan: those of a causal tile of 2048 tokens; without a mask both lengths vary, and plans
# are used less often
_LEAST_CAUSAL, _LEAST_PAIRS = 2**21, 2**25


def device_capability(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability of a device; (0, 0) without CUDA."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return (0, 0)
    return torch.cuda.get_device_capability(device)


def cudnn_version() -> int:
    """Returns the version of cuDNN as one number, such as 91600 for 9.16.0; 0 without it."""
    return torch.backends.cudnn.version() or 0


def takes_cudnn(device_type: str, capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> bool:
    """Whether cuDNN computes such tiles. head_dim: the larger of the head sizes of queries and values."""
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
    """Returns the number of tokens to which cuDNN's tiles are padded: for many tokens, at most a thirty-second more."""
    step = sharding.length_step(num_tokens)
    return num_tokens if num_tokens <= sharding.LEAST_LENGTH_STEP else -(-num_tokens // step) * step


def planned_keys(num_keys: int) -> int:
    """Returns the keys, at most `num_keys`, of cuDNN's plan for a tile without a mask: at least 15/16 of many, 0 of few."""
    step = sharding.length_step(num_keys + 1, _KEYS_PER_OCTAVE)
    return num_keys // step * step


def repays_plan(num_queries: int, num_keys: int, causal: bool) -> bool:
    """Whether a plan of cuDNN for these lengths saves more time than it takes to make."""
    if causal:
        return num_queries * num_keys // 2 >= _LEAST_CAUSAL
    return num_queries * num_keys >= _LEAST_PAIRS and planned_keys(num_keys) == num_keys


def cudnn_forward(tile: TileInputs) -> tuple[Tensor, Tensor]:
    """Returns output and LSE of a tile; the output has the memory layout of the queries."""
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
    """Pads a tile's queries, and its keys if it is causal, with tokens of zeros to the lengths of its plan."""
    num_queries = planned_tokens(tile.q.shape[1])
    num_keys = num_queries if tile.causal else tile.k.shape[1]
    q, k, v = _filled(tile.q, num_queries), _filled(tile.k, num_keys), _filled(tile.v, num_keys)
    return replace(tile, q=_side_by_side(q), k=_side_by_side(k), v=_side_by_side(v))


def _filled(x: Tensor, num_tokens: int) -> Tensor:
    """Pads `x` [H, T, ...] with tokens of zeros, in the same memory layout."""
    if x.shape[1] == num_tokens:
        return x
    is_tokens_first = x.dim() == 3 and x.stride(1) > x.stride(0)
    shape = (num_tokens, x.shape[0], *x.shape[2:]) if is_tokens_first else (x.shape[0], num_tokens, *x.shape[2:])
    filled = x.new_empty(shape)
    filled = filled.transpose(0, 1) if is_tokens_first else filled
    filled[:, : x.shape[1]] = x
    filled[:, x.shape[1] :] = 0
    return filled


def _side_by_side(x_HTD: Tensor) -> Tensor:
    """Returns the tensor without gaps between heads, if each head is contiguous."""
    is_tokens_first = x_HTD.stride(1) > x_HTD.stride(0)
    return x_HTD if is_tokens_first or x_HTD.stride(0) == x_HTD.shape[1] * x_HTD.stride(1) else x_HTD.contiguous()


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
