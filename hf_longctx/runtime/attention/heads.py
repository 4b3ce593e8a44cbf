"""Which KV head each query head of a rank reads, and how keys and values lie together.

Shapes: h query heads and g KV heads of one rank, U tokens, D head size of keys, E of values, W = D + E.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_longctx.plan.core.sharding import HeadShare


def join_kv(k_gUD: Tensor, v_gUE: Tensor) -> Tensor:
    """Keys and values beside each other, [g, U, W]: one tensor to keep or to send."""
    return torch.cat((k_gUD, v_gUE), dim=-1)


def split_kv(kv_gUW: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Keys [g, U, D] and values [g, U, E], views of what `join_kv` or the K/V book put beside each other."""
    return kv_gUW[..., :head_dim], kv_gUW[..., head_dim:]


@dataclass(frozen=True, slots=True)
class KVReaders:
    """How a rank's query heads read its KV heads: `per_kv` neighbours each, or (0) as `index`, of shape [h], says."""

    num_kv: int
    per_kv: int
    index: Tensor

    @classmethod
    def of(cls, share: HeadShare, per_kv: int, device: torch.device) -> KVReaders:
        """The readers of a rank's share in a model with `per_kv` query heads per KV head.

        Copies to `device` and waits for it on CUDA, so make it once per run, not per step.
        """
        heads = [head // per_kv - share.kv_start for head in range(share.q_start, share.q_stop)]
        is_even = heads == [head * share.num_kv // share.num_q for head in range(share.num_q)]
        is_even = is_even and share.num_q % share.num_kv == 0
        index = torch.tensor(heads, device=device)
        return cls(share.num_kv, share.num_q // share.num_kv if is_even else 0, index)

    def expand(self, heads: Tensor, dim: int) -> Tensor:
        """Keys or values once per query head: `g` heads in dimension `dim` become h."""
        if self.per_kv == 1:
            return heads
        return heads.repeat_interleave(self.per_kv, dim) if self.per_kv else heads.index_select(dim, self.index)

    def gather(self, heads_GUD: Tensor) -> Tensor:
        """Keys or values as `tiles` wants them: as they are where every KV head has as many readers, else one per query head."""
        return heads_GUD if self.per_kv else heads_GUD.index_select(0, self.index)

    def fold(self, gradient: Tensor) -> Tensor:
        """The gradient [G, U, D] of KV heads from that of what `gather` made of them."""
        if self.per_kv:
            return gradient
        wide = torch.promote_types(gradient.dtype, torch.float32)
        sum_GUD = gradient.new_zeros((self.num_kv, *gradient.shape[1:]), dtype=wide)
        self.fold_into(sum_GUD, gradient)
        return sum_GUD

    def fold_into(self, sum_GUD: Tensor, gradient: Tensor) -> None:
        """Adds to `sum_GUD` the gradient of KV heads, given that of what `gather` made of them."""
        if self.per_kv:
            sum_GUD += gradient
        else:
            sum_GUD.index_add_(0, self.index, gradient.to(sum_GUD.dtype))
