"""Plan nested sequence groups: a rank goes from group to group within a step and waits for the ranks of its next group only.

The planner tries this if no collective runs over all ranks within a step (replicated parameters, or shards within blocks of
ranks), so that ranks need not end a micro-batch together: a rank may run in a group of 64, then in one of 8, then alone several
times. Sequences are placed longest first, each on the degree and the ranks that waste the fewest rank-seconds, counting the time
of the sequence and the time its ranks wait for each other. A group takes further sequences until one of its ranks starts another
group or its memory is full.

The idea is that of Megatron's hybrid context parallelism and ByteScale (arXiv 2502.21231); the placement is our own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_longctx.plan.core.arrays import FloatArray
from hf_longctx.plan.groups.placement import PlacedGroup
from hf_longctx.plan.groups.problem import GroupingProblem


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
