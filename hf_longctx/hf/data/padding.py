"""Removes the padding at the ends of rows, given by the column `attention_mask`.

Tokenizers write it with `padding="max_length"`. A token's id never shows whether it is padding, since many tokenizers pad with
the token that also ends texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hf_longctx.runtime.core.loss import IGNORE_INDEX

MASK = "attention_mask"
# columns with one item per token, besides labels of tokens
_PER_TOKEN = ("input_ids", MASK, "loss_weights", "position_ids")


@dataclass(frozen=True, slots=True)
class Padding:
    """Number of removed padding tokens, of rows with padding, and of labels on padding."""

    num_tokens: int = 0
    num_rows: int = 0
    num_labels: int = 0

    def __add__(self, other: Padding) -> Padding:
        return Padding(self.num_tokens + other.num_tokens, self.num_rows + other.num_rows, self.num_labels + other.num_labels)


def unpadded(rows: Any, has_token_labels: bool = True) -> Any:
    """Removes the padding of a row, or of an Arrow table of rows; unchanged if there is none, or if columns are wrong.

    has_token_labels: whether the column `labels` has one label per token.
    """
    if isinstance(rows, pa.Table):
        return _unpadded_table(rows, has_token_labels)[0]
    if not isinstance(rows, Mapping) or rows.get(MASK) is None:
        return rows
    try:
        mask = np.asarray(rows[MASK])
        columns = {name: np.asarray(rows[name]) for name in _columns(list(rows), has_token_labels)}
    # lists of lists of different lengths, which the scan of the dataset reports
    except ValueError:
        return rows
    kept = None if mask.ndim != 1 or mask.dtype.kind not in "iub" else _kept(mask, np.array([len(mask)]))
    if kept is None or any(values.shape != mask.shape for values in columns.values()):
        return rows
    return {**rows, **{name: values[kept] for name, values in columns.items()}}


def padding_of(table: pa.Table, has_token_labels: bool = True) -> Padding:
    """Counts the padding that `unpadded` removes from a table."""
    return _unpadded_table(table, has_token_labels)[1]


def rows_with_holes(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """Returns the rows whose mask has zeros between other values."""
    values = pc.list_flatten(column).to_numpy().astype(np.int64)
    return np.flatnonzero(_has_holes(values, _lengths(column)))


def _unpadded_table(table: pa.Table, has_token_labels: bool) -> tuple[pa.Table, Padding]:
    unchanged = table, Padding()
    if MASK not in table.column_names:
        return unchanged
    names = _columns(table.column_names, has_token_labels)
    if not all(hasattr(table[name].type, "value_type") for name in names):
        return unchanged
    values = pc.list_flatten(table[MASK])
    if not (pa.types.is_integer(values.type) or pa.types.is_boolean(values.type)) or values.null_count:
        return unchanged
    lengths = _lengths(table[MASK])
    if any(not np.array_equal(_lengths(table[name]), lengths) for name in names):
        return unchanged
    kept = _kept(values.to_numpy(), lengths)
    if kept is None:
        return unchanged
    ends = np.cumsum(lengths)
    sums = np.append(0, np.cumsum(kept))
    counts = sums[ends] - sums[ends - lengths]
    offsets = pa.array(np.append(0, np.cumsum(counts)), pa.int64())
    num_labels = 0
    for name in names:
        items = pc.list_flatten(table[name])
        items = items.combine_chunks() if isinstance(items, pa.ChunkedArray) else items
        if name == "labels":
            dropped = items.filter(pa.array(~kept))
            num_labels = int(pc.sum(pc.not_equal(dropped, IGNORE_INDEX)).as_py() or 0)
        column = pa.LargeListArray.from_arrays(offsets, items.filter(pa.array(kept)))
        table = table.set_column(table.column_names.index(name), name, column)
    return table, Padding(int((~kept).sum()), int((counts < lengths).sum()), num_labels)


def _columns(present: list[str], has_token_labels: bool) -> list[str]:
    names = (*_PER_TOKEN, "labels") if has_token_labels else _PER_TOKEN
    return [name for name in names if name in present]


def _lengths(column: pa.ChunkedArray) -> NDArray[np.int64]:
    return pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)


def _kept(mask: NDArray[Any], lengths: NDArray[np.int64]) -> NDArray[np.bool_] | None:
    """Returns which tokens of rows are no padding; None without padding, and for masks with other values or holes."""
    values = mask.astype(np.int64)
    if not len(values) or values.min() != 0 or values.max() > 1 or _has_holes(values, lengths).any():
        return None
    return values == 1


def _has_holes(values: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether in any row the ones are not contiguous."""
    ends = np.cumsum(lengths)
    begins = values != 0
    begins[1:] &= values[:-1] == 0
    starts = (ends - lengths)[lengths > 0]
    begins[starts] = values[starts] != 0
    sums = np.append(0, np.cumsum(begins))
    return sums[ends] - sums[ends - lengths] > 1
