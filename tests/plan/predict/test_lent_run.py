"""Promises of the predicted run of lent stages, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from helpers.plans.cost_models import HARDWARE, MODEL, counted_costs
from helpers.plans.fixture_plans import fixture
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx.plan.core.lending import lent_order
from hf_longctx.plan.core.orders import pipelined
from hf_longctx.plan.core.settings import ClusterSpec
from hf_longctx.plan.core.types import ActivationPolicy, Chunk, MicroBatch, SequenceGroup, Span, StepPlan
from hf_longctx.plan.core.validate import PlanError, validate_plan
from hf_longctx.plan.cost.cost_model import CostCoefficients, CostModel, PassCoefficients
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.layer import Load
from hf_longctx.plan.memory.stage import message_bytes
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.pipeline.stages import layer_ranges
from hf_longctx.plan.predict.evaluate import Evaluation, evaluate_plan
from hf_longctx.plan.predict.lending import lent_group, run_lent

# seconds per token: one forward, two backward; the model has no head
HEADLESS = dataclasses.replace(MODEL, vocab_size=0)
UNIT = (PassCoefficients(0.0, 1.0, 0.0), PassCoefficients(0.0, 2.0, 0.0))


def sliced(num_slices: int, num_stages: int, slice_tokens: int = 40, is_lent: bool = True) -> StepPlan:
    spans = [Span(0, place * slice_tokens, (place + 1) * slice_tokens) for place in range(num_slices)]
    bare = SequenceGroup((0,), "local", tuple(Chunk(place, (span,)) for place, span in enumerate(spans)), ())
    group = pipelined(bare, layer_ranges(MODEL.num_layers, num_stages))
    batches = (MicroBatch((lent_group(group) if is_lent else group,)),)
    return validate_plan(StepPlan(0, (num_slices * slice_tokens,), num_stages, 1, "replicated", batches))


def run(
    plan: StepPlan, model: ModelSpec = HEADLESS, passes: tuple[PassCoefficients, ...] = UNIT, ranks_per_node: int = 8
) -> Evaluation:
    cluster = ClusterSpec(plan.num_ranks, ranks_per_node, HARDWARE)
    return evaluate_plan(plan, CostModel(model, cluster, CostCoefficients(*passes, 0.0, "test")))


def test_two_stages_of_four_slices_lose_the_fifth_slot() -> None:
    # a slice takes 40 / 2 seconds on a stage; the first of stage 0 and the last of stage 1 take half of that on both
    plain, lent = run(sliced(4, 2, is_lent=False)), run(sliced(4, 2))
    assert plain.step_s == pytest.approx(3 * 5 * 20)
    assert lent.step_s == pytest.approx(3 * 4 * 20)
    assert lent.busy_s == pytest.approx((240, 240)) and max(use.idle_s for use in lent.ranks) == pytest.approx(0)
    starts = {(event.rank, event.name): event.start_s for event in lent.events if event.kind == "F"}
    assert starts == {
        **{(rank, "0F0@1:0"): 0 for rank in (0, 1)},
        **{(0, "0F1"): 10, (0, "0F2"): 30, (0, "0F3"): 50, (1, "1F0"): 10, (1, "1F1"): 30, (1, "1F2"): 50},
        **{(rank, "1F3@0:0"): 70 for rank in (0, 1)},
    }


def test_kernels_are_not_divided_among_lent_stages_and_the_head_is() -> None:
    passes = (PassCoefficients(0.0, 1.0, 10.0), PassCoefficients(0.0, 2.0, 20.0))
    head = MODEL.head_share
    lent = run(sliced(4, 2), MODEL, passes)
    seconds = {event.name: event.stop_s - event.start_s for event in lent.events}
    assert seconds["0F0@1:0"] == pytest.approx((20 * (1 - head) + 10) / 2)
    assert seconds["1F3@0:0"] == pytest.approx((20 * (1 - head) + 10) / 2 + 20 * head)
    assert seconds["1B3@0:0"] == pytest.approx(2 * seconds["1F3@0:0"])


@pytest.mark.parametrize("ranks_per_node", [8, 1])
def test_what_moves_takes_its_seconds(ranks_per_node: int) -> None:
    byte_s = 1e-3 if ranks_per_node == 8 else 1e-1
    passes = tuple(PassCoefficients(0.0, 0.0, 0.0, 7.0, 1e-3, 1e-1) for _ in UNIT)
    lent = run(sliced(4, 2), HEADLESS, passes, ranks_per_node)
    found = {event.name: inside_s for event, inside_s in zip(lent.events, lent.exchange_s, strict=True)}
    # 2 layers, 2 KV heads of 8 elements of 4 bytes, keys and values: 256 bytes a token; a hidden state has 256 bytes too
    first_s = 7.0 * 4 + byte_s * (256 * 20 + 256 * 20)
    assert found["0F0@1:0"] == pytest.approx(first_s) == found["0B0@1:0"]
    # the last slice's front of 120 tokens goes to the lent rank, and its gradients come back
    last_s = 7.0 * 6 + byte_s * (256 * (20 + 120) + 256 * 20)
    assert found["1F3@0:0"] == pytest.approx(last_s) == found["1B3@0:0"]
    assert found["0F1"] == 0


def test_a_rank_holds_its_parts_of_lent_slices_and_the_states_of_all_stages() -> None:
    lent, parameters = run(sliced(2, 2)), HEADLESS.layer_parameters * 2
    loads = [Load(20, (20,), 2, 0, 20, has_head=False, is_shared=True), Load(40, (40,), 2, 40, 40, has_head=False)]
    loads = [*loads, Load(40, (40,), 2, 0, 40), Load(20, (20,), 2, 40, 20, is_shared=True)]
    half, second, first, last = (ByteModel(HEADLESS).chunk(dataclasses.replace(load, keeps_gradients=False)) for load in loads)
    # weights, gradients and moments of both stages, whose passes every rank may run
    states = 2 * parameters * (2 * 4 + 8)
    # a token's keys and values of two layers, and their gradients
    token = 2 * 256
    # stage 0: its first slice in part, its second, and part of the other stage's second
    expected = [states + half.device + second.device + last.device + token * (80 + 80)]
    # stage 1: part of the other stage's first slice, its first, and its second in part
    expected += [states + half.device + first.device + last.device + token * (40 + 80)]
    stages = sliced(2, 2).micro_batches[0].groups[0].stages
    expected = [total + message_bytes(HEADLESS, stage, 2, 40) for total, stage in zip(expected, stages, strict=True)]
    work = [max(half.workspace, one.workspace, last.workspace) for one in (second, first)]
    assert lent.peak_bytes == tuple(total + most for total, most in zip(expected, work, strict=True))
    assert [use.peak_tokens for use in lent.ranks] == [20 + 40 + 20, 20 + 40 + 20]


@given(st.integers(1, 4), st.integers(0, 4), st.randoms(use_true_random=False))
def test_no_rank_runs_two_actions_at_once_nor_one_before_its_input(num_stages: int, more: int, draw: random.Random) -> None:
    (group,) = sliced(max(1, num_stages - 1 + more), num_stages).micro_batches[0].groups
    rows = lent_order(group)
    lengths = {action: draw.random() for row in rows for action in row}
    times = run_lent(rows, lengths.__getitem__, lambda action: 0.25)
    when = {action: time for row, of_stage in zip(rows, times, strict=True) for action, time in zip(row, of_stage, strict=True)}
    for row, of_stage in zip(rows, times, strict=True):
        # an action takes equal seconds on all of its stages
        assert [when[action] for action in row] == list(of_stage)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(of_stage))
    assert all(stop_s - start_s == pytest.approx(lengths[action]) for action, (start_s, stop_s) in when.items())
    by_place = {(action.kind, action.stage, action.chunk): time for action, time in when.items()}
    for (kind, stage, chunk), (start_s, _) in by_place.items():
        source = by_place.get((kind, stage - 1 if kind == "F" else stage + 1, chunk))
        assert source is None or source[1] + 0.25 <= start_s


def test_stages_in_another_order_are_a_deadlock() -> None:
    rows = [list(row) for row in lent_order(sliced(4, 2).micro_batches[0].groups[0])]
    rows[1][0], rows[1][1] = rows[1][1], rows[1][0]
    with pytest.raises(PlanError, match="deadlock: 0F0@1:0, 1F0 wait for ranks that wait for them"):
        run_lent(rows, lambda action: 1.0, lambda action: 0.0)


def test_the_hand_written_plan_is_evaluated() -> None:
    lent = evaluate_plan(fixture("lent"), counted_costs(4))
    assert {event.name for event in lent.events if event.rank == 3} >= {"0F0@1:0,1:1", "1F3@0:0,0:1"}


def test_policies_and_packs_together_with_lenders_are_refused_by_name() -> None:
    plan = sliced(4, 2)
    (group,) = plan.micro_batches[0].groups
    first = dataclasses.replace(group.stages[0], activations=(ActivationPolicy(0, tile_tokens=8),))
    refused = {
        "activation policies": dataclasses.replace(group, stages=(first, *group.stages[1:])),
        "packs, hybrids": dataclasses.replace(
            group, chunks=(*group.chunks[:3], dataclasses.replace(group.chunks[3], spans=(Span(0, 120, 160), Span(1, 0, 5))))
        ),
    }
    for message, changed in refused.items():
        with pytest.raises(ValueError, match=message):
            run(dataclasses.replace(plan, lengths=(160, 5), micro_batches=(MicroBatch((changed,)),)))
