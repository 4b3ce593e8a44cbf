"""A rank that works for longer than `collective_timeout_s` is waited for, wherever it works; one that hangs or ended is named."""

from __future__ import annotations

import importlib.util
import itertools
import re
import time
from pathlib import Path

import pytest
from helpers.ranks.forked import CPU, Program, start_ranks

TIMEOUT_S = 2.0
# longer than a rank may be silent, and than a process without beats lives
WORK_S = 1.7 * TIMEOUT_S

PROGRAM = """
import math, os, re, signal, sys, time
from pathlib import Path
import datasets
import torch
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.trainers.stock_runs import make_stock_trainer
from helpers.trainers.trainer_runs import make_trainer, training_arguments
from transformers import TrainerCallback
from hf_longctx import LongContextCallback, LongContextConfig

door, folder, timeout_s, work_s = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
# what rank 0 or rank 1 does at places: "on_log", "on_log: stop", ...
deeds = {}
for number, deed in enumerate(sys.argv[5].split(", ")):
    # every second place is the other rank's
    deeds[deed.partition(": ")[0]] = deed.partition(": ")[2], (int(sys.argv[6]) + number) % 2
rank = int(os.environ["RANK"])

def at(place):
    deed, worker = deeds.pop(place, ("", None))
    if rank != worker:
        return
    (folder / "done").write_text(str(time.time()))
    if deed == "work":
        time.sleep(work_s)
    elif deed == "hold":
        # one call that keeps the interpreter's lock, and takes twice as long for every letter
        begin_s, letters = time.perf_counter(), 18
        re.match("(a+)+$", "a" * letters + "b")
        letters += round(math.log2(work_s / (time.perf_counter() - begin_s)))
        re.match("(a+)+$", "a" * letters + "b")
    elif deed == "raise":
        raise ValueError("planted")
    elif deed == "exit":
        sys.exit(0)
    else:
        os.kill(os.getpid(), signal.SIGSTOP if deed == "stop" else signal.SIGKILL)

class MyCallback(TrainerCallback):
    pass

EVENTS = "train_begin step_begin pre_optimizer_step step_end log evaluate prediction_step save epoch_end train_end"
for event in EVENTS.split():
    setattr(MyCallback, f"on_{event}", lambda self, *args, place=f"on_{event}", **kwargs: at(place))

rows = datasets.Dataset.from_list(random_rows([30, 9, 12, 5, 7, 8, 11, 10]))
arguments = {"max_steps": 2, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps"}
arguments |= {"save_steps": 1, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
arguments |= {"ddp_timeout": int(os.environ.get("LONGEST_S", 600))}
config = {"collective_timeout_s": timeout_s}
if door in ("sharded", "stages"):
    config |= {"parameters": "sharded"} if door == "sharded" else {"stages": 2}
if door in ("replicated", "sharded", "stages"):
    trainer = make_trainer(ModelCase(), rows, str(folder), config, arguments, eval_dataset=rows)
elif door == "trl":
    import trl
    from helpers.models.chats import word_tokenizer
    from helpers.trainers.stock_runs import quiet_config
    from helpers.trainers.trl_runs import rows_of, trl_arguments
    from hf_longctx import LongContextMixin

    class Mine(LongContextMixin, trl.SFTTrainer):
        pass

    arguments = {name: arguments[name] for name in arguments if not name.endswith("_size")} | {"gradient_checkpointing": False}
    args = trl_arguments(trl.SFTConfig, str(folder), rows_per_step=4, per_device_eval_batch_size=2, **arguments)
    rows = rows_of("text")
    trainer = Mine(model=build_model(ModelCase()), args=args, train_dataset=rows, eval_dataset=rows.select(range(4)),
                   processing_class=word_tokenizer(), longctx_config=quiet_config(tokens_per_rank=96, **config))
else:
    callback = LongContextCallback(LongContextConfig(**config))
    alone = [callback] if door == "alone" else []
    trainer = make_stock_trainer(ModelCase(), rows, str(folder), arguments, callbacks=alone, eval_dataset=rows)
    if door == "attached":
        at("attach")
        callback.attach(trainer)
# before all other callbacks
trainer.callback_handler.callbacks.insert(0, MyCallback())

def in_step(module, *args):
    if module.training:
        at("forward")

trainer.model.model.layers[0].register_forward_pre_hook(in_step)
# both ranks have begun to beat, also where only their callbacks know of each other
torch.distributed.barrier()
at("before train")
trainer.train()
at("after train")
trainer.evaluate()
at("end")
print("left", flush=True)
"""


def start(door: str, folder: Path, deeds: str, worker: int = 0, longest_s: int = 600, work_s: float = WORK_S) -> list[Program]:
    """Starts a script on two ranks. deeds: what a rank does at which places, by turns, beginning with rank `worker`."""
    folder.mkdir(parents=True)
    program = folder / "program.py"
    program.write_text(PROGRAM)
    arguments = [door, str(folder), str(TIMEOUT_S), str(work_s), deeds, str(worker)]
    return start_ranks(program, arguments, 2, folder, {**CPU, "LONGEST_S": str(longest_s)}, file_per_rank=True)


def errors_of(folder: Path) -> list[str]:
    return [(folder / f"stderr{rank}.txt").read_text() for rank in range(2)]


# every second place is rank 1's
PLACES = [
    *("before train", "on_train_begin", "on_step_begin", "forward", "on_pre_optimizer_step", "on_step_end", "on_log"),
    *("on_prediction_step", "on_evaluate", "on_save", "on_epoch_end", "on_train_end", "after train", "end"),
]


