"""Checkpoints of models that classify: any placement goes on from those of another, and plain transformers loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models.classifiers import HEADS, classifier_rows
from helpers.models.reference import relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.versions import resuming
from helpers.ranks.rank_steps import whole
from helpers.trainers.trainer_runs import make_trainer
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

# 3 steps of 8 rows in an epoch, so the save is in the middle of one
LENGTHS = [61, 13, 40, 5, 1, 34, 8, 21, 3, 17, 9, 26, 2, 11, 30, 7, 19, 4, 23, 6, 15, 10, 12, 14]
ARGUMENTS = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "warmup_steps": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "replicated": {"tokens_per_rank": 64},
    "sharded": {"tokens_per_rank": 64, "parameters": "sharded"},
    "staged": {"tokens_per_rank": 96, "stages": 2},
}
AUTO_CLASSES: dict[str, Any] = {"tokens": AutoModelForTokenClassification}


def case_of(head: str) -> ModelCase:
    return ModelCase(promoted=True, head=tuple(HEADS[head].items()))


def train(head: str, folder: str, config: dict[str, Any], start: str) -> tuple[dict[str, torch.Tensor], float]:
    """This rank's weights after step 4, of a training that saves at step 2 or goes on from `start`, and its mean loss."""
    trainer = make_trainer(case_of(head), classifier_rows(head, LENGTHS), folder, config, ARGUMENTS)
    loss = trainer.train(resume_from_checkpoint=start or None).training_loss
    return {name: whole(p.detach()).clone() for name, p in trainer.model.named_parameters()}, loss


@pytest.mark.daily("regression-staged-2-sharded")
@resuming
@pytest.mark.parametrize(
    "head,first,num_ranks,then",
    [
        ("classes", "sharded", 2, "replicated"),
        ("classes", "sharded", 1, "replicated"),
        ("tokens", "sharded", 2, "staged"),
        ("regression", "staged", 2, "sharded"),
    ],
)
def test_a_resumed_training_ends_where_the_uninterrupted_one_does(
    ranks, tmp_path: Path, head: str, first: str, num_ranks: int, then: str
) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    straight = ranks(2).run(train, head, str(folders[0]), CONFIGS[first], "")
    resumed = ranks(num_ranks).run(train, head, str(folders[1]), CONFIGS[then], str(folders[0] / "checkpoint-2"))
    expected = {name: weight for weights, _ in straight for name, weight in weights.items()}
    found = {name: weight for weights, _ in resumed for name, weight in weights.items()}
    start = dict(build_model(case_of(head)).named_parameters())
    assert found.keys() == expected.keys() == start.keys()
    assert max(relative_error(weight, expected[name]) for name, weight in found.items()) <= 1e-10
    assert min(relative_error(weight, start[name].detach()) for name, weight in found.items()) > 1e-3
    for folder in folders:
        loaded = AUTO_CLASSES.get(head, AutoModelForSequenceClassification).from_pretrained(
            folder / "checkpoint-4", dtype=torch.float64
        )
        assert loaded.num_labels == HEADS[head]["num_labels"]
        plain = dict(loaded.named_parameters())
        assert plain.keys() == expected.keys()
        assert max(relative_error(weight.detach(), expected[name]) for name, weight in plain.items()) <= 1e-10
