"""Global batches of a stream in one process, read as the trainer's readers read them but without threads or look-ahead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hf_longctx.hf.data.collator import TokenSequence
from hf_longctx.hf.data.resume import Place
from hf_longctx.hf.data.streams.composer import Announced, BatchComposer, EpochEnds, EpochOver
from hf_longctx.hf.data.streams.planned_stream import StreamSource
from hf_longctx.hf.data.streams.rows import EndOfEpoch, StreamRules
from hf_longctx.runtime.core.loss import IGNORE_INDEX


@dataclass(frozen=True)
class ReadBatch:
    """The sequences of one step, the readers that gave them, and the place after them."""

    sequences: tuple[TokenSequence, ...]
    readers: tuple[int, ...]
    after: Place


def read_batches(stream: Any, rules: StreamRules, start: Place) -> Iterator[ReadBatch]:
    """Yields global batches from a place on."""
    source = StreamSource(stream, rules, len(start.readers), lookahead=1)
    readers = [iter(source.sequences(reader, cursor, 1)) for reader, cursor in enumerate(start.readers)]
    composer, cursors = BatchComposer(rules, start), list(start.readers)
    items: list[list[Any]] = [[] for _ in readers]
    while True:
        while (batch := composer.next_batch()) is None or isinstance(batch, EpochOver):
            if batch is not None:
                continue
            reader = composer.turn
            item = next(readers[reader])
            items[reader].append(item)
            composer.announce(reader, [_announced(item)])
        for reader, count in enumerate(batch.taken):
            if count:
                cursors[reader] = items[reader][count - 1].after
        sequences = tuple(items[reader][number].tokens for reader, number in batch.members)
        yield ReadBatch(sequences, tuple(reader for reader, _ in batch.members), Place(batch.turn, tuple(cursors)))


def _announced(item: Any) -> Any:
    if isinstance(item, EndOfEpoch):
        return EpochEnds()
    has_label = bool((item.tokens.shift_labels != IGNORE_INDEX).any())
    return Announced(len(item.tokens.input_ids), has_label, item.row_hash, item.columns)
