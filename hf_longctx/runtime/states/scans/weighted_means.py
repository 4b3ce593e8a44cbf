"""RWKV's attention: outputs are means of values over the tokens so far, whose weights decay at a fixed rate for each channel.

A token's weight is the exponential of its key. It decays by a constant factor with every later token, and the token that is
computed has a bonus for itself. Weights of long documents fit no format, so sums are never formed: the state holds the mean of
all values so far and the logarithm of the sum of their weights. transformers runs this token by token, from a state of numerator,
denominator and the largest logarithm, which says the same.

Shapes: H channels, each with a state of its own; N tokens of a document, slice or part of one; B tokens of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_longctx.runtime.states.passing import Effect

# tokens that are compared with each other at once; a document takes a step for each block
BLOCK_TOKENS = 16
# logarithm of the weight of no tokens
_NOTHING = -1e38


def weighted_means(
    k_1NH: Tensor, v_1NHE: Tensor, decay_H: Tensor, bonus_H: Tensor, state_1H2: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Means [1, N, H, E], and the state [1, H, 2] after the last token in at least fp32: mean, and logarithm of the weight.

    v_1NHE: values, E = 1. With a second column, which is not read, outputs are in at least fp32 too, and have the logarithm of
    the summed weights there.
    decay_H: what the logarithm of a weight loses with every token, negative. bonus_H: what a token's own weight has more.
    """
    k_NH, v_NH, decay_H, bonus_H = (wide(x) for x in (k_1NH[0], v_1NHE[0, :, :, 0], decay_H, bonus_H))
    if state_1H2 is None:
        mean_H, log_H = torch.zeros_like(k_NH[0]), torch.full_like(k_NH[0], _NOTHING)
    else:
        mean_H, log_H = wide(state_1H2[0]).unbind(-1)
    outputs = []
    for k_BH, v_BH in zip(k_NH.split(BLOCK_TOKENS), v_NH.split(BLOCK_TOKENS), strict=True):
        count = k_BH.shape[0]
        # a row for each token, and one for what comes after the block; a column for the state, and one for each token
        row, column = torch.arange(count + 1, device=k_BH.device)[:, None, None], torch.arange(count, device=k_BH.device)[:, None]
        is_self, is_later = row == column, column > row
        logs = k_BH + torch.where(is_self, bonus_H, decay_H * (row - 1 - column))
        logs = torch.cat([(log_H + decay_H * row), logs.masked_fill(is_later, -torch.inf)], dim=1)
        means = (logs.softmax(dim=1) * torch.cat([mean_H[None], v_BH])).sum(dim=1)
        totals = logs.logsumexp(dim=1)
        outputs.append(means[:-1] if v_1NHE.shape[-1] == 1 else torch.stack([means[:-1], totals[:-1]], dim=-1))
        mean_H, log_H = means[-1], totals[-1]
    output = torch.cat(outputs)[None]
    output_1NHE = output if output.dim() == 4 else output.unsqueeze(-1).to(v_1NHE.dtype)
    return output_1NHE, torch.stack([mean_H, log_H], dim=-1).unsqueeze(0)


@dataclass(frozen=True, slots=True)
class MeansMap:
    """How `weighted_means` depends on the state before its tokens; its weights are decays and bonuses of the channels."""

    def widened(self, inputs_1NHX: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor | None]:
        """Inputs with a second column of values, for which outputs have the logarithms of weights."""
        k, v = inputs_1NHX
        return (k, F.pad(v, (0, 1))), None

    def effect(self, inputs_1NHX: Sequence[Tensor], weights_H: Sequence[Tensor], output: Tensor, after: Tensor) -> Effect:
        """The effect of tokens: the more an earlier state weighs, the nearer the outputs are to its mean."""
        num_tokens, decay_H, dtype = output.shape[1], wide(weights_H[0]), inputs_1NHX[1].dtype
        own_1NH1, logs_1NH1 = output.split(1, dim=-1)
        left_1NH1 = (decay_H * torch.arange(num_tokens, device=output.device)[:, None])[None, :, :, None]

        def output_for(state_1H2: Tensor) -> Tensor:
            mean_1H1, log_1H1 = state_1H2.split(1, dim=-1)
            share = torch.sigmoid(log_1H1[:, None] + left_1NH1 - logs_1NH1)
            return (own_1NH1 + share * (mean_1H1[:, None] - own_1NH1)).to(dtype)

        return Effect(after, (decay_H * num_tokens)[None, :, None], output_for)

    def carry_shape(self, state: torch.Size) -> tuple[int, ...]:
        """One number for each channel."""
        return (*state[:-1], 1)

    def joined(self, carry: Tensor, state: Tensor, after: Tensor) -> Tensor:
        """The mean of both, by their weights."""
        mean, log = state.split(1, dim=-1)
        own, own_log = after.split(1, dim=-1)
        log = log + carry
        share = torch.sigmoid(log - own_log)
        return torch.cat([own + share * (mean - own), torch.logaddexp(log, own_log)], dim=-1)


def wide(x: Tensor) -> Tensor:
    """`x` in at least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
