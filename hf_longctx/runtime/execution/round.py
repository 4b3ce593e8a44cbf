"""Runs rounds: one rank's share of a micro-batch each, as the actions of its group's stage, in order.

A step gives its rounds a `RoundHost` (groups, the stage's model, forward and loss of a chunk), runs them one after the other or
in turns (`run_rounds`), and returns a `StepResult`. An out-of-memory error is explained by the action that ran, predicted bytes,
bytes on the device, and what to change.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from hf_longctx.plan.core.orders import running_order
from hf_longctx.plan.core.sharding import rank_pieces
from hf_longctx.plan.core.types import (
    LEAST_TILE_TOKENS,
    PASSES,
    Action,
    ActivationPolicy,
    Blocks,
    Chunk,
    RankPlan,
    SequenceGroup,
    StagePlan,
)
from hf_longctx.runtime.activations.engine import ActivationEngine, ChunkActivations
from hf_longctx.runtime.activations.output_head import OutputHead, loss_of
from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.attention.kv_book import KVBook
from hf_longctx.runtime.attention.state_book import StateBook
from hf_longctx.runtime.core.chunk_inputs import ChunkInputs
from hf_longctx.runtime.core.clock import Interval, StepClock
from hf_longctx.runtime.core.host_copies import copy_on_host
from hf_longctx.runtime.core.loss import (
    AnyLoss,
    Scoring,
    Targets,
    TokenScores,
    TokenTally,
    label_logits,
    step_loss,
    summed_loss,
    token_scores,
)
from hf_longctx.runtime.execution.experts import RouterBalance
from hf_longctx.runtime.execution.stage_model import StageModel
from hf_longctx.runtime.parameters.gradients import ReplicatedParameters
from hf_longctx.runtime.parameters.sharded import ShardedParameters
from hf_longctx.runtime.process_groups import GroupPool, StageMessages


@dataclass(frozen=True, slots=True, eq=False)
class RoundHost:
    """Everything that a round needs from its step; one per plan."""

    pool: GroupPool
    stage: StageModel
    device: torch.device
    parameters: ReplicatedParameters | ShardedParameters
    clock: StepClock
    # label tokens of the step over all ranks, or the sum of their weights
    num_label_tokens: float
    no_mask: Tensor
    # None without other stages
    messages: StageMessages | None = None
    # executes activation policies and, if it has a head, sums losses without whole logits
    engine: ActivationEngine | None = None
    # all stages of the model, for plans that lend ranks to other stages
    all_stages: tuple[StageModel, ...] = ()
    # the routers whose balance is part of the loss
    routers: RouterBalance | None = None
    # sums the routers' counts over all ranks, once, before the first backward
    settle_routers: Callable[[], None] = lambda: None
    # the loss of a token; None for cross-entropy
    token_loss: AnyLoss = None
    # counts the label tokens of this rank's forwards
    tally: TokenTally | None = None
    # the head of a teacher; None without one, and on stages before the last
    teacher_head: OutputHead | None = None
    # see `RankPlan.blocks_of`
    blocks_of: Callable[[Chunk], tuple[Blocks, ...]] = lambda _: ()

    def targets(self, inputs: ChunkInputs) -> Targets:
        """Returns the targets of a chunk's tokens, on the device of `inputs`."""
        teacher_head = None if self.teacher_head is None else self.teacher_head.logits
        return Targets.of(inputs, self.token_loss, self.tally, teacher_head)

    def forward_chunk(
        self,
        chunk: ChunkInputs,
        context: GroupContext,
        layer_range: int = 0,
        hidden_1TC: Tensor | None = None,
        has_head: bool = True,
    ) -> Tensor:
        """Returns logits [1, T, V] of this rank's shard from the last layer range or from the head alone, else hidden states.

        hidden_1TC: hidden states of the range before. has_head: see `StageModel.forward`. Raises RuntimeError if some layer's
        attention did not get the plan.
        """
        with nullcontext() if context.activations is None else context.activations.running():
            return self.stage.forward(layer_range, chunk, hidden_1TC, self.no_mask, context, has_head)

    def sum_chunk(
        self,
        chunk: ChunkInputs,
        context: GroupContext,
        tile_tokens: int,
        keep_gradients: bool,
        layer_range: int,
        hidden_1TC: Tensor | None,
    ) -> Tensor:
        """Returns the summed loss of this rank's shard; makes no whole logits if the engine has a head and with `tile_tokens`.

        chunk: may be on the host. keep_gradients: the chunk's backward comes next, so the head keeps its gradients.
        """
        inputs = chunk.to(self.device)
        head = self.engine.head if self.engine is not None else None
        if head is None or not tile_tokens:
            return summed_loss(self.forward_chunk(inputs, context, layer_range, hidden_1TC), self.targets(inputs))
        # labels on the host show which tiles have any, without waiting for the device
        with head.summing(self.targets(chunk), tile_tokens, keep_gradients):
            returned = self.forward_chunk(inputs, context, layer_range, hidden_1TC)
        return loss_of(returned)

    def score_chunk(
        self,
        chunk: ChunkInputs,
        context: GroupContext,
        tile_tokens: int,
        layer_range: int,
        hidden_1TC: Tensor | None,
        scoring: Scoring,
    ) -> TokenScores:
        """Returns scores of this rank's shard; makes whole logits only if it must, like `sum_chunk`."""
        inputs = chunk.to(self.device)
        head = self.engine.head if self.engine is not None else None
        if head is None or not tile_tokens:
            return token_scores(self.forward_chunk(inputs, context, layer_range, hidden_1TC), inputs.shift_labels, scoring)
        with head.scoring(chunk.shift_labels, tile_tokens, scoring) as scores:
            self.forward_chunk(inputs, context, layer_range, hidden_1TC)
        return scores[0]

    def read_chunk(
        self, chunk: ChunkInputs, context: GroupContext, tile_tokens: int, layer_range: int, hidden_1TC: Tensor | None
    ) -> Tensor:
        """Returns logits [n, V] of this rank's tokens with labels; makes others only if it must, like `score_chunk`."""
        inputs = chunk.to(self.device)
        head = self.engine.head if self.engine is not None else None
        if head is None or not tile_tokens:
            return label_logits(self.forward_chunk(inputs, context, layer_range, hidden_1TC), inputs.shift_labels)
        with head.reading(chunk.shift_labels, tile_tokens) as logits:
            self.forward_chunk(inputs, context, layer_range, hidden_1TC)
        return logits[0]


