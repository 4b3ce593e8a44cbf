"""Process groups, all created once at start: aligned sequence groups, one group of all ranks, one CPU group for plans.

`dist.new_group` is collective: every rank creates every group in the same order, also those it is not in. Groups with
`use_local_synchronization` hash the number of earlier groups into their name and hang where ranks differ, so none is used.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from hf_longctx.plan.sharding import HeadShare, block_pieces, document_bounds, even_shards, travelling_pieces
from hf_longctx.plan.types import Chunk, SequenceGroup
from hf_longctx.runtime.context import Block, GroupContext, Ring, departing_tokens
from hf_longctx.runtime.heads import KVReaders
from hf_longctx.runtime.slices import KVBook, slices_of


class GroupPool:
    """Owns the process groups of a run and hands out contexts. Never creates a group after construction.

    A collective that waits longer than `timeout_s` fails on the waiting ranks; for gloo this bound holds only for groups
    created with it, so plans, forwards, backwards and the gradient reduction all run on these. (The trainer's own gather
    of the logged loss runs on the default group, with its time-out.)
    """

    def __init__(self, degrees: tuple[int, ...], timeout_s: float, control: dist.ProcessGroup | None = None) -> None:
        self.rank, self.num_ranks = 0, 1
        self.everyone: dist.ProcessGroup | None = None
        self.control = control
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._readers: dict[tuple[HeadShare, int, torch.device], KVReaders] = {}
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        timeout = timedelta(seconds=timeout_s)
        self.everyone = dist.new_group(timeout=timeout)
        # NCCL joins ranks at the first use of a group, and rings send messages between some of its ranks only
        is_on_device = torch.cuda.is_available() and dist.get_backend(self.everyone) != "gloo"
        dist.all_reduce(torch.zeros(1, device="cuda" if is_on_device else "cpu"), group=self.everyone)
        self._groups[tuple(range(self.num_ranks))] = self.everyone
        for positions in aligned_groups(self.num_ranks, degrees):
            if positions not in self._groups:
                self._groups[positions] = dist.new_group(list(positions), timeout=timeout)

    def close(self) -> None:
        """Gives up all groups, the control group too; nothing may run on them any more, on no rank."""
        groups = [*self._groups.values(), *([self.control] if self.control is not None else [])]
        self._groups, self.everyone, self.control = {}, None, None
        for group in groups:
            dist.destroy_process_group(group)

    def group(self, positions: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The handle of the ranks at `positions`; None for one rank. Raises ValueError for a group outside the pool."""
        if len(positions) == 1:
            return None
        if positions not in self._groups:
            raise ValueError(
                f"positions {positions} are not an aligned group of this run (known: {sorted(self._groups)}); a plan may use "
                f"only the degrees that the pool was created with, each starting at a multiple of its degree"
            )
        return self._groups[positions]

    def context(self, group: SequenceGroup, chunk: Chunk, book: KVBook | None = None) -> GroupContext:
        """This rank's context for a chunk of its group; all chunks of a round share one `book` (None: no chunk is a slice).

        Blocks of two or more ranks exchange on aligned groups of the pool. Rings pass messages on the group of all ranks,
        so any positions will do.
        """
        shape, place = group.shape, group.positions.index(self.rank)
        index, inside = divmod(place, shape.ulysses)
        pieces = block_pieces(chunk, shape)
        travelling = travelling_pieces(pieces)
        first = index * shape.ulysses
        neighbours = group.positions[first : first + shape.ulysses]
        tokens = even_shards(sum(piece.num_tokens for piece in pieces[index]), shape.ulysses)
        return GroupContext(
            block=Block(self.group(neighbours), inside, tokens),
            ring=Ring(
                self.everyone,
                index,
                group.positions[inside :: shape.ulysses],
                pieces[index],
                travelling,
                departing_tokens(pieces[index], travelling[index]),
            ),
            cu_seqlens=document_bounds(pieces[0]) if shape.num_blocks == 1 else (),
            known_readers=self._readers,
            slices=slices_of(group, chunk),
            book=KVBook() if book is None else book,
        )


def aligned_groups(num_ranks: int, degrees: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Positions of every group of two or more ranks that starts at a multiple of its degree, in creation order."""
    return [
        tuple(range(start, start + degree))
        for degree in sorted(degrees)
        if degree > 1
        for start in range(0, num_ranks - degree + 1, degree)
    ]
