"""Runs a short causal convolution within each document of a chunk, also if ranks or slices divide a document.

A token reads the `width` - 1 tokens before it. At the start of a document these are zeros. A slice reads those of the slice
before from the state book. If ranks of a group share a document, a rank gets the tokens before each of its own runs of tokens
from the ranks that hold them, which may be several; every rank also gets the last tokens of a slice, since the next slice may
begin on any of them.

Shapes: C channels, T tokens of this rank, K = `width` - 1 tokens that are read, N some tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.states.book import CONVOLUTION, check_not_lent, leave_state, slices_by_document, state_before
from hf_longctx.runtime.states.passing import fetch_tokens, with_backward_of


def convolve_documents(
    x_1CT: Tensor,
    width: int,
    convolve: Callable[[Tensor], Tensor],
    layer: Hashable,
    context: GroupContext,
    function: str = CONVOLUTION,
) -> Tensor:
    """Returns outputs [1, C, T] of `convolve` within each document; it must read zeros before the first token it gets.

    function: distinguishes several convolutions of one layer. Every rank of the context's group must call it for layers in the
    same order; backward repeats the exchange in reverse. Raises ValueError for slices with lent ranks.
    """
    check_not_lent(context)
    num_read, layout = width - 1, context.layout
    slices = slices_by_document(context)
    going_on = [slice_ for slice_ in slices.values() if slice_.stop < slice_.end]
    ranges_1CN, received = fetch_tokens(x_1CT, num_read, tuple(slice_.document for slice_ in going_on), layout)
    earlier = {document: state_before(slice_, function, layer, context) for document, slice_ in slices.items()}
    outputs = []
    for run, halo_1CN in zip(layout.own, ranges_1CN, strict=False):
        state = earlier.get(run.document)
        before = [x for x in (state, halo_1CN) if x is not None and x.shape[-1]]
        tokens_1CN = x_1CT[..., run.tokens]
        read_1CN = _last(torch.cat(before, dim=-1), num_read) if before else x_1CT[..., :0]
        joined = torch.cat([read_1CN, tokens_1CN], dim=-1) if before else tokens_1CN
        outputs.append(convolve(joined)[..., read_1CN.shape[-1] :])
    output_1CT = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
    for slice_, end_1CN in zip(going_on, ranges_1CN[len(layout.own) :], strict=True):
        after_1CK = _end_state(end_1CN, earlier[slice_.document], num_read)
        output_1CT = leave_state(slice_, function, layer, context, after_1CK, output_1CT)
    if layout.num_ranks == 1:
        return output_1CT
    # this rank may use neither the received tokens nor the states
    return with_backward_of(output_1CT, *received, *(state for state in earlier.values() if state is not None))


def _end_state(end_1CN: Tensor, before_1CK: Tensor | None, num_read: int) -> Tensor:
    """Returns the last tokens of a slice that the next one reads; a short slice keeps some of those before it."""
    zeros = end_1CN.new_zeros(*end_1CN.shape[:2], num_read) if before_1CK is None else before_1CK
    return _last(torch.cat([zeros, end_1CN], dim=-1), num_read)


def _last(x_1CN: Tensor, num_tokens: int) -> Tensor:
    """Returns the last tokens of `x_1CN`, or all if it has fewer."""
    return x_1CN[..., max(0, x_1CN.shape[-1] - num_tokens) :]
