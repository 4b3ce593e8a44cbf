"""Chooses the shares of every layer's saved tensors to keep, offload and recompute, so that they add the fewest seconds.

Memory is filled greedily first, which is fast and optimal for most chunks; otherwise a linear program follows. The greedy filling
places pieces of classes in the order of seconds saved per byte. Each first uses copies that are hidden, then the device, then
exposed copies if they cost less than recomputation; the rest is recomputed. Until a limit binds, all slots take their pieces of
one class at once; then they take halves of them one after the other.

Work is a sequence of *slots* in the order of the forward: each is one layer of one chunk (or one whole slice of a stage). The
tensors that slot n saves are split by tokens into three shares that sum to 1: recomputed r, host h, device g. Copies out of slot
n run during the forward of slot n+1. Copies back run during the backward of slot n+1, which comes before that of slot n. If a
copy takes longer than that, the difference is *exposed*. With b bytes of a class, t seconds to recompute all of it, a link of B
bytes per second, and T seconds of computation in a slot:

    minimize    sum r t  +  sum_n max(0, H_n / B - T_forward[n+1])  +  sum_n max(0, H_n / B - T_backward[n+1])
    subject to  G_n + H_n + H_(n-1) <= device bytes      for every slot: during its backward its own tensors are on the device,
                                                         and those of the slot before it arrive
                sum_n H_n <= host bytes
    where       H_n = sum of h b in slot n,   G_n = sum of g b in slots 0 to n

For attention, later tokens cost more to recompute, so t is not constant: the first r of the rows of a causal triangle hold r^2 of
its pairs, and more than r^2 under a window. The program uses a convex piecewise linear curve, the lower hull of exact points,
because the exact curve is not convex with several documents; outcomes are priced by the exact curve.

The layer input, from which everything else is recomputed, is not recomputed itself, except by policies of least memory
(`plan/memory/capacity.py`). That is the only dependency: attention and MLP are replayed from the layer input, and use everything
that is kept of the classes in between.

If the link is the only limit, h is SPPO's share of slice i, min(1, B T[i+1] / A_i) with A_i the slice's bytes (arXiv 2503.10377,
section 5.2), with no exposed second and nothing recomputed. Splitting by shares under host and device limits is MEMO's idea
(SIGMOD 2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hf_longctx.plan.core.settings import NoRoom
from hf_longctx.plan.core.types import FloatArray, IntArray, TensorShare
from hf_longctx.plan.policies.slots import Batch, Slot, SlotTable
from hf_longctx.plan.solver import LinearProgram, SolverError, solve_linear_program

# batches of fewer pieces are placed one by one
_LEAST_AT_ONCE = 4


def fill_memory(table: SlotTable, device_bytes: float, host_bytes: float, bytes_per_s: float) -> FloatArray | None:
    """Returns (recompute, host) of every class, an array of two columns; None if classes that must stay somewhere do not fit."""
    fill = _Filling(table, device_bytes, host_bytes, bytes_per_s)
    if not all(map(fill.place, table.batches)):
        return None
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
        self.copy_s = 1 / bytes_per_s
        self.slack = np.full(len(table.slots), float(device_bytes))
        self.host_left = host_bytes
        self.window = np.minimum(*table.windows_s) * bytes_per_s
        self.recomputed, self.on_host = np.zeros(len(table.items)), np.zeros(len(table.items))

    def place(self, batch: Batch) -> bool:
        """Places all pieces of a batch; False if one of them fits nowhere."""
        count = len(batch.places)
        return self._place_part(batch, 0, count) if batch.visits_slots_once else self._place_each(batch, 0, count)

    def _place_part(self, batch: Batch, start: int, stop: int) -> bool:
        """Places the pieces from `start` to `stop`, all of different slots; False if one of them fits nowhere."""
        if stop - start < _LEAST_AT_ONCE:
            return self._place_each(batch, start, stop)
        # a limit binds somewhere in the batch: the pieces before and after it are placed at once
        half = (start + stop) // 2
        return self._place_at_once(batch, start, stop) or (
            self._place_part(batch, start, half) and self._place_part(batch, half, stop)
        )

    def _place_at_once(self, batch: Batch, start: int, stop: int) -> bool:
        """Places pieces of different slots at once if no limit binds, else places none and returns False."""
        own = slice(start, stop)
        places, slots, sizes = batch.places[own], batch.slots[own], batch.num_bytes[own]
        following = np.minimum(slots + 1, len(self.slack) - 1)
        hidden = np.zeros(len(slots))
        if batch.can_offload:
            has_room = np.minimum(self.slack[slots], self.slack[following]) > 0
            hidden = np.where(has_room, np.clip(self.window[slots], 0.0, sizes), 0.0)
        keeps = batch.can_keep and self.slack[-1] > 0
        left = sizes - hidden
        kept = left if keeps else np.zeros(len(slots))
        if not keeps and left.any():
            pays = 2 * self.copy_s * sizes < batch.seconds[own]
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
        self.on_host[places] += hidden
        if not keeps:
            self.recomputed[places] += left
        return True

    def _place_each(self, batch: Batch, start: int, stop: int) -> bool:
        """Places the pieces from `start` to `stop` one by one; False if one of them fits nowhere."""
        columns = (each[start:stop].tolist() for each in (batch.places, batch.slots, batch.num_bytes, batch.seconds))
        return all(self._place_one(batch, *piece) for piece in zip(*columns, strict=True))

    def _place_one(self, batch: Batch, place: int, slot: int, num_bytes: float, seconds: float) -> bool:
        """Places one piece of a class; False if it fits nowhere."""
        left = num_bytes
        hidden = min(left, self._host_room(slot), max(0.0, float(self.window[slot]))) if batch.can_offload else 0.0
        self._offload(slot, hidden)
        left -= hidden
        # the last slot mostly has least room
        if batch.can_keep and left and self.slack[-1] > 0:
            kept = min(left, max(0.0, float(self.slack[slot:].min())))
            self.slack[slot:] -= kept
            left -= kept
        # compare an exposed copy, out and back, with recomputation
        pays = not batch.can_recompute or 2 * self.copy_s * num_bytes < seconds
        exposed = min(left, self._host_room(slot)) if left and pays and batch.can_offload else 0.0
        self._offload(slot, exposed)
        left -= exposed
        if left > 1e-9 * num_bytes and not batch.can_recompute:
            return False
        self.recomputed[place] += max(0.0, left) if batch.can_recompute else 0.0
        self.on_host[place] += hidden + exposed
        return True

    def _host_room(self, slot: int) -> float:
        following = min(slot + 1, len(self.slack) - 1)
        return max(0.0, min(self.host_left, float(self.slack[slot]), float(self.slack[following])))

    def _offload(self, slot: int, num_bytes: float) -> None:
        if num_bytes:
            self.slack[slot : slot + 2] -= num_bytes
            self.window[slot] -= num_bytes
            self.host_left -= num_bytes


# fraction of a limit (or of the largest class, if larger) that is subtracted from it, since solvers exceed limits a little
_MARGIN = 1e-6
# tie-breaker: a hidden copy costs a millionth of its time, so that useless copies are left out
_IDLE_COPY = 1e-6
# share of the slots' seconds below which a program is not worth solving
_NO_GAIN = 1e-6


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Most bytes of saved tensors on the device and on the host, and the speed of the link in each direction."""

    device_bytes: float
    host_bytes: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """Seconds that shares add and bytes that they hold. device_bytes: the most at any time."""

    recompute_s: float
    exposed_s: float
    device_bytes: float
    host_bytes: float

    @property
    def cost_s(self) -> float:
        return self.recompute_s + self.exposed_s


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """The chosen shares, and the reason for using the host or not. `shares[slot][i]` belongs to `slots[slot].saved[i]`."""

    shares: tuple[tuple[TensorShare, ...], ...]
    outcome: PolicyOutcome
    solver: str
    reason: str


