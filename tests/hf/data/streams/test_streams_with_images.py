"""Streams of rows with images: losses and gradients of the same rows in a list, files opened where needed, and errors."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.models.any_model import build_any, wide_floats
from helpers.models.tiny_processors import chat, file_of, picture, tiny_processor
from helpers.plans.layouts import plan_of
from helpers.plans.pipeline_plans import pipeline_plan
from helpers.ranks.rank_steps import whole
from helpers.trainers.trainer_runs import StepRecorder, check_equal_steps, training_arguments
from hf.trainer.test_media_training import IMAGE, MAKERS, STEPS, deep_model, qwen3_vl, rows_and_processor

from hf_longctx import LongContextConfig, LongContextTrainer, ShardedStream, tokenise_chat
from hf_longctx.hf.data.collator import LongContextCollator, PlannedDataset, PlannedStep
from hf_longctx.hf.data.media.processors import FileReader, MediaTokens
from hf_longctx.hf.data.resume import Cursor, Place
from hf_longctx.hf.data.sampler import SequenceIndex
from hf_longctx.hf.data.streams.planned_stream import PlannedStream, StreamSource
from hf_longctx.hf.data.streams.rows import SequenceReader, StreamMedia, StreamRules
from hf_longctx.hf.models.media import sees_images_both_ways
from hf_longctx.hf.models.spec import model_spec
from hf_longctx.plan.core.types import StepPlan, StepSequences

CONFIG = {"tokens_per_rank": 256, "report_steps": False, "timeline_steps": 0}


class Rows(torch.utils.data.IterableDataset):
    """Rows of a reader, whose columns nobody knows before they are read."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def trainer_on(rows: Any, model: Any, processor: Any, folder: str, arguments: dict[str, Any], **config: Any) -> Any:
    given = STEPS | {"per_device_train_batch_size": 2 // (dist.get_world_size() if dist.is_initialized() else 1)} | arguments
    return LongContextTrainer(
        model=model,
        args=training_arguments(folder, **given),
        train_dataset=rows,
        processing_class=processor,
        longctx_config=LongContextConfig(**CONFIG | config),
    )


def steps_of(rows: Any, folder: str, kind: str, arguments: dict[str, Any], **config: Any) -> list[Any]:
    """Loss and whole gradients of every step of a training on these rows."""
    processor = tiny_processor(kind)
    model = (deep_model if config.get("stages") else MAKERS[kind])(processor)
    recorder = StepRecorder()
    trainer = trainer_on(rows, model, processor, folder, arguments, **config)
    recorder.attach(trainer)
    with wide_floats():
        trainer.train(resume_from_checkpoint=arguments.get("resume_from_checkpoint"))
    return [(step.loss, {name: whole(each) for name, each in step.gradients.items()}) for step in recorder.steps]


def stream_and_list(folder: str, kind: str, arguments: dict[str, Any], config: dict[str, Any]) -> tuple[Any, Any]:
    rows = list(rows_and_processor(kind)[0])
    # two readers on two ranks take turns
    stream = ShardedStream(lambda reader, num_readers: Rows(rows[reader::num_readers]))
    readers = dist.get_world_size() if dist.is_initialized() else 1
    found = steps_of(stream, folder, kind, arguments, stream_readers=readers, **config)
    return found, steps_of(rows, folder, kind, {"train_sampling_strategy": "sequential"} | arguments, **config)


def joined(by_rank: Sequence[list[Any]]) -> list[Any]:
    """Losses of the first rank and gradients of all ranks, for every step."""
    return [(steps[0][0], {name: each for _, own in steps for name, each in own.items()}) for steps in zip(*by_rank, strict=True)]


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_a_stream_of_rows_with_images_trains_as_a_list_of_them(kind: str, tmp_path: Path) -> None:
    # several slices, and two batches in a step
    arguments = {"gradient_accumulation_steps": 2} if kind == "gemma3" else {}
    found, expected = stream_and_list(str(tmp_path), kind, arguments, {"tokens_per_rank": 68})
    check_equal_steps(found, expected)
    assert any("vision" in name or "visual" in name for name in found[0][1])


@pytest.mark.wide
@pytest.mark.parametrize("config", [{"parameters": "sharded"}, {"parameters": "replicated", "stages": 2}])
def test_readers_on_two_ranks_train_as_a_list_of_rows_with_images(config: dict[str, Any], ranks: Any, tmp_path: Path) -> None:
    by_rank = ranks(2).run(stream_and_list, str(tmp_path), "qwen3_vl", {}, config)
    # the lengths of a list are known, and may divide layers otherwise
    check_equal_steps(*(joined(steps) for steps in zip(*by_rank, strict=True)))


@dataclass(frozen=True)
class Recording(FileReader):
    """Opens images, and records which."""

    opened: list[tuple[int, int]] = field(default_factory=list)

    def tower_inputs(self, medium: Any, file: Any, ids: Any, where: str) -> Any:
        row, image = re.findall(r"row (\d+).* image (\d+)", where)[0]
        # readers take turns
        reader = re.findall(r"of reader (\d)", where)
        self.opened.append((int(row) * 2 + int(reader[0]) if reader else int(row), int(image)))
        return super().tower_inputs(medium, file, ids, where)


def stream_rules(processor: Any, **changes: Any) -> StreamRules:
    """The rules of a stream of which four sequences make a step."""
    settings = {"max_length": 256, "long_sequences": "error", "media": StreamMedia("")} | changes
    tokens = {"vocab_size": len(processor.tokenizer), "placeholders": (MediaTokens(processor).feature,)}
    sizes = {"tokens_per_rank": 256, "room_tokens": 256, "sequences_per_step": 4, "tokens_per_step": None, "drop_last": False}
    return StreamRules(name="train_dataset", **settings, **tokens, **sizes)


def batch_of_stream(rows: list[Any], rules: StreamRules, plan: StepPlan) -> tuple[dict[str, Any], StepSequences]:
    """This rank's batch of a plan whose rows two readers read, and what the planner was told."""
    told: list[StepSequences] = []

    def plans(steps: Iterator[Any], explore: bool) -> Iterator[StepPlan]:
        for _, given in list(steps):
            if (known := given() if callable(given) else given) is not None:
                told.append(known)
                yield plan

    pool = SimpleNamespace(control=dist.group.WORLD, rank=dist.get_rank())
    stub: Any = SimpleNamespace(pool=pool, alive_s=5.0, plans=plans)
    stream = ShardedStream(lambda reader, num_readers: Rows(rows[reader::num_readers]))
    (batch,) = PlannedStream(StreamSource(stream, rules, 2, lookahead=1), Place.begin(2), stub)
    return batch, told[0]


def parts_of(batch: dict[str, Any]) -> list[torch.Tensor]:
    """All tensors and numbers of a batch's chunks."""
    found: list[Any] = []
    for inputs in (inputs for chunks in batch["chunks"] for inputs in chunks):
        found += [inputs.input_ids, inputs.position_ids, inputs.shift_labels, inputs.media is None]
        if (media := inputs.media) is not None:
            found += [media.places, media.rows, media.positions is None, media.reaches_all, len(media.media)]
            found += [] if media.positions is None else [media.positions]
            found += [each for one in media.media for each in (one.num_features, *one.tensors.values())]
    return [torch.as_tensor(each) for each in found]


def batches_on_rank(kind: str) -> list[str]:
    """Compares this rank's batches of a stream with those of a list; returns the plans for which they differ."""
    rows, processor = rows_and_processor(kind)
    listed, lengths, rank = list(rows), list(map(len, rows["input_ids"])), dist.get_rank()
    model = MAKERS[kind](processor)
    whole_chunks = [[(0, 0, lengths[0]), (2, 0, lengths[2])], [(1, 0, lengths[1])], [(3, 0, lengths[3])]]
    plans = {
        "ring": plan_of([[(2, (0, 1, 2, 3))]], lengths, 2, ulysses=1),
        "alone": plan_of([[(1, (0, 3)), (1, (1, 2))]], lengths, 2),
        "stages": pipeline_plan(lengths, [[(1, whole_chunks)]], 2),
    }
    differing = []
    for name, plan in plans.items():
        reader, other = (Recording.of(model, processor) for _ in range(2))
        media = StreamMedia("", reader, model_spec(model).tower, sees_images_both_ways(model), reaches_all=True)
        batch, told = batch_of_stream(listed, stream_rules(processor, media=media), plan)
        index = SequenceIndex.build(np.array(lengths), 256, "error")
        item = PlannedDataset(listed, index, reader=other)[PlannedStep(plan, (0, 1, 2, 3), rank)]
        expected = LongContextCollator(np.array([bool(row["media"]) for row in listed]))([item])
        pairs = zip(parts_of(batch), parts_of(expected), strict=True)
        numbers = [len(row["media"]) for row in listed]
        is_told = told.lengths == tuple(lengths) and [len(own) for own in told.media] == numbers
        if media.has_blocks:
            is_feature = [np.isin(row["input_ids"], [MediaTokens(processor).feature]) for row in listed]
            blocks = [
                [own[begin:end].all() for begin, end in ranges] for own, ranges in zip(is_feature, told.blocks, strict=True)
            ]
            is_told &= list(map(len, blocks)) == numbers and all(map(all, blocks))
        is_equal = all(torch.equal(one, two) for one, two in pairs) and sorted(reader.opened) == sorted(other.opened)
        opens = bool(reader.opened) == (plan.place(rank)[0] == 0)
        differing += [] if is_told and is_equal and opens else [f"{name}: {is_told} {is_equal} {opens}"]
    return differing


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_ranks_get_the_tensors_of_a_list_and_open_only_the_images_of_their_tokens(kind: str, ranks: Any) -> None:
    assert ranks(2).run(batches_on_rank, kind) == [[], []]


def faults_on_rank(folder: str) -> tuple[str, str]:
    """The problems of two steps, with a file that is missing and one with another size, which both ranks read in turns."""
    processor, path = tiny_processor("qwen3_vl"), Path(folder, f"{dist.get_rank()}.png")
    picture(40, 28).save(path)
    messages = [chat({**IMAGE, "path": str(path)}, "what is this?") for _ in range(4)]
    rows = list(tokenise_chat(datasets.Dataset.from_list([{"messages": each} for each in messages]), processor))
    lengths = [len(row["input_ids"]) for row in rows]
    rules = stream_rules(processor, media=StreamMedia("", FileReader.of(qwen3_vl(processor), processor)))
    plan = plan_of([[(1, (0, 1)), (1, (2, 3))]], lengths, 2)
    found = []
    for change in (lambda: picture(96, 28).save(path), path.unlink):
        change()
        dist.barrier()
        found.append(batch_of_stream(rows, rules, plan)[0].get("changed", ""))
        dist.barrier()
    return found[0], found[1]


def test_an_image_that_a_rank_cannot_open_is_named_in_its_batch(ranks: Any, tmp_path: Path) -> None:
    for changed, missing in ranks(2).run(faults_on_rank, str(tmp_path)):
        named = r"train_dataset row \d of epoch 0 of reader \d on rank \d image 0 \("
        assert re.match(named + r"96 x 28 pixels\) takes \d+ tokens now, but its row has", changed)
        assert re.match(named + r".*\d.png\) cannot be read \(FileNotFoundError.*; correct the file, or remove", missing)


def test_a_stream_with_images_resumes_at_the_next_row_and_notices_other_files(tmp_path: Path) -> None:
    rows, processor = rows_and_processor()
    saves = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "logging_steps": 1}

    def trained(given: Any, resume: int | None) -> Any:
        model = qwen3_vl(processor)
        trainer = trainer_on(given, model, processor, str(tmp_path), saves)
        trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{resume}") if resume else None)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, {name: p.detach().clone() for name, p in model.named_parameters()}

    losses, expected = trained(rows.to_iterable_dataset(num_shards=2), None)
    for step in (1, 3):
        found, weights = trained(rows.to_iterable_dataset(num_shards=2), step)
        assert found == losses
        assert len(losses) == 4
        assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []
    # has the same tokens, with another picture in a row that is read again
    other = list(rows)
    other[1]["media_files"][0]["bytes"] = file_of(picture(48, 28, 9))
    changed = datasets.Dataset.from_list(other, features=rows.features).to_iterable_dataset(num_shards=2)
    with pytest.raises(ValueError, match="rows of train_dataset before row 2 of epoch 0 are not those of the run that"):
        trained(changed, 1)


