"""The executor: what it refuses, by name; several chunks in one group and partial rounds are still one plain process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models.reference import TOLERANCE, random_rows, reference_step, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.layouts import plan_of
from helpers.plans.pipeline_plans import pipeline_plan
from helpers.ranks.rank_steps import group_pool, rank_inputs, run_step

from hf_longctx.hf.models.layers import layer_modules, output_head
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.plan.core.serialize import plan_from_json, plan_to_json
from hf_longctx.plan.core.types import (
    LEAST_TILE_TOKENS,
    Action,
    ActivationPolicy,
    Chunk,
    MicroBatch,
    SequenceGroup,
    Span,
    StagePlan,
    StepPlan,
)
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.activations.output_head import OutputHead
from hf_longctx.runtime.core.loss import Distillation
from hf_longctx.runtime.execution.checks import forward_only, refuse_unsupported
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.stage_model import StageModel, whole_model
from hf_longctx.runtime.process_groups import GroupPool

FIXTURES = Path(__file__).parents[2] / "plan" / "fixtures"
CPU = torch.device("cpu")
# the tolerance of test_equality.py


def fixture(name: str, **changes: Any) -> StepPlan:
    """A hand-written plan with fields of the step replaced; `method` is that of all groups of two and more ranks."""
    data = json.loads((FIXTURES / f"{name}.json").read_text())
    method = changes.pop("method", None)
    for group in (group for micro_batch in data["micro_batches"] for group in micro_batch["groups"]):
        if method and len(group["positions"]) > 1:
            group["method"] = method
    return plan_from_json(json.dumps({**data, **changes}))


# plan -> (changes, what the refusal says)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "lent": ({"method": "ulysses"}, "the plan lends ranks to other stages, so every rank needs the weights of all stages"),
    "interleaved": ({}, "the plan has activation policies (recompute, offload, tiles), which need an activation engine"),
    "infinipipe": ({}, "the plan has activation policies (recompute, offload, tiles), which need an activation engine"),
    "sppo": ({}, "the plan has activation policies (recompute, offload, tiles), which need an activation engine"),
    "layer_first": (
        {},
        "the plan has activation policies (recompute, offload, tiles), which need an activation engine; pass one",
    ),
}
EXECUTED = ("flexsp", "nested", "seq1f1b", "pp_sp_replicas")


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_of_later_is_refused_by_the_name_of_what_is_missing(name: str) -> None:
    changes, message = REFUSED[name]
    plan = fixture(name, **changes)
    with pytest.raises(ValueError) as refused:
        for rank in range(plan.num_ranks):
            refuse_unsupported(plan.for_rank(rank))
    assert message in str(refused.value)


def test_every_hand_written_plan_is_either_refused_or_allowed_here() -> None:
    assert {path.stem for path in FIXTURES.glob("*.json")} == {*REFUSED, *EXECUTED}


def small_plan(**changes: Any) -> StepPlan:
    """Two sequences on one rank, with fields of the group or of its stage replaced."""
    plan = plan_of([[(1, (0, 1))]], [6, 4], 1)
    (group,) = plan.micro_batches[0].groups
    of_stage = {name: value for name, value in changes.items() if name in StagePlan.__slots__}
    of_group = {name: value for name, value in changes.items() if name not in of_stage}
    group = replace(group, stages=(replace(group.stages[0], **of_stage),), **of_group)
    return replace(plan, micro_batches=(MicroBatch((group,)),))


def actions(words: str) -> tuple[Action, ...]:
    return tuple(Action.parse(word) for word in words.split())


def stage_field(name: str, field: str) -> Any:
    return getattr(fixture(name).micro_batches[0].groups[0].stages[0], field)


def small_refusals() -> dict[str, tuple[dict[str, Any], str]]:
    """name -> (changes of a plan that is executed, what the refusal says)."""
    return {
        "policies": ({"activations": stage_field("layer_first", "activations")}, "activation policies"),
        "tiles": (
            {"activations": tuple(replace(policy, layers=()) for policy in stage_field("layer_first", "activations"))},
            "activation policies (recompute, offload, tiles)",
        ),
        "lenders": (
            {"actions": actions("0F0@1:0 0B0@1:0")},
            "the plan lends ranks to other stages, so every rank needs the weights of all stages; give the executor `all_stages`",
        ),
    }


SMALL_REFUSALS = small_refusals()


@pytest.mark.parametrize("name", SMALL_REFUSALS)
def test_each_unsupported_part_alone_is_refused(name: str) -> None:
    changes, message = SMALL_REFUSALS[name]
    with pytest.raises(ValueError) as refused:
        refuse_unsupported(small_plan(**changes).for_rank(0))
    assert message in str(refused.value)


@pytest.mark.parametrize("name", EXECUTED)
def test_heterogeneous_and_nested_groups_and_stages_are_executed(name: str) -> None:
    plan = fixture(name)
    for rank in range(plan.num_ranks):
        refuse_unsupported(plan.for_rank(rank))


def test_policies_that_keep_everything_are_executed() -> None:
    kept = tuple(replace(policy, layers=(), tile_tokens=0) for policy in stage_field("layer_first", "activations"))
    refuse_unsupported(small_plan(activations=kept).for_rank(0))


def executor_of(model: Any) -> StepExecutor:
    return StepExecutor(whole_model(model, 2), GroupPool((1,), timeout_s=1.0), CPU)


def patched_model(case: ModelCase | None = None) -> Any:
    model = build_model(case or ModelCase())
    patch_model(model)
    return model


@pytest.mark.parametrize("method", ["run", "evaluate"])
def test_nothing_runs_before_the_refusal(method: str) -> None:
    plan = fixture("layer_first")
    executor = executor_of(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="activation policies"):
        executor.run(plan.for_rank(0), [], 1) if method == "run" else executor.evaluate(plan.for_rank(0), [])


@pytest.mark.parametrize(
    "planned, message",
    [
        ((2, 1, 4), "the plan has 2 pipeline stage(s) of 1 layer range(s) each, but the model was cut into 1 of 1"),
        ((2, 1, 6), "the layer ranges of stage 0 have (3,) layers in the plan, but (2,) in the model"),
        ((2, 2, 4), "2 layer range(s) each, but the model was cut into 2 of 1; plan with stages=2 and interleave=1"),
        ((4, 1, 4), "the plan has 4 pipeline stage(s) of 1 layer range(s) each, but the model was cut into 2 of 1"),
    ],
)
def test_a_plan_of_other_stages_than_the_model_s_is_refused(planned: tuple[int, int, int], message: str) -> None:
    num_stages, num_ranges, num_layers = planned
    chunks = [[(0, 0, 8)], [(1, 0, 8)], [(2, 0, 8)], [(3, 0, 8)]]
    schedule = "interleaved" if num_ranges > 1 else "1f1b"
    plan = pipeline_plan([8] * 4, [[(1, chunks)]], num_stages, schedule, num_layers, num_ranges)
    model = torch.nn.Linear(1, 1)
    stage = whole_model(model, 4) if "into 1" in message else StageModel(model, 0, 2, (2,), 8, torch.float32)
    executor = StepExecutor(stage, GroupPool((1,), timeout_s=1.0), CPU)
    with pytest.raises(ValueError) as refused:
        executor.run(plan.for_rank(0), [], 1)
    assert message in str(refused.value)


@pytest.mark.parametrize(("head_stages", "loss"), [((), None), ((0,), Distillation())], ids=["without a head", "distillation"])
def test_output_heads_that_a_stage_cannot_run_are_refused(head_stages: tuple[int, ...], loss: Any) -> None:
    plan = pipeline_plan([8] * 4, [[(1, [[(each, 0, 8)] for each in range(4)])]], 2, output_shares=(1.0, 1.0))
    stage = StageModel(torch.nn.Linear(1, 1), 0, 2, (2,), 8, torch.float32, head_stages=head_stages)
    executor = StepExecutor(stage, GroupPool((1,), timeout_s=1.0), CPU, token_loss=loss)
    with pytest.raises(
        ValueError, match=r"has output heads on stage 0, but .* only \[\] can run them: .*; plan with .*spread_head=False"
    ):
        executor.run(plan.for_rank(0), [], 1)


def test_forwards_alone_run_all_heads_on_the_last_stage() -> None:
    chunks = [[(each, 0, 8)] for each in range(4)]
    spread, plain = (pipeline_plan([8] * 4, [[(1, chunks)]], 2, output_shares=shares) for shares in ((1.0, 1.0), ()))
    for rank in range(2):
        ((group, stage),), ((heads, _),) = (forward_only(spread.for_rank(rank)).rounds, spread.for_rank(rank).rounds)
        (_, expected), *_ = forward_only(plain.for_rank(rank)).rounds
        assert stage.actions == expected.actions
        assert heads.head_stages and not group.head_stages
        # in training, only the other stage makes tiles of their logits
        tiles = {policy.chunk: policy.tile_tokens for policy in stage.activations}
        assert tiles == (dict.fromkeys(heads.head_stages, LEAST_TILE_TOKENS) if rank else {})
        assert not any(stage.activations for _, stage in forward_only(spread.for_rank(rank), tiles_heads=False).rounds)


ROWS = random_rows([13, 5, 9])
NUM_LABELS = sum(label != -100 for row in ROWS for label in row["labels"][1:])
LONE_PLAN = plan_of([[(1, (0, 1))], [(1, (2,))]], [13, 5, 9], 1)


def test_a_model_that_drops_the_context_is_refused() -> None:
    model = build_model(ModelCase())
    with pytest.raises(RuntimeError, match="0 of 2 attention layers received the plan; the model drops extra keyword arguments"):
        executor_of(model).run(LONE_PLAN.for_rank(0), rank_inputs(LONE_PLAN, ROWS, 0)["chunks"], NUM_LABELS)


def test_a_model_that_drops_the_context_in_one_layer_is_refused() -> None:
    model = patched_model()
    attention = model.model.layers[1].self_attn
    original = attention.forward

    def forward(*args: Any, longctx: Any = None, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    attention.forward = forward
    with pytest.raises(RuntimeError, match="1 of 2 attention layers received the plan"):
        executor_of(model).evaluate(LONE_PLAN.for_rank(0), rank_inputs(LONE_PLAN, ROWS, 0)["chunks"])


@pytest.mark.quick
def test_intervals_name_every_action_and_the_reduction_in_order() -> None:
    result = executor_of(patched_model()).run(LONE_PLAN.for_rank(0), rank_inputs(LONE_PLAN, ROWS, 0)["chunks"], NUM_LABELS)
    assert [(i.round, i.kind, i.name) for i in result.intervals()] == [
        (0, "F", "0F0"),
        (0, "B", "0B0"),
        (1, "F", "0F0"),
        (1, "B", "0B0"),
        (-1, "reduce", "gradients"),
    ]
    times = [time for i in result.intervals() for time in (i.start_s, i.stop_s)]
    assert times == sorted(times) and times[0] >= 0


def test_a_step_without_labels_has_loss_zero_and_zero_gradients() -> None:
    rows = [{"input_ids": row["input_ids"], "labels": [-100] * len(row["input_ids"])} for row in ROWS]
    model = patched_model()
    result = executor_of(model).run(LONE_PLAN.for_rank(0), rank_inputs(LONE_PLAN, rows, 0)["chunks"], 0)
    assert float(result.loss) == 0.0
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


def test_loss_is_an_fp64_scalar_without_a_graph() -> None:
    model = patched_model(ModelCase(dtype=torch.float32))
    loss = executor_of(model).run(LONE_PLAN.for_rank(0), rank_inputs(LONE_PLAN, ROWS, 0)["chunks"], NUM_LABELS).loss
    assert (loss.dtype, loss.shape, loss.requires_grad) == (torch.float64, (), False)


def chunked(plan: StepPlan, words: str) -> StepPlan:
    """The plan with every group's pack cut into one chunk per sequence, run in the order of `words`."""

    def cut(group: SequenceGroup) -> SequenceGroup:
        chunks = tuple(Chunk(i, (span,)) for i, span in enumerate(group.chunks[0].spans))
        return replace(group, chunks=chunks, stages=(replace(group.stages[0], actions=actions(words)),))

    return validate_plan(replace(plan, micro_batches=tuple(MicroBatch(tuple(map(cut, mb.groups))) for mb in plan.micro_batches)))


