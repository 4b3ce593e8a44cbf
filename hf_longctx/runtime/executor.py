"""`StepExecutor.run`: the interpreter of a rank's plan, one method per action kind. Read after `plan/planner.py`.

It owns the model, the group pool and the gradient sums of a step: contexts are made per chunk, results leave
through `StepResult`. Gradients are the sum over all ranks of the loss divided by the step's label tokens, whatever the plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_longctx.plan.types import Action, ActivationPolicy, RankPlan, SequenceGroup
from hf_longctx.runtime.checkpointing import ActivationEngine, ChunkActivations
from hf_longctx.runtime.context import GroupContext
from hf_longctx.runtime.loss import step_loss, summed_cross_entropy
from hf_longctx.runtime.mesh import GroupPool
from hf_longctx.runtime.out_of_memory import explained
from hf_longctx.runtime.output_head import check_untouched
from hf_longctx.runtime.profiler import Interval, StepClock
from hf_longctx.runtime.sharded import parameters_of
from hf_longctx.runtime.slices import KVBook


@dataclass(frozen=True, slots=True)
class ChunkInputs:
    """This rank's shard of one chunk, each of shape [1, T] and type int64: token ids, positions, next-token labels."""

    input_ids: Tensor
    position_ids: Tensor
    shift_labels: Tensor

    def pin_memory(self) -> ChunkInputs:
        """The same shard in pinned memory; called by the loader's pinning thread."""
        return ChunkInputs(*(t.pin_memory() for t in (self.input_ids, self.position_ids, self.shift_labels)))

    def to(self, device: torch.device) -> ChunkInputs:
        """The same shard on `device`; from pinned memory the copies do not block the host."""
        return ChunkInputs(*(t.to(device, non_blocking=True) for t in (self.input_ids, self.position_ids, self.shift_labels)))


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The most bytes of this rank at any time in a plan, as counted.

    saved, host: that chunks under activation policies hold for their backward on the device and on the host. kv_book: keys and
    values of slices, and their gradients. device_peak: all that torch had allocated on a CUDA device; 0 elsewhere.
    """

    saved: int = 0
    host: int = 0
    kv_book: int = 0
    device_peak: int = 0

    def most(self, other: StepMemory) -> StepMemory:
        """The larger of both, number by number."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("saved", "host", "kv_book", "device_peak"))
        return StepMemory(*map(max, pairs))


