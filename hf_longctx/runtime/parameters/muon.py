"""Muon for the matrices of layers, AdamW for everything else, as one optimizer.

Muon (Jordan, 2024, https://kellerjordan.github.io/posts/muon) makes the momentum of a matrix orthogonal before it is subtracted.
It is meant for matrices inside layers; embedding, head, norms and biases are trained with AdamW.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

# setting of a group: which of the two optimizers updates it
_KIND = "kind"


class MuonAdamW(Optimizer):
    """An optimizer that runs `torch.optim.Muon` for some weights and `torch.optim.AdamW` for others."""

    def __init__(self, matrices: Iterable[nn.Parameter], others: Iterable[dict[str, Any]], muon: dict[str, Any]) -> None:
        """matrices: weights of two dimensions. others: groups of AdamW with their settings. muon: settings of Muon."""
        weights = list(matrices)
        parts: list[Optimizer] = [torch.optim.Muon(weights, **muon)] if weights else []
        rest = [group for group in others if group["params"]]
        parts += [torch.optim.AdamW(rest)] if rest else []
        groups = [{**group, _KIND: type(part).__name__} for part in parts for group in part.param_groups]
        super().__init__(groups, {})
        self._parts = {type(part).__name__: part for part in parts}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Updates all weights; both parts get the current groups and states, since checkpoints replace them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for name, part in self._parts.items():
            part.param_groups = [group for group in self.param_groups if group[_KIND] == name]
            part.state = self.state
            part.step()
        return loss
