"""Computes tiles with the packages flash-attn (FlashAttention 2) and flash-attn-4, and with attention activated in torch.

`tiles.tile` lists both packages among its backends. A backward from merged results needs private functions of them, which change
between releases. So a package is used only after its results for small tiles (with and without a mask, with and without a
softcap, forward and backward) have been compared with those of `tiles.plain`, once per device, dtype and head size. A package
that is not installed is skipped; one that differs or fails is not used, with a warning in the log. The packages' own support for
windows and sinks is not used, since both are built from tiles and their LSE.

With `torch.nn.attention.activate_flash_attention_impl` a user can replace FlashAttention 2 in torch's operators, for the whole
process, by FlashAttention 3 ("FA3"), 4 ("FA4") or any other registered implementation. Its results are compared in the same way,
once per activation, device, dtype and head size. One that differs or fails is refused by name, since torch's own attention would
use it too. Such operators make no plans, so they get the tiles that cuDNN would get otherwise. An implementation that replaces
cuDNN's operators instead ("CUDNN" of nvidia-cudnn-frontend) computes cuDNN's tiles, after the same comparison.

Shapes are those of `tiles.plain`.
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

from hf_longctx.runtime.core.torch_versions import activation, is_replaced
from hf_longctx.runtime.tiles.cuda import (
    cudnn_backward,
    cudnn_forward,
    device_capability,
    flash_backward,
    flash_forward,
    is_half,
    takes_cudnn,
    takes_flash,
)
from hf_longctx.runtime.tiles.plain import Backward, Forward, Scores, TileInputs, plain_backward, plain_forward

logger = logging.getLogger(__name__)


_LARGEST_HEAD = 256
# largest difference allowed, relative to the largest element: outputs and softmax weights are rounded to bf16
TOLERANCE = 0.02


@dataclass(frozen=True)
class PackageTiles:
    """One package as a tile backend. verdicts: results of checks, filled by `takes`, by everything they depend on."""

    name: str
    least_capability: tuple[int, int]
    forward: Forward
    backward: Backward
    verdicts: dict[tuple[tuple[int, int], torch.dtype, int, bool], bool] = field(default_factory=dict)

    def takes(self, device_type: str, capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> bool:
        """Whether the package is installed and correct for such tiles on this process's CUDA device; the first call checks."""
        if device_type != "cuda" or not is_half(dtype, head_dim, _LARGEST_HEAD) or capability < self.least_capability:
            return False
        key = (capability, dtype, head_dim, torch.are_deterministic_algorithms_enabled())
        if key not in self.verdicts:
            # finding a package searches the disk, so it is part of the verdict
            self.verdicts[key] = self.is_installed and self.is_right(torch.device("cuda"), dtype, head_dim)
        return self.verdicts[key]

    @property
    def is_installed(self) -> bool:
        """Whether the package's metadata is found (nothing is imported); False on a machine without CUDA."""
        return torch.cuda.is_available() and any(importlib.metadata.distributions(name=self.name))

    def is_right(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        """Whether small tiles agree with `plain`; warns in the log if not."""
        try:
            error = worst_error(self.forward, self.backward, device, dtype, head_dim)
        # the package is not used, whatever its function raises
        except Exception as problem:
            logger.warning(
                "attention of package %s is not used for heads of %d in %s: its check failed with %s: %s",
                *(self.name, head_dim, dtype, type(problem).__name__, problem),
            )
            return False
        # written so that NaN fails too
        if not error <= TOLERANCE:
            logger.warning(
                "attention of package %s is not used for heads of %d in %s: it differs from plain matrices by %.1e (limit %.1e)",
                *(self.name, head_dim, dtype, error, TOLERANCE),
            )
            return False
        return True


def worst_error(
    forward: Forward,
    backward: Backward,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    softcaps: tuple[float, ...] = (0.0, 1.0),
) -> float:
    """Returns the largest difference from `plain` over small tiles, relative to a result's largest element; NaN stays NaN."""
    worst = torch.zeros((), device=device)
    for (num_keys, causal), softcap in product(((130, True), (70, False)), softcaps):
        generator = torch.Generator().manual_seed(num_keys)
        shapes = ((4, 130), (4, 130), (2, num_keys), (2, num_keys))
        drawn = [torch.randn(*shape, head_dim, generator=generator).to(dtype).to(device) for shape in shapes]
        # tokens outermost: the memory layout of the K/V book and of heads received from other ranks
        gradient, q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in drawn)
        scores = Scores(head_dim**-0.5, softcap)
        tile, wide_tile = (TileInputs(q.to(like), k.to(like), v.to(like), scores, causal) for like in (dtype, torch.float32))
        out, lse = plain_forward(wide_tile)
        # pretend that another tile was merged in
        merged_out, merged_lse = (out * 0.7 + 0.1).to(dtype), lse + 0.3
        expected = (out, lse, *plain_backward(gradient.float(), wide_tile, merged_out.float(), merged_lse))
        found = (*forward(tile), *backward(gradient, tile, merged_out, merged_lse))
        for ours, plain in zip(found, expected, strict=True):
            if ours.shape != plain.shape:
                raise ValueError(f"a result has shape {list(ours.shape)}, expected {list(plain.shape)}")
            # torch.maximum keeps NaN
            worst = torch.maximum(worst, (ours.float() - plain).abs().max() / plain.abs().max())
    return float(worst)


