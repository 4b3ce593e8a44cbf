"""Plans reach every rank alike, in order and one step ahead; what goes wrong on one rank is raised on all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from helpers.plans.layouts import tiny_costs
from helpers.ranks.rank_steps import group_pool

from hf_longctx.hf.planning import source as source_module
from hf_longctx.hf.planning.source import PlanSource
from hf_longctx.hf.ranks.agreement import gather_objects
from hf_longctx.plan.core.serialize import plan_digest, plan_to_json
from hf_longctx.plan.core.settings import PlannerConfig
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.planner import plan_step
from hf_longctx.runtime.process_groups import GroupPool

STEPS = [(0, [40, 7, 9, 30]), (1, [5]), (2, [33, 33, 2, 2, 2, 1])]


def lone_source(costs: CostModel, **config: Any) -> PlanSource:
    """A source for a plan of many ranks, drawn in one process."""
    settings = {"tokens_per_rank": 64, "degrees": (1, 2, 4), **config}
    return PlanSource(GroupPool((1,), timeout_s=1.0), costs, PlannerConfig(**settings))


def measured(costs: CostModel) -> CostModel:
    return replace(costs, coefficients=replace(costs.coefficients, source="measured"))


def test_plans_come_in_order_and_are_the_planners() -> None:
    costs = tiny_costs(4)
    plans = list(lone_source(costs).plans(STEPS, explore=False))
    expected = [plan_step(*step, costs, PlannerConfig(64, (1, 2, 4))) for step in STEPS]
    assert [plan_digest(plan) for plan in plans] == [plan_digest(plan) for plan in expected]
    assert [(plan.step, list(plan.lengths)) for plan in plans] == STEPS
    assert [plan.estimate.step_s for plan in plans] == [plan.estimate.step_s for plan in expected]


def test_no_steps_give_no_plans() -> None:
    assert list(lone_source(tiny_costs(4)).plans([], explore=True)) == []


def test_one_step_is_drawn_ahead_and_no_more() -> None:
    drawn: list[int] = []

    def steps() -> Iterator[tuple[int, list[int]]]:
        for step in range(5):
            drawn.append(step)
            yield step, [5, 6]

    plans = lone_source(tiny_costs(4)).plans(steps(), explore=False)
    for step in range(3):
        assert next(plans).step == step
        assert drawn == list(range(step + 2))


def test_lengths_may_be_known_only_when_the_step_after_is_drawn() -> None:
    known: dict[int, list[int]] = {}

    def steps() -> Iterator[tuple[int, Any]]:
        yield 0, [7]
        for step in (1, 2):
            yield step, lambda step=step: known[step]
            known[step] = [5, 5 + step]

    source = lone_source(tiny_costs(4))
    plans = source.plans(steps(), explore=False)
    assert next(plans).lengths == (7,) and not known
    # plans of an evaluation come meanwhile
    assert [plan.lengths for plan in source.plans([(9, [4])], explore=False)] == [(4,)]
    assert [plan.lengths for plan in plans] == [(5, 6), (5, 7)]


def test_an_error_of_the_planner_is_raised_where_the_plan_is_drawn() -> None:
    plans = lone_source(tiny_costs(4)).plans([(0, [5]), (1, [1000])], explore=False)
    assert next(plans).step == 0
    with pytest.raises(ValueError, match="1000 tokens"):
        next(plans)


def test_plans_drawn_after_the_costs_were_replaced_use_the_new_ones() -> None:
    source = lone_source(tiny_costs(4))
    plans = source.plans([(step, [5, 6]) for step in range(4)], explore=False)
    assert next(plans).estimate.cost_source == "default"
    source.costs = measured(source.costs)
    # the plan that was already being solved may have used either
    next(plans)
    assert [plan.estimate.cost_source for plan in plans] == ["measured", "measured"]


def test_costs_replaced_while_a_plan_is_solved_leave_its_estimate_alone() -> None:
    source = lone_source(measured(tiny_costs(4)))
    expected = source.solve(0, [40, 7, 9], explore=False).estimate.step_s

    def replacing(*args: Any) -> StepPlan:
        plan = plan_step(*args)
        # the report does this on the main thread after a second measurement
        source.costs = measured(source.costs)
        return plan

    source.planner = replacing
    assert source.solve(0, [40, 7, 9], explore=False).estimate.step_s == expected > 0


MANY = [30, 21, 17, 12, 9, 8, 5, 3, 3, 2, 2, 1]


def test_less_memory_holds_for_later_plans_unless_a_step_does_not_fit_into_it() -> None:
    source, costs = lone_source(tiny_costs(4)), tiny_costs(4)
    source.tighter = PlannerConfig(16, (1, 2, 4))
    small, large = source.plans([(0, [5, 5, 5]), (1, [200])], explore=False)
    assert plan_digest(small) == plan_digest(plan_step(0, [5, 5, 5], costs, PlannerConfig(16, (1, 2, 4))))
    # 4 ranks of 16 tokens cannot hold it, 4 of 64 can
    assert plan_digest(large) == plan_digest(plan_step(1, [200], costs, PlannerConfig(64, (1, 2, 4))))


def degrees_with_work(plan: StepPlan) -> set[int]:
    return {group.degree for mb in plan.micro_batches for group in mb.groups if group.num_tokens}


def test_exploring_steps_favour_one_degree_after_the_other() -> None:
    source = lone_source(tiny_costs(4))
    assert [degrees_with_work(source.solve(step, MANY, True)) for step in range(5)] == [{1}, {2}, {4}, {1}, {2}]


def test_exploring_ends_after_its_steps_even_if_nothing_was_fitted_yet() -> None:
    # loader workers draw plans far ahead of the steps that are measured
    source = lone_source(tiny_costs(4))
    plans = [source.solve(step, MANY, True) for step in range(9)]
    assert [plan.estimate.step_s > 0 for plan in plans] == [False] * 5 + [True] * 4


def test_exploring_still_gives_long_sequences_the_ranks_they_need() -> None:
    source = lone_source(tiny_costs(4))
    plan = source.solve(0, [200, 5, 6, 7], explore=True)
    assert degrees_with_work(plan) == {1, 4}


@pytest.mark.parametrize("solver", ["auto", "greedy", "static"])
def test_exploring_works_with_every_solver(solver: str) -> None:
    source = lone_source(tiny_costs(4), solver=solver)
    found = set().union(*(degrees_with_work(source.solve(step, MANY, True)) for step in range(3)))
    assert found == {1, 2, 4}


def test_exploring_keeps_a_static_degree() -> None:
    source = lone_source(tiny_costs(4), solver="static", static_degree=2)
    assert [degrees_with_work(source.solve(step, MANY, True)) for step in range(3)] == [{2}] * 3


def test_exploring_predicts_nothing() -> None:
    source = lone_source(tiny_costs(4))
    for plan in source.plans([(step, MANY) for step in range(4)], explore=True):
        assert (plan.estimate.step_s, plan.estimate.lower_bound_s) == (0.0, 0.0)
        assert plan.estimate.cost_source == "default"
        # the seconds of planning are still known
        assert plan.estimate.solve_s > 0 and plan.estimate.solver


def test_after_calibration_nothing_is_explored() -> None:
    source = lone_source(measured(tiny_costs(4)))
    for step in range(3):
        explored, plain = (source.solve(step, MANY, explore) for explore in (True, False))
        assert plan_digest(explored) == plan_digest(plain) and explored.estimate.step_s == plain.estimate.step_s > 0


def test_exploring_leaves_the_costs_of_the_source_alone() -> None:
    source = lone_source(tiny_costs(4))
    before = source.costs
    source.solve(1, MANY, explore=True)
    assert source.costs is before


def refuse(*_: Any) -> StepPlan:
    raise AssertionError("only rank 0 plans")


def source_on_rank() -> PlanSource:
    pool = group_pool()
    degrees = tuple(d for d in (1, 2, 4) if d <= pool.num_ranks)
    return PlanSource(pool, tiny_costs(pool.num_ranks), PlannerConfig(64, degrees), planner=refuse if pool.rank else plan_step)


def plans_on_rank(steps: list[tuple[int, list[int]]], explore: bool) -> list[str]:
    return [plan_to_json(plan) for plan in source_on_rank().plans(steps, explore)]


@pytest.mark.daily("2-True")
@pytest.mark.parametrize("explore", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_all_ranks_get_the_plans_of_rank_zero(ranks, num_ranks: int, explore: bool) -> None:
    first, *others = ranks(num_ranks).run(plans_on_rank, STEPS, explore)
    assert len(first) == len(STEPS)
    # the whole text: estimates too
    assert all(plans == first for plans in others)


def failing_on_rank(steps: list[tuple[int, list[int]]]) -> tuple[int, str]:
    """How many plans came before the error, and its message; proves that the ranks are in step afterwards."""
    source = source_on_rank()
    num_plans, message = 0, ""
    try:
        for _ in source.plans(steps, explore=False):
            num_plans += 1
    except ValueError as error:
        message = str(error)
    assert gather_objects(source.pool.rank, source.pool.control) == list(range(source.pool.num_ranks))
    return num_plans, message


@pytest.mark.parametrize("position", [0, 1, 2])
def test_an_error_of_the_planner_is_raised_on_every_rank(ranks, position: int) -> None:
    steps = [(step, [5, 6]) for step in range(3)]
    steps[position] = (position, [5, 1000])
    (first_count, first), (second_count, second) = ranks(2).run(failing_on_rank, steps)
    assert first_count == second_count == position
    assert "1000 tokens" in first
    assert second == f"rank 0 could not plan: {first}"


def mismatch_on_rank(field: str) -> str:
    """Rank 1 reads another plan than was sent, as another version of the package might."""
    source = source_on_rank()
    original = source_module.plan_from_json

    def another(text: str) -> StepPlan:
        plan = original(text)
        return replace(plan, lengths=plan.lengths[::-1]) if field == "lengths" else replace(plan, parameters="sharded")

    wrong: AbstractContextManager[Any] = nullcontext()
    if source.pool.rank == 1:
        wrong = patch.object(source_module, "plan_from_json", another)
    with wrong:
        try:
            list(source.plans([(3, [5, 6, 7])], explore=False))
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("field", ["lengths", "parameters"])
def test_plans_that_differ_between_ranks_are_raised_on_every_rank(ranks, field: str) -> None:
    first, second = ranks(2).run(mismatch_on_rank, field)
    assert first == second
    assert first.startswith("ranks hold different plans for step 3 (rank 0: ") and ", rank 1: " in first
    assert "install the same version everywhere" in first


def test_estimates_are_not_part_of_the_agreement(ranks) -> None:
    assert ranks(2).run(other_estimate_on_rank) == [1, 1]


def other_estimate_on_rank() -> int:
    source = source_on_rank()
    original = source_module.plan_from_json

    def another(text: str) -> StepPlan:
        plan = original(text)
        return replace(plan, estimate=replace(plan.estimate, solve_s=99.0))

    with patch.object(source_module, "plan_from_json", another):
        return len(list(source.plans([(0, [5, 6])], explore=False)))


class ListeningSource(PlanSource):
    """Keeps the messages between the ranks; after the second one, what is waited for goes on."""

    def listen(self, go: threading.Event) -> None:
        self.go, self.messages = go, list[str]()

    def _broadcast(self, message: str) -> str:
        self.messages.append(super()._broadcast(message))
        if len(self.messages) == 2:
            self.go.set()
        return self.messages[-1]


def patient_on_rank() -> tuple[list[str], str]:
    """Messages that a rank receives before the plan, and the plan's solver."""
    pool, go = group_pool(), threading.Event()

    def plan_slowly(*step: Any) -> Any:
        go.wait(30.0)
        return plan_step(*step)

    config = PlannerConfig(64, (1, 2), solver="lp", solver_time_limit_s=2.0)
    source = ListeningSource(pool, tiny_costs(2), config, alive_s=0.02, planner=refuse if pool.rank else plan_slowly)
    source.listen(go)
    (plan,) = source.plans([(0, [5, 6])], explore=False)
    return source.messages[:2], plan.estimate.solver


def test_ranks_hear_from_rank_zero_while_it_waits(ranks) -> None:
    for messages, solver in ranks(2).run(patient_on_rank):
        assert messages == ["", ""] and solver.startswith("lp")
