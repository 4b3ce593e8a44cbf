"""Copies between device and host that block neither, with the pinned host memory for them, and memory layouts of tensors.

The host tier copies saved tensors this way, and `parameters/host_steps.py` gradients and weights. On CUDA an engine has one
stream per direction; on CPU it copies at once.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

ALIGNMENT_BYTES = 64
# tensors that may be in flight to the host at once, if the caller gives no number of bytes
_MOST_LEAVING = 2
# threads that touch the pages of a slab, and bytes that each touches at a time
_TOUCHING_THREADS, _TOUCHED_BYTES = 8, 2**28
# handle of one copy, passed to later copies that must follow it, and to `wait`
Ticket = Any


def copy_on_host(tensor: Tensor) -> Tensor:
    """Returns a copy of `tensor` in pinned memory, made in the order of the device's work; a tensor on the host as it is.

    Only work that is queued later on the same stream may read the copy. torch keeps the memory for copies of equal size.
    """
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class CopyEngine(Protocol):
    """Copies between device and host. A source may be dropped as soon as the call returns, a target after `wait`.

    is_kept: the caller drops the source only after `wait`, or drops the copy with it, so the device need not wait to free it.
    room_bytes: most bytes of source storages in flight to the host at once, unless this source is larger (default: two sources of
    any size). beside: sources in flight go on leaving while this one comes; else it comes when they have left.

    Copies to the host run in the order of the calls, so a block that was not fetched can be written again.
    """

    def to_host(
        self, source: Tensor, target: Tensor, after: tuple[Ticket, ...], is_kept: bool = False, room_bytes: int | None = None
    ) -> Ticket: ...

    def to_device(self, source: Tensor, target: Tensor, after: tuple[Ticket, ...], beside: bool = False) -> Ticket: ...

    def let_go(self) -> None:
        """Makes everything computed from now on wait until all sources in flight have left."""

    def wait(self, ticket: Ticket) -> None:
        """Makes everything computed from now on wait for the copy."""

    def wait_on_host(self, ticket: Ticket) -> None:
        """Blocks until the copy is done, so that the CPU may read or write its host memory."""


class PlainCopies:
    """Copies at once; for tensors on the CPU."""

    def to_host(
        self, source: Tensor, target: Tensor, after: tuple[Ticket, ...], is_kept: bool = False, room_bytes: int | None = None
    ) -> Ticket:
        target.copy_(source)

    def to_device(self, source: Tensor, target: Tensor, after: tuple[Ticket, ...], beside: bool = False) -> Ticket:
        target.copy_(source)

    def let_go(self) -> None:
        return

    def wait(self, ticket: Ticket) -> None:
        return

    def wait_on_host(self, ticket: Ticket) -> None:
        return


class Leaving:
    """Tensors being copied from the device, each kept until `wait` has made the device wait for its copy.

    So their memory is reused in the order of the device's work. With `record_stream` instead, it would be free only once the host
    finds the copy done: a host that runs ahead would fill the device's memory with tensors that have left it.
    """

    def __init__(self, wait: Callable[[Ticket], None]) -> None:
        self._wait = wait
        self._kept: deque[tuple[Tensor, Ticket]] = deque()
        self.num_bytes = 0

    def add(self, source: Tensor, ticket: Ticket, room_bytes: int | None = None) -> None:
        """Keeps `source` and as many earlier ones as the room allows; see `CopyEngine`."""
        # a view keeps its whole storage
        more_bytes = source.untyped_storage().nbytes()
        while self._kept and self._is_full(more_bytes, room_bytes):
            self._drop_first()
        self._kept.append((source, ticket))
        self.num_bytes += more_bytes

    def drop_all(self) -> None:
        """Makes the device wait for all copies."""
        while self._kept:
            self._drop_first()

    def _is_full(self, more_bytes: int, room_bytes: int | None) -> bool:
        if room_bytes is None:
            return len(self._kept) >= _MOST_LEAVING
        return self.num_bytes + more_bytes > room_bytes

    def _drop_first(self) -> None:
        source, ticket = self._kept.popleft()
        self._wait(ticket)
        self.num_bytes -= source.untyped_storage().nbytes()


class StreamCopies:
    """Copies on one CUDA stream per direction, after all work queued on the current stream so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._leaving = Leaving(self.wait)

    def to_host(
        self, source: Tensor, target: Tensor, after: tuple[Ticket, ...], is_kept: bool = False, room_bytes: int | None = None
    ) -> Ticket:
        ticket = self._copy(self._out, source, target, after)
        if not is_kept:
            self._leaving.add(source, ticket, room_bytes)
        return ticket

    def to_device(self, source: Tensor, target: Tensor, after: tuple[Ticket, ...], beside: bool = False) -> Ticket:
        if not beside:
            self.let_go()
        return self._copy(self._back, source, target, after)

    def let_go(self) -> None:
        self._leaving.drop_all()

    def wait(self, ticket: Ticket) -> None:
        torch.cuda.current_stream(self._device).wait_event(ticket)

    def wait_on_host(self, ticket: Ticket) -> None:
        ticket.synchronize()

    def _copy(self, stream: Any, source: Tensor, target: Tensor, after: tuple[Ticket, ...]) -> Ticket:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        for ticket in after:
            stream.wait_event(ticket)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()


