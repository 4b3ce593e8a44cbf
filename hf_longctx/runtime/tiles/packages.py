"""Tiles by the packages flash-attn (FlashAttention 2) and flash-attn-4, where these are installed and found right.

A backward from merged results needs functions that these packages keep to themselves and change between releases. So a package is
believed only after its answers for small tiles, with a mask and without, capped and not, forward and backward, were compared
with plain matrices, once for each device, dtype and head size. One that is not installed is passed over; one that differs or
fails is left out with a line in the log.

Their windows and sinks are not used: both are made of tiles and their LSE. Shapes are those of `plain_tiles`.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from itertools import product
from typing import Any

import torch
from torch import Tensor

from hf_longctx.runtime.tiles.plain import Scores, plain_backward, plain_forward

logger = logging.getLogger(__name__)

Forward = Callable[[Tensor, Tensor, Tensor, Scores, bool], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Scores, bool], tuple[Tensor, Tensor, Tensor]]

_HALF = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256
# relative to the largest element: inputs are the same, outputs are rounded to bf16, and weights inside
_TOLERANCE = 0.02


@dataclass(frozen=True)
class PackageTiles:
    """What a package computes of tiles. verdicts: filled by `takes`, by all that they depend on."""

    name: str
    least_capability: tuple[int, int]
    forward: Forward
    backward: Backward
    verdicts: dict[tuple[tuple[int, int], torch.dtype, int, bool], bool] = field(default_factory=dict)

    def takes(self, device_type: str, capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> bool:
        """Whether the package is there and right for such tiles on this process's CUDA device; runs small ones the first time."""
        is_half = dtype in _HALF and head_dim % 8 == 0 and head_dim <= _LARGEST_HEAD
        if device_type != "cuda" or not is_half or capability < self.least_capability or not self.is_installed:
            return False
        key = (capability, dtype, head_dim, torch.are_deterministic_algorithms_enabled())
        if key not in self.verdicts:
            self.verdicts[key] = self.is_right(torch.device("cuda"), dtype, head_dim)
        return self.verdicts[key]

    @property
    def is_installed(self) -> bool:
        """Whether it is there, by its metadata: nothing is imported. False on a machine without CUDA."""
        return torch.cuda.is_available() and any(importlib.metadata.distributions(name=self.name))

    def is_right(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        """Whether small tiles come out as those of plain matrices; if not, says so in the log."""
        try:
            error = worst_error(self.forward, self.backward, device, dtype, head_dim)
        # whatever a foreign function raises, its row is left out
        except Exception as problem:
            logger.warning(
                "attention of package %s is not used for heads of %d in %s: its check failed with %s: %s",
                *(self.name, head_dim, dtype, type(problem).__name__, problem),
            )
            return False
        # written so that no number is wrong
        if not error <= _TOLERANCE:
            logger.warning(
                "attention of package %s is not used for heads of %d in %s: it differs by %.1e from plain matrices (limit %.1e)",
                *(self.name, head_dim, dtype, error, _TOLERANCE),
            )
            return False
        return True


def worst_error(forward: Forward, backward: Backward, device: torch.device, dtype: torch.dtype, head_dim: int) -> float:
    """The largest difference from plain matrices, relative to each result's largest element; not a number for such results."""
    worst = torch.zeros((), device=device)
    for (num_keys, causal), softcap in product(((130, True), (70, False)), (0.0, 1.0)):
        generator = torch.Generator().manual_seed(num_keys)
        shapes = ((4, 130), (4, 130), (2, num_keys), (2, num_keys))
        drawn = [torch.randn(*shape, head_dim, generator=generator).to(dtype).to(device) for shape in shapes]
        # tokens outermost, as they lie in the K/V book and where heads were gathered
        gradient, q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in drawn)
        scores = Scores(head_dim**-0.5, softcap)
        out, lse = plain_forward(q.float(), k.float(), v.float(), scores, causal)
        # as if another tile had been merged in
        merged_out, merged_lse = (out * 0.7 + 0.1).to(dtype), lse + 0.3
        of_plain = (gradient.float(), q.float(), k.float(), v.float(), merged_out.float(), merged_lse)
        gradients = plain_backward(*of_plain, scores, causal)
        expected = (out, lse, *gradients)
        found = (*forward(q, k, v, scores, causal), *backward(gradient, q, k, v, merged_out, merged_lse, scores, causal))
        for ours, plain in zip(found, expected, strict=True):
            if ours.shape != plain.shape:
                raise ValueError(f"a result has shape {list(ours.shape)}, expected {list(plain.shape)}")
            # maximum keeps what is not a number
            worst = torch.maximum(worst, (ours.float() - plain).abs().max() / plain.abs().max())
    return float(worst)


def _tokens_first(x_HTD: Tensor) -> Tensor:
    """[1, T, H, D]: no copy where the last dimension is dense, as these packages want it."""
    x = x_HTD if x_HTD.stride(-1) == 1 else x_HTD.contiguous()
    return x.transpose(0, 1).unsqueeze(0)


def _heads_first(x_1THD: Tensor) -> Tensor:
    return x_1THD.squeeze(0).transpose(0, 1)


def _flash_2_settings(scores: Scores, causal: bool) -> dict[str, Any]:
    """What forward and backward are told alike."""
    return {
        "dropout_p": 0.0,
        "softmax_scale": scores.scale,
        "causal": causal,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": scores.softcap,
        "alibi_slopes": None,
    }


def _flash_2_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores, causal: bool) -> tuple[Tensor, Tensor]:
    run = import_module(_FLASH_2_MODULE)._flash_attn_forward
    out, lse, *_ = run(
        *map(_tokens_first, (q, k, v)),
        **_flash_2_settings(scores, causal),
        return_softmax=False,
    )
    return _heads_first(out), lse.squeeze(0)


def _flash_2_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = [_tokens_first(x) for x in (gradient, q, k, v, out)]
    gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs[1:4]]
    import_module(_FLASH_2_MODULE)._flash_attn_backward(
        *inputs,
        lse.contiguous().unsqueeze(0),
        *gradients,
        **_flash_2_settings(scores, causal),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    dq, dk, dv = map(_heads_first, gradients)
    return dq, dk, dv


def _flash_4_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores, causal: bool) -> tuple[Tensor, Tensor]:
    run = import_module(_FLASH_4_MODULE)._flash_attn_fwd
    how = {"softmax_scale": scores.scale, "causal": causal, "softcap": scores.softcap}
    out, lse, *_ = run(*map(_tokens_first, (q, k, v)), **how, return_lse=True)
    return _heads_first(out), lse.squeeze(0)


def _flash_4_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    run = import_module(_FLASH_4_MODULE)._flash_attn_bwd
    how = {"softmax_scale": scores.scale, "causal": causal, "softcap": scores.softcap}
    how["deterministic"] = torch.are_deterministic_algorithms_enabled()
    inputs = [_tokens_first(x) for x in (q, k, v, out, gradient)]
    dq, dk, dv = map(_heads_first, run(*inputs, lse.contiguous().unsqueeze(0), **how))
    return dq, dk, dv


_FLASH_2_MODULE, _FLASH_4_MODULE = "flash_attn.flash_attn_interface", "flash_attn.cute.interface"
FLASH_2 = PackageTiles("flash-attn", (8, 0), _flash_2_forward, _flash_2_backward)
FLASH_4 = PackageTiles("flash-attn-4", (9, 0), _flash_4_forward, _flash_4_backward)
