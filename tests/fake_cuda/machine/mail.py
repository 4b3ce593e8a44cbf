"""A communicator that really moves data between processes, each of which has a fake device.

Messages are read when the stream of their group comes to them, and arrive when somebody waits for them: as late as the declared
order allows, at both ends. A receive occupies its stream until then, and spoils its tensor at once. Collectives are made of
messages, on the group's own stream. Unlike NCCL's, their works keep no tensor alive: what the package says it keeps must do.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fake_cuda.machine.communicator import Posted
from fake_cuda.machine.computing import Computing
from fake_cuda.machine.device import FakeDevice
from torch import Tensor
from torch._C._distributed_c10d import Work

BACKEND = "mail"
_REDUCTIONS = {dist.ReduceOp.RedOpType.SUM: "sum", dist.ReduceOp.RedOpType.MAX: "max"}
# how long a stream may wait for another process, which may wait for a processor
_PATIENCE_S = 60.0


class Mailed(dist.ProcessGroup):
    """One group of the communicator. num_waits: works that somebody waited for."""

    num_posted = num_waits = 0

    def __init__(self, rank: int, size: int, name: str, device: FakeDevice) -> None:
        super().__init__(rank, size)
        self.index, self.others, self.name, self.device = rank, [each for each in range(size) if each != rank], name, device
        self.stream, self._counts = torch.cuda.Stream(), Counter[tuple[int, int]]()

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Work:
        self._follow()
        self._send(tensors[0], rank)
        return self._posted()

    def recv(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Work:
        self._follow(tensors)
        self._take(tensors[0], rank)
        return self._posted()

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Work:
        (x,) = tensors
        how = "sum" if options is None else _REDUCTIONS[options.reduceOp.op]
        self._follow()
        # in one order, so that all ranks have the same bits
        if self.index:
            self._send(x, 0)
            self._take(x, 0)
            return self._posted()
        for other in self.others:
            self._take(x, other, how)
        for other in self.others:
            self._send(x, other)
        return self._posted()

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work:
        is_root = options.rootRank == self.index
        self._follow([] if is_root else tensors)
        for other in self.others if is_root else ():
            self._send(tensors[0], other)
        if not is_root:
            self._take(tensors[0], options.rootRank)
        return self._posted()

    def all_gather_single(self, output: Tensor, given: Tensor, options: Any = None) -> Work:
        parts = output.view(-1).chunk(len(self.others) + 1)
        # the input may be this rank's part of the output
        self._follow([parts[other] for other in self.others])
        self._copy(parts[self.index], given.reshape(-1))
        self._exchange({other: given for other in self.others}, {other: parts[other] for other in self.others})
        return self._posted()

    def all_gather_single_coalesced(self, outputs: list[Tensor], given: list[Tensor], options: Any = None) -> Work:
        for output, each in zip(outputs, given, strict=True):
            self.all_gather_single(output, each)
        return self._posted()

    def reduce_scatter_single(self, output: Tensor, given: Tensor, options: Any = None) -> Work:
        assert options is None or options.reduceOp == dist.ReduceOp.SUM
        parts = given.view(-1).chunk(len(self.others) + 1)
        self._follow([output])
        self._copy(output.view(-1), parts[self.index])
        for other in self.others:
            self._send(parts[other], other)
        for other in self.others:
            self._take(output, other, "sum")
        return self._posted()

    def all_to_all_single(self, output: Tensor, given: Tensor, arriving: list[int], leaving: list[int], options: Any) -> Work:
        size = len(self.others) + 1
        received = output.split(arriving or [len(output) // size] * size)
        sent = given.split(leaving or [len(given) // size] * size)
        self._follow([output])
        self._copy(received[self.index], sent[self.index])
        self._exchange({other: sent[other] for other in self.others}, {other: received[other] for other in self.others})
        return self._posted()

    def barrier(self, opts: Any = None) -> Work:
        work = self.allreduce([torch.zeros(1, device="cuda")])
        self.stream.synchronize()
        return work

    def _set_group_name(self, name: str) -> None:
        # torch asks its own backends for the name, of which a group that Python makes has none
        self._known_as = name

    @property
    def group_name(self) -> str:
        return self._known_as

    def getBackendName(self) -> str:
        return BACKEND

    def _get_backend(self, device: torch.device) -> Any:
        # whom torch asks whether messages of one batch make one operation: not these
        return self

    def _exchange(self, sent: dict[int, Tensor], received: dict[int, Tensor]) -> None:
        for other, tensor in sent.items():
            if tensor.numel():
                self._send(tensor, other)
        for other, tensor in received.items():
            if tensor.numel():
                self._take(tensor, other)

    def _follow(self, spoilt: Iterable[Tensor] = ()) -> None:
        """Lets the group's stream follow the current one; what tensors hold before their messages is of no use."""
        for tensor in spoilt:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
        self.stream.wait_stream(torch.cuda.current_stream())

    def _send(self, tensor: Tensor, to: int) -> None:
        self.device.mail(self.stream, self._message(self.index, to), tensor)

    def _take(self, tensor: Tensor, source: int, how: str = "replace") -> None:
        self.device.take_mail(self.stream, self._message(source, self.index), tensor, how)

    def _copy(self, target: Tensor, source: Tensor) -> None:
        if target.data_ptr() != source.data_ptr():
            with torch.cuda.stream(self.stream):
                target.copy_(source, non_blocking=True)

    def _message(self, source: int, to: int) -> str:
        self._counts[source, to] += 1
        return f"{self.name}.{source}.{to}.{self._counts[source, to]}"

    def _posted(self) -> Work:
        Mailed.num_posted += 1
        return _Counted(self.stream.record_event())


class _Counted(Posted):
    """Work that counts whether somebody waited for it."""

    is_waited_for = False

    def wait(self, timeout: Any = None) -> bool:
        Mailed.num_waits += not self.is_waited_for
        self.is_waited_for = True
        return super().wait(timeout)


def begin(folder: str) -> str:
    """Prepares a rank's process: its device computes from now on, and its groups exchange messages; returns their backend.

    folder: place of the messages, the same for all ranks.
    """
    device = FakeDevice()
    device.open_mail(Path(folder))
    device.set_patience(_PATIENCE_S)

    def make(store: Any, rank: int, size: int, timeout: Any) -> Mailed:
        if rank == 0:
            store.set("name of mail", uuid.uuid4().hex)
        return Mailed(rank, size, store.get("name of mail").decode(), device)

    dist.Backend.register_backend(BACKEND, make, devices=["cpu", "cuda"])
    # for good: the process serves as a rank until it ends
    Computing(device).__enter__()
    return BACKEND
