"""Cut a step into micro-batches as FlexSP's blaster does (arXiv 2412.01523, section 4.2), and group each with a solver.

Shared by solvers "lp" (`price_and_round.py`) and "milp" (`milp.py`). Sequences are sorted by length, so that a micro-batch holds
similar ones, and cut into consecutive micro-batches with balanced tokens. Several numbers of micro-batches are tried, and also
the micro-batches of a seed layout; the cut with the least total time wins.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hf_longctx.plan.groups.bounds import fluid_bound_s
from hf_longctx.plan.groups.cuts import micro_batch_ends
from hf_longctx.plan.groups.greedy import group_micro_batch
from hf_longctx.plan.groups.problem import Group, GroupingProblem, Layout


@dataclass(frozen=True, slots=True)
class _TimeShares:
    """Constants that divide the time limit, chosen with `recipes/bench/cpu/planner.py` (table problems).

    least_gain: share of the seconds by which a layout must be faster to replace another. proven: a micro-batch this close to its
    bound is not solved again. worth_again: least time for solving a micro-batch again, as a share of an equal share.
    """

    least_gain: float = 1e-9
    proven: float = 2e-3
    worth_again: float = 0.2


_SHARES = _TimeShares()


@dataclass(frozen=True, slots=True)
class GroupedMicroBatch:
    """Groups of one micro-batch, and a lower bound on the seconds of any grouping of its sequences.

    is_fallback: the groups are those of the seed, because the solver failed, or neither beat nor proved them in time.
    """

    groups: tuple[Group, ...]
    bound_s: float
    is_fallback: bool


@dataclass(frozen=True, slots=True)
class GroupedStep:
    """A layout, and the number of its micro-batches that are taken from the seed without improvement or proof."""

    layout: Layout
    num_fallbacks: int


# arguments: problem of one micro-batch, groups to beat, time limit in seconds
MicroBatchSolver = Callable[[GroupingProblem, Sequence[Group], float], GroupedMicroBatch]


@dataclass(frozen=True, slots=True)
class _MicroBatch:
    """One micro-batch to solve.

    problem: the subproblem of its sequences. members: number of each of them in the step. seed: groups to beat, in numbers of
    the subproblem; if empty, the greedy planner makes them when the micro-batch is solved.
    """

    problem: GroupingProblem
    members: tuple[int, ...]
    bound_s: float
    seed: tuple[Group, ...] = ()

    @classmethod
    def of(cls, problem: GroupingProblem, members: Sequence[int], seed: Sequence[Group] = ()) -> _MicroBatch:
        """The micro-batch of these sequences; `seed` is in numbers of the step."""
        subproblem = replace(
            problem,
            lengths=tuple(problem.lengths[i] for i in members),
            seconds=problem.seconds[:, np.array(members, dtype=np.int64)],
        )
        number = {i: index for index, i in enumerate(members)}
        groups = tuple((degree, tuple(number[i] for i in group)) for degree, group in seed if group)
        return cls(subproblem, tuple(members), fluid_bound_s(subproblem), groups)

    @classmethod
    def around(cls, problem: GroupingProblem, groups: Sequence[Group]) -> _MicroBatch:
        """The micro-batch of the sequences in these groups, with the groups as its seed."""
        return cls.of(problem, sorted(i for _, members in groups for i in members), groups)

    def solve(self, solver: MicroBatchSolver, time_limit_s: float) -> GroupedMicroBatch | None:
        """The solver's groups in numbers of the step; None if neither solver nor greedy planner finds any."""
        seed = self.seed or tuple(group_micro_batch(self.problem))
        if not seed:
            return None
        solved = GroupedMicroBatch(seed, self.bound_s, is_fallback=True)
        if time_limit_s > 0:
            solved = solver(self.problem, seed, time_limit_s)
        return replace(solved, groups=tuple((degree, tuple(self.members[i] for i in group)) for degree, group in solved.groups))


