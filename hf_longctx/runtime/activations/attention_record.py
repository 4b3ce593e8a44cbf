"""Keeps the output and LSE of attention from its first run for its replay under activation checkpointing.

The activation engine makes one record per layer and forward; `attention.chunk` and `attention.ring` fill and empty it.

If only a share is kept, it is that of the last tokens, because the first tokens of a chunk are the cheapest to recompute: with
the rows of a causal triangle counted from 0 to 1, the first r of them hold r^2 of its area, the last r hold 2r - r^2.

Shapes: h query heads of this rank, S tokens of its block, E head size of values.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hf_longctx.plan.core.types import TensorShare
from hf_longctx.runtime.activations.host_tier import HostTier, SplitTensor


@dataclass(frozen=True, slots=True)
class KeptOutput:
    """Output and LSE of the tokens from `start` on; the tokens before `start` must be recomputed."""

    start: int
    out_ShE: Tensor
    lse_hS: Tensor


class AttentionRecord:
    """Output and LSE that one layer's attention leaves in one forward for its replay.

    The first run fills it, and the first replay empties it; a second replay (retain_graph) recomputes. The layer's slot owns it.
    """

    def __init__(self, share: TensorShare, tier: HostTier | None = None) -> None:
        self.share, self._tier = share, tier
        self.is_replay = False
        # output and LSE, tokens as the first dimension of both
        self.held: tuple[SplitTensor, ...] = ()

    @property
    def is_all_or_nothing(self) -> bool:
        """Whether all tokens are kept or all are recomputed."""
        return self.share.recompute in (0.0, 1.0)

    def put(self, out_ShE: Tensor, lse_hS: Tensor) -> None:
        """Keeps the planned share of a first run's result; does nothing in a replay."""
        if not self.is_replay and self.share.cuts(out_ShE.shape[0])[0] < out_ShE.shape[0]:
            self.held = tuple(SplitTensor(tensor, self.share, self._tier) for tensor in (out_ShE, lse_hS.transpose(0, 1)))

    def take(self) -> KeptOutput | None:
        """Hands over the output that the first run left; None in a first run, or if it has been taken already."""
        if not self.is_replay or not self.held:
            return None
        (out, lse), self.held = self.held, ()
        return KeptOutput(out.start, out.fetch(), lse.fetch().transpose(0, 1))
