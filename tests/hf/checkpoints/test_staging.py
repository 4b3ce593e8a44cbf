"""Folders beside checkpoints after a kill: the last complete one is never deleted, nor are files that no checkpoint wrote."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from helpers.ranks.rank_steps import group_pool

from hf_longctx.hf.checkpoints import staging
from hf_longctx.hf.checkpoints.manifest import Contents
from hf_longctx.hf.checkpoints.staging import SavingRanks, StagedCheckpoint, is_whole, publish, recover, seal

pytestmark = pytest.mark.quick

CONTENTS = Contents(step=5, num_ranks=1, num_stages=1, parameters="replicated", weights_only=False, data=None)


def checkpoint(folder: Path, state: str) -> None:
    """Writes a checkpoint that is "whole", "torn" after its manifest was written, "unsealed" (no manifest), or "missing"."""
    if state == "missing":
        return
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text("{}")
    (folder / "optimizer.pt").write_text(str(folder))
    if state != "unsealed":
        seal(folder, CONTENTS, SavingRanks(None))
    if state == "torn":
        (folder / "optimizer.pt").write_text("")


class Stopped(Exception):
    """The end of a process that is killed."""


def stop_at(number: int, patch: Any) -> None:
    """Ends the process before the change of this number to a folder."""
    calls = itertools.count(1)

    def stopping(function: Any) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            if next(calls) == number:
                raise Stopped
            return function(*args, **keywords)

        return call

    patch.setattr(Path, "rename", stopping(Path.rename))
    patch.setattr(staging.shutil, "rmtree", stopping(shutil.rmtree))


def places(run_dir: Path) -> dict[str, Path]:
    names = {"final": "checkpoint-5", "partial": ".checkpoint-5.partial/checkpoint-5", "replaced": ".checkpoint-5.replaced"}
    return {place: run_dir / name for place, name in names.items()}


STATES = ("whole", "torn", "unsealed", "missing")


@pytest.mark.parametrize("final", STATES)
def test_recovering_keeps_a_complete_checkpoint_wherever_it_stops(tmp_path: Path, monkeypatch, final: str) -> None:
    num_stopped = 0
    # hundreds of waits for the disk, which change nothing here
    monkeypatch.setattr(os, "fsync", lambda file: None)
    for case, (partial, replaced, stop) in enumerate(itertools.product(STATES, STATES, range(8))):
        run_dir = tmp_path / str(case)
        run_dir.mkdir()
        found = places(run_dir)
        states = {"final": final, "partial": partial, "replaced": replaced}
        for place, state in states.items():
            checkpoint(found[place], state)
        with monkeypatch.context() as patch:
            stop_at(stop, patch)
            try:
                recover(run_dir)
            except Stopped:
                num_stopped += 1
        had_whole = "whole" in states.values()
        everywhere = [*found.values(), run_dir / ".checkpoint-5.deleted"]
        assert any(map(is_whole, everywhere)) == had_whole, (states, stop)
        recover(run_dir)
        # one without a manifest may be worth as much, and stays
        assert is_whole(found["final"]) == (had_whole and final != "unsealed"), (states, stop)
        assert found["final"].exists() == (had_whole or final != "missing" or replaced != "missing")
        if "unsealed" in (final, replaced) and not had_whole:
            assert not (found["final"] / "longctx_checkpoint.json").exists() and (found["final"] / "optimizer.pt").read_text()
        if final != "unsealed":
            assert [path.name for path in run_dir.iterdir() if path.name.startswith(".")] == []
    assert num_stopped >= 20


def test_a_complete_one_that_could_not_be_brought_into_view_survives_the_next_save_of_its_step(tmp_path: Path) -> None:
    staged = StagedCheckpoint(tmp_path, 5, None)
    checkpoint(staged.folder, "whole")
    staged.open()
    assert is_whole(tmp_path / "checkpoint-5") and not list(staged.folder.iterdir())


def test_files_that_no_checkpoint_wrote_move_to_the_new_one(tmp_path: Path, caplog) -> None:
    """A subclass may write into the folder in view before the checkpoint is there, or after a save that is then repeated."""
    final, new = tmp_path / "checkpoint-5", tmp_path / "new"
    (final / "notes").mkdir(parents=True)
    for name in ("notes/mine.txt", "model_average.safetensors", "optimizer.pt"):
        (final / name).write_text("mine")
    checkpoint(new, "whole")
    publish(new, final)
    assert (final / "notes/mine.txt").read_text() == (final / "model_average.safetensors").read_text() == "mine"
    assert is_whole(final) and "the checkpoint's own replace: optimizer.pt" in caplog.text
    caplog.clear()
    # the step is saved again; a kill before the last deletion leaves the earlier one to `recover`
    (final / "tokens.json").write_text("old")
    final.rename(tmp_path / ".checkpoint-5.replaced")
    checkpoint(final, "whole")
    recover(tmp_path)
    assert (final / "tokens.json").read_text() == "old" and (final / "notes/mine.txt").read_text() == "mine"
    assert is_whole(final) and not list(tmp_path.glob(".*")) and not caplog.text


def seal_on_rank(folder: str) -> str:
    """The error of a seal whose second rank cannot list the folder, whose name is too long."""
    pool = group_pool()
    try:
        seal(Path(folder) if not dist.get_rank() else Path(folder, "x" * 300), CONTENTS, SavingRanks(pool.control))
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_rank_that_cannot_list_the_files_ends_the_seal_on_all(ranks, tmp_path: Path) -> None:
    for message in ranks(2).run(seal_on_rank, str(tmp_path)):
        assert "rank 1: OSError" in message and "File name too long" in message
