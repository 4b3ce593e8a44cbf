"""The fast planner: sort, cut into micro-batches, group each one, then improve the step by small moves.

Cuts come from `cuts.py`. Every micro-batch is grouped by bisection on its makespan between a bound that no grouping
beats and what runs of the sorted sequences reach (`consecutive.py`), with vector packing by many rules as the test of a makespan
(`vector_packing.py`). The cuts whose bounds promise most are grouped, all their micro-batches at once; the best layouts go
through `local_search.py`. Everything is counted, not timed: equal lengths give equal plans on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hf_longctx.plan.chunks.packing import MAX_CAPACITY, pack_sequences
from hf_longctx.plan.core.arrays import IntArray
from hf_longctx.plan.groups.backfill import backfill
from hf_longctx.plan.groups.bounds import fluid_bounds_s, least_work
from hf_longctx.plan.groups.consecutive import group_runs
from hf_longctx.plan.groups.cuts import candidate_cuts, expected_s
from hf_longctx.plan.groups.local_search import improve
from hf_longctx.plan.groups.problem import Group, GroupingProblem, Layout, Piece
from hf_longctx.plan.groups.vector_packing import Packed, Rule, Trial, pack_trials

# so many of all cuts, and of the cuts by tokens, are grouped: those that promise most
_MAX_CUTS = 3
_MAX_TOKEN_CUTS = 2
# up to so many sequences all cuts are tried
_MAX_SEQUENCES_FOR_ALL_CUTS = 14
_SEQUENCES_PER_BIN = 16
_SEARCH_BUDGET = 1_000_000
_START_BUDGET = 100_000
_BACKFILL_PASSES = 1
_RUNS_TOLERANCE = 5e-2
_TOLERANCE = 2e-3
# micro-batches of more sequences are dealt out to pods, and from so many pods on packed by the plainest rule alone
_FEW_SEQUENCES = 96
_GROUPS_PER_POD = 8
_MANY_PODS = 4
_LARGEST_EQUAL_DEGREE = 16


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard a micro-batch is tried.

    factors: the first makespans, over the bound. rounds: how often makespans are tried, `limits` of them each time after the
    first. rare_rules: whether rules are tried that seldom win. kept_rules: the share that goes on after a round. starts: how
    many of the packings found are improved.
    """

    factors: tuple[float, ...]
    rounds: int
    limits: int
    rare_rules: bool
    kept_rules: float
    starts: int


_QUICK = Effort((1.015, 1.06, 1.3, 8.0), rounds=2, limits=3, rare_rules=False, kept_rules=0.25, starts=1)
_THOROUGH = Effort((1.0, 1.01, 1.03, 1.08, 1.2, 1.6, 4.0), rounds=3, limits=10, rare_rules=True, kept_rules=1.0, starts=12)


def plan_greedy(problem: GroupingProblem, trials: int, time_aware: bool = True) -> Layout:
    """A good layout of the step, never slower than `plan_static`'s best. Independent of the order of the sequences.

    `time_aware`: micro-batches are cut by time and cost too, not by tokens alone, and sequences move between them.
    """
    ordered, order = problem.longest_first()
    useful = useful_degrees(ordered)
    layouts = sorted(_first_layouts(useful, trials, time_aware), key=useful.step_seconds)
    start = backfill(useful, layouts[0], _group_all, _BACKFILL_PASSES) if time_aware else layouts[0]
    best, _ = improve(ordered, start, _SEARCH_BUDGET, across=time_aware)
    degrees = [d for d in ordered.degrees if _static_bound_s(ordered, d) < ordered.step_seconds(best)]
    if degrees:
        best = min(best, _plan_one_degree(ordered, trials, degrees), key=ordered.step_seconds)
    return _renumber(best, order)


def plan_static(problem: GroupingProblem, trials: int, degree: int = 0) -> Layout:
    """The best layout whose groups all have one degree, the given one or (0) any; what a fixed SP degree would do.

    Raises ValueError when the longest sequence does not fit in a group of `degree` ranks.
    """
    ordered, order = problem.longest_first()
    return _renumber(_plan_one_degree(ordered, trials, (degree,) if degree else ordered.degrees), order)


def overlapping_static_layouts(problem: GroupingProblem, trials: int, limit_s: float) -> list[Layout]:
    """`plan_static`'s layout of every degree that may be done within `limit_s` if no rank waits for another micro-batch."""
    longest, tokens = max(problem.lengths), sum(problem.lengths)
    layouts = []
    for k, degree in enumerate(problem.degrees):
        usable = problem.num_ranks // degree * degree
        # a rank's share of the fixed costs of the fewest groups
        spread_s = float(problem.seconds[k].sum()) * degree / usable + problem.group_s[k] * tokens / (problem.capacity * usable)
        if longest <= degree * problem.capacity and spread_s < limit_s:
            layouts.append(plan_static(problem, trials, degree))
    return layouts


