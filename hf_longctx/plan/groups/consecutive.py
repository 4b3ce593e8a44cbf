"""Group consecutive sequences with the least makespan: bisection with an exact dynamic program, many micro-batches at once.

The greedy planner starts its search from these groups. Sequences are sorted longest first, a micro-batch (piece) is a range
[start, stop) of them, and each of its groups is a run, that is, a range within the piece. For a makespan T let next_d(i) be the
end of the longest run from sequence i that fits d ranks within T and memory; it never decreases with i. So the furthest
sequence that r ranks can serve is

    reach(0) = start,   reach(r) = max over degrees d of next_d(reach(r - d)),

and T is feasible if reach(all ranks) is the end of the piece. A lane is one piece with one T; all lanes go through the recurrence
as one array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_longctx.plan.core.arrays import FloatArray, IntArray
from hf_longctx.plan.groups.problem import Group, GroupingProblem, Piece


@dataclass(frozen=True, slots=True)
class _MakespanSearch:
    """Constants of the search; repeat the tables times and problems of `recipes/bench/cpu/planner.py` when one changes.

    first_factors: makespans tried first, as multiples of the fluid bound; the last one allows any makespan. most_limits:
    makespans tried per piece in every later iteration.
    """

    first_factors: tuple[float, ...] = (1.02, 1.06, 1.12, 1.25, 1.5, 2.0, 4.0, np.inf)
    most_limits: int = 6


_MAKESPAN = _MakespanSearch()


def group_runs(
    problem: GroupingProblem, pieces: Sequence[Piece], bounds_s: FloatArray, num_ranks: int, tolerance: float = 2e-3
) -> list[list[Group]]:
    """Groups of least makespan among all groups of consecutive sequences, for every piece; empty if memory allows none.

    The sequences of `problem` are sorted longest first. bounds_s: a lower bound on the makespan of each piece. Makespans are
    within `tolerance` of the best.
    """
    tables = _Tables(problem, pieces, num_ranks)
    limits = np.maximum(bounds_s, 1e-12)[:, None] * np.array(_MAKESPAN.first_factors)
    # per piece: the least feasible makespan found, and the choices of degrees that reach it
    kept: dict[int, tuple[float, NDArray[np.int16]]] = {}
    low, high = bounds_s.astype(np.float64), np.full(len(pieces), np.inf)
    open_pieces = np.arange(len(pieces))
    while len(open_pieces):
        reached, choices = tables.reach(open_pieces, limits)
        for row, piece in enumerate(open_pieces.tolist()):
            feasible = np.flatnonzero(reached[row])
            first = int(feasible[0]) if len(feasible) else len(limits[row])
            if first > 0:
                low[piece] = max(low[piece], limits[row][first - 1])
            if len(feasible):
                kept[piece] = limits[row][first], choices[:, row, first]
                is_any = np.isinf(limits[row][first])
                high[piece] = problem.micro_batch_seconds(tables.groups(piece, *kept[piece])) if is_any else limits[row][first]
        # pieces that fit within no limit are given up; the others are refined until their gap is small
        open_pieces = np.array([p for p in kept if high[p] - low[p] > tolerance * high[p]], dtype=np.int64)
        shares = np.arange(1, _MAKESPAN.most_limits + 1) / (_MAKESPAN.most_limits + 1)
        limits = low[open_pieces, None] + (high[open_pieces] - low[open_pieces])[:, None] * shares
    return [tables.groups(piece, *kept[piece]) if piece in kept else [] for piece in range(len(pieces))]


class _Tables:
    """Tables that do not depend on the makespan: sums over the sorted sequences, and the ends of runs that memory allows."""

    def __init__(self, problem: GroupingProblem, pieces: Sequence[Piece], num_ranks: int) -> None:
        self.problem, self.pieces, self.num_ranks = problem, pieces, num_ranks
        zero = np.zeros((len(problem.degrees), 1))
        self.seconds = np.concatenate([zero, np.cumsum(problem.seconds, axis=1)], axis=1)
        tokens = np.concatenate([[0], np.cumsum(problem.lengths)])
        rooms = [degree * problem.capacity for degree in problem.degrees]
        self.by_memory = np.stack([np.searchsorted(tokens, tokens + room, side="right") - 1 for room in rooms])

    def reach(self, chosen: IntArray, limits_s: FloatArray) -> tuple[NDArray[np.bool_], NDArray[np.int16]]:
        """Whether all ranks together reach the end of each chosen piece within each limit (array [piece, limit]).

        Also the degree index of the last group with which each number of ranks reaches furthest (array [ranks, piece, limit];
        -1: one rank fewer reaches as far).
        """
        degrees = [degree for degree in self.problem.degrees if degree <= self.num_ranks]
        starts, stops = np.array([self.pieces[piece] for piece in chosen], dtype=np.int64).T
        num_limits = limits_s.shape[1]
        table, offsets = self._next(starts, stops, limits_s, len(degrees))
        shape = (self.num_ranks + 1, len(chosen) * num_limits)
        reached, choices = np.zeros(shape, dtype=np.int64), np.full(shape, -1, dtype=np.int16)
        # indices count within the lane's own range of the table, so that one gather serves all lanes
        ends = np.repeat(stops - starts, num_limits)
        rows = np.arange(len(degrees))[:, None] * table.shape[1] + offsets
        flat, sizes = table.ravel(), np.array(degrees)
        for ranks in range(degrees[0], self.num_ranks + 1):
            usable = int(np.searchsorted(sizes, ranks, side="right"))
            candidates = flat[rows[:usable] + reached[ranks - sizes[:usable]]]
            best = candidates.argmax(axis=0)
            furthest = candidates.max(axis=0)
            before = reached[ranks - 1]
            reached[ranks] = np.maximum(furthest, before)
            choices[ranks] = np.where(furthest > before, best, -1)
            if (reached[ranks] == ends).all():
                reached[ranks + 1 :] = ends
                break
        done = (reached[-1] == ends).reshape(len(chosen), num_limits)
        return done, choices.reshape(-1, len(chosen), num_limits)

    def groups(self, piece: int, limit_s: float, choices: NDArray[np.int16]) -> list[Group]:
        """The groups that the choices of one lane describe, longest sequences first."""
        start, stop = self.pieces[piece]
        degrees, by_rank = self.problem.degrees, choices.tolist()
        ranks, chain = self.num_ranks, []
        while ranks > 0:
            if by_rank[ranks] >= 0:
                chain.append(by_rank[ranks])
                ranks -= degrees[chain[-1]]
            else:
                ranks -= 1
        ends = self._ends(np.arange(start, stop), np.full(stop - start, limit_s))
        groups, first = [], start
        for k in reversed(chain):
            end = min(int(ends[k, first - start]), stop) if first < stop else stop
            if end > first:
                groups.append((degrees[k], tuple(range(first, end))))
                first = end
        assert first == stop, "the runs that were found do not cover their piece"
        return groups

    def _next(self, starts: IntArray, stops: IntArray, limits_s: FloatArray, num_degrees: int) -> tuple[IntArray, IntArray]:
        """Ends of the longest runs from every sequence of every lane [degree, sequence], and where each lane begins.

        Ends count from the start of the piece.
        """
        num_limits = limits_s.shape[1]
        counts = np.repeat(stops - starts + 1, num_limits)
        offsets = np.concatenate([[0], np.cumsum(counts)[:-1]])
        lane_starts = np.repeat(starts, num_limits)
        firsts = np.arange(counts.sum()) - np.repeat(offsets - lane_starts, counts)
        ends = self._ends(firsts, np.repeat(limits_s.ravel(), counts))[:num_degrees]
        last = np.repeat(np.repeat(stops, num_limits), counts)
        return np.minimum(ends, last) - np.repeat(lane_starts, counts), offsets

    def _ends(self, firsts: IntArray, limits_s: FloatArray) -> IntArray:
        """Ends of the longest runs from each of `firsts` within time limit and memory, for every degree; an empty run if none."""
        ends = np.empty((len(self.seconds), len(firsts)), dtype=np.int64)
        for k, sums in enumerate(self.seconds):
            # slightly more than the limit, so that a limit taken from a layout admits this layout despite rounding
            targets = sums[firsts] + (limits_s - self.problem.group_s[k]) * (1 + 1e-12)
            by_time = np.searchsorted(sums, targets, side="right") - 1
            ends[k] = np.maximum(np.minimum(by_time, self.by_memory[k][firsts]), firsts)
        return ends
