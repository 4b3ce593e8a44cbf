"""FlexSP's blaster (arXiv 2412.01523, section 4.2): a step cut into micro-batches that a solver then groups one by one.

Sorted by length, so that a micro-batch holds similar sequences, and cut into consecutive chunks that balance tokens. Several
numbers of chunks are tried, and the micro-batches of a seed layout besides; the fastest sum wins.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hf_longctx.plan.groups.bounds import fluid_bound_s
from hf_longctx.plan.groups.cuts import consecutive_chunks
from hf_longctx.plan.groups.greedy import group_micro_batch
from hf_longctx.plan.groups.problem import Group, GroupingProblem, Layout

_LEAST_GAIN = 1e-9
# a micro-batch this close to its bound is done, and time below this share of an even one is not worth a second start
_PROVEN = 2e-3
_WORTHWHILE = 0.2


@dataclass(frozen=True, slots=True)
class GroupedMicroBatch:
    """Groups of one micro-batch; no grouping of the same sequences takes less than `bound_s`.

    is_fallback: these are the seed's groups, because the solver failed or neither beat them nor proved them in time.
    """

    groups: tuple[Group, ...]
    bound_s: float
    is_fallback: bool


@dataclass(frozen=True, slots=True)
class GroupedStep:
    """A layout and how many of its micro-batches are the seed's, unimproved and unproven."""

    layout: Layout
    num_fallbacks: int


# problem of one micro-batch, groups to beat, seconds allowed
MicroBatchSolver = Callable[[GroupingProblem, Sequence[Group], float], GroupedMicroBatch]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One micro-batch to solve: its own problem, the step's number of every sequence, its bound, and groups to beat.

    Without groups (in the numbers of its own problem) the fast planner is asked when the chunk's turn comes.
    """

    problem: GroupingProblem
    members: tuple[int, ...]
    bound_s: float
    seed: tuple[Group, ...] = ()

    @classmethod
    def of(cls, problem: GroupingProblem, members: Sequence[int], seed: Sequence[Group] = ()) -> _Chunk:
        """seed: in the step's numbers."""
        part = replace(
            problem,
            lengths=tuple(problem.lengths[i] for i in members),
            seconds=problem.seconds[:, np.array(members, dtype=np.int64)],
        )
        place = {i: position for position, i in enumerate(members)}
        groups = tuple((degree, tuple(place[i] for i in group)) for degree, group in seed if group)
        return cls(part, tuple(members), fluid_bound_s(part), groups)

    @classmethod
    def around(cls, problem: GroupingProblem, groups: Sequence[Group]) -> _Chunk:
        """The chunk of the sequences in these groups, which are to beat."""
        return cls.of(problem, sorted(i for _, part in groups for i in part), groups)

    def solve(self, solver: MicroBatchSolver, time_limit_s: float) -> GroupedMicroBatch | None:
        """The solver's groups in the step's numbers; None where nobody finds groups for these sequences."""
        seed = self.seed or tuple(group_micro_batch(self.problem))
        if not seed:
            return None
        solved = GroupedMicroBatch(seed, self.bound_s, is_fallback=True)
        if time_limit_s > 0:
            solved = solver(self.problem, seed, time_limit_s)
        return replace(solved, groups=tuple((degree, tuple(self.members[i] for i in group)) for degree, group in solved.groups))


def plan_by_chunks(
    problem: GroupingProblem, trials: int, time_limit_s: float, seed: Layout, solver: MicroBatchSolver
) -> GroupedStep:
    """The fastest layout that `solver` finds within the time for any of the cuts, never slower than `seed`.

    The time is shared evenly by the chunks that may still matter; what is left goes to the micro-batches of the winner that
    are not yet proven to be the best.
    """
    stop_s = time.perf_counter() + time_limit_s
    cuts = _cuts(problem, trials, seed)
    best = [GroupedMicroBatch(tuple(groups), 0.0, is_fallback=True) for groups in seed]
    best_s = problem.step_seconds(seed)
    for number, chunks in enumerate(cuts):
        waiting = sum(len(later) for later in cuts[number + 1 :] if _bound_s(later) < best_s)
        # the seed's own cut is finished in any case
        solved = _solve_cut(problem, chunks, solver, stop_s, waiting, best_s if number else math.inf)
        total_s = _total_s(problem, solved)
        if len(solved) == len(chunks) and (total_s < best_s * (1 - _LEAST_GAIN) or not number):
            best, best_s = solved, total_s
    best = _solve_again(problem, best, solver, stop_s, time_limit_s)
    return GroupedStep([list(found.groups) for found in best], sum(found.is_fallback for found in best))


def _solve_cut(
    problem: GroupingProblem, chunks: list[_Chunk], solver: MicroBatchSolver, stop_s: float, waiting: int, beat_s: float
) -> list[GroupedMicroBatch]:
    """The chunks solved one after the other, until they cannot be faster than `beat_s` any more; `waiting` chunks follow."""
    solved: list[GroupedMicroBatch] = []
    for position, chunk in enumerate(chunks):
        if _total_s(problem, solved) + _bound_s(chunks[position:]) >= beat_s:
            break
        share = len(chunks) - position + waiting
        found = chunk.solve(solver, (stop_s - time.perf_counter()) / share)
        if found is None:
            break
        solved.append(found)
    return solved


def _solve_again(
    problem: GroupingProblem, best: list[GroupedMicroBatch], solver: MicroBatchSolver, stop_s: float, time_limit_s: float
) -> list[GroupedMicroBatch]:
    """The micro-batches that are not proven to be the best, solved once more if enough time is left."""
    result = list(best)
    doubts = [m for m, found in enumerate(best) if problem.micro_batch_seconds(found.groups) > found.bound_s * (1 + _PROVEN)]
    for place, m in enumerate(doubts):
        share_s = (stop_s - time.perf_counter()) / (len(doubts) - place)
        if share_s <= _WORTHWHILE * time_limit_s / len(doubts):
            continue
        again = _Chunk.around(problem, best[m].groups).solve(solver, share_s)
        if again is not None:
            result[m] = replace(again, is_fallback=again.is_fallback and best[m].is_fallback)
    return result


def _total_s(problem: GroupingProblem, solved: list[GroupedMicroBatch]) -> float:
    return sum(problem.micro_batch_seconds(micro_batch.groups) for micro_batch in solved)


def _bound_s(chunks: Sequence[_Chunk]) -> float:
    return sum(chunk.bound_s for chunk in chunks)


def _cuts(problem: GroupingProblem, trials: int, seed: Layout) -> list[list[_Chunk]]:
    """The seed's micro-batches, then the blaster's chunks for `trials` numbers of them, the most promising first."""
    room = problem.num_ranks * problem.capacity
    order = sorted(range(len(problem.lengths)), key=lambda i: (-problem.lengths[i], i))
    lengths = [problem.lengths[i] for i in order]
    found: list[list[_Chunk]] = []
    for number in range(max(1, math.ceil(sum(lengths) / room)), len(lengths) + 1):
        if len(found) == trials:
            break
        ends = consecutive_chunks(lengths, number)
        parts = [order[start:end] for start, end in itertools.pairwise([0, *ends])]
        if len(parts) == number and all(sum(problem.lengths[i] for i in part) <= room for part in parts):
            found.append([_Chunk.of(problem, part) for part in parts])
    return [[_Chunk.around(problem, groups) for groups in seed], *sorted(found, key=_bound_s)]
