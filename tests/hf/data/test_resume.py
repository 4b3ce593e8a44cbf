"""The data record of a checkpoint: a run that would repeat or skip samples is refused, and the setting is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase
from helpers.trainers.trainer_runs import make_trainer, training_arguments
from torch.utils.data import DataLoader
from transformers import TrainerState, TrainingArguments

from hf_longctx import LongContextConfig
from hf_longctx.hf.checkpoints.manifest import write_json
from hf_longctx.hf.data.resume import Anchor, Cursor, DataRecorder, Place, check_resumed, data_settings, plans_done


def recorder(folder: Path, train_dataset: str, place: Place | None = None, **arguments: Any) -> DataRecorder:
    args = training_arguments(str(folder), **arguments)
    made = DataRecorder()
    made.describe(data_settings(args, LongContextConfig(), train_dataset, 3, None))
    made.follow(lambda leaves_epoch: place)
    return made


def save(folder: Path, step: int, made: DataRecorder) -> Path:
    """Writes a record as the trainer does, and returns the checkpoint's folder."""
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir()
    write_json(checkpoint / "longctx_data.json", made.record(step))
    return checkpoint


def test_a_cursor_survives_the_checkpoint(tmp_path: Path) -> None:
    anchored = Cursor(2, 17, 1, "abc", Anchor(1, 3, "def", '{"row": 3}'))
    place = Place(1, (Cursor(3), anchored))
    checkpoint = save(tmp_path, 4, recorder(tmp_path, "stream", place))
    again = recorder(tmp_path, "stream")
    again.resume(checkpoint)
    assert again.problems() == [] and again.start(2) == place
    record = json.loads((checkpoint / "longctx_data.json").read_text())
    # a record of a version that had one reader
    write_json(checkpoint / "longctx_data.json", {**record, "cursor": {"epoch": 2, "row": 17, "piece": 1, "digest": "abc"}})
    assert again.problems() == [] and again.start(1) == Place(0, (Cursor(2, 17, 1, "abc"),), epochs_ended=2)
    for damaged in (
        {"epoch": "2"},
        {"turn": 2, "readers": [{}, {}]},
        {"turn": 0, "readers": []},
        [],
        {"turn": 0, "readers": [3]},
    ):
        write_json(checkpoint / "longctx_data.json", {**record, "cursor": damaged})
        assert "has no place in a stream" in again.problems()[0]
    assert not list(checkpoint.glob("*.tmp"))


def test_a_run_that_starts_or_skips_nothing_has_no_cursor_and_no_problems(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 4, recorder(tmp_path, "stream", Place(0, (Cursor(2, 17),))))
    for where, starts_anew in ((None, False), (checkpoint, True)):
        again = recorder(tmp_path, "another")
        again.resume(where, starts_anew)
        assert again.problems() == [] and again.start(2) == Place.begin(2)


def test_a_checkpoint_of_an_older_version_is_said_and_a_stream_refused(tmp_path: Path, caplog: Any) -> None:
    checkpoint = save(tmp_path, 4, recorder(tmp_path, "digest"))
    (checkpoint / "longctx_data.json").unlink()
    map_style, stream = recorder(tmp_path, "digest"), recorder(tmp_path, "stream")
    for made in (map_style, stream):
        made.resume(checkpoint)
    assert map_style.problems() == [] and "has no longctx_data.json" in caplog.text
    (problem,) = stream.problems()
    assert "the stream cannot go on; set ignore_data_skip=True" in problem


def test_the_record_is_readable(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 4, recorder(tmp_path, "digest", per_device_train_batch_size=4))
    record = json.loads((checkpoint / "longctx_data.json").read_text())
    assert record["cursor"] is None
    assert record["settings"]["sequences_per_step"] == 4 and record["settings"]["shuffle_seed"] == 3


def run_rows(
    rows: list[dict[str, list[int]]], folder: str, config: dict[str, Any], arguments: dict[str, Any], resume: int | None = None
) -> None:
    trainer = make_trainer(ModelCase(promoted=True), rows, folder, config, {"max_steps": 7, **arguments})
    trainer.train(resume_from_checkpoint=str(Path(folder, f"checkpoint-{resume}")) if resume else None)


def map_style_then_changed(folder: str) -> list[str]:
    """Messages with which a run over a map-style dataset refuses to resume with other data or settings."""
    rows = random_rows([5] * 16)
    config = {"tokens_per_rank": 64}
    run_rows(rows, folder, config, {"max_steps": 3, "save_strategy": "steps", "save_steps": 3})
    messages = []
    for data, changes in [
        (rows, {"per_device_train_batch_size": 2}),
        (rows, {"data_seed": 9}),
        (rows[::-1], {}),
        (rows, {"dataloader_drop_last": True}),
    ]:
        try:
            run_rows(data, folder, config, changes, resume=3)
        except ValueError as error:
            messages.append(str(error))
    run_rows(rows[::-1], folder, config, {"ignore_data_skip": True}, resume=3)
    return messages


