"""Several readers of one stream: the order of their sequences, cursors and states, and readers that read the same rows."""

from __future__ import annotations

import base64
import io
import itertools
import json
import math
import random
import re
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from helpers.models.reference import random_rows
from helpers.models.tiny_models import VOCAB_SIZE
from helpers.trainers.mosaic import mosaic
from helpers.trainers.stream_batches import ReadBatch, read_batches
from transformers import TrainingArguments

from hf_longctx import LongContextConfig, ShardedStream
from hf_longctx.hf.data.resume import Place
from hf_longctx.hf.data.streams import rows as stream_rows
from hf_longctx.hf.data.streams.composer import SharedRows
from hf_longctx.hf.data.streams.rows import StreamRules
from hf_longctx.hf.data.streams.sources import keeps_state, load_state, source_digest, stream_problems, take_state

Rows = list[dict[str, Any]]
RULES = StreamRules("train_dataset", VOCAB_SIZE, 100, 50, 100, "error", 4, None, False)


class Part(torch.utils.data.IterableDataset):
    """The rows of one reader, in another order in every epoch, with a state; counts the rows that were read."""

    def __init__(self, rows: Rows) -> None:
        self.rows, self.epoch, self.place, self.begin = rows, 0, 0, 0
        self.num_read = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        shift = self.epoch % len(self.rows)
        self.place, self.begin = self.begin, 0
        for row in (self.rows[shift:] + self.rows[:shift])[self.place :]:
            self.place += 1
            self.num_read += 1
            yield row


class StatefulPart(Part):
    """A `Part` that can go on from a state."""

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "moments": torch.tensor([float(self.place)])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["moments"].tolist() == [state["place"]]
        self.begin = state["place"]


def parts(shards: list[Rows], kind: type[Part] = Part) -> tuple[ShardedStream, list[Part]]:
    """A stream of one part for each reader, and the parts that were made."""
    made: list[Part] = []

    def make(reader: int, num_readers: int) -> Part:
        assert num_readers == len(shards)
        made.append(kind(shards[reader]))
        return made[-1]

    return ShardedStream(make), made


def some(stream: Any, count: int, start: Place, rules: StreamRules = RULES) -> list[ReadBatch]:
    return list(itertools.islice(read_batches(stream, rules, start), count))


def flat(batches: list[ReadBatch]) -> list[list[int]]:
    return [sequence for batch in ids(batches) for sequence in batch]


def ids(batches: list[ReadBatch]) -> list[list[list[int]]]:
    return [[sequence.input_ids.tolist() for sequence in batch.sequences] for batch in batches]


def documented_order(shards: list[Rows], epoch: int) -> list[list[int]]:
    """The sequences of one epoch by the words of docs/guides/data.md: in turns, without readers that are at their end."""
    orders = [rows[epoch % len(rows) :] + rows[: epoch % len(rows)] for rows in shards]
    return [row["input_ids"] for turn in itertools.zip_longest(*orders) for row in turn if row is not None]


UNEVEN = [random_rows([9, 3, 5, 2, 7]), random_rows([4], seed=1), random_rows([6, 8, 3], seed=2)]


def test_readers_take_turns_and_those_at_their_end_are_left_out() -> None:
    batches = some(parts(UNEVEN)[0], 6, Place.begin(3))
    for epoch in (0, 1):
        order = documented_order(UNEVEN, epoch)
        # nine rows: two batches of four, and one of a single row
        assert ids(batches[3 * epoch : 3 * epoch + 3]) == [order[:4], order[4:8], order[8:]]
    assert [batch.readers for batch in batches[:3]] == [(0, 1, 2, 0), (2, 0, 2, 0), (0,)]


RESUMED = {
    "sequences": {},
    "tokens": {"tokens_per_step": 20},
    "pieces": {"max_length": 4, "long_sequences": "split", "sequences_per_step": 3},
    "whole batches only": {"drop_last": True},
}


