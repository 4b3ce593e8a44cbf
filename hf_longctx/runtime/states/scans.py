"""Scans of mixers whose code in transformers runs token by token, or in blocks from an empty state only.

`diagonal_scan` (Mamba 1, RG-LRU): each state is `kept` times the one before, plus what its token adds. The backward of
transformers' code copies gradients of all tokens for every token. Here the tokens of a block are combined by doubling, for all
blocks at once, and the ends of blocks by the same function again. Only products of `kept` are formed, no quotients and no
logarithms, so nothing overflows.

`lightning_blocks` (lightning attention): linear attention whose state decays at a fixed rate for each head, in blocks of tokens
from any state. `hf.models.states` gives it the model's decays, in the model's dtype.

`weighted_means` (RWKV): outputs are means of values over the tokens so far, with weights that decay at a fixed rate for each
channel. A token's weight is the exponential of its key, with a bonus for its own output. Weights of long documents fit no format,
so sums are never formed: the state is the mean of all values so far and the logarithm of the sum of their weights. (In
transformers it is numerator, denominator and largest logarithm, which is equivalent.)

`MatrixMemory` (mLSTM layers of xLSTM): a token adds the product of its key and value, times the exponential of its input gate, to
a memory that decays by the sigmoid of its forget gate. A second memory adds up keys alone. An output is what a query reads from
the first, divided by what it reads from the second, or by one if that is larger. Both memories are stored times exp(-m), where m
is the largest logarithm of a weight so far, or zero, that of the first memory. A small number is added to the divisor after that,
so outputs depend on m. The memory of keys is stored as one more column of that of values.

Shapes: N tokens of a document, slice or part of one, X any further sizes, B tokens of a block, M blocks, H heads or channels with
their own state, D, K and E sizes of a query, key and value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_longctx.runtime.states.passing import Effect

_BLOCK = 16


def diagonal_scan(kept_NX: Tensor, added_NX: Tensor, before_X: Tensor | None) -> Tensor:
    """Returns states [N, X] after each token, in the tensors' dtype; before_X: state before the first token (None: zeros)."""
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
    # tokens after the last one change nothing that is read
    left, states = kept.new_zeros(shape), added.new_zeros(shape)
    left[:num_tokens], states[:num_tokens] = kept, added
    left, states = (x.view(num_blocks, block, *kept.shape[1:]) for x in (left, states))
    reach = 1
    while reach < block:
        # each entry now combines the `reach` tokens that end with it, or all from the start of its block
        states[:, reach:] += left[:, reach:] * states[:, :-reach]
        left[:, reach:] = left[:, reach:] * left[:, :-reach]
        reach *= 2
    if num_blocks > 1:
        ends = _states(left[:-1, -1], states[:-1, -1], before)
        states[1:] += left[1:] * ends.unsqueeze(1)
    if before is not None:
        states[0] += left[0] * before
    return states.flatten(0, 1)[:num_tokens]


@dataclass(frozen=True, slots=True)
class Decays:
    """Decays of some heads."""

    # decrease of a state's logarithm per token
    slope_H11: Tensor
    # decay from the start of a block to each token, and from each token to its end
    query_HB1: Tensor
    key_HB1: Tensor
    # decay from key to query in a block; 0 for later keys
    diagonal_HBB: Tensor


