"""A recurrence over the tokens of each document of a chunk: states start anew, or from the state book, and heads are spread.

The functions in `hf.models.states` call it in place of a mixer's own scan, and pass that scan as `scan`; a package's kernel may
run all documents in one call instead (`kernels`). States are set to zero at the start of a document. A slice goes on from the
state that the slice before it left in the book, and leaves its own.

Heads do not read each other's states. So in a Ulysses group every rank runs all tokens of some heads, as in attention, and the
book holds the states of these heads. In rings, and in groups of more ranks than heads, every rank runs its own tokens with all
heads, and ranks pass states on (`passing`).

Shapes: H heads with a state of their own, G heads that several of them read, T tokens of this rank, S tokens of its block,
X and E sizes of a head, h heads that this rank computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_longctx.plan.core.sharding import head_shares, passes_states
from hf_longctx.plan.model.mixers import ScanSize
from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.attention.runs import Document, documents_of
from hf_longctx.runtime.attention.sequence_parallel import gather_heads, spread_heads
from hf_longctx.runtime.states.blocks import RowScan, in_blocks, row_in_blocks
from hf_longctx.runtime.states.book import LayerScan, check_not_lent, leave_state, state_before
from hf_longctx.runtime.states.kernels import KernelScan, Row
from hf_longctx.runtime.states.passing import Scan, StateMap, scan_runs


@dataclass(frozen=True, slots=True)
class MixerScan:
    """A mixer's scan, and the facts about it that plans need.

    size: the bytes that it saves, which decide how many tokens run at once (`blocks`). state_map: how it depends on the state
    before its tokens, for groups that pass states on; None if that is not known. kernel: what runs in its place where it is
    installed and right, on ranks that do not pass states on; None if no package has it.
    """

    run: Scan
    size: ScanSize
    state_map: StateMap | None = None
    kernel: KernelScan | None = None


def scan_documents(
    read_1TGX: Sequence[Tensor],
    own_1THX: Sequence[Tensor],
    weights_H: Sequence[Tensor],
    scan: MixerScan,
    of: LayerScan,
    context: GroupContext,
) -> Tensor:
    """Outputs [1, T, H, E] of `scan` over each document of a chunk, for this rank's tokens.

    own_1THX: inputs with H heads; X may be missing. read_1TGX: inputs with G heads, each read by H / G neighbouring heads.
    weights_H: weights of each head. `scan` gets the tensors of `read_1TGX`, `own_1THX` and `weights_H`, in this order.
    of: the layer that scans.

    Every rank of the context's group must call it for the layers in the same order; backward repeats the exchanges in reverse.
    Raises ValueError for slices that are lent ranks of other stages, and for groups in which the scan cannot run.
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
        cut = in_blocks(scan.run, len(whole), whole[-1].shape[1], scan.size.block_tokens(whole[-1].shape[2]))
        return scan_runs(whole, weights_H, cut, scan.state_map, of, context)
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
        # neighbouring ranks may share a head that is read; what all heads read is not copied for each of them
        readers = context.readers(share, num_heads // num_read, own_1THX[0].device)
        read = [readers.expand(x_1Sg, 2) for x_1Sg in read]
    weights_h = [weight_H[share.q_start : share.q_stop] for weight_H in weights_H]
    scanned = _scanned((*read, *inputs[len(read) :]), weights_h, scan, of, context)
    return gather_heads(scanned, shares, context)


def _scanned(
    inputs: Sequence[Tensor], weights_h: Sequence[Tensor], scan: MixerScan, of: LayerScan, context: GroupContext
) -> Tensor:
    """Outputs [1, S, h, E] of all documents of the block for the heads in `inputs`."""
    documents, num_tokens = documents_of(context.cu_seqlens, context.slices), inputs[-1].shape[1]
    # a rank with some of the heads runs more tokens at once
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
    """Documents in as few rows as possible, of which the first alone goes on from a state, and the last alone leaves one."""
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
