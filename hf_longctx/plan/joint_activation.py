"""Recompute and offload of one pipeline, chosen together: how many layers of each chunk run again, what share waits on the host.

A *cell* is one chunk on one part of one stage. A backward that takes longer makes all other stages wait, so that stages may as
well recompute at the same time: cells on one anti-diagonal (backwards that run side by side) recompute the same number of layers,
for the seconds of the slowest of them. That is InfiniPipe's (arXiv 2509.21275, section 5): n + P - 1 whole numbers for n chunks
on P stages in the place of n P. Offload shares are new here; every cell has its own. With c layers of L and a share h:

    minimize    sum over diagonals of c * seconds of a layer
    subject to  bytes in flight - sum of c freed + sum of h offloaded <= room     in every moment of every stage
                sum of h host bytes <= host                                       in every moment of every stage
                h <= what the link moves in time,   h + c / L <= 1

The two newest chunks of a stage are on the device whatever their share, since their copies out are under way, and so are the
chunk that runs backward and the next one to do so. Keys and values of slices always stay. A recomputed layer keeps its input
and attention's output, and runs everything else again; where that frees too little, attention runs again too.

An optimum of the linear program, rounded up and trimmed, is taken where it is close to that program's bound or the program is a
large one; else the integer program is solved from there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hf_longctx.plan.cost import FloatArray
from hf_longctx.plan.solver import LinearProgram, SolverError, solve_integer_program, solve_linear_program

# how far above the linear program's bound a solution may be, and how many nodes the search for a better one visits
_GAP = 0.02
_MOST_NODES = 50
# programs of more columns are not searched if rounding finds anything: a rounded layer is little among so many
_SEARCHED = 64
# how often some fractions are raised, and how many of them
_MOST_DIVES, _RAISED = 8, 0.7
# what solvers may exceed a limit by, relative to it
_MARGIN = 1e-6


@dataclass(frozen=True, slots=True)
class Cell:
    """One chunk on one part of a stage, and what can be done about what it saves.

    layer_s: to run one layer again. layer_bytes: what that frees on the device. offload_bytes, host_bytes: what leaves the device
    and what reaches the host if all of it goes there; offload_s: what that counts as. most_offload: the share that copies hide.
    """

    diagonal: int
    num_layers: int
    layer_s: float
    layer_bytes: float
    offload_bytes: float
    host_bytes: float
    offload_s: float
    most_offload: float


@dataclass(frozen=True, slots=True)
class Moment:
    """One moment of a stage: bytes over its room if everything is kept, cells in flight, those there whatever is copied."""

    excess_bytes: float
    cells: tuple[int, ...]
    resident: frozenset[int]


@dataclass(frozen=True, slots=True)
class JointChoice:
    """Layers that diagonals recompute at most, and those that each cell needs of them; shares that cells offload.

    cost_s: of the diagonals; bound_s: nothing costs less.
    """

    diagonals: tuple[int, ...]
    layers: tuple[int, ...]
    offload: tuple[float, ...]
    cost_s: float
    bound_s: float
    solver: str


def choose_jointly(
    cells: Sequence[Cell],
    moments: Sequence[Moment],
    host_bytes: float,
    tolerance_s: float = 0.0,
    time_limit_s: float = 5.0,
) -> JointChoice | None:
    """The cheapest layers and shares with which no moment is over its room; None where there are none.

    Within 2 % or `tolerance_s` of the optimum, whichever is more, unless 50 nodes do not get there or there are more than 64
    columns.
    """
    program = _JointProgram(cells, moments, host_bytes)
    if not program.is_needed:
        return JointChoice((0,) * program.num_diagonals, (0,) * len(cells), (0.0,) * len(cells), 0.0, 0.0, "keep")
    return program.solve(tolerance_s, time_limit_s)


class _JointProgram:
    """The program. Columns: layers of every diagonal, in those of its largest cell; then shares of the cells that may move.

    Only cells matter that a moment over its room could be helped by; all others keep everything.
    """

    def __init__(self, cells: Sequence[Cell], moments: Sequence[Moment], host_bytes: float) -> None:
        self.cells, self.moments, self.host_bytes = cells, moments, host_bytes
        self.num_diagonals = max((cell.diagonal for cell in cells), default=-1) + 1
        self.over = [moment for moment in moments if moment.excess_bytes > 0]
        self.most_layers, self.layer_s = np.zeros(self.num_diagonals), np.zeros(self.num_diagonals)
        for cell in cells:
            self.most_layers[cell.diagonal] = max(self.most_layers[cell.diagonal], cell.num_layers)
            self.layer_s[cell.diagonal] = max(self.layer_s[cell.diagonal], cell.layer_s)
        movable = {place for moment in self.over for place in moment.cells if place not in moment.resident}
        useful = sorted(place for place in movable if cells[place].most_offload > 0 and cells[place].offload_bytes > 0)
        self.share_column = {place: self.num_diagonals + index for index, place in enumerate(useful)} if host_bytes > 0 else {}
        self.byte_unit = max((moment.excess_bytes for moment in self.over), default=1.0)
        self.second_unit = float(self.layer_s.max(initial=0.0)) or 1.0

    @property
    def is_needed(self) -> bool:
        return bool(self.over)

    def solve(self, tolerance_s: float, time_limit_s: float) -> JointChoice | None:
        program = self._program()
        whole = np.arange(len(program.costs)) < self.num_diagonals
        try:
            relaxed = solve_linear_program(program, time_limit_s)
            if not relaxed.has_values:
                return None
            start = self._dive(program, relaxed.values, time_limit_s)
            gap = max(_GAP, tolerance_s / self.second_unit / max(1e-9, relaxed.bound))
            is_near = start is not None and program.costs @ start <= (1 + gap) * relaxed.bound + 1e-9
            if start is not None and (is_near or len(program.costs) > _SEARCHED):
                return self._choice(start, relaxed.bound, "rounding")
            found = solve_integer_program(program, whole, time_limit_s, gap, start, most_nodes=_MOST_NODES)
        except SolverError:
            return None
        if not found.has_values:
            return None
        return self._choice(found.values, max(found.bound, relaxed.bound), found.backend)

    def _choice(self, values: FloatArray, bound: float, solver: str) -> JointChoice:
        diagonals = tuple(int(value) for value in np.rint(values[: self.num_diagonals]))
        offload = [0.0] * len(self.cells)
        for place, column in self.share_column.items():
            share = float(values[column])
            offload[place] = share if share > 1e-6 else 0.0
        cost_s = float(self.layer_s @ np.array(diagonals, dtype=np.float64))
        layers = self._needed(diagonals, offload)
        return JointChoice(diagonals, layers, tuple(offload), cost_s, max(0.0, bound * self.second_unit), solver)

    def _needed(self, diagonals: Sequence[int], offload: Sequence[float]) -> tuple[int, ...]:
        """Layers of every cell without those that its own stage can do without: free by a diagonal is not for nothing."""
        # a diagonal counts in layers of its largest cell
        layers = [
            math.ceil(diagonals[cell.diagonal] * cell.num_layers / self.most_layers[cell.diagonal] - 1e-9) for cell in self.cells
        ]
        slack: dict[int, list[int]] = {}
        left = []
        for index, moment in enumerate(self.over):
            freed = sum(layers[place] * self.cells[place].layer_bytes for place in moment.cells)
            freed += sum(offload[p] * self.cells[p].offload_bytes for p in moment.cells if p not in moment.resident)
            left.append(freed - moment.excess_bytes)
            for place in moment.cells:
                slack.setdefault(place, []).append(index)
        # one order for all stages, so that what is left of them stands side by side
        for place in sorted(range(len(layers)), key=lambda place: self._urgency(self.cells[place])):
            if not layers[place]:
                continue
            size = self.cells[place].layer_bytes
            spare = min((left[index] for index in slack.get(place, ())), default=math.inf)
            back = layers[place] if spare >= layers[place] * size else max(0, math.floor(spare / size)) if size > 0 else 0
            layers[place] -= back
            for index in slack.get(place, ()):
                left[index] -= back * size
        return tuple(layers)

    def _urgency(self, cell: Cell) -> tuple[float, int]:
        return -float(self.layer_s[cell.diagonal]), cell.diagonal

    def _dive(self, program: LinearProgram, values: FloatArray, time_limit_s: float) -> FloatArray | None:
        """A whole solution near an optimum of the linear program; None where a few roundings find none.

        Where rounded layers leave too little to the shares, most fractions are raised, the largest first, and the rest chosen
        again.
        """
        for _ in range(_MOST_DIVES):
            if (start := self._rounded(program, values)) is not None:
                return start
            layers = values[: self.num_diagonals]
            fractions = np.ceil(layers - 1e-6) - layers
            broken = np.flatnonzero(fractions > 1e-6)
            if not len(broken):
                return None
            raised = broken[np.argsort(fractions[broken], kind="stable")][: math.ceil(_RAISED * len(broken))]
            lower = program.lower.copy()
            lower[raised] = np.ceil(layers[raised])
            program = replace(program, lower=lower)
            solved = solve_linear_program(program, time_limit_s)
            if not solved.has_values:
                return None
            values = solved.values
        return None

    def _rounded(self, program: LinearProgram, values: FloatArray) -> FloatArray | None:
        """Layers rounded up, shares lowered where they no longer fit beside them, then layers taken back that nobody needs.

        None where the lowered shares free too little.
        """
        count = self.num_diagonals
        values = values.copy()
        values[:count] = np.minimum(np.ceil(values[:count] - 1e-6), self.most_layers)
        for place, column in self.share_column.items():
            diagonal = self.cells[place].diagonal
            values[column] = max(0.0, min(values[column], 1 - values[diagonal] / self.most_layers[diagonal]))
        if program.violation(values) > 1e-7:
            return None
        freed = np.zeros((len(program.row_lower), count))
        chosen = program.columns < count
        freed[program.rows[chosen], program.columns[chosen]] = program.values[chosen]
        slack = program.activity(values) - program.row_lower
        for diagonal in np.argsort(-self.layer_s, kind="stable"):
            used = freed[:, diagonal] > 0
            spare = float((slack[used] / freed[used, diagonal]).min(initial=np.inf))
            back = min(values[diagonal], np.floor(spare + 1e-9))
            if np.isfinite(back) and back > 0:
                values[diagonal] -= back
                slack -= back * freed[:, diagonal]
        return values

    def _program(self) -> LinearProgram:
        rows = self._memory_rows() + self._host_rows() + self._share_rows()
        num_columns = self.num_diagonals + len(self.share_column)
        upper, costs = np.zeros(num_columns), np.zeros(num_columns)
        upper[: self.num_diagonals] = self.most_layers
        costs[: self.num_diagonals] = self.layer_s / self.second_unit
        for place, column in self.share_column.items():
            cell = self.cells[place]
            upper[column] = cell.most_offload
            costs[column] = cell.offload_s / self.second_unit
        entries = [(row, column, value) for row, (terms, _, _) in enumerate(rows) for column, value in sorted(terms.items())]
        return LinearProgram(
            costs,
            np.zeros(num_columns),
            upper,
            np.array([row for row, _, _ in entries], dtype=np.int64),
            np.array([column for _, column, _ in entries], dtype=np.int64),
            np.array([value for _, _, value in entries]),
            np.array([lower for _, lower, _ in rows]),
            np.array([upper for _, _, upper in rows]),
        )

    def _memory_rows(self) -> list[_Row]:
        """What is freed in every moment that is over its room."""
        rows: dict[tuple[object, ...], _Row] = {}
        for moment in self.over:
            terms: dict[int, float] = {}
            for place in moment.cells:
                cell = self.cells[place]
                # a diagonal's largest cell recomputes so many layers, smaller ones in proportion
                part = cell.num_layers / self.most_layers[cell.diagonal]
                terms[cell.diagonal] = terms.get(cell.diagonal, 0.0) + part * cell.layer_bytes / self.byte_unit
                if place not in moment.resident and place in self.share_column:
                    terms[self.share_column[place]] = cell.offload_bytes / self.byte_unit
            needed = moment.excess_bytes / self.byte_unit * (1 + _MARGIN)
            # moments alike but for what is missing: the worst of them
            key = moment.cells, moment.resident
            before = rows[key][1] if key in rows else 0.0
            rows[key] = terms, max(needed, before), np.inf
        return list(rows.values())

    def _host_rows(self) -> list[_Row]:
        rows: dict[frozenset[int], _Row] = {}
        for moment in self.moments:
            moved = [place for place in moment.cells if place in self.share_column]
            terms = {self.share_column[place]: self.cells[place].host_bytes / self.byte_unit for place in moved}
            if sum(value * self.cells[place].most_offload for place, value in zip(moved, terms.values(), strict=True)) > 0:
                rows[frozenset(moved)] = terms, -np.inf, self.host_bytes / self.byte_unit * (1 - _MARGIN)
        return list(rows.values())

    def _share_rows(self) -> list[_Row]:
        """Tokens of a layer that is recomputed need not be offloaded."""
        return [
            ({column: 1.0, self.cells[place].diagonal: 1 / self.most_layers[self.cells[place].diagonal]}, -np.inf, 1.0)
            for place, column in self.share_column.items()
        ]


# terms by column, lower and upper side
_Row = tuple[dict[int, float], float, float]
