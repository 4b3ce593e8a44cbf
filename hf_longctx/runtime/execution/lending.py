"""Runs micro-batches whose first and last slices are lent ranks of idle stages (SPPO, arXiv 2503.10377, section 6).

Every rank has the weights of all stages, frozen weights and replicated adapters, and runs its stage's order from `lent_order`. A
slice's own stage receives the slice's hidden states as in any pipeline and sends every lent stage the rows of that stage's
tokens. It then collects their outputs and sends them on as one message; backward returns gradients along the same path. The first
and the last stage of the model distribute nothing: every rank has the token ids and the labels of its position.

Gradients of a stage's weights arise on all ranks that ran its slices, so they are summed over all ranks, and every rank updates
the weights of all stages equally.

In attention (`LentSlice.attend`, which `sequence_parallel` calls), every rank computes queries, keys and values of its own
tokens. One exchange gives all ranks the keys and values of the whole slice; each rank writes them into its own K/V book, as if it
had run the slice alone. Its queries then see the front and, causally, the slice. Lent ranks that begin to help with the last
slices of a sequence do not have the front; they receive it from the slice's own stage.

In backward every rank adds the gradients from its queries to those in its own K/V book. Gradients of the slice's own keys and
values are summed over the ranks, and each rank gets those of its tokens. Gradients of a front that was sent go back to the stage
that sent it. (The paper does not describe these exchanges; they are our design.)

Shapes: h query heads and g KV heads of this rank, S tokens of its block, P tokens of one piece of it, T tokens of the slice, U of
its front, D head size of queries and keys, E of values, W = D + E; C hidden size.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hf_longctx.plan.core.lending import Phases, lent_order, lent_pieces, running_stages
from hf_longctx.plan.core.sharding import Piece, even_shards, sequence_ends
from hf_longctx.plan.core.types import Action, Chunk, SequenceGroup, StagePlan
from hf_longctx.runtime.attention.context import Block, GroupContext
from hf_longctx.runtime.attention.heads import join_kv, split_kv
from hf_longctx.runtime.attention.kv_book import KeyRun, KVBook, Slice
from hf_longctx.runtime.attention.rows import (
    AttentionRule,
    KeyPiece,
    front_piece,
    front_pieces,
    rows_backward,
    rows_forward,
    sinks_backward,
)
from hf_longctx.runtime.core.chunk_inputs import ChunkInputs
from hf_longctx.runtime.core.loss import step_loss, summed_loss
from hf_longctx.runtime.execution.round import Round, RoundHost
from hf_longctx.runtime.execution.stage_model import StageModel
from hf_longctx.runtime.process_groups import GroupPool


class LentRound(Round):
    """A micro-batch in which idle stages are lent to the first and the last slices of other stages, after `check_lending`.

    Every rank of all stages takes part. Received hidden states and outputs are keyed by (stage, chunk), since a rank runs chunks
    of several stages.
    """

    def __init__(
        self, host: RoundHost, group: SequenceGroup, stage: StagePlan, inputs: Sequence[ChunkInputs], index: int
    ) -> None:
        super().__init__(host, group, stage, inputs, index)
        self.phases = [Phases.of(each.actions, each.stage, len(group.chunks)) for each in group.stages]

    @property
    def actions(self) -> Sequence[Action]:
        """Forwards and backwards of this rank's stage and of the stages it helps; each has its own messages."""
        return lent_order(self.group)[self.stage.stage]

    def _new_books(self) -> list[KVBook]:
        # one K/V book per stage, since a lent rank closes a sequence of a stage before the stage itself does
        return [KVBook() for _ in self.group.stages]

    def _forward(self, action: Action, following: Action | None) -> None:
        key, model, rows = (action.stage, action.chunk), self.host.all_stages[action.stage], self._rows(action)
        hidden_1SC = None
        if action.stage:
            hidden_1SC = self._spread("RF", action, rows, model).requires_grad_()
            self.received[key] = hidden_1SC
        inputs = rows.of_inputs(self.inputs[action.chunk].to(self.host.device))
        output = model.forward(0, inputs, hidden_1SC, self.host.no_mask, self._context(action))
        if model.is_last(0):
            loss_sum = summed_loss(output, self.host.targets(inputs))
            output = step_loss(loss_sum, self.host.num_label_tokens)
            self.total += output.detach()
        else:
            self._collect("SF", action, rows, output)
        self.outputs[key] = output
        self._note_memory()

    def _backward(self, action: Action, following: Action | None) -> None:
        key, model, rows = (action.stage, action.chunk), self.host.all_stages[action.stage], self._rows(action)
        output = self.outputs.pop(key)
        gradient_1SC = None if model.is_last(0) else self._spread("RB", action, rows, model)
        # if only later layers have adapters, the first stages have nothing to train
        if output.requires_grad:
            output.backward(gradient_1SC)
        self.host.parameters.after_backward()
        if action.stage:
            gradient = self.received.pop(key).grad
            assert gradient is not None, f"{action}: the hidden states that it received got no gradient"
            self._collect("SB", action, rows, gradient)
        if action.chunk == self._first_chunk(action.stage):
            self.books[action.stage].close(self.group.chunks[0].spans[0].sequence)
        self._note_memory()

    def _spread(self, kind: Literal["RF", "RB"], action: Action, rows: _Rows, model: StageModel) -> Tensor:
        """Returns this rank's rows of a message, which the slice's own stage receives and distributes."""
        came_1TC = None
        if action.stage == self.stage.stage:
            came_1TC = self._receive(replace(action, kind=kind, lenders=()))
        none_10C = torch.empty((1, 0, model.hidden_size), dtype=model.hidden_dtype, device=self.host.device)
        return rows.spread(came_1TC, none_10C)

    def _collect(self, kind: Literal["SF", "SB"], action: Action, rows: _Rows, own_1SC: Tensor) -> None:
        """Collects the rows of all ranks on the slice's own stage, which sends them on as one message."""
        whole_1TC = rows.collect(own_1SC)
        if whole_1TC is not None:
            self._send(replace(action, kind=kind, lenders=()), whole_1TC)

    def _note_memory(self) -> None:
        self.memory = self.held()

    def _first_chunk(self, stage: int) -> int:
        """Returns the first chunk of `stage` that this rank runs."""
        return self.phases[stage].first_back if stage > self.stage.stage else 0

    def _rows(self, action: Action) -> _Rows:
        return _Rows.of(self.host.pool, self.group, self.group.chunks[action.chunk], action)

    def _context(self, action: Action) -> GroupContext:
        """Returns the context of a chunk that this rank runs for `action.stage`, alone or with other stages."""
        pool, group, chunk, book = self.host.pool, self.group, self.group.chunks[action.chunk], self.books[action.stage]
        own, stages = self.stage.stage, running_stages(action)
        context = pool.context(group, chunk, book)
        if len(stages) == 1:
            return context
        phases, (span,) = self.phases[action.stage], chunk.spans
        is_front = action.chunk < phases.first_alone
        last = phases.first_alone - 1 if is_front and action.stage != own else len(group.chunks) - 1
        held = lent_pieces(chunk.num_tokens, group.degree, len(stages))
        tokens = tuple(sum(piece.num_tokens for piece in pieces) for pieces in held[stages.index(own)])
        lent_slice = LentSlice(
            process_group=pool.lending_group(stages),
            index=stages.index(own),
            owner=stages.index(action.stage),
            blocks=tuple(map(block_of, held)),
            slice_=Slice(0, span.sequence, span.start, span.stop, group.chunks[last].spans[0].stop),
            moves_front=action.chunk == phases.first_back,
        )
        block = Block(context.block.process_group, context.block.index, tokens)
        documents = ((tokens[block.index], sequence_ends((*group.chunks, chunk))[span.sequence]),)
        return replace(
            context,
            block=block,
            cu_seqlens=(0, sum(tokens)),
            slices=(),
            documents=documents,
            sequences=(span.sequence,),
            lent_slice=lent_slice,
        )


