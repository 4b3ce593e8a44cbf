"""Bound the seconds of a whole step by linear programs: tighter, and much slower, than `GroupingProblem.lower_bound_s`.

Benchmarks report this bound. It counts that the number of micro-batches is whole, that a micro-batch lasts as long as its slowest
group, and that whole sequences leave some time and memory of a group unused.

The longest micro-batches are looked at one by one, each with an interval for its seconds; all others are a mixture, whose ranks
never wait. In a node (these intervals, and a number of micro-batches), fractions of sequences go to the ranks that groups of a
degree have in a micro-batch, as a linear program. Only its prices of time, memory and ranks are used: what all sequences cost at
least at any prices is a bound (weak duality), however rough the program was. The node with the lowest bound is split until
there were enough programs or intervals are short (branch and bound).

Whole sequences: if shares x of a group sum up to at most 1, so do (ceil((k + 1) * x) - 1) / k, for every whole k >= 1, because
the sum of the numerators is whole and below k + 1.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hf_longctx.plan.core.types import FloatArray
from hf_longctx.plan.groups.flexsp import LengthClasses
from hf_longctx.plan.groups.problem import GroupingProblem
from hf_longctx.plan.solver import LinearProgram, SolverError, solve_linear_program


@dataclass(frozen=True, slots=True)
class _BoundSearch:
    """Constants of the search, chosen with `recipes/bench/cpu/planner.py` (table times).

    classes: most classes of lengths of a program; a few hundred lose hardly anything. longest: micro-batches that are looked at
    one by one. whole: values of k in the rule for whole sequences. width: intervals that are shorter, as a share of the bound,
    are not split. rounding: share by which rounding may put groups above their limits.
    """

    classes: int = 256
    longest: int = 2
    whole: tuple[int, ...] = (1, 2, 3, 4, 5)
    width: float = 1e-3
    rounding: float = 1e-9


_STEP_BOUND = _BoundSearch()


def step_bound_s(problem: GroupingProblem, known_s: float, most_nodes: int = 300) -> float:
    """Lower bound on the seconds of any layout, at least `lower_bound_s`.

    known_s: seconds of a layout that was found, which the bound does not exceed. most_nodes: number of linear programs, about.
    """
    quick_s = min(known_s, problem.lower_bound_s())
    if not problem.lengths or problem.nests or problem.overlaps:
        return quick_s
    classes = _mean_classes(problem)
    fewest = max(1, math.ceil(sum(problem.lengths) / (problem.capacity * problem.num_ranks)))
    nodes = [(quick_s, 0, _Node(fewest, True, ((0.0, known_s),)))]
    number = 0
    while number < most_nodes and nodes[0][0] < known_s and (parts := nodes[0][2].parts(nodes[0][0])):
        bound_s = heapq.heappop(nodes)[0]
        for part in parts:
            # numbers break ties
            number += 1
            own_s = min(known_s, max(bound_s, _bound_of_node_s(problem, classes, part, known_s)))
            heapq.heappush(nodes, (own_s, number, part))
    return nodes[0][0]


@dataclass(frozen=True, slots=True)
class _Node:
    """Layouts of `number` micro-batches (or more: `has_more`), the longest of which take seconds in these intervals."""

    number: int
    has_more: bool
    limits_s: tuple[tuple[float, float], ...]

    def parts(self, bound_s: float) -> list[_Node]:
        """Nodes that have all layouts of this one; none if its intervals are short."""
        if self.has_more:
            return [replace(self, has_more=False), replace(self, number=self.number + 1)]
        limits = list(self.limits_s)
        if len(limits) < min(self.number, _STEP_BOUND.longest):
            limits.append((0.0, limits[-1][1]))
        widths = [high - low for low, high in limits]
        place = int(np.argmax(widths))
        if widths[place] <= _STEP_BOUND.width * bound_s:
            return []
        low, high = limits[place]
        halves = [(low, (low + high) / 2), ((low + high) / 2, high)]
        split = [_descending([*limits[:place], half, *limits[place + 1 :]]) for half in halves]
        return [replace(self, limits_s=part) for part in split if all(low <= high for low, high in part)]


def _descending(limits: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The intervals without what lies above an earlier one or below a later one."""
    highs = itertools.accumulate((high for _, high in limits), min)
    lows = list(itertools.accumulate((low for low, _ in reversed(limits)), max))
    return tuple(zip(reversed(lows), highs, strict=True))


def _mean_classes(problem: GroupingProblem) -> LengthClasses:
    """Classes of similar lengths, with the mean tokens and seconds of their sequences."""
    classes = LengthClasses.of(problem, _STEP_BOUND.classes, rounded_up=False)
    members = [list(some) for some in classes.members]
    tokens, seconds = np.array(problem.lengths, dtype=np.float64), problem.seconds
    return replace(
        classes,
        tokens=np.array([tokens[some].mean() for some in members]),
        seconds=np.stack([seconds[:, some].mean(axis=1) for some in members], axis=1),
    )


