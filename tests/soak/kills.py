"""Trainings killed at random moments and restarted: each goes on from its newest complete checkpoint, and no loss differs.

python tests/soak/kills.py --kills 200 --seed 0 --json kills.json

Each trial is a training that is killed up to three times: a rank, all ranks, the launcher, or the launcher with its process
group, in a chosen phase or at any moment. A restart counts as resumed, as one without any complete checkpoint, or as lost.
`--only N` runs trial N alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

if __name__ == "__main__":
    # for the helpers, here and in the forked processes
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    os.environ["PYTHONPATH"] = f"{sys.path[0]}:{os.environ.get('PYTHONPATH', '')}"

from helpers.ranks.killable import Launched
from soak.training import KINDS, LONGEST_S, NUM_STEPS, Case, Known, Timeline, Undisturbed, journals, run_at_once, train

from hf_longctx.hf.checkpoints.staging import is_whole, step_of

TOLERANCE = 1e-10
VICTIMS = ("rank", "launcher", "all", "group")
ANY_MOMENT = "any moment"
PHASES = ("indexing", "planning", "save", "evaluation", "resuming", ANY_MOMENT)
RESUMED, NONE, LOST = "resumed", "no checkpoint", "lost"


@dataclass(frozen=True, slots=True)
class Kill:
    """Whom to kill and when. `share`: place among all moments of the phase, 0 for the first and 1 for the last."""

    victim: str
    rank: int
    phase: str
    share: float

    def moment(self, timeline: Timeline) -> tuple[tuple[str, bool, int], float]:
        """The mark after which the kill comes, and the seconds in between, if the run is as fast as that of the timeline."""
        if self.phase != ANY_MOMENT:
            number, delay_s = timeline.place(self.phase, self.share)
            return (self.phase, True, number), delay_s
        moment_s = self.share * timeline.marks[-1][0]
        at_s, *mark = next(mark for mark in reversed(timeline.marks) if mark[0] <= moment_s)
        return (mark[0], mark[1], mark[2]), moment_s - at_s


@dataclass(frozen=True, slots=True)
class Trial:
    """A training of a kind, and the kills of its runs in their order."""

    number: int
    kind: str
    num_ranks: int
    limit: int
    kills: tuple[Kill, ...]

    @property
    def case(self) -> Case:
        return Case(self.kind, self.num_ranks, self.limit)


@dataclass(frozen=True, slots=True)
class Restart:
    """A kill that came, the phase that it came in, and how the run went on that was started after it."""

    trial: int
    kind: str
    num_ranks: int
    limit: int
    victim: str
    phase: str
    outcome: str


def run_once(trial: Trial, folder: Path, kill: Kill | None, known: Timeline) -> tuple[str | None, int]:
    """Runs a trial's training until it ends or is killed; returns the phase (None: not killed) and the exit code."""
    launched = Launched(train, (trial.case, str(folder)), trial.num_ranks, str(folder / "log"))
    start_s, timeline = time.monotonic(), Timeline()
    timeline.add(0.0, "start", True)
    mark, delay_s = kill.moment(known) if kill else (None, 0.0)
    killed_in, kill_s = None, float("inf")
    while True:
        if mark and timeline.marks[-1][1:] == mark:
            mark, kill_s = None, time.monotonic() + delay_s
        until_s = min(kill_s, start_s + LONGEST_S)
        if launched.reader.poll(max(0.0, until_s - time.monotonic())):
            try:
                timeline.add(time.monotonic() - start_s, *launched.reader.recv())
            except EOFError:
                return killed_in, launched.exit_code()
            continue
        if time.monotonic() > start_s + LONGEST_S:
            launched.kill_group()
            raise AssertionError(f"no end within {LONGEST_S:g} s")
        assert kill
        killed_in, kill_s = timeline.open_phases()[-1], float("inf")
        if kill.victim == "launcher":
            launched.kill_launcher()
        if kill.victim == "group":
            launched.kill_group()
        for rank in range(trial.num_ranks) if kill.victim == "all" else [kill.rank] if kill.victim == "rank" else []:
            launched.kill_rank(rank)