def block_of(positions: Sequence[Sequence[Piece]]) -> tuple[Piece, ...]:
    """Returns the pieces of a slice on a stage, position by position."""
    pieces, count = [], 0
    for piece in (piece for of_position in positions for piece in of_position):
        pieces.append(replace(piece, first=count))
        count += piece.num_tokens
    return tuple(pieces)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a slice's shard at this rank's position, divided among the stages that run the slice."""

    # group of the ranks at this position; None if the stage runs the slice alone
    process_group: dist.ProcessGroup | None
    # index in the group of the slice's own stage
    owner: int
    # index of this rank
    index: int
    # for each rank of the group, its rows of the shard
    rows: tuple[tuple[slice, ...], ...]

    @classmethod
    def of(cls, pool: GroupPool, group: SequenceGroup, chunk: Chunk, action: Action) -> _Rows:
        stages, place = running_stages(action), group.positions.index(pool.position)
        if len(stages) == 1:
            return cls(None, 0, 0, ((slice(None),),))
        first = (0, *accumulate(even_shards(chunk.num_tokens, group.degree)))[place]
        held = (stage_pieces[place] for stage_pieces in lent_pieces(chunk.num_tokens, group.degree, len(stages)))
        rows = tuple(tuple(slice(piece.start - first, piece.stop - first) for piece in pieces) for pieces in held)
        return cls(pool.lending_group(stages), stages.index(action.stage), stages.index(pool.stage), rows)

    def of_inputs(self, inputs: ChunkInputs) -> ChunkInputs:
        """Returns this rank's rows of the inputs of its position."""
        if self.process_group is None:
            return inputs
        rows = self.rows[self.index]
        return inputs.mapped(lambda x_1T: torch.cat([x_1T[:, piece] for piece in rows], dim=1))

    def spread(self, whole_1TC: Tensor | None, like_10C: Tensor) -> Tensor:
        """Returns this rank's rows of `whole_1TC`, which only the owner has. like_10C: example of its dtype, device and width."""
        if self.process_group is None:
            assert whole_1TC is not None
            return whole_1TC
        size = like_10C.shape[2]
        sizes = [size * count for count in self._counts()]
        if whole_1TC is None:
            send, send_sizes = like_10C.reshape(-1), [0] * len(sizes)
        else:
            send = torch.cat([whole_1TC[:, piece] for rows in self.rows for piece in rows], dim=1).reshape(-1)
            send_sizes = sizes
        receive_sizes = [sizes[self.index] if place == self.owner else 0 for place in range(len(sizes))]
        received = like_10C.new_empty(sizes[self.index])
        dist.all_to_all_single(received, send, receive_sizes, send_sizes, group=self.process_group)
        return received.view(1, -1, size)

    def collect(self, own_1SC: Tensor) -> Tensor | None:
        """Returns all rows on the owner, None on other ranks."""
        own_1SC = own_1SC.detach()
        if self.process_group is None:
            return own_1SC
        counts, size, is_owner = self._counts(), own_1SC.shape[2], self.index == self.owner
        send_sizes = [own_1SC.numel() if place == self.owner else 0 for place in range(len(counts))]
        receive_sizes = [size * count if is_owner else 0 for count in counts]
        received = own_1SC.new_empty(sum(receive_sizes))
        dist.all_to_all_single(received, own_1SC.reshape(-1), receive_sizes, send_sizes, group=self.process_group)
        if not is_owner:
            return None
        whole_1TC = own_1SC.new_empty(1, sum(counts), size)
        first = 0
        received_1TC = received.view(1, -1, size)
        for piece in (piece for rows in self.rows for piece in rows):
            count = piece.stop - piece.start
            whole_1TC[:, piece] = received_1TC[:, first : first + count]
            first += count
        return whole_1TC

    def _counts(self) -> list[int]:
        return [sum(piece.stop - piece.start for piece in rows) for rows in self.rows]


