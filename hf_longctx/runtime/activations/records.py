"""Records of results that a layer's first run keeps for its replay: projections to Q, K and V, and attention with its LSE.

The activation engine makes the records, one of each kind per layer and forward. It lets the products of a layer's projections
be made by their record (`core.products`); `attention.chunk` and `attention.ring` fill and empty the record of attention.

The kept output of a projection is that before the norms of queries and keys and the rotary embedding, which the replay repeats;
later modules get it complete and may save what they need. It includes a low-rank adapter that is one node with the projection.

If only a share of a result is kept, it is that of the last tokens, because in attention the first tokens of a chunk are the
cheapest to recompute: with rows of a causal triangle counted from 0 to 1, the first r have r^2 of its area, the last r 2r - r^2.

Shapes: T tokens of this rank, C input features, N output features, h query heads of this rank, S tokens of its block, E head
size of values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hf_longctx.plan.core.types import TensorShare
from hf_longctx.runtime.activations.host_tier import HostTier, SplitTensor


class ProjectionRecord:
    """Outputs of one layer's projections in one forward, kept for its replay by index of the projection.

    The first run fills it, and the first replay empties it; a second replay (retain_graph) recomputes. The layer's slot owns it.
    """

    def __init__(self, share: TensorShare, tier: HostTier | None = None) -> None:
        self.share, self._tier = share, tier
        self.is_replay = False
        self._held: dict[int, SplitTensor] = {}

    @property
    def held(self) -> tuple[SplitTensor, ...]:
        """Outputs currently held."""
        return tuple(self._held.values())

    def put(self, index: int, y_TN: Tensor) -> None:
        """Keeps the planned share of a first run's output; does nothing in a replay."""
        if not self.is_replay and self.share.cuts(y_TN.shape[0])[0] < y_TN.shape[0]:
            self._held[index] = SplitTensor(y_TN, self.share, self._tier)

    def take(self, index: int) -> SplitTensor | None:
        """Hands over the output that the first run left; None in a first run, or if it has been taken already."""
        return self._held.pop(index, None) if self.is_replay else None

    def made(self, index: int, x_TC: Tensor, num_features: int, first: Callable[[int], Tensor]) -> Tensor:
        """Makes the output of a projection and keeps it or, in a replay, completes what was kept (see `Maker`)."""
        if (kept := self.take(index)) is not None:
            return kept.fetch([first(kept.start)] if kept.start else [])
        y_TN = first(len(x_TC))
        self.put(index, y_TN)
        return y_TN


@dataclass(frozen=True, slots=True)
class KeptOutput:
    """Output and LSE of the tokens from `start` on; the tokens before `start` must be recomputed."""

    start: int
    out_ShE: Tensor
    lse_hS: Tensor


class AttentionRecord:
    """Output and LSE of one layer's attention in one forward, kept for its replay.

    The first run fills it, and the first replay empties it; a second replay (retain_graph) recomputes. The layer's slot owns it.
    If attention of the layer runs in parts of its heads, each part has a record of its own.
    """

    # whether attention may run in parts
    takes_parts = True

    def __init__(self, share: TensorShare, tier: HostTier | None = None) -> None:
        self.share, self._tier = share, tier
        self._is_replay = False
        # output and LSE, tokens as the first dimension of both
        self._own: tuple[SplitTensor, ...] = ()
        self._parts: dict[int, AttentionRecord] = {}

    @property
    def is_replay(self) -> bool:
        """Whether the layer is being replayed."""
        return self._is_replay

    @is_replay.setter
    def is_replay(self, is_replay: bool) -> None:
        self._is_replay = is_replay
        for record in self._parts.values():
            record.is_replay = is_replay

    @property
    def held(self) -> tuple[SplitTensor, ...]:
        """Output and LSE that are held now, of all parts."""
        return (*self._own, *(tensor for record in self._parts.values() for tensor in record.held))

    def part(self, index: int) -> AttentionRecord:
        """Returns the record of one part of the heads."""
        if index not in self._parts:
            self._parts[index] = AttentionRecord(self.share, self._tier)
            self._parts[index].is_replay = self.is_replay
        return self._parts[index]

    @property
    def is_all_or_nothing(self) -> bool:
        """Whether all tokens are kept or all are recomputed."""
        return self.share.recompute in (0.0, 1.0)

    def put(self, out_ShE: Tensor, lse_hS: Tensor) -> None:
        """Keeps the planned share of a first run's result; does nothing in a replay."""
        if not self.is_replay and self.share.cuts(out_ShE.shape[0])[0] < out_ShE.shape[0]:
            self._own = tuple(SplitTensor(tensor, self.share, self._tier) for tensor in (out_ShE, lse_hS.transpose(0, 1)))

    def take(self) -> KeptOutput | None:
        """Hands over the output that the first run left; None in a first run, or if it has been taken already."""
        if not self.is_replay or not self._own:
            return None
        (out, lse), self._own = self._own, ()
        return KeptOutput(out.start, out.fetch(), lse.fetch().transpose(0, 1))
