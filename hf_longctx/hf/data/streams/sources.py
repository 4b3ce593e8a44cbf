"""Divides iterable datasets among readers, and saves and loads their states.

Reader r of n reads shard r of the dataset: `shard(num_shards=n, index=r)`, a method of datasets of `datasets`, or what a
`ShardedStream` makes for it.

States are taken while a dataset is read, so that a resumed run need not read all earlier rows again. Only states from which
exactly the next row follows are used. A dataset without such a state is read from the beginning of its epoch, and the rows
before the cursor are dropped.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import datasets
import torch
import xxhash
from transformers import TrainingArguments

from hf_longctx.hf.checkpoints.old_shards import OLD_STREAM_MARK, old_stream_state
from hf_longctx.hf.checkpoints.values import Unwritable, class_name, first_difference, from_json, to_json
from hf_longctx.hf.config import LongContextConfig

# steps of a dataset of `datasets` with exact states; a shuffle buffer, for example, loses its rows
_EXACT = (
    "ArrowExamplesIterable",
    "ExamplesIterable",
    "FilteredExamplesIterable",
    "FormattedExamplesIterable",
    "MappedExamplesIterable",
    "RebatchedArrowExamplesIterable",
    "SelectColumnsIterable",
    "TypedExamplesIterable",
)


def keeps_state(stream: Any) -> bool:
    """Whether this dataset or loader continues at exactly the next row after `take_state` and `load_state`."""
    inner = getattr(stream, "dataset", stream)
    if isinstance(inner, datasets.IterableDataset) and not all(type(step).__name__ in _EXACT for step in steps_of(inner)):
        return False
    has_both = all(callable(getattr(stream, name, None)) for name in ("state_dict", "load_state_dict"))
    return has_both and not counts_samples(stream)


def counts_samples(stream: Any) -> bool:
    """Whether `state_dict` needs a number of samples over all ranks, as in mosaicml-streaming.

    Readers do not have that number, so only the epoch of such states is used.
    """
    found = getattr(stream, "state_dict", None)
    return callable(found) and "num_samples" in inspect.signature(found).parameters


def take_state(stream: Any) -> str:
    """Returns the dataset's state after its last row as text, from which `load_state` makes an equal one.

    Raises Unwritable with the name of a value for which that is not so, such as an object of a user's class.
    """
    state = stream.state_dict()
    try:
        text = json.dumps(state)
        if not first_difference(json.loads(text), state, "state_dict()"):
            return text
    except (TypeError, ValueError, RecursionError):
        pass
    try:
        text = _MARK + json.dumps(to_json(state, "state_dict()"))
        lost = first_difference(_loaded(text), state, "state_dict()")
        problem = f"{lost} would not be read back as it is" if lost else ""
    except Unwritable as error:
        problem = str(error)
    except Exception as error:
        problem = f"state_dict() cannot be written ({type(error).__name__}: {error})"
    if problem:
        raise Unwritable(
            f"the state of {class_name(stream)} cannot be saved, since {problem}, so a resumed run will read rows before its "
            f"place again; let state_dict return numbers, texts, lists, tuples, dictionaries, tensors, and arrays, in host memory"
        )
    return text


def load_state(stream: Any, text: str) -> None:
    """Restores a state from `take_state`, from which the next iteration begins; raises ValueError if that fails."""
    try:
        stream.load_state_dict(_loaded(text))
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise ValueError(f"the stream cannot take its state in the checkpoint ({found}); resume with the same stream") from error


def steps_of(stream: datasets.IterableDataset) -> Iterator[Any]:
    """Yields every step of a dataset of `datasets`, from the last one down to its sources."""
    waiting = [stream._ex_iterable]
    while waiting:
        step = waiting.pop()
        yield step
        waiting += getattr(step, "ex_iterables", None) or [each for each in (getattr(step, "ex_iterable", None),) if each]


# begins a state with values that JSON lacks
_MARK = "values:"


def _loaded(text: str) -> Any:
    if text.startswith(OLD_STREAM_MARK):
        return old_stream_state(text)
    return from_json(json.loads(text.removeprefix(_MARK))) if text.startswith(_MARK) else json.loads(text)


logger = logging.getLogger(__name__)

_MANY_ROWS = 100_000


class ShardedStream(torch.utils.data.IterableDataset[Any]):
    """An iterable dataset that a function makes for every reader, for loaders that cannot be divided afterwards.

    `make(reader, num_readers)` runs only on the rank of the reader and returns an iterable over that reader's rows: each row is
    a mapping, and an item may be a list of rows. If the iterable, or the dataset or sampler of a loader, has `set_epoch`, it is
    called before every epoch; if it has `state_dict` and `load_state_dict`, like torchdata's `StatefulDataLoader`, a resumed run
    continues from its state.

    Example:

        def make(reader, num_readers):
            return StatefulDataLoader(rows.shard(num_readers, reader), batch_size=None, num_workers=2)

        trainer = LongContextTrainer(train_dataset=ShardedStream(make), ...)
    """

    def __init__(self, make: Callable[[int, int], Iterable[Any]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self.make(0, 1))


class WholeStream:
    """Rows of an iterable dataset by their numbers. The first access reads it to its end and keeps the rows.

    An evaluation averages over the whole set, so an endless set cannot be evaluated; this is logged after 100,000 rows.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Any:
        return self._rows[number]

    def __getstate__(self) -> dict[str, Any]:
        # workers of a loader need only rows
        return {"stream": None, "_rows": self._rows}

    @cached_property
    def _rows(self) -> list[Any]:
        rows: list[Any] = []
        is_told = False
        try:
            for item in reader_stream(self.stream, 0, 1):
                rows += item if isinstance(item, list) else [item]
                if len(rows) > _MANY_ROWS and not is_told:
                    is_told = True
                    logger.warning(
                        "an iterable dataset that is evaluated has more than %s rows, which stay in memory; if it has no end, "
                        "pass its first ones, for example stream.take(1000)",
                        f"{_MANY_ROWS:,}",
                    )
        except Exception as error:
            raise ValueError(
                f"row {len(rows)} of an iterable dataset that is evaluated cannot be read ({type(error).__name__}: {error})"
            ) from error
        return rows