_GIB = 2**30


class OutOfMemoryTogether(torch.OutOfMemoryError):
    """Raised by all ranks once the collectives of a plan are over, if device memory ran out on some of them."""


@contextmanager
def explained(where: str, action: Action, group: SequenceGroup, device: torch.device, predicted_bytes: int = 0) -> Iterator[None]:
    """Context that re-raises torch.OutOfMemoryError with a message that names `where` (step and round) and the action."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(_message(where, action, group, device, predicted_bytes, error)) from error


def _message(
    where: str, action: Action, group: SequenceGroup, device: torch.device, predicted_bytes: int, error: torch.OutOfMemoryError
) -> str:
    chunk = group.chunks[action.chunk]
    predicted = f"; the plan was predicted to take {predicted_bytes / _GIB:.2f} GiB" if predicted_bytes else ""
    return (
        f"{where}, action {action}: out of device memory with chunk {chunk.index} of {chunk.num_tokens} tokens in "
        f"{len(chunk.spans)} documents on {group.degree} rank(s){predicted}{_held(device)}; lower tokens_per_rank, set "
        f"activations='auto', or allow more host memory. The device said: {error}"
    )


def active_bytes(device: torch.device) -> tuple[int, int]:
    """Returns bytes of a CUDA device that no new tensor can have: now, and at most since the peaks were reset.

    Unlike bytes of tensors, they include memory whose tensor is gone but which a stream may still read.
    """
    found = torch.cuda.memory_stats(device)
    return found["active_bytes.all.current"], found["active_bytes.all.peak"]


def _held(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    total = torch.cuda.get_device_properties(device).total_memory
    tensors = torch.cuda.memory_allocated(device)
    have, now, peak, held = (num_bytes / _GIB for num_bytes in (total, *active_bytes(device), tensors))
    return f"; {device} has {have:.2f} GiB, {now:.2f} GiB are in use (tensors: {held:.2f} GiB) and {peak:.2f} GiB were at most"


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Peak bytes of this rank during a plan, counted by the runtime."""

    # bytes that chunks under activation policies hold for their backward, on the device and on the host
    saved: int = 0
    host: int = 0
    # keys and values of slices, and their gradients
    kv_book: int = 0
    # CUDA memory in use by tensors or streams (torch's `active_bytes`); 0 elsewhere
    device_peak: int = 0

    def most(self, other: StepMemory) -> StepMemory:
        """Returns the larger number of each kind."""
        return StepMemory(*(max(getattr(self, name), getattr(other, name)) for name in _KINDS))

    def plus(self, other: StepMemory) -> StepMemory:
        """Returns the sum of each kind."""
        return StepMemory(*(getattr(self, name) + getattr(other, name) for name in _KINDS))