def complete_steps(out: Path) -> list[int]:
    """Steps of all complete checkpoints in an output folder, those that only lack their last name included."""
    inside = [*out.glob("checkpoint-*"), *out.glob(".checkpoint-*.partial/checkpoint-*")]
    return sorted(step for path in inside if is_whole(path) and (step := step_of(path)) is not None)


class Soak:
    """Runs trials and compares them with runs that nobody kills, of which there is one for each kind and number of ranks."""

    def __init__(self, folder: Path) -> None:
        self.undisturbed = Undisturbed(folder)
        self.restarts: list[Restart] = []

    def run(self, trial: Trial) -> list[str]:
        """Outcome of every restart of a trial; raises AssertionError if anything was lost."""
        known = self.undisturbed.known(trial.kind, trial.num_ranks)
        folder = self.undisturbed.new_folder(f"trial-{trial.number}")
        out = folder / "out"
        killed: list[tuple[Kill, str]] = []
        resumed: list[int] = []
        try:
            for kill in (*trial.kills, None):
                expected = max(complete_steps(out), default=0)
                num_began = len(self._began(trial, folder))
                phase, code = run_once(trial, folder, kill, known.timeline)
                began = self._began(trial, folder)[num_began:]
                assert all(step == expected for step in began), f"went on from {began}, complete was step {expected}"
                resumed.append(expected)
                self._check_values(trial, folder, known)
                if phase is None:
                    assert code == 0, "the run failed though nobody killed it"
                    break
                assert kill
                killed.append((kill, phase))
                self._check_checkpoints(trial, folder)
            self._check_end(trial, folder, resumed[-1])
        except AssertionError as error:
            self._record(trial, killed, [*resumed[1:], -1])
            log = folder / "log"
            tail = log.read_text()[-4000:] if log.exists() else ""
            phases = [phase for _, phase in killed]
            raise AssertionError(f"{error}\n{trial}\nkilled in {phases}; files:\n{_listing(out)}\n{tail}") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return self._record(trial, killed, resumed[1:])

    def _record(self, trial: Trial, killed: list[tuple[Kill, str]], steps: list[int]) -> list[str]:
        """Records how the run after each kill went on, given the step that it began with: 0 for the first, -1 if it was lost."""
        outcomes = [LOST if step < 0 else RESUMED if step else NONE for step in steps[: len(killed)]]
        self.restarts += [
            Restart(trial.number, trial.kind, trial.num_ranks, trial.limit, kill.victim, phase, outcome)
            for (kill, phase), outcome in zip(killed, outcomes, strict=False)
        ]
        return outcomes

    @staticmethod
    def _check_checkpoints(trial: Trial, folder: Path) -> None:
        """Raises AssertionError unless everything that was reported as saved is there, and everything in view is complete."""
        saved = [step for each in journals(trial.case, folder) for what, step, _ in each if what == "saved"]
        complete = complete_steps(folder / "out")
        assert max(saved, default=0) <= max(complete, default=0), f"{saved} were saved, complete are {complete}"
        torn = [path.name for path in (folder / "out").glob("checkpoint-*") if not is_whole(path)]
        assert not torn, f"in view, but not complete: {torn}"

    @staticmethod
    def _check_end(trial: Trial, folder: Path, began: int) -> None:
        losses = {step for what, step, _ in journals(trial.case, folder)[0] if what == "loss"}
        assert losses == set(range(1, NUM_STEPS + 1)), f"steps {sorted(losses)} were trained"
        left = sorted(path.name for path in (folder / "out").iterdir() if "checkpoint" in path.name)
        # a run that was killed between its last save and the deletion of an older one has no later save to delete it
        most = trial.limit + (began == NUM_STEPS)
        assert f"checkpoint-{NUM_STEPS}" in left and len(left) <= most, f"left are {left}"

    @staticmethod
    def _began(trial: Trial, folder: Path) -> list[int]:
        return [step for what, step, _ in journals(trial.case, folder)[0] if what == "began"]

    @staticmethod
    def _check_values(trial: Trial, folder: Path, known: Known) -> None:
        for rank, lines in enumerate(journals(trial.case, folder)):
            for what, step, value in lines:
                expected = known.values.get((what, step), value)
                assert abs(value - expected) <= TOLERANCE * abs(expected), (
                    f"{what} of step {step}: {value} on rank {rank}, {expected}"
                )

    def table(self) -> str:
        """Outcomes of restarts by kind, ranks, checkpoints kept, victim and phase in which the kill came."""
        names = (RESUMED, NONE, LOST)
        counts: dict[str, Counter[str]] = {}
        for each in self.restarts:
            keys = ["all", each.kind, f"{each.num_ranks} ranks", f"save_total_limit {each.limit}"]
            for key in (*keys, f"killed: {each.victim}", f"killed in {each.phase}"):
                counts.setdefault(key, Counter())[each.outcome] += 1
        lines = [f"{key:24}" + "".join(f"{counts[key][name]:16}" for name in names) for key in sorted(counts)]
        return "\n".join([" " * 24 + "".join(f"{name:>16}" for name in names), *lines])


