"""A collator is accepted only if plans train the same labels; every refusal names the collator, the value and the remedy."""

from __future__ import annotations

from typing import Any

import datasets
import pytest
import torch
import transformers
from helpers.models.chats import number_tokenizer as tokenizer
from helpers.models.reference import random_rows
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, default_data_collator

from hf_longctx.hf.stock.collators import collator_problems
from hf_longctx.hf.stock.exchange import read_documents

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
    assert collator_problems(collator, dataset) == []
    found = read_documents({**collator(list(dataset)), "num_items_in_batch": torch.tensor(1)})
    expected = []
    for row in dataset:
        next_labels = [*row.get("labels", row["input_ids"])[1:], -100]
        expected += [list(pair) for pair in zip(row["input_ids"], next_labels, strict=True)]
    assert found.rows_T2.tolist() == expected


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "unknown": (lambda rows: rows, LABELLED, "data_collator is <lambda>"),
    "subclass": (
        type("Mine", (transformers.DataCollatorForSeq2Seq,), {})(tokenizer()),
        LABELLED,
        "data_collator is Mine, which is not tested, so plans might learn other tokens",
    ),
    "masked": (transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False), LABELLED, "overwrites the column 'labels'"),
    "no labels": (transformers.DataCollatorWithPadding(tokenizer()), UNLABELLED, "train_dataset has no column 'labels'"),
    "no labels default": (default_data_collator, UNLABELLED, "default_data_collator makes no labels"),
    "pad is a word": (
        transformers.DataCollatorForLanguageModeling(tokenizer(str(LABELLED[0]["input_ids"][1])), mlm=False),
        UNLABELLED,
        "no label anywhere, but plans would, and train_dataset contains it",
    ),
    "pad is a word in plain rows": (
        transformers.DataCollatorForLanguageModeling(tokenizer(str(LABELLED[0]["input_ids"][1])), mlm=False),
        [{"input_ids": row["input_ids"]} for row in LABELLED],
        "no label anywhere, but plans would, and train_dataset contains it",
    ),
    "left": (transformers.DataCollatorForSeq2Seq(tokenizer(padding_side="left")), LABELLED, "pads on the left"),
    "learnt padding": (
        transformers.DataCollatorForSeq2Seq(tokenizer(), label_pad_token_id=0),
        LABELLED,
        "label_pad_token_id=0, which would be learnt",
    ),
    "separator": (transformers.DataCollatorWithFlattening(separator_id=0), LABELLED, "separator_id=0"),
    "packed": (default_data_collator, PACKED_ROWS, "has a column 'seq_lengths', by which plans would divide rows"),
    "packed, flattened": (transformers.DataCollatorWithFlattening(), PACKED_ROWS, "has a column 'seq_lengths'"),
    "no positions": (
        transformers.DataCollatorWithFlattening(return_position_ids=False),
        LABELLED,
        "return_position_ids=False and position_ids_start=0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_collator_that_teaches_something_else_is_refused(name: str) -> None:
    collator, dataset, message = REFUSED[name]
    (problem,) = collator_problems(collator, dataset)
    assert message in problem


def test_masked_language_modelling_is_refused() -> None:
    words = {str(number): number for number in range(65)}
    masked = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words)), pad_token="64", mask_token="63")
    (problem,) = collator_problems(transformers.DataCollatorForLanguageModeling(masked), UNLABELLED)
    assert "mlm=True" in problem
