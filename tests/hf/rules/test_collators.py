"""A collator is accepted only if plans train the same labels; every refusal names the collator, the value and the remedy."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
import transformers
from helpers.models.chats import number_tokenizer as tokenizer
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.trainers.stock_runs import quiet_config
from helpers.trainers.trainer_runs import training_arguments
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Trainer, default_data_collator

from hf_longctx import LongContextCallback, LongContextTrainer
from hf_longctx.hf.callback.exchange import read_documents
from hf_longctx.hf.data.scan import scan_dataset
from hf_longctx.hf.rules.collators import Collation

CASE = ModelCase(dtype=torch.float32)
LABELLED = datasets.Dataset.from_list(random_rows([5, 3, 8, 1]))
UNLABELLED = LABELLED.remove_columns("labels")
PACKED_ROWS = LABELLED.add_column("seq_lengths", [[len(ids)] for ids in LABELLED["input_ids"]])
EQUAL = datasets.Dataset.from_list(random_rows([6, 6, 6]))

ACCEPTED: dict[str, tuple[Any, Any]] = {
    "default": (default_data_collator, EQUAL),
    "default class": (transformers.DefaultDataCollator(), EQUAL),
    "padding": (transformers.DataCollatorWithPadding(tokenizer()), EQUAL),
    "sequence to sequence": (transformers.DataCollatorForSeq2Seq(tokenizer()), LABELLED),
    "flattening": (transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True), LABELLED),
    "flattening without labels": (transformers.DataCollatorWithFlattening(), UNLABELLED),
    "language modelling": (transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False), UNLABELLED),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_an_accepted_collator_teaches_the_labels_of_plans(name: str) -> None:
    collator, dataset = ACCEPTED[name]
    assert Collation(collator, "next_token").problems(dataset) == []
    found = read_documents({**collator(list(dataset)), "num_items_in_batch": torch.tensor(1)})
    expected = []
    for row in dataset:
        next_labels = [*row.get("labels", row["input_ids"])[1:], -100]
        expected += [list(pair) for pair in zip(row["input_ids"], next_labels, strict=True)]
    assert found.rows_T2.tolist() == expected


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "no batch": (lambda rows: rows, LABELLED, "data_collator <lambda> on train_dataset: it returns list; let it return a dict"),
    "no labels": (transformers.DataCollatorWithPadding(tokenizer()), UNLABELLED, "train_dataset has no column 'labels'"),
    "no labels default": (default_data_collator, UNLABELLED, "default_data_collator makes no labels"),
    "left": (transformers.DataCollatorForSeq2Seq(tokenizer(padding_side="left")), LABELLED, "pads on the left"),
    "learnt padding": (
        transformers.DataCollatorForSeq2Seq(tokenizer(), label_pad_token_id=0),
        LABELLED,
        "label_pad_token_id=0, which would be learnt",
    ),
    "separator": (transformers.DataCollatorWithFlattening(separator_id=0), LABELLED, "separator_id=0"),
    "packed": (default_data_collator, PACKED_ROWS, "has a column 'seq_lengths', by which plans would divide rows"),
    "packed, flattened": (transformers.DataCollatorWithFlattening(), PACKED_ROWS, "has a column 'seq_lengths'"),
    "packed, plain rows": (
        default_data_collator,
        list(PACKED_ROWS),
        "has a column 'seq_lengths', by which plans would divide rows",
    ),
    "no positions": (
        transformers.DataCollatorWithFlattening(return_position_ids=False),
        LABELLED,
        "return_position_ids=False and position_ids_start=0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_collator_that_teaches_something_else_is_refused(name: str) -> None:
    collator, dataset, message = REFUSED[name]
    (problem,) = Collation(collator, "next_token").problems(dataset)
    assert message in problem
    # rows of a stream are looked at as they come
    with pytest.raises(ValueError) as refused:
        Collation(collator).stream_row(next(iter(dataset)))
    assert message.split(" on train_dataset: ")[-1] in str(refused.value)


class Sized(torch.utils.data.IterableDataset):
    """A stream that knows its length."""

    def __iter__(self) -> Any:
        return iter(LABELLED)

    def __len__(self) -> int:
        return len(LABELLED)


def test_rows_of_a_sized_stream_are_not_looked_up() -> None:
    assert Collation(default_data_collator, "next_token").problems(Sized()) == []


def test_masked_language_modelling_is_refused() -> None:
    words = {str(number): number for number in range(65)}
    masked = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words)), pad_token="64", mask_token="63")
    (problem,) = Collation(transformers.DataCollatorForLanguageModeling(masked), "next_token").problems(UNLABELLED)
    assert "mlm=True" in problem


def padded(rows: list[dict[str, Any]], learns_padding: bool = False, **more: Any) -> dict[str, Any]:
    """A user's collator: pads on the right, with every token and perhaps the padding as labels."""
    made = tokenizer("0").pad([{"input_ids": row["input_ids"]} for row in rows], padding=True, return_tensors="pt")
    labels = made["input_ids"].clone()
    if not learns_padding:
        labels[made["attention_mask"] == 0] = -100
    return {**made, "labels": labels, **more}


