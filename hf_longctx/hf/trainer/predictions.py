"""Evaluates a set under plans: losses, token accuracy and entropy, and predictions for a user's `compute_metrics`.

A classifier's logits are gathered in the shape that a stock trainer gives to metrics. Documents: logits [N, K] and labels [N] or
[N, K]. Tokens: logits [N, longest, K] and labels [N, longest], padded with -100.

For a language model, metrics get arrays of tokens in the shape of a stock trainer's logits without vocabulary. Column p of
`predictions` is about the token at p + 1, which the logits at p predict; `label_ids` are not shifted. So metrics compare
`predictions[...][:, :-1]` with `label_ids[:, 1:]`, as they do with a stock trainer's likeliest tokens.

Shapes: N rows of the set, in its order, K labels, n logits that a rank holds, L tokens of the longest row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import EvalPrediction
from transformers.trainer_utils import EvalLoopOutput, denumpify_detensorize

from hf_longctx.hf.data.collator import PlannedDataset, PlannedStep, token_sequences
from hf_longctx.hf.data.labels import LOSS_WEIGHTS, HeadTask
from hf_longctx.hf.data.sampler import IntArray
from hf_longctx.hf.ranks.agreement import gather_objects, raise_together, sums_over_ranks
from hf_longctx.hf.ranks.launch import host_bytes
from hf_longctx.hf.run.run import Run
from hf_longctx.hf.trainer.row_scores import RowScores, step_scores
from hf_longctx.runtime.core.chunk_inputs import ChunkInputs
from hf_longctx.runtime.core.loss import IGNORE_INDEX, AnyLoss, Distillation, TokenTally, ValueLoss, custom_losses

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

    def loss(self, token_loss: AnyLoss) -> float:
        """The mean loss over all rows or tokens with a label, weighted as in training."""
        assert self.labels is not None
        logits = torch.from_numpy(self.logits).reshape(-1, self.logits.shape[-1])
        if isinstance(token_loss, ValueLoss):
            return float(token_loss.losses(logits, torch.from_numpy(self.labels).reshape(len(logits), -1)).double().mean())
        labels = torch.from_numpy(self.labels).reshape(-1)
        if token_loss is None:
            losses = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
        else:
            assert not isinstance(token_loss, Distillation), "classifiers have no teacher"
            losses = custom_losses(token_loss, logits, labels)
        is_label = labels != IGNORE_INDEX
        weights = is_label.double() if self.weights is None else torch.from_numpy(self.weights).reshape(-1) * is_label
        return float((losses.double() * weights).sum()) / (float(weights.sum()) or 1)

    def metrics(
        self,
        prefix: str,
        token_loss: AnyLoss,
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


def classified(
    run: Run,
    dataloader: DataLoader[Any],
    steps: Iterable[tuple[Any, Any, dict[str, Any]]],
    prefix: str,
    *user: Callable[..., Any] | None,
) -> EvalLoopOutput:
    """The loss of a set, or its logits, labels and metrics if all of its tokens that the head reads are marked.

    steps: for every planned step of `dataloader` the executor, the arguments of its forwards, and the batch. user:
    `compute_metrics` and `preprocess_logits_for_metrics`. Collective over all ranks.
    """
    rows: Any = dataloader.dataset
    loss_sum, total_weight, own = 0.0, 0.0, []
    for executor, forwards, batch in steps:
        if rows.task.marks:
            own += step_logits(batch["step"], batch["chunks"], executor.read(*forwards))
        else:
            loss_sum += float(executor.evaluate(*forwards))
            total_weight += batch["total_weight"]
    nothing: Any = None
    if not rows.task.marks:
        return EvalLoopOutput(nothing, nothing, {f"{prefix}_loss": loss_sum / (total_weight or 1)}, len(rows))
    found = predictions_of(rows, [part for parts in gather_objects(own, run.control) for part in parts])
    made, metrics = found.metrics(prefix, run.token_loss, *user)
    return EvalLoopOutput(made, found.labels, metrics, len(found.logits))


# bytes of a token: three predictions, its label and its id, in the arrays and twice while ranks gather them
_TOKEN_BYTES = 120


class TokenArrays(dict[str, Any]):
    """Arrays of tokens by name; numpy would take a plain dict for one value, of which every likeliest token is 0."""

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a dict of arrays is no array")


@dataclass(frozen=True)
class TokenMetrics:
    """A user's `compute_metrics`. form: what it gets as predictions, see `likeliest_form`; empty: the dict of arrays."""

    compute: Callable[[EvalPrediction], Mapping[str, Any]]
    form: str = ""

    def of(self, found: EvalPrediction) -> Mapping[str, Any]:
        """The metrics of the predictions that `token_predictions` made.

        Raises ValueError if the function takes the dict of arrays for an array.
        """
        arrays: Any = found.predictions
        if self.form:
            # a token without a label has no logits; 0 is the label of none, as a likeliest token is in a stock trainer
            likeliest = np.where(arrays["likeliest"] == IGNORE_INDEX, 0, arrays["likeliest"])
            predictions: Any = (likeliest, found.label_ids) if self.form == "pair" else likeliest
            return self.compute(EvalPrediction(predictions, found.label_ids, found.inputs))
        try:
            return self.compute(found)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(
                f"compute_metrics raised {type(error).__name__}: {error}; logits never exist as a whole, so `predictions` is a "
                f"dict of arrays of rows by tokens ({', '.join(arrays)}): compare predictions['likeliest'][:, :-1] with "
                f"label_ids[:, 1:], or pass preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1)"
            ) from error


