"""Streams train like map-style datasets, read no more than the look-ahead, resume exactly, and report errors on every rank."""

from __future__ import annotations

import itertools
import json
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
from datasets.distributed import split_dataset_by_node
from helpers.models.reference import random_rows
from helpers.models.tiny_models import VOCAB_SIZE, ModelCase
from helpers.models.versions import resuming
from helpers.trainers.stream_batches import ReadBatch, read_batches
from helpers.trainers.trainer_runs import LossRecorder, make_trainer

from hf_longctx.hf.data.resume import Place
from hf_longctx.hf.data.streams.planned_stream import StreamReaders, StreamSource
from hf_longctx.hf.data.streams.rows import StreamRules
from hf_longctx.hf.ranks.agreement import gather_objects

Rows = list[dict[str, list[int]]]
LENGTHS = [61, *(random.Random(0).choice([3, 5, 8, 13, 21, 34]) for _ in range(20))]
CASE = ModelCase(promoted=True)
CONFIG = {"tokens_per_rank": 64, "lookahead_batches": 2}


class Stream(torch.utils.data.IterableDataset):
    """An iterable dataset with another order of rows in every epoch, which counts the rows that were read."""

    def __init__(self, rows: Rows, fails_at: int | None = None) -> None:
        self.rows, self.fails_at, self.epoch = rows, fails_at, 0
        self.num_read, self.epochs = 0, []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        shift = 5 * self.epoch
        for number, row in enumerate(self.rows[shift:] + self.rows[:shift]):
            if number == self.fails_at:
                raise KeyError("shard 7 is gone")
            self.num_read += 1
            yield row


def rules(**changes: Any) -> StreamRules:
    settings: dict[str, Any] = {
        "name": "train_dataset",
        "vocab_size": VOCAB_SIZE,
        "max_length": 100,
        "tokens_per_rank": 50,
        "room_tokens": 100,
        "long_sequences": "error",
        "sequences_per_step": 4,
        "tokens_per_step": None,
        "drop_last": False,
    }
    return StreamRules(**{**settings, **changes})


def some_batches(stream: Any, count: int, start: Place | None = None, **changes: Any) -> list[ReadBatch]:
    return list(itertools.islice(read_batches(stream, rules(**changes), start or Place.begin(1)), count))


def tokens(batch: ReadBatch) -> list[tuple[list[int], list[int]]]:
    return [(sequence.input_ids.tolist(), sequence.shift_labels.tolist()) for sequence in batch.sequences]


def rows_of(batch: ReadBatch) -> list[list[int]]:
    return [sequence.input_ids.tolist() for sequence in batch.sequences]


@pytest.mark.quick
def test_batches_take_rows_in_order_and_end_with_the_epoch() -> None:
    rows = random_rows([3, 5, 2, 7, 4, 6])
    stream = Stream(rows)
    batches = some_batches(stream, 4)
    ids = [row["input_ids"] for row in rows]
    # the second epoch starts five rows later
    assert [rows_of(batch) for batch in batches] == [ids[:4], ids[4:], [ids[5], *ids[:3]], ids[3:5]]
    assert stream.epochs == [0, 1]
    # the label of a token is the label column's value at the next token
    assert tokens(batches[0])[0][1] == [*rows[0]["labels"][1:], -100]


def test_dropping_the_last_batch_of_every_epoch() -> None:
    rows = random_rows([3, 5, 2, 7, 4, 6])
    ids = [row["input_ids"] for row in rows]
    batches = some_batches(Stream(rows), 2, drop_last=True)
    assert [rows_of(batch) for batch in batches] == [ids[:4], [ids[5], *ids[:3]]]


def test_a_budget_closes_a_batch_when_it_is_reached() -> None:
    batches = some_batches(Stream(random_rows([3, 5, 2, 7, 4, 6])), 4, tokens_per_step=8)
    # worked out by hand: 3 + 5, 2 + 7, 4 + 6, and the second epoch starts with 6 + 3
    assert [[len(row) for row in rows_of(batch)] for batch in batches] == [[3, 5], [2, 7], [4, 6], [6, 3]]


