"""What attention leaves of its first run for its replay under activation checkpointing: output and LSE, or their back part.

The *front* tokens of a chunk are dropped first: they are the cheapest to recompute. (The first r of a causal triangle's rows
hold r^2 of it, the last 2r - r^2.)

Shapes: h query heads of this rank, S tokens of its block, E head size of values.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hf_longctx.plan.core.types import TensorShare
from hf_longctx.runtime.activations.host_tier import HostTier, SplitTensor


@dataclass(frozen=True, slots=True)
class KeptOutput:
    """Output and LSE of the tokens from `start` on; the tokens before it are to be recomputed."""

    start: int
    out_ShE: Tensor
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

    def put(self, out_ShE: Tensor, lse_hS: Tensor) -> None:
        """Keeps what the share says of a first run's result; a replay's result is not kept."""
        if not self.is_replay and self.share.cuts(out_ShE.shape[0])[0] < out_ShE.shape[0]:
            self.parts = tuple(SplitTensor(tensor, self.share, self._tier) for tensor in (out_ShE, lse_hS.transpose(0, 1)))

    def take(self) -> KeptOutput | None:
        """What the first run left, given away; None while recording, or if it has been taken."""
        if not self.is_replay or not self.parts:
            return None
        (out, lse), self.parts = self.parts, ()
        return KeptOutput(out.start, out.fetch(), lse.fetch().transpose(0, 1))
