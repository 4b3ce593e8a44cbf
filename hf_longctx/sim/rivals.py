"""Predicts other systems on the same steps: each baseline at its best degree, size of micro-batches and checkpointing.

A run has one checkpointing for all steps, and "static" one degree too; the fastest that fits over all steps is taken. Seconds
come from the prediction that judges our plans, bytes from the byte model that our plans must fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hf_longctx.plan.core.messages import counted
from hf_longctx.plan.core.settings import PlannerConfig
from hf_longctx.plan.core.types import Media, SequenceGroup, StepPlan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.groups.greedy import plan_static
from hf_longctx.plan.groups.placement import place_layout
from hf_longctx.plan.groups.problem import GroupingProblem, Layout
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.planner import build_plan
from hf_longctx.plan.predict.evaluate import evaluate_plan
from hf_longctx.plan.predict.planning import weight_seconds
from hf_longctx.sim.baselines import (
    BASELINES,
    CHECKPOINTINGS,
    KEPT,
    CannotRunError,
    CheckpointedCosts,
    Checkpointing,
    baseline_layout,
    document_load,
    group_bytes,
    most_tokens,
    static_degrees,
    static_layout,
    static_of_degree,
)
from hf_longctx.sim.scenario import Scenario

# layouts of one setting to try, each for fewer tokens on a rank, if packs need more bytes than one document
_ATTEMPTS = 4
# share of the excess by which tokens shrink beyond proportion
_MARGIN = 0.01
# groups with fewer than this share of the fullest group's tokens on a rank are not counted byte by byte
_NEARLY_FULL = 0.7


@dataclass(frozen=True, slots=True)
class Choice:
    """Another way to run the same sequences: its mean seconds per step, or (step_s 0) the reason why it cannot run."""

    name: str
    step_s: float = 0.0
    layout: str = ""
    detail: str = ""
    # degree of all groups, if the choice fixes it, else 0
    degree: int = 0
    # treatment of saved tensors; empty if nothing is recomputed
    checkpointing: str = ""
    # mean seconds with gathers of weights, sums and the optimizer, none of them hidden
    most_s: float = 0.0
    # mean seconds that plans count for gathers
    gathers_s: float = 0.0
    # most bytes of a rank beside the states (0: they were not counted)
    used_bytes: int = 0

    @property
    def is_possible(self) -> bool:
        return self.step_s > 0

    @property
    def counted_s(self) -> float:
        """Seconds for comparisons, as for plans."""
        return self.step_s + self.gathers_s

    @property
    def label(self) -> str:
        """Name with the settings of the run, for example "static <8>, selective checkpointing"."""
        degree = f" <{self.degree}>" if self.name == "static" and self.degree else ""
        return f"{self.name}{degree}" + (f", {self.checkpointing}" if self.checkpointing else "")


@dataclass(frozen=True, slots=True)
class Setting:
    """A checkpointing of a run: costs with its replays, most tokens of a rank, bytes besides the states (0: not counted).

    label: its name in tables.
    """

    checkpointing: Checkpointing
    costs: CheckpointedCosts
    tokens_per_rank: int
    left_bytes: int
    label: str


def settings_of(scenario: Scenario) -> tuple[Setting, ...]:
    """Returns the checkpointings that a run may have: only keeping everything if our plans do, to compare layouts."""
    memory, placement = scenario.memory, scenario.placement
    if memory.keeps_everything:
        return (Setting(KEPT, CheckpointedCosts.of(scenario.costs, KEPT), scenario.kept_tokens, 0, ""),)
    byte_model = ByteModel(memory.model)
    left_bytes = memory.left_bytes(*placement.sharing)
    like = document_load(memory.model.num_layers, placement.largest_shape(memory.model))
    found = []
    for checkpointing in CHECKPOINTINGS:
        tokens = most_tokens(byte_model, left_bytes, checkpointing, like)
        tokens = min(tokens, placement.max_tokens_per_rank or tokens)
        costs = CheckpointedCosts.of(scenario.costs, checkpointing)
        found.append(Setting(checkpointing, costs, tokens, left_bytes, checkpointing.name))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Way:
    """One way of a baseline to run all steps. degree: of all groups (0: chosen by the layout)."""

    setting: Setting
    degree: int
    layout: Callable[[GroupingProblem], Layout]


class Rivals:
    """Baselines for the steps of our plans. limit: most tokens of a sequence in the whole run, which "static" must hold.

    media: images of the sequences of every step.
    """

    def __init__(
        self, scenario: Scenario, batches: Sequence[Sequence[int]], limit: int, media: Sequence[tuple[Media, ...]] = ()
    ) -> None:
        self.scenario, self.batches, self.limit, self.media = scenario, batches, limit, media
        self.settings = settings_of(scenario)
        self._byte_model = ByteModel(scenario.memory.model)
        self._problems: dict[tuple[str, int], GroupingProblem] = {}

    def baselines(self) -> list[tuple[Choice, ...]]:
        """Returns for every step one choice per baseline."""
        rows = [self._fastest(name, self._ways(name), self.batches) for name in BASELINES]
        return list(zip(*rows, strict=True))

    def static_degree(self, degree: int) -> Choice:
        """Returns the first step with groups of one degree: the best layout and checkpointing, or the reason against it."""

        def layouts(problem: GroupingProblem) -> Layout:
            trials = self.scenario.planner_config.micro_batch_trials
            ordered, order = problem.longest_first()
            packed = _renumbered(static_layout(ordered, degree, fill=1.0), order)
            return min(plan_static(problem, trials, degree), packed, key=problem.step_seconds)

        ways = [_Way(setting, degree, layouts) for setting in self.settings]
        (choice,) = self._fastest(f"all groups of {degree}", ways, self.batches[:1])
        return replace(choice, degree=degree)

    def _ways(self, name: str) -> list[_Way]:
        if name != "static":
            return [_Way(setting, 0, lambda problem: baseline_layout(name, problem, self.limit)) for setting in self.settings]
        ways = []
        for setting in self.settings:
            if self._fits(setting):
                degrees = static_degrees(self._problem(setting, 0), self.limit)
                ways += [_Way(setting, degree, _static_maker(degree)) for degree in degrees]
        return ways

    def _fastest(self, name: str, ways: Sequence[_Way], batches: Sequence[Sequence[int]]) -> list[Choice]:
        """Returns choices of every step in the way that takes the fewest seconds over all steps."""
        best: list[Choice] = []
        best_s, problem = math.inf, ""
        bounded = [(self._least_s(way, len(batches)), place) for place, way in enumerate(ways)]
        for least_s, place in sorted(bounded):
            if least_s >= best_s:
                break
            try:
                found = [self._step(name, ways[place], number) for number in range(len(batches))]
            except CannotRunError as error:
                problem = problem or f"{name} cannot run: {error}"
                continue
            if (total_s := sum(choice.counted_s for choice in found)) < best_s:
                best, best_s = found, total_s
        return best or [Choice(name, detail=self._reason(name, ways) or problem)] * len(batches)

    def _fits(self, setting: Setting, degree: int = 0) -> bool:
        """Whether groups of the degree, or else the largest ones, hold the longest sequence of all steps."""
        longest = max(max(lengths) for lengths in self.batches)
        return longest <= (degree or self.scenario.placement.degrees[-1]) * setting.tokens_per_rank

    def _least_s(self, way: _Way, num_steps: int) -> float:
        """Returns a lower bound on the seconds of these steps; infinite if a sequence does not fit."""
        if not self._fits(way.setting, way.degree):
            return math.inf
        problems = [self._problem(way.setting, number) for number in range(num_steps)]
        return sum((each.restricted((way.degree,)) if way.degree else each).lower_bound_s() for each in problems)

    def _reason(self, name: str, ways: Sequence[_Way]) -> str:
        """Describes why no way fits; empty if one does."""
        roomy = max(self.settings, key=lambda setting: setting.tokens_per_rank)
        is_run = name == "static"
        degree = next((way.degree for way in ways), 0) or self.scenario.placement.degrees[-1]
        longest = self.limit if is_run else max(max(lengths) for lengths in self.batches)
        if is_run and not ways:
            divisors = [d for d in self.scenario.placement.degrees if self.scenario.placement.num_ranks % d == 0]
            degree = max(divisors, default=degree)
        if longest <= (room := degree * roomy.tokens_per_rank):
            return ""
        who = "a run has sequences of up to" if is_run else "the longest sequence has"
        even = "" if self.scenario.memory.keeps_everything else f" even with {roomy.label}"
        return f"does not fit{even}: {who} {longest:,} tokens, and there is room for {room:,} on {counted(degree, 'rank')}"

    def _problem(self, setting: Setting, number: int) -> GroupingProblem:
        key = setting.checkpointing.name, number
        if key not in self._problems:
            self._problems[key] = GroupingProblem.build(self.batches[number], setting.costs, self._config(setting))
        return self._problems[key]

    def _config(self, setting: Setting) -> PlannerConfig:
        return replace(self.scenario.planner_config, tokens_per_rank=setting.tokens_per_rank, activations=None)

    def _step(self, name: str, way: _Way, number: int) -> Choice:
        """Runs one step in this way, with as many tokens on a rank as fit; raises CannotRunError if it cannot run."""
        problem = self._problem(way.setting, number)
        costs, longest = way.setting.costs, max(problem.lengths)
        for _ in range(_ATTEMPTS):
            layout = way.layout(problem)
            placed = place_layout(layout, problem.num_ranks, costs.cluster.ranks_per_node, node_aligned=True)
            plan = build_plan(number, problem.lengths, placed, problem.shapes, costs)
            # other systems lay sequences out by their tokens, but run towers, too
            plan = replace(plan, media=self.media[number] if self.media else ())
            needed = self._most_bytes(plan, way.setting)
            if needed <= way.setting.left_bytes:
                step_s, most_s, gathers_s = predicted_s(plan, costs, self.scenario.costs)
                return Choice(name, step_s, plan.folded_layout, "", way.degree, way.setting.label, most_s, gathers_s, needed)
            share = (1 - _MARGIN) * way.setting.left_bytes / needed
            problem = replace(problem, capacity=int(share * problem.capacity))
            if longest > (way.degree or problem.degrees[-1]) * problem.capacity:
                break
        raise CannotRunError(
            f"{way.setting.label} of packs of sequences needs {needed / 2**30:.1f} GiB of {way.setting.left_bytes / 2**30:.1f}"
        )

    def _most_bytes(self, plan: StepPlan, setting: Setting) -> int:
        """Returns the most bytes besides the states on a rank of the plan, for its fullest groups; 0 if not counted."""
        if not setting.left_bytes:
            return 0
        groups = [group for micro_batch in plan.micro_batches for group in micro_batch.groups]
        least = _NEARLY_FULL * max(group.num_tokens / group.degree for group in groups)
        distinct = {_lengths(group): group for group in groups if group.num_tokens >= least * group.degree}
        return max(group_bytes(self._byte_model, each, setting.checkpointing) for each in distinct.values())


def _static_maker(degree: int) -> Callable[[GroupingProblem], Layout]:
    def layout(problem: GroupingProblem) -> Layout:
        ordered, order = problem.longest_first()
        return _renumbered(static_of_degree(ordered, degree), order)

    return layout


def _renumbered(layout: Layout, order: Sequence[int]) -> Layout:
    return [[(degree, tuple(order[i] for i in some)) for degree, some in groups] for groups in layout]


def _lengths(group: SequenceGroup) -> tuple[object, ...]:
    return group.shape, tuple(span.num_tokens for span in group.chunks[0].spans)


def predicted_s(plan: StepPlan, costs: CostModel, plain: CostModel) -> tuple[float, float, float]:
    """Predicts seconds of a step, as for our own plans: without and with gathers, sums and the optimizer, and gathers that count.

    plain: costs without replays, for gathers of weights.
    """
    run = evaluate_plan(plan, costs, with_events=False)
    most_s = weight_seconds(plan, plain).step_bounds_s(run.step_s, run.once_s, run.ranks)[1]
    return run.step_s, most_s, run.gathers_s
