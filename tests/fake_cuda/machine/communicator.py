"""A communicator that behaves as NCCL does towards the device: a receive occupies its stream until the message comes.

One process plays one rank. Once its only peer `only_answers`, it answers every message that this rank sends, in order, and sends
nothing else: a receive that is posted before the message on which the answer depends waits until that message is sent.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from fake_cuda.machine.device import FakeDevice
from torch import Tensor
from torch._C._distributed_c10d import Work

BACKEND = "spinning"


class Peer:
    """The rank at the other end: counts what was sent, and delivers one message for each."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.only_answers = device, False
        self.num_sent = 0
        self.posted: list[int] = []

    def sent(self) -> None:
        self.num_sent += self.only_answers
        for message in self.posted[: self.num_sent]:
            self.device.deliver(message)

    def posts_receive(self, stream: torch.cuda.Stream) -> None:
        message = self.device.receive(stream)
        if self.only_answers:
            self.posted.append(message)
        if len(self.posted) <= self.num_sent:
            self.device.deliver(message)


class Spinning(dist.ProcessGroup):
    """One group of the communicator, with a stream of its own."""

    def __init__(self, rank: int, size: int, peer: Peer) -> None:
        super().__init__(rank, size)
        self.peer, self.stream = peer, torch.cuda.Stream()

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Work:
        # computation does not lag behind the host, so what is sent is there
        self.stream.wait_stream(torch.cuda.current_stream())
        self.peer.sent()
        return Posted(self.stream.record_event())

    def recv(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Work:
        tensors[0].zero_()
        self.stream.wait_stream(torch.cuda.current_stream())
        self.peer.posts_receive(self.stream)
        return Posted(self.stream.record_event())

    def allreduce(self, tensors: Any, options: Any = None) -> Work:
        return Posted(torch.cuda.current_stream().record_event())

    def getBackendName(self) -> str:
        return BACKEND


class Posted(Work):
    """Work whose `wait` lets the current stream wait, not the host."""

    def __init__(self, event: torch.cuda.Event) -> None:
        super().__init__()
        self.event = event

    def wait(self, timeout: Any = None) -> bool:
        torch.cuda.current_stream().wait_event(self.event)
        return True

    def is_completed(self) -> bool:
        return self.event.query()


def register(peer: Peer) -> None:
    """Makes `BACKEND` the name of groups of this peer."""

    def make(store: Any, rank: int, size: int, timeout: Any) -> Spinning:
        return Spinning(rank, size, peer)

    # a peer of an earlier test
    dist.Backend._plugins.pop(BACKEND.upper(), None)
    if hasattr(dist.Backend, BACKEND.upper()):
        delattr(dist.Backend, BACKEND.upper())
    dist.Backend.register_backend(BACKEND, make, devices=["cpu", "cuda"])
