"""A recurrence whose state decays element by element: each state is `kept` times the one before, plus what its token adds.

Transformers' torch code of such scans (Mamba 1, RG-LRU) runs token by token, and its backward copies gradients of all tokens for
every token. Here the tokens of a block are combined by doubling, for all blocks at once, and the ends of blocks by the same
function again. Only products of what is kept are formed, no quotients and no logarithms, so nothing overflows.

Shapes: N tokens, X any further sizes, B tokens of a block, M blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BLOCK = 16


def diagonal_scan(kept_NX: Tensor, added_NX: Tensor, before_X: Tensor | None) -> Tensor:
    """States [N, X] after each token, in the tensors' dtype; before_X: the state before the first token (None: zeros)."""
    states: Tensor = _DiagonalScan.apply(kept_NX, added_NX, before_X)
    return states


class _DiagonalScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kept: Tensor, added: Tensor, before: Tensor | None) -> Tensor:
        states = _states(kept, added, before)
        ctx.save_for_backward(kept, states, before)
        return states

    @staticmethod
    def backward(ctx: Any, d_states: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:  # type: ignore[override]
        kept, states, before = ctx.saved_tensors
        # gradients pass from each state to the one before it: the same recurrence, from the last token to the first
        passed = torch.cat([torch.zeros_like(kept[:1]), kept[1:].flip(0)])
        d_added = _states(passed, d_states.flip(0), None).flip(0)
        first = torch.zeros_like(states[:1]) if before is None else before.unsqueeze(0)
        d_kept = d_added * torch.cat([first, states[:-1]])
        return d_kept, d_added, None if before is None else kept[0] * d_added[0]


def _states(kept: Tensor, added: Tensor, before: Tensor | None) -> Tensor:
    num_tokens = kept.shape[0]
    block = min(_BLOCK, num_tokens)
    num_blocks = -(-num_tokens // block)
    shape = (num_blocks * block, *kept.shape[1:])
    # tokens behind the last one change nothing that is read
    left, states = kept.new_zeros(shape), added.new_zeros(shape)
    left[:num_tokens], states[:num_tokens] = kept, added
    left, states = (x.view(num_blocks, block, *kept.shape[1:]) for x in (left, states))
    reach = 1
    while reach < block:
        # each token now stands for `reach` tokens that end with it, or for all from the start of its block
        states[:, reach:] += left[:, reach:] * states[:, :-reach]
        left[:, reach:] = left[:, reach:] * left[:, :-reach]
        reach *= 2
    if num_blocks > 1:
        ends = _states(left[:-1, -1], states[:-1, -1], before)
        states[1:] += left[1:] * ends.unsqueeze(1)
    if before is not None:
        states[0] += left[0] * before
    return states.flatten(0, 1)[:num_tokens]
