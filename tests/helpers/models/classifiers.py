"""Rows for models that classify documents or tokens, and plain transformers on them, one document at a time."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from helpers.models.tiny_models import PAD, VOCAB_SIZE
from torch import Tensor

NUM_LABELS = 3
# name -> settings of the config
HEADS: dict[str, dict[str, Any]] = {
    "classes": {"num_labels": NUM_LABELS},
    "regression": {"num_labels": 1},
    "several": {"num_labels": NUM_LABELS, "problem_type": "multi_label_classification"},
    "tokens": {"num_labels": NUM_LABELS, "classifier_dropout": 0.0},
}


def classifier_rows(head: str, lengths: list[int], seed: int = 0) -> list[dict[str, Any]]:
    """Rows of random tokens with labels for a head; some labels are missing, and some documents end in padding tokens."""
    generator = random.Random(seed)
    rows = []
    for number, length in enumerate(lengths):
        ids = [generator.randrange(VOCAB_SIZE) for _ in range(length)]
        if head != "tokens" and number % 3 == 1:
            ids[-2:] = [PAD] * len(ids[-2:])
        row: dict[str, Any] = {"input_ids": ids}
        if head == "tokens":
            row["labels"] = [generator.choice([-100, 0, 1, 2]) for _ in ids]
        elif head == "regression":
            row["label"] = generator.random()
        elif head == "several":
            row["label"] = [float(generator.randrange(2)) for _ in range(NUM_LABELS)]
        else:
            row["label"] = -100 if number == 2 else generator.randrange(NUM_LABELS)
        rows.append(row)
    return rows


def plain_step(model: Any, head: str, rows: list[dict[str, Any]]) -> tuple[float, dict[str, Tensor], list[Tensor]]:
    """Loss, gradients and logits of each row: documents alone, through the forward of the class, with losses in fp64."""
    losses, count, logits = [], 0, []
    for row in rows:
        output = model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False)
        logits.append(output.logits[0].detach())
        if head == "tokens":
            labels = torch.tensor(row["labels"])
            losses.append(F.cross_entropy(output.logits[0], labels, ignore_index=-100, reduction="sum"))
            count += int((labels != -100).sum())
            continue
        # numbers are fp32 in batches of transformers
        label = torch.tensor(row["label"], dtype=torch.int64 if head == "classes" else torch.float32)
        if head == "classes":
            losses.append(F.cross_entropy(output.logits, label.view(1), ignore_index=-100, reduction="sum"))
        elif head == "regression":
            losses.append(F.mse_loss(output.logits[0, 0], label.double()))
        else:
            losses.append(F.binary_cross_entropy_with_logits(output.logits[0], label.double()))
        count += int(label.numel() > 1 or int(label) != -100)
    loss = torch.stack(losses).sum() / count
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return float(loss.detach()), gradients, logits
