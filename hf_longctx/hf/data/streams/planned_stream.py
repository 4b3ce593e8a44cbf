"""Plans and distributes the batches of a stream: the dataset of the trainer's loader.

Reader r of n lies on rank r * ranks // n, so that readers are spread over nodes. Between two steps all ranks tell each other the
lengths that their readers have read since; each composes the same next batch, and rank 0 plans it while the present step runs.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from hf_longctx.hf.data.collator import LongContextCollator, PlannedStep, TokenSequence
from hf_longctx.hf.data.streams.composer import BatchComposer, ComposedBatch, EpochEnds
from hf_longctx.hf.data.streams.exchange import exchange_tokens
from hf_longctx.hf.data.streams.place import Cursor, Place
from hf_longctx.hf.data.streams.reader import AheadReader
from hf_longctx.hf.data.streams.rows import ONLY_READER, SequenceReader, StreamRules
from hf_longctx.hf.data.streams.sources import reader_stream
from hf_longctx.hf.planning.source import Lengths, PlanSource
from hf_longctx.hf.ranks.agreement import gather_objects

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamSource:
    """A stream, the rules of its sequences, the number of its readers, and the global batches that they may read ahead."""

    stream: Any
    rules: StreamRules
    num_readers: int
    lookahead: int

    def rank_of(self, reader: int, num_ranks: int) -> int:
        """The rank on which a reader lies."""
        return reader * num_ranks // self.num_readers

    def origin(self, reader: int, num_ranks: int) -> str:
        """The name of a reader in messages."""
        return ONLY_READER if self.num_readers == 1 else f"reader {reader} on rank {self.rank_of(reader, num_ranks)}"

    def sequences(self, reader: int, start: Cursor, num_ranks: int) -> SequenceReader:
        """The sequences of a reader from a cursor on."""
        origin = self.origin(reader, num_ranks)
        return SequenceReader(partial(reader_stream, self.stream, reader, self.num_readers), self.rules, start, origin)


class PlannedStream(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Each item is this rank's batch of one plan, in the form the collator makes.

    Collective over the plans' control group: every rank must draw equally often. `steps_done` returns the number of batches that
    the trainer discards on resume, because they were done before; such batches are empty, and nothing is read for them.
    """

    def __init__(self, source: StreamSource, start: Place, plans: PlanSource, steps_done: Callable[[], int] = lambda: 0) -> None:
        self.source, self.start, self.plans, self.steps_done = source, start, plans, steps_done
        self._turn, self._cursors = start.turn, dict[int, Cursor]()

    def loader(self, pin_memory: bool) -> DataLoader[Any]:
        """Makes a loader without length or workers; accelerate must not shard it, since every item is this rank's own."""
        return DataLoader(self, batch_size=None, collate_fn=_as_it_is, pin_memory=pin_memory)

    def place(self) -> Place:
        """The place after the batch that was drawn last. Collective over the control group."""
        known = dict(enumerate(self.start.readers))
        for found in gather_objects(self._cursors, self.plans.pool.control):
            known.update(found)
        return Place(self._turn, tuple(known[reader] for reader in sorted(known)))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        num_skipped = self.steps_done()
        for _ in range(num_skipped):
            yield {}
        pool = self.plans.pool
        readers = StreamReaders(self.source, self.start, self.plans)
        collate = LongContextCollator()
        try:
            for plan in self.plans.plans(readers.steps(num_skipped), explore=True):
                batch, read = readers.taken()
                assert plan.lengths == batch.lengths
                owners = [readers.rank_of(reader) for reader, _ in batch.members]
                held = exchange_tokens(plan, owners, read, batch.is_weighted, pool.rank, pool.control)
                self._turn, self._cursors = batch.turn, readers.cursors()
                # a stream has no index, so sequences are numbered inside their batch
                step = PlannedStep(plan, tuple(range(len(plan.lengths))), pool.rank)
                yield collate([(step, held)])
        finally:
            readers.stop()


