"""Chooses recomputation and offloading of one pipeline together: recomputed layers and the offloaded share of each chunk.

A *cell* is one chunk on one part of one stage. A backward that takes longer makes all other stages wait, so they may as well
recompute at the same time: cells on one anti-diagonal (backwards that run concurrently) recompute the same number of layers, at
the cost of the slowest cell. This is InfiniPipe's idea (arXiv 2509.21275, section 5): n + P - 1 integer variables for n chunks on
P stages instead of n P. Offload shares are our addition; every cell has its own. With c of L layers recomputed and a share h
offloaded:

    minimize    sum over diagonals of c * seconds of a layer
    subject to  bytes in flight - sum of c freed - sum of h offloaded <= room     in every moment of every stage
                sum of h host bytes <= host                                       in every moment of every stage
                h / H + c / L <= 1        where H is the share that the link copies in time

Offloaded bytes are off the device from the chunk's forward to its backward, except those of a layer or two that are copied while
it runs; they count as workspace. Keys and values of slices always stay on the device. A recomputed layer keeps its input and the
attention output and recomputes everything else; if that frees too little, attention is recomputed too.

The optimum of the linear relaxation, rounded up and trimmed, is used if it is close to the relaxation's bound or if the program
is large; otherwise the integer program is solved, starting from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from hf_longctx.plan.core.types import BoolArray, FloatArray, IntArray
from hf_longctx.plan.solver import LinearProgram, SearchLimits, SolverError, solve_integer_program, solve_linear_program

# relative margin by which limits are tightened, since solvers may exceed them slightly
_MARGIN = 1e-6


@dataclass(frozen=True, slots=True)
class _JointSearch:
    """Constants of the search for an integer solution."""

    # share of the linear program's bound by which a solution may exceed it
    gap: float = 0.02
    # nodes that the search for a better solution visits
    most_nodes: int = 50
    # most columns of a program that is searched although rounding found a solution; in a larger one a rounded layer hardly
    # matters
    few_columns: int = 64
    # times that fractions are rounded up
    most_dives: int = 8
    # share of the fractions that is rounded up each time
    raised: float = 0.7


# repeat `recipes/bench/papers/infinipipe.py` and the stages table of `recipes/bench/cpu/planner.py` when one of these changes
_JOINT = _JointSearch()


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Cells of a pipeline, each one chunk on one part of a stage, with seconds and bytes of recomputing or offloading them."""

    diagonal: IntArray
    num_layers: IntArray
    # seconds to recompute one layer
    layer_s: FloatArray
    # device bytes that this frees
    layer_bytes: FloatArray
    # if the whole cell is offloaded: bytes that leave the device, bytes that reach the host, seconds that count
    offload_bytes: FloatArray
    host_bytes: FloatArray
    offload_s: FloatArray
    # the largest share whose copies can be hidden
    most_offload: FloatArray

    def __len__(self) -> int:
        return len(self.diagonal)


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Moments of all stages, one stage after the other. excess_bytes: bytes over the stage's room if everything is kept.

    Cell i is in flight in the moments [first[i], stop[i]).
    """

    excess_bytes: FloatArray
    first: IntArray
    stop: IntArray


@dataclass(frozen=True, slots=True)
class JointChoice:
    """Most layers that each diagonal recomputes, layers that each cell recomputes, and the share that each cell offloads.

    cost_s: seconds of recomputation, summed over the diagonals. bound_s: lower bound of the cost of any solution.
    """

    diagonals: tuple[int, ...]
    layers: tuple[int, ...]
    offload: tuple[float, ...]
    cost_s: float
    bound_s: float
    solver: str


def choose_jointly(
    cells: Cells,
    moments: Moments,
    host_bytes: float,
    tolerance_s: float = 0.0,
    time_limit_s: float = 5.0,
) -> JointChoice | None:
    """Cheapest layers and shares with which no moment exceeds its room; None if there are none.

    The cost is within 2 % or `tolerance_s` of the optimum, whichever is more, unless 50 nodes do not suffice or the program has
    more than 64 columns.
    """
    program = _JointProgram(cells, moments, host_bytes)
    if not program.is_needed:
        return JointChoice((0,) * program.num_diagonals, (0,) * len(cells), (0.0,) * len(cells), 0.0, 0.0, "keep")
    return program.solve(tolerance_s, time_limit_s)


class _JointProgram:
    """The program. Columns: layers of every diagonal, counted in its largest cell; then shares of cells that may be offloaded.

    Moments that differ only in their excess are merged into the worst of them. Only cells that can free bytes in a moment over
    its room count; all others keep everything.
    """

    def __init__(self, cells: Cells, moments: Moments, host_bytes: float) -> None:
        self.host_bytes, self.diagonal, self.layer_bytes = host_bytes, cells.diagonal, cells.layer_bytes
        self.offload_bytes, self.cell_host_bytes = cells.offload_bytes, cells.host_bytes
        self.offload_s, self.most_offload = cells.offload_s, cells.most_offload
        self.num_diagonals = int(self.diagonal.max(initial=-1)) + 1
        self.most_layers, self.layer_s = np.zeros(self.num_diagonals), np.zeros(self.num_diagonals)
        np.maximum.at(self.most_layers, self.diagonal, cells.num_layers)
        np.maximum.at(self.layer_s, self.diagonal, cells.layer_s)
        # a diagonal's number of layers is that of its largest cell; smaller cells recompute proportionally fewer
        self.part = cells.num_layers / self.most_layers[self.diagonal]
        places = _merge_equal(len(moments.excess_bytes), moments.first, moments.stop)
        self.excess_bytes = np.full(int(places[-1]), -np.inf)
        np.maximum.at(self.excess_bytes, places[:-1], moments.excess_bytes)
        self.first, self.stop = places[moments.first], places[moments.stop]
        self.is_over: BoolArray = self.excess_bytes > 0
        # pairs of a cell in flight and a moment over its room
        owners, inside = _pairs(self.first, self.stop)
        self.in_flight = owners[self.is_over[inside]], inside[self.is_over[inside]]
        # cells whose shares have a column
        useful = np.unique(self.in_flight[0]) if host_bytes > 0 else np.empty(0, dtype=np.int64)
        self.shared: IntArray = useful[(self.most_offload[useful] > 0) & (self.offload_bytes[useful] > 0)]
        self.byte_unit = float(self.excess_bytes.max(initial=0.0)) or 1.0
        self.second_unit = float(self.layer_s.max(initial=0.0)) or 1.0

    @property
    def is_needed(self) -> bool:
        return bool(self.is_over.any())

    @property
    def may_fit(self) -> bool:
        """Whether every moment has room if each cell frees as many bytes in it as it can; if not, no program is needed."""
        most = self.part * self.most_layers[self.diagonal] * self.layer_bytes
        most[self.shared] = np.maximum(most[self.shared], self.most_offload[self.shared] * self.offload_bytes[self.shared])
        owners, moments = self.in_flight
        freed = np.bincount(moments, weights=most[owners], minlength=len(self.excess_bytes))
        return bool((freed >= self.excess_bytes)[self.is_over].all())

    def solve(self, tolerance_s: float, time_limit_s: float) -> JointChoice | None:
        if not self.may_fit:
            return None
        program = self._program()
        whole = np.arange(len(program.costs)) < self.num_diagonals
        try:
            relaxed = solve_linear_program(program, time_limit_s, presolve=False)
            if not relaxed.has_values:
                return None
            start = self._dive(program, relaxed.values, time_limit_s)
            gap = max(_JOINT.gap, tolerance_s / self.second_unit / max(1e-9, relaxed.bound))
            is_near = start is not None and program.costs @ start <= (1 + gap) * relaxed.bound + 1e-9
            if is_near or len(program.costs) > _JOINT.few_columns:
                return None if start is None else self._choice(start, relaxed.bound, "rounding")
            # solvers measure gaps by the solution, which is larger than the bound
            limits = SearchLimits(time_limit_s, gap / (1 + gap), most_nodes=_JOINT.most_nodes)
            found = solve_integer_program(program, whole, limits, start)
        except SolverError:
            return None
        if not found.has_values:
            return None
        return self._choice(found.values, max(found.bound, relaxed.bound), found.backend)

    def _choice(self, values: FloatArray, bound: float, solver: str) -> JointChoice:
        diagonals = np.rint(values[: self.num_diagonals]).astype(np.int64)
        offload = np.zeros(len(self.diagonal))
        shares = values[self.num_diagonals :]
        offload[self.shared] = np.where(shares > 1e-6, shares, 0.0)
        cost_s = float(self.layer_s @ diagonals)
        layers = tuple(self._needed(diagonals, offload))
        bound_s = max(0.0, bound * self.second_unit)
        return JointChoice(tuple(diagonals.tolist()), layers, tuple(offload.tolist()), cost_s, bound_s, solver)

    def _needed(self, diagonals: IntArray, offload: FloatArray) -> list[int]:
        """Layers that every cell recomputes, without those that its own stage does not need.

        The program counts those as free, since another cell of the diagonal takes as long, but they are work nevertheless.
        """
        layers: IntArray = np.ceil(diagonals[self.diagonal] * self.part - 1e-9).astype(np.int64)
        left = np.where(self.is_over, -self.excess_bytes, np.inf)
        owners, moments = self.in_flight
        freed = layers * self.layer_bytes + offload * self.offload_bytes
        left += np.bincount(moments, weights=freed[owners], minlength=len(left))
        # one order of diagonals for all stages, so that the remaining recomputation runs concurrently
        for cell in np.lexsort((self.diagonal, -self.layer_s[self.diagonal])).tolist():
            if not layers[cell]:
                continue
            size, count = float(self.layer_bytes[cell]), int(layers[cell])
            inside = slice(self.first[cell], self.stop[cell])
            spare = float(left[inside].min(initial=np.inf))
            back = count if spare >= count * size else max(0, math.floor(spare / size)) if size > 0 else 0
            layers[cell] -= back
            left[inside] -= back * size
        return layers.tolist()  # type: ignore[no-any-return]

    def _dive(self, program: LinearProgram, values: FloatArray, time_limit_s: float) -> FloatArray | None:
        """Finds an integer solution near an optimum of the linear program; None if a few roundings find none.

        If rounding all layers up leaves too little to offload, 70 % of the fractional layers (the largest fractions first) are
        rounded up, and the program is solved again for the others.
        """
        for _ in range(_JOINT.most_dives):
            if (start := self._rounded(program, values)) is not None:
                return start
            layers = values[: self.num_diagonals]
            fractions = np.ceil(layers - 1e-6) - layers
            broken = np.flatnonzero(fractions > 1e-6)
            if not len(broken):
                return None
            raised = broken[np.argsort(fractions[broken], kind="stable")][: math.ceil(_JOINT.raised * len(broken))]
            lower = program.lower.copy()
            lower[raised] = np.ceil(layers[raised])
            program = replace(program, lower=lower)
            solved = solve_linear_program(program, time_limit_s, presolve=False)
            if not solved.has_values:
                return None
            values = solved.values
        return None

    def _rounded(self, program: LinearProgram, values: FloatArray) -> FloatArray | None:
        """Rounds layers up, lowers shares that no longer fit beside them, then drops layers that no moment needs.

        Returns None if the lowered shares free too little.
        """
        count = self.num_diagonals
        values = values.copy()
        values[:count] = np.minimum(np.ceil(values[:count] - 1e-6), self.most_layers)
        diagonal = self.diagonal[self.shared]
        most = self.most_offload[self.shared] * np.maximum(0.0, 1 - values[diagonal] / self.most_layers[diagonal])
        values[count:] = np.clip(values[count:], 0.0, most)
        if program.violation(values) > 1e-7:
            return None
        slack = program.activity(values) - program.row_lower
        chosen = np.flatnonzero(program.columns < count)
        chosen = chosen[np.argsort(program.columns[chosen], kind="stable")]
        ends = np.searchsorted(program.columns[chosen], np.arange(count + 1))
        for column in np.argsort(-self.layer_s, kind="stable").tolist():
            own = chosen[ends[column] : ends[column + 1]]
            rows, freed = program.rows[own], program.values[own]
            spare = float((slack[rows[freed > 0]] / freed[freed > 0]).min(initial=np.inf))
            back = min(values[column], np.floor(spare + 1e-9))
            if np.isfinite(back) and back > 0:
                values[column] -= back
                slack[rows] -= back * freed
        return values

    def _program(self) -> LinearProgram:
        count, num_columns = self.num_diagonals, self.num_diagonals + len(self.shared)
        upper = np.concatenate([self.most_layers, self.most_offload[self.shared]])
        costs = np.concatenate([self.layer_s, self.offload_s[self.shared]]) / self.second_unit
        column = np.full(len(self.diagonal), -1)
        column[self.shared] = np.arange(count, num_columns)
        blocks = self._memory_rows(column), self._host_rows(), self._share_rows(column)
        starts = np.cumsum([0, *(len(block.lower) for block in blocks)])
        rows = np.concatenate([block.rows + start for block, start in zip(blocks, starts, strict=False)])
        columns, values = (np.concatenate([getattr(block, name) for block in blocks]) for name in ("columns", "values"))
        # entries at the same place are summed, since two parts of a stage may be on one diagonal
        places, owner = np.unique(rows * num_columns + columns, return_inverse=True)
        return LinearProgram(
            costs,
            np.zeros(num_columns),
            upper,
            places // num_columns,
            places % num_columns,
            np.bincount(owner, weights=values, minlength=len(places)).astype(np.float64),
            np.concatenate([block.lower for block in blocks]),
            np.concatenate([block.upper for block in blocks]),
        )

    def _memory_rows(self, column: IntArray) -> _Rows:
        """Rows for every moment that exceeds its room: the bytes freed cover the excess."""
        row = np.cumsum(self.is_over) - 1
        owners, moments = self.in_flight
        movers, when = owners[column[owners] >= 0], moments[column[owners] >= 0]
        needed = self.excess_bytes[self.is_over] / self.byte_unit * (1 + _MARGIN)
        return _Rows(
            np.concatenate([row[moments], row[when]]),
            np.concatenate([self.diagonal[owners], column[movers]]),
            np.concatenate([(self.part * self.layer_bytes)[owners], self.offload_bytes[movers]]) / self.byte_unit,
            needed,
            np.full(len(needed), np.inf),
        )

    def _host_rows(self) -> _Rows:
        """Rows for host bytes, only at local peaks: moments at whose start a cell arrives and after which a cell leaves."""
        first, stop = self.first[self.shared], self.stop[self.shared]
        places = _merge_equal(len(self.excess_bytes), first, stop)
        grows, shrinks = np.zeros((2, int(places[-1]) + 1), dtype=bool)
        grows[places[first]] = True
        shrinks[places[stop]] = True
        is_peak = grows[:-1] & shrinks[1:]
        owners, rows = _pairs(places[first], places[stop])
        owners, rows = owners[is_peak[rows]], rows[is_peak[rows]]
        most = np.full(int(is_peak.sum()), self.host_bytes / self.byte_unit * (1 - _MARGIN))
        return _Rows(
            (np.cumsum(is_peak) - 1)[rows],
            self.num_diagonals + owners,
            self.cell_host_bytes[self.shared][owners] / self.byte_unit,
            np.full(len(most), -np.inf),
            most,
        )

    def _share_rows(self, column: IntArray) -> _Rows:
        """Rows that keep h / h_most + c / L at most 1: a recomputed layer has nothing to offload, and the others hide no more."""
        rows, diagonal = np.arange(len(self.shared)), self.diagonal[self.shared]
        return _Rows(
            np.concatenate([rows, rows]),
            np.concatenate([column[self.shared], diagonal]),
            np.concatenate([1 / self.most_offload[self.shared], 1 / self.most_layers[diagonal]]),
            np.full(len(rows), -np.inf),
            np.ones(len(rows)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Rows of the program: values at (rows, columns), and the lower and upper limit of each row."""

    rows: IntArray
    columns: IntArray
    values: FloatArray
    lower: FloatArray
    upper: FloatArray


def _merge_equal(num_moments: int, *ends: IntArray) -> IntArray:
    """Numbers the moments after merging neighbours that hold equal cells, since no cell begins or ends between them.

    The last entry is the number of moments that remain.
    """
    begins = np.zeros(num_moments + 1, dtype=np.int64)
    for each in ends:
        begins[each] = 1
    begins[0] = 0
    begins[num_moments] = 1
    return np.cumsum(begins)


def _pairs(first: IntArray, stop: IntArray) -> tuple[IntArray, IntArray]:
    """All pairs (i, m) with m in [first[i], stop[i]), as two arrays."""
    counts = np.maximum(0, stop - first)
    owners = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    return owners, first[owners] + within
