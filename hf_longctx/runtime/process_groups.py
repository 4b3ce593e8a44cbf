"""Creates all process groups of a run once, at start, and sends messages between pipeline stages.

The trainer makes one `GroupPool`, with groups of all ranks, aligned sequence groups of each stage, and links between stages; the
executor gets from it the context of every chunk, and makes one `StageMessages` per plan.

`rank = stage * ranks_per_stage + position`. A sequence group lies within a stage, at the same positions in all stages.

`dist.new_group` is collective: every rank must create every group, also those that it is not in, in the same order. The option
`use_local_synchronization` would avoid that but is not used: it hashes the number of earlier groups into a group's name, and
hangs if ranks have created different numbers.

Hidden states go forward and their gradients back, between equal positions of the stages. The plan fixes sender, content and time
of each message, so both ends know every shape. Sends do not block: a buffer is kept until its message has left. A receive is
posted by the action that needs it and not before: on NCCL a posted receive is a kernel that occupies the device until its message
comes, and everything that waits for an idle device (the first launch of a kernel, memory returned to the driver) would wait with
it, perhaps before the very send on which the message depends. Two ranks have one process group for hidden states and one for
gradients and, with interleaving, two more for messages that wrap around between the last stage and the first. If output heads
are spread, ranks of the last stage have two more with those of every other stage that has the head: hidden states go back to it,
and gradients come forward. All messages of a group go in one direction and in the order of the plan, so that the
streams on which NCCL runs them cannot wait for each other.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from statistics import fmean
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hf_longctx.plan.core.sharding import (
    HEAD_PART_BYTES,
    MOST_HEAD_PARTS,
    HeadShare,
    block_pieces,
    document_bounds,
    even_shards,
    rank_pieces,
    sequence_ends,
    slice_pieces,
)
from hf_longctx.plan.core.types import Action, Chunk, SequenceGroup
from hf_longctx.runtime.attention.context import Block, GroupContext, Ring
from hf_longctx.runtime.attention.heads import KVReaders
from hf_longctx.runtime.attention.kv_book import KVBook, slices_of
from hf_longctx.runtime.attention.layout import GroupLayout
from hf_longctx.runtime.core.clock import group_limit
from hf_longctx.runtime.parameters.gradients import EarlyGroup
from hf_longctx.runtime.tiles.stacks import StackChecks

# stages between which messages go: neighbours, last and first, or the last one and one that runs output heads
_Way = Literal["next", "wrap", "head"]
# (action kind "F" for hidden states or "B" for gradients, way)
_Lane = tuple[str, _Way]
_LANES: tuple[_Lane, ...] = (("F", "next"), ("B", "next"), ("F", "wrap"), ("B", "wrap"))
_HEAD_LANES: tuple[_Lane, ...] = (("F", "head"), ("B", "head"))
# thread blocks of a message, each on one multiprocessor: NVLink and networks need few for one pair of ranks
_LANE_CTAS = 4
# (lane, rank at its other end)
_Link = tuple[_Lane, int]


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's location in the pipeline. The next stage is `ranks_per_stage` ranks away."""

    rank: int
    stage: int
    num_stages: int
    ranks_per_stage: int

    def peer(self, action: Action, head_end: int | None = None) -> tuple[int, _Way]:
        """Returns the global rank at the other end of a message, and the way of the message.

        head_end: stage at the other end of a message from or to an output head that was spread; None for other messages.
        """
        if head_end is not None:
            return self.rank + (head_end - self.stage) * self.ranks_per_stage, "head"
        stage = self.stage + (1 if action.kind in ("SF", "RB") else -1)
        way: _Way = "next" if 0 <= stage < self.num_stages else "wrap"
        return self.rank + (stage % self.num_stages - self.stage) * self.ranks_per_stage, way


