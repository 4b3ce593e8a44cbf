"""Rows that change after the scan at start: named with row, then and now, on every rank, before anything is trained on them."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.models.reference import random_rows
from helpers.models.tiny_models import VOCAB_SIZE, ModelCase
from helpers.plans.layouts import plan_of
from helpers.trainers.trainer_runs import LossRecorder, make_trainer
from torch.utils.data import IterableDataset

from hf_longctx.hf.data.collator import ChangedRow, PlannedDataset, PlannedStep
from hf_longctx.hf.data.sampler import SequenceIndex
from hf_longctx.hf.data.scan import ScannedRows, scan_dataset

LENGTHS = [30, 9, 12, 5, 7, 8, 11, 10] * 2
SHARDED = {"tokens_per_rank": 48, "parameters": "sharded"}
STAGES = {"tokens_per_rank": 96, "stages": 2}
REPLICATED = {"tokens_per_rank": 48}


class Augmented(Sequence[dict[str, Any]]):
    """Rows that `change` draws anew at every read; all ranks draw the same numbers, so that their scans agree."""

    def __init__(self, change: str, only_rank: int | None = None) -> None:
        self.rows, self.change, self.only_rank = random_rows(LENGTHS), change, only_rank
        self.generator = random.Random(5)
        # whether rows change already while they are scanned
        self.is_on = change == "tokens" and only_rank is None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = {name: list(values) for name, values in self.rows[number].items()}
        if not self.is_on or (self.only_rank is not None and dist.get_rank() != self.only_rank):
            return row
        if self.change == "gone":
            raise IndexError("list index out of range")
        if self.change == "tokens":
            row["input_ids"] = [self.generator.randrange(VOCAB_SIZE) for _ in row["input_ids"]]
        elif self.change == "labels":
            row["labels"] = [-100 if self.generator.random() < 0.5 else label for label in row["labels"]]
        else:
            num_more = self.generator.randrange(1, 1000) % 7
            row = {name: values + values[:1] * num_more for name, values in row.items()}
        return row


def error_of_training(dataset: Augmented, config: dict[str, Any], num_workers: int) -> str:
    """The message with which this rank's training ends."""
    # by default a rank would start workers by a server of its own: seconds of imports
    workers = {"dataloader_num_workers": num_workers, "dataloader_multiprocessing_context": "fork"} if num_workers else {}
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(ModelCase(), dataset, folder, config, {"max_steps": 3, **workers})
        dataset.is_on = True
        try:
            trainer.train()
        except ValueError as error:
            assert trainer.state.global_step == 0
            return str(error)
    return ""


@pytest.mark.wide(
    "tokens-None-config0-0-labels or weights had the hash",
    "labels-None-config1-0-labels or weights had the hash",
)
@pytest.mark.parametrize(
    "change,only_rank,config,num_workers,words",
    [
        ("tokens", None, REPLICATED, 0, "labels or weights had the hash"),
        ("labels", None, SHARDED, 0, "labels or weights had the hash"),
        ("length", None, STAGES, 0, "tokens at the start of the run, and has"),
        ("tokens", 1, REPLICATED, 2, "labels or weights had the hash"),
        ("gone", 1, SHARDED, 0, "cannot be read now (IndexError: list index out of range)"),
    ],
)
def test_a_row_that_changes_ends_the_run_on_every_rank_with_its_name(
    ranks, change: str, only_rank: int | None, config: dict[str, Any], num_workers: int, words: str
) -> None:
    errors = ranks(2).run(error_of_training, Augmented(change, only_rank), config, num_workers)
    assert errors[0] == errors[1] and errors[0].startswith("step 1 cannot run:\n- train_dataset row "), errors
    assert words in errors[0] and "seed it by the row's number" in errors[0]
    assert only_rank is None or errors[0].endswith(f"(on rank {only_rank})")


def error_at_start() -> str:
    dataset = Augmented("tokens", 1)
    dataset.is_on = True
    with tempfile.TemporaryDirectory() as folder, pytest.raises(ValueError, match="this run cannot start") as error:
        make_trainer(ModelCase(), dataset, folder, REPLICATED)
    return str(error.value)


def test_a_row_that_differs_between_ranks_is_named_at_start(ranks) -> None:
    errors = ranks(2).run(error_at_start)
    assert errors[0] == errors[1]
    assert "- train_dataset row 0 is not the same on rank 0 (30 tokens) and rank 1 (30 tokens); " in errors[0]
    assert "seed random augmentation by the row's number" in errors[0]


def error_of_evaluation(only_rank: int) -> str:
    changing = Augmented("tokens", only_rank)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(ModelCase(), random_rows(LENGTHS), folder, REPLICATED, eval_dataset=changing)
        before = trainer.evaluate()["eval_loss"]
        assert trainer.evaluate()["eval_loss"] == before
        changing.is_on = True
        with pytest.raises(ValueError, match="eval_dataset row") as error:
            trainer.evaluate()
    return str(error.value)