# by id of the stream, which lives as long as its value
_WHOLE: WeakValueDictionary[int, WholeStream] = WeakValueDictionary()


def whole(dataset: Any) -> Any:
    """Makes rows of a dataset accessible by number; returns the same object for the same iterable dataset."""
    if not is_stream(dataset):
        return dataset
    found = _WHOLE.get(id(dataset))
    if found is None:
        found = _WHOLE[id(dataset)] = WholeStream(dataset)
    return found


def is_stream(dataset: Any) -> bool:
    """Whether a dataset can only be iterated from its beginning."""
    return isinstance(dataset, datasets.IterableDataset | torch.utils.data.IterableDataset)


def stream_length(stream: Any, config: LongContextConfig) -> int | None:
    """Returns a stream's length if each row is one sequence, in steps of a fixed number of sequences; else None."""
    if config.long_sequences == "split" or config.tokens_per_step is not None:
        return None
    try:
        return len(stream) or None
    except (TypeError, NotImplementedError):
        return None


def reader_stream(stream: Any, reader: int, num_readers: int) -> Any:
    """Returns the rows of one reader; raises ValueError for a dataset that cannot be read."""
    if isinstance(stream, ShardedStream):
        made = stream.make(reader, num_readers)
    elif num_readers > 1:
        made = stream.shard(num_shards=num_readers, index=reader)
    else:
        # a copy, since a restored state stays with the dataset for its later iterations too
        made = copy.copy(stream) if isinstance(stream, datasets.IterableDataset) else stream
    if not isinstance(made, Iterable):
        raise ValueError(
            f"the shard of reader {reader} is a {type(made).__name__}; return something that gives rows when it is iterated"
        )
    if not isinstance(made, torch.utils.data.DataLoader):
        return made
    if made.batch_size is not None and made.collate_fn is torch.utils.data.default_collate:
        raise ValueError(
            f"the loader of reader {reader} stacks rows to batches (batch_size={made.batch_size}); make it with batch_size=None, "
            f"or with collate_fn=list, so that it gives rows"
        )
    own = made.generator
    if own is not None and keeps_state(made) and getattr(made.sampler, "generator", None) is own:
        # the state holds the generator before the loader draws its workers' seed from it, too
        raise ValueError(
            f"the loader of reader {reader} shuffles with its own generator, of which its state_dict keeps too little, so the "
            f"epochs after a resumed one would have another order; give the generator to its sampler alone, as in "
            f"StatefulDataLoader(rows, sampler=RandomSampler(rows, generator=generator)), with torchdata's RandomSampler"
        )
    return made