@pytest.mark.daily("pieces-Part")
@pytest.mark.parametrize("kind", [Part, StatefulPart])
@pytest.mark.parametrize("name", RESUMED)
def test_every_place_goes_on_with_exactly_the_next_sequence(monkeypatch, name: str, kind: type[Part]) -> None:
    monkeypatch.setattr(stream_rows, "ROWS_PER_STATE", 2)
    rules = replace(RULES, **RESUMED[name])
    straight = some(parts(UNEVEN, kind)[0], 12, Place.begin(3), rules)
    for number in range(11):
        # the record of a checkpoint
        place = Place.from_json(straight[number].after.to_json())
        resumed = some(parts(UNEVEN, kind)[0], 11 - number, place, rules)
        assert ids(resumed) == ids(straight[number + 1 :])
        assert [batch.after for batch in resumed] == [batch.after for batch in straight[number + 1 :]]


@pytest.mark.wide
def test_a_state_saves_reading_from_the_beginning_and_is_checked_against_a_row() -> None:
    rows = random_rows([3] * 700)
    straight = some(parts([rows], StatefulPart)[0], 160, Place.begin(1))
    after = straight[-2].after
    stream, made = parts([rows], StatefulPart)
    assert ids(some(stream, 1, after)) == ids(straight[-1:])
    # the last state before the cursor was taken after 513 rows
    assert after.readers[0].row == 636 and made[0].num_read == 640 - 513
    counted, made = parts([rows])
    assert ids(some(counted, 1, Place(0, some(parts([rows])[0], 159, Place.begin(1))[-1].after.readers))) == ids(straight[-1:])
    assert made[0].num_read == 640
    other = [*rows[:600], *random_rows([3] * 100, seed=9)]
    with pytest.raises(ValueError, match="before row 636 of epoch 0 are not those of the run"):
        some(parts([other], StatefulPart)[0], 1, after)


def test_a_place_at_the_begin_of_an_epoch_is_checked_against_rows_of_the_epoch_before() -> None:
    rows = random_rows([3] * 8)
    batches = some(parts([rows], StatefulPart)[0], 3, Place.begin(1))
    (cursor,) = batches[1].after.readers
    # the end of the epoch is not known before the next batch is made
    assert (cursor.epoch, cursor.row) == (0, 8) and cursor.anchor is not None
    assert ids(some(parts([rows], StatefulPart)[0], 1, batches[1].after)) == ids(batches[2:])
    short = some(parts([rows[:6]], StatefulPart)[0], 3, Place.begin(1))
    (cursor,) = short[1].after.readers
    assert (cursor.epoch, cursor.row) == (1, 0) and cursor.anchor is not None and cursor.anchor.epoch == 0
    assert ids(some(parts([rows[:6]], StatefulPart)[0], 1, short[1].after)) == ids(short[2:])
    with pytest.raises(ValueError, match="are not those of the run"):
        some(parts([[*rows[:5], rows[6]]], StatefulPart)[0], 1, short[1].after)


def test_states_of_datasets_are_used_where_they_are_exact() -> None:
    stream = datasets.Dataset.from_list(random_rows([3] * 12)).to_iterable_dataset(num_shards=2)
    assert keeps_state(stream.map(lambda row: row).filter(lambda row: True))
    # rows in the buffer of a shuffle are lost
    assert not keeps_state(stream.shuffle(seed=1, buffer_size=3))
    assert not keeps_state(torch.utils.data.DataLoader(stream, batch_size=None))

    class Counted(StatefulPart):
        def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
            return {}

    assert not keeps_state(Counted([]))


