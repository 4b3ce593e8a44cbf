"""Output heads on all pipeline stages give the losses, gradients and clipped steps of one process, in fp64, on gloo ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.models.reference import TOLERANCE, random_rows, reference_step, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.pipeline_plans import LENGTHS, RANDOM_PIPELINES, pipeline_plan, random_chunks
from helpers.plans.policies import layer_policies, num_policies, replayed, with_policies
from helpers.plans.sliced_plans import Rows, cut
from helpers.ranks.pipeline_steps import check_pipeline, stage_executor
from helpers.ranks.rank_steps import rank_inputs, whole
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hf_longctx.plan.core.serialize import plan_from_json, plan_to_json
from hf_longctx.plan.core.types import ActivationPolicy, Parameters, StepPlan
from hf_longctx.runtime.core.loss import TokenTally
from hf_longctx.runtime.parameters.gradients import clip_stage_gradients

# a long sequence in slices with a hybrid, packs, and other slices
LONG = [*([span] for span in cut(0, [15, 11, 9, 5])[:-1]), [cut(0, [15, 11, 9, 5])[-1], (2, 0, 9)]]
MIXED = [*([span] for span in cut(1, [12, 11])), [(3, 0, 7), (4, 0, 5)]]
# name -> (stages, groups of every micro-batch)
SHAPES: dict[str, tuple[int, list[list[tuple[int, Any]]]]] = {
    "2 x 1": (2, [[(1, [*LONG, *MIXED])], [(1, [[(5, 0, 17)], [(5, 17, 30)]])]]),
    "4 x 1": (4, [[(1, LONG)], [(1, [*MIXED, [(5, 0, 17)], [(5, 17, 30)]])]]),
    # groups side by side have different numbers of chunks
    "2 x 2": (2, [[(1, LONG), (1, MIXED)], [(2, [[(5, 0, 17)], [(5, 17, 30)]])]]),
}
POLICIES = [replayed(0.0, 0.5), replayed(1.0, mlp=0.5, input_host=1.0)]
PARAMETERS: tuple[Parameters, ...] = ("replicated", "gathered_per_round", "gathered_per_step", "sharded")


def plan_of(shape: str, parameters: Parameters = "replicated", has_policies: bool = True, **changes: Any) -> StepPlan:
    """The plan of a shape, in which every stage runs heads, and layers of some chunks are recomputed or offloaded."""
    num_stages, groups = SHAPES[shape]
    plan = pipeline_plan(LENGTHS, groups, num_stages, parameters=parameters, output_shares=(1.0,) * num_stages, **changes)
    heads = [group.head_stages for micro_batch in plan.micro_batches for group in micro_batch.groups]
    assert {stage for each in heads for stage in each.values()} == set(range(num_stages - 1))
    if not has_policies:
        return plan
    policies = [
        ActivationPolicy(0, 0, tuple(POLICIES[: place % 3]), tile_tokens=4 * (place % 2)) for place in range(num_policies(plan))
    ]
    return with_policies(plan, policies)


def num_ranks(plan: StepPlan) -> int:
    return plan.num_stages * plan.ranks_per_stage


# a stage of one rank has nothing to shard
CELLS = [("2 x 1", "replicated"), ("4 x 1", "replicated"), *(("2 x 2", parameters) for parameters in PARAMETERS)]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("shape", "parameters"), CELLS)
def test_any_stages_and_parameters_match(ranks, shape: str, parameters: Parameters, tied: bool) -> None:
    plan = plan_of(shape, parameters)
    check_pipeline(ranks(num_ranks(plan)), ModelCase(num_layers=4, tied=tied), plan)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize("shares", [(1.0, 1.0), (1.0, 0.0), (2.0, 1.0)], ids=str)
def test_a_rank_without_heads_beside_one_with_heads_matches(ranks, shares: Any, parameters: Parameters, tied: bool) -> None:
    groups = [(1, LONG), (1, [[(5, 0, 30)]])]
    plan = pipeline_plan(LENGTHS, [groups, [(2, MIXED)]], 2, parameters=parameters, output_shares=shares)
    check_pipeline(ranks(4), ModelCase(num_layers=4, tied=tied), plan)


@pytest.mark.parametrize(("shape", "parameters"), [each for each in CELLS if each[1] != "gathered_per_round"])
def test_rounds_in_turns_match(ranks, shape: str, parameters: Parameters) -> None:
    plan = plan_of(shape, parameters, has_turns=True)
    assert any(list(turns) != sorted(turns) for turns in plan.turns)
    check_pipeline(ranks(num_ranks(plan)), ModelCase(num_layers=4), plan)


def test_copies_of_shards_match(ranks) -> None:
    groups = [(1, LONG), (1, MIXED), (2, [[(5, 0, 17)], [(5, 17, 30)]])]
    plan = pipeline_plan(LENGTHS, [groups], 2, parameters="gathered_per_round", shard_ranks=2, output_shares=(1.0, 1.0))
    check_pipeline(ranks(8), ModelCase(num_layers=4, tied=True), plan)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_other_schedules_match(ranks, schedule: Any) -> None:
    check_pipeline(ranks(4), ModelCase(num_layers=4), plan_of("4 x 1", schedule=schedule))


LORA = (("r", 2), ("lora_alpha", 8), ("target_modules", ["q_proj", "v_proj"]))
EXPERTS = ModelCase("qwen3_moe_dense", promoted=True, num_layers=4, balance=2.0)
MODELS: dict[str, ModelCase] = {
    "frozen head": ModelCase(num_layers=4, lora=LORA),
    "frozen tied head": ModelCase(num_layers=4, tied=True, lora=LORA),
    "capped logits": ModelCase("gemma2", promoted=True),
    "scaled logits": ModelCase("cohere", promoted=True, num_layers=4),
    "own loss": ModelCase(num_layers=4, loss="focal"),
    "windows": ModelCase("mistral_window", num_layers=4),
    "experts": replace(EXPERTS, balance=0.0),
    "balanced experts": EXPERTS,
    "spread experts": replace(EXPERTS, spread=True),
    "half precision sums": ModelCase(num_layers=4, fp32_gradients=False),
}


@pytest.mark.parametrize("parameters", ["replicated", "sharded"])
@pytest.mark.parametrize("name", MODELS)
def test_models_match(ranks, name: str, parameters: Parameters) -> None:
    check_pipeline(ranks(4), MODELS[name], plan_of("2 x 2", parameters, num_layers=MODELS[name].num_layers))


def refused_freezing(plan_json: str, rows: Rows, tied: bool) -> str:
    """Why a step does not run after the head was frozen on the first stage alone."""
    plan = plan_from_json(plan_json)
    executor, engine = stage_executor(ModelCase(num_layers=4, tied=tied), plan)
    executor.model.lm_head.weight.requires_grad_(executor.stage.stage > 0)
    try:
        executor.run(plan.for_rank(executor.pool.rank), rank_inputs(plan, rows, executor.pool.rank)["chunks"], 1, engine=engine)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_head_frozen_on_one_of_its_stages_is_refused_everywhere(ranks, tied: bool) -> None:
    plan, rows = plan_of("2 x 1"), random_rows(LENGTHS)
    for error in ranks(2).run(refused_freezing, plan_to_json(plan), rows, tied):
        assert "is trained on some stages of the pipeline and frozen on others" in error


def tallied_on_rank(plans_json: list[str], rows: Rows) -> list[list[float]]:
    """Counts the label tokens of all ranks under each plan."""
    found = []
    for plan in map(plan_from_json, plans_json):
        executor, engine = stage_executor(ModelCase(num_layers=4), plan)
        inputs = rank_inputs(plan, rows, executor.pool.rank)["chunks"]
        tally = TokenTally(torch.device("cpu"))
        result = executor.run(plan.for_rank(executor.pool.rank), inputs, 1, engine=engine, tally=tally)
        found.append([float(each) for each in result.tallied])
    return found


def test_tokens_of_all_heads_are_counted(ranks) -> None:
    num_stages, groups = SHAPES["2 x 1"]
    plans = [plan_of("2 x 1"), pipeline_plan(LENGTHS, groups, num_stages)]
    for spread, plain in ranks(2).run(tallied_on_rank, [plan_to_json(each) for each in plans], random_rows(LENGTHS)):
        assert spread == pytest.approx(plain, rel=1e-12)
        assert plain[0] > 0


def step_with_a_frozen_stage(plan_json: str, rows: Rows) -> tuple[float, dict[str, Tensor]]:
    """Loss of the second of two steps, and gradients of this rank's stage, of which the first one trains the head alone."""
    plan = plan_from_json(plan_json)
    executor, engine = stage_executor(ModelCase(num_layers=4), plan)
    for name, weight in executor.model.named_parameters():
        weight.requires_grad_("lm_head" in name or executor.stage.stage > 0)
    path, chunks = plan.for_rank(executor.pool.rank), rank_inputs(plan, rows, executor.pool.rank)["chunks"]
    count = sum(label != -100 for row in rows for label in row["labels"][1:])
    for _ in range(2):
        executor.model.zero_grad()
        loss = float(executor.run(path, chunks, count, engine=engine).loss)
    return loss, {name: whole(weight.grad) for name, weight in executor.model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("parameters", PARAMETERS)
def test_a_stage_that_trains_the_head_alone_matches(ranks, parameters: Parameters) -> None:
    plan, rows = plan_of("2 x 2", parameters), random_rows(LENGTHS)
    expected_loss, expected = reference_step(build_model(ModelCase(num_layers=4)), rows)
    for rank, (loss, gradients) in enumerate(ranks(4).run(step_with_a_frozen_stage, plan_to_json(plan), rows)):
        assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
        assert (set(gradients) == {"lm_head.weight"}) == (rank < 2)
        assert max(relative_error(gradient, expected[name]) for name, gradient in gradients.items()) <= TOLERANCE


NUM_STEPS, MAX_NORM, LEARNING_RATE = 5, 0.5, 1e-2


def train_on_rank(case: ModelCase, plan_json: str, rows: Rows) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses and norms of steps, with evaluations between them, and the final weights of this rank's stage."""
    plan = plan_from_json(plan_json)
    executor, engine = stage_executor(case, plan)
    stage, pool, weights = executor.stage, executor.pool, list(executor.model.parameters())
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE)
    path, chunks = plan.for_rank(pool.rank), rank_inputs(plan, rows, pool.rank)["chunks"]
    count = sum(label != -100 for row in rows for label in row["labels"][1:])
    twin = executor.model.get_parameter(stage.copied) if stage.copied else None
    losses, norms = [], []
    for _ in range(NUM_STEPS):
        evaluated = float(executor.evaluate(path, chunks, engine=engine)) / count
        losses.append(float(executor.run(path, chunks, count, engine=engine).loss))
        assert evaluated == pytest.approx(losses[-1], rel=TOLERANCE)
        norms.append(float(clip_stage_gradients(weights, MAX_NORM, pool.links.pipe, twin)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: whole(weight.detach()).clone() for name, weight in executor.model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("shape", "parameters"), CELLS)
def test_clipped_steps_and_evaluations_follow_one_process(ranks, shape: str, parameters: Parameters, tied: bool) -> None:
    case, plan, rows = ModelCase(num_layers=4, tied=tied), plan_of(shape, parameters), random_rows(LENGTHS)
    model = build_model(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, norms = [], []
    for _ in range(NUM_STEPS):
        losses.append(reference_step(model, rows)[0])
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
    expected = dict(model.named_parameters(remove_duplicate=False))
    assert min(norms) > MAX_NORM
    for found in ranks(num_ranks(plan)).run(train_on_rank, case, plan_to_json(plan), rows):
        assert found[0] == pytest.approx(losses, rel=1e-10) and found[1] == pytest.approx(norms, rel=1e-10)
        assert "lm_head.weight" in found[2] or tied
        assert max(relative_error(weight, expected[name].detach()) for name, weight in found[2].items()) <= 1e-10


def score_on_rank(case: ModelCase, plan_json: str, rows: Rows) -> tuple[list[list[int]], float, int]:
    """Chunks of each micro-batch with scores, the sum of their losses, and how many logits were read."""
    plan = plan_from_json(plan_json)
    executor, engine = stage_executor(case, plan)
    path, chunks = plan.for_rank(executor.pool.rank), rank_inputs(plan, rows, executor.pool.rank)["chunks"]
    scores = executor.score(path, chunks, engine)
    total = sum(float(found.losses_T.sum()) for of_round in scores for found in of_round.values())
    read = executor.read(path, chunks, engine)
    return [sorted(found) for found in scores], total, sum(len(logits) for of_round in read for logits in of_round.values())


def test_the_last_stage_scores_and_reads_all_chunks(ranks) -> None:
    case, plan, rows = ModelCase(num_layers=4), plan_of("2 x 1"), random_rows(LENGTHS)
    expected_loss, _ = reference_step(build_model(case), rows)
    count = sum(label != -100 for row in rows for label in row["labels"][1:])
    first, last = ranks(2).run(score_on_rank, case, plan_to_json(plan), rows)
    assert first == ([[], []], 0.0, 0)
    groups = [micro_batch.groups[0] for micro_batch in plan.micro_batches]
    assert last[0] == [list(range(len(group.chunks))) for group in groups] and last[2] == count
    assert last[1] / count == pytest.approx(expected_loss, rel=TOLERANCE)


@st.composite
def plans(draw: st.DrawFn, num_stages: int, per_stage: int) -> StepPlan:
    """Random chunks, schedules, shares, micro-batches and policies of stages that share the output head's work."""
    lengths = [draw(st.integers(8, 24)), *draw(st.lists(st.integers(1, 24), max_size=5))]
    parameters = draw(st.sampled_from(PARAMETERS)) if per_stage > 1 else "replicated"
    place = draw(st.integers(1, len(lengths)))
    rounds = [range(place), range(place, len(lengths))] if place < len(lengths) else [range(place)]
    micro_batches = []
    for sequences in rounds:
        degrees = draw(st.sampled_from([[1] * per_stage, *([[2]] if per_stage == 2 else [])]))
        dealt = [[each for each in sequences if each % len(degrees) == group] for group in range(len(degrees))]
        micro_batches.append([(d, draw(random_chunks(own, lengths)) or [[]]) for d, own in zip(degrees, dealt, strict=True)])
    shares: Sequence[float] = draw(st.lists(st.integers(0, 3), min_size=num_stages, max_size=num_stages).filter(any))
    schedule = draw(st.sampled_from(["1f1b", "elastic", "gpipe"]))
    plan = pipeline_plan(
        lengths,
        micro_batches,
        num_stages,
        schedule,
        2 * num_stages,
        parameters=parameters,
        # plans are refused in which gradients of heads come first that belong to another micro-batch
        has_turns=parameters != "gathered_per_round" and schedule != "gpipe" and draw(st.booleans()),
        output_shares=shares,
    )
    layers = st.lists(layer_policies(), max_size=2).map(tuple)
    policy = st.builds(ActivationPolicy, st.just(0), st.just(0), layers, st.sampled_from([0, 1, 5, 64]), st.integers(1, 3))
    count = num_policies(plan)
    return with_policies(plan, draw(st.lists(policy, min_size=count, max_size=count)))


@pytest.mark.wide
@pytest.mark.parametrize(("num_stages", "per_stage", "examples"), [(2, 1, 20), (4, 1, 20), (2, 2, 30)])
def test_random_plans_match(ranks, num_stages: int, per_stage: int, examples: int) -> None:
    """Runs random plans, of which none may hang."""
    pool = ranks(num_stages * per_stage)

    @settings(RANDOM_PIPELINES, max_examples=examples)
    @given(plans(num_stages, per_stage), st.booleans())
    def matches(plan: StepPlan, tied: bool) -> None:
        check_pipeline(pool, ModelCase("qwen3", num_layers=2 * num_stages, tied=tied), plan)

    matches()
