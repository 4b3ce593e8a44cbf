"""Slots, what one layer saves for a chunk: bytes and seconds of each class by hand, and exact curves of partial recomputes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.plans.layouts import tiny_costs
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.settings import ClusterSpec, PlannerConfig
from hf_longctx.plan.core.types import (
    Action,
    Chunk,
    GroupShape,
    LayerPolicy,
    LayerRange,
    SequenceGroup,
    Span,
    StagePlan,
    TensorShare,
)
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.cost.cost_model import CostModel, default_coefficients, elementwise_bytes, replayed_bytes
from hf_longctx.plan.cost.profiles import read_profile
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.saved_tensors import class_bytes
from hf_longctx.plan.model.attention_pairs import FULL, AttentionPairs
from hf_longctx.plan.model.config import ExpertSpec
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.planner import plan_step
from hf_longctx.plan.policies.fit import with_layers
from hf_longctx.plan.policies.slots import SavedClass, chunk_slot, layer_slot, layer_slots
from hf_longctx.plan.predict.pipeline_run import run_alone

LOCAL = GroupShape(1)
ACTIONS = (Action("F", 0, 0), Action("B", 0, 0))


def attention(num_bytes: float, recompute_s: float, *documents: tuple[int, int]) -> SavedClass:
    return SavedClass("attention_output", num_bytes, recompute_s, documents=documents)


def test_classes_of_a_slot_share_the_seconds_of_its_forward() -> None:
    costs = tiny_costs(2)
    chunk = Chunk(0, (Span(0, 10, 60), Span(1, 0, 14)))
    slot = layer_slot(costs, chunk, GroupShape(2, 2), FULL)
    found = {item.tensor_class: item for item in slot.saved}
    # each of two ranks has 32 of the 64 tokens, and half of the pairs
    assert {name: item.num_bytes for name, item in found.items()} == {
        name: 32 * class_bytes(costs.model, name) for name in ("layer_input", "attention_output", "qkv", "mlp")
    }
    forward, num_layers = costs.coefficients.forward, costs.model.num_layers
    pairs = 50 * (10 + 25) + 14 * 7
    assert found["attention_output"].recompute_s == pytest.approx(forward.pair_s * pairs / 2 / num_layers)
    # the output head belongs to no layer
    inside = 1 - costs.model.head_share
    assert 0.5 < inside < 1
    assert found["qkv"].recompute_s + found["mlp"].recompute_s == pytest.approx(forward.token_s * 32 * inside / num_layers)
    assert 0 < found["qkv"].recompute_s < found["mlp"].recompute_s
    # another run of a whole layer makes the input of the next one, but no program chooses that
    again = sum(found[name].recompute_s for name in ("attention_output", "qkv", "mlp"))
    assert found["layer_input"].recompute_s == pytest.approx(again) and not found["layer_input"].can_recompute
    # attention alone depends on where its documents lie
    assert [item.documents for item in slot.saved if item.documents] == [((10, 50), (0, 14))]
    for is_backward, layer_s in ((False, slot.forward_s), (True, slot.backward_s)):
        one = costs.coefficients.backward if is_backward else forward
        pass_s = (costs.backward_s if is_backward else costs.forward_s)(chunk, GroupShape(2, 2), num_layers)
        assert layer_s == pytest.approx((pass_s - one.token_s * 32 * costs.model.head_share) / num_layers)


def test_the_slot_of_a_chunk_is_all_of_its_layers() -> None:
    costs = tiny_costs(1)
    costs = replace(costs, model=replace(costs.model, num_layers=4, windows=(5, None, 5, None)))
    chunk = Chunk(0, (Span(0, 0, 40),))
    whole, layers = chunk_slot(costs, chunk, LOCAL), layer_slots(costs, chunk, LOCAL)
    assert whole.forward_s == pytest.approx(sum(layer.forward_s for layer in layers))
    assert whole.backward_s == pytest.approx(sum(layer.backward_s for layer in layers))
    for joined, *own in zip(whole.saved, *(layer.saved for layer in layers), strict=True):
        assert joined.num_bytes == pytest.approx(sum(item.num_bytes for item in own))
        assert joined.recompute_s == pytest.approx(sum(item.recompute_s for item in own))


@pytest.mark.parametrize(
    "can_keep_qkv,are_spread,tiles_mlps", [(True, False, True), (False, False, True), (True, True, True), (False, False, False)]
)
def test_a_slot_says_what_the_runtime_may_do_with_each_class(can_keep_qkv: bool, are_spread: bool, tiles_mlps: bool) -> None:
    costs = tiny_costs(1)
    experts = ExpertSpec(num_ranks=2 if are_spread else 1)
    costs = replace(costs, model=replace(costs.model, can_keep_qkv=can_keep_qkv, tiles_mlps=tiles_mlps, experts=experts))
    slot = layer_slot(costs, Chunk(0, (Span(0, 0, 9),)), LOCAL, FULL)
    abilities = {item.tensor_class: (item.can_recompute, item.can_offload, item.can_keep) for item in slot.saved}
    assert abilities == {
        "layer_input": (False, True, True),
        "attention_output": (True, True, True),
        "qkv": (True, can_keep_qkv, can_keep_qkv),
        # tokens travel to spread experts as a whole, in the forward and in a replay; other MLPs cannot run alone
        "mlp": (True, *[tiles_mlps and not are_spread] * 2),
    }


def test_a_replay_sends_tokens_to_spread_experts_once_more() -> None:
    costs = tiny_costs(2)
    experts = ExpertSpec(token_rows=4, num_layers=2, num_experts=4, num_ranks=2)
    models = costs.model, replace(costs.model, experts=experts)
    chunk = Chunk(0, (Span(0, 0, 9),))
    whole, spread = (layer_slot(replace(costs, model=model), chunk, LOCAL, FULL) for model in models)
    seconds = [next(item.recompute_s for item in slot.saved if item.tensor_class == "mlp") for slot in (whole, spread)]
    # alone, a rank sends nothing else
    assert seconds[1] - seconds[0] == pytest.approx(spread.forward_s - whole.forward_s) and seconds[1] > seconds[0]


def test_layers_of_one_window_have_one_slot() -> None:
    costs = tiny_costs(1)
    costs = replace(costs, model=replace(costs.model, num_layers=4, windows=(5, None, 5, None)))
    first, second, third, fourth = layer_slots(costs, Chunk(0, (Span(0, 0, 40),)), LOCAL)
    assert first is third and second is fourth
    assert first.forward_s < second.forward_s


def test_a_dummy_token_fills_a_rank_that_has_none() -> None:
    costs = tiny_costs(4)
    chunk = Chunk(0, (Span(0, 0, 1),))
    slot = layer_slot(costs, chunk, GroupShape(4, 4), FULL)
    assert [item.num_bytes for item in slot.saved] == [class_bytes(costs.model, item.tensor_class) for item in slot.saved]


def test_a_slice_s_front_costs_what_its_prefix_says() -> None:
    # 100 tokens behind 300: 35,000 pairs, the first half 50 * 300 + 1,250 of them
    assert attention(1.0, 35.0, (300, 100)).recompute_part_s(0.5) == pytest.approx(16.25)
    # documents of 60 and 40 tokens: 1,800 and 800 pairs; 80 rows hold all of the first and 200 of the second
    packed = attention(1.0, 2.6, (0, 60), (0, 40))
    assert packed.recompute_part_s(0.6) == pytest.approx(1.8) and packed.recompute_part_s(0.8) == pytest.approx(2.0)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 500)), min_size=1, max_size=12))
def test_curves_are_convex_and_never_above_exact_points(documents: list[tuple[int, int]]) -> None:
    item = attention(1.0, 7.0, *documents)
    segments = item.segments()
    slopes = [seconds / width for width, seconds in segments]
    assert slopes == sorted(slopes)
    assert sum(width for width, _ in segments) == pytest.approx(1) and sum(s for _, s in segments) == pytest.approx(7)
    tokens = [token for start, size in documents for token in range(start, start + size)]
    for eighth in range(9):
        # pairs counted one row at a time, half a pair for the row itself
        rows = round(eighth / 8 * len(tokens))
        exact = sum(token + 0.5 for token in tokens[:rows]) / sum(token + 0.5 for token in tokens) * 7
        assert item.recompute_part_s(rows / len(tokens)) == pytest.approx(exact)
        place = seconds = 0.0
        for width, more in segments:
            part = min(1.0, max(0.0, (eighth / 8 - place) / width))
            place, seconds = place + width, seconds + part * more
        assert seconds <= item.recompute_part_s(eighth / 8) + 1e-9


def test_front_rows_of_attention_are_recomputed_at_their_own_price() -> None:
    # rows 0 to 100 under a window of 20: 200 pairs, then 20 for each row; the first half of the rows has 200 + 30 * 20
    item = SavedClass("attention_output", 100.0, 9.0, documents=((0, 100),), pairs=AttentionPairs.of((20,)))
    assert item.recompute_part_s(0.5) == pytest.approx(9.0 * 800 / 1800)
    assert sum(width for width, _ in item.segments()) == pytest.approx(1)
    rates = [seconds / width for width, seconds in item.segments()]
    assert rates == pytest.approx(sorted(rates)) and sum(seconds for _, seconds in item.segments()) == pytest.approx(9.0)


# Llama-3.1-8B
LLAMA = ModelSpec(32, 4096, 14336, 32, 8, 128, 128256, 131072, bytes_per_element=2)


def test_attention_is_kept_before_the_mlp_at_long_lengths() -> None:
    # seconds per byte at 128K tokens are dozens of times higher for attention
    slots = layer_slots(tiny_costs(1, LLAMA), Chunk(0, (Span(0, 0, 131072),)), LOCAL)
    density = {item.tensor_class: item.recompute_s / item.num_bytes for item in slots[0].saved}
    assert density["attention_output"] > 10 * max(density["mlp"], density["qkv"])


def test_layers_under_a_policy_run_their_norms_again() -> None:
    model = replace(named_model("llama-3.1-8b", 2), num_layers=4)
    hardware = read_profile("h200").spec
    rate, tokens = hardware.elementwise_bytes_per_s, 4096
    seconds = []
    for known in (True, False):
        cluster = ClusterSpec(1, 1, replace(hardware, elementwise_bytes_per_s=rate if known else 0.0))
        costs = CostModel(model, cluster, default_coefficients(model, cluster))
        group = SequenceGroup((0,), "local", (Chunk(0, (Span(0, 0, tokens),)),), (StagePlan(0, (LayerRange(0, 4),), ACTIONS),))
        # all that these layers keep is there, but they run again
        kept = LayerPolicy((TensorShare("layer_input", host=1e-9, device=1 - 1e-9),))
        under = with_layers(group, {(0, 0, 0): (kept,) * 3}, 2048)
        ends_s = [run_alone(each, costs).times[-1][1] for each in (group, under)]
        seconds.append(ends_s[1] - ends_s[0])
        again = {item.tensor_class: item.recompute_s for item in layer_slots(costs, group.chunks[0], LOCAL)[0].saved}
        forward_s = costs.coefficients.forward.token_s * tokens * (1 - costs.head_share(False)) / 4
        moved_s = elementwise_bytes(model)[0] * tokens / rate
        inner_s = replayed_bytes(model)[1] * tokens / rate
        # products and the MLP's own operations, where their rate is known
        expected_s = forward_s - moved_s + inner_s if known else forward_s
        assert again["qkv"] + again["mlp"] == pytest.approx(expected_s)
    assert seconds[0] == pytest.approx(3 * replayed_bytes(model)[0] * tokens / rate, rel=1e-6)
    assert seconds[1] == pytest.approx(0.0, abs=1e-9)


def test_packs_that_fit_whole_are_not_put_under_policies_that_copies_would_hide() -> None:
    model = replace(named_model("llama-3.1-8b", 2), num_layers=8)
    cluster = ClusterSpec(1, 1, read_profile("h200").spec)
    costs, byte_model = CostModel(model, cluster, default_coefficients(model, cluster)), ByteModel(model)
    budget = byte_model.budget(byte_model.kept_bytes(8000), 2**40)
    plan = plan_step(0, [4000, 3900, 3800, 3700], costs, PlannerConfig(32000, (1,), activations=budget))
    policies = [p for each in plan.micro_batches for group in each.groups for stage in group.stages for p in stage.activations]
    assert len(plan.micro_batches) == 2 and not any(policy.layers for policy in policies)
