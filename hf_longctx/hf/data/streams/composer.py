"""Makes the same global batches on every rank from the sequences that readers announce, and detects rows read twice.

Readers take turns: reader 0 gives a sequence, then reader 1, and so on, then reader 0 again. A reader whose epoch is over is
skipped until all are at its end; the next epoch begins with reader 0. A batch is complete when it has `sequences_per_step`
sequences, when it reaches `tokens_per_step` tokens, or at the end of an epoch (`drop_last` drops that last one). So batches
depend only on the shards, not on ranks or speeds of readers.

Readers that read the same rows would train each row once per reader. A stream whose `shard` does nothing, or a loader that is the
same for every reader, looks right: losses fall, and only the epoch is too long. So ranks compare hashes of rows.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hf_longctx.hf.data.labels import LABELS_THAT_COUNT, LOSS_WEIGHTS
from hf_longctx.hf.data.media.rows import Medium
from hf_longctx.hf.data.resume import Place
from hf_longctx.hf.data.streams.rows import StreamRules
from hf_longctx.plan.core.types import Blocks

logger = logging.getLogger(__name__)

# first rows of an epoch, which are equal for two readers only if both read the same rows
_FIRST_ROWS = 64
# one row in how many is sampled over the epoch, by its hash so that all readers sample the same rows; and most samples
_SAMPLED, _MOST_SAMPLES = 64, 200_000
# fewest samples for a verdict, and the share of them that may be read twice, since many corpora have duplicates
_FEWEST_SAMPLES, _USUAL_SHARE = 32, 0.125


class SharedRows:
    """Compares the rows of all readers in one epoch, with the same result on every rank that adds the same hashes."""

    def __init__(self, name: str, num_readers: int) -> None:
        self.name, self.num_readers = name, num_readers
        self._has_warned = False
        self._begin_epoch()

    def add(self, reader: int, row_hash: int) -> None:
        """Adds a row; raises ValueError if the first rows of its reader are another reader's."""
        if self.num_readers == 1:
            return
        self._sums[reader] = (self._sums[reader][0] + 1, (self._sums[reader][1] + row_hash) % 2**64)
        if row_hash % _SAMPLED == 0 and (row_hash in self._seen or len(self._seen) < _MOST_SAMPLES):
            self._num_sampled += 1
            self._num_shared += self._seen.setdefault(row_hash, reader) != reader
        first = self._first[reader]
        if len(first) < _FIRST_ROWS:
            first.append(row_hash)
            if len(first) == _FIRST_ROWS:
                self._refuse_alike(dict(enumerate(map(tuple, self._first))), reader, f"begin with the same {_FIRST_ROWS} rows")

    def end_epoch(self, epoch: int) -> None:
        """Ends an epoch; raises ValueError if two readers had the same rows in any order, and warns if they share many."""
        if self.num_readers == 1:
            return
        for reader in range(self.num_readers):
            self._refuse_alike(self._sums, reader, f"had the same {self._sums[reader][0]} rows in epoch {epoch}")
        if self._num_sampled >= _FEWEST_SAMPLES and self._num_shared > _USUAL_SHARE * self._num_sampled and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: %d of %d rows that were followed through epoch %d came from another reader too; make sure that readers have "
                "different rows, for example that every shuffle of files has a seed",
                *(self.name, self._num_shared, self._num_sampled, epoch),
            )
        self._begin_epoch()

    def _refuse_alike(self, found: dict[int, tuple[int, ...]], reader: int, what: str) -> None:
        # equal rows prove nothing
        if len(set(self._first[reader])) < 2:
            return
        others = [other for other, each in found.items() if other != reader and each == found[reader]]
        if others:
            first, second = sorted((others[0], reader))
            raise ValueError(
                f"readers {first} and {second} of {self.name} {what}, so these would be trained twice; give every reader its own "
                f"shard (its number is an argument of shard and of ShardedStream's function), or set stream_readers=1"
            )

    def _begin_epoch(self) -> None:
        readers = range(self.num_readers)
        self._first: list[list[int]] = [[] for _ in readers]
        self._sums: dict[int, tuple[int, ...]] = dict.fromkeys(readers, (0, 0))
        self._seen: dict[int, int] = {}
        self._num_sampled = self._num_shared = 0


class Announced(NamedTuple):
    """A sequence as announced to all ranks; row_hash, columns and blocks as in `ReadSequence`."""

    num_tokens: int
    has_label: bool
    row_hash: int | None
    columns: str
    # its images and videos, and the number of bytes of each one's packed file
    media: tuple[tuple[Medium, int], ...] = ()
    blocks: Blocks = ()


class EpochEnds(NamedTuple):
    """The end of a reader's epoch."""


class EpochOver(NamedTuple):
    """The end of all readers' epoch, after its last batch."""


class Fails(NamedTuple):
    """The error with which a reader ends."""

    text: str


Item = Announced | EpochEnds | Fails


@dataclass(frozen=True, slots=True)
class ComposedBatch:
    """The sequences of one step over all ranks."""

    # (reader, number of the reader's item) of every sequence
    members: tuple[tuple[int, int], ...]
    lengths: tuple[int, ...]
    # items of each reader that are used up after this batch
    taken: tuple[int, ...]
    # reader of the next sequence
    turn: int
    # labels have weights
    is_weighted: bool
    # images of every sequence, and its blocks
    media: tuple[tuple[tuple[Medium, int], ...], ...] = ()
    blocks: tuple[Blocks, ...] = ()


