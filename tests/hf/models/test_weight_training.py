"""Trainings that drop attention weights follow plain transformers with the same masks, on any number of ranks and resumed."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from helpers.models.reference import random_rows, relative_error
from helpers.models.tiny_models import ModelCase
from helpers.trainers.stock_runs import make_stock_trainer, quiet_config
from helpers.trainers.trainer_runs import LossRecorder, plain_training, train_with_norms

from hf_longctx import LongContextCallback

CASE = ModelCase(promoted=True, dropout=0.2)
ROWS = random_rows([40, 13, 5, 8, 21, 34, 3, 9] * 3)
NUM_STEPS = 3
TOLERANCE = 1e-10
SAVING = {"max_steps": NUM_STEPS, "save_strategy": "steps", "save_steps": 1}


def assert_plain(found: Any, start: int = 0) -> None:
    losses, weights = plain_training(CASE, ROWS, NUM_STEPS)
    assert found[0] == pytest.approx(losses[start:], rel=TOLERANCE)
    assert max(relative_error(found[-1][name], weight) for name, weight in weights.items()) <= TOLERANCE


@pytest.mark.wide
def test_one_rank_and_two_and_a_resumed_run_follow_one_plain_process(ranks, tmp_path: Path) -> None:
    without, _ = plain_training(ModelCase(promoted=True), ROWS, NUM_STEPS)
    assert abs(without[0] - plain_training(CASE, ROWS, NUM_STEPS)[0][0]) > 1e-4, "nothing was dropped"
    config = {"tokens_per_rank": 48}
    for found in ranks(2).run(train_with_norms, CASE, ROWS, str(tmp_path / "two"), config, SAVING):
        assert_plain(found)
    arguments = {"max_steps": NUM_STEPS, "resume": str(tmp_path / "two" / "checkpoint-1")}
    assert_plain(train_with_norms(CASE, ROWS, str(tmp_path / "one"), {"tokens_per_rank": 64}, {"max_steps": NUM_STEPS}))
    assert_plain(train_with_norms(CASE, ROWS, str(tmp_path / "again"), {"tokens_per_rank": 64}, arguments), start=1)


def test_an_attached_stock_trainer_follows_it_too() -> None:
    recorder = LossRecorder()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_stock_trainer(CASE, ROWS, folder, {"max_steps": NUM_STEPS})
        LongContextCallback(quiet_config(tokens_per_rank=64)).attach(trainer)
        recorder.attach(trainer)
        trainer.train()
    assert_plain((recorder.losses, {name: p.detach() for name, p in trainer.model.named_parameters()}))
