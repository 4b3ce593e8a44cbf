"""Promises of `plan_step`: a valid plan of every sequence, as good as it says, and the same one every time."""

from __future__ import annotations

import dataclasses
import gc
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from helpers.measures.calls import counted_calls
from helpers.plans.cost_models import COST_KINDS, cost_model
from helpers.plans.grouping_problems import (
    check_layout,
    layout_seconds,
    least_seconds,
    least_step_seconds,
    lognormal_lengths,
    plan_layout,
    plan_stages,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan import planner
from hf_longctx.plan.core.serialize import plan_digest, plan_from_json, plan_to_json
from hf_longctx.plan.core.settings import ActivationBudget, ClusterSpec, PlannerConfig, Solver, default_degrees
from hf_longctx.plan.core.types import PARAMETERS, GroupShape, StepPlan
from hf_longctx.plan.core.validate import PlanError, validate_plan
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients
from hf_longctx.plan.cost.profiles import read_profile
from hf_longctx.plan.groups.flexsp import GroupedStep
from hf_longctx.plan.groups.placement import place_layout, renumber
from hf_longctx.plan.groups.problem import GroupingProblem, Layout
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.pipeline.stages import balanced_ranges
from hf_longctx.plan.planner import build_plan, plan_step
from hf_longctx.plan.predict.evaluate import evaluate_plan, state_bytes
from hf_longctx.plan.predict.planning import Planning

DEGREES = (1, 2, 4)
STEP_S = 0.25  # seconds that `cost_model` adds once per step
kinds = st.sampled_from(COST_KINDS)
skewed = st.one_of(st.integers(8, 200), st.integers(8, 400), st.integers(8, 1600))
WORLDS = (1, 2, 3, 4, 5, 6, 8)


def plan(
    lengths: list[int] | tuple[int, ...],
    kind: str = "attention",
    num_ranks: int = 4,
    capacity: int = 400,
    solver: Solver = "auto",
    static_degree: int = 0,
    parameters: str = "sharded",
) -> StepPlan:
    config = PlannerConfig(capacity, default_degrees(num_ranks, 8, "ulysses"), solver, static_degree)
    costs = dataclasses.replace(cost_model(kind, num_ranks), parameters=parameters)  # type: ignore[arg-type]
    costs = dataclasses.replace(costs, model=dataclasses.replace(costs.model, node_ranks=num_ranks // 2))
    return plan_step(3, lengths, costs, config)


def check_plan(found: StepPlan, lengths: list[int] | tuple[int, ...], costs: CostModel, capacity: int) -> None:
    """Asserts what holds for every plan of whole sequences, whichever solver made it."""
    num_ranks = costs.cluster.num_ranks
    validate_plan(found)
    assert found.lengths == tuple(lengths)
    assert (found.step, found.num_stages, found.ranks_per_stage) == (3, 1, num_ranks)
    check_layout(plan_layout(found), lengths, default_degrees(num_ranks, 8, "ulysses"), num_ranks, capacity)
    for micro_batch in found.micro_batches:
        for group in micro_batch.groups:
            degree, start = group.degree, group.positions[0]
            assert group.positions == tuple(range(start, start + degree))
            assert start % degree == 0
            assert degree == 1 or group.num_tokens > 0
            assert group.stages[0].num_layers == costs.model.num_layers
    run = evaluate_plan(found, dataclasses.replace(costs, parameters=found.parameters))
    assert found.estimate.step_s == run.step_s
    assert found.estimate.peak_bytes == max(run.peak_bytes)
    assert found.estimate.lower_bound_s <= found.estimate.step_s * (1 + 1e-9)
    assert plan_from_json(plan_to_json(found)) == found


@pytest.mark.wide
@settings(derandomize=True, deadline=None, max_examples=80)
@given(
    st.lists(skewed, min_size=1, max_size=14),
    kinds,
    st.sampled_from(WORLDS),
    st.sampled_from([400, 1000]),
    st.sampled_from(["auto", "greedy", "static"]),
    st.sampled_from(PARAMETERS),
)
def test_every_plan_is_valid_aligned_within_memory_and_above_the_bound(
    lengths: list[int], kind: str, num_ranks: int, capacity: int, solver: Solver, parameters: str
) -> None:
    lengths = [min(length, default_degrees(num_ranks, 8, "ulysses")[-1] * capacity) for length in lengths]
    found = plan(lengths, kind, num_ranks, capacity, solver, parameters=parameters)
    check_plan(found, lengths, cost_model(kind, num_ranks), capacity)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(skewed, min_size=1, max_size=5), kinds)
def test_a_small_step_is_planned_as_well_as_brute_force(lengths: list[int], kind: str) -> None:
    found, costs = plan(lengths, kind), cost_model(kind, 4)
    assert found.estimate.solver == "exact"
    best_s = least_seconds(lengths, costs, DEGREES, 4, 400)
    assert layout_seconds(plan_layout(found), lengths, costs) == pytest.approx(best_s, rel=1e-9)
    # with sharded parameters all ranks wait for the slowest group, so the prediction is the same sum
    assert found.estimate.step_s == pytest.approx(best_s + STEP_S, rel=1e-9)


@pytest.mark.parametrize("kind", COST_KINDS)
@pytest.mark.parametrize("num_ranks", [3, 5, 6])
def test_odd_worlds_are_planned_as_well_as_brute_force(kind: str, num_ranks: int) -> None:
    degrees = default_degrees(num_ranks, 8, "ulysses")
    for seed in range(2):
        lengths = lognormal_lengths(seed, 5, degrees[-1] * 400)
        found = plan(lengths, kind, num_ranks)
        check_plan(found, lengths, cost_model(kind, num_ranks), 400)
        best_s = least_seconds(lengths, cost_model(kind, num_ranks), degrees, num_ranks, 400)
        assert found.estimate.step_s == pytest.approx(best_s + STEP_S, rel=1e-9)


@pytest.mark.wide
@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.lists(skewed, min_size=1, max_size=12), kinds, st.sampled_from(["auto", "greedy"]), st.sampled_from([400, 1000]))
def test_no_plan_is_predicted_slower_than_a_static_one(lengths: list[int], kind: str, solver: Solver, capacity: int) -> None:
    found = plan(lengths, kind, capacity=capacity, solver=solver)
    for degree in DEGREES:
        if max(lengths) <= degree * capacity:
            static = plan(lengths, kind, capacity=capacity, solver="static", static_degree=degree)
            assert found.estimate.step_s <= static.estimate.step_s * (1 + 1e-9)


@pytest.mark.wide(
    "auto-6-attention",
    "auto-6-fixed",
    "auto-6-windows",
    "greedy-6-attention",
    "greedy-6-fixed",
    "greedy-6-windows",
    "auto-6-exchange",
    "greedy-6-exchange",
)
@pytest.mark.parametrize("kind", COST_KINDS)
@pytest.mark.parametrize("num_ranks", [4, 6])
@pytest.mark.parametrize("solver", ["auto", "greedy"])
def test_replicated_plans_are_not_predicted_slower_than_static_ones_either(kind: str, num_ranks: int, solver: Solver) -> None:
    for seed in range(4):
        lengths = lognormal_lengths(seed, 9, default_degrees(num_ranks, 8, "ulysses")[-1] * 400)
        found = plan(lengths, kind, num_ranks, solver=solver, parameters="replicated")
        for degree in default_degrees(num_ranks, 8, "ulysses"):
            if max(lengths) <= degree * 400:
                static = plan(lengths, kind, num_ranks, solver="static", static_degree=degree, parameters="replicated")
                assert found.estimate.step_s <= static.estimate.step_s * (1 + 1e-9)


@pytest.mark.wide
@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.lists(skewed, min_size=2, max_size=12), kinds, st.randoms(use_true_random=False))
def test_the_prediction_does_not_depend_on_the_order_of_sequences(lengths: list[int], kind: str, draw: random.Random) -> None:
    shuffled = list(lengths)
    draw.shuffle(shuffled)
    assert plan(shuffled, kind).estimate.step_s == pytest.approx(plan(lengths, kind).estimate.step_s, rel=1e-9)


