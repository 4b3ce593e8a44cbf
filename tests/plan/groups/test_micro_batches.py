"""The blaster: cuts are balanced, a step is never slower than its seed, and fallbacks to the seed are counted."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from helpers.plans.grouping_problems import check_layout, flexsp_problem, lognormal_lengths
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.groups import flexsp as micro_batches
from hf_longctx.plan.groups.cuts import micro_batch_ends
from hf_longctx.plan.groups.flexsp import GroupedMicroBatch, plan_by_micro_batches
from hf_longctx.plan.groups.greedy import plan_greedy, plan_one_micro_batch
from hf_longctx.plan.groups.problem import Group, GroupingProblem


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(1, 5))
def test_chunks_have_the_least_maximum_of_tokens(lengths: list[int], number: int) -> None:
    ends = micro_batch_ends(lengths, number)
    assert ends == sorted(set(ends)) and ends[-1] == len(lengths) and len(ends) <= number

    def most(cut: Sequence[int]) -> int:
        return max(sum(lengths[start:end]) for start, end in itertools.pairwise([0, *cut]))

    inner = range(1, len(lengths))
    cuts = itertools.chain.from_iterable(itertools.combinations(inner, size) for size in range(min(number, len(lengths))))
    assert most(ends) == min(most([*cut, len(lengths)]) for cut in cuts)


def step(seed: int = 1, count: int = 60) -> GroupingProblem:
    return flexsp_problem(lognormal_lengths(seed, count, 60_000, median=4_000), num_ranks=16)


def keep(problem: GroupingProblem, seed: Sequence[Group], time_limit_s: float) -> GroupedMicroBatch:
    assert time_limit_s > 0
    assert sorted(i for _, group in seed for i in group) == list(range(len(problem.lengths)))
    return GroupedMicroBatch(tuple(seed), 0.0, is_fallback=True)


def test_a_solver_that_finds_nothing_leaves_a_layout_as_fast_as_the_seed() -> None:
    problem = step()
    seed = plan_greedy(problem, 5)
    found = plan_by_micro_batches(problem, 4, 60.0, seed, keep)
    check_layout(found.layout, problem.lengths, problem.degrees, 16, problem.capacity)
    assert problem.step_seconds(found.layout) <= problem.step_seconds(seed)
    assert found.num_fallbacks == len(found.layout)


def test_a_cut_that_ends_up_slower_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    # with bounds of zero no cut is given up early
    monkeypatch.setattr(micro_batches, "fluid_bound_s", lambda problem: 0.0)
    problem = step()
    seed = plan_greedy(problem, 5)
    found = plan_by_micro_batches(problem, 4, 60.0, seed, keep)
    assert problem.step_seconds(found.layout) <= problem.step_seconds(seed)


def test_without_time_the_seed_is_left_and_counted() -> None:
    problem = step()
    seed = plan_greedy(problem, 5)

    def forbidden(*_: object) -> GroupedMicroBatch:
        raise AssertionError("no time is left for a solver")

    found = plan_by_micro_batches(problem, 4, 0.0, seed, forbidden)
    assert found.num_fallbacks == len(found.layout)
    assert problem.step_seconds(found.layout) <= problem.step_seconds(seed)


def test_a_bad_seed_loses_to_the_best_cut() -> None:
    problem = step()
    one_by_one = [[(problem.degrees[-1], (i,))] for i in range(len(problem.lengths))]
    found = plan_by_micro_batches(problem, 4, 60.0, one_by_one, keep)
    check_layout(found.layout, problem.lengths, problem.degrees, 16, problem.capacity)
    assert problem.step_seconds(found.layout) < 0.5 * problem.step_seconds(one_by_one)


def test_only_micro_batches_of_the_chosen_layout_are_counted() -> None:
    problem = step()
    seed = plan_greedy(problem, 5)
    calls: list[int] = []

    def first_only(part: GroupingProblem, groups: Sequence[Group], limit_s: float) -> GroupedMicroBatch:
        calls.append(len(part.lengths))
        return GroupedMicroBatch(tuple(groups), 0.0, is_fallback=len(calls) > 1)

    found = plan_by_micro_batches(problem, 1, 60.0, seed, first_only)
    # the micro-batches of the seed come first, and only the first call is not a fallback
    assert found.num_fallbacks in (len(found.layout) - 1, len(found.layout))
    assert sum(calls[: len(seed)]) == len(problem.lengths)


def test_sequences_that_no_single_micro_batch_holds_are_cut_further() -> None:
    # two of 9 ranks' tokens each: tokens fit 16 ranks of a micro-batch by count, groups of powers of two do not
    capacity = flexsp_problem([1], num_ranks=16).capacity
    problem = flexsp_problem([7 * capacity, 9 * capacity], num_ranks=16)
    with pytest.raises(ValueError, match="do not fit one micro-batch"):
        plan_one_micro_batch(flexsp_problem([7 * capacity, 9 * capacity, 1], num_ranks=16))
    found = plan_by_micro_batches(problem, 3, 60.0, [[(16, (0,))], [(16, (1,))]], keep)
    check_layout(found.layout, problem.lengths, problem.degrees, 16, problem.capacity)