def wait_for_works(tmp_path: Path, doors: list[str], deed: str = "work", places: list[str] = PLACES) -> dict[str, str]:
    """Trains with work at all places, through several doors side by side; returns what their ranks said, by door."""
    deeds = ", ".join(f"{place}: {deed}" for place in places)
    trainings = {door: start(door, tmp_path / door, deeds) for door in doors}
    said = {}
    try:
        until_s = time.monotonic() + 300
        for door, ranks in trainings.items():
            codes = [each.wait(max(1.0, until_s - time.monotonic())) for each in ranks]
            said[door] = "\n".join(errors_of(tmp_path / door))
            assert codes == [0, 0], (door, said[door])
            assert "could not finish" not in said[door] and "cannot go on" not in said[door], door
            assert (tmp_path / door / "stdout0.txt").read_text().endswith("left\n"), door
    finally:
        for each in itertools.chain(*trainings.values()):
            each.kill()
    return said


@pytest.mark.wide
@pytest.mark.slow
def test_a_rank_that_works_is_waited_for_at_every_place(tmp_path: Path) -> None:
    for door, said in wait_for_works(tmp_path, ["replicated", "sharded", "stages", "attached", "alone"]).items():
        assert re.search(r"rank 0 waits for rank 1, which has been inside `on_train_begin` of MyCallback for \d+ s", said), door


@pytest.mark.slow
@pytest.mark.trl
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL")
def test_a_rank_that_works_in_a_trainer_of_trl_is_waited_for(tmp_path: Path) -> None:
    wait_for_works(tmp_path, ["trl"])


@pytest.mark.slow
def test_a_rank_that_holds_the_interpreters_lock_is_waited_for(tmp_path: Path) -> None:
    """Its thread cannot beat, but its process works."""
    wait_for_works(tmp_path, ["replicated"], "hold", ["on_evaluate"])


DIED = r"rank {} died or did not answer within 2 s"
RAISED = r"rank {} ended with ValueError: planted"
# door, place and deed, rank that does it, and what the other says
ENDS = [
    # before the ranks have met
    ("alone", "before train: stop", 0, "the start could not finish on rank 1: " + DIED),
    ("replicated", "before train: stop", 1, "could not finish on rank 0: " + DIED),
    ("attached", "before train: raise", 0, "could not finish on rank 1: " + RAISED),
    ("replicated", "on_evaluate: kill", 1, "step 1 could not finish on rank 0: " + DIED),
    ("sharded", "after train: stop", 0, "evaluation after step 2 could not finish on rank 1: " + DIED),
    ("replicated", "on_log: raise", 0, "step 1 could not finish on rank 1: " + RAISED),
    ("stages", "on_step_begin: stop", 1, r"step [01] could not finish on rank 0: " + DIED),
    (
        "replicated",
        "after train: exit",
        1,
        "evaluation after step 2 could not finish on rank 0: rank {} came to the end of its script",
    ),
    ("sharded", "on_save: kill", 1, "step [12] could not finish on rank 0: " + DIED),
    # a stock trainer's own collective
    ("attached", "after train: kill", 0, "rank 1 cannot go on: " + DIED),
    ("alone", "on_step_end: stop", 1, "step 1 could not finish on rank 0: " + DIED),
    ("alone", "after train: raise", 0, "rank 1 cannot go on: " + RAISED),
]
# trainings that run side by side, since most of their time is a wait
ABREAST = 4


@pytest.mark.daily("0")
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(ENDS), ABREAST))
def test_a_rank_that_hangs_died_or_failed_is_named_in_time(tmp_path: Path, first: int) -> None:
    cases = list(enumerate(ENDS[first : first + ABREAST]))
    trainings = [start(door, tmp_path / str(number), deed, rank) for number, (door, deed, rank, _) in cases]
    try:
        ended: dict[int, float] = {}
        until_s = time.monotonic() + 150
        while len(ended) < len(cases) and time.monotonic() < until_s:
            time.sleep(0.05)
            for number, (*_, rank, _) in cases:
                if number not in ended and trainings[number][1 - rank].exit_code is not None:
                    ended[number] = time.time()
        for number, (door, deed, rank, expected) in cases:
            said = errors_of(tmp_path / str(number))[1 - rank]
            assert number in ended, (door, deed, said)
            assert trainings[number][1 - rank].exit_code == 1, (door, deed, said)
            assert re.search(expected.format(rank), said), (door, deed, said)
            assert ended[number] - float((tmp_path / str(number) / "done").read_text()) < 2 * TIMEOUT_S + 2, (door, deed)
    finally:
        for each in itertools.chain(*trainings):
            each.kill()


@pytest.mark.slow
def test_a_wait_beyond_ddp_timeout_ends_and_says_what_it_was_for(tmp_path: Path) -> None:
    ranks = start("replicated", tmp_path / "out", "on_evaluate: work", 0, longest_s=10, work_s=45.0)
    try:
        assert ranks[1].wait(120) == 1
    finally:
        for each in ranks:
            each.kill()
    said = errors_of(tmp_path / "out")[1]
    expected = (
        r"could not finish on rank 1: it waited 10 s for rank 0, which has been inside `on_evaluate` of MyCallback for \d\d s; "
    )
    assert re.search(expected + "raise ddp_timeout", said), said
