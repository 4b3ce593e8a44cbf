"""Rows with images give the loss and every gradient of plain transformers on one document at a time, in fp64, for each class."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from helpers.models.any_model import wide_floats
from helpers.models.media_rows import CASES, MediaCase, TinyReader, blocks_of, num_labels, plain_step, worst_errors
from helpers.plans.layouts import plan_of
from helpers.plans.policies import replayed, same_policy
from helpers.plans.sliced_plans import cut, sliced_plan
from helpers.ranks.rank_steps import group_pool, mesh, whole

import hf_longctx.hf.data.collator as collator_module
import hf_longctx.hf.models.media as media_module
from hf_longctx.hf.data.collator import ChangedRow, LongContextCollator, PlannedDataset, PlannedStep
from hf_longctx.hf.data.sampler import SequenceIndex
from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.layers import layer_modules
from hf_longctx.hf.models.media import tower_graphs
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.hf.models.towers import unit_classes
from hf_longctx.plan.core.serialize import plan_from_json, plan_to_json
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.core.chunk_inputs import ChunkMedia
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.parameters.sharded import shard_model
from hf_longctx.runtime.process_groups import GroupPool
from hf_longctx.runtime.tiles.patterns import AttentionPattern

GEMMA = {"Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration"}
HERE = sorted(({*CASES} - GEMMA) & {*dir(transformers)})
# families that differ in positions, masks, layers with a state, and what layers add
FIRST = sorted(f"{name}ForConditionalGeneration" for name in ("Qwen3VL", "Qwen3_5", "Qwen2_5_VL", "Llava"))
TOLERANCE = 1e-12


def inputs_of(plan: Any, rows: Any, reader: Any, rank: int, have_media: Any = None) -> Any:
    lengths = np.array([len(row["input_ids"]) for row in rows])
    index = SequenceIndex.build(lengths, int(lengths.max()), "error")
    dataset = PlannedDataset(rows, index, reader=reader)
    return LongContextCollator(have_media)([dataset[PlannedStep(plan, tuple(range(len(rows))), rank)]])["chunks"]


def planned_step(case: MediaCase, plan: Any, rows: Any, reader: Any, pool: GroupPool | None = None, room_bytes: int = 0) -> Any:
    """Loss and gradients of one step of a plan on this rank, which leaves so many bytes free for graphs of towers."""
    model, pool = case.build(), pool or GroupPool((1,), 1.0)
    patch_model(model)
    graphs = tower_graphs(model)
    assert graphs is not None
    graphs.begin(room_bytes)
    cpu = torch.device("cpu")
    has_policies = any(stage.activations for b in plan.micro_batches for group in b.groups for stage in group.stages)
    engine = ActivationEngine(layer_modules(model), HostTier.on(cpu, 2**24)) if has_policies else None
    executor = StepExecutor(whole_model(model, num_attention_layers(model)), pool, cpu)
    with wide_floats():
        inputs = inputs_of(plan, rows, reader, pool.rank)
        result = executor.run(plan.for_rank(pool.rank), inputs, num_labels(rows), engine=engine)
    return float(result.loss), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def step_on_rank(case: MediaCase, plan_json: str) -> Any:
    """Runs `planned_step` on a rank of a pool, with the rows that every rank makes alike."""
    return planned_step(case, plan_from_json(plan_json), *case.rows(case.build()), group_pool())


def slices_of(lengths: list[int], sizes: Sequence[int] = ()) -> Any:
    """Chunks that cut the first document inside its images, the last one together with all other documents."""
    chunks = [[span] for span in cut(0, sizes or (8, lengths[0] - 24, 16))]
    chunks[-1] += [(i, 0, length) for i, length in enumerate(lengths) if i]
    return chunks


@pytest.mark.daily("Llama4ForConditionalGeneration")
@pytest.mark.parametrize("name", HERE)
def test_packs_and_slices_of_documents_with_images_are_exact(name: str) -> None:
    case = MediaCase(name)
    model = case.build()
    rows, reader = case.rows(model)
    expected_loss, expected = plain_step(model, rows, reader)
    lengths = [len(row["input_ids"]) for row in rows]
    sliced = sliced_plan(lengths, slices_of(lengths))
    plans = [plan_of([[(1, (0, 1, 2, 3))]], lengths, 1), sliced]
    if name in FIRST:
        plans.append(same_policy(sliced, *[replayed(0.5)] * num_attention_layers(model)))
    for plan in plans:
        loss, gradients = planned_step(case, plan, rows, reader)
        errors = worst_errors(gradients, expected)
        assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
        assert max(errors.values()) <= TOLERANCE, errors
        assert errors.keys() >= {"text", "tower"}


@pytest.mark.wide
@pytest.mark.parametrize("name", FIRST)
def test_groups_and_rings_of_two_ranks_are_exact_with_images_on_either_or_both(name: str, ranks: Any) -> None:
    case = MediaCase(name)
    model = case.build()
    rows, reader = case.rows(model)
    expected_loss, expected = plain_step(model, rows, reader)
    lengths = [len(row["input_ids"]) for row in rows]
    everything, chunks = (0, 1, 2, 3), slices_of(lengths)
    plans = [
        plan_of([[(2, everything)]], lengths, 2),
        plan_of([[(2, everything)]], lengths, 2, ulysses=1),
        sliced_plan(lengths, chunks, num_ranks=2),
        sliced_plan(lengths, chunks, num_ranks=2, ulysses=1),
        # the second rank has no image
        plan_of([[(1, (0, 2, 3)), (1, (1,))]], lengths, 2),
    ]
    for plan in plans:
        for loss, gradients in ranks(2).run(step_on_rank, case, plan_to_json(plan)):
            errors = worst_errors(gradients, expected)
            assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
            assert gradients.keys() == expected.keys()
            assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.daily("SmolVLMForConditionalGeneration")
@pytest.mark.parametrize("name", HERE)
def test_towers_are_exact_and_run_once_where_plans_leave_room_for_their_graphs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = MediaCase(name)
    model = case.build()
    rows, reader = case.rows(model)
    _, expected = plain_step(model, rows, reader)
    lengths = [len(row["input_ids"]) for row in rows]
    runs: list[int] = []
    tables = media_module.feature_tables

    def noting(around: Any, medium: Any) -> Any:
        runs.append(len(runs))
        return tables(around, medium)

    monkeypatch.setattr(media_module, "feature_tables", noting)
    numbers = {}
    for room_bytes in (0, 2**30):
        runs.clear()
        _, gradients = planned_step(case, plan_of([[(1, (0, 1, 2, 3))]], lengths, 1), rows, reader, room_bytes=room_bytes)
        assert max(worst_errors(gradients, expected).values()) <= TOLERANCE
        numbers[room_bytes] = len(runs)
    # five images: once more in the backward, without room for their graphs
    assert numbers[0] - numbers[2**30] == 5


@pytest.mark.parametrize("name", HERE)
def test_bytes_of_graphs_are_those_that_are_saved(name: str) -> None:
    model = MediaCase(name).build()
    patch_model(model)
    _, reader = MediaCase(name).rows(model)
    around, graphs = media_module.around_text(model), tower_graphs(model)
    assert graphs is not None
    weights = {weight.data_ptr() for weight in model.parameters()}
    for medium in reader.opened:
        saved: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor, saved: dict[int, torch.Tensor] = saved) -> torch.Tensor:
            saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
            return tensor

        with wide_floats(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            _tables = media_module.feature_tables(around, medium)
        given = {each.data_ptr() for each in medium.tensors.values()}
        counted = sum(each.untyped_storage().nbytes() for place, each in saved.items() if place not in weights | given)
        with wide_floats():
            predicted, is_small = graphs.graph_bytes(around, medium)
        assert not is_small
        # a smaller image counts in proportion to a counted one, whose windows may keep more
        most = 1.15 if medium is not reader.opened[0] else 1.02
        assert 0.95 * counted <= predicted <= most * counted


def test_a_trained_projector_behind_a_frozen_tower_never_runs_it_again() -> None:
    case = MediaCase("LlavaForConditionalGeneration", frozen=("vision_tower",))
    model = case.build()
    patch_model(model)
    _, reader = case.rows(model)
    graphs = tower_graphs(model)
    assert graphs is not None
    with wide_floats():
        num_bytes, is_small = graphs.graph_bytes(media_module.around_text(model), reader.opened[0])
    assert num_bytes > 0
    assert is_small


@pytest.mark.daily("LlavaForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
@pytest.mark.parametrize("name", FIRST)
def test_frozen_towers_get_no_gradient_and_change_no_other(name: str) -> None:
    free, frozen = MediaCase(name), MediaCase(name, frozen=("visual", "vision_tower", "projector"))
    model = free.build()
    rows, reader = free.rows(model)
    _, expected = plain_step(model, rows, reader)
    lengths = [len(row["input_ids"]) for row in rows]
    _, gradients = planned_step(frozen, sliced_plan(lengths, slices_of(lengths)), rows, reader)
    assert set(expected) - set(gradients) == {each for each in expected if any(part in each for part in frozen.frozen)}
    assert max(worst_errors(gradients, {each: expected[each] for each in gradients}).values()) <= TOLERANCE


@pytest.mark.daily("Qwen3_5ForConditionalGeneration")
@pytest.mark.parametrize("name", sorted(name for name in HERE if name.startswith(("Qwen2", "Qwen3"))))
def test_videos_beside_images_are_exact_in_packs_and_slices_that_cut_them(name: str, ranks: Any) -> None:
    case = MediaCase(name, layouts=((5, "v", 7, "i", 9), (11,), ("v", 12, "v", 3), (4, "i", 6)))
    model = case.build()
    rows, reader = case.rows(model)
    expected_loss, expected = plain_step(model, rows, reader)
    lengths = [len(row["input_ids"]) for row in rows]
    chunks = slices_of(lengths)
    for plan in (plan_of([[(1, (0, 1, 2, 3))]], lengths, 1), sliced_plan(lengths, chunks)):
        loss, gradients = planned_step(case, plan, rows, reader)
        assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
        assert max(worst_errors(gradients, expected).values()) <= TOLERANCE
    for loss, gradients in ranks(2).run(step_on_rank, case, plan_to_json(sliced_plan(lengths, chunks, num_ranks=2))):
        assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
        assert max(worst_errors(gradients, expected).values()) <= TOLERANCE


def test_towers_run_only_the_steps_of_a_video_that_a_slice_holds() -> None:
    case = MediaCase("Qwen3VLForConditionalGeneration", layouts=((3, "i", 2, "v", 4),))
    rows, reader = case.rows(case.build())
    (length,) = (len(row["input_ids"]) for row in rows)
    (_, video), steps = rows[0]["media"], []
    # the first slice ends inside the first of three steps, the second between the others
    border, step = video["start"], (video["stop"] - video["start"]) // video["grid"][0]
    plan = sliced_plan([length], [[span] for span in cut(0, (border + 4, 2 * step - 4, length - border - 2 * step))])
    for (inputs,) in zip(*inputs_of(plan, rows, reader, 0), strict=True):
        assert inputs.media is not None
        steps.append([int(each.tensors["video_grid_thw"][0, 0]) for each in inputs.media.media if each.kind == "video"])
    assert steps == [[1], [2], [1]]


def test_videos_are_refused_where_the_class_was_not_tested_with_them() -> None:
    case = MediaCase("LlavaForConditionalGeneration")
    rows, reader = case.rows(case.build())
    rows[0]["media"][0]["kind"] = "video"
    lengths = [len(row["input_ids"]) for row in rows]
    dataset = PlannedDataset(rows, SequenceIndex.build(np.array(lengths), max(lengths), "error"), reader=reader)
    _, found = dataset[PlannedStep(plan_of([[(1, (0, 1, 2, 3))]], lengths, 1), (0, 1, 2, 3), 0)]
    assert isinstance(found, ChangedRow)
    assert "row 0 has a video, which is not read for this model; remove such rows" in found.problem


def test_a_step_without_images_leaves_towers_without_gradients() -> None:
    case = MediaCase("Qwen3VLForConditionalGeneration", layouts=((9,), (14,)))
    rows, reader = case.rows(case.build())
    lengths = [len(row["input_ids"]) for row in rows]
    _, gradients = planned_step(case, plan_of([[(1, (0, 1))]], lengths, 1), rows, reader)
    assert gradients
    assert not any("visual" in name for name in gradients)


# classes in which tokens of an image see each other both ways in all layers, in those with a window, and in none
BOTH_WAYS = {
    "Gemma3": MediaCase("Gemma3ForConditionalGeneration"),
    "Gemma4": MediaCase("Gemma4ForConditionalGeneration"),
    "small Gemma4": MediaCase("Gemma4ForConditionalGeneration", text={"sliding_window": 3}),
}


def blocks_plans(case: MediaCase, rows: Any, num_ranks: int) -> dict[str, Any]:
    """Plans of packs and of slices that end at images."""
    lengths, blocks = [len(row["input_ids"]) for row in rows], blocks_of(rows)
    begin, end = blocks[0][0]
    sliced = sliced_plan(lengths, slices_of(lengths, (begin, end + 4 - begin, lengths[0] - end - 4)), num_ranks=num_ranks)
    replays = [replayed(0.5)] * num_attention_layers(case.build())
    plans = {
        "pack": plan_of([[(num_ranks, (0, 1, 2, 3))]], lengths, num_ranks),
        "slices": sliced,
        "replayed": same_policy(sliced, *replays),
        "replayed pack": same_policy(plan_of([[(num_ranks, (0, 1, 2, 3))]], lengths, num_ranks), *replays),
    }
    return {name: replace(plan, blocks=blocks) for name, plan in plans.items()}


@pytest.mark.daily("small Gemma4")
@pytest.mark.parametrize("name", BOTH_WAYS)
def test_images_that_see_themselves_both_ways_are_exact_in_packs_and_slices(name: str) -> None:
    case = BOTH_WAYS[name]
    model = case.build()
    rows, reader = case.rows(model)
    expected_loss, expected = plain_step(model, rows, reader)
    for kind, plan in blocks_plans(case, rows, 1).items():
        loss, gradients = planned_step(case, validate_plan(plan), rows, reader)
        errors = worst_errors(gradients, expected)
        assert loss == pytest.approx(expected_loss, rel=TOLERANCE), kind
        assert max(errors.values()) <= TOLERANCE, (kind, errors)
        assert errors.keys() >= {"text", "tower"}


@pytest.mark.wide
@pytest.mark.parametrize("name", BOTH_WAYS)
def test_images_that_see_themselves_both_ways_are_exact_in_groups(name: str, ranks: Any) -> None:
    case = BOTH_WAYS[name]
    model = case.build()
    rows, reader = case.rows(model)
    expected_loss, expected = plain_step(model, rows, reader)
    for kind, plan in blocks_plans(case, rows, 2).items():
        for loss, gradients in ranks(2).run(step_on_rank, case, plan_to_json(plan)):
            errors = worst_errors(gradients, expected)
            assert loss == pytest.approx(expected_loss, rel=TOLERANCE), kind
            assert max(errors.values()) <= TOLERANCE, (kind, errors)


@pytest.mark.daily("Gemma3")
@pytest.mark.parametrize("name", ["Gemma3", "Gemma4"])
def test_images_that_are_causal_by_mistake_change_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = BOTH_WAYS[name]
    model = case.build()
    rows, reader = case.rows(model)
    _, expected = plain_step(model, rows, reader)
    monkeypatch.setattr(AttentionPattern, "_block_tiles", lambda *_: ())
    for plan in blocks_plans(case, rows, 1).values():
        _, gradients = planned_step(case, plan, rows, reader)
        assert max(worst_errors(gradients, expected).values()) > 0.1


def test_a_plan_without_blocks_is_refused_where_images_see_themselves_both_ways() -> None:
    case = BOTH_WAYS["Gemma3"]
    rows, reader = case.rows(case.build())
    plan = replace(blocks_plans(case, rows, 1)["pack"], blocks=())
    with pytest.raises(RuntimeError, match="the plan names no blocks of tokens that see each other both ways"):
        planned_step(case, plan, rows, reader)


def one_kind_of_position(media: ChunkMedia) -> ChunkMedia:
    return replace(media, positions=None)


def from_the_first_row(media: ChunkMedia) -> ChunkMedia:
    """Scatters the features of a chunk's images from the first row on."""
    return replace(media, rows=torch.arange(len(media.rows)))


