"""Scans token by token: slow, obvious, and what kernels of packages are checked against (`kernels`).

Inputs, weights and states are those of `recurrence.scan_documents`. Shapes: N tokens of one document, G heads of queries and
keys, H heads with a state (a multiple of G; neighbouring heads share a query and a key), K size of a key, E size of a value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def delta_rule(tensors: Sequence[Tensor], state_1HKE: Tensor | None, normalize: bool) -> tuple[Tensor, Tensor]:
    """Outputs [1, N, H, E] and last state of a gated delta rule (Yang et al. 2025, arXiv:2412.06464, equation 10).

    A state decays with every token, and then what it holds for the token's key moves towards the token's value. tensors: queries
    and keys [1, N, G, K], values [1, N, H, E], logarithms of decays [1, N, H] or [1, N, H, K], strengths [1, N, H]. normalize:
    queries and keys are divided by their length first.
    """
    q_1NGK, k_1NGK, v_1NHE, decay, strength_1NH = tensors
    if normalize:
        q_1NGK, k_1NGK = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q_1NGK, k_1NGK))
    per_read = v_1NHE.shape[2] // k_1NGK.shape[2]
    q_1NHK, k_1NHK = (x.repeat_interleave(per_read, dim=2) for x in (q_1NGK * k_1NGK.shape[-1] ** -0.5, k_1NGK))
    left_1NHK = (decay if decay.dim() == 4 else decay.unsqueeze(-1)).exp()
    state = v_1NHE.new_zeros(1, *k_1NHK.shape[2:], v_1NHE.shape[-1]) if state_1HKE is None else state_1HKE
    outputs = []
    for token in range(v_1NHE.shape[1]):
        q, k, v = q_1NHK[:, token], k_1NHK[:, token], v_1NHE[:, token]
        state = state * left_1NHK[:, token].unsqueeze(-1)
        missing = v - (k.unsqueeze(-1) * state).sum(-2)
        state = state + k.unsqueeze(-1) * (strength_1NH[:, token].unsqueeze(-1) * missing).unsqueeze(-2)
        outputs.append((q.unsqueeze(-1) * state).sum(-2))
    return torch.stack(outputs, dim=1), state


def mamba2(
    tensors: Sequence[Tensor], state_1HEK: Tensor | None, softplus: bool, limits: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Outputs [1, N, H, E] and last state of a Mamba 2 scan (Dao and Gu 2024, arXiv:2405.21060, section 2).

    tensors: what takes tokens into the state and out of it [1, N, G, K], tokens [1, N, H, E], steps [1, N, H]; for each head its
    decay, what is added to steps, and how much of a token passes by the state. softplus: steps are activated. limits: of steps.
    """
    into_1NGK, out_1NGK, x_1NHE, step_1NH, decay_H, bias_H, past_H = tensors
    step_1NH = step_1NH + bias_H
    step_1NH = (F.softplus(step_1NH) if softplus else step_1NH).clamp(*limits)
    per_read = x_1NHE.shape[2] // into_1NGK.shape[2]
    into_1NHK, out_1NHK = (x.repeat_interleave(per_read, dim=2) for x in (into_1NGK, out_1NGK))
    left_1NH = (step_1NH * decay_H).exp()
    state = x_1NHE.new_zeros(1, *x_1NHE.shape[2:], into_1NHK.shape[-1]) if state_1HEK is None else state_1HEK
    outputs = []
    for token in range(x_1NHE.shape[1]):
        x, step = x_1NHE[:, token], step_1NH[:, token, :, None]
        state = state * left_1NH[:, token, :, None, None] + (x * step).unsqueeze(-1) * into_1NHK[:, token].unsqueeze(-2)
        outputs.append((state * out_1NHK[:, token].unsqueeze(-2)).sum(-1) + x * past_H.unsqueeze(-1))
    return torch.stack(outputs, dim=1), state
