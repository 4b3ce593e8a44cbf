"""Place of a run in a stream: which sequence every reader gives next, and whose turn it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Anchor:
    """State of a reader's dataset after `row` rows of epoch `epoch`, so that reading can begin there.

    digest: the hash up to that row. state: the text that `states.take_state` made.
    """

    epoch: int
    row: int
    digest: str
    state: str


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position of one reader: its next sequence is piece `piece` of row `row` of epoch `epoch`.

    `digest` is a hash of the rows before it, from the beginning of the epoch, or from the anchor on.
    """

    epoch: int = 0
    row: int = 0
    piece: int = 0
    digest: str = ""
    anchor: Anchor | None = None

    @property
    def is_begin(self) -> bool:
        """Whether nothing of the epoch has been used."""
        return not self.row and not self.piece


@dataclass(frozen=True, slots=True)
class Place:
    """Position of all readers between two global batches; reader `turn` gives the next sequence, unless its epoch is over.

    A reader whose epoch is over, while others still have rows of theirs, is at the beginning of the next one. `epochs_ended`:
    epochs whose end the training has seen. `batches`: global batches that it has used of the epoch after these.
    """

    turn: int
    readers: tuple[Cursor, ...]
    epochs_ended: int = 0
    batches: int = 0

    @classmethod
    def begin(cls, num_readers: int, epoch: int = 0) -> Place:
        """The beginning of an epoch."""
        return cls(0, (Cursor(epoch),) * num_readers, epoch)

    @property
    def epoch(self) -> int:
        """The epoch of the next global batch."""
        return min(cursor.epoch for cursor in self.readers)

    def to_json(self) -> dict[str, Any]:
        """The place as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Any) -> Place:
        """The place that `to_json` described; raises ValueError for anything else."""
        try:
            # records of a single reader were a cursor alone
            listed = found.get("readers", [found])
            cursors = tuple(_cursor(each) for each in listed)
            # older records count neither epochs nor batches
            ended = found.get("epochs_ended", min((cursor.epoch for cursor in cursors), default=0))
            place = cls(found.get("turn", 0), cursors, ended, found.get("batches", 0))
        except (TypeError, KeyError, AttributeError):
            raise ValueError(f"no place in a stream, but {found!r:.80}") from None
        numbers = list(_numbers(place))
        texts = [text for cursor in place.readers for text in _texts(cursor)]
        is_whole = all(type(number) is int and number >= 0 for number in numbers)
        if not is_whole or not all(isinstance(text, str) for text in texts) or place.turn >= len(place.readers):
            raise ValueError(f"no place in a stream, but {found!r:.80}")
        return place


def _cursor(found: dict[str, Any]) -> Cursor:
    anchor = found.get("anchor")
    return Cursor(**{**found, "anchor": None if anchor is None else Anchor(**anchor)})


def _numbers(place: Place) -> Iterator[Any]:
    yield from (place.turn, place.epochs_ended, place.batches)
    for cursor in place.readers:
        yield from (cursor.epoch, cursor.row, cursor.piece)
        if cursor.anchor is not None:
            yield from (cursor.anchor.epoch, cursor.anchor.row)


def _texts(cursor: Cursor) -> Iterator[Any]:
    yield cursor.digest
    if cursor.anchor is not None:
        yield from (cursor.anchor.digest, cursor.anchor.state)
