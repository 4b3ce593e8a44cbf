"""Evaluates a set with a language model: loss, token accuracy and entropy, scores of tokens, and a user's metrics of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from hf_longctx.hf.data.collator import PlannedDataset
from hf_longctx.hf.ranks.agreement import sums_over_ranks
from hf_longctx.hf.trainer.classifiers.predictions import named_metrics
from hf_longctx.hf.trainer.run import Run
from hf_longctx.hf.trainer.tokens.predictions import TokenMetrics, check_room, token_predictions
from hf_longctx.hf.trainer.tokens.row_scores import RowScores, step_scores
from hf_longctx.runtime.core.loss import TokenTally


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