@pytest.mark.parametrize("words,expected", [("0F0 0F1 0B1 0B0", [13, 5, 5, 13]), ("0F0 0F1 0B0 0B1", [13, 5, 13, 5])])
def test_every_action_runs_its_own_chunk(words: str, expected: list[int]) -> None:
    model, seen = patched_model(), []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[1]))
    model.lm_head.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0].shape[1]))
    rows = random_rows([13, 5])
    plan = chunked(plan_of([[(1, (0, 1))]], [13, 5], 1), words)
    executor_of(model).run(plan.for_rank(0), rank_inputs(plan, rows, 0)["chunks"], 10)
    assert seen == expected


def check_step(pool: Any, plan: StepPlan, rows: list[dict[str, list[int]]]) -> None:
    """Asserts that every rank ends with the loss and gradients of one plain process."""
    expected_loss, expected = reference_step(build_model(ModelCase()), rows)
    for loss, gradients in run_step(pool, ModelCase(), plan, rows):
        assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
        assert gradients.keys() == expected.keys()
        assert max(relative_error(gradients[name], expected[name]) for name in expected) <= TOLERANCE


@pytest.mark.wide("0F0 0F1 0B1 0B0")
@pytest.mark.parametrize("words", ["0F0 0F1 0B1 0B0", "0F0 0F1 0B0 0B1", "0F0 0B0 0F1 0B1", "0F1 0F0 0B1 0B0"])
def test_several_chunks_of_a_group_in_any_order_match(ranks, words: str) -> None:
    lengths = [13, 5]
    check_step(ranks(2), chunked(plan_of([[(2, (0, 1))]], lengths, 2), words), random_rows(lengths))


