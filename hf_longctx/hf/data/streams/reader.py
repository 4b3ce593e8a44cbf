"""Reads the sequences of one reader ahead of training, in a thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from hf_longctx.hf.data.collator import TokenSequence
from hf_longctx.hf.data.streams.composer import Announced, EpochEnds, Fails, Item
from hf_longctx.hf.data.streams.rows import EndOfEpoch, ReadSequence, SequenceReader


class AheadReader:
    """Items of one reader, numbered from 0: sequences, ends of epochs, and at last an error, if reading fails.

    has_room: says, given the number of items, of tokens and of ends of epochs that were read, whether one more may be read. It is
    asked in the thread and must not wait; call `look` when its answer may have changed. `cursor`: the place after the items that
    were taken.
    """

    def __init__(self, sequences: SequenceReader, has_room: Callable[[int, int, int], bool]) -> None:
        self.sequences, self.cursor = sequences, sequences.start
        self.error: Exception | None = None
        self.num_read = self.num_tokens = self.num_ends = 0
        self._has_room, self._is_stopped = has_room, False
        self._items: deque[ReadSequence | EndOfEpoch] = deque()
        self._num_taken = 0
        self._news: list[Item] = []
        self._changed = threading.Condition()
        # a daemon thread, because a source that hangs must not keep the process alive
        threading.Thread(target=self._read, name="longctx-stream", daemon=True).start()

    def news(self) -> list[Item]:
        """The items that were read since the last call, as they are announced."""
        with self._changed:
            found, self._news = self._news, []
        return found

    def look(self) -> None:
        """Lets the thread ask again whether it may read on."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, has_enough: Callable[[AheadReader], bool], timeout_s: float) -> bool:
        """Waits until enough was read, or reading has failed; returns whether that came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self.error is not None or has_enough(self), timeout_s)

    def take(self, until: int, wanted: set[int]) -> dict[int, TokenSequence]:
        """Forgets the items below number `until` and puts the cursor behind them; returns the sequences of the wanted numbers."""
        found = {}
        with self._changed:
            while self._num_taken < until:
                item = self._items.popleft()
                self.cursor = item.after
                if self._num_taken in wanted:
                    assert isinstance(item, ReadSequence)
                    found[self._num_taken] = item.tokens
                self._num_taken += 1
        return found

    def stop(self) -> None:
        """Ends the thread, unless its source hangs."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def _read(self) -> None:
        try:
            items = iter(self.sequences)
            while True:
                with self._changed:
                    self._changed.wait_for(self._may_read)
                    if self._is_stopped:
                        return
                item = next(items)
                with self._changed:
                    self._keep(item)
        except Exception as error:
            with self._changed:
                self.error = error
                self._news.append(Fails(str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"))
                self._changed.notify_all()

    def _may_read(self) -> bool:
        return self._is_stopped or self._has_room(self.num_read, self.num_tokens, self.num_ends)

    def _keep(self, item: ReadSequence | EndOfEpoch) -> None:
        self._items.append(item)
        self.num_read += 1
        if isinstance(item, EndOfEpoch):
            self.num_ends += 1
            self._news.append(EpochEnds())
        else:
            num_tokens = len(item.tokens.input_ids)
            self.num_tokens += num_tokens
            self._news.append(Announced(num_tokens, item.tokens.has_label, item.row_hash, item.columns))
        self._changed.notify_all()