@pytest.mark.parametrize("kind", COST_KINDS)
@pytest.mark.parametrize("count", [1, 6, 30])
def test_equal_arguments_give_equal_plans(kind: str, count: int) -> None:
    lengths = lognormal_lengths(count, count, 1600)
    first, second = plan(lengths, kind), plan(list(lengths), kind)
    assert plan_digest(first) == plan_digest(second)
    assert dataclasses.replace(first, estimate=second.estimate) == second


@pytest.mark.parametrize("kind", COST_KINDS)
@pytest.mark.parametrize("static_degree", [0, 1, 2, 4])
def test_the_static_solver_uses_one_degree(kind: str, static_degree: int) -> None:
    lengths = lognormal_lengths(2, 11, max(1, static_degree) * 400)
    found = plan(lengths, kind, solver="static", static_degree=static_degree)
    used = {degree for groups in plan_layout(found) for degree, _ in groups}
    assert len(used) == 1
    assert used == {static_degree} or static_degree == 0
    assert found.estimate.solver == "static"


@pytest.mark.parametrize("kind", COST_KINDS)
@pytest.mark.parametrize("solver", ["auto", "greedy", "static"])
def test_the_micro_batch_with_the_fullest_group_comes_first(kind: str, solver: Solver) -> None:
    found = plan(lognormal_lengths(9, 14, 1600), kind, capacity=400, solver=solver)
    heaviest = [max(group.num_tokens / group.degree for group in mb.groups) for mb in found.micro_batches]
    assert heaviest == sorted(heaviest, reverse=True)
    assert len(heaviest) > 1


