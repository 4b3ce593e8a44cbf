"""The greedy planner is close to optimal, never slower than a fixed degree, and depends on the lengths only."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from helpers.plans.cost_models import COST_KINDS, cost_model
from helpers.plans.grouping_problems import (
    check_layout,
    check_problem_layout,
    flexsp_problem,
    flexsp_problems,
    layout_seconds,
    least_micro_batch_seconds,
    least_seconds,
    least_step_seconds,
    lognormal_lengths,
    odd_problems,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.settings import PlannerConfig, default_degrees
from hf_longctx.plan.groups.greedy import (
    _pods,
    group_micro_batch,
    group_pieces,
    overlapping_static_layouts,
    plan_greedy,
    plan_one_micro_batch,
    plan_static,
)
from hf_longctx.plan.groups.local_search import _State
from hf_longctx.plan.groups.problem import GroupingProblem, Layout
from hf_longctx.sim.baselines import BASELINES, all_baselines

DEGREES = (1, 2, 4)
TRIALS = 5
kinds = st.sampled_from(COST_KINDS)
# skewed lengths: half of them below 200, a few up to the 1600 tokens of the largest group
skewed = st.one_of(st.integers(8, 200), st.integers(8, 400), st.integers(8, 1600))


def build(lengths: list[int] | tuple[int, ...], kind: str, num_ranks: int = 4, capacity: int = 400) -> GroupingProblem:
    config = PlannerConfig(capacity, default_degrees(num_ranks, 8, "ulysses"))
    return GroupingProblem.build(lengths, cost_model(kind, num_ranks), config)


def greedy_over_best(lengths: list[int] | tuple[int, ...], kind: str, num_ranks: int = 4, capacity: int = 400) -> float:
    """Seconds of the greedy layout divided by those of the best one."""
    costs, degrees = cost_model(kind, num_ranks), default_degrees(num_ranks, 8, "ulysses")
    layout = plan_greedy(build(lengths, kind, num_ranks, capacity), TRIALS)
    check_layout(layout, lengths, degrees, num_ranks, capacity)
    return layout_seconds(layout, lengths, costs) / least_seconds(lengths, costs, degrees, num_ranks, capacity)


@pytest.mark.wide
@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(skewed, min_size=1, max_size=5), kinds)
def test_greedy_stays_within_five_percent_of_brute_force(lengths: list[int], kind: str) -> None:
    # all tokens fit one micro-batch; the next test has several
    capacity = max(400, -(-sum(lengths) // 4))
    ratio = greedy_over_best(lengths, kind, capacity=capacity)
    assert 1 - 1e-9 <= ratio <= 1.05


@pytest.mark.wide("8-attention", "8-exchange", "8-fixed", "8-linear", "8-windows")
@pytest.mark.parametrize("kind", COST_KINDS)
@pytest.mark.parametrize("count", [6, 7, 8])
def test_greedy_stays_within_five_percent_on_more_sequences(kind: str, count: int) -> None:
    for seed in range(2):
        lengths = lognormal_lengths(seed, count, 1600)
        assert greedy_over_best(lengths, kind, capacity=max(400, -(-sum(lengths) // 4))) <= 1.05


@pytest.mark.wide(
    "4-600-lengths6-attention",
    "4-600-lengths6-exchange",
    "4-600-lengths6-fixed",
    "4-600-lengths6-linear",
    "4-600-lengths6-windows",
)
@pytest.mark.parametrize("kind", COST_KINDS)
@pytest.mark.parametrize(
    ("num_ranks", "capacity", "lengths"),
    [
        (4, 300, (585, 372, 249, 737)),
        (4, 300, (1177, 503, 463, 211)),
        (4, 600, (982, 225, 1184, 113)),
        (4, 1000, (2694, 220, 1959, 1761, 597)),
        (4, 600, (453, 1391, 1241, 460, 320)),
        (4, 300, (369, 199, 131, 201, 613)),
        (4, 600, (92, 153, 396, 157, 1126, 420, 2400, 361)),
        (1, 1000, (77, 157, 882, 631, 115, 268, 65, 595)),
        (5, 300, (750, 305, 209, 67, 325)),
    ],
)
def test_greedy_stays_within_five_percent_where_memory_is_tight(
    kind: str, num_ranks: int, capacity: int, lengths: tuple[int, ...]
) -> None:
    """With 1 to 2.5 times the tokens of a micro-batch, packing decides how many micro-batches there are."""
    assert greedy_over_best(lengths, kind, num_ranks, capacity) <= 1.05


@pytest.mark.wide
@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.lists(skewed, min_size=1, max_size=16), kinds, st.sampled_from([400, 1000]))
def test_greedy_never_loses_to_a_fixed_degree(lengths: list[int], kind: str, capacity: int) -> None:
    problem, costs = build(lengths, kind, capacity=capacity), cost_model(kind, 4)
    seconds = layout_seconds(plan_greedy(problem, TRIALS), lengths, costs)
    for degree in DEGREES:
        if max(lengths) <= degree * capacity:
            static = plan_static(problem, TRIALS, degree)
            assert seconds <= layout_seconds(static, lengths, costs) * (1 + 1e-9)


@pytest.mark.wide
@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(skewed, min_size=1, max_size=20), kinds, st.sampled_from([1, 2, 3, 4, 5, 6, 8]), st.sampled_from([400, 1000]))
def test_greedy_keeps_every_sequence_within_ranks_memory_and_bound(
    lengths: list[int], kind: str, num_ranks: int, capacity: int
) -> None:
    degrees = default_degrees(num_ranks, 8, "ulysses")
    lengths = [min(length, degrees[-1] * capacity) for length in lengths]
    problem = build(lengths, kind, num_ranks, capacity)
    layout = plan_greedy(problem, TRIALS)
    check_layout(layout, lengths, degrees, num_ranks, capacity)
    assert layout_seconds(layout, lengths, cost_model(kind, num_ranks)) >= problem.lower_bound_s() * (1 - 1e-9)


@pytest.mark.wide
@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.lists(skewed, min_size=2, max_size=16), kinds, st.randoms(use_true_random=False))
def test_the_cost_does_not_depend_on_the_order_of_sequences(lengths: list[int], kind: str, draw: random.Random) -> None:
    shuffled = list(lengths)
    draw.shuffle(shuffled)
    costs = cost_model(kind, 4)
    first, second = (layout_seconds(plan_greedy(build(case, kind), TRIALS), case, costs) for case in (lengths, shuffled))
    assert first == pytest.approx(second, rel=1e-9)


@pytest.mark.parametrize("kind", COST_KINDS)
def test_greedy_is_deterministic(kind: str) -> None:
    lengths = lognormal_lengths(11, 40, 1600)
    assert plan_greedy(build(lengths, kind), TRIALS) == plan_greedy(build(lengths, kind), TRIALS)


@pytest.mark.parametrize("kind", COST_KINDS)
@pytest.mark.parametrize("degree", DEGREES)
def test_static_uses_its_one_degree_and_keeps_memory(kind: str, degree: int) -> None:
    lengths = lognormal_lengths(5, 12, degree * 400)
    layout = plan_static(build(lengths, kind), TRIALS, degree)
    check_layout(layout, lengths, (degree,), 4, 400)


@pytest.mark.parametrize("kind", COST_KINDS)
def test_static_without_a_degree_takes_the_best_one(kind: str) -> None:
    lengths = lognormal_lengths(6, 12, 400)
    problem = build(lengths, kind)
    best = min(problem.step_seconds(plan_static(problem, TRIALS, degree)) for degree in DEGREES)
    assert problem.step_seconds(plan_static(problem, TRIALS)) == best


def test_static_skips_degrees_that_are_too_small_and_refuses_a_given_one() -> None:
    problem = build([700, 20], "attention")
    assert {degree for groups in plan_static(problem, TRIALS) for degree, _ in groups} <= {2, 4}
    with pytest.raises(ValueError, match="700 tokens does not fit a group of 1 ranks of 400 tokens each; raise static_degree"):
        plan_static(problem, TRIALS, 1)


def test_more_trials_never_hurt_a_fixed_degree() -> None:
    problem = build(lognormal_lengths(8, 20, 1600), "fixed")
    seconds = [problem.step_seconds(plan_static(problem, trials)) for trials in (1, 2, 4, 8)]
    assert seconds == sorted(seconds, reverse=True)


def test_equal_sequences_are_spread_evenly() -> None:
    # eight of 100 tokens on four ranks that hold 400 each: two on every rank, in one micro-batch
    [groups] = plan_greedy(build([100] * 8, "attention"), TRIALS)
    assert [(degree, len(members)) for degree, members in groups] == [(1, 2)] * 4


def test_one_long_sequence_gets_a_group_and_short_ones_the_other_ranks() -> None:
    # 700 tokens need two ranks; where exchanges are dear, four are slower than two and the short ones run beside them
    [groups] = plan_greedy(build([700, 300, 300], "exchange"), TRIALS)
    assert (2, (0,)) in groups


def test_the_cost_of_a_long_batch_does_not_depend_on_the_order_of_sequences() -> None:
    lengths = (426, 115, 130, 1690, 438, 472, 159, 239, 152, 172, 155, 956)
    lengths += (202, 454, 628, 458, 615, 385, 2470, 288, 49, 917, 2540, 343)
    shuffled = (202, 472, 115, 438, 385, 628, 956, 343, 49, 426, 152, 2470)
    shuffled += (288, 615, 155, 239, 159, 2540, 130, 1690, 458, 172, 454, 917)
    assert sorted(lengths) == sorted(shuffled)
    costs = cost_model("exchange", 5)
    first, second = (
        layout_seconds(plan_greedy(build(case, "exchange", 5, 600), TRIALS), case, costs) for case in (lengths, shuffled)
    )
    assert first == pytest.approx(second, rel=1e-9)


@pytest.mark.parametrize("kind", COST_KINDS)
def test_every_move_of_the_local_search_makes_the_step_faster(kind: str) -> None:
    starts: list[tuple[tuple[int, ...], Layout]] = [
        # the last micro-batch empties at once; putting the long sequence there costs a whole group again
        ((600, 10, 10), [[(1, (0,)), (1, (1,)), (1, ()), (1, ())], [(4, (2,))]]),
        ((900, 500, 40, 30, 8), [[(2, (0,)), (1, (2,)), (1, (3,))], [(4, (1,))], [(4, (4,))]]),
    ]
    for lengths, start in starts:
        state = _State(build(lengths, kind, capacity=1000), start, budget=10**9, across=True)
        costs = cost_model(kind, 4)
        seconds = layout_seconds(state.layout(), lengths, costs)
        for _ in range(20):
            if not state.improve_once():
                break
            before_s, seconds = seconds, layout_seconds(state.layout(), lengths, costs)
            assert seconds < before_s


@pytest.mark.wide
def test_one_micro_batch_is_within_a_percent_of_the_bound_and_of_what_programs_found() -> None:
    gaps = []
    for name, problem, bound_s, best_milp_s in flexsp_problems():
        groups = group_micro_batch(problem)
        check_problem_layout([groups], problem)
        seconds = problem.micro_batch_seconds(groups)
        gaps.append(seconds / bound_s - 1)
        assert gaps[-1] <= 0.025, name
        assert seconds <= best_milp_s * 1.01, name
        # FlexSP is this search with fewer degrees, and may be lucky
        others = [other for other in BASELINES if other != "FlexSP"]
        for baseline in all_baselines(problem, max(problem.lengths), others):
            # baselines may need several micro-batches
            assert not baseline.can_run or seconds <= baseline.step_s * (1 + 1e-9), (name, baseline.name)
    assert np.mean(gaps) <= 0.01


@settings(derandomize=True, deadline=None, max_examples=60)
@given(odd_problems(most=5, longest_first=False))
def test_groups_of_one_micro_batch_keep_their_limits_and_come_near_brute_force(problem: GroupingProblem) -> None:
    best_s = least_micro_batch_seconds(problem)
    groups = group_micro_batch(problem)
    assert bool(groups) == (best_s < float("inf"))
    if groups:
        check_problem_layout([groups], problem)
        # if sequences cost the same whatever their length, memory may mislead the search
        factor = 1.05 if len(set(problem.seconds[0].tolist())) == len(set(problem.lengths)) else 1.5
        assert best_s * (1 - 1e-9) <= problem.micro_batch_seconds(groups) <= best_s * factor
        [alone] = plan_one_micro_batch(problem)
        assert problem.micro_batch_seconds(alone) <= problem.micro_batch_seconds(groups)
    else:
        with pytest.raises(ValueError, match="do not fit one micro-batch"):
            plan_one_micro_batch(problem)


def test_vector_packing_goes_on_where_no_runs_fit_memory() -> None:
    # 24 + 1 + 1 + 1 on five ranks of 7 and 12 on two; runs would give 1 + 1 to the two, and the last one no rank
    problem = replace(flexsp_problem((24, 12, 1, 1, 1)), num_ranks=7, capacity=7, degrees=(1, 2, 5))
    problem = replace(problem, seconds=problem.seconds[:3], group_s=problem.group_s[:3])
    assert group_micro_batch(problem)
    assert group_pieces(problem, [(0, 5)]) != [[]]


@settings(derandomize=True, deadline=None, max_examples=40)
@given(odd_problems(most=5, longest_first=False))
def test_odd_problems_are_planned_near_brute_force_and_above_the_bound(problem: GroupingProblem) -> None:
    layout, best_s = plan_greedy(problem, TRIALS), least_step_seconds(problem)
    check_problem_layout(layout, problem)
    seconds = problem.step_seconds(layout)
    assert best_s * (1 - 1e-9) <= seconds <= best_s * 1.1
    assert problem.lower_bound_s() <= best_s * (1 + 1e-9)
    assert seconds <= problem.step_seconds(plan_static(problem, TRIALS)) * (1 + 1e-9)


@settings(derandomize=True, deadline=None, max_examples=20)
@given(odd_problems(most=40, longest_first=False), st.booleans())
def test_odd_problems_of_more_sequences_keep_their_limits(problem: GroupingProblem, time_aware: bool) -> None:
    layout = plan_greedy(problem, TRIALS, time_aware)
    check_problem_layout(layout, problem)
    seconds = problem.step_seconds(layout)
    assert seconds >= problem.lower_bound_s() * (1 - 1e-9)
    for degree in problem.degrees:
        if max(problem.lengths) <= degree * problem.capacity:
            static = plan_static(problem, TRIALS, degree)
            check_problem_layout(static, problem)
            assert {used for groups in static for used, _ in groups} == {degree}
            assert seconds <= problem.step_seconds(static) * (1 + 1e-9)


@pytest.mark.daily("-40")
@pytest.mark.parametrize("exponent", [-40, 20])
def test_the_unit_of_time_does_not_matter(exponent: int) -> None:
    # scaling by a power of two changes no rounding
    scale = 2.0**exponent
    for seed, count in [(0, 12), (1, 60), (2, 200)]:
        problem = flexsp_problem(lognormal_lengths(seed, count, 200_000, 6000, 1.5))
        scaled = replace(problem, seconds=problem.seconds * scale, group_s=tuple(s * scale for s in problem.group_s))
        assert plan_greedy(scaled, TRIALS) == plan_greedy(problem, TRIALS)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(1, 500), st.sampled_from([1, 3, 5, 8, 24, 48, 64, 256]), st.integers(0, 30), st.integers(1, 20_000))
def test_pods_deal_out_every_sequence_once_and_evenly(count: int, num_ranks: int, start: int, longest: int) -> None:
    problem = replace(flexsp_problem([longest] * (start + count)), num_ranks=num_ranks)
    pods = _pods(problem, (start, start + count))
    assert sorted(i for pod in pods for i in pod.tolist()) == list(range(start, start + count))
    assert num_ranks % len(pods) == 0
    assert all(pod.tolist() == sorted(pod.tolist()) for pod in pods)
    sizes = [len(pod) for pod in pods]
    assert max(sizes) - min(sizes) <= 1
    if len(pods) > 1:
        needed = next(degree for degree in problem.degrees if longest <= degree * problem.capacity)
        assert num_ranks // len(pods) >= 8 * needed
        assert count > 96 * len(pods) / 2
        # dealt out forwards and backwards in turn
        assert [pod[0] - start for pod in pods] == list(range(len(pods)))
        assert [pod[1] - start for pod in pods] == list(range(2 * len(pods) - 1, len(pods) - 1, -1))


def test_many_sequences_are_dealt_to_pods_and_few_are_not() -> None:
    assert [len(_pods(flexsp_problem([1000] * count), (0, count))) for count in (96, 97, 192, 193, 384, 385, 5000)] == [
        1, 2, 2, 4, 4, 8, 8,
    ]  # fmt: skip


def test_pieces_are_grouped_the_same_alone_and_together() -> None:
    problem, _ = flexsp_problem(lognormal_lengths(4, 300, 100_000, 5000, 1.3)).longest_first()
    pieces = [(0, 20), (20, 120), (120, 300), (50, 60), (0, 1)]
    assert group_pieces(problem, pieces) == [group_pieces(problem, [piece])[0] for piece in pieces]


@settings(derandomize=True, deadline=None, max_examples=40)
@given(odd_problems(most=10, longest_first=False), st.sampled_from([0.5, 1.0, 1.5, 1e9]))
def test_static_layouts_left_out_could_not_have_ended_in_time(problem: GroupingProblem, factor: float) -> None:
    limit_s = factor * problem.lower_bound_s()
    found = overlapping_static_layouts(problem, TRIALS, limit_s)
    usable = [degree for degree in problem.degrees if max(problem.lengths) <= degree * problem.capacity]
    if factor == 1e9:
        assert found == [plan_static(problem, TRIALS, degree) for degree in usable]
    for degree in usable:
        layout = plan_static(problem, TRIALS, degree)
        # the bound holds even if all groups ran without a gap
        busy_s = degree * sum(problem.group_seconds(group) for groups in layout for group in groups)
        assert layout in found or busy_s / (problem.num_ranks // degree * degree) >= limit_s * (1 - 1e-9)