@dataclass(frozen=True, slots=True)
class LentSlice:
    """A slice and the ranks that run it: one rank of every stage, all at one position, in `process_group`'s order."""

    process_group: dist.ProcessGroup
    # this rank's index in the group
    index: int
    # index of the rank of the slice's own stage
    owner: int
    # pieces of every rank; `start` counts from the start of the slice, `first` within the rank's block
    blocks: tuple[tuple[Piece, ...], ...]
    # the slice as in this rank's K/V book, where the sequence ends with the last slice that the rank runs
    slice_: Slice
    # only the owner has the front, and sends it to the others
    moves_front: bool

    @property
    def is_owner(self) -> bool:
        return self.index == self.owner

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Pieces of the slice on this rank."""
        return self.blocks[self.index]

    @property
    def block_tokens(self) -> tuple[int, ...]:
        """Number of tokens on every rank."""
        return tuple(sum(piece.num_tokens for piece in block) for block in self.blocks)

    def attend(
        self,
        q_hSD: Tensor,
        k_gSD: Tensor,
        v_gSE: Tensor,
        sinks_h: Tensor | None,
        rule: AttentionRule,
        kv_book: KVBook,
        layer: Hashable,
    ) -> Tensor:
        """Returns attention of this rank's tokens in one layer, [S, h, E], differentiable.

        layer: its key in the K/V book, the same object in every chunk. All ranks of the slice must call it for layers in the same
        order, and run backward in reverse order.
        """
        output: Tensor = _LentAttention.apply(q_hSD, k_gSD, v_gSE, sinks_h, _Call(rule, self, kv_book, layer))
        return output


@dataclass(frozen=True, slots=True)
class _Call:
    """Attention of one layer within a lent slice."""

    rule: AttentionRule
    lent: LentSlice
    kv_book: KVBook
    layer: Hashable


class _LentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_hSD: Tensor, k_gSD: Tensor, v_gSE: Tensor, sinks_h: Tensor | None, call: _Call) -> Tensor:
        slice_, head_dim = call.lent.slice_, q_hSD.shape[2]
        kv_gTW = _whole_slice(join_kv(k_gSD, v_gSE), call.lent)
        if call.lent.moves_front and not call.lent.is_owner:
            _receive_front(kv_gTW, head_dim, call)
        front = call.kv_book.write(call.layer, slice_, *split_kv(kv_gTW, head_dim), pattern=call.rule.pattern)
        if call.lent.moves_front and call.lent.is_owner:
            _send_front(front, call)
        out_ShE = q_hSD.new_empty(q_hSD.shape[1], q_hSD.shape[0], v_gSE.shape[2])
        lses = []
        for piece in call.lent.pieces:
            start = slice_.start + piece.start
            own = split_kv(kv_gTW[:, piece.start : piece.stop], head_dim)
            rows = (q_hSD[:, piece.tokens], *own, (*front, KeyRun(slice_.start, kv_gTW[:, : piece.start])))
            rule = call.rule.of_rows(piece.tokens, slice_.document, start)
            out_hPE, lse_hP = rows_forward(*rows, rule, start, sinks_h)
            out_ShE[piece.tokens] = out_hPE.transpose(0, 1)
            lses.append(lse_hP)
        ctx.save_for_backward(q_hSD, out_ShE, torch.cat(lses, dim=1), sinks_h)
        ctx.call = call
        return out_ShE

    @staticmethod
    def backward(ctx: Any, gradient_ShE: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_hSD, out_ShE, lse_hS, sinks_h = ctx.saved_tensors
        call: _Call = ctx.call
        lent, slice_, head_dim = call.lent, call.lent.slice_, q_hSD.shape[2]
        front, kv_gTW = call.kv_book.read(call.layer, slice_)
        front_sum_gUW, own_sum_gTW = call.kv_book.gradients(call.layer, slice_)
        dq_hSD = torch.empty_like(q_hSD)
        for piece in lent.pieces:
            rows = piece.tokens
            gradient_hPE, out_hPE = gradient_ShE[rows].transpose(0, 1), out_ShE[rows].transpose(0, 1)
            start, num_rows = slice_.start + piece.start, piece.num_tokens
            own, own_sum = (split_kv(x[:, piece.start : piece.stop], head_dim) for x in (kv_gTW, own_sum_gTW))
            before = KeyRun(slice_.start, kv_gTW[:, : piece.start])
            key_pieces = [
                KeyPiece(own, call.rule.pattern.own_tiles(start, num_rows), own_sum, start),
                front_piece(before, call.rule.pattern, start, num_rows, head_dim, own_sum_gTW[:, : piece.start]),
                *front_pieces(front, front_sum_gUW, slice_.start, call.rule.pattern, start, num_rows, head_dim),
            ]
            lse_hP, rule = lse_hS[:, rows], call.rule.of_rows(rows, slice_.document, start)
            dq_hSD[:, rows] = rows_backward(gradient_hPE, q_hSD[:, rows], out_hPE, lse_hP, key_pieces, rule)
        dsinks_h = None
        if sinks_h is not None:
            dsinks_h = sinks_backward(gradient_ShE.transpose(0, 1), out_ShE.transpose(0, 1), lse_hS, sinks_h)
        dk_gSD, dv_gSE = split_kv(_own_tokens(own_sum_gTW, lent).to(q_hSD.dtype), head_dim)
        if lent.moves_front:
            _return_front(front_sum_gUW, lent)
        call.kv_book.backward_done(call.layer, slice_)
        return dq_hSD, dk_gSD, dv_gSE, dsinks_h, None


def _whole_slice(own_gSW: Tensor, lent: LentSlice) -> Tensor:
    """Gathers keys and values of all tokens of the slice, [g, T, W], from the ranks that hold the tokens."""
    num_kv, num_own, width = own_gSW.shape
    token_values = num_kv * width
    counts = lent.block_tokens
    receive_sizes = [token_values * count for count in counts]
    received = own_gSW.new_empty(sum(receive_sizes))
    send_sizes = [token_values * num_own] * len(counts)
    dist.all_to_all_single(received, own_gSW.reshape(-1).repeat(len(counts)), receive_sizes, send_sizes, group=lent.process_group)
    whole_gTW = own_gSW.new_empty(num_kv, sum(counts), width)
    for block, count, flat in zip(lent.blocks, counts, received.split(receive_sizes), strict=True):
        block_gSW = flat.view(num_kv, count, width)
        for piece in block:
            whole_gTW[:, piece.start : piece.stop] = block_gSW[:, piece.tokens]
    return whole_gTW


def _own_tokens(whole_gTW: Tensor, lent: LentSlice) -> Tensor:
    """Sums gradients of this rank's tokens over all ranks, [g, S, W]: the backward of `_whole_slice`."""
    num_kv, _, width = whole_gTW.shape
    token_values = num_kv * width
    counts = lent.block_tokens
    blocks = [torch.cat([whole_gTW[:, piece.start : piece.stop] for piece in block], dim=1).reshape(-1) for block in lent.blocks]
    num_own = counts[lent.index]
    receive_sizes = [token_values * num_own] * len(counts)
    received = whole_gTW.new_empty(sum(receive_sizes))
    send_sizes = [token_values * count for count in counts]
    dist.all_to_all_single(received, torch.cat(blocks), receive_sizes, send_sizes, group=lent.process_group)
    return received.view(len(counts), num_kv, num_own, width).sum(0)


