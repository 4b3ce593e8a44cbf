"""The recurrence of xLSTM's mLSTM layers: a matrix memory with exponential gates, and outputs normalised by what it holds.

A token adds the product of its key and value, times the exponential of its input gate, to a memory that decays by the sigmoid of
its forget gate. A second memory adds up keys alone. An output is what a query reads from the first, divided by what it reads
from the second, or by one if that is more. Both memories are kept times exp(-m), where m is the largest logarithm of a weight so
far, or that of the first memory, which is zero. A small number is added to the divisor after that, so outputs depend on m.

transformers runs blocks of tokens and then single ones, both of which compute these same outputs; its blocks take no rest.

Shapes: H heads, N tokens of a document, slice or part of one, B tokens of a block, K and E sizes of a key and a value. The memory
of keys is one more column of that of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_longctx.runtime.states.passing import Effect
from hf_longctx.runtime.states.scans.weighted_means import wide

# logarithm of the largest weight of no tokens
_NOTHING = -1e38


@dataclass(frozen=True, slots=True)
class MatrixMemory:
    """The recurrence for values of `value_size` elements, `block_tokens` at once; `eps` is added to divisors."""

    value_size: int
    block_tokens: int
    eps: float

    def scan(self, inputs: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Outputs [1, N, H, E], and the state after the last token (`_packed`) in at least fp32.

        inputs: queries and keys [1, N, H, K], values [1, N, H, E], input gates and forget gates [1, N, H]. For values with two
        more columns, which are not read, outputs are numerator, divisor and m, in at least fp32, before they are divided.
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
        """Outputs of what queries read, with the divisor in the last column; most: m of each token."""
        values, divisor = read.split([self.value_size, 1], dim=-1)
        return values / (torch.maximum(divisor.abs(), torch.exp(-most)) + self.eps)

    def widened(self, inputs_1NHX: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor | None]:
        """Inputs for which `scan` does not divide, and a state that weighs nothing."""
        q, k, v, *gates = inputs_1NHX
        none = v.new_zeros(v.shape[2], k.shape[-1], self.value_size + 1, dtype=wide(v[:, :0]).dtype)
        return (q, k, F.pad(v, (0, 2)), *gates), _packed(none, none.new_full((len(none),), _NOTHING))[None]

    def effect(self, inputs_1NHX: Sequence[Tensor], weights_H: Sequence[Tensor], output: Tensor, after: Tensor) -> Effect:
        """The effect of tokens; their outputs are divided here, by what queries read from both memories."""
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
        """One number for each head."""
        return (*state[:2], 1, 1)

    def joined(self, carry: Tensor, state: Tensor, after: Tensor) -> Tensor:
        """The sum of both memories, each times what its m differs from that of both."""
        (memory, m), (own, own_m) = _unpacked(state[0]), _unpacked(after[0])
        m = m + carry.view(-1)
        most = torch.maximum(m, own_m)
        total = memory * torch.exp(m - most)[:, None, None] + own * torch.exp(own_m - most)[:, None, None]
        return _packed(total, most)[None]


def _scaled(q: Tensor) -> Tensor:
    return q * q.shape[-1] ** -0.5


def _packed(memory_HKE: Tensor, m_H: Tensor) -> Tensor:
    """One tensor [H, K + 1, E + 1] for both memories and m, which fills the last row."""
    return torch.cat([memory_HKE, m_H[:, None, None].expand(-1, 1, memory_HKE.shape[-1])], dim=1)


def _unpacked(state: Tensor) -> tuple[Tensor, Tensor]:
    return state[:, :-1], state[:, -1, 0]
