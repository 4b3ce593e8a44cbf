"""Keeps the shards of layers in host memory while forwards and backwards run; the device holds those of two layers.

`LayerShards.away` copies all shards of layers to pinned memory and frees them on the device. A gather then reads a layer's shards
from a slot of device memory, which is filled by one copy. FSDP2 gathers a layer while the one before it computes; meanwhile the
slot of the layer after it is filled. Layers usually come in order, forward or backward; a gather always waits for the layer's own
copy, so another order costs only time. At the end of the context all shards come back.

Outside of the context every shard is on the device, where the optimizer, checkpoints and user code read and write it. Its host
copy is written again in each step, since changes of a weight through `.data` cannot be detected. Only an evaluation, which reads
no weights between its forwards, may leave them on the host (`wait_away`). Gradients stay on the device, as do embedding, head and
final norm, which are one unit that is gathered once per forward.

FSDP2's own `CPUOffloadPolicy` would move gradients too, and wait for them inside each layer's backward. FSDP2 has no other way
to gather from elsewhere, so two methods of its record of a layer are replaced here, as in `rounded.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hf_longctx.runtime.core.host_copies import CopyEngine, HostMemory, Ticket, block_bytes, copies_of
from hf_longctx.runtime.core.torch_versions import weight_groups
from hf_longctx.runtime.parameters.gathers import gather_of

# layers with shards on the device: one is gathered while the next is copied
NUM_SLOTS = 2


class LayerShards:
    """Shards of all layers of a sharded model, in the order of its forward.

    layers: FSDP2's units. device: device of the shards. copies: copy engine (default: the device's).
    """

    def __init__(self, layers: Sequence[FSDPModule], device: torch.device, copies: CopyEngine | None = None) -> None:
        groups = [group for layer in layers for group in weight_groups(layer)]
        self._layers = [_Layer(place, group) for place, group in enumerate(groups)]
        self._copies = copies_of(device) if copies is None else copies
        sizes = [layer.num_bytes for layer in self._layers]
        # page-locked memory, which must outlive its views
        self._memory = HostMemory(sum(sizes), device.type == "cuda", "layer_weights='host'")
        self._slots = [_Slot(torch.empty(max(sizes), dtype=torch.uint8, device=device)) for _ in range(NUM_SLOTS)]
        self._is_away = False
        # whether shards stay on the host at the end of a context
        self._waits = False
        # index of the layer gathered last, and 1 or -1 for the direction in which layers follow each other
        self._last, self._way = 0, 1
        for layer, home in zip(self._layers, self._memory.memory.split(sizes), strict=True):
            layer.home = home
            self._bind(layer)

    @contextmanager
    def away(self, root: FSDPModule) -> Iterator[None]:
        """Context of forwards and backwards of the model `root`, during which shards of layers are on the host.

        Raises RuntimeError if an earlier step ran out of memory when they should have come back.
        """
        if self._is_away and not self._waits:
            raise RuntimeError(
                "an earlier step failed, and the device had no room for weights that were on the host (layer_weights='host'); "
                "start the run again from its last checkpoint"
            )
        # FSDP2's first gather reads the shards, and would pad freed ones
        root._get_fsdp_state()._lazy_init()
        if not self._is_away:
            self._leave()
        try:
            yield
        except BaseException:
            self._waits = False
            # raise the error of the step instead
            with suppress(torch.OutOfMemoryError):
                self._come_back()
            raise
        if not self._waits:
            self._come_back()

    def wait_away(self) -> None:
        """Leaves shards on the host between the following contexts, until `come_back`; weights must not be used there."""
        self._waits = True

    def come_back(self) -> None:
        """Ends `wait_away`. Idempotent."""
        waited, self._waits = self._waits, False
        if waited and self._is_away:
            self._come_back()

    def home_of(self, parameter: nn.Parameter) -> Tensor | None:
        """Returns the host memory of a parameter's shard, free outside of `away`; None for weights that never leave."""
        for layer in self._layers:
            for weight, home in zip(layer.weights, layer.pieces(layer.home), strict=True):
                if weight.sharded_param is parameter:
                    own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                    return home[: own.numel()].view(own.shape)
        return None

    @torch.no_grad()
    def _leave(self) -> None:
        tickets: list[Ticket] = []
        for layer in self._layers:
            layer.shards = [weight._sharded_param_data for weight in layer.weights]
            for shard, home in zip(layer.shards, layer.pieces(layer.home), strict=True):
                if (shard.shape, shard.dtype, shard.untyped_storage().nbytes()) != (home.shape, home.dtype, home.nbytes):
                    raise RuntimeError(
                        f"a shard of {shard.numel()} elements of {shard.dtype} cannot leave the device: since the model was "
                        f"sharded, its size or dtype has changed, or it shares its memory with another tensor; change weights in "
                        f"place, or set layer_weights='device'"
                    )
                tickets.append(self._copies.to_host(shard, home, (), is_kept=True))
        self._is_away = True
        for ticket in tickets:
            self._copies.wait(ticket)
        for layer in self._layers:
            for shard in layer.shards:
                shard.untyped_storage().resize_(0)

    @torch.no_grad()
    def _come_back(self) -> None:
        returning: list[Ticket] = []
        for layer in self._layers:
            layer.read_from(layer.shards)
            for shard, home in zip(layer.shards, layer.pieces(layer.home), strict=True):
                shard.untyped_storage().resize_(shard.nbytes)
                returning.append(self._copies.to_device(home, shard, ()))
        for ticket in returning:
            self._copies.wait(ticket)
        for slot in self._slots:
            slot.place, slot.is_read = None, False
        self._is_away = False

    def _bind(self, layer: _Layer) -> None:
        """Makes FSDP2 gather the layer from a slot while shards are away."""
        group = layer.group
        gather = gather_of(group)
        assert gather is not None

        def unshard(async_op: bool = False) -> None:
            is_first = self._is_away and group.is_sharded and not gather.is_running
            slot = self._bring(layer) if is_first else None
            gather.start()
            if slot is not None:
                slot.is_read = gather.is_running
                self._bring_next(layer)

        def wait_for_unshard() -> None:
            gather.finish()
            if self._is_away:
                layer.read_from(layer.shards)
                # the current stream has waited for the gather, and the next copy to the slot waits for the current stream
                for slot in self._slots:
                    slot.is_read = slot.is_read and slot.place != layer.place

        group.unshard, group.wait_for_unshard = unshard, wait_for_unshard

    @torch.no_grad()
    def _bring(self, layer: _Layer) -> _Slot:
        """Makes the layer's next gather read from a slot that has its shards, or will have them when the gather begins."""
        slot = next((slot for slot in self._slots if slot.place == layer.place), None)
        if slot is None:
            # there may be no free slot if several layers are gathered at once, which our executor never does
            if all(slot.is_read for slot in self._slots):
                self._slots.append(_Slot(torch.empty_like(self._slots[0].memory)))
            slot = self._fill(layer)
        slot.is_read = True
        layer.read_from(layer.pieces(slot.memory))
        context = layer.group.comm_ctx
        with context.device_handle.stream(context.all_gather_stream):
            self._copies.wait(slot.ticket)
        return slot

    def _bring_next(self, layer: _Layer) -> None:
        """Fills a slot with the shards of the layer that is probably gathered next."""
        step, self._last = layer.place - self._last, layer.place
        if abs(step) == 1:
            self._way = step
        elif layer.place in (0, len(self._layers) - 1):
            # a forward or a backward begins
            self._way = -1 if layer.place else 1
        following = layer.place + self._way
        is_there = any(slot.place == following for slot in self._slots)
        is_free = any(not slot.is_read and slot.place != layer.place for slot in self._slots)
        if 0 <= following < len(self._layers) and is_free and not is_there:
            self._fill(self._layers[following])

    @torch.no_grad()
    def _fill(self, layer: _Layer) -> _Slot:
        """Starts the copy of a layer's shards into an unread slot, if possible not the last layer's."""
        slot = min((slot for slot in self._slots if not slot.is_read), key=lambda slot: slot.place == self._last)
        slot.place = layer.place
        slot.ticket = self._copies.to_device(layer.home, slot.memory[: layer.num_bytes], ())
        return slot


