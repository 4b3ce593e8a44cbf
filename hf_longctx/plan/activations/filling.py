"""Fills memory greedily with saved tensors: the quick way to policies, which is also optimal for most chunks.

Pieces of classes are placed in the order of seconds saved per byte. Each first uses copies that are hidden, then the device, then
exposed copies if they cost less than recomputation; the rest is recomputed. As long as no limit binds, all slots take their
pieces of one class at once; where one does, they take halves of them one after the other.
"""

from __future__ import annotations

import numpy as np

from hf_longctx.plan.activations.slot_table import Batch, SlotTable
from hf_longctx.plan.core.arrays import FloatArray

# batches of fewer pieces are placed one by one
_LEAST_AT_ONCE = 4


def fill_memory(
    table: SlotTable, device_bytes: float, host_bytes: float, bytes_per_s: float, back_bytes: float = 0.0
) -> FloatArray | None:
    """Returns (recompute, host) of every class, an array of two columns; None if classes that must stay somewhere do not fit.

    back_bytes: hidden copies are given up until so many bytes are on the device.
    """
    fill = _Filling(table, device_bytes, host_bytes, bytes_per_s)
    if not all(map(fill.place, table.batches)):
        return None
    # where something is recomputed, the device is full
    if back_bytes > 0 and not fill.recomputed[table.can_keep].any():
        fill.bring_back(back_bytes)
    sizes = np.where(table.num_bytes > 0, table.num_bytes, 1.0)
    shares = np.stack([fill.recomputed, fill.on_host], axis=1) / sizes[:, None]
    for place in np.flatnonzero(table.num_bytes == 0).tolist():
        item = table.items[place][1]
        shares[place, 0] = float(item.can_recompute and not item.can_keep)
    return shares


class _Filling:
    """Bytes that are still free while classes are placed.

    slack[n]: bytes free on the device during the backward of slot n. window[n]: bytes of slot n whose copies would still be
    hidden, below 0 after exposed ones. recomputed, on_host: bytes of every class.
    """

    def __init__(self, table: SlotTable, device_bytes: float, host_bytes: float, bytes_per_s: float) -> None:
        self.table, self.copy_s, self.device_bytes = table, 1 / bytes_per_s, device_bytes
        self.slack = np.full(len(table.slots), float(device_bytes))
        self.host_left = host_bytes
        self.window = np.minimum(*table.windows_s) * bytes_per_s
        self.recomputed, self.on_host = np.zeros(len(table.items)), np.zeros(len(table.items))

    def place(self, batch: Batch) -> bool:
        """Places all pieces of a batch; False if one of them fits nowhere."""
        count = len(batch.places)
        if count < _LEAST_AT_ONCE or not batch.visits_slots_once:
            return all(self._place_one(batch, index) for index in range(count))
        # a limit binds somewhere in the batch: the pieces before and after it are placed at once
        half = count // 2
        return self._place_at_once(batch) or (self.place(batch.part(0, half)) and self.place(batch.part(half, count)))

    def _place_at_once(self, batch: Batch) -> bool:
        """Places pieces of different slots as one by one would if no limit is met; else places none and returns False."""
        slots, sizes = batch.slots, batch.num_bytes
        following = np.minimum(slots + 1, len(self.slack) - 1)
        hidden = np.zeros(len(slots))
        if batch.can_offload:
            has_room = np.minimum(self.slack[slots], self.slack[following]) > 0
            hidden = np.where(has_room, np.clip(self.window[slots], 0.0, sizes), 0.0)
        keeps = batch.can_keep and self.slack[-1] > 0
        left = sizes - hidden
        kept = left if keeps else np.zeros(len(slots))
        if not keeps and left.any():
            pays = 2 * self.copy_s * sizes < batch.seconds
            if not batch.can_recompute or (batch.can_offload and self.host_left > 0 and bool(pays.any())):
                return False
        taken = np.zeros(len(self.slack) + 1)
        taken[slots] += kept
        taken = np.cumsum(taken)
        taken[slots] += hidden
        taken[slots + 1] += hidden
        after = self.slack - taken[:-1]
        if (after < np.minimum(self.slack, 0.0)).any() or float(hidden.sum()) > self.host_left:
            return False
        self.slack = after
        self.window[slots] -= hidden
        self.host_left -= float(hidden.sum())
        self.on_host[batch.places] += hidden
        if not keeps:
            self.recomputed[batch.places] += left
        return True

    def _place_one(self, batch: Batch, index: int) -> bool:
        """Places one piece of a class; False if it fits nowhere."""
        place, slot = int(batch.places[index]), int(batch.slots[index])
        num_bytes = left = float(batch.num_bytes[index])
        hidden = min(left, self._host_room(slot), max(0.0, float(self.window[slot]))) if batch.can_offload else 0.0
        self._offload(slot, hidden)
        left -= hidden
        if batch.can_keep:
            kept = min(left, max(0.0, float(self.slack[slot:].min())))
            self.slack[slot:] -= kept
            left -= kept
        # compare an exposed copy, out and back, with recomputation
        pays = not batch.can_recompute or 2 * self.copy_s * num_bytes < batch.seconds[index]
        exposed = min(left, self._host_room(slot)) if batch.can_offload and pays and left else 0.0
        self._offload(slot, exposed)
        left -= exposed
        if left > 1e-9 * num_bytes and not batch.can_recompute:
            return False
        self.recomputed[place] += max(0.0, left) if batch.can_recompute else 0.0
        self.on_host[place] += hidden + exposed
        return True

    def _host_room(self, slot: int) -> float:
        return max(0.0, min(self.host_left, float(self.slack[slot : slot + 2].min())))

    def _offload(self, slot: int, num_bytes: float) -> None:
        if num_bytes:
            self.slack[slot : slot + 2] -= num_bytes
            self.window[slot] -= num_bytes
            self.host_left -= num_bytes

    def bring_back(self, back_bytes: float) -> None:
        """Keeps what was offloaded until `back_bytes` are on the device: a copy that saves no time is useless.

        Bytes of a slot that stay take room in the backwards from two slots later on; before, they were on the device anyway.
        The latest slots come first, since they take room in the fewest backwards.
        """
        self.slack -= max(0.0, self.device_bytes - back_bytes)
        for place in reversed(np.flatnonzero(self.on_host).tolist()):
            slot, item = self.table.items[place]
            if not item.can_keep:
                continue
            later = self.slack[slot + 2 :]
            stays = min(float(self.on_host[place]), max(0.0, float(later.min() if len(later) else self.slack.min())))
            later -= stays
            self.on_host[place] -= stays
            self.host_left += stays
