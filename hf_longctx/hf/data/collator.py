"""Turns the rows of a planned step into the chunk inputs of one rank.

`PlannedDataset` runs in the loader's workers and fetches only this rank's tokens; it shifts labels before any sequence is cut.
`LongContextCollator` packs these tokens into the rank's shard of each chunk, for the trainer's `training_step`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from hf_longctx.hf.data.fields import MEDIA, MEDIA_FILES
from hf_longctx.hf.data.labels import LOSS_WEIGHTS, NEXT_TOKEN, HeadTask
from hf_longctx.hf.data.media.rows import (
    MediaReader,
    Medium,
    SequenceMedia,
    chunk_media,
    dealt_media,
    joined_positions,
    positions_alone,
    sequence_media,
)
from hf_longctx.hf.data.sampler import IntArray, SequenceIndex
from hf_longctx.hf.data.scan import ScannedRows
from hf_longctx.plan.core.sharding import Piece, rank_pieces
from hf_longctx.plan.core.types import Chunk, SequenceGroup, StepPlan
from hf_longctx.runtime.core.chunk_inputs import ChunkInputs, ChunkMedia
from hf_longctx.runtime.core.loss import IGNORE_INDEX, Targets


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan, the rank that runs it, and the dataset's sequences: sequence i of the plan is `sequences[i]` of the index."""

    plan: StepPlan
    sequences: tuple[int, ...]
    rank: int


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Consecutive tokens of one sequence, from its token `first` on, with ids and labels of the next token.

    Both have shape [n] and type int64; a label is IGNORE_INDEX if its token is not learnt.
    """

    input_ids: Tensor
    shift_labels: Tensor
    first: int = 0
    # weight of each label in the loss, [n], fp64, 0 if there is no next token; None if every label weighs 1
    loss_weights: Tensor | None = None
    # values [N, K] if labels are numbers of its rows, such as 0 for the label of a document; None if labels are classes
    label_values: Tensor | None = None
    # images and videos of the tokens; None for a document of text
    media: SequenceMedia | None = None

    @property
    def has_label(self) -> bool:
        """Whether any label counts in the loss."""
        is_label = self.shift_labels != IGNORE_INDEX
        return bool((is_label if self.loss_weights is None else is_label & (self.loss_weights > 0)).any())

    def between(self, begin: int, end: int) -> TokenSequence:
        """Returns tokens [begin, end), counted from the start of the sequence."""
        cut = slice(begin - self.first, end - self.first)
        weights = None if self.loss_weights is None else self.loss_weights[cut]
        media = None if self.media is None else self.media.cut(cut.start, cut.stop)
        return TokenSequence(self.input_ids[cut], self.shift_labels[cut], begin, weights, self.label_values, media)


@dataclass(frozen=True, slots=True)
class ChangedRow:
    """Replaces a step's tokens if one of its rows has changed since the start, or has an image that cannot be read.

    problem: message that names the row.

    It is part of the batch, because after an error in one rank's loader all others would wait: the trainer raises it on every
    rank.
    """

    problem: str


class PlannedDataset(Dataset[tuple[PlannedStep, dict[int, TokenSequence] | ChangedRow]]):
    """A dataset whose keys are planned steps: an item has the tokens of that step that one rank needs.

    dataset: rows as mappings of lists or arrays, or as Arrow tables, of which only the needed tokens are copied. scanned: makes
    an item a `ChangedRow` if a row differs from the scanned one. task: meaning of the rows' labels. reader: opens images and
    videos; None if no row has any.
    """

    def __init__(
        self,
        dataset: Any,
        index: SequenceIndex,
        scanned: ScannedRows | None = None,
        task: HeadTask = NEXT_TOKEN,
        reader: MediaReader | None = None,
    ) -> None:
        self.dataset, self.index, self.scanned, self.task, self.reader = dataset, index, scanned, task, reader

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, step: PlannedStep) -> tuple[PlannedStep, dict[int, TokenSequence] | ChangedRow]:
        found = {}
        has_towers = step.plan.place(step.rank)[0] == 0
        held, dealt = held_pieces(step.plan, step.rank), dealt_images(step.plan, step.rank) if has_towers else {}
        # tokens whose images the rank runs itself
        own = held_pieces(step.plan, step.rank, are_dealt=False) if dealt else held
        for i in sorted(held.keys() | dealt.keys()):
            number = step.sequences[i]
            row = self._row(int(self.index.rows[number]))
            if isinstance(row, ChangedRow):
                return step, row
            first, stop = covered(held.get(i, [(0, 0)]))
            sequence = self._sequence(row, number, first, stop)
            try:
                media = self._media(row, number, own.get(i, ()), has_towers, dealt.get(i, ()), i in held)
            except ValueError as error:
                return step, ChangedRow(str(error))
            found[i] = sequence if media is None else replace(sequence, media=media.cut(first, stop))
        return step, found

    def _media(
        self,
        row: Any,
        number: int,
        pieces: Sequence[tuple[int, int]],
        has_towers: bool,
        dealt: Collection[int],
        has_tokens: bool,
    ) -> SequenceMedia | None:
        """Returns the media of a whole sequence, opened if they have tokens in these pieces; None for a sequence of text.

        has_towers: whether the rank's stage runs towers; no other opens media. dealt, has_tokens: see `sequence_media`.
        """
        is_table = isinstance(row, pa.Table)
        if self.reader is None or MEDIA not in (row.column_names if is_table else row):
            return None
        items, files = (row[name][0] if is_table else row[name] for name in (MEDIA, MEDIA_FILES))
        media = [Medium.of(item) for item in (items.as_py() if is_table else items)]
        start, end = int(self.index.starts[number]), int(self.index.stops[number])
        own = [
            (replace(medium, start=medium.start - start, stop=medium.stop - start), files[place])
            for place, medium in enumerate(media)
            if start <= medium.start and medium.stop <= end
        ]
        if not own:
            return None
        name = "" if self.scanned is None else f"{self.scanned.name} "
        ids = _tokens(row, "input_ids", start, end)
        if not has_towers:
            return positions_alone(ids, [medium for medium, _ in own], self.reader)
        where = f"{name}row {int(self.index.rows[number])}"
        return sequence_media(ids, own, pieces, self.reader, where, dealt, has_tokens)

    def _row(self, number: int) -> Any:
        if self.scanned is None:
            return self.task.read(self.dataset[number])
        try:
            row = self.task.read(self.dataset[number])
        except IndexError as error:
            return ChangedRow(self.scanned.loss(number, error))
        problem = self.scanned.change(number, row)
        return ChangedRow(problem) if problem else row

    def _sequence(self, row: Any, number: int, first: int, stop: int) -> TokenSequence:
        start, end = int(self.index.starts[number]), int(self.index.stops[number])
        columns = row.column_names if isinstance(row, pa.Table) else row
        ids = _tokens(row, "input_ids", start + first, start + stop)
        if self.task.kind == "document":
            labels, values = self._document_labels(row, start, end, start + first, start + stop)
            return TokenSequence(ids, labels, first, label_values=values)
        if self.task.kind == "token":
            own = start + first, start + stop
            if self.task.marks:
                return TokenSequence(ids, torch.zeros_like(ids), first)
            weights = _items(row, LOSS_WEIGHTS, *own, np.float64) if LOSS_WEIGHTS in columns else None
            return TokenSequence(ids, _tokens(row, "labels", *own), first, weights)
        after = start + first + 1, min(start + stop + 1, end)
        labels = _tokens(row, "labels" if "labels" in columns else "input_ids", *after)
        weights = _items(row, LOSS_WEIGHTS, *after, np.float64) if LOSS_WEIGHTS in columns else None
        if start + stop == end:
            labels = torch.cat([labels, labels.new_full((1,), IGNORE_INDEX)])
            weights = None if weights is None else torch.cat([weights, weights.new_zeros(1)])
        return TokenSequence(ids, labels, first, weights)

    def _document_labels(self, row: Any, start: int, end: int, begin: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Returns labels of tokens [begin, stop) of a row with a document at [start, end), and values of the document's label."""
        ids = row["input_ids"].combine_chunks().flatten() if isinstance(row, pa.Table) else row["input_ids"]
        place = self.task.label_place(ids, start, end)
        labels = torch.full((stop - begin,), IGNORE_INDEX, dtype=torch.int64)
        has_values = self.task.has_values
        if self.task.marks:
            if begin <= place < stop:
                labels[place - begin] = 0
            return labels, None
        own = _items(row, "labels", 0, self.task.labels_per_row, np.float64 if has_values else np.int64)
        if begin <= place < stop:
            labels[place - begin] = 0 if has_values else own[0]
        return labels, own.float().unsqueeze(0) if has_values else None


