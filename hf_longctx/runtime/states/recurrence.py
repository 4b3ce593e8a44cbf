"""Runs a recurrence over each document of a chunk, starting from zero or from the state book, with heads divided among ranks.

The functions in `hf.models.states` call it in place of a mixer's own scan, which they pass as `scan`; a package's kernel may
run all documents in one call instead (`kernels`). States are zero at the start of a document. A slice starts from the state that
the slice before left in the book, and leaves its own.

Heads do not read each other's states. So in a Ulysses group every rank runs all tokens of some heads, as in attention, and the
book holds the states of these heads. In rings, and in groups of more ranks than heads, every rank runs its own tokens with all
heads, and ranks pass states on (`passing`).

A scan runs in blocks of tokens, as one autograd node that saves the scan's inputs and the states between blocks. Transformers'
torch code of a scan saves many tensors for backward, such as fp32 matrices of every tile. Kernels of packages save less, but
their backward makes a state and its gradient for every tile of a row at once. Backward therefore runs each block forward and
backward, the last block first, so that these tensors exist for one block at a time, at the cost of one more forward. Blocks end
at ends of tiles, so they compute the same numbers as one scan.

Shapes: H heads with their own state, G heads that several of them read, T tokens of this rank, S tokens of its block, N tokens of
one document or slice, X and E sizes of a head, h heads that this rank computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hf_longctx.plan.core.sharding import head_shares, passes_states
from hf_longctx.plan.model.mixers import ScanSize
from hf_longctx.runtime.activations.token_tiles import tiles_of
from hf_longctx.runtime.attention.chunk import Document, documents_of
from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.attention.sequence_parallel import gather_heads, spread_heads
from hf_longctx.runtime.states.book import LayerScan, check_not_lent, leave_state, state_before
from hf_longctx.runtime.states.kernels import KernelScan, Row
from hf_longctx.runtime.states.passing import Scan, StateMap, scan_runs

# like `Scan`, but returns None in place of a state that is not needed
RowScan = Callable[[Sequence[Tensor], Tensor | None], tuple[Tensor, Tensor | None]]


def in_blocks(scan: Scan, num_inputs: int, num_tokens: int, block_tokens: int) -> Scan:
    """Returns `scan` in blocks of `block_tokens` tokens, each recomputed in backward; unchanged for a chunk of one block.

    num_inputs: number of the scan's tensors of tokens [1, N, H, X], which come before weights of heads. num_tokens: tokens of the
    chunk. block_tokens: whole tiles of the scan.
    """
    if num_tokens <= block_tokens:
        return scan

    def scan_blocks(tensors: Sequence[Tensor], before: Tensor | None) -> tuple[Tensor, Tensor]:
        blocks = [_Block(tokens, scan) for tokens in tiles_of(0, tensors[0].shape[1], block_tokens)]
        found: tuple[Tensor, Tensor] = _InBlocks.apply(blocks, num_inputs, before, *tensors)
        return found

    return scan_blocks


def row_in_blocks(kernel: KernelScan, row: Row, num_inputs: int, num_tokens: int, block_tokens: int, tile_tokens: int) -> RowScan:
    """Returns `kernel` over a row's documents in blocks that backward recomputes; in one piece for a chunk of one block.

    A document of more than `block_tokens` tokens is cut, and shorter ones share blocks, in which each counts as whole tiles of
    `tile_tokens` tokens. Other arguments: see `in_blocks`.
    """

    def of(part: Row) -> RowScan:
        return lambda tensors, state: kernel(tensors, state, part)

    if num_tokens <= block_tokens:
        return of(row)
    blocks, start = [], 0
    for part in row_blocks(row, block_tokens, tile_tokens):
        blocks.append(_Block(slice(start, start + part.boundaries[-1]), of(part)))
        start += part.boundaries[-1]

    def scan_blocks(tensors: Sequence[Tensor], before: Tensor | None) -> tuple[Tensor, Tensor | None]:
        found: tuple[Tensor, Tensor | None] = _InBlocks.apply(blocks, num_inputs, before, *tensors)
        return found

    return scan_blocks


def row_blocks(row: Row, block_tokens: int, tile_tokens: int) -> list[Row]:
    """Splits a row into rows of at most as many tiles as `block_tokens` has: whole documents, or parts of one."""
    cuts, num_tiles = [0], 0
    for start, stop in pairwise(row.boundaries):
        for first in range(start, stop, block_tokens):
            own = -(-(min(first + block_tokens, stop) - first) // tile_tokens)
            if first and num_tiles + own > block_tokens // tile_tokens:
                cuts.append(first)
                num_tiles = 0
            num_tiles += own
    found = []
    for start, stop in pairwise([*cuts, row.boundaries[-1]]):
        inside = (bound - start for bound in row.boundaries if start < bound < stop)
        goes_on = row.goes_on if stop == row.boundaries[-1] else stop not in row.boundaries
        found.append(Row((0, *inside, stop - start), goes_on))
    return found


@dataclass(frozen=True, slots=True)
class _Block:
    """Tokens that run at once, and their scan, which returns a state if the next block starts from it."""

    tokens: slice
    scan: RowScan


class _InBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, blocks: Sequence[_Block], num_inputs: int, before: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        inputs, weights = tensors[:num_inputs], tensors[num_inputs:]
        num_tokens, device = inputs[0].shape[1], inputs[0].device.type
        output, state = None, before
        states = []
        for block in blocks:
            part, state = block.scan([*(x[:, block.tokens] for x in inputs), *weights], state)
            if output is None:
                output = part.new_empty((1, num_tokens, *part.shape[2:]))
            output[:, block.tokens] = part
            # a copy, since a state may be a view of something larger
            state = None if state is None else state.clone()
            states.append(state)
        assert output is not None
        ctx.save_for_backward(before, *tensors, *states[:-1])
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        ctx.settings = blocks, num_inputs, len(tensors)
        return output, state

    @staticmethod
    def backward(ctx: Any, d_output: Tensor, d_after: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        blocks, num_inputs, num_tensors = ctx.settings
        before, *saved = ctx.saved_tensors
        tensors, states = saved[:num_tensors], [before, *saved[num_tensors:]]
        needs_before, *needs = ctx.needs_input_grad[2:]
        device, dtype, is_enabled = ctx.autocast
        sums = [_zeros(x, is_weight=place >= num_inputs) if needs[place] else None for place, x in enumerate(tensors)]
        d_state = d_after
        for place, block in reversed(list(enumerate(blocks))):
            parts = [*(x[:, block.tokens] for x in tensors[:num_inputs]), *tensors[num_inputs:]]
            leaves = [x.detach().requires_grad_(need) for x, need in zip(parts, needs, strict=True)]
            state = states[place]
            if state is not None:
                state = state.detach().requires_grad_(place > 0 or needs_before)
            # backward does not restore autocast by itself
            with torch.enable_grad(), torch.autocast(device, dtype, is_enabled):
                made = block.scan(leaves, state)
            ends = [x for x in (*leaves, state) if x is not None and x.requires_grad]
            ending = zip(made, (d_output[:, block.tokens], d_state), strict=True)
            given = [(y, dy) for y, dy in ending if y is not None and y.requires_grad]
            outputs, gradients = zip(*given, strict=True)
            found = iter(torch.autograd.grad(outputs, ends, gradients, materialize_grads=True))
            for index, total in enumerate(sums):
                if total is not None:
                    (total[:, block.tokens] if index < num_inputs else total).add_(next(found))
            d_state = next(found, None)
        own = (None if total is None else total.to(x.dtype) for total, x in zip(sums, tensors, strict=True))
        return None, None, d_state, *own


def _zeros(x: Tensor, is_weight: bool) -> Tensor:
    """Makes a tensor for gradients of `x`: in at least fp32 for a weight, to which every block adds."""
    dtype = torch.promote_types(x.dtype, torch.float32) if is_weight else x.dtype
    return torch.zeros(x.shape, dtype=dtype, device=x.device)


@dataclass(frozen=True, slots=True)
class MixerScan:
    """A mixer's scan, with the facts that plans need."""

    run: Scan
    # bytes that the scan saves, from which follows how many tokens run at once (`blocks`)
    size: ScanSize
    # dependence on the state before the tokens, for groups that pass states on; None if unknown
    state_map: StateMap | None = None
    # faster kernel, used if installed and correct; None if no package has one
    kernel: KernelScan | None = None

    def in_blocks(self, num_inputs: int, num_tokens: int, num_heads: int) -> Scan:
        """Returns the scan of one document or slice in blocks, by a kernel that takes its tensors, else by `run`.

        Arguments: see `in_blocks`. num_heads: heads with a state on this rank, which decide how many tokens a block has.
        """
        block_tokens = self.size.block_tokens(num_heads)
        cut = in_blocks(self.run, num_inputs, num_tokens, block_tokens)

        def scanned(tensors: Sequence[Tensor], before: Tensor | None) -> tuple[Tensor, Tensor]:
            if self.kernel is None or not self.kernel.takes(tensors):
                return cut(tensors, before)
            row = Row((0, tensors[0].shape[1]), goes_on=True)
            by_kernel = row_in_blocks(self.kernel, row, num_inputs, num_tokens, block_tokens, self.size.tile_tokens)
            output, after = by_kernel(tensors, before)
            assert after is not None
            return output, after

        return scanned


