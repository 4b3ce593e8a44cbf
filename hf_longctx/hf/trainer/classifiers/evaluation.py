"""Evaluates a set with a model that classifies: its loss alone, or its logits, labels and metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput

from hf_longctx.hf.ranks.agreement import gather_objects
from hf_longctx.hf.trainer.classifiers.predictions import predictions_of, step_logits
from hf_longctx.hf.trainer.run import Run


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
