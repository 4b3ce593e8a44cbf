"""Predictions and measurements of one plan, side by side.

`report.py` makes and prints a `StepRecord` after every plan, and draws timelines from its events; `refit.py` fits costs to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_longctx.hf.planning.refit import MeasuredPlan, Samples, pass_samples
from hf_longctx.plan.core.lending import is_lent
from hf_longctx.plan.core.orders import layer_turns, running_order
from hf_longctx.plan.core.sharding import held_tokens, rank_pieces, shard_tokens
from hf_longctx.plan.core.types import PASSES, ActivationPolicy, SequenceGroup, StagePlan, StepPlan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.saved_tensors import held_bytes
from hf_longctx.plan.memory.stage import joined_moments, message_bytes
from hf_longctx.plan.memory.towers import TowerBytes
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.predict.evaluate import evaluate_plan
from hf_longctx.runtime.core.clock import Interval
from hf_longctx.runtime.execution.round import NO_MEMORY, StepMemory
from hf_longctx.timeline import TimelineEvent


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One finished plan on rank `rank`: number `place` (from 0) of the `count` plans in an optimizer step."""

    plan: StepPlan
    rank: int
    # loss of the whole optimizer step
    loss: float
    intervals: tuple[Interval, ...]
    place: int = 0
    count: int = 1
    memory: StepMemory = NO_MEMORY
    # prediction of `memory`
    predicted_memory: StepMemory = NO_MEMORY
    # prediction of `idle_share`; None until the cost model was fitted to measurements
    predicted_idle: float | None = None
    # see `StepResult`
    aux_loss: float | None = None
    router_load: float | None = None
    # the plan's label tokens, those that were the likeliest, and the sum of the entropies; empty if not counted
    tallied: tuple[float, ...] = ()

    @property
    def ends_step(self) -> bool:
        """Whether gradients were reduced after this plan."""
        return self.place == self.count - 1

    @property
    def measured_s(self) -> float:
        """Measured seconds from the plan's first action to the end of its gradient reduction."""
        return max(interval.stop_s for interval in self.intervals)

    @property
    def reduce_s(self) -> float:
        """Measured seconds of the gradient reduction, including waits for other ranks."""
        return sum(interval.stop_s - interval.start_s for interval in self.intervals if interval.kind == "reduce")

    @property
    def idle_share(self) -> float | None:
        """Share of the time that a pipeline's first stage spends outside its passes.

        Only the first stage can measure it: its last backward ends the pipeline, for which all other stages wait at the
        beginning of the reduction. So the share is None on other stages, and if there is only one stage.
        """
        if self.plan.num_stages == 1 or self.plan.place(self.rank)[0]:
            return None
        busy_s = sum(interval.stop_s - interval.start_s for interval in self.intervals if interval.kind in PASSES)
        return 1 - busy_s / (self.measured_s - self.reduce_s)

    @property
    def error(self) -> float | None:
        """Relative error predicted / measured - 1; None until predictions come from measured costs."""
        estimate = self.plan.estimate
        return None if estimate.cost_source == "default" else estimate.step_s / self.measured_s - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the plan over all ranks, without dummy tokens."""
        return sum(self.plan.lengths)

    @property
    def padding_share(self) -> float:
        """Share of dummy tokens among all tokens of the plan."""
        return padding_share(self.plan)

    @property
    def gap(self) -> float | None:
        """Predicted seconds above the lower bound of any plan, as a share of that bound.

        None until costs are measured, and on one rank, which has no choice of plans.
        """
        estimate = self.plan.estimate
        if self.plan.num_ranks == 1 or estimate.cost_source == "default" or estimate.lower_bound_s <= 0:
            return None
        return estimate.gap

    def samples(self, costs: CostModel) -> Samples:
        """Returns this rank's measured chunks as samples for the cost model."""
        return pass_samples(self.plan, self.rank, self.intervals, costs)

    def measured(self, costs: CostModel) -> MeasuredPlan:
        """Returns measurements for fitting the cost model."""
        reduce_s = self.reduce_s if self.ends_step else -1.0
        return MeasuredPlan(self.plan, self.samples(costs), self.measured_s, reduce_s, self.error)

    def events(self) -> list[TimelineEvent]:
        """Returns this rank's timeline; seconds count from the start of the plan."""
        rounds = self.plan.for_rank(self.rank).rounds
        return [
            TimelineEvent(
                rank=self.rank,
                kind=interval.kind,
                name=interval.name,
                start_s=interval.start_s,
                stop_s=interval.stop_s,
                detail="" if interval.round < 0 else _group_detail(*rounds[interval.round]),
            )
            for interval in self.intervals
        ]


