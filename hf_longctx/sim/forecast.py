"""Forecasts a workload on a scenario: plans of some steps, the same steps under other systems, and rejected alternatives.

Called by `hf-longctx plan`; `sim/output` writes the result as text, JSON and pictures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

from hf_longctx.plan.core.messages import counted
from hf_longctx.plan.core.settings import GroupMethod, PlannerConfig
from hf_longctx.plan.core.types import GroupShape, Media, SequenceGroup, StepPlan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.planner import plan_step
from hf_longctx.plan.predict.planning import WeightSeconds
from hf_longctx.plan.setup import Remedy, fitting_remedies, remedies, wider_job
from hf_longctx.plan.stage_count import StageOption, StageOptions, StageSetup, stage_options
from hf_longctx.sim.ablation import AblationRow, Machine, ablation
from hf_longctx.sim.execution import Execution, execute_plan
from hf_longctx.sim.longest import Budget, LongestRow, longest_rows
from hf_longctx.sim.memory_use import MemoryUse, has_policies, memory_use
from hf_longctx.sim.rivals import Choice, Rivals
from hf_longctx.sim.scenario import Scenario
from hf_longctx.sim.workloads import Workload

_METHODS: tuple[GroupMethod, ...] = ("ulysses", "ring", "hybrid")


@dataclass(frozen=True, slots=True)
class StepForecast:
    """One step: its plan, predicted run and memory, and seconds of every baseline with the same lengths and cost model.

    Baselines run in the same memory, each at its best checkpointing.
    """

    plan: StepPlan
    execution: Execution
    memory_use: MemoryUse
    baselines: tuple[Choice, ...]
    # seconds by which towers lengthen the step
    towers_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DegreeUse:
    """Sequences of all steps that run in groups of one degree and method."""

    degree: int
    method: str
    num_sequences: int
    num_tokens: int
    shortest: int
    longest: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """All content of the report. Without lengths there are no steps, but memory and the longest sequence are known."""

    scenario: Scenario
    workload: Workload | None
    seed: int
    steps: tuple[StepForecast, ...]
    # other degrees and methods for the first step
    alternatives: tuple[Choice, ...]
    # changes that would allow longer sequences
    remedies: tuple[Remedy, ...]
    # the longest sequence for each setting of the activation engine
    longest: tuple[LongestRow, ...]
    # a step with one sequence of `scenario.longest_tokens`, without baselines
    at_limit: StepForecast
    # sequence length that every step of a run must hold if all steps use one degree
    context_limit: int = 0
    # the first step as each of the four systems alone would plan it, if requested
    ablation: tuple[AblationRow, ...] = ()
    # the first step by number of stages, fastest first; empty if other numbers than one are out of the question
    stages: StageOptions = field(default_factory=StageOptions)

    @property
    def longest_row(self) -> LongestRow:
        """The row with the most tokens; the fastest one if several are equal."""
        return max(self.longest, key=lambda row: (row.tokens, -row.step_s))

    @property
    def at_limit_s(self) -> float:
        """Seconds of a step with one sequence of the most tokens, with gathers, sums and the optimizer, none hidden."""
        return self.at_limit.execution.step_bounds_s[1]

    @property
    def whole_step_s(self) -> float:
        """Mean seconds of a step with gathers, sums and the optimizer, none of them hidden."""
        return self.step_bounds_s[1]

    @property
    def step_s(self) -> float:
        """Mean seconds of a step, without those of a teacher."""
        return _mean([step.execution.step_s for step in self.steps])

    @property
    def taught_step_s(self) -> float:
        """Mean seconds of a step with the forwards of a teacher, if there is one."""
        return self.step_s + self.weights.teacher_s

    @property
    def step_bounds_s(self) -> tuple[float, float]:
        """Mean least and most seconds of a step with gathers of sharded weights, sums of gradients and the optimizer."""
        ranges = [step.execution.step_bounds_s for step in self.steps]
        return _mean([least for least, _ in ranges]), _mean([most for _, most in ranges])

    @property
    def weights(self) -> WeightSeconds:
        """Mean seconds of a step for moving weights and gradients, as if nothing else ran."""
        found = [step.execution.weights for step in self.steps]
        # gathers stand first, for every rank
        _, *others = fields(WeightSeconds)
        means = {each.name: _mean([getattr(weights, each.name) for weights in found]) for each in others}
        return WeightSeconds((_mean([weights.gather_s for weights in found]),), **means)

    @property
    def gap(self) -> float:
        """Mean seconds above the lower bound, as a share of it, with the gathers that count."""
        return self.counted_s / self.lower_bound_s - 1

    @property
    def counted_s(self) -> float:
        """Mean seconds by which plans were compared, with the gathers that count."""
        return _mean([step.plan.estimate.counted_s for step in self.steps])

    @property
    def lower_bound_s(self) -> float:
        return _mean([step.plan.estimate.lower_bound_s for step in self.steps])

    @property
    def towers_s(self) -> float:
        """Mean seconds by which towers lengthen a step."""
        return _mean([step.towers_s for step in self.steps])

    @property
    def tower_bytes(self) -> int:
        """Most bytes that towers take while an image runs."""
        model = self.scenario.costs.model
        return max((model.towers_bytes(step.plan.media) for step in self.steps), default=0)

    @property
    def tokens_per_s(self) -> float:
        return sum(sum(step.plan.lengths) for step in self.steps) / len(self.steps) / self.taught_step_s

    @property
    def peak_tokens(self) -> int:
        """Most tokens that a rank holds in any step; without steps, most tokens that fit with all activations kept."""
        held = [rank.peak_tokens for step in self.steps for rank in step.execution.ranks]
        return max(held, default=self.scenario.kept_tokens)

    @property
    def fullest(self) -> MemoryUse | None:
        """Memory of the step with the fullest rank; None without steps."""
        return max((step.memory_use for step in self.steps), key=lambda use: use.peak_bytes, default=None)

    @property
    def activation_bytes(self) -> int:
        """Bytes of the fullest rank of all steps besides the states; without steps, those of `peak_tokens`, all kept."""
        memory, placement = self.scenario.memory, self.scenario.placement
        if self.fullest is None:
            return memory.kept_bytes(self.peak_tokens, placement.is_shared)
        return self.fullest.peak_bytes - memory.state_bytes(*placement.sharing)

    def share(self, seconds: str) -> float:
        """Returns a share of the rank-seconds of all steps, as `Execution.share`."""
        total_s = sum(step.execution.step_s for step in self.steps)
        return sum(step.execution.share(seconds) * step.execution.step_s for step in self.steps) / total_s

    @property
    def baselines(self) -> tuple[Choice, ...]:
        """Mean seconds of every baseline that can run all steps, fastest first, gathers counted; then those that cannot."""
        means = [_mean_choice(same) for same in zip(*(step.baselines for step in self.steps), strict=True)]
        return tuple(sorted(means, key=lambda choice: (not choice.is_possible, choice.counted_s)))

    @property
    def degrees_used(self) -> tuple[DegreeUse, ...]:
        """Sequences by degree, largest degree first."""
        found: dict[tuple[int, str], list[int]] = defaultdict(list)
        for length, group in self.placed_lengths():
            found[group.degree, group.method].append(length)
        return tuple(
            DegreeUse(degree, method, len(lengths), sum(lengths), min(lengths), max(lengths))
            for (degree, method), lengths in sorted(found.items(), reverse=True)
        )

    def placed_lengths(self) -> Iterator[tuple[int, SequenceGroup]]:
        """Length and group of every sequence of all steps."""
        for plan in (step.plan for step in self.steps):
            for group in (group for micro_batch in plan.micro_batches for group in micro_batch.groups):
                # count a sliced sequence once, by its first slice
                for span in (span for chunk in group.chunks for span in chunk.spans if not span.start):
                    yield plan.lengths[span.sequence], group


def make_forecast(
    scenario: Scenario, workload: Workload | None, num_steps: int, global_batch: int, seed: int, with_ablation: bool = False
) -> Forecast:
    """Plans `num_steps` steps of the workload and compares them with baselines; raises ValueError if a sequence fits nowhere.

    with_ablation: also plan the first step with pipelines, and as each of the four systems alone would.
    """
    if with_ablation and scenario.kept_because:
        raise ValueError(
            f"--ablation compares plans that recompute activations, which a run of this model never does "
            f"({scenario.kept_because}); leave it out"
        )
    longer, at_limit = _longer(scenario), _at_limit(scenario)
    longest = _longest(scenario, at_limit)
    if workload is None:
        return Forecast(scenario, None, seed, (), (), longer, longest, at_limit)
    _check_longest(scenario, workload)
    batches = workload.draw_steps(num_steps, global_batch, seed)
    media = [workload.media_of(lengths) for lengths in batches]
    rivals = Rivals(scenario.flat, batches, workload.limit, media)
    others = rivals.baselines()
    steps = tuple(
        _forecast_step(number, lengths, scenario, others[number], media[number]) for number, lengths in enumerate(batches)
    )
    static = (rivals.static_degree(degree) for degree in scenario.flat.placement.degrees)
    alternatives = (*static, *_other_methods(steps[0].plan, scenario))
    rows = ablation(batches[0], _machine(scenario.flat)) if with_ablation else ()
    stages = scenario.setup.stage_options
    if scenario.placement.is_pipeline and not stages.fitting:
        stages = _beside_one_stage(steps[0].plan, scenario)
    return Forecast(scenario, workload, seed, steps, alternatives, longer, longest, at_limit, workload.limit, rows, stages)


def _beside_one_stage(plan: StepPlan, scenario: Scenario) -> StageOptions:
    """The plan's number of stages, which the user chose, and the same step on one stage."""
    setup, flat = scenario.setup, scenario.flat.setup
    own = StageOption(setup.num_stages, len(setup.ranges[0]), plan, StageSetup(setup.costs, setup.planner))
    try:
        other = stage_options(plan.lengths, (1,), lambda *_: StageSetup(flat.costs, flat.planner))
    except ValueError as error:
        return StageOptions((own,), ((1, str(error)),))
    return StageOptions(tuple(sorted((own, *other.fitting), key=lambda option: option.counted_s)))