def test_the_micro_batch_that_fills_a_rank_most_comes_first() -> None:
    """A run that does not fit memory must fail at once, and memory is tokens per rank, not tokens per group."""
    # 1000 tokens on four ranks are 250 each; a sequence of 400 on one rank is the peak
    found = plan([1000, 400, 400, 400, 400], "exchange", capacity=400)
    assert sorted(micro_batch.layout for micro_batch in found.micro_batches) == ["<1,1,1,1>", "<4>"]
    most = [max(-(-group.num_tokens // group.degree) for group in micro_batch.groups) for micro_batch in found.micro_batches]
    assert most[0] == max(most)


def test_sequences_of_a_pack_stand_longest_first() -> None:
    found = plan([30, 10, 20, 10], "fixed", num_ranks=1)
    [group] = found.micro_batches[0].groups
    assert [span.sequence for span in group.chunks[0].spans] == [0, 2, 1, 3]


@pytest.mark.quick
@pytest.mark.parametrize("solver", ["auto", "greedy", "static"])
@pytest.mark.parametrize("num_ranks", WORLDS)
def test_one_sequence_is_planned_in_every_world(num_ranks: int, solver: Solver) -> None:
    for length in (1, 8, 399, 400):
        found = plan([length], "attention", num_ranks, solver=solver)
        check_plan(found, [length], cost_model("attention", num_ranks), 400)
        [micro_batch] = found.micro_batches
        assert micro_batch.num_tokens == length


@pytest.mark.parametrize("solver", ["auto", "greedy"])
def test_one_rank_packs_as_much_as_it_holds(solver: Solver) -> None:
    found = plan([300, 100, 250, 150, 400], "fixed", num_ranks=1, solver=solver)
    check_plan(found, [300, 100, 250, 150, 400], cost_model("fixed", 1), 400)
    # 1200 tokens fit three micro-batches of 400: 400, 300 + 100, 250 + 150
    assert [micro_batch.num_tokens for micro_batch in found.micro_batches] == [400, 400, 400]


def test_a_sequence_that_fills_all_ranks_takes_them_all() -> None:
    found = plan([1600, 8], "attention")
    assert found.micro_batches[0].layout == "<4>"
    assert len(found.micro_batches) == 2


@pytest.mark.parametrize("solver", ["auto", "greedy", "static"])
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_a_sequence_too_long_is_refused_with_the_remedy(num_ranks: int, solver: Solver) -> None:
    limit = 400 * num_ranks
    with pytest.raises(
        ValueError, match=f"sequence 1 has {limit + 1} tokens.*holds {limit}.*raise tokens_per_rank.*truncate or split"
    ):
        plan([5, limit + 1], num_ranks=num_ranks, solver=solver)


def test_a_static_degree_too_small_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"401 tokens does not fit a group of 1 ranks.*raise static_degree or tokens_per_rank"):
        plan([401], solver="static", static_degree=1)


def test_degrees_that_the_world_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match="degree 8 needs 8 ranks, but the run has 4"):
        plan_step(0, [10], cost_model("attention", 4), PlannerConfig(400, (1, 8)))


def test_a_step_without_sequences_is_a_plan_of_dummy_chunks() -> None:
    found = plan([])
    validate_plan(found)
    [micro_batch] = found.micro_batches
    assert micro_batch.layout == "<1,1,1,1>"
    assert micro_batch.num_tokens == 0


@pytest.mark.parametrize("num_ranks", [3, 4, 5])
def test_ranks_without_work_get_the_dummy_chunk(num_ranks: int) -> None:
    [micro_batch] = plan([300], "exchange", num_ranks, solver="static", static_degree=2).micro_batches
    assert micro_batch.layout == "<" + ",".join(["2"] + ["1"] * (num_ranks - 2)) + ">"
    assert [group.num_tokens for group in micro_batch.groups] == [300] + [0] * (num_ranks - 2)


def test_degrees_without_one_leave_single_ranks_to_the_dummy_chunk() -> None:
    config = PlannerConfig(400, (2, 4))
    found = plan_step(3, [700, 90, 30], dataclasses.replace(cost_model("exchange", 5), parameters="sharded"), config)
    validate_plan(found)
    for group in (group for micro_batch in found.micro_batches for group in micro_batch.groups):
        assert (group.degree == 1) == (group.num_tokens == 0)


def test_the_estimate_says_where_its_numbers_come_from() -> None:
    found = plan([100, 200, 30])
    assert found.estimate.cost_source == "test"
    assert found.estimate.solve_s > 0
    assert found.estimate.solver == "exact"
    assert plan(lognormal_lengths(0, 30, 1600)).estimate.solver == "greedy"
    assert plan([100, 200, 30], solver="greedy").estimate.solver == "greedy"


@pytest.mark.parametrize("parameters", PARAMETERS)
def test_parameters_reach_the_plan(parameters: str) -> None:
    assert plan([100], parameters=parameters).parameters == parameters


def test_a_hundred_sequences_are_planned_in_few_calls() -> None:
    # the planner has to stay ahead of steps that take seconds on a small machine; 94,000 calls take it a tenth of a second
    _, num_calls = counted_calls(lambda: plan(lognormal_lengths(1, 100, 3200), "attention", 8))
    assert num_calls < 400_000


def test_a_layout_that_loses_a_sequence_never_leaves_the_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "choose_layout", lambda problem, config: ([[(1, (0,))]], "broken"))
    with pytest.raises(PlanError, match="sequence 1: tokens 0 to 100 are never planned"):
        plan([200, 100])


