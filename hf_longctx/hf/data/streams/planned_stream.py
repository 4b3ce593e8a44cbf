"""Plans and distributes the batches of a stream: the dataset of the trainer's loader.

Reader r of n runs on rank r * ranks // n, so that readers are spread over nodes, and reads ahead of training in a thread. Between
two steps all ranks exchange the lengths that their readers have read since; each composes the same next batch, and rank 0 plans
it while the current step runs. Tokens of a planned batch are then sent from the ranks that have read them to the ranks that need
them, one message per pair; sizes follow from the plan. One iteration is one epoch, as with any dataset. No reader begins an epoch
before the training does, so callbacks between two epochs can change the stream.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from hf_longctx.hf.data.collator import ChangedRow, LongContextCollator, PlannedStep, TokenSequence, held_pieces
from hf_longctx.hf.data.media.rows import MediaReader, Medium, SequenceMedia, positions_alone, sequence_media, tower_work
from hf_longctx.hf.data.resume import Cursor, Place
from hf_longctx.hf.data.streams.composer import Announced, BatchComposer, ComposedBatch, EpochEnds, EpochOver, Fails, Item
from hf_longctx.hf.data.streams.rows import ONLY_READER, EndOfEpoch, PackedFile, ReadSequence, SequenceReader, StreamRules
from hf_longctx.hf.data.streams.sources import reader_stream
from hf_longctx.hf.planning.source import Lengths, PlanSource
from hf_longctx.hf.ranks.agreement import gather_objects
from hf_longctx.plan.core.sharding import rank_pieces
from hf_longctx.plan.core.types import StepPlan, StepSequences


@dataclass(frozen=True, slots=True)
class HeldTokens:
    """Tokens [begin, end) of a plan's sequence on one rank."""

    sequence: int
    begin: int
    end: int


def tokens_of_positions(plan: StepPlan) -> dict[int, list[HeldTokens]]:
    """Returns the tokens of the ranks at each position, in message order. All stages have the same tokens."""
    found: dict[int, list[HeldTokens]] = {}
    for micro_batch in plan.micro_batches:
        for group in micro_batch.groups:
            for chunk in group.chunks:
                for position, pieces in zip(group.positions, rank_pieces(chunk, group.shape), strict=True):
                    held = found.setdefault(position, [])
                    for piece in pieces:
                        # further documents are dummy tokens
                        if piece.document < len(chunk.spans):
                            span = chunk.spans[piece.document]
                            held.append(HeldTokens(span.sequence, span.start + piece.start, span.start + piece.stop))
    return found


