"""Rows to a rank's chunks: fetch only this rank's sequences, shift labels before any cut, pack, keep this rank's shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hf_longctx.hf.sampler import SequenceIndex
from hf_longctx.plan.sharding import rank_pieces
from hf_longctx.plan.types import Chunk, SequenceGroup, StepPlan
from hf_longctx.runtime.executor import ChunkInputs
from hf_longctx.runtime.loss import IGNORE_INDEX


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan and the dataset's sequences it is about: plan sequence i is sequence `sequences[i]` of the index."""

    plan: StepPlan
    sequences: tuple[int, ...]
    rank: int


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One sequence: token ids and next-token labels (IGNORE_INDEX where there is none), each of shape [n], int64."""

    input_ids: Tensor
    shift_labels: Tensor


class PlannedDataset(Dataset[tuple[PlannedStep, dict[int, TokenSequence]]]):
    """Rows of a dataset, asked for by planned steps: one item is the sequences of one rank's chunks."""

    def __init__(self, dataset: Any, index: SequenceIndex) -> None:
        self.dataset, self.index = dataset, index

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, step: PlannedStep) -> tuple[PlannedStep, dict[int, TokenSequence]]:
        wanted = {
            span.sequence for group, _ in step.plan.for_rank(step.rank).rounds for chunk in group.chunks for span in chunk.spans
        }
        return step, {i: self._sequence(step.sequences[i]) for i in sorted(wanted)}

    def _sequence(self, number: int) -> TokenSequence:
        row = self.dataset[int(self.index.rows[number])]
        cut = slice(int(self.index.starts[number]), int(self.index.stops[number]))
        # cut first: the row of a short piece may have millions of tokens
        input_ids = torch.as_tensor(row["input_ids"][cut], dtype=torch.int64)
        labels = torch.as_tensor(row["labels"][cut], dtype=torch.int64) if "labels" in row else input_ids
        return TokenSequence(input_ids, shift(labels))


def shift(labels: Tensor) -> Tensor:
    """The label of the next token for every token of one document; the last token has none. Shape [n] to [n]."""
    return torch.cat([labels[1:], labels.new_full((1,), IGNORE_INDEX)])


class LongContextCollator:
    """Turns one planned step and its sequences into the batch that the trainer's `training_step` gets.

    The batch is a plain mapping: `input_ids` are all tokens of this rank (for token counts), `chunks[r][c]` the inputs of
    chunk c in round r, `num_label_tokens` this rank's label tokens, `step` the planned step.
    """

    def __call__(self, items: Sequence[tuple[PlannedStep, Mapping[int, TokenSequence]]]) -> dict[str, Any]:
        ((step, sequences),) = items
        rank_plan = step.plan.for_rank(step.rank)
        # one stage: a rank's position is its rank
        chunks = [[chunk_inputs(chunk, group, step.rank, sequences) for chunk in group.chunks] for group, _ in rank_plan.rounds]
        return step_batch(step, chunks)


def step_batch(step: PlannedStep, chunks: list[list[ChunkInputs]]) -> dict[str, Any]:
    """The batch of a planned step from the inputs of this rank's chunks, `chunks[round][chunk]`."""
    flat = [inputs for round_chunks in chunks for inputs in round_chunks]
    return {
        "input_ids": torch.cat([inputs.input_ids for inputs in flat], dim=1),
        "chunks": chunks,
        "num_label_tokens": sum(int((inputs.shift_labels != IGNORE_INDEX).sum()) for inputs in flat),
        "step": step,
    }


def chunk_inputs(chunk: Chunk, group: SequenceGroup, position: int, sequences: Mapping[int, TokenSequence]) -> ChunkInputs:
    """The shard of `chunk` that the rank at `position` holds; positions restart at 0 in every document.

    Dummy tokens have id 0, position 0 and no label, and lie behind the real tokens.
    """
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for piece in rank_pieces(chunk, group.shape)[group.positions.index(position)]:
        if piece.document < len(chunk.spans):
            span = chunk.spans[piece.document]
            begin, end = span.start + piece.start, span.start + piece.stop
            sequence = sequences[span.sequence]
            parts.append((sequence.input_ids[begin:end], torch.arange(begin, end), sequence.shift_labels[begin:end]))
        else:
            zeros = torch.zeros(piece.num_tokens, dtype=torch.int64)
            parts.append((zeros, zeros, torch.full_like(zeros, IGNORE_INDEX)))
    input_ids, position_ids, shift_labels = (torch.cat(column).unsqueeze(0) for column in zip(*parts, strict=True))
    return ChunkInputs(input_ids, position_ids, shift_labels)