def test_long_rows_are_cut_as_in_map_style_sets() -> None:
    rows = random_rows([7, 3])
    whole = rows[0]["input_ids"]
    (split,) = some_batches(Stream(rows), 1, max_length=3, long_sequences="split")
    assert rows_of(split) == [whole[:3], whole[3:6], whole[6:], rows[1]["input_ids"]]
    # the pieces are documents of their own
    assert tokens(split)[0][1][-1] == -100
    (truncated,) = some_batches(Stream(rows), 1, max_length=3, long_sequences="truncate")
    assert rows_of(truncated) == [whole[:3], rows[1]["input_ids"]]


RESUMED = {
    "sequences": {},
    "tokens": {"tokens_per_step": 20},
    "pieces": {"max_length": 4, "long_sequences": "split", "sequences_per_step": 3},
    "whole batches only": {"drop_last": True},
}


@pytest.mark.daily("pieces")
@pytest.mark.parametrize("name", RESUMED)
def test_every_cursor_goes_on_with_exactly_the_next_sequence(name: str) -> None:
    rows, changes = random_rows([9, 3, 5, 2, 7, 4, 6, 8]), RESUMED[name]
    straight = some_batches(Stream(rows), 12, **changes)
    for number in range(11):
        resumed = some_batches(Stream(rows), 11 - number, straight[number].after, **changes)
        assert list(map(tokens, resumed)) == list(map(tokens, straight[number + 1 :]))
        assert [batch.after for batch in resumed] == [batch.after for batch in straight[number + 1 :]]


def test_every_cursor_of_a_shuffled_and_tokenised_stream_of_datasets() -> None:
    rows = random_rows([9, 3, 5, 2, 7, 4, 6, 8, 5, 3])

    def stream() -> datasets.IterableDataset:
        texts = datasets.Dataset.from_list([{"text": " ".join(map(str, row["input_ids"]))} for row in rows])
        shuffled = texts.to_iterable_dataset(num_shards=3).shuffle(seed=7, buffer_size=4)
        return shuffled.map(lambda row: {"input_ids": [int(word) for word in row["text"].split()]}, remove_columns="text")

    straight = some_batches(stream(), 7)
    ids = sorted(row["input_ids"] for row in rows)
    first, second = [[ids for batch in epoch for ids in rows_of(batch)] for epoch in (straight[:3], straight[3:6])]
    assert sorted(first) == sorted(second) == ids and first != second
    for number in range(6):
        resumed = some_batches(stream(), 6 - number, straight[number].after)
        assert list(map(tokens, resumed)) == list(map(tokens, straight[number + 1 :]))


def test_resuming_reads_no_earlier_epoch() -> None:
    rows = random_rows([3] * 8)
    stream = Stream(rows)
    some_batches(stream, 1, some_batches(Stream(rows), 5)[-1].after)
    assert stream.epochs == [2] and stream.num_read <= 8


@pytest.mark.parametrize("changes", [{}, {"max_length": 4, "long_sequences": "split"}], ids=["rows", "pieces"])
def test_a_stream_that_does_not_repeat_itself_is_refused(changes: dict[str, Any]) -> None:
    rows = random_rows([9, 3, 5, 2, 7, 4, 6, 8])
    after = some_batches(Stream(rows), 1, **changes)[0].after
    other = [rows[1], rows[0], *rows[2:]]
    (cursor,) = after.readers
    with pytest.raises(ValueError, match=f"before row {cursor.row} of epoch 0 are not those of the run"):
        some_batches(Stream(other), 1, after, **changes)
    with pytest.raises(ValueError, match="ended after 1 rows of epoch 0, but the checkpoint stopped at row"):
        some_batches(Stream(rows[:1]), 1, after, **changes)


def good(number: int) -> dict[str, list[int]]:
    return {"input_ids": [number % 60] * 3, "labels": [number % 60] * 3}