def test_groups_of_one_round_may_run_different_orders(ranks) -> None:
    lengths = [13, 5, 9, 7]
    plan = chunked(plan_of([[(2, (0, 1)), (2, (2, 3))]], lengths, 4), "0F0 0F1 0B1 0B0")
    first, second = plan.micro_batches[0].groups
    other = replace(second, stages=(replace(second.stages[0], actions=actions("0F1 0B1 0F0 0B0")),))
    check_step(ranks(4), validate_plan(replace(plan, micro_batches=(MicroBatch((first, other)),))), random_rows(lengths))


def test_nested_groups_that_leave_ranks_out_match(ranks) -> None:
    # the shape of nested.json with short sequences: <4>, then (0, 1) alone with two chunks, then <1,1,2>
    rows = random_rows(lengths := [30, 8, 6, 7, 5, 9])
    plan = fixture("nested", lengths=lengths)

    def shorten(group: SequenceGroup) -> SequenceGroup:
        chunks = tuple(replace(c, spans=tuple(Span(s.sequence, 0, lengths[s.sequence]) for s in c.spans)) for c in group.chunks)
        return replace(group, chunks=chunks)

    plan = replace(plan, micro_batches=tuple(MicroBatch(tuple(map(shorten, mb.groups))) for mb in plan.micro_batches))
    check_step(ranks(4), validate_plan(plan), rows)


