"""Gives a user's `compute_metrics` what plans know of every token, in the shape of a stock trainer's logits without vocabulary.

Column p of `predictions` is about the token at p + 1, which the logits at p predict; `label_ids` are not shifted. So metrics
compare `predictions[...][:, :-1]` with `label_ids[:, 1:]`, as they do with a stock trainer's likeliest tokens.

Shapes: N rows of the set, in its order, L tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from transformers import EvalPrediction

from hf_longctx.hf.data.collator import PlannedDataset
from hf_longctx.hf.data.sampler import IntArray
from hf_longctx.hf.ranks.agreement import gather_objects, raise_together
from hf_longctx.hf.ranks.launch import host_bytes
from hf_longctx.hf.trainer.classifiers.predictions import padded_rows, row_items
from hf_longctx.hf.trainer.tokens.row_scores import RowScores
from hf_longctx.runtime.core.loss import IGNORE_INDEX

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