STATES: dict[str, Any] = {
    "plain": {"a": [1, {"b": None}], "c": "text", "d": 2.5, "e": True},
    "tuples": {"a": (1, (2, []))},
    "a tuple": (1, 2),
    "int keys": {0: "a", 1: "b"},
    "keys": {1: 2.5, (1, "b"): {None: b"\x00\xff"}},
    "random states": (random.Random(3).getstate(), np.random.RandomState(3).get_state(), torch.get_rng_state()),
    "numpy": {
        "generator": np.random.default_rng(5).bit_generator.state,
        "scalar": np.float32(0.1),
        "array": np.arange(6).reshape(2, 3),
    },
    "tensors": [torch.arange(3), torch.tensor(0.1, dtype=torch.bfloat16), torch.zeros(0, 2), torch.tensor([1j, math.nan])],
    "collections": [OrderedDict(b=1, a=2), Counter("aab"), {1, 2}, frozenset({3}), bytearray(b"x"), torch.Size([2]), torch.int8],
    "floats": [math.nan, -math.inf, -0.0, 1e-320, 0.1, 10**40],
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_is_read_back_as_it_was_without_pickle(monkeypatch, name: str) -> None:
    monkeypatch.setattr(torch, "save", None)
    monkeypatch.setattr(torch, "load", None)
    text = take_state(Holder(STATES[name]))
    json.loads(text[text.find(":") + 1 :] if text.startswith("values:") else text)
    holder = Holder({})
    load_state(holder, text)
    assert repr(holder.state) == repr(STATES[name])


def test_a_state_of_plain_values_is_plain_json() -> None:
    assert json.loads(take_state(Holder(STATES["plain"]))) == STATES["plain"]


class Number(int):
    pass


class Text(str):
    pass


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"a": {"lock": threading.Lock()}}, r"since state_dict\(\)/a/lock is a _thread.lock, so a resumed run"),
        ({"a": [1, Number(2)]}, r"since state_dict\(\)/a/1 would not be read back as it is"),
        ({"a": {Text("b"): 1}}, r"since state_dict\(\)/a would not be read back as it is"),
        ({"a": {Text("b")}}, r"since state_dict\(\)/a would not be read back as it is"),
        ({Text("b"): 1}, r"since state_dict\(\) would not be read back as it is"),
        ({"a": defaultdict(int)}, r"since state_dict\(\)/a would not be read back as it is"),
        ({"a": torch.zeros(2, requires_grad=True)}, r"since state_dict\(\)/a would not be read back as it is"),
        ({"a": np.array([object()])}, r"since state_dict\(\)/a is a object"),
        ({"a": np.zeros(2, "i4,i4")}, r"since state_dict\(\)"),
    ],
)
def test_a_state_that_cannot_be_saved_is_named_once_and_rows_are_read_again(
    monkeypatch, caplog: Any, state: Any, problem: str
) -> None:
    class Strange(StatefulPart):
        def state_dict(self) -> Any:
            return state

    monkeypatch.setattr(stream_rows, "ROWS_PER_STATE", 2)
    rows = [random_rows([3] * 8)]
    straight = some(parts(rows, Strange)[0], 4, Place.begin(1))
    (message,) = [record.getMessage() for record in caplog.records if "cannot be saved" in record.getMessage()]
    assert re.search(f"row 0 of epoch 0: the state of .*Strange cannot be saved, {problem}", message)
    assert "a resumed run will read rows before its place again" in message
    for number in range(3):
        assert all(cursor.anchor is None for cursor in straight[number].after.readers)
        assert ids(some(parts(rows, Strange)[0], 3 - number, straight[number].after)) == ids(straight[number + 1 :])


def test_a_run_whose_later_states_cannot_be_saved_goes_on_from_the_last_saved_one(monkeypatch) -> None:
    class LaterStrange(StatefulPart):
        def state_dict(self) -> Any:
            found = super().state_dict()
            return {**found, "own": object()} if max(found.values()) > 4 else found

    monkeypatch.setattr(stream_rows, "ROWS_PER_STATE", 2)
    rows = [random_rows([3] * 16)]
    straight = some(parts(rows, LaterStrange)[0], 7, Place.begin(1))
    (cursor,) = straight[5].after.readers
    assert cursor.anchor is not None and 0 < cursor.anchor.row < cursor.row - 2
    for number in range(6):
        assert ids(some(parts(rows, LaterStrange)[0], 6 - number, straight[number].after)) == ids(straight[number + 1 :])


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["a"] = state
    with pytest.raises(ValueError, match=r"state_dict\(\) cannot be written \(RecursionError"):
        take_state(Holder(state))


def as_before(text: str) -> str:
    """A state as releases before 0.2.0 wrote it."""
    holder, file = Holder({}), io.BytesIO()
    load_state(holder, text)
    torch.save(holder.state, file)
    return "torch:" + base64.b64encode(file.getvalue()).decode()


