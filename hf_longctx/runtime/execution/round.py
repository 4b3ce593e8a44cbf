"""One round of a rank's plan: the actions of its group's stage, run in order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_longctx.plan.core.sharding import rank_pieces
from hf_longctx.plan.core.types import Action, SequenceGroup, StagePlan
from hf_longctx.runtime.activations.engine import ChunkActivations
from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.attention.kv_book import KVBook
from hf_longctx.runtime.core.chunk_inputs import ChunkInputs
from hf_longctx.runtime.core.clock import StepClock
from hf_longctx.runtime.core.loss import TokenScores, step_loss
from hf_longctx.runtime.execution.out_of_memory import explained
from hf_longctx.runtime.execution.results import StepMemory
from hf_longctx.runtime.process_groups.links import RoundMessages

if TYPE_CHECKING:
    from hf_longctx.runtime.execution.executor import StepExecutor

# (part, chunk): one forward of a stage
_Pass = tuple[int, int]


class Round:
    """One micro-batch of one rank: what its chunks hold between their F and their B, and the keys and values of slices.

    A forward leaves its output, which its backward starts from: a loss at the end of the model, else hidden states, whose
    gradient the next part sends. Its input is a leaf, whose gradient goes to the part before.
    """

    def __init__(
        self,
        executor: StepExecutor,
        group: SequenceGroup,
        inputs: Sequence[ChunkInputs],
        num_label_tokens: int,
        clock: StepClock,
        index: int,
        stage: StagePlan,
        is_counted: bool = False,
    ) -> None:
        self.executor, self.group, self.inputs = executor, group, inputs
        # whether forwards tell the routers' balance what goes where
        self.is_counted = is_counted
        self.policies = {(policy.part, policy.chunk): policy for policy in stage.activations}
        self.num_label_tokens, self.clock, self.index = num_label_tokens, clock, index
        self.stage = stage
        # of chunks between their F and their B
        self.received: dict[_Pass, Tensor] = {}
        self.outputs: dict[_Pass, Tensor] = {}
        self.gradients: dict[_Pass, Tensor] = {}
        self.activations: dict[_Pass, ChunkActivations] = {}
        self.memory = StepMemory()
        self.num_backwards = 0
        self.book = KVBook()
        self.messages: RoundMessages | None = None
        # of every chunk, where they are asked for instead of the loss
        self.scores: dict[int, TokenScores] | None = None
        self.total = torch.zeros((), dtype=torch.float64, device=executor.device)
        self.handlers = {
            "F": self._forward,
            "B": self._backward,
            "SF": self._send_hidden,
            "RF": self._receive_hidden,
            "SB": self._send_gradient,
            "RB": self._receive_gradient,
        }

    def run(self, actions: Sequence[Action], where: str, predicted_bytes: int = 0) -> Tensor:
        """The actions in order; this rank's share of the step's loss, without a graph. `where`: for errors."""
        self.num_backwards = sum(action.kind == "B" for action in actions)
        self.book = KVBook(has_backward=self.num_backwards > 0)
        self.messages = self._post_messages(actions)
        for action, following in itertools.zip_longest(actions, actions[1:]):
            memory = explained(where, action, self.group, self.executor.device, predicted_bytes)
            with self.clock.measure(self.index, action.kind, str(action)), memory:
                self.handlers[action.kind](action, following)
        if self.messages is not None:
            self.messages.finish()
        assert not self.book.num_bytes, f"the K/V book holds {self.book.num_bytes} bytes behind its round"
        return self.total

    def _forward(self, action: Action, following: Action | None) -> None:
        key, chunk = (action.part, action.chunk), self.group.chunks[action.chunk]
        context = self.executor.pool.context(self.group, chunk, self.book)
        policy = self.policies.get(key)
        if self.executor.engine is not None and policy is not None and torch.is_grad_enabled():
            self.activations[key] = self.executor.engine.begin(policy, layers_of(self.stage, action.part))
            context = replace(context, activations=self.activations[key])
        # without a backward nobody else needs it
        hidden_1TC = self.received.get(key) if self.num_backwards else self.received.pop(key, None)
        with self._routing(action, self.is_counted):
            self._run_forward(action, following, context, hidden_1TC)
        self._note_memory()

    def _run_forward(self, action: Action, following: Action | None, context: GroupContext, hidden_1TC: Tensor | None) -> None:
        key = (action.part, action.chunk)
        policy = self.policies.get(key)
        if self.executor.stage.is_last(action.part):
            is_backward_next = following is not None and (following.kind, following.chunk) == ("B", action.chunk)
            tile_tokens = policy.tile_tokens if policy is not None else 0
            if self.scores is not None:
                inputs = self.inputs[action.chunk]
                self.scores[action.chunk] = self.executor.score_chunk(inputs, context, tile_tokens, action.part, hidden_1TC)
                return
            loss_sum = self.executor.sum_chunk(
                self.inputs[action.chunk], context, tile_tokens, is_backward_next, action.part, hidden_1TC
            )
            self.outputs[key] = step_loss(loss_sum, self.num_label_tokens)
            self.total += self.outputs[key].detach()
        else:
            inputs = self.inputs[action.chunk].to(self.executor.device)
            self.outputs[key] = self.executor.forward_chunk(inputs, context, action.part, hidden_1TC)

    def _backward(self, action: Action, following: Action | None) -> None:
        key = (action.part, action.chunk)
        output, gradient = self.outputs.pop(key), self.gradients.pop(key, None)
        self.num_backwards -= 1
        self.executor.settle_routers()
        self.executor.parameters.before_backward(is_last=not self.num_backwards)
        # nothing is trained before the first stage's end under some adapters
        if output.requires_grad:
            with self._routing(action):
                output.backward(gradient)
        self.executor.parameters.after_backward()
        self.activations.pop(key, None)
        self._note_memory()
        if not action.part:
            for span in self.group.chunks[action.chunk].spans:
                if not span.start:
                    self.book.close(span.sequence)

    def _routing(self, action: Action, is_counted: bool = False) -> AbstractContextManager[None]:
        """Around a forward or a backward: the routers' balance learns whether any token of this rank's shard is real."""
        if self.executor.routers is None:
            return nullcontext()
        chunk, place = self.group.chunks[action.chunk], self.group.positions.index(self.executor.pool.position)
        pieces = rank_pieces(chunk, self.group.shape)[place]
        num_real = sum(piece.document < len(chunk.spans) for piece in pieces)
        assert num_real in (0, len(pieces)), "a shard mixes tokens and dummy tokens"
        return self.executor.routers.running(not num_real, is_counted)

    def _receive_hidden(self, action: Action, following: Action | None) -> None:
        assert self.messages is not None
        hidden_1TC = self.messages.receive(action)
        self.received[action.part, action.chunk] = hidden_1TC.requires_grad_(torch.is_grad_enabled())

    def _send_hidden(self, action: Action, following: Action | None) -> None:
        assert self.messages is not None
        self.messages.send(action, self.outputs[action.part, action.chunk])
        if not self.num_backwards:
            # forwards alone: nothing waits for it
            del self.outputs[action.part, action.chunk]

    def _receive_gradient(self, action: Action, following: Action | None) -> None:
        assert self.messages is not None
        self.gradients[action.part, action.chunk] = self.messages.receive(action)

    def _send_gradient(self, action: Action, following: Action | None) -> None:
        assert self.messages is not None
        gradient = self.received.pop((action.part, action.chunk)).grad
        assert gradient is not None, f"{action}: no gradient of what came in"
        self.messages.send(action, gradient)

    def _post_messages(self, actions: Sequence[Action]) -> RoundMessages | None:
        links, stage = self.executor.pool.links, self.executor.stage
        if links is None:
            return None

        def shape_of(chunk: int) -> tuple[int, int, int]:
            return 1, self.inputs[chunk].input_ids.shape[1], stage.hidden_size

        return RoundMessages(links, actions, shape_of, stage.hidden_dtype, self.executor.device)

    def _note_memory(self) -> None:
        held = [activations.held_bytes() for activations in self.activations.values()]
        saved, host = (sum(column) for column in zip((0, 0), *held, strict=True))
        self.memory = self.memory.most(StepMemory(saved, host, self.book.peak_bytes))


def layers_of(stage: StagePlan, part: int) -> range:
    """Where the layers of a part are among those of its stage."""
    first = sum(layers.num_layers for layers in stage.parts[:part])
    return range(first, first + stage.parts[part].num_layers)
