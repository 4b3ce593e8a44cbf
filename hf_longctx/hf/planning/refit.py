"""Keeps a run's cost model accurate: fits it to the first steps, and again whenever its predictions drift.

Trainer and callback add every finished plan. All ranks do so in the same order with the same plans, so they all gather, decide
and fit in the same way; nothing happens inside a step. `StepRecord` turns a rank's measured forwards and backwards into samples
(`pass_samples`), each of a whole chunk or of a chunk's part on one pipeline stage; `CostRefit` fits the cost model to them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from hf_longctx.hf.planning.source import PlanSource
from hf_longctx.hf.ranks.agreement import gather_objects
from hf_longctx.plan.core.lending import is_lent
from hf_longctx.plan.core.types import Action, LayerRange, SequenceGroup, StagePlan, StepPlan
from hf_longctx.plan.cost.cost_model import WHOLE_MODEL, CostModel, ModelPart, num_tiles
from hf_longctx.plan.cost.fitting import ChunkSample, Fit, PassSample, fit_coefficients, scaled_coefficients
from hf_longctx.plan.cost.traffic import mean_traffic
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.predict.evaluate import evaluate_plan
from hf_longctx.plan.predict.pipeline_run import StageRun, run_pipeline
from hf_longctx.runtime.core.clock import Interval

# plans of a refit: few, to follow changes of a machine's speed; costs that do not occur in them keep earlier coefficients
_WINDOW_PLANS = 8
_CHECK_EVERY_PLANS = 2
# last plans whose prediction errors decide whether to refit
_RECENT_PLANS = 4
# fewest predictions from which to take a median
_LEAST_PREDICTIONS = 3
# largest median of |predicted / measured - 1| that needs no refit
_TOLERATED_ERROR = 0.1
# bounds of measured / predicted step seconds; a ratio beyond them is not caused by the plan's chunks
_FACTORS = (0.7, 1.5)

# (number of the micro-batch, positions of the group, name of the forward with stage, layer range and chunk)
ChunkKey = tuple[int, tuple[int, ...], str]
Samples = dict[ChunkKey, ChunkSample]


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """Measurements of one plan on one rank."""

    plan: StepPlan
    samples: Samples
    # seconds of the whole plan
    measured_s: float
    # seconds of the gradient reduction; negative if there was none
    reduce_s: float
    # predicted / measured - 1, or None without a prediction
    error: float | None


class CostRefit:
    """Replaces the cost coefficients of `source`: first after `first_plans` plans, later when predictions are wrong.

    A source that starts with measured coefficients is refitted only if its predictions are wrong. `first_plans=0`: never refit.
    """

    def __init__(self, source: PlanSource, first_plans: int) -> None:
        self.source = source
        self.num_fits = 0
        self._window: deque[MeasuredPlan] = deque(maxlen=max(_WINDOW_PLANS, first_plans))
        self._num_plans = 0
        # one plan more, because the first includes start-up costs and is skipped
        self._next_look = first_plans + 1 if first_plans else 0

    def add(self, plan: MeasuredPlan, ends_step: bool) -> str:
        """Adds a finished plan; returns the line to print if it led to a fit, else "". Collective over the control group."""
        self._num_plans += 1
        if self._num_plans > 1:
            self._window.append(plan)
        # a fit needs a gradient reduction, which only the last plan of a step has
        if not self._next_look or self._num_plans < self._next_look or not ends_step or not self._window:
            return ""
        self._next_look = self._num_plans + _CHECK_EVERY_PLANS
        return self._fit() if self._is_off() else ""

    def _is_off(self) -> bool:
        """Whether the current coefficients are guesses, or predicted the last plans badly; rank 0 decides for all ranks."""
        present = self.source.costs.coefficients
        if not present.is_measured:
            return True
        recent = list(self._window)[-_RECENT_PLANS:]
        errors = [
            abs(plan.error) for plan in recent if plan.error is not None and plan.plan.estimate.cost_source == present.source
        ]
        is_off = len(errors) >= _LEAST_PREDICTIONS and median(errors) > _TOLERATED_ERROR
        return bool(gather_objects(is_off, self.source.pool.control)[0])

    def _fit(self) -> str:
        costs = self.source.costs
        mine = [(plan.samples, plan.reduce_s, plan.measured_s) for plan in self._window]
        everyone = gather_objects(mine, self.source.pool.control)
        samples = [sample for plans in zip(*everyone, strict=True) for sample in without_waiting([p[0] for p in plans])]
        # the last rank to start a reduction did not wait in it, so its seconds are those of the transfer alone
        reductions = [min(plan[1] for plan in plans) for plans in zip(*everyone, strict=True) if plans[0][1] >= 0]
        self.num_fits += 1
        name = "measured" if self.num_fits == 1 and not costs.coefficients.is_measured else f"measured, fit {self.num_fits}"
        fit = fit_coefficients(samples, median(reductions), name, costs.coefficients)
        # passes of this run contain its gathers
        hardware = replace(costs.cluster.hardware, gather_bytes_per_s=(), scatter_bytes_per_s=())
        fitted = replace(costs, coefficients=fit.coefficients, cluster=replace(costs.cluster, hardware=hardware))
        # take the rank that measured the least, which started last; its delay is not a cost
        seconds = [min(plan[2] for plan in plans) for plans in zip(*everyone, strict=True)]
        factor = whole_step_factor(list(self._window), seconds, fitted)
        self.source.costs = replace(fitted, coefficients=scaled_coefficients(fit.coefficients, factor))
        return _line(fit, len(mine), self.num_fits)


def whole_step_factor(plans: Sequence[MeasuredPlan], seconds: Sequence[float], costs: CostModel) -> float:
    """Returns the median ratio of measured `seconds` of whole plans to their prediction from single chunks, within bounds.

    Whole plans take longer than typical chunks suggest: ranks wait for the slowest rank, and for the host between chunks.
    """
    ratios = []
    for plan, measured_s in zip(plans, seconds, strict=True):
        predicted_s = evaluate_plan(plan.plan, costs, with_events=False).step_s
        if plan.reduce_s < 0:
            predicted_s -= costs.coefficients.step_s
        ratios.append(measured_s / predicted_s)
    low, high = _FACTORS
    return min(max(median(ratios), low), high)


def without_waiting(ranks: Sequence[Samples]) -> list[ChunkSample]:
    """Merges all ranks' samples of a plan into one sample per chunk and stage, from the passes of the rank that waited least.

    Ranks enter a micro-batch at different times, and the early ones wait inside their first exchange.
    """
    groups: dict[ChunkKey, list[ChunkSample]] = {}
    for samples in ranks:
        for key, sample in samples.items():
            groups.setdefault(key, []).append(sample)
    return [
        ChunkSample(
            min((sample.forward for sample in group), key=lambda one_pass: one_pass.seconds),
            min((sample.backward for sample in group), key=lambda one_pass: one_pass.seconds),
        )
        for group in groups.values()
    ]


def _line(fit: Fit, num_plans: int, num_fits: int) -> str:
    residuals = fit.residuals
    again = " again" if num_fits > 1 else ""
    outliers = f", {residuals.num_outliers} left out as outliers" if residuals.num_outliers else ""
    return (
        f"cost model fitted{again} on {residuals.num_passes} passes of {num_plans} plans: median error "
        f"{residuals.median:.1%}{outliers}"
    )


def pass_samples(plan: StepPlan, rank: int, intervals: Sequence[Interval], costs: CostModel) -> Samples:
    """Returns this rank's measured chunks, each with its work and traffic as counted by `costs`.

    All ranks of a group use the same keys for a chunk. The time that activation policies add (recomputing, waiting for copies) is
    predicted, scaled by measured / predicted seconds of the chunk's forward, and subtracted. The time that rings hide is added
    (`CostModel.without_overlap`).
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

    # use the plan's numbers of micro-batches, since ranks take part in different ones in nested plans
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
    """Returns seconds by (micro-batch of this rank, action), without the time that activation policies add."""
    seconds = _without_towers(plan, rank, intervals, costs)
    for index, (group, stage) in enumerate(plan.for_rank(rank).rounds):
        for forward, (forward_s, backward_s) in _added_by_policies(plan, costs, group, stage).items():
            names = [(index, str(replace(forward, kind=kind))) for kind in ("F", "B")]
            part = _part_of(costs.model, group, forward)
            num_layers, chunk = stage.layer_ranges[forward.layer_range].num_layers, group.chunks[forward.chunk]
            pairs = costs.attention_pairs(_layers_of(group, forward))
            expected_s = costs.part_s(chunk, group.shape, False, num_layers, part.has_head, pairs=pairs) + forward_s
            rate = seconds[names[0]] / max(expected_s, 1e-12)
            # keep at least a tenth of the pass, since the added time is only a prediction
            for name, added_s in zip(names, (forward_s, backward_s), strict=True):
                seconds[name] = max(seconds[name] - added_s * rate, seconds[name] / 10)
    return seconds


