"""Finds out how a trainer's data collator changes rows, so that plans learn the same tokens without calling it on batches.

A plan packs whole sequences and learns the next token at every position of each. Collators whose effect on a row is known are
replaced by that effect. Any other is called on single rows, and the row that it makes is read: its tokens, its labels, and the
padding that its mask names. Rows must not depend on the others of their batch, and two calls must give the same; a few rows are
tried at the start. Trainers and callbacks share this module.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import transformers
from numpy.typing import NDArray
from transformers import default_data_collator

from hf_longctx.hf.data.fields import tower_columns
from hf_longctx.hf.data.labels import LOSS_WEIGHTS
from hf_longctx.hf.data.scan import PACKED, as_array
from hf_longctx.hf.data.streams.sources import is_stream
from hf_longctx.hf.models.heads import HeadKind
from hf_longctx.runtime.core.loss import IGNORE_INDEX

_BATCH_ROWS = 1000
_PADDING = (transformers.DataCollatorWithPadding, transformers.DefaultDataCollator)
# TRL's collator: takes labels from the row's column `labels`, or else the token ids, just as plans do
_TRL = ("trl.trainer.sft_trainer", "DataCollatorForLanguageModeling")
# names that a batch of a user's collator may have
_READ = ("input_ids", "labels", "attention_mask", "position_ids", "token_type_ids", LOSS_WEIGHTS)
# rows of a set that a user's collator is tried on, and first rows of a stream
_TRIED_ROWS = 5

Row = Mapping[str, Any]


class Collation:
    """A collator, and the rows that it makes from those of a run.

    kind_of_head: what the model's head predicts. columns: those that reach the collator, since `Trainer` removes others; None
    for all.
    """

    def __init__(self, collator: Any, kind_of_head: HeadKind = "next_token", columns: Collection[str] | None = None) -> None:
        self.collator, self.kind_of_head = collator, kind_of_head
        self.columns = None if columns is None else frozenset(columns)
        self._name = getattr(collator, "__name__", type(collator).__name__)
        self._is_known = _is_known(collator, kind_of_head)
        # first rows of a stream, as they were made
        self._seen: list[tuple[Any, Row]] = []

    @property
    def reads_all(self) -> bool:
        """Whether the collator is a user's and gets all columns of rows."""
        return self.collator is not None and not self._is_known and self.columns is None

    def problems(self, dataset: Any, name: str = "train_dataset") -> list[str]:
        """Returns why plans would learn other tokens than the collator's batches over `dataset`; empty if they learn the same.

        name: the name of the set in messages.
        """
        if self.collator is None:
            return []
        if self._is_known:
            found = _known_problems(self.collator, self._name, dataset, self.kind_of_head)
            return [problem.replace("train_dataset", name) for problem in found]
        if dataset is None or is_stream(dataset) or not is_readable(dataset):
            return []
        with kept_random_states():
            try:
                self._try([dataset[number] for number in _tried(len(dataset))])
            except _CollatorProblem as error:
                return [f"data_collator {self._name} on {name}: {error}"]
        return []

    def rows(self, dataset: Any) -> Any:
        """The rows that the collator makes of those of a set; the set itself if these are the same."""
        if dataset is None or self.collator is None or is_stream(dataset):
            return dataset
        if self._is_known:
            pad = _pad_token(self.collator)
            if pad is None or not is_readable(dataset):
                return dataset
            changes = _has_labels(dataset) or _has_token(dataset, pad)
            return CollatedRows(dataset, self._masked) if changes else dataset
        return CollatedRows(dataset, self._made)

    @property
    def stream_row(self) -> Callable[[Any], Any] | None:
        """Makes a row of a stream, and tries the collator on the first ones; None if rows stay as they are."""
        if self.collator is None:
            return None
        return self._known_row if self._is_known else self._tried_row

    def _known_row(self, row: Any) -> Any:
        """A row of a stream, whose columns were unknown at the start. Raises ValueError for a row that plans would divide."""
        if isinstance(row, Mapping) and (found := _known_problems(self.collator, self._name, [row], self.kind_of_head)):
            raise ValueError(found[0])
        return row if _pad_token(self.collator) is None else self._masked(row)

    def _masked(self, row: Any) -> Any:
        """The row with its token ids as labels, and none for the padding token, as DataCollatorForLanguageModeling makes it."""
        if not isinstance(row, Mapping) or "input_ids" not in row:
            return row
        ids = _integers(row["input_ids"])
        # rows without token ids are left to the scan of the dataset, which names them
        return row if ids is None else {**row, "labels": np.where(ids == _pad_token(self.collator), IGNORE_INDEX, ids)}

    def _made(self, row: Any) -> Row:
        """The row that the collator makes of one row alone. Raises ValueError for one that cannot be read."""
        try:
            return self._read(self._called([row]))
        except _CollatorProblem as error:
            raise ValueError(f"data_collator {self._name}: {error}") from error

    def _tried_row(self, row: Any) -> Row:
        made = self._made(row)
        if len(self._seen) < _TRIED_ROWS:
            self._seen.append((row, made))
            try:
                self._compare(row, made)
                self._try_pair(*self._seen[0], row, made)
            except _CollatorProblem as error:
                raise ValueError(f"data_collator {self._name}: {error}") from error
        return made

    def _called(self, rows: Sequence[Any]) -> Any:
        # `Trainer` hands rows of other kinds on as they are, such as the tuples of a TensorDataset
        given = [self._reaching(row) if isinstance(row, Mapping) else row for row in rows]
        if given[0] == {}:
            raise _CollatorProblem(
                f"the model's forward takes none of the columns {', '.join(map(str, rows[0]))}, so that no row is left for it; "
                f"set remove_unused_columns=False"
            )
        try:
            return self.collator(given)
        except Exception as error:
            raise _CollatorProblem(
                f"it failed on {len(rows)} row{'s' if len(rows) > 1 else ''} ({type(error).__name__}: {error}); plans call it on "
                f"one row at a time: let it take a list of rows of any length, or do its work with dataset.map"
            ) from error

    def _reaching(self, row: Row) -> dict[str, Any]:
        """The columns of a row that reach the collator."""
        return {name: value for name, value in row.items() if self.columns is None or name in self.columns}

    def _try(self, rows: Sequence[Any]) -> None:
        """Tries the collator on single rows, each twice, and on the shortest and the longest of them together."""
        made = [self._read(self._called([row])) for row in rows]
        for row, found in zip(rows, made, strict=True):
            self._compare(row, found)
        order = sorted(range(len(rows)), key=lambda place: len(made[place]["input_ids"]))
        first, last = order[0], order[-1]
        self._try_pair(rows[first], made[first], rows[last], made[last])

    def _compare(self, row: Any, made: Row) -> None:
        if not _are_equal(made, self._read(self._called([row]))):
            raise _CollatorProblem(
                "two calls on the same row gave different tokens or labels, so it draws random numbers, but every rank reads "
                "rows by itself; draw them once with dataset.map, or by a seed from the row"
            )

    def _try_pair(self, first: Any, made_first: Row, second: Any, made_second: Row) -> None:
        """Compares the rows that the collator makes of two together with those that it makes of each alone."""
        try:
            batch = self._called([first, second])
        except _CollatorProblem:
            # some stack rows, which must then be equally long; `Trainer` would fail on these too
            batch, second, made_second = self._called([first, first]), first, made_first
        ids = np.asarray(batch.get("input_ids")) if isinstance(batch, Mapping) else np.zeros(0)
        if ids.ndim != 2 or len(ids) != 2:
            raise _CollatorProblem(
                f"it makes input_ids of shape {list(ids.shape)} from two rows, as collators do that pack them; leave it out, "
                f"since plans pack rows themselves and keep them apart"
            )
        for place, made in enumerate((made_first, made_second)):
            own = {name: value[place : place + 1] for name, value in batch.items() if value is not None}
            if not _are_equal(made, self._read(own)):
                raise _CollatorProblem(
                    "it makes other tokens or labels of a row beside another row than of the row alone, but plans choose which "
                    "rows run together; let it treat each row by itself"
                )

    def _read(self, batch: Any) -> Row:
        """The row in a batch of one: tokens without padding, and labels."""
        if not isinstance(batch, Mapping):
            raise _CollatorProblem(f"it returns {type(batch).__name__}; let it return a dict with input_ids and labels")
        found = {name: np.asarray(value) for name, value in batch.items() if value is not None}
        if unknown := [name for name in found if name not in _READ]:
            if pixels := tower_columns(unknown):
                raise _CollatorProblem(
                    f"it returns {pixels[0]!r}, which plans do not read; give rows with images to tokenise_chat and the model's "
                    f"processor, and leave the collator out"
                )
            raise _CollatorProblem(
                f"it returns {unknown[0]!r}, which plans do not read, and to ignore it would change what is trained; express "
                f"it in input_ids, labels (-100 for no label) and attention_mask"
            )
        for name in ("input_ids", "labels"):
            if name not in found:
                raise _CollatorProblem(f"it returns no {name!r}, so that `Trainer` would have no loss; add it")
        ids, labels = found["input_ids"], found["labels"]
        if ids.ndim != 2 or len(ids) != 1:
            raise _CollatorProblem(f"it makes input_ids of shape {list(ids.shape)} from one row; let it return [rows, tokens]")
        of_tokens = [name for name in found if name != "input_ids" and (name != "labels" or self.kind_of_head != "document")]
        if wrong := [name for name in of_tokens if found[name].shape != ids.shape]:
            raise _CollatorProblem(
                f"it makes {wrong[0]} of shape {list(found[wrong[0]].shape)} beside input_ids of {list(ids.shape)}; give one per "
                f"token"
            )
        start, stop = _kept(found.get("attention_mask", np.ones(ids.shape)))
        if "position_ids" in found and not (found["position_ids"][0, start:stop] == np.arange(stop - start)).all():
            raise _CollatorProblem("its position_ids do not count from 0 in every row, as those of plans do; leave them out")
        if "token_type_ids" in found and found["token_type_ids"].any():
            raise _CollatorProblem("its token_type_ids are not all 0, and plans do not read them; leave them out")
        made = {"input_ids": ids[0, start:stop]}
        if self.kind_of_head == "document":
            return {**made, "labels": labels[0] if labels.ndim else labels}
        if (labels[0, :start] != IGNORE_INDEX).any() or (labels[0, stop:] != IGNORE_INDEX).any():
            raise _CollatorProblem(
                f"it gives padding a label, of which there is more or less beside other rows; write {IGNORE_INDEX} where "
                f"attention_mask is 0"
            )
        if start and self.kind_of_head == "next_token" and labels[0, start] != IGNORE_INDEX:
            raise _CollatorProblem(
                "it pads on the left, so a sequence's first token is predicted from padding, which plans do not have; set "
                "tokenizer.padding_side='right' for training"
            )
        made["labels"] = labels[0, start:stop]
        return made | ({LOSS_WEIGHTS: found[LOSS_WEIGHTS][0, start:stop]} if LOSS_WEIGHTS in found else {})