def evaluated_on_rank(plan_json: str, rows: list[dict[str, list[int]]]) -> tuple[float, bool]:
    """The summed loss, and whether evaluation left gradients behind."""
    pool, plan = group_pool(), plan_from_json(plan_json)
    model = patched_model()
    executor = StepExecutor(whole_model(model, 2), pool, CPU)
    total = executor.evaluate(plan.for_rank(pool.rank), rank_inputs(plan, rows, pool.rank)["chunks"])
    return float(total), any(p.grad is not None for p in model.parameters())


def test_evaluation_sums_the_loss_over_all_ranks_and_leaves_no_gradients(ranks) -> None:
    lengths = [13, 5, 9, 1]
    rows = random_rows(lengths)
    plan = plan_of([[(2, (0, 3))], [(1, (1,)), (1, (2,))]], lengths, 2)
    mean, _ = reference_step(build_model(ModelCase()), rows)
    num_labels = sum(label != -100 for row in rows for label in row["labels"][1:])
    for total, has_gradients in ranks(2).run(evaluated_on_rank, plan_to_json(plan), rows):
        assert total == pytest.approx(mean * num_labels, rel=TOLERANCE)
        assert not has_gradients


def tiled_plan(lengths: list[int], chunks: list[tuple[Span, ...]], words: str, tile_tokens: int) -> StepPlan:
    """One rank, these chunks in the order of `words`, every loss in tiles and everything kept."""
    plan = plan_of([[(1, tuple(range(len(lengths))))]], lengths, 1)
    (group,) = plan.micro_batches[0].groups
    policies = tuple(ActivationPolicy(index, tile_tokens=tile_tokens) for index in range(len(chunks)))
    group = replace(
        group,
        chunks=tuple(Chunk(index, spans) for index, spans in enumerate(chunks)),
        stages=(replace(group.stages[0], actions=actions(words), activations=policies),),
    )
    return validate_plan(replace(plan, micro_batches=(MicroBatch((group,)),)))