@pytest.mark.daily("from_the_first_row")
@pytest.mark.parametrize("mistake", [one_kind_of_position, from_the_first_row, "deepstack"])
def test_planted_mistakes_change_gradients(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = MediaCase("Qwen3VLForConditionalGeneration")
    model = case.build()
    rows, reader = case.rows(model)
    _, expected = plain_step(model, rows, reader)
    lengths = [len(row["input_ids"]) for row in rows]
    if mistake == "deepstack":
        tables = media_module.feature_tables
        monkeypatch.setattr(media_module, "feature_tables", lambda *each: tables(*each)[:1])
    else:
        chunk_media = collator_module.chunk_media

        def made(parts: Any) -> Any:
            found = chunk_media(parts)
            return None if found is None else mistake(found)

        monkeypatch.setattr(collator_module, "chunk_media", made)
    _, gradients = planned_step(case, sliced_plan(lengths, slices_of(lengths)), rows, reader)
    assert max(worst_errors(gradients, expected).values()) > 0.1


def test_only_images_with_tokens_on_the_rank_are_opened() -> None:
    case = MediaCase("Qwen3VLForConditionalGeneration")
    rows, reader = case.rows(case.build())
    opened: list[str] = []

    @dataclass(frozen=True)
    class Noting(TinyReader):
        def tower_inputs(self, medium: Any, file: Any, ids: Any, where: str) -> Any:
            opened.append(file["path"])
            return super().tower_inputs(medium, file, ids, where)

    noting = Noting(reader.opened, reader.of_document, reader.tokens)
    lengths = [len(row["input_ids"]) for row in rows]
    # 5 tokens, an image of 6 between marks, 7 tokens, an image of 8 between marks, 9 tokens: the halves of rank 1 and rank 0
    plan = plan_of([[(2, (0,))]], lengths[:1], 2)
    for rank, paths in ((0, ["0"]), (1, ["1"])):
        opened.clear()
        inputs_of(plan, rows[:1], noting, rank)
        assert opened == paths


def test_a_sliced_document_never_has_the_features_of_all_its_images_at_once() -> None:
    case = MediaCase("Qwen3VLForConditionalGeneration", layouts=((6, "i", 6) * 8,))
    model = case.build()
    rows, reader = case.rows(model)
    (length,) = (len(row["input_ids"]) for row in rows)
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    tables = media_module.feature_tables

    def noting(*given: Any) -> list[torch.Tensor]:
        nonlocal most
        found = tables(*given)
        alive.extend(map(weakref.ref, found[:1]))
        most = max(most, sum(len(each()) for each in alive if each() is not None))  # type: ignore[arg-type]
        return found

    frozen = replace(case, frozen=("visual",))
    sizes = [length // 8] * 7 + [length - 7 * (length // 8)]
    plan = sliced_plan([length], [[span] for span in cut(0, sizes)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(media_module, "feature_tables", noting)
        planned_step(frozen, plan, rows, reader)
    total = sum(item["num_features"] for item in rows[0]["media"])
    assert most <= total // 3, (most, total)


def test_towers_of_another_size_are_refused_by_both_numbers() -> None:
    case = MediaCase("LlavaForConditionalGeneration")
    model = case.build()
    _, reader = case.rows(model)
    with wide_floats(), pytest.raises(ValueError, match=r"give 16 features for a medium \(image\) of 15 tokens"):
        media_module.feature_tables(media_module.around_text(model), replace(reader.opened[0], num_features=15))


def sharded_step(case: MediaCase, plan_json: str) -> Any:
    """Runs one step of a plan with the weights in shards on a rank of a pool."""
    rows, reader = case.rows(case.build())
    plan, pool, model = plan_from_json(plan_json), group_pool(), case.build()
    patch_model(model)
    shard_model(model, unit_classes(model, True), mesh(pool.num_ranks))
    executor = StepExecutor(whole_model(model, num_attention_layers(model)), pool, torch.device("cpu"))
    with_media = np.array([bool(row["media"]) for row in rows])
    with wide_floats():
        inputs = inputs_of(plan, rows, reader, pool.rank, with_media)
        result = executor.run(plan.for_rank(pool.rank), inputs, num_labels(rows))
    return float(result.loss), {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.wide
@pytest.mark.parametrize("parameters", ["sharded", "gathered_per_step"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", FIRST)
def test_shards_are_exact_also_if_a_rank_has_no_image(name: str, frozen: bool, parameters: Any, ranks: Any) -> None:
    case = MediaCase(name, frozen=("visual", "vision_tower", "projector") if frozen else ())
    model = case.build()
    rows, reader = case.rows(model)
    expected_loss, expected = plain_step(model, rows, reader)
    lengths = [len(row["input_ids"]) for row in rows]
    everything = (0, 1, 2, 3)
    plans = [
        plan_of([[(2, everything)]], lengths, 2),
        sliced_plan(lengths, slices_of(lengths), num_ranks=2, ulysses=1),
        # the second rank has no image, and then no tokens in the second micro-batch
        plan_of([[(1, (0,)), (1, (1,))], [(2, (2, 3))]], lengths, 2),
    ]
    for plan in plans:
        for loss, gradients in ranks(2).run(sharded_step, case, plan_to_json(replace(plan, parameters=parameters))):
            assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
            # weights of a tower that no image reaches get zeros here
            extra = gradients.keys() - expected.keys()
            assert not any(gradients[each].any() for each in extra)
            assert all("vision" in each for each in extra)
            found = {each: gradient for each, gradient in gradients.items() if each in expected}
            assert max(worst_errors(found, expected).values()) <= TOLERANCE


def test_shards_without_images_in_a_step_leave_towers_without_gradients(ranks: Any) -> None:
    case = MediaCase("Qwen3VLForConditionalGeneration", layouts=((9,), (14,)))
    plan = replace(plan_of([[(1, (0,)), (1, (1,))]], [9, 14], 2), parameters="sharded")
    for _, gradients in ranks(2).run(sharded_step, case, plan_to_json(plan)):
        assert gradients
        assert not any("visual" in name for name in gradients)