def exchange_tokens(
    plan: StepPlan,
    readers: Sequence[int],
    read: Mapping[int, ReadSequence],
    is_weighted: bool,
    rank: int,
    control: dist.ProcessGroup | None,
    media: Sequence[Sequence[tuple[Medium, int]]] = (),
) -> tuple[dict[int, TokenSequence], dict[tuple[int, int], PackedFile]]:
    """Returns the token range that this rank needs of each of its sequences in a plan, and files of its images. Collective.

    readers: the rank that has read each sequence. read: the whole sequences that this rank has read. media: for every sequence
    its images and the bytes of their packed files; () without any. In a range that another rank has read, tokens between those
    of this rank are zeros. A sequence with images comes whole, since its positions depend on all of its tokens. The key of a file
    is the numbers of its sequence and of the image in it; ranks get those of which they run towers.
    """
    held = tokens_of_positions(plan)
    wanted_files = _files_of_ranks(plan, held, media)
    whole = {number for number, each in enumerate(media) if each}
    held = {position: _with_whole(pieces, whole, plan.lengths) for position, pieces in held.items()}
    own = held.get(plan.place(rank)[1], [])
    found = _room(own, is_weighted, {number for number in range(len(readers)) if readers[number] == rank})
    incoming: dict[int, Tensor] = {}
    work = []
    for source in sorted({readers[each.sequence] for each in own} - {rank}):
        size = sum(each.end - each.begin for each in own if readers[each.sequence] == source)
        incoming[source] = torch.empty(4 if is_weighted else 2, size, dtype=torch.int32)
        work.append(dist.irecv(incoming[source], source, control))
    files: dict[tuple[int, int], Tensor] = {}
    for sequence, number in wanted_files.get(rank, ()):
        if readers[sequence] != rank:
            files[sequence, number] = torch.empty(media[sequence][number][1], dtype=torch.uint8)
            work.append(dist.irecv(files[sequence, number], readers[sequence], control))
    # this list keeps the tensors alive until they are sent
    outgoing = []
    for target in range(plan.num_ranks):
        wanted = [each for each in held.get(plan.place(target)[1], []) if readers[each.sequence] == rank]
        if wanted and target != rank:
            outgoing.append(torch.cat([_packed(read[each.sequence].tokens, each, is_weighted) for each in wanted], dim=1))
            work.append(dist.isend(outgoing[-1], target, control))
        for sequence, number in wanted_files.get(target, ()) if target != rank else ():
            if readers[sequence] == rank:
                outgoing.append(torch.frombuffer(bytearray(read[sequence].files[number]), dtype=torch.uint8))
                work.append(dist.isend(outgoing[-1], target, control))
    for message in work:
        assert message is not None
        message.wait()
    for source, message_RN in incoming.items():
        parts = [each for each in own if readers[each.sequence] == source]
        for each, piece in zip(parts, message_RN.split([each.end - each.begin for each in parts], dim=1), strict=True):
            _unpack(piece, found[each.sequence], each)
    tokens = {
        number: read[number].tokens if readers[number] == rank else found[number] for number in {each.sequence for each in own}
    }
    packed = {key: each.numpy().tobytes() for key, each in files.items()}
    packed |= {(each, number): read[each].files[number] for each, number in wanted_files.get(rank, ()) if readers[each] == rank}
    return tokens, {key: PackedFile.unpack(each) for key, each in packed.items()}


def _files_of_ranks(
    plan: StepPlan, held: Mapping[int, Sequence[HeldTokens]], media: Sequence[Sequence[tuple[Medium, int]]]
) -> dict[int, list[tuple[int, int]]]:
    """Returns, for every rank that runs towers, the sequence and the number of each image with tokens on it, in message order."""
    if not any(media):
        return {}
    found = {}
    for rank in range(plan.num_ranks):
        stage, position = plan.place(rank)
        if stage == 0:
            found[rank] = sorted(
                {
                    (each.sequence, number)
                    for each in held.get(position, ())
                    for number, (medium, _) in enumerate(media[each.sequence])
                    if medium.start < each.end and each.begin < medium.stop
                }
            )
    return found


def _with_whole(pieces: Sequence[HeldTokens], whole: set[int], lengths: Sequence[int]) -> list[HeldTokens]:
    """Returns the pieces of a rank with one for all tokens in place of those of each sequence in `whole`."""
    asked = sorted({each.sequence for each in pieces} & whole)
    return [each for each in pieces if each.sequence not in whole] + [HeldTokens(each, 0, lengths[each]) for each in asked]


def with_media(
    step: PlannedStep,
    tokens: Mapping[int, TokenSequence],
    files: Mapping[tuple[int, int], PackedFile],
    media: Sequence[Sequence[tuple[Medium, int]]],
    reader: MediaReader,
) -> dict[int, TokenSequence] | ChangedRow:
    """Opens a rank's images of a step; returns its sequences with them, or the problem with one that cannot be opened.

    The other arguments are those and the results of `exchange_tokens`.
    """
    found, held = dict(tokens), held_pieces(step.plan, step.rank)
    has_towers = step.plan.place(step.rank)[0] == 0
    for sequence in [number for number in tokens if number < len(media) and media[number]]:
        whole, own = tokens[sequence], [medium for medium, _ in media[sequence]]
        here = {number: files[each, number] for each, number in files if each == sequence}
        where = next((each.where for each in here.values()), f"sequence {sequence} of the step")
        given = [(medium, here[number].item if number in here else None) for number, medium in enumerate(own)]
        opened: SequenceMedia | None
        try:
            if has_towers:
                opened = sequence_media(whole.input_ids, given, held[sequence], reader, where)
            else:
                opened = positions_alone(whole.input_ids, own, reader)
        except ValueError as error:
            return ChangedRow(str(error))
        found[sequence] = replace(whole, media=opened)
    return found


