"""Nested sequence groups: a rank goes from group to group inside a step and waits for its partners alone.

Where no collective runs over all ranks inside a step (replicated parameters, or shards that lie inside blocks of ranks),
micro-batches need not be left together: a rank may run a group of 64, then one of 8, then several alone. Sequences are
placed longest first, each on the degree and the ranks that waste the fewest rank-seconds: those the sequence itself takes
and those its ranks wait for each other. A group takes further sequences until one of its ranks starts another group, or
its memory is full.

The idea is in Megatron's hybrid context parallelism and ByteScale (arXiv 2502.21231); the placement is our own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hf_longctx.plan.core.arrays import FloatArray
from hf_longctx.plan.groups.placement import PlacedGroup
from hf_longctx.plan.groups.problem import GroupingProblem

# finishes to aim for, over the bound that no plan beats; many sequences have time for the first one alone
_LIMIT_FACTORS = (1.08, np.inf, 1.04)
_MAX_PLACES = 12_000


def plan_nested(problem: GroupingProblem, ranks_per_node: int) -> list[PlacedGroup]:
    """Groups in the order in which their ranks run them; empty if no degree nests.

    Degrees that nest hold whole blocks of `problem.block_ranks` ranks, and are powers of two, all ranks, or such that nodes
    divide into them or they into nodes.
    """
    ordered, order = problem.longest_first()
    usable = [k for k, degree in enumerate(ordered.degrees) if _nests(degree, ordered, ranks_per_node)]
    largest = max((ordered.degrees[k] for k in usable), default=0) * ordered.capacity
    if not usable or ordered.lengths[0] > largest:
        return []
    bound_s = ordered.lower_bound_s()
    tries = max(1, _MAX_PLACES // (len(usable) * len(order)))
    runs = [_Board(ordered, usable, bound_s * factor).place_all() for factor in _LIMIT_FACTORS[:tries]]
    groups, _ = min(runs, key=lambda run: run[1])
    return [PlacedGroup(g.first, g.degree, tuple(order[i] for i in g.members)) for g in groups]


def _nests(degree: int, problem: GroupingProblem, ranks_per_node: int) -> bool:
    if degree % max(1, problem.block_ranks):
        return False
    tiles = degree % ranks_per_node == 0 or ranks_per_node % degree == 0
    return tiles or degree & (degree - 1) == 0 or degree == problem.num_ranks


class _Board:
    """Who is busy until when, for every degree and every aligned place of it."""

    def __init__(self, problem: GroupingProblem, usable: list[int], limit_s: float) -> None:
        self.problem, self.usable, self.limit_s = problem, usable, limit_s
        num_ranks = problem.num_ranks
        self.degrees = [problem.degrees[k] for k in usable]
        self.loads = np.zeros(num_ranks)
        # by degree and place: when its last rank is free, the sum over its ranks, and the group open there
        self.ready = [np.zeros(num_ranks // degree) for degree in self.degrees]
        self.sums = [np.zeros(num_ranks // degree) for degree in self.degrees]
        self.entry = [np.full(num_ranks // degree, problem.group_s[k]) for k, degree in zip(usable, self.degrees, strict=True)]
        self.room_left: list[NDArray[np.int64]] = [np.zeros(num_ranks // degree, dtype=np.int64) for degree in self.degrees]
        self.open_group: list[dict[int, int]] = [{} for _ in self.degrees]
        self.opened: list[tuple[int, int, list[int]]] = []

    def place_all(self) -> tuple[list[PlacedGroup], float]:
        """All sequences, longest first; the groups in the order in which they were opened, and the latest finish."""
        for i, length in enumerate(self.problem.lengths):
            options = [
                option
                for row in range(len(self.degrees))
                if length <= self.degrees[row] * self.problem.capacity
                for option in [self._best_place(row, i, length)]
            ]
            _, _, finish_s, row, place = min(options)
            self._put(row, place, i, length, finish_s)
        groups = [PlacedGroup(first, degree, tuple(members)) for first, degree, members in self.opened]
        return groups, float(self.loads.max())

    def _best_place(self, row: int, i: int, length: int) -> tuple[float, float, float, int, int]:
        """(how late, waste in rank-seconds, finish, row, place) of the place of this degree that finishes the sequence first."""
        seconds = float(self.problem.seconds[self.usable[row], i])
        fixed_s = self.problem.group_s[self.usable[row]]
        # where the open group has no room, a new one is opened
        entry: FloatArray = np.where(self.room_left[row] >= length, self.entry[row], fixed_s)
        finish = self.ready[row] + entry
        place = int(finish.argmin())
        finish_s = float(finish[place]) + seconds
        waste = self.degrees[row] * finish_s - float(self.sums[row][place])
        return max(0.0, finish_s - self.limit_s), waste, finish_s, row, place

    def _put(self, row: int, place: int, i: int, length: int, finish_s: float) -> None:
        degree = self.degrees[row]
        first = place * degree
        if place in self.open_group[row] and self.room_left[row][place] >= length:
            self.opened[self.open_group[row][place]][2].append(i)
            self.room_left[row][place] -= length
        else:
            self._close(first, degree)
            self.open_group[row][place] = len(self.opened)
            self.opened.append((first, degree, [i]))
            self.entry[row][place] = 0.0
            self.room_left[row][place] = degree * self.problem.capacity - length
        self.loads[first : first + degree] = finish_s
        for other, size in enumerate(self.degrees):
            for touched in range(first // size, min(-(-(first + degree) // size), len(self.ready[other]))):
                inside = self.loads[touched * size : (touched + 1) * size]
                self.ready[other][touched] = inside.max()
                self.sums[other][touched] = inside.sum()

    def _close(self, first: int, degree: int) -> None:
        """Ends every open group that shares a rank with a new one."""
        for row, size in enumerate(self.degrees):
            for place in range(first // size, min(-(-(first + degree) // size), len(self.ready[row]))):
                if self.open_group[row].pop(place, None) is not None:
                    self.entry[row][place] = self.problem.group_s[self.usable[row]]
                    self.room_left[row][place] = 0
