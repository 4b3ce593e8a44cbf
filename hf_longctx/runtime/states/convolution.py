"""A short causal convolution over the tokens of each document of a chunk, also where ranks or slices cut a document.

A token reads the `width` - 1 tokens before it. At the start of a document these are zeros. A slice finds those of the slice
before it in the state book. In a Ulysses group a rank gets the tokens before its own from the ranks before it; every rank also
gets the last tokens of a slice, since the next slice may begin on any of them.

Shapes: C channels, T tokens of this rank, S tokens of its block, K = `width` - 1 tokens that are read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from hf_longctx.runtime.attention.chunk import Document, documents_of
from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.attention.sequence_parallel import all_to_all
from hf_longctx.runtime.states.recurrence import check_group, leave_state, state_before

CONVOLUTION = "convolution"


def convolve_documents(
    x_1CT: Tensor, width: int, convolve: Callable[[Tensor], Tensor], layer: Hashable, context: GroupContext
) -> Tensor:
    """Outputs [1, C, T] of `convolve`, which reads zeros before the first token it gets, within each document of a chunk.

    Every rank of the context's group must call it for the layers in the same order; backward repeats the exchange in reverse.
    Raises ValueError for groups that cannot pass states on.
    """
    check_group(context)
    num_read = width - 1
    documents = documents_of(context.cu_seqlens, context.slices)
    going_on = [document for document in documents if document.as_slice and document.as_slice.stop < document.as_slice.end]
    ends = [slice(max(document.start, document.stop - num_read), document.stop) for document in going_on]
    bounds = list(pairwise(accumulate(context.block.tokens, initial=0)))
    start, stop = bounds[context.block.index]
    halos = [slice(max(0, first - num_read), first) for first, _ in bounds]
    (halo_1CN, *ends_1CN), received = _exchanged(x_1CT, [[halo, *ends] for halo in halos], bounds, context)
    earlier: dict[Document, Tensor | None] = {
        document: state_before(document, CONVOLUTION, layer, context) for document in documents
    }
    outputs = []
    for document in documents:
        first, last = max(document.start, start), min(document.stop, stop)
        if first >= last:
            continue
        before = [] if (state := earlier[document]) is None else [state]
        if document.start < start:
            before.append(halo_1CN[..., max(0, document.start - halos[context.block.index].start) :])
        read_1CN = _last(torch.cat(before, dim=-1), num_read) if before else x_1CT[..., :0]
        tokens_1CN = x_1CT[..., first - start : last - start]
        joined = torch.cat([read_1CN, tokens_1CN], dim=-1) if before else tokens_1CN
        outputs.append(convolve(joined)[..., read_1CN.shape[-1] :])
    output_1CT = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
    for document, end_1CN in zip(going_on, ends_1CN, strict=True):
        state = earlier[document]
        zeros = x_1CT.new_zeros(*x_1CT.shape[:2], num_read) if state is None else state
        after_1CK = _last(torch.cat([zeros, end_1CN], dim=-1), num_read)
        output_1CT = leave_state(document, CONVOLUTION, layer, context, after_1CK, output_1CT)
    if context.block.num_ranks == 1:
        return output_1CT
    # this rank may use neither what it received nor the states
    return with_backward_of(output_1CT, *received, *(state for state in earlier.values() if state is not None))


def _last(x_1CN: Tensor, num_tokens: int) -> Tensor:
    """The last tokens of `x_1CN`, or all if it has fewer."""
    return x_1CN[..., max(0, x_1CN.shape[-1] - num_tokens) :]


def _exchanged(
    x_1CT: Tensor, wanted: Sequence[Sequence[slice]], bounds: Sequence[tuple[int, int]], context: GroupContext
) -> tuple[list[Tensor], list[Tensor]]:
    """The token ranges of the block that this rank wants, each [1, C, N], and what an exchange received for them.

    wanted: ranges that each rank wants. bounds: tokens of the block that each rank has.
    """
    own, (start, stop) = context.block.index, bounds[context.block.index]
    if context.block.num_ranks == 1:
        return [x_1CT[..., tokens] for tokens in wanted[own]], []
    channels = x_1CT.shape[1]
    parts = [_overlaps(ranges, start, stop) for ranges in wanted]
    sends = [x_1CT[0, :, first - start : last - start].reshape(-1) for ranges in parts for first, last in ranges]
    send_sizes = [channels * sum(last - first for first, last in ranges) for ranges in parts]
    arriving = [_overlaps(wanted[own], *bound) for bound in bounds]
    receive_sizes = [channels * sum(last - first for first, last in ranges) for ranges in arriving]
    received = all_to_all(torch.cat(sends), send_sizes, receive_sizes, context.block.process_group)
    lengths = [channels * (last - first) for ranges in arriving for first, last in ranges]
    pieces = [flat.view(1, channels, -1) for flat in received.split(lengths)]
    # ranks hold tokens in order, so the pieces of a range lie in order too
    return [torch.cat(pieces[place :: len(wanted[own])], dim=-1) for place in range(len(wanted[own]))], [received]


def _overlaps(ranges: Sequence[slice], start: int, stop: int) -> list[tuple[int, int]]:
    """The part of each range that lies in [start, stop), perhaps empty."""
    firsts = [min(max(tokens.start, start), stop) for tokens in ranges]
    return [(first, max(first, min(tokens.stop, stop))) for first, tokens in zip(firsts, ranges, strict=True)]


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