class _Slot:
    """Device memory for the shards of one layer.

    place: index of the layer whose shards it has, or will have after `ticket`. is_read: a gather has yet to read it.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.place: int | None = None
        self.ticket: Ticket = None
        self.is_read = False


class _Layer:
    """Shards of one layer. group: FSDP2's record of it. home: its host memory. shards: its tensors on the device."""

    home: Tensor

    def __init__(self, place: int, group: Any) -> None:
        self.place, self.group = place, group
        self.weights: list[Any] = list(group.fsdp_params)
        self.shards: list[Tensor] = []
        # sizes with padding, since ranks gather equal parts
        self._kinds = [(weight.padded_sharded_param_size.numel(), weight.sharded_param.dtype) for weight in self.weights]
        self._sizes = [block_bytes(count * dtype.itemsize) for count, dtype in self._kinds]
        self.num_bytes = sum(self._sizes)

    def pieces(self, memory: Tensor) -> list[Tensor]:
        """Returns views of the layer's memory, one tensor per weight."""
        parts = memory[: self.num_bytes].split(self._sizes)
        return [part[: count * dtype.itemsize].view(dtype) for part, (count, dtype) in zip(parts, self._kinds, strict=True)]

    def read_from(self, shards: Sequence[Tensor]) -> None:
        """Makes FSDP2 gather these shards."""
        for weight, shard in zip(self.weights, shards, strict=True):
            weight._sharded_param_data = shard
