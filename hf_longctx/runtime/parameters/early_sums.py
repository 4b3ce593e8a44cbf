"""Sums gradients over ranks during the last backward of a step, each bucket when no layer still to run adds to it.

`gradients.ReplicatedParameters` makes `EarlySums`; the executor says which backward is the last, and where the step ends.

Buckets follow the layers from the last one to the first. All ranks start all of them, in the same order, on a process group that
nothing else uses. So no rank waits for another inside its backward, whatever their groups, orders and micro-batches are: a rank
whose last backward comes later, or that has none, starts its buckets later, at the latest at the end of the step. Ranks of one
sequence group start a bucket at the same place of their programs (`layer_order.py`).

A bucket that was started too early costs time and nothing else. A gradient that comes after its weight's sum has started, as
from a module that several layers share, adds up beside it. The ranks tell each other at the end, sum the rest, and sum such
weights at the end from then on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_longctx.runtime.parameters.layer_order import AT_END, LayerOrder

# bytes from which a gradient is summed where it lies; smaller ones are copied into buckets of at most so many bytes
_EARLY_BUCKET_BYTES = 16 * 2**20
# most bytes of such copies, those of one bucket at the end of a step; what is beyond them is summed at the end
_MOST_COPIED_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class EarlyGroup:
    """Process group of all ranks with equal weights, for these sums alone.

    longest_s: most seconds of a rank's last backward with which sums start early. A rank waits for the ranks whose last backward
    begins later, and with longer ones it could wait longer than the group's time-out.
    """

    ranks: dist.ProcessGroup
    longest_s: float


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Weights that are summed in one message, once the gradient of the input of layer `level` is known."""

    level: int
    weights: tuple[nn.Parameter, ...]


