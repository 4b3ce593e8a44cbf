"""SIGTERM, SIGUSR1 and Ctrl-C, on any rank or the launcher: one checkpoint, exit code 0, a resume that is equal bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.models.versions import resuming
from helpers.ranks.forked import CPU, free_port, run_ranks, start_ranks
from helpers.trainers.trainer_runs import training_arguments
from transformers import TrainerControl, TrainerState

from hf_longctx.hf.ranks.stopping import OrderlyStop

PROGRAM = """
import json, os, signal, sys, threading, time
from pathlib import Path
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase
from helpers.trainers.trainer_runs import LossRecorder, make_trainer
from transformers import TrainerCallback

folder, who, resume = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "resume"
rank = int(os.environ["RANK"])
before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}

class Sender(TrainerCallback):
    def on_substep_end(self, args, state, control, **kwargs):
        self.on_step_end(args, state, control)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step != 2:
            return
        if who == "rank 1, SIGTERM" and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if who == "both, SIGUSR1 and SIGINT":
            os.kill(os.getpid(), (signal.SIGUSR1, signal.SIGINT)[rank])
        if who == "launcher" and rank == 0:
            os.kill(os.getppid(), signal.SIGTERM)
            # the launcher passes it on within a poll
            time.sleep(2)
        if who == "twice" and rank == 1:
            def later():
                time.sleep(2.5)
                os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Thread(target=later, daemon=True).start()
        if who == "twice" and rank == 0:
            # the other rank waits inside a collective
            time.sleep(600)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        # the last step's exchange is over
        if who == "rank 1, last step" and rank == 1 and state.global_step == 7:
            os.kill(os.getpid(), signal.SIGTERM)

arguments = {"max_steps": 8, "logging_steps": 1, "save_strategy": "epoch", "save_total_limit": 1, "enable_jit_checkpoint": True}
arguments["per_device_train_batch_size"] = 4
if who == "launcher":
    # a launcher signals whole process groups; the last step still needs batches that workers have
    arguments.update(dataloader_num_workers=1, dataloader_multiprocessing_context="fork")
config = {"calibration_steps": 0}
trainer = make_trainer(ModelCase(), random_rows([30, 9, 12, 5, 7, 8, 11, 10] * 2), str(folder), config, arguments)
recorder = LossRecorder()
recorder.attach(trainer)
trainer.add_callback(Sender())
saves = []
class Saves(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        saves.append(state.global_step)
trainer.add_callback(Saves())
trainer.train(resume_from_checkpoint=True if resume else None)
assert {each: signal.getsignal(each) for each in before} == before and signal.set_wakeup_fd(-1) == -1
result = {"losses": recorder.losses, "stopped_by": trainer.stopped_by, "step": trainer.state.global_step, "saves": saves}
(folder / f"result{rank}.json").write_text(json.dumps(result))
"""


def ranks_of(folder: Path, who: str, resume: bool = False) -> list[dict]:
    """Returns what two forked ranks report after a training that ended with exit code 0."""
    done = run_ranks(program(folder), [str(folder), who, "resume" if resume else "new"], 2, folder, CPU)
    assert done.returncode == 0, done.stderr
    return results(folder)


def program(folder: Path) -> Path:
    path = folder / "program.py"
    path.write_text(PROGRAM)
    return path


def results(folder: Path) -> list[dict]:
    return [json.loads((folder / f"result{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    reports = ranks_of(folder, "nobody")
    # epochs have two steps
    assert [report["saves"] for report in reports] == [[2, 4, 6, 8]] * 2
    assert {report["stopped_by"] for report in reports} == {""}
    return reports[0]["losses"]


def check_stop_and_resume(folder: Path, stopped_by: str, uninterrupted: list[float], who: str = "nobody") -> list[dict]:
    """Checks that both ranks stopped in one step with one checkpoint, and that a resumed run has the losses of one run.

    Returns what the ranks of the resumed run report; `who` is signalled in it.
    """
    first = results(folder)
    assert first[0]["step"] == first[1]["step"] == 3 and {each["stopped_by"] for each in first} == {stopped_by}
    # after the first epoch, and once more
    assert [each["saves"] for each in first] == [[2, 3]] * 2
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-3"]
    second = ranks_of(folder, who, resume=True)
    assert second[0]["step"] == 8 and [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-8"]
    assert first[0]["losses"] + second[0]["losses"] == uninterrupted
    return second


@pytest.mark.wide
@resuming
def test_sigterm_to_one_rank_stops_all_ranks_with_exit_code_0(tmp_path: Path, uninterrupted: list[float]) -> None:
    # a launcher ends with 0 if all of its ranks do
    done = run_ranks(program(tmp_path), [str(tmp_path), "rank 1, SIGTERM", "new"], 2, tmp_path, CPU)
    assert done.returncode == 0, done.stderr
    assert "rank 1 got SIGTERM: the training finishes its step, saves and stops" in done.stderr
    assert "the training stopped after step 3 of 8, since it got SIGTERM" in done.stderr
    for report in check_stop_and_resume(tmp_path, "SIGTERM", uninterrupted, "rank 1, last step"):
        # a signal after the last exchange still stops both ranks together, with one checkpoint
        assert report["stopped_by"] == "SIGTERM" and report["saves"] == [4, 6, 8]


@pytest.mark.wide
@pytest.mark.slow
@resuming
def test_sigterm_to_the_launcher_saves_on_all_ranks(tmp_path: Path, uninterrupted: list[float]) -> None:
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.accelerate_cli",
        "launch",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ]
    command += ["--multi_gpu", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", str(free_port())]
    command += [str(program(tmp_path)), str(tmp_path), "launcher", "new"]
    environment = {**os.environ, **CPU, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    # the launcher itself ends with an error of its own about the signal
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert "the training stopped after step 3 of 8, since it got SIGTERM" in done.stderr, done.stderr
    check_stop_and_resume(tmp_path, "SIGTERM", uninterrupted)


@pytest.mark.wide
@resuming
def test_different_signals_on_all_ranks_are_one_request(tmp_path: Path, uninterrupted: list[float]) -> None:
    ranks_of(tmp_path, "both, SIGUSR1 and SIGINT")
    assert {report["stopped_by"] for report in check_stop_and_resume(tmp_path, "SIGUSR1", uninterrupted)} == {""}


def test_the_way_to_resume_is_named_truly_for_weights_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stop, state = OrderlyStop(5.0, None), TrainerState(global_step=3, max_steps=8, is_world_process_zero=True)
    for saves_weights_only in (False, True):
        caplog.clear()
        stop.stopped_by = "SIGTERM"
        stop.on_train_end(training_arguments(str(tmp_path), save_only_model=saves_weights_only), state, TrainerControl())
        assert "the training stopped after step 3 of 8" in caplog.text
        assert ("Go on with train(resume_from_checkpoint=True)" in caplog.text) == (not saves_weights_only)
        assert ("refuses it unless LongContextConfig(resume_partial=True)" in caplog.text) == saves_weights_only


def test_a_second_signal_ends_a_rank_at_once_inside_a_collective(tmp_path: Path) -> None:
    ranks = start_ranks(program(tmp_path), [str(tmp_path), "twice", "new"], 2, tmp_path, CPU)
    try:
        assert ranks[1].wait(60) == 128 + signal.SIGTERM
    finally:
        for rank in ranks:
            rank.kill()
    assert "rank 1 got SIGTERM after SIGTERM: it ends at once, without saving" in (tmp_path / "stderr.txt").read_text()
