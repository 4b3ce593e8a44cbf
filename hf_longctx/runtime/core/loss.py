"""The loss of a plan: cross-entropy summed over tokens, divided once by the step's label tokens over all ranks.

Whatever the plan, every label token weighs the same, so loss and gradients do not depend on it. (FlexSP's artefact takes
the mean inside each group, which makes a token's weight depend on its group.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100


def summed_cross_entropy(logits_1TV: Tensor, shift_labels_1T: Tensor) -> Tensor:
    """Scalar sum over this rank's label tokens, in at least fp32; exactly zero, with zero gradients, where all are masked.

    `shift_labels` holds the next token of each position (shifted before any cut) and IGNORE_INDEX where there is none.
    """
    logits_TV = logits_1TV.reshape(-1, logits_1TV.shape[-1])
    if logits_TV.dtype in (torch.float16, torch.bfloat16):
        logits_TV = logits_TV.float()
    return F.cross_entropy(logits_TV, shift_labels_1T.reshape(-1), ignore_index=IGNORE_INDEX, reduction="sum")


@dataclass(frozen=True, slots=True)
class TokenScores:
    """How well the next token of every token of a shard was predicted, without a graph; zero and False without a label.

    losses_T: the cross-entropy, computed in at least fp32 and held as fp64. is_right_T: whether the label was likeliest.
    """

    losses_T: Tensor
    is_right_T: Tensor


@torch.no_grad()
def token_scores(logits_1TV: Tensor, shift_labels_1T: Tensor) -> TokenScores:
    """The scores whose losses add up to `summed_cross_entropy`."""
    logits_TV, labels_T = logits_1TV.reshape(-1, logits_1TV.shape[-1]), shift_labels_1T.reshape(-1)
    is_right_T = logits_TV.argmax(-1) == labels_T
    if logits_TV.dtype in (torch.float16, torch.bfloat16):
        logits_TV = logits_TV.float()
    losses_T = F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORE_INDEX, reduction="none")
    return TokenScores(losses_T.double(), is_right_T)


def step_loss(loss_sum: Tensor, num_label_tokens: int) -> Tensor:
    """This rank's share of the step's loss: sums over ranks and chunks to the mean over `num_label_tokens`.

    `num_label_tokens` counts the label tokens of the whole step over all ranks. A step without any has loss zero.
    """
    return loss_sum / max(num_label_tokens, 1)
