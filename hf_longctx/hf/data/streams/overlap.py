"""Finds readers that read the same rows, which would then be trained once per reader.

A stream whose `shard` does nothing, and a loader that every reader makes alike, look right: losses fall, and only the epoch is
too long. So ranks compare hashes of rows.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

# rows from the begin of an epoch that are not the same for two readers unless both read the same
_FIRST_ROWS = 64
# one row in so many is followed through the epoch, chosen by its hash, so that all readers choose the same; and at most so many
_SAMPLED, _MOST_SAMPLES = 64, 200_000
# fewest followed rows that say something, and the share of them that may be read twice, since texts come twice in many corpora
_FEWEST_SAMPLES, _USUAL_SHARE = 32, 0.125


class SharedRows:
    """Compares the rows of all readers in one epoch. Every rank that adds the same hashes comes to the same result."""

    def __init__(self, name: str, num_readers: int) -> None:
        self.name, self.num_readers = name, num_readers
        self._has_warned = False
        self._begin_epoch()

    def add(self, reader: int, row_hash: int) -> None:
        """Adds a row; raises ValueError if the first rows of its reader are those of another one."""
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
        """Ends an epoch; raises ValueError if two readers had the same rows, in whatever order, and warns if they share many."""
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
        # rows that are all alike say nothing
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
