"""Reads a tokenised dataset once before training: checks every row, and stores their lengths in a file.

Called at start-up by trainer and callback; `streams` checks its rows one at a time with `row_tokens`. Arrow columns are read in
batches, so that a large dataset needs little memory.

With the file, each machine reads all rows only once per dataset fingerprint. It is next to the dataset's own cache files, and
used only if its checksum is correct and it was made from the same rows for the same purpose: fingerprint, columns, vocabulary,
and size and time of every Arrow file must match. Datasets without files (made from lists, or of other classes) are read again by
every process, since they have no fingerprint that outlives the process, and fit into memory anyway.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from accelerate import PartialState
from numpy.typing import NDArray
from tqdm.auto import tqdm

from hf_longctx.hf.data.fields import (
    MEDIA,
    MEDIA_FILES,
    is_text,
    listed_column_problem,
    text_columns,
    token_column_problem,
    unnamed_column_problem,
    unread_columns,
)
from hf_longctx.hf.data.labels import (
    LABELS_THAT_COUNT,
    LOSS_WEIGHTS,
    NEXT_TOKEN,
    NO_LABEL,
    HeadTask,
    class_problems,
    first_labels,
    list_lengths,
)
from hf_longctx.hf.data.padding import MASK, Padding, padding_of, rows_with_holes, unpadded
from hf_longctx.hf.data.sampler import IntArray, document_places
from hf_longctx.runtime.core.loss import IGNORE_INDEX

# columns in which packers store where the documents of a row begin
PACKED = ("position_ids", "seq_lengths")
# optional columns, present in every row or in none
_OPTIONAL = ("labels", LOSS_WEIGHTS, *PACKED)
# columns that the scan reads if present
_READ = (MASK, "input_ids", *_OPTIONAL, MEDIA)
# columns that are hashed, since they decide what is trained
_HASHED = ("input_ids", *_OPTIONAL)
# most tokens per column in a batch, estimated from the batch before it
_BATCH_TOKENS = 1 << 22
# most rows in a batch
_BATCH_ROWS = 1 << 16
_FIRST_BATCH_ROWS = 64
# most problems that are shown; all others are only counted
_SHOWN = 3


@dataclass(frozen=True)
class DatasetScan:
    """Result of one pass over a dataset: tokens per row, a hash of all tokens and labels, and the problems found."""

    lengths: IntArray
    digest: str
    problems: list[str]
    # 8-byte hash of every row if the dataset makes rows by code; None for Arrow datasets, whose rows cannot change
    row_digests: NDArray[np.uint64] | None = None
    # tokens per document, row by row, if rows are packed; None if every row is one document
    documents: IntArray | None = None
    # position of every document's first label that counts; see the function `first_labels`
    first_labels: IntArray | None = None
    # tokens left out of the rows
    padding: Padding = field(default_factory=Padding)
    # number of features of images and videos in every row; None if no row has any
    media_features: IntArray | None = None
    # (row, begin, end) of all tokens in a row that stand for a feature without another token between them, [M, 3], in order; None
    # if no row has any
    media_blocks: IntArray | None = None
    # (row, start, stop, features, parts, elements, whether it is a video) of every `Medium`, [M, 7], in order; None without any
    media: IntArray | None = None

    @property
    def sequence_lengths(self) -> IntArray:
        """Tokens of every row, or of every document if rows are packed."""
        return self.lengths if self.documents is None else self.documents

    def rows(self) -> IntArray | None:
        """Row numbers of `sequence_lengths`; None if they count from 0."""
        return None if self.documents is None else document_places(self.lengths, self.documents)[0]


def scan_dataset(
    dataset: Any,
    name: str,
    vocab_size: int,
    show_progress: bool = False,
    placeholders: tuple[int, ...] = (),
    task: HeadTask = NEXT_TOKEN,
) -> DatasetScan:
    """Reads a dataset once and checks every row; keeps one batch of rows and all lengths in memory.

    The column `input_ids` is required; `labels`, `loss_weights`, and `position_ids` and `seq_lengths`, which divide a row into
    documents, are used if present. A row needs at least one token, as many labels and weights as tokens, ids below `vocab_size`,
    and finite weights of 0 or more. Padding at its ends, given by `attention_mask`, is removed. If the columns are unusable, the
    result has a problem and no lengths. name: name of the dataset in messages, for example "train_dataset". show_progress: show a
    bar if reading takes longer than a second. placeholders: token ids for padding, images, sound or video that no row may have.
    task: labels for a classifying head.
    """
    if (unusable := _unusable(dataset, name, task)) is not None:
        return DatasetScan(np.zeros(0, dtype=np.int64), "", [unusable])
    lengths: IntArray = np.zeros(len(dataset), dtype=np.int64)
    problems: list[str] = []
    num_more, has_label, num_rows, padding = 0, False, 0, Padding()
    firsts: list[IntArray] = []
    # the hash has a part for labels even if there are none, as in earlier versions
    present = {"input_ids", "labels", *task.renamed(_columns(dataset))}
    hashes = {column: xxhash.xxh3_128() for column in _HASHED if column in present}
    documents: list[IntArray] = []
    media_features: list[IntArray] = []
    media_blocks: list[IntArray] = []
    media: list[IntArray] = []
    row_digests = None if isinstance(dataset, datasets.Dataset) else np.zeros(len(dataset), dtype=np.uint64)
    bar = tqdm(total=len(dataset), desc=f"reading {name}", unit=" rows", unit_scale=True, delay=1.0, disable=not show_progress)
    with bar:
        for padded in _tables(dataset, task):
            table = unpadded(padded, task.kind != "document")
            rows, found = _table_problems(name, num_rows, table, vocab_size, placeholders, task)
            fresh = [problem for problem in found if problem not in problems]
            room = _SHOWN - len(problems)
            problems += fresh[:room]
            num_more += len(fresh[room:])
            # rows of an unusable batch cannot be counted, which would make later row numbers wrong
            if len(rows) == 0:
                return DatasetScan(np.zeros(0, dtype=np.int64), "", problems)
            assert isinstance(table, pa.Table)
            lengths[num_rows : num_rows + len(rows)] = rows
            if row_digests is not None and not problems:
                row_digests[num_rows : num_rows + len(rows)] = _digests_of(table)
            num_rows += len(rows)
            if not problems:
                padding += padding_of(padded, task.kind != "document")
                media_features.append(_media_features(table, len(rows)))
                if media_features[-1].any():
                    media_blocks.append(_media_blocks(table, rows, placeholders, num_rows - len(rows)))
                    media.append(_media_table(table, num_rows - len(rows)))
                documents += [] if (found_documents := _documents(table)) is None else [found_documents]
                if (first := first_labels(table, found_documents, task)) is not None:
                    firsts.append(first)
                    has_label = has_label or bool((first < NO_LABEL).any())
                else:
                    has_label = has_label or bool(((rows if found_documents is None else found_documents) > 1).any())
                _hash_columns(hashes, table)
            bar.update(len(rows))
    if not problems and not has_label:
        what, why = "row" if task.kind == "document" else "token", LABELS_THAT_COUNT
        why = why if task.kind == "next_token" else "-100 does not count"
        problems.append(
            f"{name} has no {what} with a label that counts, so there is nothing to learn from it; check its labels ({why})"
        )
    if num_more:
        problems.append(f"... and {num_more} more problems")
    digest = xxhash.xxh3_128(b"".join(items.digest() for items in (*hashes.values(), xxhash.xxh3_128(lengths.data))))
    joined, first = (np.concatenate(arrays) if arrays else None for arrays in (documents, firsts))
    features = np.concatenate(media_features) if media_features else None
    features = features if features is not None and features.any() else None
    blocks = np.concatenate(media_blocks) if media_blocks else None
    known = np.concatenate(media) if media else None
    return DatasetScan(lengths, digest.hexdigest(), problems, row_digests, joined, first, padding, features, blocks, known)


def _media_features(table: pa.Table, num_rows: int) -> IntArray:
    """Counts the features of images and videos in every row of a table without problems."""
    if MEDIA not in table.column_names:
        return np.zeros(num_rows, dtype=np.int64)
    _, numbers, rows = _media_numbers(table)
    return np.bincount(rows, numbers["num_features"], num_rows).astype(np.int64)


def _are_features(table: pa.Table, placeholders: tuple[int, ...]) -> NDArray[np.bool_]:
    """Returns whether each token of a table stands for a feature."""
    return np.isin(_values(table["input_ids"]).cast(pa.int64(), safe=False).to_numpy(), placeholders)


def _media_blocks(table: pa.Table, lengths: IntArray, placeholders: tuple[int, ...], first_row: int) -> IntArray:
    """Returns (row, begin, end) of consecutive placeholders in the rows of a table, [M, 3]; rows count from `first_row`."""
    is_feature = _are_features(table, placeholders)
    firsts = np.cumsum(lengths) - lengths
    # a row begins anew
    begins_row = np.zeros(len(is_feature), dtype=bool)
    begins_row[firsts] = True
    before = np.concatenate([[False], is_feature[:-1]]) & ~begins_row
    after = np.concatenate([is_feature[1:] & ~begins_row[1:], [False]])
    begins, ends = np.flatnonzero(is_feature & ~before), np.flatnonzero(is_feature & ~after) + 1
    rows = np.searchsorted(firsts, begins, side="right") - 1
    return np.stack([first_row + rows, begins - firsts[rows], ends - firsts[rows]], axis=1).astype(np.int64)


def _media_table(table: pa.Table, first_row: int) -> IntArray:
    """Returns `DatasetScan.media` of a table without problems; rows count from `first_row`."""
    _, numbers, rows = _media_numbers(table)
    items = _values(table[MEDIA])
    parts, elements, kinds = (
        pc.fill_null(pc.struct_field(items, name), least).to_numpy(zero_copy_only=False)
        if items.type.get_field_index(name) >= 0
        else np.full(len(rows), least)
        for name, least in _OF_TOWERS.items()
    )
    return np.stack([first_row + rows, *numbers.values(), parts, elements, kinds == "video"], axis=1).astype(np.int64)


def _media_numbers(table: pa.Table) -> tuple[IntArray, dict[str, IntArray], IntArray]:
    """Returns the number of media of every row, and of all media one after another the numbers and the row."""
    counts = list_lengths(table[MEDIA])
    items = _values(table[MEDIA])
    names = ("start", "stop", "num_features")
    if not pa.types.is_struct(items.type):
        # Arrow gives the items of empty lists the type null
        numbers = {name: np.zeros(0, dtype=np.int64) for name in names}
    else:
        numbers = {name: pc.fill_null(pc.struct_field(items, name).cast(pa.int64()), -1).to_numpy() for name in names}
    return counts, numbers, np.repeat(np.arange(len(counts)), counts)


def _media_problems(name: str, first_row: int, table: pa.Table, lengths: IntArray, placeholders: tuple[int, ...]) -> list[str]:
    """Reports rows whose tokens are not those of their media."""
    if others := [column for column in (MASK, *PACKED) if column in table.column_names]:
        return [f"{name} has a column {others[0]!r} beside images, which are read in rows of one document; remove the column"]
    counts, numbers, rows = _media_numbers(table)
    if len(rows) and not placeholders:
        return [
            f"{name} row {first_row + rows[0]} has images, but the model reads text alone; use a multimodal model, or remove "
            f"such rows"
        ]
    starts, stops, features = numbers["start"], numbers["stop"], numbers["num_features"]
    firsts = np.cumsum(lengths) - lengths
    sums = np.concatenate([[0], np.cumsum(_are_features(table, placeholders))])
    before = np.concatenate([[0], stops[:-1]]) if len(stops) else stops
    before[(np.cumsum(counts) - counts)[counts > 0]] = 0
    wrong = (starts < before) | (stops <= starts) | (stops > lengths[rows]) | (features < 1)
    inside = np.clip(firsts[rows] + starts, 0, len(sums) - 1), np.clip(firsts[rows] + stops, 0, len(sums) - 1)
    wrong |= sums[inside[1]] - sums[inside[0]] != features
    bad = set(rows[wrong].tolist())
    totals = sums[firsts + lengths] - sums[firsts]
    bad |= set(np.flatnonzero(totals != np.bincount(rows, features, len(lengths))).tolist())
    if not bad and (learnt := _learnt_features(table, placeholders)):
        row = int(np.searchsorted(firsts + lengths, learnt[0], side="right"))
        return [
            f"{name} row {first_row + row} has labels on tokens that stand for images, which are no text to learn; give these "
            f"tokens the label {IGNORE_INDEX} in a column 'labels', as tokenise_chat does, and use no collator that writes labels"
        ]
    return [
        f"{name} row {first_row + row} has {totals[row]} tokens that stand for images, sound or video, and its column {MEDIA!r} "
        f"places {int(features[rows == row].sum())} of them elsewhere or in another number; tokenise the row again with the "
        f"model's processor"
        for row in sorted(bad)
    ]


def _learnt_features(table: pa.Table, placeholders: tuple[int, ...]) -> list[int]:
    """Returns the places of features in a table's tokens that have a label."""
    column = "labels" if "labels" in table.column_names else "input_ids"
    are_features, labels = _are_features(table, placeholders), _values(table[column])
    if len(labels) != len(are_features):
        # reported with the labels
        return []
    values = pc.fill_null(labels.cast(pa.int64(), safe=False), IGNORE_INDEX).to_numpy()
    places: list[int] = np.flatnonzero(are_features & (values != IGNORE_INDEX)).tolist()
    return places