def test_an_evaluation_reads_a_stream_of_rows_with_images(tmp_path: Path) -> None:
    rows, processor = rows_and_processor()
    trainer = trainer_on(rows.to_iterable_dataset(), qwen3_vl(processor), processor, str(tmp_path), {})
    with wide_floats():
        found, expected = (trainer.evaluate(given)["eval_loss"] for given in (rows.to_iterable_dataset(), rows))
    assert found == expected


def error_of(rows: Any, folder: Path, model: Any, processor: Any, **config: Any) -> str:
    with pytest.raises(ValueError) as refused:
        trainer_on(rows, model, processor, str(folder), {}, **config).train()
    return str(refused.value)


def refusal_of(rows: list[Any], processor: Any, **changes: Any) -> str:
    """The error of a reader of these rows."""
    with pytest.raises(ValueError) as refused:
        list(itertools.islice(SequenceReader(lambda: rows, stream_rules(processor, **changes), Cursor(0)), len(rows)))
    return str(refused.value)


def test_rows_of_a_stream_that_cannot_be_trained_are_refused_by_row_and_remedy() -> None:
    rows, processor = rows_and_processor()
    listed = list(rows)
    for way in ("truncate", "split", "error"):
        said = refusal_of(listed, processor, max_length=40, long_sequences=way)
        assert re.search(
            r"row \d of epoch 0 of the stream has \d+ tokens, \d+ of them for images, above the limit of 40, and rows with",
            said,
        )
    said = refusal_of([row | {"labels": row["input_ids"]} for row in listed], processor)
    assert "row 0 has labels on tokens that stand for images, which are no text to learn; give these tokens the label" in said
    bare = [{name: value for name, value in row.items() if name != "labels"} for row in listed]
    assert "row 0 has labels on tokens that stand for images" in refusal_of(bare, processor)
    for other in ({"media_files": []}, {"media_files": [3]}, {"media_files": [{"path": 3}]}, {"media_files": None}):
        said = refusal_of([listed[0] | other], processor)
        assert "column 'media_files' holds" in said
        assert "beside 1 images and videos in 'media'; give both columns as tokenise_chat writes them" in said
    bare = [{name: value for name, value in row.items() if name != "media_files"} for row in listed]
    assert "has a column 'media' without 'media_files', which names the files of images; keep both" in refusal_of(bare, processor)
    moved = listed[0]["media"][0] | {"num_features": 1}
    assert "row 0 has" in (said := refusal_of([listed[0] | {"media": [moved]}], processor))
    assert "tokens that stand for images" in said


def test_runs_that_train_no_images_refuse_the_first_row_of_a_stream_with_some(tmp_path: Path) -> None:
    rows, processor = rows_and_processor()
    said = "rows have images, but processing_class is TokenizersBackend, which reads text alone; pass the model's processor"
    assert said in error_of(rows.to_iterable_dataset(), tmp_path, qwen3_vl(processor), processor.tokenizer)
    assert f"{said} (" in error_of(Rows(list(rows)), tmp_path, qwen3_vl(processor), processor.tokenizer)
    sizes = {"vocab_size": len(processor.tokenizer), "max_position_embeddings": 512}
    said = error_of(Rows(list(rows)), tmp_path, build_any("Qwen3ForCausalLM", "sdpa", **sizes), processor)
    assert "rows have images, but Qwen3ForCausalLM trains rows of text alone; use a class" in said
    # rows of text need no processor, and towers are frozen
    text = rows.filter(lambda row: not row["media"])
    model = qwen3_vl(processor)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer_on(Rows(list(text)), model, processor.tokenizer, str(tmp_path), {}).train()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed and not [name for name in changed if "visual" in name]
