"""The callback alone keeps a stock trainer's checkpoints, folder and ranks as safe as those of LongContextTrainer."""

from __future__ import annotations

import multiprocessing
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase
from helpers.models.versions import resuming
from helpers.trainers.stock_runs import LossTrainer, make_stock_trainer, quiet_config
from helpers.trainers.used_folder import used_by_another_job
from transformers import TrainerCallback

from hf_longctx import LongContextCallback

ROWS = random_rows([30, 9, 12, 5, 7, 8, 11, 10] * 3)
# epochs have three steps
ARGUMENTS = {"max_steps": 6, "save_strategy": "epoch", "save_total_limit": 1}
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


@dataclass
class Outcome:
    """Results of a training of a stock trainer under the callback alone; `message`: why it raised."""

    losses: list[float]
    steps: int
    message: str
    stopped_by: str
    checkpoints: list[str]
    hidden: list[str]


def train(
    folder: str,
    resume: Any = None,
    extra: tuple[TrainerCallback, ...] = (),
    late: bool = False,
    partial: bool = False,
    **changes: Any,
) -> Outcome:
    """Trains a stock trainer on this rank; `late`: the callback is added to the trainer when that is built already."""
    callback = LongContextCallback(quiet_config(tokens_per_rank=64, resume_partial=partial))
    callbacks = [*extra, *([] if late else [callback])]
    arguments = {**ARGUMENTS, **changes}
    trainer = make_stock_trainer(ModelCase(promoted=True), ROWS, folder, arguments, LossTrainer, callbacks=callbacks)
    handlers = [signal.getsignal(each) for each in SIGNALS]
    if late:
        trainer.add_callback(callback)
    message = ""
    try:
        trainer.train(resume_from_checkpoint=resume)
    except (ValueError, RuntimeError) as error:
        message = str(error)
        if late:
            callback.detach()
    assert type(trainer) is LossTrainer and [signal.getsignal(each) for each in SIGNALS] == handlers
    names = sorted(path.name for path in Path(folder).iterdir()) if Path(folder).exists() else []
    return Outcome(
        losses=getattr(trainer, "losses", []),
        steps=trainer.state.global_step,
        message=message,
        stopped_by=callback.stopped_by,
        checkpoints=[name for name in names if name.startswith("checkpoint")],
        hidden=[name for name in names if name.startswith(".")],
    )