def held_pieces(plan: StepPlan, rank: int, are_dealt: bool = True) -> dict[int, list[tuple[int, int]]]:
    """Returns, for every sequence with tokens on this rank, their ranges [first, stop).

    are_dealt: with those of chunks whose images the plan deals to the ranks of a group.
    """
    found: dict[int, list[tuple[int, int]]] = {}
    _, position = plan.place(rank)
    for group, _ in plan.for_rank(rank).rounds:
        for chunk in group.chunks if are_dealt else (each for each in group.chunks if not group.dealt(each)):
            for piece in rank_pieces(chunk, group.shape)[group.positions.index(position)]:
                if piece.document < len(chunk.spans):
                    span = chunk.spans[piece.document]
                    found.setdefault(span.sequence, []).append((span.start + piece.start, span.start + piece.stop))
    return found


def dealt_images(plan: StepPlan, rank: int) -> dict[int, set[int]]:
    """Returns the numbers of the dealt images that this rank runs, for every sequence with a dealt image in its groups."""
    found: dict[int, set[int]] = {}
    _, position = plan.place(rank)
    for group, _ in plan.for_rank(rank).rounds:
        for run in (run for run in group.towers if run.rank >= 0):
            numbers = found.setdefault(run.sequence, set())
            numbers |= {run.number} if group.positions[run.rank] == position else set()
    return found


