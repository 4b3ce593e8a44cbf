"""A rank that dies or hangs in a step takes the others down within the collective time-out, its own traceback first."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from helpers.ranks.forked import Program, free_port, rank_environment

PROGRAM = """
import os, sys, time
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase
from helpers.trainers.trainer_runs import make_trainer

config = {"collective_timeout_s": 4.0, "parameters": "sharded" if "sharded" in sys.argv[2] else "replicated"}
config["stages"] = 2 if "stages" in sys.argv[2] else 1
trainer = make_trainer(ModelCase(), random_rows([30, 9, 12, 5, 7, 8, 11, 10] * 3), sys.argv[1], config)
original = trainer.training_step

def training_step(*args, **kwargs):
    if trainer.state.global_step == 3 and int(os.environ["RANK"]) == 1:
        if sys.argv[2] == "raise":
            raise RuntimeError("planted failure on rank 1")
        if sys.argv[2] == "kill":
            os.kill(os.getpid(), 9)
        if sys.argv[2] == "kill in the middle, stages":
            # behind the first of several forwards of the stage
            trainer.model.get_decoder().layers[-1].register_forward_hook(lambda *_: os.kill(os.getpid(), 9))
            return original(*args, **kwargs)
        time.sleep(600)
    return original(*args, **kwargs)

trainer.training_step = training_step
trainer.train()
"""


def run_ranks(folder: Path, how: str) -> tuple[list[int], str, float]:
    """Exit codes of two ranks, what they wrote to one shared error stream, and the seconds until rank 0 ended."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    port, errors = free_port(), folder / "stderr.txt"
    started = time.monotonic()
    processes = [
        Program(
            program,
            [str(folder), how],
            {**rank_environment(rank, 2, port), "ACCELERATE_USE_CPU": "true"},
            folder / "stdout.txt",
            errors,
        )
        for rank in range(2)
    ]
    try:
        codes = [processes[0].wait(100)]
        took = time.monotonic() - started
        if how.startswith("hang"):
            processes[1].kill()
        codes.append(processes[1].wait(20))
    finally:
        for process in processes:
            process.kill()
    return codes, errors.read_text(), took


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "kill", "hang", "hang, sharded", "hang, stages", "kill in the middle, stages"])
def test_the_other_rank_exits_and_says_why(tmp_path: Path, how: str) -> None:
    codes, errors, took = run_ranks(tmp_path, how)
    assert codes[0] != 0 and codes[1] != 0
    # start-up, three steps and the time-out of four seconds; without a time-out it would be thirty minutes
    assert took < 90
    consequence = errors.index("step 4 could not finish on rank 0: rank 1 died or did not answer within 4 s")
    if how == "raise":
        assert errors.index("planted failure on rank 1") < consequence
