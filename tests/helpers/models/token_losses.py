"""Losses of tokens that users may write, and rows with weights of tokens."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_longctx.runtime.core.loss import LabelSmoothing, TokenLoss

Rows = list[dict[str, list[int]]]


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    """Focal loss with gamma 2 (arXiv 1708.02002)."""
    losses = F.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
    return (1 - torch.exp(-losses)) ** 2 * losses


# name in a `ModelCase` -> the loss that plans get
TOKEN_LOSSES: dict[str, TokenLoss | None] = {"": None, "focal": focal, "smoothed": LabelSmoothing(0.1)}


def plain_losses(loss: str, logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """Losses [T] of tokens that all have labels, each by its definition."""
    log_p_TV = logits_TV - logits_TV.exp().sum(dim=1, keepdim=True).log()
    losses_T = -log_p_TV[torch.arange(len(labels_T)), labels_T]
    if loss == "focal":
        return (1 - log_p_TV.exp()[torch.arange(len(labels_T)), labels_T]) ** 2 * losses_T
    return 0.9 * losses_T - 0.1 * log_p_TV.mean(dim=1) if loss == "smoothed" else losses_T


def with_weights(rows: Rows, zero: bool = False) -> Rows:
    """The rows with random weights of tokens, a third of them zero; zero: all of them are."""
    generator = random.Random(5)
    return [
        {**row, "loss_weights": [0.0 if zero else generator.choice([0.0, 0.3, generator.random() * 4]) for _ in row["input_ids"]]}
        for row in rows
    ]


def total_weight(rows: Rows) -> float:
    """Number of label tokens of the rows, or the sum of their weights."""
    return sum(
        weight
        for row in rows
        for label, weight in zip(row["labels"][1:], row.get("loss_weights", [1] * len(row["labels"]))[1:], strict=True)
        if label != -100
    )
