"""A rank is killed at every place of a save; the restarted run goes on from the last complete checkpoint with equal losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.models.versions import resuming
from helpers.ranks.forked import CPU, start_ranks
from helpers.trainers.killed_saves import NUM_STEPS, run, whole_checkpoints

PROGRAM = """
import sys
from helpers.trainers.killed_saves import plant, trainer_of

kind, folder, place, step, limit = sys.argv[1:]
trainer = trainer_of(kind, folder, {"async_save": place.endswith("behind")}, save_total_limit=int(limit))
plant(trainer, place, int(step))
trainer.train(resume_from_checkpoint=True)
"""

# place -> the step from which the restart goes on, if the save after step 4 was killed there
BEFORE_MANIFEST, AFTER_MANIFEST = 2, 4
PLACES = {
    "weights": BEFORE_MANIFEST,
    "sums of rank 1": BEFORE_MANIFEST,
    "manifest": BEFORE_MANIFEST,
    "writing behind": BEFORE_MANIFEST,
    "rename behind": AFTER_MANIFEST,
    "rename": AFTER_MANIFEST,
    "flush": AFTER_MANIFEST,
    "rotation": AFTER_MANIFEST,
    "deletion": AFTER_MANIFEST,
}
CASES = [("replicated", place) for place in PLACES]
# files that these kinds write in their own way; the state, the manifest, the new name and the rotation are the same for all
CASES += [("sharded", place) for place in ("optimizer", "sums of rank 1", "writing behind", "second file")]
CASES += [("staged", "weights"), ("attached", "optimizer"), ("stream", "rng of rank 1")]
CASES += [("callback", place) for place in ("weights", "deletion")]


@pytest.fixture(scope="module")
def straight(ranks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Losses of runs that nobody kills, by kind."""
    known: dict[str, list[float]] = {}

    def losses(kind: str) -> list[float]:
        if kind not in known:
            known[kind] = ranks(2).run(run, kind, str(tmp_path_factory.mktemp(kind)))[0][1]
        return known[kind]

    return losses


def killed(folder: Path, kind: str, place: str, step: int, limit: int = 1) -> None:
    """Starts a run on two ranks and waits until one of them was killed and the other has given up or was ended."""
    program, out = folder / "program.py", folder / "out"
    program.write_text(PROGRAM)
    started = start_ranks(program, [kind, str(out), place, str(step), str(limit)], 2, folder, CPU)
    victim = 1 if place.endswith("rank 1") else 0
    try:
        assert started[victim].wait(200) == -9, (folder / "stderr.txt").read_text()
    finally:
        for each in started:
            each.kill()


@pytest.mark.daily("replicated-rename")
@pytest.mark.slow
@resuming
@pytest.mark.parametrize("kind,place", CASES)
def test_a_killed_save_costs_no_complete_checkpoint(ranks, straight, tmp_path: Path, kind: str, place: str) -> None:
    killed(tmp_path, kind, place, step=4)
    out = tmp_path / "out"
    # in view there are only checkpoints that are complete, and the last complete one is among them
    in_view = sorted(path.name for path in out.glob("checkpoint-*"))
    assert in_view and in_view == whole_checkpoints(out)
    for first, losses in ranks(2).run(run, kind, str(out), True, None, {"save_total_limit": 1}):
        assert first == PLACES.get(place, BEFORE_MANIFEST)
        assert losses == pytest.approx(straight(kind)[first:], rel=1e-10, abs=0)
    assert [path.name for path in out.iterdir() if "checkpoint" in path.name] == [f"checkpoint-{NUM_STEPS}"]


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["replicated", "callback"])
def test_a_run_killed_in_its_first_save_starts_anew_and_says_so(ranks, straight, tmp_path: Path, kind: str) -> None:
    killed(tmp_path, kind, "state", step=2, limit=2)
    assert not list((tmp_path / "out").glob("checkpoint-*"))
    for first, losses in ranks(2).run(run, kind, str(tmp_path / "out"), True):
        assert first == 0
        assert losses == pytest.approx(straight(kind), rel=1e-10, abs=0)


@pytest.mark.wide
@resuming
@pytest.mark.parametrize("kind", ["replicated", "stream"])
def test_a_run_killed_after_its_last_save_trains_no_further_step(ranks, tmp_path: Path, kind: str) -> None:
    ranks(2).run(run, kind, str(tmp_path))
    for found in ranks(2).run(run, kind, str(tmp_path), True):
        assert found == (NUM_STEPS, [])
    assert not (tmp_path / f"checkpoint-{NUM_STEPS + 1}").exists()
