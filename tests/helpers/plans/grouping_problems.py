"""Grouping problems: FlexSP's and random ones, and the least seconds of small ones by enumeration."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from helpers.plans.cost_models import COST_KINDS, cost_model
from helpers.plans.pipeline_plans import stage_ranges
from hypothesis import strategies as st

from hf_longctx.plan.core.settings import PlannerConfig
from hf_longctx.plan.core.types import GroupShape, StepPlan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.groups.problem import GroupingProblem, Layout
from hf_longctx.plan.planner import plan_step

_PROBLEMS = Path(__file__).parents[2] / "plan" / "microbatch_problems.json"

# numbers that FlexSP's artefact publishes for GPT-7B on A100s of 40 GB with 8 per node (milliseconds, MB, GB/s per rank)
_MS_PER_PAIR, _MS_PER_TOKEN, _MS_PER_GROUP = 5.128e-6, 0.1839576, 629.3563
_MB_PER_TOKEN, _BUDGET_MB = 4.480441895, 30 * 1024
_GI_PARAMETERS = {192: 7.1174468994, 384: 7.8498687744}  # by thousands of positions, which are learned
_EXCHANGED_MB_PER_TOKEN = 8 * 32 * 4096 * 2 / 2**20
_GB_PER_S = {2: 119.54, 4: 104.07, 8: 96.5, 16: 10.33, 32: 5.94, 64: 4.87}
_DEGREES = (1, *_GB_PER_S)

# lengths and kinds of costs of problems that can be enumerated
few_lengths = st.lists(st.integers(4, 1600), min_size=1, max_size=5)
kinds = st.sampled_from(COST_KINDS)


def flexsp_problem(lengths: Sequence[int], limit_ktokens: int = 384, num_ranks: int = 64) -> GroupingProblem:
    """FlexSP's cost model of GPT-7B (arXiv 2412.01523, section 4.1, ZeRO-3, 16 bytes per parameter) on up to 64 GPUs."""
    degrees = tuple(degree for degree in _DEGREES if degree <= num_ranks)
    tokens = np.array(lengths, dtype=np.float64)
    rank_ms = [
        _MS_PER_PAIR * tokens**2 + (_MS_PER_TOKEN + (_EXCHANGED_MB_PER_TOKEN / _GB_PER_S[d] if d > 1 else 0.0)) * tokens
        for d in degrees
    ]
    return GroupingProblem(
        lengths=tuple(lengths),
        num_ranks=num_ranks,
        capacity=int((_BUDGET_MB - _GI_PARAMETERS[limit_ktokens] * 16 * 1024 / num_ranks) / _MB_PER_TOKEN),
        degrees=degrees,
        shapes={degree: GroupShape(degree, degree) for degree in degrees},
        seconds=np.stack([ms / degree / 1000 for ms, degree in zip(rank_ms, degrees, strict=True)]),
        group_s=(_MS_PER_GROUP / 1000,) * len(degrees),
    )


def flexsp_problems() -> Iterator[tuple[str, GroupingProblem, float, float]]:
    """18 micro-batches of 64 GPUs: name, problem, seconds that no grouping beats, and the fastest that MILP solvers found.

    Lengths are drawn from log-normal distributions and Wikipedia, sorted and cut by FlexSP's blaster. The bound is the
    configuration LP's, searched with a tolerance of 0.4 %; both seconds include the fixed cost of a group.
    """
    for case in json.loads(_PROBLEMS.read_text()):
        problem = flexsp_problem(case["lengths"], case["limit_ktokens"])
        yield case["problem"], problem, case["bound_ms"] / 1000, case["best_milp_ms"] / 1000


def plan_stages(step: int, lengths: Sequence[int], costs: CostModel, num_stages: int, config: PlannerConfig) -> StepPlan:
    """`plan_step` on `num_stages` pipeline stages; layers are balanced over them unless the configuration says otherwise."""
    return plan_step(step, lengths, costs, replace(config, stages=config.stages or stage_ranges(costs.model, num_stages)))


def lognormal_lengths(seed: int, count: int, longest: int, median: float = 300.0, sigma: float = 1.2) -> tuple[int, ...]:
    """Skewed lengths between 8 and `longest` tokens."""
    draw = random.Random(seed)
    return tuple(min(longest, max(8, round(draw.lognormvariate(math.log(median), sigma)))) for _ in range(count))


