"""Rows that were packed before: each of their documents trains as if it were a row, and rows that do not add up are refused."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from helpers.models.reference import random_rows, relative_error
from helpers.models.tiny_models import VOCAB_SIZE, ModelCase
from helpers.trainers.stream_batches import read_batches
from helpers.trainers.trainer_runs import PLAIN_DESCENT, make_trainer, plain_steps

from hf_longctx.hf.data.collator import PlannedDataset, TokenSequence
from hf_longctx.hf.data.resume import Place
from hf_longctx.hf.data.sampler import SequenceIndex
from hf_longctx.hf.data.scan import cached_scan, scan_dataset
from hf_longctx.hf.data.streams.rows import StreamRules
from hf_longctx.hf.data.tokenise import DataError, uniform
from hf_longctx.hf.trainer.row_scores import plain_scores

DOCUMENTS = [[13, 1, 5], [34], [8, 21, 2, 3], [5, 44]]
LENGTHS = [length for row in DOCUMENTS for length in row]
CASE = ModelCase(promoted=True)
Rows = list[dict[str, list[Any]]]


def weighted_rows() -> Rows:
    rows: Rows = random_rows(LENGTHS, seed=3)
    for number, row in enumerate(rows):
        row["loss_weights"] = [0.5 + (number + place) % 3 for place in range(len(row["labels"]))]
    return rows


def packed(rows: Rows, columns: Sequence[str] = ("seq_lengths",)) -> Rows:
    """The rows as packers write them: those of DOCUMENTS together, with columns that say where they begin."""
    waiting, found = iter(rows), []
    for lengths in DOCUMENTS:
        parts = [next(waiting) for _ in lengths]
        row: dict[str, list[Any]] = {name: [item for part in parts for item in part[name]] for name in parts[0]}
        added = {"seq_lengths": lengths, "position_ids": [place for length in lengths for place in range(length)]}
        found.append({**row, **{name: added[name] for name in columns}})
    return found


class PlainList(Sequence):
    """A dataset that is not Arrow."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        return self.rows[number]


