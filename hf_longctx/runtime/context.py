"""What an attention layer must know of the chunk it runs in. It travels as a keyword argument, never as a global."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from hf_longctx.plan.sharding import Piece
from hf_longctx.plan.types import Method


@dataclass(slots=True)
class AttentionCalls:
    """How often attention received the context in one forward; the executor compares it with the number of layers."""

    count: int = 0


@dataclass(frozen=True, slots=True)
class GroupContext:
    """One rank's view of one chunk on its sequence group.

    process_group: the handle that its messages use, None for a single rank. ranks: the group's global ranks. index: this
    rank's place in the group. shard_tokens: tokens of every rank of the group, in order. cu_seqlens: document boundaries
    in the whole chunk, starting at 0 (empty in a ring, whose layout is `pieces`: what each rank holds of each document).
    indices: index tensors that the layers of this forward share, so that only the first of them builds and copies one.
    """

    process_group: dist.ProcessGroup | None
    index: int
    shard_tokens: tuple[int, ...]
    cu_seqlens: tuple[int, ...]
    method: Method = "ulysses"
    ranks: tuple[int, ...] = ()
    pieces: tuple[tuple[Piece, ...], ...] = ()
    calls: AttentionCalls = field(default_factory=AttentionCalls)
    indices: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.method != "ring" and sum(self.shard_tokens) != self.cu_seqlens[-1]:
            raise ValueError(f"shards of {self.shard_tokens} tokens do not add up to the chunk's {self.cu_seqlens[-1]} tokens")

    def index_tensor(self, values: tuple[int, ...], device: torch.device) -> Tensor:
        """`values` as an int64 tensor on `device`, made once per chunk."""
        if values not in self.indices:
            self.indices[values] = torch.tensor(values, device=device)
        return self.indices[values]

    @property
    def degree(self) -> int:
        return len(self.shard_tokens)
