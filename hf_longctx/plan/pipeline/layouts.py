"""Divides a stage's ranks into sequence groups, of one degree or of different degrees, and deals sequences to them.

Sequences go longest first, each to the group that would finish it first (Graham 1969, section 4: within 4/3 - 1/(3m) of the
optimum for m equal groups). Faster groups thus get more work, and a group never gets a sequence that is too long for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapreplace

import numpy as np
from numpy.typing import ArrayLike

from hf_longctx.plan.core.arrays import FloatArray, IntArray
from hf_longctx.plan.groups.placement import PlacedGroup, place_layout, with_idle_ranks
from hf_longctx.plan.pipeline.staged_step import StagedStep

# degrees of the groups of a stage, the largest first; ranks that they leave over are idle
StageLayout = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _LayoutSearch:
    """Constants of the search for layouts.

    few_ranks: most ranks for which layouts may have three different degrees; beyond it two, or there would be thousands of
    layouts. most_mixed: layouts of mixed degrees that are tried.
    """

    few_ranks: int = 16
    most_mixed: int = 12


# repeat the stages table of `recipes/bench/cpu/planner.py` when one of these changes
_LAYOUTS = _LayoutSearch()


def dealt_layouts(staged: StagedStep, members: Sequence[int]) -> Iterator[list[PlacedGroup]]:
    """Concurrent groups for these sequences, placed on the ranks of a stage, for each of the most promising layouts."""
    layouts = stage_layouts(staged.ranks_per_stage, staged.degrees)
    chosen = np.array(members, dtype=np.int64)
    seconds = {degree: each[chosen] for degree, each in staged.seconds.items()}
    for layout in promising(layouts, seconds, staged.lengths[chosen], staged.longest, _LAYOUTS.most_mixed):
        yield dealt_groups(staged, layout, members)


def dealt_groups(staged: StagedStep, layout: StageLayout, members: Sequence[int]) -> list[PlacedGroup]:
    """Deals sequences to the groups of a layout and places these on positions; groups without sequences become idle ranks.

    Raises ValueError for a sequence that no group can hold.
    """
    chosen = np.array(members, dtype=np.int64)
    seconds = [staged.seconds[degree][chosen] for degree in layout]
    dealt = deal_sequences(staged.lengths[chosen], seconds, [staged.longest[degree] for degree in layout])
    groups = [(degree, tuple(members[i] for i in part)) for degree, part in zip(layout, dealt, strict=True)]
    nodes, num_ranks = staged.costs.cluster.ranks_per_node, staged.ranks_per_stage
    placed = place_layout([groups], num_ranks, nodes, staged.config.node_aligned)
    return with_idle_ranks(placed, num_ranks, staged.block_ranks)[0]


def stage_layouts(num_ranks: int, degrees: Sequence[int]) -> list[StageLayout]:
    """All layouts of at most three different degrees (at most two for more than 16 ranks) in which no further group fits."""
    most = 3 if num_ranks <= _LAYOUTS.few_ranks else 2
    usable = [degree for degree in sorted(degrees, reverse=True) if degree <= num_ranks]
    return list(_layouts(num_ranks, usable, most)) if usable else []


def _layouts(num_ranks: int, degrees: Sequence[int], most: int) -> Iterator[StageLayout]:
    """Layouts of `num_ranks` ranks that use at most `most` of the degrees, which are given in descending order."""
    if not degrees or degrees[-1] > num_ranks:
        yield ()
        return
    if not most:
        return
    for place, degree in enumerate(degrees):
        for count in range(num_ranks // degree, 0, -1):
            for rest in _layouts(num_ranks - count * degree, degrees[place + 1 :], most - 1):
                # a degree that was passed over must not fit into what is left
                if num_ranks - count * degree - sum(rest) < degrees[-1]:
                    yield (*(degree,) * count, *rest)


def promising(
    layouts: Sequence[StageLayout], seconds: Mapping[int, FloatArray], lengths: IntArray, longest: Mapping[int, int], most: int
) -> list[StageLayout]:
    """Layouts that hold every sequence: all with one degree, and the `most` with mixed degrees whose lower bounds are least.

    seconds[d][i]: seconds of sequence i on a group of d ranks. longest[d]: the most tokens of one sequence on d ranks. The lower
    bound of a layout is the larger of two times: that of its slowest sequence, and that of all work spread evenly over its
    ranks, each sequence counted on the degree where it costs the fewest rank-seconds.
    """
    bounds: dict[StageLayout, float] = {}
    alone = {degree: np.where(lengths <= longest[degree], each, np.inf) for degree, each in seconds.items()}
    for layout in layouts:
        used = sorted(set(layout))
        longest_s = np.min([alone[degree] for degree in used], axis=0).max(initial=0.0)
        work = np.min([alone[degree] * degree for degree in used], axis=0).sum() / sum(layout)
        bounds[layout] = float(max(longest_s, work))
    held = [layout for layout in layouts if bounds[layout] < np.inf]
    mixed = sorted((layout for layout in held if len(set(layout)) > 1), key=lambda layout: (bounds[layout], layout))
    return [layout for layout in held if len(set(layout)) == 1] + mixed[:most]


def deal_sequences(
    lengths: Sequence[int] | IntArray,
    seconds: ArrayLike,
    longest: Sequence[int],
    capacity: Sequence[int] | None = None,
) -> tuple[tuple[int, ...], ...]:
    """Sequences of every group, longest first, dealt so that the slowest group finishes early.

    seconds[g][i]: seconds that sequence i adds to group g. longest[g]: the most tokens of one sequence that group g can run.
    capacity[g]: the most tokens of all its sequences (None: any number). Raises ValueError for a sequence without a place.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    seconds_GN = np.asarray(seconds, dtype=np.float64).reshape(len(longest), len(tokens))
    order = np.lexsort((np.arange(len(tokens)), -tokens)).tolist()
    room = list(capacity) if capacity is not None else [int(tokens.sum())] * len(longest)
    is_equal = len(set(longest)) == 1 and capacity is None and bool((seconds_GN == seconds_GN[:1]).all())
    if is_equal and (not len(tokens) or tokens.max() <= longest[0]):
        return _deal_equal(order, seconds_GN[0], len(longest))
    columns = seconds_GN.T.tolist()
    done_s = [0.0] * len(longest)
    taken: list[list[int]] = [[] for _ in longest]
    for i in order:
        length = int(tokens[i])
        fitting = [g for g, most in enumerate(longest) if length <= most and length <= room[g]]
        if not fitting:
            raise ValueError(
                f"sequence {i} has {length} tokens, but of {len(longest)} groups side by side none takes more than "
                f"{max(map(min, longest, room))}; allow larger groups or plan several micro-batches"
            )
        # ties go to the group that takes least time for the sequence: a larger one may lose time by sharing
        group = min(fitting, key=lambda g: (done_s[g] + columns[i][g], columns[i][g], g))
        done_s[group] += columns[i][group]
        room[group] -= length
        taken[group].append(i)
    return tuple(map(tuple, taken))


def _deal_equal(order: Sequence[int], seconds_N: FloatArray, num_groups: int) -> tuple[tuple[int, ...], ...]:
    """Deals sequences to equal groups; a heap finds the next group without comparing all of them."""
    taken: list[list[int]] = [[] for _ in range(num_groups)]
    heap = [(0.0, group) for group in range(num_groups)]
    seconds = seconds_N.tolist()
    for i in order:
        done_s, group = heap[0]
        taken[group].append(i)
        heapreplace(heap, (done_s + seconds[i], group))
    return tuple(map(tuple, taken))
