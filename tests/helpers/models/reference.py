"""Plain Hugging Face as the reference: random rows, and a step on them one document at a time, without the package's code."""

from __future__ import annotations

import random
from typing import Any

import peft
import torch
import torch.nn.functional as F
from helpers.models.dropout_truth import dropping
from helpers.models.tiny_models import VOCAB_SIZE
from helpers.models.token_losses import plain_losses, total_weight
from torch import Tensor


def random_rows(lengths: list[int], seed: int = 0, masked: tuple[int, ...] = ()) -> list[dict[str, list[int]]]:
    """Dataset rows of random tokens with labels; rows in `masked` have no labels, the others lack some."""
    generator = random.Random(seed)
    rows = []
    for number, length in enumerate(lengths):
        input_ids = [generator.randrange(VOCAB_SIZE) for _ in range(length)]
        labels = [-100 if number in masked or generator.random() < 0.2 else token for token in input_ids]
        rows.append({"input_ids": input_ids, "labels": labels})
    return rows


def reference_step(
    model: torch.nn.Module, rows: list[dict[str, list[int]]], loss_name: str = "", teacher: torch.nn.Module | None = None
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the mean over all label tokens: HF logits of each row alone, cross-entropy summed in fp64.

    Rows may have weights of tokens; loss_name: another loss than cross-entropy; teacher: for losses beside one. If the config
    asks for it, the balancing loss of the experts over all rows is added.
    """
    config = model.get_base_model().config if isinstance(model, peft.PeftModel) else model.config
    is_balanced = getattr(config, "output_router_logits", False)
    routed, losses = [], []
    count = total_weight(rows)
    total = 0.0
    model.zero_grad()
    for number, row in enumerate(rows):
        with dropping(model, number):
            output = model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False)
        labels = torch.tensor(row["labels"][1:], dtype=torch.int64)
        logits_TV = output.logits[0, :-1].double()
        if loss_name or "loss_weights" in row:
            is_label = labels != -100
            weights = torch.tensor(row.get("loss_weights", [1.0] * len(row["labels"]))[1:], dtype=torch.float64)[is_label]
            beside = None
            if teacher is not None:
                with torch.no_grad():
                    beside = (
                        teacher(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0, :-1].double()[is_label]
                    )
            losses_T = plain_losses(loss_name, logits_TV[is_label], labels[is_label], beside)
            loss = (weights * losses_T).sum() / (count or 1)
        else:
            loss = F.cross_entropy(logits_TV, labels, ignore_index=-100, reduction="sum") / max(count, 1)
        total += float(loss.detach())
        if is_balanced:
            losses.append(loss)
            routed.append(output.router_logits)
        else:
            loss.backward()
    if is_balanced:
        balance = config.router_aux_loss_coef * balance_of(routed, config)
        (sum(losses) + balance).backward()
        total += float(balance.detach())
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def balance_of(routed: list[tuple[Tensor, ...]], config: Any) -> Tensor:
    """Balancing loss of the experts over all rows and layers, from logits [tokens, experts], in fp64 instead of fp32."""
    p_RE = torch.cat([logits.double() for row in routed for logits in row]).softmax(dim=-1)
    chosen = p_RE.topk(config.num_experts_per_tok, dim=-1).indices
    share_E = F.one_hot(chosen, config.num_experts).sum(dim=1).double().mean(dim=0)
    return config.num_experts * (share_E * p_RE.mean(dim=0)).sum()


def relative_error(found: Tensor, expected: Tensor) -> float:
    """max |found - expected| / max |expected|; zero if both tensors are zero."""
    scale = float(expected.abs().max())
    error = float((found - expected).abs().max())
    return error / scale if scale else error


def worst_error(found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> float:
    """The largest relative error of loss and gradients."""
    assert found[1].keys() == expected[1].keys()
    errors = [relative_error(found[1][name], gradient) for name, gradient in expected[1].items()]
    return max(abs(found[0] - expected[0]) / max(abs(expected[0]), 1.0), *errors)


TOLERANCE = 1e-12


# largest relative error allowed in bf16: 2^-9 per rounding (8 bits), over some tens of roundings in a row
BF16_BAND = 0.08
