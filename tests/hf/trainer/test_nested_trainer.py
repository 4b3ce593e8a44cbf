"""Training with nested plans: every step's loss is that of plans whose ranks all wait for each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase
from helpers.models.versions import resuming
from helpers.ranks.rank_steps import whole
from helpers.trainers.stock_runs import make_stock_trainer, quiet_config
from helpers.trainers.trainer_runs import LossRecorder, make_trainer

from hf_longctx import LongContextCallback

CASE = ModelCase(promoted=True)
# steps of eight equal sequences, which no number of full micro-batches holds evenly, or of one long one and seven
LENGTHS = [61, *[13] * 39]
NUM_STEPS = 8
# costs that were not measured give the same plans every time
CONFIG = {"tokens_per_rank": 24, "calibration_steps": 0}
ARGUMENTS = {"max_steps": NUM_STEPS, "logging_steps": 1}


Run = tuple[list[float], list[str], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, list[int]]]:
    return random_rows(LENGTHS)


def train(rows: list[dict[str, list[int]]], folder: str, config: dict[str, Any], arguments: dict[str, Any], way: str) -> Run:
    """Losses and layouts of all steps and final weights of a run on this rank, from the checkpoint `resume` if given."""
    resume = arguments.pop("resume", None)
    if way == "trainer":
        trainer: Any = make_trainer(CASE, rows, folder, {**CONFIG, **config}, {**ARGUMENTS, **arguments})
    else:
        trainer = make_stock_trainer(CASE, rows, folder, {**ARGUMENTS, **arguments})
        LongContextCallback(quiet_config(**{**CONFIG, **config})).attach(trainer)
    recorder = LossRecorder()
    recorder.attach(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return recorder.losses, recorder.layouts, {n: whole(p.detach()).clone() for n, p in trainer.model.named_parameters()}


def leaves_ranks_out(layout: str) -> bool:
    """Whether some micro-batch of a layout such as "<2,1,1>,<1>" has groups of fewer than four ranks together."""
    return any(sum(map(int, part.split(","))) < 4 for part in layout[1:-1].split(">,<"))


@pytest.fixture(scope="module")
def plain(ranks, rows, tmp_path_factory) -> Run:
    """The run with the switch off."""
    found = ranks(4).run(train, rows, str(tmp_path_factory.mktemp("plain")), {"nested": False}, {}, "trainer")[0]
    assert not any(map(leaves_ranks_out, found[1]))
    return found


def same(found: Run, expected: Run, first: int = 0) -> None:
    assert found[0] == pytest.approx(expected[0][first:], rel=1e-10)
    assert max(float((found[2][n] - w).abs().max() / w.abs().max()) for n, w in expected[2].items()) <= 1e-10


# pairs of ranks, of which an odd one leaves a block out
SHARDED = {"parameters": "sharded", "shard_ranks": 2, "degrees": [2, 4], "tokens_per_rank": 37}
RUNS = {"replicated": ({}, "trainer"), "copies of shards": (SHARDED, "trainer"), "callback": ({}, "callback")}


@pytest.mark.daily("callback")
@pytest.mark.parametrize("name", RUNS)
def test_nested_steps_follow_those_that_wait_for_everyone(ranks, rows, plain: Run, tmp_path: Path, name: str) -> None:
    config, way = RUNS[name]
    for found in ranks(4).run(train, rows, str(tmp_path), config, {}, way):
        assert sum(map(leaves_ranks_out, found[1])) >= 2, found[1]
        same(found, plain)


@pytest.mark.wide
@resuming
@pytest.mark.parametrize("config", [{}, SHARDED], ids=["replicated", "copies of shards"])
def test_a_nested_run_resumes(ranks, rows, plain: Run, tmp_path: Path, config: dict[str, Any]) -> None:
    saving = {"save_strategy": "steps", "save_steps": 5}
    for found in ranks(4).run(train, rows, str(tmp_path), config, saving, "trainer"):
        same(found, plain)
    resumed = {"resume": str(tmp_path / "checkpoint-5")}
    for found in ranks(4).run(train, rows, str(tmp_path), config, resumed, "trainer"):
        assert len(found[0]) == NUM_STEPS - 5
        assert any(map(leaves_ranks_out, found[1]))
        same(found, plain, first=5)
