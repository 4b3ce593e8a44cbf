"""Place the groups of a layout on ranks: consecutive positions for each group.

The planner calls this after a solver has found a layout. A group starts at a multiple of the largest power of two that divides
its degree; its blocks then lie where process groups for them exist. Groups that fit into a node are packed into nodes, the
largest first, as long as nodes have room for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hf_longctx.plan.groups.problem import Group, Layout


@dataclass(frozen=True, slots=True)
class PlacedGroup:
    """A group of sequences (`members`) on `degree` consecutive positions starting at `first`."""

    first: int
    degree: int
    members: tuple[int, ...]

    @property
    def positions(self) -> range:
        return range(self.first, self.first + self.degree)


PlacedLayout = list[list[PlacedGroup]]


def place_layout(layout: Layout, num_ranks: int, ranks_per_node: int, node_aligned: bool) -> PlacedLayout:
    """Place the groups of every micro-batch on consecutive positions; within nodes if `node_aligned` and if that is possible."""
    return [
        (_place_in_nodes(groups, num_ranks, ranks_per_node) if node_aligned else []) or _place_in_a_row(groups)
        for groups in layout
    ]


def place_alone(sequences: Sequence[int], degree: int, num_ranks: int, block_ranks: int) -> PlacedLayout:
    """Places groups of `degree` ranks with one sequence each: side by side, but never two on ranks that wait for one another.

    block_ranks: number of consecutive ranks that do so.
    """
    stride = -(-degree // block_ranks) * block_ranks
    # a start elsewhere has no process groups
    count = num_ranks // stride if stride % _alignment(degree) == 0 else 1
    places = [PlacedGroup(number % count * stride, degree, (i,)) for number, i in enumerate(sequences)]
    return [places[first : first + count] for first in range(0, len(places), count)]


def renumber(placed: PlacedLayout, numbers: Sequence[int]) -> PlacedLayout:
    """The layout with sequence i called numbers[i]."""
    return [[replace(group, members=tuple(numbers[i] for i in group.members)) for group in groups] for groups in placed]


def levels(groups: Sequence[PlacedGroup], num_ranks: int) -> PlacedLayout:
    """Make micro-batches of groups given in running order: each group goes into the first one after all groups of its ranks."""
    next_level = [0] * num_ranks
    result: PlacedLayout = []
    for group in groups:
        level = max(next_level[rank] for rank in group.positions)
        if level == len(result):
            result.append([])
        result[level].append(group)
        for rank in group.positions:
            next_level[rank] = level + 1
    return result


def with_idle_ranks(placed: PlacedLayout, num_ranks: int, block_ranks: int) -> PlacedLayout:
    """Add groups of one rank without sequences for ranks that must take part although they have nothing to do.

    The ranks of a block (`block_ranks` 0: all ranks) take part in a micro-batch together. A block without any sequence in the
    step takes part in one micro-batch, the first.
    """
    block = block_ranks or num_ranks
    ever_busy = {rank // block for groups in placed for group in groups for rank in group.positions}
    result: PlacedLayout = []
    for index, groups in enumerate(placed):
        busy = {rank for group in groups for rank in group.positions}
        blocks = {rank // block for rank in busy}
        if index == 0:
            blocks |= set(range(-(-num_ranks // block))) - ever_busy
        ranks = (rank for b in sorted(blocks) for rank in range(b * block, min((b + 1) * block, num_ranks)))
        result.append([*groups, *[PlacedGroup(rank, 1, ()) for rank in ranks if rank not in busy]])
    return result


def _alignment(degree: int) -> int:
    return degree & -degree


def _sorted(groups: Sequence[Group]) -> list[Group]:
    """Groups with sequences, in an order that keeps every start aligned if groups are placed without gaps."""
    return sorted((group for group in groups if group[1]), key=lambda group: (-_alignment(group[0]), -group[0], group[1]))


def _place_in_a_row(groups: Sequence[Group]) -> list[PlacedGroup]:
    placed, position = [], 0
    for degree, members in _sorted(groups):
        placed.append(PlacedGroup(position, degree, members))
        position += degree
    return placed


def _place_in_nodes(groups: Sequence[Group], num_ranks: int, ranks_per_node: int) -> list[PlacedGroup]:
    """Place groups larger than a node in a row, and the others by best fit into nodes; empty if one then finds no room."""
    large = [group for group in groups if group[0] > ranks_per_node]
    placed = _place_in_a_row(large)
    start = max((group.first + group.degree for group in placed), default=0)
    nodes = range(start // ranks_per_node, -(-num_ranks // ranks_per_node))
    free = {node: set(range(max(start, node * ranks_per_node), min((node + 1) * ranks_per_node, num_ranks))) for node in nodes}
    for degree, members in _sorted([group for group in groups if group[0] <= ranks_per_node]):
        fullest_first = sorted(nodes, key=lambda node: len(free[node]))
        options = ((node, first) for node in fullest_first for first in _starts(degree, free[node]))
        node, first = next(options, (0, -1))
        if first < 0:
            return []
        placed.append(PlacedGroup(first, degree, members))
        free[node].difference_update(placed[-1].positions)
    return placed


def _starts(degree: int, free: set[int]) -> Iterator[int]:
    """Free positions at which a group may start, in order."""
    if len(free) >= degree:
        aligned = range(_up(min(free), _alignment(degree)), max(free) - degree + 2, _alignment(degree))
        yield from (first for first in aligned if free.issuperset(range(first, first + degree)))


def _up(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