def _forecast_step(
    number: int, lengths: Sequence[int], scenario: Scenario, others: tuple[Choice, ...], media: tuple[Media, ...] = ()
) -> StepForecast:
    costs, config = scenario.costs, scenario.planner_config
    # the choice of stages, or of how weights are shared, has planned the first step
    setup = scenario.setup
    made = [(option.setup, option.plan) for option in setup.stage_options.fitting]
    made += [(setup.planned, setup.planned.plan)] if setup.planned is not None and setup.planned.plan is not None else []
    known = (
        plan
        for own, plan in made
        if (own.costs, own.config) == (costs, config) and (plan.step, plan.lengths, plan.media) == (number, tuple(lengths), media)
    )
    plan = next(known, None) or plan_step(number, lengths, costs, config, media=media)
    execution = execute_plan(plan, scenario.costs)
    towers_s = execution.step_s - execute_plan(replace(plan, media=()), scenario.costs).step_s if media else 0.0
    use = memory_use(plan, execution, scenario.costs, scenario.memory, scenario.budget)
    plan = replace(plan, estimate=replace(plan.estimate, peak_bytes=use.peak_bytes))
    return StepForecast(plan, execution, use, others, towers_s)


def _other_methods(plan: StepPlan, scenario: Scenario) -> tuple[Choice, ...]:
    """Prices the plan's groups with each other method of sharing attention."""
    config, costs = scenario.planner_config, scenario.costs
    if plan.num_stages > 1:
        return ()
    used = {group.method for micro_batch in plan.micro_batches for group in micro_batch.groups if group.degree > 1}
    choices = []
    for method in _METHODS:
        if not used or used == {method}:
            continue
        name, forced = f"these groups by {method} alone", replace(costs, method=method)
        if has_policies(plan):
            # slices and policies are chosen for one method and would be wrong for another
            reason = f"does not fit: the plan's groups recompute or offload to hold more than {scenario.kept_tokens:,}"
            choices.append(Choice(name, detail=f"{reason} tokens per rank, which fits one method only"))
            continue
        try:
            shapes = _shapes(plan, forced, config)
        except ValueError as error:
            choices.append(Choice(name, detail=str(error)))
            continue
        step_s = execute_plan(_reshaped(plan, shapes), forced).step_s
        choices.append(Choice(name, step_s, gathers_s=plan.estimate.gathers_s))
    return tuple(choices)