def sequences(dataset: Any, limit: int, long_sequences: str) -> list[Any]:
    """Token ids, shifted labels and weights of every sequence that a dataset trains."""
    scan = scan_dataset(dataset, "d", VOCAB_SIZE)
    assert scan.problems == []
    index = SequenceIndex.build(scan.lengths, limit, long_sequences, scan.documents)
    made = PlannedDataset(dataset, index)
    found = []
    for number, length in enumerate(index.lengths.tolist()):
        half = made._sequence(dataset[int(index.rows[number])], number, length // 2, length)
        whole = made._sequence(dataset[int(index.rows[number])], number, 0, length)
        assert torch.equal(whole.between(length // 2, length).shift_labels, half.shift_labels)
        found.append(listed(whole))
    return found


def listed(sequence: TokenSequence) -> list[list[Any]]:
    assert sequence.loss_weights is not None
    return [sequence.input_ids.tolist(), sequence.shift_labels.tolist(), sequence.loss_weights.tolist()]


@pytest.mark.parametrize("columns", [("seq_lengths",), ("position_ids",), ("position_ids", "seq_lengths")])
@pytest.mark.parametrize(("limit", "long_sequences"), [(50, "error"), (13, "split"), (13, "truncate"), (1, "split")])
def test_documents_are_the_sequences_that_they_are_as_rows(columns: tuple[str, ...], limit: int, long_sequences: str) -> None:
    rows = weighted_rows()
    expected = sequences(PlainList(rows), limit, long_sequences)
    assert sequences(PlainList(packed(rows, columns)), limit, long_sequences) == expected


@pytest.mark.wide
@pytest.mark.parametrize("make", [datasets.Dataset.from_list, PlainList])
def test_a_packed_set_trains_what_plain_transformers_train_on_its_documents_alone(make: Any) -> None:
    arguments = {**PLAIN_DESCENT, "max_steps": 2, "per_device_train_batch_size": len(LENGTHS)}
    rows = random_rows(LENGTHS, seed=3)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(CASE, make(packed(rows, ("position_ids",))), folder, {"tokens_per_rank": 64}, arguments)
        trainer.train()
    _, expected = plain_steps(CASE, rows, 2)
    found = {name: parameter.detach() for name, parameter in trainer.model.named_parameters()}
    assert max(relative_error(found[name], expected[name]) for name in expected) < 1e-12


@pytest.mark.parametrize("columns", [("seq_lengths",), ("position_ids",)])
@pytest.mark.parametrize("long_sequences", ["error", "split"])
def test_a_packed_stream_has_the_sequences_of_its_documents_and_resumes_inside_a_row(
    columns: tuple[str, ...], long_sequences: str
) -> None:
    limit = 50 if long_sequences == "error" else 13
    settings = StreamRules("d", VOCAB_SIZE, limit, 50, 50, long_sequences, 3, None, False)
    expected = sequences(PlainList(weighted_rows()), limit, long_sequences)
    stream = PlainList(packed(weighted_rows(), columns))
    batches = list(itertools.islice(read_batches(stream, settings, Place.begin(1)), -(-len(expected) // 3)))
    assert [listed(sequence) for batch in batches for sequence in batch.sequences] == expected
    resumed = list(itertools.islice(read_batches(stream, settings, batches[0].after), len(batches) - 1))
    assert [listed(sequence) for batch in resumed for sequence in batch.sequences] == expected[3:]


BAD = {
    "sum": ({"seq_lengths": [2, 2]}, r"d row 1 has 5 tokens but seq_lengths that add up to 4;"),
    "empty": ({"seq_lengths": [5, 0]}, "d row 1 has 5 tokens but seq_lengths that add up to 5, with documents of no tokens"),
    "negative": ({"seq_lengths": [6, -1]}, "with documents of no tokens"),
    "no documents": ({"seq_lengths": []}, "add up to 0"),
    "count": ({"position_ids": [0, 1, 2, 3]}, "d row 1 has 5 tokens but 4 position_ids; give one per token"),
    "begin": ({"position_ids": [3, 4, 5, 0, 1]}, "d row 1 has position 3 at token 0; position_ids must begin with 0"),
    "gap": ({"position_ids": [0, 1, 3, 0, 1]}, "d row 1 has position 3 at token 2"),
    "jump": ({"position_ids": [0, 1, 2, 1, 2]}, "d row 1 has position 1 at token 3"),
    "missing": ({"position_ids": [0, 1, None, 0, 1]}, "d row 1"),
    "both": ({"position_ids": [0, 1, 2, 0, 1], "seq_lengths": [2, 3]}, "d row 1 has position_ids and seq_lengths that divide"),
    "true and false": ({"position_ids": [False, True, False, True, False]}, "position_ids"),
    "mask": (
        {"attention_mask": [1, 1, 2, 2, 2]},
        "numbers the documents of its rows in attention_mask, up to 2; .*'seq_lengths'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_row_that_does_not_add_up_is_refused_by_its_number(name: str) -> None:
    bad, message = BAD[name]
    good = {"position_ids": [0, 1, 0], "seq_lengths": [2, 1], "attention_mask": [1, 1, 1]}
    kept = {column: good[column] for column in bad}
    if name == "true and false":
        kept = {"position_ids": [False, True, False]}
    rows = [{"input_ids": [5] * 3, **kept}, {"input_ids": [5] * 5, **bad}, {"input_ids": [5] * 3, **kept}]
    problems = scan_dataset(datasets.Dataset.from_list(rows), "d", VOCAB_SIZE).problems
    assert len(problems) == 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(problems[0])


def test_a_set_is_learnt_from_only_if_a_token_behind_a_document_start_has_a_label() -> None:
    row = {"input_ids": [5, 6, 7], "labels": [-100, -100, 7], "seq_lengths": [2, 1]}
    (problem,) = scan_dataset(datasets.Dataset.from_list([row]), "d", VOCAB_SIZE).problems
    assert "has no token with a label" in problem
    assert scan_dataset(datasets.Dataset.from_list([{**row, "seq_lengths": [1, 2]}]), "d", VOCAB_SIZE).problems == []


def test_the_cached_scan_keeps_documents(tmp_path: Path) -> None:
    datasets.Dataset.from_list(packed(random_rows(LENGTHS))).save_to_disk(str(tmp_path / "set"))
    dataset = datasets.load_from_disk(str(tmp_path / "set"))
    first, again = (cached_scan(dataset, "d", VOCAB_SIZE) for _ in range(2))
    assert list(tmp_path.rglob("*.index"))
    assert again.documents is not None and again.documents.tolist() == first.documents.tolist() == LENGTHS
    assert again.lengths.tolist() == [sum(row) for row in DOCUMENTS] and again.digest == first.digest
    assert again.rows().tolist() == [row for row, lengths in enumerate(DOCUMENTS) for _ in lengths]
    # other documents of the same tokens are another set
    rows = [{**row, "seq_lengths": [sum(row["seq_lengths"])]} for row in packed(random_rows(LENGTHS))]
    assert scan_dataset(datasets.Dataset.from_list(rows), "d", VOCAB_SIZE).digest != first.digest


def test_what_would_lose_the_documents_is_refused() -> None:
    rows = packed(random_rows(LENGTHS))
    with pytest.raises(DataError, match="'seq_lengths', which mixing would drop"):
        uniform(datasets.Dataset.from_list(rows), True)
    with pytest.raises(ValueError, match=r"row 0 has a column 'seq_lengths'.* one document"):
        plain_scores(torch.nn.Linear(1, 1), rows, 0, 1, torch.device("cpu"))
