"""The host tier: keeps saved tensors in one slab of host memory until their backward.

The activation engine owns one tier per rank; the records of layers store into it.

A slab is one allocation, cut into blocks whose sizes are multiples of 64 bytes. (The pinned allocator of torch up to 2.11 would
round sizes up to powers of two.) Layers and steps request the same sizes again and again, so a freed block is usually reused for
its own size; free neighbours are merged only if nothing fits. A tensor that fits into no block is stored in several, so no
memory is lost to gaps. A slab may be smaller than the memory that a rank may use: tensors that do not fit then get pieces of
pageable memory, since other ranks would have to wait for pinning inside a step.

Copies go through a `CopyEngine` (`runtime/core/host_copies.py`). They keep this order: a copy to the host starts after the
computation that was queued before it; a copy back starts after the copy to the host; a copy into a reused block starts after the
copy that brought the old tensor back from that block; a reader waits for the copy back. A block is free once its `HostTensor` is
no longer referenced.

A layer saves its tensors in bursts, mostly in its MLP, and copying them takes about as long as the whole layer. So copies in
flight may hold as many device bytes as one layer offloads: with fewer, the device would wait during bursts and its link would
idle between them. In a pipeline they may hold those of several layers (`ActivationPolicy.leaving_layers`): the backward of
another chunk comes next, and takes longer than a forward, so that what is left leaves beside it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_longctx.plan.core.types import TensorShare
from hf_longctx.runtime.core.host_copies import (
    ALIGNMENT_BYTES,
    CopyEngine,
    HostMemory,
    Ticket,
    block_bytes,
    copies_of,
    dense_strides,
    has_strides,
)

# bytes of a piece of pageable memory beside a full slab, unless a tensor needs more
_PIECE_BYTES = 2**26


class HostSlab:
    """One allocation of host memory and its free runs, each with the copies that must end before it is overwritten.

    most_bytes: most bytes of slab and pageable pieces together (default: no pieces).
    """

    def __init__(self, capacity_bytes: int, is_pinned: bool, most_bytes: int = 0) -> None:
        self.capacity_bytes, self.most_bytes = block_bytes(capacity_bytes), most_bytes
        self._home = HostMemory(self.capacity_bytes, is_pinned, "host_gib")
        self.memory, self.is_pinned = self._home.memory, self._home.is_pinned
        # the slab and its pieces by first offset, with gaps between them so that runs are never merged across them
        self._pieces = [(0, self.memory)]
        # sorted by size, then by the time at which they were freed
        self._free = [_Run(0, self.capacity_bytes, ())]

    @property
    def beside_bytes(self) -> int:
        """Bytes of the pieces beside the slab."""
        return sum(memory.numel() for _, memory in self._pieces[1:])

    def memory_of(self, run: _Run) -> Tensor:
        """Returns the bytes of a run."""
        place = bisect_right(self._pieces, run.offset, key=_offset) - 1
        offset, memory = self._pieces[place]
        return memory[run.offset - offset :][: run.num_bytes]

    def take(self, num_rows: int, row_bytes: int) -> list[tuple[int, _Run]]:
        """Takes runs for rows of `row_bytes`, each with its number of rows: the smallest free run that holds all, or several.

        Raises ValueError, without taking anything, if there is too little memory.
        """
        if not self._holds(num_rows * row_bytes):
            self._merge()
        found: list[tuple[int, _Run]] = []
        while num_rows:
            count = num_rows if self._holds(num_rows * row_bytes) else self._free[-1].num_bytes // row_bytes if self._free else 0
            if not count:
                self._add_piece(num_rows * row_bytes, found)
                count = num_rows
            found.append((count, self._cut(block_bytes(count * row_bytes))))
            num_rows -= count
        return found

    def _holds(self, num_bytes: int) -> bool:
        """Whether one free run has at least `num_bytes`."""
        return bool(self._free) and self._free[-1].num_bytes >= num_bytes

    def _cut(self, size: int) -> _Run:
        """Takes the first `size` bytes of the smallest free run that has as many."""
        fitting = self._free.pop(bisect_left(self._free, size, key=_size))
        if rest := fitting.num_bytes - size:
            self.give(_Run(fitting.offset + size, rest, ()), fitting.tickets)
        return _Run(fitting.offset, size, fitting.tickets)

    def _add_piece(self, size: int, taken: list[tuple[int, _Run]]) -> None:
        """Adds pageable memory for `size` bytes; raises ValueError if that would exceed `most_bytes`.

        taken: runs of the same tensor, which are given back in that case.
        """
        size, left_bytes = block_bytes(size), self.most_bytes - self.capacity_bytes - self.beside_bytes
        if size > left_bytes:
            for _, run in taken:
                self.give(run, run.tickets)
            free_bytes, taken_bytes = sum(run.num_bytes for run in self._free), sum(run.num_bytes for _, run in taken)
            raise ValueError(
                f"{(size + taken_bytes) / 2**20:.3f} MiB of saved tensors do not fit into the host slab: "
                f"{free_bytes / 2**20:.3f} of its {(self.capacity_bytes + self.beside_bytes) / 2**20:.3f} MiB are free; raise "
                f"host_gib"
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
    """Host memory of one rank, and the copies to and from it. stored_bytes: bytes of the tensors stored now."""

    def __init__(self, capacity_bytes: int, copies: CopyEngine, is_pinned: bool = False, most_bytes: int = 0) -> None:
        self.slab, self.copies = HostSlab(capacity_bytes, is_pinned, most_bytes), copies
        self.stored_bytes = self.peak_bytes = 0
        # bytes that this layer has offloaded, and the most that any layer of the chunk has
        self._layer_bytes = self._most_layer_bytes = 0
        # number for the chunk that ran forward last, until its tensors have left
        self.leaving_layers = 1

    @classmethod
    def on(cls, device: torch.device, capacity_bytes: int, most_bytes: int = 0) -> HostTier:
        """Makes a tier for tensors of `device`; most_bytes: see `HostSlab`."""
        return cls(capacity_bytes, copies_of(device), device.type == "cuda", most_bytes)

    def begin_chunk(self, leaving_layers: int = 1) -> None:
        """Begins another chunk when all tensors have left; also clears what an error may have left behind."""
        self.settle()
        self._layer_bytes = self._most_layer_bytes = 0
        self.leaving_layers = leaving_layers

    def settle(self) -> None:
        """Lets the device wait until all tensors have left."""
        self.copies.let_go()
        self.leaving_layers = 1

    def end_chunk(self) -> None:
        """Lets the device wait for tensors of the chunk's last layers, unless these leave beside the next pass."""
        if self.leaving_layers == 1:
            self.copies.let_go()

    def begin_layer(self) -> None:
        """Begins another layer, to which the tensors stored from now on belong."""
        if not self._layer_bytes and self.leaving_layers == 1:
            # tensors had the time of the layer before to leave
            self.copies.let_go()
        self._layer_bytes = 0

    def store(self, tensor: Tensor) -> HostTensor:
        """Starts a copy of `tensor` to the host; the caller may drop `tensor` at once.

        Raises ValueError if there is too little memory.
        """
        self._layer_bytes += tensor.untyped_storage().nbytes()
        self._most_layer_bytes = max(self._most_layer_bytes, self._layer_bytes)
        return HostTensor(self, tensor, self.leaving_layers * self._most_layer_bytes)