# name -> (row 5, the message about it)
BAD_ROWS: dict[str, tuple[Any, str]] = {
    "no tokens": ({"input_ids": [], "labels": []}, "train_dataset row 5 has no tokens"),
    "id outside": (
        {"input_ids": [64], "labels": [1]},
        r"holds token id 64, but the model's vocabulary has 64.*\(row 5 of epoch 0",
    ),
    "label outside": ({"input_ids": [1], "labels": [-3]}, r"holds label -3.*\(row 5 of epoch 0 of the stream\)"),
    "fewer labels": ({"input_ids": [1, 2], "labels": [1]}, "train_dataset row 5 has 2 tokens but 1 labels"),
    "text": ({"text": "abc"}, r"no column 'input_ids' \(it has text\).*\(row 5 of epoch 0"),
    "no mapping": ([1, 2], r"no column 'input_ids' \(it has list\).*\(row 5 of epoch 0"),
    "fractions": ({"input_ids": [1.5], "labels": [1]}, "train_dataset row 5 column 'input_ids' holds"),
    "padding": ({"input_ids": [1], "labels": [1], "attention_mask": [0]}, "row 5"),
    "padding, later": ({**good(0), "attention_mask": [1, 1, 0]}, "row 5 has 'attention_mask' with padding, but the first row"),
    "other columns": ({"input_ids": [1]}, "row 5 has no 'labels', but the first row has"),
    "packed": (
        {**good(0), "position_ids": [0, 1, 2]},
        r"row 5 has 'position_ids', but the first row has none.*\(row 5 of epoch 0",
    ),
    "masked": ({**good(0), "assistant_masks": [0, 1, 1]}, r"has a column 'assistant_masks'.*\(row 5 of epoch 0"),
    "too long": ({"input_ids": [1] * 101, "labels": [1] * 101}, "train_dataset row 5 has 101 tokens, above max_length 100"),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named_when_it_comes(name: str) -> None:
    row, message = BAD_ROWS[name]
    first = {"attention_mask": [1, 1, 1]} if name == "padding" else {}
    rows = [{**good(number), **first} for number in range(5)] + [row]
    batches = read_batches(Stream(rows), rules(), Place.begin(1))
    next(batches)
    with pytest.raises(ValueError, match=message):
        next(batches)


def test_streams_that_never_give_a_step_are_errors() -> None:
    with pytest.raises(ValueError, match="gave no rows; check its source"):
        some_batches(Stream([]), 1)
    used_up = datasets.IterableDataset.from_generator(lambda: iter([]))
    with pytest.raises(ValueError, match="gave no rows"):
        some_batches(used_up, 1)
    with pytest.raises(ValueError, match="dataloader_drop_last leaves no step: 3 sequences"):
        some_batches(Stream([good(1)] * 3), 1, drop_last=True)
    with pytest.raises(ValueError, match="no token with a label"):
        some_batches(Stream([{"input_ids": [1, 2], "labels": [1, -100]}]), 2)

    class Once(torch.utils.data.IterableDataset):
        rows = iter([good(1), good(2)])

        def __iter__(self) -> Iterator[Any]:
            return self.rows

    with pytest.raises(ValueError, match="gave no rows in epoch 1: every iteration must start anew"):
        some_batches(Once(), 2)


def test_what_fails_in_the_source_is_named_with_its_row() -> None:
    with pytest.raises(ValueError, match="train_dataset failed at row 6 of epoch 0 of the stream: KeyError: 'shard 7 is gone'"):
        some_batches(Stream([good(n) for n in range(9)], fails_at=6), 3)


def settled(count: Any) -> int:
    """Waits until a number that another thread raises stays the same, and returns it."""
    before = -1
    while before != count():
        before = count()
        time.sleep(0.05)
    return before


def readers_alone(stream: Any, lookahead: int, **changes: Any) -> StreamReaders:
    """All readers of a stream in one process, without a planner."""
    plans: Any = SimpleNamespace(pool=SimpleNamespace(control=None, rank=0), alive_s=0.2)
    count = changes.pop("num_readers", 1)
    return StreamReaders(StreamSource(stream, rules(**changes), count, lookahead), Place.begin(count), plans)


@pytest.mark.parametrize("lookahead", [1, 3])
def test_the_reader_never_gets_further_ahead(lookahead: int) -> None:
    stream = Stream([good(n) for n in range(400)])
    readers = readers_alone(stream, lookahead)
    steps = readers.steps(0)
    next(steps)
    for step in range(5):
        next(steps)
        assert readers.taken()[0].lengths == (3, 3, 3, 3)
        # the batch in use and the batches of the look-ahead have four rows each
        assert settled(lambda: stream.num_read) == 4 * (step + 1 + lookahead)
    readers.stop()


def test_stopped_readers_end_their_threads() -> None:
    before = settled(threading.active_count)
    hangs = threading.Event()

    class Hanging(Stream):
        def __iter__(self) -> Iterator[Any]:
            yield from itertools.islice(super().__iter__(), 6)
            hangs.wait()

    readers = readers_alone(Hanging([good(n) for n in range(400)]), 1)
    steps = readers.steps(0)
    next(steps)
    next(steps)
    readers.taken()
    readers.stop()
    hangs.set()
    assert settled(threading.active_count) == before


def train(rows: Any, folder: str, config: dict[str, Any], arguments: dict[str, Any], resume: int | None = None) -> tuple:
    """Losses and final weights of a run, or of the part of it after a checkpoint."""
    trainer = make_trainer(CASE, rows, folder, config, {"max_steps": 7, **arguments})
    recorder = LossRecorder()
    recorder.attach(trainer)
    trainer.train(resume_from_checkpoint=str(Path(folder, f"checkpoint-{resume}")) if resume else None)
    return recorder.losses, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def stream_and_map_style(lengths: list[int], config: dict[str, Any]) -> tuple[tuple, tuple]:
    rows = random_rows(lengths)
    order = {"train_sampling_strategy": "sequential"}
    map_style = {name: value for name, value in config.items() if name != "lookahead_batches"}
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset()
    with tempfile.TemporaryDirectory() as folder:
        return train(stream, folder, config, {}), train(rows, folder, map_style, order)


@pytest.mark.wide
@pytest.mark.parametrize("config", [CONFIG, {**CONFIG, "max_length": 30, "long_sequences": "split", "method": "ring"}])
def test_a_stream_trains_as_the_map_style_set(ranks, config: dict[str, Any]) -> None:
    # 21 rows: the third batch of eight is short, and the run takes three epochs
    for (losses, weights), (expected_losses, expected) in ranks(2).run(stream_and_map_style, LENGTHS, config):
        assert losses == pytest.approx(expected_losses, rel=1e-12) and len(losses) == 7
        assert all(float((weights[name] - expected[name]).abs().max()) <= 1e-11 for name in expected)


SAVED = {"save_strategy": "steps", "save_steps": 5}


def save_and_resume(lengths: list[int], folder: str) -> tuple[list[float], list[float], list[int]]:
    """Losses of a whole run, those of a run resumed from its checkpoint, and the rows that this rank read when it resumed."""
    rows, config = random_rows(lengths), {**CONFIG, "max_length": 30, "long_sequences": "split"}
    straight, _ = train(Stream(rows), folder, config, SAVED)
    stream = Stream(rows)
    resumed, _ = train(stream, folder, config, SAVED, resume=5)
    return straight, resumed, stream.num_read


def resume_elsewhere(lengths: list[int], folder: str, arguments: dict[str, Any], config: dict[str, Any]) -> Any:
    """Losses after the checkpoint of `save_and_resume`, or the message with which resuming is refused."""
    config = {**CONFIG, "max_length": 30, "long_sequences": "split", **config}
    try:
        return train(Stream(random_rows(lengths)), folder, config, {**SAVED, **arguments}, resume=5)[0]
    except ValueError as error:
        return str(error)


@pytest.mark.wide
@resuming
def test_a_run_resumed_in_the_middle_goes_on_with_the_same_samples(ranks, tmp_path: Path) -> None:
    results = ranks(2).run(save_and_resume, LENGTHS, str(tmp_path))
    for straight, resumed, _ in results:
        assert len(straight) == 7
        assert resumed == pytest.approx(straight[5:], rel=1e-9)
    # the second rank has a stream, too, but does not read it
    assert results[0][2] > 0 and results[1][2] == 0
    (cursor,) = json.loads((tmp_path / "checkpoint-5" / "longctx_data.json").read_text())["cursor"]["readers"]
    assert (cursor["epoch"], len(cursor["digest"])) == (1, 32)
    straight = results[0][0]
    # one rank with the same eight sequences per step
    (elsewhere,) = ranks(1).run(resume_elsewhere, LENGTHS, str(tmp_path), {}, {})
    assert elsewhere == pytest.approx(straight[5:], rel=1e-9)
    # one rank with four sequences per step, as the same per_device_train_batch_size would give
    refusals = ranks(2).run(resume_elsewhere, LENGTHS, str(tmp_path), {"per_device_train_batch_size": 2}, {})
    for message in refusals:
        assert "sequences_per_step was 8 in checkpoint-5 and is 4 now" in message
        assert "choose per_device_train_batch_size" in message and "ignore_data_skip=True" in message
    # two plans of four sequences per step: the short batch at the end of an epoch would be another one
    halves = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    for message in ranks(2).run(resume_elsewhere, LENGTHS, str(tmp_path), halves, {}):
        assert "sequences_per_plan was 8 in checkpoint-5 and is 4 now" in message
    (message,) = ranks(1).run(resume_elsewhere, LENGTHS, str(tmp_path), {}, {"max_length": 31})
    assert "cut_tokens was 30 in checkpoint-5 and is 31 now" in message
    (anew,) = ranks(1).run(resume_elsewhere, LENGTHS, str(tmp_path), {"ignore_data_skip": True}, {"max_length": 31})
    assert len(anew) == 2 and anew[0] != pytest.approx(straight[5], rel=1e-9)
    (tmp_path / "checkpoint-5" / "longctx_data.json").unlink()
    (message,) = ranks(1).run(resume_elsewhere, LENGTHS, str(tmp_path), {}, {})
    assert "longctx_data.json is missing" in message


def fail_in_the_middle(kind: str) -> tuple[int, str]:
    """Number of steps before the error, and its message on this rank; checks that ranks can communicate afterwards."""
    rows = random_rows([5] * 40)
    if kind == "bad row":
        rows[20]["input_ids"] = [64] * 5
    stream = Stream(rows, fails_at=20 if kind == "failing source" else None)
    if kind == "empty":
        stream = Stream([])
    recorder, message = LossRecorder(), ""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(ModelCase(dtype=torch.float32), stream, folder, CONFIG, {"max_steps": 7})
        recorder.attach(trainer)
        try:
            trainer.train()
        except ValueError as error:
            message = str(error)
    assert gather_objects(dist.get_rank(), trainer.longctx_run.control) == [0, 1]
    return len(recorder.losses), message


FAILURES = {
    "bad row": (2, "token id 64, but the model's vocabulary has 64"),
    "failing source": (2, "train_dataset failed at row 20 of epoch 0 of the stream: KeyError"),
    "empty": (0, "train_dataset gave no rows"),
}


@pytest.mark.daily("failing source")
@pytest.mark.parametrize("kind", FAILURES)
def test_an_error_of_the_stream_is_raised_on_every_rank_when_its_batch_comes(ranks, kind: str) -> None:
    expected_steps, expected = FAILURES[kind]
    for num_steps, message in ranks(2).run(fail_in_the_middle, kind):
        # sixteen rows before the batch of row 20
        assert num_steps == expected_steps
        assert expected in message


def steps_with_a_slow_source() -> list[int]:
    """Steps in which more than the look-ahead was read, with a source slower than the control group's time-out."""

    class Slow(Stream):
        def __iter__(self) -> Iterator[Any]:
            for number, row in enumerate(super().__iter__()):
                if number == 17:
                    time.sleep(2.2)
                yield row

    stream = Slow(random_rows([5] * 100))
    config = {**CONFIG, "lookahead_batches": 1, "collective_timeout_s": 1.0}
    exceeded: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(ModelCase(dtype=torch.float32), stream, folder, config, {"max_steps": 4})
        original = trainer.longctx_run.report.step_done

        def step_done(plan: Any, result: Any) -> None:
            # the batch of this step and one more, of eight rows each
            if stream.num_read > 8 * (plan.step + 2):
                exceeded.append(plan.step)
            original(plan, result)

        trainer.longctx_run.report.step_done = step_done
        trainer.train()
        assert trainer.state.global_step == 4
    return exceeded


@pytest.mark.wide
def test_a_source_slower_than_the_time_out_is_waited_for_and_never_read_further(ranks) -> None:
    assert ranks(2).run(steps_with_a_slow_source) == [[], []]


def refusal(kind: str) -> str:
    rows = random_rows([5] * 9)
    stream: Any = Stream(rows)
    arguments = {"max_steps": -1} if kind == "no steps" else {}
    if kind.startswith("split"):
        whole = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=2)
        stream = split_dataset_by_node(whole, rank=dist.get_rank(), world_size=2)
    config: dict[str, Any] = {"lookahead_batches": 2}
    others = {}
    if kind == "split evaluation":
        stream, others, config = rows, {"eval_dataset": stream}, {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            make_trainer(CASE, rows if kind == "map-style" else stream, folder, config, arguments, **others)
        except ValueError as error:
            return str(error)
    return ""


REFUSALS = {
    "no steps": "set max_steps",
    "map-style": "lookahead_batches=2 has no effect unless train_dataset is iterable; leave it out",
    "split": "train_dataset is split over nodes (split_dataset_by_node)",
    "split evaluation": "eval_dataset is split over nodes (split_dataset_by_node)",
}


@pytest.mark.daily("no steps", "split evaluation")
@pytest.mark.parametrize("kind", REFUSALS)
def test_what_a_stream_cannot_do_is_refused_at_start_on_every_rank(ranks, kind: str) -> None:
    for message in ranks(2).run(refusal, kind):
        assert REFUSALS[kind] in message


def own_tokens_on_rank() -> tuple[int, list[list[int]], int]:
    """Number of tokens that this rank got, token ids of every step, and number of rows it read."""
    stream = Stream(random_rows([5] * 40))
    with tempfile.TemporaryDirectory() as folder:
        # four batches ahead, as nothing is set
        trainer = make_trainer(CASE, stream, folder, {"tokens_per_rank": 64}, {"max_steps": 4})
        batches = list(itertools.islice(trainer.get_train_dataloader(), 4))
    return sum(batch["input_ids"].numel() for batch in batches), [b["input_ids"][0].tolist() for b in batches], stream.num_read


def test_a_rank_gets_its_own_tokens_only(ranks) -> None:
    (first, ours, _), (second, theirs, num_read) = ranks(2).run(own_tokens_on_rank)
    assert first + second == 4 * 8 * 5 and min(first, second) > 0
    assert num_read == 0
    rows = random_rows([5] * 40)
    for step, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        expected = sorted(i for row in rows[8 * step : 8 * step + 8] for i in row["input_ids"])
        assert sorted(left + right) == expected


def test_a_column_with_one_number_per_token_is_refused() -> None:
    rows = [{**good(number), "importance": [0.5, 1.0, 0.0]} for number in range(4)]
    with pytest.raises(ValueError, match="train_dataset has a column 'importance' with one number per token"):
        some_batches(Stream(rows), 1)
