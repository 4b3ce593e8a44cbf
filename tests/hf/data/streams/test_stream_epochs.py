"""The end of a stream is the end of an epoch: events, logs, checkpoints and losses are those of `Trainer` on one process."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.trainers.stock_runs import OFF, EventRecorder, PaddingCollator, fp64_loss
from helpers.trainers.trainer_runs import training_arguments
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback

from hf_longctx import LongContextCallback, LongContextConfig, LongContextTrainer

CASE = ModelCase(promoted=True)
CONFIG: dict[str, Any] = {"tokens_per_rank": 64, "lookahead_batches": 2, "report_steps": False, **OFF}
LENGTHS = [5, 8, 13, 21, 3, 34, 5, 8, 13, 7, 9, 4]
EPOCHS = {"max_steps": 9, "eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"}
# parts of names of values that depend on the clock
TIMES = ("runtime", "per_second", "seconds", "total_flos")


class Stream(torch.utils.data.IterableDataset):
    """Rows in another order in every epoch; counts how often it was begun, and with which epoch. `stage` shifts rows."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.epoch, self.stage, self.begun = rows, 0, 0, list[tuple[int, int]]()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        self.begun.append((self.epoch, self.stage))
        shift = 5 * self.epoch + self.stage
        yield from self.rows[shift % len(self.rows) :] + self.rows[: shift % len(self.rows)]


class SizedStream(Stream):
    """A stream that knows its length."""

    def __len__(self) -> int:
        return len(self.rows)


class StopsAfter(TrainerCallback):
    """Ends the training after some epochs, counting them as users do."""

    def __init__(self, num_epochs: int) -> None:
        self.num_epochs, self.seen = num_epochs, 0

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen += 1
        control.should_training_stop = self.seen == self.num_epochs


class LeavesAt(TrainerCallback):
    """Ends the epoch after one step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step == self.step


class ChangesStage(TrainerCallback):
    """Changes what the stream gives at the beginning of an epoch, as curricula do."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stream.stage = state.global_step


# name -> (class of the stream, number of rows, changed arguments, name of a callback)
RUNS: dict[str, tuple[type[Stream], int, dict[str, Any], str]] = {
    "three epochs": (Stream, 12, {}, ""),
    "a short batch": (Stream, 10, {"max_steps": 7}, ""),
    "a sized stream": (SizedStream, 10, {"max_steps": -1, "num_train_epochs": 2}, ""),
    "a sized stream by steps": (SizedStream, 12, {}, ""),
    "accumulation": (Stream, 12, {"max_steps": 5, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}, ""),
    "stops": (Stream, 12, {}, "stops"),
    "leaves": (Stream, 12, {"max_steps": 6}, "leaves"),
    "curriculum": (Stream, 12, {"max_steps": 6}, "curriculum"),
}


def run(kind: str, folder: str, door: str, num_ranks: int = 1, config: dict[str, Any] | None = None, **train: Any) -> Any:
    """Events, what was logged, the folders, the epochs that were begun, and the weights of one run."""
    stream_class, num_rows, changes, name = RUNS[kind]
    stream = stream_class(random_rows(LENGTHS[:num_rows]))
    settings = {**EPOCHS, "per_device_train_batch_size": 4, **changes}
    settings["per_device_train_batch_size"] //= num_ranks
    model = build_model(CASE)
    recorder = EventRecorder()
    callbacks = {"stops": [StopsAfter(2)], "leaves": [LeavesAt(2)], "curriculum": [ChangesStage(stream)]}.get(name, [])
    given = {
        "model": model,
        "args": training_arguments(folder, **settings),
        "train_dataset": stream,
        "eval_dataset": datasets.Dataset.from_list(random_rows(LENGTHS[:5], seed=7)),
        "callbacks": [*callbacks, recorder],
    }
    planned = LongContextConfig(**{**CONFIG, **(config or {})})
    if door == "trainer":
        trainer: Trainer = LongContextTrainer(**given, longctx_config=planned)
    else:
        model.loss_function = fp64_loss
        trainer = Trainer(**given, data_collator=DataCollatorWithFlattening() if door == "attached" else PaddingCollator())
    if door == "attached":
        LongContextCallback(planned).attach(trainer)
    trainer.train(**train)
    logged = [
        {name: value for name, value in entry.items() if not any(word in name for word in TIMES)}
        for entry in trainer.state.log_history
    ]
    kept = {"loss", "eval_loss", "train_loss", "epoch", "step", "learning_rate"}
    logged = [{name: entry[name] for name in sorted(entry.keys() & kept)} for entry in logged]
    events = [event for event in recorder.events if not event.startswith(("on_prediction", "on_substep"))]
    folders = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return events, logged, folders, stream.begun, weights


def check(found: Any, expected: Any, names_epochs: bool = True) -> None:
    events, logged, folders, _, weights = found
    assert events == expected[0]
    kept = {"epoch"} if not names_epochs else set[str]()
    shown, wanted = ([{name: entry[name] for name in entry.keys() - kept} for entry in each] for each in (logged, expected[1]))
    assert shown == [pytest.approx(entry, rel=1e-9) for entry in wanted]
    assert folders == expected[2]
    assert all(float((weights[name] - expected[4][name]).abs().max()) <= 1e-10 for name in weights)


