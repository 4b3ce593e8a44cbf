"""Rows with images and videos give the loss and every gradient of plain transformers in pipelines, in fp64, on gloo ranks.

Classes of which no other test has groups, rings and shards have them here, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from exact.models.test_media import FIRST, HERE, TOLERANCE, inputs_of, sharded_step, step_on_rank
from helpers.models.any_model import wide_floats
from helpers.models.media_rows import MediaCase, num_labels, plain_step, worst_errors
from helpers.plans.layouts import plan_of
from helpers.plans.pipeline_plans import pipeline_plan
from helpers.plans.policies import num_policies, replayed, with_policies
from helpers.plans.sliced_plans import cut, sliced_plan
from helpers.ranks.pipeline_steps import stage_mesh, stage_pool
from helpers.ranks.rank_steps import whole

import hf_longctx.hf.models.media as media_module
from hf_longctx.hf.models.cutting import cut_model, stage_model
from hf_longctx.hf.models.layers import layer_modules, output_head
from hf_longctx.hf.models.logits import logit_change
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.hf.models.towers import num_text_layers, unit_classes
from hf_longctx.plan.core.serialize import plan_from_json, plan_to_json
from hf_longctx.plan.core.types import ActivationPolicy, StepPlan
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.activations.output_head import OutputHead
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.parameters.sharded import shard_model

CPU = torch.device("cpu")
# positions of both kinds, layers with a state, features that layers add, and a text model that has the head
NAMES = sorted(f"{name}ForConditionalGeneration" for name in ("Qwen2_5_VL", "Qwen3VL", "Qwen3_5", "Llava", "Mistral3", "Llama4"))
TOWERS = ("visual", "vision_tower", "vision_model", "projector")


def staged_step(case: MediaCase, plan_json: str) -> Any:
    """Runs one step of a plan on this rank's stage, whole or in shards as the plan says; returns loss and gradients."""
    rows, reader = case.rows(case.build())
    plan, model = plan_from_json(plan_json), case.build()
    pool = stage_pool(plan.num_stages)
    patch_model(model)
    ranges = [stage.layer_ranges for stage in plan.micro_batches[0].groups[0].stages]
    units = unit_classes(model, True)
    cut_model(model, ranges, pool.stage)
    stage = stage_model(model, ranges, pool.stage)
    is_sharded = plan.parameters != "replicated"
    if is_sharded:
        shard_model(model, units, stage_mesh(plan.num_stages, plan.block_ranks))
    has_policies = any(each.activations for batch in plan.micro_batches for group in batch.groups for each in group.stages)
    head = OutputHead(output_head(model), change=logit_change(model)) if pool.stage == plan.num_stages - 1 else None
    engine = ActivationEngine(layer_modules(model), HostTier.on(CPU, 2**24), head) if has_policies else None
    with wide_floats():
        have_media = np.array([bool(row["media"]) for row in rows]) if is_sharded else None
        inputs = inputs_of(plan, rows, reader, pool.rank, have_media)
        assert pool.stage == 0 or not any(each.media.media for chunks in inputs for each in chunks if each.media is not None)
        result = StepExecutor(stage, pool, CPU).run(plan.for_rank(pool.rank), inputs, num_labels(rows), engine=engine)
    return float(result.loss), {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def check(
    case: MediaCase, plan: StepPlan, pool: Any, expected_loss: float, expected: dict[str, torch.Tensor], step: Any = staged_step
) -> None:
    """Asserts that ranks together have the loss and every gradient of plain transformers."""
    found: set[str] = set()
    for loss, gradients in pool.run(step, case, plan_to_json(plan)):
        assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
        if "lm_head.weight" not in expected and "lm_head.weight" in gradients:
            # tied, and summed over both ends
            (tied,) = (each for each in expected if each.endswith("embed_tokens.weight"))
            gradients[tied] = gradients.pop("lm_head.weight")
        # weights of a tower in shards that no image reaches get zeros
        extra = gradients.keys() - expected.keys()
        assert not any(gradients[each].any() for each in extra)
        own = {name: gradient for name, gradient in gradients.items() if name in expected}
        errors = worst_errors(own, {name: expected[name] for name in own})
        assert max(errors.values()) <= TOLERANCE, errors
        found |= own.keys()
    assert found == {name for name in expected if not any(part in name for part in case.frozen)}


def reference(case: MediaCase) -> tuple[list[int], float, dict[str, torch.Tensor]]:
    """Lengths of a case's rows, and loss and gradients of plain transformers."""
    model = case.build()
    rows, reader = case.rows(model)
    return [len(row["input_ids"]) for row in rows], *plain_step(model, rows, reader)


def slices_of(lengths: list[int]) -> Any:
    """Cuts the first document inside its images; its last slice has a second document, and all others form a pack."""
    chunks: list[Any] = [[span] for span in cut(0, (8, lengths[0] - 24, 16))]
    chunks[-1].append((1, 0, lengths[1]))
    return [*chunks, [(i, 0, lengths[i]) for i in (2, 3)]]


@pytest.mark.wide
@pytest.mark.parametrize("name", NAMES)
def test_two_stages_are_exact_in_slices_packs_and_layer_ranges_with_trained_and_frozen_towers(name: str, ranks: Any) -> None:
    # Qwen3-VL adds two levels, after two layers in the first of two ranges of each stage
    case = MediaCase(name, num_layers=8 if name.startswith("Qwen3VL") else 4)
    lengths, loss, expected = reference(case)
    ways: dict[str, Any] = {"num_layers": case.num_layers}
    sliced = pipeline_plan(lengths, [[(1, slices_of(lengths))]], 2, **ways)
    half = [ActivationPolicy(0, 0, (replayed(0.5),) * (case.num_layers // 2), tile_tokens=5)] * num_policies(sliced)
    packs = [[(1, [[(0, 0, lengths[0]), (1, 0, lengths[1])]])], [(1, [[(2, 0, lengths[2])], [(3, 0, lengths[3])]])]]
    for plan in (
        sliced,
        with_policies(sliced, half),
        pipeline_plan(lengths, packs, 2, **ways),
        pipeline_plan(lengths, [[(1, slices_of(lengths))]], 2, "interleaved", num_ranges=2, **ways),
    ):
        check(case, plan, ranks(2), loss, expected)
    check(replace(case, frozen=TOWERS), sliced, ranks(2), loss, expected)


@pytest.mark.wide
@pytest.mark.parametrize("name", NAMES)
def test_two_stages_of_two_ranks_are_exact_in_groups_side_by_side_and_shards(name: str, ranks: Any) -> None:
    case = MediaCase(name, num_layers=4)
    lengths, loss, expected = reference(case)
    chunks, ways = slices_of(lengths), {"num_layers": 4}
    first = [[span] for span in cut(0, (8, lengths[0] - 24, 16))]
    # the second rank of each stage has no image in the second plan
    side_by_side = [[(1, first), (1, [[(1, 0, lengths[1])]])], [(2, [[(2, 0, lengths[2]), (3, 0, lengths[3])]])]]
    for plan in (
        pipeline_plan(lengths, [[(2, chunks)]], 2, **ways),
        pipeline_plan(lengths, side_by_side, 2, **ways),
        pipeline_plan(lengths, [[(2, chunks)]], 2, method="ring", **ways),
        pipeline_plan(lengths, side_by_side, 2, parameters="sharded", **ways),
    ):
        check(case, plan, ranks(4), loss, expected)


@pytest.mark.wide
def test_interleaved_stages_in_shards_are_exact(ranks: Any) -> None:
    case = MediaCase("Qwen3VLForConditionalGeneration", num_layers=8)
    lengths, loss, expected = reference(case)
    groups = [[(2, slices_of(lengths))]]
    plan = pipeline_plan(lengths, groups, 2, "interleaved", 8, num_ranges=2, parameters="gathered_per_step")
    check(case, plan, ranks(4), loss, expected)
    check(replace(case, frozen=TOWERS), plan, ranks(4), loss, expected)


VIDEOS = ((5, "v", 7, "i", 9), (11,), ("v", 12, "v", 3), (4, "i", 6))
# positions by time as text, by seconds, and layers with a state
WITH_VIDEOS = [f"{name}ForConditionalGeneration" for name in ("Qwen3VL", "Qwen2_5_VL", "Qwen3_5")]


@pytest.mark.wide
@pytest.mark.parametrize("name", WITH_VIDEOS)
def test_videos_are_exact_in_stages_and_in_shards(name: str, ranks: Any) -> None:
    case = MediaCase(name, VIDEOS, num_layers=4)
    lengths, loss, expected = reference(case)
    # the first document is cut inside its video
    check(case, pipeline_plan(lengths, [[(1, slices_of(lengths))]], 2, num_layers=4), ranks(2), loss, expected)
    # the second rank has no video, and then no tokens
    alone = plan_of([[(1, (0, 2, 3)), (1, (1,))]], lengths, 2)
    for plan in (sliced_plan(lengths, slices_of(lengths), num_ranks=2), alone):
        check(case, replace(plan, parameters="sharded"), ranks(2), loss, expected, sharded_step)
    check(
        replace(case, frozen=TOWERS),
        pipeline_plan(lengths, [[(1, slices_of(lengths))]], 2, num_layers=4),
        ranks(2),
        loss,
        expected,
    )


# classes that other tests of this folder do not have in groups, rings, shards and stages
OTHERS = sorted({*HERE} - {*FIRST})
# a convolution with a state, latent attention, and experts under M-RoPE
_DIFFERENT = {f"{name}ForConditionalGeneration" for name in ("Lfm2Vl", "Kimi_K25", "Ernie4_5_VLMoe")}


@pytest.mark.daily("Ernie4_5_VLMoeForConditionalGeneration")
@pytest.mark.parametrize("name", OTHERS)
def test_all_other_classes_are_exact_in_rings_groups_shards_and_stages(name: str, ranks: Any) -> None:
    # Qwen3-VL's experts add features after two layers
    case = MediaCase(name, num_layers=4 if name.startswith("Qwen3VL") else 0)
    lengths, loss, expected = reference(case)
    chunks, num_layers = slices_of(lengths), num_text_layers(case.build())
    check(case, sliced_plan(lengths, chunks, num_ranks=2, ulysses=1), ranks(2), loss, expected, step_on_rank)
    pack = plan_of([[(2, (0, 1, 2, 3))]], lengths, 2)
    check(case, replace(pack, parameters="sharded"), ranks(2), loss, expected, sharded_step)
    check(case, pipeline_plan(lengths, [[(1, chunks)]], 2, num_layers=num_layers), ranks(2), loss, expected)


def mistaken_step(case: MediaCase, plan_json: str) -> Any:
    """Runs a step in which all stages but the first count tokens."""
    given = media_module._with_media

    def wrong(*args: Any) -> Any:
        return None if args[-1].get("input_ids") is None else given(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(media_module, "_with_media", wrong)
        return staged_step(case, plan_json)


def test_positions_left_out_after_the_first_stage_change_gradients(ranks: Any) -> None:
    case = MediaCase("Qwen3VLForConditionalGeneration", num_layers=4)
    lengths, _, expected = reference(case)
    plan = pipeline_plan(lengths, [[(1, slices_of(lengths))]], 2)
    results = ranks(2).run(mistaken_step, case, plan_to_json(plan))
    worst = [max(worst_errors(own, {name: expected[name] for name in own}).values()) for _, own in results]
    assert max(worst) > 0.1
