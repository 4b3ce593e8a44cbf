"""Solver "greedy": plans a step in milliseconds by sorting, cutting, grouping every micro-batch, and then small moves.

The other solvers start from its layout. Cuts come from `cuts.py`; the most promising ones are grouped, all their micro-batches at
once. A micro-batch is grouped by bisection on its makespan, between the fluid bound (`problem.py`) and the makespan of groups of
consecutive sequences. A makespan is feasible if vector packing by one of many rules succeeds (`packing.py`). The best layout is
improved by `backfill.py` and `local_search.py`. Searches end by counts, never by time, so that equal lengths give equal plans on
every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from hf_longctx.plan.core.types import IntArray
from hf_longctx.plan.groups.backfill import backfill
from hf_longctx.plan.groups.best_fit import MAX_CAPACITY, pack_sequences
from hf_longctx.plan.groups.cuts import candidate_cuts, expected_s
from hf_longctx.plan.groups.local_search import improve
from hf_longctx.plan.groups.packing import JointPacking, Packed, Rule, Trial, group_runs, one_fewer_s, pack_trials
from hf_longctx.plan.groups.problem import Group, GroupingProblem, Layout, Piece, fluid_bounds_s, least_work


@dataclass(frozen=True, slots=True)
class _GreedySearch:
    """Constants of the search, chosen with `recipes/bench/cpu/planner.py` (tables times and problems).

    Large micro-batches are split into pods, equal shares of ranks and sequences.
    """

    # most cuts that are grouped, of all and of those by tokens
    most_cuts: int = 3
    most_token_cuts: int = 2
    # most sequences for which all cuts are tried
    all_cuts_sequences: int = 14
    # most sequences per micro-batch for which best-fit bins are tried as well
    bin_sequences: int = 16
    # matrix entries that local search may read, for a step and for one packing of a micro-batch
    step_budget: int = 1_000_000
    start_budget: int = 100_000
    # times that every micro-batch gives its sequences to others
    backfill_passes: int = 1
    # with at least this many sequences in a step and in a micro-batch, and `joint_pairs` pairs of a sequence and a rank,
    # all micro-batches are packed at once
    joint_sequences: tuple[int, int] = (400, 16)
    # in steps of fewer sequences that got no fewer micro-batches, one cut is grouped, too
    joint_alone: int = 640
    joint_pairs: int = 12_800
    # one micro-batch fewer is packed, too, if it leaves at most this share of memory full
    joint_fullness: float = 0.95
    # cuts whose expected seconds are tried as limits
    joint_cuts: int = 2
    # relative precision of the makespan of consecutive groups, and of the bisection
    runs_tolerance: float = 5e-2
    tolerance: float = 2e-3
    # least sequences of a pod
    pod_sequences: int = 96
    # groups of the largest degree needed for which a pod has room
    pod_groups: int = 8
    # number of pods from which only the plainest rule is tried
    many_pods: int = 4
    # largest degree of rules that open equal groups
    largest_equal_degree: int = 16


_GREEDY = _GreedySearch()


@dataclass(frozen=True, slots=True)
class Effort:
    """Amount of work to group one micro-batch."""

    # the first makespans to try, as multiples of the bound
    factors: tuple[float, ...]
    # times that makespans are tried, `limits` of them in each iteration after the first
    iterations: int
    limits: int
    # also try rules that seldom win
    rare_rules: bool
    # share of the rules that stays after an iteration
    kept_rules: float
    # number of packings that local search improves
    starts: int


# effort for each micro-batch of a step, and for a single micro-batch; chosen with `recipes/bench/cpu/planner.py`
_QUICK = Effort((1.015, 1.06, 1.3, 8.0), iterations=2, limits=3, rare_rules=False, kept_rules=0.25, starts=1)
_THOROUGH = Effort((1.0, 1.01, 1.03, 1.08, 1.2, 1.6, 4.0), iterations=3, limits=10, rare_rules=True, kept_rules=1.0, starts=12)


def plan_greedy(problem: GroupingProblem, trials: int, time_aware: bool = True) -> Layout:
    """A good layout of the step, never slower than that of `plan_static`. Independent of the order of the sequences.

    trials: numbers of micro-batches to try. time_aware: cut micro-batches by cost as well as by tokens, and let sequences move
    between them.
    """
    ordered, order = problem.longest_first()
    useful = useful_degrees(ordered)
    best, _ = improve(ordered, _start(useful, trials, time_aware), _GREEDY.step_budget, across=time_aware)
    degrees = [d for d in ordered.degrees if _static_bound_s(ordered, d) < ordered.step_seconds(best)]
    if degrees:
        best = min(best, _plan_one_degree(ordered, trials, degrees), key=ordered.step_seconds)
    return _renumber(best, order)


def plan_static(problem: GroupingProblem, trials: int, degree: int = 0) -> Layout:
    """The best layout whose groups all have the same degree, as with a fixed sequence-parallel degree (0: the best one).

    Raises ValueError if the longest sequence does not fit into a group of `degree` ranks.
    """
    ordered, order = problem.longest_first()
    return _renumber(_plan_one_degree(ordered, trials, (degree,) if degree else ordered.degrees), order)


def overlapping_static_layouts(problem: GroupingProblem, trials: int, limit_s: float) -> list[Layout]:
    """Layouts of `plan_static` for every degree that could end within `limit_s` if ranks did not wait between micro-batches."""
    longest, tokens = max(problem.lengths), sum(problem.lengths)
    layouts = []
    for k, degree in enumerate(problem.degrees):
        usable = problem.num_ranks // degree * degree
        # add a rank's share of the fixed costs of the fewest groups
        spread_s = float(problem.seconds[k].sum()) * degree / usable + problem.group_s[k] * tokens / (problem.capacity * usable)
        if longest <= degree * problem.capacity and spread_s < limit_s:
            layouts.append(plan_static(problem, trials, degree))
    return layouts


def plan_one_micro_batch(problem: GroupingProblem, one_degree: bool = False) -> Layout:
    """A good layout with a single micro-batch (one_degree: with groups of equal size); raises ValueError if none is found."""
    ordered, order = problem.longest_first()
    found = _one_micro_batch_of_one_degree(ordered) if one_degree else _one_micro_batch(ordered)
    if not found:
        raise ValueError(
            f"{sum(problem.lengths)} tokens in {len(problem.lengths)} sequences (the longest has {max(problem.lengths)}) do not "
            f"fit one micro-batch on {problem.num_ranks} ranks of {problem.capacity} tokens each; raise tokens_per_rank or use "
            f"fewer sequences per step"
        )
    return _renumber([found] if one_degree else improve(ordered, [found], _GREEDY.step_budget)[0], order)


def useful_degrees(problem: GroupingProblem) -> GroupingProblem:
    """This problem without degrees that need more rank-seconds than a larger degree, for the sequences that they can hold.

    Packing opens the smallest group that is fast enough, which is right only if larger ones cost more.
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
    """The best groups found for all sequences in one micro-batch; empty if none was found. Takes tens of milliseconds."""
    ordered, order = problem.longest_first()
    return _renumber([_one_micro_batch(ordered)], order)[0]


