"""Images that ranks of a group run for each other give the loss and every gradient of plain transformers, in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.models.any_model import wide_floats
from helpers.models.media_rows import MediaCase, num_labels, plain_step, worst_errors
from helpers.plans.layouts import plan_of
from helpers.plans.sliced_plans import cut, sliced_plan
from helpers.ranks.rank_steps import group_pool, mesh, whole

import hf_longctx.hf.models.media as media_module
from hf_longctx.hf.data.collator import LongContextCollator, PlannedDataset, PlannedStep
from hf_longctx.hf.data.media.rows import Medium, tower_work
from hf_longctx.hf.data.sampler import SequenceIndex
from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.hf.models.spec import model_spec
from hf_longctx.hf.models.towers import unit_classes
from hf_longctx.plan.core.serialize import plan_from_json, plan_to_json
from hf_longctx.plan.core.sharding import images_of
from hf_longctx.plan.core.types import MicroBatch, SequenceGroup, StepPlan, TowerRun
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.parameters.sharded import shard_model

TOLERANCE = 1e-12
LAYOUTS: tuple[tuple[int | str, ...], ...] = ((5, "i", 7, "i", 9), (11,), (3, "v", 12, "i", 2), ("i", 6, "i"))
CASES = {
    "trained": MediaCase("Qwen3VLForConditionalGeneration", LAYOUTS),
    "frozen": MediaCase("Qwen3VLForConditionalGeneration", LAYOUTS, frozen=("visual",)),
    "projector": MediaCase("LlavaForConditionalGeneration", frozen=("vision_tower",)),
}


def rows_of(case: MediaCase) -> Any:
    """Rows whose videos have as many parts as steps in time."""
    rows, reader = case.rows(case.build())
    for item in (item for row in rows for item in row["media"]):
        item["num_parts"] = item["grid"][0] if item["kind"] == "video" else 1
    return rows, reader


def dealt(plan: StepPlan, case: MediaCase, rows: Any) -> StepPlan:
    """The plan with every image on another rank than its neighbours, mostly not that of its tokens; every third runs again."""
    tower = model_spec(case.build()).tower
    media = tuple(tuple(work for item in row["media"] for work in tower_work(Medium.of(item), tower)) for row in rows)

    def of_group(group: SequenceGroup) -> SequenceGroup:
        runs: list[TowerRun] = []
        for chunk in group.chunks:
            for place, key in enumerate(images_of(chunk, media)):
                # the last rank of four runs nothing
                rank = (place + 1) % min(group.degree, 3) if group.degree > 1 else -1
                runs.append(TowerRun(chunk.index, *key, int(place % 3 > 0), rank))
        return replace(group, towers=tuple(runs))

    batches = (MicroBatch(tuple(map(of_group, each.groups))) for each in plan.micro_batches)
    return validate_plan(replace(plan, media=media, micro_batches=tuple(batches)))


def plans_of(case: MediaCase, rows: Any, num_ranks: int) -> list[StepPlan]:
    lengths = [len(row["input_ids"]) for row in rows]
    chunks = [[span] for span in cut(0, (8, lengths[0] - 24, 16))]
    chunks[-1] += [(i, 0, length) for i, length in enumerate(lengths) if i]
    everything = tuple(range(len(rows)))
    plans = [
        plan_of([[(num_ranks, everything)]], lengths, num_ranks),
        sliced_plan(lengths, chunks, num_ranks=num_ranks, ulysses=1),
    ]
    if num_ranks == 2:
        plans.append(plan_of([[(1, (0,)), (1, (1,))], [(2, (2, 3))]], lengths, 2))
    return [dealt(plan, case, rows) for plan in plans]


def steps_on_rank(case: MediaCase, plans: list[str], is_hooked: bool = False) -> list[Any]:
    """Loss, gradients and number of images that this rank ran, for steps of plans.

    is_hooked: embeddings of towers require gradients, as after `enable_input_require_grads`.
    """
    return [_step(case, plan_from_json(text), is_hooked) for text in plans]


def _step(case: MediaCase, plan: StepPlan, is_hooked: bool) -> Any:
    (rows, reader), pool, model = rows_of(case), group_pool(), case.build()
    patch_model(model)
    if is_hooked:
        model.model.visual.patch_embed.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())
    if plan.parameters != "replicated":
        shards = mesh(pool.num_ranks, plan.node_ranks)
        shard_model(model, unit_classes(model, True), shards, node_ranks=plan.node_ranks)
    executor = StepExecutor(whole_model(model, num_attention_layers(model)), pool, torch.device("cpu"))
    lengths = torch.tensor([len(row["input_ids"]) for row in rows]).numpy()
    index = SequenceIndex.build(lengths, int(lengths.max()), "error")
    dataset = PlannedDataset(rows, index, reader=reader)
    has_media = torch.tensor([bool(row["media"]) for row in rows]).numpy() if plan.parameters != "replicated" else None
    ran: list[int] = []
    tables = media_module.feature_tables

    def noting(around: Any, medium: Any) -> Any:
        ran.append(medium.num_features)
        return tables(around, medium)

    with wide_floats(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(media_module, "feature_tables", noting)
        step = PlannedStep(plan, tuple(range(len(rows))), pool.rank)
        inputs = LongContextCollator(has_media)([dataset[step]])["chunks"]
        result = executor.run(plan.for_rank(pool.rank), inputs, num_labels(rows))
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return float(result.loss), gradients, ran


def check(found: Any, expected_loss: float, expected: Any) -> None:
    """Compares loss and gradients; under shards, weights that nothing reaches have gradients of zero."""
    loss, gradients, _ = found
    assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
    assert not any(gradients[name].any() for name in gradients.keys() - expected.keys())
    assert expected.keys() <= gradients.keys()
    errors = worst_errors({name: gradients[name] for name in expected}, expected)
    assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.wide("4-projector", "4-frozen")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_dealt_images_are_exact_and_run_on_one_rank(num_ranks: int, name: str, ranks: Any) -> None:
    case = CASES[name]
    rows, reader = rows_of(case)
    expected_loss, expected = plain_step(case.build(), rows, reader)
    plans = plans_of(case, rows, num_ranks)
    by_rank = ranks(num_ranks).run(steps_on_rank, case, list(map(plan_to_json, plans)))
    for place in range(len(plans)):
        for found in by_rank:
            check(found[place], expected_loss, expected)
    if name == "frozen":
        # once in the whole group, in one chunk
        total = sum(item["num_features"] for row in rows for item in row["media"])
        assert sum(sum(found[0][2]) for found in by_rank) == total


def test_frozen_towers_exchange_no_gradients_even_if_their_features_require_some(ranks: Any) -> None:
    case = CASES["frozen"]
    rows, reader = rows_of(case)
    expected_loss, expected = plain_step(case.build(), rows, reader)
    (plan, *_) = plans_of(case, rows, 2)
    ((group,),) = (each.groups for each in plan.micro_batches)
    group = replace(group, towers=tuple(run._replace(rank=0) for run in group.towers))
    plan = validate_plan(replace(plan, micro_batches=(MicroBatch((group,)),)))
    for found in ranks(2).run(steps_on_rank, case, [plan_to_json(plan)], True):
        check(found[0], expected_loss, expected)


@pytest.mark.wide("2-gathered_per_step")
@pytest.mark.parametrize(("num_ranks", "parameters"), [(2, "sharded"), (2, "gathered_per_step"), (4, "gathered_per_node")])
def test_dealt_images_are_exact_in_shards(num_ranks: int, parameters: Any, ranks: Any) -> None:
    case = CASES["trained"]
    rows, reader = rows_of(case)
    expected_loss, expected = plain_step(case.build(), rows, reader)
    changes = {"parameters": parameters, "node_ranks": num_ranks // 2 if parameters == "gathered_per_node" else 0}
    plans = [validate_plan(replace(plan, **changes)) for plan in plans_of(case, rows, num_ranks)]
    for found in ranks(num_ranks).run(steps_on_rank, case, list(map(plan_to_json, plans))):
        for each in found:
            check(each, expected_loss, expected)


def test_only_the_rank_that_runs_an_image_opens_it() -> None:
    case = CASES["trained"]
    rows, reader = rows_of(case)
    (plan, *_) = plans_of(case, rows, 2)
    ((group,),) = (each.groups for each in plan.micro_batches)
    opened: dict[int, set[str]] = {}
    for rank in range(2):

        class Noting:
            tokens = reader.tokens
            positions = reader.positions

            def tower_inputs(self, medium: Any, file: Any, ids: Any, where: str, rank: int = rank) -> Any:
                opened.setdefault(rank, set()).add(file["path"])
                return reader.tower_inputs(medium, file, ids, where)

        lengths = torch.tensor([len(row["input_ids"]) for row in rows]).numpy()
        index = SequenceIndex.build(lengths, int(lengths.max()), "error")
        PlannedDataset(rows, index, reader=Noting())[PlannedStep(plan, tuple(range(len(rows))), rank)]
    paths = [[file["path"] for file in row["media_files"]] for row in rows]
    # the third sequence has a video of several numbers before its image
    numbers = [[0] * item["num_parts"] if item["kind"] == "video" else [0] for row in rows for item in row["media"]]
    own: dict[int, set[str]] = {0: set(), 1: set()}
    flat = [path for each in paths for path in each]
    media_of = [(i, path) for (i, row) in enumerate(rows) for path in paths[i]]
    counts = dict(zip(flat, map(len, numbers), strict=True))
    for run in group.towers:
        number = run.number
        for i, path in media_of:
            if i == run.sequence and number >= 0:
                number -= counts[path]
                if number < 0:
                    own[run.rank].add(path)
                    break
    assert opened == own