@pytest.mark.wide
def test_a_map_style_run_with_other_samples_is_not_resumed(ranks, tmp_path: Path) -> None:
    (messages,) = ranks(1).run(map_style_then_changed, str(tmp_path))
    names = ["sequences_per_step was 8", "shuffle_seed was 3", "train_dataset was ", "dataloader_drop_last was False"]
    assert len(messages) == len(names)
    assert all(name in message and "repeated or skipped" in message for name, message in zip(names, messages, strict=True))


def arguments(folder: Path, accumulation: int = 1, **changes: Any) -> TrainingArguments:
    settings = {"gradient_accumulation_steps": accumulation, "report_to": "none", "use_cpu": True, **changes}
    return TrainingArguments(output_dir=str(folder), **settings)


@pytest.mark.parametrize(
    "steps,plans_per_epoch,accumulation,expected", [(7, 5, 1, 7), (4, 10, 2, 8), (4, 5, 2, 7), (3, 5, 2, 5), (2, 3, 8, 6)]
)
def test_optimizer_steps_take_as_many_plans_as_the_trainer_does(
    tmp_path, steps: int, plans_per_epoch: int, accumulation: int, expected: int
) -> None:
    assert plans_done(steps, plans_per_epoch, arguments(tmp_path, accumulation)) == expected


def batches(count: int) -> Any:
    return DataLoader(list(range(count)), batch_size=1)  # type: ignore[arg-type]


def test_a_run_goes_on_where_it_stopped_with_any_accumulation(tmp_path) -> None:
    # 7 steps at 5 steps per epoch; with half the batch size and two batches per step, these are 14 batches at 10 per epoch
    state = TrainerState(global_step=7, epoch=1.4)
    check_resumed(arguments(tmp_path), state, batches(5))
    check_resumed(arguments(tmp_path, 2), state, batches(10))
    check_resumed(arguments(tmp_path), TrainerState(), batches(3))


def test_other_steps_per_epoch_are_refused_unless_data_is_not_skipped(tmp_path) -> None:
    state = TrainerState(global_step=7, epoch=1.4)
    with pytest.raises(ValueError, match=r"step 7 and epoch 1.4000, but with the present batch size step 7 is epoch 0.7000"):
        check_resumed(arguments(tmp_path), state, batches(10))
    check_resumed(arguments(tmp_path, ignore_data_skip=True), state, batches(10))


def test_how_a_step_is_divided_matters_only_where_plans_end_an_epoch(tmp_path: Path) -> None:
    whole = {"per_device_train_batch_size": 4}
    halves = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    for number, (train_dataset, arguments, is_refused) in enumerate(
        [("digest", {}, False), ("digest", {"dataloader_drop_last": True}, True), ("stream", {}, True)]
    ):
        checkpoint = save(tmp_path, number, recorder(tmp_path, train_dataset, Place.begin(1), **whole, **arguments))
        for division, is_other in ((whole, False), (halves, True)):
            again = recorder(tmp_path, train_dataset, **division, **arguments)
            again.resume(checkpoint)
            assert ["sequences_per_plan was 4" in problem for problem in again.problems()] == [True] * (is_other and is_refused)


def test_a_stock_loader_without_a_length_is_not_resumed(tmp_path) -> None:
    state, stream = TrainerState(global_step=7, epoch=0.0), iter(())
    with pytest.raises(ValueError, match=r"step 7 of a dataset without a length.*attach\(trainer\), which records it"):
        check_resumed(arguments(tmp_path), state, stream)
    check_resumed(arguments(tmp_path, ignore_data_skip=True), state, stream)
    check_resumed(arguments(tmp_path), TrainerState(), stream)


DAMAGED = ["[1]", "{}", '{"settings": {}}', "{", '{"settings": 3, "cursor": null}']
CURSORS = ["7", '{"row": -1}', '{"row": 1.5}', '{"rows": 1}', '{"digest": 3}']


@pytest.mark.parametrize("text", [*DAMAGED, *(f'{{"settings": {{}}, "cursor": {cursor}}}' for cursor in CURSORS)])
@pytest.mark.parametrize("data", ["stream", "digest"])
def test_a_record_that_is_none_is_refused(tmp_path, data: str, text: str) -> None:
    checkpoint = save(tmp_path, 4, recorder(tmp_path, data))
    (checkpoint / "longctx_data.json").write_text(text)
    again = recorder(tmp_path, data)
    again.resume(checkpoint)
    (problem,) = again.problems()
    assert "longctx_data.json" in problem and "resume_partial=True" in problem
    again.resume(checkpoint, starts_anew=True)
    assert again.problems() == [] and again.start(2) == Place.begin(2)
