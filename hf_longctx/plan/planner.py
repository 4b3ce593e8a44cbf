"""`plan_step` turns sequence lengths into a validated `StepPlan`, pass by pass. Read this file first.

    lengths -> grouping problem -> layout (exact, greedy, by programs or static) -> places on ranks, nested where that is faster
            -> plan tree -> activation policies and slices for what does not fit as it is -> evaluate -> validate -> estimate

Every pass is a function from plain data to plain data. The planner runs on rank 0, one step ahead; all ranks obey its plan.
"""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from hf_longctx.plan.core.settings import NoRoom, PlannerConfig, check_degrees
from hf_longctx.plan.core.types import (
    Action,
    Blocks,
    Chunk,
    Estimate,
    GroupShape,
    LayerRange,
    Media,
    MicroBatch,
    SequenceGroup,
    Span,
    StagePlan,
    StepPlan,
)
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.groups.configurations import plan_by_configurations, plan_lp
from hf_longctx.plan.groups.exact import can_solve_exactly, solve_exactly
from hf_longctx.plan.groups.flexsp import GroupedStep, group_by_milp, plan_milp
from hf_longctx.plan.groups.greedy import overlapping_static_layouts, plan_greedy, plan_one_micro_batch, plan_static
from hf_longctx.plan.groups.placement import (
    PlacedGroup,
    PlacedLayout,
    levels,
    place_alone,
    place_layout,
    plan_nested,
    renumber,
    with_idle_ranks,
)
from hf_longctx.plan.groups.problem import GroupingProblem, Layout
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.pipeline.lending import lent_plans
from hf_longctx.plan.pipeline.search import NotFaster, PipelineSearch
from hf_longctx.plan.predict.bounds import MemoryLimitedStep
from hf_longctx.plan.predict.evaluate import Evaluation, state_bytes
from hf_longctx.plan.predict.planning import Planning
from hf_longctx.plan.predict.towers import with_towers
from hf_longctx.plan.room.room import make_room, steps_of_room

