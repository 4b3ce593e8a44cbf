"""Creates all process groups of a run once, at start: all ranks, aligned sequence groups of each stage, links between stages.

The trainer makes one `GroupPool`; the executor asks it for the context of every chunk.

`rank = stage * ranks_per_stage + position`. A sequence group lies within a stage, at equal positions in all stages.

`dist.new_group` is collective: every rank must create every group, also those that it is not in, in the same order. The option
`use_local_synchronization` would avoid that but is not used: it hashes the number of earlier groups into a group's name, and
hangs if ranks have created different numbers.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hf_longctx.plan.core.sharding import (
    HeadShare,
    block_pieces,
    document_bounds,
    even_shards,
    rank_pieces,
    sequence_ends,
    slice_pieces,
)
from hf_longctx.plan.core.types import Chunk, SequenceGroup
from hf_longctx.runtime.attention.context import Block, GroupContext, Ring
from hf_longctx.runtime.attention.heads import KVReaders
from hf_longctx.runtime.attention.kv_book import KVBook, slices_of
from hf_longctx.runtime.attention.layout import GroupLayout
from hf_longctx.runtime.core.time_limits import group_limit
from hf_longctx.runtime.parameters.early_sums import EarlyGroup
from hf_longctx.runtime.process_groups.links import Links, Place, few_multiprocessors

# longest last backward with which gradients are summed early, as a share of a group's time-out
_EARLY_SHARE = 1 / 8
# multiprocessors that such a sum may occupy while layers compute on the others
_SUM_CTAS = 8


class GroupPool:
    """Owns the process groups of a run and makes contexts of chunks. Creates no group after construction.

    A collective that waits longer than `timeout_s` (on NCCL: `group_limit`) fails on the waiting ranks. `lends`: stages may lend
    ranks to slices of other stages; then there are also groups of equal positions, for the stages from any one to the last and
    from the first to any one. `sums_early`: gradients of replicated weights are summed during the last backward of a step, in a
    group of their own (`early`).
    """

    def __init__(
        self,
        degrees: tuple[int, ...],
        timeout_s: float,
        control: dist.ProcessGroup | None = None,
        num_stages: int = 1,
        lends: bool = False,
        sums_early: bool = False,
    ) -> None:
        self.rank, self.num_ranks, self.num_stages = 0, 1, num_stages
        self.everyone: dist.ProcessGroup | None = None
        self.control = control
        self.links: Links | None = None
        self.early: EarlyGroup | None = None
        self._early_ranks: dist.ProcessGroup | None = None
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._readers: dict[tuple[HeadShare, int, torch.device], KVReaders] = {}
        if dist.is_initialized():
            self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        if self.num_ranks % num_stages:
            raise ValueError(f"{self.num_ranks} ranks cannot be split into {num_stages} equal stages; choose a divisor")
        self.ranks_per_stage = self.num_ranks // num_stages
        self.stage, self.position = divmod(self.rank, self.ranks_per_stage)
        if self.num_ranks == 1:
            return
        timeout = group_limit(timeout_s)
        self.everyone = dist.new_group(timeout=timeout)
        is_on_device = torch.cuda.is_available() and dist.get_backend(self.everyone) != "gloo"
        device = torch.device("cuda" if is_on_device else "cpu")
        self._groups[tuple(range(self.num_ranks))] = self.everyone
        whole_stage = tuple(range(self.ranks_per_stage))
        for stage in range(num_stages):
            first = stage * self.ranks_per_stage
            for positions in [
                *aligned_groups(self.ranks_per_stage, degrees),
                *([whole_stage] if self.ranks_per_stage > 1 else []),
            ]:
                ranks = tuple(first + position for position in positions)
                if ranks not in self._groups:
                    self._groups[ranks] = dist.new_group(list(ranks), timeout=timeout)
        for ranks in lending_ranks(num_stages, self.ranks_per_stage) if lends else ():
            if ranks not in self._groups:
                self._groups[ranks] = dist.new_group(list(ranks), timeout=timeout)
        if num_stages > 1:
            place = Place(self.rank, self.stage, num_stages, self.ranks_per_stage)
            self.links = Links.create(place, timeout, device)
        if sums_early and self.ranks_per_stage > 1:
            self.early = self._early_group(timeout)
            self._early_ranks = self.early.ranks
        # NCCL connects the ranks of a group at its first use, which takes seconds and needs all of them: rings send messages
        # between some ranks only, and in a step ranks would wait for each other's first uses
        for group in [
            *(group for ranks, group in self._groups.items() if self.rank in ranks),
            *([] if self._early_ranks is None else [self._early_ranks]),
        ]:
            dist.all_reduce(torch.zeros(1, device=device), group=group)

    def _early_group(self, timeout: timedelta) -> EarlyGroup:
        """Creates the groups of all stages' ranks for early sums; returns this rank's. Collective over all ranks."""
        longest_s = timeout.total_seconds() * _EARLY_SHARE
        # a rank waits for the last backward of another, besides the time that it may wait at the end of a step
        timeout += timedelta(seconds=longest_s)
        found = []
        for first in range(0, self.num_ranks, self.ranks_per_stage):
            ranks = list(range(first, first + self.ranks_per_stage))
            group = dist.new_group(ranks, timeout=timeout, pg_options=few_multiprocessors(timeout, _SUM_CTAS))
            found += [group] if self.rank in ranks else []
        return EarlyGroup(found[0], longest_s)

    @property
    def stage_group(self) -> dist.ProcessGroup | None:
        """The group of all ranks of this rank's stage, which hold equal layers; None for a single rank."""
        return self.group(tuple(range(self.ranks_per_stage)))

    def drop_early(self) -> None:
        """Lets later steps sum all gradients at their ends; for a step that ended in an error, with sums under way."""
        self.early = None

    def close(self) -> None:
        """Destroys all groups, including the control group. No rank may still run anything on them."""
        groups = [*self._groups.values(), *([self.control] if self.control is not None else [])]
        groups += self.links.groups if self.links is not None else ()
        groups += [self._early_ranks] if self._early_ranks is not None else []
        self._groups, self.everyone, self.control, self.links = {}, None, None, None
        self.early = self._early_ranks = None
        for group in groups:
            dist.destroy_process_group(group)

    def group(self, positions: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Group of the ranks of this rank's stage at `positions`; None for one rank. Raises ValueError if the pool has none."""
        if len(positions) == 1:
            return None
        first = self.stage * self.ranks_per_stage
        ranks = tuple(first + position for position in positions)
        if ranks not in self._groups:
            known = [tuple(rank - first for rank in group) for group in sorted(self._groups) if set(group) <= self._stage_ranks]
            raise ValueError(
                f"positions {positions} are not an aligned group of this run (known: {known}); a plan may use only the degrees "
                f"that the pool was created with, each starting at a multiple of its degree"
            )
        return self._groups[ranks]

    def lending_group(self, stages: tuple[int, ...]) -> dist.ProcessGroup:
        """Group of the ranks at this rank's position of `stages`, in order. Raises ValueError if the pool has none."""
        ranks = tuple(stage * self.ranks_per_stage + self.position for stage in stages)
        if ranks not in self._groups:
            raise ValueError(
                f"stages {stages} are not a group of this run; create the pool with lends=True, and lend ranks only among "
                f"consecutive stages that include the first or the last one"
            )
        return self._groups[ranks]

    @property
    def _stage_ranks(self) -> set[int]:
        first = self.stage * self.ranks_per_stage
        return set(range(first, first + self.ranks_per_stage))

    def context(self, group: SequenceGroup, chunk: Chunk, kv_book: KVBook | None = None) -> GroupContext:
        """This rank's context for a chunk of its group; all chunks of a micro-batch share one `kv_book` (None: no slices).

        Blocks of two or more ranks exchange heads on aligned groups of the pool. Rings send messages on the group of all ranks,
        so their ranks may be at any positions of the stage.
        """
        shape, index_in_group = group.shape, group.positions.index(self.position)
        block, index_in_block = divmod(index_in_group, shape.ulysses)
        pieces, slices = block_pieces(chunk, shape), slices_of(group, chunk, block)
        slice_ = slices[0] if slices and shape.num_blocks > 1 else None
        ends = sequence_ends((*group.chunks, chunk))
        first = block * shape.ulysses
        neighbours = group.positions[first : first + shape.ulysses]
        tokens = even_shards(sum(piece.num_tokens for piece in pieces[block]), shape.ulysses)
        ring_positions = group.positions[index_in_block :: shape.ulysses]
        by_rank = rank_pieces(chunk, shape)
        own = by_rank[index_in_group]
        first_rank = self.stage * self.ranks_per_stage
        layout = GroupLayout.of(
            process_group=self.group(neighbours) if shape.num_blocks == 1 else self.everyone,
            is_block=shape.num_blocks == 1,
            ranks=tuple(first_rank + position for position in group.positions),
            index=index_in_group,
            pieces=by_rank,
        )
        return GroupContext(
            block=Block(self.group(neighbours), index_in_block, tokens),
            ring=Ring.of(
                self.everyone,
                block,
                tuple(first_rank + position for position in ring_positions),
                pieces,
                slice_,
                () if slice_ is None else slice_pieces(group.chunks, slice_.sequence, shape.num_blocks),
            ),
            cu_seqlens=document_bounds(pieces[0]) if shape.num_blocks == 1 else (),
            known_readers=self._readers,
            slices=slices,
            documents=tuple(
                (piece.num_tokens, ends[chunk.spans[piece.document].sequence] if piece.document < len(chunk.spans) else 1)
                for piece in own
            ),
            layout=layout,
            kv_book=KVBook() if kv_book is None else kv_book,
            sequences=tuple(chunk.spans[piece.document].sequence if piece.document < len(chunk.spans) else -1 for piece in own),
            chunk_sequences=tuple(span.sequence for span in chunk.spans),
        )


def sum_over_ranks(total: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sums `total` over the ranks of `group` (None: this rank alone), in place, and returns it. Collective over the group."""
    if group is not None:
        dist.all_reduce(total, group=group)
    return total


def lending_ranks(num_stages: int, ranks_per_stage: int) -> list[tuple[int, ...]]:
    """Ranks of every set of stages that may run a slice together, per position, in the order of creation."""
    spans = [range(first, num_stages) for first in range(num_stages - 1)] + [range(last + 1) for last in range(1, num_stages - 1)]
    return [
        tuple(stage * ranks_per_stage + position for stage in stages) for stages in spans for position in range(ranks_per_stage)
    ]


def aligned_groups(num_ranks: int, degrees: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Positions of every group of two or more ranks that starts at a multiple of its degree, in the order of creation."""
    return [
        tuple(range(start, start + degree))
        for degree in sorted(degrees)
        if degree > 1
        for start in range(0, num_ranks - degree + 1, degree)
    ]
