"""A rank that dies or hangs in a step takes the others down within the collective time-out, its own traceback first."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
from helpers.ranks.forked import CPU, Program, start_ranks

PROGRAM = """
import os, signal, sys
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase
from helpers.trainers.trainer_runs import make_trainer

config = {"collective_timeout_s": 4.0, "parameters": "sharded" if "sharded" in sys.argv[2] else "replicated"}
config["stages"] = 2 if "stages" in sys.argv[2] else 1
trainer = make_trainer(ModelCase(), random_rows([30, 9, 12, 5, 7, 8, 11, 10] * 3), sys.argv[1], config)
original = trainer.training_step

def training_step(*args, **kwargs):
    if trainer.state.global_step == 3 and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        if sys.argv[2] == "raise":
            raise RuntimeError("planted failure")
        if sys.argv[2] == "kill":
            os.kill(os.getpid(), 9)
        if sys.argv[2].startswith("kill in the middle"):
            # behind the first of several forwards of the stage
            trainer.model.get_decoder().layers[-1].register_forward_hook(lambda *_: os.kill(os.getpid(), 9))
            return original(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGSTOP)
    return original(*args, **kwargs)

trainer.training_step = training_step
trainer.train()
"""


def start(folder: Path, how: str) -> list[Program]:
    """Starts a training on two ranks, or on two for each of two sharded stages; they write to one shared error stream."""
    folder.mkdir()
    program = folder / "program.py"
    program.write_text(PROGRAM)
    return start_ranks(program, [str(folder), how], 4 if "sharded stages" in how else 2, folder, CPU)


# run side by side, since most of their time is a wait
WAYS = [("raise", "kill", "hang"), ("hang, sharded", "hang, stages", "kill in the middle, stages")]
WAYS += [("hang, sharded stages", "kill in the middle, sharded stages")]


@pytest.mark.wide(
    "hang, sharded; hang, stages; kill in the middle, stages",
    "hang, sharded stages; kill in the middle, sharded stages",
)
@pytest.mark.slow
@pytest.mark.parametrize("ways", WAYS, ids="; ".join)
def test_the_other_ranks_exit_and_say_why(tmp_path: Path, ways: tuple[str, ...]) -> None:
    started = time.monotonic()
    trainings = {how: start(tmp_path / how, how) for how in ways}
    try:
        for how, ranks in trainings.items():
            # start-up, three steps and the time-out of four seconds; without a time-out it would be thirty minutes
            codes = [ranks[0].wait(max(1.0, started + 90 - time.monotonic()))]
            if how.startswith("hang"):
                ranks[-1].kill()
            codes += [rank.wait(20) for rank in ranks[1:]]
            assert all(codes), how
            errors = (tmp_path / how / "stderr.txt").read_text()
            what = "ended with RuntimeError: planted" if how == "raise" else "died or did not answer within 4 s"
            consequence = errors.index(f"step 4 could not finish on rank 0: rank {len(ranks) - 1} {what}")
            if how == "raise":
                assert errors.index("planted failure") < consequence
    finally:
        for each in itertools.chain(*trainings.values()):
            each.kill()
