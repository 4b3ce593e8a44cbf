"""Checks of a tokenised dataset before training starts, and its row lengths. Arrow columns are read in batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from hf_longctx.hf.sampler import IntArray

_BATCH_ROWS = 10_000
_SHOWN = 3


def dataset_problems(dataset: Any, name: str, vocab_size: int) -> tuple[IntArray, list[str]]:
    """The length of every row of `dataset` and what is wrong with it; no lengths where the columns are unusable.

    `name` is how messages call it, for example "train_dataset". Needed: column `input_ids`; used if there: `labels`. A
    row needs at least one token, as many labels as tokens, ids below `vocab_size`, and no padding.
    """
    empty = np.zeros(0, dtype=np.int64)
    if isinstance(dataset, (datasets.IterableDataset, torch.utils.data.IterableDataset)):
        return empty, [f"{name} is an iterable dataset, which is not supported yet; pass a map-style dataset with a length"]
    if isinstance(dataset, dict):
        return empty, [f"{name} is a dict of datasets; pass one dataset"]
    if len(dataset) == 0:
        return empty, [f"{name} has no rows; check its path, split and filters"]
    columns = set(_columns(dataset))
    if "input_ids" not in columns:
        return empty, [
            f"{name} has no column 'input_ids' (it has {', '.join(sorted(columns))}); tokenise it first, for example with "
            f"dataset.map(lambda row: tokenizer(row['text']))"
        ]
    lengths, problems = [], []
    for first_row, table in _tables(dataset, sorted(columns & {"input_ids", "labels", "attention_mask"})):
        rows, found = _table_problems(name, first_row, table, vocab_size)
        lengths.append(rows)
        problems += found
    return np.concatenate(lengths), _shorten(problems)


def token_rows(dataset: Any) -> Any:
    """The dataset with only the columns that training reads, as numpy arrays where it is an Arrow dataset."""
    if not isinstance(dataset, datasets.Dataset):
        return dataset
    columns = [name for name in ("input_ids", "labels") if name in dataset.column_names]
    return dataset.select_columns(columns).with_format("numpy")


def too_long(lengths: IntArray, max_length: int, memory_limit: int, tokens_per_rank: int, name: str) -> list[str]:
    """One problem for the longest of the rows above either limit, with the remedies; empty if all fit."""
    limit = min(max_length, memory_limit)
    above = np.flatnonzero(lengths > limit)
    if not len(above):
        return []
    row = int(above[np.argmax(lengths[above])])
    if lengths[row] > max_length:
        broken = f"max_length {max_length}"
    else:
        broken = f"memory: tokens_per_rank {tokens_per_rank} on the largest group gives {memory_limit}"
    others = f" ({len(above) - 1} more rows are above it)" if len(above) > 1 else ""
    return [
        f"{name} row {row} has {lengths[row]} tokens, above {broken}{others}; set long_sequences='truncate' to drop its "
        f"tail, long_sequences='split' to cut it into independent documents, or raise the limit"
    ]


def _columns(dataset: Any) -> list[str]:
    if isinstance(dataset, datasets.Dataset):
        return list(dataset.column_names)
    row = dataset[0]
    return list(row) if isinstance(row, dict) else [type(row).__name__]


def _tables(dataset: Any, columns: list[str]) -> Iterator[tuple[int, pa.Table]]:
    """(number of the first row, rows) batch by batch."""
    first_row = 0
    if isinstance(dataset, datasets.Dataset):
        for table in dataset.select_columns(columns).with_format("arrow").iter(_BATCH_ROWS):
            yield first_row, table
            first_row += len(table)
        return
    while first_row < len(dataset):
        rows = [dataset[i] for i in range(first_row, min(first_row + _BATCH_ROWS, len(dataset)))]
        yield first_row, pa.table({c: [np.asarray(row[c], dtype=np.int64) for row in rows] for c in columns})
        first_row += len(rows)


def _table_problems(name: str, first_row: int, table: pa.Table, vocab_size: int) -> tuple[IntArray, list[str]]:
    problems = []
    input_ids = table["input_ids"]
    if not (pa.types.is_list(input_ids.type) or pa.types.is_large_list(input_ids.type)):
        return np.ones(len(table), dtype=np.int64), [
            f"{name} column 'input_ids' holds {input_ids.type}, expected a list of integers per row"
        ]
    lengths = pc.fill_null(pc.list_value_length(input_ids), 0).to_numpy().astype(np.int64)
    for row in np.flatnonzero(lengths == 0):
        problems.append(f"{name} row {first_row + row} has no tokens; remove empty rows, for example with dataset.filter")
    ids = pc.list_flatten(input_ids)
    bounds = pc.min_max(ids).as_py() if len(ids) else {"min": 0, "max": 0}
    if bounds["min"] < 0 or bounds["max"] >= vocab_size:
        wrong = bounds["max"] if bounds["max"] >= vocab_size else bounds["min"]
        problems.append(
            f"{name} holds token id {wrong}, the model's vocabulary has {vocab_size}; tokenise with the model's own tokenizer"
        )
    if "labels" in table.column_names:
        label_lengths = pc.fill_null(pc.list_value_length(table["labels"]), 0).to_numpy()
        for row in np.flatnonzero(label_lengths != lengths):
            problems.append(
                f"{name} row {first_row + row} has {lengths[row]} tokens but {label_lengths[row]} labels; give one label per "
                f"token (-100 for none), not shifted"
            )
        labels = pc.list_flatten(table["labels"])
        highest = pc.max(labels).as_py() if len(labels) else None
        if highest is not None and highest >= vocab_size:
            problems.append(f"{name} holds label {highest}, the model's vocabulary has {vocab_size}")
    if "attention_mask" in table.column_names:
        mask = pc.list_flatten(table["attention_mask"])
        if len(mask) and pc.min(pc.cast(mask, pa.int64())).as_py() == 0:
            problems.append(
                f"{name} is padded (attention_mask holds zeros); tokenise without padding, rows of any length are packed"
            )
    return lengths, problems


def _shorten(problems: list[str]) -> list[str]:
    """The first few problems and how many more there are."""
    unique = list(dict.fromkeys(problems))
    more = len(unique) - _SHOWN
    return unique[:_SHOWN] + ([f"... and {more} more rows with problems"] if more > 0 else [])
