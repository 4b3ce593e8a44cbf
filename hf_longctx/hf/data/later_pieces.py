"""Reads split rows again at the start, since the scan does not store which labels their later pieces have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from hf_longctx.hf.data.labels import LOSS_WEIGHTS, NEXT_TOKEN, HeadTask, list_lengths
from hf_longctx.hf.data.sampler import IntArray
from hf_longctx.hf.data.scan import ScannedRows, token_rows

# most tokens of a table, unless a row alone has more
_TABLE_TOKENS = 1 << 20


class RowChanged(ValueError):
    """Raised if a row differs from the scanned one; the message names it."""


def tables_of(dataset: Any, rows: IntArray, scanned: ScannedRows, task: HeadTask = NEXT_TOKEN) -> Iterator[pa.Table]:
    """Reads each of some rows once, in order, as tables of token ids and, if present, labels and weights.

    Raises RowChanged for a row that can no longer be read, or whose tokens or labels have changed since the scan.
    """
    source = token_rows(dataset, task)
    lengths = scanned.scan.lengths[rows]
    for numbers in np.split(rows, np.flatnonzero(np.diff(np.cumsum(lengths) // _TABLE_TOKENS)) + 1):
        if not isinstance(dataset, datasets.Dataset):
            yield _table([_unchanged(source, int(number), scanned, task) for number in numbers])
            continue
        table = task.read(source[numbers.tolist()])
        for place in np.flatnonzero(list_lengths(table["input_ids"]) != scanned.scan.lengths[numbers]):
            raise RowChanged(scanned.change(int(numbers[place]), table.slice(place, 1)))
        yield table


def _unchanged(dataset: Any, number: int, scanned: ScannedRows, task: HeadTask) -> Any:
    try:
        row = task.read(dataset[number])
    except IndexError as error:
        raise RowChanged(scanned.loss(number, error)) from error
    if problem := scanned.change(number, row):
        raise RowChanged(problem)
    return row


def _table(rows: list[Any]) -> pa.Table:
    dtypes = {"input_ids": np.int64, "labels": np.int64, LOSS_WEIGHTS: np.float64}
    present = [column for column in dtypes if column in rows[0]]
    return pa.table({column: pa.array([np.asarray(row[column], dtypes[column]) for row in rows]) for column in present})