def _shapes(plan: StepPlan, costs: CostModel, config: PlannerConfig) -> dict[int, GroupShape]:
    """Returns for every degree of the plan the method's cheapest shape, for an even share of the step's tokens."""
    share = min(sum(plan.lengths) / plan.num_ranks, config.tokens_per_rank)
    documents = len(plan.lengths) * share / sum(plan.lengths)
    degrees = {group.degree for micro_batch in plan.micro_batches for group in micro_batch.groups}
    return {degree: costs.best_shape(degree, degree * share, degree * documents) for degree in sorted(degrees)}


def _reshaped(plan: StepPlan, shapes: dict[int, GroupShape]) -> StepPlan:
    def reshape(group: SequenceGroup) -> SequenceGroup:
        return SequenceGroup.of(shapes[group.degree], group.positions, group.chunks, group.stages)

    micro_batches = tuple(replace(mb, groups=tuple(reshape(group) for group in mb.groups)) for mb in plan.micro_batches)
    return replace(plan, micro_batches=micro_batches)


def _check_longest(scenario: Scenario, workload: Workload) -> None:
    room, most = scenario.longest_tokens, scenario.placement.max_length
    if workload.longest <= room:
        return
    if most and workload.longest > most:
        raise ValueError(
            f"the longest of {workload.num_sequences:,} sequences has {workload.longest:,} tokens, but {scenario.model_name} has "
            f"{most:,} positions, which nothing extends; leave longer ones out with --limit {min(room, most)}, or use a model "
            f"with rotary embeddings"
        )
    if scenario.placement.is_pipeline:
        advice = "".join(f"; or {one.change} (holds {one.longest_tokens:,})" for one in _longer(scenario))
        raise ValueError(
            f"the longest of {workload.num_sequences:,} sequences has {workload.longest:,} tokens, but "
            f"{counted(scenario.setup.num_stages, 'stage')} of {counted(scenario.placement.ranks_per_stage, 'rank')} hold "
            f"{room:,}; leave longer ones out with --limit {room}{advice}"
        )
    ranks, tokens = scenario.placement.degrees[-1], scenario.tokens_per_rank
    alone = ", more of a sequence alone" if room > ranks * tokens else ""
    too_long = int(workload.counts[workload.lengths > room].sum())
    found = fitting_remedies(scenario.memory, scenario.placement, workload.longest, scenario.may_recompute)
    enough = [f"{one.change} (holds {one.longest_tokens:,})" for one in found]
    more = wider_job(scenario.memory, scenario.placement, 2 * scenario.placement.num_ranks, workload.longest)
    if not any("--gpus" in text for text in enough) and (holds := more.longest_tokens(scenario.memory)) >= workload.longest:
        enough.append(f"--gpus {more.num_ranks} (holds {holds:,})")
    advice = "".join(f"; or {text}" for text in enough)
    raise ValueError(
        f"the longest of {workload.num_sequences:,} sequences has {workload.longest:,} tokens, but the largest group "
        f"({ranks} ranks of {tokens:,} tokens{alone}) holds {room:,}; {too_long:,} "
        f"sequence(s) are longer; leave these out with --limit {room}{advice}"
    )


