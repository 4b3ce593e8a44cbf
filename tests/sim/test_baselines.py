"""Baselines cover every sequence within memory, and equal the published methods by hand and by brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from helpers.plans.cost_models import COST_KINDS, cost_model
from helpers.plans.grouping_problems import check_layout, layout_seconds, least_seconds
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.settings import PlannerConfig
from hf_longctx.plan.core.types import GroupShape
from hf_longctx.plan.groups.problem import GroupingProblem, Layout
from hf_longctx.sim.baselines import (
    BASELINES,
    CannotRunError,
    all_baselines,
    best_fit,
    best_static_layout,
    even_runs,
    fcp_groups,
    fcp_layout,
    hybrid_cp_layout,
    pack_by_memory,
    soonest_degrees,
    static_layout,
)


def hand_problem(
    lengths: tuple[int, ...],
    num_ranks: int,
    degrees: tuple[int, ...],
    capacity: int = 10,
    exchange: float = 0.0,
    group_s: float = 1.0,
) -> GroupingProblem:
    """A problem in which a token costs one second of one rank, and `exchange` seconds for every doubling of the group."""
    seconds = np.array([[length * (1 / d + exchange * math.log2(d)) for length in lengths] for d in degrees])
    shapes = {degree: GroupShape(degree, degree) for degree in degrees}
    return GroupingProblem(lengths, num_ranks, capacity, degrees, shapes, seconds, (group_s,) * len(degrees))


def real_problem(lengths: tuple[int, ...], kind: str, num_ranks: int, degrees: tuple[int, ...], capacity: int) -> GroupingProblem:
    return GroupingProblem.build(lengths, cost_model(kind, num_ranks), PlannerConfig(capacity, degrees))


def as_layout(layout: tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]) -> Layout:
    return [list(groups) for groups in layout]


lists = st.lists(st.integers(1, 4000), min_size=1, max_size=40)
pools = st.sampled_from([(1, (1,)), (4, (1, 2, 4)), (6, (2, 6)), (8, (1, 2, 4, 8)), (8, (4, 8))])


@pytest.mark.wide
@given(lists, st.sampled_from(COST_KINDS), pools, st.integers(0, 3000))
@settings(max_examples=50, deadline=None)
def test_every_layout_covers_each_sequence_once_within_memory(
    lengths: list[int], kind: str, pool: tuple[int, tuple[int, ...]], extra: int
) -> None:
    num_ranks, degrees = pool
    capacity = -(-max(lengths) // degrees[-1]) + extra
    costs = cost_model(kind, num_ranks)
    problem = GroupingProblem.build(lengths, costs, PlannerConfig(capacity, degrees))
    found = all_baselines(problem, max(lengths))
    assert tuple(baseline.name for baseline in found) == BASELINES
    for baseline in found:
        if baseline.can_run:
            check_layout(as_layout(baseline.layout), lengths, degrees, num_ranks, capacity)
            assert baseline.step_s == pytest.approx(layout_seconds(as_layout(baseline.layout), lengths, costs))
            assert baseline.step_s >= problem.lower_bound_s() * (1 - 1e-9)
        else:
            assert baseline.name in baseline.detail and not baseline.layout
    # the best degree of a batch is no worse than one for all of them
    assert found[1].step_s <= found[0].step_s
    # all but Megatron, which needs powers of two, can run whenever a plan exists
    assert all(baseline.can_run for baseline in (found[0], found[1], found[3]))


@given(lists, st.sampled_from([(7, (1, 2, 3, 5)), (8, tuple(range(1, 9))), (5, (3, 5))]), st.integers(0, 500), st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_integer_degrees_are_laid_out_too(
    lengths: list[int], pool: tuple[int, tuple[int, ...]], extra: int, exchange: float
) -> None:
    num_ranks, degrees = pool
    capacity = -(-max(lengths) // degrees[-1]) + extra
    problem = hand_problem(tuple(lengths), num_ranks, degrees, capacity, exchange)
    for baseline in all_baselines(problem, max(lengths)):
        if baseline.can_run:
            check_layout(as_layout(baseline.layout), lengths, degrees, num_ranks, capacity)


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=5), st.sampled_from(COST_KINDS), st.integers(1, 2000))
@settings(max_examples=25, deadline=None)
def test_no_baseline_beats_the_best_layout_of_all(lengths: list[int], kind: str, extra: int) -> None:
    degrees, capacity = (1, 2, 4), -(-max(lengths) // 4) + extra
    costs = cost_model(kind, 4)
    problem = GroupingProblem.build(lengths, costs, PlannerConfig(capacity, degrees))
    best_s = least_seconds(lengths, costs, degrees, 4, capacity)
    for baseline in all_baselines(problem, max(lengths)):
        assert baseline.step_s >= best_s * (1 - 1e-9)


def test_the_layout_does_not_depend_on_the_order_of_the_sequences() -> None:
    lengths = (900, 30, 500, 120, 700, 60, 250, 410)
    one = all_baselines(real_problem(lengths, "attention", 8, (1, 2, 4, 8), 200), 1600)
    other = all_baselines(real_problem(lengths[::-1], "attention", 8, (1, 2, 4, 8), 200), 1600)
    assert [baseline.step_s for baseline in one] == pytest.approx([baseline.step_s for baseline in other])


def test_best_fit_by_hand() -> None:
    # 9 | 7 2 | 6 3: the fullest pack with room for 3 is that of 6, and 2 goes to 7
    assert best_fit((9, 6, 7, 3, 2), 9) == [[0], [2, 4], [1, 3]]


def test_static_by_hand() -> None:
    # two groups of two ranks, 20 tokens each, filled to 18: packs 18 | 10 8 | 6 5 4 2; the third pack is a micro-batch of its
    # own and is dealt out anew: 6 2 | 5 4. Seconds: 18 / 2 + 1, then (5 + 4) / 2 + 1
    problem = hand_problem((6, 10, 4, 18, 5, 8, 2), 4, (1, 2, 4))
    layout = static_layout(problem, 2)
    assert layout == [[(2, (3,)), (2, (1, 5))], [(2, (0, 6)), (2, (4, 2))]]
    assert problem.step_seconds(layout) == 10.0 + 5.5


def test_a_sequence_above_the_fill_still_fits_alone() -> None:
    problem = hand_problem((20, 19, 1), 4, (2, 4))
    # a longest sequence above the limit raises it for all packs
    assert static_layout(problem, 2) == [[(2, (0,)), (2, (1, 2))]]


def test_a_last_micro_batch_that_cannot_be_dealt_out_stays_packed() -> None:
    # with completely filled packs, 10 + 10 | 9 6 5: dealt out longest first, 9 and 6 are apart and 5 joins 6
    problem = hand_problem((10, 10, 9, 6, 5), 2, (1, 2))
    layout = static_layout(problem, 1, fill=1.0)
    check_layout(layout, problem.lengths, (1,), 2, 10)
    # three groups of 6 4 | 5 5 | 4 4 2 dealt out anew would leave no room for the last
    brim = hand_problem((6, 5, 5, 4, 4, 4, 2), 3, (1, 3))
    assert static_layout(brim, 1, fill=1.0) == [[(1, (0, 3)), (1, (1, 2)), (1, (4, 5, 6))]]


def test_the_static_degree_holds_the_limit_and_batch_ada_the_batch() -> None:
    # exchanges make degree 1 the best; a limit of 40 tokens needs 4 ranks, this batch only one
    problem = hand_problem((8, 8, 8, 8), 4, (1, 2, 4), exchange=0.5)
    static, ada = all_baselines(problem, 40)[:2]
    assert {degree for groups in static.layout for degree, _ in groups} == {4}
    assert {degree for groups in ada.layout for degree, _ in groups} == {1}
    assert ada.step_s == 9.0
    # 32 tokens in one group of 4 at fill 0.9: all but none is left over, 32 / 4 + 32 * 0.5 * 2 + 1
    assert static.step_s == 8.0 + 32.0 + 1.0


def test_static_degrees_divide_the_ranks() -> None:
    # three ranks would be faster, 25 (1 / 3 + log2(3) / 2) against 25 (1 / 4 + 1), but leave a fourth idle
    problem = hand_problem((25,), 4, (1, 2, 3, 4), exchange=0.5)
    assert {degree for groups in best_static_layout(problem, 25) for degree, _ in groups} == {4}


def test_hybrid_cp_by_hand() -> None:
    # 17 tokens need two ranks, 9, 8 and 7 one: work 17^2 / 2 = 144.5, 81, 64, 49. The queues, two for two degrees, close at
    # 1.1 * 338.5 / 2 = 186: [17] and [9 8 7]. 17 takes two ranks, 9 and 8 one each; 7 finds no rank with room, since its
    # group would hold 15 of 10 tokens, and waits. Alone in the next micro-batch, it is widened to 2 and then 4 ranks.
    problem = hand_problem((7, 17, 9, 8), 4, (1, 2, 4))
    assert hybrid_cp_layout(problem) == [[(2, (1,)), (1, (2,)), (1, (3,))], [(4, (0,))]]
    # 17 / 2 + 1 and 9 + 1 in the first micro-batch, 7 / 4 + 1 in the second
    assert problem.step_seconds(hybrid_cp_layout(problem)) == 10.0 + 2.75


def test_hybrid_cp_trims_what_unbalances_a_full_round() -> None:
    # work 36 and 25 each on one rank, then 5 more joins the lighter one: 25 + 25 = 50 against 36 is worse than 36 against 25
    problem = hand_problem((6, 5, 5), 2, (1, 2), capacity=20)
    first, second = hybrid_cp_layout(problem)
    assert sorted(first) == [(1, (0,)), (1, (1,))]
    assert second == [(2, (2,))]


def test_hybrid_cp_takes_the_next_queue_when_the_first_is_stuck() -> None:
    # 12 and 11 need two of three ranks, and no group of two holds both; 6, in a queue of its own because 72, 60.5 and 36
    # are two by two above 1.1 * 168.5 / 2 = 92.7, takes the third rank. 11 waits, and its two ranks cannot become four
    problem = hand_problem((12, 11, 6), 3, (1, 2))
    assert hybrid_cp_layout(problem) == [[(2, (0,)), (1, (2,))], [(2, (1,))]]


def test_hybrid_cp_leaves_a_group_its_only_sequence() -> None:
    # work 200, 25 and 16: without the first the rest would be more even
    problem = hand_problem((20, 5, 4), 4, (1, 2, 4))
    assert hybrid_cp_layout(problem) == [[(2, (0,)), (1, (1,)), (1, (2,))]]


def test_hybrid_cp_stops_a_round_when_it_is_balanced() -> None:
    # one sequence on two ranks, work 20^2 / 2 = 200, and two of 14, work 196: within 5 %, so the short ones wait although
    # the single ranks have room for two tokens more
    problem = hand_problem((20, 14, 14, 2, 2), 4, (1, 2, 4), capacity=16)
    first, second = hybrid_cp_layout(problem)
    assert first == [(2, (0,)), (1, (1,)), (1, (2,))]
    assert second == [(2, (3,)), (2, (4,))]


def test_hybrid_cp_needs_a_power_of_two() -> None:
    problem = hand_problem((25,), 3, (1, 2, 3))
    with pytest.raises(CannotRunError, match="25 tokens fits none of the powers of two"):
        hybrid_cp_layout(problem)
    megatron = all_baselines(problem, 30)[2]
    assert (megatron.can_run, megatron.layout, megatron.step_s) == (False, (), math.inf)
    assert megatron.detail.startswith("Megatron hybrid-CP cannot run: a sequence of 25 tokens")


def test_packs_are_those_that_memory_asks_for() -> None:
    # 25 needs three ranks of 10 and leaves 5, 12 needs two and leaves 8; 9 opens a pack, 7 and 5 fill 12's and 25's up
    problem = hand_problem((5, 12, 25, 7, 9), 8, tuple(range(1, 9)))
    assert pack_by_memory(problem, range(5)) == [(3, [2, 0]), (2, [1, 3]), (1, [4])]


@pytest.mark.parametrize("degrees", [(1, 2, 3, 4, 5, 6), (1, 2, 4), (2, 3)])
@pytest.mark.parametrize("exchange", [0.0, 0.05, 0.4])
def test_degrees_are_the_best_of_all_by_brute_force(degrees: tuple[int, ...], exchange: float) -> None:
    problem = hand_problem((23, 9, 14, 4, 6), 9, degrees, capacity=12, exchange=exchange)
    packs = [(degrees[-1] if degrees[-1] < 3 else 2, [0]), (degrees[0], [1, 3]), (degrees[0], [4])]
    options = [
        (max(problem.group_seconds((d, tuple(part))) for d, (_, part) in zip(chosen, packs, strict=True)), sum(chosen))
        for chosen in itertools.product(degrees, repeat=3)
        if sum(chosen) <= 9 and all(d >= least for d, (least, _) in zip(chosen, packs, strict=True))
    ]
    chosen = soonest_degrees(problem, packs)
    makespan = max(problem.group_seconds((d, tuple(part))) for d, (_, part) in zip(chosen, packs, strict=True))
    # among equally fast degrees, those that take the fewest ranks
    assert (makespan, sum(chosen)) == min(options)


def test_packs_that_need_more_ranks_than_there_are_get_none() -> None:
    problem = hand_problem((25, 25), 4, (1, 2, 3, 4))
    assert soonest_degrees(problem, [(3, [0]), (3, [1])]) == []
    assert fcp_groups(problem, (0, 1)) == []
    # the batch is cut in two, and each half gets all ranks
    assert fcp_layout(problem) == [[(4, (0,))], [(4, (1,))]]


def test_a_run_that_needs_too_many_ranks_is_cut_in_two() -> None:
    # no run may have more tokens than 40, so by tokens they are 40 | 15 11 11 3. The packs of the second, 15 3 | 11 | 11, need
    # two ranks each of four; its halves are 15 | 11 11 3, since 15 11 | 11 3 has more tokens in one
    problem = hand_problem((40, 15, 11, 11, 3), 4, (1, 2, 4))
    assert fcp_layout(problem) == [[(4, (0,))], [(4, (1,))], [(2, (2, 4)), (2, (3,))]]


def test_more_micro_batches_than_fit_are_tried() -> None:
    # together 20 takes two ranks and 20 / 2 + 1 seconds; one after the other both have four, 20 / 4 + 1 and 10 / 4 + 1
    problem = hand_problem((20, 10), 4, (1, 2, 4))
    assert problem.step_seconds(fcp_layout(problem, trials=1)) == 11.0
    assert fcp_layout(problem) == [[(4, (0,))], [(4, (1,))]]


def test_idle_ranks_are_handed_out_unless_they_slow_a_group_down() -> None:
    # 20 needs two ranks; 4 is done before it on one, so two of five ranks stay idle
    lengths = (20, 4)
    assert fcp_groups(hand_problem(lengths, 5, (1, 2, 3, 4)), (0, 1)) == [(4, (0,)), (1, (1,))]
    # exchanges cost the gain: 20 / 2 + 20 * 0.25 = 15 on two, 20 / 4 + 20 * 0.5 = 15 on four, 4 on one, 4 / 2 + 1 on two
    dear = hand_problem(lengths, 4, (1, 2, 4), exchange=0.25)
    assert fcp_groups(dear, (0, 1)) == [(2, (0,)), (2, (1,))]
    # 4 / 2 + 4 * 0.75 = 5 on two is slower than 4 on one
    dearer = hand_problem(lengths, 4, (1, 2, 4), exchange=0.75)
    assert fcp_groups(dearer, (0, 1)) == [(2, (0,)), (1, (1,))]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_even_runs_have_the_least_maximum_by_brute_force(lengths: list[int], number: int) -> None:
    count = len(lengths)
    runs = even_runs(lengths, range(count), number)
    assert [i for run in runs for i in run] == list(range(count)) and len(runs) <= number
    cuts = [
        max(sum(lengths[start:stop]) for start, stop in itertools.pairwise((0, *inner, count)))
        for size in range(min(number, count))
        for inner in itertools.combinations(range(1, count), size)
    ]
    assert max(sum(lengths[i] for i in run) for run in runs) == min(cuts)


def test_details_name_the_groups() -> None:
    static = all_baselines(hand_problem((6, 10, 4, 18, 5, 8), 4, (1, 2, 4), exchange=0.5), 20)[0]
    assert static.detail == "2 micro-batches: <2x2>, <2x2>"


def test_a_limit_no_degree_holds_is_said_by_name() -> None:
    static, ada, *_ = all_baselines(hand_problem((8, 8), 4, (1, 2, 4)), 41)
    assert not static.can_run and static.detail.startswith("static cannot run: no degree of (1, 2, 4)")
    assert "41 tokens" in static.detail and ada.can_run


def test_a_sequence_above_the_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="30 tokens, but the limit is 20"):
        all_baselines(hand_problem((30,), 4, (1, 2, 4)), 20)


def test_no_sequences_take_no_time() -> None:
    assert [(found.layout, found.step_s) for found in all_baselines(hand_problem((), 4, (1, 2, 4)), 20)] == [((), 0)] * len(
        BASELINES
    )