def plan_one_micro_batch(problem: GroupingProblem, one_degree: bool = False) -> Layout:
    """A good layout with a single micro-batch; `one_degree`: with groups of one size.

    Raises ValueError if none is found that fits the ranks.
    """
    ordered, order = problem.longest_first()
    found = _one_micro_batch_of_one_degree(ordered) if one_degree else _one_micro_batch(ordered)
    if not found:
        raise ValueError(
            f"{sum(problem.lengths)} tokens in {len(problem.lengths)} sequences (the longest has {max(problem.lengths)}) fit no "
            f"single micro-batch on {problem.num_ranks} ranks of {problem.capacity} tokens each (tokens_per_rank)"
        )
    return _renumber([found] if one_degree else improve(ordered, [found], _SEARCH_BUDGET)[0], order)


def useful_degrees(problem: GroupingProblem) -> GroupingProblem:
    """The same problem without degrees that cost more rank-seconds than a larger one, for the sequences that they hold.

    Packing opens the smallest group that is fast enough, which is right only where larger ones cost more.
    """
    work, lengths = least_work(problem), np.array(problem.lengths)
    kept: list[int] = []
    for k in reversed(range(len(problem.degrees))):
        held = lengths <= problem.degrees[k] * problem.capacity
        larger = [float(work[other][held].sum()) for other in kept]
        if held.any() and all(float(work[k][held].sum()) < total for total in larger):
            kept.append(k)
    return problem.restricted([problem.degrees[k] for k in kept])


def group_micro_batch(problem: GroupingProblem) -> list[Group]:
    """The best groups found for all sequences in one micro-batch; empty where none was found. Takes some tens of ms."""
    ordered, order = problem.longest_first()
    return _renumber([_one_micro_batch(ordered)], order)[0]