def choose_policy(
    slots: Sequence[Slot] | SlotTable,
    limits: MemoryLimits,
    time_limit_s: float = 10.0,
    explains: bool = True,
    solves: bool = True,
) -> PolicyChoice:
    """Finds the cheapest shares within the limits, at most as costly as `greedy_shares`; raises NoRoom if none fit.

    slots: slots, or their table if they are asked for several limits. `explains`: whether to give a reason, which may require
    solving a second program. `solves`: False skips the linear program. It is also skipped if a bound proves that it cannot save
    anything, as for most chunks; then the choice takes less than a millisecond.
    """
    _check(limits)
    table = SlotTable.of(slots)
    found: list[tuple[str, FloatArray, PolicyOutcome]] = []
    # every outcome ends with at least the bytes of classes that stay
    if table.num_bytes[table.can_keep].sum() <= _allowed(limits.device_bytes):
        kept: FloatArray = np.stack([~table.can_keep, np.zeros(len(table.items))], axis=1).astype(np.float64)
        found = [("keep", kept, outcome_of(table, kept, limits))]
    if not found or not _fits(found[0][2], limits):
        found = []
        if (greedy := greedy_shares(table, limits)) is not None:
            found.append(("greedy", greedy, outcome_of(table, greedy, limits)))
        is_best = greedy is not None and _is_best(table, greedy, found[0][2], limits)
        if solves and not is_best and (solved := _Problem(table, limits).solve(time_limit_s)) is not None:
            found.append(("lp", solved, outcome_of(table, solved, limits)))
    fitting = [entry for entry in found if _fits(entry[2], limits)]
    if not fitting:
        raise NoRoom(_nothing_fits(table.slots, limits))
    # a copy that saves no time is useless: at equal cost, prefer fewer bytes on the host
    name, shares, outcome = min(fitting, key=lambda entry: (round(entry[2].cost_s, 12), entry[2].host_bytes))
    reason = _reason(table, limits, outcome, time_limit_s) if explains else ""
    return PolicyChoice(_as_shares(table, shares), outcome, name, reason)