def _send_front(front: tuple[KeyRun, ...], call: _Call) -> None:
    """Sends the keys and values of the front that the slice sees, if any; their number follows from the plan."""
    if front:
        front_gUW = torch.cat([run.kv_GUW for run in front], dim=1)
        dist.broadcast(front_gUW, group=call.lent.process_group, group_src=call.lent.owner)


def _receive_front(kv_gTW: Tensor, head_dim: int, call: _Call) -> None:
    """Receives the front from the owner and writes it into this rank's K/V book."""
    slice_ = call.lent.slice_
    num_seen = slice_.start - call.rule.pattern.first_seen(slice_.start)
    front_gUW = kv_gTW.new_empty(kv_gTW.shape[0], num_seen, kv_gTW.shape[2])
    if num_seen:
        dist.broadcast(front_gUW, group=call.lent.process_group, group_src=call.lent.owner)
    if slice_.start:
        earlier = replace(slice_, start=0, stop=slice_.start)
        call.kv_book.write(call.layer, earlier, *split_kv(front_gUW, head_dim), pattern=call.rule.pattern, keeps_own=False)


def _return_front(front_sum_gUW: Tensor, lent: LentSlice) -> None:
    """Adds the other ranks' gradients of the front to the owner's."""
    if not front_sum_gUW.shape[1]:
        return
    total_gUW = front_sum_gUW.contiguous()
    dist.reduce(total_gUW, group=lent.process_group, group_dst=lent.owner)
    if lent.is_owner:
        front_sum_gUW.copy_(total_gUW)
