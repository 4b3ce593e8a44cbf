"""Several readers on two ranks: losses of a plain list in the documented order, resumed runs, and errors on all ranks."""

from __future__ import annotations

import itertools
import json
import logging
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase
from helpers.models.versions import resuming
from helpers.trainers.trainer_runs import LossRecorder, StepRecorder, make_trainer

from hf_longctx import ShardedStream
from hf_longctx.hf.ranks.agreement import gather_objects

CASE = ModelCase(promoted=True)
CONFIG = {"tokens_per_rank": 64, "lookahead_batches": 2, "stream_readers": 3}
# rows of three readers, the first and third of which lie on the first rank
LENGTHS = [[61, 5, 8, 13, 21, 34, 3, 5, 8, 13, 7], [9, 4, 30], [13, 5, 5, 34, 21, 8]]


class Part(torch.utils.data.IterableDataset):
    """The rows of one reader, with a state; counts those that were read.

    It fails at row `fails_at`, and waits before its tenth row until there is a file `waits_for`.
    """

    def __init__(self, rows: list[Any], fails_at: int | None = None, waits_for: Path | None = None) -> None:
        self.rows, self.fails_at, self.waits_for = rows, fails_at, waits_for
        self.place, self.begin, self.num_read = 0, 0, 0

    def __iter__(self) -> Iterator[Any]:
        self.place, self.begin = self.begin, 0
        while self.place < len(self.rows):
            if self.place == self.fails_at:
                raise KeyError("file 7 is gone")
            while self.place == 9 and self.waits_for is not None and not self.waits_for.exists():
                time.sleep(0.02)
            self.place += 1
            self.num_read += 1
            yield self.rows[self.place - 1]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["place"]


def shards(is_weighted: bool = False) -> list[list[dict[str, Any]]]:
    found: list[list[dict[str, Any]]] = [random_rows(lengths, seed=seed) for seed, lengths in enumerate(LENGTHS)]
    for number, row in enumerate(row for rows in found for row in rows if is_weighted):
        row["loss_weights"] = [0.5 + (number + place) % 3 for place in range(len(row["labels"]))]
    return found


def in_turns(parts: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rows in the order that docs/guides/data.md states."""
    return [row for turn in itertools.zip_longest(*parts) for row in turn if row is not None]


def steps_of(rows: Any, config: dict[str, Any], arguments: dict[str, Any]) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Loss and gradients of every step."""
    recorder = StepRecorder()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(CASE, rows, folder, config, {"max_steps": 5, **arguments})
        recorder.attach(trainer)
        trainer.train()
    return [(step.loss, step.gradients) for step in recorder.steps]


def stream_and_list(is_weighted: bool, config: dict[str, Any]) -> tuple[Any, Any]:
    parts = shards(is_weighted)
    stream = ShardedStream(lambda reader, num_readers: Part(parts[reader]))
    found = steps_of(stream, {**CONFIG, **config}, {})
    map_style = {name: value for name, value in config.items() if name != "lookahead_batches"}
    expected = steps_of(in_turns(parts), {"tokens_per_rank": 64, **map_style}, {"train_sampling_strategy": "sequential"})
    return found, expected


@pytest.mark.wide
@pytest.mark.parametrize(
    "is_weighted,config", [(False, {}), (True, {"method": "ring", "lookahead_batches": 1}), (False, {"stages": 2})]
)
def test_several_readers_train_as_a_list_in_the_documented_order(ranks, is_weighted: bool, config: dict[str, Any]) -> None:
    # twenty rows: the third batch of every epoch is short
    for found, expected in ranks(2).run(stream_and_list, is_weighted, config):
        assert len(found) == len(expected) == 5
        for (loss, gradients), (expected_loss, expected_gradients) in zip(found, expected, strict=True):
            assert loss == pytest.approx(expected_loss, rel=1e-12)
            assert gradients.keys() == expected_gradients.keys() and gradients
            for name, gradient in gradients.items():
                assert float((gradient - expected_gradients[name]).abs().max()) <= 1e-12, name


def huggingface_rows() -> tuple[int, list[list[int]], list[list[int]]]:
    """Number of tokens of this rank's share of two epochs of a dataset of `datasets`, its sequences' ids, and all ids."""
    rows = random_rows([3 + number % 5 for number in range(22)])
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=5).shuffle(seed=2, buffer_size=4)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(CASE, stream, folder, {**CONFIG, "tokens_per_step": 40}, {"max_steps": 4})
        batches = list(itertools.islice(trainer.get_train_dataloader(), 3))
    return (
        sum(each["input_ids"].numel() for each in batches),
        [each["input_ids"][0].tolist() for each in batches],
        [row["input_ids"] for row in rows],
    )


def test_tokens_of_a_divided_dataset_come_to_the_ranks_once(ranks) -> None:
    (_, ours, rows), (_, theirs, _) = ranks(2).run(huggingface_rows)
    # three steps of 40 tokens or little more are an epoch of 108 tokens
    found = sorted(token for tokens in (*ours, *theirs) for token in tokens)
    assert found == sorted(token for row in rows for token in row)


SAVED = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5}


def run_parts(folder: str, resume: bool, config: dict[str, Any], arguments: dict[str, Any]) -> Any:
    """Losses of a run or of its part after step 2, and the rows that this rank read; or the refusal to resume."""
    made: list[Part] = []

    def make(reader: int, num_readers: int) -> Part:
        made.append(Part(shards()[reader % 3]))
        return made[-1]

    settings = {**CONFIG, "max_length": 30, "long_sequences": "split", **config}
    trainer = make_trainer(CASE, ShardedStream(make), folder, settings, {**SAVED, **arguments})
    recorder = LossRecorder()
    recorder.attach(trainer)
    try:
        trainer.train(resume_from_checkpoint=str(Path(folder, "checkpoint-2")) if resume else None)
    except ValueError as error:
        return str(error)
    return recorder.losses, sum(part.num_read for part in made)