def _room(own: Sequence[HeldTokens], is_weighted: bool, is_here: set[int]) -> dict[int, TokenSequence]:
    """Allocates zeros for tokens from other ranks."""
    ranges: dict[int, tuple[int, int]] = {}
    for each in own:
        low, high = ranges.get(each.sequence, (each.begin, each.end))
        ranges[each.sequence] = min(low, each.begin), max(high, each.end)
    return {
        number: TokenSequence(
            torch.zeros(high - low, dtype=torch.int64),
            torch.zeros(high - low, dtype=torch.int64),
            low,
            torch.zeros(high - low, dtype=torch.float64) if is_weighted else None,
        )
        for number, (low, high) in ranges.items()
        if number not in is_here
    }


def _packed(sequence: TokenSequence, held: HeldTokens, is_weighted: bool) -> Tensor:
    """Packs token ids and labels into [2, n] in int32; with weights [4, n], whose last rows are their fp64 bits."""
    part = sequence.between(held.begin, held.end)
    packed = torch.stack([part.input_ids, part.shift_labels]).to(torch.int32)
    if not is_weighted:
        return packed
    assert part.loss_weights is not None
    return torch.cat([packed, part.loss_weights.contiguous().view(torch.int32).view(-1, 2).T])


def _unpack(packed: Tensor, sequence: TokenSequence, held: HeldTokens) -> None:
    """Writes the result of `_packed` into a sequence."""
    part = sequence.between(held.begin, held.end)
    part.input_ids.copy_(packed[0])
    part.shift_labels.copy_(packed[1])
    if part.loss_weights is not None:
        part.loss_weights.copy_(packed[2:].T.contiguous().view(torch.float64).view(-1))


