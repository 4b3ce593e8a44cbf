"""Which heads a rank of a block computes, and which KV head each of its query heads reads.

Shapes: h query heads and g KV heads of one rank, U tokens, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Query heads [q_start, q_stop) of one rank and the KV heads [kv_start, kv_stop) that they read."""

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int

    @property
    def num_q(self) -> int:
        return self.q_stop - self.q_start

    @property
    def num_kv(self) -> int:
        return self.kv_stop - self.kv_start


def head_shares(num_heads: int, num_kv_heads: int, num_ranks: int) -> tuple[HeadShare, ...]:
    """Contiguous query heads per rank, spread as evenly as possible, and their KV heads.

    Raises ValueError when KV heads do not divide query heads or a rank would get no head.
    """
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are no multiple of {num_kv_heads} KV heads")
    if num_ranks > num_heads:
        raise ValueError(f"{num_ranks} ranks share {num_heads} heads, but Ulysses needs at least one head per rank")
    per_kv = num_heads // num_kv_heads
    base, remainder = divmod(num_heads, num_ranks)
    shares, start = [], 0
    for index in range(num_ranks):
        stop = start + base + (index < remainder)
        shares.append(HeadShare(start, stop, start // per_kv, (stop - 1) // per_kv + 1))
        start = stop
    return tuple(shares)


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

    def fold_into(self, sum_GUD: Tensor, gradient_HUD: Tensor) -> None:
        """Adds to `sum_GUD` the gradients of the query heads that read each KV head."""
        gradient_HUD = gradient_HUD.to(sum_GUD.dtype)
        if self.per_kv:
            sum_GUD += gradient_HUD.unflatten(0, (self.num_kv, self.per_kv)).sum(1)
        else:
            sum_GUD.index_add_(0, self.index, gradient_HUD)
