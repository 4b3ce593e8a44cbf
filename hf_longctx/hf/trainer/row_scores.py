"""Scores of the single tokens of a dataset, each with its row and position, computed under plans or by the plain model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from hf_longctx.hf.data.collator import PlannedStep, shift, token_sequences
from hf_longctx.hf.data.fields import MEDIA
from hf_longctx.hf.data.padding import unpadded
from hf_longctx.hf.data.sampler import IntArray, SequenceIndex
from hf_longctx.hf.data.scan import PACKED
from hf_longctx.hf.models.adapters import base_of
from hf_longctx.hf.models.document_rope import forget_documents
from hf_longctx.hf.models.layers import output_head
from hf_longctx.hf.models.logits import head_problem, logit_change
from hf_longctx.hf.models.quantised import QuantisedPatch
from hf_longctx.hf.ranks.agreement import sums_over_ranks
from hf_longctx.hf.rules.classes import class_problem
from hf_longctx.runtime.activations.output_head import OutputHead
from hf_longctx.runtime.core.chunk_inputs import ChunkInputs
from hf_longctx.runtime.core.loss import IGNORE_INDEX, Scoring, TokenScores, token_scores

# tokens per tile of the output head if no plan sets it
_TILE_TOKENS = 1024


@dataclass(frozen=True)
class RowScores:
    """The label tokens that this rank scored, each array of shape [n]."""

    # rows of the dataset
    rows: IntArray
    # index of the predicted token in its document, which is the number of tokens before it; a row that was split is several
    # documents
    positions: IntArray
    # the token of the row at which the document begins
    starts: IntArray
    # cross-entropy in nats
    losses: NDArray[np.float64]
    # the likeliest token, and whether it is the label
    likeliest: IntArray
    is_right: NDArray[np.bool_]
    # entropy of the distribution over the token, in nats
    entropies: NDArray[np.float64]
    # weight of the token in the loss that is trained
    weights: NDArray[np.float64]

    @classmethod
    def joined(cls, parts: Sequence[RowScores]) -> RowScores:
        """The label tokens of all parts, in order."""
        whole, real = np.zeros(0, np.int64), np.zeros(0)
        empty = cls(whole, whole, whole, real, whole, np.zeros(0, np.bool_), real, real)
        names = ("rows", "positions", "starts", "losses", "likeliest", "is_right", "entropies", "weights")
        return cls(*(np.concatenate([getattr(part, name) for part in (empty, *parts)]) for name in names))

    def sums(self) -> NDArray[np.float64]:
        """Sums over the tokens with a weight: weighted losses, weights, losses, ones, right ones, entropies. Shape [6]."""
        is_learnt = self.weights > 0
        losses, weights = self.losses[is_learnt], self.weights[is_learnt]
        counts = losses.sum(), is_learnt.sum(), self.is_right[is_learnt].sum(), self.entropies[is_learnt].sum()
        return np.array([(weights * losses).sum(), weights.sum(), *counts])

    def by_row(self, num_rows: int) -> NDArray[np.float64]:
        """For every row of the dataset: the sum of the log-probabilities of its label tokens, their number, the right ones, and
        the sum of their entropies. Shape [4, num_rows]."""
        columns = (-self.losses, np.ones(len(self.rows)), self.is_right, self.entropies)
        return np.stack([np.bincount(self.rows, column, num_rows) for column in columns])

    def of_rows(self, num_rows: int, control: dist.ProcessGroup | None) -> NDArray[np.void]:
        """`by_row`, summed over all ranks, as a structured array with one entry per row. Collective."""
        sums = self.by_row(num_rows)
        totals = np.reshape(sums_over_ranks(sums.ravel().tolist(), control), sums.shape)
        kinds: Any = [("log_prob", "f8"), ("num_tokens", "i8"), ("num_right", "i8"), ("entropy", "f8")]
        found = np.zeros(num_rows, dtype=kinds)
        for (name, _), values in zip(kinds, totals, strict=True):
            found[name] = values
        return found


def step_scores(
    step: PlannedStep,
    chunks: Sequence[Sequence[ChunkInputs]],
    scores: Sequence[Mapping[int, TokenScores]],
    index: SequenceIndex,
) -> RowScores:
    """Scores of this rank's `chunks`, found by `StepExecutor.score`. index: the dataset's sequences."""
    _, position = step.plan.place(step.rank)
    parts = []
    for (group, _), inputs, found in zip(step.plan.for_rank(step.rank).rounds, chunks, scores, strict=True):
        for number, chunk_scores in found.items():
            sequences_T = token_sequences(group.chunks[number], group, position)
            # dummy tokens have no label, so any row will do
            numbers_T = np.asarray(step.sequences, dtype=np.int64)[sequences_T]
            held = inputs[number]
            parts.append(_labelled(index.rows[numbers_T], index.starts[numbers_T], held, chunk_scores))
    return RowScores.joined(parts)


@torch.no_grad()
def plain_scores(model: nn.Module, dataset: Any, rank: int, num_ranks: int, device: torch.device) -> RowScores:
    """The scores of every `num_ranks`-th row from `rank` on, by the model's own forward, one document at a time.

    Logits are made tile by tile, unless the model changes them after its head in an unknown way.
    """
    was_training = model.training
    # this may be the model's first forward in evaluation mode, which would repack four-bit weights
    QuantisedPatch().apply(model)
    model.eval()
    parts = []
    with _scorer(model) as score:
        for number in range(rank, len(dataset), num_ranks):
            row = unpadded(dataset[number])
            if row.get(MEDIA):
                raise ValueError(
                    f"row {number} has images, which the model of a stock trainer does not get here; use LongContextTrainer, or "
                    f"rows of text"
                )
            if packed := [name for name in PACKED if name in row]:
                raise ValueError(
                    f"row {number} has a column {packed[0]!r}, but the model of a stock trainer reads every row as one document; "
                    f"remove the column, give one document per row, or use LongContextTrainer"
                )
            # score every document as if alone: without the rotary frequencies of a longer document before it
            forget_documents(model)
            ids_T = torch.as_tensor(row["input_ids"], dtype=torch.int64)
            labels_T = shift(torch.as_tensor(row["labels"] if "labels" in row else row["input_ids"], dtype=torch.int64))
            positions_T = torch.arange(len(ids_T))
            document = ChunkInputs(ids_T.unsqueeze(0), positions_T.unsqueeze(0), labels_T.unsqueeze(0))
            scores = score(document.input_ids.to(device), document.shift_labels)
            starts_T = np.zeros(len(ids_T), dtype=np.int64)
            parts.append(_labelled(starts_T + number, starts_T, document, scores))
    model.train(was_training)
    return RowScores.joined(parts)


@contextmanager
def _scorer(model: nn.Module) -> Iterator[Any]:
    """Context with a function from token ids [1, T] and labels [1, T] (in host memory) to scores.

    Afterwards the model has its own head again.
    """
    # only the forwards of tested classes are known to leave the head's logits as they are
    if head_problem(model) or class_problem(base_of(model)):
        yield lambda ids_1T, labels_1T: token_scores(
            model(input_ids=ids_1T, use_cache=False).logits, labels_1T.to(ids_1T.device), Scoring()
        )
        return
    head = OutputHead(output_head(model), change=logit_change(model))

    def score(ids_1T: Tensor, labels_1T: Tensor) -> TokenScores:
        with head.scoring(labels_1T, _TILE_TOKENS, Scoring()) as scores:
            model(input_ids=ids_1T, use_cache=False)
        return scores[0]

    try:
        yield score
    finally:
        head.unbind()


def _labelled(rows_T: IntArray, starts_T: IntArray, inputs: ChunkInputs, scores: TokenScores) -> RowScores:
    is_label_T = (inputs.shift_labels[0] != IGNORE_INDEX).cpu().numpy()
    # the label at position p is the token at p + 1
    positions_T = inputs.position_ids[0].cpu().numpy() + 1
    names = ("losses_T", "likeliest_T", "is_right_T", "entropies_T")
    found = (getattr(scores, name).cpu().numpy() for name in names)
    weights_T = np.ones(len(rows_T)) if inputs.loss_weights is None else inputs.loss_weights[0].cpu().numpy()
    return RowScores(*(each[is_label_T] for each in (rows_T, positions_T, starts_T, *found, weights_T)))