NO_MEMORY = StepMemory()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a plan leaves behind. `loss` is its part of the step's mean loss over all ranks' label tokens, on every rank."""

    loss: Tensor
    clock: StepClock
    memory: StepMemory = NO_MEMORY

    def intervals(self) -> list[Interval]:
        """What this rank did; call it after the step, since on CUDA it waits for the device."""
        return self.clock.intervals()


class StepExecutor:
    """Runs rank plans of one model on the groups of one pool.

    `model` is the plain, DDP-wrapped or sharded (`shard_model`) model; its attention must be the registered `longctx`
    function, called `num_attention_layers` times per forward. `fp32_gradients`: gradients of weights in half precision add
    up in fp32. `engine` executes activation policies; without one, plans that have any are refused. With a head, chunks whose
    policy has `tile_tokens` make no logits, in evaluation too.
    """

    def __init__(
        self,
        model: nn.Module,
        pool: GroupPool,
        num_attention_layers: int,
        device: torch.device,
        fp32_gradients: bool = True,
        engine: ActivationEngine | None = None,
    ) -> None:
        self.model, self.pool, self.device, self.engine = model, pool, device, engine
        self.num_attention_layers = num_attention_layers
        self.parameters = parameters_of(model, fp32_gradients)
        self._no_mask = no_mask(device)

    def run(
        self,
        plan: RankPlan,
        inputs: Sequence[Sequence[ChunkInputs]],
        num_label_tokens: int,
        reduce: bool = True,
        predicted_bytes: int = 0,
    ) -> StepResult:
        """Forward and backward of every round; gradients end as the sum over all ranks, sharded as the parameters are.

        `inputs[r][c]` is this rank's shard of chunk c in round r. `num_label_tokens` counts the label tokens of the step
        over all ranks. `reduce`: false for every plan of an optimizer step but its last, whose reduction then covers the
        gradients of all of them. `predicted_bytes`: what the plan was estimated to take, for the message where memory runs
        out. Every rank of the pool must call it with its own path of the same plan. Raises ValueError by name for what this
        version does not execute, torch.OutOfMemoryError naming the action that ran out of device memory.
        """
        self.parameters.check(plan.parameters)
        refuse_unsupported(plan, self.engine)
        clock = StepClock(self.device)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        memory = StepMemory()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        with self.parameters.in_step():
            for index, (group, stage) in enumerate(plan.rounds):
                self.parameters.enter_round(plan.parameters)
                current = _Round(self, group, inputs[index], num_label_tokens, clock, index, stage.activations)
                total += current.run(stage.actions, f"step {plan.step}, round {index}", predicted_bytes)
                memory = memory.most(current.memory)
        with clock.measure(-1, "reduce", "gradients"):
            if reduce:
                self.parameters.reduce(self.pool.everyone)
            self._sum_over_ranks(total)
        if self.device.type == "cuda":
            memory = replace(memory, device_peak=torch.cuda.max_memory_allocated(self.device))
        return StepResult(total, clock, memory)

    @torch.no_grad()
    def evaluate(self, plan: RankPlan, inputs: Sequence[Sequence[ChunkInputs]]) -> Tensor:
        """The summed cross-entropy over all ranks' label tokens (fp64 scalar): forwards only, as `run` otherwise."""
        self.parameters.check(plan.parameters)
        plan = forward_only(plan)
        refuse_unsupported(plan, self.engine)
        clock = StepClock(self.device)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, (group, stage) in enumerate(plan.rounds):
            self.parameters.enter_round(plan.parameters)
            forwards = [action for action in stage.actions if action.kind == "F"]
            current = _Round(self, group, inputs[index], 1, clock, index, stage.activations)
            total += current.run(forwards, f"evaluation {plan.step}, round {index}")
        self.parameters.free()
        self._sum_over_ranks(total)
        return total

    def forward_chunk(self, chunk: ChunkInputs, context: GroupContext) -> Tensor:
        """Logits [1, T, V] of this rank's shard; raises RuntimeError if some layer's attention did not get the plan."""
        with nullcontext() if context.activations is None else context.activations.running():
            output = self.model(
                input_ids=chunk.input_ids,
                position_ids=chunk.position_ids,
                attention_mask=self._no_mask,
                use_cache=False,
                return_dict=True,
                longctx=context,
            )
        context.check_calls(self.num_attention_layers)
        logits: Tensor = output.logits
        return logits

    def sum_chunk(self, chunk: ChunkInputs, context: GroupContext, tile_tokens: int = 0, keep_gradients: bool = False) -> Tensor:
        """The summed cross-entropy of this rank's shard, a scalar: without logits if there are `tile_tokens` and a head.

        `chunk` may be on the host. `keep_gradients`: its backward comes next.
        """
        inputs = chunk.to(self.device)
        head = self.engine.head if self.engine is not None else None
        if head is None or not tile_tokens:
            return summed_cross_entropy(self.forward_chunk(inputs, context), inputs.shift_labels)
        # labels on the host tell which tiles have any, without waiting for the device
        with head.summing(chunk.shift_labels, tile_tokens, keep_gradients):
            loss = self.forward_chunk(inputs, context)
        check_untouched(loss)
        return loss

    def _sum_over_ranks(self, total: Tensor) -> None:
        if self.pool.everyone is not None:
            dist.all_reduce(total, group=self.pool.everyone)


