"""Layouts of a stage: what enumeration finds, and bounds that keep the best one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hf_longctx.plan.pipeline.layouts import promising, stage_layouts


@pytest.mark.parametrize(
    "num_ranks, degrees", [(4, (1, 2, 4)), (3, (1, 2)), (5, (2, 4)), (3, (2,)), (8, (1, 2, 4, 8)), (7, (2, 3, 5)), (2, (4,))]
)
def test_layouts_are_all_full_ones_of_up_to_three_degrees(num_ranks: int, degrees: tuple[int, ...]) -> None:
    found = stage_layouts(num_ranks, degrees)
    assert len(set(found)) == len(found)
    everything = {
        tuple(sorted(chosen, reverse=True))
        for count in range(1, num_ranks + 1)
        for chosen in itertools.combinations_with_replacement(degrees, count)
        if sum(chosen) <= num_ranks and num_ranks - sum(chosen) < degrees[0] and len(set(chosen)) <= 3
    }
    assert set(found) == everything


def test_many_ranks_have_hundreds_of_layouts_not_thousands() -> None:
    assert len(stage_layouts(32, (*range(1, 9), 16, 24, 32))) < 200
    assert (8,) * 4 in stage_layouts(32, (1, 2, 4, 8, 16, 32))


def test_promising_layouts_hold_the_longest_sequence_and_those_of_one_degree_stay() -> None:
    lengths = np.array([100, 10, 10, 10])
    seconds = {degree: lengths / degree**0.9 for degree in (1, 2, 4)}
    longest = {1: 30, 2: 60, 4: 200}
    layouts = stage_layouts(8, (1, 2, 4))
    kept = promising(layouts, seconds, lengths, longest, 2)
    # 100 tokens need four ranks
    assert kept == [(4, 4), (4, 1, 1, 1, 1), (4, 2, 1, 1)]
    assert promising(layouts, seconds, lengths, {1: 30, 2: 60, 4: 90}, 2) == []


def test_layouts_in_which_the_longest_sequence_is_done_late_are_not_promising() -> None:
    lengths = np.array([100, 10, 10, 10])
    seconds = {degree: lengths / degree**0.9 for degree in (1, 2, 4)}
    # alone it takes 100 s on one rank, 54 on two, 29 on four, and all work spread over 8 ranks 16
    kept = promising(stage_layouts(8, (1, 2, 4)), seconds, lengths, {1: 200, 2: 200, 4: 200}, 2)
    assert kept == [(4, 4), (2, 2, 2, 2), (1,) * 8, (4, 1, 1, 1, 1), (4, 2, 1, 1)]
