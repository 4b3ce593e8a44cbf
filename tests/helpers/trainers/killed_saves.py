"""Small trainings that save every other step, and places in a save where a rank is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import psutil
import torch
import torch.distributed as dist
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase
from helpers.trainers.stock_runs import LossTrainer, make_stock_trainer, quiet_config
from helpers.trainers.trainer_runs import LossRecorder, make_trainer
from transformers import TrainerState

from hf_longctx import LongContextCallback, LongContextTrainer
from hf_longctx.hf.checkpoints import staging, weights
from hf_longctx.hf.checkpoints.background import MEMORY_FOLDER, MemoryCopy
from hf_longctx.hf.run import saver

NUM_STEPS, SAVE_STEPS = 6, 2
# how the model and the data live -> settings; with " adapters" behind it, adapters alone are trained
KINDS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "sharded": {"parameters": "sharded"},
    "staged": {"stages": 2},
    "stream": {"lookahead_batches": 2, "stream_readers": 3},
    # a stock trainer with the callback alone, or attached
    "callback": {},
    "attached": {"stages": 2},
}
LIMIT = {"save_total_limit": 1}


def copies_in_memory() -> list[Path]:
    """Copies of checkpoints in host memory that processes of this test made, or processes that have ended."""
    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    made_by = {root: int(root.name.split("-")[2]) for root in MEMORY_FOLDER.glob("longctx-checkpoint-*")}
    return [root for root, maker in made_by.items() if maker in own or not psutil.pid_exists(maker)]


def trainer_of(kind: str, folder: str, config: dict[str, Any] | None = None, **arguments: Any) -> Any:
    rows = random_rows([30, 9, 12, 5, 7, 8, 11, 10] * 5)
    data: Any = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3) if kind == "stream" else rows
    # forked programs have no process group yet, by which `make_trainer` would divide
    saving = {
        "per_device_train_batch_size": 4,
        "max_steps": NUM_STEPS,
        "save_strategy": "steps",
        "save_steps": SAVE_STEPS,
        "logging_steps": 1,
        **arguments,
    }
    placed = KINDS[kind.removesuffix(" adapters")]
    settings = {"tokens_per_rank": 64, "collective_timeout_s": 6.0, **placed, **(config or {})}
    if kind in ("callback", "attached"):
        callback = LongContextCallback(quiet_config(**settings))
        if kind == "callback":
            return make_stock_trainer(ModelCase(promoted=True), rows, folder, saving, LossTrainer, callbacks=[callback])
        trainer = make_stock_trainer(ModelCase(promoted=True), rows, folder, saving)
        callback.attach(trainer)
        return trainer
    lora = (("r", 2), ("target_modules", "all-linear")) if kind.endswith(" adapters") else ()
    return make_trainer(ModelCase(promoted=True, lora=lora), data, folder, settings, saving)


def run(
    kind: str, folder: str, resume: Any = None, config: dict[str, Any] | None = None, arguments: dict[str, Any] | None = None
) -> tuple[int, list[float]]:
    """Trains to the end on this rank; returns the step from which it went on, and the losses from there."""
    trainer = trainer_of(kind, folder, config, **(arguments or {}))
    if kind == "callback":
        trainer.train(resume_from_checkpoint=resume)
        # every rank has the loss of its own tokens
        losses = torch.tensor(getattr(trainer, "losses", []), dtype=torch.float64)
        dist.all_reduce(losses)
        return NUM_STEPS - len(losses), losses.tolist()
    recorder = LossRecorder()
    recorder.attach(trainer)
    trainer.train(resume_from_checkpoint=resume)
    close(trainer)
    return NUM_STEPS - len(recorder.losses), recorder.losses


def close(trainer: Any) -> None:
    """Ends the run of a trainer, unless its callback has done so."""
    if isinstance(trainer, LongContextTrainer):
        trainer.longctx_run.close()


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
        case "second file":
            # sharded weights are written file by file
            weights.FILE_BYTES = 20_000
            write = weights._write

            def dying_in_second(tensors: Any, file: Path) -> None:
                write(tensors, file)
                if is_now() and file.name == "model-00002.safetensors":
                    file.write_bytes(file.read_bytes()[:-100])
                    os.kill(os.getpid(), signal.SIGKILL)

            weights._write = dying_in_second
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
        case "writing behind" | "rename behind":
            # in the thread, when the training is in a later step
            owner, name, number = (MemoryCopy, "write", 1) if place == "writing behind" else (staging, "publish", 1)
            original = getattr(owner, name)

            def dying(*args: Any) -> None:
                folder = Path(args[number])
                if rank == 0 and folder.name == f"checkpoint-{step}":
                    if owner is MemoryCopy:
                        half_written(str(folder))
                    while trainer.state.global_step == step:
                        time.sleep(0.01)
                    os.kill(os.getpid(), signal.SIGKILL)
                original(*args)

            setattr(owner, name, dying)
        case "rotation":
            before(saver, "rotate", 0)
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