def _digests_of(table: pa.Table) -> list[int]:
    """Returns the `row_digest` of every row of a table without problems."""
    columns = {}
    for name in _HASHED:
        if name in table.column_names:
            ends = np.cumsum(list_lengths(table[name]))
            columns[name] = np.split(_values(table[name]).to_numpy(), ends[:-1])
    return [_row_digest({name: rows[number] for name, rows in columns.items()}) for number in range(len(table))]


def _row_digest(row: Mapping[str, Any]) -> int:
    """Returns a 64-bit hash of a row's token ids and, if present, labels, weights and documents."""
    state = xxhash.xxh3_64()
    for name in _HASHED:
        if name not in row:
            continue
        is_float = name == LOSS_WEIGHTS or getattr(row[name], "dtype", None) == np.float64
        array = np.ascontiguousarray(row[name], dtype=np.float64 if is_float else np.int64)
        state.update(name.encode())
        state.update(len(array).to_bytes(8, "little"))
        state.update(array.data)
    return state.intdigest()


@dataclass(frozen=True)
class ScannedRows:
    """Finds rows that have changed since the scan at start, which gave plans their lengths.

    Rows of datasets that run code are compared as a whole, even if a rank needs only a part. Arrow rows are compared by length,
    since they change only if somebody writes into their file.
    """

    name: str
    scan: DatasetScan

    def change(self, number: int, row: Any) -> str:
        """Describes how row `number` differs from the scanned one; empty if it does not."""
        then = int(self.scan.lengths[number])
        if isinstance(row, pa.Table):
            now, is_other = int(list_lengths(row["input_ids"])[0]), False
        else:
            now, is_other = len(row["input_ids"]), False
            if now == then and self.scan.row_digests is not None:
                before, after = int(self.scan.row_digests[number]), _row_digest(row)
                is_other = before != after
        if now == then and not is_other:
            return ""
        if now != then:
            found = f"it had {then} tokens at the start of the run, and has {now} now"
        else:
            hashes = f"{before:016x} at the start of the run, and have {after:016x} now"
            found = f"its {then} tokens, labels or weights had the hash {hashes}"
        return self._problem(number, found)

    def loss(self, number: int, error: IndexError) -> str:
        """Returns the message that row `number` can no longer be read."""
        then = f"it had {int(self.scan.lengths[number])} tokens at the start of the run"
        return self._problem(number, f"{then}, and cannot be read now ({type(error).__name__}: {error})")

    def _problem(self, number: int, found: str) -> str:
        return (
            f"{self.name} row {number} has changed: {found}. Plans are made from the lengths at the start, and every rank reads "
            f"rows by itself, so each read of a row must give the same tokens; draw random augmentation once, for example with "
            f"dataset.map, or seed it by the row's number"
        )


