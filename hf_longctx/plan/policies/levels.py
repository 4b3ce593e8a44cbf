"""Chooses recomputation and offloading of one pipeline together: layers that each cell recomputes, and the share it offloads.

A *cell* is one chunk on one layer range of one stage. It is in flight from its forward to its backward. In every moment of a
stage, bytes that exceed the room must leave the device:

    sum of c freed + sum of h offloaded >= excess     over the cells in flight, in every moment of every stage
    sum of h host bytes <= host                       in every moment of every stage
    h L + c <= L,   h <= H                            of each cell, with L layers, and H the share that the link copies in time

Copies that hide cost nothing, so offloading comes first, and recomputation frees what is left. In each moment, the cells
in flight free equal shares of what they can free: its *level*. A cell frees the share of the highest level of its moments.
Levels fulfil all rows, and neighbouring chunks recompute about equally much, so that slots of the pipeline stay equal: one stage
that takes longer makes all others wait. A solution of a linear program costs less in sum, but recomputes some chunks wholly and
others not at all. Where the highest level is more than other moments need, cells free less.

InfiniPipe (arXiv 2509.21275, section 5) lets cells on one anti-diagonal, whose backwards run at once, recompute as many layers.
Here stages recompute what they need; in one that needs less, the rest would be free but useless. Offload shares are our addition.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hf_longctx.plan.core.types import FloatArray, IntArray

# times that cells give back what no moment needs
_PASSES = 4
# parts of what the link copies in time in which offloaded shares are counted, upwards
_OFFLOAD_STEPS = 4
# times that copies leave more of the host to what recomputed layers need
_HOST_TRIES = 4
# factor on the excess of the host by which copies get less of it: what they leave is recomputed, which needs some of it again
_HOST_SHRINK = 1.25
# relative margin by which bytes are freed, for rounding
_MARGIN = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Cells of a pipeline, each one chunk on one layer range of a stage, with seconds and bytes of recomputing or offloading."""

    num_layers: IntArray
    # seconds to recompute one layer
    layer_s: FloatArray
    # device bytes that this frees, and host bytes that it takes
    layer_bytes: FloatArray
    layer_host_bytes: FloatArray
    # if the whole cell is offloaded: bytes that leave the device, bytes that reach the host
    offload_bytes: FloatArray
    host_bytes: FloatArray
    # the largest share whose copies can be hidden
    most_offload: FloatArray

    def __len__(self) -> int:
        return len(self.num_layers)


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Moments of all stages, one stage after the other. excess_bytes: bytes over the stage's room if everything is kept.

    Cell i is in flight in the moments [first[i], stop[i]).
    """

    excess_bytes: FloatArray
    first: IntArray
    stop: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Levels:
    """Layers that each cell recomputes, in parts of a layer, and the share that each cell offloads."""

    layers: FloatArray
    offload: FloatArray


def choose_levels(cells: Cells, moments: Moments, host_bytes: float) -> Levels | None:
    """Layers and shares with which no moment exceeds its room or the host's; None if none are found."""
    excess = np.where(moments.excess_bytes > 0, moments.excess_bytes * (1 + _MARGIN), -np.inf)
    flight, for_copies = _Flight(moments), max(0.0, host_bytes)
    for _ in range(_HOST_TRIES):
        levels = _levels(cells, excess, flight, for_copies)
        if levels is None:
            return None
        held = flight.sums(levels.offload * cells.host_bytes + levels.layers * cells.layer_host_bytes)
        over = float(held.max(initial=0.0)) - (1 + _MARGIN) * max(0.0, host_bytes)
        if over <= 0:
            return levels
        if not for_copies:
            return None
        # recomputed layers need host memory too, which leaves less for copies
        for_copies = max(0.0, for_copies - _HOST_SHRINK * over)
    return None


def hosted_shares(cells: Cells, moments: Moments, host_bytes: float) -> FloatArray:
    """Returns the share that every cell offloads if each offloads what the link copies in time and the host has room for."""
    return _hosted(cells.most_offload, cells, _Flight(moments), max(0.0, host_bytes))


def _hosted(offload: FloatArray, cells: Cells, flight: _Flight, host_bytes: float) -> FloatArray:
    """Returns shares of at most `offload` for which the host has room in every moment."""
    held = flight.sums(offload * cells.host_bytes)
    fitting = np.divide(host_bytes, held, out=np.full_like(held, 1.0), where=held > host_bytes)
    found: FloatArray = offload * np.minimum(1.0, -flight.highest(-fitting))
    return found


def _levels(cells: Cells, excess: FloatArray, flight: _Flight, host_bytes: float) -> Levels | None:
    """Layers and shares if offloaded shares alone take host memory; None if they free too little."""
    most = cells.most_offload * cells.offload_bytes
    share = np.zeros(len(cells))
    if host_bytes > 0:
        # copies cost nothing, and cells with few different policies are quicker to predict
        share = np.ceil(np.minimum(1.0, flight.highest(_level(excess, flight.sums(most)))) * _OFFLOAD_STEPS) / _OFFLOAD_STEPS
    offload = _hosted(share * cells.most_offload, cells, flight, host_bytes)
    left = excess - flight.sums(offload * cells.offload_bytes)
    layers, layer_bytes = cells.num_layers * (1 - offload), np.maximum(0.0, cells.layer_bytes)
    level = _level(left, flight.sums(layers * layer_bytes))
    if (level > 1 + 1e-9).any():
        return None
    layers = layers * np.minimum(1.0, flight.highest(level))
    for _ in range(_PASSES):
        freed = flight.sums(layers * layer_bytes)
        # the part of what is freed that no moment needs
        spare = np.divide(freed - np.maximum(0.0, left), freed, out=np.ones_like(freed), where=freed > 0)
        layers *= 1 - np.maximum(0.0, -flight.highest(-spare))
    return Levels(layers, offload)


def _level(excess: FloatArray, most: FloatArray) -> FloatArray:
    """Share of what cells in flight can free at most that each moment needs; 0 if nothing, infinity if they free hardly any."""
    needed = np.maximum(0.0, excess)
    return np.divide(needed, most, out=np.where(needed > 0, np.inf, 0.0), where=most > _MARGIN * needed)


class _Flight:
    """Sums over the cells in flight in every moment, and maxima over the moments of every cell."""

    def __init__(self, moments: Moments) -> None:
        self.first, self.stop, self.num_moments = moments.first, moments.stop, len(moments.excess_bytes)
        lengths = np.maximum(1, self.stop - self.first)
        # the largest power of two of moments in the flight of every cell
        self.powers = np.frexp(lengths)[1] - 1

    def sums(self, values: FloatArray) -> FloatArray:
        """Sum of the values of the cells in flight in every moment."""
        count = self.num_moments + 1
        comes, goes = (np.bincount(ends, weights=values, minlength=count) for ends in (self.first, self.stop))
        found: FloatArray = np.cumsum(comes - goes)[:-1]
        return found

    def highest(self, values: FloatArray) -> FloatArray:
        """Highest value of the moments in which every cell is in flight."""
        found = np.empty(len(self.first))
        of_power = values
        for power in range(int(self.powers.max(initial=0)) + 1):
            own = np.flatnonzero(self.powers == power)
            # two runs of moments that together are the cell's
            found[own] = np.maximum(of_power[self.first[own]], of_power[self.stop[own] - (1 << power)])
            if len(of_power) > 1 << power:
                of_power = np.maximum(of_power[: -(1 << power)], of_power[1 << power :])
        return found