def test_a_place_of_an_earlier_release_goes_on_with_exactly_the_next_sequence(monkeypatch) -> None:
    monkeypatch.setattr(stream_rows, "ROWS_PER_STATE", 2)
    straight = some(parts(UNEVEN, StatefulPart)[0], 12, Place.begin(3))
    for number in range(1, 11):
        record = straight[number].after.to_json()
        for cursor in record["readers"]:
            if cursor["anchor"] is not None:
                cursor["anchor"] = {**cursor["anchor"], "state": as_before(cursor["anchor"]["state"])}
        resumed = some(parts(UNEVEN, StatefulPart)[0], 11 - number, Place.from_json(record))
        assert ids(resumed) == ids(straight[number + 1 :])


def test_a_state_of_an_earlier_release_runs_no_code(tmp_path: Path) -> None:
    class Bad:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    file = io.BytesIO()
    torch.save({"a": Bad()}, file)
    text = "torch:" + base64.b64encode(file.getvalue()).decode()
    for bad in (text, "torch:abc", "values:{", 'values:{"pieces": []}', 'values:{"dtype": "load", "shape": [], "values": []}'):
        with pytest.raises(ValueError, match="the stream cannot take its state in the checkpoint"):
            load_state(Holder({}), bad)
    assert not (tmp_path / "ran").exists()


class Holder:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def stateful_loader(reader: int, num_readers: int, num_workers: int = 0, kind: str = "shuffled") -> Any:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    samplers = pytest.importorskip("torchdata.stateful_dataloader.sampler")
    rows = random_rows([3 + number % 5 for number in range(23)])[reader::num_readers]
    if kind == "shuffled":
        sampler = samplers.RandomSampler(rows, generator=torch.Generator().manual_seed(reader))
        return torchdata.StatefulDataLoader(rows, batch_size=None, sampler=sampler, num_workers=num_workers)
    if kind == "shared generator":
        generator = torch.Generator().manual_seed(reader)
        return torchdata.StatefulDataLoader(rows, batch_size=None, shuffle=True, generator=generator)
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=2)
    return torchdata.StatefulDataLoader(stream, batch_size=2, collate_fn=list, num_workers=num_workers)


@pytest.mark.daily("0-stream")
@pytest.mark.parametrize("num_workers,kind", [(0, "shuffled"), (0, "stream"), (2, "stream")])
def test_a_stateful_loader_of_torchdata_goes_on_exactly(monkeypatch, num_workers: int, kind: str) -> None:
    monkeypatch.setattr(stream_rows, "ROWS_PER_STATE", 4)
    stream = ShardedStream(lambda reader, num_readers: stateful_loader(reader, num_readers, num_workers, kind))
    straight = some(stream, 13, Place.begin(2))
    everything = sorted(row["input_ids"] for row in random_rows([3 + number % 5 for number in range(23)]))
    assert sorted(flat(straight[:6])) == sorted(flat(straight[6:12])) == everything
    for number in (0, 2, 5, 6, 8) if not num_workers else (2, 7):
        resumed = some(stream, 12 - number, straight[number].after)
        assert ids(resumed) == ids(straight[number + 1 :])


def test_a_loader_whose_state_leaves_out_a_part_of_its_shuffle_is_refused() -> None:
    # its state leads to the next row, but the epoch after that of a resumed run has another order
    stream = ShardedStream(lambda reader, num_readers: stateful_loader(reader, num_readers, kind="shared generator"))
    with pytest.raises(ValueError, match=r"loader of reader 0 shuffles with its own generator.* to its sampler"):
        some(stream, 1, Place.begin(2))


def test_the_sampler_of_a_loader_is_told_the_epoch() -> None:
    rows = random_rows([3] * 12)
    sampler = torch.utils.data.DistributedSampler(rows, num_replicas=1, rank=0, seed=3)
    stream = ShardedStream(lambda reader, n: torch.utils.data.DataLoader(rows, batch_size=None, sampler=sampler, collate_fn=dict))
    straight = some(stream, 6, Place.begin(1))
    assert sorted(flat(straight[:3])) == sorted(flat(straight[3:])) and ids(straight[:3]) != ids(straight[3:])
    for number in (1, 2, 3):
        assert ids(some(stream, 5 - number, straight[number].after)) == ids(straight[number + 1 :])