def _longer(scenario: Scenario) -> tuple[Remedy, ...]:
    """Changes that allow longer sequences; for a pipeline that of having none, if it does."""
    if not scenario.placement.is_pipeline:
        return remedies(scenario.memory, scenario.placement, scenario.may_recompute)
    flat = scenario.flat
    found = Remedy("no pipeline: --stages 1", flat.tokens_per_rank, flat.longest_tokens, "stages=1")
    return (found,) if found.longest_tokens > scenario.longest_tokens else ()


def _longest(scenario: Scenario, at_limit: StepForecast) -> tuple[LongestRow, ...]:
    """Returns the longest sequence of the largest group, by settings of the activation engine; that of a pipeline as planned.

    Gathered parameters are counted by formula, since measured bytes do not list them separately.
    """
    if scenario.placement.is_pipeline:
        return (LongestRow("in slices through all stages", scenario.longest_tokens, at_limit.execution.step_s),)
    memory, placement = scenario.memory, scenario.placement
    ways = (memory, replace(memory, state_bytes_per_parameter=0))
    states = max(way.state_bytes(*placement.sharing) for way in ways)
    device_bytes = memory.usable_bytes - states
    shape = placement.largest_shape(memory.model)
    budget = Budget(shape.degree, device_bytes, memory.host_bytes, placement.reruns(memory.model), shape.ulysses)
    rows = longest_rows(scenario.costs, budget)
    # the first one keeps everything
    return rows[:1] if scenario.kept_because else rows


def _at_limit(scenario: Scenario) -> StepForecast:
    """Plans a step with the longest sequence that a run would accept, like a run."""
    memory, costs = scenario.memory, scenario.costs
    plan = plan_step(0, (scenario.longest_tokens,), costs, scenario.planner_config)
    execution = execute_plan(plan, costs)
    return StepForecast(plan, execution, memory_use(plan, execution, costs, memory, scenario.budget), ())


def _machine(scenario: Scenario) -> Machine:
    """Returns machine and settings for all rows of an ablation."""
    return Machine(scenario.costs, scenario.planner_config, scenario.memory.usable_bytes, scenario.memory.host_bytes)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _mean_choice(same: Sequence[Choice]) -> Choice:
    if all(choice.is_possible for choice in same):
        step_s, most_s, gathers_s = (_mean([getattr(each, name) for each in same]) for name in ("step_s", "most_s", "gathers_s"))
        means = replace(same[0], step_s=step_s, most_s=most_s, gathers_s=gathers_s)
        return replace(means, used_bytes=max(choice.used_bytes for choice in same))
    return next(replace(choice, step_s=0.0) for choice in same if not choice.is_possible)
