"""Lent rounds: micro-batches whose first and last slices are lent ranks of idle stages (SPPO, arXiv 2503.10377, section 6).

Every rank has the weights of all stages, frozen weights and replicated adapters, and runs its stage's order from
`plan.core.sharding.lent_order`. A slice's own stage receives the slice's hidden states as in any pipeline and sends every lent
stage the rows of that stage's tokens. It then collects their outputs and sends them on as one message; backward returns gradients
along the same path. The first and the last stage of the model distribute nothing: every rank has the token ids and the labels of
its position.

Gradients of a stage's weights arise on all ranks that ran its slices, so they are summed over all ranks, and every rank updates
the weights of all stages equally.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hf_longctx.plan.core.sharding import Piece, even_shards, lent_order, lent_pieces, running_stages, sequence_ends
from hf_longctx.plan.core.types import Action, Chunk, RankPlan, SequenceGroup, StagePlan
from hf_longctx.runtime.attention.context import Block, GroupContext
from hf_longctx.runtime.attention.kv_book import KVBook, Slice
from hf_longctx.runtime.attention.lent_slice import LentSlice
from hf_longctx.runtime.core.chunk_inputs import ChunkInputs
from hf_longctx.runtime.core.loss import step_loss, summed_loss
from hf_longctx.runtime.execution.round import Round, RoundHost, StepMemory
from hf_longctx.runtime.execution.stage_model import StageModel
from hf_longctx.runtime.process_groups import GroupPool


def without_lending(group: SequenceGroup) -> SequenceGroup:
    """Returns the group with every stage running its own chunks alone."""
    stages = tuple(
        replace(stage, actions=tuple(replace(action, lenders=()) for action in stage.actions)) for stage in group.stages
    )
    return replace(group, stages=stages)


@dataclass(frozen=True, slots=True)
class Phases:
    """Stages that run a stage's chunks: `front` before chunk `first_alone`, `back` from `first_back` on, else its own."""

    front: tuple[int, ...]
    first_alone: int
    back: tuple[int, ...]
    first_back: int

    @classmethod
    def of(cls, actions: Sequence[Action], stage: int, num_chunks: int) -> Phases:
        """Reads the phases of a stage from its actions.

        Raises ValueError unless later stages are lent to the first chunks, earlier stages to the last, none to those in between,
        and the same stages run forward and backward of a chunk.
        """
        running = {(action.kind, action.chunk): running_stages(action) for action in actions if action.kind in ("F", "B")}
        forward = [running["F", chunk] for chunk in range(num_chunks)]
        front, back = forward[0], forward[-1]
        first_alone = next((chunk for chunk, stages in enumerate(forward) if stages != front), num_chunks)
        if front[-1] == stage:
            front, first_alone = (stage,), 0
        first_back = num_chunks - next((n for n, stages in enumerate(reversed(forward)) if stages != back), num_chunks)
        if back[0] == stage:
            back, first_back = (stage,), num_chunks
        phases = cls(front, first_alone, back, first_back)
        is_regular = phases.front[0] == phases.back[-1] == stage and first_alone <= first_back
        if not is_regular or any(running[kind, chunk] != phases.running(chunk, stage) for kind, chunk in running):
            found = {f"{chunk}": list(stages) for chunk, stages in enumerate(forward)}
            raise ValueError(
                f"the chunks of stage {stage} are run by stages {found}; only later stages can be lent to the first chunks, and "
                f"only earlier ones to the last chunks, the same ones forward and backward; let the planner choose them"
            )
        return phases

    def phase(self, chunk: int) -> int:
        """Returns 0 for a chunk at the front with lent ranks, 2 for one at the back, 1 in between."""
        return (chunk >= self.first_alone) + (chunk >= self.first_back)

    def running(self, chunk: int, stage: int) -> tuple[int, ...]:
        """Returns the stages that run `chunk` of `stage`."""
        return (self.front, (stage,), self.back)[self.phase(chunk)]


def check_lending(plan: RankPlan, group: SequenceGroup, has_all_stages: bool = True) -> None:
    """Raises ValueError naming the first setting of a group with lent ranks that cannot be executed.

    has_all_stages: whether every rank has the weights of all stages.
    """
    if not has_all_stages:
        raise ValueError(
            "the plan lends ranks to other stages, so every rank needs the weights of all stages; give the executor "
            "`all_stages`, or plan with lend_stages=False"
        )
    if plan.parameters != "replicated":
        raise ValueError(
            f"the plan lends ranks, so every rank needs all weights, but parameters={plan.parameters!r}; use 'replicated'"
        )
    if any(stage.activations for stage in group.stages):
        raise ValueError(
            "the plan lends ranks and has activation policies (recompute, offload, tiles), which cannot be executed together; "
            "plan without one of the two"
        )
    if group.shape.num_blocks != 1 or any(len(stage.parts) != 1 for stage in group.stages):
        raise ValueError(
            f"a {group.method} group with {len(group.stages[0].parts)} layer range(s) per stage lends ranks, but only local and "
            f"ulysses groups with one layer range per stage can; plan such groups, or set lend_stages=False"
        )
    if any(len(chunk.spans) != 1 or chunk.spans[0].sequence != group.chunks[0].spans[0].sequence for chunk in group.chunks):
        raise ValueError(
            "a group lends ranks, but its chunks hold several sequences; ranks can be lent only to slices of one sequence, so "
            "give the sequence a group of its own"
        )
    phases = [Phases.of(stage.actions, stage.stage, len(group.chunks)) for stage in group.stages]
    for chunk in range(len(group.chunks)):
        found = [stage_phases.phase(chunk) for stage_phases in phases]
        if found != sorted(found):
            raise ValueError(
                f"the stages that run chunk {chunk} would wait for each other forever: for some it is one of their first chunks, "
                f"after stages for which it is one of their last; let the planner choose to which chunks stages are lent"
            )
    for row, stage in zip(lent_order(group), group.stages, strict=True):
        own = [action for action in row if action.stage == stage.stage]
        planned = [action for action in stage.actions if action.kind in ("F", "B")]
        if own != planned:
            raise ValueError(
                f"stage {stage.stage} is planned to run {' '.join(map(str, planned))}; with lent ranks all forwards must come "
                f"first, then all backwards: {' '.join(map(str, own))}"
            )
        for action in planned:
            positions = sorted(position for _, position in action.lenders)
            if positions != sorted(group.positions * (len(running_stages(action)) - 1)):
                raise ValueError(f"action {action} must be run at the group's positions {group.positions} of every stage")
            lent_pieces(group.chunks[action.chunk].num_tokens, group.degree, len(running_stages(action)))


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

    def _order(self, actions: Sequence[Action]) -> Sequence[Action]:
        """Returns forwards and backwards of this rank's stage and of the stages it helps; each has its own messages."""
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
            assert self.messages is not None
            came_1TC = self.messages.receive(replace(action, kind=kind, lenders=()))
        none_10C = torch.empty((1, 0, model.hidden_size), dtype=model.hidden_dtype, device=self.host.device)
        return rows.spread(came_1TC, none_10C)

    def _collect(self, kind: Literal["SF", "SB"], action: Action, rows: _Rows, own_1SC: Tensor) -> None:
        """Collects the rows of all ranks on the slice's own stage, which sends them on as one message."""
        whole_1TC = rows.collect(own_1SC)
        if whole_1TC is not None:
            assert self.messages is not None
            self.messages.send(replace(action, kind=kind, lenders=()), whole_1TC)

    def _note_memory(self) -> None:
        self.memory = self.memory.most(StepMemory(kv_book=sum(book.num_bytes for book in self.books)))

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