class CollatedRows:
    """The rows of a set as a collator makes them, one by one."""

    def __init__(self, dataset: Any, make: Callable[[Any], Any]) -> None:
        self.dataset, self.make = dataset, make

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> Any:
        return self.make(self.dataset[number])


class _CollatorProblem(Exception):
    """Raised for a collator's batch that plans cannot read; says what to do."""


def forward_columns(base: Any, args: transformers.TrainingArguments) -> list[str] | None:
    """Columns of rows that `Trainer` leaves to a collator: those that the forward of `base` takes, and labels; None for all."""
    if not args.remove_unused_columns:
        return None
    named = inspect.signature(base.forward).parameters
    # names that are no list are refused with the other arguments
    own = args.label_names if isinstance(args.label_names, list | tuple) else ()
    return [*named, "labels", "label", "label_ids", LOSS_WEIGHTS, *own]


def _is_known(collator: Any, kind_of_head: HeadKind) -> bool:
    """Whether the effect of a collator on rows is known; false for subclasses, which may do anything."""
    kind = type(collator)
    if collator is default_data_collator or kind in _PADDING:
        return True
    if kind_of_head != "next_token":
        return kind is transformers.DataCollatorForTokenClassification
    known = (
        transformers.DataCollatorWithFlattening,
        transformers.DataCollatorForSeq2Seq,
        transformers.DataCollatorForLanguageModeling,
    )
    return kind in known or (kind.__module__, kind.__name__) == _TRL


