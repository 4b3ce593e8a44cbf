"""Losses of tokens that users may write, and rows with weights of tokens."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_longctx.runtime.core.loss import AnyLoss, Distillation, LabelSmoothing

Rows = list[dict[str, list[int]]]


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    """Focal loss with gamma 2 (arXiv 1708.02002)."""
    losses = F.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
    return (1 - torch.exp(-losses)) ** 2 * losses


# losses beside a teacher
DISTANCES = {
    "forward": Distillation(0.0, 2.0),
    "reverse": Distillation(1.0, 0.7),
    "jsd": Distillation(0.3, 1.5, 0.6),
    "top_k": Distillation(0.0, 1.0, 1.0, 5),
    "jsd_of_top_k": Distillation(0.5, 3.0, 0.25, 1),
}
# name in a `ModelCase` -> the loss that plans get
TOKEN_LOSSES: dict[str, AnyLoss] = {"": None, "focal": focal, "smoothed": LabelSmoothing(0.1), **DISTANCES}


def plain_distances(loss: Distillation, logits_TV: Tensor, teacher_TV: Tensor, labels_T: Tensor) -> Tensor:
    """Losses [T] beside a teacher, of tokens that all have labels, by the definition: of probabilities, not of logarithms."""
    scaled = ((x / loss.temperature).exp() for x in (logits_TV, teacher_TV))
    q_TV, p_TV = (each / each.sum(dim=1, keepdim=True) for each in scaled)
    if loss.top_k is not None:
        order_TV = teacher_TV.argsort(dim=1, descending=True)
        likely_Tk = order_TV[:, : loss.top_k]
        q_TV, p_TV = (
            torch.cat([each.gather(1, likely_Tk), each.gather(1, order_TV[:, loss.top_k :]).sum(dim=1, keepdim=True)], dim=1)
            for each in (q_TV, p_TV)
        )

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a / b).log()).sum(dim=1)

    if loss.beta in (0, 1):
        found_T = kl(q_TV, p_TV) if loss.beta else kl(p_TV, q_TV)
    else:
        m_TV = loss.beta * p_TV + (1 - loss.beta) * q_TV
        found_T = loss.beta * kl(p_TV, m_TV) + (1 - loss.beta) * kl(q_TV, m_TV)
    return loss.weight * found_T + (1 - loss.weight) * plain_losses("", logits_TV, labels_T)


def plain_losses(loss: str, logits_TV: Tensor, labels_T: Tensor, teacher_TV: Tensor | None = None) -> Tensor:
    """Losses [T] of tokens that all have labels, each by its definition. teacher_TV: logits of a teacher, if there is one."""
    if loss in DISTANCES:
        assert teacher_TV is not None
        return plain_distances(DISTANCES[loss], logits_TV, teacher_TV, labels_T)
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