def covered(pieces: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Returns the smallest token range [first, stop) that covers all pieces."""
    return min(begin for begin, _ in pieces), max(end for _, end in pieces)


def token_sequences(chunk: Chunk, group: SequenceGroup, position: int) -> IntArray:
    """Returns the plan's sequence of every token [T] of `chunk` on the rank at `position`; 0 for dummy tokens."""
    pieces = rank_pieces(chunk, group.shape)[group.positions.index(position)]
    numbers = [chunk.spans[piece.document].sequence if piece.document < len(chunk.spans) else 0 for piece in pieces]
    return np.repeat(np.asarray(numbers, dtype=np.int64), [piece.num_tokens for piece in pieces])


def _tokens(row: Any, column: str, start: int, stop: int) -> Tensor:
    """Returns token ids or labels [start, stop) of a row, shape [stop - start], int64."""
    return _items(row, column, start, stop, np.int64)


def _items(row: Any, column: str, start: int, stop: int, dtype: type[np.int64 | np.float64]) -> Tensor:
    """Returns items [start, stop) of the list in a row's column, shape [stop - start]."""
    if not isinstance(row, pa.Table):
        return torch.as_tensor(row[column][start:stop], dtype=torch.from_numpy(np.zeros(0, dtype)).dtype)
    values = row[column].combine_chunks().flatten().slice(start, stop - start)
    return torch.from_numpy(values.to_numpy(zero_copy_only=False).astype(dtype))


def shift(labels: Tensor, last: int = IGNORE_INDEX) -> Tensor:
    """Shifts the labels [n] of one document, so that every token has its next token's; the last one gets `last`."""
    return torch.cat([labels[1:], labels.new_full((1,), last)])


class LongContextCollator:
    """Turns one planned step and its sequences into the batch for the trainer's `training_step`.

    The batch is a plain mapping: `input_ids` are all tokens of this rank, `num_dummies` the number of dummy tokens among them,
    `chunks[r][c]` the inputs of chunk c in this rank's micro-batch r, `num_label_tokens` the label tokens of this rank's losses,
    `total_weight` the sum of their `loss_weights` (their number if the dataset has none), `step` the planned step. If a row has
    changed, the batch has no inputs, and `changed` describes the row.

    have_media: for every sequence of the index whether it has images, if weights are sharded: in steps with images, the backward
    of every chunk then reaches all trained weights of towers.
    """

    def __init__(self, have_media: NDArray[np.bool_] | None = None) -> None:
        self.have_media = have_media

    def __call__(self, items: Sequence[tuple[PlannedStep, Mapping[int, TokenSequence] | ChangedRow]]) -> dict[str, Any]:
        ((step, sequences),) = items
        if isinstance(sequences, ChangedRow):
            nothing = torch.zeros(1, 1, dtype=torch.int64)
            counts = {"num_dummies": 1, "num_label_tokens": 0, "total_weight": 0.0}
            return {"input_ids": nothing, "chunks": [], **counts, "step": step, "changed": sequences.problem}
        rank_plan = step.plan.for_rank(step.rank)
        _, position = step.plan.place(step.rank)
        chunks = [[chunk_inputs(chunk, group, position, sequences) for chunk in group.chunks] for group, _ in rank_plan.rounds]
        if self.have_media is not None and self.have_media[list(step.sequences)].any():
            chunks = [[reaching_all(inputs) for inputs in round_chunks] for round_chunks in chunks]
        return step_batch(step, chunks)


def step_batch(step: PlannedStep, chunks: list[list[ChunkInputs]]) -> dict[str, Any]:
    """Makes the batch of a planned step from the inputs of this rank's chunks, `chunks[micro-batch][chunk]`."""
    flat = [inputs for round_chunks in chunks for inputs in round_chunks]
    stage, _ = step.plan.place(step.rank)
    # all stages of a pipeline have the same tokens, but only the last computes losses
    has_loss = stage == step.plan.num_stages - 1
    return {
        "input_ids": torch.cat([inputs.input_ids for inputs in flat], dim=1),
        "chunks": chunks,
        "num_dummies": _num_dummies(step),
        "num_label_tokens": sum(int((inputs.shift_labels != IGNORE_INDEX).sum()) for inputs in flat) if has_loss else 0,
        "total_weight": sum(Targets.of(inputs).total_weight() for inputs in flat) if has_loss else 0.0,
        "step": step,
    }


def reaching_all(inputs: ChunkInputs) -> ChunkInputs:
    """Returns the inputs of a chunk whose backward reaches all trained weights of towers."""
    none = torch.zeros(0, dtype=torch.int64)
    return replace(inputs, media=replace(inputs.media or ChunkMedia((), none, none), reaches_all=True))


def _num_dummies(step: PlannedStep) -> int:
    """Counts this rank's tokens in the step that belong to no document."""
    _, position = step.plan.place(step.rank)
    return sum(
        piece.num_tokens
        for group, _ in step.plan.for_rank(step.rank).rounds
        for chunk in group.chunks
        for piece in rank_pieces(chunk, group.shape)[group.positions.index(position)]
        if piece.document >= len(chunk.spans)
    )


def chunk_inputs(chunk: Chunk, group: SequenceGroup, position: int, sequences: Mapping[int, TokenSequence]) -> ChunkInputs:
    """Makes the inputs of `chunk` on the rank at `position` of the group; position ids count from the start of each sequence.

    Dummy tokens have id 0, position 0 and no label, and come after the real tokens.
    """
    parts: list[tuple[TokenSequence, Tensor]] = []
    numbers: list[int] = []
    for piece in rank_pieces(chunk, group.shape)[group.positions.index(position)]:
        numbers.append(chunk.spans[piece.document].sequence if piece.document < len(chunk.spans) else -1)
        if piece.document < len(chunk.spans):
            span = chunk.spans[piece.document]
            begin, end = span.start + piece.start, span.start + piece.stop
            parts.append((sequences[span.sequence].between(begin, end), torch.arange(begin, end)))
        else:
            zeros = torch.zeros(piece.num_tokens, dtype=torch.int64)
            parts.append((TokenSequence(zeros, torch.full_like(zeros, IGNORE_INDEX)), zeros))
    label_values = None
    if any(part.label_values is not None for part, _ in parts):
        parts, label_values = _numbered(parts)
    rows = ((part.input_ids, positions, part.shift_labels) for part, positions in parts)
    input_ids, position_ids, shift_labels = (torch.cat(column).unsqueeze(0) for column in zip(*rows, strict=True))
    loss_weights = None
    if any(part.loss_weights is not None for part, _ in parts):
        weights = (
            torch.zeros(len(positions), dtype=torch.float64) if part.loss_weights is None else part.loss_weights
            for part, positions in parts
        )
        loss_weights = torch.cat(list(weights)).unsqueeze(0)
    of_parts = [(number, part.media, each) for number, (part, each) in zip(numbers, parts, strict=True)]
    media = _chunk_media(chunk, group, position, of_parts, sequences)
    return ChunkInputs(input_ids, position_ids, shift_labels, loss_weights, label_values, media)


def _chunk_media(
    chunk: Chunk,
    group: SequenceGroup,
    position: int,
    parts: Sequence[tuple[int, SequenceMedia | None, Tensor]],
    sequences: Mapping[int, TokenSequence],
) -> ChunkMedia | None:
    """Returns the media of a shard of a chunk, as the plan says which ranks run them; None without any."""
    keeps: dict[int, dict[int, bool]] = {}
    for run in (run for run in group.towers if run.chunk == chunk.index):
        keeps.setdefault(run.sequence, {})[run.number] = bool(run.keeps)
    kept = [(number, own and own.kept(keeps.get(number, {})), each) for number, own, each in parts]
    has_towers = any(own is not None and own.all_rows is not None for own in (each.media for each in sequences.values()))
    if not has_towers or not (dealt := group.dealt(chunk)):
        return chunk_media(kept)
    whole = {i: media.kept(keeps[i]) for i in keeps if (media := sequences[i].media) is not None}
    places = [[_place(chunk, piece) for piece in pieces] for pieces in rank_pieces(chunk, group.shape)]
    return dealt_media(places, group.positions.index(position), whole, dealt, joined_positions(kept))


def _place(chunk: Chunk, piece: Piece) -> tuple[int, int, int]:
    """Returns the sequence of a piece, -1 for a dummy, and its token range there."""
    if piece.document >= len(chunk.spans):
        return -1, 0, piece.num_tokens
    span = chunk.spans[piece.document]
    return span.sequence, span.start + piece.start, span.start + piece.stop


def _numbered(parts: Sequence[tuple[TokenSequence, Tensor]]) -> tuple[list[tuple[TokenSequence, Tensor]], Tensor | None]:
    """Returns the parts with labels that are row numbers of one table, and that table [N, K]; None if no token has a label."""
    numbered, table = [], list[Tensor]()
    for part, positions in parts:
        if (values := part.label_values) is not None:
            rows, labels = part.shift_labels[part.shift_labels != IGNORE_INDEX], part.shift_labels.clone()
            labels[labels != IGNORE_INDEX] = sum(map(len, table)) + torch.arange(len(rows))
            part = replace(part, shift_labels=labels)
            table.append(values[rows])
        numbered.append((part, positions))
    values_NK = torch.cat(table)
    return numbered, values_NK if len(values_NK) else None
