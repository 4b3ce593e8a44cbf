"""Runs a plan under a cost model: seconds of the step and of every rank, bytes, and the predicted timeline."""

from __future__ import annotations

from dataclasses import dataclass

from hf_longctx.plan.cost import CostModel
from hf_longctx.plan.sharding import held_tokens, rank_pieces
from hf_longctx.plan.types import Action, Chunk, SequenceGroup, StagePlan, StepPlan
from hf_longctx.timeline import TimelineEvent


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a plan is predicted to take: `busy_s` and `peak_bytes` per rank, `events` of every action."""

    step_s: float
    busy_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    events: tuple[TimelineEvent, ...]


def evaluate_plan(plan: StepPlan, costs: CostModel) -> Evaluation:
    """The plan's predicted run. A rank waits for its group; with sharded parameters all ranks wait at every micro-batch.

    Raises ValueError by name for what it cannot run yet: several stages or parts, helpers, and actions other than F and B.
    """
    if plan.num_stages > 1:
        raise ValueError(f"a plan of {plan.num_stages} pipeline stages cannot be evaluated yet; only one stage can")
    clocks, busy = [0.0] * plan.num_ranks, [0.0] * plan.num_ranks
    tokens = [0] * plan.num_ranks
    events: list[TimelineEvent] = []
    for micro_batch in plan.micro_batches:
        for group in micro_batch.groups:
            start_s = max(clocks[position] for position in group.positions)
            group_events = _run_group(group, group.stages[0], costs, start_s)
            events += group_events
            stop_s = max(event.stop_s for event in group_events)
            held = [sum(shards) for shards in zip(*(_shards(group, chunk) for chunk in group.chunks), strict=True)]
            for index, position in enumerate(group.positions):
                clocks[position] = stop_s
                busy[position] += stop_s - start_s
                tokens[position] = max(tokens[position], held[index])
        if plan.parameters != "replicated":
            clocks = [max(clocks)] * plan.num_ranks
    return Evaluation(
        step_s=max(clocks) + costs.coefficients.step_s,
        busy_s=tuple(busy),
        peak_bytes=tuple(costs.rank_bytes(count) for count in tokens),
        events=tuple(events),
    )


def _shards(group: SequenceGroup, chunk: Chunk) -> tuple[int, ...]:
    return held_tokens(rank_pieces(chunk, group.shape))


def _run_group(group: SequenceGroup, stage: StagePlan, costs: CostModel, clock_s: float) -> list[TimelineEvent]:
    events = []
    for action in stage.actions:
        stop_s = clock_s + _action_s(group, stage, action, costs)
        chunk = group.chunks[action.chunk]
        detail = f"<{group.degree}> {chunk.num_tokens} tokens in {len(chunk.spans)} sequence(s)"
        events += [TimelineEvent(rank, action.kind, str(action), clock_s, stop_s, detail) for rank in group.positions]
        clock_s = stop_s
    return events


def _action_s(group: SequenceGroup, stage: StagePlan, action: Action, costs: CostModel) -> float:
    if action.helpers or action.part or action.kind not in ("F", "B") or stage.activations:
        what = "activation policies" if stage.activations else f"action {action}"
        raise ValueError(f"{what} cannot be evaluated yet; only F and B of one part without helpers or policies can")
    chunk = group.chunks[action.chunk]
    seconds = costs.forward_s if action.kind == "F" else costs.backward_s
    return seconds(chunk, group.shape, stage.num_layers)
