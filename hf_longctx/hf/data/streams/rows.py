"""Makes the sequences of one reader from its rows: checks and cuts rows, and keeps the place for a resumed run.

A resumed run reads the epoch's rows before the cursor again, or those since the last state of the dataset (`Anchor`), drops them,
and compares their hash with that of the first run.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader

from hf_longctx.hf.checkpoints.values import Unwritable
from hf_longctx.hf.data.collator import TokenSequence, shift
from hf_longctx.hf.data.fields import MEDIA, MEDIA_FILES, token_types_problem, unread_columns
from hf_longctx.hf.data.labels import LOSS_WEIGHTS
from hf_longctx.hf.data.media.images import MediaFile
from hf_longctx.hf.data.media.rows import MediaReader, Medium
from hf_longctx.hf.data.resume import Anchor, Cursor
from hf_longctx.hf.data.sampler import IntArray, SequenceIndex
from hf_longctx.hf.data.scan import RowTokens, images_too_long, listed_in_rows, row_tokens, too_long
from hf_longctx.hf.data.streams.sources import begin_epoch, keeps_state, load_state, take_state
from hf_longctx.hf.models.facts import TokenTypes
from hf_longctx.plan.core.types import Blocks
from hf_longctx.plan.model.towers import TowerSpec

logger = logging.getLogger(__name__)

# rows between saved states of a dataset: a resumed run reads at most this many again
ROWS_PER_STATE = 256
# first rows of an epoch in which workers that read the same rows are detected
_WORKER_ROWS = 256
# name of a single reader in messages
ONLY_READER = "the stream"


@dataclass(frozen=True, slots=True)
class StreamMedia:
    """Ways in which a run reads images and videos in rows of a stream."""

    # why the run reads none; empty if it does
    problem: str = "rows have images, which this run does not read; remove such rows"
    reader: MediaReader | None = None
    # tower whose seconds and bytes plans count
    tower: TowerSpec = field(default_factory=TowerSpec)
    # whether images see themselves both ways
    has_blocks: bool = False
    # whether weights are sharded, see `LongContextCollator`
    reaches_all: bool = False


@dataclass(frozen=True, slots=True)
class StreamRules:
    """Rules by which rows become sequences, and sequences global batches. Equal rules and rows give equal batches.

    A sequence has at most `max_length` tokens, by a setting, and at most `room_tokens`, by memory.
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
    # token ids that no row may have, since they stand for padding, images, sound or video
    placeholders: tuple[int, ...] = ()
    # when a model without types of tokens computes the same
    token_types: TokenTypes = "always"
    # applies the user's collator to one row; None if rows stay as they are
    collate: Callable[[Any], Any] | None = None
    # length of the stream, from which the trainer computes steps per epoch; None if unknown
    num_rows: int | None = None
    media: StreamMedia = field(default_factory=StreamMedia)


@dataclass(frozen=True, slots=True)
class ReadSequence:
    """A sequence, the reader's cursor after it, and facts about its row for other ranks."""

    tokens: TokenSequence
    after: Cursor
    # hash of the row for its first sequence; None for further ones
    row_hash: int | None
    # the row's columns that change what is learnt
    columns: str
    # images and videos of the row, and the `PackedFile` of each
    media: tuple[Medium, ...] = ()
    files: tuple[bytes, ...] = ()
    # ranges of tokens that see each other both ways
    blocks: Blocks = ()


@dataclass(frozen=True, slots=True)
class PackedFile:
    """An item of `media_files` on its way to the ranks that open it. where: name of the row in messages."""

    where: str
    item: Mapping[str, Any]

    def pack(self) -> bytes:
        """Returns bytes from which another rank of the run makes an equal one."""
        return pickle.dumps((self.where, self.item), pickle.HIGHEST_PROTOCOL)

    @classmethod
    def unpack(cls, packed: bytes) -> PackedFile:
        """Reads the result of `pack`."""
        return cls(*pickle.loads(packed))


@dataclass(frozen=True, slots=True)
class EndOfEpoch:
    """End of a reader's rows in one epoch. after: its cursor in the next one."""

    after: Cursor


