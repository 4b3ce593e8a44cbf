"""Exchanges among all ranks of a sequence group, differentiable: backward sends the gradients back along the same paths.

A block of ranks has a process group of its own and runs one all-to-all on it. The ranks of a ring have none, so they send each
other messages on the group of all ranks, as the ring's attention does; nothing is sent where both ends know of no need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_longctx.runtime.attention.layout import GroupLayout


def exchange(sends: Sequence[Tensor], receive_sizes: Sequence[int], inputs: Sequence[Tensor], layout: GroupLayout) -> Tensor:
    """Elements that all ranks send this rank, in the order of ranks.

    sends: a flat tensor for each rank, of one dtype. receive_sizes: elements that come from each rank. inputs: what the sent
    tensors may be made of; if any of them has a gradient, this rank takes part in the backward, also if it sends nothing.
    """
    anchor = next((x for x in inputs if x.requires_grad), inputs[0])
    sizes = [send.numel() for send in sends], list(receive_sizes)
    received: Tensor = _Exchange.apply(torch.cat(tuple(sends)), anchor, *sizes, layout)
    return received


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, send: Tensor, anchor: Tensor, send_sizes: list[int], receive_sizes: list[int], layout: GroupLayout
    ) -> Tensor:
        ctx.settings = send_sizes, receive_sizes, layout
        return _swap(send, send_sizes, receive_sizes, layout)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        send_sizes, receive_sizes, layout = ctx.settings
        return _swap(gradient, receive_sizes, send_sizes, layout), None, None, None, None


def _swap(send: Tensor, send_sizes: list[int], receive_sizes: list[int], layout: GroupLayout) -> Tensor:
    """Sends each rank its part of `send`, and returns what the ranks send this one."""
    received = send.new_empty(sum(receive_sizes))
    if layout.is_block:
        dist.all_to_all_single(received, send.contiguous(), receive_sizes, send_sizes, group=layout.process_group)
        return received
    parts = zip(layout.ranks, send.split(send_sizes), received.split(receive_sizes), strict=True)
    operations = []
    for index, (rank, outgoing, arriving) in enumerate(parts):
        if index == layout.index:
            arriving.copy_(outgoing)
            continue
        if outgoing.numel():
            operations.append(dist.P2POp(dist.isend, outgoing.contiguous(), rank, group=layout.process_group))
        if arriving.numel():
            operations.append(dist.P2POp(dist.irecv, arriving, rank, group=layout.process_group))
    for request in dist.batch_isend_irecv(operations) if operations else []:
        request.wait()
    return received


def with_backward_of(output: Tensor, *others: Tensor) -> Tensor:
    """`output`, whose backward also runs that of `others`, with gradients of zero from here.

    For tensors whose backward must run although this rank may use nothing of them: states, and what collectives received.
    """
    waiting = [other for other in others if other.requires_grad]
    if not waiting:
        return output
    returned: Tensor = _WithBackward.apply(output, *waiting)
    return returned


class _WithBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, *others: Tensor) -> Tensor:
        ctx.shapes = [(other.shape, other.dtype) for other in others]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        zeros = (torch.zeros(shape, dtype=dtype, device=gradient.device) for shape, dtype in ctx.shapes)
        return gradient, *zeros


def fetch_tokens(
    x_1CT: Tensor, num_read: int, going_on: tuple[int, ...], layout: GroupLayout
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Up to `num_read` tokens before each run of this rank and the last ones of the documents `going_on`, each [1, C, N].

    Also returns what an exchange received. Collective over the group.
    """
    channels = x_1CT.shape[1]
    fetch = layout.fetch_before(num_read, going_on)
    if layout.num_ranks == 1:
        parts = [x_1CT[..., tokens] for tokens in fetch.outgoing[0]]
        received: tuple[Tensor, ...] = ()
    else:
        nothing = x_1CT[0, :, :0].reshape(-1)
        sends = [torch.cat([nothing, *(x_1CT[0, :, each].reshape(-1) for each in tokens)]) for tokens in fetch.outgoing]
        sizes = [channels * num_tokens for arriving in fetch.arriving for num_tokens in arriving]
        receive_sizes = [channels * sum(arriving) for arriving in fetch.arriving]
        flat = exchange(sends, receive_sizes, (x_1CT,), layout)
        parts, received = [part.view(1, channels, -1) for part in flat.split(sizes)], (flat,)
    nothing_1CN = x_1CT[..., :0]
    return [torch.cat([parts[place] for place in places], dim=-1) if places else nothing_1CN for places in fetch.order], received
