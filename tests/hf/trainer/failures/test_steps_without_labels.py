"""Rows, steps and sets in which no label counts: rows are told, steps and sets are refused by name."""

from __future__ import annotations

import logging
import tempfile
from typing import Any

import datasets
import pytest
import torch
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase
from helpers.trainers.trainer_runs import make_trainer, plain_training, train_on_rank

CASE = ModelCase(num_layers=1)
ROWS = random_rows([9] * 8)
SECOND_HALF: Any = [{**row, "labels": [-100] * 5 + row["input_ids"][5:]} for row in ROWS]
WEIGHTED: Any = [{**row, "loss_weights": [0.0] * 9} for row in ROWS]
# one row of four without labels
SOME: Any = [{**row, "labels": [-100] * 9 if number % 4 == 0 else row["input_ids"]} for number, row in enumerate(ROWS)]
CUT = {"max_length": 5, "long_sequences": "truncate"}
ONE = {"max_length": 1, "long_sequences": "truncate"}
SPLIT = {"max_length": 5, "long_sequences": "split"}
SINGLE = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}


def message(rows: Any, config: dict[str, Any], arguments: dict[str, Any], at_start: bool, **kwargs: Any) -> tuple[str, int]:
    """The error of a training that must not run, and the number of steps before it; `at_start`: no trainer may be made."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"max_steps": 8, "learning_rate": 1e-3, **arguments}
        if at_start:
            with pytest.raises(ValueError) as caught:
                make_trainer(CASE, rows, folder, config, arguments, **kwargs)
            return str(caught.value), 0
        trainer = make_trainer(CASE, rows, folder, config, arguments, **kwargs)
        with pytest.raises(ValueError) as caught:
            trainer.train()
        assert trainer.state.global_step or trainer.optimizer is None
    return str(caught.value), trainer.state.global_step


# name -> rows, settings, the problem
SETS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "one token": (
        ROWS,
        ONE,
        "train_dataset has no label that counts once its rows are cut to 1 tokens (long_sequences='truncate')",
    ),
    "one token, split": (ROWS, {**ONE, "long_sequences": "split"}, "cut to 1 tokens (long_sequences='split')"),
    "cut off": (SECOND_HALF, CUT, "once its rows are cut to 5 tokens"),
    "weights": (WEIGHTED, {}, "train_dataset has no token with a label that counts"),
    "masked": ([{**row, "labels": [-100] * 9} for row in ROWS], {}, "train_dataset has no token with a label that counts"),
}


@pytest.mark.parametrize("name", SETS)
def test_a_set_in_which_nothing_counts_is_refused_before_a_trainer_is_made(name: str) -> None:
    rows, config, expected = SETS[name]
    assert expected in message(rows, config, {}, at_start=True)[0]


def test_an_evaluation_set_in_which_nothing_counts_is_refused_too() -> None:
    held_out = datasets.Dataset.from_list(SECOND_HALF)
    found, _ = message(ROWS, CUT, {}, at_start=True, eval_dataset=held_out)
    assert "eval_dataset has no label that counts once its rows are cut to 5 tokens" in found


@pytest.mark.daily("pieces")
@pytest.mark.parametrize("name", ["masked rows", "pieces", "two batches a step"])
def test_a_step_in_which_nothing_counts_is_refused_before_the_first_step(name: str) -> None:
    rows, config, arguments = {
        "masked rows": (SOME, {}, SINGLE),
        # the first piece of every row has no label
        "pieces": (SECOND_HALF, SPLIT, SINGLE),
        "two batches a step": (SOME[:1] * 5 + SOME[1:2], {}, {**SINGLE, "gradient_accumulation_steps": 2}),
    }[name]
    found, steps = message(rows, config, arguments, at_start=False)
    assert "would have no label that counts: its" in found and "per_device_train_batch_size" in found and not steps


class Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def test_a_step_of_a_stream_in_which_nothing_counts_is_refused_when_it_comes() -> None:
    found, steps = message(Stream(SOME[1:4] + SOME[:1]), {"lookahead_batches": 2}, SINGLE, at_start=False)
    assert "step 4 has no label that counts" in found and steps == 3


def test_rows_without_labels_are_told_once_and_train_like_everywhere(caplog) -> None:
    case = ModelCase(num_layers=1)
    with caplog.at_level(logging.WARNING):
        losses, _, weights = train_on_rank(case, SOME, {}, {"max_steps": 4})
    told = [record.message for record in caplog.records if "have no label that counts" in record.message]
    assert len(told) == 1 and "train_dataset: 2 of 8 sequences have no label that counts" in told[0]
    expected, expected_weights = plain_training(case, SOME, 4)
    # warm-up and decay depend on the number of steps, the first steps are those of a longer run
    assert losses[:1] == pytest.approx(expected[:1], rel=1e-10)
    for name, weight in expected_weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-8, atol=1e-10)
