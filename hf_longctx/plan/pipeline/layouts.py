"""Lists the ways to divide a stage's ranks into sequence groups, of one degree or of different degrees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from hf_longctx.plan.core.arrays import FloatArray, IntArray

# degrees of the groups of a stage, the largest first; ranks that they leave over are idle
StageLayout = tuple[int, ...]

# most ranks for which layouts may have three different degrees; beyond it two, or there would be thousands of layouts
_FEW_RANKS = 16


def stage_layouts(num_ranks: int, degrees: Sequence[int]) -> list[StageLayout]:
    """All layouts of at most three different degrees (at most two for more than 16 ranks) in which no further group fits."""
    most = 3 if num_ranks <= _FEW_RANKS else 2
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
