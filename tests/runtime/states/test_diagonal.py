"""Scans in blocks are those of a loop over tokens, with all gradients, however tokens fill the blocks."""

from __future__ import annotations

import pytest
import torch
from helpers.models.reference import relative_error
from torch import Tensor

from hf_longctx.runtime.states.scans import diagonal_scan


def by_loop(kept: Tensor, added: Tensor, before: Tensor | None) -> Tensor:
    state = torch.zeros_like(added[0]) if before is None else before
    states = []
    for token in range(kept.shape[0]):
        state = kept[token] * state + added[token]
        states.append(state)
    return torch.stack(states)


@pytest.mark.quick
@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 33, 256, 257, 300])
@pytest.mark.parametrize("with_state", [False, True])
def test_blocks_are_the_loop(num_tokens: int, with_state: bool) -> None:
    torch.manual_seed(num_tokens)
    # from states that stay to states that are gone at once
    kept = torch.exp(-torch.logspace(-4, 3, 5, dtype=torch.float64) * torch.rand(num_tokens, 3, 5, dtype=torch.float64))
    kept[num_tokens // 2] = 0.0
    inputs = [kept, *torch.randn(2, num_tokens, 3, 5, dtype=torch.float64)]
    inputs[2] = inputs[2][0]
    counts = torch.randn(num_tokens, 3, 5, dtype=torch.float64)

    def results(scan: object) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs[: 2 + with_state]]
        states = scan(*leaves[:2], leaves[2] if with_state else None)  # type: ignore[operator]
        return [states.detach(), *torch.autograd.grad((states * counts).sum(), leaves)]

    for found, expected in zip(results(diagonal_scan), results(by_loop), strict=True):
        assert relative_error(found, expected) <= 1e-14
