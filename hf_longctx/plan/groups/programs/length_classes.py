"""Combine sequences of similar length into few classes, the buckets of FlexSP's program (arXiv 2412.01523, section 4.3).

Integer programs count sequences per class instead of naming each; `draw_groups` turns their answer back into real sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_longctx.plan.core.arrays import FloatArray
from hf_longctx.plan.groups.problem import Group, GroupingProblem


def bucket_ends(lengths: Sequence[int], counts: Sequence[int], num_buckets: int) -> list[int]:
    """Ends of at most `num_buckets` buckets of consecutive lengths that minimize the tokens added by rounding up.

    Every length is rounded up to the largest of its bucket. lengths: ascending, without repeats; counts: number of sequences of
    each length. Exact, by dynamic programming over the last bucket.
    """
    values, number = np.array(lengths, dtype=np.float64), len(lengths)
    if number <= num_buckets:
        return list(range(1, number + 1))
    sequences = np.concatenate([[0.0], np.cumsum(counts)])
    tokens = np.concatenate([[0.0], np.cumsum(values * np.array(counts))])
    # added[j, i]: tokens added by a bucket of lengths j to i (inclusive)
    added = values * (sequences[1:] - sequences[:-1, None]) - (tokens[1:] - tokens[:-1, None])
    added[np.tril_indices(number, -1)] = np.inf
    least, starts = added[0], []
    for _ in range(num_buckets - 1):
        # the buckets before a bucket that starts at length j end at length j - 1
        totals = np.concatenate([[np.inf], least[:-1]])[:, None] + added
        starts.append(totals.argmin(axis=0))
        least = totals.min(axis=0)
    ends = [number]
    for start in reversed(starts):
        ends.append(int(start[ends[-1] - 1]))
    return ends[::-1]


@dataclass(frozen=True, slots=True, eq=False)
class LengthClasses:
    """Classes of sequences with one length, or with similar lengths treated as one, from short to long.

    counts, tokens: number of sequences, and tokens of one sequence, of every class. seconds[k]: seconds that one sequence of
    every class adds to a group of the k-th degree. members: the numbers of the sequences of every class.
    """

    counts: NDArray[np.int64]
    tokens: FloatArray
    seconds: FloatArray
    members: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, problem: GroupingProblem, most: int, rounded_up: bool) -> LengthClasses:
        """At most `most` classes; each takes tokens and seconds of its largest sequence if `rounded_up`, else of its smallest.

        Groups that hold classes rounded up also hold their sequences. A bound for classes rounded down is a bound for their
        sequences.
        """
        lengths = np.array(problem.lengths, dtype=np.int64)
        order = np.argsort(lengths, kind="stable")
        values, firsts, counts = np.unique(lengths[order], return_index=True, return_counts=True)
        ends = bucket_ends(values.tolist(), counts.tolist(), most)
        cuts = [0, *[int(firsts[end]) if end < len(firsts) else len(lengths) for end in ends]]
        runs = [order[start:stop] for start, stop in itertools.pairwise(cuts)]
        pick = np.max if rounded_up else np.min
        return cls(
            counts=np.array([len(run) for run in runs], dtype=np.int64),
            tokens=np.array([pick(lengths[run]) for run in runs], dtype=np.float64),
            seconds=np.stack([pick(problem.seconds[:, run], axis=1) for run in runs], axis=1),
            members=tuple(tuple(run.tolist()) for run in runs),
        )


def draw_groups(
    problem: GroupingProblem, classes: LengthClasses, kinds: NDArray[np.int64], contents: FloatArray
) -> tuple[Group, ...]:
    """Groups of real sequences, given contents[g, j] sequences of class j for group g of degree index kinds[g].

    Long classes come first; within a class the longest sequence goes to the group with the most time left. If the groups have
    more slots for a class than it has sequences, the slowest groups lose slots. Memory is kept if classes are rounded up and
    the contents fit. Empty if ranks, memory or slots do not suffice.
    """
    slots = contents.astype(np.int64)
    planned = np.array(problem.group_s)[kinds] + (classes.seconds[kinds] * contents).sum(axis=1)
    members: list[list[int]] = [[] for _ in kinds]
    for j in range(len(classes.counts) - 1, -1, -1):
        for _ in range(int(slots[:, j].sum() - classes.counts[j])):
            g = int(np.where(slots[:, j] > 0, planned, -np.inf).argmax())
            slots[g, j] -= 1
            planned[g] -= classes.seconds[kinds[g], j]
        for i in sorted(classes.members[j], key=lambda i: (-problem.lengths[i], i)):
            if not slots[:, j].any():
                return ()
            g = int(np.where(slots[:, j] > 0, planned, np.inf).argmin())
            slots[g, j] -= 1
            planned[g] += problem.seconds[kinds[g], i] - classes.seconds[kinds[g], j]
            members[g].append(i)
    groups = tuple((problem.degrees[k], tuple(some)) for k, some in zip(kinds.tolist(), members, strict=True) if some)
    fits = sum(degree for degree, _ in groups) <= problem.num_ranks and all(problem.fits(group) for group in groups)
    return groups if fits else ()