def _tokens_first(x_HTD: Tensor) -> Tensor:
    """Turns [H, T, D] into [1, T, H, D] with a dense last dimension, the packages' layout; copies only if necessary."""
    x = x_HTD if x_HTD.stride(-1) == 1 else x_HTD.contiguous()
    return x.transpose(0, 1).unsqueeze(0)


def _heads_first(x_1THD: Tensor) -> Tensor:
    return x_1THD.squeeze(0).transpose(0, 1)


def _flash_2_settings(scores: Scores, causal: bool) -> dict[str, Any]:
    """Returns the arguments that forward and backward share."""
    return {
        "dropout_p": 0.0,
        "softmax_scale": scores.scale,
        "causal": causal,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": scores.softcap,
        "alibi_slopes": None,
    }


def _flash_2_forward(tile: TileInputs) -> tuple[Tensor, Tensor]:
    run = import_module(_FLASH_2_MODULE)._flash_attn_forward
    out, lse, *_ = run(
        *map(_tokens_first, (tile.q, tile.k, tile.v)),
        **_flash_2_settings(tile.scores, tile.causal),
        return_softmax=False,
    )
    return _heads_first(out), lse.squeeze(0)


def _flash_2_backward(gradient: Tensor, tile: TileInputs, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    inputs = [_tokens_first(x) for x in (gradient, tile.q, tile.k, tile.v, out)]
    gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs[1:4]]
    import_module(_FLASH_2_MODULE)._flash_attn_backward(
        *inputs,
        lse.contiguous().unsqueeze(0),
        *gradients,
        **_flash_2_settings(tile.scores, tile.causal),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    dq, dk, dv = map(_heads_first, gradients)
    return dq, dk, dv


def _flash_4_settings(tile: TileInputs) -> dict[str, Any]:
    """Returns the arguments that forward and backward share."""
    return {"softmax_scale": tile.scores.scale, "causal": tile.causal, "softcap": tile.scores.softcap}


def _flash_4_forward(tile: TileInputs) -> tuple[Tensor, Tensor]:
    run = import_module(_FLASH_4_MODULE)._flash_attn_fwd
    out, lse, *_ = run(*map(_tokens_first, (tile.q, tile.k, tile.v)), **_flash_4_settings(tile), return_lse=True)
    return _heads_first(out), lse.squeeze(0)


def _flash_4_backward(gradient: Tensor, tile: TileInputs, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    run = import_module(_FLASH_4_MODULE)._flash_attn_bwd
    settings = _flash_4_settings(tile) | {"deterministic": torch.are_deterministic_algorithms_enabled()}
    inputs = [_tokens_first(x) for x in (tile.q, tile.k, tile.v, out, gradient)]
    dq, dk, dv = map(_heads_first, run(*inputs, lse.contiguous().unsqueeze(0), **settings))
    return dq, dk, dv


_FLASH_2_MODULE, _FLASH_4_MODULE = "flash_attn.flash_attn_interface", "flash_attn.cute.interface"
FLASH_2 = PackageTiles("flash-attn", (8, 0), _flash_2_forward, _flash_2_backward)
FLASH_4 = PackageTiles("flash-attn-4", (9, 0), _flash_4_forward, _flash_4_backward)


_CUDA = torch.device("cuda")


# operators of torch that an implementation of cuDNN's attention replaces, and those that another FlashAttention replaces
_CUDNN, _FLASH = "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_flash_attention"


def active_attention() -> str:
    """Returns the name of the implementation that is active in `torch.nn.attention`; empty if there is none."""
    active = activation()
    return "" if active is None else active[0]


@dataclass
class _Kind:
    """Operators that the active implementation replaces. known: the activation to which `is_cudnn` belongs."""

    known: Any = None
    is_cudnn: bool = False

    def read(self) -> bool:
        """Whether the active implementation replaces cuDNN's attention, and leaves FlashAttention 2."""
        if (active := activation()) is not self.known:
            self.known = active
            # one that replaces neither is taken for a FlashAttention, for which torch has its registry
            self.is_cudnn = active is not None and is_replaced(_CUDNN, _CUDA.type) and not is_replaced(_FLASH, _CUDA.type)
        return self.is_cudnn


_KIND = _Kind()


def active_cudnn() -> str:
    """Returns the name of the implementation that is active in place of cuDNN's operators alone; empty if there is none."""
    return active_attention() if _KIND.read() else ""


def active_flash() -> str:
    """Returns the name of the implementation that is active in place of torch's own FlashAttention 2; empty if there is none."""
    return "" if _KIND.read() else active_attention()


@dataclass
class RegisteredAttention:
    """Results of checks of active implementations, as far as they compute one kind of calls."""

    # name of the calls
    what: str
    # name of the active implementation that computes them; empty if there is none
    active: Callable[[], str]
    # whether torch's operator computes such calls
    fits: Callable[[str, tuple[int, int], torch.dtype, int], bool]
    # (device, dtype, head size) -> largest difference from `plain`, relative to the largest element
    error: Callable[[torch.device, torch.dtype, int], float]
    # activation to which `problems` belong; a later one clears them
    known: Any = None
    problems: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def problem(self, dtype: torch.dtype, head_dim: int) -> str:
        """Describes how the active implementation is wrong, and what to do; empty if it is correct or none is active."""
        name = self.active()
        if not name:
            return ""
        if (active := activation()) is not self.known:
            self.known = active
            self.problems.clear()
        device = _CUDA
        key = (device_capability(device), dtype, head_dim, torch.are_deterministic_algorithms_enabled())
        if key not in self.problems:
            self.problems[key] = self._found(name, device, dtype, head_dim)
        return self.problems[key]

    def takes(self, device_type: str, capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> bool:
        """Whether torch's operator computes such calls; raises RuntimeError if the active implementation of it is wrong.

        head_dim: the larger of the head sizes of queries and values.
        """
        if not self.fits(device_type, capability, dtype, head_dim):
            return False
        if problem := self.problem(dtype, head_dim):
            raise RuntimeError(problem)
        return True

    def _found(self, name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
        try:
            error = self.error(device, dtype, head_dim)
        # refused whatever its functions raise
        except Exception as failure:
            found = f"fails with {type(failure).__name__}: {failure}".split("\n")[0]
        else:
            # written so that NaN fails too
            if error <= TOLERANCE:
                return ""
            found = f"differs from plain matrices by {error:.1e} (limit {TOLERANCE:.1e})"
        return (
            f"the attention {name!r}, which is active in torch.nn.attention, {found} in {self.what} with heads of {head_dim} in "
            f"{dtype}; call torch.nn.attention.restore_flash_attention_impl(), or install a version of it that fits this torch"
        )


def _flash_error(device: torch.device, dtype: torch.dtype, head_dim: int) -> float:
    return worst_error(flash_forward, flash_backward, device, dtype, head_dim, softcaps=(0.0,))


def _cudnn_error(device: torch.device, dtype: torch.dtype, head_dim: int) -> float:
    return worst_error(cudnn_forward, cudnn_backward, device, dtype, head_dim, softcaps=(0.0,))


REGISTERED_TILES = RegisteredAttention("tiles", active_flash, takes_flash, _flash_error)
REGISTERED_CUDNN = RegisteredAttention("tiles of cuDNN", active_cudnn, takes_cudnn, _cudnn_error)
