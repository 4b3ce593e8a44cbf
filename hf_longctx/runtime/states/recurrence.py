"""A recurrence over the tokens of each document of a chunk: states start anew, or from the state book, and heads are spread.

The functions in `hf.models.states` call it in place of a mixer's own scan, and pass that scan as `scan`. States are set to zero
at the start of a document. A slice goes on from the state that the slice before it left in the book, and leaves its own.

Heads do not read each other's states. So in a Ulysses group every rank runs all tokens of some heads, as in attention, and the
book holds the states of these heads.

Shapes: H heads with a state of their own, G heads that several of them read, T tokens of this rank, S tokens of its block,
X and E sizes of a head, h heads that this rank computes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from hf_longctx.plan.core.sharding import head_shares
from hf_longctx.runtime.attention.chunk import Document, documents_of
from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.attention.sequence_parallel import gather_heads, spread_heads
from hf_longctx.runtime.attention.state_book import StatePlace

# takes the tokens of one document or slice and the weights of its heads, and the state before the tokens (None: zeros); returns
# outputs and the state after them
Scan = Callable[[Sequence[Tensor], Tensor | None], tuple[Tensor, Tensor]]
RECURRENCE = "recurrence"


def scan_documents(
    read_1TGX: Sequence[Tensor],
    own_1THX: Sequence[Tensor],
    weights_H: Sequence[Tensor],
    scan: Scan,
    layer: Hashable,
    context: GroupContext,
) -> Tensor:
    """Outputs [1, T, H, E] of `scan` over each document of a chunk, for this rank's tokens.

    own_1THX: inputs with H heads; X may be missing. read_1TGX: inputs with G heads, each read by H / G neighbouring heads.
    weights_H: weights of each head. `scan` gets the tensors of `read_1TGX`, `own_1THX` and `weights_H`, in this order. Every rank
    of the context's group must call it for the layers in the same order; backward repeats the exchanges in reverse. Raises
    ValueError for groups that cannot pass states on.
    """
    check_group(context)
    if context.block.num_ranks == 1:
        return _scanned((*read_1TGX, *own_1THX), weights_H, scan, layer, context)
    num_heads, num_read = own_1THX[0].shape[2], read_1TGX[0].shape[2] if read_1TGX else own_1THX[0].shape[2]
    shares = head_shares(num_heads, num_read, context.block.num_ranks)
    share = shares[context.block.index]
    heads = [
        [slice(each.kv_start, each.kv_stop)] * len(read_1TGX) + [slice(each.q_start, each.q_stop)] * len(own_1THX)
        for each in shares
    ]
    spread = spread_heads([x_1TH.squeeze(0).transpose(0, 1) for x_1TH in (*read_1TGX, *own_1THX)], heads, context)
    readers = context.readers(share, num_heads // num_read, own_1THX[0].device)
    inputs = [x_hS.transpose(0, 1).unsqueeze(0) for x_hS in spread]
    read = [readers.expand(x_1Sg, 2) for x_1Sg in inputs[: len(read_1TGX)]]
    weights_h = [weight_H[share.q_start : share.q_stop] for weight_H in weights_H]
    return gather_heads(_scanned((*read, *inputs[len(read) :]), weights_h, scan, layer, context), shares, context)


def check_group(context: GroupContext) -> None:
    """Raises ValueError for groups that cannot pass states on from rank to rank."""
    if context.ring.num_blocks > 1:
        raise ValueError(
            f"the chunk is spread over a ring of {context.ring.num_blocks} blocks, but layers with a state along the sequence "
            f"run in local and ulysses groups only; set method='ulysses'"
        )
    if context.lent_slice is not None:
        raise ValueError(
            "the slice is lent ranks of other stages, but layers with a state along the sequence do not run there; set "
            "lend_stages=False"
        )


def _scanned(inputs: Sequence[Tensor], weights_h: Sequence[Tensor], scan: Scan, layer: Hashable, context: GroupContext) -> Tensor:
    """Outputs [1, S, h, E] of all documents of the block for the heads in `inputs`."""
    outputs = []
    for document in documents_of(context.cu_seqlens, context.slices):
        before = state_before(document, RECURRENCE, layer, context)
        output, after = scan([*(x[:, document.tokens] for x in inputs), *weights_h], before)
        outputs.append(leave_state(document, RECURRENCE, layer, context, after, output))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def state_before(document: Document, function: str, layer: Hashable, context: GroupContext) -> Tensor | None:
    """The state from which a document's tokens start; None at the start of a sequence."""
    slice_ = document.as_slice
    if slice_ is None or not slice_.start:
        return None
    return context.state_book.take(StatePlace(layer, function, slice_.sequence, slice_.start))


def leave_state(
    document: Document, function: str, layer: Hashable, context: GroupContext, state: Tensor, output: Tensor
) -> Tensor:
    """Leaves the state after a document's tokens in the book, if the sequence goes on; returns `output` (`StateBook.put`)."""
    slice_ = document.as_slice
    if slice_ is None or slice_.stop == slice_.end:
        return output
    return context.state_book.put(StatePlace(layer, function, slice_.sequence, slice_.stop), state, output)
