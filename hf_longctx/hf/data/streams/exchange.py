"""Sends the tokens of a planned batch from the ranks that have read them to the ranks that hold them, one message for each pair.

Every rank knows the plan and who has read which sequence, so no sizes are exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hf_longctx.hf.data.collator import TokenSequence
from hf_longctx.plan.core.sharding import rank_pieces
from hf_longctx.plan.core.types import StepPlan


@dataclass(frozen=True, slots=True)
class HeldTokens:
    """Tokens [begin, end) of sequence `sequence` of a plan, which a rank holds."""

    sequence: int
    begin: int
    end: int


def tokens_of_positions(plan: StepPlan) -> dict[int, list[HeldTokens]]:
    """The tokens that the ranks at each position hold, in the order in which messages have them. Stages hold the same tokens."""
    found: dict[int, list[HeldTokens]] = {}
    for micro_batch in plan.micro_batches:
        for group in micro_batch.groups:
            for chunk in group.chunks:
                for position, pieces in zip(group.positions, rank_pieces(chunk, group.shape), strict=True):
                    held = found.setdefault(position, [])
                    for piece in pieces:
                        # documents above these are dummy tokens
                        if piece.document < len(chunk.spans):
                            span = chunk.spans[piece.document]
                            held.append(HeldTokens(span.sequence, span.start + piece.start, span.start + piece.stop))
    return found


def exchange_tokens(
    plan: StepPlan,
    readers: Sequence[int],
    read: Mapping[int, TokenSequence],
    is_weighted: bool,
    rank: int,
    control: dist.ProcessGroup | None,
) -> dict[int, TokenSequence]:
    """Returns, for the sequences of a plan of which this rank holds tokens, the range of them that it needs. Collective.

    readers: the rank that has read each sequence. read: the sequences that this rank has read, whole. Between the tokens that a
    rank holds, the returned ranges are zeros where another rank has read the sequence.
    """
    held = tokens_of_positions(plan)
    own = held.get(plan.place(rank)[1], [])
    found = _room(own, is_weighted, {number for number in range(len(readers)) if readers[number] == rank})
    incoming: dict[int, Tensor] = {}
    work = []
    for source in sorted({readers[each.sequence] for each in own} - {rank}):
        size = sum(each.end - each.begin for each in own if readers[each.sequence] == source)
        incoming[source] = torch.empty(4 if is_weighted else 2, size, dtype=torch.int32)
        work.append(dist.irecv(incoming[source], source, control))
    # this list keeps the tensors alive until they are sent
    outgoing = []
    for target in range(plan.num_ranks):
        wanted = [each for each in held.get(plan.place(target)[1], []) if readers[each.sequence] == rank]
        if wanted and target != rank:
            outgoing.append(torch.cat([_packed(read[each.sequence], each, is_weighted) for each in wanted], dim=1))
            work.append(dist.isend(outgoing[-1], target, control))
    for message in work:
        assert message is not None
        message.wait()
    for source, message_RN in incoming.items():
        parts = [each for each in own if readers[each.sequence] == source]
        for each, piece in zip(parts, message_RN.split([each.end - each.begin for each in parts], dim=1), strict=True):
            _unpack(piece, found[each.sequence], each)
    return {number: read[number] if readers[number] == rank else found[number] for number in {each.sequence for each in own}}


def _room(own: Sequence[HeldTokens], is_weighted: bool, is_here: set[int]) -> dict[int, TokenSequence]:
    """Zeros for the tokens that come from other ranks."""
    ranges: dict[int, tuple[int, int]] = {}
    for each in own:
        low, high = ranges.get(each.sequence, (each.begin, each.end))
        ranges[each.sequence] = min(low, each.begin), max(high, each.end)
    return {
        number: TokenSequence(
            torch.zeros(high - low, dtype=torch.int64),
            torch.zeros(high - low, dtype=torch.int64),
            low,
            torch.zeros(high - low, dtype=torch.float64) if is_weighted else None,
        )
        for number, (low, high) in ranges.items()
        if number not in is_here
    }


def _packed(sequence: TokenSequence, held: HeldTokens, is_weighted: bool) -> Tensor:
    """Token ids and labels [2, n] in int32; with weights [4, n], whose last rows are their bits in fp64."""
    part = sequence.between(held.begin, held.end)
    packed = torch.stack([part.input_ids, part.shift_labels]).to(torch.int32)
    if not is_weighted:
        return packed
    assert part.loss_weights is not None
    return torch.cat([packed, part.loss_weights.contiguous().view(torch.int32).view(-1, 2).T])


def _unpack(packed: Tensor, sequence: TokenSequence, held: HeldTokens) -> None:
    """Writes what `_packed` made to its place in a sequence."""
    part = sequence.between(held.begin, held.end)
    part.input_ids.copy_(packed[0])
    part.shift_labels.copy_(packed[1])
    if part.loss_weights is not None:
        part.loss_weights.copy_(packed[2:].T.contiguous().view(torch.float64).view(-1))
