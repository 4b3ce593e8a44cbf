"""Pins the collectives of trainings of three steps on two ranks: `collectives.json` has their sequences.

Each sequence runs from the construction of the trainer to the end of `train()`, divided into phases: "constructor"; "start",
up to the first step; the steps, each with the planning of the next one; and "end", after the last step. Entries name the method
of the process group, a message's peer, the group's ranks, and dtype and shape of tensors; equal entries in a row are counted. A
collective on objects is one entry without sizes, since objects may have any. A new process group is an entry, too. The file has
only counts and a hash of a sequence with more than a hundred entries, as a self-test has.

Nothing here depends on time: heartbeats and roll calls go through the store of the process group, which is no collective and is
not recorded; no rates are measured on CPU ranks; and costs, by which plans are made, are fitted to measured steps only after the
fourth step. Collectives of other threads would be a phase of their own; there are none.

**A change may replace a sequence by a shorter one, or by one of equal length; a longer one needs a reason.** A failing test
prints both. `PYTHONPATH=tests python tests/snapshots/test_collectives.py` pins the new ones. They belong to the versions of
torch, transformers and accelerate that the file names, and are compared with these alone.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from helpers.measures.collectives import CollectiveRecord, recorded
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase
from helpers.ranks.rank_pool import RankPool
from helpers.trainers.trainer_runs import SKEWED, make_trainer
from transformers import TrainerCallback

PINNED = Path(__file__).parent / "collectives.json"
CASE = ModelCase(promoted=True, num_layers=4)
NUM_STEPS, NUM_RANKS = 3, 2
# name -> configuration and training arguments
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "replicated, with a self-test": ({"self_test": True}, {}),
    "sharded": ({"parameters": "gathered_per_round"}, {}),
    "sharded, saved after the second step": ({"parameters": "gathered_per_round"}, {"save_strategy": "steps", "save_steps": 2}),
    "two stages": ({"stages": 2, "tokens_per_rank": 64}, {}),
}
# entries of a phase that are pinned in full
_MOST_ENTRIES = 100
# a busy machine is no failure
_TIMEOUT_S = 250.0
# stands for the sequence of rank 0 in the same phase
AS_FIRST = "as on rank 0"


class Phases(TrainerCallback):
    """Divides a record into phases."""

    def __init__(self, record: CollectiveRecord) -> None:
        self.record = record

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.record.begin(f"step {state.global_step + 1}")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == NUM_STEPS:
            self.record.begin("end")


def run(config: dict[str, Any], arguments: dict[str, Any], folder: str) -> dict[str, list[str]]:
    """The collectives of a training on this rank, by phase."""
    with recorded() as record:
        record.begin("constructor")
        arguments = {"max_steps": NUM_STEPS, **arguments}
        trainer = make_trainer(CASE, random_rows(SKEWED), folder, config, arguments, callbacks=[Phases(record)])
        record.begin("start")
        trainer.train()
    return record.runs()


def sequences_of(name: str) -> list[dict[str, list[str]]]:
    """The collectives of every rank. A pool of its own, since ranks that have trained before have groups already."""
    pool = RankPool(NUM_RANKS)
    with tempfile.TemporaryDirectory() as folder:
        found = pool.run(run, *RUNS[name], folder, timeout_s=_TIMEOUT_S)
    pool.close()
    return found


def short(sequence: list[str]) -> Any:
    """The sequence of a phase as the file has it."""
    if len(sequence) <= _MOST_ENTRIES:
        return sequence
    counts: Counter[str] = Counter()
    for entry in sequence:
        head, _, rest = entry.partition(" x ")
        number, words = (int(head), rest.split()) if rest and head.isdigit() else (1, entry.split())
        counts[" ".join(words[:2]) if words[0] == "objects" else words[0]] += number
    return {"hash": hashlib.sha256("\n".join(sequence).encode()).hexdigest()[:16], "counts": dict(sorted(counts.items()))}


def pinned() -> dict[str, Any]:
    return dict(json.loads(PINNED.read_text()))


def versions() -> dict[str, str]:
    """The first two numbers of the versions of packages that have collectives of their own."""
    return {name: ".".join(version(name).split(".")[:2]) for name in ("torch", "transformers", "accelerate")}


@pytest.mark.parametrize("name", RUNS)
def test_a_training_makes_the_collectives_that_it_made(name: str) -> None:
    known = pinned()
    if versions() != known["versions"]:
        pytest.skip(f"collectives are pinned for {known['versions']}, not {versions()}")
    found = sequences_of(name)
    lines: list[str] = []
    for rank, (before, now) in enumerate(zip(known["runs"][name], found, strict=True)):
        for phase in dict.fromkeys((*before, *now)):
            old, new = before.get(phase, []), now.get(phase, [])
            old = known["runs"][name][0][phase] if old == AS_FIRST else old
            if short(new) == old:
                continue
            lines.append(f"rank {rank}, {phase}:")
            if isinstance(old, dict):
                lines += [f"  was {old}", f"  is {short(new)}", *(f"  {entry}" for entry in new)]
            else:
                lines += [f"  {line}" for line in difflib.ndiff(old, new) if not line.startswith("?")]
    assert not lines, "\n".join(lines)


if __name__ == "__main__":
    runs = {}
    for name in RUNS:
        first, *others = ({phase: short(entries) for phase, entries in each.items()} for each in sequences_of(name))
        equal = [{phase: AS_FIRST if first.get(phase) == own else own for phase, own in each.items()} for each in others]
        runs[name] = [first, *equal]
    PINNED.write_text(json.dumps({"versions": versions(), "runs": runs}, indent=1) + "\n")
