"""Reads the labels of a model's output head from rows and Arrow tables, and finds those that count in the loss.

A language model learns the next token of every token. A head that classifies tokens has one label per token in the column
`labels`. A head that classifies documents has one label per row, in `labels`, `label` or `label_ids`, all accepted by stock
collators: a class, a number (regression), or one number per class (multi-label). This label belongs to the token that
transformers' head reads: the last one that is no padding token.

A label counts if it is not -100, has no weight of 0, and its token is predicted. A sequence without such labels teaches nothing,
and a step of such sequences has no mean loss. The scan of a dataset stores the position of every document's first label that
counts, which shows for any limit whether a truncated document has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hf_longctx.hf.data.padding import unpadded
from hf_longctx.hf.data.sampler import IntArray, LengthAwareSampler, SequenceIndex
from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.heads import HeadKind
from hf_longctx.runtime.core.loss import IGNORE_INDEX

Problem = Literal["single_label_classification", "regression", "multi_label_classification"]
# columns with a document's label, in the order in which stock collators prefer them
_COLUMNS = ("label", "label_ids", "labels")
# tokens searched at a time for the last one that is no padding
_TAIL = 64


@dataclass(frozen=True)
class HeadTask:
    """Kind and meaning of a run's labels."""

    # kind of prediction
    kind: HeadKind = "next_token"
    # number of outputs of a classifying head
    num_labels: int = 0
    # loss per document, by its name in transformers
    problem: Problem = "single_label_classification"
    # token that a document head skips at the end of a document; None: it skips none
    pad_token_id: int | None = None
    # label every token that the head reads with 0 and ignore labels of rows
    marks: bool = False

    @property
    def has_values(self) -> bool:
        """Whether labels are numbers instead of classes."""
        return self.kind == "document" and self.problem != "single_label_classification"

    @property
    def labels_per_row(self) -> int:
        """Number of entries of a document's label."""
        return self.num_labels if self.has_values else 1

    def label_column(self, columns: Sequence[str]) -> str:
        """Returns the column with labels; "" without one."""
        names = _COLUMNS if self.kind == "document" else ("labels",)
        return next((name for name in names if name in columns), "")

    def renamed(self, columns: Sequence[str]) -> list[str]:
        """Returns the names of columns after `listed`."""
        own = self.label_column(columns)
        return ["labels" if name == own else name for name in columns]

    def listed(self, rows: Any) -> Any:
        """Turns labels of documents in a row, or an Arrow table of rows, into lists in the column `labels`."""
        if self.kind != "document":
            return rows
        if isinstance(rows, pa.Table):
            return self._listed_table(rows)
        if not isinstance(rows, Mapping) or not (own := self.label_column(list(rows))) or rows[own] is None:
            return rows
        values = np.atleast_1d(np.asarray(rows[own]))
        if values.dtype.kind in ("iuf" if self.has_values else "iu"):
            values = values.astype(np.float64 if self.has_values else np.int64)
        return {**{name: value for name, value in rows.items() if name != own}, "labels": values}

    def read(self, rows: Any) -> Any:
        """Returns a row, or an Arrow table of rows, in the form for training: `listed`, and without padding."""
        return unpadded(self.listed(rows), self.kind != "document")

    def _listed_table(self, table: pa.Table) -> pa.Table:
        own = self.label_column(table.column_names)
        if not own:
            return table
        column = table[own]
        if not hasattr(column.type, "value_type"):
            values = column.combine_chunks()
            values = values if isinstance(values, pa.Array) else pa.concat_arrays(values.chunks)
            if self.has_values and pa.types.is_integer(values.type):
                values = values.cast(pa.float64())
            column = pa.FixedSizeListArray.from_arrays(values, 1)
        return table.drop_columns([own]).append_column("labels", column)

    @property
    def expected_labels(self) -> str:
        """Describes the allowed labels of a document, for an error message; "" for labels of tokens."""
        if self.kind != "document":
            return ""
        if not self.has_values:
            return f"expected one class per row, an integer from 0 to {self.num_labels - 1}"
        return f"expected {f'a list of {self.num_labels} numbers' if self.num_labels > 1 else 'a number'} per row"

    def column_problem(self, columns: Sequence[str], name: str, packed: Sequence[str], weights: str) -> str | None:
        """Describes why rows with these columns have no labels for the head; None if they have.

        packed: columns that divide a row into documents; weights: the column with weights of tokens.
        """
        if self.kind == "next_token":
            return None
        found = [column for column in (_COLUMNS if self.kind == "document" else ("labels",)) if column in columns]
        if not found and not self.marks:
            what = "'labels', one class per token" if self.kind == "token" else "'label' or 'labels', one label per row"
            return f"{name} has no column {what}, which a model that classifies {self.kind}s learns; add it"
        if len(found) > 1:
            return f"{name} has the columns {' and '.join(map(repr, found))}, which both hold labels; remove all but one"
        if self.kind == "document" and (wrong := [column for column in (*packed, weights) if column in columns]):
            why = "weighs tokens, but the loss is that of documents" if wrong[0] == weights else "divides rows into documents"
            return (
                f"{name} has a column {wrong[0]!r}, which {why}, and a model that classifies documents has one label per row; "
                f"give one document per row, and remove the column"
            )
        return None

    def document_problems(self, name: str, first_row: int, column: pa.ChunkedArray) -> list[str]:
        """Reports labels of documents that the head cannot learn, in a column of lists."""
        counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
        if len(wrong := np.flatnonzero(counts != self.labels_per_row)):
            found = f"has {counts[wrong[0]]} labels" if counts[wrong[0]] else "has no label"
            return [f"{name} row {first_row + wrong[0]} {found}, {self.expected_labels} (problem_type {self.problem!r})"]
        values = pc.list_flatten(column)
        if not self.has_values:
            return class_problems(name, values, self.num_labels)
        numbers = pc.fill_null(values.cast(pa.float64()), float("nan")).to_numpy()
        if not np.isfinite(numbers).all():
            return [f"{name} has a label that is missing or not finite; give finite numbers, or remove the row"]
        if self.problem == "multi_label_classification" and ((numbers < 0) | (numbers > 1)).any():
            wrong_one = numbers[(numbers < 0) | (numbers > 1)][0]
            return [
                f"{name} has the label {wrong_one:g}, but multi_label_classification learns numbers from 0 to 1; give such "
                f"numbers, or set problem_type of the config to 'regression'"
            ]
        return []

    def label_place(self, ids: Any, start: int, stop: int) -> int:
        """Returns the index of the token whose logits transformers uses for a document at tokens [start, stop) of a row.

        ids: token ids of the row, as something that can be sliced.
        """
        if self.pad_token_id is None:
            return stop - 1
        for end in range(stop, start, -_TAIL):
            begin = max(start, end - _TAIL)
            found = np.flatnonzero(np.asarray(ids[begin:end]) != self.pad_token_id)
            if len(found):
                return begin + int(found[-1])
        # a document of padding only
        return start