class SequenceReader:
    """Iterates endlessly over the sequences of one reader from a cursor on, with an `EndOfEpoch` after each epoch.

    make: returns the reader's dataset. origin: name of the reader in messages. epoch, num_rows: progress. Raises ValueError for a
    row that cannot be trained on and for a dataset that fails, naming the row's number; for an epoch without rows; and if the
    rows before the cursor are not those of the run that wrote it.
    """

    def __init__(self, make: Callable[[], Any], rules: StreamRules, start: Cursor, origin: str = ONLY_READER) -> None:
        self.make, self.rules, self.start, self.origin = make, rules, start, origin
        anchor = start.anchor
        self.epoch, self.num_rows = (start.epoch, 0) if anchor is None else (anchor.epoch, anchor.row)
        self._anchor: Anchor | None = anchor
        self._pending: Anchor | None = None
        # first row after which the next state is taken
        self._state_row = 0 if anchor is None else anchor.row - 1 + ROWS_PER_STATE
        self._hashed = xxhash.xxh3_128(b"" if anchor is None else anchor.digest.encode())
        self._has_states = self._has_told_cuts = self._has_told_padding = False
        self._columns: list[str] | None = None
        # hashes of the first rows of a loader with workers, until they are checked
        self._worker_rows: list[int] | None = []

    def __iter__(self) -> Iterator[ReadSequence | EndOfEpoch]:
        stream, start = self._made(), self.start
        self._has_states = keeps_state(stream)
        if start.anchor is None and start.row:
            logger.warning(
                "%s: reading and dropping %d rows of epoch %d of %s before the cursor",
                *(self.rules.name, start.row, start.epoch, self.origin),
            )
        is_first = True
        while True:
            begin_epoch(stream, self.epoch, is_first)
            if is_first and start.anchor is not None:
                load_state(stream, start.anchor.state)
            is_first = False
            for tokens, is_item in self._rows(stream):
                yield from self._row(stream, tokens, is_item)
                self.num_rows += 1
            after = self._end_epoch()
            if after.epoch > start.epoch:
                yield EndOfEpoch(after)

    def _made(self) -> Any:
        try:
            return self.make()
        except ValueError as error:
            raise ValueError(f"{self.rules.name}: {error}") from error
        except Exception as error:
            raise ValueError(f"{self.rules.name} could not be opened for {self.origin}: {_said(error)}") from error

    def _row(self, stream: Any, tokens: RowTokens, is_item: bool) -> Iterator[ReadSequence]:
        """Yields the sequences of one row from the cursor on."""
        start, place = self.start, (self.epoch, self.num_rows)
        is_start = place == (start.epoch, start.row)
        if is_start and not start.piece:
            self._compare()
        if self._pending is not None:
            # not earlier, so that a run that continues from this state has at least one row to compare
            self._anchor, self._hashed, self._pending = self._pending, xxhash.xxh3_128(self._pending.digest.encode()), None
        row_hash = self._add(tokens)
        self._watch_workers(stream, row_hash)
        if is_start and start.piece:
            self._compare()
        digest = self._hashed.hexdigest()
        if self._has_states and is_item and self.num_rows >= self._state_row:
            self._state_row = self.num_rows + ROWS_PER_STATE
            self._pending = self._state_after_row(stream, digest)
        num_features = sum(item["num_features"] for item in tokens.media)
        cuts = self._cuts(np.array([len(tokens.input_ids)]), tokens.documents, num_features)
        if len(cuts) > 1 and self.rules.num_rows is not None:
            raise ValueError(
                f"{self.rules.name} has a length of {self.rules.num_rows} rows, by which the steps of an epoch are counted, but "
                f"row {self.num_rows} of epoch {self.epoch}{self._by()} has {len(cuts)} documents; remove its __len__ and set "
                f"max_steps, or give one document per row"
            )
        for piece, cut in enumerate(cuts):
            if (*place, piece) >= (start.epoch, start.row, start.piece):
                then = (self.num_rows + 1, 0) if piece + 1 == len(cuts) else (self.num_rows, piece + 1)
                after = Cursor(self.epoch, *then, digest, self._anchor)
                weights = None if tokens.loss_weights is None else shift(torch.tensor(tokens.loss_weights[cut]), last=0)
                sequence = TokenSequence(
                    torch.tensor(tokens.input_ids[cut]), shift(torch.tensor(tokens.labels[cut])), loss_weights=weights
                )
                # a row with images is one sequence
                files = tuple(PackedFile(self._place, item).pack() for item in tokens.files)
                blocks = tokens.blocks.tolist() if self.rules.media.has_blocks and tokens.blocks is not None else ()
                of_media = tuple(map(Medium.of, tokens.media)), files, tuple((begin, end) for begin, end in blocks)
                yield ReadSequence(sequence, after, None if piece else row_hash, self._kinds, *of_media)

    @property
    def _place(self) -> str:
        """Name of the present row in messages."""
        return f"{self.rules.name} row {self.num_rows} of epoch {self.epoch} of {self.origin}"

    def _state_after_row(self, stream: Any, digest: str) -> Anchor | None:
        """Takes the state of the dataset. If it cannot be saved, warns and returns None, and no later one is taken."""
        try:
            return Anchor(self.epoch, self.num_rows + 1, digest, take_state(stream))
        except Unwritable as error:
            self._has_states = False
            logger.warning("%s, row %d of epoch %d%s: %s", self.rules.name, self.num_rows, self.epoch, self._by(), error)
            return None

    @property
    def _kinds(self) -> str:
        """Returns the columns that decide what is learnt from a row."""
        return ", ".join(column for column in ("labels", LOSS_WEIGHTS) if column in (self._columns or ()))

    def _end_epoch(self) -> Cursor:
        """Checks the rows of an epoch and moves to the next one; returns the cursor there."""
        rules, start, epoch, num_rows = self.rules, self.start, self.epoch, self.num_rows
        if not num_rows:
            again = "" if not epoch else f" in epoch {epoch}: every iteration must start anew, which a generator cannot do"
            raise ValueError(f"{rules.name} gave no rows{again}{self._by()}; check its source, split and filters")
        if epoch == start.epoch and num_rows < start.row + (start.piece > 0):
            raise ValueError(
                f"{rules.name} ended after {num_rows} rows of epoch {epoch}{self._by()}, but the checkpoint stopped at row "
                f"{start.row}; resume with the same stream"
            )
        if (epoch, num_rows) == (start.epoch, start.row):
            self._compare()
        self._check_workers()
        if self._anchor is None:
            # a run that begins with the next epoch has no hashes of this one
            self._hashed, self._pending = xxhash.xxh3_128(), None
        self.epoch, self.num_rows, self._state_row = epoch + 1, 0, 0
        return Cursor(epoch + 1) if self._anchor is None else Cursor(epoch + 1, 0, 0, self._hashed.hexdigest(), self._anchor)

    def _rows(self, stream: Any) -> Iterator[tuple[RowTokens, bool]]:
        """Checks the rows of an epoch and yields their tokens, and whether a row ends an item of the dataset."""
        rules, place = self.rules, f"of epoch {self.epoch} of {self.origin}"
        try:
            items = iter(stream)
            while True:
                try:
                    item = next(items)
                except StopIteration:
                    return
                rows = item if isinstance(item, list) and item and all(isinstance(row, Mapping) for row in item) else [item]
                for number, given in enumerate(rows, start=1):
                    row = given if rules.collate is None else rules.collate(given)
                    if self._columns is None and isinstance(row, Mapping):
                        self._columns = sorted(row)
                        if unread := unread_columns(self._columns):
                            logger.warning("%s: columns not read: %s", rules.name, ", ".join(unread))
                        if problem := listed_in_rows([row], rules.name):
                            raise ValueError(problem)
                    if problem := token_types_problem([row], rules.name, rules.token_types):
                        raise ValueError(problem)
                    if rules.media.problem and isinstance(row, Mapping) and row.get(MEDIA):
                        raise ValueError(rules.media.problem)
                    tokens = row_tokens(row, self._columns or (), self.num_rows, rules.name, rules.vocab_size, rules.placeholders)
                    _check_files(tokens)
                    self._log_padding(tokens)
                    yield tokens, number == len(rows)
        except ValueError as error:
            raise ValueError(f"{error} (row {self.num_rows} {place})") from error
        except Exception as error:
            raise ValueError(f"{rules.name} failed at row {self.num_rows} {place}: {_said(error)}") from error

    def _log_padding(self, tokens: RowTokens) -> None:
        if tokens.num_padding and not self._has_told_padding:
            self._has_told_padding = True
            logger.warning(
                "%s: %d tokens of padding of row %d are left out, as attention_mask says, and so is that of all later rows",
                *(self.rules.name, tokens.num_padding, self.num_rows),
            )

    def _cuts(self, row_length: IntArray, documents: IntArray | None, num_features: int) -> list[slice]:
        """Cuts a row of `row_length` [1] tokens into sequences, by the rule of map-style datasets.

        num_features: tokens for images and videos; a row with some is not cut.
        """
        rules, lengths, row = self.rules, row_length if documents is None else documents, self.num_rows
        room, num_tokens = rules.room_tokens, int(lengths.max())
        if num_features and num_tokens > (limit := min(rules.max_length, room)):
            raise ValueError(images_too_long(self._place, num_tokens, num_features, limit))
        if rules.long_sequences == "error":
            numbers = np.full(len(lengths), row)
            for problem in too_long(lengths, rules.max_length, room, rules.tokens_per_rank, rules.name, numbers):
                raise ValueError(f"{problem} (epoch {self.epoch} of {self.origin})")
        limit = min(rules.max_length, room)
        if num_tokens > limit and not self._has_told_cuts:
            self._has_told_cuts = True
            what = "truncated" if rules.long_sequences == "truncate" else "split"
            logger.warning(
                "%s: row %d has %d tokens and is %s at %d, as all later long rows are", rules.name, row, num_tokens, what, limit
            )
        index = SequenceIndex.build(row_length, limit, rules.long_sequences, documents)
        return [slice(int(start), int(stop)) for start, stop in zip(index.starts, index.stops, strict=True)]

    def _add(self, tokens: RowTokens) -> int:
        """Adds a row to the hash of all rows; returns the hash of this row alone."""
        own = xxhash.xxh3_64()
        for hashed in (self._hashed, own):
            # with the length, so that the same tokens in other rows have another hash
            hashed.update(np.int64(len(tokens.input_ids)).tobytes() + tokens.input_ids.tobytes() + tokens.labels.tobytes())
            if tokens.loss_weights is not None:
                hashed.update(tokens.loss_weights.tobytes())
            if tokens.documents is not None:
                hashed.update(tokens.documents.tobytes())
            for part in _file_parts(tokens.files):
                hashed.update(len(part).to_bytes(8, "little") + part)
        return own.intdigest()

    def _watch_workers(self, stream: Any, row_hash: int) -> None:
        if self._worker_rows is not None and isinstance(stream, DataLoader) and stream.num_workers > 1:
            self._worker_rows.append(row_hash)
            if len(self._worker_rows) == _WORKER_ROWS:
                self._check_workers()

    def _check_workers(self) -> None:
        """Raises ValueError if each of the first rows came at least twice, as from workers that read the same rows."""
        found, self._worker_rows = self._worker_rows or [], None
        if len(found) > 3 and 1 < len(set(found)) <= len(found) // 2 + 1:
            raise ValueError(
                f"the workers of the loader of {self.origin} read the same rows ({len(set(found))} different ones among the "
                f"first {len(found)}); let each read its part (torch.utils.data.get_worker_info), or set num_workers to 0"
            )

    def _compare(self) -> None:
        start = self.start
        if start.digest and self._hashed.hexdigest() != start.digest:
            raise ValueError(
                f"the rows of {self.rules.name} before row {start.row} of epoch {start.epoch}{self._by()} are not those of the "
                f"run that is resumed; give the stream a fixed order (a seed for every shuffle), or set ignore_data_skip=True to "
                f"start it from its beginning"
            )

    def _by(self) -> str:
        return "" if self.origin == ONLY_READER else f" of {self.origin}"


def _check_files(tokens: RowTokens) -> None:
    """Raises ValueError unless a row has a file for each of its images and videos."""
    are_files = isinstance(tokens.files, list | tuple) and len(tokens.files) == len(tokens.media)
    if not are_files or not all(map(_is_file, tokens.files)):
        raise ValueError(
            f"column {MEDIA_FILES!r} holds {tokens.files!r:.60} beside {len(tokens.media)} images and videos in {MEDIA!r}; give "
            f"both columns as tokenise_chat writes them with a processor"
        )


def _is_file(item: Any) -> bool:
    """Whether a value has the form of an item of `media_files`."""
    if not isinstance(item, Mapping):
        return False
    is_right = isinstance(item.get("path"), str | None) and isinstance(item.get("bytes"), bytes | None)
    return is_right and all(map(_is_file, item.get("frames") or ()))


def _file_parts(files: Sequence[Any]) -> Iterator[bytes]:
    """Yields contents of files or their names, by which they differ; a resumed run may find them in another folder."""
    for item in files:
        own = MediaFile.of("video", item)
        for each in (own, *own.frames):
            yield each.content if each.content is not None else Path(each.path or "").name.encode()


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