class EarlySums:
    """Starts sums in the last backward of a step, and collects them at its end.

    take: gives up this rank's gradient of a weight, and tells whether there was one; zeros otherwise. dtype_of: dtype in which a
    weight's gradients add up. A model without layers sums at the end. So does the first step, whose last backward tells how long
    those of this run take; its buckets are those of later steps.
    """

    def __init__(
        self,
        order: LayerOrder,
        take: Callable[[nn.Parameter], tuple[Tensor, bool]],
        dtype_of: Callable[[nn.Parameter], torch.dtype],
    ) -> None:
        self._take, self._dtype_of = take, dtype_of
        self._order, self._levels = order, order.levels
        self._group: EarlyGroup | None = None
        # weights with a gradient that came too late, in any step and on any rank
        self._late: set[nn.Parameter] = set()
        # seconds of the longest last backward of the steps so far, over all ranks; None before the first
        self._longest_s: float | None = None
        self._buckets: list[_Bucket] = []
        self._started: list[_Started] = []
        self._is_last = False
        # seconds of this rank's last backward
        self._began_s = self.backward_s = 0.0

    @contextmanager
    def in_step(self, group: EarlyGroup | None) -> Iterator[None]:
        """Context around the forwards and backwards of the plan that ends a step; None: this plan sums nothing early."""
        self._group, self._buckets, self._started, self._is_last, self.backward_s = group, [], [], False, 0.0
        # the buckets are the same when all of them start at the end, so that no bit of a gradient depends on seconds
        if group is not None:
            trained = [weight for weight in self._levels if weight.requires_grad and weight not in self._late]
            self._buckets = _early_buckets(trained, self._levels, self._dtype_of)
        with ExitStack() as hooks:
            is_early = group is not None and self._longest_s is not None and self._longest_s <= group.longest_s
            if is_early and self._buckets:
                hooks.enter_context(self._order.watching(self._passed))
            yield

    def begin_last(self) -> None:
        """Call it before this rank's last backward of the step."""
        self._is_last, self._began_s = self._group is not None, time.monotonic()

    def end_backward(self) -> None:
        """Call it after every backward."""
        if self._is_last:
            self._is_last, self.backward_s = False, time.monotonic() - self._began_s

    def start_all(self) -> dict[nn.Parameter, bool]:
        """Starts what has not started; for every weight that is summed early, whether this rank had a gradient by then."""
        self._start(AT_END)
        return {weight: had for started in self._started for weight, had in started.had_gradient.items()}

    def finish(self, longest_s: float, late: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Waits for all sums and returns them.

        longest_s: seconds of the longest last backward of all ranks. late: weights of which some rank had a gradient after the
        sum had started. Both must be equal on all ranks.
        """
        found = {weight: total for started in self._started for weight, total in started.finish().items()}
        if self._group is not None:
            self._longest_s = max(self._longest_s or 0.0, longest_s)
        self._late.update(late)
        self._group, self._buckets, self._started = None, [], []
        return found

    def _passed(self, level: int) -> None:
        if self._is_last:
            self._start(level)

    @torch.no_grad()
    def _start(self, level: int) -> None:
        """Starts the next buckets to which layers before `level` add nothing."""
        while len(self._started) < len(self._buckets) and self._buckets[len(self._started)].level >= level:
            assert self._group is not None
            weights = self._buckets[len(self._started)].weights
            self._started.append(_Started(weights, [self._take(weight) for weight in weights], self._group.ranks))


class _Started:
    """One sum over ranks that is under way. gradients: (gradient, whether this rank had one) of every weight."""

    def __init__(self, weights: Sequence[nn.Parameter], gradients: list[tuple[Tensor, bool]], group: dist.ProcessGroup) -> None:
        self.had_gradient = {weight: had for weight, (_, had) in zip(weights, gradients, strict=True)}
        self._gradients = tensors = [gradient for gradient, _ in gradients]
        self._is_in_place = len(tensors) == 1 and tensors[0].is_contiguous()
        self._flat = tensors[0] if self._is_in_place else torch.cat([gradient.reshape(-1) for gradient in tensors])
        work = dist.all_reduce(self._flat, group=group, async_op=True)
        assert work is not None
        self._work = work

    def finish(self) -> dict[nn.Parameter, Tensor]:
        """Waits for the sum, on CUDA without blocking the host; returns it for each weight, in the tensor of its gradient."""
        self._work.wait()
        if not self._is_in_place:
            parts = self._flat.split([gradient.numel() for gradient in self._gradients])
            for gradient, total in zip(self._gradients, parts, strict=True):
                gradient.copy_(total.view_as(gradient))
        return dict(zip(self.had_gradient, self._gradients, strict=True))


def _early_buckets(
    weights: Sequence[nn.Parameter], levels: Mapping[nn.Parameter, int], dtype_of: Callable[[nn.Parameter], torch.dtype]
) -> list[_Bucket]:
    """Buckets of the weights that belong to layers, from the last layer to the first; equal on all ranks with equal weights."""
    buckets: list[_Bucket] = []
    filling: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
    copied_bytes = 0
    for weight in sorted((weight for weight in weights if levels[weight] > AT_END), key=lambda weight: -levels[weight]):
        dtype = dtype_of(weight)
        num_bytes = weight.numel() * dtype.itemsize
        if num_bytes >= _EARLY_BUCKET_BYTES:
            buckets.append(_Bucket(levels[weight], (weight,)))
            continue
        if copied_bytes + num_bytes > _MOST_COPIED_BYTES:
            continue
        copied_bytes += num_bytes
        held, held_bytes = filling.pop(dtype, ([], 0))
        if held and held_bytes + num_bytes > _EARLY_BUCKET_BYTES:
            buckets.append(_Bucket(levels[held[-1]], tuple(held)))
            held, held_bytes = [], 0
        filling[dtype] = [*held, weight], held_bytes + num_bytes
    buckets += [_Bucket(levels[held[-1]], tuple(held)) for held, _ in filling.values()]
    return sorted(buckets, key=lambda bucket: -bucket.level)
