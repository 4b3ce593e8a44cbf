"""The integer program is exact on few lengths, never slower than its seed, keeps memory, and reports failures."""

from __future__ import annotations

import pytest
from helpers.plans.cost_models import COST_KINDS, cost_model
from helpers.plans.grouping_problems import (
    check_layout,
    flexsp_problem,
    flexsp_problems,
    least_micro_batch_seconds,
    lognormal_lengths,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.settings import PlannerConfig
from hf_longctx.plan.groups import flexsp as milp
from hf_longctx.plan.groups.flexsp import group_by_milp, plan_milp
from hf_longctx.plan.groups.greedy import plan_greedy, plan_one_micro_batch
from hf_longctx.plan.groups.problem import GroupingProblem, Layout
from hf_longctx.plan.solver import Backend, Solution, SolverError

PROBLEMS = {name: problem for name, problem, _, _ in flexsp_problems()}
BEST_S = {name: best_s for name, _, _, best_s in flexsp_problems()}


def build(lengths: list[int], kind: str = "attention", capacity: int = 400) -> GroupingProblem:
    return GroupingProblem.build(lengths, cost_model(kind, 4), PlannerConfig(capacity, (1, 2, 4)))


def check_groups(problem: GroupingProblem, layout: Layout) -> None:
    check_layout(layout, problem.lengths, problem.degrees, problem.num_ranks, problem.capacity)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(st.lists(st.integers(4, 1600), min_size=1, max_size=5), st.sampled_from(COST_KINDS))
def test_few_lengths_are_grouped_as_well_as_by_brute_force(lengths: list[int], kind: str) -> None:
    problem = build(lengths, kind, capacity=2000)
    # everything in one group is the worst seed that always fits
    seed = [(4, tuple(range(len(lengths))))]
    found = group_by_milp(problem, seed, 20.0)
    check_groups(problem, [list(found.groups)])
    best_s = least_micro_batch_seconds(problem)
    assert problem.micro_batch_seconds(found.groups) == pytest.approx(best_s, rel=1e-6)
    assert found.bound_s <= best_s * (1 + 1e-9)
    assert not found.is_fallback


@pytest.mark.daily("cbc")
@pytest.mark.parametrize("backend", ["highs", "cbc"])
def test_backends_agree_on_measured_problems(backend: Backend) -> None:
    for name in ("LN1.8-384k-s0/0", "LN1.8-192k-s1/0", "LN1.4-192k-s2/0"):
        problem = PROBLEMS[name]
        found = group_by_milp(problem, plan_one_micro_batch(problem)[0], 20.0, backend)
        assert problem.micro_batch_seconds(found.groups) == pytest.approx(BEST_S[name], rel=1e-6)
        assert not found.is_fallback


@pytest.mark.daily("wiki-384k-b12/0")
@pytest.mark.parametrize("name", ["LN1.8-384k-s0/4", "LN1.8-192k-s1/4", "wiki-384k-b12/0"])
def test_a_short_time_never_loses_to_the_seed(name: str) -> None:
    problem = PROBLEMS[name]
    seed = plan_one_micro_batch(problem)[0]
    found = group_by_milp(problem, seed, 1.0)
    check_groups(problem, [list(found.groups)])
    assert problem.micro_batch_seconds(found.groups) <= problem.micro_batch_seconds(seed)
    assert found.is_fallback == (found.groups == tuple(seed))


@pytest.mark.wide
@settings(derandomize=True, deadline=None, max_examples=8)
@given(st.integers(0, 1000))
def test_memory_holds_on_true_lengths_after_buckets(seed: int) -> None:
    """With more lengths than buckets and nearly full memory, groups that fit rounded up also fit in truth."""
    lengths = list(lognormal_lengths(seed, 40, 1500, median=120, sigma=0.8))
    problem = build(lengths, capacity=-(-sum(lengths) * 11 // 40))
    assert len(set(lengths)) > 20
    greedy = plan_one_micro_batch(problem)[0]
    found = group_by_milp(problem, greedy, 0.3)
    check_groups(problem, [list(found.groups)])
    assert problem.micro_batch_seconds(found.groups) <= problem.micro_batch_seconds(greedy)


@pytest.mark.wide
def test_a_seed_that_breaks_buckets_is_no_obstacle() -> None:
    # rounded up, the long sequences of a full group no longer fit, so there is no start, but there is an answer
    capacity = 1000
    lengths = [capacity - 3 * i for i in range(20)] + list(range(100, 118))
    problem = GroupingProblem.build(lengths, cost_model("attention", 24), PlannerConfig(capacity, (1, 2, 4)))
    seed = plan_one_micro_batch(problem)[0]
    found = group_by_milp(problem, seed, 1.0)
    check_groups(problem, [list(found.groups)])
    assert problem.micro_batch_seconds(found.groups) <= problem.micro_batch_seconds(seed)


def test_a_solver_that_fails_or_finds_nothing_leaves_the_seed_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = flexsp_problem(lognormal_lengths(3, 30, 60_000, median=4_000), num_ranks=16)
    seed = plan_greedy(problem, 5)

    def broken(*_: object, **__: object) -> Solution:
        raise SolverError("out of order")

    for answer in (broken, lambda *_, **__: Solution("timed out", "highs"), lambda *_, **__: Solution("infeasible", "highs")):
        monkeypatch.setattr(milp, "solve_integer_program", answer)
        found = plan_milp(problem, 2, 5.0, seed)
        assert found.num_fallbacks == len(found.layout)
        assert problem.step_seconds(found.layout) <= problem.step_seconds(seed)
        check_groups(problem, found.layout)


@pytest.mark.wide
def test_a_step_is_not_slower_than_its_seed_and_improves_it_here() -> None:
    problem = flexsp_problem(lognormal_lengths(5, 40, 60_000, median=4_000), num_ranks=16)
    worst = [[(16, (i,))] for i in range(40)]
    found = plan_milp(problem, 2, 2.0, worst)
    check_groups(problem, found.layout)
    assert problem.step_seconds(found.layout) < problem.step_seconds(worst)