@pytest.mark.wide
@given(st.lists(skewed, min_size=1, max_size=12), kinds, st.sampled_from(WORLDS))
@settings(max_examples=40)
def test_one_micro_batch_holds_everything_at_a_cost_near_the_best(lengths: list[int], kind: str, num_ranks: int) -> None:
    config = PlannerConfig(sum(lengths), default_degrees(num_ranks, 8), one_micro_batch=True)
    costs = cost_model(kind, num_ranks)
    found = plan_step(3, lengths, costs, config)
    check_plan(found, lengths, costs, sum(lengths))
    assert len(plan_layout(found)) == 1
    # one group size for all, packed longest first, is among what it chose from
    same = dataclasses.replace(config, solver="static")
    assert found.estimate.step_s <= plan_step(3, lengths, costs, same).estimate.step_s * (1 + 1e-9)
    assert len({degree for degree, part in plan_layout(plan_step(3, lengths, costs, same))[0] if part}) == 1


def test_one_micro_batch_that_memory_does_not_hold_is_refused_with_the_numbers() -> None:
    config = PlannerConfig(100, (1, 2, 4), one_micro_batch=True)
    with pytest.raises(
        ValueError, match=r"450 tokens in 3 sequences \(the longest has 150\) do not fit one micro-batch on 4 ranks"
    ):
        plan_step(3, [150, 150, 150], cost_model("attention", 4), config)