@pytest.mark.wide
@resuming
def test_a_run_resumes_exactly_on_any_number_of_ranks_with_as_many_readers(ranks, tmp_path: Path) -> None:
    folder = str(tmp_path)
    results = ranks(2).run(run_parts, folder, False, {}, {})
    straight = results[0][0]
    assert len(straight) == 5 and all(losses == straight for losses, _ in results)
    # both ranks read
    assert all(num_read for _, num_read in results)
    place = json.loads((tmp_path / "checkpoint-2" / "longctx_data.json").read_text())["cursor"]
    assert len(place["readers"]) == 3 and any(cursor["anchor"] for cursor in place["readers"])
    for num_ranks in (2, 1):
        for losses, _ in ranks(num_ranks).run(run_parts, folder, True, {}, {}):
            assert losses == pytest.approx(straight[2:], rel=1e-9)
    (message,) = ranks(1).run(run_parts, folder, True, {"stream_readers": 2}, {})
    assert "stream_readers was 3 in checkpoint-2 and is 2 now" in message and "so set it back" in message


def failing(kind: str, folder: str) -> tuple[int, str, list[str]]:
    """Steps before the error, its message on this rank, and what was logged; ranks can communicate afterwards."""
    parts = [random_rows([5] * 40, seed=seed) for seed in range(2)]
    if kind == "bad row":
        parts[1][9]["input_ids"] = [64] * 5
    if kind == "same rows":
        parts[1] = parts[0]
    named = Path(folder, "named")
    at: dict[str, Any] = {"failing": {"fails_at": 9}, "slow": {"waits_for": named}}.get(kind, {})
    stream = ShardedStream(lambda reader, _: Part(parts[reader], **(at if reader else {})))
    recorder, message, logged = LossRecorder(), "", Lines(named)
    logging.getLogger("hf_longctx").addHandler(logged)
    config = {**CONFIG, "stream_readers": 2, "collective_timeout_s": 8.0 if kind == "slow" else 60.0}
    with tempfile.TemporaryDirectory() as out:
        # evaluations come while the next batch is not complete
        arguments = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1} if kind == "slow" else {"max_steps": 11}
        evaluated = datasets.Dataset.from_list(random_rows([5] * 4)) if kind == "slow" else None
        case = ModelCase(dtype=torch.float32)
        trainer = make_trainer(case, stream, out, config, arguments, eval_dataset=evaluated)
        recorder.attach(trainer)
        try:
            trainer.train()
        except ValueError as error:
            message = str(error)
    logging.getLogger("hf_longctx").removeHandler(logged)
    assert gather_objects(dist.get_rank(), trainer.longctx_run.control) == [0, 1]
    return len(recorder.losses), message, logged.lines


class Lines(logging.Handler):
    """Keeps what is logged, and makes the file `named` when a reader that is late is named."""

    def __init__(self, named: Path) -> None:
        super().__init__()
        self.lines, self.named = list[str](), named

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if "all ranks wait for reader" in self.lines[-1]:
            self.named.touch()


# kind -> (steps before the error, the message)
FAILURES = {
    "bad row": (2, "token id 64, but the model's vocabulary has 64 entries"),
    "failing": (2, "train_dataset failed at row 9 of epoch 0 of reader 1 on rank 1: KeyError: 'file 7 is gone'"),
    "same rows": (10, "readers 0 and 1 of train_dataset had the same 40 rows in epoch 0, so these would be trained twice"),
}


@pytest.mark.wide
@pytest.mark.parametrize("kind", FAILURES)
def test_an_error_of_one_reader_is_raised_on_all_ranks_with_its_name(ranks, tmp_path: Path, kind: str) -> None:
    expected_steps, expected = FAILURES[kind]
    for num_steps, message, _ in ranks(2).run(failing, kind, str(tmp_path)):
        assert expected in message and (kind != "bad row" or "(row 9 of epoch 0 of reader 1 on rank 1)" in message)
        # sixteen rows before the batch of row 9 of the second reader
        assert num_steps == expected_steps


def test_a_reader_that_is_late_is_named_and_waited_for_while_evaluations_run(ranks, tmp_path: Path) -> None:
    first, second = ranks(2).run(failing, "slow", str(tmp_path))
    assert (first[:2], second[:2]) == ((3, ""), (3, ""))
    assert any("all ranks wait for reader 1 on rank 1" in line and "it has read 9 rows of epoch 0" in line for line in first[2])


def refused_at_start() -> tuple[str, str]:
    """Refusals of a dataset that each rank shuffles in its own way, and of one with too few shards."""
    messages = []
    for num_shards, seed in ((3, dist.get_rank()), (2, 0)):
        stream = datasets.Dataset.from_list(random_rows([5] * 9)).to_iterable_dataset(num_shards=num_shards).shuffle(seed=seed)
        with tempfile.TemporaryDirectory() as folder, pytest.raises(ValueError) as error:
            make_trainer(CASE, stream, folder, CONFIG)
        messages.append(str(error.value))
    return messages[0], messages[1]


@pytest.mark.wide
def test_streams_that_ranks_would_divide_differently_are_refused_at_start(ranks) -> None:
    for own_seeds, few_shards in ranks(2).run(refused_at_start):
        assert "sources and shuffles of train_dataset differs between ranks" in own_seeds
        assert "stream_readers=3, but train_dataset has 2 shards" in few_shards