class AheadReader:
    """Reads items of one reader in a thread: sequences, ends of epochs and, if reading fails, a last error; numbered from 0.

    has_room: returns, for numbers of items, tokens and ends of epochs already read, whether to read one more. Called in the
    thread, must not wait; call `look` when its result may have changed. cursor: the place after the items that were taken.
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
        """Returns the items read since the last call, for announcing."""
        with self._changed:
            found, self._news = self._news, []
        return found

    def look(self) -> None:
        """Makes the thread call `has_room` again."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, has_enough: Callable[[AheadReader], bool], timeout_s: float) -> bool:
        """Waits until enough was read or reading has failed; returns whether that happened in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self.error is not None or has_enough(self), timeout_s)

    def take(self, until: int, wanted: set[int]) -> dict[int, ReadSequence]:
        """Drops the items below number `until` and moves the cursor after them; returns the wanted sequences."""
        found = {}
        with self._changed:
            while self._num_taken < until:
                item = self._items.popleft()
                self.cursor = item.after
                if self._num_taken in wanted:
                    assert isinstance(item, ReadSequence)
                    found[self._num_taken] = item
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
            media = tuple((medium, len(file)) for medium, file in zip(item.media, item.files, strict=True))
            self._news.append(Announced(num_tokens, item.tokens.has_label, item.row_hash, item.columns, media, item.blocks))
        self._changed.notify_all()


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamSource:
    """A stream, the rules of its sequences, its number of readers, and the global batches that they may read ahead."""

    stream: Any
    rules: StreamRules
    num_readers: int
    lookahead: int

    def rank_of(self, reader: int, num_ranks: int) -> int:
        """Returns the rank of a reader."""
        return reader * num_ranks // self.num_readers

    def origin(self, reader: int, num_ranks: int) -> str:
        """Returns the name of a reader in messages."""
        return ONLY_READER if self.num_readers == 1 else f"reader {reader} on rank {self.rank_of(reader, num_ranks)}"

    def sequences(self, reader: int, start: Cursor, num_ranks: int) -> SequenceReader:
        """Returns the sequences of a reader from a cursor on."""
        origin = self.origin(reader, num_ranks)
        return SequenceReader(partial(reader_stream, self.stream, reader, self.num_readers), self.rules, start, origin)


class PlannedStream(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Dataset whose items are this rank's batches of plans, in the collator's form; an iteration ends with the stream's epoch.

    Collective over the plans' control group: every rank must draw equally often. An iteration after one that was left before the
    end of its epoch begins the next epoch. steps_done: called at the first draw, returns the batches that the run had finished
    before it was resumed. num_skipped: batches of the epoch that the trainer discards for that; they are empty, and nothing is
    read for them. Its length is the stream's.
    """

    def __init__(
        self,
        source: StreamSource,
        start: Place,
        plans: PlanSource,
        steps_done: Callable[[], int] = lambda: 0,
        num_skipped: int = 0,
    ) -> None:
        self.source, self.start, self.plans, self.num_skipped = source, start, plans, num_skipped
        self.epochs_ended, self.batches = start.epochs_ended, start.batches
        self._turn, self._cursors = start.turn, dict[int, Cursor]()
        self._steps_done = steps_done
        # number of the next batch, after the first draw
        self._next: int | None = None
        # whether the last epoch has begun and not ended
        self._is_inside = False
        self._readers: StreamReaders | None = None

    def __len__(self) -> int:
        if self.source.rules.num_rows is None:
            raise TypeError("a stream has no length")
        return self.source.rules.num_rows

    def loader(self, pin_memory: bool) -> DataLoader[Any]:
        """Makes a loader without workers, which accelerate must not shard, since every item is this rank's own."""
        return StreamLoader(self, batch_size=None, collate_fn=_as_it_is, pin_memory=pin_memory)

    def place(self, leaves_epoch: bool = False) -> Place:
        """Returns the place after the last drawn batch, from which a resumed run continues. Collective over the control group.

        leaves_epoch: the training continues with the next epoch.
        """
        if leaves_epoch and self._is_inside:
            return Place.begin(self.source.num_readers, self.epochs_ended + 1)
        known = dict(enumerate(self.start.readers))
        for found in gather_objects(self._cursors, self.plans.pool.control):
            known.update(found)
        return Place(self._turn, tuple(known[reader] for reader in sorted(known)), self.epochs_ended, self.batches)

    def leave_epoch(self) -> None:
        """Makes the next iteration begin the next epoch."""
        self._is_inside, self.num_skipped = True, 0

    def stop(self) -> None:
        """Ends the readers' threads, unless their sources hang. Idempotent."""
        if self._readers is not None:
            self._readers.stop()
            self._readers = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self._is_inside:
            self._begin_next_epoch()
        self._is_inside = True
        num_skipped, self.num_skipped = self.num_skipped, 0
        for _ in range(num_skipped):
            yield {}
        # otherwise the checkpoint was written in the last step of an epoch, before its end
        if self.epochs_ended == self.start.epoch or self._readers is not None:
            yield from self._epoch()
        self._is_inside, self.epochs_ended, self.batches = False, self.epochs_ended + 1, 0

    def _epoch(self) -> Iterator[dict[str, Any]]:
        pool, readers = self.plans.pool, self._readers or StreamReaders(self.source, self.start, self.plans)
        if self._readers is None:
            self._readers = readers
            # for loaders used outside of a training
            weakref.finalize(self, readers.stop)
        if self._next is None:
            self._next = self._steps_done()
        readers.begin_epoch()
        of_media = self.source.rules.media
        try:
            for plan in self.plans.plans(readers.steps(self._next), explore=True):
                batch, read = readers.taken()
                assert plan.lengths == batch.lengths
                owners = [readers.rank_of(reader) for reader, _ in batch.members]
                held, files = exchange_tokens(plan, owners, read, batch.is_weighted, pool.rank, pool.control, batch.media)
                self._turn, self._cursors = batch.turn, readers.cursors()
                self._next, self.batches = self._next + 1, self.batches + 1
                # a stream has no index, so sequences are numbered within their batch
                step = PlannedStep(plan, tuple(range(len(plan.lengths))), pool.rank)
                have_media = np.array([bool(each) for each in batch.media]) if of_media.reaches_all else None
                own = held if of_media.reader is None else with_media(step, held, files, batch.media, of_media.reader)
                yield LongContextCollator(have_media)([(step, own)])
        except Exception:
            self.stop()
            raise
        readers.take_ends()
        self._turn, self._cursors = 0, readers.cursors()

    def _begin_next_epoch(self) -> None:
        """Leaves an epoch before its end, or at its end after the last batch. Collective."""
        if self._readers is None or not self._readers.is_at_end():
            if self.source.rules.num_rows is not None and self.batches >= num_batches(self.source.rules):
                logger.warning(
                    "%s gives more than the %d rows of its length, and the rest of epoch %d is left out, as by Trainer; let "
                    "__len__ return the number of its rows",
                    *(self.source.rules.name, self.source.rules.num_rows, self.epochs_ended),
                )
            self.stop()
            self.start = Place.begin(self.source.num_readers, self.epochs_ended + 1)
            self._turn, self._cursors = 0, {}
        else:
            self._readers.take_ends()
        self.epochs_ended, self.batches = self.epochs_ended + 1, 0