def test_an_object_that_counts_samples_over_all_ranks_begins_a_resumed_epoch_in_its_order() -> None:
    class Counting:
        """Counts its epochs, as the datasets of mosaicml-streaming."""

        def __init__(self, rows: Rows) -> None:
            self.rows, self.next_epoch = rows, 0

        def __iter__(self) -> Iterator[Any]:
            epoch, self.next_epoch = self.next_epoch, self.next_epoch + 1
            yield from random.Random(epoch).sample(self.rows, len(self.rows))

        def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
            return {"epoch": self.next_epoch - 1, "sample_in_epoch": num_samples}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert state["sample_in_epoch"] == 0
            self.next_epoch = state["epoch"]

    rows = random_rows([3] * 14)
    stream = ShardedStream(lambda reader, num_readers: Counting(rows[reader::num_readers]))
    straight = some(stream, 10, Place.begin(2))
    for number in range(9):
        assert ids(some(stream, 1, straight[number].after)) == ids(straight[number + 1 : number + 2])


def test_datasets_of_mosaicml_streaming_give_their_rows_and_go_on(tmp_path: Path) -> None:
    streaming = mosaic()
    rows = random_rows([3] * 14)
    with streaming.MDSWriter(out=str(tmp_path), columns={"input_ids": "ndarray:int64"}, size_limit=200) as writer:
        for row in rows:
            writer.write({"input_ids": np.array(row["input_ids"])})
    # rows of an epoch that does not divide by the number of ranks and workers would come twice
    stream = ShardedStream(lambda reader, n: streaming.StreamingDataset(local=str(tmp_path), shuffle=True, batch_size=1))
    straight = some(stream, 8, Place.begin(1))
    read = flat(straight)
    assert sorted(read[:14]) == sorted(read[14:28]) == sorted(row["input_ids"] for row in rows) and read[:14] != read[14:28]
    for number in (0, 2, 3, 5):
        assert ids(some(stream, 2, straight[number].after)) == ids(straight[number + 1 : number + 3])


def test_readers_with_the_same_rows_are_refused() -> None:
    rows = random_rows([3] * 200)
    same = ShardedStream(lambda reader, num_readers: rows)
    with pytest.raises(ValueError, match="readers 0 and 1 of train_dataset begin with the same 64 rows, so these would be"):
        some(same, 40, Place.begin(2))
    # fewer rows, and another order for every reader
    few = ShardedStream(lambda reader, num_readers: random.Random(reader).sample(rows[:20], 20))
    with pytest.raises(ValueError, match="readers 0 and 1 of train_dataset had the same 20 rows in epoch 0"):
        some(few, 20, Place.begin(3))
    # nothing can be said of rows that are all alike
    assert len(some(ShardedStream(lambda reader, num_readers: rows[:1] * 70), 40, Place.begin(2))) == 40


def test_readers_that_share_many_rows_are_warned_of(caplog) -> None:
    hashes = [64 * number for number in range(300)]
    for shared, is_warned in ((100, True), (20, False)):
        caplog.clear()
        found = SharedRows("train_dataset", 2)
        for reader, begin in ((0, 0), (1, 200 - shared)):
            for row_hash in hashes[begin : begin + 200 - reader]:
                found.add(reader, row_hash)
        found.end_epoch(0)
        assert ("came from another reader too" in caplog.text) == is_warned


