"""The fluid bound: no layout is faster, it is monotonic in sequences and ranks, and it is exact if all groups are even."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from helpers.plans.grouping_problems import (
    few_lengths,
    flexsp_problem,
    flexsp_problems,
    kinds,
    least_micro_batch_seconds,
    odd_problems,
    small_problem,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.groups.problem import GroupingProblem, Piece, fluid_bound_s, fluid_bounds_s, least_work


@settings(derandomize=True, deadline=None, max_examples=60)
@given(few_lengths, kinds, st.sampled_from([400, 800, 2000]))
def test_no_grouping_is_faster_than_the_fluid_bound(lengths: list[int], kind: str, capacity: int) -> None:
    problem = small_problem(lengths, kind, capacity)
    assert fluid_bound_s(problem) <= least_micro_batch_seconds(problem) * (1 + 1e-12)


def test_different_fixed_costs_keep_the_bound_a_bound() -> None:
    draw = np.random.default_rng(5)
    for _ in range(40):
        problem = small_problem(draw.integers(4, 1600, draw.integers(1, 6)).tolist())
        problem = replace(problem, group_s=tuple(draw.uniform(0, 0.5, 3)), seconds=draw.uniform(0.01, 1, problem.seconds.shape))
        assert fluid_bound_s(problem) <= least_micro_batch_seconds(problem) * (1 + 1e-12)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(few_lengths, kinds)
def test_the_fluid_bound_grows_with_sequences_and_falls_with_ranks(lengths: list[int], kind: str) -> None:
    bound_s = fluid_bound_s(small_problem(lengths, kind, 4000))
    assert fluid_bound_s(small_problem([*lengths, 100], kind, 4000)) >= bound_s * (1 - 1e-8)
    problem = small_problem(lengths, kind, 4000)
    assert fluid_bound_s(replace(problem, num_ranks=8)) <= bound_s * (1 + 1e-8)


def test_the_fluid_bound_is_met_where_everything_is_even() -> None:
    # 64 equal sequences on 64 ranks: each rank has the fixed cost and one sequence
    problem = flexsp_problem([3200] * 64)
    assert fluid_bound_s(problem) == pytest.approx(0.6293563 + (5.128e-6 * 3200**2 + 0.1839576 * 3200) / 1000, rel=1e-6)
    # a single sequence takes as long as on its fastest degree
    alone = flexsp_problem([300_000])
    assert fluid_bound_s(alone) == pytest.approx(alone.group_seconds((64, (0,))), rel=1e-9)


def test_what_memory_rules_out_has_an_infinite_bound() -> None:
    assert math.isinf(fluid_bound_s(small_problem([400] * 5)))
    assert math.isinf(fluid_bound_s(replace(small_problem([1600]), degrees=(1, 2, 3))))
    assert fluid_bound_s(small_problem([])) == 0


def test_the_fluid_bound_lies_below_the_measured_bounds() -> None:
    for name, problem, bound_s, best_milp_s in flexsp_problems():
        assert 0.8 * bound_s < fluid_bound_s(problem) < bound_s * 1.001 < best_milp_s * 1.001, name


def all_pieces(problem: GroupingProblem) -> list[Piece]:
    count = len(problem.lengths)
    return [(start, stop) for start in range(count) for stop in range(start + 1, count + 1)]


def part(problem: GroupingProblem, piece: Piece) -> GroupingProblem:
    return replace(problem, lengths=problem.lengths[slice(*piece)], seconds=problem.seconds[:, slice(*piece)])


def fluid_s(problem: GroupingProblem, piece: Piece, num_ranks: int) -> float:
    """The crude fluid bound from its definition, without its fixed cost.

    Between two makespans at which some sequence may take another degree, the rank-seconds needed do not change.
    """
    start, stop = piece
    options = [
        [
            (float(problem.seconds[k][i]), degree * float(problem.seconds[k][i]))
            for k, degree in enumerate(problem.degrees)
            if problem.lengths[i] <= degree * problem.capacity
        ]
        for i in range(start, stop)
    ]
    ends = sorted({seconds for choices in options for seconds, _ in choices})
    best_s = math.inf
    for limit_s in ends:
        if all(any(seconds <= limit_s for seconds, _ in choices) for choices in options):
            needed = sum(min(work for seconds, work in choices if seconds <= limit_s) for choices in options)
            best_s = min(best_s, max(limit_s, needed / num_ranks))
    return best_s


@settings(derandomize=True, deadline=None, max_examples=100)
@given(odd_problems(most=5))
def test_no_grouping_is_faster_than_the_fluid_bounds(problem: GroupingProblem) -> None:
    pieces = all_pieces(problem)
    for piece, bound_s in zip(pieces, fluid_bounds_s(problem, pieces, problem.num_ranks), strict=True):
        assert 0 <= bound_s <= least_micro_batch_seconds(part(problem, piece)) * (1 + 1e-9)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(odd_problems(), st.integers(1, 8))
def test_the_fluid_bounds_are_what_their_definition_says(problem: GroupingProblem, num_ranks: int) -> None:
    pieces = all_pieces(problem)
    for piece, bound_s in zip(pieces, fluid_bounds_s(problem, pieces, num_ranks), strict=True):
        expected = fluid_s(problem, piece, num_ranks) + min(problem.group_s)
        assert expected * (1 - 2e-3) <= bound_s <= expected * (1 + 1e-9)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(odd_problems())
def test_the_fluid_bounds_grow_with_sequences_and_fall_with_ranks(problem: GroupingProblem) -> None:
    pieces, hair = all_pieces(problem), 1 + 2e-3
    bounds_s = dict(zip(pieces, fluid_bounds_s(problem, pieces, problem.num_ranks), strict=True))
    with_more = dict(zip(pieces, fluid_bounds_s(problem, pieces, problem.num_ranks + 1), strict=True))
    for (start, stop), bound_s in bounds_s.items():
        assert with_more[start, stop] <= bound_s * hair
        for inner in [(start + 1, stop), (start, stop - 1)]:
            assert bounds_s.get(inner, 0.0) <= bound_s * hair


@settings(derandomize=True, deadline=None, max_examples=100)
@given(odd_problems())
def test_one_bound_is_the_least_makespan_whose_needs_fit_the_ranks(problem: GroupingProblem) -> None:
    def needed_ranks(limit_s: float) -> float:
        total = 0.0
        for i, length in enumerate(problem.lengths):
            total += min(
                problem.degrees[k] * seconds[i] / max(limit_s - fixed_s, 1e-300)
                if length <= problem.degrees[k] * problem.capacity and seconds[i] + fixed_s <= limit_s
                else math.inf
                for k, (seconds, fixed_s) in enumerate(zip(problem.seconds.tolist(), problem.group_s, strict=True))
            )
        return total

    bound_s = fluid_bound_s(problem)
    if sum(problem.lengths) > problem.num_ranks * problem.capacity:
        assert math.isinf(bound_s)
    else:
        assert needed_ranks(bound_s * (1 + 1e-7)) <= problem.num_ranks
        assert needed_ranks(bound_s * (1 - 1e-7)) > problem.num_ranks
        [crude_s] = fluid_bounds_s(problem, [(0, len(problem.lengths))], problem.num_ranks)
        assert crude_s <= bound_s * (1 + 1e-9)


def test_each_degrees_own_fixed_cost_counts() -> None:
    # 150 tokens need the two ranks, which wait 3 of T seconds: 2 * 4 / (T - 3) ranks of two make T = 7; the least fixed cost is 1
    problem = replace(
        flexsp_problem((150,)), num_ranks=2, capacity=100, degrees=(1, 2), seconds=np.array([[9.0], [4.0]]), group_s=(1.0, 3.0)
    )
    assert fluid_bound_s(problem) == pytest.approx(7.0, rel=1e-6)
    assert fluid_bounds_s(problem, [(0, 1)], 2).tolist() == pytest.approx([5.0], rel=2e-3)
    # four of 1 s on two ranks, where a single rank's group waits 2 s: 4 / (T - 2) ranks make T = 4
    four = replace(problem, lengths=(20,) * 4, seconds=np.array([[1.0] * 4, [5.0] * 4]), group_s=(2.0, 0.0))
    assert fluid_bound_s(four) == pytest.approx(4.0, rel=1e-6)
    assert fluid_bounds_s(four, [(0, 4)], 2).tolist() == pytest.approx([2.0], rel=2e-3)


def test_work_is_infinite_where_a_sequence_does_not_fit_alone() -> None:
    problem = replace(flexsp_problem((150, 100)), capacity=100, degrees=(1, 2), seconds=np.array([[4.0, 3.0], [2.5, 2.0]]))
    assert least_work(problem).tolist() == [[math.inf, 3.0], [5.0, 4.0]]
