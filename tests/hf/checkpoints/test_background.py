"""Checkpoints written behind training: equal to those written while it stands still, and as safe."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase
from helpers.models.versions import resuming
from helpers.ranks.forked import FORKED
from helpers.trainers.killed_saves import (
    KINDS,
    NUM_STEPS,
    SAVE_STEPS,
    close,
    copies_in_memory,
    run,
    trainer_of,
    whole_checkpoints,
)
from helpers.trainers.stock_runs import make_stock_trainer
from helpers.trainers.trainer_runs import LossRecorder, make_trainer, training_arguments
from transformers import TrainerCallback

from hf_longctx import LongContextCallback, LongContextConfig, LongContextTrainer
from hf_longctx.hf.checkpoints import background, room
from hf_longctx.hf.checkpoints.background import MemoryCopy, remove_left_copies
from hf_longctx.hf.checkpoints.manifest import read_manifest

# written with the name of the folder, with times or with random names
OWN_FILES = {"training_args.bin", "trainer_state.json", "optimizer/index.json"}
# plans that follow measured times may differ between runs
SAME_PLANS = {"calibration_steps": 0}
STEPS = range(SAVE_STEPS, NUM_STEPS + 1, SAVE_STEPS)


class InView(TrainerCallback):
    """Records which checkpoints are in view when a step ends, and keeps the writing thread waiting until one has ended."""

    def __init__(self, folder: str) -> None:
        self.folder, self.seen, self.num_ended = Path(folder), {}, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen[state.global_step] = sorted(path.name for path in self.folder.glob("checkpoint-*"))
        self.num_ended = state.global_step

    def hold_back(self, original: Any) -> Any:
        def write(copy: MemoryCopy, folder: Path) -> None:
            step = int(folder.name.removeprefix("checkpoint-"))
            while self.num_ended <= step < NUM_STEPS:
                time.sleep(0.005)
            original(copy, folder)

        return write


def run_behind(kind: str, folder: str, resume: Any = None) -> tuple[list[float], dict[int, list[str]]]:
    """Trains with checkpoints that are written when the weights have changed; returns losses and checkpoints in view by step."""
    trainer = trainer_of(kind, folder, {"async_save": True, **SAME_PLANS})
    recorder, view = LossRecorder(), InView(folder)
    recorder.attach(trainer)
    trainer.add_callback(view)
    original = MemoryCopy.write
    MemoryCopy.write = view.hold_back(original)
    try:
        trainer.train(resume_from_checkpoint=resume)
    finally:
        MemoryCopy.write = original
        close(trainer)
    return recorder.losses, view.seen


@pytest.mark.daily("staged adapters")
@resuming
@pytest.mark.parametrize("kind", [*(kind for kind in KINDS if kind != "callback"), "staged adapters"])
def test_files_written_behind_training_are_those_of_the_save_step(ranks, tmp_path: Path, kind: str) -> None:
    plain, behind = tmp_path / "plain", tmp_path / "behind"
    straight = [losses for _, losses in ranks(2).run(run, kind, str(plain), None, SAME_PLANS)]
    for (losses, seen), expected in zip(ranks(2).run(run_behind, kind, str(behind)), straight, strict=True):
        assert losses == expected
        # the thread waits for the end of step 3, and the save after step 4 for the thread
        assert seen[3] == [] and seen[5] == ["checkpoint-2"]
    for step in STEPS:
        sums = [read_manifest(folder / f"checkpoint-{step}") for folder in (plain, behind)]
        assert sums[0] is not None and sums[1] is not None and sums[0].contents == sums[1].contents
        assert sums[0].files.keys() == sums[1].files.keys()
        assert [name for name in sums[0].files if name not in OWN_FILES and sums[0].files[name] != sums[1].files[name]] == []
        states = [json.loads((folder / f"checkpoint-{step}/trainer_state.json").read_text()) for folder in (plain, behind)]
        assert len({(state["global_step"], state["epoch"], len(state["log_history"])) for state in states}) == 1
    assert not list(behind.glob(".checkpoint*")) and not copies_in_memory()
    for losses, _ in ranks(2).run(run_behind, kind, str(behind), str(behind / "checkpoint-4")):
        assert losses == straight[0][4:]


# kind -> (rank, file that finds the disk full)
FULL = {"replicated": (0, "optimizer.pt"), "sharded": (1, "optimizer/rank-1.safetensors")}


def fail_behind(kind: str, folder: str, victim: int, name: str) -> tuple[str, int, list[str]]:
    """Error of a run whose thread finds the disk full at a file of its second checkpoint; the step; the output folder then."""
    trainer = trainer_of(kind, folder, {"async_save": True})
    original = MemoryCopy.write

    def write(copy: MemoryCopy, inside: Path) -> None:
        if trainer.args.process_index == victim and inside.name == "checkpoint-4":
            (inside / name).parent.mkdir(exist_ok=True)
            (inside / name).symlink_to("/dev/full")
        original(copy, inside)

    MemoryCopy.write = write
    try:
        trainer.train()
    except RuntimeError as error:
        names = sorted(path.name for path in Path(folder).iterdir() if "checkpoint" in path.name)
        return str(error), trainer.state.global_step, names
    finally:
        MemoryCopy.write = original
        trainer.longctx_run.close()
    return "", 0, []


@pytest.mark.daily("replicated")
@resuming
@pytest.mark.parametrize("kind", FULL)
def test_a_full_disk_behind_training_ends_all_ranks_in_a_later_step(ranks, tmp_path: Path, kind: str) -> None:
    victim, name = FULL[kind]
    for message, step, names in ranks(2).run(fail_behind, kind, str(tmp_path), victim, name):
        assert message.startswith("the checkpoint of step 4, written behind training: ") and 4 <= step <= NUM_STEPS
        assert "No space left on device" in message and f"rank {victim}: " in message and f"checkpoint-4/{name}" in message
        assert names == ["checkpoint-2"]
    assert not copies_in_memory()
    for first, losses in ranks(2).run(run, kind, str(tmp_path), True, {"async_save": True}):
        assert first == 2 and len(losses) == NUM_STEPS - 2


class Stops(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            raise KeyError("a bug in step 3")


@pytest.mark.wide
def test_a_checkpoint_in_flight_survives_the_error_that_ends_its_training(tmp_path: Path) -> None:
    rows = random_rows([5] * 32)
    arguments = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(ModelCase(), rows, str(tmp_path), {"async_save": True}, arguments, callbacks=[Stops()])
    original = MemoryCopy.write

    def late(copy: MemoryCopy, folder: Path) -> None:
        while trainer.state.global_step < 3:
            time.sleep(0.005)
        original(copy, folder)

    MemoryCopy.write = late
    try:
        with pytest.raises(KeyError, match="a bug in step 3"):
            trainer.train()
    finally:
        MemoryCopy.write = original
        trainer.longctx_run.close()
    assert whole_checkpoints(tmp_path) == ["checkpoint-2"]


def hold_memory(connection: Any) -> None:
    copy = MemoryCopy("checkpoint-1")
    (copy.folder / "weights").write_bytes(b"0" * 100)
    connection.send(copy.root)
    time.sleep(60)


def test_memory_of_a_rank_that_was_killed_is_freed_at_the_next_start() -> None:
    ours, theirs = FORKED.Pipe()
    process = FORKED.Process(target=hold_memory, args=(theirs,))
    process.start()
    root = ours.recv()
    remove_left_copies()
    assert (root / "checkpoint-1/weights").exists()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    remove_left_copies()
    assert not root.exists()


def test_a_job_that_starts_just_now_does_not_take_the_memory_of_a_copy(monkeypatch) -> None:
    make_folder = tempfile.mkdtemp
    cleanings = iter([True])

    def make_and_be_seen(**options: Any) -> str:
        folder = make_folder(**options)
        if next(cleanings, False):
            remove_left_copies()
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_be_seen)
    copy = MemoryCopy("checkpoint-1")
    assert next(cleanings, None) is None
    remove_left_copies()
    assert copy.folder.is_dir()
    copy.drop()


class AddsFile(TrainerCallback):
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...


class SavesMore(LongContextTrainer):
    def _save_checkpoint(self, *args: Any) -> None:
        super()._save_checkpoint(*args)


def test_what_would_see_a_later_step_is_refused(tmp_path: Path, monkeypatch) -> None:
    rows, saving = random_rows([5] * 16), {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    behind, folder = LongContextConfig(async_save=True, report_steps=False), str(tmp_path)
    trainer = make_trainer(ModelCase(), rows, folder, {"async_save": True}, saving, callbacks=[AddsFile()])
    with pytest.raises(ValueError, match=r"AddsFile\.on_save would be called with the model of a later step"):
        trainer.train()
    trainer.longctx_run.close()
    with pytest.raises(ValueError, match=r"SavesMore\._save_checkpoint would end before the checkpoint is in its folder"):
        SavesMore(trainer.model, training_arguments(folder), train_dataset=trainer.train_dataset, longctx_config=behind)
    with pytest.raises(ValueError, match="hub_strategy='every_save'"):
        make_trainer(ModelCase(), rows, folder, {"async_save": True}, {"push_to_hub": True, "hub_strategy": "every_save"})
    stock = make_stock_trainer(ModelCase(), rows, folder, saving, callbacks=[LongContextCallback(behind)])
    with pytest.raises(ValueError, match=r"async_save=True needs the exchange.*attach\(trainer\)"):
        stock.train()
    monkeypatch.setattr(room, "disk_usage", lambda _: namedtuple("Usage", "total used free")(0, 0, 10))
    with pytest.raises(ValueError, match=r"/dev/shm has room for 0.00 GiB; give it more \(docker: --shm-size"):
        make_trainer(ModelCase(), rows, folder, {"async_save": True})
    monkeypatch.setattr(background, "MEMORY_FOLDER", tmp_path / "nowhere")
    monkeypatch.setattr(room, "MEMORY_FOLDER", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="mount a tmpfs there"):
        make_trainer(ModelCase(), rows, folder, {"async_save": True})


class Signals(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_stop_by_a_signal_waits_for_its_checkpoint(tmp_path: Path) -> None:
    arguments = {"max_steps": 4, "per_device_train_batch_size": 8}
    trainer = make_trainer(ModelCase(), random_rows([5] * 32), str(tmp_path), {"async_save": True}, arguments)
    trainer.add_callback(Signals())
    trainer.train()
    trainer.longctx_run.close()
    assert trainer.stopped_by == "SIGTERM" and whole_checkpoints(tmp_path) == ["checkpoint-2"]


@pytest.mark.parametrize("is_written", [True, False])
def test_memory_is_freed_although_a_forked_worker_holds_the_files(tmp_path: Path, is_written: bool) -> None:
    copy = MemoryCopy("checkpoint-2")
    (copy.folder / "model.safetensors").write_bytes(b"weights")
    copy.hold()
    (file,) = copy._files.values()
    held = os.dup(file.fileno())
    if is_written:
        copy.write(tmp_path)
        assert (tmp_path / "model.safetensors").read_bytes() == b"weights"
    copy.drop()
    assert os.fstat(held).st_size == 0
    os.close(held)