def _hash_columns(hashes: Mapping[str, Any], table: pa.Table) -> None:
    """Adds the items of all rows to their column's hash, which does not depend on batches."""
    for column, items in hashes.items():
        if column in table.column_names:
            for chunk in _values(table[column]).chunks:
                values = chunk.to_numpy(zero_copy_only=False)
                items.update(np.ascontiguousarray(values.astype(np.float64) if column == LOSS_WEIGHTS else values))


def _unusable(dataset: Any, name: str, task: HeadTask) -> str | None:
    """Describes why the rows of a dataset cannot be read; None if they can."""
    if isinstance(dataset, dict):
        return f"{name} is a dict ({', '.join(map(str, dataset))}), and only eval_dataset may be a dict of sets; pass one of them"
    if isinstance(dataset, str | bytes | type) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return (
            f"{name} is a {type(dataset).__name__}, expected rows that can be read by number: a datasets.Dataset, a list of rows "
            f"or an object with __len__ and __getitem__; make one with datasets.Dataset.from_list(list(rows)), or give an "
            f"iterable dataset with max_steps"
        )
    if is_empty(dataset):
        return f"{name} has no rows; check its path, split and filters"
    if isinstance(dataset, datasets.Dataset):
        if (problem := column_problem(columns := text_columns(dataset), name, task)) is not None:
            return problem
        if dataset.format["type"] == "custom":
            return f"{name} has a transform (with_transform), which is not supported; apply it with dataset.map instead"
        return _listed_problem(dataset, unread_columns(columns), name)
    if not isinstance(row := dataset[0], Mapping):
        return f"{name} row 0 {_no_mapping(row)}"
    if problem := unnamed_column_problem(row, f"{name} row 0"):
        return problem
    problem = column_problem({column: is_text(value) for column, value in row.items()}, name, task)
    return problem or listed_in_rows((dataset[number] for number in range(min(len(dataset), _FIRST_BATCH_ROWS))), name)


def is_empty(dataset: Any) -> bool:
    """Whether a map-style dataset has no rows."""
    has_rows = not isinstance(dataset, type) and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return has_rows and len(dataset) == 0


