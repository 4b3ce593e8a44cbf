"""Packing all micro-batches at once keeps limits and memory, never worsens a layout, and pays where micro-batches are large."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.plans.grouping_problems import check_problem_layout, flexsp_problem, lognormal_lengths, odd_problems
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.groups import greedy
from hf_longctx.plan.groups import packing as joint_packing
from hf_longctx.plan.groups.greedy import plan_greedy
from hf_longctx.plan.groups.packing import JointPacking, one_fewer_s
from hf_longctx.plan.groups.problem import GroupingProblem


def alone_s(problem: GroupingProblem) -> np.ndarray:
    """Least seconds of a group with each sequence alone."""
    ends_s = problem.seconds + np.array(problem.group_s)[:, None]
    fits = np.array(problem.lengths) <= np.array(problem.degrees)[:, None] * problem.capacity
    return np.where(fits, ends_s, np.inf).min(axis=0)  # type: ignore[no-any-return]


@pytest.mark.wide
@settings(derandomize=True, deadline=None, max_examples=200)
@given(odd_problems(), st.lists(st.floats(0.5, 4.0), min_size=1, max_size=4))
def test_micro_batches_keep_their_limits(problem: GroupingProblem, factors: list[float]) -> None:
    limits = np.array(factors) * float(alone_s(problem).max())
    layout = JointPacking(problem).pack(limits)
    if layout is None:
        # one micro-batch for each sequence always suffices
        layout, limits = JointPacking(problem).pack(alone_s(problem)), alone_s(problem)
        assert layout is not None
    check_problem_layout(layout, problem)
    # micro-batches without groups are left out, so that seconds are compared in order
    seconds = sorted(problem.micro_batch_seconds(groups) for groups in layout)
    assert len(seconds) <= len(limits)
    assert all(own <= limit * (1 + 1e-8) for own, limit in zip(reversed(seconds), sorted(limits)[::-1], strict=False))


@pytest.fixture(scope="module")
def fewer_trials() -> Iterator[None]:
    """A fifth of the trials that small steps have, which still are dozens from each start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint_packing, "_LIMITS", replace(joint_packing._LIMITS, least_placed=(307, 1024)))
        yield


@settings(derandomize=True, deadline=None, max_examples=30)
@given(odd_problems())
def test_trials_of_lower_limits_never_worsen_a_layout(fewer_trials: None, problem: GroupingProblem) -> None:
    joint = JointPacking(problem)
    # more seconds than any micro-batch needs, so that the first try succeeds
    starts = [[float(alone_s(problem).sum())] * number for number in (len(problem.lengths), len(problem.lengths) + 1)]
    found = joint.best([[start] for start in starts])
    assert found is not None
    check_problem_layout(found, problem)
    for start in starts:
        first = joint.first([start])
        assert first is not None
        assert problem.step_seconds(found) <= problem.step_seconds(first)
    assert JointPacking(problem).best([[start] for start in starts]) == found
    # where a start has too little time, the other is left
    too_short = [float(alone_s(problem).max()) / 2]
    assert joint.best([[too_short], [starts[0]]]) is not None
    assert joint.best([[too_short]]) is None
    assert joint.first([alone_s(problem).tolist()], below_s=0.0) is None


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.floats(0.0, 9.0), min_size=2, max_size=8), st.floats(0.1, 2.0))
def test_one_micro_batch_fewer_keeps_the_seconds_without_fixed_ones(own_s: list[float], fixed_s: float) -> None:
    problem = replace(flexsp_problem((1000,)), group_s=(fixed_s,) * 7)
    expected = fixed_s + np.array(own_s)
    fewer = one_fewer_s(problem, expected.tolist())
    assert len(fewer) == len(expected) - 1
    assert (fewer - fixed_s).sum() == pytest.approx((expected - fixed_s).sum())
    # only the shortest grow, to one length
    longest_first = np.sort(expected)[::-1][:-1]
    grown = fewer > longest_first * (1 + 1e-9)
    assert (fewer >= longest_first * (1 - 1e-9)).all()
    assert fewer[grown] == pytest.approx(fewer.min())


def test_short_sequences_fill_what_a_long_one_leaves() -> None:
    problem = flexsp_problem((100_000, *[1_000] * 16), num_ranks=16)
    tokens = problem.capacity
    problem = flexsp_problem((7 * tokens, *[2 * tokens // 5] * 16), num_ranks=16)
    k = problem.degrees.index(8)
    limit = float(problem.seconds[k, 0] + problem.group_s[k])
    # eight ranks are left beside the long sequence, and hold two short ones each; nothing ends in a micro-batch of half a second
    (groups,) = JointPacking(problem).pack(np.array([limit, 0.5])) or [[]]
    assert [degree for degree, _ in groups] == [8, *[1] * 8]
    assert [len(members) for _, members in groups] == [1, *[2] * 8]
    # longer micro-batches come first, since their fixed cost is a smaller share of them
    more = flexsp_problem((7 * tokens, *[2 * tokens // 5] * 20), num_ranks=16)
    assert [len(each) for each in JointPacking(more).pack(np.array([limit * 0.9, limit])) or []] == [2, 9]


@pytest.mark.daily("1")
@pytest.mark.parametrize("seed", [0, 1])
def test_large_micro_batches_get_faster_layouts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(flexsp_problem(lognormal_lengths(seed, 2048, 200_000, 700.0, 1.8)), num_ranks=256)
    jointly = plan_greedy(problem, 5)
    check_problem_layout(jointly, problem)
    monkeypatch.setattr(greedy, "_GREEDY", replace(greedy._GREEDY, joint_sequences=(10**9, 1)))
    apart = plan_greedy(problem, 5)
    assert len(apart) > 1
    assert problem.step_seconds(jointly) < 0.99 * problem.step_seconds(apart)


@pytest.mark.wide
def test_steps_of_few_hundred_sequences_take_the_faster_of_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    gains, by_cuts = [], []
    for seed in (0, 2, 8, 9):
        problem = replace(flexsp_problem(lognormal_lengths(seed, 512, 150_000, 976.0, 1.6)), num_ranks=64)
        found_s, apart_s, packed_s = (
            planned_s(problem, monkeypatch, **settings) for settings in ({}, {"joint_sequences": (10**9, 1)}, {"joint_alone": 1})
        )
        assert found_s <= packed_s
        gains.append(1 - found_s / apart_s)
        by_cuts.append(found_s < packed_s)
    # one cut of several is grouped beside, so that a step may be a little slower than the best of all cuts
    assert min(gains) > -0.01 and max(gains) > 0.05 and sum(gains) > 0.1
    assert any(by_cuts)


def planned_s(problem: GroupingProblem, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> float:
    """Seconds of the planned step with these constants of the search."""
    with monkeypatch.context() as patch:
        patch.setattr(greedy, "_GREEDY", replace(greedy._GREEDY, **settings))
        layout = plan_greedy(problem, 5)
    check_problem_layout(layout, problem)
    return problem.step_seconds(layout)
