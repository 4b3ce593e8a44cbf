"""The loss of a step: cross-entropy summed over tokens, divided once by the number of label tokens of all ranks.

Every label token has equal weight under any plan, so loss and gradients do not depend on the plan. (FlexSP's published
code takes the mean inside each group, so a token's weight depends on its group.) The executor, the tiled output head and the
evaluation call these functions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100


def summed_cross_entropy(logits_1TV: Tensor, shift_labels_1T: Tensor) -> Tensor:
    """Cross-entropy summed over this rank's label tokens: a scalar in at least fp32.

    `shift_labels` holds the next token of each position (shifted before sequences were cut), IGNORE_INDEX where there is none.
    If all labels are masked, loss and gradients are exactly zero.
    """
    logits_TV = logits_1TV.reshape(-1, logits_1TV.shape[-1])
    if logits_TV.dtype in (torch.float16, torch.bfloat16):
        logits_TV = logits_TV.float()
    return F.cross_entropy(logits_TV, shift_labels_1T.reshape(-1), ignore_index=IGNORE_INDEX, reduction="sum")


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Prediction quality of each token of a shard, without a graph.

    losses_T: cross-entropy, computed in at least fp32 and stored as fp64; 0 for tokens without a label.
    is_right_T: whether the label was the most likely token; False without a label.
    """

    losses_T: Tensor
    is_right_T: Tensor


@torch.no_grad()
def token_scores(logits_1TV: Tensor, shift_labels_1T: Tensor) -> TokenScores:
    """Scores of every token of a shard; their losses add up to `summed_cross_entropy`."""
    logits_TV, labels_T = logits_1TV.reshape(-1, logits_1TV.shape[-1]), shift_labels_1T.reshape(-1)
    is_right_T = logits_TV.argmax(-1) == labels_T
    if logits_TV.dtype in (torch.float16, torch.bfloat16):
        logits_TV = logits_TV.float()
    losses_T = F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORE_INDEX, reduction="none")
    return TokenScores(losses_T.double(), is_right_T)


def step_loss(loss_sum: Tensor, num_label_tokens: int) -> Tensor:
    """One chunk's contribution to the loss of the step.

    Summed over ranks and chunks, the contributions are the mean over `num_label_tokens`, the label tokens of the whole step
    on all ranks. A step without label tokens has loss zero.
    """
    return loss_sum / max(num_label_tokens, 1)