def _listed_problem(dataset: datasets.Dataset, columns: list[str], name: str) -> str | None:
    """Describes an unread column with one number per token; None if there is none."""
    kinds = {column: dataset.data.schema.field(column).type for column in columns}
    lists = [column for column, kind in kinds.items() if hasattr(kind, "value_type") and _is_number(kind.value_type)]
    if not lists:
        return None
    first = (
        dataset.select(range(min(len(dataset), _FIRST_BATCH_ROWS))).select_columns(["input_ids", *lists]).with_format("arrow")[:]
    )
    if not hasattr(first["input_ids"].type, "value_type"):
        return None
    lengths = {column: list_lengths(first[column]).tolist() for column in first.column_names}
    return listed_column_problem(name, lengths.pop("input_ids"), lengths, "token")


def listed_in_rows(rows: Iterable[Any], name: str) -> str | None:
    """Describes an unread column with one number per token in each of these rows; None if there is none."""
    found: list[dict[str, int | None]] = []
    for row in rows:
        if not isinstance(row, Mapping):
            break
        counts = {column: _num_numbers(row.get(column)) for column in ("input_ids", *unread_columns(row))}
        kept = {column for column, count in counts.items() if count is not None and count == counts["input_ids"]}
        if len(kept) < 2:
            # no column has one per token in every row
            return None
        found.append(counts)
    if not found:
        return None
    lengths = {column: [counts.get(column) for counts in found] for column in found[0]}
    return listed_column_problem(name, [int(count or 0) for count in lengths.pop("input_ids")], lengths, "token")


def _num_numbers(value: Any) -> int | None:
    """Counts the numbers in a list; None for another value."""
    found = as_array(value)
    return len(found) if found is not None and found.ndim == 1 and found.dtype.kind in "biuf" else None


def as_array(value: Any) -> NDArray[Any] | None:
    """Returns the value as a numpy array; None for lists of different lengths and values that numpy does not take."""
    try:
        return np.asarray(value)
    except (ValueError, TypeError, OverflowError):
        return None


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def column_problem(columns: Mapping[str, bool], name: str, task: HeadTask = NEXT_TOKEN) -> str | None:
    """Describes why rows with these columns cannot be trained on; None if they can. columns: whether each holds text."""
    if "input_ids" not in columns:
        return (
            f"{name} has no column 'input_ids' (it has {', '.join(sorted(columns))}); tokenise it first, for example with "
            f"dataset.map(lambda row: tokenizer(row['text']))"
        )
    if (problem := task.column_problem(list(columns), name, PACKED, LOSS_WEIGHTS)) is not None:
        return problem
    if MEDIA in columns and MEDIA_FILES not in columns:
        return f"{name} has a column {MEDIA!r} without {MEDIA_FILES!r}, which names the files of images; keep both"
    own = task.label_column(list(columns))
    return token_column_problem({column: is_text for column, is_text in columns.items() if column != own}, name)


def token_rows(dataset: Any, task: HeadTask = NEXT_TOKEN) -> Any:
    """Returns the dataset with only the columns for training; rows of an Arrow dataset are then Arrow tables."""
    if not isinstance(dataset, datasets.Dataset):
        return dataset
    read = ("input_ids", task.label_column(dataset.column_names), LOSS_WEIGHTS, MASK, MEDIA, MEDIA_FILES)
    return dataset.select_columns([name for name in read if name in dataset.column_names]).with_format("arrow")


@dataclass(frozen=True, slots=True)
class RowTokens:
    """Token ids and labels of one row, each of shape [n], and the weights of the labels [n], or None if it has none."""

    input_ids: IntArray
    labels: IntArray
    loss_weights: NDArray[np.float64] | None
    # lengths of the row's documents, if it is packed
    documents: IntArray | None = None
    # number of padding tokens that were removed
    num_padding: int = 0
    # items of the columns `media` and `media_files`
    media: Sequence[Mapping[str, Any]] = ()
    files: Sequence[Any] = ()
    # begin and end of the tokens that stand for a feature without another token between them, [M, 2]
    blocks: IntArray | None = None


