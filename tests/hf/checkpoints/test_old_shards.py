"""Optimizer states of earlier releases go on bit by bit as those releases read them, on any number of ranks."""

from __future__ import annotations

import json
import tarfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from helpers.models.versions import resuming
from helpers.trainers.old_checkpoints import KINDS, merged, train

KEPT = Path(__file__).parent / "old_checkpoints"
EXPECTED: dict[str, Any] = json.loads((KEPT / "expected.json").read_text())


def checkpoint_of(kind: str, folder: Path) -> str:
    if kind == "low-bit" and find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    target = folder / "checkpoint-2"
    with tarfile.open(KEPT / f"{kind}.tar.xz") as archive:
        archive.extractall(target, filter="data")
    return str(target)


@resuming
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_as_with_the_release_that_wrote_its_checkpoint(ranks, tmp_path: Path, kind: str) -> None:
    checkpoint, expected = checkpoint_of(kind, tmp_path), EXPECTED[kind]
    found = merged(ranks(2).run(train, kind, kind, str(tmp_path / "out"), checkpoint))
    assert found["states"] == expected["states"] and found["groups"] == expected["groups"]
    # processors may add in another order
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)


@resuming
@pytest.mark.parametrize(("kind", "placed", "num_ranks"), [("sharded", "sharded", 3), ("sharded", "replicated", 1), ("sharded", "staged", 4), ("staged", "sharded", 2), ("whole", "sharded", 3), ("low-bit", "replicated", 1)])
def test_states_are_the_same_wherever_a_run_goes_on(ranks, tmp_path: Path, kind: str, placed: str, num_ranks: int) -> None:
    checkpoint = checkpoint_of(kind, tmp_path)
    found = merged(ranks(num_ranks).run(train, kind, placed, str(tmp_path / "out"), checkpoint))
    expected = EXPECTED[kind]["states"]
    assert {name: each for name, each in found["states"].items() if name in expected} == expected
