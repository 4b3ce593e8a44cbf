"""A stopped process is noticed wherever the others wait for it: all survivors end in time, and name step and rank."""

from __future__ import annotations

import itertools
import re
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks.forked import CPU, Program, start_ranks

TIMEOUT_S = 3.0

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase
from helpers.trainers.stock_runs import make_stock_trainer
from helpers.trainers.trainer_runs import make_trainer
from hf_longctx.hf.checkpoints.background import MemoryCopy
from transformers import TrainerCallback
from hf_longctx import LongContextCallback, LongContextConfig

folder, place, lost = Path(sys.argv[1]), sys.argv[2].removeprefix("alone, "), int(sys.argv[3])
rank = int(os.environ["RANK"])

def stop(here, is_due=True):
    if place == here and rank == lost and is_due:
        (folder / "stopped").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGSTOP)

class Stopper(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        stop("begin")

    def on_step_end(self, args, state, control, **kwargs):
        # the loss is gathered next
        stop("logging", state.global_step == 1)

    def on_log(self, args, state, control, **kwargs):
        # an evaluation is next
        stop("callback", state.global_step == 2)

    def on_prediction_step(self, args, state, control, **kwargs):
        stop("evaluation")

    def on_save(self, args, state, control, **kwargs):
        if place == "slow saving" and rank == lost:
            # alive, for longer than a collective of a step may wait
            time.sleep(2 * float(sys.argv[4]))
        stop("saving")

def stop_in_backward(layer, *gradients):
    # before the sum of this layer's gradients, and after the sums of the layers behind it
    if trainer.state.global_step == 1:
        stop("backward")

class Rows:
    def __len__(self):
        return len(rows)

    def __getitem__(self, index):
        stop("data", reads_steps)
        return rows[index]

rows = random_rows([30, 9, 12, 5, 7, 8, 11, 10])
arguments = {"max_steps": 2, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps"}
arguments |= {"save_steps": 2, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
config = {"collective_timeout_s": float(sys.argv[4])}
if place == "writing behind":
    del Stopper.on_save
    config["async_save"] = True
    write = MemoryCopy.write
    # the thread of the lost rank stops all of its process, while the other rank's main thread waits for its own thread
    MemoryCopy.write = lambda *args: (time.sleep(1), stop("writing behind"), write(*args))
reads_steps = False
if sys.argv[2] == place:
    trainer = make_trainer(ModelCase(), Rows(), str(folder), config, arguments, eval_dataset=rows)
else:
    alone = [LongContextCallback(LongContextConfig(**config))]
    trainer = make_stock_trainer(ModelCase(), rows, str(folder), {**arguments, "eval_strategy": "no"}, callbacks=alone)
trainer.callback_handler.callbacks.insert(0, Stopper())
reads_steps = True
if place == "backward":
    trainer.model.model.layers[0].register_full_backward_hook(stop_in_backward)
if place == "slow writing" and rank == lost:
    write = trainer._save

    def slow(*args, **kwargs):
        time.sleep(2 * float(sys.argv[4]))
        return write(*args, **kwargs)

    trainer._save = slow
trainer.train()
print("trained", flush=True)
"""


def start(folder: Path, place: str, lost: int, num_ranks: int) -> list[Program]:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    return start_ranks(program, [str(folder), place, str(lost), str(TIMEOUT_S)], num_ranks, folder, CPU, file_per_rank=True)


# place, lost rank, number of ranks, and the step that the others name; rank 0 also holds the store over which the others would
# learn who is lost
CASES = [
    ("begin", 1, 2, 1),
    ("logging", 1, 3, 1),
    ("callback", 1, 2, 2),
    ("evaluation", 1, 2, 2),
    ("saving", 0, 3, 2),
    ("saving", 1, 2, 2),
    ("writing behind", 1, 2, 2),
    ("data", 1, 2, 1),
    ("logging", 0, 2, 1),
    ("backward", 1, 2, 2),
    ("backward", 0, 3, 2),
    # a stock trainer with the callback alone
    ("alone, logging", 1, 2, 1),
]
# trainings that run side by side, since most of their time is a wait
ABREAST = 4
FIRST = range(0, len(CASES), ABREAST)


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.parametrize("first", FIRST, ids=["; ".join(case[0] for case in CASES[first:][:ABREAST]) for first in FIRST])
def test_all_survivors_end_in_time_and_name_step_and_rank(tmp_path: Path, first: int) -> None:
    cases = CASES[first : first + ABREAST]
    folders = [tmp_path / str(number) for number in range(len(cases))]
    for folder in folders:
        folder.mkdir()
    trainings = [start(folder, *case[:3]) for folder, case in zip(folders, cases, strict=True)]
    survivors = {
        (case, rank): each
        for case, ranks in zip(cases, trainings, strict=True)
        for rank, each in enumerate(ranks)
        if rank != case[1]
    }
    ended: dict[tuple[Any, int], float] = {}
    until_s = time.time() + 90
    try:
        while len(ended) < len(survivors) and time.time() < until_s:
            time.sleep(0.05)
            ended |= {key: time.time() for key, each in survivors.items() if key not in ended and each.exit_code is not None}
    finally:
        for each in itertools.chain(*trainings):
            each.kill()
    assert set(ended) == set(survivors)
    for folder, case in zip(folders, cases, strict=True):
        _, lost, num_ranks, step = case
        stopped_s = float((folder / "stopped").read_text())
        for rank in set(range(num_ranks)) - {lost}:
            assert survivors[case, rank].exit_code, (case, rank)
            errors = (folder / f"stderr{rank}.txt").read_text()
            found = re.findall(r"step (\d+) could not finish on rank (\d+): (rank \d+) died", errors)
            assert found and {each[1:] for each in found} == {(str(rank), f"rank {lost}")}, (case, errors)
            assert abs(int(found[-1][0]) - step) <= 1, case
            assert ended[case, rank] - stopped_s < 2 * TIMEOUT_S + 1, case


def test_a_rank_that_writes_for_longer_than_the_time_out_is_waited_for(tmp_path: Path) -> None:
    folders = [tmp_path / place for place in ("slow saving", "slow writing")]
    for folder in folders:
        folder.mkdir()
    trainings = [start(folder, folder.name, 0, 2) for folder in folders]
    try:
        for folder, ranks in zip(folders, trainings, strict=True):
            assert [each.wait(150) for each in ranks] == [0, 0], (folder.name, (folder / "stderr1.txt").read_text())
    finally:
        for each in itertools.chain(*trainings):
            each.kill()
