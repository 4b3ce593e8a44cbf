"""Turns one rank's measured forwards and backwards into samples for the cost model.

A sample is a whole chunk, or the part of a chunk that one pipeline stage runs. `StepRecord` calls `pass_samples`; `CostRefit`
fits the cost model to the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hf_longctx.hf.planning.refit import Samples
from hf_longctx.plan.core.sharding import is_lent
from hf_longctx.plan.core.types import Action, LayerRange, SequenceGroup, StagePlan, StepPlan
from hf_longctx.plan.cost.cost_model import WHOLE_MODEL, CostModel, ModelPart, num_tiles
from hf_longctx.plan.cost.fitting import ChunkSample, PassSample
from hf_longctx.plan.cost.traffic import mean_traffic
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.predict.pipeline_run import StageRun, run_pipeline
from hf_longctx.runtime.core.clock import Interval


def pass_samples(plan: StepPlan, rank: int, intervals: Sequence[Interval], costs: CostModel) -> Samples:
    """This rank's measured chunks, each with the work and traffic that `costs` counts for it.

    All ranks of a group use the same keys for a chunk. The time that activation policies add (recomputing, waiting for copies) is
    subtracted. That time is predicted, and then scaled by measured / predicted seconds of the chunk's forward. The time that
    rings hide is added (`CostModel.without_overlap`).
    """
    seconds = _without_policies(plan, rank, intervals, costs)

    def sample(group: SequenceGroup, round_index: int, action: Action) -> PassSample:
        chunk = group.chunks[action.chunk]
        tokens = float(max(chunk.num_tokens, group.degree))
        num_documents = len(chunk.spans)
        traffic = mean_traffic(costs.model, costs.cluster, group.shape, tokens, action.kind == "B", num_documents=num_documents)
        tiles = num_tiles(group.shape, num_documents)
        part = _part_of(costs.model, group, action)
        seconds_of = costs.without_overlap(seconds[round_index, str(action)], chunk, group.shape, action.kind == "B")
        num_pairs = costs.attention_pairs(_layers_of(group, action)).of_chunk(chunk)
        return PassSample(chunk.num_tokens, num_pairs, group.degree, traffic, seconds_of, tiles, part)

    # use the plan's numbers of micro-batches: nested plans leave ranks out of some, so ranks would count differently
    _, position = plan.place(rank)
    micro_batches = [
        number
        for number, micro_batch in enumerate(plan.micro_batches)
        if any(position in group.positions for group in micro_batch.groups)
    ]
    return {
        (micro_batches[index], group.positions, str(forward)): ChunkSample(
            sample(group, index, forward), sample(group, index, replace(forward, kind="B"))
        )
        for index, (group, stage) in enumerate(plan.for_rank(rank).rounds)
        # a forward that ranks of several stages share is not a sample of a chunk on its own group
        if not is_lent(group)
        for forward in stage.actions
        if forward.kind == "F"
    }


def _without_policies(plan: StepPlan, rank: int, intervals: Sequence[Interval], costs: CostModel) -> dict[tuple[int, str], float]:
    """Seconds by (micro-batch of this rank, action), without the time that activation policies add."""
    seconds = {(interval.round, interval.name): interval.stop_s - interval.start_s for interval in intervals}
    for index, (group, stage) in enumerate(plan.for_rank(rank).rounds):
        for forward, (forward_s, backward_s) in _added_by_policies(plan, costs, group, stage).items():
            names = [(index, str(replace(forward, kind=kind))) for kind in ("F", "B")]
            part = _part_of(costs.model, group, forward)
            num_layers, chunk = stage.parts[forward.part].num_layers, group.chunks[forward.chunk]
            pairs = costs.attention_pairs(_layers_of(group, forward))
            expected_s = costs.part_s(chunk, group.shape, False, num_layers, part.has_head, pairs=pairs) + forward_s
            rate = seconds[names[0]] / max(expected_s, 1e-12)
            # keep at least a tenth of the pass, since the added time is only predicted and a pass must take some time
            for name, added_s in zip(names, (forward_s, backward_s), strict=True):
                seconds[name] = max(seconds[name] - added_s * rate, seconds[name] / 10)
    return seconds


def _added_by_policies(
    plan: StepPlan, costs: CostModel, group: SequenceGroup, stage: StagePlan
) -> dict[Action, tuple[float, float]]:
    """Predicted seconds that policies add to (forward, backward) of every chunk and layer range, keyed by the forward action."""
    policies = [policy for policy in stage.activations if policy.layers]
    if not policies:
        return {}
    # a wait of the stage may hide copies, so predict the group's run with and without policies and compare
    with_s, without_s = (
        _action_seconds(run_pipeline(plan, each, costs, [0.0] * len(group.stages))[stage.stage])
        for each in (group, replace(group, stages=tuple(replace(other, activations=()) for other in group.stages)))
    )
    keys = [Action("F", stage.stage, policy.chunk, policy.part) for policy in policies]
    added_s = {action: with_s[action] - without_s[action] for action in with_s}
    return {forward: (added_s[forward], added_s[replace(forward, kind="B")]) for forward in keys}


def _action_seconds(run: StageRun) -> dict[Action, float]:
    return {action: stop_s - start_s for action, (start_s, stop_s) in zip(run.actions, run.times, strict=True)}


def _layers_of(group: SequenceGroup, action: Action) -> tuple[LayerRange, ...]:
    """Layers that a forward or backward action runs."""
    return (group.stages[action.stage].parts[action.part],)


def _part_of(model: ModelSpec, group: SequenceGroup, action: Action) -> ModelPart:
    """Share of the model that a forward or backward action runs."""
    parts = group.stages[action.stage].parts
    if len(group.stages) == 1 and len(parts) == 1:
        return WHOLE_MODEL
    has_head = (action.stage, action.part) == (len(group.stages) - 1, len(parts) - 1)
    return ModelPart(parts[action.part].num_layers / model.num_layers, has_head, model.head_share)