class StreamLoader(DataLoader[Any]):
    """A loader of planned batches, with a length if the stream has one and each row is one sequence."""

    dataset: PlannedStream

    def __len__(self) -> int:
        return num_batches(self.dataset.source.rules)


def num_batches(rules: StreamRules) -> int:
    """Returns the number of batches in an epoch; raises TypeError if the stream has no length."""
    if rules.num_rows is None:
        raise TypeError("a stream has no length")
    whole, rest = divmod(rules.num_rows, rules.sequences_per_step)
    return whole + (rest > 0 and not rules.drop_last)


class StreamReaders:
    """This rank's readers, and the batches composed from all readers' sequences.

    A reader may be ahead of the running step by its share of the sequences of `lookahead` batches. With a token budget, its share
    is that of the batch before.
    """

    def __init__(self, source: StreamSource, start: Place, plans: PlanSource) -> None:
        self.source, self.plans = source, plans
        control = plans.pool.control
        self.num_ranks = 1 if control is None else dist.get_world_size(control)
        self.composer = BatchComposer(source.rules, start)
        # complete batches that were not drawn yet
        self._complete: deque[ComposedBatch] = deque()
        # items of every reader in complete batches
        self._closed: tuple[int, ...] = (0,) * source.num_readers
        # batches that may be read beyond the complete ones, and sequences of a reader in each (0: still unknown)
        self._ahead = source.lookahead
        self._share = 0 if source.rules.tokens_per_step else -(-source.rules.sequences_per_step // source.num_readers)
        # whether the batch of the step before is still incomplete
        self._is_late = False
        # whether all batches of the epoch are known, and the epoch that readers may read
        self._is_over, self._open_epoch = False, self.composer.epoch
        self._begins = [cursor.epoch for cursor in start.readers]
        # ends of epochs announced by own readers, and progress of every reader of all ranks: epoch, rows
        self._num_ends: Counter[int] = Counter()
        self._progress: dict[int, tuple[int, int]] = {}
        self._readers = {
            reader: AheadReader(source.sequences(reader, cursor, self.num_ranks), partial(self._has_room, reader))
            for reader, cursor in enumerate(start.readers)
            if self.rank_of(reader) == plans.pool.rank
        }

    def rank_of(self, reader: int) -> int:
        """Returns the rank of a reader."""
        return self.source.rank_of(reader, self.num_ranks)

    def begin_epoch(self) -> None:
        """Lets readers read the next (or first) epoch."""
        self._is_over, self._open_epoch = False, self.composer.epoch
        self._let_read(self.source.lookahead)

    def steps(self, first: int) -> Iterator[tuple[int, Lengths]]:
        """Yields the sequences of the epoch's steps, with numbers from `first` on, for `PlanSource.plans`. Collective.

        If a step has unread sequences, it comes with a function that returns them later (None if the epoch ended
        before); the next draw waits for them. An error of any reader is raised then, on all ranks.
        """
        for step in itertools.count(first):
            # the step before has ended, so the batch after it is the running one
            self._let_read(self.source.lookahead)
            if self._is_late:
                self._note(self._finished(), self.source.lookahead)
            if self._is_over:
                return
            batch = self._try_batch()
            self._is_late = batch is None
            if batch is None:
                yield step, self._late_sequences
                continue
            self._note(batch, self.source.lookahead - 1)
            if isinstance(batch, EpochOver):
                return
            yield step, self._sequences(batch)

    def _late_sequences(self) -> StepSequences | None:
        """Returns the sequences of the first complete batch that was not drawn; None if the epoch is over."""
        return self._sequences(self._complete[0]) if self._complete else None

    def _sequences(self, batch: ComposedBatch) -> StepSequences:
        """Returns what plans must know of a batch."""
        tower = self.source.rules.media.tower
        media = () if tower.is_empty else batch.media
        works = tuple(tuple(work for medium, _ in own for work in tower_work(medium, tower)) for own in media)
        # readers send files to the ranks of an image's tokens alone
        return StepSequences(
            batch.lengths, batch.blocks if any(batch.blocks) else (), works if any(works) else (), deals_images=False
        )

    def is_at_end(self) -> bool:
        """Whether all batches of the epoch are taken; waits for the next item. Collective."""
        if not self._complete and not self._is_over:
            self._is_late = False
            self._note(self._finished(), self.source.lookahead)
        return self._is_over and not self._complete

    def take_ends(self) -> None:
        """Moves the cursors of this rank's readers past the end of the epoch, whose batches are all taken."""
        for reader, ahead in self._readers.items():
            ahead.take(self.composer.taken[reader], set())

    def taken(self) -> tuple[ComposedBatch, dict[int, ReadSequence]]:
        """Returns the next batch and those of its sequences that this rank has read, and frees them."""
        batch = self._complete.popleft()
        read = {}
        for reader, ahead in self._readers.items():
            places = {number: place for place, (owner, number) in enumerate(batch.members) if owner == reader}
            for number, sequence in ahead.take(batch.taken[reader], set(places)).items():
                read[places[number]] = sequence
        return batch, read

    def cursors(self) -> dict[int, Cursor]:
        """Returns the cursors of this rank's readers after the last taken batch."""
        return {reader: ahead.cursor for reader, ahead in self._readers.items()}

    def stop(self) -> None:
        """Ends all threads, unless their sources hang."""
        for ahead in self._readers.values():
            ahead.stop()

    def _finished(self) -> ComposedBatch | EpochOver:
        """Waits until the next batch is complete or the epoch is over, however long readers take."""
        begun_s = time.monotonic()
        try:
            while (batch := self.composer.next_batch()) is None:
                self._wait_for_own(begun_s)
                self._meet()
        except ValueError as error:
            own = [each.error for each in self._readers.values() if each.error is not None and str(each.error) == str(error)]
            raise error from (own[0] if own else None)
        return batch

    def _try_batch(self) -> ComposedBatch | EpochOver | None:
        """Returns the next batch if its sequences were read, or the end of the epoch; leaves an error for later."""
        try:
            if (batch := self.composer.next_batch()) is None:
                self._meet()
                batch = self.composer.next_batch()
        except ValueError:
            return None
        return batch

    def _meet(self) -> None:
        """Exchanges among all ranks what their readers have read. Collective."""
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
        """Waits for this rank's readers, but within other ranks' time limits; logs which are late since `begun_s`."""
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

    def _has_room(self, reader: int, num_read: int, num_tokens: int, num_ends: int) -> bool:
        """Whether a reader that has read this much may read on; called in its thread."""
        if not self._ahead or self._begins[reader] + num_ends > self._open_epoch:
            return False
        if num_read <= self.composer.taken[reader]:
            # other readers gave less than their share, so the incomplete batch needs more of this one
            return True
        if self._share:
            return num_read - self._closed[reader] < self._ahead * self._share
        return num_tokens < self._ahead * self._token_share

    def _has_enough(self, reader: int, ahead: AheadReader) -> bool:
        """Whether a reader has read enough to announce: its share of a batch, or the end of its epoch."""
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

    def _note(self, batch: ComposedBatch | EpochOver, ahead: int) -> None:
        """Stores a complete batch, or the end of the epoch; lets readers read `ahead` batches beyond it."""
        self._is_late = False
        if isinstance(batch, EpochOver):
            self._is_over, self._closed = True, tuple(self.composer.taken)
            return
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
    # the dataset makes whole batches, whose contents torch's default would convert
    return batch