def row_tokens(
    row: Any, columns: Sequence[str], number: int, name: str, vocab_size: int, placeholders: tuple[int, ...] = ()
) -> RowTokens:
    """Checks one row and returns its tokens; without labels, the ids are the labels.

    columns: columns of the first row, which every row must have. Raises ValueError for a row in which `scan_dataset` would find
    a problem.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"{name} row {number} {_no_mapping(row)}")
    if (unusable := column_problem({column: is_text(value) for column, value in row.items()}, name)) is not None:
        raise ValueError(unusable)
    if problem := _other_columns([row], columns, number, NEXT_TOKEN):
        raise ValueError(f"{name} {problem}")
    read = [column for column in _READ if column in columns]
    padded = _plain_table([row], read, number)
    table = unpadded(padded)
    lengths, problems = _table_problems(name, number, table, vocab_size, placeholders)
    if problems:
        raise ValueError(problems[0])
    assert isinstance(table, pa.Table)
    ids, labels = (_values(table[column]).to_numpy() for column in ("input_ids", "labels" if "labels" in read else "input_ids"))
    weights = _values(table[LOSS_WEIGHTS]).to_numpy() if LOSS_WEIGHTS in read else None
    tokens = RowTokens(ids, labels, weights, _documents(table), padding_of(padded).num_tokens)
    if not row.get(MEDIA):
        return tokens
    return replace(tokens, media=row[MEDIA], files=row[MEDIA_FILES], blocks=_media_blocks(table, lengths, placeholders, 0)[:, 1:])


def too_long(
    lengths: IntArray, max_length: int, memory_limit: int, tokens_per_rank: int, name: str, rows: IntArray | None = None
) -> list[str]:
    """Reports the longest row or document above either limit, with remedies, as a list of one problem; empty if all fit.

    rows: row numbers of `lengths`, if they do not count from 0.
    """
    limit = min(max_length, memory_limit)
    above = np.flatnonzero(lengths > limit)
    if not len(above):
        return []
    longest = int(above[np.argmax(lengths[above])])
    row = longest if rows is None else int(rows[longest])
    if lengths[longest] > max_length:
        broken = f"max_length {max_length}"
    else:
        broken = f"the memory limit: {memory_limit} on the largest group (tokens_per_rank {tokens_per_rank} beside others)"
    others = f" ({len(above) - 1} more rows are above it)" if len(above) > 1 else ""
    return [
        f"{name} row {row} has {lengths[longest]} tokens, above {broken}{others}; set long_sequences='truncate' to drop "
        f"the tail, long_sequences='split' to cut it into independent documents, or raise the limit"
    ]


def images_too_long(where: str, num_tokens: int, num_features: int, limit: int) -> str:
    """Returns why a row with images is not cut to a limit of tokens. where: its name."""
    return (
        f"{where} has {num_tokens} tokens, {num_features} of them for images, above the limit of {limit}, and rows with images "
        f"are not cut so far; raise max_length, lower the number of pixels in the processor's settings, or remove such rows"
    )


def _columns(dataset: Any) -> list[str]:
    if isinstance(dataset, datasets.Dataset):
        return list(dataset.column_names)
    row = dataset[0]
    return list(row) if isinstance(row, Mapping) else [type(row).__name__]


def _tables(dataset: Any, task: HeadTask) -> Iterator[pa.Table | str]:
    """Yields the rows batch by batch, or the problem with the rows of a batch."""
    present = _columns(dataset)
    own = task.label_column(present)
    columns = [column for column in _READ if column in task.renamed(present)]
    read = [own if column == "labels" else column for column in columns]
    arrow = dataset.select_columns(read).with_format("arrow") if isinstance(dataset, datasets.Dataset) else None
    first_row, num_rows = 0, min(_FIRST_BATCH_ROWS, _BATCH_ROWS)
    while first_row < len(dataset):
        stop = min(first_row + num_rows, len(dataset))
        if arrow is not None:
            table = task.listed(arrow[first_row:stop])
        else:
            rows = [dataset[i] for i in range(first_row, stop)]
            table = _other_columns(rows, present, first_row, task) or _plain_table(
                [task.listed(row) for row in rows], columns, first_row, task
            )
        yield table
        # these rows were usable, or the caller would not continue
        num_tokens = len(_values(table["input_ids"]))
        num_rows = max(1, min(_BATCH_ROWS, _BATCH_TOKENS * (stop - first_row) // max(num_tokens, 1)))
        first_row = stop


def _other_columns(rows: list[Any], first: Collection[str], first_row: int, task: HeadTask) -> str:
    """Describes the first row with columns that change training and that the dataset's first row lacks; "" without one."""
    for number, row in enumerate(rows, start=first_row):
        if isinstance(row, Mapping) and (others := [column for column in row if column not in first]):
            if MASK in others and not _is_whole(row[MASK]):
                return f"row {number} has {MASK!r} with padding, but the first row has none; give every row the same columns"
            columns = {column: is_text(row[column]) for column in ("input_ids", *others) if column in row}
            if problem := token_column_problem(columns, f"row {number}"):
                return problem
    return ""


def _is_whole(mask: Any) -> bool:
    """Whether a mask keeps everything."""
    if mask is None:
        return True
    found = as_array(mask)
    # numpy 2.0 compares texts with a number as a whole
    return found is not None and bool(np.all(found == 1))


def _plain_table(rows: list[Any], columns: Sequence[str], first_row: int, task: HeadTask = NEXT_TOKEN) -> pa.Table | str:
    floats = _float_columns(task)
    values: dict[str, list[Any]] = {column: [] for column in columns}
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            return f"row {first_row + number} {_no_mapping(row)}"
        for column in (*_OPTIONAL, MEDIA):
            if column in row and column not in columns:
                return f"row {first_row + number} has {column!r}, but the first row has none; give every row the same columns"
        for column in columns:
            if column not in row:
                return f"row {first_row + number} has no {column!r}, but the first row has; give every row the same columns"
            if column == MEDIA:
                if problem := _medium_problem(row[column]):
                    return f"row {first_row + number} column {column!r} {problem}"
                values[column].append([{name: item.get(name) for name in (*_MEDIUM, *_OF_TOWERS)} for item in row[column]])
                continue
            kinds, items, dtype = ("iuf", "numbers", np.float64) if column in floats else ("iub", "integers", np.int64)
            try:
                value = None if row[column] is None else np.asarray(row[column])
                is_ragged = False
            # lists of different lengths, or values that numpy does not take
            except (ValueError, TypeError, OverflowError):
                is_ragged = True
            if is_ragged or (value is not None and (value.ndim != 1 or (value.dtype.kind not in kinds and value.size))):
                return f"row {first_row + number} column {column!r} holds {row[column]!r:.40}, expected a list of {items} per row"
            values[column].append(value if value is None else value.astype(dtype))
    types = {column: pa.list_(pa.float64() if column in floats else pa.int64()) for column in columns}
    numbers = [(name, pa.int64()) for name in _MEDIUM]
    types[MEDIA] = pa.list_(pa.struct([*numbers, *((name, pa.scalar(least).type) for name, least in _OF_TOWERS.items())]))
    return pa.table({column: pa.array(items, types[column]) for column, items in values.items()})


# numbers of a medium that the scan reads, and what it reads of towers, which rows of earlier versions lack
_MEDIUM = ("start", "stop", "num_features")
_OF_TOWERS: dict[str, int | str] = {"num_parts": 1, "elements": 0, "kind": "image"}


def _medium_problem(value: Any) -> str:
    """Returns what is wrong with a row's media; empty if nothing is."""
    is_right = isinstance(value, list | tuple) and all(
        isinstance(item, Mapping)
        and all(isinstance(item.get(name), int) for name in _MEDIUM)
        and all(isinstance(item.get(name) or least, type(least)) for name, least in _OF_TOWERS.items())
        for item in value
    )
    return "" if is_right else f"holds {value!r:.60}, expected the images that tokenise_chat writes with a processor"


def _no_mapping(row: Any) -> str:
    return (
        f"is {row!r:.60} and has no column 'input_ids' (it has {type(row).__name__}), expected a mapping of columns; correct the "
        f"row, or remove it"
    )


def _float_columns(task: HeadTask) -> tuple[str, ...]:
    return (LOSS_WEIGHTS, "labels") if task.has_values else (LOSS_WEIGHTS,)


