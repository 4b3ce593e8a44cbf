"""The grouping problem: no layout beats its lower bounds, a layout costs what its plan does, and what fits nowhere is refused."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from helpers.plans.cost_models import COST_KINDS, cost_model
from helpers.plans.grouping_problems import (
    FIRST_DEGREES,
    cost_kinds,
    flexsp_problems,
    least_seconds,
    least_step_seconds,
    lengths_of_five,
    odd_problems,
    priced_problem,
    set_partitions,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.settings import default_degrees
from hf_longctx.plan.core.types import GroupShape
from hf_longctx.plan.groups.exact import solve_exactly
from hf_longctx.plan.groups.greedy import plan_greedy, plan_static
from hf_longctx.plan.groups.placement import place_layout
from hf_longctx.plan.groups.problem import GroupingProblem, Layout
from hf_longctx.plan.planner import build_plan
from hf_longctx.plan.predict.evaluate import evaluate_plan


def test_the_brute_force_meets_every_partition_once() -> None:
    # Bell numbers 1, 1, 2, 5, 15, 52, 203
    for count, bell in enumerate([1, 1, 2, 5, 15, 52, 203]):
        found = [frozenset(map(frozenset, parts)) for parts in set_partitions(tuple(range(count)))]
        assert len(found) == len(set(found)) == bell


@settings(derandomize=True, deadline=None, max_examples=60)
@given(lengths_of_five, cost_kinds, st.sampled_from([400, 800, 2000]))
def test_no_layout_is_faster_than_the_lower_bound(lengths: list[int], kind: str, capacity: int) -> None:
    best_s = least_seconds(lengths, cost_model(kind, 4), FIRST_DEGREES, 4, capacity)
    assert priced_problem(lengths, kind, capacity=capacity).lower_bound_s() <= best_s * (1 + 1e-9)


def least_overlapping_seconds(problem: GroupingProblem) -> float:
    """Least seconds of a step whose ranks wait for the ranks of their groups only, by plain enumeration.

    Tries every partition into groups with every degree and placement, in every order; a group starts when its last rank is free.
    """
    places = [(k, first) for k, degree in enumerate(problem.degrees) for first in range(problem.num_ranks - degree + 1)]
    best_s = math.inf
    for parts in set_partitions(tuple(range(len(problem.lengths)))):
        tokens = [sum(problem.lengths[i] for i in part) for part in parts]
        options = [[(k, first) for k, first in places if count <= problem.degrees[k] * problem.capacity] for count in tokens]
        for order in itertools.permutations(range(len(parts))):
            for chosen in itertools.product(*(options[place] for place in order)):
                clocks = [0.0] * problem.num_ranks
                for place, (k, first) in zip(order, chosen, strict=True):
                    ranks = slice(first, first + problem.degrees[k])
                    seconds = problem.group_s[k] + float(sum(problem.seconds[k][i] for i in parts[place]))
                    clocks[ranks] = [max(clocks[ranks]) + seconds] * problem.degrees[k]
                best_s = min(best_s, max(clocks))
    return best_s


@settings(derandomize=True, deadline=None, max_examples=60)
@given(odd_problems(most=5, max_ranks=5, longest_first=False))
def test_no_layout_is_faster_than_the_lower_bound_whatever_the_problem(problem: GroupingProblem) -> None:
    assert problem.lower_bound_s() <= least_step_seconds(problem) * (1 + 1e-9)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(odd_problems(most=3, max_ranks=3, longest_first=False))
def test_no_overlapping_groups_are_faster_than_the_bound_of_ranks_on_their_own(problem: GroupingProblem) -> None:
    on_their_own = replace(problem, block_ranks=1)
    best_s = least_overlapping_seconds(problem)
    assert best_s <= least_step_seconds(problem) * (1 + 1e-9)
    assert on_their_own.nests == (problem.num_ranks > 1)
    assert on_their_own.lower_bound_s() <= best_s * (1 + 1e-9)
    assert on_their_own.lower_bound_s() <= problem.lower_bound_s() * (1 + 1e-9)


def test_the_bound_of_ranks_on_their_own_counts_a_share_of_the_fixed_costs() -> None:
    # three ranks, five equal sequences that fill one rank each: 5 / 3 of a sequence and of a fixed cost, not 2
    problem = replace(priced_problem([400] * 5, num_ranks=3, degrees=(1,)), block_ranks=1)
    alone_s = problem.group_seconds((1, (0,)))
    assert problem.lower_bound_s() == pytest.approx(alone_s * 5 / 3)
    # if all ranks wait for each other there are two micro-batches, and every rank pays the fixed cost of both
    together_s = replace(problem, block_ranks=0, overlaps=False).lower_bound_s()
    assert together_s == pytest.approx(float(problem.seconds[0][0]) * 5 / 3 + 2 * problem.group_s[0])


def test_what_memory_keeps_out_of_the_longest_ones_micro_batch_comes_on_top() -> None:
    # the long one takes 16 s on its two ranks; two short ones of 1 s fit beside it on the third, the third short one does not
    problem = GroupingProblem(
        lengths=(200, 50, 50, 50),
        num_ranks=3,
        capacity=100,
        degrees=(1, 2),
        shapes={1: GroupShape(1), 2: GroupShape(2)},
        seconds=np.array([[99.0, 1.0, 1.0, 1.0], [16.0, 1.0, 1.0, 1.0]]),
        group_s=(0.5, 0.5),
    )
    assert problem.lower_bound_s() == pytest.approx(16.0 + 1 / 3 + 2 * 0.5)


def test_the_lower_bound_is_met_where_everything_is_even() -> None:
    # four equal sequences on four ranks, then one more that needs all ranks
    problem = priced_problem([400] * 4)
    assert problem.lower_bound_s() == pytest.approx(problem.step_seconds([[(1, (i,)) for i in range(4)]]), rel=1e-12)
    alone = priced_problem([1600], kind="linear")
    assert alone.lower_bound_s() == pytest.approx(alone.step_seconds([[(4, (0,))]]), rel=1e-12)


def test_the_lower_bound_of_no_sequences_is_no_error() -> None:
    assert priced_problem([]).lower_bound_s() >= 0


def test_a_problem_prices_groups_micro_batches_and_steps() -> None:
    problem = priced_problem([100, 200, 300])
    model = cost_model("attention", 4)
    alone, pair = GroupShape(1), GroupShape(2, 2)
    one, two = model.sequences_s([100, 200, 300], alone), model.sequences_s([100, 200, 300], pair)
    assert problem.group_seconds((1, (0, 2))) == pytest.approx(model.group_s(alone) + one[0] + one[2])
    assert problem.group_seconds((2, (1,))) == pytest.approx(model.group_s(pair) + two[1])
    groups: list[tuple[int, tuple[int, ...]]] = [(1, (0, 2)), (2, (1,))]
    assert problem.micro_batch_seconds(groups) == max(map(problem.group_seconds, groups))
    assert problem.step_seconds([groups, [(1, (0,))]]) == problem.micro_batch_seconds(groups) + problem.group_seconds((1, (0,)))


def test_a_group_fits_up_to_its_last_token() -> None:
    problem = priced_problem([400, 400, 1])
    assert problem.fits((1, (0,)))
    assert problem.fits((2, (0, 1)))
    assert not problem.fits((1, (0, 2)))
    assert not problem.fits((2, (0, 1, 2)))


@pytest.mark.wide("exact-attention", "exact-exchange", "exact-fixed", "exact-windows")
@pytest.mark.parametrize("kind", COST_KINDS)
@pytest.mark.parametrize("solve", ["exact", "greedy", "static"])
def test_the_price_of_a_layout_is_the_predicted_time_of_its_plan(kind: str, solve: str) -> None:
    """A group without sequences is not built, so it must not be paid for either."""
    for num_ranks, capacity, lengths in [
        (4, 300, (369, 199, 131, 201, 613)),
        (4, 600, (982, 225, 1184, 113)),
        (5, 300, (750, 305, 209, 67, 325)),
        (6, 600, (413, 399, 1150, 628, 65, 1731, 10, 96, 143)),
    ]:
        problem = priced_problem(lengths, kind, num_ranks, capacity, default_degrees(num_ranks, 8, "ulysses"))
        layouts: dict[str, Layout] = {"greedy": plan_greedy(problem, 5), "static": plan_static(problem, 5)}
        if solve == "exact":
            layouts["exact"] = solve_exactly(problem)
        costs = replace(cost_model(kind, num_ranks), parameters="sharded")
        placed = place_layout(layouts[solve], num_ranks, costs.cluster.ranks_per_node, node_aligned=False)
        run = evaluate_plan(build_plan(0, lengths, placed, problem.shapes, costs), costs)
        assert problem.step_seconds(layouts[solve]) == pytest.approx(run.step_s - costs.coefficients.step_s, rel=1e-9)


def test_a_sequence_too_long_is_refused_with_the_remedy() -> None:
    priced_problem([1600])
    with pytest.raises(
        ValueError, match=r"sequence 1 has 1601 tokens.* 4 ranks holds 1600 .*allow a larger degree, raise tokens"
    ):
        priced_problem([3, 1601, 5000])


@pytest.mark.parametrize("length", [0, -1])
def test_an_empty_sequence_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"sequence 2 has {length} tokens; remove"):
        priced_problem([3, 4, length])


def test_the_measured_problems_are_loaded_with_their_fixed_cost() -> None:
    """Rank-seconds spread evenly reach the measured bounds of the most even problems, so `group_s` must be in both."""
    cases = list(flexsp_problems())
    assert [len(cases), cases[0][0], cases[0][1].capacity, cases[6][1].capacity] == [18, "LN1.8-384k-s0/0", 6407, 6449]
    assert cases[5][1].lower_bound_s() == pytest.approx(cases[5][2], rel=1e-3)
    for name, problem, bound_s, best_milp_s in cases:
        assert problem.lower_bound_s() <= bound_s * 1.005 <= best_milp_s * 1.005, name