def begin_epoch(stream: Any, epoch: int, is_resumed: bool) -> None:
    """Sets the next epoch of a dataset, or of a loader's dataset or sampler.

    is_resumed: earlier epochs were read in another run.
    """
    inner = (stream.dataset, stream.sampler) if isinstance(stream, torch.utils.data.DataLoader) else ()
    for each in (stream, *inner):
        if hasattr(each, "set_epoch"):
            each.set_epoch(epoch)
            return
    if is_resumed and epoch and counts_samples(stream):
        # it counts epochs by itself
        stream.load_state_dict({**stream.state_dict(0, True), "epoch": epoch})


def stream_problems(sets: dict[str, Any], config: LongContextConfig, args: TrainingArguments) -> list[str]:
    """Lists settings with which streams among the named datasets cannot be used, and look-ahead without a stream."""
    problems = []
    for name, stream in sets.items():
        source = stream.stream if isinstance(stream, WholeStream) else stream
        if getattr(source, "_distributed", None) is not None:
            problems.append(
                f"{name} is split over nodes (split_dataset_by_node), but rows are divided here, among ranks and readers, so the "
                f"other nodes' rows would be lost; pass the stream before it is split"
            )
        if is_stream(stream) and config.stream_readers > 1:
            problems += _shard_problems(name, stream, config.stream_readers)
    if "train_dataset" not in sets:
        return problems
    if is_stream(sets["train_dataset"]):
        if args.max_steps < 1 and stream_length(sets["train_dataset"], config) is None:
            problems.append(
                "max_steps is not set, but an iterable dataset has no length that tells the steps of an epoch; set max_steps"
            )
    else:
        for setting, default in (("lookahead_batches", None), ("stream_readers", 1)):
            if (value := getattr(config, setting)) != default:
                problems.append(f"{setting}={value} has no effect unless train_dataset is iterable; leave it out")
    return problems


def _shard_problems(name: str, stream: Any, num_readers: int) -> list[str]:
    """Lists reasons why the shards of a stream would not contain each of its rows once."""
    if isinstance(stream, ShardedStream):
        return []
    if not callable(getattr(stream, "shard", None)):
        return [
            f"stream_readers={num_readers}, but {name} ({type(stream).__name__}) cannot be divided, so each reader would train "
            f"on all of its rows; give it a method shard(num_shards, index), pass hf_longctx.ShardedStream(make) with a function "
            f"that makes the rows of one reader, or leave stream_readers out"
        ]
    problems = []
    num_shards = getattr(stream, "num_shards", None)
    if isinstance(num_shards, int) and num_shards < num_readers:
        problems.append(
            f"stream_readers={num_readers}, but {name} has {num_shards} shards (its num_shards, mostly files), and a reader "
            f"needs one; set stream_readers to {num_shards} or less, or divide the data into more files"
        )
    if isinstance(stream, datasets.IterableDataset):
        kinds = list(steps_of(stream))
        if any(getattr(step, "split_when_sharding", False) for step in kinds):
            problems.append(
                f"stream_readers={num_readers}, but {name} was made with take or skip, which would choose other rows in every "
                f"shard, perhaps those of an evaluation set; choose rows by file or with filter, or leave stream_readers out"
            )
        if any(getattr(step, "with_indices", False) for step in kinds):
            problems.append(
                f"stream_readers={num_readers}, but {name} was made by a map or filter with_indices, which would number the rows "
                f"of every shard from 0; put the number into a column of the data, or leave stream_readers out"
            )
    return problems


def source_digest(stream: Any) -> str:
    """Returns a hash of what decides a shard's rows: ordered sources and random generators; empty if unknown.

    With `shuffle()` and no seed, for example, each rank orders the files differently before it takes its shard.
    """
    if not isinstance(stream, datasets.IterableDataset):
        return ""
    found = xxhash.xxh3_64()
    for step in steps_of(stream):
        generator = getattr(step, "generator", None)
        found.update(f"{type(step).__name__} {None if generator is None else generator.bit_generator.state};".encode())
        for name, value in sorted((getattr(step, "kwargs", None) or {}).items()):
            sources = value if isinstance(value, list | tuple) else [value]
            found.update(f"{name}={[_described(each) for each in sources]};".encode())
    return found.hexdigest()


def _described(source: Any) -> str:
    if isinstance(source, datasets.Dataset):
        ends = [source[number] for number in (0, -1) if len(source)]
        return f"{len(source)} rows, {ends!r}"
    return repr(source) if isinstance(source, str | int | float | bool | None) else type(source).__name__