_KINDS = tuple(each.name for each in fields(StepMemory))
NO_MEMORY = StepMemory()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a plan. loss: its part of the step's mean loss over all ranks' label tokens, equal on every rank."""

    loss: Tensor
    clock: StepClock
    memory: StepMemory = NO_MEMORY
    # balance loss of the experts over the whole step; the first plan's loss includes it, times its coefficient
    aux_loss: Tensor | None = None
    # rows of the fullest expert divided by those of an even split. Both are None for later plans, and without balanced experts
    router_load: Tensor | None = None
    # ranks on which the step's reduced gradients are not finite; zero for plans before the step's last one
    num_bad: Tensor | None = None
    # sums of `TokenTally` over all ranks; empty if tokens are not counted
    tallied: tuple[Tensor, ...] = ()

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradients are finite on all ranks; waits for the device."""
        return bool(torch.isfinite(self.loss)) and not (self.num_bad is not None and bool(self.num_bad))

    def intervals(self) -> list[Interval]:
        """Returns this rank's actions with their times; call it after the step, since on CUDA it waits for the device."""
        return self.clock.intervals()


# kinds of results of the forwards at the end of the model; a head: what it gets
Wanted = Literal["loss", "logits"] | Scoring | TokenTally | OutputHead
# key of one forward: (layer range, chunk), or (stage, chunk) if ranks are lent to other stages
_Pass = tuple[int, int]


