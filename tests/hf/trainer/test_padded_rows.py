"""Rows that the tokenizer padded train as in the stock `Trainer`, through every door; tokens are counted by masks, not by ids."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from helpers.models.chats import tokenizer_of
from helpers.models.tiny_models import ModelCase, build_model
from helpers.trainers.stock_runs import quiet_config
from helpers.trainers.trainer_runs import training_arguments
from transformers import Trainer, default_data_collator

from hf_longctx import LongContextCallback, LongContextTrainer

NUM_ROWS, WIDTH, PAD = 12, 16, 3


def padded_rows() -> list[dict[str, list[int]]]:
    """Rows of one width, padded on the right with a token that also ends them."""
    draw, rows = random.Random(5), []
    for _ in range(NUM_ROWS):
        ids = [draw.randrange(4, 40) for _ in range(draw.randint(4, WIDTH - 1))] + [PAD]
        gap = WIDTH - len(ids)
        rows.append(
            {
                "input_ids": ids + [PAD] * gap,
                "labels": [-100, *ids[1:]] + [-100] * gap,
                "attention_mask": [1] * len(ids) + [0] * gap,
            }
        )
    return rows


def run(make: Callable[..., Trainer], rows: Any, folder: str, **changes: Any) -> tuple[list[float], float, int]:
    """Losses of three steps on 4 rows each, the loss of an evaluation, and the tokens seen."""
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "max_steps": 3,
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
    }
    # one batch of evaluation, since the stock trainer's mean is one over batches
    settings["per_device_eval_batch_size"] = NUM_ROWS
    arguments = training_arguments(folder, **{**settings, "include_num_input_tokens_seen": "non_padding", **changes})
    trainer = make(model=build_model(ModelCase()), args=arguments, train_dataset=rows, eval_dataset=rows_of(rows))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.evaluate()["eval_loss"], int(trainer.state.num_input_tokens_seen)


def rows_of(rows: Any) -> Any:
    return datasets.Dataset.from_list(padded_rows()) if isinstance(rows, datasets.IterableDataset) else rows


def stock(**given: Any) -> Trainer:
    return Trainer(data_collator=default_data_collator, **given)


def ours(**given: Any) -> Trainer:
    # the tokenizer's padding token is also the one that ends texts
    tokenizer = tokenizer_of(64)
    tokenizer.pad_token = tokenizer.eos_token = f"w{PAD}"
    is_stream = isinstance(given["train_dataset"], datasets.IterableDataset)
    settings = replace(quiet_config(), lookahead_batches=2 if is_stream else None)
    return LongContextTrainer(longctx_config=settings, processing_class=tokenizer, **given)


def attached(**given: Any) -> Trainer:
    trainer = stock(**given)
    LongContextCallback(quiet_config()).attach(trainer)
    return trainer


def alone(**given: Any) -> Trainer:
    return stock(callbacks=[LongContextCallback(quiet_config())], **given)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], float, int]:
    return run(stock, datasets.Dataset.from_list(padded_rows()), str(tmp_path_factory.mktemp("stock")))


@pytest.mark.daily("ours-stream")
@pytest.mark.parametrize(
    ("make", "kind"),
    [(ours, "arrow"), (ours, "left"), (ours, "rows"), (ours, "stream"), (attached, "arrow"), (alone, "arrow")],
)
def test_padded_rows_train_as_in_the_stock_trainer(
    make: Callable[..., Trainer], kind: str, expected: tuple[list[float], float, int], tmp_path: Path, caplog: Any
) -> None:
    rows = padded_rows()
    if kind == "left":
        for row in rows:
            gap = row["attention_mask"].count(0)
            row.update({name: values[WIDTH - gap :] + values[: WIDTH - gap] for name, values in row.items()})
    kinds = {"rows": lambda: rows, "stream": lambda: datasets.Dataset.from_list(rows).to_iterable_dataset()}
    losses, eval_loss, num_tokens = run(make, kinds.get(kind, lambda: datasets.Dataset.from_list(rows))(), str(tmp_path))
    assert losses == pytest.approx(expected[0], rel=1e-5) and eval_loss == pytest.approx(expected[1], rel=1e-5)
    assert num_tokens == expected[2] == sum(sum(row["attention_mask"]) for row in rows)
    said = [record.getMessage() for record in caplog.records if "tokens of padding" in record.getMessage()]
    assert (not said) == (make is alone) and len(said) == len(set(said))