def plan_by_micro_batches(
    problem: GroupingProblem, trials: int, time_limit_s: float, seed: Layout, solver: MicroBatchSolver
) -> GroupedStep:
    """The fastest layout that `solver` finds in time for any of the cuts, never slower than `seed`.

    The time is shared evenly by the micro-batches of cuts that may still win. Time that is left goes to micro-batches of the
    winning cut that are not yet proven optimal.
    """
    stop_s = time.perf_counter() + time_limit_s
    cuts = _cuts(problem, trials, seed)
    best = [GroupedMicroBatch(tuple(groups), 0.0, is_fallback=True) for groups in seed]
    best_s = problem.step_seconds(seed)
    for index, cut in enumerate(cuts):
        num_waiting = sum(len(later) for later in cuts[index + 1 :] if _bound_s(later) < best_s)
        # the first cut is the seed's, which is always finished
        solved = _solve_cut(problem, cut, solver, stop_s, num_waiting, best_s if index else math.inf)
        total_s = _total_s(problem, solved)
        if len(solved) == len(cut) and (total_s < best_s * (1 - _SHARES.least_gain) or not index):
            best, best_s = solved, total_s
    best = _solve_again(problem, best, solver, stop_s, time_limit_s)
    return GroupedStep([list(found.groups) for found in best], sum(found.is_fallback for found in best))


def _solve_cut(
    problem: GroupingProblem, cut: list[_MicroBatch], solver: MicroBatchSolver, stop_s: float, num_waiting: int, beat_s: float
) -> list[GroupedMicroBatch]:
    """Solve the micro-batches of a cut one by one until they can no longer be faster than `beat_s` seconds in total.

    num_waiting: number of micro-batches in later cuts that need time too.
    """
    solved: list[GroupedMicroBatch] = []
    for index, micro_batch in enumerate(cut):
        if _total_s(problem, solved) + _bound_s(cut[index:]) >= beat_s:
            break
        num_left = len(cut) - index + num_waiting
        found = micro_batch.solve(solver, (stop_s - time.perf_counter()) / num_left)
        if found is None:
            break
        solved.append(found)
    return solved


def _solve_again(
    problem: GroupingProblem, best: list[GroupedMicroBatch], solver: MicroBatchSolver, stop_s: float, time_limit_s: float
) -> list[GroupedMicroBatch]:
    """Solve the micro-batches that are not proven optimal once more, if enough time is left."""
    result = list(best)
    within = 1 + _SHARES.proven
    doubts = [m for m, found in enumerate(best) if problem.micro_batch_seconds(found.groups) > found.bound_s * within]
    for index, m in enumerate(doubts):
        share_s = (stop_s - time.perf_counter()) / (len(doubts) - index)
        if share_s <= _SHARES.worth_again * time_limit_s / len(doubts):
            continue
        again = _MicroBatch.around(problem, best[m].groups).solve(solver, share_s)
        if again is not None:
            result[m] = replace(again, is_fallback=again.is_fallback and best[m].is_fallback)
    return result


def _total_s(problem: GroupingProblem, solved: list[GroupedMicroBatch]) -> float:
    return sum(problem.micro_batch_seconds(micro_batch.groups) + problem.micro_batch_s for micro_batch in solved)


def _bound_s(cut: Sequence[_MicroBatch]) -> float:
    return sum(micro_batch.bound_s + micro_batch.problem.micro_batch_s for micro_batch in cut)


def _cuts(problem: GroupingProblem, trials: int, seed: Layout) -> list[list[_MicroBatch]]:
    """The micro-batches of the seed, then the blaster's cuts into `trials` numbers of micro-batches, most promising first."""
    room = problem.num_ranks * problem.capacity
    order = sorted(range(len(problem.lengths)), key=lambda i: (-problem.lengths[i], i))
    lengths = [problem.lengths[i] for i in order]
    found: list[list[_MicroBatch]] = []
    for number in range(max(1, math.ceil(sum(lengths) / room)), len(lengths) + 1):
        if len(found) == trials:
            break
        ends = micro_batch_ends(lengths, number)
        cut = [order[start:end] for start, end in itertools.pairwise([0, *ends])]
        if len(cut) == number and all(sum(problem.lengths[i] for i in members) <= room for members in cut):
            found.append([_MicroBatch.of(problem, members) for members in cut])
    return [[_MicroBatch.around(problem, groups) for groups in seed], *sorted(found, key=_bound_s)]