def class_problems(name: str, labels: pa.ChunkedArray, num_labels: int) -> list[str]:
    """Reports a label that is missing, or neither a class nor IGNORE_INDEX."""
    if labels.null_count:
        return [f"{name} has a row with a missing label; write {IGNORE_INDEX} for no label, or remove the row"]
    values = labels.to_numpy()
    if len(wrong := values[((values < 0) | (values >= num_labels)) & (values != IGNORE_INDEX)]):
        return [
            f"{name} holds label {wrong[0]}, but the model has {num_labels} labels, from 0 to {num_labels - 1} ({IGNORE_INDEX} "
            f"means no label); load it with num_labels set to the number of classes"
        ]
    return []


NEXT_TOKEN = HeadTask()


def task_of(facts: ModelFacts, dataset: Any = None) -> HeadTask:
    """Returns the labels that a model's head learns. dataset: rows that show whether classes exclude each other."""
    base, kind = facts.base, facts.head_kind
    if kind == "next_token":
        return NEXT_TOKEN
    num_labels = int(base.config.num_labels)
    if kind == "token":
        return HeadTask(kind, num_labels)
    problem = base.config.problem_type or _problem(num_labels, dataset)
    return HeadTask(kind, num_labels, problem, base.config.get_text_config().pad_token_id)


def _problem(num_labels: int, dataset: Any) -> Problem:
    """Returns the problem that transformers infers from the first labels if the config names none."""
    if num_labels == 1:
        return "regression"
    row = dataset[0] if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and len(dataset) else {}
    own = HeadTask("document").label_column(list(row)) if isinstance(row, Mapping) else ""
    is_class = not own or np.asarray(row[own]).dtype.kind in "iu"
    return "single_label_classification" if is_class else "multi_label_classification"


# column with one weight per label, a factor of its token's loss
LOSS_WEIGHTS = "loss_weights"
# description of labels that do not count
LABELS_THAT_COUNT = "-100 and weight 0 do not count, nor does the first token of a document, which nothing predicts"
# position of the first label in a document without any
NO_LABEL = np.iinfo(np.int64).max
# most steps of a training that are checked before it starts
_MOST_STEPS = 100_000


def list_lengths(column: pa.ChunkedArray) -> IntArray:
    """Returns the number of items in every row; 0 for a row without the list."""
    lengths: IntArray = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
    return lengths