def test_workers_that_read_the_same_rows_are_refused() -> None:
    rows = random_rows([3] * 30)

    class Undivided(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return iter(rows)

    stream = ShardedStream(lambda reader, n: torch.utils.data.DataLoader(Undivided(), batch_size=None, num_workers=2))
    with pytest.raises(ValueError, match="the workers of the loader of the stream read the same rows"):
        some(stream, 20, Place.begin(1))


def test_loaders_that_stack_rows_and_makers_that_fail_are_named() -> None:
    rows = random_rows([3] * 30)
    stacked = ShardedStream(lambda reader, n: torch.utils.data.DataLoader(rows, batch_size=2))
    with pytest.raises(ValueError, match=r"stacks rows to batches \(batch_size=2\); make it with batch_size=None, or"):
        some(stacked, 1, Place.begin(1))
    with pytest.raises(ValueError, match="the shard of reader 0 is a int; return something that gives rows"):
        some(ShardedStream(lambda reader, n: reader), 1, Place.begin(2))
    with pytest.raises(ValueError, match="could not be opened for reader 1 on rank 0: KeyError: 1"):
        some(ShardedStream(lambda reader, n: {0: rows}[reader]), 1, Place.begin(2))
    with pytest.raises(ValueError, match="gave no rows of reader 1 on rank 0"):
        some(ShardedStream(lambda reader, n: [rows, []][reader]), 1, Place.begin(2))


def test_shards_with_other_columns_are_refused() -> None:
    rows = random_rows([3] * 8)
    plain = [{"input_ids": row["input_ids"]} for row in rows]
    with pytest.raises(ValueError, match=r"differ between shards \(reader 0: labels; reader 1: none\); give all files the same"):
        some(ShardedStream(lambda reader, n: [rows, plain][reader]), 1, Place.begin(2))


def problems(stream: Any, readers: int = 2) -> str:
    config = LongContextConfig(lookahead_batches=2, stream_readers=readers)
    return "\n".join(stream_problems({"train_dataset": stream}, config, TrainingArguments(use_cpu=True, max_steps=3)))


def test_streams_that_cannot_be_divided_are_refused() -> None:
    stream = datasets.Dataset.from_list(random_rows([3] * 12)).to_iterable_dataset(num_shards=3)
    assert problems(stream) == problems(stream.shuffle(seed=3), 3) == problems(ShardedStream(lambda r, n: []), 9) == ""
    assert "stream_readers=4, but train_dataset has 3 shards (its num_shards" in problems(stream, 4)
    assert "cannot be divided, so each reader would train on all of its rows" in problems(Part([]))
    assert "made with take or skip" in problems(stream.skip(3)) and "made with take or skip" in problems(stream.take(3))
    assert "with_indices" in problems(stream.map(lambda row, number: row, with_indices=True))
    assert "with_indices" in problems(stream.filter(lambda row, number: number, with_indices=True))
    assert problems(stream.skip(3), 1) == problems(Part([]), 1) == ""
    assert "stream_readers=2 has no effect unless train_dataset is iterable" in problems(datasets.Dataset.from_list([{"a": 1}]))


def test_shuffles_without_a_seed_and_other_files_differ_between_ranks() -> None:
    rows = random_rows([3] * 12)

    def stream(rows: Rows = rows) -> datasets.IterableDataset:
        return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3)

    alike = source_digest(stream().shuffle(seed=7).map(lambda row: row))
    assert alike == source_digest(stream().shuffle(seed=7).map(lambda row: row))
    others = [stream().shuffle(), stream().shuffle(seed=8), stream(rows[::-1]).shuffle(seed=7), stream()]
    assert len({alike, *(source_digest(each.map(lambda row: row)) for each in others)}) == 5
    files = [
        datasets.IterableDataset.from_generator(lambda names: iter([]), gen_kwargs={"names": names})
        for names in (["a", "b"], ["b", "a"])
    ]
    assert source_digest(files[0]) != source_digest(files[1])


def test_shards_of_a_shuffled_dataset_are_all_of_its_rows() -> None:
    rows = random_rows([3 + number % 4 for number in range(17)])
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=5).shuffle(seed=5, buffer_size=4)
    batches = some(stream, 10, Place.begin(3))
    expected = sorted(row["input_ids"] for row in rows)
    first, second = (flat(epoch) for epoch in (batches[:5], batches[5:]))
    assert sorted(first) == sorted(second) == expected and first != second
    for number in (0, 4, 6):
        assert ids(some(stream, 2, batches[number].after)) == ids(batches[number + 1 : number + 3])
    assert np.unique([len(batch.sequences) for batch in batches[:4]]).tolist() == [4]
