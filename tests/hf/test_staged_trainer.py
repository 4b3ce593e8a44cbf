"""The trainer on pipeline stages: the trajectory of one plain process, whatever the number of stages and groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import ModelCase, random_rows
from helpers.training import LossRecorder, make_trainer, plain_training
from test_trainer import SKEWED

NUM_STEPS = 10
ARGUMENTS = {"max_steps": NUM_STEPS, "logging_steps": 1}
CASE = ModelCase(promoted=True, num_layers=4)

Rows = list[dict[str, list[int]]]


@pytest.fixture(scope="module")
def rows() -> Rows:
    return random_rows(SKEWED)


def train(
    case: ModelCase, rows: Rows, folder: str, config: dict[str, Any], arguments: dict[str, Any]
) -> tuple[list[float], dict[str, torch.Tensor], list[int]]:
    """Losses and final weights of a run on this rank, and the stages and chunks of its plans."""
    trainer = make_trainer(case, rows, folder, config, {**ARGUMENTS, **arguments})
    recorder = LossRecorder()
    recorder.attach(trainer)
    trainer.train()
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return recorder.losses, weights, recorder.num_chunks


# name -> (ranks, settings, arguments)
RUNS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "two stages": (2, {"stages": 2, "tokens_per_rank": 64}, {"max_grad_norm": 0.0}),
}


@pytest.mark.parametrize("name", RUNS)
def test_steps_follow_one_plain_process(ranks, rows, tmp_path: Path, name: str) -> None:
    num_ranks, config, arguments = RUNS[name]
    expected_losses, expected = plain_training(CASE, rows, NUM_STEPS)
    results = ranks(num_ranks).run(train, CASE, rows, str(tmp_path), config, arguments)
    print(results[0][0], expected_losses)
    found: set[str] = set()
    for losses, weights, num_chunks in results:
        assert max(num_chunks) > 1
        assert losses == pytest.approx(expected_losses, rel=1e-10)
        assert max(float((w - expected[n]).abs().max() / expected[n].abs().max()) for n, w in weights.items()) <= 1e-10
        found |= weights.keys()
    assert found == expected.keys()
