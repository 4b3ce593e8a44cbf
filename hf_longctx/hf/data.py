"""Checks of a tokenised dataset before training starts, and its row lengths. Arrow columns are read in batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from hf_longctx.hf.sampler import IntArray
from hf_longctx.runtime.loss import IGNORE_INDEX

# columns that say how a row is packed or masked; ignoring them would train on something else
_MEANINGFUL = (
    *("position_ids", "seq_idx", "seq_lengths", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "shift_labels"),
    *("completion_mask", "assistant_masks", "loss_mask", "label", "label_ids", "labels_ids", "inputs_embeds"),
)
_BATCH_ROWS = 1000
_SHOWN = 3


@dataclass(frozen=True)
class DatasetScan:
    """What one pass over a dataset found: tokens per row, a hash of all tokens and labels, and problems."""

    lengths: IntArray
    digest: str
    problems: list[str]


def scan_dataset(dataset: Any, name: str, vocab_size: int) -> DatasetScan:
    """Reads a dataset once; no lengths where its columns are unusable.

    `name` is how messages call it, for example "train_dataset". Needed: column `input_ids`; used if there: `labels`. A
    row needs at least one token, as many labels as tokens, ids below `vocab_size`, and no padding.
    """
    if (unusable := _unusable(dataset, name)) is not None:
        return DatasetScan(np.zeros(0, dtype=np.int64), "", [unusable])
    lengths: list[IntArray] = []
    problems: list[str] = []
    digest, num_labels = hashlib.sha256(), 0
    for first_row, table in _tables(dataset):
        rows, found = _table_problems(name, first_row, table, vocab_size)
        lengths.append(rows)
        problems += found
        # after rows of another kind the numbers of rows are lost
        if len(rows) == 0:
            break
        assert isinstance(table, pa.Table)
        num_labels += _count_labels(table)
        for column in (c for c in ("input_ids", "labels") if c in table.column_names):
            digest.update(_values(table[column]).to_numpy().tobytes())
        digest.update(rows.tobytes())
    if not problems and not num_labels:
        problems.append(f"{name} has no token with a label, so there is nothing to learn from it; check its labels")
    return DatasetScan(np.concatenate(lengths), digest.hexdigest()[:16], _shorten(problems))


def _unusable(dataset: Any, name: str) -> str | None:
    """Why the rows of a dataset cannot be read, if so."""
    if isinstance(dataset, datasets.IterableDataset | torch.utils.data.IterableDataset):
        return f"{name} is an iterable dataset, which is not supported yet; pass a map-style dataset with a length"
    if isinstance(dataset, dict):
        return f"{name} is a dict of datasets ({', '.join(map(str, dataset))}); pass one of them"
    if len(dataset) == 0:
        return f"{name} has no rows; check its path, split and filters"
    columns = _columns(dataset)
    if "input_ids" not in columns:
        return (
            f"{name} has no column 'input_ids' (it has {', '.join(sorted(columns))}); tokenise it first, for example with "
            f"dataset.map(lambda row: tokenizer(row['text']))"
        )
    if meaningful := [column for column in _MEANINGFUL if column in columns]:
        return (
            f"{name} has a column {meaningful[0]!r}, which is not supported and would change what is trained; express it in "
            f"'labels' (-100 for no label) and one document per row, or remove it"
        )
    if isinstance(dataset, datasets.Dataset) and dataset.format["type"] == "custom":
        return f"{name} has a transform (with_transform), which is not supported; apply it with dataset.map instead"
    return None


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
    return list(row) if isinstance(row, Mapping) else [type(row).__name__]


def _tables(dataset: Any) -> Iterator[tuple[int, pa.Table | str]]:
    """(number of the first row, rows) batch by batch; instead of rows, what is wrong with them."""
    present = _columns(dataset)
    columns = [column for column in ("attention_mask", "input_ids", "labels") if column in present]
    first_row = 0
    if isinstance(dataset, datasets.Dataset):
        for table in dataset.select_columns(columns).with_format("arrow").iter(_BATCH_ROWS):
            yield first_row, table
            first_row += len(table)
        return
    while first_row < len(dataset):
        stop = min(first_row + _BATCH_ROWS, len(dataset))
        yield first_row, _plain_table([dataset[i] for i in range(first_row, stop)], columns, first_row)
        first_row = stop


def _plain_table(rows: list[Any], columns: Sequence[str], first_row: int) -> pa.Table | str:
    values: dict[str, list[Any]] = {column: [] for column in columns}
    for number, row in enumerate(rows):
        if "labels" in row and "labels" not in columns:
            return f"row {first_row + number} has 'labels', the first row has not; give every row the same columns"
        for column in columns:
            if column not in row:
                return f"row {first_row + number} has no {column!r}, the first row has; give every row the same columns"
            value = None if row[column] is None else np.asarray(row[column])
            if value is not None and (value.ndim != 1 or (value.dtype.kind not in "iub" and value.size)):
                return (
                    f"row {first_row + number} column {column!r} holds {row[column]!r:.40}, expected a list of integers per row"
                )
            values[column].append(value if value is None else value.astype(np.int64))
    return pa.table({column: pa.array(items, pa.list_(pa.int64())) for column, items in values.items()})


def _table_problems(name: str, first_row: int, table: pa.Table | str, vocab_size: int) -> tuple[IntArray, list[str]]:
    """The lengths of the rows and their problems; no lengths where a column does not hold lists of integers."""
    if isinstance(table, str):
        return np.zeros(0, dtype=np.int64), [f"{name} {table}"]
    for column in table.column_names:
        kind = table[column].type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        # an empty list has values of no type
        if not is_list or not (pa.types.is_integer(kind.value_type) or kind.value_type in (pa.bool_(), pa.null())):
            expected = "expected a list of integers per row"
            return np.zeros(0, dtype=np.int64), [f"{name} column {column!r} holds {kind}, {expected}"]
    if "labels" in table.column_names and table["labels"].type.value_type == pa.bool_():
        return np.zeros(0, dtype=np.int64), [f"{name} column 'labels' holds true and false, expected token ids"]
    lengths = _list_lengths(table["input_ids"])
    problems = [
        f"{name} row {first_row + row} has no tokens; remove empty rows, for example with dataset.filter"
        for row in np.flatnonzero(lengths == 0)
    ]
    problems += _range_problems(name, "token id", _values(table["input_ids"]), vocab_size)
    if "labels" in table.column_names:
        label_lengths = _list_lengths(table["labels"])
        problems += [
            f"{name} row {first_row + row} has {lengths[row]} tokens but {label_lengths[row]} labels; give one label per token "
            f"({IGNORE_INDEX} for none), not shifted"
            for row in np.flatnonzero(label_lengths != lengths)
        ]
        flat = _values(table["labels"])
        problems += _range_problems(name, "label", pc.filter(flat, pc.not_equal(flat, IGNORE_INDEX)), vocab_size)
    if "attention_mask" in table.column_names:
        mask_lengths = _list_lengths(table["attention_mask"])
        problems += [
            f"{name} row {first_row + row} has {lengths[row]} tokens but an attention_mask of {mask_lengths[row]}"
            for row in np.flatnonzero(mask_lengths != lengths)
        ]
        if pc.min(pc.cast(_values(table["attention_mask"]), pa.int64())).as_py() == 0:
            problems.append(
                f"{name} is padded (attention_mask holds zeros); tokenise without padding, rows of any length are packed"
            )
    return lengths, problems


def _values(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The items of all rows in a row."""
    return pc.list_flatten(column)