def prompt_masked(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A user's collator that learns all but the first three tokens."""
    made = padded(rows)
    made["labels"][:, :3] = -100
    return made


def tokenised(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A user's collator that reads text; its padding token is a word of the rows, which then has no label."""
    own = tokenizer(str(LABELLED[0]["input_ids"][1]))
    made = own([" ".join(map(str, row["words"])) for row in rows], padding=True, return_tensors="pt", return_token_type_ids=False)
    made["labels"] = made["input_ids"].masked_fill(made["input_ids"] == own.pad_token_id, -100)
    return made


class Subclass(transformers.DataCollatorForSeq2Seq):
    """Masks what a subclass masks."""

    def __call__(self, features: Any, return_tensors: Any = None) -> Any:
        made = super().__call__(features, return_tensors)
        made["labels"][:, :2] = -100
        return made


def random_labels(rows: list[dict[str, Any]]) -> dict[str, Any]:
    made = padded(rows)
    return {**made, "labels": made["labels"].where(torch.rand(made["labels"].shape) < 0.5, -100)}


def of_tuples(rows: list[tuple[torch.Tensor]]) -> dict[str, Any]:
    ids = torch.stack([row[0] for row in rows])
    return {"input_ids": ids, "labels": ids.where(torch.arange(6) > 1, -100)}


def joined(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ids = torch.tensor([[token for row in rows for token in row["input_ids"]]])
    return {"input_ids": ids, "labels": ids}


def beside(rows: list[dict[str, Any]]) -> dict[str, Any]:
    made = padded(rows)
    return made if len(rows) == 1 else {**made, "labels": made["labels"].where(made["labels"] == -100, 1)}


OTHERS: dict[str, tuple[Any, str]] = {
    "learnt padding": (partial(padded, learns_padding=True), "it gives padding a label, of which there is more or less beside"),
    "pictures": (partial(padded, pixel_values=torch.zeros(1, 3)), "it returns 'pixel_values', which plans do not read"),
    "no labels": (lambda rows: {"input_ids": padded(rows)["input_ids"]}, "it returns no 'labels', so that `Trainer` would have"),
    "random": (random_labels, "two calls on the same row gave different tokens or labels, so it draws random numbers"),
    "packs": (joined, "it makes input_ids of shape [1, "),
    "beside others": (beside, "it makes other tokens or labels of a row beside another row than of the row alone"),
    "fails": (lambda rows: rows[0]["text"], "it failed on 1 row (KeyError: 'text'); plans call it on one row at a time"),
    "positions": (
        lambda rows: {**padded(rows), "position_ids": 7 + torch.arange(len(padded(rows)["input_ids"][0])).expand(len(rows), -1)},
        "its position_ids do not count from 0 in every row",
    ),
    "holes": (lambda rows: {**padded(rows), "attention_mask": holes(rows)}, "its attention_mask is not 1 for all tokens but"),
    "lists": (
        lambda rows: {name: value[0] for name, value in padded(rows).items()},
        "from one row; let it return [rows, tokens]",
    ),
}


def holes(rows: list[dict[str, Any]]) -> torch.Tensor:
    mask = torch.ones_like(padded(rows)["input_ids"])
    mask[:, 1] = 0
    return mask


@pytest.mark.parametrize("name", OTHERS)
def test_a_users_collator_that_cannot_be_read_is_refused_by_what_it_does(name: str) -> None:
    collator, message = OTHERS[name]
    before = torch.random.get_rng_state()
    rows = datasets.Dataset.from_list(random_rows([5, 9, 8, 4]))
    (problem,) = Collation(collator).problems(rows, "eval_dataset['a']")
    assert message in problem and problem.startswith("data_collator ") and " on eval_dataset['a']: " in problem
    # random numbers of the training are those of before
    assert torch.equal(before, torch.random.get_rng_state())
    # a stream's rows are tried as they come
    with pytest.raises(ValueError, match=r"^data_collator .*: ") as refused:
        collation = Collation(collator)
        for row in rows:
            collation.stream_row(row)
    assert message in str(refused.value)


# words of text beside token ids, which only a collator reads
WORDS = LABELLED.add_column("words", LABELLED["input_ids"])
DOORS = ["trainer", "attached"]
FOUND: dict[str, tuple[Any, Any]] = {
    "language modelling, pad is a word": (
        transformers.DataCollatorForLanguageModeling(tokenizer(str(LABELLED[0]["input_ids"][1])), mlm=False),
        UNLABELLED,
    ),
    "language modelling, plain rows": (
        transformers.DataCollatorForLanguageModeling(tokenizer(str(LABELLED[0]["input_ids"][1])), mlm=False),
        [{"input_ids": row["input_ids"]} for row in LABELLED],
    ),
    "sequence to sequence": (transformers.DataCollatorForSeq2Seq(tokenizer("0")), LABELLED),
    "default": (default_data_collator, EQUAL),
    "flattening": (transformers.DataCollatorWithFlattening(), LABELLED),
    "classes of tokens": (transformers.DataCollatorForTokenClassification(tokenizer("0")), LABELLED),
    "a function": (padded, UNLABELLED),
    "a mask of prompts": (prompt_masked, UNLABELLED),
    "text": (tokenised, WORDS),
    "tuples": (of_tuples, torch.utils.data.TensorDataset(torch.tensor(EQUAL["input_ids"])[:, :6].repeat(2, 1))),
    "a subclass": (Subclass(tokenizer("0")), LABELLED),
}


def losses(trainer: Any, callback: LongContextCallback | None = None) -> list[float]:
    if callback is not None:
        callback.attach(trainer)
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


@pytest.mark.daily("language modelling, pad is a word-trainer", "text-attached")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", FOUND)
def test_a_collator_has_the_effect_on_losses_that_it_has_in_a_stock_trainer(
    tmp_path: Path, name: str, door: str, caplog: pytest.LogCaptureFixture
) -> None:
    collator, rows = FOUND[name]
    is_lone = name == "text"
    arguments = {"max_steps": 3, "logging_steps": 1, "per_device_train_batch_size": 4, "train_sampling_strategy": "sequential"}
    args = training_arguments(str(tmp_path), **arguments, remove_unused_columns=not is_lone, per_device_eval_batch_size=4)
    sets = {"data_collator": collator, "train_dataset": rows, "eval_dataset": rows}
    stock = Trainer(build_model(CASE), args, **sets)
    expected, evaluated = losses(stock), stock.evaluate()["eval_loss"]
    if door == "trainer":
        trainer: Any = LongContextTrainer(build_model(CASE), args, **sets, longctx_config=quiet_config())
        found = losses(trainer)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(evaluated, abs=2e-5)
    else:
        found = losses(Trainer(build_model(CASE), args, **sets), LongContextCallback(quiet_config()))
    assert found == pytest.approx(expected, abs=2e-5)
    # columns that a collator reads are not named as unread
    assert "columns not read" not in caplog.text


def stream_on_rank(folder: str) -> list[float]:
    rows = LABELLED.remove_columns("labels").to_iterable_dataset()
    args = training_arguments(folder, max_steps=2, logging_steps=1, per_device_train_batch_size=4 // dist.get_world_size())
    config = quiet_config(lookahead_batches=1)
    return losses(LongContextTrainer(build_model(CASE), args, prompt_masked, rows, longctx_config=config))


def test_rows_of_a_stream_are_made_by_the_collator(ranks, tmp_path: Path) -> None:
    args = training_arguments(str(tmp_path), max_steps=2, logging_steps=1, per_device_train_batch_size=4)
    expected = losses(Trainer(build_model(CASE), args, prompt_masked, UNLABELLED))
    for found in ranks(2).run(stream_on_rank, str(tmp_path)):
        assert found == pytest.approx(expected, abs=2e-5)


def test_a_set_that_comes_late_is_tried_too(tmp_path: Path) -> None:
    args = training_arguments(str(tmp_path), per_device_train_batch_size=4)
    trainer = LongContextTrainer(build_model(CASE), args, padded, UNLABELLED, longctx_config=quiet_config())
    with pytest.raises(ValueError, match="data_collator padded on eval_dataset: it failed on 1 row"):
        trainer.evaluate(datasets.Dataset.from_list([{"labels": [1, 2]}, {"labels": [3]}]))
    assert len(trainer.predict(UNLABELLED).predictions) == len(UNLABELLED)


def test_a_row_that_no_column_reaches_is_explained() -> None:
    (problem,) = Collation(tokenised, columns=["input_ids"]).problems(datasets.Dataset.from_list([{"words": [1, 2]}]))
    assert "the model's forward takes none of the columns words" in problem and "remove_unused_columns=False" in problem


BAD_ROWS: dict[str, tuple[Any, str]] = {
    "no token ids": ([{"text": "a"}], "has no column 'input_ids' (it has text)"),
    "lists in lists": ([{"input_ids": [[1], [2, 3]]}], "row 0 column 'input_ids' holds [[1], [2, 3]]"),
    "nothing": ([{"input_ids": [1, 0]}, None], "row 1 is None"),
    "text": (datasets.Dataset.from_dict({"input_ids": ["ab"]}), "column 'input_ids' holds string"),
    "texts": (datasets.Dataset.from_dict({"input_ids": [["ab"]]}), "column 'input_ids' holds list<item: string>"),
    "numbers": (datasets.Dataset.from_dict({"input_ids": [3]}), "column 'input_ids' holds int"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_rows_that_are_no_tokens_are_refused_by_name(name: str) -> None:
    rows, message = BAD_ROWS[name]
    known = Collation(transformers.DataCollatorForLanguageModeling(tokenizer("0"), mlm=False))
    (problem,) = scan_dataset(known.rows(rows), "train_dataset", 64).problems
    assert message in problem
    (problem,) = Collation(padded).problems(rows)
    assert problem.startswith("data_collator padded on train_dataset: it ")


def test_a_class_in_place_of_a_set_is_left_to_the_check_of_sets() -> None:
    class Rows:
        """Rows by number, once there is an object."""

        def __len__(self) -> int:
            return 1

        def __getitem__(self, number: int) -> Any:
            return {"input_ids": [1, 2]}

    assert Collation(transformers.default_data_collator).problems(Rows) == []