def _table_problems(
    name: str,
    first_row: int,
    table: pa.Table | str,
    vocab_size: int,
    placeholders: tuple[int, ...],
    task: HeadTask = NEXT_TOKEN,
) -> tuple[IntArray, list[str]]:
    """Returns lengths of the rows and their problems; no lengths if a column does not hold lists of integers."""
    if isinstance(table, str):
        return np.zeros(0, dtype=np.int64), [f"{name} {table}"]
    for column in table.column_names:
        if column == MEDIA:
            continue
        kind = table[column].type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        # Arrow gives the items of empty lists the type null
        is_number = is_list and (pa.types.is_integer(kind.value_type) or kind.value_type == pa.null())
        is_other = is_list and (
            pa.types.is_floating(kind.value_type) if column in _float_columns(task) else kind.value_type == pa.bool_()
        )
        if not is_number and not is_other:
            expected = f"expected a list of {'numbers' if column in _float_columns(task) else 'integers'} per row"
            if column == "labels":
                expected = task.expected_labels or expected
            return np.zeros(0, dtype=np.int64), [f"{name} column {column!r} holds {kind}, {expected}"]
    for column, expected in (("labels", "token ids"), ("position_ids", "positions"), ("seq_lengths", "lengths")):
        if column in table.column_names and table[column].type.value_type == pa.bool_():
            return np.zeros(0, dtype=np.int64), [f"{name} column {column!r} holds true and false, expected {expected}"]
    lengths = list_lengths(table["input_ids"])
    problems = [
        f"{name} row {first_row + row} has no tokens; remove empty rows, for example with dataset.filter"
        for row in np.flatnonzero(lengths == 0)
    ]
    if MEDIA in table.column_names:
        problems += _media_problems(name, first_row, table, lengths, placeholders)
    else:
        problems += _placeholder_problems(name, first_row, table["input_ids"], placeholders)
    problems += _range_problems(name, "token id", _values(table["input_ids"]), vocab_size)
    if task.kind == "document" and "labels" in table.column_names:
        problems += task.document_problems(name, first_row, table["labels"])
    elif "labels" in table.column_names:
        label_lengths = list_lengths(table["labels"])
        problems += [
            f"{name} row {first_row + row} has {lengths[row]} tokens but {label_lengths[row]} labels; give one label per token "
            f"({IGNORE_INDEX} for none), not shifted"
            for row in np.flatnonzero(label_lengths != lengths)
        ]
        problems += _label_problems(name, _values(table["labels"]), vocab_size, task)
    if LOSS_WEIGHTS in table.column_names:
        problems += _weight_problems(name, first_row, table[LOSS_WEIGHTS], lengths)
    if MASK in table.column_names:
        problems += mask_problems(name, table[MASK], lengths, first_row)
    return lengths, problems + _packing_problems(name, first_row, table, lengths)


def mask_problems(name: str, column: pa.ChunkedArray, lengths: IntArray, first_row: int = 0) -> list[str]:
    """Reports masks with other lengths than their rows, with zeros between tokens, or with document numbers."""
    if (
        not hasattr(column.type, "value_type")
        or not _is_number(column.type.value_type)
        or pa.types.is_floating(column.type.value_type)
    ):
        return [f"{name} column {MASK!r} holds {column.type}, expected a list of integers per row"]
    mask_lengths = list_lengths(column)
    if len(wrong := np.flatnonzero(mask_lengths != lengths)):
        return [
            f"{name} row {first_row + row} has {lengths[row]} tokens but an attention_mask of {mask_lengths[row]}; give one "
            f"value per token, or remove the column"
            for row in wrong
        ]
    values = _values(column)
    if values.null_count:
        return [f"{name} has a row with a missing value in attention_mask; write 1 for a token and 0 for padding"]
    bounds = pc.min_max(values).as_py()
    if bounds["max"] is None or (bounds["min"] >= 0 and bounds["max"] <= 1):
        return [
            f"{name} row {first_row + row} has zeros between the ones of its attention_mask, but only padding at the ends of a "
            f"row can be left out; give such tokens the label {IGNORE_INDEX} instead, or take them out of the row"
            for row in rows_with_holes(column)
        ]
    if bounds["min"] < 0:
        return [f"{name} holds {bounds['min']} in attention_mask, expected 1 for a token and 0 for padding"]
    return [
        f"{name} numbers the documents of its rows in attention_mask, up to {bounds['max']}; give the lengths of every row's "
        f"documents in a column 'seq_lengths' instead, and remove the column"
    ]


def _packing_problems(name: str, first_row: int, table: pa.Table, lengths: IntArray) -> list[str]:
    """Reports rows in which positions or lengths do not divide the row into whole documents, or disagree."""
    problems = []
    row_ends = np.cumsum(lengths)
    if "position_ids" in table.column_names:
        counts, values = list_lengths(table["position_ids"]), _values(table["position_ids"])
        problems = [
            f"{name} row {first_row + row} has {lengths[row]} tokens but {counts[row]} position_ids; give one per token, or "
            f"remove the column"
            for row in np.flatnonzero(counts != lengths)
        ]
        if not problems and len(values):
            positions = pc.fill_null(values.cast(pa.int64(), safe=False), -1).to_numpy()
            before = np.concatenate([[-1], positions[:-1]])
            before[(row_ends - lengths)[lengths > 0]] = -1
            wrong = np.flatnonzero((positions != 0) & ((before < 0) | (positions != before + 1)))
            for row in np.unique(np.searchsorted(row_ends, wrong, side="right")):
                place = int(wrong[wrong >= row_ends[row] - lengths[row]][0])
                place_in_row = place - int(row_ends[row] - lengths[row])
                problems.append(
                    f"{name} row {first_row + row} has position {positions[place]} at token {place_in_row}; position_ids must "
                    f"begin with 0 in every row, and count up by one until they begin again"
                )
    if "seq_lengths" in table.column_names:
        counts, values = list_lengths(table["seq_lengths"]), _values(table["seq_lengths"])
        sizes = pc.fill_null(values.cast(pa.int64(), safe=False), 0).to_numpy()
        sums = np.concatenate([[0], np.cumsum(sizes)])
        ends = np.cumsum(counts)
        totals = sums[ends] - sums[ends - counts]
        none = set(np.searchsorted(ends, np.flatnonzero(sizes < 1), side="right").tolist())
        problems += [
            f"{name} row {first_row + row} has {lengths[row]} tokens but seq_lengths that add up to {totals[row]}"
            f"{', with documents of no tokens' if row in none else ''}; give the number of tokens of every document of the row"
            for row in np.flatnonzero((totals != lengths) | np.isin(np.arange(len(lengths)), list(none)))
        ]
    if not problems and all(column in table.column_names for column in PACKED):
        by_position, by_length = (_documents(table.select([column])) for column in PACKED)
        assert by_position is not None and by_length is not None
        ends_of_both = np.setxor1d(np.cumsum(by_position), np.cumsum(by_length))
        problems += [
            f"{name} row {first_row + row} has position_ids and seq_lengths that divide it differently; remove one of them"
            for row in np.unique(np.searchsorted(row_ends, ends_of_both, side="left"))
        ]
    return problems