def group_pieces(problem: GroupingProblem, pieces: Sequence[Piece], effort: Effort = _QUICK) -> list[list[Group]]:
    """The best groups found for every micro-batch (consecutive sequences, longest first); empty where none was found."""
    bounds_s = fluid_bounds_s(problem, pieces, problem.num_ranks)
    found = group_runs(problem, pieces, bounds_s, problem.num_ranks, _RUNS_TOLERANCE)
    searches = [
        _Search(problem, piece, groups, float(bound_s), effort)
        for piece, groups, bound_s in zip(pieces, found, bounds_s, strict=True)
    ]
    for turn in range(effort.rounds):
        attempts = [
            (search, rule, limit_s)
            for search in searches
            if search.low_s < search.high_s * (1 - _TOLERANCE)
            for limit_s in search.limits(turn)
            for rule in search.rules
        ]
        trials = [
            Trial(part, limit_s, problem.num_ranks // len(search.pods), rule)
            for search, rule, limit_s in attempts
            for part in search.pods
        ]
        packed = iter(pack_trials(problem, trials))
        for search, rule, limit_s in attempts:
            search.note(rule, limit_s, [next(packed) for _ in search.pods])
        for search in searches:
            search.narrow()
    return [search.best() for search in searches]


def _first_layouts(problem: GroupingProblem, trials: int, time_aware: bool) -> list[Layout]:
    """Layouts of the most promising cuts into micro-batches; of all cuts where sequences are few."""
    count = len(problem.lengths)
    if count <= _MAX_SEQUENCES_FOR_ALL_CUTS:
        return [_best_cut(problem), *_bins(problem)]
    cuts = candidate_cuts(problem, trials, problem.num_ranks, time_aware)
    pieces = list(dict.fromkeys(piece for cut in cuts for piece in cut))
    expected = dict(zip(pieces, expected_s(problem, pieces, problem.num_ranks), strict=True))
    # cuts by tokens come first; FlexSP's own are never left out
    promising = [sorted(some, key=lambda cut: sum(expected[piece] for piece in cut)) for some in (cuts[:trials], cuts)]
    cuts = list({tuple(cut): cut for cut in [*promising[0][:_MAX_TOKEN_CUTS], *promising[1][:_MAX_CUTS]]}.values())
    pieces = list(dict.fromkeys(piece for cut in cuts for piece in cut))
    groups = dict(zip(pieces, group_pieces(problem, pieces), strict=True))
    layouts = [[groups[piece] for piece in cut] for cut in cuts if all(groups[piece] for piece in cut)]
    if count <= _SEQUENCES_PER_BIN * len(cuts[0]):
        layouts += _bins(problem)
    # memory may refuse every group where tokens alone would fit: one sequence per micro-batch always works
    return layouts or [[[_alone(problem, i)] for i in range(count)]]


def _bins(problem: GroupingProblem) -> list[Layout]:
    """The layout of the fewest micro-batches that best fit finds, if they can be grouped: where each holds few sequences,
    runs of like lengths would waste much of its memory."""
    packing = pack_sequences(problem.lengths, min(problem.capacity * problem.num_ranks, MAX_CAPACITY))
    order = packing.order.tolist()
    found = group_pieces(problem.part(order), list(pairwise(packing.offsets.tolist())))
    return [_renumber(found, order)] if all(found) else []


def _one_micro_batch(problem: GroupingProblem) -> list[Group]:
    """The best groups for all sequences that thorough search finds, never behind groups of one degree; empty if it finds none."""
    found = [group_pieces(problem, [(0, len(problem.lengths))], _THOROUGH)[0]]
    if same := _one_micro_batch_of_one_degree(problem):
        found += improve(problem, [same], _START_BUDGET)[0]
    return min(filter(None, found), key=problem.micro_batch_seconds, default=[])


def _one_micro_batch_of_one_degree(problem: GroupingProblem) -> list[Group]:
    piece = (0, len(problem.lengths))
    found = [_spread_one_degree(problem, [piece], degree)[0] for degree in problem.degrees]
    return min(filter(None, found), key=problem.micro_batch_seconds, default=[])


def _group_all(problem: GroupingProblem) -> list[Group]:
    return group_pieces(problem, [(0, len(problem.lengths))])[0]


def _alone(problem: GroupingProblem, i: int) -> Group:
    usable = [(degree, (i,)) for degree in problem.degrees if problem.lengths[i] <= degree * problem.capacity]
    return min(usable, key=problem.group_seconds)


def _best_cut(problem: GroupingProblem) -> Layout:
    """The cheapest cut into consecutive micro-batches, each grouped as well as we can, by dynamic programming over all cuts."""
    count = len(problem.lengths)
    pieces = [(start, stop) for stop in range(1, count + 1) for start in range(stop)]
    groups = dict(zip(pieces, group_pieces(problem, pieces), strict=True))
    best: list[tuple[float, Layout]] = [(0.0, [])]
    for stop in range(1, count + 1):
        options = []
        for start in range(stop):
            if groups[start, stop]:
                seconds, layout = best[start]
                options.append((seconds + problem.micro_batch_seconds(groups[start, stop]), [*layout, groups[start, stop]]))
        best.append(min(options, key=lambda option: option[0]))
    return best[count][1]


def _renumber(layout: Layout, order: Sequence[int]) -> Layout:
    return [[(degree, tuple(order[i] for i in part)) for degree, part in groups] for groups in layout]


class _Search:
    """Bisection on the makespan of one micro-batch: what was refused, what was reached, and which rules did best."""

    def __init__(self, problem: GroupingProblem, piece: Piece, runs: list[Group], low_s: float, effort: Effort) -> None:
        self.problem, self.effort, self.runs, self.low_s = problem, effort, runs, low_s
        self.high_s = problem.micro_batch_seconds(runs) if runs else np.inf
        self.pods = _pods(problem, piece)
        self.rules = _rules(problem, effort.rare_rules) if len(self.pods) < _MANY_PODS else [Rule()]
        self._best_of_rule = dict.fromkeys(self.rules, np.inf)
        self._best_of_limit: dict[float, float] = {}
        # different packings by their seconds
        self._reached: dict[float, list[Packed]] = {}

    def limits(self, turn: int) -> list[float]:
        """Makespans to try: from the bound on at first, later at equal distances."""
        if turn == 0 or self.high_s == np.inf:
            return [self.low_s * factor for factor in self.effort.factors if self.low_s * factor < self.high_s]
        step_s = (self.high_s - self.low_s) / (self.effort.limits + 1)
        return [self.low_s + step_s * place for place in range(1, self.effort.limits + 1)]

    def note(self, rule: Rule, limit_s: float, parts: list[Packed]) -> None:
        """Takes in how one rule did within one limit, in every pod."""
        seconds = max(part.makespan_s for part in parts)
        self._best_of_rule[rule] = min(seconds, self._best_of_rule[rule])
        self._best_of_limit[limit_s] = min(seconds, self._best_of_limit.get(limit_s, np.inf))
        if seconds < np.inf:
            self.high_s = min(self.high_s, seconds)
            self._reached.setdefault(seconds, parts)

    def narrow(self) -> None:
        """Ends a round: limits that no rule kept count as refused, and the better rules go on once one got anywhere."""
        refused = [limit_s for limit_s, best in self._best_of_limit.items() if best == np.inf and limit_s < self.high_s]
        self.low_s = max([self.low_s, *refused])
        if self._reached:
            kept = math.ceil(self.effort.kept_rules * len(self.rules))
            self.rules = sorted(self.rules, key=self._best_of_rule.__getitem__)[:kept]

    def best(self) -> list[Group]:
        """The best groups, after a short search from each of the fastest packings."""
        packings = [self._reached[seconds] for seconds in sorted(self._reached)[: self.effort.starts]]
        starts = [[group for part in parts for group in part.groups(self.problem)] for parts in packings]
        if self.runs:
            starts.append(self.runs)
        if self.effort.starts > 1:
            starts += [improve(self.problem, [start], _START_BUDGET)[0][0] for start in starts]
        return min(starts, key=self.problem.micro_batch_seconds, default=[])


def _rules(problem: GroupingProblem, rare: bool) -> list[Rule]:
    """Ways to place sequences."""
    weights = [(1.0, 1.0, 0.0), (0.0, 0.0, 1.0), *([(0.3, 0.3, 1.0)] if rare else [])]
    rules = [Rule(), Rule(0.0, 0.0, 1.0), *([Rule(larger=1)] if rare else [])]
    # equal groups of the smallest degree are nearly what the plain rule opens
    for k, degree in enumerate(problem.degrees):
        if (k or rare) and degree <= _LARGEST_EQUAL_DEGREE:
            rules += [Rule(*each, equal_degree=k) for each in weights]
    return rules


def _pods(problem: GroupingProblem, piece: Piece) -> list[IntArray]:
    """The sequences of a micro-batch, dealt out to equal shares of the ranks where there are very many of them.

    A share has room for several groups of the largest degree that the longest sequence may need.
    """
    start, stop = piece
    needed = next(d for k, d in enumerate(problem.degrees) if problem.lengths[start] <= d * problem.capacity)
    number = 1
    while (stop - start) > _FEW_SEQUENCES * number and problem.num_ranks % (2 * number) == 0:
        if problem.num_ranks // (2 * number) < _GROUPS_PER_POD * needed:
            break
        number *= 2
    places = np.arange(stop - start)
    # there and back again, so that every share gets as many long ones as another
    turn, place = divmod(places, number)
    dealt = np.where(turn % 2, number - 1 - place, place)
    return [start + places[dealt == pod] for pod in range(number)]


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
        cuts = candidate_cuts(problem, trials, problem.num_ranks // degree * degree, time_aware=True)
        pieces = list(dict.fromkeys(piece for cut in cuts for piece in cut))
        groups = dict(zip(pieces, _spread_one_degree(problem, pieces, degree), strict=True))
        candidates += [[groups[piece] for piece in cut] for cut in cuts if all(groups[piece] for piece in cut)]
        candidates.append(_fewest_groups(problem, degree))
    return min(candidates, key=problem.step_seconds)


def _fewest_groups(problem: GroupingProblem, degree: int) -> Layout:
    """As few groups of `degree` ranks as best fit finds, those that take equally long beside each other."""
    packing = pack_sequences(problem.lengths, min(degree * problem.capacity, MAX_CAPACITY))
    groups = [(degree, tuple(part)) for part in packing.bins()]
    groups.sort(key=problem.group_seconds, reverse=True)
    at_once = problem.num_ranks // degree
    return [groups[first : first + at_once] for first in range(0, len(groups), at_once)]


def _spread_one_degree(problem: GroupingProblem, pieces: Sequence[Piece], degree: int) -> list[list[Group]]:
    """Every micro-batch on groups of one degree, longest first into the group that then ends earliest; empty if it fits none."""
    k = problem.degrees.index(degree)
    total_s = float(problem.seconds[k].sum()) + problem.group_s[k]
    rule = Rule(time_weight=-1.0, room_weight=0.0, equal_degree=k, only_equal=True)
    trials = [Trial(np.arange(*piece), total_s, problem.num_ranks, rule) for piece in pieces]
    return [packed.groups(problem) for packed in pack_trials(problem, trials)]


def _static_bound_s(problem: GroupingProblem, degree: int) -> float:
    """No layout of groups of `degree` ranks is faster; infinite if a sequence fits none."""
    k = problem.degrees.index(degree)
    if max(problem.lengths) > degree * problem.capacity:
        return float("inf")
    usable = problem.num_ranks // degree * degree
    fewest = -(-sum(problem.lengths) // (problem.capacity * usable))
    return float(problem.seconds[k].sum()) * degree / usable + fewest * problem.group_s[k]