def _without_towers(plan: StepPlan, rank: int, intervals: Sequence[Interval], costs: CostModel) -> dict[tuple[int, str], float]:
    """Returns seconds by (micro-batch of this rank, action), without the predicted share of towers."""
    seconds = {(interval.round, interval.name): interval.stop_s - interval.start_s for interval in intervals}
    if not plan.media:
        return seconds
    priced = replace(costs, media=plan.media)
    for index, (group, stage) in enumerate(plan.for_rank(rank).rounds):
        for action in stage.actions if not stage.stage else ():
            if action.kind in ("F", "B") and action.layer_range == 0:
                chunk, part, is_backward = group.chunks[action.chunk], _part_of(costs.model, group, action), action.kind == "B"
                num_layers = stage.layer_ranges[0].num_layers
                text_s = costs.part_s(chunk, group.shape, is_backward, num_layers, part.has_head)
                towers_s = priced.chunk_towers_s(group, chunk, is_backward)
                seconds[index, str(action)] *= text_s / (text_s + towers_s)
    return seconds


def _added_by_policies(
    plan: StepPlan, costs: CostModel, group: SequenceGroup, stage: StagePlan
) -> dict[Action, tuple[float, float]]:
    """Predicts seconds that policies add to (forward, backward) of every chunk and layer range, by forward action."""
    policies = [policy for policy in stage.activations if policy.layers]
    if not policies:
        return {}
    # a wait of the stage may hide copies, so predict the group's run with and without policies and compare
    with_s, without_s = (
        _action_seconds(run_pipeline(plan, each, costs, [0.0] * len(group.stages))[stage.stage])
        for each in (group, replace(group, stages=tuple(replace(other, activations=()) for other in group.stages)))
    )
    keys = [Action("F", stage.stage, policy.chunk, policy.layer_range) for policy in policies]
    added_s = {action: with_s[action] - without_s[action] for action in with_s}
    return {forward: (added_s[forward], added_s[replace(forward, kind="B")]) for forward in keys}


def _action_seconds(run: StageRun) -> dict[Action, float]:
    return {action: stop_s - start_s for action, (start_s, stop_s) in zip(run.actions, run.times, strict=True)}


def _layers_of(group: SequenceGroup, action: Action) -> tuple[LayerRange, ...]:
    """Returns the layers that a forward or backward action runs."""
    return (group.stages[action.stage].layer_ranges[action.layer_range],)


def _part_of(model: ModelSpec, group: SequenceGroup, action: Action) -> ModelPart:
    """Returns the part of the model that a forward or backward action runs."""
    layer_ranges = group.stages[action.stage].layer_ranges
    if len(group.stages) == 1 and len(layer_ranges) == 1:
        return WHOLE_MODEL
    has_head = (action.stage, action.layer_range) == (len(group.stages) - 1, len(layer_ranges) - 1)
    # another stage may run the head of the chunk
    has_head = has_head and action.chunk not in group.head_stages
    return ModelPart(layer_ranges[action.layer_range].num_layers / model.num_layers, has_head, model.head_share)
