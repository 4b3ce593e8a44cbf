"""Cut the sorted sequences of a step into micro-batches (pieces), evenly by tokens or by predicted cost.

The greedy planner groups the most promising of these cuts. Cutting by tokens is FlexSP's blaster (arXiv 2412.01523, section
4.2): few micro-batches, each with sequences of similar length and an equal share of the memory. If one long sequence decides
how long its micro-batch takes, the other groups of this micro-batch wait; cuts by cost give it more of the shorter sequences,
as far as memory allows.

Sequences of similar length cannot fill groups completely, so memory holds fewer of them than their tokens say. Cuts by cost
therefore count "lumped" tokens, which include the waste: a group of the smallest degree that holds the sequence, or of the
next degree, divided by the number of such sequences that fit into it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_longctx.plan.core.types import FloatArray, IntArray
from hf_longctx.plan.groups.problem import GroupingProblem, Piece, least_work

# share by which rounding may put a sum above its limit
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class _CutSearch:
    """Constants of the cuts, chosen with `recipes/bench/cpu/planner.py` (tables times and problems).

    Groups of few sequences are less even than groups of many, so shares of time come in pairs (few, many).
    """

    # number of sequences below which a micro-batch counts as one of few
    few_sequences: int = 96
    # shares of the ranks' time that groups use; cuts are searched for every pair
    time_shares: tuple[tuple[float, float], ...] = ((0.96, 0.96), (0.88, 0.98))
    # the pair with which cuts are compared
    expected_shares: tuple[float, float] = (0.9, 0.97)
    # shares of the memory that lumped tokens may fill; cuts are searched for each
    room_shares: tuple[float, ...] = (1.08, 1.0, 0.92)
    # most positions at which a cut by cost may lie
    most_positions: int = 240


_CUTS = _CutSearch()


def candidate_cuts(problem: GroupingProblem, trials: int, num_ranks: int, time_aware: bool) -> list[list[Piece]]:
    """Cuts of the sequences, sorted longest first, into micro-batches whose tokens fit `num_ranks` ranks.

    There is a cut by tokens for each of `trials` numbers of micro-batches, starting at the fewest that fit, then (`time_aware`)
    cuts by cost. The last resort is one sequence per micro-batch.
    """
    tokens = np.array(problem.lengths, dtype=np.float64)
    room = float(problem.capacity * num_ranks)
    cuts: dict[tuple[Piece, ...], None] = {}
    tried = 0
    for number in range(max(1, math.ceil(tokens.sum() / room)), len(tokens) + 1):
        if cut := _balanced(tokens, number, room):
            # if one long sequence decides the balance, a larger number may give the same cut again
            cuts[tuple(cut)] = None
            tried += 1
        if tried == trials:
            break
    if time_aware:
        cuts |= dict.fromkeys(tuple(cut) for cut in _cuts_by_cost(problem, num_ranks) if cut)
    return [list(cut) for cut in cuts] or [[(i, i + 1) for i in range(len(tokens))]]


def expected_s(problem: GroupingProblem, pieces: list[Piece], num_ranks: int) -> FloatArray:
    """Seconds that each micro-batch will probably take, to compare cuts before grouping them.

    This is the time of its longest sequence, or that of its work on groups that are not quite even, whichever is longer; more
    if its lumped tokens exceed the memory.
    """
    work = least_work(problem)
    cheapest = work.min(axis=0)
    sums, lumped = (np.concatenate([[0.0], np.cumsum(measure)]) for measure in (cheapest, _lumped_tokens(problem)))
    expected = np.empty(len(pieces))
    for index, (start, stop) in enumerate(pieces):
        fits = np.isfinite(work[:, start])
        rank_seconds = sums[stop] - sums[start] + work[fits, start] - cheapest[start]
        spread_s = rank_seconds / (num_ranks * _CUTS.expected_shares[stop - start >= _CUTS.few_sequences])
        overfull = max(1.0, float(lumped[stop] - lumped[start]) / (problem.capacity * num_ranks))
        # the longest sequence runs on the degree that serves it and the rest best
        makespan_s = float(np.maximum(problem.seconds[fits, start], spread_s).min())
        expected[index] = makespan_s * overfull + min(problem.group_s) + problem.micro_batch_s
    return expected


def micro_batch_ends(lengths: Sequence[int], number: int) -> list[int]:
    """Ends of at most `number` micro-batches of consecutive sequences whose largest has as few tokens as possible.

    Exact, by bisection on the tokens of the largest.
    """
    sums = np.cumsum(lengths)

    def cut(most: int) -> list[int]:
        ends = [0]
        while ends[-1] < len(lengths):
            before = int(sums[ends[-1] - 1]) if ends[-1] else 0
            ends.append(int(np.searchsorted(sums, before + most, side="right")))
        return ends[1:]

    low, high = max(lengths), int(sums[-1])
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(cut(middle)) <= number else (middle + 1, high)
    return cut(low)


def _lumped_tokens(problem: GroupingProblem) -> FloatArray:
    """Tokens of memory that every sequence takes if its group holds only sequences of its length."""
    tokens, rooms = np.array(problem.lengths), np.array(problem.degrees) * problem.capacity
    smallest = np.searchsorted(rooms, tokens)
    shares = [rooms[np.minimum(smallest + larger, len(rooms) - 1)] for larger in (0, 1)]
    lumped: FloatArray = np.min([room / np.maximum(room // tokens, 1) for room in shares], axis=0)
    return lumped


def _balanced(tokens: FloatArray, number: int, room: float) -> list[Piece]:
    """At most `number` pieces with the least maximum of tokens, none above `room`; empty if that is impossible."""
    sums: list[float] = np.cumsum(tokens).tolist()

    def cut(limit: float) -> list[Piece]:
        pieces: list[Piece] = []
        start = 0
        while start < len(sums) and len(pieces) <= number:
            base = sums[start - 1] if start else 0.0
            stop = max(start + 1, bisect_right(sums, base + limit * (1 + _ROUNDING)))
            pieces.append((start, stop))
            start = stop
        return pieces

    low, high = max(float(tokens[0]), sums[-1] / number), min(sums[-1], room)
    if len(cut(high)) > number:
        return []
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if len(cut(middle)) <= number else (middle, high)
    return cut(high)


def _cuts_by_cost(problem: GroupingProblem, num_ranks: int) -> list[list[Piece]]:
    """Cuts with the least predicted sum of makespans, by dynamic programming over the positions where a cut may lie."""
    lengths = np.array(problem.lengths, dtype=np.float64)
    positions = _cut_positions(lengths)
    work = least_work(problem)
    cheapest = work.min(axis=0)
    sums, tokens, lumped = (
        np.concatenate([[0.0], np.cumsum(measure)])[positions] for measure in (cheapest, lengths, _lumped_tokens(problem))
    )
    first = np.minimum(positions, len(lengths) - 1)
    room = float(problem.capacity * num_ranks)
    rank_seconds = sums - sums[:, None]
    count = positions - positions[:, None]
    # a single sequence always has room
    may_be_full, is_empty = count > 1, count <= 0
    over_room = tokens - tokens[:, None] > room
    lumped_tokens = lumped - lumped[:, None]
    excluded = [is_empty | (may_be_full & (over_room | (lumped_tokens > share * room))) for share in _CUTS.room_shares]
    fixed_s = min(problem.group_s) + problem.micro_batch_s
    costs = np.empty((len(_CUTS.time_shares) * len(excluded), *count.shape))
    for place, (few, many) in enumerate(_CUTS.time_shares):
        usable = num_ranks * np.where(count < _CUTS.few_sequences, few, many)
        # a piece takes at least as long as its longest sequence, which runs on the degree that serves it and the rest best
        makespans = np.full(rank_seconds.shape, np.inf)
        for k in range(len(problem.degrees)):
            # only rows of sequences that fit; the longest are first
            fitting = slice(int(np.argmax(np.isfinite(work[k][first]))), None)
            if not np.isfinite(work[k][first[-1]]):
                continue
            alone, dearer = problem.seconds[k][first[fitting]], work[k][first[fitting]] - cheapest[first[fitting]]
            spread = rank_seconds[fitting] + dearer[:, None]
            spread /= usable[fitting]
            np.maximum(spread, alone[:, None], out=spread)
            np.minimum(makespans[fitting], spread, out=makespans[fitting])
        makespans += fixed_s
        for share, excludes in enumerate(excluded):
            costs[place * len(excluded) + share] = np.where(excludes, np.inf, makespans)
    return _cheapest_paths(costs, positions)


def _cut_positions(lengths: FloatArray) -> IntArray:
    """Positions where cuts may lie: before each of the longest sequences, and after them at equal distances in tokens."""
    count = len(lengths)
    if count < _CUTS.most_positions:
        return np.arange(count + 1)
    half = _CUTS.most_positions // 2
    sums = np.concatenate([[0.0], np.cumsum(lengths)])
    rest = np.searchsorted(sums, np.linspace(sums[half], sums[-1], half))
    return np.unique(np.concatenate([np.arange(half), rest, [count]]))


def _cheapest_paths(costs: FloatArray, positions: IntArray) -> list[list[Piece]]:
    """For each table of costs, the pieces of least total cost from the first to the last position; empty if none is finite.

    costs: cost of a piece [table, first position, last position].
    """
    rows = np.arange(len(costs))
    best, came_from = np.full((len(costs), len(positions)), np.inf), np.zeros((len(positions), len(costs)), dtype=np.int64)
    best[:, 0] = 0.0
    for end in range(1, len(positions)):
        totals = best[:, :end] + costs[:, :end, end]
        came_from[end] = totals.argmin(axis=1)
        best[:, end] = totals[rows, came_from[end]]
    found: list[list[Piece]] = []
    for table, is_finite in enumerate(np.isfinite(best[:, -1]).tolist()):
        pieces, end = [], len(positions) - 1 if is_finite else 0
        while end > 0:
            start = int(came_from[end, table])
            pieces.append((int(positions[start]), int(positions[end])))
            end = start
        found.append(pieces[::-1])
    return found
