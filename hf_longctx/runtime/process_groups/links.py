"""Messages between pipeline stages: hidden states go forward, their gradients back, between equal positions of the stages.

`process_groups.pool` creates the links of a run; the executor makes one `RoundMessages` per micro-batch.

The plan says who sends what and when, so both ends know every shape. Sends do not block: a buffer is kept until its message has
left. A receive is posted by the action that needs it and not before: on NCCL a posted receive is a kernel that occupies the
device until its message comes, and everything that waits for an idle device (the first launch of a kernel, memory given back to
the driver) would wait with it, perhaps in front of the very send that the message depends on. Two ranks have one process group
for hidden states and one for gradients, and, with interleaving, two more for messages that wrap around between the last stage and
the first. All messages of a group go in one direction and in the order of the plan, so that the streams on which NCCL runs them
cannot wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_longctx.plan.core.types import Action

# (action kind "F" for hidden states or "B" for gradients, whether messages wrap around)
_Lane = tuple[str, bool]
_LANES: tuple[_Lane, ...] = (("F", False), ("B", False), ("F", True), ("B", True))
# blocks of threads, one on a multiprocessor each, of a message: NVLink and networks need few of them for one pair of ranks
_LANE_CTAS = 4
# (lane, rank at its other end)
_Way = tuple[_Lane, int]


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's location in the pipeline. The next stage is `ranks_per_stage` ranks away."""

    rank: int
    stage: int
    num_stages: int
    ranks_per_stage: int

    def peer(self, action: Action) -> tuple[int, bool]:
        """Global rank at the other end of a message, and whether the message wraps around between last and first stage."""
        stage = self.stage + (1 if action.kind in ("SF", "RB") else -1)
        is_wrap = not 0 <= stage < self.num_stages
        return self.rank + (stage % self.num_stages - self.stage) * self.ranks_per_stage, is_wrap


@dataclass(frozen=True, slots=True)
class Links:
    """Process groups of one rank for messages between stages and for sums over stages.

    lanes: one group for each lane and rank at its other end. pipe: the ranks at this position of all stages, for the gradient
    norm. ends: the ranks at this position of the first and the last stage, for the gradients of tied embeddings; None on other
    stages.
    """

    place: Place
    lanes: dict[_Way, dist.ProcessGroup]
    pipe: dist.ProcessGroup
    ends: dist.ProcessGroup | None

    @classmethod
    def create(cls, place: Place, timeout: timedelta, device: torch.device) -> Links:
        """Creates the links. Collective over all ranks, which create groups in the same order. `device`: holds the messages."""
        lanes: dict[_Way, dist.ProcessGroup] = {}
        for lane in _LANES:
            for pair in _pairs(place, is_wrap=lane[1]):
                group = dist.new_group(list(pair), timeout=timeout, pg_options=few_multiprocessors(timeout))
                if place.rank in pair:
                    lanes[lane, pair[pair[0] == place.rank]] = group
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
        """Every group that this rank is in, so that the caller can destroy them."""
        return (*self.lanes.values(), self.pipe, *([self.ends] if self.ends is not None else []))

    def _join(self, device: torch.device) -> None:
        """Sends one message over every link, because NCCL connects two ranks at their first message and both must take part."""
        for ((kind, is_wrap), peer), group in self.lanes.items():
            # hidden states go to the next stage; where they wrap around, that is the first stage
            is_ahead = (peer < self.place.rank) if is_wrap else (peer > self.place.rank)
            message = dist.isend if is_ahead == (kind == "F") else dist.irecv
            work = message(torch.zeros(1, device=device), peer, group=group)
            assert work is not None
            work.wait()


def few_multiprocessors(timeout: timedelta, most: int = _LANE_CTAS) -> Any:
    """Options for a group whose messages run beside computing; None on other backends than NCCL.

    A message that waits for its other end occupies as many multiprocessors as its communicator may use, by default up to 16.
    """
    if dist.get_backend() != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = most
    # torch warns if it differs from the group's
    options._timeout = timeout
    return options


def _pairs(place: Place, is_wrap: bool) -> list[tuple[int, int]]:
    """(sender, receiver) of hidden states: from each stage to the next, or (`is_wrap`) from the last to the first."""
    last = place.num_stages - 1
    stages = [(last, 0)] if is_wrap else [(stage, stage + 1) for stage in range(last)]
    width = place.ranks_per_stage
    return [(sender * width + each, receiver * width + each) for sender, receiver in stages for each in range(width)]


class RoundMessages:
    """Messages of one rank in one micro-batch. `shape_of(chunk)`: shape of the chunk's hidden states on this rank.

    Both ends must run their actions in the order of the plan; otherwise messages reach the wrong action.
    """

    def __init__(
        self, links: Links, shape_of: Callable[[int], tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._links, self._shape_of = links, shape_of
        self._dtype, self._device = dtype, device
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()

    def receive(self, action: Action) -> Tensor:
        """Waits for the tensor that `action` receives. The caller owns the tensor."""
        way = self._way(action)
        buffer = torch.empty(self._shape_of(action.chunk), dtype=self._dtype, device=self._device)
        work = dist.irecv(buffer, way[1], group=self._links.lanes[way])
        assert work is not None
        work.wait()
        return buffer

    def send(self, action: Action, tensor: Tensor) -> None:
        """Starts to send `tensor`; nobody may write to it until it has left."""
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        way, tensor = self._way(action), tensor.detach().contiguous()
        work = dist.isend(tensor, way[1], group=self._links.lanes[way])
        assert work is not None
        self._sending.append((work, tensor))

    def finish(self) -> None:
        """Waits until all messages have left."""
        while self._sending:
            self._sending.popleft()[0].wait()

    def _way(self, action: Action) -> _Way:
        peer, is_wrap = self._links.place.peer(action)
        return (action.kind[1], is_wrap), peer
