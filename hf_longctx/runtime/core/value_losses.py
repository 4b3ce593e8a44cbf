"""Losses of tokens whose labels are numbers instead of classes: regression, several classes at once, and given slopes.

A label is then the number of a row in `ChunkInputs.label_values`. `Targets.of` binds that table to the loss, so that the executor
and the tiled output head see an ordinary `TokenLoss`.

Shapes: T tokens, K outputs of the head, N rows of the table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor


class ValueLoss(ABC):
    """A loss from the outputs of a head and the values that they should have, for each token by itself."""

    name: ClassVar[str]
    """The loss in words for the log."""

    @abstractmethod
    def losses(self, logits_TK: Tensor, values_TK: Tensor) -> Tensor:
        """Losses [T] of `logits_TK`, in at least fp32."""


@dataclass(frozen=True, slots=True)
class SquaredError(ValueLoss):
    """Mean over the outputs of their squared distance from the values: regression, as transformers computes it."""

    name: ClassVar[str] = "squared error"

    def losses(self, logits_TK: Tensor, values_TK: Tensor) -> Tensor:
        """Losses [T]."""
        return (logits_TK - values_TK).square().mean(dim=1)


@dataclass(frozen=True, slots=True)
class BinaryCrossEntropy(ValueLoss):
    """Mean over the outputs of the cross-entropy of each as a class of its own: several labels, as transformers computes it."""

    name: ClassVar[str] = "binary cross-entropy"

    def losses(self, logits_TK: Tensor, values_TK: Tensor) -> Tensor:
        """Losses [T]."""
        values_TK = values_TK.to(logits_TK.dtype)
        return F.binary_cross_entropy_with_logits(logits_TK, values_TK, reduction="none").mean(dim=1)


@dataclass(frozen=True, slots=True)
class OwnLogit:
    """A `TokenLoss`: the first logit itself, such as a reward, so that weights of labels are slopes of a loss by rewards."""

    def __call__(self, logits_TK: Tensor, labels_T: Tensor) -> Tensor:
        """Losses [T]."""
        return logits_TK[:, 0]


@dataclass(frozen=True, slots=True)
class AtValues:
    """A `TokenLoss`: a `ValueLoss` with its table, in which labels number the rows.

    values_NK: None for tokens of which none has a label.
    """

    loss: ValueLoss
    values_NK: Tensor | None

    def __call__(self, logits_TK: Tensor, labels_T: Tensor) -> Tensor:
        """Losses [T]; those of tokens without a label are finite and mean nothing."""
        values_NK = torch.zeros(1, logits_TK.shape[1]) if self.values_NK is None else self.values_NK
        return self.loss.losses(logits_TK, values_NK.to(logits_TK.device)[labels_T.clamp_min(0)])
