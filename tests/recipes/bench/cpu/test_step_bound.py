"""The bound on a whole step by linear programs: no layout beats it, whatever the prices, and it is tighter than the quick one."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from helpers.plans.cost_models import COST_KINDS
from helpers.plans.grouping_problems import (
    flexsp_problem,
    least_step_seconds,
    lognormal_lengths,
    odd_problems,
    priced_problem,
    problems_and_layouts,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.groups.greedy import plan_greedy
from hf_longctx.plan.groups.problem import GroupingProblem, Layout
from hf_longctx.plan.solver import SolverError
from hf_longctx.recipes.bench.cpu import step_bound
from hf_longctx.recipes.bench.cpu.step_bound import _Node, _Prices, _Shares, step_bound_s


@pytest.mark.wide
@settings(derandomize=True, deadline=None, max_examples=60)
@given(odd_problems(most=5, max_ranks=5, longest_first=False), st.floats(1.0, 2.0))
def test_no_layout_is_faster_than_the_bound_whatever_the_problem(problem: GroupingProblem, factor: float) -> None:
    best_s = least_step_seconds(problem)
    bound_s = step_bound_s(problem, factor * best_s, most_nodes=60)
    assert problem.lower_bound_s() * (1 - 1e-9) <= bound_s <= best_s * (1 + 1e-9)


@pytest.mark.parametrize("kind", COST_KINDS)
def test_no_layout_is_faster_than_the_bound(kind: str) -> None:
    for lengths in ([1600, 400, 390, 50, 50], [900, 850, 300, 10], [401] * 5, [200] * 5):
        problem = priced_problem(lengths, kind)
        best_s = least_step_seconds(problem)
        assert problem.lower_bound_s() * (1 - 1e-9) <= step_bound_s(problem, 1.5 * best_s) <= best_s * (1 + 1e-9)


@pytest.mark.wide
@settings(derandomize=True, deadline=None, max_examples=100)
@given(problems_and_layouts(), st.data())
def test_any_prices_give_a_bound_on_every_layout_of_a_node(found: tuple[GroupingProblem, Layout], data: st.DataObject) -> None:
    problem, layout = found
    ends_s = sorted((problem.micro_batch_seconds(groups) + problem.micro_batch_s for groups in layout), reverse=True)
    longest = data.draw(st.integers(1, min(3, len(layout))))
    widths = st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0))
    limits = tuple(
        (end_s * (1 - below), end_s * (1 + above))
        for end_s, (below, above) in zip(ends_s[:longest], data.draw(st.tuples(*[widths] * longest)), strict=True)
    )
    has_more = data.draw(st.booleans())
    number = len(layout) - (data.draw(st.integers(0, len(layout) - longest)) if has_more else 0)
    node = _Node(number, has_more, limits)
    shares = _Shares(problem, node, np.array(problem.lengths, dtype=np.float64), problem.seconds)
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    scale = data.draw(st.sampled_from([0.0, 0.1, 1.0]))
    prices = _Prices(
        random.exponential(1 / problem.num_ranks, shares.num_pools),
        scale * random.exponential(1.0, shares.num_pools),
        random.exponential(1.0, shares.ranks.shape[:3]) * (random.random(shares.ranks.shape[:3]) < 0.3),
    )
    prices.time[longest:] = 1 / problem.num_ranks
    # prices of ranks are added and subtracted again, so that sums round by their size
    rounding_s = 1e-12 * problem.num_ranks * float(prices.rank.sum())
    assert shares.priced_s(prices) <= problem.step_seconds(layout) * (1 + 1e-9) + rounding_s


@pytest.mark.wide
@settings(derandomize=True, deadline=None, max_examples=100)
@given(problems_and_layouts())
def test_no_group_takes_more_ranks_by_a_rule_than_it_has(found: tuple[GroupingProblem, Layout]) -> None:
    problem, layout = found
    for groups in layout:
        end_s = problem.micro_batch_seconds(groups) + problem.micro_batch_s
        shares = _Shares(problem, _Node(1, False, ((0.0, end_s),)), np.array(problem.lengths, dtype=np.float64), problem.seconds)
        for degree, members in groups:
            k = problem.degrees.index(degree)
            assert shares.is_allowed[k, 0, list(members)].all()
            assert (shares.ranks[:, k, 0, list(members)].sum(axis=1) <= degree * (1 + 1e-9)).all()


def test_parts_of_a_node_have_all_its_layouts() -> None:
    node = _Node(3, True, ((0.0, 8.0),))
    assert node.parts(1.0) == [_Node(3, False, ((0.0, 8.0),)), _Node(4, True, ((0.0, 8.0),))]
    # the second longest gets an interval of its own, and ends no later than the longest
    assert _Node(3, False, ((4.0, 8.0),)).parts(1.0) == [
        _Node(3, False, ((4.0, 8.0), (0.0, 4.0))),
        _Node(3, False, ((4.0, 8.0), (4.0, 8.0))),
    ]
    assert _Node(3, False, ((2.0, 8.0), (4.0, 5.0))).parts(1.0) == [
        _Node(3, False, ((4.0, 5.0), (4.0, 5.0))),
        _Node(3, False, ((5.0, 8.0), (4.0, 5.0))),
    ]
    assert _Node(1, False, ((4.0, 4.001),)).parts(8.0) == []


@pytest.mark.wide
def test_a_bound_is_much_tighter_where_long_sequences_rule() -> None:
    problem = flexsp_problem(lognormal_lengths(0, 512, 200_000, 1500.0, 1.6))
    found_s = problem.step_seconds(plan_greedy(problem, 5))
    quick_s, bound_s = problem.lower_bound_s(), step_bound_s(problem, found_s, most_nodes=100)
    assert bound_s > 1.01 * quick_s
    assert bound_s < found_s
    # more programs never lower it
    assert step_bound_s(problem, found_s, most_nodes=10) <= bound_s


def test_without_a_solver_or_where_ranks_do_not_wait_the_quick_bound_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = priced_problem([1600, 400, 390, 50])
    on_their_own = replace(problem, block_ranks=1)
    assert step_bound_s(on_their_own, 1e9) == on_their_own.lower_bound_s()
    assert step_bound_s(replace(problem, overlaps=True), 1e9) == replace(problem, overlaps=True).lower_bound_s()
    assert step_bound_s(priced_problem([]), math.inf) == 0.0

    def fail(*_: object) -> None:
        raise SolverError("no solver")

    monkeypatch.setattr(step_bound, "solve_linear_program", fail)
    assert step_bound_s(problem, 1e9, most_nodes=30) == problem.lower_bound_s()
