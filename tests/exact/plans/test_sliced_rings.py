"""Slices of a sequence in rings, in hybrids and beside other groups give the loss and the gradients of one plain process.

All in fp64, on gloo ranks.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from helpers.models.any_model import wide_floats
from helpers.models.reference import TOLERANCE, random_rows, reference_step, worst_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.layouts import plan_of, tiny_costs
from helpers.plans.policies import offloading, same_policy
from helpers.plans.sliced_plans import cut, forward_then_back, sliced_plan
from helpers.ranks.rank_pool import RankPool
from helpers.ranks.rank_steps import step_on_rank

from hf_longctx.plan.chunks import sliced_in_step
from hf_longctx.plan.core.serialize import plan_from_json, plan_to_json
from hf_longctx.plan.core.settings import ActivationBudget, PlannerConfig
from hf_longctx.plan.core.types import Action, Chunk, LayerPolicy, MicroBatch, Span, StepPlan
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.plan.model.attention_pairs import SpanRates
from hf_longctx.plan.predict.planning import Planning
from hf_longctx.plan.room.room import make_room

LENGTHS = [37, 9, 5, 20, 1]
# slices of one token, and of fewer than a ring has pieces, leave ranks without tokens of a slice; whole documents beside the last
# slice, a pack, and a second sequence in slices
CHUNKS = [*([span] for span in cut(0, (15, 1, 3))), [(0, 19, 37), (1, 0, 9), (4, 0, 1)], [(2, 0, 5)], [(3, 0, 1)], [(3, 1, 20)]]
# a slice runs backward before others of its sequence run forward, and sequences take turns
TURNS = "0F0 0F1 0F5 0F2 0F4 0B4 0F3 0F6 0B3 0B6 0B2 0B1 0B5 0B0"


def steps_on_rank(steps: list[tuple[ModelCase, str]], rows: Any) -> list[Any]:
    """Runs one step for each case and plan; what transformers computes in fp32 is fp64."""
    with wide_floats():
        return [step_on_rank(case, plan, rows, shard_ranks=plan_from_json(plan).shard_ranks) for case, plan in steps]


def check(pool: RankPool, steps: list[tuple[ModelCase, StepPlan]]) -> None:
    """Asserts that every rank ends with the loss and gradients of one plain process."""
    rows = random_rows(LENGTHS)
    found = pool.run(steps_on_rank, [(case, plan_to_json(plan)) for case, plan in steps], rows)
    with wide_floats():
        expected = {case: reference_step(build_model(case), rows, case.loss) for case, _ in steps}
    for of_rank in found:
        errors = {
            (case.family, place): worst_error(step, expected[case])
            for place, ((case, _), step) in enumerate(zip(steps, of_rank, strict=True))
        }
        assert max(errors.values()) <= TOLERANCE, errors


def sliced(num_ranks: int, ulysses: int, words: str = "") -> StepPlan:
    return sliced_plan(LENGTHS, CHUNKS, words, num_ranks=num_ranks, ulysses=ulysses)


LLAMA, WINDOW = ModelCase(), ModelCase("mistral_window")
# windows in one of two layers and capped scores; values of another size than keys; keys chosen by an index; experts and sinks
OTHERS = [*map(ModelCase, ("gemma2", "deepseek_v2", "deepseek_v32")), ModelCase("gpt_oss", attention="eager")]
# outputs of attention that are recomputed, and kept, in part on the host
RECOMPUTED, KEPT = offloading(), offloading(recompute=0.0, host=0.5, mlp=0.5)


def replayed(plan: StepPlan, policy: LayerPolicy) -> StepPlan:
    return same_policy(plan, policy, policy, tile_tokens=4)


@pytest.mark.wide
def test_slices_in_rings_match(ranks) -> None:
    plan = sliced(3, 1, TURNS)
    again, kept = (replayed(plan, policy) for policy in (RECOMPUTED, KEPT))
    check(ranks(3), [(LLAMA, plan), (LLAMA, again), (LLAMA, kept), (WINDOW, plan), (WINDOW, kept)])


@pytest.mark.wide
def test_slices_of_other_models_in_rings_match(ranks) -> None:
    plan = sliced(3, 1)
    check(ranks(3), [(case, plan) for case in OTHERS])


def test_slices_in_rings_of_two_match(ranks) -> None:
    # one KV head for all query heads
    check(ranks(2), [(replace(LLAMA, num_kv_heads=1), sliced(2, 1)), (WINDOW, sliced(2, 1))])


@pytest.mark.wide
def test_slices_in_hybrids_match(ranks) -> None:
    plan = sliced(4, 2, TURNS)
    sharded = validate_plan(replace(plan, parameters="sharded"))
    check(ranks(4), [(LLAMA, sharded), (WINDOW, replayed(plan, RECOMPUTED)), (OTHERS[0], plan)])


def beside_others(ulysses: int) -> StepPlan:
    """A group of two ranks that runs slices, beside ranks that run whole documents in one chunk."""
    plan = plan_of([[(2, (0, 4)), (1, (1, 2)), (1, (3,))]], LENGTHS, 4, ulysses)
    first, *others = plan.micro_batches[0].groups
    spans = [*([span] for span in cut(0, (15, 1, 3))), [(0, 19, 37), (4, 0, 1)]]
    stage = replace(first.stages[0], actions=tuple(map(Action.parse, forward_then_back(4).split())))
    chunks = tuple(Chunk(index, tuple(Span(*span) for span in each)) for index, each in enumerate(spans))
    return validate_plan(replace(plan, micro_batches=(MicroBatch((replace(first, chunks=chunks, stages=(stage,)), *others)),)))


@pytest.mark.wide
def test_slices_beside_other_groups_match(ranks) -> None:
    plan, in_ring = beside_others(0), beside_others(1)
    assert plan.layout == in_ring.layout == "<2,1,1>"
    # the two others share parameters with each other alone
    sharded = validate_plan(replace(in_ring, parameters="sharded", shard_ranks=2))
    check(ranks(4), [(LLAMA, plan), (LLAMA, in_ring), (LLAMA, sharded)])


def kept_beside_others() -> StepPlan:
    """Groups of 2, 1 and 1 ranks that share weights, one chunk each, before anything makes room."""
    return replace(plan_of([[(2, (0, 4)), (1, (1, 2)), (1, (3,))]], LENGTHS, 4), parameters="sharded")


@pytest.mark.wide
def test_groups_that_share_weights_match_where_only_slices_fit(ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    # slices of the documents of this test, and not of 2K tokens
    monkeypatch.setattr("hf_longctx.plan.chunks.LEAST_SLICE_TOKENS", 3)
    kept, costs = kept_beside_others(), replace(tiny_costs(4), parameters="sharded")
    plans = []
    for device_bytes in range(10_000, 200_000, 1_000):
        config = PlannerConfig(1, (1,), activations=ActivationBudget(0, device_bytes, tile_tokens=0))
        with suppress(ValueError):
            plans.append(validate_plan(make_room(kept, Planning(costs, config))))
            with pytest.raises(ValueError, match="do not fit"):
                make_room(kept, Planning(costs, replace(config, one_micro_batch=True)))
            break
    (plan,) = plans
    long, *others = plan.micro_batches[0].groups
    assert plan.layout == "<2,1,1>" and len({len(group.chunks) for group in (long, *others)}) == 1
    assert sum(span.sequence == 0 for chunk in long.chunks for span in chunk.spans) > 1
    # some group would not have been cut, and runs beside dummy chunks
    assert any(not chunk.spans for group in others for chunk in group.chunks)
    assert any(policy.layers for policy in long.stages[0].activations)
    check(ranks(4), [(LLAMA, plan), (WINDOW, plan), (OTHERS[0], plan)])


def test_experts_that_are_spread_meet_in_slices_in_step(ranks) -> None:
    """Ranks also exchange tokens of experts in every layer, those with dummy chunks too, and balance the experts."""
    cut = sliced_in_step(kept_beside_others().micro_batches[0].groups, 3, SpanRates(1.0, 1.0))
    plan = validate_plan(replace(kept_beside_others(), micro_batches=(MicroBatch(cut),)))
    check(ranks(4), [(ModelCase("qwen3_moe_dense", balance=0.1, spread=True), plan)])


def test_gradients_that_later_slices_do_not_leave_are_noticed(ranks) -> None:
    rows, plan = random_rows(LENGTHS), plan_to_json(sliced(2, 1))
    expected = reference_step(build_model(LLAMA), rows)
    for step in ranks(2).run(step_on_rank, LLAMA, plan, rows, "gradients of keys and values dropped"):
        assert worst_error(step, expected) > 1e-3
