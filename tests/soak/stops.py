"""Ranks stopped at random moments of a training: the others notice it in time, end, and name step and rank.

python tests/soak/stops.py --stops 40 --seed 0 --json stops.json

Each trial stops one rank by SIGSTOP while it logs, saves, evaluates, runs a callback, reads data, or anywhere in the training.
All other ranks must end with an error within twice `collective_timeout_s`. `--only N` runs trial N alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

if __name__ == "__main__":
    # for the helpers, here and in the forked processes
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    os.environ["PYTHONPATH"] = f"{sys.path[0]}:{os.environ.get('PYTHONPATH', '')}"

import psutil
from helpers.ranks.killable import Launched
from soak.training import KINDS, LONGEST_S, Case, Stop, Undisturbed, journals, run_at_once, train

TIMEOUT_S = 8.0
STOPPED_KINDS = ("replicated", "sharded", "stages")
PHASES = ("save", "logging", "evaluation", "callbacks", "reading data", "training")
_POLL_S = 0.05
# share of a phase's moments after which no collective comes: the events after the last log, in which nobody waits for a rank
_NEEDED = {"callbacks": 0.95}


@dataclass(frozen=True, slots=True)
class Trial:
    """A training, and the rank that is stopped in it. `share`: place among all moments of the phase, from 0 to 1."""

    number: int
    kind: str
    num_ranks: int
    rank: int
    phase: str
    share: float
    timeout_s: float = TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Noticed:
    """A stop that came: after which step, and seconds until the last of the other ranks had ended."""

    trial: Trial
    step: int
    seconds: float


class Soak:
    """Stops ranks of trainings. Where a rank does what is known from trainings that nobody stops."""

    def __init__(self, folder: Path) -> None:
        self.undisturbed = Undisturbed(folder)
        self.noticed: list[Noticed] = []

    def run(self, trial: Trial) -> Noticed | None:
        """How the stop of a trial was noticed; None if the training ended before it. Raises AssertionError if it was not."""
        known = self.undisturbed.known(trial.kind, trial.num_ranks)
        share = trial.share * _NEEDED.get(trial.phase, 1.0)
        return self.run_at(trial, *known.timeline.place(trial.phase, share))

    def run_at(self, trial: Trial, number: int, delay_s: float) -> Noticed | None:
        """How a stop was noticed that comes so long after the rank has entered the phase for the `number`th time."""
        place = number, delay_s
        case = Case(trial.kind, trial.num_ranks, timeout_s=trial.timeout_s, stop=Stop(trial.rank, trial.phase, *place))
        folder = self.undisturbed.new_folder(f"stop-{trial.number}")
        launched = Launched(train, (case, str(folder)), trial.num_ranks, str(folder / "log"), ends_others=False)
        others = [each for rank, each in enumerate(launched.ranks) if rank != trial.rank]
        stopped, log = folder / "stopped", folder / "log"
        try:
            until_s = time.monotonic() + LONGEST_S
            while _are_alive(others) and time.monotonic() < until_s:
                time.sleep(_POLL_S)
            end_s = time.time()
            if not stopped.exists() or not stopped.read_text():
                assert not _are_alive(others), f"no end within {LONGEST_S:g} s"
                return None
            seconds = end_s - float(stopped.read_text())
            if "train_runtime" in log.read_text() and not _are_alive(others):
                # it came when nobody needed the rank any more
                return None
            step = max((step for what, step, _ in journals(case, folder)[trial.rank] if what == "loss"), default=0)
            assert not _are_alive(others), f"not noticed within {seconds:.1f} s after step {step}"
            found = Noticed(trial, step, seconds)
            self._check(found, log.read_text())
            self.noticed.append(found)
            return found
        except AssertionError as error:
            raise AssertionError(f"{error}\n{trial}\n{log.read_text()[-4000:]}") from error
        finally:
            launched.kill_group()
            launched.exit_code()
            shutil.rmtree(folder, ignore_errors=True)

    @staticmethod
    def _check(found: Noticed, log: str) -> None:
        """Raises AssertionError unless every other rank has named the stopped one and the step, and in time."""
        trial = found.trial
        lines = re.findall(r"step (\d+) could not finish on rank (\d+): (.*) died or did not answer", log)
        survivors = {str(rank) for rank in range(trial.num_ranks) if rank != trial.rank}
        assert {rank for _, rank, _ in lines} == survivors, f"ranks {survivors} should say who is lost, found {lines}"
        assert {lost for *_, lost in lines} == {f"rank {trial.rank}"}, f"named {lines}"
        assert all(found.step <= int(step) <= found.step + 1 for step, *_ in lines), f"stopped after {found.step}: {lines}"
        assert found.seconds < 2 * trial.timeout_s, f"noticed after {found.seconds:.1f} s, with {trial.timeout_s:g} s allowed"


def _are_alive(processes: Iterable[int]) -> bool:
    for number in processes:
        try:
            if psutil.Process(number).status() != psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            continue
    return False


def trial_of(number: int, seed: int, timeout_s: float = TIMEOUT_S) -> Trial:
    """Trial `number`; kinds and phases take turns."""
    generator = random.Random(f"{seed} {number}")
    kind = STOPPED_KINDS[number % len(STOPPED_KINDS)]
    phase = PHASES[(number + number // len(STOPPED_KINDS)) % len(PHASES)]
    num_ranks = generator.choice(KINDS[kind][1])
    return Trial(number, kind, num_ranks, generator.randrange(num_ranks), phase, generator.random(), timeout_s)


def table(noticed: Iterable[Noticed], timeout_s: float) -> str:
    """Stops and the seconds until they were noticed, by kind, ranks and phase."""
    seconds: dict[str, list[float]] = {}
    for each in noticed:
        for key in ("all", each.trial.kind, f"{each.trial.num_ranks} ranks", f"stopped in {each.trial.phase}"):
            seconds.setdefault(key, []).append(each.seconds)
    lines = [f"{'':24}{'noticed':>10}{'median s':>10}{'most s':>10}   (collective_timeout_s {timeout_s:g})"]
    for key, values in sorted(seconds.items()):
        lines.append(f"{key:24}{len(values):10}{sorted(values)[len(values) // 2]:10.1f}{max(values):10.1f}")
    return "\n".join(lines)


def main() -> int:
    """Runs the trials that the command line asks for; returns how many stops were not noticed as they should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=40, help="go on until so many stops have come")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="collective_timeout_s of the trainings")
    parser.add_argument("--at-once", type=int, default=2, help="trials that run at once")
    parser.add_argument("--json", type=Path, help="write every stop to this file")
    options = parser.parse_args()
    failed: list[int] = []
    printing, begin_s = threading.Lock(), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        soak = Soak(Path(name))

        def run(number: int) -> bool:
            trial = trial_of(number, options.seed, options.timeout)
            try:
                # a training may be faster than the one that nobody stopped
                found = soak.run(trial) or soak.run(replace(trial, share=trial.share / 2))
                text = f"noticed after {found.seconds:.1f} s, step {found.step}" if found else "ended before it was stopped"
            except AssertionError as error:
                failed.append(number)
                text = f"FAILED, seed {options.seed}: {error}"
            with printing:
                print(f"{number:4} {trial.kind:10} {trial.num_ranks} ranks, rank {trial.rank}, {trial.phase}: {text}", flush=True)
            return options.only is None and len(soak.noticed) + len(failed) < options.stops

        run_at_once(run, options.first if options.only is None else options.only, options.at_once if options.only is None else 1)
    print(table(soak.noticed, options.timeout))
    minutes = (time.monotonic() - begin_s) / 60
    print(f"{len(soak.noticed)} stops noticed, {len(failed)} not: {failed}; seed {options.seed}, {minutes:.1f} minutes")
    if options.json:
        options.json.write_text(json.dumps({"failed": failed, "noticed": [asdict(each) for each in soak.noticed]}, indent=1))
    return len(failed)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
