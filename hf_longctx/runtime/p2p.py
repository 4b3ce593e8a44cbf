"""Messages between pipeline stages: hidden states forward, their gradients back, at equal positions of the stages.

A plan says who sends what when, so both ends know every shape. Sends do not block: the buffer is kept until the message has
left. A receive is posted one message ahead of the action that needs it. Hidden states and gradients have a process group each,
and those that interleaving wraps around from the last stage to the first two more: messages of one group between two ranks all
go one way and in the order of the plan, so that the streams on which NCCL runs them cannot wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hf_longctx.plan.types import Action

# hidden states or gradients, and whether they wrap around
_Lane = tuple[str, bool]
_LANES: tuple[_Lane, ...] = (("F", False), ("B", False), ("F", True), ("B", True))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands in the pipeline: its stage of how many, and how far in ranks the next stage is."""

    rank: int
    stage: int
    num_stages: int
    ranks_per_stage: int

    def peer(self, action: Action) -> tuple[int, bool]:
        """The other end of a message as a global rank, and whether the message wraps around."""
        stage = self.stage + (1 if action.kind in ("SF", "RB") else -1)
        is_wrap = not 0 <= stage < self.num_stages
        return self.rank + (stage % self.num_stages - self.stage) * self.ranks_per_stage, is_wrap


@dataclass(frozen=True, slots=True)
class Links:
    """The process groups of a run's messages, and those of this rank's position on all stages and on the two ends.

    pipe: for the norm of all stages' gradients. ends: the first and the last stage, for the gradients of tied embeddings; None
    for ranks of other stages.
    """

    place: Place
    lanes: dict[_Lane, dist.ProcessGroup]
    pipe: dist.ProcessGroup
    ends: dist.ProcessGroup | None

    @classmethod
    def create(cls, place: Place, timeout: timedelta, device: torch.device) -> Links:
        """Collective over all ranks, which create every group in one order. `device`: of the messages."""
        lanes = {lane: dist.new_group(timeout=timeout) for lane in _LANES}
        found: dict[str, dist.ProcessGroup] = {}
        for position in range(place.ranks_per_stage):
            column = list(range(position, place.num_stages * place.ranks_per_stage, place.ranks_per_stage))
            for name, ranks in (("pipe", column), ("ends", [column[0], column[-1]])):
                group = dist.new_group(ranks, timeout=timeout)
                if place.rank in ranks:
                    found[name] = group
        links = cls(place, lanes, found["pipe"], found.get("ends"))
        links._join(device)
        return links

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Every group that this rank is in, for closing them."""
        return (*self.lanes.values(), self.pipe, *([self.ends] if self.ends is not None else []))

    def _join(self, device: torch.device) -> None:
        """One message over every link: NCCL joins two ranks at their first, and both must be there."""
        for (kind, is_wrap), group in self.lanes.items():
            for sender in range(self.place.num_stages):
                # along the chain, so that nobody waits in a circle
                has_receiver = is_wrap == (sender + 1 == self.place.num_stages)
                receiver = (sender + 1) % self.place.num_stages
                if not has_receiver or self.place.stage not in (sender, receiver):
                    continue
                peer_stage = receiver if self.place.stage == sender else sender
                peer = self.place.rank + (peer_stage - self.place.stage) * self.place.ranks_per_stage
                token = torch.zeros(1, device=device)
                message = dist.isend if self.place.stage == (sender if kind == "F" else receiver) else dist.irecv
                work = message(token, peer, group=group)
                assert work is not None
                work.wait()


class RoundMessages:
    """The messages of one rank in one round. `shape_of(chunk)`: of its hidden states on this rank.

    Fatal: actions in another order than the one given, on either end.
    """

    def __init__(
        self,
        links: Links,
        actions: Sequence[Action],
        shape_of: Callable[[int], tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._links, self._shape_of = links, shape_of
        self._dtype, self._device = dtype, device
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()
        self._awaited: dict[tuple[_Lane, int], deque[Action]] = {}
        self._posted: dict[tuple[_Lane, int], tuple[Action, dist.Work, Tensor]] = {}
        for action in actions:
            if action.kind in ("RF", "RB"):
                self._awaited.setdefault(self._way(action), deque()).append(action)
        for way in self._awaited:
            self._post(way)

    def receive(self, action: Action) -> Tensor:
        """What `action` receives, once it is there; posts the receive behind it. The tensor is the caller's."""
        way = self._way(action)
        expected, work, buffer = self._posted.pop(way)
        assert expected == action, f"{action} ran where {expected} is next"
        self._post(way)
        work.wait()
        return buffer

    def send(self, action: Action, tensor: Tensor) -> None:
        """Starts to send `tensor`, which must not be written to until it has left."""
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        (lane, peer), tensor = self._way(action), tensor.detach().contiguous()
        work = dist.isend(tensor, peer, group=self._links.lanes[lane])
        assert work is not None
        self._sending.append((work, tensor))

    def finish(self) -> None:
        """Waits until all that was sent has left."""
        while self._sending:
            self._sending.popleft()[0].wait()

    def _way(self, action: Action) -> tuple[_Lane, int]:
        peer, is_wrap = self._links.place.peer(action)
        return (action.kind[1], is_wrap), peer

    def _post(self, way: tuple[_Lane, int]) -> None:
        if not self._awaited[way]:
            return
        action = self._awaited[way].popleft()
        buffer = torch.empty(self._shape_of(action.chunk), dtype=self._dtype, device=self._device)
        work = dist.irecv(buffer, way[1], group=self._links.lanes[way[0]])
        assert work is not None
        self._posted[way] = (action, work, buffer)
