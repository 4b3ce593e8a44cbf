"""Vector packing equals a plain loop: every trial follows its rule, whatever other trials run with it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from helpers.plans.grouping_problems import flexsp_problem, lognormal_lengths, odd_problems
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.types import GroupShape
from hf_longctx.plan.groups.packing import Rule, Trial, pack_trials
from hf_longctx.plan.groups.problem import Group, GroupingProblem

# relative tolerance, so that rounding does not make a makespan that was reached infeasible
HAIR = 1e-9


@dataclass
class OpenGroup:
    """A group of the plain loop; its room is a share of its memory."""

    kind: int
    time_left: float
    room_left: float = 1.0
    members: list[int] = field(default_factory=list)


class SlowTrial:
    """A trial carried out one sequence and one group at a time."""

    def __init__(self, problem: GroupingProblem, trial: Trial) -> None:
        self.problem, self.rule = problem, trial.rule
        self.limit_s = trial.limit_s * (1 + HAIR)
        self.free_ranks = trial.num_ranks
        self.open: list[OpenGroup] = []
        self.has_equal = trial.rule.equal_degree < 0

    def open_group(self, kind: int) -> OpenGroup:
        self.free_ranks -= self.problem.degrees[kind]
        self.open.append(OpenGroup(kind, self.limit_s - self.problem.group_s[kind]))
        return self.open[-1]

    def share(self, i: int, group: OpenGroup) -> float:
        return self.problem.lengths[i] * (1 / (float(self.problem.capacity) * self.problem.degrees[group.kind]))

    def smallest(self, i: int) -> int | None:
        """The first degree that holds a sequence and finishes it in time."""
        for k, degree in enumerate(self.problem.degrees):
            seconds = float(self.problem.seconds[k][i]) + self.problem.group_s[k]
            if self.problem.lengths[i] <= degree * self.problem.capacity and seconds <= self.limit_s:
                return k
        return None

    def best_open(self, i: int) -> OpenGroup | None:
        scored = []
        for group in self.open:
            time_s, room = float(self.problem.seconds[group.kind][i]), self.share(i, group)
            time_slack, room_slack = group.time_left - time_s, group.room_left - room
            if time_slack < 0 or room_slack < -1e-11:
                continue
            score = self.rule.time_weight / self.limit_s * time_slack + self.rule.room_weight * room_slack
            share = 1 / self.limit_s
            score -= self.rule.dot_weight * (time_s * share * (group.time_left * share) + room * group.room_left)
            scored.append((score, len(scored), group))
        return min(scored)[2] if scored else None

    def new_group(self, i: int) -> OpenGroup | None:
        kind = self.smallest(i)
        if kind is None or self.rule.only_equal:
            return None
        larger = min(kind + self.rule.larger, len(self.problem.degrees) - 1)
        if self.problem.degrees[larger] <= self.free_ranks:
            kind = larger
        return self.open_group(kind) if self.problem.degrees[kind] <= self.free_ranks else None

    def place(self, i: int) -> bool:
        smallest = self.smallest(i)
        is_enough = smallest is not None and smallest <= self.rule.equal_degree
        if not self.has_equal and (self.rule.only_equal or is_enough):
            for _ in range(self.free_ranks // self.problem.degrees[self.rule.equal_degree]):
                self.open_group(self.rule.equal_degree)
            self.has_equal = True
        group = self.best_open(i) or self.new_group(i)
        if group is None:
            return False
        group.time_left -= float(self.problem.seconds[group.kind][i])
        group.room_left -= self.share(i, group)
        group.members.append(i)
        return True


def pack_slowly(problem: GroupingProblem, trial: Trial) -> list[Group]:
    """The groups of a trial by a plain loop, in the order in which they were opened; empty if a sequence found no place."""
    slow = SlowTrial(problem, trial)
    if not all(slow.place(int(i)) for i in trial.sequences):
        return []
    return [(problem.degrees[group.kind], tuple(group.members)) for group in slow.open if group.members]


def rules(num_degrees: int) -> st.SearchStrategy[Rule]:
    weight = st.sampled_from([0.0, 1.0, 0.3])
    return st.builds(
        Rule,
        time_weight=st.sampled_from([0.0, 1.0, 0.3, -1.0]),
        room_weight=weight,
        dot_weight=weight,
        larger=st.integers(0, 2),
        equal_degree=st.integers(-1, num_degrees - 1),
        only_equal=st.booleans(),
    )


@st.composite
def trials(draw: st.DrawFn) -> tuple[GroupingProblem, list[Trial]]:
    problem = draw(odd_problems(most=12))
    alone_s = float((problem.seconds[-1] + problem.group_s[-1]).max())
    found = []
    for _ in range(draw(st.integers(1, 12))):
        chosen = draw(st.sets(st.integers(0, len(problem.lengths) - 1), min_size=1))
        limit_s = alone_s * draw(st.sampled_from([0.5, 1.0, 1.3, 2.0, 5.0, 40.0]))
        num_ranks = draw(st.integers(problem.degrees[0], problem.num_ranks))
        found.append(Trial(np.array(sorted(chosen)), limit_s, num_ranks, draw(rules(len(problem.degrees)))))
    return problem, found


@pytest.mark.wide
@settings(derandomize=True, deadline=None, max_examples=200)
@given(trials())
def test_every_trial_does_what_a_plain_loop_does(case: tuple[GroupingProblem, list[Trial]]) -> None:
    problem, several = case
    for trial, packed in zip(several, pack_trials(problem, several), strict=True):
        expected = pack_slowly(problem, trial)
        assert packed.trial is trial
        assert packed.groups(problem) == expected
        if expected:
            assert packed.makespan_s == pytest.approx(problem.micro_batch_seconds(expected), rel=1e-6)
            assert problem.micro_batch_seconds(expected) <= trial.limit_s * (1 + 2 * HAIR)
            assert sum(degree for degree, _ in expected) <= trial.num_ranks
            assert all(problem.fits(group) for group in expected)
        else:
            assert math.isinf(packed.makespan_s)


def test_a_trial_has_the_same_result_alone_and_among_hundreds() -> None:
    problem, _ = flexsp_problem(lognormal_lengths(0, 90, 300_000, 6000, 1.5)).longest_first()
    total_s = float(problem.seconds[-1].sum())
    many_rules = [
        Rule(),
        Rule(0.0, 0.0, 1.0),
        Rule(larger=1),
        Rule(0.3, 0.3, 1.0, equal_degree=2),
        Rule(-1.0, 0.0, 0.0, 0, 3, True),
    ]
    several = [
        Trial(np.arange(start, 90, step), total_s * factor, num_ranks, rule)
        for start, step in [(0, 1), (30, 1), (1, 2), (3, 7), (89, 1)]
        for factor in (0.02, 0.2, 0.6, 1.1)
        for num_ranks in (8, 32, 64)
        for rule in many_rules
    ]
    together = pack_trials(problem, several)
    alone = [pack_trials(problem, [trial])[0] for trial in several]
    assert [packed.makespan_s for packed in together] == [packed.makespan_s for packed in alone]
    assert [packed.groups(problem) for packed in together] == [packed.groups(problem) for packed in alone]
    assert [packed.groups(problem) for packed in together] == [pack_slowly(problem, trial) for trial in several]
    # some lanes die early, some late, some not at all
    assert 0.2 < np.mean([math.isinf(packed.makespan_s) for packed in together]) < 0.8


def even_problem(capacity: int, seconds: float, fixed_s: float, lengths: tuple[int, ...]) -> GroupingProblem:
    return GroupingProblem(
        lengths=lengths,
        num_ranks=2,
        capacity=capacity,
        degrees=(1,),
        shapes={1: GroupShape(1)},
        seconds=np.full((1, len(lengths)), seconds),
        group_s=(fixed_s,),
    )


def test_a_limit_of_nanoseconds_is_kept() -> None:
    # 3 ns each; 8.5 ns hold two of them, so two groups take four and the fifth finds no place
    problem = even_problem(100, 3e-9, 0.0, (1,) * 5)
    first, second = pack_trials(problem, [Trial(np.arange(count), 8.5e-9, 2, Rule()) for count in (4, 5)])
    assert first.makespan_s == pytest.approx(6e-9)
    assert math.isinf(second.makespan_s)


def test_not_one_token_too_many_is_packed_into_a_large_memory() -> None:
    half = 10**10
    problem = even_problem(2 * half, 1.0, 0.0, (half + 1, half, half, half))
    first, second = pack_trials(problem, [Trial(np.arange(count), 10.0, 2, Rule()) for count in (3, 4)])
    assert all(problem.fits(group) for group in first.groups(problem))
    assert math.isinf(second.makespan_s)


def test_a_group_costs_its_fixed_seconds_even_where_its_sequences_cost_nothing() -> None:
    problem = even_problem(100, 0.0, 2.0, (50, 50, 50))
    [packed] = pack_trials(problem, [Trial(np.arange(3), 10.0, 2, Rule())])
    assert packed.makespan_s == pytest.approx(2.0)


def test_empty_equal_groups_take_no_time() -> None:
    problem = even_problem(100, 1.0, 2.0, (50,))
    [packed] = pack_trials(problem, [Trial(np.arange(1), 10.0, 2, Rule(equal_degree=0))])
    assert packed.makespan_s == pytest.approx(3.0)
    assert packed.groups(problem) == [(1, (0,))]


def test_a_group_that_got_nothing_does_not_count_with_its_fixed_seconds() -> None:
    # the first sequence needs two ranks; for the second a single rank is opened, whose fixed cost is 5 s, but it joins the first
    problem = GroupingProblem(
        lengths=(150, 10),
        num_ranks=3,
        capacity=100,
        degrees=(1, 2),
        shapes={1: GroupShape(1), 2: GroupShape(2)},
        seconds=np.array([[9.0, 0.1], [1.0, 1.0]]),
        group_s=(5.0, 0.0),
    )
    [packed] = pack_trials(problem, [Trial(np.arange(2), 10.0, 3, Rule(0.0, 1.0, equal_degree=0))])
    assert packed.groups(problem) == [(2, (0, 1))]
    assert packed.makespan_s == pytest.approx(2.0)


def test_no_trials_have_no_results() -> None:
    assert pack_trials(even_problem(10, 1.0, 0.0, (5,)), []) == []
