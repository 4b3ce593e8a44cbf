"""Places the groups of a layout on ranks: consecutive positions for each group.

The planner calls this after a solver has found a layout. A group starts at a multiple of the largest power of two that divides
its degree; its blocks then lie where process groups for them exist. Groups that fit into a node are packed into nodes, the
largest first, as long as nodes have room for them.

In nested groups a rank goes from group to group within a step and waits only for the ranks of its next group. The planner tries
them if no collective runs over all ranks within a step (replicated parameters, or shards within blocks of ranks), so that ranks
need not end a micro-batch together: a rank may run in a group of 64, then in one of 8, then alone several times. Sequences are
placed longest first, each on the degree and the ranks that waste the fewest rank-seconds, counting the time of the sequence and
the time its ranks wait for each other. A group takes further sequences until one of its ranks starts another group or its memory
is full.

The idea is that of Megatron's hybrid context parallelism and ByteScale (arXiv 2502.21231); the placement is our own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hf_longctx.plan.core.types import FloatArray
from hf_longctx.plan.groups.problem import Group, GroupingProblem, Layout


@dataclass(frozen=True, slots=True)
class PlacedGroup:
    """A group of sequences (`members`) on `degree` consecutive positions starting at `first`."""

    first: int
    degree: int
    members: tuple[int, ...]

    @property
    def positions(self) -> range:
        return range(self.first, self.first + self.degree)


PlacedLayout = list[list[PlacedGroup]]


def place_layout(layout: Layout, num_ranks: int, ranks_per_node: int, node_aligned: bool) -> PlacedLayout:
    """Place the groups of every micro-batch on consecutive positions; within nodes if `node_aligned` and if that is possible."""
    return [
        (_place_in_nodes(groups, num_ranks, ranks_per_node) if node_aligned else []) or _place_in_a_row(groups)
        for groups in layout
    ]


def place_alone(sequences: Sequence[int], degree: int, num_ranks: int, block_ranks: int) -> PlacedLayout:
    """Places groups of `degree` ranks with one sequence each: side by side, but never two on ranks that wait for one another.

    block_ranks: number of consecutive ranks that do so.
    """
    stride = -(-degree // block_ranks) * block_ranks
    # a start elsewhere has no process groups
    count = num_ranks // stride if stride % _alignment(degree) == 0 else 1
    places = [PlacedGroup(number % count * stride, degree, (i,)) for number, i in enumerate(sequences)]
    return [places[first : first + count] for first in range(0, len(places), count)]


def renumber(placed: PlacedLayout, numbers: Sequence[int]) -> PlacedLayout:
    """The layout with sequence i called numbers[i]."""
    return [[replace(group, members=tuple(numbers[i] for i in group.members)) for group in groups] for groups in placed]


def levels(groups: Sequence[PlacedGroup], num_ranks: int) -> PlacedLayout:
    """Make micro-batches of groups given in running order: each group goes into the first one after all groups of its ranks."""
    next_level = [0] * num_ranks
    result: PlacedLayout = []
    for group in groups:
        level = max(next_level[rank] for rank in group.positions)
        if level == len(result):
            result.append([])
        result[level].append(group)
        for rank in group.positions:
            next_level[rank] = level + 1
    return result


def with_idle_ranks(placed: PlacedLayout, num_ranks: int, block_ranks: int) -> PlacedLayout:
    """Add groups of one rank without sequences for ranks that must take part although they have nothing to do.

    The ranks of a block (`block_ranks` 0: all ranks) take part in a micro-batch together. A block without any sequence in the
    step takes part in one micro-batch, the first.
    """
    block = block_ranks or num_ranks
    ever_busy = {rank // block for groups in placed for group in groups for rank in group.positions}
    result: PlacedLayout = []
    for index, groups in enumerate(placed):
        busy = {rank for group in groups for rank in group.positions}
        blocks = {rank // block for rank in busy}
        if index == 0:
            blocks |= set(range(-(-num_ranks // block))) - ever_busy
        ranks = (rank for b in sorted(blocks) for rank in range(b * block, min((b + 1) * block, num_ranks)))
        result.append([*groups, *[PlacedGroup(rank, 1, ()) for rank in ranks if rank not in busy]])
    return result


def _alignment(degree: int) -> int:
    return degree & -degree


def _sorted(groups: Sequence[Group]) -> list[Group]:
    """Groups with sequences, in an order that keeps every start aligned if groups are placed without gaps."""
    return sorted((group for group in groups if group[1]), key=lambda group: (-_alignment(group[0]), -group[0], group[1]))


def _place_in_a_row(groups: Sequence[Group]) -> list[PlacedGroup]:
    placed, position = [], 0
    for degree, members in _sorted(groups):
        placed.append(PlacedGroup(position, degree, members))
        position += degree
    return placed


def _place_in_nodes(groups: Sequence[Group], num_ranks: int, ranks_per_node: int) -> list[PlacedGroup]:
    """Place groups larger than a node in a row, and the others by best fit into nodes; empty if one then finds no room."""
    large = [group for group in groups if group[0] > ranks_per_node]
    placed = _place_in_a_row(large)
    start = max((group.first + group.degree for group in placed), default=0)
    nodes = range(start // ranks_per_node, -(-num_ranks // ranks_per_node))
    free = {node: set(range(max(start, node * ranks_per_node), min((node + 1) * ranks_per_node, num_ranks))) for node in nodes}
    for degree, members in _sorted([group for group in groups if group[0] <= ranks_per_node]):
        fullest_first = sorted(nodes, key=lambda node: len(free[node]))
        options = ((node, first) for node in fullest_first for first in _starts(degree, free[node]))
        node, first = next(options, (0, -1))
        if first < 0:
            return []
        placed.append(PlacedGroup(first, degree, members))
        free[node].difference_update(placed[-1].positions)
    return placed


def _starts(degree: int, free: set[int]) -> Iterator[int]:
    """Free positions at which a group may start, in order."""
    if len(free) >= degree:
        aligned = range(_up(min(free), _alignment(degree)), max(free) - degree + 2, _alignment(degree))
        yield from (first for first in aligned if free.issuperset(range(first, first + degree)))


def _up(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


@dataclass(frozen=True, slots=True)
class _NestedSearch:
    """Constants of the search; repeat the tables times and ablation of `recipes/bench/cpu/planner.py` when one changes.

    limit_factors: finish times to aim for, as multiples of the lower bound; with many sequences only the first is tried.
    most_options: pairs of a sequence and a degree that are looked at, over all finish times.
    """

    limit_factors: tuple[float, ...] = (1.08, np.inf, 1.04)
    most_options: int = 12_000


_NESTED = _NestedSearch()


def plan_nested(problem: GroupingProblem, ranks_per_node: int) -> list[PlacedGroup]:
    """Groups in the order in which their ranks run them; empty if no degree can nest or the longest sequence does not fit.

    A degree can nest if it is a multiple of `problem.block_ranks` and a power of two, all ranks, or a divisor or multiple of the
    ranks of a node.
    """
    ordered, order = problem.longest_first()
    usable = [k for k, degree in enumerate(ordered.degrees) if _nests(degree, ordered, ranks_per_node)]
    largest = max((ordered.degrees[k] for k in usable), default=0) * ordered.capacity
    if not usable or ordered.lengths[0] > largest:
        return []
    bound_s = ordered.lower_bound_s()
    tries = max(1, _NESTED.most_options // (len(usable) * len(order)))
    runs = [_Board(ordered, usable, bound_s * factor).place_all() for factor in _NESTED.limit_factors[:tries]]
    groups, _ = min(runs, key=lambda run: run[1])
    return [PlacedGroup(g.first, g.degree, tuple(order[i] for i in g.members)) for g in groups]


def _nests(degree: int, problem: GroupingProblem, ranks_per_node: int) -> bool:
    if degree % max(1, problem.block_ranks):
        return False
    tiles = degree % ranks_per_node == 0 or ranks_per_node % degree == 0
    return tiles or degree & (degree - 1) == 0 or degree == problem.num_ranks


class _Board:
    """Times until which ranks are busy, for every degree and every aligned slot of ranks of this degree."""

    def __init__(self, problem: GroupingProblem, usable: list[int], limit_s: float) -> None:
        self.problem, self.usable, self.limit_s = problem, usable, limit_s
        num_ranks = problem.num_ranks
        self.degrees = [problem.degrees[k] for k in usable]
        self.loads = np.zeros(num_ranks)
        # by degree and slot: when its last rank is free, the sum over its ranks, the cost to join, and the group open there
        self.ready = [np.zeros(num_ranks // degree) for degree in self.degrees]
        self.sums = [np.zeros(num_ranks // degree) for degree in self.degrees]
        self.entry = [np.full(num_ranks // degree, problem.group_s[k]) for k, degree in zip(usable, self.degrees, strict=True)]
        self.room_left: list[NDArray[np.int64]] = [np.zeros(num_ranks // degree, dtype=np.int64) for degree in self.degrees]
        self.open_group: list[dict[int, int]] = [{} for _ in self.degrees]
        self.opened: list[tuple[int, int, list[int]]] = []

    def place_all(self) -> tuple[list[PlacedGroup], float]:
        """Place all sequences, longest first; return the groups in the order in which they were opened, and the last finish."""
        for i, length in enumerate(self.problem.lengths):
            options = [
                option
                for row in range(len(self.degrees))
                if length <= self.degrees[row] * self.problem.capacity
                for option in [self._best_slot(row, i, length)]
            ]
            _, _, finish_s, row, slot = min(options)
            self._put(row, slot, i, length, finish_s)
        groups = [PlacedGroup(first, degree, tuple(members)) for first, degree, members in self.opened]
        return groups, float(self.loads.max())

    def _best_slot(self, row: int, i: int, length: int) -> tuple[float, float, float, int, int]:
        """(seconds over the limit, wasted rank-seconds, finish, row, slot) of the slot that finishes the sequence first."""
        seconds = float(self.problem.seconds[self.usable[row], i])
        fixed_s = self.problem.group_s[self.usable[row]]
        # if the open group has no room, a new one is opened
        entry: FloatArray = np.where(self.room_left[row] >= length, self.entry[row], fixed_s)
        finish = self.ready[row] + entry
        slot = int(finish.argmin())
        finish_s = float(finish[slot]) + seconds
        waste = self.degrees[row] * finish_s - float(self.sums[row][slot])
        return max(0.0, finish_s - self.limit_s), waste, finish_s, row, slot

    def _put(self, row: int, slot: int, i: int, length: int, finish_s: float) -> None:
        """Put a sequence into the group open in this slot, or into a new one."""
        degree = self.degrees[row]
        first = slot * degree
        if slot in self.open_group[row] and self.room_left[row][slot] >= length:
            self.opened[self.open_group[row][slot]][2].append(i)
            self.room_left[row][slot] -= length
        else:
            self._close(first, degree)
            self.open_group[row][slot] = len(self.opened)
            self.opened.append((first, degree, [i]))
            self.entry[row][slot] = 0.0
            self.room_left[row][slot] = degree * self.problem.capacity - length
        self.loads[first : first + degree] = finish_s
        for other, size in enumerate(self.degrees):
            for touched in range(first // size, min(-(-(first + degree) // size), len(self.ready[other]))):
                inside = self.loads[touched * size : (touched + 1) * size]
                self.ready[other][touched] = inside.max()
                self.sums[other][touched] = inside.sum()

    def _close(self, first: int, degree: int) -> None:
        """Close every open group that shares a rank with the new one."""
        for row, size in enumerate(self.degrees):
            for slot in range(first // size, min(-(-(first + degree) // size), len(self.ready[row]))):
                if self.open_group[row].pop(slot, None) is not None:
                    self.entry[row][slot] = self.problem.group_s[self.usable[row]]
                    self.room_left[row][slot] = 0