class AfterStep(TrainerCallback):
    """Does something on one rank after a step."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == self.step and args.process_index == self.rank:
            self.act(model)

    def act(self, model: Any) -> None:
        # the loader's worker and the server that forked it get it too, as from a launcher
        helpers = psutil.Process().children(recursive=True)
        for process in (*helpers, psutil.Process()):
            process.send_signal(signal.SIGTERM)
        assert helpers and not psutil.wait_procs(helpers, timeout=0.5)[0]


class Drift(AfterStep):
    def act(self, model: Any) -> None:
        next(model.parameters()).detach().view(-1)[0] += 1e-9


def stop_and_go_on(folder: str, late: bool) -> tuple[Outcome, Outcome, Outcome]:
    """A training that ends, one that a signal to rank 1 and its worker stops, and one that goes on from there."""
    # every step needs more batches than the worker has made before it
    workers = {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 1}
    batches = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, **workers}
    if late:
        # default of Python 3.14; the server of these workers gets the signal, too
        multiprocessing.set_forkserver_preload(["transformers.trainer", "hf_longctx.hf.callback.callback"])
        multiprocessing.set_start_method("forkserver", force=True)
    try:
        straight = train(f"{folder}/straight", late=late, **batches)
        stopped = train(f"{folder}/out", None, (AfterStep(1, 4),), late, **batches)
        return straight, stopped, train(f"{folder}/out", True, (), late, **batches)
    finally:
        multiprocessing.set_start_method("fork", force=True)


@pytest.mark.daily("True")
@pytest.mark.slow
@resuming
@pytest.mark.parametrize("late", [False, True])
def test_a_signal_stops_all_ranks_after_one_step_and_the_next_training_goes_on(ranks, tmp_path: Path, late: bool) -> None:
    for rank, (straight, first, second) in enumerate(ranks(2).run(stop_and_go_on, str(tmp_path), late)):
        assert straight.stopped_by == "" and straight.steps == 6
        assert first.stopped_by == "SIGTERM" and first.steps == 5 and first.checkpoints == ["checkpoint-5"]
        assert second.stopped_by == "" and second.steps == 6 and second.checkpoints == ["checkpoint-6"]
        assert not first.hidden or rank == 1
        assert first.losses + second.losses == straight.losses


def test_a_drifting_rank_is_named_and_nothing_is_saved_from_it(ranks, tmp_path: Path) -> None:
    for each in ranks(2).run(train, str(tmp_path), None, (Drift(1, 2),)):
        assert each.message.startswith("after step 3, copies of the same weights differ: ranks 0 and 1 differ in 1 weights")
        assert not each.checkpoints


def test_a_folder_that_another_job_uses_is_refused_on_every_rank(ranks, tmp_path: Path) -> None:
    with used_by_another_job(tmp_path):
        for each in ranks(2).run(train, str(tmp_path)):
            assert f"output_dir {tmp_path} is in use by process 1 on elsewhere" in each.message and not each.losses


def test_a_model_is_saved_before_its_first_training(tmp_path: Path) -> None:
    callback = LongContextCallback(quiet_config(tokens_per_rank=64))
    trainer = make_stock_trainer(ModelCase(promoted=True), ROWS, str(tmp_path), ARGUMENTS, LossTrainer, callbacks=[callback])
    trainer.save_model(str(tmp_path / "untrained"))
    assert (tmp_path / "untrained" / "model.safetensors").exists()


def train_and_keep(folder: str) -> Outcome:
    """A training that keeps its two checkpoints."""
    return train(folder, save_total_limit=2)


def resume_in_every_way(saved: str, out: str) -> dict[str, Outcome]:
    """Trainings that resume from checkpoints of the folder `saved`."""
    whole, torn = f"{saved}/checkpoint-3", f"{saved}/checkpoint-6"
    kept = {"save_strategy": "no"}
    return {
        "newest": train(saved, True, **kept),
        "elsewhere": train(out, whole, **kept),
        "late elsewhere": train(out, whole, late=True, **kept),
        "torn": train(out, torn, **kept),
        "late torn": train(out, torn, late=True, **kept),
        "partial": train(out, torn, partial=True, **kept),
    }


@resuming
def test_a_checkpoint_that_is_not_whole_is_passed_over_or_refused_wherever_it_lies(ranks, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    straight = ranks(2).run(train_and_keep, str(saved))
    assert straight[0].checkpoints == ["checkpoint-3", "checkpoint-6"]
    (saved / "checkpoint-6/optimizer.pt").unlink()
    # left by a stock trainer that was killed
    (saved / "checkpoint-9").mkdir()
    (saved / "checkpoint-9/model.safetensors").write_bytes(b"half")
    found = ranks(2).run(resume_in_every_way, str(saved), str(tmp_path / "out"))
    for outcomes, expected in zip(found, straight, strict=True):
        for name in ("newest", "elsewhere", "late elsewhere"):
            assert not outcomes[name].message and outcomes[name].losses == pytest.approx(expected.losses[3:], rel=1e-10)
        refused = f"{saved}/checkpoint-6 cannot be resumed: optimizer.pt is missing; "
        assert outcomes["torn"].message.startswith(f"{refused}resume_from_checkpoint=True takes the newest complete checkpoint")
        assert outcomes["late torn"].message == f"{refused}pass {saved}/checkpoint-3, which is complete"
        assert not outcomes["torn"].losses and not outcomes["late torn"].losses
        # the optimizer would start anew, but all steps are done
        assert not outcomes["partial"].message and outcomes["partial"].steps == 6 and not outcomes["partial"].losses