# factor on the even share of tokens that a rank of a micro-batch may hold: groups are never quite even
_SLACK = 1.15
# steps of at most this many sequences are planned for several token limits
_FEW_SEQUENCES = 16
# share of the best token limit that ranks must be able to keep, for micro-batches that keep everything to be tried
_WORTH_KEEPING = 1 / 3
# shares of the most tokens on a rank up to which sequences run beside others, where nothing else fits
_SMALLER_SHARES = (1.0, 0.9, 0.75, 0.5, 0.25, 0.0)
# steps of at most this many micro-batches are planned for one fewer, too
_FEW_MICRO_BATCHES = 4
# a further number of micro-batches that is tried, as a multiple of the most promising one
_MORE = 1.1


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Context in which Python's garbage collector rests: planning makes many small objects, and none of them in cycles.

    Only in the main thread. In another one a training goes on meanwhile, whose garbage may have cycles, and which may fork.
    """
    pauses = gc.isenabled() and threading.current_thread() is threading.main_thread()
    if pauses:
        gc.disable()
    try:
        yield
    finally:
        if pauses:
            gc.enable()


@_collector_paused()
def plan_step(
    step: int,
    lengths: Sequence[int],
    costs: CostModel,
    config: PlannerConfig,
    most_s: float = math.inf,
    blocks: tuple[Blocks, ...] = (),
    media: tuple[Media, ...] = (),
) -> StepPlan:
    """Plans optimizer step `step` for sequences of `lengths` tokens: the actions of every rank, and an estimate.

    most_s: seconds of a plan with other stages or shards, which a plan of several stages must beat; the search ends as soon as
    it cannot. blocks: those of every sequence, on one stage; groups then divide heads, since rings cannot compute them. media:
    the images of every sequence, whose towers count.
    Deterministic: equal arguments give an equal digest, except that solvers "lp" and "milp" stop at their time limit.
    Raises ValueError for a sequence that fits no allowed group and for settings that do not go together, NoRoom (a ValueError)
    where memory is short, NotFaster if no plan of several stages takes less than `most_s`, and PlanError if a pass broke an
    invariant.
    """
    if config.lend_stages and not costs.model.keeps_all_stages:
        raise ValueError(
            "lend_stages is set, but the model's states are counted for one stage per rank (keeps_all_stages=False); a rank that "
            "is lent needs the weights of all stages, so set ModelSpec.keeps_all_stages or leave lend_stages out"
        )
    if blocks:
        if len(config.stages) > 1:
            raise ValueError("sequences have tokens that see each other both ways, which several stages do not run; set stages=1")
        costs = replace(costs, method="ulysses")
    costs = replace(costs, media=media)
    plan = _planned(step, lengths, costs, config, most_s, blocks)
    budget, tower_bytes = config.activations, costs.model.towers_bytes(media)
    if media and budget is not None and tower_bytes < budget.device_bytes:
        states = max(state_bytes(plan, costs, ByteModel(costs.model)))
        if plan.estimate.peak_bytes > budget.device_bytes + states:
            # towers meet what other chunks hold; where no plan leaves room for that, the estimate says what the step needs
            with suppress(NoRoom):
                beside = replace(config, activations=replace(budget, device_bytes=budget.device_bytes - tower_bytes))
                return _planned(step, lengths, costs, beside, most_s, blocks, tower_bytes)
    return plan


def _planned(
    step: int,
    lengths: Sequence[int],
    costs: CostModel,
    config: PlannerConfig,
    most_s: float,
    blocks: tuple[Blocks, ...],
    tower_bytes: int = 0,
) -> StepPlan:
    """Plans a step whose images are those of `costs`; see `plan_step`.

    tower_bytes: of the device, left free beside the budget.
    """
    started_s = time.perf_counter()
    planning = Planning(costs, config, blocks)
    if len(config.stages) > 1:
        search = PipelineSearch(step, lengths, planning, most_s)
        plan = search.plan()
        fitting = [(plan, "pipelines"), *((lent, "pipelines, lent") for lent in lent_plans(search, plan))]
        lower_bound_s = search.staged.lower_bound_s()
    else:
        check_degrees(config.degrees, costs.cluster.num_ranks, costs.model.num_heads, costs.method)
        problem = GroupingProblem.build(lengths, costs, config)
        fitting = group_plans(step, problem, planning)
    plan, run, solver = choose(fitting, planning)
    if costs.media:
        plan = with_towers(plan, planning, tower_bytes)
        run = planning.predict(plan)
    counted_s = planning.counted_s(plan)
    if counted_s >= most_s:
        raise NotFaster(counted_s)
    gathers_s = planning.gathers_s(plan)
    if plan.num_stages == 1:
        chunks_s = counted_s - run.once_s
        lower_bound_s = run.once_s + least_step_s(problem, costs, config, chunks_s)
    estimate = Estimate(
        step_s=counted_s - gathers_s,
        gathers_s=gathers_s,
        lower_bound_s=lower_bound_s,
        peak_bytes=max(run.peak_bytes),
        host_bytes=max(run.host_bytes),
        solve_s=time.perf_counter() - started_s,
        solver=solver,
        cost_source=costs.coefficients.source,
    )
    return validate_plan(replace(plan, estimate=estimate), planning.limit_bytes(plan), planning.host_limit_bytes)


def step_bound_s(lengths: Sequence[int], costs: CostModel, config: PlannerConfig) -> float:
    """Lower bound on the counted seconds of any plan of `lengths`, without planning; raises ValueError as `plan_step` does."""
    if len(config.stages) > 1:
        return PipelineSearch(0, lengths, Planning(costs, config)).bound_s()
    return costs.coefficients.step_s + GroupingProblem.build(lengths, costs, config).lower_bound_s()


def least_step_s(problem: GroupingProblem, costs: CostModel, config: PlannerConfig, most_s: float) -> float:
    """Lower bound on the seconds of any plan's chunks, gathers counted; memory counts where it is limited.

    most_s: seconds of the chunks of a plan that was found.
    """
    if config.activations is None:
        return problem.lower_bound_s()
    if not problem.num_alone:
        return MemoryLimitedStep(problem, costs, config.activations).lower_bound_s(most_s)
    # a bound for more room than there is holds as well; the last of equal slices may be short
    roomy = replace(problem, capacity=-(-max(problem.lengths) // problem.degrees[-1]))
    return MemoryLimitedStep(roomy, costs, config.activations, shortest_slice=1).lower_bound_s(most_s)


def choose(plans: Iterable[tuple[StepPlan, str]], planning: Planning) -> tuple[StepPlan, Evaluation, str]:
    """Returns the plan predicted to be fastest, its predicted run, and its solver's name.

    Only the prediction decides: it alone knows which groups span nodes and which ranks wait for which. Gathers of sharded weights
    count.
    """
    plan, solver = min(plans, key=lambda item: planning.counted_s(item[0]))
    return plan, planning.predict(plan), solver


def group_plans(step: int, problem: GroupingProblem, planning: Planning) -> list[tuple[StepPlan, str]]:
    """Returns one-stage plans that fit, each with its solver's name; raises the first candidate's ValueError if none fits.

    Where the most promising token limits leave no room, all others are tried, and then fewer tokens beside each other: a pack may
    need more memory than one sequence of as many tokens.
    """
    config = planning.config
    try:
        return _fitting_plans(step, problem, planning, tries_all=False)
    except ValueError as error:
        if config.activations is None:
            raise
        for share in _SMALLER_SHARES[: 1 if config.one_micro_batch else None]:
            with suppress(ValueError):
                smaller = replace(problem, capacity=max(1, int(problem.capacity * share)))
                return _fitting_plans(step, smaller, planning, tries_all=True)
        raise error


def _fitting_plans(step: int, problem: GroupingProblem, planning: Planning, tries_all: bool) -> list[tuple[StepPlan, str]]:
    """Returns the plans of `group_plans`; tries_all: for every token limit.

    Candidates are tried in the order of their seconds with those that policies add if ranks are equally full. Making room only
    adds seconds, so those that could not become faster than the best so far are left out, and so is a candidate that is slower
    than the best with room in some of its micro-batches.
    """
    costs, config = planning.costs, planning.config
    # sequences get their input numbers back only at the end, so that no pass depends on the order of the input
    ordered, order = problem.longest_first()
    plans = [
        (
            replace(
                build_plan(step, problem.lengths, renumber(placed, order), problem.shapes, costs, problem.block_ranks),
                blocks=planning.blocks,
            ),
            solver,
        )
        for placed, solver in _long_ones_apart(ordered, costs, config, tries_all)
    ]
    if len(plans) == 1 or config.activations is None:
        return [(make_room(plan, planning), solver) for plan, solver in plans]
    limited = MemoryLimitedStep(problem, costs, config.activations)
    bounds_s = [planning.counted_s(plan) for plan, _ in plans]
    likely_s = [bound_s + limited.policies_s(len(plan.micro_batches)) for bound_s, (plan, _) in zip(bounds_s, plans, strict=True)]
    found: dict[int, tuple[StepPlan, str]] = {}
    errors: dict[int, ValueError] = {}
    best_s = math.inf
    for place in sorted(range(len(plans)), key=lambda place: likely_s[place]):
        if bounds_s[place] >= best_s:
            continue
        plan, solver = plans[place]
        try:
            for number, made in enumerate(steps_of_room(plan, planning), 1):
                # a prediction takes about as long as room in one micro-batch
                if found and number & (number - 1) == 0 and planning.counted_s(made) > best_s:
                    break
            else:
                found[place] = made, solver
                best_s = min(best_s, planning.counted_s(made))
        except ValueError as error:
            # a traceback would hold this frame, and so itself
            errors[place] = error.with_traceback(None)
    if not found:
        # the first candidate is the configured solver's, so its reason is the one to tell
        raise errors[0]
    return [found[place] for place in sorted(found)]


def _long_ones_apart(
    problem: GroupingProblem, costs: CostModel, config: PlannerConfig, tries_all: bool
) -> list[tuple[PlacedLayout, str]]:
    """Returns `candidates_with_room`, after groups of one sequence each for those that no group holds beside others.

    Sequences are sorted longest first.
    """
    num_alone = problem.num_alone
    if not num_alone:
        return candidates_with_room(problem, costs, config, tries_all)
    block_ranks = 1 if costs.parameters == "replicated" else costs.shards or problem.num_ranks
    alone = place_alone(range(num_alone), problem.degrees[-1], problem.num_ranks, block_ranks)
    others = range(num_alone, len(problem.lengths))
    if not others:
        return [(alone, "alone")]
    found = candidates_with_room(problem.subproblem(others), costs, config, tries_all)
    return [([*alone, *renumber(placed, others)], f"{solver}, long ones apart") for placed, solver in found]


def candidates_with_room(
    problem: GroupingProblem, costs: CostModel, config: PlannerConfig, tries_all: bool = False
) -> list[tuple[PlacedLayout, str]]:
    """Tries `candidates` for every per-rank token limit that could win: recomputing costs time, and so do more micro-batches.

    Where every sequence fits on one rank with everything kept, only that limit is tried. Otherwise it is the number of tokens at
    which gathers, fixed seconds and policies together probably take the fewest seconds (or, if more, the fewest tokens at which
    the longest sequence fits the largest group). Few sequences are tried with less and with more, too, and any where nothing
    else fits (`tries_all`). Sequences that fit no group with everything kept are also planned apart from the others.
    """
    budget = config.activations
    if budget is None or budget.kept_tokens >= problem.capacity or not problem.lengths:
        return candidates(problem, costs, config)
    longest, kept = max(problem.lengths), budget.kept_tokens
    needed = -(-longest // problem.degrees[-1])
    least = max(kept, needed)
    number = MemoryLimitedStep(problem, costs, budget).fullness()
    # few micro-batches are less even than the estimate, so that one fewer is tried, too; layouts of more vary
    numbers = [number, number - 1] if 1 < number <= _FEW_MICRO_BATCHES else [number, math.ceil(_MORE * number)]
    full = [math.ceil(_SLACK * sum(problem.lengths) / problem.num_ranks / each) for each in numbers]
    limits = [min(problem.capacity, max(least, each)) for each in full]
    tries_all = tries_all or len(problem.lengths) <= _FEW_SEQUENCES
    # without gathers, the number of micro-batches matters little beside their shapes
    tries_all |= config.one_micro_batch or not problem.micro_batch_s
    if tries_all or longest <= kept:
        limits = [least, *limits]
    if longest > kept and tries_all:
        limits = [*limits, problem.capacity]
    if longest <= kept and not problem.micro_batch_s:
        # everything fits as it is
        limits = [least]
    found = [each for limit in dict.fromkeys(limits) for each in _candidates_or_none(problem, limit, costs, config)]
    if not found:
        # a single micro-batch must hold everything
        return candidates(problem, costs, config)
    num_long = sum(length > kept * problem.degrees[-1] for length in problem.lengths)
    is_worth = kept >= _WORTH_KEEPING * limits[0] or tries_all
    if kept and is_worth and not config.one_micro_batch and 0 < num_long < len(problem.lengths):
        # sorted longest first
        long, others = range(num_long), range(num_long, len(problem.lengths))
        [(first, name), *_] = candidates(replace(problem.subproblem(long), capacity=needed), costs, config)
        [(second, _), *_] = candidates(replace(problem.subproblem(others), capacity=kept), costs, config)
        found.append(([*renumber(first, long), *renumber(second, others)], f"{name}, long ones apart"))
    return found


def _candidates_or_none(
    problem: GroupingProblem, tokens_per_rank: int, costs: CostModel, config: PlannerConfig
) -> list[tuple[PlacedLayout, str]]:
    """Returns `candidates` with at most `tokens_per_rank` tokens on a rank; none if they must fit one micro-batch and do not."""
    try:
        return candidates(replace(problem, capacity=tokens_per_rank), costs, config)
    except ValueError:
        if config.one_micro_batch:
            return []
        raise


def candidates(problem: GroupingProblem, costs: CostModel, config: PlannerConfig) -> list[tuple[PlacedLayout, str]]:
    """Returns layouts placed on ranks, each with its solver's name: the configured solver's, and others that could be faster."""
    nodes = costs.cluster.ranks_per_node
    is_free = bool(problem.lengths) and config.solver != "static"
    is_quick = is_free and config.solver in ("auto", "greedy") and not config.one_micro_batch
    layouts = [choose_layout(each, config) for each in [problem, *(_easier_to_place(problem, nodes) if is_quick else [])]]
    if is_free and problem.nests:
        # overlapping micro-batches of one degree may beat layouts whose summed seconds are fewer
        limit_s = min(problem.step_seconds(layout) for layout, _ in layouts)
        layouts += [(layout, "static") for layout in overlapping_static_layouts(problem, config.micro_batch_trials, limit_s)]
    found = [(place_layout(layout, problem.num_ranks, nodes, config.node_aligned), solver) for layout, solver in layouts]
    if is_free and problem.nests and (groups := plan_nested(problem, nodes)):
        found.append((levels(groups, problem.num_ranks), f"{layouts[0][1]}, nested"))
    return found


def _easier_to_place(problem: GroupingProblem, ranks_per_node: int) -> list[GroupingProblem]:
    """Restricts the problem to degrees that are powers of two, that tile nodes, or both: other groups often span nodes."""
    longest = max(problem.lengths)
    powers = tuple(degree for degree in problem.degrees if degree & (degree - 1) == 0)
    tiles = tuple(d for d in problem.degrees if d % ranks_per_node == 0 or ranks_per_node % d == 0 or d == problem.num_ranks)
    choices = {powers, tiles, tuple(sorted({*powers, *tiles}))} - {problem.degrees}
    return [problem.restricted(degrees) for degrees in sorted(choices) if degrees and longest <= degrees[-1] * problem.capacity]


def choose_layout(problem: GroupingProblem, config: PlannerConfig) -> tuple[Layout, str]:
    """Returns the configured solver's layout and the solver's name. "auto" is exact for few sequences."""
    if not problem.lengths:
        return [[]], "empty"
    if config.solver in ("lp", "milp"):
        return _improve_greedy(problem, config)
    if config.one_micro_batch:
        return plan_one_micro_batch(problem, one_degree=config.solver == "static"), "one micro-batch"
    if config.solver == "static":
        return plan_static(problem, config.micro_batch_trials, config.static_degree), "static"
    if config.solver == "auto" and can_solve_exactly(problem):
        return solve_exactly(problem), "exact"
    return plan_greedy(problem, config.micro_batch_trials, config.time_aware), "greedy"


def _improve_greedy(problem: GroupingProblem, config: PlannerConfig) -> tuple[Layout, str]:
    """Improves the greedy layout by linear or integer programs; the name says how many micro-batches they left to greedy."""
    limit_s = config.solver_time_limit_s
    if config.one_micro_batch:
        [groups] = plan_one_micro_batch(problem)
        group = group_by_milp if config.solver == "milp" else plan_by_configurations
        solved = group(problem, groups, limit_s)
        step = GroupedStep([list(solved.groups)], int(solved.is_fallback))
    else:
        improve = plan_milp if config.solver == "milp" else plan_lp
        step = improve(
            problem, config.micro_batch_trials, limit_s, plan_greedy(problem, config.micro_batch_trials, config.time_aware)
        )
    left = f" ({step.num_fallbacks} of {len(step.layout)} micro-batches by greedy)" if step.num_fallbacks else ""
    return step.layout, config.solver + left


def build_plan(
    step: int,
    lengths: Sequence[int],
    placed: PlacedLayout,
    shapes: Mapping[int, GroupShape],
    costs: CostModel,
    block_ranks: int = 0,
) -> StepPlan:
    """Builds the plan tree of placed groups: one packed chunk per group, forward then backward, idle ranks on the dummy chunk.

    `shapes`: how groups of each degree share attention. `block_ranks`: size of the blocks of ranks that skip micro-batches in
    which they have no work; 0: every rank takes part in all micro-batches.
    """
    num_ranks = costs.cluster.num_ranks
    micro_batches = with_idle_ranks(placed, num_ranks, block_ranks)
    if not block_ranks:
        micro_batches = _fullest_first(micro_batches, lengths)
    layers = LayerRange(0, costs.model.num_layers)
    return StepPlan(
        step=step,
        lengths=tuple(int(length) for length in lengths),
        num_stages=1,
        ranks_per_stage=num_ranks,
        parameters=costs.parameters,
        micro_batches=tuple(
            MicroBatch(tuple(_sequence_group(group, shapes, lengths, layers) for group in groups)) for groups in micro_batches
        ),
        shard_ranks=costs.shards,
        node_ranks=costs.node_ranks,
    )


def _fullest_first(micro_batches: PlacedLayout, lengths: Sequence[int]) -> PlacedLayout:
    """Orders micro-batches by the most tokens on a rank, so that a run that does not fit fails at once.

    Any order is valid where all ranks take part in all micro-batches; where blocks skip some, the placement has chosen it.
    """
    return sorted(
        micro_batches, key=lambda groups: -max(sum(lengths[i] for i in group.members) / group.degree for group in groups)
    )


def _sequence_group(
    placed: PlacedGroup, shapes: Mapping[int, GroupShape], lengths: Sequence[int], layers: LayerRange
) -> SequenceGroup:
    shape = shapes[placed.degree] if placed.members else GroupShape(1)
    chunk = Chunk(0, _longest_first(placed.members, lengths))
    stage = StagePlan(0, (layers,), (Action("F", 0, 0), Action("B", 0, 0)))
    return SequenceGroup.of(shape, placed.positions, (chunk,), (stage,))


def _longest_first(members: Sequence[int], lengths: Sequence[int]) -> tuple[Span, ...]:
    return tuple(Span(i, 0, int(lengths[i])) for i in sorted(members, key=lambda i: (-lengths[i], i)))
