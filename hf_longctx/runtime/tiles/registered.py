"""Checks the FlashAttention that a user has put under torch's own operators, before tiles or packs are given to it.

`torch.nn.attention.activate_flash_attention_impl` replaces FlashAttention 2 in torch's operators, for the whole process, by
FlashAttention 3 ("FA3"), 4 ("FA4") or any other implementation that is registered. This package activates none. It compares the
results of the one that is active with those of `tiles.plain`, forward and backward, once for each activation, device, dtype and
head size. One that differs or fails is refused by its name: torch's own attention would use it, too.

Such operators make no plans, so they get the tiles that cuDNN would get otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import attention

from hf_longctx.runtime.tiles.cuda import device_capability, flash_backward, flash_forward, takes_flash
from hf_longctx.runtime.tiles.packages import TOLERANCE, worst_error

_CUDA = torch.device("cuda")


def active_flash() -> str:
    """Name of the implementation that is active in place of torch's own FlashAttention 2; empty if none is."""
    # versions of torch before the registry have no such function
    current = getattr(attention, "current_flash_attention_impl", None)
    return (current() if current is not None else None) or ""


@dataclass
class RegisteredFlash:
    """Verdicts on implementations.

    what: name of the calls. error: (device, dtype, head size) -> largest difference from `plain`, relative to the largest
    element. activation: the activation that `problems` hold for, as torch keeps it; a later one clears them.
    """

    what: str
    error: Callable[[torch.device, torch.dtype, int], float]
    activation: Any = None
    problems: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def problem(self, dtype: torch.dtype, head_dim: int) -> str:
        """Says how the active implementation is wrong, and what to do; empty if it is right or none is active."""
        name = active_flash()
        if not name:
            return ""
        # torch makes a new object at every activation, also of one that was registered again under its name
        activation = getattr(getattr(attention, "_registry", None), "_FLASH_ATTENTION_ACTIVE", None) or name
        if activation is not self.activation:
            self.activation = activation
            self.problems.clear()
        device = _CUDA
        key = (device_capability(device), dtype, head_dim, torch.are_deterministic_algorithms_enabled())
        if key not in self.problems:
            self.problems[key] = self._found(name, device, dtype, head_dim)
        return self.problems[key]

    def takes(self, device_type: str, capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> bool:
        """Whether torch's FlashAttention computes such calls; raises RuntimeError if the active implementation is wrong.

        head_dim: the larger of the head sizes of queries and values.
        """
        if not takes_flash(device_type, capability, dtype, head_dim):
            return False
        if active_flash() and (problem := self.problem(dtype, head_dim)):
            raise RuntimeError(problem)
        return True

    def _found(self, name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
        try:
            error = self.error(device, dtype, head_dim)
        # it is refused whatever its functions raise
        except Exception as failure:
            found = f"fails with {type(failure).__name__}: {failure}".split("\n")[0]
        else:
            # written so that NaN is a difference, too
            if error <= TOLERANCE:
                return ""
            found = f"differs from plain matrices by {error:.1e} (limit {TOLERANCE:.1e})"
        return (
            f"the attention {name!r}, which is active in torch.nn.attention, {found} in {self.what} with heads of {head_dim} in "
            f"{dtype}; call torch.nn.attention.restore_flash_attention_impl(), or install a version of it that fits this torch"
        )


def _tile_error(device: torch.device, dtype: torch.dtype, head_dim: int) -> float:
    return worst_error(flash_forward, flash_backward, device, dtype, head_dim, softcaps=(0.0,))


REGISTERED_TILES = RegisteredFlash("tiles", _tile_error)