def small_problem(lengths: list[int], kind: str = "attention", capacity: int = 400, num_ranks: int = 4) -> GroupingProblem:
    """A problem on a few ranks, in groups of one, two, four or eight."""
    degrees = tuple(degree for degree in (1, 2, 4, 8) if degree <= num_ranks)
    return GroupingProblem.build(lengths, cost_model(kind, num_ranks), PlannerConfig(capacity, degrees))


@st.composite
def odd_problems(draw: st.DrawFn, most: int = 7, max_ranks: int = 8, longest_first: bool = True) -> GroupingProblem:
    """Small problems of every kind.

    They have any degrees, memory that just suffices, equal lengths, costs from 1e-9 to 1e6 seconds, and maybe no fixed costs. A
    longer sequence never costs less, and a larger group need not be faster.
    """
    num_ranks = draw(st.sampled_from([ranks for ranks in (1, 3, 5, 7, 8) if ranks <= max_ranks]))
    degrees = tuple(sorted(draw(st.sets(st.integers(1, num_ranks), min_size=1, max_size=4))))
    capacity = draw(st.sampled_from([1, 7, 100]))
    limits = [degree * capacity for degree in degrees]
    length = st.one_of(st.integers(1, limits[-1]), st.integers(1, capacity), st.sampled_from(limits))
    lengths = draw(st.lists(length, min_size=1, max_size=most))
    if longest_first:
        lengths.sort(reverse=True)
    scale_s = draw(st.sampled_from([1e-9, 1e-3, 1.0, 1e6]))
    # costs from equal for all sequences to a ratio of 1e12
    added_s = scale_s * (np.array(lengths) / limits[-1]) ** draw(st.sampled_from([0.0, 1.0, 2.0, 4.0]))
    slowdowns = [draw(st.sampled_from([1.0, 1.1, 1.7])) / degree for degree in degrees]
    fixed_s = scale_s * draw(st.sampled_from([0.0, 1e-3, 0.5]))
    return GroupingProblem(
        lengths=tuple(lengths),
        num_ranks=num_ranks,
        capacity=capacity,
        degrees=degrees,
        shapes={degree: GroupShape(degree) for degree in degrees},
        seconds=np.stack([added_s * slowdown for slowdown in slowdowns]),
        group_s=tuple(fixed_s * draw(st.sampled_from([1.0, 1.5])) for _ in degrees),
    )


def check_problem_layout(layout: Layout, problem: GroupingProblem) -> None:
    """Asserts what `check_layout` does, with the problem's own limits."""
    check_layout(layout, problem.lengths, problem.degrees, problem.num_ranks, problem.capacity)