def _count_labels(table: pa.Table) -> int:
    """Tokens that something is learnt from: labelled ones, the first of every row left out."""
    if "labels" not in table.column_names:
        return len(_values(table["input_ids"])) - len(table)
    labels = table["labels"]
    counted = pc.sum(pc.not_equal(_values(labels), IGNORE_INDEX)).as_py() or 0
    first = pc.sum(pc.not_equal(pc.list_element(labels.filter(pc.greater(pc.list_value_length(labels), 0)), 0), IGNORE_INDEX))
    return int(counted - (first.as_py() or 0))


def _list_lengths(column: pa.ChunkedArray) -> IntArray:
    """Items of every row; a missing list has none."""
    lengths: IntArray = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
    return lengths


def _range_problems(name: str, what: str, values: pa.ChunkedArray, limit: int) -> list[str]:
    """A problem if some value is missing or outside [0, limit)."""
    if values.null_count and what == "token id":
        return [f"{name} holds a missing {what} inside a row; tokenise again or remove the row"]
    bounds = pc.min_max(values).as_py()
    if bounds["min"] is None or (bounds["min"] >= 0 and bounds["max"] < limit):
        return []
    wrong = bounds["max"] if bounds["max"] >= limit else bounds["min"]
    none = f" ({IGNORE_INDEX} means no label)" if what == "label" else ""
    return [f"{name} holds {what} {wrong}, the model's vocabulary has {limit}{none}; tokenise with the model's own tokenizer"]


def _shorten(problems: list[str]) -> list[str]:
    """The first few problems and how many more there are."""
    unique = list(dict.fromkeys(problems))
    more = len(unique) - _SHOWN
    return unique[:_SHOWN] + ([f"... and {more} more problems"] if more > 0 else [])