def group_pieces(problem: GroupingProblem, pieces: Sequence[Piece], effort: Effort = _QUICK) -> list[list[Group]]:
    """The best groups found for every micro-batch (a range of the sequences, longest first); empty if none was found."""
    bounds_s = fluid_bounds_s(problem, pieces, problem.num_ranks)
    found = group_runs(problem, pieces, bounds_s, problem.num_ranks, _GREEDY.runs_tolerance)
    searches = [
        _Search(problem, piece, groups, float(bound_s), effort)
        for piece, groups, bound_s in zip(pieces, found, bounds_s, strict=True)
    ]
    for iteration in range(effort.iterations):
        attempts = [
            (search, rule, limit_s)
            for search in searches
            if search.low_s < search.high_s * (1 - _GREEDY.tolerance)
            for limit_s in search.limits(iteration)
            for rule in search.rules
        ]
        trials = [
            Trial(pod, limit_s, problem.num_ranks // len(search.pods), rule)
            for search, rule, limit_s in attempts
            for pod in search.pods
        ]
        packed = iter(pack_trials(problem, trials))
        for search, rule, limit_s in attempts:
            search.note(rule, limit_s, [next(packed) for _ in search.pods])
        for search in searches:
            search.narrow()
    return [search.best() for search in searches]


def _start(problem: GroupingProblem, trials: int, time_aware: bool) -> Layout:
    """The layout from which moves of single sequences start."""
    cuts = _PromisingCuts.of(problem, trials, time_aware) if len(problem.lengths) > _GREEDY.all_cuts_sequences else None
    if cuts is None or not time_aware:
        layouts = [_best_cut(problem), *_bins(problem)] if cuts is None else _grouped(problem, cuts)
        start = min(layouts, key=problem.step_seconds)
        return backfill(problem, start, _group_all, _GREEDY.backfill_passes) if time_aware else start
    count, (in_step, in_micro_batch) = len(problem.lengths), _GREEDY.joint_sequences
    is_large = count >= max(in_step, in_micro_batch * cuts.num_micro_batches, _GREEDY.joint_pairs / problem.num_ranks)
    packed = None
    if cuts.num_micro_batches > 1 and is_large:
        starts_s = [cuts.expected_s]
        if sum(problem.lengths) < _GREEDY.joint_fullness * problem.capacity * problem.num_ranks * (cuts.num_micro_batches - 1):
            starts_s.append([one_fewer_s(problem, cuts.expected_s[0]).tolist()])
        packed = JointPacking(problem).best(starts_s)
        if packed is not None and (count >= _GREEDY.joint_alone or len(packed) < cuts.num_micro_batches):
            return packed
    start = min(_grouped(problem, cuts if packed is None else replace(cuts, cuts=cuts.cuts[:1])), key=problem.step_seconds)
    start = backfill(problem, start, _group_all, _GREEDY.backfill_passes)
    if packed is not None:
        return min(packed, start, key=problem.step_seconds)
    if cuts.num_micro_batches == 1:
        return start
    return JointPacking(problem).first(cuts.expected_s, problem.step_seconds(start)) or start


@dataclass(frozen=True, slots=True)
class _PromisingCuts:
    """The most promising cuts of a step into micro-batches."""

    # cuts that are worth grouping
    cuts: list[list[Piece]]
    # expected seconds of each micro-batch, without `micro_batch_s`, for any cuts, the most promising first
    expected_s: list[list[float]]
    # number of micro-batches of the most promising cut
    num_micro_batches: int

    @classmethod
    def of(cls, problem: GroupingProblem, trials: int, time_aware: bool) -> _PromisingCuts:
        cuts = candidate_cuts(problem, trials, problem.num_ranks, time_aware)
        pieces = list(dict.fromkeys(piece for cut in cuts for piece in cut))
        expected = dict(zip(pieces, expected_s(problem, pieces, problem.num_ranks).tolist(), strict=True))
        # the first `trials` cuts are FlexSP's, by tokens; the best of them are always kept
        by_tokens, by_any = (
            sorted(some, key=lambda cut: sum(expected[piece] for piece in cut)) for some in (cuts[:trials], cuts)
        )
        promising = [*by_tokens[: _GREEDY.most_token_cuts], *by_any[: _GREEDY.most_cuts]]
        return cls(
            list({tuple(cut): cut for cut in promising}.values()),
            [[expected[piece] - problem.micro_batch_s for piece in cut] for cut in by_any[: _GREEDY.joint_cuts]],
            len(by_any[0]),
        )


def _grouped(problem: GroupingProblem, promising: _PromisingCuts) -> list[Layout]:
    """Layouts of the cuts, and of bins where micro-batches hold few sequences; at least one."""
    count, cuts = len(problem.lengths), promising.cuts
    pieces = list(dict.fromkeys(piece for cut in cuts for piece in cut))
    groups = dict(zip(pieces, group_pieces(problem, pieces), strict=True))
    layouts = [[groups[piece] for piece in cut] for cut in cuts if all(groups[piece] for piece in cut)]
    if count <= _GREEDY.bin_sequences * len(cuts[0]):
        layouts += _bins(problem)
    # tokens may fit the ranks although no groups fit the memory; one sequence per micro-batch always works
    return layouts or [[[_alone(problem, i)] for i in range(count)]]


def _bins(problem: GroupingProblem) -> list[Layout]:
    """The layout of the fewest micro-batches that best fit finds, in a list that is empty if they cannot be grouped.

    If micro-batches hold few sequences, ranges of similar lengths would waste much of their memory.
    """
    packing = pack_sequences(problem.lengths, min(problem.capacity * problem.num_ranks, MAX_CAPACITY))
    order = packing.order.tolist()
    found = group_pieces(problem.subproblem(order), list(pairwise(packing.offsets.tolist())))
    return [_renumber(found, order)] if all(found) else []


def _one_micro_batch(problem: GroupingProblem) -> list[Group]:
    """The best groups that a thorough search finds for all sequences, never slower than groups of one degree; empty if none."""
    found = [group_pieces(problem, [(0, len(problem.lengths))], _THOROUGH)[0]]
    if same := _one_micro_batch_of_one_degree(problem):
        found += improve(problem, [same], _GREEDY.start_budget)[0]
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
    """The layout of the cheapest cut into ranges of sequences, by dynamic programming; the quick search groups each range."""
    count = len(problem.lengths)
    pieces = [(start, stop) for stop in range(1, count + 1) for start in range(stop)]
    groups = dict(zip(pieces, group_pieces(problem, pieces), strict=True))
    best: list[tuple[float, Layout]] = [(0.0, [])]
    for stop in range(1, count + 1):
        options = []
        for start in range(stop):
            if groups[start, stop]:
                seconds, layout = best[start]
                micro_batch_s = problem.micro_batch_seconds(groups[start, stop]) + problem.micro_batch_s
                options.append((seconds + micro_batch_s, [*layout, groups[start, stop]]))
        best.append(min(options, key=lambda option: option[0]))
    return best[count][1]


def _renumber(layout: Layout, order: Sequence[int]) -> Layout:
    """The layout with sequence i called order[i]."""
    return [[(degree, tuple(order[i] for i in members)) for degree, members in groups] for groups in layout]


class _Search:
    """Bisection on the makespan of one micro-batch: makespans refused and reached so far, and the rules that did best."""

    def __init__(self, problem: GroupingProblem, piece: Piece, runs: list[Group], low_s: float, effort: Effort) -> None:
        self.problem, self.effort, self.runs, self.low_s = problem, effort, runs, low_s
        self.high_s = problem.micro_batch_seconds(runs) if runs else np.inf
        self.pods = _pods(problem, piece)
        self.rules = _rules(problem, effort.rare_rules) if len(self.pods) < _GREEDY.many_pods else [Rule()]
        self._best_of_rule = dict.fromkeys(self.rules, np.inf)
        self._best_of_limit: dict[float, float] = {}
        # makespan -> the packings, one for each pod, that reached it first
        self._reached: dict[float, list[Packed]] = {}

    def limits(self, iteration: int) -> list[float]:
        """Makespans to try: multiples of the bound at first, later values at equal distances in the remaining interval."""
        if iteration == 0 or self.high_s == np.inf:
            return [self.low_s * factor for factor in self.effort.factors if self.low_s * factor < self.high_s]
        distance_s = (self.high_s - self.low_s) / (self.effort.limits + 1)
        return [self.low_s + distance_s * index for index in range(1, self.effort.limits + 1)]

    def note(self, rule: Rule, limit_s: float, packings: list[Packed]) -> None:
        """Record the packings, one for each pod, that one rule found within one limit."""
        seconds = max(packed.makespan_s for packed in packings)
        self._best_of_rule[rule] = min(seconds, self._best_of_rule[rule])
        self._best_of_limit[limit_s] = min(seconds, self._best_of_limit.get(limit_s, np.inf))
        if seconds < np.inf:
            self.high_s = min(self.high_s, seconds)
            self._reached.setdefault(seconds, packings)

    def narrow(self) -> None:
        """End an iteration: raise the lower end to limits that no rule kept, and drop the worse rules once one has succeeded."""
        refused = [limit_s for limit_s, best in self._best_of_limit.items() if best == np.inf and limit_s < self.high_s]
        self.low_s = max([self.low_s, *refused])
        if self._reached:
            kept = math.ceil(self.effort.kept_rules * len(self.rules))
            self.rules = sorted(self.rules, key=self._best_of_rule.__getitem__)[:kept]

    def best(self) -> list[Group]:
        """The best groups, after a short local search from each of the fastest packings; empty if there are none."""
        fastest = [self._reached[seconds] for seconds in sorted(self._reached)[: self.effort.starts]]
        starts = [[group for packed in packings for group in packed.groups(self.problem)] for packings in fastest]
        if self.runs:
            starts.append(self.runs)
        if self.effort.starts > 1:
            starts += [improve(self.problem, [start], _GREEDY.start_budget)[0][0] for start in starts]
        return min(starts, key=self.problem.micro_batch_seconds, default=[])


def _rules(problem: GroupingProblem, rare: bool) -> list[Rule]:
    """Rules by which packings place sequences; `rare` adds those that seldom win."""
    weights = [(1.0, 1.0, 0.0), (0.0, 0.0, 1.0), *([(0.3, 0.3, 1.0)] if rare else [])]
    rules = [Rule(), Rule(0.0, 0.0, 1.0), *([Rule(larger=1)] if rare else [])]
    # equal groups of the smallest degree seldom win, because the plain rule opens nearly the same groups
    for k, degree in enumerate(problem.degrees):
        if (k or rare) and degree <= _GREEDY.largest_equal_degree:
            rules += [Rule(*each, equal_degree=k) for each in weights]
    return rules


def _pods(problem: GroupingProblem, piece: Piece) -> list[IntArray]:
    """The sequences of a micro-batch, split into pods (equal shares of the ranks) if there are very many of them.

    A pod has room for several groups of the degree that the longest sequence needs.
    """
    start, stop = piece
    needed = next(d for k, d in enumerate(problem.degrees) if problem.lengths[start] <= d * problem.capacity)
    number = 1
    while (stop - start) > _GREEDY.pod_sequences * number and problem.num_ranks % (2 * number) == 0:
        if problem.num_ranks // (2 * number) < _GREEDY.pod_groups * needed:
            break
        number *= 2
    indices = np.arange(stop - start)
    # deal out forwards and backwards in turn, so that every pod gets as many long sequences as another
    turn, position = divmod(indices, number)
    pod_of = np.where(turn % 2, number - 1 - position, position)
    return [start + indices[pod_of == pod] for pod in range(number)]


def _plan_one_degree(problem: GroupingProblem, trials: int, degrees: Sequence[int]) -> Layout:
    longest = max(problem.lengths)
    usable = [degree for degree in degrees if longest <= degree * problem.capacity]
    if not usable:
        raise ValueError(
            f"a sequence of {longest} tokens does not fit a group of {max(degrees)} ranks of {problem.capacity} tokens each; "
            f"raise static_degree or tokens_per_rank"
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
    """The fewest groups of `degree` ranks that best fit finds; groups that take equally long run in the same micro-batch."""
    packing = pack_sequences(problem.lengths, min(degree * problem.capacity, MAX_CAPACITY))
    groups = [(degree, tuple(members)) for members in packing.bins()]
    groups.sort(key=problem.group_seconds, reverse=True)
    at_once = problem.num_ranks // degree
    return [groups[first : first + at_once] for first in range(0, len(groups), at_once)]


def _spread_one_degree(problem: GroupingProblem, pieces: Sequence[Piece], degree: int) -> list[list[Group]]:
    """Groups of one degree for every micro-batch, longest first into the group that then ends earliest; empty if none fit."""
    k = problem.degrees.index(degree)
    total_s = float(problem.seconds[k].sum()) + problem.group_s[k]
    rule = Rule(time_weight=-1.0, room_weight=0.0, equal_degree=k, only_equal=True)
    trials = [Trial(np.arange(*piece), total_s, problem.num_ranks, rule) for piece in pieces]
    return [packed.groups(problem) for packed in pack_trials(problem, trials)]


def _static_bound_s(problem: GroupingProblem, degree: int) -> float:
    """Lower bound on the seconds of a layout with groups of `degree` ranks only; infinite if a sequence does not fit them."""
    k = problem.degrees.index(degree)
    if max(problem.lengths) > degree * problem.capacity:
        return float("inf")
    usable = problem.num_ranks // degree * degree
    fewest = -(-sum(problem.lengths) // (problem.capacity * usable))
    return float(problem.seconds[k].sum()) * degree / usable + fewest * (problem.group_s[k] + problem.micro_batch_s)
