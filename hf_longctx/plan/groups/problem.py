"""States the grouping problem of one step: assign whole sequences to sequence groups of several degrees at least cost.

Every solver in this folder takes a `GroupingProblem` and returns a `Layout`. The cost of a layout is FlexSP's (arXiv
2412.01523, section 4): micro-batches run one after the other, and each takes as long as its slowest group. With replicated
parameters a step can only be faster, because then a rank waits for the other ranks of its group only.

Solvers stop at lower bounds on the seconds of a micro-batch ("fluid" bounds: sequences may be split freely over a pool of ranks),
and the plan's estimate reports them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hf_longctx.plan.core.settings import PlannerConfig
from hf_longctx.plan.core.types import FloatArray, GroupShape
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.cost.weight_traffic import whole_gathers

# (degree, sequences) of one group; a layout is a list of micro-batches, each a list of groups
Group = tuple[int, tuple[int, ...]]
Layout = list[list[Group]]
# a micro-batch as a range [start, stop) of the sequences sorted longest first
Piece = tuple[int, int]


@dataclass(frozen=True)
class GroupingProblem:
    """Whole sequences to assign to groups on `num_ranks` ranks."""

    lengths: tuple[int, ...]
    num_ranks: int
    # most tokens of a rank; a group of d ranks holds at most d * capacity
    capacity: int
    degrees: tuple[int, ...]
    # how groups of each degree share attention in this step
    shapes: Mapping[int, GroupShape]
    # seconds[k][i]: seconds that sequence i adds to a group of degrees[k] ranks
    seconds: FloatArray
    # fixed seconds of a group of each degree
    group_s: tuple[float, ...]
    # number of consecutive ranks that start and end micro-batches together (0: all ranks)
    block_ranks: int = 0
    # ranks take part in all micro-batches, but some may start the next one before others have finished
    overlaps: bool = False
    # seconds that every micro-batch adds to its groups', for gathers of sharded weights
    micro_batch_s: float = 0.0

    @property
    def num_alone(self) -> int:
        """Number of sequences that a group holds only if it has no others; these do not go to solvers."""
        room = self.capacity * self.degrees[-1]
        return sum(length > room for length in self.lengths)

    @property
    def nests(self) -> bool:
        """Whether ranks may change groups within a step without waiting for all other ranks."""
        return 0 < self.block_ranks < self.num_ranks

    @classmethod
    def build(cls, lengths: Sequence[int], costs: CostModel, config: PlannerConfig) -> GroupingProblem:
        """Builds the problem of one step; raises ValueError for the first sequence that fits no allowed group."""
        num_ranks = costs.cluster.num_ranks
        limit = config.room_tokens
        beside = " beside others" if limit > config.tokens_per_rank * config.degrees[-1] else ""
        for index, length in enumerate(lengths):
            if length < 1:
                raise ValueError(f"sequence {index} has {length} tokens; remove empty sequences before planning")
            if length > limit:
                raise ValueError(
                    f"sequence {index} has {length} tokens, but the largest group of {config.degrees[-1]} ranks holds "
                    f"{limit} ({config.tokens_per_rank} tokens per rank{beside}); allow a larger degree, raise tokens_per_rank, "
                    f"or truncate or split the sequence"
                )
        # one shape per degree and step: the cheapest for an even share of the tokens
        share = min(sum(lengths) / num_ranks, config.tokens_per_rank)
        block_ranks = 1 if costs.parameters == "replicated" else costs.shards
        documents = len(lengths) * share / max(1, sum(lengths))
        shapes = {degree: costs.best_shape(degree, degree * share, degree * documents) for degree in config.degrees}
        towers_s = costs.sequence_towers_s(len(lengths))
        return cls(
            lengths=tuple(lengths),
            num_ranks=num_ranks,
            capacity=config.tokens_per_rank,
            degrees=config.degrees,
            shapes=shapes,
            seconds=np.stack([costs.sequences_s(list(lengths), shape) + towers_s / shape.degree for shape in shapes.values()]),
            group_s=tuple(costs.group_s(shape) for shape in shapes.values()),
            block_ranks=block_ranks if config.nested and not config.one_micro_batch else 0,
            overlaps=0 < (costs.node_ranks or block_ranks) < num_ranks,
            micro_batch_s=whole_gathers(costs).least_s(),
        )

    def group_seconds(self, group: Group) -> float:
        """Seconds of one group; a group without sequences counts as free, since its ranks run dummy chunks on their own."""
        if not group[1]:
            return 0.0
        fixed_s, row = self._rows[group[0]]
        return fixed_s + sum(map(row.__getitem__, group[1]))

    @cached_property
    def _rows(self) -> dict[int, tuple[float, list[float]]]:
        """Fixed seconds of a group of every degree, and `seconds` as a list, from which single numbers are read faster."""
        return dict(zip(self.degrees, zip(self.group_s, self.seconds.tolist(), strict=True), strict=True))

    def micro_batch_seconds(self, groups: Sequence[Group]) -> float:
        """Seconds of one micro-batch without `micro_batch_s`, which are those of its slowest group."""
        return max((self.group_seconds(group) for group in groups), default=0.0)

    def step_seconds(self, layout: Layout) -> float:
        """Seconds of all micro-batches, run one after the other."""
        return sum(self.micro_batch_seconds(groups) for groups in layout) + self.micro_batch_s * len(layout)

    def longest_first(self) -> tuple[GroupingProblem, list[int]]:
        """Sorts the sequences longest first; returns the sorted problem and the original number of each sequence.

        Solvers break ties by sequence number, so on sorted sequences their result does not depend on the order of the input.
        """
        order = sorted(range(len(self.lengths)), key=lambda i: (-self.lengths[i], i))
        return self.subproblem(order), order

    def restricted(self, degrees: Sequence[int]) -> GroupingProblem:
        """Keeps only these degrees of the problem."""
        kept = [k for k, degree in enumerate(self.degrees) if degree in degrees]
        return replace(
            self,
            degrees=tuple(self.degrees[k] for k in kept),
            seconds=self.seconds[kept],
            group_s=tuple(self.group_s[k] for k in kept),
        )

    def subproblem(self, sequences: Sequence[int]) -> GroupingProblem:
        """Keeps only these sequences of the problem, numbered in this order."""
        chosen = list(sequences)
        return replace(self, lengths=tuple(self.lengths[i] for i in chosen), seconds=self.seconds[:, chosen])

    def fits(self, group: Group) -> bool:
        """Whether every rank of the group holds at most `capacity` tokens."""
        return sum(self.lengths[i] for i in group[1]) <= group[0] * self.capacity

    def lower_bound_s(self) -> float:
        """Lower bound on the seconds of any layout; cheap enough to compute in every step.

        It is the larger of two bounds. The first spreads the rank-seconds of all sequences, each at its cheapest degree, evenly
        over the ranks. The second takes the slowest micro-batch and adds the tokens that memory keeps out of it: at least the
        cheapest ones, spread evenly. To both it adds the fixed seconds of the fewest micro-batches that memory allows. Degrees at
        which a sequence would take longer than the slowest micro-batch are ruled out; the seconds of that micro-batch are chosen
        so that the larger bound is least. If ranks may change groups on their own (`nests`) or start before others have finished
        (`overlaps`), it adds only a rank's share of the fixed seconds, and the second bound is the longest sequence alone.
        """
        if not self.lengths:
            return 0.0
        degrees, lengths = np.array(self.degrees)[:, None], np.array(self.lengths, dtype=np.float64)
        fits = lengths <= degrees * self.capacity
        work = np.where(fits, self.seconds * degrees, np.inf).min(axis=0)
        longest_s = float(np.where(fits, self.seconds, np.inf).min(axis=0).max())
        room = float(self.capacity * self.num_ranks)
        fixed_s = min(self.group_s) + self.micro_batch_s
        spread_s = float(work.sum()) / self.num_ranks
        if self.nests or self.overlaps:
            return max(spread_s + fixed_s * sum(self.lengths) / room, longest_s + fixed_s)
        kept_out = _cheapest_work(work, lengths, sum(self.lengths) - room) / self.num_ranks
        slowest_s, works = self._works_within(fits)
        bounds_s = np.maximum(works / self.num_ranks, slowest_s - min(self.group_s) + kept_out)
        return float(bounds_s.min()) + max(1, math.ceil(sum(self.lengths) / room)) * fixed_s

    def _works_within(self, fits: NDArray[np.bool_]) -> tuple[FloatArray, FloatArray]:
        """Seconds that the slowest group may take, from the fewest on, and the least rank-seconds of all sequences within each.

        fits: whether a group of each degree holds each sequence [degree, sequence].
        """
        ends_s = np.where(fits, self.seconds + np.array(self.group_s)[:, None], np.inf)
        order = np.argsort(ends_s, axis=0, kind="stable")
        ends_s = np.take_along_axis(ends_s, order, axis=0)
        work = np.where(fits, self.seconds * np.array(self.degrees)[:, None], np.inf)
        # with more seconds, a sequence may have all degrees up to that row
        work = np.minimum.accumulate(np.take_along_axis(work, order, axis=0), axis=0)
        fewest_s, saved = float(ends_s[0].max()), work[:-1] - work[1:]
        later = (ends_s[1:] > fewest_s) & np.isfinite(ends_s[1:]) & (saved > 0)
        ordered = np.argsort(ends_s[1:][later], kind="stable")
        within_s = np.concatenate([[fewest_s], ends_s[1:][later][ordered]])
        at_first = float(np.where(ends_s <= fewest_s, work, np.inf).min(axis=0).sum())
        return within_s, at_first - np.concatenate([[0.0], np.cumsum(saved[later][ordered])])


def _cheapest_work(work: FloatArray, lengths: FloatArray, num_tokens: float) -> float:
    """The least work of any `num_tokens` tokens, fractions of sequences allowed."""
    order = np.argsort(work / lengths, kind="stable")
    tokens = np.cumsum(lengths[order])
    last = int(np.searchsorted(tokens, num_tokens))
    if num_tokens <= 0:
        return 0.0
    if last >= len(order):
        return float(work.sum())
    before = float(tokens[last - 1]) if last else 0.0
    fraction = (num_tokens - before) / lengths[order[last]]
    return float(work[order[:last]].sum() + fraction * work[order[last]])


# share by which rounding may put a finish time above its limit
_ROUNDING = 1e-12
# relative precision of the bound of one micro-batch, and of the bounds of many
_TOLERANCE, _CRUDE_TOLERANCE = 1e-9, 1e-3


def fluid_bound_s(problem: GroupingProblem) -> float:
    """Lower bound on the seconds of a micro-batch with all sequences; infinite if memory rules out a single micro-batch.

    A group of d ranks that ends within T seconds has d * (T - group_s) rank-seconds for its sequences. So a sequence needs at
    least work / (T - group_s) ranks, at the best degree among those that hold it and end in time. The bound is the smallest T
    at which these needs add up to no more than the ranks. It grows with every sequence and falls with every rank.
    """
    if not problem.lengths:
        return 0.0
    longest, tokens = max(problem.lengths), sum(problem.lengths)
    if longest > problem.degrees[-1] * problem.capacity or tokens > problem.num_ranks * problem.capacity:
        return math.inf
    return float(_bounds_s(problem, problem.group_s, [(0, len(problem.lengths))], problem.num_ranks, _TOLERANCE)[0])


def fluid_bounds_s(problem: GroupingProblem, pieces: Sequence[Piece], num_ranks: int) -> FloatArray:
    """Lower bounds on the seconds of many micro-batches, less tight than `fluid_bound_s`.

    Memory is not checked, all degrees have the smallest fixed cost, and each bound is found to a thousandth.
    """
    return _bounds_s(problem, (min(problem.group_s),) * len(problem.degrees), pieces, num_ranks, _CRUDE_TOLERANCE)


def _bounds_s(
    problem: GroupingProblem, group_s: Sequence[float], pieces: Sequence[Piece], num_ranks: int, tolerance: float
) -> FloatArray:
    work, fixed_s = least_work(problem), min(group_s)
    # from here on the least fixed cost is subtracted from all seconds
    extra_s = np.array(group_s)[:, None] - fixed_s
    ends_s = np.where(np.isfinite(work), problem.seconds + extra_s, np.inf)
    least = np.concatenate([[0.0], np.cumsum(work.min(axis=0))])
    earliest_s = ends_s.min(axis=0)
    bounds_s = np.empty(len(pieces))
    for index, (start, stop) in enumerate(pieces):
        low = max(float(earliest_s[start:stop].max()), float(least[stop] - least[start]) / num_ranks)
        measures = ends_s[:, start:stop], work[:, start:stop], extra_s
        high = _needed(low, *measures) / num_ranks
        # more time never needs more rank-seconds, so the answer lies between
        while high - low > tolerance * high:
            middle = (low + high) / 2
            low, high = (middle, high) if _needed(middle, *measures) > num_ranks * middle else (low, middle)
        bounds_s[index] = low + fixed_s
    return bounds_s


def least_work(problem: GroupingProblem) -> FloatArray:
    """Rank-seconds of every sequence at every degree [degree, sequence]; infinite if it does not fit even alone."""
    degrees = np.array(problem.degrees, dtype=np.float64)[:, None]
    fits = np.array(problem.lengths) <= degrees * problem.capacity
    return np.where(fits, problem.seconds * degrees, np.inf)


def _needed(limit_s: float, ends_s: FloatArray, work: FloatArray, extra_s: FloatArray) -> float:
    """Rank-seconds that sequences need, with their share of the groups' fixed cost, if all groups end within `limit_s`."""
    room_s = limit_s - extra_s
    # if the fixed cost leaves no time, only sequences without work end in time
    busy = work * np.divide(limit_s, room_s, out=np.ones_like(room_s), where=room_s > 0)
    return float(np.where(ends_s <= limit_s * (1 + _ROUNDING), busy, np.inf).min(axis=0).sum())
