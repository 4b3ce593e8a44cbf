"""Trains on streams: rank 0 alone reads an iterable dataset, a few global batches ahead, and sends every rank its tokens.

The trainer uses `PlannedStream` as its loader's dataset. A global batch is complete when it has `sequences_per_step`
sequences, when it reaches `tokens_per_step` tokens, or at the end of an epoch (`dataloader_drop_last` drops that last one).
Sequences come in the order of the stream; shuffle it with `stream.shuffle(seed=..., buffer_size=...)`. At its end the stream
starts again, after `set_epoch(epoch + 1)` if it has that method.

A cursor says which sequence comes next in training, regardless of what was read ahead. A resumed run reads the epoch's rows
before the cursor again, drops them, and compares their hash with that of the first run.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.data.collator import LongContextCollator, PlannedStep, TokenSequence, shift, step_batch
from hf_longctx.hf.data.sampler import IntArray, SequenceIndex
from hf_longctx.hf.data.scan import RowTokens, row_tokens, too_long
from hf_longctx.hf.planning.source import PlanSource
from hf_longctx.plan.core.sharding import held_tokens, rank_pieces
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.runtime.core.chunk_inputs import ChunkInputs
from hf_longctx.runtime.core.loss import IGNORE_INDEX

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamRules:
    """Rules by which rows become sequences, and sequences become global batches. Equal rules and rows give equal batches.

    A sequence has at most `max_length` tokens, which is a setting, and at most `room_tokens`, which is what memory holds.
    placeholders: token ids that no row may have, since they stand for padding, images, sound or video.
    """

    name: str
    vocab_size: int
    max_length: int
    tokens_per_rank: int
    room_tokens: int
    long_sequences: str
    sequences_per_step: int
    tokens_per_step: int | None
    drop_last: bool
    placeholders: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position in a stream: the next sequence is piece `piece` of row `row` of epoch `epoch`.

    `digest` is a hash of the epoch's rows before it.
    """

    epoch: int = 0
    row: int = 0
    piece: int = 0
    digest: str = ""


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The sequences of one step over all ranks, and the cursor after them."""

    sequences: tuple[TokenSequence, ...]
    after: Cursor


def is_stream(dataset: Any) -> bool:
    """Whether a dataset can only be iterated from its beginning."""
    return isinstance(dataset, datasets.IterableDataset | torch.utils.data.IterableDataset)


def stream_problems(sets: dict[str, Any], config: LongContextConfig, args: TrainingArguments) -> list[str]:
    """Problems with settings under which the streams among the named datasets cannot be used, and look-ahead without a stream."""
    problems = []
    for name, stream in sets.items():
        if not is_stream(stream):
            continue
        if name != "train_dataset":
            problems.append(
                f"{name} is an iterable dataset, which cannot be evaluated as a whole; pass a map-style one, for example "
                f"datasets.Dataset.from_list(list(stream.take(1000)))"
            )
        elif config.lookahead_batches is None:
            problems.append(
                f"{name} is an iterable dataset and lookahead_batches is not set; set it to the number of global batches that "
                f"may be read ahead of training (for example 4), or pass a map-style dataset with a length"
            )
        if getattr(stream, "_distributed", None) is not None:
            problems.append(
                f"{name} is split over nodes (split_dataset_by_node), but rank 0 reads for all ranks, so the other nodes' rows "
                f"would be lost; pass the stream before it is split"
            )
    if "train_dataset" not in sets:
        return problems
    if is_stream(sets["train_dataset"]):
        if args.max_steps < 1:
            problems.append("max_steps is not set, but an iterable dataset has no length; set max_steps")
    elif config.lookahead_batches is not None:
        problems.append(
            f"lookahead_batches={config.lookahead_batches} has no effect unless train_dataset is iterable; leave it out"
        )
    return problems


class StreamBatches:
    """Iterates over the global batches of a stream from a cursor on, without end.

    Raises ValueError for a row that cannot be trained on and for a stream that fails, naming the row's number; for a stream
    without rows or without labels; and if the rows before the cursor are not those of the run that wrote the cursor.
    """

    def __init__(self, stream: Any, rules: StreamRules, start: Cursor) -> None:
        self.stream, self.rules, self.start = stream, rules, start
        self._has_told_cuts = False

    def __iter__(self) -> Iterator[GlobalBatch]:
        start = self.start
        while True:
            yield from self._epoch(start)
            start = Cursor(start.epoch + 1)

    def _epoch(self, start: Cursor) -> Iterator[GlobalBatch]:
        rules = self.rules
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(start.epoch)
        waiting: list[TokenSequence] = []
        num_tokens, num_sequences, has_label = 0, 0, False
        is_whole = is_empty = start == Cursor(start.epoch)
        for sequence, after in self._sequences(start):
            waiting.append(sequence)
            num_tokens += len(sequence.input_ids)
            num_sequences += 1
            has_label = has_label or bool((sequence.shift_labels != IGNORE_INDEX).any())
            is_full = len(waiting) == rules.sequences_per_step
            if num_tokens >= rules.tokens_per_step if rules.tokens_per_step is not None else is_full:
                yield GlobalBatch(tuple(waiting), after)
                waiting, num_tokens, is_empty = [], 0, False
        if is_whole and not has_label:
            raise ValueError(f"{rules.name} has no token with a label, so there is nothing to learn from it; check its labels")
        if waiting and not rules.drop_last:
            yield GlobalBatch(tuple(waiting), Cursor(start.epoch + 1))
        elif is_empty:
            raise ValueError(
                f"dataloader_drop_last leaves no step: {num_sequences} sequences of {rules.name} are fewer than one step of "
                f"{rules.sequences_per_step}; set it to False or lower per_device_train_batch_size"
            )

    def _sequences(self, start: Cursor) -> Iterator[tuple[TokenSequence, Cursor]]:
        """Yields every sequence of an epoch from the cursor on, each with the cursor that comes after it."""
        epoch, digest, num_rows = start.epoch, xxhash.xxh3_128(), 0
        if start.row:
            logger.warning("%s: reading and dropping %d rows of epoch %d before the cursor", self.rules.name, start.row, epoch)
        for row, tokens in enumerate(self._rows(epoch)):
            input_ids, labels, weights = tokens.input_ids, tokens.labels, tokens.loss_weights
            if row == start.row and not start.piece:
                self._compare(digest.hexdigest(), start)
            documents = tokens.documents
            # hash the length too, so that the same tokens divided into other rows hash differently
            digest.update(np.int64(len(input_ids)).tobytes() + input_ids.tobytes() + labels.tobytes())
            if weights is not None:
                digest.update(weights.tobytes())
            if documents is not None:
                digest.update(documents.tobytes())
            if row == start.row and start.piece:
                self._compare(digest.hexdigest(), start)
            num_rows = row + 1
            cuts = self._cuts(row, epoch, np.array([len(input_ids)]), documents)
            for piece, cut in enumerate(cuts):
                if (row, piece) >= (start.row, start.piece):
                    place = (num_rows, 0) if piece + 1 == len(cuts) else (row, piece + 1)
                    shifted = None if weights is None else shift(torch.tensor(weights[cut]), last=0)
                    sequence = TokenSequence(torch.tensor(input_ids[cut]), shift(torch.tensor(labels[cut])), loss_weights=shifted)
                    yield sequence, Cursor(epoch, *place, digest.hexdigest())
        if num_rows < start.row + (start.piece > 0):
            raise ValueError(
                f"{self.rules.name} ended after {num_rows} rows of epoch {epoch}, but the checkpoint stopped at row "
                f"{start.row}; resume with the same stream"
            )
        if num_rows == start.row:
            self._compare(digest.hexdigest(), start)

    def _rows(self, epoch: int) -> Iterator[RowTokens]:
        """Checks every row of an epoch, and yields its tokens."""
        rules, number, columns = self.rules, 0, None
        try:
            rows = iter(self.stream)
            while True:
                try:
                    row = next(rows)
                except StopIteration:
                    break
                columns = columns if columns is not None else sorted(row)
                yield row_tokens(row, columns, number, rules.name, rules.vocab_size, rules.placeholders)
                number += 1
        except ValueError as error:
            raise ValueError(f"{error} (row {number} of epoch {epoch} of the stream)") from error
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
            raise ValueError(f"{rules.name} failed at row {number} of epoch {epoch} of the stream: {found}") from error
        if not number:
            again = "" if not epoch else f" in epoch {epoch}: every iteration must start anew, which a generator cannot do"
            raise ValueError(f"{rules.name} gave no rows{again}; check its source, split and filters")

    def _cuts(self, row: int, epoch: int, row_length: IntArray, documents: IntArray | None) -> list[slice]:
        """Cuts a row of `row_length` [1] tokens into sequences, by the same rule as for map-style datasets."""
        rules, lengths = self.rules, row_length if documents is None else documents
        room, num_tokens = rules.room_tokens, int(lengths.max())
        if rules.long_sequences == "error":
            for problem in too_long(
                lengths, rules.max_length, room, rules.tokens_per_rank, rules.name, np.full(len(lengths), row)
            ):
                raise ValueError(f"{problem} (epoch {epoch} of the stream)")
        limit = min(rules.max_length, room)
        if num_tokens > limit and not self._has_told_cuts:
            self._has_told_cuts = True
            what = "truncated" if rules.long_sequences == "truncate" else "split"
            logger.warning(
                "%s: row %d has %d tokens and is %s at %d, as all later long rows are", rules.name, row, num_tokens, what, limit
            )
        index = SequenceIndex.build(row_length, limit, rules.long_sequences, documents)
        return [slice(int(start), int(stop)) for start, stop in zip(index.starts, index.stops, strict=True)]

    def _compare(self, digest: str, start: Cursor) -> None:
        if start.digest and digest != start.digest:
            raise ValueError(
                f"the rows of {self.rules.name} before row {start.row} of epoch {start.epoch} are not those of the run that is "
                f"resumed; give the stream a fixed order (a seed for every shuffle), or set ignore_data_skip=True to start it "
                f"from its beginning"
            )


class StreamReader:
    """Reads batches in a thread, at most `lookahead` of them beyond the batch in use."""

    def __init__(self, batches: StreamBatches, lookahead: int) -> None:
        self._batches = batches
        self._room = threading.Semaphore(lookahead + 1)
        self._ready: queue.SimpleQueue[GlobalBatch | Exception] = queue.SimpleQueue()
        self._is_stopped = False
        # a daemon thread, because a source that hangs must not keep the process alive
        threading.Thread(target=self._read, name="longctx-stream", daemon=True).start()

    def take(self) -> GlobalBatch:
        """Waits for the next batch and returns it; raises the error with which reading it failed, if it did."""
        batch = self._ready.get()
        if isinstance(batch, Exception):
            raise batch
        return batch

    def release(self) -> None:
        """Tells the thread that the batch in use is done with, so that one more may be read."""
        self._room.release()

    def stop(self) -> None:
        """Ends the thread, and any call that is waiting in `take`."""
        self._is_stopped = True
        self._room.release()
        self._ready.put(RuntimeError("the stream is no longer read"))

    def _read(self) -> None:
        batches = iter(self._batches)
        try:
            while True:
                self._room.acquire()
                if self._is_stopped:
                    return
                self._ready.put(next(batches))
        except Exception as error:
            self._ready.put(error)


class PlannedStream(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Plans and distributes a stream's batches: each item is this rank's batch of one plan, in the form the collator makes.

    Collective over the source's control group: every rank must draw equally often. `steps_done` returns the number of batches
    that the trainer discards on resume, because they were done before; such batches are empty, and nothing is read for them.
    `cursor`: position after the batch that was drawn last; only rank 0 knows it.
    """

    def __init__(
        self, batches: StreamBatches, lookahead: int, source: PlanSource, steps_done: Callable[[], int] = lambda: 0
    ) -> None:
        self.batches, self.lookahead, self.source, self.steps_done = batches, lookahead, source, steps_done
        self.cursor = batches.start

    def loader(self, pin_memory: bool) -> DataLoader[Any]:
        """Makes a loader without length or workers; accelerate must not shard it, since every item is this rank's own."""
        return DataLoader(self, batch_size=None, collate_fn=_as_it_is, pin_memory=pin_memory)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        num_skipped = self.steps_done()
        for _ in range(num_skipped):
            yield {}
        if self.source.pool.rank:
            yield from self._received(num_skipped)
            return
        reader = StreamReader(self.batches, self.lookahead)
        try:
            yield from self._sent(reader, num_skipped)
        finally:
            reader.stop()

    def _sent(self, reader: StreamReader, first_step: int) -> Iterator[dict[str, Any]]:
        """Yields rank 0's batches: plans what the reader reads, sends every other rank its part, and keeps its own part."""
        in_planning: deque[GlobalBatch] = deque()

        def lengths() -> list[int]:
            # runs in the planner's thread, where waiting for the stream delays nothing else
            in_planning.append(reader.take())
            return [len(sequence.input_ids) for sequence in in_planning[-1].sequences]

        for plan in self.source.plans(((step, lengths) for step in itertools.count(first_step)), explore=True):
            batch = in_planning.popleft()
            parts = [_part(plan, rank, batch.sequences) for rank in range(plan.num_ranks)]
            # this mapping keeps the tensors alive until they are sent
            is_weighted = any(sequence.loss_weights is not None for sequence in batch.sequences)
            packed = {rank: _packed(part["chunks"], is_weighted) for rank, part in enumerate(parts) if rank}
            # the other ranks learn first how many numbers a token has
            heads = {rank: torch.tensor(len(tensor)) for rank, tensor in packed.items()}
            for messages in (heads, packed):
                for message in [dist.isend(tensor, rank, self.source.pool.control) for rank, tensor in messages.items()]:
                    assert message is not None
                    message.wait()
            self.cursor = batch.after
            yield parts[0]
            # the trainer has come back for the next batch, so it is done with this one
            reader.release()

    def _received(self, first_step: int) -> Iterator[dict[str, Any]]:
        """Yields the batches of a rank other than 0, whose tokens of each plan come from rank 0."""
        pool = self.source.pool

        def no_lengths() -> list[int]:
            raise AssertionError("rank 0 plans")

        for plan in self.source.plans(((step, no_lengths) for step in itertools.count(first_step)), explore=True):
            counts = _chunk_tokens(plan, pool.rank)
            head = torch.tensor(0)
            dist.recv(head, 0, pool.control)
            packed = torch.empty(int(head), sum(map(sum, counts)), dtype=torch.int32)
            dist.recv(packed, 0, pool.control)
            yield step_batch(_planned(plan, pool.rank), _unpacked(packed, counts))