def padding_share(plan: StepPlan) -> float:
    """Returns the share of dummy tokens among all tokens of a plan."""
    dummies = sum(
        sum(held_tokens(rank_pieces(chunk, group.shape))) - chunk.num_tokens
        for micro_batch in plan.micro_batches
        for group in micro_batch.groups
        for chunk in group.chunks
    )
    return dummies / (dummies + sum(plan.lengths))


def predicted_idle(plan: StepPlan, rank: int, costs: CostModel) -> float | None:
    """Predicts `StepRecord.idle_share` of this rank; None if that share is None, or if costs are guesses."""
    if plan.num_stages == 1 or plan.place(rank)[0] or not costs.coefficients.is_measured:
        return None
    run = evaluate_plan(plan, costs, with_events=False)
    return 1 - run.busy_s[rank] / (run.step_s - run.once_s)


def predicted_memory(plan: StepPlan, rank: int, model: ModelSpec) -> StepMemory:
    """Predicts `StepResult.memory` of this rank."""
    memory, byte_model = NO_MEMORY, ByteModel(model)
    own = plan.for_rank(rank)
    # in turns, chunks of several micro-batches wait for their backward together
    for rounds in (own.rounds,) if own.turns else ((each,) for each in own.rounds):
        if is_lent(rounds[0][0]):
            # a lent rank also has parts of other stages' chunks, so take the plan's estimate
            memory = memory.most(StepMemory(device_peak=plan.estimate.peak_bytes))
        else:
            memory = memory.most(_memory_of(plan, plan.place(rank)[1], rounds, own.turns, byte_model))
    return memory


def _memory_of(
    plan: StepPlan,
    position: int,
    rounds: Sequence[tuple[SequenceGroup, StagePlan]],
    turns: Sequence[int],
    byte_model: ByteModel,
) -> StepMemory:
    """Predicts the memory of the rank at a position, for one round, or for rounds in turns."""
    model, places = byte_model.model, [group.positions.index(position) for group, _ in rounds]
    # a single chunk on one stage, the common case, has no K/V book, and the plan's estimate is its peak
    book, device_peak = 0, plan.estimate.peak_bytes
    if plan.num_stages > 1 or len(rounds[0][0].chunks) > 1:
        # the plan's estimate is for the rank with the most bytes, but this rank may hold fewer
        moments, messages = [], 0
        for (group, stage), place in zip(rounds, places, strict=True):
            moments.append(byte_model.moments(group, stage, place, waiting=byte_model.stage_waiting(stage, plan)))
            most_tokens = max(shard_tokens(chunk, group.shape)[place] for chunk in group.chunks)
            messages = max(messages, message_bytes(model, stage, plan.num_stages, most_tokens))
        found = (
            joined_moments(moments, np.array(layer_turns([stage for _, stage in rounds], turns))) if turns else moments[0]
        ).most
        book, device_peak = found.book, byte_model.stage_states(rounds[0][1], plan) + found.peak + messages
        if not rounds[0][1].stage:
            towers = TowerBytes(plan, byte_model)
            device_peak += max(towers.above(group, place) for (group, _), place in zip(rounds, places, strict=True))
    policies = [{(policy.layer_range, policy.chunk): policy for policy in stage.activations} for _, stage in rounds]
    held: dict[tuple[int, int, int], tuple[int, int]] = {}
    memory = NO_MEMORY
    for index, action in running_order([stage.actions for _, stage in rounds], turns):
        (group, stage), key = rounds[index], (action.layer_range, action.chunk)
        if action.kind == "B":
            del held[index, *key]
        if action.kind != "F":
            continue
        tokens = shard_tokens(group.chunks[action.chunk], group.shape)[places[index]]
        policy = policies[index].get(key, ActivationPolicy(action.chunk))
        layers = stage.layer_ranges[action.layer_range]
        held[index, *key] = held_bytes(model, policy, layers.num_layers, tokens, layers.first_layer, counts_kept=False)
        saved, host = (sum(column) for column in zip(*held.values(), strict=True))
        memory = memory.most(StepMemory(saved, host, book, device_peak))
    return memory


def _group_detail(group: Any, stage: Any) -> str:
    num_sequences = sum(len(chunk.spans) for chunk in group.chunks)
    return f"<{group.degree}> {group.num_tokens} tokens in {num_sequences} sequence(s)"