@pytest.mark.daily("three epochs-attached", "leaves-trainer")
@pytest.mark.parametrize("door", ["trainer", "attached"])
@pytest.mark.parametrize("kind", RUNS)
def test_epochs_of_a_stream_are_those_of_trainer(tmp_path: Path, kind: str, door: str) -> None:
    expected = run(kind, str(tmp_path / "stock"), "stock")
    found = run(kind, str(tmp_path / "ours"), door)
    check(found, expected)
    # each reader begins an epoch after the callbacks of its beginning
    assert found[3] == expected[3]


def on_rank(kind: str, config: dict[str, Any]) -> Any:
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared, src=0)
        found = run(kind, shared[0], "trainer", 2, config)
        dist.barrier()
        return found


@pytest.mark.wide
@pytest.mark.parametrize("kind,config", [("a short batch", {}), ("stops", {"stages": 2}), ("leaves", {"parameters": "sharded"})])
def test_epochs_of_a_stream_on_two_ranks(ranks, tmp_path: Path, kind: str, config: dict[str, Any]) -> None:
    expected = run(kind, str(tmp_path), "stock")
    for events, logged, folders, _, _ in ranks(2).run(on_rank, kind, config):
        assert events == expected[0]
        assert logged == [pytest.approx(entry, rel=1e-9) for entry in expected[1]]
        assert folders == expected[2]


# a checkpoint in the middle of an epoch, and those before and after the end of one
RESUMED = [("steps", 4), ("steps", 3), ("epoch", 3)]


@pytest.mark.daily("SizedStream-10-steps-4")
@pytest.mark.parametrize("strategy,step", RESUMED)
@pytest.mark.parametrize("stream_class,num_rows", [(Stream, 12), (Stream, 10), (SizedStream, 10)])
def test_a_run_resumed_in_any_epoch_goes_on_as_if_it_had_not_stopped(
    tmp_path: Path, monkeypatch, stream_class: type[Stream], num_rows: int, strategy: str, step: int
) -> None:
    saving = {"save_strategy": strategy, "save_steps": 1, "logging_strategy": "steps", "logging_steps": 1, "max_steps": 8}
    monkeypatch.setitem(RUNS, "resumed", (stream_class, num_rows, saving, ""))
    straight = run("resumed", str(tmp_path), "trainer")
    resumed = run("resumed", str(tmp_path), "trainer", resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    events, logged = straight[:2]
    # `Trainer` begins the next epoch if it knows that a checkpoint was written in the last step of one
    if (stream_class, strategy, step) == (SizedStream, "steps", 3):
        logged = [entry for entry in logged if "eval_loss" not in entry or entry["step"] != 3]
    # the history has the first part, too; the end has the mean loss of this part
    assert [each["epoch"] for each in resumed[1]] == [each["epoch"] for each in logged]
    assert resumed[1][:-1] == [pytest.approx(entry, rel=1e-9) for entry in logged[:-1]]
    begin = f"on_step_begin {step}"
    assert resumed[0][resumed[0].index(begin) :] == events[events.index(begin) :]
    if stream_class is Stream and strategy == "steps" and step == 3:
        # the end of the epoch, after which the run stopped, comes again
        assert resumed[0].index("on_epoch_end 3") < resumed[0].index("on_evaluate 3") < resumed[0].index(begin)
    assert all(float((resumed[4][name] - straight[4][name]).abs().max()) <= 1e-12 for name in straight[4])


@pytest.mark.wide
def test_an_epoch_that_a_callback_left_is_not_taken_up_again(tmp_path: Path, monkeypatch) -> None:
    saving = {"save_strategy": "epoch", "max_steps": 6}
    monkeypatch.setitem(RUNS, "resumed", (Stream, 12, saving, "leaves"))
    straight = run("resumed", str(tmp_path), "trainer")
    resumed = run("resumed", str(tmp_path), "trainer", resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed[3] == straight[3][1:] == [(1, 0), (2, 0)]
    assert resumed[1][-2] == pytest.approx(straight[1][-2], rel=1e-9)


def test_a_stream_that_ends_inside_a_step_ends_the_step(tmp_path: Path, monkeypatch) -> None:
    # ten rows in batches of two, of which a step takes two: like steps of four rows, the last of which has two
    halves = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 7}
    monkeypatch.setitem(RUNS, "halves", (Stream, 10, halves, ""))
    found = run("halves", str(tmp_path / "ours"), "trainer")
    check(found, run("a short batch", str(tmp_path / "stock"), "stock"), names_epochs=False)


def test_a_sized_stream_that_gives_more_than_it_says_is_warned_of(tmp_path: Path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(SizedStream, "__len__", lambda stream: 8)
    expected = run("a sized stream", str(tmp_path / "stock"), "stock")
    check(run("a sized stream", str(tmp_path / "ours"), "trainer"), expected)
    assert "gives more than the 8 rows of its length, and the rest of epoch 0 is left out" in caplog.text
