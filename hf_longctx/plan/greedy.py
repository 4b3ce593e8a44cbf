"""The fast planner: sort, cut into micro-batches, group each one, then improve the step by moves and swaps.

For every number of micro-batches from the fewest that fit, the sequences in descending order are cut into consecutive
runs, once balanced by tokens and once by time (FlexSP's blaster, arXiv 2412.01523, section 4.2, with a second measure), and
packed into micro-batches in two ways for steps that memory fills to the brim.
A micro-batch is grouped two ways: bisection on the makespan with an exact dynamic program over runs of the sorted
sequences, and longest-first packing into every rank layout where these are few. The better one is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hf_longctx.plan.cost import FloatArray
from hf_longctx.plan.grouping import Group, GroupingProblem, Layout, rank_layouts

_MAX_PACKINGS = 2000
# matrix entries that the search of one start may look at, and what a matrix costs besides: about a tenth of a second
_SEARCH_BUDGET = 3_000_000
_CALL_COST = 3_000
_MAX_STARTS = 2
_MAX_SEARCHES = 4
_MANY_SEQUENCES = 64
_NEAR = 0.1
_LEAST_GAIN = 1e-4
_MAX_RUN_SEQUENCES = 12
_BISECTION_TOLERANCE = 2e-3


def plan_greedy(problem: GroupingProblem, trials: int) -> Layout:
    """A good layout of the step, never slower than `plan_static`'s best. Independent of the order of the sequences."""
    ordered, order = problem.longest_first()
    layouts = [_plan_one_degree(ordered, trials, ordered.degrees)]
    for runs in _candidate_runs(ordered, trials, ordered.num_ranks):
        layouts += _if_complete([_group_micro_batch(ordered, run) for run in runs])
    if len(ordered.lengths) <= _MAX_RUN_SEQUENCES:
        layouts.append(_best_runs(ordered))
    improved = [_improve(ordered, layout) for layout in _promising(ordered, layouts)]
    return _renumber(min(improved, key=ordered.step_seconds), order)


def plan_static(problem: GroupingProblem, trials: int, degree: int = 0) -> Layout:
    """The best layout whose groups all have one degree, the given one or (0) any; what a fixed SP degree would do.

    Raises ValueError when the longest sequence does not fit in a group of `degree` ranks.
    """
    ordered, order = problem.longest_first()
    return _renumber(_plan_one_degree(ordered, trials, (degree,) if degree else ordered.degrees), order)


