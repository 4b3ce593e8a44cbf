"""Planned batches: the sampler's sequences with their plans, numbered through epochs and restarts, alike on every rank."""

from __future__ import annotations

import numpy as np
from helpers.plans.layouts import tiny_costs
from helpers.ranks.rank_steps import group_pool

from hf_longctx.hf.data.sampler import LengthAwareSampler
from hf_longctx.hf.planning.source import PlanSource
from hf_longctx.hf.trainer.loaders import PlannedBatchSampler
from hf_longctx.plan.core.serialize import plan_digest
from hf_longctx.plan.core.settings import PlannerConfig
from hf_longctx.runtime.process_groups import GroupPool

LENGTHS = np.array([5, 9, 3, 12, 7, 1, 20], dtype=np.int64)


def batch_sampler(steps_done: int = 0) -> PlannedBatchSampler:
    """Planned batches of a plan of four ranks, drawn in one process."""
    source = PlanSource(GroupPool((1,), timeout_s=1.0), tiny_costs(4), PlannerConfig(64, (1, 2, 4)))
    sampler = LengthAwareSampler(LENGTHS, 3, seed=1)
    return PlannedBatchSampler(sampler, LENGTHS, source, explore=False, steps_done=lambda: steps_done)


def test_each_batch_is_one_planned_step_of_the_samplers_sequences() -> None:
    planned = batch_sampler()
    batches = list(planned)
    assert [len(batch) for batch in batches] == [1] * len(planned) == [1, 1, 1]
    steps = [batch[0] for batch in batches]
    assert [list(step.sequences) for step in steps] == list(planned.sampler)
    for step in steps:
        assert list(step.plan.lengths) == LENGTHS[list(step.sequences)].tolist()
        assert step.rank == 0


def test_step_numbers_go_on_through_the_epochs() -> None:
    planned = batch_sampler()
    numbers = []
    for epoch in range(3):
        planned.set_epoch(epoch)
        numbers += [step.plan.step for (step,) in planned]
    assert numbers == list(range(9))


def test_a_resumed_epoch_gives_the_steps_of_an_unbroken_run() -> None:
    unbroken, resumed = batch_sampler(), batch_sampler()
    unbroken.set_epoch(0)
    list(unbroken)
    for planned in (unbroken, resumed):
        planned.set_epoch(1)
    for (expected,), (found,) in zip(unbroken, resumed, strict=True):
        assert (plan_digest(found.plan), found.sequences) == (plan_digest(expected.plan), expected.sequences)


def test_steps_that_were_done_before_are_left_empty_and_not_planned() -> None:
    unbroken, resumed = batch_sampler(), batch_sampler(steps_done=4)
    for planned in (unbroken, resumed):
        planned.set_epoch(1)
    # three steps to an epoch: the first of the second epoch was done
    empty, *found = resumed
    assert empty == []
    assert [(step.plan.step, step.sequences) for (step,) in found] == [
        (step.plan.step, step.sequences) for (step,) in list(unbroken)[1:]
    ]


def planned_steps_on_rank() -> list[tuple[str, tuple[int, ...], int]]:
    source = PlanSource(group_pool(), tiny_costs(2), PlannerConfig(64, (1, 2)))
    planned = PlannedBatchSampler(LengthAwareSampler(LENGTHS, 3), LENGTHS, source, explore=True)
    return [(plan_digest(step.plan), step.sequences, step.rank) for (step,) in planned]


def test_every_rank_gets_the_same_step_with_its_own_number(ranks) -> None:
    first, second = ranks(2).run(planned_steps_on_rank)
    assert [step[:2] for step in first] == [step[:2] for step in second]
    assert {step[2] for step in first} == {0} and {step[2] for step in second} == {1}