def check_room(rows: PlannedDataset, num_ranks: int, control: dist.ProcessGroup | None) -> None:
    """Raises ValueError on every rank if the padded arrays of a set would not fit into its share of host memory.

    num_ranks: ranks of this machine, each of which makes the arrays. Collective.
    """
    num_rows, longest = len(rows.dataset), int(rows.index.stops.max())
    needed, available = num_rows * longest * _TOKEN_BYTES, host_bytes()[0] // num_ranks
    problems = []
    if needed > available:
        problems.append(
            f"compute_metrics gets arrays of {num_rows} rows by {longest} tokens, padded as a stock trainer pads them, which "
            f"take {needed / 2**30:.1f} GiB of host memory on every rank; {available / 2**30:.1f} GiB are free for a rank; give "
            f"rows of similar lengths as a set of their own (eval_dataset={{name: set}}), or leave compute_metrics out: "
            f"predict() sums up every row"
        )
    raise_together(problems, control, "the evaluation cannot start")


def token_predictions(
    rows: PlannedDataset, scores: RowScores, includes: Sequence[str], control: dist.ProcessGroup | None
) -> EvalPrediction:
    """Predictions and labels of a whole set, equal on every rank. Collective.

    predictions: arrays [N, L] under three names. `likeliest`: the likeliest next token, IGNORE_INDEX without a label. `log_prob`:
    the log-probability of the next token's label, and `entropy`: that of its distribution, both in nats and 0 without a label.
    label_ids: labels [N, L], padded with IGNORE_INDEX, as are the token ids in `inputs`, if `includes` names them.
    """
    lengths = np.zeros(len(rows.dataset), np.int64)
    np.maximum.at(lengths, rows.index.rows, rows.index.stops)
    shape = len(lengths), int(lengths.max())
    everyone = gather_objects((scores.rows, scores.starts + scores.positions - 1, *_kept(scores)), control)
    numbers, places, *values = (np.concatenate(column) for column in zip(*everyone, strict=True))
    predictions = TokenArrays()
    for name, own in zip(("likeliest", "log_prob", "entropy"), values, strict=True):
        predictions[name] = np.full(shape, IGNORE_INDEX if name == "likeliest" else 0, own.dtype)
        predictions[name][numbers, places] = own
    columns = {"labels": _empty(shape), "input_ids": _empty(shape)}
    listed = [rows.task.read(rows.dataset[number]) for number in range(shape[0])]
    for name, padding in columns.items():
        items = [row_items(row, name if name in _names(row) else "input_ids") for row in listed]
        padded_rows(items, lengths, padding)
    made: Any = predictions
    return EvalPrediction(made, columns["labels"], columns["input_ids"] if "inputs" in includes else None)


def _kept(scores: RowScores) -> tuple[NDArray[Any], ...]:
    return scores.likeliest, -scores.losses, scores.entropies


def _empty(shape: tuple[int, int]) -> IntArray:
    return np.full(shape, IGNORE_INDEX, np.int64)


def _names(row: Any) -> list[str]:
    """The columns of a row."""
    return getattr(row, "column_names", None) or list(row)


def evaluated(
    run: Run,
    dataloader: DataLoader[Any],
    steps: Iterable[tuple[Any, Any, dict[str, Any]]],
    prefix: str,
    compute: TokenMetrics | None,
    wants_scores: bool = False,
) -> tuple[dict[str, Any], int, RowScores]:
    """Metrics of a set over all ranks, its number of sequences, and the scores that this rank holds if they are wanted.

    steps: for every planned step of `dataloader` the executor, the arguments of its forwards, and the batch. compute: the user's
    `compute_metrics`. Collective over all ranks.
    """
    rows: Any = dataloader.dataset
    assert isinstance(rows, PlannedDataset)
    if compute is not None:
        wants_scores = True
        check_room(rows, run.setup.costs.cluster.ranks_per_node, run.control)
    sums, loss_sum, total_weight, num_samples = np.zeros(6), 0.0, 0.0, 0
    kept: list[RowScores] = []
    tally = TokenTally(run.args.device)
    for executor, forwards, batch in steps:
        if run.token_loss is not None:
            loss_sum += float(executor.evaluate(*forwards, tally))
        if run.token_loss is None or wants_scores:
            scores = step_scores(batch["step"], batch["chunks"], executor.score(*forwards), rows.index)
            sums += scores.sums()
            kept += [scores] * wants_scores
        total_weight += batch["total_weight"]
        num_samples += len(batch["step"].sequences)
    if run.token_loss is not None:
        # tokens of the loss, counted with it
        sums[3:] = tally.sums_3.cpu().numpy()
    weighted, weight, loss, num_tokens, num_right, entropy = sums_over_ranks(sums.tolist(), run.control)
    mean = (weighted / (weight or 1)) if run.token_loss is None else loss_sum / (total_weight or 1)
    metrics: dict[str, Any] = {f"{prefix}_loss": mean}
    if run.token_loss is None and weighted == loss:
        metrics[f"{prefix}_perplexity"] = math.exp(min(mean, 700.0))
    if num_tokens:
        metrics[f"{prefix}_mean_token_accuracy"] = num_right / num_tokens
        metrics[f"{prefix}_entropy"] = entropy / num_tokens
    found = RowScores.joined(kept)
    if compute is not None:
        made = token_predictions(rows, found, run.args.include_for_metrics, run.control)
        metrics |= named_metrics(compute.of(made), prefix)
    return metrics, num_samples, found
