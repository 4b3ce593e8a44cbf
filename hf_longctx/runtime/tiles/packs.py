"""Computes attention of several documents side by side in one call: torch's FlashAttention 2 for CUDA with document boundaries.

One call for all short documents of a pack costs one launch, and no plan for each new length as with cuDNN. The kernel supports
windows and fewer KV heads than query heads, and returns the LSE without gaps, [H, S], on NVIDIA devices.

Shapes: H query heads, G KV heads (H is a multiple of G), S tokens of all documents, D head size of queries and keys, E of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_longctx.runtime.core.host_copies import dense_channels
from hf_longctx.runtime.tiles.cuda import device_capability, takes_flash
from hf_longctx.runtime.tiles.packages import REGISTERED_CUDNN, REGISTERED_TILES, RegisteredAttention, active_flash
from hf_longctx.runtime.tiles.plain import Scores, TileInputs, plain_backward, plain_forward

# capabilities with little shared memory, and the largest heads for training that torch's own attention takes there
_SMALL, _LARGEST_ON_SMALL = ((8, 6), (8, 9), (12, 0), (12, 1)), 192
# the longest document is rounded up to whole blocks of the kernel. This does not change the result, and prevents that torch
# passes documents of one token to a kernel for decoding
_BLOCK = 128


@dataclass(frozen=True, slots=True)
class PackBounds:
    """Boundaries of documents on the device, int32 [documents + 1], each made once. known: cache by values."""

    known: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def on_device(self, lengths: Sequence[int], device: torch.device) -> Tensor:
        """Returns the boundaries of documents with these lengths, from 0 to their sum."""
        key = tuple(accumulate(lengths, initial=0))
        if key not in self.known:
            # the host does not wait for a copy from pinned memory
            bounds = torch.tensor(key, dtype=torch.int32, pin_memory=torch.cuda.is_available())
            self.known[key] = bounds.to(device, non_blocking=True)
        return self.known[key]


@dataclass(frozen=True, slots=True)
class PackInputs:
    """Documents side by side: q [H, S, D], k [G, S, D], v [G, S, E].

    In each document query i sees keys 0 to i, or the last `window` of them if that is not 0. bounds: from `PackBounds`. longest:
    tokens of the longest document.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bounds: Tensor
    longest: int
    scale: float
    window: int = 0

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest document, rounded up."""
        return -(-self.longest // _BLOCK) * _BLOCK

    @property
    def windows(self) -> dict[str, int]:
        """The window as operator arguments: numbers of tokens that a query sees before and after its own; -1 for all."""
        return {"window_size_left": self.window - 1, "window_size_right": 0} if 0 < self.window < self.longest else {}


def takes_packs(device: torch.device, dtype: torch.dtype, head_dim: int, is_capped: bool) -> bool:
    """Whether documents on this device can share a call. head_dim: the larger of the head sizes of queries and values.

    Raises RuntimeError if the user has activated another FlashAttention in torch, and its results are wrong.
    """
    # AMD devices return another layout of the LSE
    if device.type != "cuda" or is_capped or torch.version.hip is not None or not torch.backends.cuda.flash_sdp_enabled():
        return False
    capability = device_capability(device)
    is_too_large = capability in _SMALL and head_dim > _LARGEST_ON_SMALL
    return not is_too_large and _REGISTERED_PACKS.takes(device.type, capability, dtype, head_dim)


def attention_problems(device: torch.device, dtype: torch.dtype, head_dim: int) -> list[str]:
    """Lists problems of the attention that the user has activated in torch, if plans would use it for such heads."""
    capability, checks = device_capability(device), (REGISTERED_CUDNN, REGISTERED_TILES, _REGISTERED_PACKS)
    fitting = [checked for checked in checks if checked.fits(device.type, capability, dtype, head_dim)]
    return [problem for problem in (checked.problem(dtype, head_dim) for checked in fitting) if problem]


def pack_forward(pack: PackInputs) -> tuple[Tensor, Tensor]:
    """Returns output [H, S, E], and LSE [H, S] in at least fp32."""
    wide = _of_one_width(pack)
    q_SHD, k_SGD, v_SGD = (_tokens_first(x) for x in (wide.q, wide.k, wide.v))
    # no dropout, causal, no mask returned for debugging
    settings = (pack.bounds, pack.bounds, pack.most_tokens, pack.most_tokens, 0.0, True, False)
    attention = torch.ops.aten._flash_attention_forward
    out_SHD, lse_HS, *_ = attention(q_SHD, k_SGD, v_SGD, *settings, scale=pack.scale, **pack.windows)
    # a view would keep columns of padding for backward
    out_SHE = out_SHD if out_SHD.shape[2] == pack.v.shape[2] else _narrowed(out_SHD, pack.v.shape[2]).contiguous()
    return out_SHE.transpose(0, 1), lse_HS


def pack_backward(gradient_HSE: Tensor, pack: PackInputs, out_HSE: Tensor, lse_HS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns gradients of q, k and v, given output and LSE, into which more keys may have been merged."""
    wide = _of_one_width(pack)
    gradient, out = (_widened(x, wide.v.shape[2]) for x in (gradient_HSE, out_HSE))
    inputs = [_tokens_first(x) for x in (gradient, wide.q, wide.k, wide.v, out)]
    # read only with dropout
    device = pack.q.device
    seed, unused = torch.empty(2, dtype=torch.uint64, device=device), torch.empty((), dtype=torch.uint64, device=device)
    settings = (pack.bounds, pack.bounds, pack.most_tokens, pack.most_tokens, 0.0, True, seed, unused)
    backward = torch.ops.aten._flash_attention_backward
    found = backward(*inputs, lse_HS.contiguous(), *settings, scale=pack.scale, **pack.windows)
    sizes = (pack.q.shape[2], pack.k.shape[2], pack.v.shape[2])
    dq, dk, dv = (_narrowed(x, size).transpose(0, 1) for x, size in zip(found, sizes, strict=True))
    return dq, dk, dv


