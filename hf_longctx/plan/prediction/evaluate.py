"""Runs a plan under a cost model: seconds of the step and of every rank, bytes, and the predicted timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_longctx.plan.activations.added_seconds import added_seconds
from hf_longctx.plan.core.sharding import is_shared, shard_tokens
from hf_longctx.plan.core.types import Action, GroupShape, SequenceGroup, StepPlan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.memory.saved_tensors import saved_token_bytes
from hf_longctx.plan.memory.stage import most_in_flight, stage_state_bytes
from hf_longctx.plan.prediction.lent_run import run_shared_pipeline
from hf_longctx.plan.prediction.pipeline_run import KnownRuns, check_action, near_ranks, run_pipeline
from hf_longctx.timeline import TimelineEvent


@dataclass(frozen=True, slots=True)
class RankUse:
    """What one rank does in the chunks of a step, in seconds, and the most tokens it holds at once.

    compute_s + exchange_s + idle_s is the step without what it adds once (`Evaluation.once_s`).
    """

    rank: int
    compute_s: float
    exchange_s: float
    idle_s: float
    peak_tokens: int

    @property
    def busy_s(self) -> float:
        return self.compute_s + self.exchange_s


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a plan is predicted to take.

    once_s: of the step, for the optimizer and all that is not part of a chunk. peak_bytes, host_bytes: of every rank. events:
    every F and B of every rank; exchange_s: how much of each event is communication. in_flight: of every stage, the most
    chunks that wait for their backward at one time, once for each part that they wait on.
    """

    step_s: float
    once_s: float
    ranks: tuple[RankUse, ...]
    peak_bytes: tuple[int, ...]
    host_bytes: tuple[int, ...]
    events: tuple[TimelineEvent, ...]
    exchange_s: tuple[float, ...]
    in_flight: tuple[int, ...]

    @property
    def busy_s(self) -> tuple[float, ...]:
        return tuple(rank.busy_s for rank in self.ranks)


def evaluate_plan(plan: StepPlan, costs: CostModel, with_events: bool = True, known: KnownRuns | None = None) -> Evaluation:
    """The plan's predicted run. A rank waits for its group; ranks that share shards wait for each other at every micro-batch.

    Each group is a pipeline over its positions of all stages. Without `with_events` there are none, which is faster. known: what
    plans for the same model share, so that bytes of chunks alike are counted once. Raises
    ValueError by name for what it cannot run yet: explicit copies and frees, helpers together with parts, policies or packs;
    PlanError for a deadlock.
    """
    run = _Run(plan, costs, with_events, KnownRuns() if known is None else known)
    for micro_batch in plan.micro_batches:
        for group in micro_batch.groups:
            run.enter(group)
        run.leave_together()
    return run.result()