class Round:
    """Executes one micro-batch; holds the tensors of chunks between their F and their B, and the keys and values of slices.

    A forward keeps its output, from which its backward starts: a loss at the end of the model, otherwise hidden states, whose
    gradient the next layer range sends. A forward's input is a leaf, whose gradient goes to the layer range before. The head of a
    chunk of another stage runs forward and backward at once, on hidden states from the last stage, which get their gradient.

    inputs: this rank's shard of every chunk. index: index of the micro-batch in the plan. is_counted: forwards count the tokens
    that routers send to each expert. wanted: the loss, perhaps with a tally of its tokens; or, given a `Scoring`, scores of
    tokens by chunk, in `scores`; or logits of tokens with labels, in `logits`; or, given the model's head, its inputs [1, T, C],
    in `head_inputs`, on the host.
    """

    def __init__(
        self,
        host: RoundHost,
        group: SequenceGroup,
        stage: StagePlan,
        inputs: Sequence[ChunkInputs],
        index: int,
        is_counted: bool = False,
        wanted: Wanted = "loss",
    ) -> None:
        self.host, self.group, self.stage, self.inputs = host, group, stage, inputs
        self.index, self.is_counted = index, is_counted
        self.policies = {(policy.layer_range, policy.chunk): policy for policy in stage.activations}
        # tensors and policies' state between the F and the B of a chunk
        self.received: dict[_Pass, Tensor] = {}
        self.outputs: dict[_Pass, Tensor] = {}
        self.gradients: dict[_Pass, Tensor] = {}
        self.activations: dict[_Pass, ChunkActivations] = {}
        # most bytes during the latest pass
        self.memory = StepMemory()
        self.num_backwards = sum(action.kind == "B" for action in self.actions)
        # whether the running action is the last backward of the plan, or comes after it
        self.is_last_of_plan = False
        # stage of each chunk's head, and the chunks whose gradients each stage will send from heads, in the order of sending
        self.head_stages = group.head_stages
        self.coming = {
            head_stage: deque(action.chunk for action in group.stages[head_stage].actions if action.kind == "H")
            for head_stage in set(self.head_stages.values())
        }
        self.books = self._new_books()
        self.state_book = StateBook(has_backward=self.num_backwards > 0)
        self.wanted = wanted
        self.scores: dict[int, TokenScores] = {}
        self.logits: dict[int, Tensor] = {}
        self.head_inputs: dict[int, Tensor] = {}
        # this rank's share of the step's loss, without a graph
        self.total = torch.zeros((), dtype=torch.float64, device=host.device)
        self.handlers = {
            "F": self._forward,
            "B": self._backward,
            "H": self._head,
            "SF": self._send_hidden,
            "RF": self._receive_hidden,
            "SB": self._send_gradient,
            "RB": self._receive_gradient,
        }

    @property
    def actions(self) -> Sequence[Action]:
        """Actions that this rank executes, in order."""
        return self.stage.actions

    def run(self, action: Action, following: Action | None) -> None:
        """Runs the next action. following: the action of this round that the rank runs right after it."""
        self.handlers[action.kind](action, following)

    def finish(self) -> None:
        """Checks that nothing waits for a backward any more, and drops the inputs, which a teacher's states make large."""
        self.inputs = ()
        held_bytes = self.held().kv_book
        assert not held_bytes, f"the books of keys and values and of states hold {held_bytes} bytes after their round"

    def held(self) -> StepMemory:
        """Returns the bytes that chunks and slices hold for their backward."""
        pairs = [activations.held_bytes() for activations in self.activations.values()]
        saved, host = (sum(column) for column in zip((0, 0), *pairs, strict=True))
        return StepMemory(saved, host, sum(book.num_bytes for book in self.books) + self.state_book.num_bytes)

    def _new_books(self) -> list[KVBook]:
        return [KVBook(has_backward=self.num_backwards > 0)]

    def _forward(self, action: Action, following: Action | None) -> None:
        key, chunk = (action.layer_range, action.chunk), self.group.chunks[action.chunk]
        context = self.host.pool.context(self.group, chunk, self.books[0])
        context = replace(context, state_book=self.state_book, blocks=self.host.blocks_of(chunk))
        policy, engine = self.policies.get(key), self.host.engine
        if policy is None and engine is not None and engine.partners is not None:
            # other ranks may replay layers in which this rank must take part
            policy = ActivationPolicy(action.chunk, action.layer_range)
        if engine is not None:
            engine.settle()
        if engine is not None and policy is not None and torch.is_grad_enabled():
            self.activations[key] = engine.begin(policy, layers_of(self.stage, action.layer_range))
            context = replace(context, activations=self.activations[key])
        # without a backward nothing else needs the hidden states
        hidden_1TC = self.received.get(key) if self.num_backwards else self.received.pop(key, None)
        with self._routing(action, self.is_counted):
            self._run_forward(action, following, context, hidden_1TC)
        self._note_memory()

    def _run_forward(self, action: Action, following: Action | None, context: GroupContext, hidden_1TC: Tensor | None) -> None:
        key, inputs = (action.layer_range, action.chunk), self.inputs[action.chunk]
        is_last = self.host.stage.is_last(action.layer_range)
        if not is_last or action.chunk in self.head_stages:
            arguments = inputs.to(self.host.device), context, action.layer_range, hidden_1TC, not is_last
            self.outputs[key] = self.host.forward_chunk(*arguments)
            return
        policy = self.policies.get(key)
        tile_tokens = policy.loss_tile_tokens if policy is not None else 0
        if isinstance(self.wanted, Scoring):
            found = self.host.score_chunk(inputs, context, tile_tokens, action.layer_range, hidden_1TC, self.wanted)
            self.scores[action.chunk] = found
            return
        if self.wanted == "logits":
            self.logits[action.chunk] = self.host.read_chunk(inputs, context, tile_tokens, action.layer_range, hidden_1TC)
            return
        if isinstance(self.wanted, OutputHead):
            with self.wanted.holding(inputs.shift_labels) as found_inputs:
                self.host.forward_chunk(inputs.to(self.host.device), context, action.layer_range, hidden_1TC)
            self.head_inputs[action.chunk] = copy_on_host(found_inputs[0])
            return
        is_backward_next = following is not None and (following.kind, following.chunk) == ("B", action.chunk)
        self.outputs[key] = self._loss(action, context, tile_tokens, is_backward_next, hidden_1TC)

    def _loss(
        self, action: Action, context: GroupContext, tile_tokens: int, is_backward_next: bool, hidden_1TC: Tensor | None
    ) -> Tensor:
        """Returns the part of the step's loss of a chunk, and adds it to the total."""
        inputs = self.inputs[action.chunk]
        loss_sum = self.host.sum_chunk(inputs, context, tile_tokens, is_backward_next, action.layer_range, hidden_1TC)
        loss = step_loss(loss_sum, self.host.num_label_tokens)
        self.total += loss.detach()
        return loss

    def _head(self, action: Action, following: Action | None) -> None:
        context = self.host.pool.context(self.group, self.group.chunks[action.chunk])
        hidden_1TC = self.received[action.layer_range, action.chunk]
        # whole logits would be large beside what chunks in flight hold
        loss = self._loss(action, context, LEAST_TILE_TOKENS, is_backward_next=True, hidden_1TC=hidden_1TC)
        self.host.parameters.before_backward(is_last=False)
        loss.backward()
        self.host.parameters.after_backward()
        self._note_memory()

    def _backward(self, action: Action, following: Action | None) -> None:
        key = (action.layer_range, action.chunk)
        output, gradient = self.outputs.pop(key), self.gradients.pop(key, None)
        self.num_backwards -= 1
        self.host.settle_routers()
        is_last = not self.num_backwards
        self.host.parameters.before_backward(is_last, self.is_last_of_plan)
        # if only later layers have adapters, the first stages have nothing to train
        if output.requires_grad:
            with self._routing(action):
                output.backward(gradient)
        else:
            self.host.parameters.skip_backward()
        self.host.parameters.after_backward()
        if self.host.engine is not None:
            self.host.engine.settle()
        self.activations.pop(key, None)
        self._note_memory()
        if not action.layer_range:
            for span in self.group.chunks[action.chunk].spans:
                if not span.start:
                    self.books[0].close(span.sequence)
                    self.state_book.close(span.sequence)

    def _routing(self, action: Action, is_counted: bool = False) -> AbstractContextManager[None]:
        """Context around a forward or backward, in which routers count, unless this rank's shard has only dummy tokens."""
        if self.host.routers is None:
            return nullcontext()
        chunk, place = self.group.chunks[action.chunk], self.group.positions.index(self.host.pool.position)
        pieces = rank_pieces(chunk, self.group.shape)[place]
        num_real = sum(piece.document < len(chunk.spans) for piece in pieces)
        assert num_real in (0, len(pieces)), "a shard mixes tokens and dummy tokens"
        return self.host.routers.running(not num_real, is_counted)

    def _receive_hidden(self, action: Action, following: Action | None) -> None:
        hidden_1TC = self._receive(action)
        self.received[action.layer_range, action.chunk] = hidden_1TC.requires_grad_(torch.is_grad_enabled())

    def _send_hidden(self, action: Action, following: Action | None) -> None:
        self._send(action, self.outputs[action.layer_range, action.chunk])
        if not self.num_backwards:
            # forwards only: no backward needs the output
            del self.outputs[action.layer_range, action.chunk]

    def _receive_gradient(self, action: Action, following: Action | None) -> None:
        key, head_end = (action.layer_range, action.chunk), self._head_end(action)
        # heads run in the order of forwards: gradients of other chunks that come first are kept for their backwards
        while head_end is not None and key not in self.gradients:
            came = replace(action, chunk=self.coming[head_end].popleft())
            self.gradients[action.layer_range, came.chunk] = self._receive(came)
        if head_end is None:
            self.gradients[key] = self._receive(action)

    def _send_gradient(self, action: Action, following: Action | None) -> None:
        gradient = self.received.pop((action.layer_range, action.chunk)).grad
        assert gradient is not None, f"{action}: the hidden states that the stage received got no gradient"
        self._send(action, gradient)

    def _receive(self, action: Action) -> Tensor:
        """Returns the hidden states of a chunk, or their gradient, from another stage."""
        assert self.host.messages is not None
        shape = 1, self.inputs[action.chunk].input_ids.shape[1], self.host.stage.hidden_size
        return self.host.messages.receive(action, shape, self._head_end(action))

    def _send(self, action: Action, tensor: Tensor) -> None:
        assert self.host.messages is not None
        self.host.messages.send(action, tensor, self._head_end(action))

    def _head_end(self, action: Action) -> int | None:
        """Returns the stage at the other end of a message from or to an output head on another stage; None for other messages."""
        if action.layer_range == len(self.stage.layer_ranges):
            return self.host.stage.num_stages - 1
        is_behind = action.kind in ("SF", "RB") and self.host.stage.is_last(action.layer_range)
        return self.head_stages[action.chunk] if is_behind else None

    def _note_memory(self) -> None:
        held = self.held()
        self.memory = replace(held, kv_book=sum(book.take_peak() for book in self.books) + self.state_book.num_bytes)


