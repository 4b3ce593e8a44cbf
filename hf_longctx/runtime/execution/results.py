"""Results of a step on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hf_longctx.runtime.core.clock import Interval, StepClock


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The most bytes of this rank at any time in a plan, as counted.

    saved, host: that chunks under activation policies hold for their backward on the device and on the host. kv_book: keys and
    values of slices, and their gradients. device_peak: all that torch had allocated on a CUDA device; 0 elsewhere.
    """

    saved: int = 0
    host: int = 0
    kv_book: int = 0
    device_peak: int = 0

    def most(self, other: StepMemory) -> StepMemory:
        """The larger of both, number by number."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("saved", "host", "kv_book", "device_peak"))
        return StepMemory(*map(max, pairs))


NO_MEMORY = StepMemory()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a plan leaves behind. `loss` is its part of the step's mean loss over all ranks' label tokens, on every rank.

    router_loss: of a model whose experts are balanced, the balance of the whole step, which is part of the loss of its first
    plan. router_load: the rows of the fullest expert for those of an even split. None for other models and later plans.
    """

    loss: Tensor
    clock: StepClock
    memory: StepMemory = NO_MEMORY
    router_loss: Tensor | None = None
    router_load: Tensor | None = None

    def intervals(self) -> list[Interval]:
        """What this rank did; call it after the step, since on CUDA it waits for the device."""
        return self.clock.intervals()
