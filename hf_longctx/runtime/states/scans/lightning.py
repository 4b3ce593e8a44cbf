"""Lightning attention: linear attention whose state decays at a fixed rate for each head, computed in blocks of tokens.

transformers computes a sequence in blocks from an empty state, and token by token from a state that is given. This function runs
blocks from any state. `hf.models.states.methods` gives it the decays that the model holds, in the model's dtype.

Shapes: H heads, N tokens of a document or slice, D = E = K head size, B tokens of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Decays:
    """Decays of some heads.

    slope_H11: what a state's logarithm loses with every token. query_HB1, key_HB1: decay from a block's start to each of its
    tokens, and from each token to its end. diagonal_HBB: decay from key to query in a block, 0 for later keys.
    """

    slope_H11: Tensor
    query_HB1: Tensor
    key_HB1: Tensor
    diagonal_HBB: Tensor


def lightning_blocks(
    q_1NHD: Tensor, k_1NHD: Tensor, v_1NHD: Tensor, decays: Decays, state_1HEK: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs [1, N, H, D], and the state [1, H, E, K] after the last token: products of values and keys."""
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