class HostTensor:
    """A tensor in the slab; its blocks are freed with the object. room_bytes: see `CopyEngine`."""

    def __init__(self, tier: HostTier, source: Tensor, room_bytes: int) -> None:
        self._tier, self._device, self.num_bytes = tier, source.device, source.nbytes
        self._returning: tuple[Tensor, list[Ticket]] | None = None
        # dimensions keep their order in memory if that takes one plain copy
        strides = dense_strides(source)
        is_dense = has_strides(source, strides)
        self._like = torch.empty_like(
            source, device="meta", memory_format=torch.preserve_format if is_dense else torch.contiguous_format
        )
        rows = _rows(source.detach(), is_dense)
        num_rows, start = rows.shape[0], 0
        parts: list[_Part] = []
        for count, run in tier.slab.take(num_rows, source.nbytes // num_rows) if source.nbytes else ():
            own = rows[start : start + count]
            home = tier.slab.memory_of(run)[: own.nbytes].view(source.dtype).view(own.shape)
            # copies to the host run in order, so the last one ends after the others
            is_last = start + count == num_rows
            arrival = tier.copies.to_host(own, home, run.tickets, is_kept=not is_last, room_bytes=room_bytes)
            parts.append(_Part(slice(start, start + count), run, home, arrival))
            start += count
        self._parts, self._is_dense = parts, is_dense
        tier.stored_bytes += self.num_bytes
        tier.peak_bytes = max(tier.peak_bytes, tier.stored_bytes)

    def prefetch(self) -> None:
        """Starts the copy back to the device, unless it has been started."""
        if self._returning is None:
            target = torch.empty_like(self._like, device=self._device)
            rows = _rows(target, self._is_dense)
            for part in self._parts:
                beside = self._tier.leaving_layers > 1
                part.back = self._tier.copies.to_device(part.home, rows[part.place], (part.arrival,), beside)
            self._returning = (target, [part.back for part in self._parts])

    def fetch(self) -> Tensor:
        """Returns the tensor on its device. The caller owns it; a second call copies again."""
        self.prefetch()
        assert self._returning is not None
        (target, tickets), self._returning = self._returning, None
        for ticket in tickets:
            self._tier.copies.wait(ticket)
        return target

    def __del__(self) -> None:
        # the attribute is missing if the slab was full
        if not hasattr(self, "_parts"):
            return
        for part in self._parts:
            if self._returning is not None:
                # wait for a copy back that was never read, since its memory is free from now on
                self._tier.copies.wait(part.back)
            self._tier.slab.give(part.run, () if part.back is None else (part.back,))
        self._tier.stored_bytes -= self.num_bytes


@dataclass(slots=True)
class _Part:
    """Rows of a stored tensor, or elements of a dense one, in one run, with their latest copies out and back."""

    place: slice
    run: _Run
    home: Tensor
    arrival: Ticket
    back: Ticket = None


def _rows(x: Tensor, is_dense: bool) -> Tensor:
    """Returns a view whose first dimension can be cut; for a dense tensor, all elements in memory order."""
    if is_dense:
        return x.as_strided((x.numel(),), (1,))
    return x.flatten(0, next(axis for axis, size in enumerate(x.shape) if size > 1))


class SplitTensor:
    """A saved tensor [T, ...] split by tokens: the first are recomputed, the next wait on the host, the rest stay."""

    def __init__(self, tensor: Tensor, share: TensorShare, tier: HostTier | None) -> None:
        num_tokens = tensor.shape[0]
        self.start, host_stop = share.cuts(num_tokens)
        self._host: HostTensor | None = None
        self._device: Tensor | None = None
        if host_stop > self.start:
            assert tier is not None
            self._host = tier.store(tensor[self.start : host_stop])
        if host_stop == 0:
            # detached, because an output refers to the autograd node, which would hold it in a cycle
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
        """Returns the tokens from `start` on, on the device, appended to the tensors of `front`."""
        pieces = [*front, *([] if self._host is None else [self._host.fetch()])]
        if self._device is not None:
            pieces.append(self._device)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
