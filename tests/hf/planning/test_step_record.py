"""One plan, predicted and measured: numbers worked out by hand from hand-written intervals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.plans.layouts import plan_of, tiny_costs
from helpers.plans.measured_plans import INTERVALS, TRUTH, intervals_of, step_record
from helpers.plans.pipeline_plans import pipeline_plan
from helpers.plans.policies import num_policies, with_policies
from helpers.plans.sliced_plans import cut

from hf_longctx.hf.planning.report import record_parts
from hf_longctx.hf.planning.step_record import StepRecord, predicted_idle, predicted_memory
from hf_longctx.plan.core.settings import ActivationBudget, PlannerConfig
from hf_longctx.plan.core.types import (
    Action,
    ActivationPolicy,
    Chunk,
    Estimate,
    GroupShape,
    LayerPolicy,
    Span,
    TensorShare,
)
from hf_longctx.plan.cost.fitting import ChunkSample, PassSample
from hf_longctx.plan.cost.traffic import Traffic, mean_traffic
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.planner import plan_step
from hf_longctx.plan.predict.evaluate import evaluate_plan
from hf_longctx.runtime.core.clock import Interval


def test_seconds_of_a_step_end_with_its_last_interval() -> None:
    assert step_record().measured_s == 0.5
    assert step_record().reduce_s == pytest.approx(0.08)


def test_tokens_and_padding_are_those_of_all_ranks() -> None:
    record = step_record()
    # one dummy on the idle rank of the second micro-batch
    assert record.num_tokens == 17
    assert record.padding_share == pytest.approx(1 / 18)


def test_padding_counts_every_dummy_of_a_chunk_smaller_than_its_group() -> None:
    record = StepRecord(plan_of([[(4, (0,))]], [1], 4), 0, 0.0, INTERVALS)
    assert record.padding_share == pytest.approx(3 / 4)


def test_samples_are_this_ranks_chunks_with_whole_chunk_sizes() -> None:
    # 12 tokens in documents of 9 and 3: 81 / 2 + 9 / 2 causal pairs; rank 1 is the idle one of the second round
    costs = tiny_costs(2)
    traffic = [mean_traffic(costs.model, costs.cluster, GroupShape(2, 2), 12, is_backward) for is_backward in (False, True)]
    assert traffic[0].num_bytes > 0
    samples = step_record().samples(costs)
    assert list(samples) == [(0, (0, 1), "0F0"), (1, (1,), "0F0")]
    assert list(samples.values()) == [
        ChunkSample(
            PassSample(12, 45.0, 2, traffic[0], pytest.approx(0.1)), PassSample(12, 45.0, 2, traffic[1], pytest.approx(0.2))
        ),
        ChunkSample(PassSample(0, 0, 1, Traffic(), pytest.approx(0.05)), PassSample(0, 0, 1, Traffic(), pytest.approx(0.02))),
    ]


def test_ranks_of_a_group_call_a_chunk_the_same_where_one_of_them_was_left_out_before() -> None:
    # rank 1 works alone while rank 0 waits, then both share a sequence
    plan = plan_of([[(1, (0,)), (1, (1,))], [(2, (2,))]], [9, 8, 12], 2)
    first, second = plan.micro_batches
    alone = replace(first, groups=tuple(group for group in first.groups if group.positions == (1,)))
    plan = replace(plan, micro_batches=(alone, second))
    intervals = tuple(Interval(r, kind, f"0{kind}0", r, r + 1.0) for r in (0, 1) for kind in "FB")
    keys = [set(StepRecord(plan, rank, 0.0, intervals).samples(tiny_costs(2))) for rank in (0, 1)]
    assert keys == [{(1, (0, 1), "0F0")}, {(0, (1,), "0F0"), (1, (0, 1), "0F0")}]


def test_samples_tell_several_chunks_of_a_group_apart() -> None:
    plan = plan_of([[(1, (0, 1))]], [4, 6], 1)
    ((group, stage),) = plan.for_rank(0).rounds
    chunks = (Chunk(0, (Span(0, 0, 4),)), Chunk(1, (Span(1, 0, 6),)))
    stage = replace(stage, actions=tuple(Action.parse(word) for word in ("0F0", "0F1", "0B1", "0B0")))
    group = replace(group, chunks=chunks, stages=(stage,))
    plan = replace(plan, micro_batches=(replace(plan.micro_batches[0], groups=(group,)),))
    seconds = {"0F0": (0.0, 1.0), "0F1": (1.0, 3.0), "0B1": (3.0, 7.0), "0B0": (7.0, 15.0)}
    intervals = tuple(Interval(0, name[1], name, *times) for name, times in seconds.items())
    first, second = StepRecord(plan, 0, 0.0, intervals).samples(tiny_costs(1)).values()
    assert (first.forward.num_tokens, first.forward.seconds, first.backward.seconds) == (4, 1.0, 8.0)
    assert (second.forward.num_tokens, second.forward.seconds, second.backward.seconds) == (6, 2.0, 4.0)


@pytest.mark.parametrize("rate", [1.0, 3.0])
def test_samples_leave_out_what_policies_add(rate: float) -> None:
    """Also where the device is slower than the model says: what was added is taken off at the rate of the forward."""
    costs = tiny_costs(1)
    budget = ActivationBudget(32, ByteModel(costs.model).kept_bytes(60), 2**20, 16)
    plan = plan_step(0, [120], costs, PlannerConfig(240, (1,), activations=budget))
    assert any(policy.layers for policy in plan.micro_batches[0].groups[0].stages[0].activations)
    intervals = tuple(replace(i, start_s=rate * i.start_s, stop_s=rate * i.stop_s) for i in intervals_of(plan, costs, 0))
    (sample,) = StepRecord(plan, 0, 0.0, intervals).samples(costs).values()
    ((group, _),) = plan.for_rank(0).rounds
    for measured, kept_s in (
        (sample.forward, costs.forward_s(group.chunks[0], group.shape, costs.model.num_layers)),
        (sample.backward, costs.backward_s(group.chunks[0], group.shape, costs.model.num_layers)),
    ):
        assert measured.seconds == pytest.approx(rate * kept_s, rel=1e-9)


def test_events_carry_rank_times_and_what_ran() -> None:
    events = step_record().events()
    assert [(e.rank, e.kind, e.name, e.start_s, e.stop_s) for e in events] == [
        (1, i.kind, i.name, i.start_s, i.stop_s) for i in INTERVALS
    ]
    assert [e.detail for e in events] == [
        "<2> 12 tokens in 2 sequence(s)",
        "<2> 12 tokens in 2 sequence(s)",
        "<1> 0 tokens in 0 sequence(s)",
        "<1> 0 tokens in 0 sequence(s)",
        "",
    ]


# two stages, two slices: stage 0 runs forwards of 1 s and backwards of 2 s, stage 1 takes twice as long
STAGED = {
    0: "F0 0 1, SF0 1 1, F1 1 2, SF1 2 2, RB1 2 9, B1 9 11, SB1 11 11, RB0 11 13, B0 13 15",
    1: "RF0 0 1, F0 1 3, SF0 3 3, RF1 3 3, F1 3 5, B1 5 9, SB1 9 9, B0 9 13, SB0 13 13",
}


def staged_record(rank: int, **fields: Any) -> StepRecord:
    """A rank of a pipeline of two slices, with the reduction behind it: half a second, and waiting on stage 1."""
    plan = pipeline_plan([30], [[(1, [[span] for span in cut(0, [20, 10])])]], 2)
    intervals = []
    for text in STAGED[rank].split(", "):
        word, start, stop = text.split()
        intervals.append(Interval(0, word.rstrip("01"), f"{rank}{word}", float(start), float(stop)))
    intervals.append(Interval(-1, "reduce", "gradients", intervals[-1].stop_s, 15.5))
    estimate = {name: fields.pop(name) for name in ("step_s", "cost_source") if name in fields}
    return StepRecord(replace(plan, estimate=Estimate(**estimate)), rank, 2.5, tuple(intervals), **fields)


def test_a_step_of_stages_is_measured_on_every_stage() -> None:
    first, last = (staged_record(rank, step_s=12.4, cost_source="measured") for rank in (0, 1))
    assert first.measured_s == last.measured_s == 15.5 and first.error == last.error == pytest.approx(-0.2)
    assert (first.reduce_s, last.reduce_s) == (0.5, 2.5)
    # busy for 6 of 15 seconds
    assert first.idle_share == pytest.approx(0.6) and last.idle_share is None
    assert [event.name for event in last.events()][:2] == ["1RF0", "1F0"]
    costs = replace(tiny_costs(2), model=replace(tiny_costs(2).model, num_layers=4))
    assert [(key[2], s.forward.seconds, s.backward.seconds) for key, s in last.samples(costs).items()] == [
        ("1F0", 2.0, 4.0),
        ("1F1", 2.0, 4.0),
    ]


def test_line_of_a_pipeline_shows_the_idle_share_of_the_first_stage() -> None:
    assert record_parts([staged_record(0)], 0.0)[-2:] == ["1 micro-batch <1>", "first stage idle 60.0% measured"]
    assert record_parts([staged_record(0, predicted_idle=0.55)], 0.0)[-1] == ("first stage idle 55.0% predicted, 60.0% measured")
    assert not any("idle" in part for record in (staged_record(1), step_record()) for part in record_parts([record], 0.0))


def test_predicted_idle_is_the_judges_and_asks_for_measured_costs() -> None:
    plan, costs = staged_record(0).plan, tiny_costs(2)
    truth = replace(costs, coefficients=replace(TRUTH, step_s=100.0))
    run = evaluate_plan(plan, truth)
    idle_s = run.ranks[0].idle_s
    assert predicted_idle(plan, 0, truth) == pytest.approx(idle_s / (idle_s + run.busy_s[0])) and idle_s > 0
    assert predicted_idle(plan, 1, truth) is None and predicted_idle(plan, 0, costs) is None


def test_predicted_memory_of_stages_counts_layer_ranges_and_leaves_messages_out() -> None:
    spec = replace(tiny_costs(2).model, num_layers=8)
    plan = pipeline_plan([30, 8], [[(1, [*([span] for span in cut(0, [20, 10])), [(1, 0, 8)]])]], 2, "interleaved", 8, 2)
    keep = LayerPolicy(tuple(TensorShare(name, recompute=1.0) for name in ("attention_output", "qkv", "mlp")))
    plan = with_policies(plan, [ActivationPolicy(0, 0, (keep, LayerPolicy(), keep))] * num_policies(plan))
    for rank in range(2):
        ((group, stage),) = plan.for_rank(rank).rounds
        # the first of two layers per part is replayed: its input, 32 numbers of 4 bytes per token, waits
        waiting, most = [], 0
        for action in stage.actions:
            if action.kind == "F":
                waiting.append((action.layer_range, action.chunk))
            elif action.kind == "B":
                waiting.remove((action.layer_range, action.chunk))
            most = max(most, sum(group.chunks[chunk].num_tokens for _, chunk in waiting))
        found = predicted_memory(plan, rank, spec)
        assert found.saved == most * 32 * 4
        assert found.kv_book == ByteModel(spec).moments(group, stage).most.book
        # keys and values of four layers and 30 tokens, gradients of the first 20: at most two parts' at once
        assert found.kv_book <= 2 * 4 * 2 * 8 * 4 * (30 + 20)
        run = evaluate_plan(plan, replace(tiny_costs(2), model=spec))
        assert found.device_peak == run.peak_bytes[rank]