class StreamReaders:
    """This rank's readers and its view of the batches that all readers' sequences make.

    A reader may be `lookahead` batches ahead of the running step, in sequences, of which it gives its share. With a budget of
    tokens, its share is that of the batch before.
    """

    def __init__(self, source: StreamSource, start: Place, plans: PlanSource) -> None:
        self.source, self.plans = source, plans
        control = plans.pool.control
        self.num_ranks = 1 if control is None else dist.get_world_size(control)
        self.composer = BatchComposer(source.rules, start)
        # batches that are complete and not yet drawn
        self._complete: deque[ComposedBatch] = deque()
        # for every reader, the number of items in complete batches
        self._closed: tuple[int, ...] = (0,) * source.num_readers
        # batches that may be read beyond the complete ones, and sequences that a reader gives to each; 0: not known yet
        self._ahead = source.lookahead
        self._share = 0 if source.rules.tokens_per_step else -(-source.rules.sequences_per_step // source.num_readers)
        # the batch of the step before is not complete yet
        self._is_late = False
        # ends of epochs that own readers have announced, and how far each reader of all ranks has read: epoch, rows
        self._num_ends: Counter[int] = Counter()
        self._progress: dict[int, tuple[int, int]] = {}
        self._readers = {
            reader: AheadReader(source.sequences(reader, cursor, self.num_ranks), partial(self._has_room, reader))
            for reader, cursor in enumerate(start.readers)
            if self.rank_of(reader) == plans.pool.rank
        }

    def rank_of(self, reader: int) -> int:
        """The rank on which a reader lies."""
        return self.source.rank_of(reader, self.num_ranks)

    def steps(self, first: int) -> Iterator[tuple[int, Lengths]]:
        """The lengths of every step from number `first` on, for `PlanSource.plans`. Collective: all ranks draw equally often.

        A step whose sequences are not all read yet comes with a function that returns their lengths later: they are waited for
        here when the next step is drawn. An error of any reader is raised then, on all ranks.
        """
        for step in itertools.count(first):
            # the step before has ended, so the batch behind it is the running one
            self._let_read(self.source.lookahead)
            if self._is_late:
                self._keep(self._finished(), self.source.lookahead)
            batch = self._try_batch()
            self._is_late = batch is None
            if batch is not None:
                self._keep(batch, self.source.lookahead - 1)
                yield step, list(batch.lengths)
            else:
                yield step, self._late_lengths

    def _late_lengths(self) -> list[int]:
        """Lengths of the first batch that is complete and not drawn."""
        return list(self._complete[0].lengths)

    def taken(self) -> tuple[ComposedBatch, dict[int, TokenSequence]]:
        """The next batch, and those of its sequences that this rank has read; frees them."""
        batch = self._complete.popleft()
        read = {}
        for reader, ahead in self._readers.items():
            places = {number: place for place, (owner, number) in enumerate(batch.members) if owner == reader}
            for number, sequence in ahead.take(batch.taken[reader], set(places)).items():
                read[places[number]] = sequence
        return batch, read

    def cursors(self) -> dict[int, Cursor]:
        """The places of this rank's readers after the batch that was taken last."""
        return {reader: ahead.cursor for reader, ahead in self._readers.items()}

    def stop(self) -> None:
        """Ends all threads, unless their sources hang."""
        for ahead in self._readers.values():
            ahead.stop()

    def _finished(self) -> ComposedBatch:
        """Waits until the next batch is complete, however long readers take."""
        begun_s = time.monotonic()
        try:
            while (batch := self.composer.next_batch()) is None:
                self._wait_for_own(begun_s)
                self._meet()
        except ValueError as error:
            own = [each.error for each in self._readers.values() if each.error is not None and str(each.error) == str(error)]
            raise error from (own[0] if own else None)
        return batch

    def _try_batch(self) -> ComposedBatch | None:
        """The next batch, if its sequences are read; an error is left for later, when the batch is needed."""
        try:
            if (batch := self.composer.next_batch()) is None:
                self._meet()
                batch = self.composer.next_batch()
        except ValueError:
            return None
        return batch

    def _meet(self) -> None:
        """Tells all ranks what this rank's readers have read, and learns the same of others. Collective."""
        news = {}
        for reader, ahead in self._readers.items():
            items = ahead.news()
            self._num_ends[reader] += sum(isinstance(item, EpochEnds) for item in items)
            news[reader] = items, (ahead.sequences.epoch, ahead.sequences.num_rows)
        for found in gather_objects(news, self.plans.pool.control):
            for reader, (items, progress) in found.items():
                self.composer.announce(reader, items)
                self._progress[reader] = progress

    def _wait_for_own(self, begun_s: float) -> None:
        """Waits for this rank's readers, but not so long that other ranks would give it up; says who is late since `begun_s`."""
        late_s, until_s = time.monotonic() - begun_s, time.monotonic() + self.plans.alive_s
        if late_s > self.plans.alive_s and self.plans.pool.rank == 0:
            reader = self.composer.turn
            epoch, num_rows = self._progress.get(reader, (self.composer.epoch, 0))
            logger.warning(
                "all ranks wait for %s, which has given no further sequence for %.0f s; it has read %d rows of epoch %d",
                *(self.source.origin(reader, self.num_ranks), late_s, num_rows, epoch),
            )
        for reader, ahead in self._readers.items():
            ahead.look()
            if self.composer.lacks(reader):
                ahead.wait(partial(self._has_enough, reader), max(0.0, until_s - time.monotonic()))

    def _has_room(self, reader: int, num_read: int, num_tokens: int) -> bool:
        """Whether a reader that has read so much may read on; called in its thread."""
        if not self._ahead:
            return False
        if num_read <= self.composer.taken[reader]:
            # other readers gave less than their share, so the batch that is being filled needs more of this one
            return True
        if self._share:
            return num_read - self._closed[reader] < self._ahead * self._share
        return num_tokens < self._ahead * self._token_share

    def _has_enough(self, reader: int, ahead: AheadReader) -> bool:
        """Whether it is time to announce what a reader has read: its share of a batch, or the end of its epoch."""
        if ahead.num_read <= self.composer.taken[reader]:
            return False
        if ahead.num_ends > self._num_ends[reader]:
            return True
        if self._share:
            return ahead.num_read - self._closed[reader] >= self._share
        return ahead.num_tokens >= self._token_share

    @property
    def _token_share(self) -> int:
        return -(-(self.source.rules.tokens_per_step or 0) // self.source.num_readers)

    def _keep(self, batch: ComposedBatch, ahead: int) -> None:
        self._complete.append(batch)
        self._closed = batch.taken
        if self.source.rules.tokens_per_step is not None:
            self._share = -(-len(batch.members) // self.source.num_readers)
        self._let_read(ahead)

    def _let_read(self, ahead: int) -> None:
        self._ahead = ahead
        for each in self._readers.values():
            each.look()


def _as_it_is(batch: Any) -> Any:
    # the dataset makes whole batches; torch's default would convert what is inside them
    return batch
