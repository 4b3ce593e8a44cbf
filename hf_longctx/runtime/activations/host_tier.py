"""The host tier: saved tensors that wait for their backward in one slab of host memory.

The activation engine owns one tier per rank; the records of layers store into it.

A slab is one allocation, cut into blocks whose sizes are multiples of 64 bytes. (The pinned allocator of torch up to 2.11 would
round sizes up to powers of two.) Layers and steps ask for the same sizes again and again, so a freed block is usually reused for
its own size; free neighbours are merged only when nothing fits. A slab may be smaller than the memory that a rank may use: what
does not fit then gets pieces of pageable memory beside it, since pinning inside a step would let other ranks wait.

Copies go through a `CopyEngine` (`runtime/core/host_copies.py`). They keep this order: a copy to the host starts after the
computation that was queued before it; a copy back starts after the copy to the host; a copy into a reused block starts after the
copy that brought the old tensor back from that block; a reader waits for the copy back. A block is free once nobody refers to its
`HostTensor`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_longctx.plan.core.types import TensorShare
from hf_longctx.runtime.core.host_copies import ALIGNMENT_BYTES, CopyEngine, HostMemory, Ticket, block_bytes, copies_of
from hf_longctx.runtime.core.strides import dense_strides, has_strides

# bytes of a piece of memory beside a full slab, unless a tensor needs more
_PIECE_BYTES = 2**26


class HostSlab:
    """One allocation of host memory and its free runs; each run knows the copies that must end before it is overwritten.

    most_bytes: bytes that it may have with the pieces of pageable memory that it gets when it is full (default: no pieces).
    """

    def __init__(self, capacity_bytes: int, is_pinned: bool, most_bytes: int = 0) -> None:
        self.capacity_bytes, self.most_bytes = block_bytes(capacity_bytes), most_bytes
        self._home = HostMemory(self.capacity_bytes, is_pinned, "host_gib")
        self.memory, self.is_pinned = self._home.memory, self._home.is_pinned
        # the slab and its pieces by their first offset, with a gap behind each so that none is merged with the next
        self._pieces = [(0, self.memory)]
        # sorted by size; runs of one size in the order in which they were freed
        self._free = [_Run(0, self.capacity_bytes, ())]

    @property
    def beside_bytes(self) -> int:
        """Bytes of the pieces beside the slab."""
        return sum(memory.numel() for _, memory in self._pieces[1:])

    def memory_of(self, run: _Run) -> Tensor:
        """The bytes of a run."""
        place = bisect_right(self._pieces, run.offset, key=_offset) - 1
        offset, memory = self._pieces[place]
        return memory[run.offset - offset :][: run.num_bytes]

    def take(self, num_bytes: int) -> _Run:
        """A run for `num_bytes`, taken from the smallest free run that fits. Raises ValueError if none does."""
        size = block_bytes(num_bytes)
        if self._free[-1:] and self._free[-1].num_bytes < size:
            self._merge()
        if not self._free[-1:] or self._free[-1].num_bytes < size:
            self._add_piece(size)
        place = bisect_left(self._free, size, key=_size)
        fitting = self._free.pop(place)
        if rest := fitting.num_bytes - size:
            self.give(_Run(fitting.offset + size, rest, ()), fitting.tickets)
        return _Run(fitting.offset, size, fitting.tickets)

    def _add_piece(self, size: int) -> None:
        """Adds pageable memory with a run of `size` bytes; raises ValueError if the slab may not have so much more."""
        left_bytes = self.most_bytes - self.capacity_bytes - self.beside_bytes
        if size > left_bytes:
            free_bytes = sum(run.num_bytes for run in self._free)
            raise ValueError(
                f"{size / 2**20:.3f} MiB of saved tensors do not fit into the host slab: {free_bytes / 2**20:.3f} of its "
                f"{(self.capacity_bytes + self.beside_bytes) / 2**20:.3f} MiB are free, in smaller pieces; raise host_gib"
            )
        num_bytes = max(size, min(_PIECE_BYTES, left_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES))
        last_offset, last = self._pieces[-1]
        offset = last_offset + last.numel() + ALIGNMENT_BYTES
        self._pieces.append((offset, torch.empty(num_bytes, dtype=torch.uint8)))
        self.give(_Run(offset, num_bytes, ()), ())

    def give(self, run: _Run, tickets: tuple[Ticket, ...]) -> None:
        """Frees a run; `tickets` belong to the copies that may still read it."""
        insort(self._free, _Run(run.offset, run.num_bytes, tickets), key=_size)

    def _merge(self) -> None:
        merged: list[_Run] = []
        for run in sorted(self._free, key=lambda run: run.offset):
            if merged and merged[-1].offset + merged[-1].num_bytes == run.offset:
                before = merged.pop()
                run = _Run(before.offset, before.num_bytes + run.num_bytes, before.tickets + run.tickets)
            merged.append(run)
        self._free = sorted(merged, key=_size)


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive bytes of a slab, and the copies that must end before they are overwritten."""

    offset: int
    num_bytes: int
    tickets: tuple[Ticket, ...]