def _of_one_width(pack: PackInputs) -> PackInputs:
    """Returns the documents, padded with columns of zeros if queries and values differ in head size."""
    width = max(pack.q.shape[2], pack.v.shape[2])
    return replace(pack, q=_widened(pack.q, width), k=_widened(pack.k, width), v=_widened(pack.v, width))


def _widened(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _narrowed(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else x[..., :width]


def _tokens_first(x_HSD: Tensor) -> Tensor:
    return dense_channels(x_HSD).transpose(0, 1)


def pack_error(device: torch.device, dtype: torch.dtype, head_dim: int) -> float:
    """Returns the largest difference from `tiles.plain` of three documents, with and without a window; NaN stays NaN."""
    lengths, worst = (1, 70, 130), torch.zeros((), device=device)
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(sum(lengths), heads, head_dim, generator=generator).to(device, dtype) for heads in (4, 4, 2, 2)]
    gradient, q, k, v = (x.transpose(0, 1) for x in drawn)
    bounds = torch.tensor((0, *accumulate(lengths)), dtype=torch.int32, device=device)
    for window in (0, 40):
        pack = PackInputs(q, k, v, bounds, max(lengths), head_dim**-0.5, window)
        documents = zip(*(x.float().split(lengths, 1) for x in (gradient, q, k, v)), strict=True)
        plain = [_plain_results(g, *qkv, scale=pack.scale, window=window) for g, *qkv in documents]
        out, lse, *gradients = (torch.cat(parts, 1) for parts in zip(*plain, strict=True))
        found = (*pack_forward(pack), *pack_backward(gradient, pack, out.to(dtype), lse))
        for ours, expected in zip(found, (out, lse, *gradients), strict=True):
            # torch.maximum keeps NaN
            worst = torch.maximum(worst, (ours.float() - expected).abs().max() / expected.abs().max())
    return float(worst)


def _plain_results(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int) -> tuple[Tensor, ...]:
    """Returns output, LSE and gradients of one document, computed by matrices."""
    seen = None
    if window:
        places = torch.arange(q.shape[1], device=q.device)
        seen = places.unsqueeze(1) - torch.arange(window, device=q.device)
    tile = TileInputs(q, k, v, Scores(scale), causal=True, chosen=seen)
    out, lse = plain_forward(tile)
    return out, lse, *plain_backward(gradient, tile, out, lse)


_REGISTERED_PACKS = RegisteredAttention("calls of several documents", active_flash, takes_flash, pack_error)
