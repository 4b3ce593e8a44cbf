"""Maps each query head of a rank to the KV head that it reads, and joins keys and values in one tensor.

Shapes: h query heads and g KV heads of one rank, U tokens, D head size of keys, E of values, W = D + E.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_longctx.plan.core.sharding import HeadShare


def join_kv(k_gUD: Tensor, v_gUE: Tensor) -> Tensor:
    """Joins keys and values side by side, [g, U, W]: one tensor to keep or to send."""
    return torch.cat((k_gUD, v_gUE), dim=-1)


def split_kv(kv_gUW: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Returns keys [g, U, D] and values [g, U, E] as views of a joined tensor."""
    return kv_gUW[..., :head_dim], kv_gUW[..., head_dim:]


@dataclass(frozen=True, slots=True)
class KVReaders:
    """Assignment of a rank's query heads to KV heads.

    If per_kv > 0, each KV head is read by `per_kv` neighbouring query heads. If it is 0, query head i reads KV head `index[i]`.
    """

    num_kv: int
    per_kv: int
    index: Tensor

    @classmethod
    def of(cls, share: HeadShare, per_kv: int, device: torch.device) -> KVReaders:
        """Makes readers for the heads of `share` in a model with `per_kv` query heads per KV head.

        Copies to `device` and, on CUDA, waits for the copy: call it once per run, not per step.
        """
        heads = [head // per_kv - share.kv_start for head in range(share.q_start, share.q_stop)]
        is_even = heads == [head * share.num_kv // share.num_q for head in range(share.num_q)]
        is_even = is_even and share.num_q % share.num_kv == 0
        index = torch.tensor(heads, device=device)
        return cls(share.num_kv, share.num_q // share.num_kv if is_even else 0, index)

    def expand(self, heads: Tensor, dim: int) -> Tensor:
        """Repeats keys or values for every query head: g heads in dimension `dim` become h."""
        if self.per_kv == 1:
            return heads
        return heads.repeat_interleave(self.per_kv, dim) if self.per_kv else heads.index_select(dim, self.index)

    def gather(self, heads_GUD: Tensor) -> Tensor:
        """Returns keys or values for `tiles`: unchanged if all KV heads have equally many readers, else one per query head."""
        return heads_GUD if self.per_kv else heads_GUD.index_select(0, self.index)

    def fold(self, gradient: Tensor) -> Tensor:
        """Returns the gradient of the KV heads, [G, U, D], given that of the result of `gather`."""
        if self.per_kv:
            return gradient
        wide = torch.promote_types(gradient.dtype, torch.float32)
        sum_GUD = gradient.new_zeros((self.num_kv, *gradient.shape[1:]), dtype=wide)
        self.fold_into(sum_GUD, gradient)
        return sum_GUD

    def fold_into(self, sum_GUD: Tensor, gradient: Tensor) -> None:
        """Adds the gradient of the KV heads to `sum_GUD`, given that of the result of `gather`."""
        if self.per_kv:
            sum_GUD += gradient
        else:
            sum_GUD.index_add_(0, self.index, gradient.to(sum_GUD.dtype))
