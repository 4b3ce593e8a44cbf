"""The sorted sequences of a step into micro-batches: consecutive runs (pieces), cut by tokens or by predicted cost.

By tokens is FlexSP's blaster (arXiv 2412.01523, section 4.2): few micro-batches, each with sequences of like length and an
equal share of memory. Where one long sequence decides how long its micro-batch takes, that leaves slack: cuts by cost give
such a micro-batch more of the shorter sequences, as far as memory goes.

Memory goes less far than tokens say: sequences of like length fill groups badly. So a sequence is counted with what it
wastes, "lumped": a group of the smallest degree that holds it, or of the next, shared by as many of its kind as fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hf_longctx.plan.core.arrays import FloatArray, IntArray
from hf_longctx.plan.groups.bounds import least_work
from hf_longctx.plan.groups.problem import GroupingProblem, Piece

_ROUNDING = 1e-12
# how much of the time groups of few and of many sequences are expected to use, and how much of the memory lumped sequences
# may fill, in several moods
_FEW_SEQUENCES = 96
_TIME_SHARES = ((0.96, 0.96), (0.88, 0.98))
_EXPECTED_SHARES = (0.9, 0.97)
_ROOM_SHARES = (1.08, 1.0, 0.92)
_MOST_CUT_PLACES = 240


def candidate_cuts(problem: GroupingProblem, trials: int, num_ranks: int, time_aware: bool) -> list[list[Piece]]:
    """Cuts of the (descending) sequences into micro-batches whose tokens fit `num_ranks` ranks, for `trials` numbers of them.

    The numbers start from the fewest that fit. One sequence per micro-batch is the last resort.
    """
    tokens = np.array(problem.lengths, dtype=np.float64)
    room = float(problem.capacity * num_ranks)
    cuts: dict[tuple[Piece, ...], None] = {}
    tried = 0
    for number in range(max(1, math.ceil(tokens.sum() / room)), len(tokens) + 1):
        if cut := _balanced(tokens, number, room):
            # a long sequence may leave more micro-batches nothing to balance, so the same cut may come again
            cuts[tuple(cut)] = None
            tried += 1
        if tried == trials:
            break
    if time_aware:
        cuts |= dict.fromkeys(tuple(cut) for cut in _cuts_by_cost(problem, num_ranks) if cut)
    return [list(cut) for cut in cuts] or [[(i, i + 1) for i in range(len(tokens))]]


def expected_s(problem: GroupingProblem, pieces: list[Piece], num_ranks: int) -> FloatArray:
    """What every piece is likely to take: as long as its longest sequence, or as its work spread over groups that are not
    quite even, and longer where lumped sequences overfill the memory."""
    work = least_work(problem)
    cheapest = work.min(axis=0)
    sums, lumped = (np.concatenate([[0.0], np.cumsum(measure)]) for measure in (cheapest, _lumped_tokens(problem)))
    expected = np.empty(len(pieces))
    for place, (start, stop) in enumerate(pieces):
        fits = np.isfinite(work[:, start])
        rank_seconds = sums[stop] - sums[start] + work[fits, start] - cheapest[start]
        spread_s = rank_seconds / (num_ranks * (_EXPECTED_SHARES[0] if stop - start < _FEW_SEQUENCES else _EXPECTED_SHARES[1]))
        overfull = max(1.0, float(lumped[stop] - lumped[start]) / (problem.capacity * num_ranks))
        # on the degree that serves the longest sequence and all others best
        makespan_s = float(np.maximum(problem.seconds[fits, start], spread_s).min())
        expected[place] = makespan_s * overfull + min(problem.group_s)
    return expected


def consecutive_chunks(lengths: Sequence[int], number: int) -> list[int]:
    """Ends of at most `number` consecutive chunks with the least maximum of tokens; exact, by bisection on that maximum."""
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
    """Tokens of room that every sequence takes with its like."""
    tokens, rooms = np.array(problem.lengths), np.array(problem.degrees) * problem.capacity
    smallest = np.searchsorted(rooms, tokens)
    shares = [rooms[np.minimum(smallest + larger, len(rooms) - 1)] for larger in (0, 1)]
    lumped: FloatArray = np.min([room / np.maximum(room // tokens, 1) for room in shares], axis=0)
    return lumped


def _balanced(tokens: FloatArray, number: int, room: float) -> list[Piece]:
    """At most `number` consecutive runs with the least maximum of tokens, none above `room`; empty if there are none."""
    sums = np.cumsum(tokens)

    def cut(limit: float) -> list[Piece]:
        pieces: list[Piece] = []
        start = 0
        while start < len(tokens) and len(pieces) <= number:
            base = sums[start - 1] if start else 0.0
            stop = max(start + 1, int(np.searchsorted(sums, base + limit * (1 + _ROUNDING), side="right")))
            pieces.append((start, stop))
            start = stop
        return pieces

    low, high = max(float(tokens[0]), float(sums[-1]) / number), min(float(sums[-1]), room)
    if len(cut(high)) > number:
        return []
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if len(cut(middle)) <= number else (middle, high)
    return cut(high)


def _cuts_by_cost(problem: GroupingProblem, num_ranks: int) -> list[list[Piece]]:
    """Cuts with the least predicted sum of makespans, by dynamic programming over places where a cut may lie."""
    lengths = np.array(problem.lengths, dtype=np.float64)
    places = _cut_places(lengths)
    work = least_work(problem)
    cheapest = work.min(axis=0)
    sums, tokens, lumped = (
        np.concatenate([[0.0], np.cumsum(measure)])[places] for measure in (cheapest, lengths, _lumped_tokens(problem))
    )
    first = np.minimum(places, len(lengths) - 1)
    room = float(problem.capacity * num_ranks)
    rank_seconds = sums - sums[:, None]
    count = places - places[:, None]
    found = []
    for few, many in _TIME_SHARES:
        time_shares = np.where(count < _FEW_SEQUENCES, few, many)
        # a piece takes at least as long as its longest sequence, on the degree that serves both best
        makespans = np.full(rank_seconds.shape, np.inf)
        for k in range(len(problem.degrees)):
            alone = np.where(np.isfinite(work[k][first]), problem.seconds[k][first], np.inf)
            dearer = np.where(np.isfinite(work[k][first]), work[k][first] - cheapest[first], np.inf)
            spread = (rank_seconds + dearer[:, None]) / (num_ranks * time_shares)
            makespans = np.minimum(makespans, np.maximum(alone[:, None], spread))
        for share in _ROOM_SHARES:
            # a single sequence always has room
            is_full = ((lumped - lumped[:, None] > share * room) | (tokens - tokens[:, None] > room)) & (count > 1)
            costs = np.where((count <= 0) | is_full, np.inf, makespans + min(problem.group_s))
            found.append(_cheapest_path(costs, places))
    return found


def _cut_places(lengths: FloatArray) -> IntArray:
    """Where cuts may lie: around each of the longest sequences, and at equal steps of tokens behind them."""
    count = len(lengths)
    if count < _MOST_CUT_PLACES:
        return np.arange(count + 1)
    half = _MOST_CUT_PLACES // 2
    sums = np.concatenate([[0.0], np.cumsum(lengths)])
    rest = np.searchsorted(sums, np.linspace(sums[half], sums[-1], half))
    return np.unique(np.concatenate([np.arange(half), rest, [count]]))


def _cheapest_path(costs: FloatArray, places: IntArray) -> list[Piece]:
    """The pieces of least total cost from the first to the last place; empty if there is no way."""
    best, came_from = np.full(len(places), np.inf), np.zeros(len(places), dtype=np.int64)
    best[0] = 0.0
    for end in range(1, len(places)):
        totals = best[:end] + costs[:end, end]
        came_from[end] = totals.argmin()
        best[end] = totals[came_from[end]]
    if not np.isfinite(best[-1]):
        return []
    pieces, end = [], len(places) - 1
    while end > 0:
        start = int(came_from[end])
        pieces.append((int(places[start]), int(places[end])))
        end = start
    return pieces[::-1]
