"""Sorted lengths cut into few consecutive runs: buckets for an integer program (FlexSP, arXiv 2412.01523, section 4.3)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_longctx.plan.core.arrays import FloatArray
from hf_longctx.plan.groups.problem import Group, GroupingProblem


def bucket_ends(lengths: Sequence[int], counts: Sequence[int], num_buckets: int) -> list[int]:
    """Ends of at most `num_buckets` consecutive runs with the fewest tokens added by rounding every length up to its run's last.

    lengths: ascending, without repeats; counts: sequences of each. Exact, by dynamic programming over the last run.
    """
    values, number = np.array(lengths, dtype=np.float64), len(lengths)
    if number <= num_buckets:
        return list(range(1, number + 1))
    sequences = np.concatenate([[0.0], np.cumsum(counts)])
    tokens = np.concatenate([[0.0], np.cumsum(values * np.array(counts))])
    # added[j, i]: what a run of items j to i (inclusive) adds
    added = values * (sequences[1:] - sequences[:-1, None]) - (tokens[1:] - tokens[:-1, None])
    added[np.tril_indices(number, -1)] = np.inf
    least, starts = added[0], []
    for _ in range(num_buckets - 1):
        # the runs before item j end at item j - 1
        totals = np.concatenate([[np.inf], least[:-1]])[:, None] + added
        starts.append(totals.argmin(axis=0))
        least = totals.min(axis=0)
    ends = [number]
    for start in reversed(starts):
        ends.append(int(start[ends[-1] - 1]))
    return ends[::-1]


@dataclass(frozen=True, slots=True, eq=False)
class LengthClasses:
    """Sequences of one length, or of nearby lengths treated as one.

    counts, tokens: of every class, from short to long. seconds[k]: what one sequence of a class adds to a group of the k-th
    degree. members: the sequences of a class, by number.
    """

    counts: NDArray[np.int64]
    tokens: FloatArray
    seconds: FloatArray
    members: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, problem: GroupingProblem, most: int, rounded_up: bool) -> LengthClasses:
        """At most `most` classes, each as dear as its dearest sequence if `rounded_up`, else as its cheapest.

        Groups that hold classes rounded up hold their sequences; what rules out classes rounded down rules out theirs.
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
    """Groups of real sequences for contents[g, j] sequences of class j in a group of degree index kinds[g].

    Long classes first; in a class the longest sequence goes to the group that has the most time left, and surplus places
    stay empty. Memory holds where classes are rounded up and contents fit; empty if ranks, memory or places
    do not suffice.
    """
    places = contents.astype(np.int64)
    planned = np.array(problem.group_s)[kinds] + (classes.seconds[kinds] * contents).sum(axis=1)
    members: list[list[int]] = [[] for _ in kinds]
    for j in range(len(classes.counts) - 1, -1, -1):
        for _ in range(int(places[:, j].sum() - classes.counts[j])):
            g = int(np.where(places[:, j] > 0, planned, -np.inf).argmax())
            places[g, j] -= 1
            planned[g] -= classes.seconds[kinds[g], j]
        for i in sorted(classes.members[j], key=lambda i: (-problem.lengths[i], i)):
            if not places[:, j].any():
                return ()
            g = int(np.where(places[:, j] > 0, planned, np.inf).argmin())
            places[g, j] -= 1
            planned[g] += problem.seconds[kinds[g], i] - classes.seconds[kinds[g], j]
            members[g].append(i)
    groups = tuple((problem.degrees[k], tuple(part)) for k, part in zip(kinds.tolist(), members, strict=True) if part)
    fits = sum(degree for degree, _ in groups) <= problem.num_ranks and all(problem.fits(group) for group in groups)
    return groups if fits else ()
