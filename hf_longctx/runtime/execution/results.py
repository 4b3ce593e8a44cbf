"""Results of a step on one rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_longctx.runtime.core.clock import Interval, StepClock


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Peak bytes of this rank during a plan, as the runtime counted them.

    saved, host: bytes that chunks under activation policies hold for their backward, on the device and on the host. kv_book:
    keys and values of slices, and their gradients. device_peak: all memory of a CUDA device that torch had in use, by tensors or
    by streams (`active_bytes`); 0 elsewhere.
    """

    saved: int = 0
    host: int = 0
    kv_book: int = 0
    device_peak: int = 0

    def most(self, other: StepMemory) -> StepMemory:
        """The larger number of each kind."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("saved", "host", "kv_book", "device_peak"))
        return StepMemory(*map(max, pairs))


NO_MEMORY = StepMemory()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of a plan. `loss` is its part of the step's mean loss over all ranks' label tokens, equal on every rank.

    aux_loss: the balance of the experts over the whole step; the loss of the step's first plan has it, times its coefficient.
    router_load: rows of the fullest expert, divided by those of an even split. Both are None for later plans, and for models
    whose experts are not balanced. num_bad: ranks on which the step's reduced gradients are not finite (`finite.py`); zero
    for plans before the step's last one. tallied: the sums of `TokenTally` over all ranks; empty if tokens are not counted.
    """

    loss: Tensor
    clock: StepClock
    memory: StepMemory = NO_MEMORY
    aux_loss: Tensor | None = None
    router_load: Tensor | None = None
    num_bad: Tensor | None = None
    tallied: tuple[Tensor, ...] = ()

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradients are finite on all ranks; waits for the device."""
        return bool(torch.isfinite(self.loss)) and not (self.num_bad is not None and bool(self.num_bad))

    def intervals(self) -> list[Interval]:
        """This rank's actions with their times; call it after the step, since on CUDA it waits for the device."""
        return self.clock.intervals()
