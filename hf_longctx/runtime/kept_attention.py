"""Attention that runs forward once under activation checkpointing: the replay takes output and LSE from the first run.

The replay recomputes queries, keys and values, which backward needs anyway, and rebuilds the autograd node on them. Of an
output that is kept in part the *front* tokens are dropped: they are the cheapest to recompute, and their keys are a prefix,
so that they need no more than causal squares. (The first r of a causal triangle's rows hold r^2 of it, the last 2r - r^2.)

Shapes: h query heads and g KV heads of this rank, S tokens of its block, D head size.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_longctx.plan.types import TensorShare
from hf_longctx.runtime.heads import KVReaders
from hf_longctx.runtime.offload import HostTier, SplitTensor
from hf_longctx.runtime.tiles import tile_backward, tile_forward


@dataclass(frozen=True, slots=True)
class KeptOutput:
    """Output and LSE of the tokens from `start` on; the tokens before it are to be recomputed."""

    start: int
    out_ShD: Tensor
    lse_hS: Tensor


class AttentionRecord:
    """What one layer's attention leaves in one forward for its replay.

    Filled by the first run, emptied by the first replay: a second one (retain_graph) recomputes. Owned by the layer's slot.
    """

    def __init__(self, share: TensorShare, tier: HostTier | None = None) -> None:
        self.share, self._tier = share, tier
        self.is_replay = False
        # output and LSE, both token first
        self.parts: tuple[SplitTensor, ...] = ()

    @property
    def is_all_or_nothing(self) -> bool:
        return self.share.recompute in (0.0, 1.0)

    def put(self, out_ShD: Tensor, lse_hS: Tensor) -> None:
        """Keeps what the share says of a first run's result; a replay's result is not kept."""
        if not self.is_replay and self.share.cuts(out_ShD.shape[0])[0] < out_ShD.shape[0]:
            self.parts = tuple(SplitTensor(tensor, self.share, self._tier) for tensor in (out_ShD, lse_hS.transpose(0, 1)))

    def take(self) -> KeptOutput | None:
        """What the first run left, given away; None while recording, or if it has been taken."""
        if not self.is_replay or not self.parts:
            return None
        (out, lse), self.parts = self.parts, ()
        return KeptOutput(out.start, out.fetch(), lse.fetch().transpose(0, 1))


def kept_attention(
    q_1hSD: Tensor,
    k_1gSD: Tensor,
    v_1gSD: Tensor,
    readers: KVReaders,
    scale: float,
    cu_seqlens: tuple[int, ...],
    record: AttentionRecord,
) -> Tensor:
    """Causal attention inside each document of a packed row, shape [1, S, h, D], whose output goes through `record`."""
    output: Tensor = _KeptAttention.apply(q_1hSD[0], k_1gSD[0], v_1gSD[0], readers, scale, cu_seqlens, record)
    return output.unsqueeze(0)


class _KeptAttention(torch.autograd.Function):
    # saves the same five tensors recording and replaying: checkpointing compares their number, shapes and dtypes
    @staticmethod
    def forward(
        ctx: Any,
        q_hSD: Tensor,
        k_gSD: Tensor,
        v_gSD: Tensor,
        readers: KVReaders,
        scale: float,
        cu_seqlens: tuple[int, ...],
        record: AttentionRecord,
    ) -> Tensor:
        kept = record.take()
        num_rows = q_hSD.shape[1] if kept is None else kept.start
        outs, lses = _front_rows(q_hSD, k_gSD, v_gSD, readers, scale, _front_documents(cu_seqlens, num_rows))
        if kept is not None:
            outs, lses = [*outs, kept.out_ShD], [*lses, kept.lse_hS]
        out_ShD, lse_hS = (parts[0] if len(parts) == 1 else torch.cat(parts, dim) for parts, dim in ((outs, 0), (lses, 1)))
        if kept is None:
            record.put(out_ShD, lse_hS)
        ctx.save_for_backward(q_hSD, k_gSD, v_gSD, out_ShD, lse_hS)
        ctx.settings = readers, scale, cu_seqlens
        return out_ShD

    @staticmethod
    def backward(ctx: Any, gradient_ShD: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None, None]:  # type: ignore[override]
        q_hSD, k_gSD, v_gSD, out_ShD, lse_hS = ctx.saved_tensors
        readers, scale, cu_seqlens = ctx.settings
        dq_hSD = torch.empty_like(q_hSD)
        dk_gSD, dv_gSD = (torch.zeros_like(x, dtype=lse_hS.dtype) for x in (k_gSD, v_gSD))
        for start, stop in itertools.pairwise(cu_seqlens):
            tokens = slice(start, stop)
            k, v = readers.expand(k_gSD[:, tokens], 0), readers.expand(v_gSD[:, tokens], 0)
            gradient, out = gradient_ShD[tokens].transpose(0, 1), out_ShD[tokens].transpose(0, 1)
            dq, dk, dv = tile_backward(gradient, q_hSD[:, tokens], k, v, out, lse_hS[:, tokens], scale, causal=True)
            dq_hSD[:, tokens] = dq
            readers.fold_into(dk_gSD[:, tokens], dk)
            readers.fold_into(dv_gSD[:, tokens], dv)
        return dq_hSD, dk_gSD.to(k_gSD.dtype), dv_gSD.to(v_gSD.dtype), None, None, None, None


def _front_documents(cu_seqlens: tuple[int, ...], num_rows: int) -> list[slice]:
    """The documents, and the front of the last one, that the first `num_rows` rows hold."""
    documents = itertools.pairwise(cu_seqlens)
    return [slice(start, min(stop, num_rows)) for start, stop in documents if start < num_rows]


def _front_rows(
    q_hSD: Tensor, k_gSD: Tensor, v_gSD: Tensor, readers: KVReaders, scale: float, documents: list[slice]
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, token first, and LSEs of documents or of their fronts."""
    outs, lses = [], []
    for tokens in documents:
        k, v = readers.expand(k_gSD[:, tokens], 0), readers.expand(v_gSD[:, tokens], 0)
        out, lse = tile_forward(q_hSD[:, tokens], k, v, scale, causal=True)
        outs.append(out.transpose(0, 1))
        lses.append(lse)
    return outs, lses
