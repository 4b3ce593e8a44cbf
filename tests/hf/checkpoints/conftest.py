"""Checkpoints that the tests here damage."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.trainers.killed_saves import run


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Output folders with the checkpoints of steps 2 and 4, and the losses of all steps, by kind."""
    known: dict[str, tuple[Path, list[float]]] = {}

    def folder_and_losses(kind: str) -> tuple[Path, list[float]]:
        if kind not in known:
            folder = tmp_path_factory.mktemp(kind)
            losses = ranks(2).run(run, kind, str(folder))[0][1]
            shutil.rmtree(folder / "checkpoint-6")
            known[kind] = folder, losses
        return known[kind]

    return folder_and_losses
