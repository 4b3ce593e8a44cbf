"""Rows drawn at random, good and bad: each gives tokens, or an error that names it; Python's own errors never come through."""

from __future__ import annotations

import random
from typing import Any

import datasets
import numpy as np
import pytest
from helpers.models.chats import byte_tokenizer

from hf_longctx import DataError, tokenise_chat, tokenise_completions, tokenise_text
from hf_longctx.hf.data.collator import PlannedDataset
from hf_longctx.hf.data.sampler import SequenceIndex
from hf_longctx.hf.data.scan import row_tokens, scan_dataset, token_rows

ODD: list[Any] = [None, 0, 1, -1, 0.5, True, "", "x", [], {}, [None], [[]], [1, [2]], {"a": None}, float("nan"), 10**30, "1"]
TOKEN_COLUMNS = [
    "input_ids",
    "labels",
    "attention_mask",
    "loss_weights",
    "position_ids",
    "seq_lengths",
    "id",
    "weight",
    "my_mask",
]
MESSAGE_FIELDS = ["role", "content", "from", "value", "weight", "loss", "train", "tool_calls", "name", "thing", "id"]


def value(draw: random.Random) -> Any:
    return draw.choice(ODD)


def message(draw: random.Random) -> Any:
    if draw.random() < 0.02:
        return value(draw)
    role = draw.choice(["user", "assistant", "system", "tool"])
    made: dict[str, Any] = {"role": role, "content": draw.choice(["hi", "", "a b", [{"type": "text", "text": "t"}]])}
    if draw.random() < 0.1:
        made = {"from": draw.choice(["human", "gpt", "bot", ["gpt"]]), "value": "hi"}
    for _ in range(draw.choice([0] * 12 + [1, 2])):
        made[draw.choice(MESSAGE_FIELDS)] = value(draw)
    return made


def token_row(draw: random.Random) -> Any:
    if draw.random() < 0.05:
        return value(draw)
    count = draw.randint(0, 5)
    row: dict[str, Any] = {"input_ids": [draw.randrange(64) for _ in range(count)]}
    if draw.random() < 0.5:
        row["labels"] = [draw.choice([-100, 3]) for _ in range(count)]
    if draw.random() < 0.5:
        row["attention_mask"] = [draw.choice([0, 1]) for _ in range(count)]
    for _ in range(draw.choice([0, 0, 1, 1, 2])):
        row[draw.choice(TOKEN_COLUMNS)] = draw.choice([value(draw), [value(draw), 1], [[1], [2, 3]], [1] * count])
    return row


@pytest.mark.daily("3")
@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="needs a datasets that reads values of mixed types as JSON")
@pytest.mark.parametrize("seed", range(6))
def test_conversations_give_tokens_or_a_refusal_that_names_the_row(seed: int) -> None:
    draw, tokenizer, num_learnt, num_refused = random.Random(seed), byte_tokenizer(), 0, 0
    for _ in range(150):
        row: dict[str, Any] = {"messages": [message(draw) for _ in range(draw.randint(0, 4))]}
        if draw.random() < 0.05:
            row["messages"] = value(draw)
        for column in ("tools", "chat_template_kwargs", "system", "images", "id", "weight", "loss_mask"):
            if draw.random() < 0.03:
                row[column] = value(draw)
        try:
            rows = datasets.Dataset.from_list([row], on_mixed_types="use_json")
        # the format itself cannot hold it
        except (TypeError, ValueError, OverflowError):
            continue
        try:
            found = tokenise_chat(rows, tokenizer, row_numbers=[77])
        except DataError as error:
            num_refused += 1
            assert any(word in str(error) for word in ("row 77", "the dataset has a column", "none of the 1 rows")), row
        else:
            num_learnt += 1
            assert any(label >= 0 for label in found[0]["labels"])
    assert num_learnt > 8 and num_refused > 20


@pytest.mark.daily("3", "4")
@pytest.mark.parametrize("seed", range(6))
def test_rows_of_tokens_are_read_or_refused_by_name(seed: int) -> None:
    draw, num_read, num_refused = random.Random(seed), 0, 0
    for _ in range(250):
        rows: Any = [token_row(draw) for _ in range(draw.randint(1, 3))]
        if draw.random() < 0.5:
            try:
                rows = datasets.Dataset.from_list(rows)
            except (TypeError, ValueError, OverflowError, AttributeError, KeyError):
                continue
        scan = scan_dataset(rows, "d", 64)
        if scan.problems:
            num_refused += 1
            assert all(problem.startswith(("d ", "... and")) for problem in scan.problems), rows
            continue
        num_read += 1
        index = SequenceIndex.build(scan.lengths, 100, "error", scan.documents)
        read = PlannedDataset(token_rows(rows), index)
        for number in range(len(index)):
            sequence = read._sequence(read._row(int(index.rows[number])), number, 0, int(index.lengths[number]))
            assert len(sequence.input_ids) == len(sequence.shift_labels) == index.lengths[number]
    assert num_read > 10 and num_refused > 20


@pytest.mark.daily("2")
@pytest.mark.parametrize("seed", range(3))
def test_rows_of_a_stream_are_read_or_refused_by_name(seed: int) -> None:
    draw = random.Random(seed)
    for number in range(400):
        row = token_row(draw)
        try:
            row_tokens(row, list(row) if isinstance(row, dict) else ["input_ids"], number, "d", 64)
        except ValueError as error:
            assert str(error).startswith("d "), row


@pytest.mark.daily("0")
@pytest.mark.parametrize("seed", range(3))
def test_texts_and_completions_are_read_or_refused_by_row(seed: int) -> None:
    draw, tokenizer = random.Random(seed), byte_tokenizer()
    for _ in range(60):
        row = {"prompt": draw.choice(["a", value(draw)]), "completion": draw.choice(["b", value(draw)])}
        try:
            rows = datasets.Dataset.from_list([row])
        except (TypeError, ValueError, OverflowError):
            continue
        for encode in (tokenise_completions, lambda *given, **named: tokenise_text(*given, ("prompt", "completion"), **named)):
            try:
                encode(rows, tokenizer, row_numbers=[77])
            except DataError as error:
                assert "row 77 column" in str(error) or "none of the 1 rows" in str(error)


@pytest.mark.parametrize("rows", [7, None, (row for row in [{"input_ids": [1]}]), "text", {1, 2}, np.float64(2)])
def test_what_is_no_set_of_rows_is_refused_by_name(rows: Any) -> None:
    (problem,) = scan_dataset(rows, "train_dataset", 64).problems
    assert problem.startswith(f"train_dataset is a {type(rows).__name__}, expected rows that can be read by number")
