"""torch's FlashAttention 2 for documents side by side, as torch 2.11 to 2.13 call it, computed by matrices and with its limits.

Written from the operator's definition alone. fp64 stays fp64, so that results can be compared closely.

Shapes: S tokens of all documents, H query heads, G KV heads, D head size; n tokens of one document.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from hf_longctx.runtime.attention import sequence_parallel


@dataclass(frozen=True, slots=True)
class _Mask:
    """The keys that a token sees, and the factor of its scores, as the operator is told; a window of -1 has no end."""

    is_causal: bool
    scale: float
    window_size_left: int = -1
    window_size_right: int = -1


class FlashPacks:
    """The operator and its backward. forwards, backwards: lengths of the documents of every call."""

    def __init__(self) -> None:
        self.forwards: list[list[int]] = []
        self.backwards: list[list[int]] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *others: Any, **mask: Any) -> tuple[Tensor, ...]:
        """torch's `_flash_attention_forward` with boundaries: output [S, H, D], LSE [H, S], and what only dropout needs."""
        *bounds, dropout, is_causal, returns_mask = others
        assert not dropout and not returns_mask
        hidden, spans = _Mask(is_causal, **mask), _checked(q, k, v, *bounds)
        self.forwards.append([stop - start for start, stop in spans])
        # the output lies in memory as the queries do
        out, lse_HS = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=_wide(q))
        for start, stop in spans:
            scores_Hnn, _ = _scores(q[start:stop], k[start:stop], hidden)
            lse_HS[:, start:stop] = scores_Hnn.logsumexp(-1)
            values_nHD = _per_query_head(v[start:stop], q)
            out[start:stop] = torch.einsum("hij,jhd->ihd", scores_Hnn.softmax(-1), values_nHD).to(q.dtype)
        return out, lse_HS, torch.empty(2, dtype=torch.uint64), torch.empty((), dtype=torch.uint64), q.new_empty(0)

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *others: Any, **mask: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """torch's `_flash_attention_backward` with boundaries: gradients of q, k and v."""
        *bounds, dropout, is_causal, _, _ = others
        assert not dropout and lse.is_contiguous() and lse.dtype == _wide(q) and lse.shape == (q.shape[1], q.shape[0])
        assert gradient.shape == out.shape == q.shape and gradient.dtype == out.dtype == q.dtype
        hidden, spans = _Mask(is_causal, **mask), _checked(q, k, v, *bounds)
        self.backwards.append([stop - start for start, stop in spans])
        found = dq, dk, dv = tuple(torch.empty_like(x) for x in (q, k, v))
        for start, stop in spans:
            tokens = slice(start, stop)
            scores_Hnn, keys_nHD = _scores(q[tokens], k[tokens], hidden)
            wide_gradient, wide_out = gradient[tokens].to(_wide(q)), out[tokens].to(_wide(q))
            weights_Hnn = (scores_Hnn - lse[:, tokens].unsqueeze(2)).exp()
            delta_Hn1 = (wide_gradient * wide_out).sum(-1).t().unsqueeze(2)
            dweights_Hnn = torch.einsum("ihd,jhd->hij", wide_gradient, _per_query_head(v[tokens], q))
            dscores_Hnn = weights_Hnn * (dweights_Hnn - delta_Hn1) * hidden.scale
            dq[tokens] = torch.einsum("hij,jhd->ihd", dscores_Hnn, keys_nHD).to(q.dtype)
            per_head = (
                (dk, torch.einsum("hij,ihd->jhd", dscores_Hnn, q[tokens].to(_wide(q)))),
                (dv, torch.einsum("hij,ihd->jhd", weights_Hnn, wide_gradient)),
            )
            for total, each_nHD in per_head:
                total[tokens] = each_nHD.unflatten(1, (k.shape[1], -1)).sum(2).to(q.dtype)
        return found


@contextmanager
def flash_on_the_cpu() -> Iterator[FlashPacks]:
    """Context in which documents side by side go to torch's operator for them, which is computed on the CPU."""
    packs, library = FlashPacks(), torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", packs.forward, "CPU")
    library.impl("_flash_attention_backward", packs.backward, "CPU")

    def takes_packs(device: torch.device, dtype: torch.dtype, head_dim: int, is_capped: bool) -> bool:
        return not is_capped

    try:
        with patch.object(sequence_parallel, "takes_packs", takes_packs):
            yield packs
    finally:
        library._destroy()


def _checked(
    q: Tensor, k: Tensor, v: Tensor, bounds_q: Tensor, bounds_k: Tensor, most_q: int, most_k: int
) -> list[tuple[int, int]]:
    """First token of every document and the one after its last, once everything is as the kernel needs it."""
    assert q.dim() == k.dim() == v.dim() == 3 and q.shape[2] == k.shape[2] == v.shape[2] and k.shape == v.shape
    assert all(x.stride(-1) == 1 for x in (q, k, v)) and q.shape[1] % k.shape[1] == 0 and q.shape[0] == k.shape[0]
    assert max(q.shape[1], len(bounds_q)) < 2**16, "the grid of a CUDA kernel counts heads and documents in 16 bits"
    for bounds, most in ((bounds_q, most_q), (bounds_k, most_k)):
        assert bounds.dtype == torch.int32 and bounds.is_contiguous() and bounds.device == q.device
        spans = list(pairwise(bounds.tolist()))
        assert bounds[0] == 0 and bounds[-1] == len(q) and all(0 < stop - start <= most for start, stop in spans)
    # with one query of every document torch folds query heads into queries, for decoding
    assert most_q > 1
    return spans


def _scores(q: Tensor, k: Tensor, mask: _Mask) -> tuple[Tensor, Tensor]:
    """Scores [H, n, n] of a document, minus infinity where the mask hides a key, and the keys for every query head."""
    keys = _per_query_head(k, q)
    scores = torch.einsum("ihd,jhd->hij", q.to(_wide(q)), keys) * mask.scale
    i, j = torch.arange(len(q)).unsqueeze(1), torch.arange(len(q)).unsqueeze(0)
    is_hidden = torch.zeros(len(q), len(q), dtype=torch.bool)
    if mask.is_causal or mask.window_size_right == 0:
        is_hidden |= j > i
    if mask.window_size_left >= 0:
        is_hidden |= j < i - mask.window_size_left
    return scores.masked_fill(is_hidden, float("-inf")), keys


def _per_query_head(x_nGD: Tensor, q_SHD: Tensor) -> Tensor:
    return x_nGD.repeat_interleave(q_SHD.shape[1] // x_nGD.shape[1], 1).to(_wide(q_SHD))


def _wide(x: Tensor) -> Any:
    return torch.promote_types(x.dtype, torch.float32)