def _pad_token(collator: Any) -> int | None:
    """The token that a collator gives no label; None if it leaves labels as they are."""
    if type(collator) is not transformers.DataCollatorForLanguageModeling:
        return None
    pad = collator.tokenizer.pad_token_id
    # without a padding token, no token id is left out
    return -1 if pad is None else int(pad)


def _tried(num_rows: int) -> list[int]:
    return sorted({0, 1, num_rows // 3, 2 * num_rows // 3, num_rows - 1} & set(range(num_rows)))


def _kept(mask: NDArray[Any]) -> tuple[int, int]:
    """The range of tokens that are no padding."""
    places = np.flatnonzero(mask[0])
    if not len(places):
        raise _CollatorProblem("its attention_mask is 0 for all tokens of a row; remove such rows with dataset.filter")
    start, stop = int(places[0]), int(places[-1]) + 1
    if len(places) != stop - start or set(np.unique(mask[0, start:stop]).tolist()) != {1}:
        raise _CollatorProblem(
            "its attention_mask is not 1 for all tokens but padding at the ends; leave padding alone out of it, and put "
            "documents into rows of their own"
        )
    return start, stop


def _are_equal(first: Row, second: Row) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Context after which random numbers continue as if none had been drawn."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def _known_problems(collator: Any, name: str, dataset: Any, kind_of_head: HeadKind) -> list[str]:
    kind = type(collator)
    if kind_of_head != "next_token":
        return _classifier_problems(collator, kind, name, kind_of_head)
    if kind is transformers.DataCollatorWithFlattening:
        return _flattening_problems(collator) + _packing_problems(name, dataset)
    if kind is transformers.DataCollatorForSeq2Seq:
        return _label_problems(name, dataset) + _seq2seq_problems(collator) + _packing_problems(name, dataset)
    if kind is transformers.DataCollatorForLanguageModeling:
        return _language_modeling_problems(collator) + _packing_problems(name, dataset)
    if (kind.__module__, kind.__name__) == _TRL:
        # this collator pads on the right without labels, or flattens documents and masks the first label of each
        return []
    return _label_problems(name, dataset) + _packing_problems(name, dataset)


def _classifier_problems(collator: Any, kind: type, name: str, kind_of_head: HeadKind) -> list[str]:
    """Returns why plans would learn other labels of documents or tokens than batches of `collator`."""
    if kind is transformers.DataCollatorForTokenClassification and collator.label_pad_token_id != IGNORE_INDEX:
        return [f"{name} has label_pad_token_id={collator.label_pad_token_id}, which would be learnt; set it to {IGNORE_INDEX}"]
    return _padding_side_problems(collator) if hasattr(collator, "tokenizer") else []


def _label_problems(name: str, dataset: Any) -> list[str]:
    if is_readable(dataset) and not _has_labels(dataset):
        return [
            f"{name} makes no labels and train_dataset has no column 'labels', so the stock trainer would have no loss; add "
            f"labels, or use DataCollatorWithFlattening or DataCollatorForLanguageModeling(mlm=False)"
        ]
    return []


def _packing_problems(name: str, dataset: Any) -> list[str]:
    columns = getattr(dataset, "column_names", None) or ()
    if not columns and is_readable(dataset) and isinstance(row := dataset[0], Mapping):
        columns = list(row)
    return [
        f"train_dataset has a column {column!r}, by which plans would divide rows into documents, but {name} does not; remove "
        f"the column, or leave data_collator out of LongContextTrainer"
        for column in PACKED
        if column in columns
    ][:1]


def _seq2seq_problems(collator: Any) -> list[str]:
    problems = _padding_side_problems(collator)
    if collator.label_pad_token_id != IGNORE_INDEX:
        problems.append(
            f"DataCollatorForSeq2Seq has label_pad_token_id={collator.label_pad_token_id}, which would be learnt; set it to "
            f"{IGNORE_INDEX}"
        )
    return problems


def _flattening_problems(collator: Any) -> list[str]:
    problems = []
    if collator.separator_id != IGNORE_INDEX:
        problems.append(
            f"DataCollatorWithFlattening has separator_id={collator.separator_id}, which would be learnt across documents; set "
            f"it to {IGNORE_INDEX}"
        )
    if not collator.return_position_ids or collator.position_ids_start:
        problems.append(
            f"DataCollatorWithFlattening has return_position_ids={collator.return_position_ids} and position_ids_start="
            f"{collator.position_ids_start}, but plans count the positions of every document from 0; set them to True and 0"
        )
    return problems


def _language_modeling_problems(collator: Any) -> list[str]:
    if collator.mlm:
        return [
            "DataCollatorForLanguageModeling has mlm=True (masked language modelling), but plans train the next token; set "
            "mlm=False"
        ]
    return _padding_side_problems(collator)


def _padding_side_problems(collator: Any) -> list[str]:
    if collator.tokenizer.padding_side == "right":
        return []
    return [
        f"the tokenizer of {type(collator).__name__} pads on the {collator.tokenizer.padding_side}, so a sequence's first token "
        f"is predicted from padding, which plans do not have; set tokenizer.padding_side='right' for training"
    ]


def is_readable(dataset: Any) -> bool:
    """Whether rows can be looked up by number; other datasets are refused later, when row lengths are read."""
    # iterable datasets of torch inherit a __getitem__ that always fails
    if is_stream(dataset) or isinstance(dataset, dict | type):
        return False
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and len(dataset) > 0


def _has_labels(dataset: Any) -> bool:
    if isinstance(dataset, datasets.Dataset):
        return "labels" in dataset.column_names
    row = dataset[0]
    return isinstance(row, Mapping) and "labels" in row


def _has_token(dataset: Any, token: int) -> bool:
    if isinstance(dataset, datasets.Dataset):
        kind = dataset.data.schema.field("input_ids").type if "input_ids" in dataset.column_names else pa.null()
        # other columns are left to the scan of the dataset, which names them
        if not hasattr(kind, "value_type") or not pa.types.is_integer(kind.value_type):
            return False
        tables = dataset.select_columns(["input_ids"]).with_format("arrow").iter(_BATCH_ROWS)
        return any(pc.any(pc.equal(pc.list_flatten(table["input_ids"]), token)).as_py() for table in tables)
    rows = (dataset[i] for i in range(len(dataset)))
    found = (_integers(row["input_ids"]) for row in rows if isinstance(row, Mapping) and "input_ids" in row)
    return any(ids is not None and bool(np.isin(token, ids)) for ids in found)


def _integers(value: Any) -> NDArray[Any] | None:
    """A list of integers as an array; None for anything else."""
    found = as_array(value)
    return found if found is not None and found.ndim == 1 and found.dtype.kind in "iu" else None
