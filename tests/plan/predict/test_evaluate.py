"""Promises of the predicted run, against small plans worked out by hand."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from helpers.plans.cost_models import MODEL, counted_costs
from helpers.plans.fixture_plans import edited, fixture

from hf_longctx.plan.core.types import (
    Action,
    ActivationPolicy,
    Chunk,
    LayerRange,
    MicroBatch,
    Parameters,
    SequenceGroup,
    Span,
    StagePlan,
    StepPlan,
)
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.predict.evaluate import evaluate_plan

pytestmark = pytest.mark.quick


def group(positions: tuple[int, ...], chunks: list[tuple[int, ...]], lengths: tuple[int, ...], order: str = "") -> SequenceGroup:
    """A group of whole sequences; each chunk is a tuple of sequences."""
    built = tuple(Chunk(i, tuple(Span(s, 0, lengths[s]) for s in part)) for i, part in enumerate(chunks))
    words = order.split() or [f"0{kind}{i}" for i in range(len(chunks)) for kind in "FB"]
    stage = StagePlan(0, (LayerRange(0, MODEL.num_layers),), tuple(Action.parse(word) for word in words))
    return SequenceGroup(positions, "local" if len(positions) == 1 else "ulysses", built, (stage,))


def plan(lengths: tuple[int, ...], num_ranks: int, rounds: list[list[SequenceGroup]], parameters: Parameters) -> StepPlan:
    micro_batches = tuple(MicroBatch(tuple(groups)) for groups in rounds)
    return validate_plan(StepPlan(0, lengths, 1, num_ranks, parameters, micro_batches))


def test_one_rank_adds_forward_and_backward_of_every_chunk_and_the_step() -> None:
    lengths = (5, 7)
    run = evaluate_plan(plan(lengths, 1, [[group((0,), [(0,), (1,)], lengths)]], "replicated"), counted_costs(1, step_s=1000.0))
    # 3 seconds per token and 30 per chunk
    assert run.step_s == 3 * 12 + 2 * 30 + 1000
    assert run.busy_s == (96,)


def test_the_order_of_actions_moves_events_but_not_the_sum() -> None:
    lengths = (5, 7)
    run = evaluate_plan(
        plan(lengths, 1, [[group((0,), [(0,), (1,)], lengths, "0F0 0F1 0B1 0B0")]], "replicated"), counted_costs(1)
    )
    assert [(event.name, event.kind, event.start_s, event.stop_s) for event in run.events] == [
        ("0F0", "F", 0, 15),
        ("0F1", "F", 15, 32),
        ("0B1", "B", 32, 66),
        ("0B0", "B", 66, 96),
    ]


def two_rounds(parameters: Parameters) -> StepPlan:
    """Rank 0 is slow in the first round and rank 1 in the second."""
    lengths = (100, 10, 20, 200)
    return plan(
        lengths,
        2,
        [
            [group((0,), [(0,)], lengths), group((1,), [(1,)], lengths)],
            [group((0,), [(2,)], lengths), group((1,), [(3,)], lengths)],
        ],
        parameters,
    )


@pytest.mark.parametrize("parameters", ["sharded", "gathered_per_round"])
def test_with_sharded_parameters_everyone_waits_at_every_micro_batch(parameters: Parameters) -> None:
    run = evaluate_plan(two_rounds(parameters), counted_costs(2))
    # slowest of each round: 330 and 630
    assert run.step_s == 330 + 630
    assert run.busy_s == (330 + 90, 60 + 630)
    assert [event.start_s for event in run.events if event.rank == 1 and event.kind == "F"] == [0, 330]


def test_with_replicated_parameters_a_rank_waits_for_its_own_group_only() -> None:
    run = evaluate_plan(two_rounds("replicated"), counted_costs(2))
    # the slower of the two sums: 330 + 90 and 60 + 630
    assert run.step_s == 690
    assert run.busy_s == (420, 690)


def test_a_group_starts_when_its_last_rank_is_free() -> None:
    lengths = (100, 10, 40)
    rounds = [[group((0,), [(0,)], lengths), group((1,), [(1,)], lengths)], [group((0, 1), [(2,)], lengths)]]
    run = evaluate_plan(plan(lengths, 2, rounds, "replicated"), counted_costs(2))
    # rank 0 is free after 330; then 40 tokens on two ranks: 3 * 20 + 30 + 300
    assert run.step_s == 330 + 390
    assert run.busy_s == (330 + 390, 60 + 390)
    assert {(e.rank, e.start_s) for e in run.events if e.name == "0F0" and e.detail.startswith("<2>")} == {(0, 330), (1, 330)}


def test_a_rank_without_work_runs_one_dummy_token() -> None:
    lengths = (50,)
    run = evaluate_plan(
        plan(lengths, 2, [[group((0,), [(0,)], lengths), group((1,), [()], lengths)]], "sharded"), counted_costs(2)
    )
    assert run.step_s == 180
    assert run.busy_s == (180, 33)


def test_the_peak_is_the_fullest_micro_batch_of_each_rank() -> None:
    lengths = (101, 10, 20, 200)
    rounds = [
        [group((0, 1), [(0,), (1,)], lengths)],
        [group((0,), [(2,)], lengths), group((1,), [(3,)], lengths)],
    ]
    model = counted_costs(2)
    run = evaluate_plan(plan(lengths, 2, rounds, "sharded"), model)
    # round 0 is walked, since it has two chunks (51 + 5 tokens on rank 0 and 50 + 5 on rank 1); round 1: 20 and 200
    (first,) = plan(lengths, 2, rounds, "sharded").micro_batches[0].groups
    byte_model = ByteModel(model.model)
    states = byte_model.states(model.parameters, model.shard_ranks)
    walked = states + byte_model.moments(first, first.stages[0]).most.peak
    short, long = (states + byte_model.kept_bytes(num_tokens) for num_tokens in (20, 200))
    assert short < walked < long
    assert run.peak_bytes == (walked, long)


def test_fewer_layers_cost_their_share_beside_the_head() -> None:
    lengths = (50,)
    base = plan(lengths, 1, [[group((0,), [(0,)], lengths)]], "replicated")
    first = base.micro_batches[0].groups[0]
    half = dataclasses.replace(first.stages[0], layer_ranges=(LayerRange(0, MODEL.num_layers // 2),))
    shorter = dataclasses.replace(base, micro_batches=(MicroBatch((dataclasses.replace(first, stages=(half,)),)),))
    # a token's 3 seconds are partly those of the head
    head_s = 3 * 50 * MODEL.head_share
    whole_s, half_s = (evaluate_plan(each, counted_costs(1)).step_s for each in (base, shorter))
    assert half_s - head_s == pytest.approx((whole_s - head_s) / 2)


def test_every_action_of_every_rank_is_an_event() -> None:
    run = evaluate_plan(fixture("nested"), counted_costs(4))
    assert len(run.events) == 4 * 2 + 2 * 4 + 2 + 2 + 2 * 2
    for rank in range(4):
        events = [event for event in run.events if event.rank == rank]
        assert all(first.stop_s <= second.start_s for first, second in itertools.pairwise(events))
        assert sum(event.stop_s - event.start_s for event in events) == pytest.approx(run.busy_s[rank])


@pytest.mark.parametrize(
    ("actions", "found"),
    [("0F0@1:0 0B0", "0F0@1:0"), ("0F0 0.1B0", "0.1B0")],
)
def test_lenders_and_layer_ranges_that_do_not_exist_are_refused_by_name(actions: str, found: str) -> None:
    with pytest.raises(ValueError, match=f"action {found} cannot be evaluated yet"):
        evaluate_plan(edited("flexsp", micro_batches__1__groups__0__stages__0__actions=actions), counted_costs(4))


def test_without_events_there_are_none_and_nothing_else_changes() -> None:
    for name in ("nested", "seq1f1b"):
        quiet, full = (evaluate_plan(fixture(name), counted_costs(4), with_events=wants) for wants in (False, True))
        assert full.events and dataclasses.replace(full, events=(), exchange_s=()) == quiet


def test_a_tiled_loss_costs_no_seconds_and_other_bytes() -> None:
    policy = edited("flexsp", micro_batches__0__groups__0__stages__0__activations=[{"chunk": 0, "tile_tokens": 1024}])
    assert policy.micro_batches[0].groups[0].stages[0].activations == (ActivationPolicy(0, tile_tokens=1024),)
    found, kept = evaluate_plan(policy, counted_costs(4)), evaluate_plan(edited("flexsp"), counted_costs(4))
    assert found.step_s == kept.step_s
    assert found.peak_bytes != kept.peak_bytes