class _Round:
    """One micro-batch of one rank: its chunks' losses between their F and their B, and the keys and values of slices."""

    def __init__(
        self,
        executor: StepExecutor,
        group: SequenceGroup,
        inputs: Sequence[ChunkInputs],
        num_label_tokens: int,
        clock: StepClock,
        index: int,
        policies: Sequence[ActivationPolicy] = (),
    ) -> None:
        self.executor, self.group, self.inputs = executor, group, inputs
        self.policies = {policy.chunk: policy for policy in policies}
        self.num_label_tokens, self.clock, self.index = num_label_tokens, clock, index
        self.losses: dict[int, Tensor] = {}
        # of chunks between their F and their B
        self.activations: dict[int, ChunkActivations] = {}
        self.memory = StepMemory()
        self.num_backwards = 0
        self.book = KVBook()
        self.total = torch.zeros((), dtype=torch.float64, device=executor.device)
        self.handlers = {"F": self._forward, "B": self._backward}

    def run(self, actions: Sequence[Action], where: str, predicted_bytes: int = 0) -> Tensor:
        """The actions in order; this rank's share of the step's loss, without a graph. `where`: for errors."""
        self.num_backwards = sum(action.kind == "B" for action in actions)
        self.book = KVBook(has_backward=self.num_backwards > 0)
        for action, following in itertools.zip_longest(actions, actions[1:]):
            memory = explained(where, action, self.group, self.executor.device, predicted_bytes)
            with self.clock.measure(self.index, action.kind, str(action)), memory:
                self.handlers[action.kind](action, following)
        assert not self.book.num_bytes, f"the K/V book holds {self.book.num_bytes} bytes behind its round"
        return self.total

    def _forward(self, action: Action, following: Action | None) -> None:
        chunk = self.group.chunks[action.chunk]
        context = self.executor.pool.context(self.group, chunk, self.book)
        policy = self.policies.get(action.chunk)
        if self.executor.engine is not None and policy is not None and torch.is_grad_enabled():
            self.activations[action.chunk] = self.executor.engine.begin(policy)
            context = replace(context, activations=self.activations[action.chunk])
        is_backward_next = following is not None and (following.kind, following.chunk) == ("B", action.chunk)
        tile_tokens = policy.tile_tokens if policy is not None else 0
        loss_sum = self.executor.sum_chunk(self.inputs[action.chunk], context, tile_tokens, is_backward_next)
        loss = step_loss(loss_sum, self.num_label_tokens)
        self.total += loss.detach()
        self.losses[action.chunk] = loss
        self._note_memory()

    def _backward(self, action: Action, following: Action | None) -> None:
        loss = self.losses.pop(action.chunk)
        self.num_backwards -= 1
        self.executor.parameters.before_backward(is_last=not self.num_backwards)
        loss.backward()
        self.executor.parameters.after_backward()
        self.activations.pop(action.chunk, None)
        self._note_memory()
        for span in self.group.chunks[action.chunk].spans:
            if not span.start:
                self.book.close(span.sequence)

    def _note_memory(self) -> None:
        held = [activations.held_bytes() for activations in self.activations.values()]
        saved, host = (sum(column) for column in zip((0, 0), *held, strict=True))
        self.memory = self.memory.most(StepMemory(saved, host, self.book.peak_bytes))


def forward_only(plan: RankPlan) -> RankPlan:
    """The plan without what policies do for a backward: their tiles are left."""
    rounds = tuple(
        (group, replace(stage, activations=tuple(replace(policy, layers=()) for policy in stage.activations)))
        for group, stage in plan.rounds
    )
    return replace(plan, rounds=rounds)


def no_mask(device: torch.device) -> Tensor:
    """An attention mask of four dimensions: transformers passes it on as it is, and builds none over the packed row."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def refuse_unsupported(plan: RankPlan, engine: ActivationEngine | None = None) -> None:
    """Raises ValueError naming the first part of the plan that this version does not execute, with `engine` or without."""
    for group, stage in plan.rounds:
        if len(group.stages) > 1:
            raise ValueError(f"a plan of {len(group.stages)} pipeline stages is not executed yet; only one stage is")
        if len(stage.parts) > 1:
            raise ValueError(f"a stage of {len(stage.parts)} interleaved parts is not executed yet; only one part is")
        if engine is not None:
            for policy in stage.activations:
                engine.check(policy)
        elif any(policy.layers or policy.tile_tokens for policy in stage.activations):
            raise ValueError("activation policies (recompute, offload, tiles) are not executed yet; everything is kept")
        for chunk in group.chunks:
            if group.shape.num_blocks > 1 and any(span.start for span in chunk.spans):
                raise ValueError(
                    f"chunk {chunk.index} is a slice of a sequence in a {group.method} group; slices are executed in local and "
                    f"ulysses groups only"
                )
        for action in stage.actions:
            if action.helpers or action.kind not in ("F", "B"):
                raise ValueError(f"action {action} is not executed yet; only F and B without helpers are")
