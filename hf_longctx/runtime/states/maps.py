"""How scans of known kinds depend on the state before their tokens, for `passing.scan_runs`.

Shapes: H heads with a state of their own, G heads that several of them read, N tokens, K and E sizes of a head's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_longctx.runtime.states.passing import Effect


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """Delta rules, with states [1, H, K, E], a row for each element of a key; inputs: queries, keys, values, and others.

    Columns of the state do not read each other. So K more columns, whose values are zero and whose first state is one, hold the
    matrix that a token's output and the last state multiply a state before the tokens with.
    """

    def widened(self, inputs_1NHX: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor | None]:
        """Inputs with K more columns of values, and their first state."""
        q, k, v, *others = inputs_1NHX
        key_size, value_size, num_heads = k.shape[-1], v.shape[-1], v.shape[2]
        wide = torch.promote_types(v.dtype, torch.float32)
        one = torch.eye(key_size, dtype=wide, device=v.device).expand(1, num_heads, key_size, key_size)
        # outputs have the format of queries; what adds up to an output is rounded once, after that
        return (q.to(wide), k, F.pad(v, (0, key_size)), *others), F.pad(one, (value_size, 0))

    def effect(self, inputs_1NHX: Sequence[Tensor], weights_H: Sequence[Tensor], output: Tensor, after: Tensor) -> Effect:
        """The effect of tokens, from the columns that the rule made."""
        value_size, dtype = inputs_1NHX[2].shape[-1], inputs_1NHX[0].dtype
        own_1NHE, reads_1NHK = output[..., :value_size], output[..., value_size:]

        def output_for(state_1HKE: Tensor) -> Tensor:
            added = reads_1NHK.transpose(1, 2) @ state_1HKE.to(reads_1NHK.dtype)
            return (own_1NHE + added.transpose(1, 2)).to(dtype)

        return Effect(after[..., :value_size], after[..., value_size:], output_for)

    def carry_shape(self, state: torch.Size) -> tuple[int, ...]:
        """A K x K matrix for each head."""
        return (*state[:-1], state[-2])

    def joined(self, carry: Tensor, state: Tensor, after: Tensor) -> Tensor:
        """The matrix times the state, and what the tokens added."""
        return carry @ state + after


@dataclass(frozen=True, slots=True)
class Decay:
    """Mamba 2, with states [1, H, E, K] that decay by one number for each token and head.

    log_decays: takes inputs and weights of the scan; the logarithm of these numbers [1, N, H]. reads: takes the inputs; for each
    token and group of heads what takes a state to the output [1, N, G, K].
    """

    log_decays: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
    reads: Callable[[Sequence[Tensor]], Tensor]

    def widened(self, inputs_1NHX: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor | None]:
        """The inputs themselves: what a state adds is computed from its decay alone."""
        return inputs_1NHX, None

    def effect(self, inputs_1NHX: Sequence[Tensor], weights_H: Sequence[Tensor], output: Tensor, after: Tensor) -> Effect:
        """The effect of tokens."""
        decays_1NH = self.log_decays(inputs_1NHX, weights_H)
        # in 16 bits, the sum would stall after some hundred tokens
        left_1NH = decays_1NH.to(torch.promote_types(decays_1NH.dtype, torch.float32)).cumsum(dim=1).exp()
        reads_1NGK = self.reads(inputs_1NHX).to(left_1NH.dtype)

        def output_for(state_1HEK: Tensor) -> Tensor:
            num_tokens, num_groups, size = reads_1NGK.shape[1:]
            by_group = state_1HEK.to(left_1NH.dtype).reshape(num_groups, -1, size)
            added_GNE = reads_1NGK[0].transpose(0, 1) @ by_group.transpose(1, 2)
            added = added_GNE.transpose(0, 1).reshape(1, num_tokens, *state_1HEK.shape[1:3])
            return (output + added * left_1NH.unsqueeze(-1)).to(output.dtype)

        return Effect(after, left_1NH[:, -1, :, None, None], output_for)

    def carry_shape(self, state: torch.Size) -> tuple[int, ...]:
        """One number for each head."""
        return (*state[:2], 1, 1)

    def joined(self, carry: Tensor, state: Tensor, after: Tensor) -> Tensor:
        """The state times its decay, and what the tokens added."""
        return carry * state + after


@dataclass(frozen=True, slots=True)
class ChannelDecay:
    """Mamba 1, with states [1, H, K] of which every element decays by a number of its own; every channel is a head.

    steps: takes inputs and weights of the scan; by how much each token lets each head decay [1, N, H]. decays: takes the weights;
    the logarithm of what is left of each element after a step of one, [H, K]. reads: takes the inputs; what takes a state to the
    outputs of all heads [1, N, K].
    """

    steps: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
    decays: Callable[[Sequence[Tensor]], Tensor]
    reads: Callable[[Sequence[Tensor]], Tensor]

    def widened(self, inputs_1NHX: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor | None]:
        """The inputs themselves: what a state adds is computed from its decay alone."""
        return inputs_1NHX, None

    def effect(self, inputs_1NHX: Sequence[Tensor], weights_H: Sequence[Tensor], output: Tensor, after: Tensor) -> Effect:
        """The effect of tokens; outputs are [1, N, H, 1]."""
        decays_HK, reads_1NK = self.decays(weights_H), self.reads(inputs_1NHX)
        passed_1NH = self.steps(inputs_1NHX, weights_H).to(decays_HK.dtype).cumsum(dim=1)

        def output_for(state_1HK: Tensor) -> Tensor:
            left_1NHK = torch.exp(decays_HK * passed_1NH.unsqueeze(-1)) * state_1HK.unsqueeze(1)
            added_1NH1 = left_1NHK @ reads_1NK.to(left_1NHK.dtype).unsqueeze(-1)
            return (output + added_1NH1).to(output.dtype)

        return Effect(after, torch.exp(decays_HK * passed_1NH[:, -1].unsqueeze(-1)), output_for)

    def carry_shape(self, state: torch.Size) -> tuple[int, ...]:
        """One number for each element of the state."""
        return tuple(state)

    def joined(self, carry: Tensor, state: Tensor, after: Tensor) -> Tensor:
        """The state times its decay, and what the tokens added."""
        return carry * state + after