def tiled_executor(model: Any, has_head: bool = True) -> tuple[StepExecutor, ActivationEngine, list[int]]:
    """An executor, its engine, and how many tokens the head got in each of its runs."""
    seen: list[int] = []
    original = model.lm_head.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape[1])
        return original(x)

    model.lm_head.forward = forward
    engine = ActivationEngine(layer_modules(model), head=OutputHead(output_head(model)) if has_head else None)
    return StepExecutor(whole_model(model, 2), GroupPool((1,), timeout_s=1.0), CPU), engine, seen


WHOLE = [(Span(0, 0, 13),), (Span(1, 0, 5), Span(2, 0, 9))]
SLICED = [(Span(0, 0, 6),), (Span(0, 6, 13), Span(1, 0, 5), Span(2, 0, 9))]


# tiles of 5: gradients are computed with the loss where its backward comes next, else by a second run of the head
@pytest.mark.quick
@pytest.mark.parametrize(
    "chunks,words,expected",
    [
        (WHOLE, "0F0 0B0 0F1 0B1", [5, 5, 3, 5, 5, 4]),
        (WHOLE, "0F0 0F1 0B1 0B0", [5, 5, 3, 5, 5, 4, 5, 5, 3]),
        (WHOLE, "0F0 0F1 0B0 0B1", [5, 5, 3, 5, 5, 4, 5, 5, 3, 5, 5, 4]),
        (SLICED, "0F0 0F1 0B1 0B0", [5, 1, 5, 5, 5, 5, 5, 1]),
    ],
)
def test_losses_in_tiles_match_and_the_head_runs_as_often_as_needed(
    chunks: list[tuple[Span, ...]], words: str, expected: list[int]
) -> None:
    expected_loss, gradients = reference_step(build_model(ModelCase()), ROWS)
    model = patched_model()
    executor, engine, seen = tiled_executor(model)
    plan = tiled_plan([13, 5, 9], chunks, words, 5)
    result = executor.run(plan.for_rank(0), rank_inputs(plan, ROWS, 0)["chunks"], NUM_LABELS, engine=engine)
    assert float(result.loss) == pytest.approx(expected_loss, rel=TOLERANCE)
    assert max(relative_error(p.grad, gradients[name]) for name, p in model.named_parameters()) <= TOLERANCE
    assert seen == expected


@pytest.mark.parametrize("has_head,expected", [(True, [5, 5, 3, 5, 5, 4]), (False, [13, 14])])
def test_an_evaluation_is_tiled_where_there_is_a_head(has_head: bool, expected: list[int]) -> None:
    mean, _ = reference_step(build_model(ModelCase()), ROWS)
    executor, engine, seen = tiled_executor(patched_model(), has_head)
    plan = tiled_plan([13, 5, 9], WHOLE, "0F0 0F1 0B1 0B0", 5)
    total = executor.evaluate(plan.for_rank(0), rank_inputs(plan, ROWS, 0)["chunks"], engine)
    assert float(total) == pytest.approx(mean * NUM_LABELS, rel=TOLERANCE)
    assert seen == expected


def test_without_tile_tokens_the_loss_is_taken_from_logits() -> None:
    executor, engine, seen = tiled_executor(patched_model())
    executor.run(LONE_PLAN.for_rank(0), rank_inputs(LONE_PLAN, ROWS, 0)["chunks"], NUM_LABELS, engine=engine)
    assert seen == [18, 9]