def test_groups_start_at_a_multiple_of_their_degree_whatever_their_methods() -> None:
    # two nodes of eight: the cost model takes a ring of eight to stay inside one
    layout: Layout = [[(2, (2,)), (4, (1,)), (8, (0,)), (2, (3,))]]
    shapes = {8: GroupShape(8), 4: GroupShape(4, 4), 2: GroupShape(2)}
    placed = place_layout(layout, 16, 8, node_aligned=False)
    plan = build_plan(0, [80, 40, 20, 10], placed, shapes, cost_model(COST_KINDS[0], 16))
    assert all(group.positions[0] % group.degree == 0 for group in plan.micro_batches[0].groups)


@settings(derandomize=True, deadline=None, max_examples=12)
@given(st.lists(skewed, min_size=1, max_size=14), kinds, st.sampled_from(WORLDS), st.sampled_from(["lp", "milp"]), st.booleans())
def test_programs_never_lose_to_greedy(lengths: list[int], kind: str, num_ranks: int, solver: Solver, at_once: bool) -> None:
    lengths = [min(length, default_degrees(num_ranks, 8)[-1] * 400) for length in lengths]
    capacity = sum(lengths) if at_once else 400
    config = PlannerConfig(
        capacity, default_degrees(num_ranks, 8), solver, 0, 2, one_micro_batch=at_once, solver_time_limit_s=0.4
    )
    costs = dataclasses.replace(cost_model(kind, num_ranks), parameters="sharded")
    found = plan_step(3, lengths, costs, config)
    check_plan(found, lengths, costs, capacity)
    greedy = plan_step(3, lengths, costs, dataclasses.replace(config, solver="greedy"))
    assert found.estimate.step_s <= greedy.estimate.step_s * (1 + 1e-9)
    assert found.estimate.solver.split()[0] == solver


@pytest.mark.parametrize("solver", ["lp", "milp"])
def test_the_estimate_says_how_much_of_the_plan_is_greedys(solver: Solver, monkeypatch: pytest.MonkeyPatch) -> None:
    layout: Layout = [[(2, (0,))], [(1, (1,)), (1, (2,))]]
    for num_fallbacks, name in [(0, solver), (1, f"{solver} (1 of 2 micro-batches by greedy)")]:
        monkeypatch.setattr(planner, f"plan_{solver}", lambda *_, left=num_fallbacks: GroupedStep(layout, left))
        assert plan([300, 40, 30], solver=solver).estimate.solver == name


