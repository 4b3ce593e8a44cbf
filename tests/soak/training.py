"""The training that the soaks kill or stop, launched like a user's: it tells what it is doing and records its values."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any

import datasets
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase
from helpers.ranks.killable import Launched, Tell
from helpers.trainers.trainer_runs import make_trainer
from transformers import TrainerCallback

from hf_longctx.hf.planning.source import PlanSource
from hf_longctx.hf.run import sets as trainer_sets

NUM_STEPS, SAVE_STEPS, EVAL_STEPS = 8, 2, 4
ROWS_PER_STEP = 12
LONGEST_S = 150.0
# how the model and the data live -> settings, and the numbers of ranks that can run it
KINDS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "replicated": ({}, (2, 3, 4)),
    "sharded": ({"parameters": "sharded"}, (2, 3, 4)),
    "stages": ({"stages": 2}, (2, 4)),
    "sharded stages": ({"stages": 2, "parameters": "sharded"}, (4,)),
    "kept stages": ({"stages": 2, "parameters": "gathered_per_step"}, (4,)),
    "stream": ({"lookahead_batches": 2, "stream_readers": 3}, (2, 3, 4)),
}
# methods of the trainer -> names of the phases that they are
_METHODS = {
    "_inner_training_loop": "training",
    "_save_checkpoint": "save",
    "evaluate": "evaluation",
    "_choose_checkpoint": "resuming",
    "_maybe_log_save_evaluate": "logging",
    "get_batch_samples": "reading data",
}


@dataclass(frozen=True, slots=True)
class Stop:
    """SIGSTOP that a rank gives itself, so long after it has entered a phase for the `number`th time."""

    rank: int
    phase: str
    number: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class Case:
    """A training: how model and data live, ranks, checkpoints kept, seconds that ranks wait for each other."""

    kind: str
    num_ranks: int
    limit: int = 2
    timeout_s: float = 60.0
    stop: Stop | None = None


@dataclass(slots=True)
class Timeline:
    """When rank 0 entered and left phases in a run: (seconds since the start, phase, whether it entered, how often before)."""

    marks: list[tuple[float, str, bool, int]] = field(default_factory=list)
    num_seen: Counter[tuple[str, bool]] = field(default_factory=Counter)

    def add(self, at_s: float, phase: str, is_entered: bool) -> None:
        self.marks.append((at_s, phase, is_entered, self.num_seen[phase, is_entered]))
        self.num_seen[phase, is_entered] += 1

    def open_phases(self) -> list[str]:
        """Phases that rank 0 has entered and not left, the innermost last."""
        entered = [phase for _, phase, is_entered, _ in self.marks if is_entered]
        names = dict.fromkeys(reversed(entered))
        return [name for name in reversed(names) if self.num_seen[name, True] > self.num_seen[name, False]]

    def place(self, phase: str, share: float) -> tuple[int, float]:
        """Which time of a phase, and seconds after its begin, at this share of all its moments."""
        ends = {number: at_s for at_s, name, is_entered, number in self.marks if name == phase and not is_entered}
        begins = [(at_s, number) for at_s, name, is_entered, number in self.marks if name == phase and is_entered]
        spans = [(at_s, ends[number]) for at_s, number in begins]
        number = int(share * len(spans))
        start_s, end_s = spans[number]
        return number, (share * len(spans) - number) * (end_s - start_s)


class Journal(TrainerCallback):
    """Record of a rank's runs in a file that outlives them: where they went on, losses, evaluations, finished saves."""

    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._step = 0

    def write(self, what: str, step: int, value: float = 0.0) -> None:
        os.write(self._file, (json.dumps([what, step, value]) + "\n").encode())

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._step = state.global_step
        self.write("began", state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        self.write("evaluation", state.global_step, metrics["eval_loss"])

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.write("saved", state.global_step)

    def step_done(self, original: Callable[..., None], plan: Any, result: Any) -> None:
        self._step += 1
        self.write("loss", self._step, float(result.loss))
        original(plan, result)


class Phases:
    """Tells of the phases that a rank enters and leaves, and stops the rank where it is to be stopped."""

    def __init__(self, tell: Tell, stop: Stop | None, file: Path) -> None:
        self._tell, self._stop, self._file = tell, stop, file
        self._num_seen: Counter[str] = Counter()

    def told(self, phase: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """`original`, whose every call is a phase."""

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._tell((phase, True))
            self._stop_if_due(phase)
            result = original(*args, **kwargs)
            self._tell((phase, False))
            return result

        return call

    def _stop_if_due(self, phase: str) -> None:
        number = self._num_seen[phase]
        self._num_seen[phase] += 1
        if self._stop is None or (self._stop.phase, self._stop.number) != (phase, number):
            return
        timer = threading.Timer(self._stop.delay_s, self._stop_process)
        timer.daemon = True
        if self._stop.delay_s > 0.001:
            timer.start()
        else:
            self._stop_process()

    def _stop_process(self) -> None:
        self._file.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGSTOP)


def train(rank: int, tell: Tell, case: Case, folder: str) -> None:
    """Trains to the end on this rank, from the newest complete checkpoint if there is one."""
    stop = case.stop if case.stop and case.stop.rank == rank else None
    phases = Phases(tell, stop, Path(folder, "stopped"))
    trainer_sets.scan_on_every_rank = phases.told("indexing", trainer_sets.scan_on_every_rank)
    PlanSource.solve = phases.told("planning", PlanSource.solve)
    rows = datasets.load_from_disk(f"{folder}/rows")
    trainer = make_trainer(
        ModelCase(promoted=True),
        rows.to_iterable_dataset(num_shards=3) if case.kind == "stream" else rows,
        f"{folder}/out",
        {"tokens_per_rank": 64, "collective_timeout_s": case.timeout_s, **KINDS[case.kind][0]},
        {
            "per_device_train_batch_size": ROWS_PER_STEP // case.num_ranks,
            "per_device_eval_batch_size": 2,
            "max_steps": NUM_STEPS,
            "logging_steps": 1,
            "save_strategy": "steps",
            "save_steps": SAVE_STEPS,
            "save_total_limit": case.limit,
            "eval_strategy": "steps",
            "eval_steps": EVAL_STEPS,
        },
        eval_dataset=datasets.load_from_disk(f"{folder}/eval_rows"),
    )
    journal = Journal(Path(folder, f"journal-{rank}"))
    trainer.add_callback(journal)
    report = trainer.longctx_run.report
    report.step_done = partial(journal.step_done, report.step_done)
    for name, phase in _METHODS.items():
        setattr(trainer, name, phases.told(phase, getattr(trainer, name)))
    trainer.callback_handler.call_event = phases.told("callbacks", trainer.callback_handler.call_event)
    trainer.train(resume_from_checkpoint=True)
    trainer.longctx_run.close()
    tell(("end", True))


def journals(case: Case, folder: Path) -> list[list[tuple[str, int, float]]]:
    """Records of each rank's runs."""
    files = [folder / f"journal-{rank}" for rank in range(case.num_ranks)]
    return [[tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else [] for file in files]


@dataclass(frozen=True, slots=True)
class Known:
    """Timeline of a training that nobody disturbs, and its losses by (what, step)."""

    timeline: Timeline
    values: dict[tuple[str, int], float]


class Undisturbed:
    """Trainings that nobody disturbs, one for each kind and number of ranks, and folders with data for others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[tuple[str, int], Known] = {}
        self._locks = {(kind, number): threading.Lock() for kind, (_, numbers) in KINDS.items() for number in numbers}
        (folder / "data").mkdir()
        rows = random_rows([30, 9, 12, 5, 7, 8, 11, 10] * 8)
        datasets.Dataset.from_list(rows).save_to_disk(str(folder / "data/rows"))
        datasets.Dataset.from_list(random_rows([9, 20, 6, 14, 8], seed=1)).save_to_disk(str(folder / "data/eval_rows"))

    def new_folder(self, name: str) -> Path:
        """A folder with data of its own, so that it is indexed anew."""
        folder = self.folder / name
        shutil.copytree(self.folder / "data", folder)
        return folder

    def known(self, kind: str, num_ranks: int) -> Known:
        """Timeline and values of the undisturbed training; runs it if it has not run yet."""
        key = kind, num_ranks
        with self._locks[key]:
            if key not in self._known:
                self._known[key] = self._run(Case(kind, num_ranks))
            return self._known[key]

    def _run(self, case: Case) -> Known:
        folder = self.new_folder(f"{case.kind}-{case.num_ranks}")
        launched = Launched(train, (case, str(folder)), case.num_ranks, str(folder / "log"))
        start_s, timeline = time.monotonic(), Timeline()
        timeline.add(0.0, "start", True)
        try:
            while launched.reader.poll(LONGEST_S):
                timeline.add(time.monotonic() - start_s, *launched.reader.recv())
            launched.kill_group()
            raise AssertionError(f"no end within {LONGEST_S:g} s")
        except EOFError:
            assert launched.exit_code() == 0, (folder / "log").read_text()[-3000:]
        values = {(what, step): value for what, step, value in journals(case, folder)[0] if what in ("loss", "evaluation")}
        assert len(values) == NUM_STEPS + NUM_STEPS // EVAL_STEPS
        shutil.rmtree(folder)
        return Known(timeline, values)


def run_at_once(run: Callable[[int], bool], first: int, at_once: int) -> None:
    """Calls `run` with the numbers from `first` on, several at once, until one of the calls returns False."""
    lock = threading.Lock()
    numbers = iter(range(first, 1_000_000))
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            with lock:
                number = next(numbers)
            if not run(number):
                is_over.set()

    with ThreadPoolExecutor(at_once) as pool:
        for each in [pool.submit(work) for _ in range(at_once)]:
            each.result()
