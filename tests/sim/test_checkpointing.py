"""Checkpointed costs and bytes are those of our own plans under the same policy, and some of them are worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.plans.cost_models import COST_KINDS, cost_model
from helpers.plans.forecasts import COEFFICIENTS, MODEL
from helpers.plans.forecasts import cost_model as toy_costs
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.types import Action, Chunk, GroupShape, LayerRange, SequenceGroup, Span, StagePlan
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.saved_tensors import class_bytes
from hf_longctx.plan.policies.slots import chunk_slot
from hf_longctx.plan.predict.pipeline_run import run_alone
from hf_longctx.sim.baselines import (
    CHECKPOINTINGS,
    FULL,
    KEPT,
    SELECTIVE,
    CheckpointedCosts,
    Checkpointing,
    document_load,
    group_bytes,
    most_tokens,
)

SHAPES = (GroupShape(1), GroupShape(2, 2), GroupShape(4, 4), GroupShape(4, 1), GroupShape(8, 4))
lists = st.lists(st.integers(1, 3000), min_size=1, max_size=6)


def group_of(lengths: list[int], shape: GroupShape, costs: CostModel, checkpointing: Checkpointing = KEPT) -> SequenceGroup:
    """A group with whole sequences in one chunk, under the policy of a checkpointing."""
    chunk = Chunk(0, tuple(Span(i, 0, length) for i, length in enumerate(lengths)))
    num_layers = costs.model.num_layers
    policies = (checkpointing.policy(num_layers),) if checkpointing.recomputed else ()
    stage = StagePlan(0, (LayerRange(0, num_layers),), (Action("F", 0, 0), Action("B", 0, 0)), policies)
    return SequenceGroup.of(shape, range(shape.degree), (chunk,), (stage,))


def test_replays_by_hand() -> None:
    # forward 1 ms a token and 2 us a pair on a rank, 10 ms a chunk; backward 2 ms, 5 us, 10 ms; 1 us a byte sent. The head has 80
    # of the 80 + 2 * 576 products of a token, which no replay repeats
    forward, backward = replace(COEFFICIENTS.forward, pair_s=2e-6), replace(COEFFICIENTS.backward, pair_s=5e-6)
    costs = replace(toy_costs(4), coefficients=replace(COEFFICIENTS, forward=forward, backward=backward))
    # documents of 40 and 20 tokens see 40^2 / 2 + 20^2 / 2 = 1000 pairs; four ranks send 3 / 4 of 16 values of 16 bytes, twice
    exchange_s = 2 * 60 / 4 * 3 / 4 * 16 * 16 * 1e-6
    kept_s = 0.02 + 60 / 4 * 3e-3 + 1000 / 4 * 7e-6 + exchange_s
    layers_s, attention_s = 60 / 4 * 1e-3 * (1 - 80 / 1232), 1000 / 4 * 2e-6
    expected = {KEPT: kept_s, SELECTIVE: kept_s + layers_s, FULL: kept_s + layers_s + attention_s}
    for checkpointing, seconds in expected.items():
        own = CheckpointedCosts.of(costs, checkpointing)
        chunk = Chunk(0, (Span(0, 0, 40), Span(1, 0, 20)))
        shape = GroupShape(4, 4)
        assert own.forward_s(chunk, shape, 2) + own.backward_s(chunk, shape, 2) == pytest.approx(seconds, rel=1e-12)
        assert own.group_s(shape) + own.sequences_s([40, 20], shape).sum() == pytest.approx(seconds, rel=1e-12)
        assert own.forward_s(chunk, shape, 2) == costs.forward_s(chunk, shape, 2)


@pytest.mark.wide
def at_once(kind: str) -> CostModel:
    """Costs of our own plans that exchange all heads before and after attention, as other systems do."""
    costs = cost_model(kind, 8)
    return replace(costs, method="auto", model=replace(costs.model, exchange_parts=1))


@given(lists, st.sampled_from(COST_KINDS), st.sampled_from(SHAPES))
@settings(max_examples=60, deadline=None)
def test_seconds_are_those_of_our_own_plans_under_the_same_policy(lengths: list[int], kind: str, shape: GroupShape) -> None:
    costs = at_once(kind)
    chunk = group_of(lengths, shape, costs).chunks[0]
    for checkpointing in CHECKPOINTINGS:
        own = CheckpointedCosts.of(costs, checkpointing)
        (first, last) = run_alone(group_of(lengths, shape, costs, checkpointing), costs).times
        predicted_s = own.forward_s(chunk, shape, 4) + own.backward_s(chunk, shape, 4)
        assert predicted_s == pytest.approx(last[1] - first[0], rel=1e-9)
        added_s = sum(
            item.recompute_s for item in chunk_slot(costs, chunk, shape).saved if item.tensor_class in checkpointing.recomputed
        )
        assert predicted_s - costs.forward_s(chunk, shape, 4) - costs.backward_s(chunk, shape, 4) == pytest.approx(
            added_s, abs=1e-9
        )


@given(lists, st.sampled_from(COST_KINDS), st.sampled_from(SHAPES))
@settings(max_examples=60, deadline=None)
def test_recomputing_more_takes_no_less_time(lengths: list[int], kind: str, shape: GroupShape) -> None:
    costs = at_once(kind)
    kept, selective, full = (CheckpointedCosts.of(costs, each).sequences_s(lengths, shape) for each in CHECKPOINTINGS)
    assert (kept == costs.sequences_s(lengths, shape)).all()
    # windows and linear costs may leave attention no seconds
    assert (kept < selective).all() and (selective <= full).all()


def test_spread_experts_are_visited_once_more_in_a_replay() -> None:
    plain = named_model("llama-3.2-1b")
    experts = replace(plain.experts, num_experts=8, num_ranks=4, num_layers=16, token_rows=32)
    costs = replace(toy_costs(4), model=replace(plain, experts=experts))
    chunk, shape = Chunk(0, (Span(0, 0, 400),)), GroupShape(4, 4)
    for checkpointing in (SELECTIVE, FULL):
        own = CheckpointedCosts.of(costs, checkpointing)
        (first, last) = run_alone(group_of([400], shape, costs, checkpointing), costs).times
        seconds = own.forward_s(chunk, shape, 16) + own.backward_s(chunk, shape, 16)
        assert seconds == pytest.approx(last[1] - first[0], rel=1e-9)
        assert seconds == pytest.approx(own.group_s(shape) + float(own.sequences_s([400], shape)[0]), rel=1e-9)


@given(lists, st.sampled_from(SHAPES))
@settings(max_examples=30, deadline=None)
def test_recomputing_more_takes_no_more_bytes_and_more_tokens_no_fewer(lengths: list[int], shape: GroupShape) -> None:
    costs = replace(cost_model("attention", 8), method="auto")
    byte_model = ByteModel(costs.model)
    longer = [*lengths[:-1], lengths[-1] + 500]
    for checkpointing in CHECKPOINTINGS:
        few, more = (group_bytes(byte_model, group_of(each, shape, costs), checkpointing) for each in (lengths, longer))
        assert few < more
    group = group_of(lengths, shape, costs)
    selective, full = (group_bytes(byte_model, group, each) for each in (SELECTIVE, FULL))
    assert full <= selective


def test_what_attention_keeps_is_the_difference_between_both() -> None:
    # 8 values of four bytes and an fp32 sum for each of four heads; the last layer's are there again in its full replay
    assert class_bytes(MODEL, "attention_output") == 8 * 4 + 4 * 4
    costs = toy_costs(1)
    byte_model, group = ByteModel(costs.model), group_of([300], GroupShape(1), costs)
    selective, full = (group_bytes(byte_model, group, each) for each in (SELECTIVE, FULL))
    assert selective - full == 300 * 48


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-8b", "gemma-3-12b", "qwen3.5-9b", "gpt-7b"])
@pytest.mark.parametrize("shape", [GroupShape(1), GroupShape(8, 8), GroupShape(8, 1)])
def test_a_rank_holds_ever_more_tokens_and_not_one_more(name: str, shape: GroupShape) -> None:
    model = named_model(name)
    byte_model, like = ByteModel(model), document_load(model.num_layers, shape)
    device_bytes = 30 * 2**30
    found = [most_tokens(byte_model, device_bytes, each, like) for each in CHECKPOINTINGS]
    assert found == sorted(found) and found[2] > 4 * found[0] > 0
    costs = replace(toy_costs(8), model=model)
    for checkpointing, tokens in zip(CHECKPOINTINGS, found, strict=True):
        needed = [
            group_bytes(byte_model, group_of([count * shape.degree], shape, costs), checkpointing)
            for count in (tokens, tokens + 1)
        ]
        assert needed[0] <= device_bytes < needed[1]