def _documents(table: pa.Table) -> IntArray | None:
    """Returns lengths of the documents of all rows without problems; None if rows are not packed."""
    if "seq_lengths" in table.column_names:
        return _values(table["seq_lengths"]).cast(pa.int64(), safe=False).to_numpy()
    if "position_ids" not in table.column_names:
        return None
    positions = _values(table["position_ids"]).to_numpy()
    return np.diff(np.append(np.flatnonzero(positions == 0), len(positions)))


def _values(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns the items of all rows, one after another."""
    return pc.list_flatten(column)


def _label_problems(name: str, labels: pa.ChunkedArray, vocab_size: int, task: HeadTask = NEXT_TOKEN) -> list[str]:
    """Reports a label that is missing, or that is neither a token id (or a class) nor IGNORE_INDEX."""
    if task.kind == "token":
        return class_problems(name, labels, task.num_labels)
    if labels.null_count:
        return [f"{name} has a row with a missing label; write {IGNORE_INDEX} for no label, or remove the row"]
    bounds = pc.min_max(labels).as_py()
    if bounds["min"] is None or (bounds["min"] >= 0 and bounds["max"] < vocab_size):
        return []
    # comparing two counts saves a filtered copy of all labels
    num_negative, num_ignored = (pc.sum(found).as_py() for found in (pc.less(labels, 0), pc.equal(labels, IGNORE_INDEX)))
    if num_negative == num_ignored and bounds["max"] < vocab_size:
        return []
    return _range_problems(name, "label", pc.filter(labels, pc.not_equal(labels, IGNORE_INDEX)), vocab_size)


def _weight_problems(name: str, first_row: int, column: pa.ChunkedArray, lengths: IntArray) -> list[str]:
    """Reports rows with more or fewer weights than tokens, and a weight that is missing, negative or not finite."""
    weight_lengths = list_lengths(column)
    problems = [
        f"{name} row {first_row + row} has {lengths[row]} tokens but {weight_lengths[row]} {LOSS_WEIGHTS}; give one weight per "
        f"token, each beside its label, not shifted"
        for row in np.flatnonzero(weight_lengths != lengths)
    ]
    values = _values(column)
    if values.null_count:
        return [*problems, f"{name} has a row with a missing weight in {LOSS_WEIGHTS}; write 1.0 for an ordinary token"]
    weights = values.to_numpy().astype(np.float64)
    wrong = weights[~(np.isfinite(weights) & (weights >= 0))]
    return problems + [
        f"{name} holds the weight {weight:g} in {LOSS_WEIGHTS}; give finite numbers of 0 or more" for weight in wrong[:1]
    ]


def _placeholder_problems(name: str, first_row: int, column: pa.ChunkedArray, placeholders: tuple[int, ...]) -> list[str]:
    """Reports the first row with a placeholder token for an image, sound or video, or for padding."""
    values = _values(column)
    # Arrow gives the items of empty lists the type null
    if not placeholders or values.type == pa.null():
        return []
    wide = values.cast(pa.int64(), safe=False)
    found = pc.index(pc.is_in(wide, value_set=pa.array(placeholders, pa.int64())), True).as_py()
    if found < 0:
        return []
    row = int(np.searchsorted(np.cumsum(list_lengths(column)), found, side="right"))
    return [
        f"{name} row {first_row + row} has token {values[found]}, which stands for an image, sound or video, or for padding, but "
        f"its row has none; give conversations with images to tokenise_chat and the model's processor, or remove such rows, for "
        f"example with dataset.filter"
    ]


def _range_problems(name: str, what: str, values: pa.ChunkedArray, limit: int) -> list[str]:
    """Reports a value that is missing or outside [0, limit)."""
    if values.null_count:
        return [f"{name} has a row with a missing {what}; tokenise it again, or remove the row"]
    bounds = pc.min_max(values).as_py()
    if bounds["min"] is None or (bounds["min"] >= 0 and bounds["max"] < limit):
        return []
    wrong = bounds["max"] if bounds["max"] >= limit else bounds["min"]
    none = f" ({IGNORE_INDEX} means no label)" if what == "label" else ""
    return [
        f"{name} holds {what} {wrong}, but the model's vocabulary has {limit} entries{none}; tokenise with the model's own "
        f"tokenizer"
    ]


logger = logging.getLogger(__name__)

# version of the file; raise it if a scan finds other problems or lengths than before, or writes them differently
_FORMAT = 8


def scan_on_every_rank(
    sets: Mapping[str, Any], vocab_size: int, show_progress: bool, placeholders: tuple[int, ...] = (), task: HeadTask = NEXT_TOKEN
) -> dict[str, DatasetScan]:
    """Scans the named datasets for every rank: one process per machine reads the rows, the others read the file it wrote.

    Collective over all ranks, on the default process group with its long time-out (`ddp_timeout`): every rank must call this
    equally often. show_progress: rank 0 shows a bar if reading takes longer than a second.
    """
    state = PartialState()
    show_progress = show_progress and state.is_main_process
    early = [name for name in sets if state.is_local_main_process or not _files(sets[name])]
    found = {name: cached_scan(sets[name], name, vocab_size, show_progress, placeholders, task) for name in early}
    state.wait_for_everyone()
    scans = {
        name: found[name] if name in found else cached_scan(dataset, name, vocab_size, show_progress, placeholders, task)
        for name, dataset in sets.items()
    }
    # if no file could be written, the other processes read the rows: wait for them
    state.wait_for_everyone()
    return scans


def cached_scan(
    dataset: Any,
    name: str,
    vocab_size: int,
    show_progress: bool = False,
    placeholders: tuple[int, ...] = (),
    task: HeadTask = NEXT_TOKEN,
) -> DatasetScan:
    """Reads an earlier scan from its file, or scans now and writes that file (if the dataset has files)."""
    files = _files(dataset)
    if not files:
        return scan_dataset(dataset, name, vocab_size, show_progress, placeholders, task)
    made_from = _made_from(dataset, files, name, vocab_size) | {"placeholders": list(placeholders), "task": asdict(task)}
    path = cache_path(dataset, name, vocab_size, placeholders, task)
    scan = _read(path, made_from, name) if path.exists() else None
    if scan is None:
        scan = scan_dataset(dataset, name, vocab_size, show_progress, placeholders, task)
        _write(path, made_from, scan, name)
    return scan


def cache_path(
    dataset: datasets.Dataset,
    name: str,
    vocab_size: int,
    placeholders: tuple[int, ...] = (),
    task: HeadTask = NEXT_TOKEN,
) -> Path:
    """Returns the file of a scan: next to the dataset's files, or in the datasets cache if their folder is read-only."""
    folder = Path(_files(dataset)[0]).parent
    if not os.access(folder, os.W_OK):
        folder = Path(datasets.config.HF_DATASETS_CACHE) / "hf_longctx"
    made_for = [_FORMAT, name, vocab_size, placeholders, asdict(task), len(dataset), _sorted_columns(dataset)]
    purpose = xxhash.xxh3_64_hexdigest(json.dumps(made_for).encode())
    return folder / f"longctx-{dataset._fingerprint}-{purpose}.index"


def _files(dataset: Any) -> list[str]:
    """Returns the files of an Arrow dataset; empty for a dataset in memory or of another class."""
    return [file["filename"] for file in dataset.cache_files] if isinstance(dataset, datasets.Dataset) else []


def _sorted_columns(dataset: datasets.Dataset) -> list[str]:
    # all columns, not only those that are read: the scan refuses some by their name
    return sorted(dataset.column_names)


def _made_from(dataset: datasets.Dataset, files: list[str], name: str, vocab_size: int) -> dict[str, Any]:
    """Collects everything that a scan depends on, as JSON values."""
    states = [(file, Path(file).stat()) for file in files]
    return {
        "format": _FORMAT,
        "name": name,
        "vocab_size": vocab_size,
        "fingerprint": dataset._fingerprint,
        "columns": _sorted_columns(dataset),
        "dataset_format": dataset.format["type"],
        "num_rows": len(dataset),
        "files": [[file, state.st_size, state.st_mtime_ns] for file, state in states],
    }


def _read(path: Path, made_from: dict[str, Any], name: str) -> DatasetScan | None:
    """Reads a scan from its file; returns None, and logs why, if the file is damaged or was made from something else."""
    try:
        content = path.read_bytes()
    except OSError as error:
        logger.warning("%s: the index in %s cannot be read (%s), so it is built again", name, path, error)
        return None
    header_start = content.find(b"\n") + 1
    checksum = content[:header_start].decode(errors="replace").strip()
    if checksum != xxhash.xxh3_128_hexdigest(memoryview(content)[header_start:]):
        logger.warning("%s: the index in %s is damaged, so it is built again", name, path)
        return None
    try:
        found = _parsed(content, header_start, made_from)
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration, RecursionError):
        # its checksum is correct, so it was written by another version, or by hand
        logger.warning("%s: the index in %s has another form, so it is built again", name, path)
        return None
    if found is None:
        logger.warning("%s: the index in %s was made from other files, so it is built again", name, path)
    return found


