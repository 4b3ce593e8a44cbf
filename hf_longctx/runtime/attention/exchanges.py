"""Exchanges of heads that run beside attention: those of one part of the heads while another part is computed.

`sequence_parallel` calls it for blocks of several ranks whose heads are worth cutting (`plan.core.sharding.head_parts`). Forward
starts the exchanges of all parts at once, and waits for each just before its attention; the output of a part leaves while the
next one is computed. Backward does the same in the opposite direction. Autograd runs the nodes that were made last first, so the
gradients of the last part's output travel first, and those of each part's inputs leave while those of the part before it are
computed.

A node that starts a message returns an empty tensor, a ticket, and another node gives what arrived for it. In backward the
second node starts a message, whose ticket is the gradient of the first one's, and the first node gives what arrived.

Shapes: N elements of a part that a rank sends, M that it receives; parts may differ in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# elements that a rank sends to each rank, and that it receives from each
Sizes = tuple[Sequence[int], Sequence[int]]


class _Messages:
    """Exchanges of all parts in one direction, and those of them that run."""

    def __init__(self, sizes: Sequence[Sizes], group: dist.ProcessGroup | None) -> None:
        self._sizes, self._group = sizes, group
        self.num_sent, self.num_received = ([sum(each[end]) for each in sizes] for end in (0, 1))
        # for each part its work, and its buffers, which must live until it has arrived
        self._running: dict[int, tuple[Any, Tensor, Tensor]] = {}

    def start(self, part: int, sent: Tensor, received: Tensor) -> None:
        sends, receives = self._sizes[part]
        work = dist.all_to_all_single(received, sent, receives, sends, group=self._group, async_op=True)
        self._running[part] = work, sent, received

    def take(self, part: int) -> Tensor:
        """Lets the current stream wait for a part; returns it, [M]."""
        work, _, received = self._running.pop(part)
        work.wait()
        return received


class PartExchange:
    """Exchange of several parts over the ranks of a block, differentiable; make one for every call of a layer.

    sizes: those of each part on this rank. Use `start_all` and then `arrived` for each part, or `start` for each part and then
    `all_arrived`; every rank must do the same, forward and backward.
    """

    def __init__(self, sizes: Sequence[Sizes], group: dist.ProcessGroup | None) -> None:
        self.there, self.back = _Messages(sizes, group), _Messages([(receives, sends) for sends, receives in sizes], group)
        # buffers in which parts that start one by one arrive, and gradients of parts that started together
        self.received: Tensor | None = None
        self.returned: Tensor | None = None

    def start_all(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Starts all parts of a flat buffer, in order; returns tickets for `arrived`."""
        tickets: tuple[Tensor, ...] = _StartAll.apply(flat, self)
        return tickets

    def arrived(self, part: int, ticket: Tensor) -> Tensor:
        """Waits for a part of `start_all`; returns it, [M]."""
        found: Tensor = _Arrived.apply(ticket, self, part)
        return found

    def start(self, part: int, sent: Tensor) -> Tensor:
        """Starts one part [N]; returns a ticket for `all_arrived`."""
        ticket: Tensor = _Start.apply(sent, self, part)
        return ticket

    def all_arrived(self, tickets: Sequence[Tensor]) -> Tensor:
        """Waits for all parts of `start`; returns them in a flat buffer, in order."""
        found: Tensor = _AllArrived.apply(self, *tickets)
        return found


class _StartAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, exchange: PartExchange) -> tuple[Tensor, ...]:
        ctx.exchange, messages = exchange, exchange.there
        for part, sent in enumerate(flat.split(messages.num_sent)):
            messages.start(part, sent, flat.new_empty(messages.num_received[part]))
        return tuple(flat.new_empty(0) for _ in messages.num_sent)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        exchange: PartExchange = ctx.exchange
        for part in range(len(exchange.back.num_sent)):
            exchange.back.take(part)
        returned, exchange.returned = exchange.returned, None
        assert returned is not None
        return returned, None


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, exchange: PartExchange, part: int) -> Tensor:
        ctx.exchange, ctx.part = exchange, part
        return exchange.there.take(part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        exchange: PartExchange = ctx.exchange
        messages = exchange.back
        if exchange.returned is None:
            exchange.returned = gradient.new_empty(sum(messages.num_received))
        messages.start(ctx.part, gradient.contiguous(), exchange.returned.split(messages.num_received)[ctx.part])
        return gradient.new_empty(0), None, None


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: Tensor, exchange: PartExchange, part: int) -> Tensor:
        ctx.exchange, ctx.part = exchange, part
        messages = exchange.there
        if exchange.received is None:
            exchange.received = sent.new_empty(sum(messages.num_received))
        messages.start(part, sent.contiguous(), exchange.received.split(messages.num_received)[part])
        return sent.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        exchange: PartExchange = ctx.exchange
        return exchange.back.take(ctx.part), None, None


class _AllArrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: PartExchange, *tickets: Tensor) -> Tensor:
        ctx.exchange = exchange
        for part in range(len(tickets)):
            exchange.there.take(part)
        received, exchange.received = exchange.received, None
        assert received is not None
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        exchange: PartExchange = ctx.exchange
        messages = exchange.back
        for part, sent in reversed(list(enumerate(gradient.contiguous().split(messages.num_sent)))):
            messages.start(part, sent, sent.new_empty(messages.num_received[part]))
        return None, *(gradient.new_empty(0) for _ in messages.num_sent)
