"""Finds the labels that count in the loss: neither -100 nor of weight 0, and of a token that is predicted.

A sequence without any teaches nothing, and a step of such sequences has no mean loss. The scan of a dataset notes where the first
label of every document stands that counts; from this follows, for any limit, whether a truncated document has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hf_longctx.hf.data.labels.task import HeadTask
from hf_longctx.hf.data.sampler import IntArray, LengthAwareSampler, SequenceIndex
from hf_longctx.runtime.core.loss import IGNORE_INDEX

# column with one weight per label, by which the loss of its token is multiplied
LOSS_WEIGHTS = "loss_weights"
# words for labels that do not count
LABELS_THAT_COUNT = "-100 and weight 0 do not count, nor does the first token of a document, which nothing predicts"
# place of the first label of a document that has none
NO_LABEL = np.iinfo(np.int64).max
# steps of a training that are looked at before it starts
_MOST_STEPS = 100_000


def list_lengths(column: pa.ChunkedArray) -> IntArray:
    """Number of items in every row; 0 for a row without the list."""
    lengths: IntArray = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
    return lengths


def first_labels(table: pa.Table, documents: IntArray | None, task: HeadTask) -> IntArray | None:
    """The token of each document at which its first label stands that counts, or NO_LABEL; None for rows of plain text.

    documents: lengths of the documents in rows that are packed. Rows must be without problems.
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
    """Whether the label of each token counts, row by row; None for rows of plain text, where all do."""
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
    """Whether a label counts in each sequence of `index`.

    lengths: tokens of every document before they were cut. first: see `first_labels`. read: gives rows by their numbers, in
    tables; called for rows with later pieces of documents that were split, each of which is read once.
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
    """The number, from 1, and the sequences of the first optimizer step without a label that counts; None if all have one.

    labelled: see `have_labels`. Looks at the first steps of very long trainings alone, and leaves the sampler in its epoch.
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
    """Sequences of every optimizer step; each epoch ends with a step, which may have fewer batches."""
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        step: list[int] = []
        for number, batch in enumerate(sampler, start=1):
            step += batch
            if number % batches_per_step == 0 or number == len(sampler):
                yield step
                step = []