def scan_documents(
    read_1TGX: Sequence[Tensor],
    own_1THX: Sequence[Tensor],
    weights_H: Sequence[Tensor],
    scan: MixerScan,
    of: LayerScan,
    context: GroupContext,
) -> Tensor:
    """Returns outputs [1, T, H, E] of `scan` over each document of a chunk, for this rank's tokens.

    own_1THX: inputs with H heads; X may be missing. read_1TGX: inputs with G heads, each read by H / G neighbouring heads.
    weights_H: weights of each head. `scan` gets the tensors of `read_1TGX`, `own_1THX` and `weights_H`, in this order.
    of: the scanning layer.

    Every rank of the context's group must call it for layers in the same order; backward repeats the exchanges in reverse.
    Raises ValueError for slices with lent ranks, and for groups in which the scan cannot run.
    """
    check_not_lent(context)
    num_ranks = context.block.num_ranks
    if passes_states(context.ring.num_blocks, num_ranks, own_1THX[0].shape[2]):
        if scan.state_map is None:
            raise ValueError(
                f"a group of {context.layout.num_ranks} ranks in blocks of {num_ranks} would pass states from rank to rank, but "
                f"this kind of layer only shares out its {own_1THX[0].shape[2]} heads; set method='ulysses' and lower degrees"
            )
        whole = (*read_1TGX, *own_1THX)
        in_runs = scan.in_blocks(len(whole), *whole[-1].shape[1:3])
        return scan_runs(whole, weights_H, in_runs, scan.state_map, of, context)
    if num_ranks == 1:
        return _scanned((*read_1TGX, *own_1THX), weights_H, scan, of, context)
    num_heads, num_read = own_1THX[0].shape[2], read_1TGX[0].shape[2] if read_1TGX else own_1THX[0].shape[2]
    shares = head_shares(num_heads, num_read, num_ranks)
    share = shares[context.block.index]
    heads = [
        [slice(each.kv_start, each.kv_stop)] * len(read_1TGX) + [slice(each.q_start, each.q_stop)] * len(own_1THX)
        for each in shares
    ]
    spread = spread_heads([x_1TH.squeeze(0).transpose(0, 1) for x_1TH in (*read_1TGX, *own_1THX)], heads, context)
    inputs = [x_hS.transpose(0, 1).unsqueeze(0) for x_hS in spread]
    read = inputs[: len(read_1TGX)]
    if num_read > 1:
        # neighbouring ranks may share a read head; a head that all heads read is not copied for each of them
        readers = context.readers(share, num_heads // num_read, own_1THX[0].device)
        read = [readers.expand(x_1Sg, 2) for x_1Sg in read]
    weights_h = [weight_H[share.q_start : share.q_stop] for weight_H in weights_H]
    scanned = _scanned((*read, *inputs[len(read) :]), weights_h, scan, of, context)
    return gather_heads(scanned, shares, context)


def _scanned(
    inputs: Sequence[Tensor], weights_h: Sequence[Tensor], scan: MixerScan, of: LayerScan, context: GroupContext
) -> Tensor:
    """Returns outputs [1, S, h, E] of all documents of the block for the heads in `inputs`."""
    documents, num_tokens = documents_of(context.cu_seqlens, context.slices), inputs[-1].shape[1]
    # a rank with fewer heads runs more tokens at once
    block_tokens = scan.size.block_tokens(inputs[-1].shape[2])
    cut = in_blocks(scan.run, len(inputs), num_tokens, block_tokens)
    kernel = scan.kernel if scan.kernel is not None and scan.kernel.takes([*inputs, *weights_h]) else None
    outputs = []
    for row in rows_of(documents) if kernel else [[document] for document in documents]:
        first, last = row[0], row[-1]
        before = state_before(first.as_slice, of.function, of.layer, context)
        mine = [*(x[:, first.start : last.stop] for x in inputs), *weights_h]
        run: RowScan = cut
        if kernel is not None:
            bounds = Row((0, *(document.stop - first.start for document in row)), _goes_on(last))
            run = row_in_blocks(kernel, bounds, len(inputs), num_tokens, block_tokens, scan.size.tile_tokens)
        output, after = run(mine, before)
        outputs.append(output if after is None else leave_state(last.as_slice, of.function, of.layer, context, after, output))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def rows_of(documents: Sequence[Document]) -> list[list[Document]]:
    """Groups documents into as few rows as possible, in which only the first starts from a state and only the last leaves one."""
    rows: list[list[Document]] = []
    for document in documents:
        starts_late = document.as_slice is not None and document.as_slice.start > 0
        if not rows or starts_late or _goes_on(rows[-1][-1]):
            rows.append([])
        rows[-1].append(document)
    return rows


def _goes_on(document: Document) -> bool:
    """Whether the next slice reads the state after these tokens."""
    return document.as_slice is not None and document.as_slice.stop < document.as_slice.end