def test_a_row_of_an_evaluation_set_that_changes_is_named_on_every_rank(ranks) -> None:
    errors = ranks(2).run(error_of_evaluation, 1)
    assert errors[0] == errors[1] and errors[0].startswith("the evaluation cannot go on:\n- eval_dataset row ")
    assert "(on rank 1)" in errors[0]


def item_of(rows: list[dict[str, Any]], change: Any, limit: int = 100) -> Any:
    """The part of the one row that a rank of a group of two reads, after `change` was applied to the rows that were scanned."""
    scan = scan_dataset(rows, "train_dataset", VOCAB_SIZE)
    assert not scan.problems and scan.row_digests is not None and scan.row_digests.nbytes == 8 * len(rows)
    index = SequenceIndex.build(scan.lengths, limit, "truncate")
    change(rows)
    dataset = PlannedDataset(rows, index, ScannedRows("train_dataset", scan))
    _, item = dataset[PlannedStep(plan_of([[(2, (0,))]], [int(index.lengths[0])], 2), (0,), 0)]
    return item


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor], ids=["lists", "arrays", "tensors"])
def test_a_change_outside_the_part_that_a_rank_reads_is_found(kind: Any) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[0]["input_ids"][-1] += 1

    rows = [{"input_ids": kind([1, 2, 3, 4, 5, 6])}]
    found = item_of(rows, change, limit=4)
    assert isinstance(found, ChangedRow) and "train_dataset row 0 has changed: its 6 tokens, labels or weights" in found.problem


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor], ids=["lists", "arrays", "tensors"])
def test_rows_of_other_types_with_equal_tokens_have_not_changed(kind: Any) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[0] = {name: kind(values) for name, values in rows[0].items()}

    found = item_of([{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}], change)
    assert not isinstance(found, ChangedRow) and found[0].input_ids.tolist() == [1, 2]


def test_labels_that_appear_later_are_a_change() -> None:
    found = item_of([{"input_ids": [1, 2, 3]}], lambda rows: rows[0].update(labels=[-100, 2, 3]))
    assert isinstance(found, ChangedRow)


def test_weights_that_change_are_a_change() -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[0]["loss_weights"][1] = 0.25

    assert isinstance(item_of([{"input_ids": [1, 2, 3], "loss_weights": [1.0, 0.5, 1.0]}], change), ChangedRow)
    found = item_of([{"input_ids": [1, 2, 3], "loss_weights": [1, 2, 1]}], lambda rows: None)
    assert not isinstance(found, ChangedRow)


def test_rows_of_arrow_cannot_change_and_need_no_hashes() -> None:
    assert scan_dataset(datasets.Dataset.from_list(random_rows([3, 2])), "d", VOCAB_SIZE).row_digests is None


class Drawing(IterableDataset[dict[str, Any]]):
    """A stream that draws other tokens whenever it is read, and counts the rows that it has given."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []
        self.generator = random.Random()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            length = self.generator.randrange(2, 30)
            self.given.append({"input_ids": [self.generator.randrange(VOCAB_SIZE) for _ in range(length)]})
            yield self.given[-1]


def losses_of_stream(given: list[dict[str, Any]] | None) -> tuple[list[float], list[dict[str, Any]]]:
    """Losses of three steps on a stream that is drawn at random, or on the rows in `given`; and the rows that this rank drew."""
    stream = Drawing()
    config = {**REPLICATED, **({"lookahead_batches": 2} if given is None else {})}
    rows: Any = stream if given is None else given
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"max_steps": 3, "train_sampling_strategy": "sequential"}
        trainer = make_trainer(ModelCase(), rows, folder, config, arguments)
        recorder = LossRecorder()
        recorder.attach(trainer)
        trainer.train()
    return recorder.losses, stream.given


@pytest.mark.wide
def test_a_stream_that_draws_at_random_is_safe_because_rank_0_alone_reads_every_row_once(ranks) -> None:
    (losses, drawn), (other_losses, nothing) = ranks(2).run(losses_of_stream, None)
    assert losses == other_losses and nothing == [] and len(drawn) >= 24
    # the tokens that were drawn are the tokens that were trained
    (expected, _), _ = ranks(2).run(losses_of_stream, drawn[:24])
    assert losses == pytest.approx(expected, rel=1e-10)


class ReadOnce(Sequence[dict[str, Any]]):
    """Rows of which, on rank 1, all but the first can be read no more than once."""

    def __init__(self) -> None:
        self.rows, self.read = random_rows([4, 9, 12, 30]), set[int]()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number in self.read and dist.get_rank() == 1:
            raise IndexError("the shard is gone")
        self.read |= {number} - {0}
        return self.rows[number]


def error_of_pieces(folder: str) -> str:
    try:
        make_trainer(ModelCase(), ReadOnce(), folder, {"max_length": 8, "long_sequences": "split"}, {"max_steps": 1})
    except ValueError as error:
        return str(error)
    return ""


def test_a_row_that_one_rank_cannot_read_for_its_pieces_is_named_on_every_rank(ranks, tmp_path) -> None:
    for message in ranks(2).run(error_of_pieces, str(tmp_path)):
        assert "train_dataset row 1 has changed: it had 9 tokens" in message and "the shard is gone" in message, message
