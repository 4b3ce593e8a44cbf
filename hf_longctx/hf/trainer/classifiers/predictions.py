"""Gathers the logits of a classifier that were computed under plans, in the shape in which a stock trainer gives them to metrics.

Documents: logits [N, K] and labels [N] or [N, K]. Tokens: logits [N, longest, K] and labels [N, longest], padded with -100.

Shapes: N rows of the set, K labels, n logits that a rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import EvalPrediction
from transformers.trainer_utils import denumpify_detensorize

from hf_longctx.hf.data.collator import PlannedDataset, PlannedStep, token_sequences
from hf_longctx.hf.data.labels import LOSS_WEIGHTS, HeadTask
from hf_longctx.hf.data.sampler import IntArray
from hf_longctx.runtime.core.chunk_inputs import ChunkInputs
from hf_longctx.runtime.core.loss import IGNORE_INDEX, TokenLoss, ValueLoss, custom_losses

Array = NDArray[Any]


@dataclass(frozen=True)
class ReadLogits:
    """Logits [n, K] that a rank read, each with the sequence of the index [n] and the position in that sequence [n]."""

    sequences: IntArray
    positions: IntArray
    logits: Array


def step_logits(
    step: PlannedStep, chunks: Sequence[Sequence[ChunkInputs]], found: Sequence[Mapping[int, Tensor]]
) -> list[ReadLogits]:
    """The logits of this rank's `chunks`, as `StepExecutor.read` returned them."""
    _, position = step.plan.place(step.rank)
    parts = []
    for (group, _), inputs, logits in zip(step.plan.for_rank(step.rank).rounds, chunks, found, strict=True):
        for index, logits_nK in logits.items():
            is_read_T = (inputs[index].shift_labels[0] != IGNORE_INDEX).cpu().numpy()
            numbers_T = np.asarray(step.sequences, dtype=np.int64)[token_sequences(group.chunks[index], group, position)]
            places_T = inputs[index].position_ids[0].cpu().numpy()
            parts.append(ReadLogits(numbers_T[is_read_T], places_T[is_read_T], logits_nK.cpu().numpy()))
    return parts


@dataclass(frozen=True)
class Predictions:
    """Logits and labels of a whole set, equal on every rank; labels are None for a set without them.

    weights: the weight of each label in the loss, of the shape of the labels; None if every label weighs 1.
    """

    logits: Array
    labels: Array | None
    weights: Array | None = None

    def loss(self, token_loss: TokenLoss | ValueLoss | None) -> float:
        """The mean loss over all rows or tokens with a label, weighted as in training."""
        assert self.labels is not None
        logits = torch.from_numpy(self.logits).reshape(-1, self.logits.shape[-1])
        if isinstance(token_loss, ValueLoss):
            return float(token_loss.losses(logits, torch.from_numpy(self.labels).reshape(len(logits), -1)).double().mean())
        labels = torch.from_numpy(self.labels).reshape(-1)
        if token_loss is None:
            losses = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
        else:
            losses = custom_losses(token_loss, logits, labels)
        is_label = labels != IGNORE_INDEX
        weights = is_label.double() if self.weights is None else torch.from_numpy(self.weights).reshape(-1) * is_label
        return float((losses.double() * weights).sum()) / (float(weights.sum()) or 1)

    def metrics(
        self,
        prefix: str,
        token_loss: TokenLoss | ValueLoss | None,
        compute: Callable[[EvalPrediction], dict[str, Any]] | None,
        preprocess: Callable[[Tensor, Tensor], Any] | None,
    ) -> tuple[Any, dict[str, Any]]:
        """The user's predictions, made from logits by `preprocess`, and metrics with the loss, named as `Trainer` does."""
        predictions: Any = self.logits
        if preprocess is not None:
            labels: Any = None if self.labels is None else torch.from_numpy(self.labels)
            made = preprocess(torch.from_numpy(self.logits), labels)
            predictions = tuple(each.numpy() for each in made) if isinstance(made, tuple | list) else made.numpy()
        if self.labels is None:
            return predictions, {}
        found = {} if compute is None else compute(EvalPrediction(predictions=predictions, label_ids=self.labels))
        return predictions, {**named_metrics(found, prefix), f"{prefix}_loss": self.loss(token_loss)}


def predictions_of(rows: PlannedDataset, parts: Sequence[ReadLogits]) -> Predictions:
    """The predictions of a set whose tokens were marked; `parts` of all ranks."""
    index, task = rows.index, rows.task
    logits = np.concatenate([part.logits for part in parts])
    numbers, places = (np.concatenate([getattr(part, name) for part in parts]) for name in ("sequences", "positions"))
    # a row that was split is several sequences
    places = places + index.starts[numbers]
    num_rows = int(index.rows.max()) + 1
    labels, weights = _labels(rows, num_rows)
    if task.kind == "document":
        ordered = np.zeros((num_rows, logits.shape[1]), logits.dtype)
        ordered[index.rows[numbers]] = logits
        return Predictions(ordered, _stacked(labels, task))
    longest = int(index.stops.max())
    padded = np.full((num_rows, longest, logits.shape[1]), IGNORE_INDEX, logits.dtype)
    padded[index.rows[numbers], places] = logits
    if labels is None:
        return Predictions(padded, None)
    lengths = np.zeros(num_rows, np.int64)
    np.maximum.at(lengths, index.rows, index.stops)
    shape = num_rows, longest
    label_ids = padded_rows(labels, lengths, np.full(shape, IGNORE_INDEX, np.int64))
    return Predictions(padded, label_ids, None if weights is None else padded_rows(weights, lengths, np.zeros(shape)))


def named_metrics(found: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Results of a user's `compute_metrics`, with the names that `Trainer` gives them, as plain numbers."""
    named = {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value for name, value in found.items()}
    made: dict[str, Any] = denumpify_detensorize(named)
    return made


def row_items(row: Any, column: str) -> Array:
    """The list in a column of a row, which is a mapping or an Arrow table."""
    own = row[column]
    items: Array = own.combine_chunks().flatten().to_numpy(zero_copy_only=False) if hasattr(own, "chunks") else np.asarray(own)
    return items


def padded_rows(rows: Sequence[Array], lengths: IntArray, padding: Array) -> Array:
    """The first `lengths` items of every row, in front of `padding` [N, longest], which is changed."""
    for own, length, padded in zip(rows, lengths, padding, strict=True):
        padded[:length] = own[:length]
    return padding


def _labels(rows: PlannedDataset, num_rows: int) -> tuple[list[Array] | None, list[Array] | None]:
    """The labels of every row and their weights in the loss; None for what the set has not."""
    listed = (rows.task.read(rows.dataset[number]) for number in range(num_rows))
    found: dict[str, list[Array]] = {"labels": [], LOSS_WEIGHTS: []}
    for row in listed:
        columns = getattr(row, "column_names", None) or list(row)
        if "labels" not in columns:
            return None, None
        for name in (name for name in found if name in columns):
            found[name].append(row_items(row, name))
    return found["labels"], found[LOSS_WEIGHTS] or None


def _stacked(labels: list[Array] | None, task: HeadTask) -> Array | None:
    """Labels of documents: classes [N], numbers [N], or [N, K]; numbers in fp32, as stock collators make them."""
    if labels is None:
        return None
    stacked = np.stack(labels).astype(np.float32 if task.has_values else np.int64)
    return stacked if task.labels_per_row > 1 else stacked[:, 0]