def outcome_of(slots: Sequence[Slot] | SlotTable, shares: FloatArray, limits: MemoryLimits) -> PolicyOutcome:
    """Computes cost and bytes of shares: one row (recompute, host) for each class of each slot, in order."""
    table = SlotTable.of(slots)
    num_slots = len(table.slots)
    host = np.bincount(table.owner, weights=shares[:, 1] * table.num_bytes, minlength=num_slots)
    kept = np.bincount(table.owner, weights=(1 - shares.sum(1)) * table.num_bytes, minlength=num_slots)
    arriving = np.concatenate([[0.0], host[:-1]])
    recompute_s, *exposed_s = slot_seconds(table, shares, limits.bytes_per_s)
    peak = float((np.cumsum(kept) + host + arriving).max(initial=0.0))
    return PolicyOutcome(float(recompute_s.sum()), float(sum(way.sum() for way in exposed_s)), peak, float(host.sum()))


def slot_seconds(
    slots: Sequence[Slot] | SlotTable, shares: FloatArray, bytes_per_s: float
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Seconds that shares (see `outcome_of`) add to every slot: recomputation, exposed copies out, exposed copies back."""
    table = SlotTable.of(slots)
    copy_s = np.bincount(table.owner, weights=shares[:, 1] * table.num_bytes, minlength=len(table.slots)) / bytes_per_s
    again_s = table.again_s(shares[:, 0])
    recompute_s: FloatArray = np.bincount(table.owner, weights=again_s, minlength=len(table.slots)).astype(np.float64)
    forward_s, backward_s = (np.maximum(0.0, copy_s - window_s) for window_s in table.windows_s)
    return recompute_s, forward_s, backward_s


def greedy_shares(slots: Sequence[Slot] | SlotTable, limits: MemoryLimits) -> FloatArray | None:
    """Fills memory in the order of seconds saved per byte and returns (r, h) of every class; None if that does not fit."""
    return fill_memory(SlotTable.of(slots), limits.device_bytes, limits.host_bytes, limits.bytes_per_s)


def _is_best(table: SlotTable, greedy: FloatArray, outcome: PolicyOutcome, limits: MemoryLimits) -> bool:
    """Whether no shares cost less than these, by the curves of the program."""
    if not _fits(outcome, limits):
        return False
    least_s = table.least_cost_s(limits.device_bytes, limits.host_bytes, 1 / limits.bytes_per_s)
    return table.hull_s(greedy[:, 0]) + outcome.exposed_s <= least_s + _NO_GAIN * table.work_s


class _Problem:
    """The linear program. Columns: r and h of every class; for every slot G, exposed forward, exposed backward; then segments.

    The segments of a class's curve sum to its r. Seconds rise from segment to segment, so the first ones are filled first.
    """

    def __init__(self, slots: Sequence[Slot] | SlotTable, limits: MemoryLimits) -> None:
        self.table, self.limits = SlotTable.of(slots), limits
        self.num_items, self.num_slots = len(self.table.items), len(self.table.slots)
        # units that scale the program's numbers to about one
        self.byte_unit = float(self.table.num_bytes.max(initial=0.0)) or 1.0
        times = [item.recompute_s for _, item in self.table.items if item.can_recompute]
        times += [slot.forward_s for slot in self.table.slots]
        self.second_unit = max([*times, self.byte_unit / limits.bytes_per_s * 1e-3])

    def solve(self, time_limit_s: float) -> FloatArray | None:
        """(r, h) of every class; None if nothing fits or no solution was found."""
        if not self.num_items:
            return np.zeros((0, 2))
        try:
            solution = solve_linear_program(self._program(), time_limit_s)
        except SolverError:
            # the greedy shares are used instead, and the choice names them as its solver
            return None
        if not solution.has_values:
            return None
        shares: FloatArray = np.clip(solution.values[: 2 * self.num_items].reshape(-1, 2), 0.0, 1.0)
        shares /= np.maximum(1.0, shares.sum(1, keepdims=True))
        return shares

    def _program(self) -> LinearProgram:
        """The program within the limits; everything but the bounds of its rows of memory is made once for a link."""
        known = self.table.programs
        if self.limits.bytes_per_s not in known:
            known[self.limits.bytes_per_s] = self._without_limits()
        program, host = known[self.limits.bytes_per_s], self.num_items + 2 * self.num_slots
        upper = program.row_upper.copy()
        upper[self.num_items + 1 : host : 2] = self._safely(self.limits.device_bytes)
        upper[host] = self._safely(self.limits.host_bytes)
        return replace(program, row_upper=upper)

    def _safely(self, limit_bytes: float) -> float:
        """Converts a limit to the program's unit, less a margin because solvers exceed limits by their tolerance."""
        return max(0.0, limit_bytes - _MARGIN * max(limit_bytes, self.byte_unit)) / self.byte_unit

    def _without_limits(self) -> LinearProgram:
        """The program with room for everything.

        Rows: r + h of every class; for every slot the sum that makes its G, and the device in its backward; the host; exposed
        forward and backward of every slot; sums of segments.
        """
        table, num_items, num_slots = self.table, self.num_items, self.num_slots
        classes, slots, owner = np.arange(num_items), np.arange(num_slots), table.owner
        size, copy = table.num_bytes / self.byte_unit, self.byte_unit / self.limits.bytes_per_s / self.second_unit
        total = np.bincount(owner, size, num_slots)
        kept, is_before = 2 * num_items + slots, owner < num_slots - 1
        curves = [(place, table.segments[place]) for place, (_, item) in enumerate(table.items) if item.documents]
        pieces = [piece for _, segments in curves for piece in segments]
        of_curve = np.repeat(np.arange(len(curves)), [len(segments) for _, segments in curves]).astype(np.int64)
        curved = np.array([place for place, _ in curves], dtype=np.int64)
        host = num_items + 2 * num_slots
        exposed, summed = host + 1, host + 1 + 2 * num_slots
        segments = 2 * num_items + 3 * num_slots + np.arange(len(pieces))
        # row, column and value of entries, in the order in which they stand in a row
        entries: list[tuple[IntArray, IntArray, FloatArray | float]] = [
            (np.repeat(classes, 2), np.arange(2 * num_items), 1.0),
            (num_items + 2 * slots, kept, 1.0),
            (num_items + 2 * np.repeat(owner, 2), np.arange(2 * num_items), np.repeat(size, 2)),
            (num_items + 2 * slots[1:], kept[:-1], -1.0),
            (num_items + 2 * slots + 1, kept, 1.0),
            (num_items + 2 * owner + 1, 2 * classes + 1, size),
            (num_items + 2 * owner[is_before] + 3, 2 * classes[is_before] + 1, size[is_before]),
            (np.full(num_items, host), 2 * classes + 1, size),
            *((exposed + 2 * slots + way, kept + (1 + way) * num_slots, 1.0) for way in (0, 1)),
            *((exposed + 2 * owner + way, 2 * classes + 1, -size * copy) for way in (0, 1)),
            (summed + np.arange(len(curves)), 2 * curved, -1.0),
            (summed + of_curve, segments, 1.0),
        ]
        rows, columns = (np.concatenate([entry[side] for entry in entries]) for side in (0, 1))
        values = np.concatenate([np.broadcast_to(value, len(row)) for row, _, value in entries])
        order = np.argsort(rows, kind="stable")
        order = order[values[order] != 0]
        none, windows_s = np.full(num_slots, -np.inf), np.stack(table.windows_s, axis=1).ravel()
        summing = [np.where(table.can_keep, -np.inf, 1.0), np.ones(num_items)]
        chained = [np.stack([total, bound], axis=1).ravel() for bound in (none, -none)]
        others = [[-np.inf], -windows_s / self.second_unit], [[np.inf], np.full(2 * num_slots, np.inf)]
        row_lower, row_upper = (
            np.concatenate([summing[side], chained[side], *others[side], np.zeros(len(curves))]) for side in (0, 1)
        )
        upper = np.full(2 * num_items + 3 * num_slots + len(pieces), np.inf)
        costs = np.zeros_like(upper)
        can_recompute, can_offload = (
            np.array([getattr(item, name) for _, item in table.items], dtype=np.float64)
            for name in ("can_recompute", "can_offload")
        )
        upper[0 : 2 * num_items : 2], upper[1 : 2 * num_items : 2] = can_recompute, can_offload
        costs[0 : 2 * num_items : 2] = can_recompute * table.recompute_s / self.second_unit
        costs[1 : 2 * num_items : 2] = _IDLE_COPY * table.num_bytes / self.limits.bytes_per_s / self.second_unit
        costs[2 * num_items + num_slots : 2 * num_items + 3 * num_slots] = 1.0
        # the segments of a curve cost what its r would
        costs[2 * curved] = 0.0
        widths, seconds = np.array(pieces, dtype=np.float64).reshape(-1, 2).T
        upper[segments], costs[segments] = widths, seconds / widths / self.second_unit
        return LinearProgram(costs, np.zeros_like(upper), upper, rows[order], columns[order], values[order], row_lower, row_upper)


def _check(limits: MemoryLimits) -> None:
    if not (limits.device_bytes >= 0 and limits.host_bytes >= 0 and limits.bytes_per_s > 0):
        raise ValueError(f"{limits} needs bytes of at least 0 and a link of more than 0 bytes per second")


def _fits(outcome: PolicyOutcome, limits: MemoryLimits) -> bool:
    return outcome.device_bytes <= _allowed(limits.device_bytes) and outcome.host_bytes <= _allowed(limits.host_bytes)


def _allowed(limit_bytes: float) -> float:
    """A little more than the limit, since sums of many shares round."""
    return limit_bytes * (1 + 1e-9) + 1e-3


def _nothing_fits(slots: Sequence[Slot], limits: MemoryLimits) -> str:
    needed = sum(item.num_bytes for slot in slots for item in slot.saved if not item.can_recompute)
    return (
        f"{needed / 2**30:.3f} GiB of saved tensors cannot be recomputed, and {limits.device_bytes / 2**30:.3f} GiB on the "
        f"device with {limits.host_bytes / 2**30:.3f} GiB on the host cannot hold them next to the tensors of two running "
        f"layers; use more ranks, shorter sequences, or more host memory"
    )


def _reason(table: SlotTable, limits: MemoryLimits, outcome: PolicyOutcome, time_limit_s: float) -> str:
    """Explains in one sentence why bytes go to the host, or why none do."""
    total = float(table.num_bytes.sum())
    if outcome.host_bytes <= 0.5:
        if total <= limits.device_bytes:
            return "nothing is offloaded: everything fits on the device"
        if limits.host_bytes <= 0:
            return "nothing is offloaded: there is no host memory for it"
        return (
            f"nothing is offloaded: recomputing ({outcome.recompute_s:.3g} s) is faster than copies over "
            f"{limits.bytes_per_s / 1e9:.3g} GB/s that computation does not hide"
        )
    text = f"{outcome.host_bytes / 2**30:.3f} GiB are offloaded; computation hides all but {outcome.exposed_s:.3g} s of copies"
    without = _Problem(table, MemoryLimits(limits.device_bytes, 0.0, limits.bytes_per_s)).solve(time_limit_s)
    if without is None:
        return f"{text}; without host memory nothing fits"
    saved_s = outcome_of(table, without, limits).cost_s - outcome.cost_s
    return f"{text}; without host memory it would take {saved_s:.3g} s more"


def _as_shares(table: SlotTable, shares: FloatArray) -> tuple[tuple[TensorShare, ...], ...]:
    """Shares of every slot; equal slots share one object, whose bytes and seconds are counted once."""
    rows = shares.ravel().tolist()
    known: dict[tuple[object, ...], tuple[TensorShare, ...]] = {}
    result, start = [], 0
    for slot in table.slots:
        stop = start + 2 * len(slot.saved)
        own = rows[start:stop]
        key = id(slot.saved), *own
        if key not in known:
            known[key] = tuple(
                TensorShare(item.tensor_class, recompute=recompute, host=host, device=max(0.0, 1 - recompute - host))
                for item, *row in zip(slot.saved, own[::2], own[1::2], strict=True)
                for recompute, host in [_rounded(*row)]
            )
        result.append(known[key])
        start = stop
    return tuple(result)


def _rounded(recompute: float, host: float) -> tuple[float, float]:
    """Shares without remainders of rounding."""
    recompute, host = (0.0 if share < 1e-9 else share for share in (recompute, host))
    return (1.0, 0.0) if recompute > 1 - 1e-9 else (recompute, host)