def _bound_of_node_s(problem: GroupingProblem, classes: LengthClasses, node: _Node, known_s: float) -> float:
    """Lower bound on the seconds of a node's layouts; 0 if the solver fails."""
    of_classes = _Shares(problem, node, classes.tokens, classes.seconds)
    try:
        solved = solve_linear_program(of_classes.program(classes.counts, known_s))
    except SolverError:
        return 0.0
    of_sequences = _Shares(problem, node, np.array(problem.lengths, dtype=np.float64), problem.seconds)
    return of_sequences.priced_s(of_classes.prices(solved.duals)) if solved.has_values else 0.0


@dataclass(frozen=True, slots=True)
class _Prices:
    """Prices in seconds of the step: of a rank-second [pool], a rank [pool], and a rank by each rule [rule, degree, pool]."""

    time: FloatArray
    rank: FloatArray
    rule: FloatArray


@dataclass(frozen=True, eq=False)
class _Shares:
    """Shares of the pools of a node that sequences, or means of their classes, take.

    A pool is the ranks of one of the longest micro-batches, or of all others. Seconds are counted without the least fixed cost
    of a group, which every micro-batch adds. lengths, seconds: as in `GroupingProblem`.
    """

    problem: GroupingProblem
    node: _Node
    lengths: FloatArray
    seconds: FloatArray

    @cached_property
    def num_pools(self) -> int:
        return self.num_longest + (self.node.has_more or self.node.number > self.num_longest)

    @cached_property
    def num_longest(self) -> int:
        return len(self.node.limits_s)

    @cached_property
    def micro_batch_s(self) -> float:
        """Seconds that every micro-batch adds."""
        return min(self.problem.group_s) + self.problem.micro_batch_s

    @cached_property
    def degrees(self) -> FloatArray:
        return np.array(self.problem.degrees, dtype=np.float64)

    @cached_property
    def fixed_s(self) -> FloatArray:
        return np.array(self.problem.group_s) - min(self.problem.group_s)

    @cached_property
    def ends_s(self) -> FloatArray:
        """Least and most seconds of each of the longest micro-batches [2, pool]."""
        return np.maximum(0.0, np.array(self.node.limits_s).T - self.micro_batch_s)

    @cached_property
    def rooms_s(self) -> FloatArray:
        """Most seconds of the sequences of a group [degree, pool]."""
        most_s = self.ends_s[1][np.minimum(np.arange(self.num_pools), self.num_longest - 1)]
        rooms_s: FloatArray = np.maximum(0.0, most_s - self.fixed_s[:, None])
        return rooms_s

    @cached_property
    def work(self) -> FloatArray:
        """Rank-seconds of a sequence [degree, sequence]."""
        work: FloatArray = self.seconds * self.degrees[:, None]
        return work

    @cached_property
    def is_allowed(self) -> NDArray[np.bool_]:
        """Whether a group may hold a sequence [degree, pool, sequence]."""
        fits = self.lengths <= self.degrees[:, None] * self.problem.capacity
        in_time = self.seconds[:, None, :] <= self.rooms_s[:, :, None] * (1 + _STEP_BOUND.rounding)
        return fits[:, None, :] & in_time

    @cached_property
    def ranks(self) -> FloatArray:
        """Ranks that a sequence takes of a group by every rule, of which no group exceeds its own [rule, degree, pool, sequence].

        The rules are time and memory, each as it is and for each k of whole sequences.
        """
        time = self.seconds[:, None, :] / np.maximum(self.rooms_s, 1e-300)[:, :, None]
        room = np.broadcast_to((self.lengths / (self.degrees[:, None] * self.problem.capacity))[:, None, :], time.shape)
        shares = np.stack([time, room])
        whole = [np.maximum(0.0, np.ceil((k + 1) * shares - 2 * k * _STEP_BOUND.rounding) - 1) / k for k in _STEP_BOUND.whole]
        taken: FloatArray = np.concatenate([shares, *whole]) * self.degrees[:, None, None]
        return np.where(self.is_allowed, taken, 0.0)

    def program(self, counts: NDArray[np.int64], most_s: float) -> LinearProgram:
        """The program of the fewest seconds.

        Columns: sequences in groups, ranks of groups, seconds of the longest micro-batches, number of micro-batches, and
        sequences left out, each for `most_s`. Rows: sequences, time of the longest, ranks of pools, and rules.
        """
        num_ranks, num_pools, num_longest = float(self.problem.num_ranks), self.num_pools, self.num_longest
        num_rules, num_degrees, _, num_classes = self.ranks.shape
        degree, pool, member = np.nonzero(self.is_allowed)
        ranks = len(degree) + np.arange(num_degrees * num_pools)
        longest = ranks[-1] + 1 + np.arange(num_longest)
        number = int(longest[-1]) + 1
        left_out = number + 1 + np.arange(num_classes)
        column = np.zeros(self.is_allowed.shape, dtype=np.int64)
        column[self.is_allowed] = np.arange(len(degree))
        time_row, rank_row = num_classes, num_classes + num_longest
        rule_row = rank_row + num_pools
        rule = np.nonzero(self.ranks)
        of_degree, of_pool = np.divmod(np.arange(num_degrees * num_pools), num_pools)
        in_longest, for_longest = pool < num_longest, of_pool < num_longest
        rules = np.arange(num_rules * num_degrees * num_pools)
        entries: list[tuple[NDArray[np.int64], NDArray[np.int64], FloatArray | float]] = [
            (member, np.arange(len(member)), 1.0),
            (np.arange(num_classes), left_out, 1.0),
            (time_row + pool[in_longest], np.flatnonzero(in_longest), self.work[degree, member][in_longest]),
            (time_row + of_pool[for_longest], ranks[for_longest], self.fixed_s[of_degree][for_longest]),
            (time_row + np.arange(num_longest), longest, -num_ranks),
            (rank_row + of_pool, ranks, 1.0),
            (rule_row + np.ravel_multi_index(rule[:3], self.ranks.shape[:3]), column[rule[1:]], self.ranks[rule]),
            (rule_row + rules, ranks[rules % len(ranks)], -1.0),
        ]
        rank_limits = np.full(num_pools, num_ranks)
        if num_pools > num_longest:
            entries.append((np.array([rank_row + num_longest]), np.array([number]), -num_ranks))
            rank_limits[-1] *= -num_longest
        costs, lower, upper = np.zeros(left_out[-1] + 1), np.zeros(left_out[-1] + 1), np.full(left_out[-1] + 1, np.inf)
        costs[: len(degree)] = np.where(in_longest, 0.0, self.work[degree, member] / num_ranks)
        costs[ranks] = np.where(for_longest, 0.0, self.fixed_s[of_degree] / num_ranks)
        costs[longest], lower[longest], upper[longest] = 1.0, self.ends_s[0], self.ends_s[1]
        costs[number], lower[number], costs[left_out] = self.micro_batch_s, self.node.number, most_s
        upper[number] = np.inf if self.node.has_more else self.node.number
        return LinearProgram(
            costs,
            lower,
            upper,
            np.concatenate([rows for rows, _, _ in entries]),
            np.concatenate([columns for _, columns, _ in entries]),
            np.concatenate([np.broadcast_to(values, rows.shape) for rows, _, values in entries]),
            np.concatenate([counts, np.full(num_longest + num_pools + len(rules), -np.inf)]),
            np.concatenate([np.full(num_classes, np.inf), np.zeros(num_longest), rank_limits, np.zeros(len(rules))]),
        )

    def prices(self, duals: FloatArray) -> _Prices:
        """Prices that the duals of `program` give."""
        prices = np.maximum(0.0, -duals[len(self.lengths) :])
        time, rank, rule = np.split(prices, np.cumsum([self.num_longest, self.num_pools]))
        mixed = np.full(self.num_pools - self.num_longest, 1 / self.problem.num_ranks)
        return _Prices(np.concatenate([time, mixed]), rank, rule.reshape(self.ranks.shape[:3]))

    def priced_s(self, prices: _Prices) -> float:
        """Lower bound on the seconds of the node's layouts that any prices prove; infinite if a sequence fits nowhere."""
        num_ranks, num_longest = self.problem.num_ranks, self.num_longest
        rank = prices.rank.copy()
        if self.node.has_more:
            # one more micro-batch must not pay off
            rank[-1] = min(float(rank[-1]), self.micro_batch_s / num_ranks)
        # a rank is worth no more than it costs
        worth, costs = prices.rule.sum(axis=0), prices.time * self.fixed_s[:, None] + rank
        rule = prices.rule * np.minimum(1.0, np.divide(costs, worth, out=np.ones_like(costs), where=worth > 0))
        each_s = prices.time[:, None] * self.work[:, None, :] + (rule[..., None] * self.ranks).sum(axis=0)
        sequences_s = float(np.where(self.is_allowed, each_s, np.inf).min(axis=(0, 1)).sum())
        left = 1 - num_ranks * prices.time[:num_longest]
        longest_s = float((left * np.where(left > 0, self.ends_s[0], self.ends_s[1])).sum())
        pools = np.array([1.0] * num_longest + [float(self.node.number - num_longest)] * (self.num_pools - num_longest))
        return self.node.number * self.micro_batch_s + longest_s + sequences_s - num_ranks * float(rank @ pools)
