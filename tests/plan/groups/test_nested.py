"""Nested plans are valid, fit memory, are never slower than plans in which all ranks wait, and never beat the bound."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from helpers.plans.cost_models import COST_KINDS, cost_model
from helpers.plans.grouping_problems import check_layout, lognormal_lengths, plan_layout, set_partitions
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.settings import PlannerConfig, default_degrees
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.groups.placement import PlacedGroup, PlacedLayout, levels, plan_nested
from hf_longctx.plan.groups.problem import GroupingProblem
from hf_longctx.plan.planner import build_plan, plan_step
from hf_longctx.plan.predict.evaluate import evaluate_plan

CAPACITY = 400
STEP_S = 0.25  # seconds that `cost_model` adds once per step


@dataclass(frozen=True)
class Case:
    """Sequences and the ranks they run on; `block` ranks share one copy of the parameters (1: every rank has its own)."""

    lengths: tuple[int, ...]
    costs: CostModel
    degrees: tuple[int, ...]
    block: int

    @property
    def config(self) -> PlannerConfig:
        return PlannerConfig(CAPACITY, self.degrees)

    @property
    def problem(self) -> GroupingProblem:
        return GroupingProblem.build(self.lengths, self.costs, self.config)


def case(lengths: list[int] | tuple[int, ...], kind: str, num_ranks: int, block: int, method: str = "ulysses") -> Case:
    parameters = "replicated" if block == 1 else "sharded"
    costs = replace(cost_model(kind, num_ranks), method=method, parameters=parameters, shard_ranks=block)  # type: ignore[arg-type]
    degrees = default_degrees(num_ranks, 8, "ulysses") if method == "ulysses" else tuple(range(1, num_ranks + 1))
    return Case(tuple(min(length, degrees[-1] * CAPACITY) for length in lengths), costs, degrees, block)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.one_of(st.integers(8, 200), st.integers(8, 400), st.integers(8, 1600)), min_size=1, max_size=12))
    num_ranks, block = draw(st.sampled_from([(2, 1), (3, 1), (4, 1), (4, 2), (6, 1), (6, 2), (6, 3), (8, 1), (8, 2), (8, 4)]))
    return case(lengths, draw(st.sampled_from(COST_KINDS)), num_ranks, block, draw(st.sampled_from(["ulysses", "auto"])))


def finish_s(problem: GroupingProblem, placed: PlacedLayout, block: int) -> float:
    """Seconds until the last rank is done, by definition: a group waits for its ranks, and so does a block."""
    clocks = [0.0] * problem.num_ranks
    for groups in placed:
        for group in groups:
            ranks = group.positions
            end = max(clocks[rank] for rank in ranks) + problem.group_seconds((group.degree, group.members))
            for rank in ranks:
                clocks[rank] = end
        clocks = [max(clocks[rank // block * block : rank // block * block + block]) for rank in range(problem.num_ranks)]
    return max(clocks)


@pytest.mark.wide
@settings(max_examples=100)
@given(cases())
def test_nested_groups_are_a_valid_plan_that_takes_as_long_as_its_groups(found: Case) -> None:
    problem, num_ranks = found.problem, found.costs.cluster.num_ranks
    groups = plan_nested(problem, found.costs.cluster.ranks_per_node)
    if not groups:
        return
    placed = levels(groups, num_ranks)
    assert all(group.first % group.degree == 0 and group.degree % found.block == 0 for group in groups)
    plan = validate_plan(build_plan(0, found.lengths, placed, problem.shapes, found.costs, problem.block_ranks))
    check_layout(plan_layout(plan), found.lengths, found.degrees, num_ranks, CAPACITY)
    run = evaluate_plan(plan, found.costs)
    assert run.step_s - STEP_S == pytest.approx(finish_s(problem, placed, found.block), rel=1e-9)


@pytest.mark.wide
@settings(max_examples=40)
@given(cases(), st.randoms(use_true_random=False))
def test_a_step_is_no_slower_than_without_the_switch_and_not_below_its_bound(found: Case, draw: random.Random) -> None:
    plan = plan_step(0, found.lengths, found.costs, found.config)
    off = plan_step(0, found.lengths, found.costs, replace(found.config, nested=False))
    assert plan.estimate.step_s <= off.estimate.step_s * (1 + 1e-9)
    for one in (plan, off):
        assert one.estimate.lower_bound_s <= one.estimate.step_s * (1 + 1e-9)
        check_layout(plan_layout(one), found.lengths, found.degrees, found.costs.cluster.num_ranks, CAPACITY)
    shuffled = list(found.lengths)
    draw.shuffle(shuffled)
    again = plan_step(0, shuffled, found.costs, found.config)
    assert again.estimate.step_s == pytest.approx(plan.estimate.step_s, rel=1e-9)


# lengths for which equal groups of a micro-batch, on other ranks, let other groups run beside each other later
ORDERS = {
    "replicated": ([155, 589, 34, 394, 779, 215, 42], "exchange", 5, 1, False),
    "copies of shards": ([256, 215, 50, 195, 180, 73, 157, 171, 373, 140, 67, 146], "fixed", 4, 2, True),
    "many degrees": ([741, 266, 202, 1452, 210, 358, 59, 88, 914, 74, 824, 10, 507], "fixed", 8, 2, True),
}


@pytest.mark.daily("replicated")
@pytest.mark.parametrize("name", ORDERS)
def test_the_prediction_does_not_depend_on_the_order_of_sequences(name: str) -> None:
    lengths, kind, num_ranks, block, nested = ORDERS[name]
    found = case(lengths, kind, num_ranks, block, "ring")
    config = replace(found.config, nested=nested)
    shuffles = [random.Random(seed).sample(lengths, len(lengths)) for seed in range(6)]
    seconds = [plan_step(0, some, found.costs, config).estimate.step_s for some in shuffles]
    assert seconds == pytest.approx([seconds[0]] * 6, rel=1e-9)


def schedules(problem: GroupingProblem) -> Iterator[list[PlacedGroup]]:
    """Every way to put all sequences into groups that fit, on every aligned set of ranks, in every order."""
    for parts in set_partitions(tuple(range(len(problem.lengths)))):
        options = [
            [
                PlacedGroup(first, degree, part)
                for degree in problem.degrees
                if sum(problem.lengths[i] for i in part) <= degree * problem.capacity
                for first in range(0, problem.num_ranks - degree + 1, degree)
            ]
            for part in parts
        ]
        for chosen in itertools.product(*options):
            yield from map(list, itertools.permutations(chosen))


def least_seconds(found: Case) -> float:
    """Least seconds of a nested schedule, by plain enumeration."""
    problem, best_s = found.problem, math.inf
    seconds = [[float(s) for s in row] for row in problem.seconds]
    for groups in schedules(problem):
        clocks = [0.0] * problem.num_ranks
        for group in groups:
            k = problem.degrees.index(group.degree)
            end = max(clocks[rank] for rank in group.positions) + problem.group_s[k] + sum(seconds[k][i] for i in group.members)
            for rank in group.positions:
                clocks[rank] = end
        best_s = min(best_s, max(clocks))
    return best_s


@pytest.mark.wide("3-4-attention", "3-4-exchange", "3-4-fixed", "3-4-linear", "3-4-windows")
@pytest.mark.parametrize("kind", COST_KINDS)
@pytest.mark.parametrize("num_ranks,count", [(2, 4), (4, 3), (3, 4)])
def test_no_schedule_is_faster_than_the_bound(kind: str, num_ranks: int, count: int) -> None:
    for seed in range(6):
        found = case(lognormal_lengths(seed, count, 1600, median=250.0), kind, num_ranks, 1)
        best_s = least_seconds(found)
        bound_s = found.problem.lower_bound_s()
        assert bound_s <= best_s * (1 + 1e-9)
        plan = plan_step(0, found.lengths, found.costs, found.config)
        assert plan.estimate.step_s - STEP_S >= best_s * (1 - 1e-9)


def test_the_bound_lets_ranks_go_on_before_others_also_with_the_switch_off() -> None:
    # rank 0 runs the long sequence; rank 1 fills up with short ones and goes on with the rest of them meanwhile
    lengths = [400, *[40] * 18]
    found = replace(case(lengths, "attention", 2, 1), degrees=(1,))
    config = replace(found.config, nested=False)
    problem = GroupingProblem.build(lengths, found.costs, config)
    placed = [
        [PlacedGroup(0, 1, (0,)), PlacedGroup(1, 1, tuple(range(1, 11)))],
        [PlacedGroup(1, 1, tuple(range(11, 19)))],
    ]
    run = evaluate_plan(validate_plan(build_plan(0, lengths, placed, problem.shapes, found.costs)), found.costs)
    assert problem.lower_bound_s() + STEP_S <= run.step_s
    # where everyone waits for the long sequence, the rest comes behind it
    waiting = replace(found.costs, parameters="sharded", shard_ranks=2)
    assert GroupingProblem.build(lengths, waiting, config).lower_bound_s() + STEP_S > run.step_s
