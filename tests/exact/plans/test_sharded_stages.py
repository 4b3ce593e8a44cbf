"""Stages whose weights are sharded: losses, gradients and clipped steps of one process, and no gather that the plan lacks.

Ranks of a stage meet in every pass ("sharded", as ZeRO-3) or in every backward ("gathered_per_step", as ZeRO-2), in fp64, on
gloo ranks.

What proves what, for 2 stages of 2 ranks, 2 of 4 and 4 of 2, in both modes where no other number is named:

    slices, packs, hybrids of them, recomputing, offloading    `test_slices_packs_and_policies_match`
    10 clipped steps of AdamW, each of two plans (accumulation)    `test_ten_clipped_steps_of_two_plans_each_follow_one_process`
    110 random plans, none of which hangs    `test_random_plans_match`
    no gather or sum that the plan lacks (4 x 2; 2 x 2 interleaved)    `test_weights_are_gathered_as_often_as_the_plan_says`
    rings, hybrids of rings and Ulysses, more ranks than heads, copies of shards    `test_rings_match` and the three after it
    one schedule through several micro-batches (2 x 2, 4 x 2)    `test_rounds_in_turns.py`
    experts, adapters, frozen layers, tied weights, windows    `test_models_match`
    resuming to and from every layout (2 x 2)    `hf/trainer/test_staged_trainer.py`
    clipped trainings, evaluation, fp32 copies of bf16 weights (2 x 2)    `hf/trainer/stages/test_sharded_stage_trainer.py`
    kills and restarts (2 x 2)    `soak/test_kills.py`
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.models.reference import random_rows, reference_step, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.cost_models import cost_model
from helpers.plans.pipeline_plans import LENGTHS, RANDOM_PIPELINES, pipeline_plan, random_chunks
from helpers.plans.policies import layer_policies, num_policies, replayed, with_policies
from helpers.plans.sliced_plans import Rows, cut
from helpers.ranks.pipeline_steps import check_pipeline, stage_executor
from helpers.ranks.rank_steps import rank_inputs, whole
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_longctx.plan.core.orders import running_order
from hf_longctx.plan.core.serialize import plan_from_json, plan_to_json
from hf_longctx.plan.core.settings import PlannerConfig
from hf_longctx.plan.core.types import ActivationPolicy, Parameters, RankPlan, StepPlan
from hf_longctx.plan.pipeline.stages import layer_ranges
from hf_longctx.plan.planner import plan_step
from hf_longctx.runtime.parameters.gradients import clip_stage_gradients

MODES: tuple[Parameters, ...] = ("sharded", "gathered_per_step")
CASE = ModelCase(num_layers=4)
POLICIES = [replayed(0.0, 0.5), replayed(1.0, mlp=0.5, input_host=1.0)]
# a long sequence in slices with a hybrid, packs, and other slices
LONG = [*([span] for span in cut(0, [15, 11, 9, 5])[:-1]), [cut(0, [15, 11, 9, 5])[-1], (2, 0, 9)]]
MIXED = [*([span] for span in cut(1, [12, 11])), [(3, 0, 7), (4, 0, 5)]]
# name -> (stages, ranks of a stage, groups of every micro-batch)
SHAPES: dict[str, tuple[int, int, list[list[tuple[int, Any]]]]] = {
    "2 x 2": (2, 2, [[(1, LONG), (1, MIXED)], [(2, [[(5, 0, 17)], [(5, 17, 30)]])]]),
    "2 x 4": (2, 4, [[(2, LONG), (1, MIXED), (1, [[(5, 0, 30)]])]]),
    "4 x 2": (4, 2, [[(2, LONG)], [(1, MIXED), (1, [[(5, 0, 30)]])]]),
}


def plan_of(shape: str, parameters: Parameters, **changes: Any) -> StepPlan:
    """The plan of a shape, in which some layers of some chunks are recomputed or offloaded."""
    num_stages, _, groups = SHAPES[shape]
    plan = pipeline_plan(LENGTHS, groups, num_stages, parameters=parameters, **changes)
    policies = [
        ActivationPolicy(0, 0, tuple(POLICIES[: place % 3]), tile_tokens=4 * (place % 2)) for place in range(num_policies(plan))
    ]
    return with_policies(plan, policies)


def num_ranks(plan: StepPlan) -> int:
    return plan.num_stages * plan.ranks_per_stage


@pytest.mark.daily("2 x 2-gathered_per_step")
@pytest.mark.parametrize("parameters", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_slices_packs_and_policies_match(ranks, shape: str, parameters: Parameters) -> None:
    plan = plan_of(shape, parameters)
    results = check_pipeline(ranks(num_ranks(plan)), CASE, plan)
    assert any(memory.host for *_, memory in results)


@pytest.mark.daily("1f1b-sharded")
@pytest.mark.parametrize("parameters", MODES)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_other_orders_match(ranks, schedule: Any, parameters: Parameters) -> None:
    check_pipeline(ranks(4), CASE, plan_of("2 x 2", parameters, schedule=schedule))


@pytest.mark.daily("degrees2-attention-12-sharded")
@pytest.mark.parametrize("parameters", MODES)
@pytest.mark.parametrize(
    ("degrees", "kind", "tokens"), [((1,), "exchange", 60), ((2,), "exchange", 12), ((1, 2), "attention", 12)]
)
def test_groups_side_by_side_that_the_planner_slices_match(
    ranks, degrees: tuple[int, ...], kind: str, tokens: int, parameters: Parameters
) -> None:
    costs = replace(cost_model(kind, 8), parameters=parameters)
    lengths = [40, 38, 23, 22, 9, 9, 7, 7, 5, 4, 30, 12]
    plan = plan_step(0, lengths, costs, PlannerConfig(tokens, degrees, stages=layer_ranges(CASE.num_layers, 2)))
    assert all(len(micro_batch.groups) > 1 for micro_batch in plan.micro_batches)
    groups = [group for micro_batch in plan.micro_batches for group in micro_batch.groups]
    assert sum(any(chunk.prefix_tokens for chunk in group.chunks) for group in groups) > 1
    check_pipeline(ranks(8), CASE, plan)


@pytest.mark.wide
@pytest.mark.parametrize("parameters", MODES)
def test_copies_of_shards_match(ranks, parameters: Parameters) -> None:
    plan = plan_of("2 x 4", parameters, shard_ranks=2)
    check_pipeline(ranks(8), ModelCase(num_layers=4, tied=True), plan)


@pytest.mark.wide
@pytest.mark.parametrize("parameters", MODES)
def test_rings_match(ranks, parameters: Parameters) -> None:
    plan = pipeline_plan(
        [40, 23, 9],
        [[(2, [*LONG[:3], [*LONG[3]]])], [(2, [[(1, 0, 13)], [(1, 13, 23)]])]],
        2,
        parameters=parameters,
        method="ring",
    )
    check_pipeline(ranks(4), ModelCase("mistral_window", num_layers=4), plan)


@pytest.mark.wide
@pytest.mark.parametrize("parameters", MODES)
def test_interleaved_ranges_match(ranks, parameters: Parameters) -> None:
    plan = pipeline_plan(LENGTHS, [[(1, LONG), (1, MIXED)], [(2, [[(5, 0, 30)]])]], 2, "interleaved", 8, 2, parameters)
    check_pipeline(ranks(4), ModelCase(num_layers=8), plan)


@pytest.mark.wide
@pytest.mark.parametrize("parameters", MODES)
def test_hybrids_match(ranks, parameters: Parameters) -> None:
    plan = pipeline_plan([40, 23, 9], [[(4, [*LONG, [(1, 0, 23)]])]], 2, parameters=parameters, method="hybrid", ulysses=2)
    check_pipeline(ranks(8), CASE, plan)


@pytest.mark.daily("gathered_per_step")
@pytest.mark.parametrize("parameters", MODES)
def test_more_ranks_than_heads_match_in_rings(ranks, parameters: Parameters) -> None:
    plan = pipeline_plan([40, 23, 9], [[(2, [*LONG, [(1, 0, 23)]])]], 2, parameters=parameters, method="ring")
    check_pipeline(ranks(4), ModelCase(num_heads=1, num_kv_heads=1, num_layers=4), plan)


LORA = (("r", 2), ("lora_alpha", 8), ("target_modules", ["q_proj", "v_proj"]))
EXPERTS = ModelCase("qwen3_moe_dense", promoted=True, num_layers=4, balance=2.0)
MODELS: dict[str, ModelCase] = {
    "adapters": ModelCase(num_layers=4, lora=LORA),
    # stage 0 begins with a layer that no backward reaches, stage 1 with one that trains nothing
    "frozen layers": ModelCase(num_layers=4, lora=(*LORA, ("layers_to_transform", [1, 3]))),
    "a trained head beside DoRA": ModelCase(num_layers=4, lora=(*LORA, ("use_dora", True), ("modules_to_save", ["lm_head"]))),
    "adapters on embedding and head": ModelCase(num_layers=4, lora=(("r", 2), ("target_modules", ["embed_tokens", "lm_head"]))),
    "tied": ModelCase(num_layers=4, tied=True),
    "more ranks than KV heads": ModelCase(num_layers=4, num_kv_heads=1),
    "windows": ModelCase("mistral_window", num_layers=4),
    "balanced experts": EXPERTS,
    "spread experts": replace(EXPERTS, spread=True),
    "adapters beside spread experts": replace(EXPERTS, spread=True, lora=LORA),
}


@pytest.mark.daily("frozen layers-sharded")
@pytest.mark.parametrize("parameters", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_models_match(ranks, name: str, parameters: Parameters) -> None:
    check_pipeline(ranks(4), MODELS[name], plan_of("2 x 2", parameters))


NUM_STEPS, MAX_NORM, LEARNING_RATE = 10, 0.5, 1e-2


def train_on_rank(plans_json: list[str], rows: list[Rows]) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses and norms of steps that accumulate over all plans, and the final weights of this rank's stage."""
    plans = [plan_from_json(text) for text in plans_json]
    executor, engine = stage_executor(CASE, plans[0])
    weights, pool = list(executor.model.parameters()), executor.pool
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE)
    count = sum(label != -100 for each in rows for row in each for label in row["labels"][1:])
    losses, norms = [], []
    for _ in range(NUM_STEPS):
        total = 0.0
        for place, (plan, each) in enumerate(zip(plans, rows, strict=True)):
            chunks = rank_inputs(plan, each, pool.rank)["chunks"]
            is_last = place == len(plans) - 1
            total += float(executor.run(plan.for_rank(pool.rank), chunks, count, reduce=is_last, engine=engine).loss)
        losses.append(total)
        norms.append(float(clip_stage_gradients(weights, MAX_NORM, pool.links.pipe)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: whole(weight.detach()).clone() for name, weight in executor.model.named_parameters()}


@pytest.mark.wide
@pytest.mark.parametrize("parameters", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_ten_clipped_steps_of_two_plans_each_follow_one_process(ranks, shape: str, parameters: Parameters) -> None:
    num_stages, per_stage, _ = SHAPES[shape]
    other = pipeline_plan([24, 6], [[(per_stage, [[(0, 0, 14)], [(0, 14, 24), (1, 0, 6)]])]], num_stages, parameters=parameters)
    plans, rows = [plan_of(shape, parameters), other], [random_rows(LENGTHS), random_rows([24, 6], seed=1)]
    model = build_model(CASE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, norms = [], []
    for _ in range(NUM_STEPS):
        losses.append(reference_step(model, [row for each in rows for row in each])[0])
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
    expected = dict(model.named_parameters())
    assert min(norms) > MAX_NORM
    for found in ranks(num_ranks(plans[0])).run(train_on_rank, [plan_to_json(plan) for plan in plans], rows):
        assert found[0] == pytest.approx(losses, rel=1e-10) and found[1] == pytest.approx(norms, rel=1e-10)
        assert max(relative_error(weight, expected[name].detach()) for name, weight in found[2].items()) <= 1e-10


# (what is done with a unit of FSDP2, its name; "" for embedding and head), in the order of the host; gathers that a unit starts
# when it is about to run are "own gather"
Collectives = list[tuple[str, str]]


def collectives_on_rank(plan_json: str, rows: Rows) -> tuple[Collectives, Collectives]:
    """Gathers of weights and sums of gradients in a step, and gathers in an evaluation after it."""
    plan = plan_from_json(plan_json)
    executor, engine = stage_executor(ModelCase(num_layers=8), plan)
    path, chunks = plan.for_rank(executor.pool.rank), rank_inputs(plan, rows, executor.pool.rank)["chunks"]
    with torch.profiler.profile() as step:
        executor.run(path, chunks, 1, engine=engine)
    with torch.profiler.profile() as evaluation:
        executor.evaluate(path, chunks, engine=engine)
    return collectives_in(step), collectives_in(evaluation)


def collectives_in(profile: torch.profiler.profile) -> Collectives:
    kinds = {"FSDP::all_gather": "gather", "FSDP::sum_gradients": "sum"}
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    found: Collectives = []
    begun: Any = None
    for event in events:
        label, name, *_ = [*event.name.split(" "), ""]
        if label in ("FSDP::pre_forward", "FSDP::pre_backward"):
            begun = event
        elif label in kinds:
            is_own = kinds[label] == "gather" and begun is not None and event.time_range.start < begun.time_range.end
            found.append(("own gather" if is_own else kinds[label], name.strip("()")))
    return found


def later_ranges(ranges: list[range], is_kept: bool) -> list[str]:
    """First layers of further layer ranges, which gather themselves in their first forward if weights are gathered once."""
    return [f"model.layers.{each[0]}" for each in ranges[1:]] if is_kept else []


def kept_layers(path: RankPlan, ranges: list[range]) -> Counter[str]:
    """How often a pass of this rank begins with the layer with which the pass before it ended."""
    order = running_order([stage.actions for _, stage in path.rounds], path.turns)
    passes = [action for _, action in order if action.kind in ("F", "B")]
    ends = [(ranges[each.layer_range][0], ranges[each.layer_range][-1])[:: 1 if each.kind == "F" else -1] for each in passes]
    return Counter(f"model.layers.{last}" for (_, last), (first, _) in pairwise(ends) if first == last)


@pytest.mark.wide
@pytest.mark.parametrize("parameters", MODES)
@pytest.mark.parametrize(("num_ranges", "shares"), [(1, ()), (2, ()), (1, (1.0, 1.0, 1.0, 1.0))], ids=["1", "2", "heads"])
def test_weights_are_gathered_as_often_as_the_plan_says(
    ranks, parameters: Parameters, num_ranges: int, shares: tuple[float, ...]
) -> None:
    if num_ranges == 1:
        plan = plan_of("4 x 2", parameters, num_layers=8, output_shares=shares)
    else:
        plan = pipeline_plan(LENGTHS, [[(1, LONG), (1, MIXED)], [(2, [[(5, 0, 30)]])]], 2, "interleaved", 8, 2, parameters)
    results = ranks(num_ranks(plan)).run(collectives_on_rank, plan_to_json(plan), random_rows(LENGTHS))
    for rank, (step, evaluation) in enumerate(results):
        path = plan.for_rank(rank)
        num_chunks = sum(len(group.chunks) for group, _ in path.rounds)
        ranges = [range(each.first_layer, each.first_layer + each.num_layers) for each in path.rounds[0][1].layer_ranges]
        layers = {f"model.layers.{layer}" for own in ranges for layer in own}
        # the first stage has the embedding, the last one norm and head, and stages that share the head have that
        num_heads = sum(action.kind == "H" for _, own in path.rounds for action in own.actions)
        ends = {""} if plan.place(rank)[0] in (0, plan.num_stages - 1) else set()
        outside = {""} if num_heads else ends
        is_kept = parameters == "gathered_per_step"
        # only the first pass of a step begins with a gather that nothing hides
        first = f"model.layers.{ranges[0][0]}"
        assert [unit for kind, unit in step if kind == "own gather"] == [*outside, first, *later_ranges(ranges, is_kept)]
        gathers, sums = (Counter(unit for kind, unit in step if wanted in kind) for wanted in ("gather", "sum"))
        kept = Counter() if is_kept else kept_layers(path, ranges)
        assert gathers == {
            **{layer: 1 if is_kept else 2 * num_chunks - kept[layer] for layer in layers},
            **dict.fromkeys(outside, 1),
        }
        # a head runs no layer
        assert sums == {**dict.fromkeys(layers, num_chunks), **{unit: num_chunks * len(ends) + num_heads for unit in outside}}
        assert Counter(unit for _, unit in evaluation) == {
            **dict.fromkeys(layers, 1 if is_kept else num_chunks),
            **dict.fromkeys(outside, 1),
        }
        # the layer that a backward runs next is gathered before the sums of the one before it
        before = {f"model.layers.{layer}": f"model.layers.{layer - 1}" for own in ranges for layer in own[1:]}
        for (_, last), (kind, unit) in pairwise(step):
            assert is_kept or kind != "sum" or last == before.get(unit, last)


@st.composite
def sharded_pipelines(draw: st.DrawFn, num_stages: int, per_stage: int) -> StepPlan:
    """Random chunks of groups of one or two ranks, in one order, with dummy chunks, policies, layer ranges and micro-batches."""
    lengths = [draw(st.integers(8, 24)), *draw(st.lists(st.integers(1, 24), max_size=5))]
    parameters = draw(st.sampled_from(MODES))
    num_ranges = draw(st.integers(1, 2))
    schedule = "interleaved" if num_ranges > 1 else draw(st.sampled_from(["1f1b", "elastic", "gpipe"]))
    place = draw(st.integers(1, len(lengths)))
    rounds = [range(place), range(place, len(lengths))] if place < len(lengths) else [range(place)]
    micro_batches = []
    for sequences in rounds:
        degrees = draw(st.sampled_from([[1] * per_stage, [2] * (per_stage // 2), [2, *[1] * (per_stage - 2)]]))
        dealt = [[each for each in sequences if each % len(degrees) == group] for group in range(len(degrees))]
        chunks = [draw(random_chunks(own, lengths)) or [[]] for own in dealt]
        micro_batches.append(list(zip(degrees, chunks, strict=True)))
    shard_ranks = draw(st.sampled_from([0, 2]))
    plan = pipeline_plan(
        lengths, micro_batches, num_stages, schedule, 2 * num_stages, num_ranges, parameters, shard_ranks=shard_ranks
    )
    layers = st.lists(layer_policies(), max_size=2).map(tuple)
    policy = st.builds(ActivationPolicy, st.just(0), st.just(0), layers, st.sampled_from([0, 1, 5, 64]), st.integers(1, 3))
    count = num_policies(plan)
    return with_policies(plan, draw(st.lists(policy, min_size=count, max_size=count)))


@pytest.mark.wide
@pytest.mark.parametrize(
    "num_stages,per_stage,examples",
    [
        (2, 2, 6),
        (4, 2, 3),
        *(pytest.param(*each, marks=pytest.mark.wide) for each in ((2, 2, 60), (2, 4, 25), (4, 2, 25))),
    ],
)
def test_random_plans_match(ranks, num_stages: int, per_stage: int, examples: int) -> None:
    """Runs 9 random plans, and 110 wide ones; none may hang."""
    pool = ranks(num_stages * per_stage)
    case = ModelCase("qwen3", num_layers=2 * num_stages)

    @settings(RANDOM_PIPELINES, max_examples=examples)
    @given(sharded_pipelines(num_stages, per_stage))
    def matches(plan: StepPlan) -> None:
        check_pipeline(pool, case, plan)

    matches()