def set_partitions(items: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    """Every partition of `items` into non-empty parts."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for size in range(len(rest) + 1):
        for others in itertools.combinations(rest, size):
            left = tuple(item for item in rest if item not in others)
            for parts in set_partitions(left):
                yield [(first, *others), *parts]


def least_seconds(lengths: Sequence[int], costs: CostModel, degrees: Sequence[int], num_ranks: int, capacity: int) -> float:
    """Least seconds of a step by plain enumeration, straight from the definition, without the planner's code.

    It tries all partitions into micro-batches, for each of these all partitions into groups, and all degrees that fit the ranks.
    """
    added_s = {degree: costs.sequences_s(list(lengths), GroupShape(degree, degree)) for degree in degrees}
    # for every number of groups, all degrees that fit the ranks
    fitting = [
        [chosen for chosen in itertools.product(degrees, repeat=count) if sum(chosen) <= num_ranks]
        for count in range(min(num_ranks, len(lengths)) + 1)
    ]

    @cache
    def group_seconds(part: tuple[int, ...], degree: int) -> float:
        if sum(lengths[i] for i in part) > degree * capacity:
            return math.inf
        return costs.group_s(GroupShape(degree, degree)) + sum(float(added_s[degree][i]) for i in part)

    @cache
    def micro_batch_seconds(members: tuple[int, ...]) -> float:
        return min(
            max(group_seconds(part, degree) for part, degree in zip(parts, chosen, strict=True))
            for parts in set_partitions(members)
            if len(parts) < len(fitting)
            for chosen in fitting[len(parts)]
        )

    everything = tuple(range(len(lengths)))
    return min(sum(micro_batch_seconds(part) for part in parts) for parts in set_partitions(everything))


def least_micro_batch_seconds(problem: GroupingProblem) -> float:
    """Least seconds of one micro-batch with all sequences, by plain enumeration; infinite if they do not fit into one."""
    best_s = math.inf
    for parts in set_partitions(tuple(range(len(problem.lengths)))):
        options = [
            [
                (d, problem.group_s[k] + sum(problem.seconds[k][i] for i in part))
                for k, d in enumerate(problem.degrees)
                if sum(problem.lengths[i] for i in part) <= d * problem.capacity
            ]
            for part in parts
        ]
        for chosen in itertools.product(*options):
            if sum(degree for degree, _ in chosen) <= problem.num_ranks:
                best_s = min(best_s, float(max(seconds for _, seconds in chosen)))
    return best_s


def least_step_seconds(problem: GroupingProblem) -> float:
    """Least seconds of a step by plain enumeration, like `least_seconds` but for any problem of few sequences."""

    @cache
    def group_ends(part: tuple[int, ...]) -> list[tuple[int, float]]:
        return [
            (d, problem.group_s[k] + float(sum(problem.seconds[k][i] for i in part)))
            for k, d in enumerate(problem.degrees)
            if sum(problem.lengths[i] for i in part) <= d * problem.capacity
        ]

    @cache
    def micro_batch_seconds(members: tuple[int, ...]) -> float:
        return min(
            (
                max(seconds for _, seconds in chosen)
                for parts in set_partitions(members)
                if len(parts) * problem.degrees[0] <= problem.num_ranks
                for chosen in itertools.product(*map(group_ends, parts))
                if sum(degree for degree, _ in chosen) <= problem.num_ranks
            ),
            default=math.inf,
        )

    everything = tuple(range(len(problem.lengths)))
    return min(sum(micro_batch_seconds(part) for part in parts) for parts in set_partitions(everything))


def layout_seconds(layout: Layout, lengths: Sequence[int], costs: CostModel) -> float:
    """Seconds of a layout from the definition: the slowest group of every micro-batch, without groups that have no sequences."""
    return sum(
        max(
            costs.group_s(GroupShape(degree, degree))
            + sum(float(costs.sequences_s([lengths[i]], GroupShape(degree, degree))[0]) for i in members)
            for degree, members in groups
            if members
        )
        for groups in layout
    )


def plan_layout(plan: StepPlan) -> Layout:
    """The layout of a plan of one stage, without groups that run the dummy chunk."""
    return [
        [
            (group.degree, tuple(span.sequence for chunk in group.chunks for span in chunk.spans))
            for group in micro_batch.groups
            if group.num_tokens
        ]
        for micro_batch in plan.micro_batches
    ]


def check_layout(layout: Layout, lengths: Sequence[int], degrees: Sequence[int], num_ranks: int, capacity: int) -> None:
    """Asserts that a layout holds every sequence once, in groups that fit the ranks and their memory."""
    placed = sorted(i for groups in layout for _, members in groups for i in members)
    assert placed == list(range(len(lengths)))
    for groups in layout:
        assert sum(degree for degree, _ in groups) <= num_ranks
        assert any(members for _, members in groups)
        for degree, members in groups:
            assert degree in degrees
            assert sum(lengths[i] for i in members) <= degree * capacity


@st.composite
def problems_and_layouts(draw: st.DrawFn) -> tuple[GroupingProblem, Layout]:
    """A problem and a random layout of it: each sequence may join the latest group, start another, or start a micro-batch."""
    problem = draw(odd_problems(most=12))
    layout: Layout = []
    for i in draw(st.permutations(range(len(problem.lengths)))):
        degree = draw(st.sampled_from([d for d in problem.degrees if problem.lengths[i] <= d * problem.capacity]))
        action = draw(st.sampled_from(["join", "beside", "new"]))
        if layout and action == "join" and problem.fits((layout[-1][-1][0], (*layout[-1][-1][1], i))):
            last = layout[-1][-1]
            layout[-1][-1] = (last[0], (*last[1], i))
        elif layout and action != "new" and sum(d for d, _ in layout[-1]) + degree <= problem.num_ranks:
            layout[-1].append((degree, (i,)))
        else:
            layout.append([(degree, (i,))])
    return problem, layout


FIRST_DEGREES = (1, 2, 4)


cost_kinds = st.sampled_from(COST_KINDS)


lengths_of_five = st.lists(st.integers(4, 1600), min_size=1, max_size=5)


def priced_problem(
    lengths: list[int] | tuple[int, ...],
    kind: str = "attention",
    num_ranks: int = 4,
    capacity: int = 400,
    degrees: tuple[int, ...] = FIRST_DEGREES,
) -> GroupingProblem:
    """The problem of these lengths under the cost model in which `kind` dominates."""
    return GroupingProblem.build(lengths, cost_model(kind, num_ranks), PlannerConfig(capacity, degrees))