def run_rounds(host: RoundHost, plan: RankPlan, rounds: Sequence[Round], where: str, predicted_bytes: int = 0) -> StepMemory:
    """Runs the rounds of a plan one after the other, or in its turns; returns the most bytes at one time.

    where: for errors. predicted_bytes: for out-of-memory errors.
    """
    order = running_order([each.actions for each in rounds], plan.turns)
    num_left = Counter(index for index, _ in order)
    num_backwards = sum(action.kind == "B" for _, action in order)
    # an output head runs no layer, so gathers go on beside it
    passes = iter([action for _, action in order if action.kind in ("F", "B")][1:])
    memory, live = StepMemory(), set[int]()
    for place, (index, action) in enumerate(order):
        current = rounds[index]
        if index not in live:
            host.parameters.enter_round(plan.parameters)
            live.add(index)
        num_backwards -= action.kind == "B"
        current.is_last_of_plan = not num_backwards
        if action.kind in ("F", "B"):
            host.parameters.begin_pass(action, next(passes, None))
        next_index, following = order[place + 1] if place + 1 < len(order) else (index, None)
        explained_errors = explained(f"{where}, round {index}", action, current.group, host.device, predicted_bytes)
        with host.clock.measure(index, action.kind, str(action)), explained_errors:
            current.run(action, following if next_index == index else None)
        if action.kind in PASSES:
            memory = memory.most(reduce(StepMemory.plus, (rounds[other].held() for other in live - {index}), current.memory))
        num_left[index] -= 1
        if not num_left[index]:
            current.finish()
            live.remove(index)
    if host.messages is not None:
        host.messages.finish()
    return memory


def layers_of(stage: StagePlan, layer_range: int) -> range:
    """Returns the indices of a layer range's layers among those of its stage."""
    first = sum(layers.num_layers for layers in stage.layer_ranges[:layer_range])
    return range(first, first + stage.layer_ranges[layer_range].num_layers)
