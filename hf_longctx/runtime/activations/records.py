"""Records of results that a layer's first run keeps for its replay: projections to Q, K and V, and attention with its LSE.

The activation engine makes the records, one of each kind per layer and forward. It binds `project` to the projections of a layer;
`attention.chunk` and `attention.ring` fill and empty the record of attention.

The gradients of y = x W' + b need x and W, not y. So the autograd node of a projection saves only x and W, in first run and
replay, and its backward is that of the whole product, however much of y was computed. The kept tensor is y, before the norms of
queries and keys and the rotary embedding, which the replay repeats; later modules get y complete and may save what they need.

If only a share of a result is kept, it is that of the last tokens, because in attention the first tokens of a chunk are the
cheapest to recompute: with rows of a causal triangle counted from 0 to 1, the first r have r^2 of its area, the last r 2r - r^2.

Shapes: T tokens of this rank, C input features, N output features, h query heads of this rank, S tokens of its block, E head
size of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


def project(linear: nn.Linear, x: Tensor, record: ProjectionRecord, index: int) -> Tensor:
    """Returns linear(x), [..., C] to [..., N]; `record` keeps the output or, in a replay, supplies it."""
    x, weight_NC, bias_N = autocast_operands(linear, x)
    y_TN: Tensor = _Projection.apply(x.flatten(0, -2), weight_NC, bias_N, record, index)
    return y_TN.view(*x.shape[:-1], y_TN.shape[-1])


def autocast_operands(linear: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns input, weight and bias, cast if autocast is on; outside a node, so that autograd casts gradients back."""
    weight: Tensor = linear.weight
    bias: Tensor | None = linear.bias
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return _cast(x, dtype), _cast(weight, dtype), None if bias is None else _cast(bias, dtype)


def product_gradients(ctx: Any, gradient_TN: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns gradients of input, weight and bias of a product, from saved input and weight (None: not needed)."""
    x_TC, weight_NC = ctx.saved_tensors
    dx_TC = None if weight_NC is None else gradient_TN @ weight_NC
    dw_NC = None if x_TC is None else gradient_TN.T @ x_TC
    db_N = gradient_TN.sum(0) if ctx.needs_input_grad[2] else None
    return dx_TC, dw_NC, db_N


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts as autocast does, which leaves fp64 alone."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)


def _multiply(x_TC: Tensor, weight_NC: Tensor, bias_N: Tensor | None) -> Tensor:
    return F.linear(x_TC, weight_NC, bias_N)


class _Projection(torch.autograd.Function):
    # saves the same tensors in first run and replay, because checkpointing compares their number, shapes and dtypes
    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, weight_NC: Tensor, bias_N: Tensor | None, record: ProjectionRecord, index: int) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x_TC if needs_weight else None, weight_NC if needs_x else None)
        kept = record.take(index)
        if kept is not None:
            front = [_multiply(x_TC[: kept.start], weight_NC, bias_N)] if kept.start else []
            return kept.fetch(front)
        y_TN = _multiply(x_TC, weight_NC, bias_N)
        record.put(index, y_TN)
        return y_TN

    @staticmethod
    def backward(ctx: Any, gradient_TN: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:  # type: ignore[override]
        return *product_gradients(ctx, gradient_TN), None, None


@dataclass(frozen=True, slots=True)
class KeptOutput:
    """Output and LSE of the tokens from `start` on; the tokens before `start` must be recomputed."""

    start: int
    out_ShE: Tensor
    lse_hS: Tensor


class AttentionRecord:
    """Output and LSE of one layer's attention in one forward, kept for its replay.

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