def _listing(folder: Path) -> str:
    return "\n".join(f"{path.stat().st_size:9} {path}" for path in sorted(folder.rglob("*")) if path.is_file())


def trial_of(number: int, seed: int) -> Trial:
    """Trial `number`; kinds, phases and victims take turns, so that a few trials already show all of them."""
    generator = random.Random(f"{seed} {number}")
    kinds = list(KINDS)
    kind = kinds[number % len(kinds)]
    num_ranks = generator.choice(KINDS[kind][1])
    phase = PHASES[(number + number // len(kinds)) % len(PHASES)]
    if phase == "indexing" and kind == "stream":
        phase = "save"
    kills = [Kill(VICTIMS[number // 2 % len(VICTIMS)], generator.randrange(num_ranks), phase, generator.random())]
    for place in range(1, generator.randint(1, 3)):
        # a restarted run has fewer moments before it
        share = generator.random() / (1 + place)
        victim = VICTIMS[(number // 2 + place) % len(VICTIMS)]
        kills.append(Kill(victim, generator.randrange(num_ranks), generator.choice(["resuming", ANY_MOMENT, "save"]), share))
    return Trial(number, kind, num_ranks, generator.choice([1, 2]), tuple(kills))


def main() -> int:
    """Runs the trials that the command line asks for; returns how many of them lost something."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="go on until so many kills have come")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--at-once", type=int, default=3, help="trials that run at once")
    parser.add_argument("--json", type=Path, help="write every restart and the sums to this file")
    options = parser.parse_args()
    lost: list[int] = []
    printing, begin_s = threading.Lock(), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        soak = Soak(Path(name))

        def run(number: int) -> bool:
            trial, start_s = trial_of(number, options.seed), time.monotonic()
            try:
                outcomes = soak.run(trial)
                text = ", ".join(outcomes) or "ended before it was killed"
            except AssertionError as error:
                lost.append(number)
                text = f"LOST, seed {options.seed}: {error}"
            with printing:
                seconds = time.monotonic() - start_s
                print(f"{number:4} {trial.kind:10} {trial.num_ranks} ranks: {text} ({seconds:.1f} s)", flush=True)
            return options.only is None and len(soak.restarts) < options.kills

        run_at_once(run, options.first if options.only is None else options.only, options.at_once if options.only is None else 1)
    print(soak.table())
    minutes = (time.monotonic() - begin_s) / 60
    sums = {"kills": len(soak.restarts), **Counter(each.outcome for each in soak.restarts), "lost trials": lost}
    print(f"{json.dumps(sums)}, seed {options.seed}, {minutes:.1f} minutes")
    if options.json:
        options.json.write_text(json.dumps({**sums, "restarts": [asdict(each) for each in soak.restarts]}, indent=1))
    return len(lost)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