def lightning_blocks(
    q_1NHD: Tensor, k_1NHD: Tensor, v_1NHD: Tensor, decays: Decays, state_1HEK: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns outputs [1, N, H, D], and the state [1, H, E, K] after the last token: products of values and keys."""
    block = decays.query_HB1.shape[1]
    q_1HND, k_1HND, v_1HND = (x.transpose(1, 2) for x in (q_1NHD, k_1NHD, v_1NHD))
    num_tokens, head_dim = q_1HND.shape[2:]
    state = q_1HND.new_zeros(1, q_1HND.shape[1], head_dim, head_dim) if state_1HEK is None else state_1HEK
    outputs = []
    for first in range(0, num_tokens, block):
        q, k, v = (x[:, :, first : first + block] for x in (q_1HND, k_1HND, v_1HND))
        count = q.shape[2]
        within = (q @ k.transpose(-1, -2)) * decays.diagonal_HBB[:, :count, :count] @ v
        outputs.append((q * decays.query_HB1[:, :count]) @ state.transpose(-1, -2) + within)
        added = v.transpose(-1, -2) @ (k * decays.key_HB1[:, block - count :])
        state = state * torch.exp(-decays.slope_H11 * count) + added
    return torch.cat(outputs, dim=2).transpose(1, 2), state


# tokens that are compared with each other at once; a document takes a step for each block
BLOCK_TOKENS = 16
# logarithm of the weight of no tokens
_NOTHING = -1e38


def weighted_means(
    k_1NH: Tensor, v_1NHE: Tensor, decay_H: Tensor, bonus_H: Tensor, state_1H2: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns means [1, N, H, E], and the state [1, H, 2] after the last token in at least fp32: mean, logarithm of weight.

    v_1NHE: values, E = 1. With a second column, which is not read, outputs are in at least fp32 too and have the logarithm of
    the summed weights there. decay_H: change of a weight's logarithm per token, negative. bonus_H: bonus of a token's own weight.
    """
    k_NH, v_NH, decay_H, bonus_H = (wide(x) for x in (k_1NH[0], v_1NHE[0, :, :, 0], decay_H, bonus_H))
    if state_1H2 is None:
        mean_H, log_H = torch.zeros_like(k_NH[0]), torch.full_like(k_NH[0], _NOTHING)
    else:
        mean_H, log_H = wide(state_1H2[0]).unbind(-1)
    outputs = []
    for k_BH, v_BH in zip(k_NH.split(BLOCK_TOKENS), v_NH.split(BLOCK_TOKENS), strict=True):
        count = k_BH.shape[0]
        # a row for each token and one for the state after the block; a column for the state before it and one for each token
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
    """State map of `weighted_means`; its weights are decays and bonuses of the channels."""

    def widened(self, inputs_1NHX: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor | None]:
        """Returns inputs with a second column of values, for which outputs have the logarithms of weights."""
        k, v = inputs_1NHX
        return (k, F.pad(v, (0, 1))), None

    def effect(self, inputs_1NHX: Sequence[Tensor], weights_H: Sequence[Tensor], output: Tensor, after: Tensor) -> Effect:
        """Returns the effect of tokens: the larger the weight of an earlier state, the nearer outputs are to its mean."""
        num_tokens, decay_H, dtype = output.shape[1], wide(weights_H[0]), inputs_1NHX[1].dtype
        own_1NH1, logs_1NH1 = output.split(1, dim=-1)
        left_1NH1 = (decay_H * torch.arange(num_tokens, device=output.device)[:, None])[None, :, :, None]

        def output_for(state_1H2: Tensor) -> Tensor:
            mean_1H1, log_1H1 = state_1H2.split(1, dim=-1)
            share = torch.sigmoid(log_1H1[:, None] + left_1NH1 - logs_1NH1)
            return (own_1NH1 + share * (mean_1H1[:, None] - own_1NH1)).to(dtype)

        return Effect(after, (decay_H * num_tokens)[None, :, None], output_for)

    def carry_shape(self, state: torch.Size) -> tuple[int, ...]:
        """Returns the shape of one number for each channel."""
        return (*state[:-1], 1)

    def joined(self, carry: Tensor, state: Tensor, after: Tensor) -> Tensor:
        """Returns the weighted mean of both."""
        mean, log = state.split(1, dim=-1)
        own, own_log = after.split(1, dim=-1)
        log = log + carry
        share = torch.sigmoid(log - own_log)
        return torch.cat([own + share * (mean - own), torch.logaddexp(log, own_log)], dim=-1)


def wide(x: Tensor) -> Tensor:
    """Returns `x` in at least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# logarithm of the largest weight of no tokens


@dataclass(frozen=True, slots=True)
class MatrixMemory:
    """Recurrence of mLSTM for values of `value_size` elements, `block_tokens` at once; `eps` is added to divisors."""

    value_size: int
    block_tokens: int
    eps: float

    def scan(self, inputs: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns outputs [1, N, H, E], and the state after the last token (`_packed`) in at least fp32.

        inputs: queries and keys [1, N, H, K], values [1, N, H, E], input gates and forget gates [1, N, H]. For values with two
        more columns, which are not read, outputs are numerator, divisor and m, in at least fp32, without the division.
        """
        is_open, dtype = inputs[2].shape[-1] > self.value_size, inputs[2].dtype
        q_HNK, k_HNK, v_HNE, gate_HN, kept_HN = (wide(x[0]).transpose(0, 1) for x in inputs)
        q_HNK, v_HNE = _scaled(q_HNK), F.pad(v_HNE[..., : self.value_size], (0, 1), value=1.0)
        if state is None:
            memory_HKE, m_H = v_HNE.new_zeros(v_HNE.shape[0], k_HNK.shape[-1], v_HNE.shape[-1]), gate_HN.new_zeros(len(gate_HN))
        else:
            memory_HKE, m_H = _unpacked(wide(state[0]))
        outputs = []
        for start in range(0, gate_HN.shape[1], self.block_tokens):
            block = slice(start, start + self.block_tokens)
            q, k, v = (x[:, block] for x in (q_HNK, k_HNK, v_HNE))
            decay_HB = F.logsigmoid(kept_HN[:, block]).cumsum(dim=1)
            before_HB, logs_HB = decay_HB + m_H[:, None], gate_HN[:, block] - decay_HB
            is_later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
            logs_HBB = (decay_HB[..., None] + logs_HB[:, None]).masked_fill(is_later, -torch.inf)
            most_HB = torch.maximum(before_HB, logs_HBB.amax(dim=-1))
            within = (q @ k.transpose(1, 2)) * torch.exp(logs_HBB - most_HB[..., None])
            read = within @ v + (q @ memory_HKE) * torch.exp(before_HB - most_HB)[..., None]
            outputs.append(torch.cat([read, most_HB[..., None]], dim=-1) if is_open else self.divided(read, most_HB[..., None]))
            left_HB = decay_HB[:, -1:] + logs_HB
            next_H = torch.maximum(before_HB[:, -1], left_HB.amax(dim=1))
            added = (k * torch.exp(left_HB - next_H[:, None])[..., None]).transpose(1, 2) @ v
            memory_HKE = memory_HKE * torch.exp(before_HB[:, -1] - next_H)[:, None, None] + added
            m_H = next_H
        output = torch.cat(outputs, dim=1).transpose(0, 1)[None]
        return output if is_open else output.to(dtype), _packed(memory_HKE, m_H)[None]

    def divided(self, read: Tensor, most: Tensor) -> Tensor:
        """Divides what queries read, whose last column is the divisor. most: m of each token."""
        values, divisor = read.split([self.value_size, 1], dim=-1)
        return values / (torch.maximum(divisor.abs(), torch.exp(-most)) + self.eps)

    def widened(self, inputs_1NHX: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor | None]:
        """Returns inputs for which `scan` does not divide, and a state of zero weight."""
        q, k, v, *gates = inputs_1NHX
        none = v.new_zeros(v.shape[2], k.shape[-1], self.value_size + 1, dtype=wide(v[:, :0]).dtype)
        return (q, k, F.pad(v, (0, 2)), *gates), _packed(none, none.new_full((len(none),), _NOTHING))[None]

    def effect(self, inputs_1NHX: Sequence[Tensor], weights_H: Sequence[Tensor], output: Tensor, after: Tensor) -> Effect:
        """Returns the effect of tokens, whose outputs are divided here, by what queries read from both memories."""
        dtype, q_NHK = inputs_1NHX[2].dtype, _scaled(wide(inputs_1NHX[0][0]))
        decay_NH1 = F.logsigmoid(wide(inputs_1NHX[-1][0])).cumsum(dim=0).unsqueeze(-1)
        own_NHE, own_m = output[0].split([self.value_size + 1, 1], dim=-1)

        def output_for(state: Tensor) -> Tensor:
            memory_HKE, m_H = _unpacked(state[0])
            before = decay_NH1 + m_H[:, None]
            most = torch.maximum(before, own_m)
            earlier = (q_NHK.transpose(0, 1) @ memory_HKE).transpose(0, 1)
            read = own_NHE * torch.exp(own_m - most) + earlier * torch.exp(before - most)
            return self.divided(read, most)[None].to(dtype)

        return Effect(after, decay_NH1[None, -1, :, :, None], output_for)

    def carry_shape(self, state: torch.Size) -> tuple[int, ...]:
        """Returns the shape of one number for each head."""
        return (*state[:2], 1, 1)

    def joined(self, carry: Tensor, state: Tensor, after: Tensor) -> Tensor:
        """Returns the sum of both memories, each scaled to the larger m."""
        (memory, m), (own, own_m) = _unpacked(state[0]), _unpacked(after[0])
        m = m + carry.view(-1)
        most = torch.maximum(m, own_m)
        total = memory * torch.exp(m - most)[:, None, None] + own * torch.exp(own_m - most)[:, None, None]
        return _packed(total, most)[None]


def _scaled(q: Tensor) -> Tensor:
    return q * q.shape[-1] ** -0.5


def _packed(memory_HKE: Tensor, m_H: Tensor) -> Tensor:
    """Packs both memories and m, which fills the last row, into one tensor [H, K + 1, E + 1]."""
    return torch.cat([memory_HKE, m_H[:, None, None].expand(-1, 1, memory_HKE.shape[-1])], dim=1)


def _unpacked(state: Tensor) -> tuple[Tensor, Tensor]:
    return state[:, :-1], state[:, -1, 0]
