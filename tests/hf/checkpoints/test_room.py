"""Folders that refuse files and disks without room: found at the start, or in the middle of a save without leaving a trace."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.versions import resuming
from helpers.trainers.killed_saves import NUM_STEPS, close, copies_in_memory, run, trainer_of
from helpers.trainers.trainer_runs import make_trainer, start, training_arguments

from hf_longctx.hf.checkpoints import room
from hf_longctx.hf.ranks.stopping import LOCK_NAME
from hf_longctx.journal import JOURNAL

SAVING = {"save_strategy": "steps", "save_steps": 2}


def test_an_output_folder_that_refuses_files_is_named_at_the_start(ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "out", "/proc/out"):
        problems = room.folder_problems(training_arguments(str(folder), **SAVING), None)
        assert len(problems) == 1 and f"output_dir {folder} cannot be written to" in problems[0]
        assert room.folder_problems(training_arguments(str(folder)), None) == []
    for message in ranks(2).run(start, random_rows([5] * 8), {}, {"output_dir": "/proc/out", **SAVING}, None):
        # rank 0 alone writes, and the other rank learns of it
        assert "output_dir /proc/out cannot be written to" in message and "(on rank 0)" in message


Usage = namedtuple("Usage", "total used free")


def test_a_disk_without_room_for_a_checkpoint_is_named_at_the_start(monkeypatch, tmp_path: Path) -> None:
    model = build_model(ModelCase())
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    for changes, expected in (({}, 3 * num_bytes), ({"save_only_model": True}, num_bytes), ({"optim": "sgd"}, num_bytes)):
        args = training_arguments(str(tmp_path), **SAVING, **changes)
        for free, count in ((expected, 0), (expected - 1, 1)):
            monkeypatch.setattr(room, "disk_usage", lambda _, free=free: Usage(0, 0, free))
            problems = room.folder_problems(args, model)
            assert len(problems) == count
            assert all("GiB free, but a checkpoint takes at least" in problem for problem in problems)


# arguments, checkpoints that are there already -> checkpoints for which there must be room
COUNTS: list[tuple[dict[str, Any], int, int]] = [
    ({"save_total_limit": 3}, 0, 4),
    ({"save_total_limit": 3}, 2, 2),
    ({"save_total_limit": 3}, 7, 1),
    ({"save_total_limit": 1, "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}, 0, 3),
    # fewer saves than the limit
    ({"save_total_limit": 30}, 0, 10),
    ({}, 0, 10),
    ({"save_steps": 0.3}, 0, 4),
    ({"save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2.5}, 0, 3),
    ({"save_strategy": "epoch"}, 0, 1),
    # a run that goes on
    ({}, 8, 2),
    # never
    ({"save_steps": 0}, 0, 1),
]


@pytest.mark.parametrize("changes,num_there,count", COUNTS)
def test_a_disk_without_room_for_all_that_will_stand_there_is_told(
    monkeypatch, tmp_path: Path, caplog, changes: dict[str, Any], num_there: int, count: int
) -> None:
    model = build_model(ModelCase())
    for step in range(num_there):
        (tmp_path / f"checkpoint-{step}").mkdir()
    args = training_arguments(str(tmp_path), **{**SAVING, **changes})
    needed = count * room.checkpoint_bytes(args, model)
    for free, is_told in ((needed, False), (needed - 1, count > 1)):
        caplog.clear()
        monkeypatch.setattr(room, "disk_usage", lambda _, free=free: Usage(0, 0, free))
        assert len(room.folder_problems(args, model)) == (free < needed and count == 1)
        assert (f"but {count} more checkpoints will stand there at once" in caplog.text) == is_told


def test_the_bytes_of_a_checkpoint_are_those_that_it_takes(ranks, tmp_path: Path) -> None:
    ranks(1).run(run, "replicated", str(tmp_path), None, None, {"per_device_train_batch_size": 8})
    model = build_model(ModelCase(promoted=True))
    written = sum(path.stat().st_size for path in (tmp_path / "checkpoint-6").glob("*") if path.suffix in (".pt", ".safetensors"))
    estimated = room.checkpoint_bytes(training_arguments(str(tmp_path)), model)
    # files have headers besides the numbers, a large share of such a small model's
    assert 0.5 * written < estimated < written


BEHIND = ", behind training"
# kind -> (rank, file that cannot be written in the save of step 4)
OBSTACLES = {
    "replicated": [(0, "optimizer.pt"), (1, "rng_state_1.pth"), (0, "trainer_state.json")],
    "sharded": [(0, "model.safetensors"), (1, "optimizer/rank-1.safetensors"), (0, "scheduler.pt")],
    "staged": [(1, "stage-1.partial"), (0, "longctx_data.json")],
    "stream": [(0, "longctx_checkpoint.json.tmp")],
    "callback": [(0, "optimizer.pt")],
    # in host memory
    f"sharded{BEHIND}": [(1, "optimizer/rank-1.safetensors")],
}


def fail(kind: str, folder: str, victim: int, name: str) -> tuple[str, list[str]]:
    """The error of a run that cannot write one file of its second checkpoint, and what is in the output folder then."""
    trainer = trainer_of(kind.removesuffix(BEHIND), folder, {"async_save": kind.endswith(BEHIND)})
    original = trainer.save_model

    def save_model(output_dir: str, *args: Any, **kwargs: Any) -> None:
        if trainer.state.global_step == 4 and trainer.args.process_index == victim:
            # a folder in the file's place, or a file in the folder's
            Path(output_dir, name if name.endswith(".partial") else f"{name}/occupied").parent.mkdir(parents=True, exist_ok=True)
            if name.endswith(".partial"):
                Path(output_dir, name).write_text("")
        original(output_dir, *args, **kwargs)

    trainer.save_model = save_model
    try:
        trainer.train()
    except Exception as error:
        close(trainer)
        # rank 0 may still hold the lock
        names = {path.name for path in Path(folder).iterdir()} - {"runs", LOCK_NAME, JOURNAL}
        return f"{type(error).__name__}: {error}", sorted(names)
    return "", []


@pytest.mark.daily("sharded, behind training-1-optimizer/rank-1.safetensors")
@resuming
@pytest.mark.parametrize("kind,victim,name", [(kind, *obstacle) for kind in OBSTACLES for obstacle in OBSTACLES[kind]])
def test_a_save_that_fails_ends_all_ranks_and_leaves_no_trace(ranks, tmp_path: Path, kind: str, victim: int, name: str) -> None:
    for message, names in ranks(2).run(fail, kind, str(tmp_path), victim, name):
        assert "RuntimeError: checkpoint-4 could not be written" in message and f"rank {victim}: " in message
        assert "resume_from_checkpoint=True" in message and ("in host memory" in message) == kind.endswith(BEHIND)
        assert names == ["checkpoint-2"]
    assert not copies_in_memory()
    for first, losses in ranks(2).run(run, kind.removesuffix(BEHIND), str(tmp_path), True):
        assert first == 2 and len(losses) == NUM_STEPS - 2


def test_trainers_that_save_nothing_need_no_folder_to_write_to(tmp_path: Path) -> None:
    make_trainer(ModelCase(), random_rows([5] * 8), str(tmp_path)).longctx_run.close()