def _size(run: _Run) -> int:
    return run.num_bytes


def _offset(piece: tuple[int, Tensor]) -> int:
    return piece[0]


class HostTier:
    """Host memory of one rank, and the copies to and from it. `stored_bytes`: bytes of the tensors stored now."""

    def __init__(self, capacity_bytes: int, copies: CopyEngine, is_pinned: bool = False, most_bytes: int = 0) -> None:
        self.slab, self.copies = HostSlab(capacity_bytes, is_pinned, most_bytes), copies
        self.stored_bytes = self.peak_bytes = 0

    @classmethod
    def on(cls, device: torch.device, capacity_bytes: int, most_bytes: int = 0) -> HostTier:
        """A tier for tensors of `device`; most_bytes: see `HostSlab`."""
        return cls(capacity_bytes, copies_of(device), device.type == "cuda", most_bytes)

    def store(self, tensor: Tensor) -> HostTensor:
        """Starts a copy of `tensor` to the host; the caller may drop `tensor` at once."""
        return HostTensor(self, tensor)


class HostTensor:
    """A tensor in the slab; its block is freed when nobody refers to the object any more."""

    def __init__(self, tier: HostTier, source: Tensor) -> None:
        self._tier, self._device = tier, source.device
        self._returning: tuple[Tensor, Ticket] | None = None
        self._tickets: tuple[Ticket, ...] = ()
        self.num_bytes = source.numel() * source.element_size()
        self._run = tier.slab.take(self.num_bytes)
        memory = tier.slab.memory_of(self._run)[: self.num_bytes]
        home, strides = memory.view(source.dtype), dense_strides(source)
        # dimensions keep their order in memory where that takes one plain copy
        self._home = home.as_strided(source.shape, strides) if has_strides(source, strides) else home.view(source.shape)
        self._arrival = tier.copies.to_host(source.detach(), self._home, self._run.tickets)
        tier.stored_bytes += self.num_bytes
        tier.peak_bytes = max(tier.peak_bytes, tier.stored_bytes)

    def prefetch(self) -> None:
        """Starts the copy back to the device, unless it has been started."""
        if self._returning is None:
            target = torch.empty_like(self._home, device=self._device)
            ticket = self._tier.copies.to_device(self._home, target, (self._arrival,))
            self._returning = (target, ticket)
            self._tickets = (ticket,)

    def fetch(self) -> Tensor:
        """The tensor back on its device. The caller owns it; a second call copies again."""
        self.prefetch()
        assert self._returning is not None
        (target, ticket), self._returning = self._returning, None
        self._tier.copies.wait(ticket)
        return target

    def __del__(self) -> None:
        # the attribute is missing if the slab was full
        if hasattr(self, "_arrival"):
            if self._returning is not None:
                # nobody has waited for the copy back into memory that is free from now on
                self._tier.copies.wait(self._returning[1])
            self._tier.slab.give(self._run, self._tickets)
            self._tier.stored_bytes -= self.num_bytes


class SplitTensor:
    """A saved tensor [T, ...] split by tokens: the first are dropped and recomputed, the next wait on the host, the rest stay."""

    def __init__(self, tensor: Tensor, share: TensorShare, tier: HostTier | None) -> None:
        num_tokens = tensor.shape[0]
        self.start, host_stop = share.cuts(num_tokens)
        self._host: HostTensor | None = None
        self._device: Tensor | None = None
        if host_stop > self.start:
            assert tier is not None
            self._host = tier.store(tensor[self.start : host_stop])
        if host_stop == 0:
            # detached, because an output refers to the autograd node that would hold it
            self._device = tensor.detach()
        elif host_stop < num_tokens:
            # a copy, since a view would keep the whole storage alive
            self._device = tensor[host_stop:].detach().clone()

    @property
    def device_bytes(self) -> int:
        return 0 if self._device is None else self._device.numel() * self._device.element_size()

    @property
    def host_bytes(self) -> int:
        return 0 if self._host is None else self._host.num_bytes

    def prefetch(self) -> None:
        if self._host is not None:
            self._host.prefetch()

    def fetch(self, front: Sequence[Tensor] = ()) -> Tensor:
        """The tokens from `start` on, on the device, appended to the tensors of `front`."""
        pieces = [*front, *([] if self._host is None else [self._host.fetch()])]
        if self._device is not None:
            pieces.append(self._device)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