@dataclass(frozen=True, slots=True)
class Links:
    """Process groups of one rank for messages between stages and for sums over stages."""

    place: Place
    # one group per lane and rank at the other end
    lanes: dict[_Link, dist.ProcessGroup]
    # the ranks at this position of all stages, for the gradient norm
    pipe: dist.ProcessGroup
    # stages -> the ranks at this position of them, for gradients of a weight that they hold: the first stage and those with the
    # head, for tied embeddings, and those with the head alone
    shared: dict[tuple[int, ...], dist.ProcessGroup]

    @classmethod
    def create(cls, place: Place, timeout: timedelta, device: torch.device, head_stages: tuple[int, ...] = ()) -> Links:
        """Creates the links. Collective over all ranks, which create groups in the same order.

        device: device of messages. head_stages: see `GroupPool`.
        """
        heads = with_head(place.num_stages, head_stages)
        lanes: dict[_Link, dist.ProcessGroup] = {}
        for lane in (*_LANES, *_HEAD_LANES):
            for pair in _pairs(place, lane[1], heads):
                group = dist.new_group(list(pair), timeout=timeout, pg_options=few_multiprocessors(timeout))
                if place.rank in pair:
                    lanes[lane, pair[pair[0] == place.rank]] = group
        pipe: dist.ProcessGroup | None = None
        shared: dict[tuple[int, ...], dist.ProcessGroup] = {}
        sharing = dict.fromkeys((tuple(sorted({0, *heads})), *([heads] if len(heads) > 1 else [])))
        for position in range(place.ranks_per_stage):
            column = list(range(position, place.num_stages * place.ranks_per_stage, place.ranks_per_stage))
            group = dist.new_group(column, timeout=timeout)
            pipe = group if place.rank in column else pipe
            for stages in sharing:
                ranks = [column[stage] for stage in stages]
                group = dist.new_group(ranks, timeout=timeout)
                if place.rank in ranks:
                    shared[stages] = group
        assert pipe is not None
        links = cls(place, lanes, pipe, shared)
        links._join(device)
        return links

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Groups that this rank is in, so that the caller can destroy them."""
        return (*self.lanes.values(), self.pipe, *self.shared.values())

    def _join(self, device: torch.device) -> None:
        """Sends one message over every link, because NCCL connects two ranks at their first message and both must take part."""
        for ((kind, way), peer), group in self.lanes.items():
            # hidden states go to the next stage; if they wrap around, to the first; to a head, to one before the last
            is_ahead = (peer > self.place.rank) if way == "next" else (peer < self.place.rank)
            message = dist.isend if is_ahead == (kind == "F") else dist.irecv
            work = message(torch.zeros(1, device=device), peer, group=group)
            assert work is not None
            work.wait()


def few_multiprocessors(timeout: timedelta, most: int = _LANE_CTAS) -> Any:
    """Makes options for a group whose messages run beside computing; None on other backends than NCCL.

    A message that waits for its other end occupies as many multiprocessors as its communicator may use, by default up to 16.
    """
    if dist.get_backend() != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = most
    # torch warns if it differs from the group's
    options._timeout = timeout
    return options


def with_head(num_stages: int, head_stages: Sequence[int]) -> tuple[int, ...]:
    """Returns the stages that have the output head: the last one, and those that run heads of some chunks."""
    return tuple(sorted({*head_stages, num_stages - 1}))


def _pairs(place: Place, way: _Way, heads: Sequence[int]) -> list[tuple[int, int]]:
    """Returns (sender, receiver) of hidden states: stages and the next ones, last and first, or the last and those in `heads`."""
    last = place.num_stages - 1
    if way == "next":
        stages = [(stage, stage + 1) for stage in range(last)]
    else:
        stages = [(last, stage) for stage in ([0] if way == "wrap" else heads[:-1])]
    width = place.ranks_per_stage
    return [(sender * width + each, receiver * width + each) for sender, receiver in stages for each in range(width)]


class StageMessages:
    """Messages of one rank in one plan, from and to the stages beside its own and, with a `head_end` (`Place.peer`), of heads.

    Both ends must run their actions in the order of the plan; otherwise messages reach the wrong action.
    """

    def __init__(self, links: Links, dtype: torch.dtype, device: torch.device) -> None:
        self._links, self._dtype, self._device = links, dtype, device
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()

    def receive(self, action: Action, shape: Sequence[int], head_end: int | None = None) -> Tensor:
        """Waits for the tensor of this shape that `action` receives. The caller owns the tensor."""
        link = self._link(action, head_end)
        buffer = torch.empty(tuple(shape), dtype=self._dtype, device=self._device)
        work = dist.irecv(buffer, link[1], group=self._links.lanes[link])
        assert work is not None
        work.wait()
        return buffer

    def send(self, action: Action, tensor: Tensor, head_end: int | None = None) -> None:
        """Starts to send `tensor`, which must not be written until it has left."""
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        link, tensor = self._link(action, head_end), tensor.detach().contiguous()
        work = dist.isend(tensor, link[1], group=self._links.lanes[link])
        assert work is not None
        self._sending.append((work, tensor))

    def finish(self) -> None:
        """Waits until all messages have left."""
        while self._sending:
            self._sending.popleft()[0].wait()

    def _link(self, action: Action, head_end: int | None) -> _Link:
        peer, way = self._links.place.peer(action, head_end)
        return (action.kind[1], way), peer


# longest last backward with which gradients are summed early, as a share of a group's time-out
_EARLY_SHARE = 1 / 8
# multiprocessors that such a sum may occupy while layers compute on the others
_SUM_CTAS = 8


class GroupPool:
    """Owns the process groups of a run and makes contexts of chunks. Creates no group after construction.

    A collective that waits longer than `timeout_s` (on NCCL: `group_limit`) fails on the waiting ranks. lends: stages may lend
    ranks to slices of other stages, which needs groups of equal positions in the stages from the first to any one and from any
    one to the last. sums_early: gradients of replicated weights are summed during the last backward of a step, in a separate
    group (`early`). exchange_parts: most parts in which heads are exchanged beside attention; one if stages lend ranks.
    head_stages: stages before the last that may run output heads, which needs links between them and the last.
    """

    def __init__(
        self,
        degrees: tuple[int, ...],
        timeout_s: float,
        control: dist.ProcessGroup | None = None,
        num_stages: int = 1,
        lends: bool = False,
        sums_early: bool = False,
        exchange_parts: int = MOST_HEAD_PARTS,
        *,
        head_stages: tuple[int, ...] = (),
    ) -> None:
        self.rank, self.num_ranks, self.num_stages = 0, 1, num_stages
        self.everyone: dist.ProcessGroup | None = None
        self.control = control
        self.links: Links | None = None
        self.early: EarlyGroup | None = None
        self._early_ranks: dist.ProcessGroup | None = None
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        # verdicts of the device, which last for the run
        self.stacks = StackChecks()
        # most parts in which heads are exchanged beside attention, and fewest bytes of one, see `head_parts`
        self.exchange_parts, self.part_bytes = 1 if lends else exchange_parts, HEAD_PART_BYTES
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
            self.links = Links.create(place, timeout, device, head_stages)
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
        # a rank waits for the last backward of another, in addition to its wait at the end of a step
        timeout += timedelta(seconds=longest_s)
        found = []
        for first in range(0, self.num_ranks, self.ranks_per_stage):
            ranks = list(range(first, first + self.ranks_per_stage))
            group = dist.new_group(ranks, timeout=timeout, pg_options=few_multiprocessors(timeout, _SUM_CTAS))
            found += [group] if self.rank in ranks else []
        return EarlyGroup(found[0], longest_s)

    @property
    def stage_group(self) -> dist.ProcessGroup | None:
        """The group of all ranks of this rank's stage, which hold the same layers; None for a single rank."""
        return self.group(tuple(range(self.ranks_per_stage)))

    def drop_early(self) -> None:
        """Makes later steps sum all gradients at their ends, after a step that ended in an error while sums were running."""
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
        """Returns the group of ranks of this stage at `positions`; None for one rank. Raises ValueError if there is none."""
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
        """Returns the group of ranks at this rank's position of `stages`, in order. Raises ValueError if there is none."""
        ranks = tuple(stage * self.ranks_per_stage + self.position for stage in stages)
        if ranks not in self._groups:
            raise ValueError(
                f"stages {stages} are not a group of this run; create the pool with lends=True, and lend ranks only among "
                f"consecutive stages that include the first or the last one"
            )
        return self._groups[ranks]

    @contextmanager
    def small_parts(self, part_bytes: int = 1) -> Iterator[None]:
        """Context in which heads are exchanged in parts, if they can be, of so few bytes."""
        usual, self.part_bytes = self.part_bytes, part_bytes
        try:
            yield
        finally:
            self.part_bytes = usual

    @property
    def _stage_ranks(self) -> set[int]:
        first = self.stage * self.ranks_per_stage
        return set(range(first, first + self.ranks_per_stage))

    def context(self, group: SequenceGroup, chunk: Chunk, kv_book: KVBook | None = None) -> GroupContext:
        """Makes this rank's context for a chunk of its group; all chunks of a micro-batch share one `kv_book` (None: no slices).

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
            stacks=self.stacks,
            slices=slices,
            documents=tuple(
                (piece.num_tokens, ends[chunk.spans[piece.document].sequence] if piece.document < len(chunk.spans) else 1)
                for piece in own
            ),
            layout=layout,
            kv_book=KVBook() if kv_book is None else kv_book,
            sequences=tuple(chunk.spans[piece.document].sequence if piece.document < len(chunk.spans) else -1 for piece in own),
            chunk_sequences=tuple(span.sequence for span in chunk.spans),
            mean_tokens=math.ceil(fmean(each.num_tokens for each in group.chunks or (chunk,)) / shape.degree),
            exchange_parts=self.exchange_parts,
            part_bytes=self.part_bytes,
        )


def sum_over_ranks(total: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sums `total` over the ranks of `group` (None: this rank alone), in place, and returns it. Collective over the group."""
    if group is not None:
        dist.all_reduce(total, group=group)
    return total


def lending_ranks(num_stages: int, ranks_per_stage: int) -> list[tuple[int, ...]]:
    """Returns the ranks of every set of stages that may run a slice together, per position, in order of creation."""
    spans = [range(first, num_stages) for first in range(num_stages - 1)] + [range(last + 1) for last in range(1, num_stages - 1)]
    return [
        tuple(stage * ranks_per_stage + position for stage in stages) for stages in spans for position in range(ranks_per_stage)
    ]


def aligned_groups(num_ranks: int, degrees: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns the positions of every group of two or more ranks that starts at a multiple of its degree, in creation order."""
    return [
        tuple(range(start, start + degree))
        for degree in sorted(degrees)
        if degree > 1
        for start in range(0, num_ranks - degree + 1, degree)
    ]