class BatchComposer:
    """Makes batches from announced items, from a place on.

    taken: number of used items of each reader, including the incomplete batch.
    """

    def __init__(self, rules: StreamRules, start: Place) -> None:
        count = len(start.readers)
        self.rules, self.num_readers, self.turn = rules, count, start.turn
        self.epoch = start.epoch
        self.has_ended = [cursor.epoch > start.epoch for cursor in start.readers]
        self.taken = [0] * count
        self.known: list[deque[Item]] = [deque() for _ in range(count)]
        self.shared = SharedRows(rules.name, count)
        self._failure: ValueError | None = None
        self._members: list[tuple[int, int]] = []
        self._items: list[Announced] = []
        self._columns: tuple[int, str] | None = None
        self._num_tokens = self._num_sequences = 0
        self._has_label = self._is_whole = self._is_empty = self._is_over = False
        self._begin_epoch(is_whole=not any(self.has_ended) and all(cursor.is_begin for cursor in start.readers))

    def announce(self, reader: int, items: Sequence[Item]) -> None:
        """Adds further items of a reader."""
        self.known[reader].extend(items)

    def lacks(self, reader: int) -> bool:
        """Whether a reader must announce more before its epoch can continue."""
        return not self.has_ended[reader] and not self.known[reader]

    def next_batch(self) -> ComposedBatch | EpochOver | None:
        """Returns the next batch, or the end of the epoch; None until more is announced.

        Raises ValueError, at every call, where a reader has failed, and for an epoch that cannot be trained on.
        """
        if self._failure is not None:
            raise self._failure
        try:
            return self._next_batch()
        except ValueError as error:
            self._failure = error
            raise

    def _next_batch(self) -> ComposedBatch | EpochOver | None:
        while True:
            reader = self.turn
            if self._is_over:
                self._is_over = False
                return EpochOver()
            if all(self.has_ended):
                if (last := self._end_epoch()) is not None:
                    return last
            elif self.has_ended[reader]:
                self.turn = (reader + 1) % self.num_readers
            elif not self.known[reader]:
                return None
            else:
                item = self.known[reader][0]
                if isinstance(item, Fails):
                    raise ValueError(item.text)
                self.known[reader].popleft()
                self.taken[reader] += 1
                self.turn = (reader + 1) % self.num_readers
                if isinstance(item, EpochEnds):
                    self.has_ended[reader] = True
                elif self._is_full_with(reader, item):
                    return self._close()

    def _is_full_with(self, reader: int, item: Announced) -> bool:
        """Puts a sequence into the batch; returns whether that completes it."""
        rules = self.rules
        self._members.append((reader, self.taken[reader] - 1))
        self._items.append(item)
        self._num_tokens += item.num_tokens
        self._num_sequences += 1
        self._has_label = self._has_label or item.has_label
        self._compare_columns(reader, item.columns)
        if item.row_hash is not None:
            self.shared.add(reader, item.row_hash)
        if rules.tokens_per_step is not None:
            return self._num_tokens >= rules.tokens_per_step
        return len(self._members) == rules.sequences_per_step

    def _compare_columns(self, reader: int, columns: str) -> None:
        """Raises ValueError if rows of one reader have weights or labels and those of another have none."""
        first, known = self._columns or (reader, columns)
        self._columns = first, known
        if columns != known:
            shown = [f"reader {number}: {found or 'none'}" for number, found in ((first, known), (reader, columns))]
            raise ValueError(
                f"{self.rules.name} has columns beside input_ids that differ between shards ({'; '.join(shown)}); give all "
                f"files the same columns"
            )

    def _close(self) -> ComposedBatch:
        is_weighted = self._columns is not None and LOSS_WEIGHTS in self._columns[1]
        lengths, media, blocks = (
            tuple(each) for each in zip(*((i.num_tokens, i.media, i.blocks) for i in self._items), strict=True)
        )
        batch = ComposedBatch(tuple(self._members), lengths, tuple(self.taken), self.turn, is_weighted, media, blocks)
        self._members, self._items, self._num_tokens, self._is_empty = [], [], 0, False
        return batch

    def _end_epoch(self) -> ComposedBatch | None:
        """Moves to the next epoch; returns the last batch of this one if it is incomplete and not dropped."""
        rules, is_left, is_empty, num_sequences = self.rules, bool(self._members), self._is_empty, self._num_sequences
        if self._is_whole and not self._has_label:
            raise ValueError(
                f"{rules.name} has no token with a label that counts, so there is nothing to learn from it; check its labels "
                f"({LABELS_THAT_COUNT})"
            )
        self.shared.end_epoch(self.epoch)
        self.turn = 0
        last = self._close() if is_left and not rules.drop_last else None
        if last is None and is_empty:
            raise ValueError(
                f"dataloader_drop_last leaves no step: {num_sequences} sequences of {rules.name} are fewer than one step of "
                f"{rules.sequences_per_step}; set it to False or lower per_device_train_batch_size"
            )
        self.epoch += 1
        self._is_over = True
        self.has_ended = [False] * self.num_readers
        self._begin_epoch(is_whole=True)
        return last

    def _begin_epoch(self, is_whole: bool) -> None:
        self._members, self._items, self._columns = [], [], None
        self._num_tokens, self._num_sequences, self._has_label = 0, 0, False
        self._is_whole = self._is_empty = is_whole