def first_labels(table: pa.Table, documents: IntArray | None, task: HeadTask) -> IntArray | None:
    """Returns the position of each document's first label that counts, or NO_LABEL; None for rows of plain text.

    documents: lengths of the documents in packed rows. Rows must be free of problems.
    """
    if task.marks or (task.kind == "document" and task.has_values):
        return np.zeros(len(table), dtype=np.int64)
    if task.kind == "document":
        classes = pc.list_flatten(table["labels"]).to_numpy()
        return np.where(classes != IGNORE_INDEX, 0, NO_LABEL).astype(np.int64)
    if (counts := counted_labels(table)) is None:
        return None
    lengths = list_lengths(table["input_ids"]) if documents is None else documents
    ends = np.cumsum(lengths)
    starts = ends - lengths
    if task.kind == "next_token":
        # nothing predicts the first token of a document
        counts[starts] = False
    places = np.append(np.flatnonzero(counts), NO_LABEL)
    first = places[np.searchsorted(places, starts)]
    return np.where(first < ends, first - starts, NO_LABEL)


def counted_labels(table: pa.Table) -> NDArray[np.bool_] | None:
    """Returns whether the label of each token counts, row by row; None for rows of plain text, where all do."""
    if "labels" not in table.column_names and LOSS_WEIGHTS not in table.column_names:
        return None
    counts = np.ones(int(list_lengths(table["input_ids"]).sum()), dtype=bool)
    if "labels" in table.column_names:
        counts &= pc.list_flatten(table["labels"]).to_numpy() != IGNORE_INDEX
    if LOSS_WEIGHTS in table.column_names:
        counts &= pc.list_flatten(table[LOSS_WEIGHTS]).to_numpy() > 0
    return counts


def have_labels(
    index: SequenceIndex,
    lengths: IntArray,
    first: IntArray | None,
    task: HeadTask,
    read: Callable[[IntArray], Iterator[pa.Table]],
) -> NDArray[np.bool_]:
    """Returns for each sequence of `index` whether it has a label that counts.

    lengths: tokens of every document before cutting. first: from `first_labels`. read: returns rows by their numbers, in tables;
    called for rows with later pieces of split documents, once per row.
    """
    if first is None:
        return index.lengths > 1
    if len(index) == len(lengths):
        return first < index.lengths
    ends = np.cumsum(index.lengths)
    document_ends = np.cumsum(lengths)
    document = np.searchsorted(document_ends, ends)
    stops = ends - (document_ends - lengths)[document]
    found = first[document] < stops
    if task.marks or task.kind == "document":
        # every piece has the label of its row
        return found
    later = np.flatnonzero(found & (stops > index.lengths))
    rows, places = np.unique(index.rows[later], return_inverse=True)
    num_read = 0
    for table in read(rows):
        counts = counted_labels(table)
        assert counts is not None
        sums = np.append(0, np.cumsum(counts))
        row_lengths = list_lengths(table["input_ids"])
        # sequences are in the order of their rows
        own = slice(*np.searchsorted(places, (num_read, num_read + len(table))))
        begins = (np.cumsum(row_lengths) - row_lengths)[places[own] - num_read]
        numbers = later[own]
        # nothing predicts the first token of a piece
        unpredicted = int(task.kind == "next_token")
        found[numbers] = sums[begins + index.stops[numbers]] > sums[begins + index.starts[numbers] + unpredicted]
        num_read += len(table)
    return found


def step_without_labels(
    sampler: LengthAwareSampler, labelled: NDArray[np.bool_], num_epochs: int, most_steps: int, batches_per_step: int
) -> tuple[int, list[int]] | None:
    """Returns number (from 1) and sequences of the first optimizer step without a label that counts; None if all have one.

    labelled: from `have_labels`. Checks only the first steps of very long trainings, and leaves the sampler in its epoch.
    """
    if labelled.all():
        return None
    before = sampler.epoch
    try:
        steps = enumerate(_steps(sampler, num_epochs, batches_per_step), start=1)
        for number, sequences in steps:
            if number > min(most_steps, _MOST_STEPS):
                return None
            if not labelled[sequences].any():
                return number, sequences
    finally:
        sampler.set_epoch(before)
    return None


def _steps(sampler: LengthAwareSampler, num_epochs: int, batches_per_step: int) -> Iterator[list[int]]:
    """Yields the sequences of every optimizer step; an epoch's last step may have fewer batches."""
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        step: list[int] = []
        for number, batch in enumerate(sampler, start=1):
            step += batch
            if number % batches_per_step == 0 or number == len(sampler):
                yield step
                step = []
