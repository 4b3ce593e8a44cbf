"""Small trainings that save every other step, and places in a save where a rank is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase
from helpers.trainers.stock_runs import make_stock_trainer
from helpers.trainers.trainer_runs import LossRecorder, make_trainer
from transformers import TrainerState

from hf_longctx import LongContextCallback, LongContextConfig
from hf_longctx.hf.checkpoints import staging
from hf_longctx.hf.trainer import checkpoint_mixin

NUM_STEPS, SAVE_STEPS = 6, 2
# how the model and the data live -> settings
KINDS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "sharded": {"parameters": "sharded"},
    "staged": {"stages": 2},
    "stream": {"lookahead_batches": 2},
}
LIMIT = {"save_total_limit": 1}


def trainer_of(kind: str, folder: str, config: dict[str, Any] | None = None, **arguments: Any) -> Any:
    rows = random_rows([30, 9, 12, 5, 7, 8, 11, 10] * 5)
    data: Any = datasets.Dataset.from_list(rows).to_iterable_dataset() if kind == "stream" else rows
    # forked programs have no process group yet, by which `make_trainer` would divide
    saving = {
        "per_device_train_batch_size": 4,
        "max_steps": NUM_STEPS,
        "save_strategy": "steps",
        "save_steps": SAVE_STEPS,
        "logging_steps": 1,
        **arguments,
    }
    settings = {"tokens_per_rank": 64, "collective_timeout_s": 6.0, **KINDS[kind], **(config or {})}
    return make_trainer(ModelCase(promoted=True), data, folder, settings, saving)


def run(
    kind: str, folder: str, resume: Any = None, config: dict[str, Any] | None = None, arguments: dict[str, Any] | None = None
) -> tuple[int, list[float]]:
    """Trains to the end on this rank; returns the step from which it went on, and the losses from there."""
    trainer = trainer_of(kind, folder, config, **(arguments or {}))
    recorder = LossRecorder()
    recorder.attach(trainer)
    trainer.train(resume_from_checkpoint=resume)
    trainer.longctx_run.close()
    return NUM_STEPS - len(recorder.losses), recorder.losses


def refusal(kind: str, folder: str, resume: Any, config: dict[str, Any] | None = None) -> str:
    """The message with which a run refuses to resume."""
    try:
        run(kind, folder, resume, config)
    except ValueError as error:
        return str(error)
    return ""


def plant(trainer: Any, place: str, step: int) -> None:
    """Kills this rank at a place of the save after `step`; the name says which rank and where."""
    rank, is_now = int(os.environ["RANK"]), lambda: trainer.state.global_step == step

    def before(owner: Any, name: str, victim: int, act: Callable[..., None] = lambda *_: None) -> None:
        original = getattr(owner, name)

        def dying(*args: Any, **kwargs: Any) -> Any:
            if rank == victim and is_now():
                act(*args)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(owner, name, dying)

    def half_written(folder: str, *_: Any) -> None:
        Path(folder).mkdir(exist_ok=True)
        Path(folder, "model.safetensors").write_bytes(b"half")

    def half_deleted(folder: Path, *_: Any) -> None:
        next(Path(folder).glob("*.safetensors")).unlink()

    match place:
        case "weights":
            before(trainer, "_save", 0, half_written)
        case "optimizer":
            before(trainer, "_save_optimizer_and_scheduler", 0)
        case "rng of rank 1":
            before(trainer, "_save_rng_state", 1)
        case "state":
            before(TrainerState, "save_to_json", 0)
        case "sums of rank 1":
            before(staging, "file_sum", 1)
        case "manifest":
            before(staging, "write_manifest", 0)
        case "rename":
            before(staging, "publish", 0)
        case "flush":
            # the folder has its name, and the hidden one is still there
            before(staging, "flush_folder", 0)
        case "rotation":
            before(checkpoint_mixin, "rotate", 0)
        case "deletion":
            original = staging.shutil.rmtree

            def rmtree(path: Any, *args: Any, **kwargs: Any) -> None:
                if rank == 0 and is_now() and Path(path).name.endswith(".deleted") and Path(path).exists():
                    half_deleted(Path(path))
                    os.kill(os.getpid(), signal.SIGKILL)
                original(path, *args, **kwargs)

            staging.shutil.rmtree = rmtree
        case _:
            raise ValueError(place)


def whole_checkpoints(folder: Path) -> list[str]:
    """Names of the checkpoints in view that are complete."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and staging.is_whole(path))


def stock_run(folder: str, resume: str | None, takes_partial: bool) -> str:
    """Trains a stock trainer under the callback alone; returns the message with which it refuses to resume."""
    rows = random_rows([30, 9, 12, 5, 7, 8, 11, 10] * 5)
    saving = {"max_steps": NUM_STEPS, "save_strategy": "steps", "save_steps": SAVE_STEPS}
    callback = LongContextCallback(LongContextConfig(resume_partial=takes_partial, report_steps=False))
    trainer = make_stock_trainer(ModelCase(), rows, folder, saving, callbacks=[callback])
    try:
        trainer.train(resume_from_checkpoint=resume)
    except ValueError as error:
        callback.detach()
        return str(error)
    return ""