def _as_it_is(batch: Any) -> Any:
    # the dataset makes whole batches; torch's default would convert what is inside them
    return batch


def _planned(plan: StepPlan, rank: int) -> PlannedStep:
    # a stream has no index, so sequences are numbered inside their batch
    return PlannedStep(plan, tuple(range(len(plan.lengths))), rank)


def _part(plan: StepPlan, rank: int, sequences: tuple[TokenSequence, ...]) -> dict[str, Any]:
    return LongContextCollator()([(_planned(plan, rank), dict(enumerate(sequences)))])


def _chunk_tokens(plan: StepPlan, rank: int) -> list[list[int]]:
    """Number of tokens that a rank holds of each of its chunks, micro-batch by micro-batch."""
    _, position = plan.place(rank)
    return [
        [held_tokens(rank_pieces(chunk, group.shape))[group.positions.index(position)] for chunk in group.chunks]
        for group, _ in plan.for_rank(rank).rounds
    ]


def _packed(chunks: list[list[ChunkInputs]], is_weighted: bool = False) -> torch.Tensor:
    """Concatenates token ids, positions and labels of all chunks, shape [3, tokens], int32.

    is_weighted: two more rows hold the bits of the labels' weights in fp64.
    """
    flat = [inputs for round_chunks in chunks for inputs in round_chunks]
    columns = [torch.cat([inputs.input_ids, inputs.position_ids, inputs.shift_labels]) for inputs in flat]
    packed = torch.cat(columns, dim=1).to(torch.int32)
    if not is_weighted:
        return packed
    # a chunk of dummy tokens alone has no weights
    weights = [torch.zeros(i.input_ids.shape, dtype=torch.float64) if i.loss_weights is None else i.loss_weights for i in flat]
    return torch.cat([packed, torch.cat(weights, dim=1).view(torch.int32).view(-1, 2).T])


def _unpacked(packed: torch.Tensor, counts: list[list[int]]) -> list[list[ChunkInputs]]:
    """Splits what `_packed` concatenated into chunks of `counts[micro-batch][chunk]` tokens."""
    sizes = [count for round_counts in counts for count in round_counts]
    pieces = iter(packed[:3].to(torch.int64).split(sizes, dim=1))
    weights: Iterator[torch.Tensor | None] = itertools.repeat(None)
    if len(packed) > 3:
        weights = iter(packed[3:].T.contiguous().view(torch.float64).view(1, -1).split(sizes, dim=1))
    return [[_inputs(next(pieces), next(weights)) for _ in of_round] for of_round in counts]


def _inputs(piece: torch.Tensor, weights: torch.Tensor | None) -> ChunkInputs:
    ids, positions, labels = piece.unsqueeze(1)
    return ChunkInputs(ids, positions, labels, weights)