def copies_of(device: torch.device) -> CopyEngine:
    """Makes an engine for tensors of `device`."""
    return StreamCopies(device) if device.type == "cuda" else PlainCopies()


def block_bytes(num_bytes: int) -> int:
    """Returns the bytes that a tensor of `num_bytes` takes in host memory."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class HostMemory:
    """One allocation of host memory, page-locked for CUDA if `is_pinned` and the system allows it. It must outlive its views.

    setting: the setting to lower, for the warning if the system refuses.
    """

    def __init__(self, num_bytes: int, is_pinned: bool, setting: str) -> None:
        self.memory = _touched(num_bytes) if is_pinned else torch.empty(num_bytes, dtype=torch.uint8)
        self.is_pinned = is_pinned and _pin(self.memory, setting)
        if self.is_pinned:
            # unpin before the memory is freed: pages returned to the system must not stay locked
            weakref.finalize(self, _unpin, self.memory.data_ptr())


def _touched(num_bytes: int) -> Tensor:
    """Allocates memory and touches its pages, huge ones if available: pinning would add missing pages one by one."""
    pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # fails on a kernel without huge pages
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes]
    parts = memory.split(_TOUCHED_BYTES)
    with ThreadPoolExecutor(_TOUCHING_THREADS) as threads:
        for _ in threads.map(Tensor.zero_, parts):
            pass
    return memory


def _pin(memory: Tensor, setting: str) -> bool:
    """Page-locks the memory for CUDA; returns False, with a warning, if the system refuses."""
    error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if error:
        logger.warning(
            "%.1f GiB of host memory could not be pinned (CUDA error %d): copies from pageable memory are slower and block; "
            "raise the limit of locked memory (ulimit -l), or lower %s",
            memory.numel() / 2**30,
            error,
            setting,
        )
    return not error


def _unpin(address: int) -> None:
    # copies may still be running, for example after an error inside a step
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)


def dense_channels(x: Tensor) -> Tensor:
    """Returns `x` with a dense last dimension, the only layout that attention operators require.

    Views of a long buffer in which only the heads are strided, such as keys and values, are not copied.
    """
    return x if x.stride(-1) == 1 else x.contiguous()


def dense_strides(x: Tensor) -> tuple[int, ...]:
    """Returns the strides of a tensor without gaps whose dimensions have the same order in memory as those of `x`."""
    return torch.empty_like(x, device="meta").stride()


def has_strides(x: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether `x` has these strides; those of dimensions of size 1 do not count."""
    return all(size == 1 or own == stride for size, own, stride in zip(x.shape, x.stride(), strides, strict=True))


def laid_out(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Returns `x` if it has these strides, else a copy that has them."""
    if has_strides(x, strides):
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
