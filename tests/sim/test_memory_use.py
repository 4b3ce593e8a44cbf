"""Forecasts of the memory of plans that hold more tokens than can be kept, and of baselines beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.plans.forecasts import LENGTHS, MEMORY, MODEL, changed, cost_model, forecast, scenario

from hf_longctx.plan.core.serialize import plan_digest
from hf_longctx.plan.core.types import (
    Action,
    ActivationPolicy,
    Chunk,
    LayerPolicy,
    LayerRange,
    MicroBatch,
    SequenceGroup,
    Span,
    StagePlan,
    StepPlan,
    TensorShare,
)
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.saved_tensors import class_bytes
from hf_longctx.plan.setup import lora_adapters
from hf_longctx.sim.execution import execute_plan
from hf_longctx.sim.forecast import make_forecast
from hf_longctx.sim.memory_use import memory_use, peak_bytes
from hf_longctx.sim.output.text import forecast_text
from hf_longctx.sim.scenario import Scenario

# most tokens of four ranks with everything kept, 41 each, as worked out in test_remedies
KEPT = 164


def engine(**changes: int) -> Scenario:
    """The toy scenario with the activation engine, as a run would plan it."""
    own = scenario()
    return changed(own, memory=replace(own.memory, keeps_everything=False, **changes))


def test_a_sequence_above_what_is_kept_is_planned_and_others_recompute_for_it() -> None:
    found = forecast((KEPT + 1, 30), of=engine())
    [step] = found.steps
    validate_plan(step.plan)
    assert step.memory_use.num_tiled + step.memory_use.num_chosen == 1
    assert step.plan.estimate.step_s == step.execution.step_s == execute_plan(step.plan, cost_model(4)).step_s
    assert step.plan.estimate.peak_bytes == max(step.execution.peak_bytes) <= MEMORY.usable_bytes
    # the others recompute, too
    assert {choice.checkpointing for choice in step.baselines} == {"selective checkpointing"}
    degrees = [choice for choice in found.alternatives if choice.degree]
    assert [(choice.degree, choice.is_possible) for choice in degrees] == [(1, False), (2, False), (4, True)]
    assert degrees[1].detail.startswith(f"does not fit even with full checkpointing: the longest sequence has {KEPT + 1} tokens")


def test_the_longest_sequence_of_the_engine_is_planned_and_one_token_more_is_refused() -> None:
    own = engine()
    room = own.longest_tokens
    assert room > 1.5 * KEPT and own.kept_tokens * 4 == KEPT
    assert forecast((room, 30), of=own).fullest.peak_bytes <= MEMORY.usable_bytes
    with pytest.raises(ValueError, match=rf"has {room + 1} tokens, .* holds {room}; 1 sequence.*--limit {room}"):
        forecast((room + 1, 30), of=own)


def test_host_memory_that_is_used_shows_with_its_reason() -> None:
    found = forecast((260,), of=engine(host_bytes=200_000))
    assert 0 < found.fullest.host_bytes <= 200_000 and found.fullest.on_host > 0
    assert found.fullest.host_bytes == max(found.steps[0].execution.host_bytes)
    assert "are offloaded" in found.fullest.reason
    text = forecast_text(found)
    assert (
        f"{found.fullest.host_bytes / 2**30:.1f} GiB of host memory on the fullest rank" in text and found.fullest.reason in text
    )
    without = forecast((260,), of=engine()).fullest
    assert without.host_bytes == 0 and without.reason == "nothing is offloaded: there is no host memory for it"


def test_a_bound_on_tokens_holds_for_the_engine_too() -> None:
    own = engine()
    bound = changed(own, placement=replace(own.placement, max_tokens_per_rank=50))
    assert (bound.tokens_per_rank, bound.kept_tokens, bound.planner_config.tokens_per_rank) == (50, 41, 50)
    assert changed(own, placement=replace(own.placement, max_tokens_per_rank=20)).kept_tokens == 20


@pytest.mark.wide
def test_what_fits_is_planned_as_if_there_were_no_engine() -> None:
    with_engine, without = forecast(of=engine()), forecast()
    # LENGTHS fit with everything kept, but fewer micro-batches with more tokens may be faster
    assert with_engine.step_s <= without.step_s * (1 + 1e-12)
    few = (30, 20, 10)
    assert plan_digest(forecast(few, of=engine()).steps[0].plan) == plan_digest(forecast(few).steps[0].plan)
    assert forecast(few, of=engine()).fullest.reason == "nothing is offloaded: everything fits on the device"
    assert sum(use.num_sequences for use in with_engine.degrees_used) == len(LENGTHS)


def hand_made() -> StepPlan:
    """Two slices of a sequence of 40 tokens on one rank; one layer of the second is recomputed and half of it offloaded."""
    half = LayerPolicy(
        (
            TensorShare("layer_input", host=0.5, device=0.5),
            TensorShare("attention_output", recompute=1.0),
            TensorShare("qkv", recompute=1.0),
            TensorShare("mlp", recompute=0.25, device=0.75),
        )
    )
    chunks = (Chunk(0, (Span(0, 0, 10),)), Chunk(1, (Span(0, 10, 40),)))
    order = (Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 1), Action("B", 0, 0))
    stage = StagePlan(0, (LayerRange(0, 2),), order, (ActivationPolicy(1, 0, (half,)),))
    group = SequenceGroup((0,), "local", chunks, (stage,))
    kept = SequenceGroup(
        (0,), "local", (Chunk(0, (Span(1, 0, 5),)),), (StagePlan(0, (LayerRange(0, 2),), (Action("F", 0, 0), Action("B", 0, 0))),)
    )
    return StepPlan(0, (40, 5), 1, 1, "replicated", (MicroBatch((group,)), MicroBatch((kept,))))


def test_shares_are_counted_by_bytes() -> None:
    plan = validate_plan(hand_made())
    costs = replace(cost_model(1), parameters="replicated", shard_ranks=1)
    run = execute_plan(plan, costs)
    use = memory_use(plan, run, costs, MEMORY)
    assert (use.num_kept, use.num_tiled, use.num_chosen, use.num_sliced, use.most_slices) == (1, 0, 1, 1, 2)
    # one of two layers, for 30 of 40 tokens
    assert dict(use.recomputed) == pytest.approx({"attention_output": 0.375, "qkv": 0.375, "mlp": 0.375 / 4})
    names = ("layer_input", "attention_output", "qkv", "mlp")
    whole = sum(class_bytes(MODEL, name) for name in names) * 2 * 40
    assert use.on_host == pytest.approx(class_bytes(MODEL, "layer_input") * 15 / whole)
    assert use.host_bytes == class_bytes(MODEL, "layer_input") * 15
    # one layer runs attention and projections of queries, keys and values again, and a quarter of the MLP's tokens; the layer
    # above it hides the copies of its input
    forward, qkv = costs.coefficients.forward, MODEL.qkv_parameters / MODEL.layer_parameters
    products_s = forward.token_s * 30 * (1 - MODEL.head_share) * (qkv + 0.25 * (1 - qkv))
    assert use.added_s == pytest.approx((products_s + forward.pair_s * 30 * (10 + 15)) / 2, rel=1e-9)
    assert run.step_s == pytest.approx(use.added_s + execute_plan(without_policies(plan), costs).step_s)


def without_policies(plan: StepPlan) -> StepPlan:
    strip = lambda group: replace(group, stages=tuple(replace(stage, activations=()) for stage in group.stages))  # noqa: E731
    return replace(plan, micro_batches=tuple(replace(mb, groups=tuple(map(strip, mb.groups))) for mb in plan.micro_batches))


def test_a_sequence_in_slices_counts_once() -> None:
    found = forecast((30, 20))
    sliced = replace(found, steps=(replace(found.steps[0], plan=hand_made()),))
    assert sorted(length for length, _ in sliced.placed_lengths()) == [5, 40]


def test_states_of_adapters_are_those_of_the_memory_model() -> None:
    plan = hand_made()
    costs = replace(cost_model(1), parameters="replicated", shard_ranks=1)
    run = execute_plan(plan, costs)
    lora = replace(MEMORY, model=replace(MEMORY.model, adapters=lora_adapters(MEMORY.model, 1)), lora_rank=1)
    less = MEMORY.state_bytes("replicated", 1) - lora.state_bytes("replicated", 1)
    assert less > 0 and MEMORY.state_bytes("replicated", 1) == ByteModel(costs.model).states(costs.parameters, costs.shard_ranks)
    [whole], [adapters] = (peak_bytes(plan, run, costs, memory) for memory in (MEMORY, lora))
    assert whole == run.peak_bytes[0] and adapters == whole - less


def test_the_report_says_what_planned_steps_hold() -> None:
    own = engine()
    text = forecast_text(make_forecast(own, None, 1, 1, 0))
    longest = f"LONGEST SEQUENCE  {own.longest_tokens:,} tokens (4 ranks of {own.tokens_per_rank:,}), all weights trained: "
    assert f"{longest}everything kept up to 41" in text
    planned = forecast_text(forecast((KEPT + 1, 30), of=own))
    assert "  activations: 1 group " in planned and "nothing is offloaded: " in planned
    assert "static <4>, selective checkpointing" in planned and "all groups of 2 or fewer" in planned
    assert "above the bound" in planned and "full checkpointing layer inputs alone" in planned
    # who plans with everything kept compares layouts
    kept = forecast_text(forecast((KEPT, 30)))
    assert "checkpointing" not in kept and "static <4> " in kept
