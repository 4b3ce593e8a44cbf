"""Trainings killed at random moments and restarted: each goes on from its newest complete checkpoint, and no loss differs.

python tests/soak/kills.py --count 200 --seed 0

A trial kills a rank, all ranks, or the launcher with its process group, in a chosen phase or at any moment, and every fourth one
kills the restarted run too. `--only N` runs trial N alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # for the helpers, here and in the forked processes
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    os.environ["PYTHONPATH"] = f"{sys.path[0]}:{os.environ.get('PYTHONPATH', '')}"

import datasets
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase
from helpers.ranks.killable import Launched, Tell
from helpers.trainers.trainer_runs import make_trainer
from transformers import TrainerCallback

from hf_longctx.hf.checkpoints.staging import is_whole, step_of
from hf_longctx.hf.planning.source import PlanSource
from hf_longctx.hf.trainer import sets as trainer_sets

NUM_STEPS, SAVE_STEPS, EVAL_STEPS = 8, 2, 4
ROWS_PER_STEP = 12
TOLERANCE = 1e-10
LONGEST_S = 150.0
# how the model and the data live -> settings, and the numbers of ranks that can run it
KINDS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "replicated": ({}, (2, 3, 4)),
    "sharded": ({"parameters": "sharded"}, (2, 3, 4)),
    "stages": ({"stages": 2}, (2, 4)),
    "stream": ({"lookahead_batches": 2}, (2, 3, 4)),
}
VICTIMS = ("rank", "launcher", "all")
ANY_MOMENT = "any moment"
PHASES = ("indexing", "planning", "save", "evaluation", "resuming", ANY_MOMENT)


@dataclass(frozen=True, slots=True)
class Kill:
    """Whom to kill and when. `share`: place among all moments of the phase, 0 for the first and 1 for the last."""

    victim: str
    rank: int
    phase: str
    share: float


@dataclass(frozen=True, slots=True)
class Trial:
    """A training of a kind, and the kills of its runs in their order."""

    number: int
    kind: str
    num_ranks: int
    limit: int
    kills: tuple[Kill, ...]


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

    def moment(self, kill: Kill) -> tuple[tuple[str, bool, int], float]:
        """The mark after which a kill comes, and the seconds in between, if the run is as fast as this one."""
        if kill.phase != ANY_MOMENT:
            ends = {number: at_s for at_s, phase, is_entered, number in self.marks if phase == kill.phase and not is_entered}
            begins = [(at_s, number) for at_s, phase, is_entered, number in self.marks if phase == kill.phase and is_entered]
            spans = [(at_s, ends[number]) for at_s, number in begins]
            place = kill.share * len(spans)
            start_s, end_s = spans[int(place)]
            return (kill.phase, True, int(place)), (place - int(place)) * (end_s - start_s)
        moment_s = kill.share * self.marks[-1][0]
        at_s, *mark = next(mark for mark in reversed(self.marks) if mark[0] <= moment_s)
        return (mark[0], mark[1], mark[2]), moment_s - at_s


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


def train(rank: int, tell: Tell, kind: str, num_ranks: int, limit: int, folder: str) -> None:
    """Trains to the end on this rank, from the newest complete checkpoint if there is one."""

    def told(phase: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tell((phase, True))
            result = original(*args, **kwargs)
            tell((phase, False))
            return result

        return call

    trainer_sets.scan_on_every_rank = told("indexing", trainer_sets.scan_on_every_rank)
    PlanSource.solve = told("planning", PlanSource.solve)
    rows = datasets.load_from_disk(f"{folder}/rows")
    trainer = make_trainer(
        ModelCase(promoted=True),
        rows.to_iterable_dataset() if kind == "stream" else rows,
        f"{folder}/out",
        {"tokens_per_rank": 64, "collective_timeout_s": 60.0, **KINDS[kind][0]},
        {
            "per_device_train_batch_size": ROWS_PER_STEP // num_ranks,
            "per_device_eval_batch_size": 2,
            "max_steps": NUM_STEPS,
            "logging_steps": 1,
            "save_strategy": "steps",
            "save_steps": SAVE_STEPS,
            "save_total_limit": limit,
            "eval_strategy": "steps",
            "eval_steps": EVAL_STEPS,
        },
        eval_dataset=datasets.load_from_disk(f"{folder}/eval_rows"),
    )
    journal = Journal(Path(folder, f"journal-{rank}"))
    trainer.add_callback(journal)
    report = trainer.longctx_run.report
    report.step_done = partial(journal.step_done, report.step_done)
    for phase, name in (("save", "_save_checkpoint"), ("evaluation", "evaluate"), ("resuming", "_choose_checkpoint")):
        setattr(trainer, name, told(phase, getattr(trainer, name)))
    trainer.train(resume_from_checkpoint=True)
    trainer.longctx_run.close()
    tell(("end", True))


def run_once(trial: Trial, folder: Path, kill: Kill | None, known: Timeline | None) -> tuple[str | None, Timeline, int]:
    """Runs a trial's training until it ends or is killed; returns the phase (None: not killed), its timeline, its exit code."""
    launched = Launched(train, (trial.kind, trial.num_ranks, trial.limit, str(folder)), trial.num_ranks, str(folder / "log"))
    start_s, timeline = time.monotonic(), Timeline()
    timeline.add(0.0, "start", True)
    mark, delay_s = known.moment(kill) if kill and known else (None, 0.0)
    killed_in, kill_s = None, float("inf")
    while True:
        if mark and timeline.marks[-1][1:] == mark:
            mark, kill_s = None, time.monotonic() + delay_s
        until_s = min(kill_s, start_s + LONGEST_S)
        if launched.reader.poll(max(0.0, until_s - time.monotonic())):
            try:
                timeline.add(time.monotonic() - start_s, *launched.reader.recv())
            except EOFError:
                return killed_in, timeline, launched.exit_code()
            continue
        if time.monotonic() > start_s + LONGEST_S:
            launched.kill_group()
            raise AssertionError(f"no end within {LONGEST_S:g} s")
        assert kill
        killed_in, kill_s = timeline.open_phases()[-1], float("inf")
        if kill.victim == "launcher":
            launched.kill_group()
        for rank in range(trial.num_ranks) if kill.victim == "all" else [kill.rank] if kill.victim == "rank" else []:
            launched.kill_rank(rank)