def plan_one_micro_batch(problem: GroupingProblem, one_degree: bool = False) -> Layout:
    """A good layout with a single micro-batch; `one_degree`: with groups of one size.

    Raises ValueError if none is found that fits the ranks.
    """
    ordered, order = problem.longest_first()
    run = range(len(ordered.lengths))
    if one_degree:
        candidates = [_pack(ordered, run, (degree,) * (ordered.num_ranks // degree)) for degree in ordered.degrees]
    else:
        candidates = [_group_micro_batch(ordered, run)]
    layouts: list[Layout] = [[groups] for groups in candidates if groups is not None]
    if not layouts:
        raise ValueError(
            f"{sum(problem.lengths)} tokens in {len(problem.lengths)} sequences (the longest has {max(problem.lengths)}) fit no "
            f"single micro-batch on {problem.num_ranks} ranks of {problem.capacity} tokens each (tokens_per_rank)"
        )
    best = min(layouts, key=ordered.step_seconds)
    return _renumber(best if one_degree else _improve(ordered, best), order)


def _plan_one_degree(problem: GroupingProblem, trials: int, degrees: Sequence[int]) -> Layout:
    longest = max(problem.lengths)
    usable = [degree for degree in degrees if longest <= degree * problem.capacity]
    if not usable:
        raise ValueError(
            f"a sequence of {longest} tokens does not fit {max(degrees)} ranks of {problem.capacity} tokens each; raise "
            f"static_degree or tokens_per_rank"
        )
    candidates: list[Layout] = []
    for degree in usable:
        layout = (degree,) * (problem.num_ranks // degree)
        for runs in _candidate_runs(problem, trials, len(layout) * degree):
            candidates += _if_complete([_pack(problem, run, layout) for run in runs])
    return min(candidates, key=problem.step_seconds)


def _if_complete(micro_batches: list[list[Group] | None]) -> list[Layout]:
    """The layout of these micro-batches as the only item, or nothing if one of them fits no groups."""
    fitting = [groups for groups in micro_batches if groups is not None]
    return [fitting] if len(fitting) == len(micro_batches) else []


def _promising(problem: GroupingProblem, layouts: list[Layout]) -> list[Layout]:
    """Starts that are worth a local search: the best of all, and the best of each number of micro-batches if near it."""
    layouts = sorted(layouts, key=problem.step_seconds)
    limit_s = problem.step_seconds(layouts[0]) * (1 + _NEAR)
    starts: dict[int, list[Layout]] = {}
    for layout in layouts:
        if problem.step_seconds(layout) <= limit_s:
            starts.setdefault(len(layout), []).append(layout)
    return [layout for same in starts.values() for layout in same[:_MAX_STARTS]][:_MAX_SEARCHES]


def _best_runs(problem: GroupingProblem) -> Layout:
    """The cheapest cut of the sorted sequences into consecutive micro-batches, each grouped as well as we can: exact in
    the cuts, by dynamic programming, and quadratic in groupings, so for few sequences only.
    """
    count = len(problem.lengths)
    best: list[tuple[float, Layout]] = [(0.0, [])]
    for end in range(1, count + 1):
        options = []
        for start in range(end):
            groups = _group_micro_batch(problem, range(start, end))
            if groups is not None:
                seconds, layout = best[start]
                options.append((seconds + problem.micro_batch_seconds(groups), [*layout, groups]))
        best.append(min(options, key=lambda option: option[0]))
    return best[count][1]


def _renumber(layout: Layout, order: Sequence[int]) -> Layout:
    return [[(degree, tuple(order[i] for i in part)) for degree, part in groups] for groups in layout]


def _candidate_runs(problem: GroupingProblem, trials: int, num_ranks: int) -> list[list[list[int]]]:
    """Ways to spread the sequences (longest first) over micro-batches on `num_ranks` ranks, for several numbers of them.

    Consecutive runs balanced by tokens and by time, and two packings that fill micro-batches better: longest first into
    the emptiest one and into the fullest one with room.
    """
    room = problem.capacity * num_ranks
    tokens = np.array(problem.lengths, dtype=np.float64)
    seconds = problem.seconds.min(axis=0)
    fewest = max(1, math.ceil(tokens.sum() / room))
    count = len(problem.lengths)
    found: list[list[list[int]]] = []
    # as many micro-batches as sequences always fit, so the loop ends
    for number in range(fewest, count + 1):
        ends = {tuple(_balanced_ends(measure, number, tokens, room)) for measure in (tokens, seconds)}
        found += [
            [list(range(start, end)) for start, end in zip((0, *cut[:-1]), cut, strict=True)] for cut in sorted(ends - {()})
        ]
        found += [bins for fullest in (False, True) if (bins := _fill(problem.lengths, number, room, fullest))]
        # every candidate costs time, and with many sequences they differ little
        if found and number >= fewest + (min(trials, 3) if count > _MANY_SEQUENCES else trials) - 1:
            break
    # grouping may fail where tokens alone fit: one sequence per micro-batch is always feasible
    return [*found, [[i] for i in range(count)]]


def _fill(lengths: Sequence[int], number: int, room: float, fullest: bool) -> list[list[int]]:
    """Sequences in order into at most `number` bins of `room` tokens, each into the fullest or the emptiest that has room.

    Empty if one fits nowhere.
    """
    loads = [0.0] * number
    bins: list[list[int]] = [[] for _ in range(number)]
    for i, length in enumerate(lengths):
        open_bins = [(loads[b], b) for b in range(number) if loads[b] + length <= room]
        if not open_bins:
            return []
        _, chosen = max(open_bins, key=lambda item: (item[0], -item[1])) if fullest else min(open_bins)
        loads[chosen] += length
        bins[chosen].append(i)
    return [part for part in bins if part]


def _balanced_ends(measure: FloatArray, number: int, tokens: FloatArray, room: float) -> list[int]:
    """Ends of at most `number` consecutive runs with the least maximum of `measure`, none above `room` tokens."""
    sums, token_sums = np.cumsum(measure), np.cumsum(tokens)

    def cut(limit: float) -> list[int]:
        ends: list[int] = []
        while not ends or ends[-1] < len(measure):
            start = ends[-1] if ends else 0
            base, token_base = (sums[start - 1], token_sums[start - 1]) if start else (0.0, 0.0)
            by_measure = int(np.searchsorted(sums, base + limit * (1 + 1e-12), side="right"))
            by_tokens = int(np.searchsorted(token_sums, token_base + room + 1e-6, side="right"))
            ends.append(max(start + 1, min(by_measure, by_tokens)))
        return ends

    low, high = float(measure.max()), float(sums[-1])
    if len(cut(high)) > number:
        return []
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if len(cut(middle)) <= number else (middle, high)
    return cut(high)


def _group_micro_batch(problem: GroupingProblem, run: Sequence[int]) -> list[Group] | None:
    """The best grouping found for the sequences of one micro-batch (longest first); None if none fits."""
    candidates = [groups for groups in (_group_by_runs(problem, run),) if groups is not None]
    layouts = rank_layouts(problem.num_ranks, problem.degrees) if problem.num_ranks <= 16 else []
    if len(layouts) * len(run) > _MAX_PACKINGS:
        layouts = []
    layouts += [tuple(sorted((degree for degree, _ in groups), reverse=True)) for groups in candidates]
    candidates += [groups for layout in layouts if (groups := _pack(problem, run, layout)) is not None]
    return min(candidates, key=problem.micro_batch_seconds, default=None)


def _pack(problem: GroupingProblem, run: Sequence[int], layout: tuple[int, ...]) -> list[Group] | None:
    """Longest first, each sequence into the group that then ends earliest; None where one fits no group."""
    indices = [problem.degrees.index(degree) for degree in layout]
    loads = [problem.group_s[k] for k in indices]
    rooms = [degree * problem.capacity for degree in layout]
    members: list[list[int]] = [[] for _ in layout]
    for i in run:
        ends = [(loads[g] + problem.seconds[k][i], g) for g, k in enumerate(indices) if problem.lengths[i] <= rooms[g]]
        if not ends:
            return None
        end, g = min(ends)
        loads[g] = float(end)
        rooms[g] -= problem.lengths[i]
        members[g].append(i)
    return [(degree, tuple(part)) for degree, part in zip(layout, members, strict=True)]


def _group_by_runs(problem: GroupingProblem, run: Sequence[int]) -> list[Group] | None:
    """Consecutive runs of the sorted sequences as groups with the least makespan that fits all ranks, by bisection."""
    chosen = list(run)
    tokens = np.concatenate([[0.0], np.cumsum([problem.lengths[i] for i in chosen])])
    sums = [np.concatenate([[0.0], np.cumsum(row[chosen])]) for row in problem.seconds]
    high = float(sum(problem.seconds[:, chosen].max(axis=0))) + max(problem.group_s)
    best = _fewest_ranks(problem, tokens, sums, high)
    if best is None:
        return None
    low = 0.0
    while high - low > _BISECTION_TOLERANCE * high:
        middle = (low + high) / 2
        groups = _fewest_ranks(problem, tokens, sums, middle)
        if groups is None:
            low = middle
        else:
            high, best = middle, groups
    return [(problem.degrees[k], tuple(chosen[start:end])) for k, start, end in best]


def _fewest_ranks(
    problem: GroupingProblem, tokens: FloatArray, sums: list[FloatArray], limit_s: float
) -> list[tuple[int, int, int]] | None:
    """(degree index, start, end) of runs that end within `limit_s` and use the fewest ranks; None if more than all."""
    count = len(tokens) - 1
    reach = []
    for k, degree in enumerate(problem.degrees):
        by_time = np.searchsorted(sums[k], sums[k][:-1] + (limit_s - problem.group_s[k]) * (1 + 1e-12), side="right") - 1
        by_room = np.searchsorted(tokens, tokens[:-1] + degree * problem.capacity, side="right") - 1
        reach.append(np.minimum(by_time, by_room).tolist())
    ranks, choice = [0] * (count + 1), [(-1, -1)] * (count + 1)
    for start in range(count - 1, -1, -1):
        options = [(problem.degrees[k] + ranks[ends[start]], k) for k, ends in enumerate(reach) if ends[start] > start]
        if not options:
            return None
        ranks[start], k = min(options)
        choice[start] = (k, reach[k][start])
    if ranks[0] > problem.num_ranks:
        return None
    runs, start = [], 0
    while start < count:
        k, end = choice[start]
        runs.append((k, start, end))
        start = end
    return runs


def _improve(problem: GroupingProblem, layout: Layout) -> Layout:
    """Moves and swaps of sequences across micro-batches, then every micro-batch grouped anew, while the step gets faster."""
    budget = _SEARCH_BUDGET
    while True:
        state = _State(problem, layout, budget)
        while state.budget > 0 and state.improve_once():
            pass
        budget = state.budget
        moved = state.layout()
        layout = [_regroup(problem, groups) for groups in moved]
        if budget <= 0 or problem.step_seconds(layout) >= problem.step_seconds(moved) * (1 - _LEAST_GAIN):
            return layout


def _regroup(problem: GroupingProblem, groups: list[Group]) -> list[Group]:
    """The same sequences in better groups, if there are any."""
    regrouped = _group_micro_batch(problem, sorted(i for _, part in groups for i in part))
    return groups if regrouped is None else min(groups, regrouped, key=problem.micro_batch_seconds)


class _State:
    """A layout under local search, as arrays over groups: degree index, micro-batch, load, tokens, room.

    `budget` falls by the size of every matrix looked at, so that the search ends after the same work on every machine.
    """

    def __init__(self, problem: GroupingProblem, layout: Layout, budget: int) -> None:
        self.problem, self.budget = problem, budget
        self.lengths = np.array(problem.lengths)
        kinds, homes, self.members = [], [], []
        for home, groups in enumerate(layout):
            spare = problem.num_ranks - sum(degree for degree, _ in groups)
            # idle ranks become empty groups of one, so that a move may use them
            for degree, members in [*groups, *([(1, ())] * spare if 1 in problem.degrees else [])]:
                kinds.append(problem.degrees.index(degree))
                homes.append(home)
                self.members.append(list(members))
        self.kinds, self.homes = np.array(kinds), np.array(homes)
        self.owner = np.zeros(len(problem.lengths), dtype=np.int64)
        for group, part in enumerate(self.members):
            self.owner[part] = group
        own_seconds = problem.seconds[self.kinds[self.owner], np.arange(len(self.lengths))]
        self.fixed = np.array(problem.group_s)[self.kinds]
        # a group without sequences is no group: its fixed cost comes with its first sequence
        self.loads = np.bincount(self.owner, own_seconds, len(kinds)) + np.where([bool(m) for m in self.members], self.fixed, 0)
        self.tokens = np.bincount(self.owner, self.lengths, len(kinds))
        self.rooms = np.array(problem.degrees)[self.kinds] * problem.capacity

    def layout(self) -> Layout:
        """The layout as it stands; micro-batches that lost all sequences are gone."""
        result: Layout = [[] for _ in range(int(self.homes.max()) + 1)]
        for kind, part, home in zip(self.kinds, self.members, self.homes, strict=True):
            result[home].append((self.problem.degrees[kind], tuple(part)))
        return [groups for groups in result if any(part for _, part in groups)]

    def improve_once(self) -> bool:
        """Takes the best move (else the best swap) out of the slowest group of every micro-batch; False if none helps."""
        least_gain = 1e-9 * float(self.loads.max())
        improved = False
        for home in range(int(self.homes.max()) + 1):
            gain, i, target, j = self._best_move(home)
            if gain <= least_gain:
                gain, i, target, j = self._best_swap(home)
            if gain > least_gain and self.budget > 0:
                source = int(self.owner[i])
                self._shift(i, target)
                if j >= 0:
                    self._shift(j, source)
                improved = True
        return improved

    def _best_move(self, home: int) -> tuple[float, int, int, int]:
        """(gain in seconds, sequence, target group, -1) of the best move out of the slowest group of `home`."""
        source = self._slowest(home)
        chosen = np.array(self.members[source], dtype=np.int64)
        if not len(chosen):
            return 0.0, -1, -1, -1
        self.budget -= _CALL_COST + len(chosen) * len(self.loads)
        seconds = self.problem.seconds[:, chosen]
        rest = self.loads[source] - seconds[self.kinds[source]] if len(chosen) > 1 else np.zeros(1)
        entry = np.where([bool(m) for m in self.members], 0.0, self.fixed)
        loads = self.loads + entry + seconds[self.kinds].T
        fits = self.tokens + self.lengths[chosen][:, None] <= self.rooms
        fits[:, source] = False
        targets = np.broadcast_to(np.arange(len(self.loads)), loads.shape)
        gains = np.where(fits, self._gains(home, source, rest[:, None], targets, loads), -np.inf)
        row, target = np.unravel_index(int(np.argmax(gains)), gains.shape)
        return float(gains[row, target]), int(chosen[row]), int(target), -1

    def _best_swap(self, home: int) -> tuple[float, int, int, int]:
        """(gain in seconds, sequence, target group, the sequence that comes back) of the best swap, as `_best_move`."""
        source, problem = self._slowest(home), self.problem
        chosen = np.array(self.members[source], dtype=np.int64)
        others = np.flatnonzero(self.owner != source)
        if not len(chosen) or not len(others):
            return 0.0, -1, -1, -1
        self.budget -= _CALL_COST + len(chosen) * len(others)
        targets = self.owner[others]
        kinds, kind = self.kinds[targets], self.kinds[source]
        grows = self.lengths[chosen][:, None] - self.lengths[others]
        fits = (self.tokens[targets] + grows <= self.rooms[targets]) & (self.tokens[source] - grows <= self.rooms[source])
        rest = self.loads[source] - problem.seconds[kind, chosen][:, None] + problem.seconds[kind, others]
        loads = self.loads[targets] - problem.seconds[kinds, others] + problem.seconds[:, chosen][kinds].T
        spread = np.broadcast_to(targets, loads.shape)
        gains = np.where(fits, self._gains(home, source, rest, spread, loads), -np.inf)
        row, column = np.unravel_index(int(np.argmax(gains)), gains.shape)
        return float(gains[row, column]), int(chosen[row]), int(targets[column]), int(others[column])

    def _slowest(self, home: int) -> int:
        inside = np.flatnonzero(self.homes == home)
        return int(inside[np.argmax(self.loads[inside])])

    def _gains(self, home: int, source: int, rest: FloatArray, targets: NDArray[np.int64], loads: FloatArray) -> FloatArray:
        """Seconds that the step saves when `source` (slowest of `home`) falls to `rest` and a target rises to `loads`."""
        maxima = np.full(int(self.homes.max()) + 1, -np.inf)
        np.maximum.at(maxima, self.homes, self.loads)
        inside = np.flatnonzero((self.homes == home) & (np.arange(len(self.loads)) != source))
        ranked = inside[np.argsort(-self.loads[inside], kind="stable")]
        second = self.loads[ranked[0]] if len(ranked) else 0.0
        third = self.loads[ranked[1]] if len(ranked) > 1 else 0.0
        runner_up = ranked[0] if len(ranked) else -1
        elsewhere = maxima[home] - np.maximum(rest, second) + np.minimum(0.0, maxima[self.homes[targets]] - loads)
        within = maxima[home] - np.maximum(np.maximum(rest, loads), np.where(targets == runner_up, third, second))
        gains: FloatArray = np.where(self.homes[targets] == home, within, elsewhere)
        return gains

    def _shift(self, i: int, target: int) -> None:
        source = int(self.owner[i])
        self.members[source].remove(i)
        self.members[target].append(i)
        self.owner[i] = target
        for group in (source, target):
            part, kind = self.members[group], self.kinds[group]
            # from scratch, so that no rounding piles up
            self.loads[group] = self.fixed[group] + self.problem.seconds[kind, part].sum() if part else 0.0
            self.tokens[group] = self.lengths[part].sum()
