"""Lets gradients leave for the host during the last backward of a step, each when no layer still to run adds to it.

`gradients.ReplicatedParameters` makes `EarlyCopies`; the executor says to whom gradients are sent, and which backward is last.
A gradient that comes after its weight's has left adds up beside it, and the sum leaves once more (`host_steps.py`). The first
step sends nothing and finds the weights for which this happens, so that they are sent at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from hf_longctx.runtime.parameters.layer_order import AT_END, LayerOrder

# gets a weight and its gradient
Send = Callable[[nn.Parameter, Tensor], None]


class EarlyCopies:
    """Sends the gradients of layers that the last backward has passed.

    settle: the gradient of a weight, rounded as the optimizer gets it, or None; in a trial it is not rounded.
    """

    def __init__(self, order: LayerOrder, settle: Callable[[nn.Parameter, bool], Tensor | None]) -> None:
        self._order, self._settle = order, settle
        # from the last layer to the first
        self._weights = sorted(
            (weight for weight, level in order.levels.items() if level > AT_END), key=lambda weight: -order.levels[weight]
        )
        self._send: Send | None = None
        self._is_last, self._is_trial, self._num_passed = False, True, 0

    @contextmanager
    def in_step(self, send: Send | None) -> Iterator[None]:
        """Context around the forwards and backwards of the plan that ends a step; None: this plan sends nothing."""
        self._send, self._is_last, self._num_passed = send, False, 0
        watching: AbstractContextManager[None] = nullcontext() if send is None else self._order.watching(self._passed)
        with watching:
            yield
        self._send = None

    def begin_last(self) -> None:
        """Call it before this rank's last backward of the step."""
        self._is_last = self._send is not None

    def end_backward(self) -> None:
        """Call it after every backward."""
        if self._is_last:
            self._is_last = self._is_trial = False

    @torch.no_grad()
    def _passed(self, level: int) -> None:
        """Sends the gradients of the next weights to which layers before `level` add nothing."""
        if not self._is_last or self._send is None:
            return
        while self._num_passed < len(self._weights) and self._order.levels[self._weights[self._num_passed]] >= level:
            weight = self._weights[self._num_passed]
            self._num_passed += 1
            if (gradient := self._settle(weight, self._is_trial)) is not None:
                self._send(weight, gradient)