class _Run:
    """The clocks of all ranks, and what has happened so far."""

    def __init__(self, plan: StepPlan, costs: CostModel, with_events: bool, known: KnownRuns) -> None:
        self.plan, self.costs, self.block_ranks, self.with_events, self.known = plan, costs, plan.block_ranks, with_events, known
        self.clocks = [0.0] * plan.num_ranks
        self.busy, self.exchanging = [0.0] * plan.num_ranks, [0.0] * plan.num_ranks
        self.tokens, self.host_bytes = [0] * plan.num_ranks, [0] * plan.num_ranks
        self.peak_bytes = state_bytes(plan, costs)
        self.in_flight = [0] * plan.num_stages
        self.events: list[TimelineEvent] = []
        self.exchange_s: list[float] = []
        # seconds of an exchange without tokens and per token, which many groups share
        self.exchanges: dict[tuple[GroupShape, int, bool], tuple[float, float]] = {}

    def enter(self, group: SequenceGroup) -> None:
        """Runs all actions of a group; each stage from when the last of its ranks is free."""
        for place, stage in enumerate(group.stages):
            self.in_flight[place] = max(self.in_flight[place], most_in_flight(stage.actions))
        if len(group.stages) > 1 or len(group.stages[0].parts) > 1:
            self._enter_pipeline(group)
        else:
            self._enter_stage(group)

    def _enter_pipeline(self, group: SequenceGroup) -> None:
        per_stage = self.plan.ranks_per_stage
        ranks = [[stage.stage * per_stage + position for position in group.positions] for stage in group.stages]
        starts = [max(self.clocks[rank] for rank in of_stage) for of_stage in ranks]
        if is_shared(group):
            runs = run_shared_pipeline(self.plan, group, self.costs, starts)
        else:
            runs = run_pipeline(self.plan, group, self.costs, starts, self.known)
        for of_stage, run in zip(ranks, runs, strict=True):
            busy_s = sum(stop_s - start_s for start_s, stop_s in run.times)
            for rank in of_stage:
                self.clocks[rank] = max(self.clocks[rank], run.times[-1][1])
                self.busy[rank] += busy_s
                self.exchanging[rank] += sum(run.exchange_s)
                self.tokens[rank] = max(self.tokens[rank], run.peak_tokens)
                self.peak_bytes[rank] = max(self.peak_bytes[rank], run.peak_bytes)
                self.host_bytes[rank] = max(self.host_bytes[rank], run.host_bytes)
            for action, time, inside_s in zip(run.actions, run.times, run.exchange_s, strict=True):
                self._record(group, of_stage, action, time, inside_s)

    def _enter_stage(self, group: SequenceGroup) -> None:
        start_s = clock_s = max(self.clocks[position] for position in group.positions)
        near = near_ranks(group.positions, self.costs.cluster.ranks_per_node)
        exchanged_s = 0.0
        (stage,) = group.stages
        added = added_seconds(self.costs, group, stage)
        for action in stage.actions:
            seconds, inside_s = self._action_s(group, action, near)
            seconds += added.get(action.chunk, (0.0, 0.0))[action.kind == "B"]
            stop_s = clock_s + seconds
            self._record(group, group.positions, action, (clock_s, stop_s), inside_s)
            clock_s, exchanged_s = stop_s, exchanged_s + inside_s
        held = [sum(shards) for shards in zip(*(shard_tokens(chunk, group.shape) for chunk in group.chunks), strict=True)]
        # formulas for the whole chunk are the quick way where everything is kept
        is_plain = not stage.activations and len(group.chunks) == 1
        memory = None if is_plain else self.known.byte_model(self.costs.model).round(group, stage)
        token_bytes = saved_token_bytes(self.costs.model)
        for position, tokens in zip(group.positions, held, strict=True):
            self.clocks[position] = clock_s
            self.busy[position] += clock_s - start_s
            self.exchanging[position] += exchanged_s
            self.tokens[position] = max(self.tokens[position], tokens)
            held_bytes = tokens * token_bytes if memory is None else memory.peak
            self.peak_bytes[position] = max(self.peak_bytes[position], self.costs.state_bytes + held_bytes)
            self.host_bytes[position] = max(self.host_bytes[position], 0 if memory is None else memory.host)

    def _record(
        self, group: SequenceGroup, ranks: Sequence[int], action: Action, time: tuple[float, float], exchange_s: float
    ) -> None:
        if self.with_events:
            chunk = group.chunks[action.chunk]
            detail = f"<{group.degree}> {chunk.num_tokens} tokens in {len(chunk.spans)} sequence(s)"
            self.events += [TimelineEvent(rank, action.kind, str(action), *time, detail) for rank in ranks]
            self.exchange_s += [exchange_s] * len(ranks)

    def leave_together(self) -> None:
        """Ends a micro-batch: ranks that share shards wait for the last of them."""
        block = self.block_ranks
        if block > 1:
            for first in range(0, len(self.clocks), block):
                self.clocks[first : first + block] = [max(self.clocks[first : first + block])] * block

    def result(self) -> Evaluation:
        chunks_s = max(self.clocks)
        once_s = self.costs.coefficients.step_s
        ranks = tuple(
            # rounding must not make a rank wait for less than nothing
            RankUse(rank, busy_s - exchanged_s, exchanged_s, max(0.0, chunks_s - busy_s), tokens)
            for rank, (busy_s, exchanged_s, tokens) in enumerate(zip(self.busy, self.exchanging, self.tokens, strict=True))
        )
        return Evaluation(
            step_s=chunks_s + once_s,
            once_s=once_s,
            ranks=ranks,
            peak_bytes=tuple(self.peak_bytes),
            host_bytes=tuple(self.host_bytes),
            events=tuple(self.events),
            exchange_s=tuple(self.exchange_s),
            in_flight=tuple(self.in_flight),
        )

    def _action_s(self, group: SequenceGroup, action: Action, near: int) -> tuple[float, float]:
        """Seconds of an action, and how many of them are communication."""
        stage = group.stages[0]
        check_action(action, stage)
        chunk, shape, is_backward = group.chunks[action.chunk], group.shape, action.kind == "B"
        key = (shape, near, is_backward)
        if key not in self.exchanges:
            self.exchanges[key] = self.costs.exchange_line(shape, is_backward, near)
        fixed_s, token_s = self.exchanges[key]
        layers = stage.num_layers / self.costs.model.num_layers
        # a group with fewer tokens than ranks runs dummy tokens
        exchange_s = (fixed_s + token_s * max(chunk.num_tokens, shape.degree)) * layers
        pairs = self.costs.model.attention_pairs(stage.parts)
        return self.costs.local_s(chunk, shape, is_backward, pairs) * layers + exchange_s, exchange_s


def state_bytes(plan: StepPlan, costs: CostModel) -> list[int]:
    """Bytes of weights, gradients and optimizer states on every rank."""
    if plan.num_stages == 1:
        return [costs.state_bytes] * plan.num_ranks
    stages = plan.micro_batches[0].groups[0].stages if plan.micro_batches else ()
    return [stage_state_bytes(costs.model, stage, plan) for stage in stages for _ in range(plan.ranks_per_stage)]
