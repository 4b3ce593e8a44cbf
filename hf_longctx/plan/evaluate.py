"""Runs a plan under a cost model: seconds of the step and of every rank, bytes, and the predicted timeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hf_longctx.plan.cost import CostModel
from hf_longctx.plan.memory import round_bytes
from hf_longctx.plan.policies import added_seconds
from hf_longctx.plan.sharding import shard_tokens
from hf_longctx.plan.types import Action, GroupShape, SequenceGroup, StepPlan
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
    every action of every rank; exchange_s: how much of each event is communication.
    """

    step_s: float
    once_s: float
    ranks: tuple[RankUse, ...]
    peak_bytes: tuple[int, ...]
    host_bytes: tuple[int, ...]
    events: tuple[TimelineEvent, ...]
    exchange_s: tuple[float, ...]

    @property
    def busy_s(self) -> tuple[float, ...]:
        return tuple(rank.busy_s for rank in self.ranks)


def evaluate_plan(plan: StepPlan, costs: CostModel, with_events: bool = True) -> Evaluation:
    """The plan's predicted run. A rank waits for its group; ranks that share shards wait for each other at every micro-batch.

    Without `with_events` there are none, which is faster. Raises ValueError by name for what it cannot run yet: several
    stages or parts, helpers, and actions other than F and B.
    """
    if plan.num_stages > 1:
        raise ValueError(f"a plan of {plan.num_stages} pipeline stages cannot be evaluated yet; only one stage can")
    run = _Run(plan, costs, with_events)
    for micro_batch in plan.micro_batches:
        for group in micro_batch.groups:
            run.enter(group)
        run.leave_together()
    return run.result()


class _Run:
    """The clocks of all ranks, and what has happened so far."""

    def __init__(self, plan: StepPlan, costs: CostModel, with_events: bool) -> None:
        self.costs, self.block_ranks, self.with_events = costs, plan.block_ranks, with_events
        self.clocks = [0.0] * plan.num_ranks
        self.busy, self.exchanging = [0.0] * plan.num_ranks, [0.0] * plan.num_ranks
        self.tokens, self.host_bytes = [0] * plan.num_ranks, [0] * plan.num_ranks
        self.peak_bytes = [costs.state_bytes] * plan.num_ranks
        self.events: list[TimelineEvent] = []
        self.exchange_s: list[float] = []
        # seconds of an exchange without tokens and per token, which many groups share
        self.exchanges: dict[tuple[GroupShape, int, bool], tuple[float, float]] = {}

    def enter(self, group: SequenceGroup) -> None:
        """Runs all actions of a group, from when its last rank is free."""
        start_s = clock_s = max(self.clocks[position] for position in group.positions)
        near_ranks = _near_ranks(group.positions, self.costs.cluster.ranks_per_node)
        exchanged_s = 0.0
        (stage,) = group.stages
        added = added_seconds(self.costs, group, stage)
        for action in stage.actions:
            chunk = group.chunks[action.chunk]
            seconds, inside_s = self._action_s(group, action, near_ranks)
            seconds += added.get(action.chunk, (0.0, 0.0))[action.kind == "B"]
            detail = f"<{group.degree}> {chunk.num_tokens} tokens in {len(chunk.spans)} sequence(s)"
            stop_s = clock_s + seconds
            self.events += [TimelineEvent(rank, action.kind, str(action), clock_s, stop_s, detail) for rank in group.positions]
            self.exchange_s += [inside_s] * group.degree
            clock_s, exchanged_s = stop_s, exchanged_s + inside_s
        held = [sum(shards) for shards in zip(*(shard_tokens(chunk, group.shape) for chunk in group.chunks), strict=True)]
        # formulas for the whole chunk are the quick way where everything is kept
        is_plain = not stage.activations and len(group.chunks) == 1
        memory = None if is_plain else round_bytes(self.costs.model, group, stage)
        for position, tokens in zip(group.positions, held, strict=True):
            self.clocks[position] = clock_s
            self.busy[position] += clock_s - start_s
            self.exchanging[position] += exchanged_s
            self.tokens[position] = max(self.tokens[position], tokens)
            peak_bytes = self.costs.rank_bytes(tokens) if memory is None else self.costs.state_bytes + memory.peak
            self.peak_bytes[position] = max(self.peak_bytes[position], peak_bytes)
            self.host_bytes[position] = max(self.host_bytes[position], 0 if memory is None else memory.host)

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
        )

    def _action_s(self, group: SequenceGroup, action: Action, near_ranks: int) -> tuple[float, float]:
        """Seconds of an action, and how many of them are communication."""
        stage = group.stages[0]
        if action.helpers or action.part or action.kind not in ("F", "B"):
            raise ValueError(f"action {action} cannot be evaluated yet; only F and B of one part without helpers can")
        chunk, shape, is_backward = group.chunks[action.chunk], group.shape, action.kind == "B"
        key = (shape, near_ranks, is_backward)
        if key not in self.exchanges:
            self.exchanges[key] = self.costs.exchange_line(shape, is_backward, near_ranks)
        fixed_s, token_s = self.exchanges[key]
        layers = stage.num_layers / self.costs.model.num_layers
        # a group with fewer tokens than ranks runs dummy tokens
        exchange_s = (fixed_s + token_s * max(chunk.num_tokens, shape.degree)) * layers
        return self.costs.local_s(chunk, shape, is_backward) * layers + exchange_s, exchange_s


def _near_ranks(positions: Sequence[int], ranks_per_node: int) -> int:
    """The fewest of these ranks that share a node: they wait for most of what the others send over the network."""
    if positions[0] // ranks_per_node == positions[-1] // ranks_per_node:
        return len(positions)
    return min(Counter(position // ranks_per_node for position in positions).values())
