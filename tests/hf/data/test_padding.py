"""Padding at the ends of rows is left out as the mask says, of Arrow tables and of plain rows alike."""

from __future__ import annotations

import random
from typing import Any

import datasets
import numpy as np
import pytest

from hf_longctx.hf.data.padding import Padding, padding_of, unpadded
from hf_longctx.hf.data.scan import row_tokens, scan_dataset

VOCAB_SIZE = 64


def padded_rows(seed: int, count: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows with padding at either end, whose padding token also stands among the tokens, and the same rows without it."""
    draw = random.Random(seed)
    padded, plain = [], []
    for _ in range(count):
        own = [draw.randrange(3) for _ in range(draw.randint(1, 6))]
        left, right = draw.choice([(0, 0), (0, 3), (2, 0), (1, 2)])
        row = {"input_ids": own, "labels": [draw.choice([-100, token]) for token in own], "attention_mask": [1] * len(own)}
        row["position_ids"] = list(range(len(own)))
        row["loss_weights"] = [float(draw.randint(0, 2)) for _ in own]
        fill = {"input_ids": 0, "labels": draw.choice([-100, 0]), "attention_mask": 0, "position_ids": 1, "loss_weights": 1.0}
        plain.append(row)
        padded.append({name: [fill[name]] * left + values + [fill[name]] * right for name, values in row.items()})
    return padded, plain


@pytest.mark.parametrize("seed", range(5))
def test_padding_is_left_out_of_tables_and_rows(seed: int) -> None:
    padded, plain = padded_rows(seed, 40)
    table = datasets.Dataset.from_list(padded).with_format("arrow")[:]
    assert unpadded(table).to_pylist() == plain
    assert [{name: np.asarray(values).tolist() for name, values in unpadded(row).items()} for row in padded] == plain
    missing = [sum(value == 0 for value in row["attention_mask"]) for row in padded]
    labels = sum(
        label != -100 for row in padded for label, kept in zip(row["labels"], row["attention_mask"], strict=True) if not kept
    )
    assert padding_of(table) == Padding(sum(missing), sum(count > 0 for count in missing), labels)


def test_the_scan_and_streams_read_rows_as_if_they_had_never_been_padded() -> None:
    padded, plain = padded_rows(7, 30)
    # a scan needs a label that counts
    for rows in (padded, plain):
        rows[0]["labels"], rows[0]["loss_weights"] = list(rows[0]["input_ids"]), [1.0] * len(rows[0]["input_ids"])
    num_missing = sum(len(row["input_ids"]) - len(alone["input_ids"]) for row, alone in zip(padded, plain, strict=True))
    for make in (datasets.Dataset.from_list, list):
        expected, found = (scan_dataset(make(rows), "d", VOCAB_SIZE) for rows in (plain, padded))
        assert expected.padding == Padding() and expected.problems == []
        assert found.problems == [] and found.digest == expected.digest
        assert found.lengths.tolist() == expected.lengths.tolist() == [len(row["input_ids"]) for row in plain]
        assert found.padding.num_tokens == num_missing
    for number, (row, alone) in enumerate(zip(padded, plain, strict=True)):
        found_row = row_tokens(row, list(row), number, "d", VOCAB_SIZE)
        assert found_row.input_ids.tolist() == alone["input_ids"] and found_row.labels.tolist() == alone["labels"]
        assert found_row.num_padding == len(row["input_ids"]) - len(alone["input_ids"])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"attention_mask": [1, 0, 1]}, "row 1 has zeros between the ones of its attention_mask"),
        ({"attention_mask": [0, 0, 0]}, "row 1 has no tokens"),
        ({"attention_mask": [0, 1]}, "row 1 has 3 tokens but an attention_mask of 2"),
        ({"attention_mask": [1, 1, -1]}, "holds -1 in attention_mask, expected 1 for a token and 0 for padding"),
        ({"attention_mask": [1, 1, 0], "labels": [1, 2]}, "row 1 has 3 tokens but 2 labels"),
        ({"attention_mask": [1, 1, None]}, "d "),
        ({"attention_mask": None}, "row 1 has 3 tokens but an attention_mask of 0"),
    ],
)
@pytest.mark.parametrize("is_arrow", [True, False])
def test_masks_that_say_something_else_are_refused_by_row(row: dict[str, Any], message: str, is_arrow: bool) -> None:
    good = {"input_ids": [1, 2, 3], "labels": [1, 2, 3], "attention_mask": [1, 1, 0]}
    rows = [good, {**good, **row}]
    (problem, *_) = scan_dataset(datasets.Dataset.from_list(rows) if is_arrow else rows, "d", VOCAB_SIZE).problems
    assert message in problem