def _parsed(content: bytes, header_start: int, made_from: dict[str, Any]) -> DatasetScan | None:
    """Reads a scan from an index file's bytes; None if it was made from other files. Raises an error for another format."""
    lengths_start = content.index(b"\n", header_start) + 1
    values = json.loads(content[header_start:lengths_start])
    if values["made_from"] != made_from:
        return None
    numbers = np.frombuffer(content, dtype=np.int64, offset=lengths_start).copy()
    counts = [None if count is None else int(count) for count in values["counts"]]
    if sum(count for count in counts if count is not None) != len(numbers) or min((c for c in counts if c), default=1) < 0:
        raise ValueError("counts")
    parts = iter(np.split(numbers, np.cumsum([count for count in counts if count is not None])))
    lengths, documents, first, features, blocks, media = (None if count is None else next(parts) for count in counts)
    if lengths is None or not isinstance(values["digest"], str) or not isinstance(values["problems"], list):
        raise ValueError("lengths")
    padding = Padding(*map(int, values["padding"]))
    blocks = None if blocks is None else blocks.reshape(-1, 3)
    media = None if media is None else media.reshape(-1, 7)
    return DatasetScan(lengths, values["digest"], values["problems"], None, documents, first, padding, features, blocks, media)


def _write(path: Path, made_from: dict[str, Any], scan: DatasetScan, name: str) -> None:
    """Writes checksum, header, and the numbers of rows and documents into one file, atomically."""
    blocks, media = (None if each is None else each.reshape(-1) for each in (scan.media_blocks, scan.media))
    arrays = scan.lengths, scan.documents, scan.first_labels, scan.media_features, blocks, media
    values: dict[str, Any] = {"made_from": made_from, "digest": scan.digest, "problems": scan.problems}
    values["padding"] = astuple(scan.padding)
    values["counts"] = [None if array is None else len(array) for array in arrays]
    header = json.dumps(values).encode() + b"\n"
    numbers = [array.data for array in arrays if array is not None]
    checksum = xxhash.xxh3_128(header)
    for lengths in numbers:
        checksum.update(lengths)
    # a plain file, so that the umask decides who may read it
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(checksum.hexdigest().encode() + b"\n" + header)
            for lengths in numbers:
                file.write(lengths.cast("B"))
        temporary.replace(path)
    except OSError as error:
        logger.warning("%s: the index could not be written to %s (%s), so the next run reads all rows again", name, path, error)
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
