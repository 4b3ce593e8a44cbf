"""Cuts into micro-batches cover all sequences, fit memory, and contain the blaster's; expected seconds are checked by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from helpers.plans.grouping_problems import flexsp_problem, lognormal_lengths, odd_problems
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.groups.cuts import (
    _cheapest_paths,
    _cut_positions,
    _lumped_tokens,
    candidate_cuts,
    expected_s,
    micro_batch_ends,
)
from hf_longctx.plan.groups.problem import GroupingProblem, Piece


def all_cuts(count: int, number: int) -> list[list[Piece]]:
    """Every cut of `count` sequences into `number` consecutive pieces."""
    cuts = itertools.combinations(range(1, count), number - 1)
    return [list(itertools.pairwise((0, *places, count))) for places in cuts]


def least_maximum_tokens(problem: GroupingProblem, number: int) -> int:
    """The fewest tokens that the fullest of `number` consecutive pieces can have."""
    return min(max(sum(problem.lengths[start:stop]) for start, stop in cut) for cut in all_cuts(len(problem.lengths), number))


@pytest.mark.wide
@settings(derandomize=True, deadline=None, max_examples=150)
@given(odd_problems(most=9), st.integers(1, 6), st.booleans())
def test_cuts_cover_and_fit_and_contain_flexsps_of_the_fewest_micro_batches(
    problem: GroupingProblem, trials: int, time_aware: bool
) -> None:
    count, room = len(problem.lengths), problem.num_ranks * problem.capacity
    cuts = candidate_cuts(problem, trials, problem.num_ranks, time_aware)
    for cut in cuts:
        assert [i for start, stop in cut for i in range(start, stop)] == list(range(count))
        assert all(start < stop and sum(problem.lengths[start:stop]) <= room for start, stop in cut)
    assert len({tuple(cut) for cut in cuts}) == len(cuts)
    fewest = next(number for number in range(1, count + 1) if least_maximum_tokens(problem, number) <= room)
    most_tokens = max(sum(problem.lengths[start:stop]) for start, stop in cuts[0])
    # the most even cut is found to a thousandth
    assert most_tokens <= least_maximum_tokens(problem, fewest) * 1.001
    assert len(cuts[0]) == fewest


@settings(derandomize=True, deadline=None, max_examples=60)
@given(odd_problems(most=9), st.integers(1, 6))
def test_cuts_by_time_come_after_those_by_tokens(problem: GroupingProblem, trials: int) -> None:
    by_tokens = candidate_cuts(problem, trials, problem.num_ranks, time_aware=False)
    assert len(by_tokens) <= trials
    assert candidate_cuts(problem, trials, problem.num_ranks, time_aware=True)[: len(by_tokens)] == by_tokens
    # every cut has a different number of micro-batches, in ascending order
    sizes = [len(cut) for cut in by_tokens]
    assert sizes == sorted(set(sizes))


def test_no_cut_by_time_overfills_memory() -> None:
    # 26 of 4 tokens fill 104 of 100, which lumped sequences may, and one micro-batch would save a fixed cost
    problem = replace(flexsp_problem((4,) * 26), num_ranks=1, capacity=100, degrees=(1,), group_s=(9.0,))
    problem = replace(problem, seconds=problem.seconds[:1])
    for cut in candidate_cuts(problem, 1, 1, time_aware=True):
        assert all(4 * (stop - start) <= 100 for start, stop in cut)


@pytest.mark.parametrize("seed", range(4))
def test_cuts_by_tokens_are_balanced_to_a_thousandth(seed: int) -> None:
    problem, _ = flexsp_problem(lognormal_lengths(seed, 300, 100_000, 5000, 1.2)).longest_first()
    for cut in candidate_cuts(problem, 5, 64, time_aware=False):
        # compare with the exact cut of the blaster
        ends = micro_batch_ends(problem.lengths, len(cut))
        exact = max(sum(problem.lengths[start:stop]) for start, stop in itertools.pairwise((0, *ends)))
        assert max(sum(problem.lengths[start:stop]) for start, stop in cut) <= exact * 1.001


def test_cuts_by_time_fill_the_slack_of_a_long_sequence() -> None:
    # the long one keeps 8 of 64 ranks busy for 3 s, in which the others could do twice what memory holds; tokens share evenly
    problem = replace(flexsp_problem((50_000, *[6000] * 100), num_ranks=64), degrees=(1, 2, 4, 8))
    problem = replace(problem, seconds=problem.seconds[:4], group_s=problem.group_s[:4])
    cuts = candidate_cuts(problem, 1, 64, time_aware=True)
    assert len(cuts[0]) == 2
    assert max(cut[0][1] for cut in cuts[1:]) > cuts[0][0][1]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(2, 6), st.randoms(use_true_random=False))
def test_the_cheapest_path_equals_brute_force(count: int, draw: object) -> None:
    generator = np.random.default_rng(draw.randint(0, 10**6))  # type: ignore[attr-defined]
    costs = generator.uniform(0.0, 1.0, (count + 1, count + 1))
    costs[generator.uniform(size=costs.shape) < 0.4] = np.inf
    places = np.cumsum(generator.integers(1, 4, count + 1)) - 1
    # a second table must not change the answer for the first
    found, _ = _cheapest_paths(np.stack([costs, costs[::-1]]), places)
    at = {int(place): index for index, place in enumerate(places)}
    paths = [
        list(itertools.pairwise((0, *inner, count)))
        for number in range(count)
        for inner in itertools.combinations(range(1, count), number)
    ]
    best = min(sum(costs[step] for step in path) for path in paths)
    if math.isinf(best):
        assert found == []
    else:
        assert [found[0][0], found[-1][1]] == [places[0], places[-1]]
        assert sum(costs[at[start], at[stop]] for start, stop in found) == pytest.approx(best)


@pytest.mark.parametrize("count", [1, 239, 240, 1000, 20_000])
def test_places_to_cut_are_few_and_reach_from_end_to_end(count: int) -> None:
    lengths = np.sort(np.array(lognormal_lengths(3, count, 100_000), dtype=np.float64))[::-1]
    places = _cut_positions(lengths)
    assert len(places) <= 242
    assert [places[0], places[-1]] == [0, count]
    assert (np.diff(places) > 0).all()


def test_a_sequence_is_lumped_with_as_many_of_its_kind_as_fit() -> None:
    # rooms of 100, 200 and 400: 100 fills one; 60 wastes 40, or three of them share 200; 34 go two to 100, or five to 200;
    # 101 wastes 99, or three of them share 400; 300 has 400
    problem = replace(flexsp_problem((300, 101, 100, 60, 34)), capacity=100, degrees=(1, 2, 4), num_ranks=4)
    assert _lumped_tokens(problem).tolist() == pytest.approx([400.0, 400 / 3, 100.0, 200 / 3, 40.0])


def test_uneven_groups_and_overfilled_memory_are_expected_to_take_longer() -> None:
    # two sequences of 60 in rooms of 100 waste 80 of 200 tokens; four lumped ones take 800 / 3 of 200
    problem = replace(
        flexsp_problem((60, 60, 60, 60)),
        capacity=100,
        degrees=(1, 2),
        num_ranks=2,
        seconds=np.array([[1.0] * 4, [0.5] * 4]),
        group_s=(0.1, 0.1),
    )
    # a second of one rank each, on groups that use nine tenths of the time; alone on two ranks it takes half a second
    expected = [1 / 1.8 + 0.1, 3 / 1.8 + 0.1, 4 / 1.8 * 4 / 3 + 0.1]
    assert expected_s(problem, [(0, 1), (0, 3), (0, 4)], 2).tolist() == pytest.approx(expected)
    # a sequence that takes longer than its share of all work decides
    slow = replace(problem, seconds=np.array([[3.0, 1, 1, 1], [2.0, 0.5, 0.5, 0.5]]))
    assert expected_s(slow, [(0, 1)], 2).tolist() == pytest.approx([4 / 1.8 + 0.1])