@dataclasses.dataclass(frozen=True)
class StepCase:
    """Arguments of `plan_step` for few sequences: sharded or replicated parameters, degrees of any size."""

    lengths: tuple[int, ...]
    costs: CostModel
    config: PlannerConfig

    @property
    def problem(self) -> GroupingProblem:
        return GroupingProblem.build(self.lengths, self.costs, self.config)

    def plan(self, lengths: Sequence[int] | None = None, **changes: Any) -> StepPlan:
        config = dataclasses.replace(self.config, **changes)
        return plan_step(3, self.lengths if lengths is None else lengths, self.costs, config)


@st.composite
def step_cases(draw: st.DrawFn, most: int = 12, worlds: Sequence[int] = (1, 3, 4, 5, 7, 8)) -> StepCase:
    num_ranks = draw(st.sampled_from(worlds))
    chosen = draw(st.sets(st.integers(1, num_ranks), min_size=1, max_size=3))
    degrees = tuple(sorted(chosen)) if draw(st.booleans()) else default_degrees(num_ranks, 8)
    parameters = draw(st.sampled_from(["sharded", "replicated"]))
    capacity = draw(st.sampled_from([100, 400]))
    longest = degrees[-1] * capacity
    # from 8 tokens on, every rank of a group has one: what a group pads is not priced
    length = st.one_of(st.integers(8, capacity), st.integers(8, longest), st.just(longest), st.just(capacity // 2))
    lengths = draw(st.lists(length, min_size=1, max_size=most))
    costs = dataclasses.replace(cost_model(draw(kinds), num_ranks), method="auto", parameters=parameters)
    return StepCase(tuple(lengths), costs, PlannerConfig(capacity, degrees))


@settings(derandomize=True, deadline=None, max_examples=100)
@given(step_cases())
def test_every_plan_validates_within_memory_and_above_its_bound(case: StepCase) -> None:
    found = case.plan()
    validate_plan(found)
    check_layout(plan_layout(found), case.lengths, case.config.degrees, case.costs.cluster.num_ranks, case.config.tokens_per_rank)
    byte_model, is_shared = ByteModel(case.costs.model), case.config.degrees[-1] > 1
    most = byte_model.kept_bytes(case.config.tokens_per_rank, is_shared)
    assert found.estimate.peak_bytes <= byte_model.states(case.costs.parameters, case.costs.shard_ranks) + most
    run = evaluate_plan(found, case.costs)
    assert max(rank.peak_tokens for rank in run.ranks) <= case.config.tokens_per_rank
    assert case.problem.lower_bound_s() + STEP_S == pytest.approx(found.estimate.lower_bound_s, rel=1e-12)
    assert found.estimate.lower_bound_s <= run.step_s * (1 + 1e-9)


@pytest.mark.wide
@settings(derandomize=True, deadline=None, max_examples=100)
@given(step_cases())
def test_no_plan_is_predicted_slower_than_any_static_plan_it_could_have_chosen(case: StepCase) -> None:
    step_s = case.plan().estimate.step_s
    for degree in case.config.degrees:
        if max(case.lengths) <= degree * case.config.tokens_per_rank:
            static = case.plan(solver="static", static_degree=degree)
            assert step_s <= static.estimate.step_s * (1 + 1e-9)


def test_micro_batches_that_overlap_are_compared_by_when_they_end() -> None:
    """Where ranks do not wait for others, a one-degree layout may end first although its micro-batches sum to more seconds."""
    costs = dataclasses.replace(cost_model("exchange", 4), method="auto", parameters="replicated")
    case = StepCase((57, 185, 99, 68, 50, 200, 183, 50), costs, PlannerConfig(100, (2,)))
    assert case.plan().estimate.step_s <= case.plan(solver="static", static_degree=2).estimate.step_s * (1 + 1e-9)


@pytest.mark.wide
@settings(derandomize=True, deadline=None, max_examples=60)
@given(step_cases(), st.randoms(use_true_random=False))
def test_no_prediction_depends_on_the_order_of_sequences(case: StepCase, draw: random.Random) -> None:
    shuffled = list(case.lengths)
    draw.shuffle(shuffled)
    assert case.plan(shuffled).estimate.step_s == pytest.approx(case.plan().estimate.step_s, rel=1e-9)


@pytest.mark.wide
@settings(derandomize=True, deadline=None, max_examples=100)
@given(step_cases(most=6, worlds=(1, 2, 3, 4)))
def test_a_small_step_is_within_a_percent_of_brute_force(case: StepCase) -> None:
    """Replicated parameters are never slower than the best plan whose ranks leave every micro-batch together."""
    best_s = least_step_seconds(case.problem)
    found = case.plan()
    assert found.estimate.step_s - STEP_S <= best_s * 1.01
    assert found.estimate.lower_bound_s - STEP_S <= best_s * (1 + 1e-9)
    if case.costs.parameters == "sharded":
        assert found.estimate.step_s - STEP_S >= best_s * (1 - 1e-9)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_plan_above_the_budget_is_refused_whoever_made_it(num_stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = dataclasses.replace(cost_model("attention", 4), parameters="replicated")
    budget = ActivationBudget(0, 1 << 22, 0, 64)
    config = PlannerConfig(400, (1, 2), activations=budget)
    found = plan_stages(0, [300, 200], costs, num_stages, config)
    assert found.estimate.peak_bytes <= (limit := Planning(costs, config).limit_bytes(found))
    # the limit is a stage's states plus the budget; a plan that needs one byte more is refused
    assert limit == max(state_bytes(found, costs, ByteModel(costs.model))) + budget.device_bytes
    monkeypatch.setattr(Planning, "limit_bytes", lambda self, plan: found.estimate.peak_bytes)
    monkeypatch.setattr(planner, "validate_plan", lambda plan, limit, _: validate_plan(plan, limit - 1))
    with pytest.raises(PlanError, match="is predicted to need"):
        plan_stages(0, [300, 200], costs, num_stages, config)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_plan_above_the_host_s_budget_is_refused_whoever_made_it(num_stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = dataclasses.replace(cost_model("attention", 4), parameters="replicated")
    config = PlannerConfig(400, (1, 2), activations=ActivationBudget(0, 1 << 22, 1 << 20, 64))
    found = plan_stages(0, [300, 200], costs, num_stages, config)
    assert found.estimate.host_bytes <= Planning(costs, config).host_limit_bytes == 1 << 20
    assert Planning(costs, PlannerConfig(400, (1, 2))).host_limit_bytes is None
    monkeypatch.setattr(Planning, "host_limit_bytes", found.estimate.host_bytes - 1)
    with pytest.raises(PlanError, match="on the host of a rank"):
        plan_stages(0, [300, 200], costs, num_stages, config)


def test_of_plans_that_do_not_fit_the_first_tells_why(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[StepPlan] = []

    def refuse(found: StepPlan, _: Planning) -> StepPlan:
        tried.append(found)
        raise ValueError(f"{found.layout} does not fit")

    for name in ("make_room", "steps_of_room"):
        monkeypatch.setattr(planner, name, refuse)
    config = PlannerConfig(400, (1, 2, 4), activations=ActivationBudget(100, 1 << 22, 0, 64))
    lengths, costs = [300, 200, 100, 50, 40], cost_model("attention", 4)
    problem = GroupingProblem.build(lengths, costs, config)
    placed, _ = planner.candidates_with_room(problem, costs, config)[0]
    first = planner.build_plan(0, lengths, placed, problem.shapes, costs, problem.block_ranks)
    with pytest.raises(ValueError, match=f"^{re.escape(first.layout)} does not fit$"):
        plan_step(0, lengths, costs, config)
    assert len(tried) > 1 and len({plan.layout for plan in tried}) > 1


@pytest.mark.wide
def test_a_candidate_is_left_out_only_if_it_could_not_win(monkeypatch: pytest.MonkeyPatch) -> None:
    config = PlannerConfig(2000, (1, 2, 4), activations=ActivationBudget(100, 1 << 22, 1 << 22, 64))
    costs = dataclasses.replace(cost_model("attention", 4), parameters="gathered_per_round", shard_ranks=4)
    tried: list[StepPlan] = []
    # micro-batches of each that got no room
    left: list[int] = []
    steps_of_room = planner.steps_of_room

    def note(plan: StepPlan, planning: Planning) -> Iterator[StepPlan]:
        tried.append(plan)
        left.append(len(plan.micro_batches))
        for made in steps_of_room(plan, planning):
            left[-1] -= 1
            yield made

    monkeypatch.setattr(planner, "steps_of_room", note)
    num_left_out = 0
    for seed in range(12):
        lengths = np.random.default_rng(seed).integers(20, 600, 9).tolist()
        tried.clear()
        best_s = plan_step(0, lengths, costs, config).estimate.step_s
        planning, problem = Planning(costs, config), GroupingProblem.build(lengths, costs, config)
        ordered, order = problem.longest_first()
        candidates = planner.candidates_with_room(ordered, costs, config)
        num_left_out += len(candidates) - len(tried)
        for placed, _ in candidates:
            plan = planner.build_plan(0, lengths, renumber(placed, order), problem.shapes, costs, problem.block_ranks)
            assert best_s <= planning.predict(planner.make_room(plan, planning)).step_s + 1e-12
    assert num_left_out > 0 and any(left)


def test_solvers_are_not_loaded_before_they_are_asked_for() -> None:
    code = (
        "import sys; from hf_longctx.plan import planner; assert not {'pulp', 'highspy'} & set(sys.modules), 'a solver is loaded'"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_collector_rests_while_the_main_thread_plans_and_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    costs, config, seen = cost_model("attention", 2), PlannerConfig(1000, (1, 2)), []
    group_plans = planner.group_plans

    def seeing(*arguments: Any) -> Any:
        seen.append(gc.isenabled())
        return group_plans(*arguments)

    monkeypatch.setattr(planner, "group_plans", seeing)
    plan_step(0, [100, 200], costs, config)
    with pytest.raises(ValueError):
        plan_step(0, [5000], costs, config)
    assert seen == [False] and gc.isenabled()
    thread = threading.Thread(target=plan_step, args=(0, [100, 200], costs, config))
    thread.start()
    thread.join()
    assert seen == [False, True]
    # a caller who paused it finds it so
    gc.disable()
    try:
        plan_step(0, [100, 200], costs, config)
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.wide
@pytest.mark.parametrize(("num_sequences", "num_stages"), [(64, 1), (512, 1), (40, 4)])
def test_plans_leave_no_cycles_behind(num_sequences: int, num_stages: int) -> None:
    lengths = np.random.default_rng(0).integers(20, 600, num_sequences).tolist()
    config = PlannerConfig(2000, (1, 2, 4), activations=ActivationBudget(100, 1 << 22, 1 << 22, 64))
    costs = cost_model("attention", 4)
    if num_stages > 1:
        # so little room that pipelines of least memory are tried
        model, cluster = named_model("llama-3.1-8b"), ClusterSpec(16, 8, read_profile("h100").spec)
        costs = CostModel(model, cluster, default_coefficients(model, cluster), "ulysses", parameters="replicated")
        lengths = np.clip(np.random.default_rng(0).lognormal(np.log(3000.0), 1.2, 40), 16, 32_768).astype(int).tolist()
        room, stages = ByteModel(model).budget(3 << 30, 0, 1024), balanced_ranges(costs, num_stages, lengths)
        config = PlannerConfig(32_768, (1, 2, 4), activations=room, stages=stages)
    plan_step(0, lengths, costs, config)
    gc.collect()
    # the collector would find them as soon as planning has ended
    gc.disable()
    try:
        plan_step(0, lengths, costs, config)
        assert gc.collect() < 100
    finally:
        gc.enable()