def journals(trial: Trial, folder: Path) -> list[list[tuple[str, int, float]]]:
    """Records of each rank's runs."""
    files = [folder / f"journal-{rank}" for rank in range(trial.num_ranks)]
    return [[tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else [] for file in files]


def complete_steps(out: Path) -> list[int]:
    """Steps of all complete checkpoints in an output folder, those that only lack their last name included."""
    inside = [*out.glob("checkpoint-*"), *out.glob(".checkpoint-*.partial/checkpoint-*")]
    return sorted(step for path in inside if is_whole(path) and (step := step_of(path)) is not None)


class Soak:
    """Runs trials and compares them with runs that nobody kills, of which there is one for each kind and number of ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[tuple[str, int], tuple[Timeline, dict[tuple[str, int], float]]] = {}
        self.outcomes: list[tuple[Trial, list[str], str]] = []
        (folder / "data").mkdir()
        rows = random_rows([30, 9, 12, 5, 7, 8, 11, 10] * 8)
        datasets.Dataset.from_list(rows).save_to_disk(str(folder / "data/rows"))
        datasets.Dataset.from_list(random_rows([9, 20, 6, 14, 8], seed=1)).save_to_disk(str(folder / "data/eval_rows"))

    def known(self, trial: Trial) -> tuple[Timeline, dict[tuple[str, int], float]]:
        """Timeline and values of an uninterrupted run."""
        key = (trial.kind, trial.num_ranks)
        if key not in self._known:
            folder = self._new_folder("-".join(map(str, key)))
            _, timeline, code = run_once(trial, folder, None, None)
            assert code == 0, (folder / "log").read_text()[-3000:]
            values = {(what, step): value for what, step, value in journals(trial, folder)[0] if what in ("loss", "evaluation")}
            assert len(values) == NUM_STEPS + NUM_STEPS // EVAL_STEPS
            self._known[key] = timeline, values
        return self._known[key]

    def run(self, trial: Trial) -> str:
        """Outcome of a trial in a word; raises AssertionError if anything was lost."""
        timeline, values = self.known(trial)
        folder = self._new_folder(str(trial.number))
        out, phases, resumed = folder / "out", [], [0]
        try:
            for kill in (*trial.kills, None):
                expected = max(complete_steps(out), default=0)
                num_began = len(self._began(trial, folder))
                phase, _, code = run_once(trial, folder, kill, timeline)
                began = self._began(trial, folder)[num_began:]
                assert all(step == expected for step in began), f"went on from {began}, complete was step {expected}"
                resumed += began
                self._check_values(trial, folder, values)
                if phase is None:
                    assert code == 0, "the run failed though nobody killed it"
                    break
                phases.append(phase)
                saved = [step for each in journals(trial, folder) for what, step, _ in each if what == "saved"]
                complete = complete_steps(out)
                assert max(saved, default=0) <= max(complete, default=0), f"{saved} were saved, complete are {complete}"
                torn = [path.name for path in out.glob("checkpoint-*") if not is_whole(path)]
                assert not torn, f"in view, but not complete: {torn}"
            losses = {step for what, step, _ in journals(trial, folder)[0] if what == "loss"}
            assert losses == set(range(1, NUM_STEPS + 1)), f"steps {sorted(losses)} were trained"
            left = sorted(path.name for path in out.iterdir() if "checkpoint" in path.name)
            # a run that was killed between its last save and the deletion of an older one has no later save to delete it
            most = trial.limit + (resumed[-1] == NUM_STEPS)
            assert f"checkpoint-{NUM_STEPS}" in left and len(left) <= most, f"left are {left}"
        except AssertionError as error:
            log = folder / "log"
            tail = log.read_text()[-4000:] if log.exists() else ""
            raise AssertionError(f"{error}\n{trial}\nkilled in {phases}; files:\n{_listing(out)}\n{tail}") from error
        outcome = "ended first" if not phases else "resumed" if any(resumed) else "none to resume"
        self.outcomes.append((trial, phases, outcome))
        shutil.rmtree(folder)
        return outcome

    @staticmethod
    def _began(trial: Trial, folder: Path) -> list[int]:
        return [step for what, step, _ in journals(trial, folder)[0] if what == "began"]

    @staticmethod
    def _check_values(trial: Trial, folder: Path, values: dict[tuple[str, int], float]) -> None:
        for rank, lines in enumerate(journals(trial, folder)):
            for what, step, value in lines:
                expected = values.get((what, step), value)
                assert abs(value - expected) <= TOLERANCE * abs(expected), (
                    f"{what} of step {step}: {value} on rank {rank}, {expected}"
                )

    def _new_folder(self, name: str) -> Path:
        folder = self.folder / name
        # with data of its own, so that it is indexed anew
        shutil.copytree(self.folder / "data", folder)
        return folder

    def table(self) -> str:
        """Outcomes by kind, ranks, checkpoints kept, victim and phase in which the first kill came."""
        names = ("resumed", "none to resume", "ended first")
        counts: dict[str, Counter[str]] = {}
        for trial, phases, outcome in self.outcomes:
            keys = [trial.kind, f"{trial.num_ranks} ranks", f"save_total_limit {trial.limit}"]
            for kill, phase in zip(trial.kills, phases, strict=False):
                keys += [f"killed: {kill.victim}", f"killed in {phase}"]
            for key in ("all", *dict.fromkeys(keys)):
                counts.setdefault(key, Counter())[outcome] += 1
        lines = [f"{key:24}" + "".join(f"{counts[key][name]:16}" for name in names) for key in sorted(counts)]
        return "\n".join([" " * 24 + "".join(f"{name:>16}" for name in names), *lines])


def _listing(folder: Path) -> str:
    return "\n".join(f"{path.stat().st_size:9} {path}" for path in sorted(folder.rglob("*")) if path.is_file())


def trial_of(number: int, seed: int, most_ranks: int = 4) -> Trial:
    """Trial `number`; kinds, phases and victims take turns, so that a few trials already show all of them."""
    generator = random.Random(f"{seed} {number}")
    kinds = list(KINDS)
    kind = kinds[number % len(kinds)]
    num_ranks = generator.choice([each for each in KINDS[kind][1] if each <= most_ranks])
    phase = PHASES[(number + number // len(kinds)) % len(PHASES)]
    if phase == "indexing" and kind == "stream":
        phase = "save"
    kills = []
    for place in range(2 if generator.random() < 0.25 else 1):
        victim = VICTIMS[(number // 2 + place) % len(VICTIMS)]
        # a restarted run may have only the last steps before it
        kills.append(Kill(victim, generator.randrange(num_ranks), phase if not place else ANY_MOMENT, generator.random()))
    return Trial(number, kind, num_ranks, generator.choice([1, 2]), tuple(kills))


def main() -> int:
    """Runs the trials that the command line asks for; returns how many of them lost something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    options = parser.parse_args()
    first, count = (options.first, options.count) if options.only is None else (options.only, 1)
    num_lost = 0
    with tempfile.TemporaryDirectory() as name:
        soak = Soak(Path(name))
        for number in range(first, first + count):
            trial, start_s = trial_of(number, options.seed), time.monotonic()
            try:
                outcome = soak.run(trial)
                phases = ", ".join(soak.outcomes[-1][1])
                seconds = time.monotonic() - start_s
                print(f"{number:4} {trial.kind:10} {trial.num_ranks} ranks: {outcome} ({phases}) {seconds:.1f} s", flush=True)
            except AssertionError as error:
                num_lost += 1
                print(f"{number:4} LOST, seed {options.seed}: {error}", flush=True)
        print(soak.table())
    print(f"{count} trials, seed {options.seed}: {num_lost} lost")
    return num_lost


if __name__ == "__main__":
    sys.exit(min(main(), 1))
