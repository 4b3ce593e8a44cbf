"""Placed groups are aligned, disjoint and within nodes if there is room, and every rank that must take part does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.groups.placement import PlacedGroup, levels, place_alone, place_layout, with_idle_ranks
from hf_longctx.plan.groups.problem import Group


@st.composite
def micro_batches(draw: st.DrawFn, powers: bool) -> tuple[list[Group], int, int]:
    """Groups with one sequence each that fit the ranks, the number of ranks, and the ranks of a node."""
    ranks_per_node = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    num_ranks = ranks_per_node * draw(st.integers(1, 4))
    degrees = [1, 2, 4, 8] if powers else list(range(1, 13))
    groups: list[Group] = []
    for degree in draw(st.lists(st.sampled_from(degrees), min_size=1, max_size=num_ranks)):
        if sum(d for d, _ in groups) + degree <= num_ranks:
            groups.append((degree, (len(groups),)))
    return groups, num_ranks, ranks_per_node


@pytest.mark.wide
@settings(max_examples=200)
@given(micro_batches(powers=False), st.booleans())
def test_groups_are_whole_disjoint_and_aligned(problem: tuple[list[Group], int, int], node_aligned: bool) -> None:
    groups, num_ranks, ranks_per_node = problem
    [placed] = place_layout([groups], num_ranks, ranks_per_node, node_aligned)
    assert sorted((group.degree, group.members) for group in placed) == sorted(groups)
    taken = [rank for group in placed for rank in group.positions]
    assert len(taken) == len(set(taken)) and all(0 <= rank < num_ranks for rank in taken)
    # blocks of two, four, ... ranks of a group are blocks of the whole run
    assert all(group.first % (group.degree & -group.degree) == 0 for group in placed)


@given(st.integers(1, 7), st.integers(1, 12), st.integers(1, 12), st.integers(1, 4))
def test_sequences_alone_share_no_ranks_that_wait_for_one_another(count: int, degree: int, block: int, blocks: int) -> None:
    num_ranks = block * blocks
    if degree > num_ranks:
        return
    placed = place_alone(range(count), degree, num_ranks, block)
    assert [group.members for groups in placed for group in groups] == [(i,) for i in range(count)]
    for groups in placed:
        used = [rank // block for group in groups for rank in {position // block * block for position in group.positions}]
        assert len(used) == len(set(used)) and max(used) < blocks
        assert all(group.first % (degree & -degree) == 0 for group in groups)
    # whole blocks that fit side by side are all used
    if degree == block:
        assert len(placed) == -(-count // blocks)


def places_in_nodes(degrees: list[int], num_ranks: int, ranks_per_node: int) -> bool:
    """Whether groups of all these degrees can be placed, aligned and within nodes, by trying every placement."""

    def search(left: list[int], taken: frozenset[int], first: int) -> bool:
        if not left:
            return True
        degree = left[0]
        starts = [
            start
            for start in range(first, num_ranks - degree + 1)
            if start % degree == 0
            and start // ranks_per_node == (start + degree - 1) // ranks_per_node
            and taken.isdisjoint(range(start, start + degree))
        ]
        # the order of equal groups does not matter
        return any(
            search(left[1:], taken | set(range(start, start + degree)), start if left[1:2] == [degree] else 0) for start in starts
        )

    return search(sorted(degrees, reverse=True), frozenset(), 0)


@settings(max_examples=150)
@given(micro_batches(powers=True))
def test_powers_of_two_lie_inside_nodes_whenever_they_can(problem: tuple[list[Group], int, int]) -> None:
    groups, num_ranks, ranks_per_node = problem
    groups = [group for group in groups if group[0] <= ranks_per_node]
    [placed] = place_layout([groups], num_ranks, ranks_per_node, node_aligned=True)
    crossing = [group for group in placed if group.positions[0] // ranks_per_node != group.positions[-1] // ranks_per_node]
    assert not crossing or not places_in_nodes([degree for degree, _ in groups], num_ranks, ranks_per_node)


def test_ranks_in_front_of_an_aligned_group_are_not_lost() -> None:
    # two nodes of six: the second group of four starts at 8, and the ranks 6 and 7 before it take a pair
    layout = [[(4, (0,)), (4, (1,)), (2, (2,)), (2, (3,))]]
    [placed] = place_layout(layout, 12, 6, node_aligned=True)
    assert sorted(tuple(group.positions) for group in placed) == [(0, 1, 2, 3), (4, 5), (6, 7), (8, 9, 10, 11)]


def test_groups_that_fit_no_node_stand_in_a_row() -> None:
    # 2, 2 and 2 do not fit two nodes of three
    [placed] = place_layout([[(2, (0,)), (2, (1,)), (2, (2,))]], 6, 3, node_aligned=True)
    assert [group.first for group in placed] == [0, 2, 4]


@pytest.mark.parametrize("node_aligned,first", [(True, 3), (False, 2)])
def test_a_group_of_three_keeps_to_a_node_of_three_if_asked(node_aligned: bool, first: int) -> None:
    [placed] = place_layout([[(3, (0,)), (2, (1,)), (1, (2,))]], 6, 3, node_aligned)
    assert {group.degree: group.first for group in placed}[3] == first


@st.composite
def nested_groups(draw: st.DrawFn) -> tuple[list[PlacedGroup], int]:
    """Groups in the order in which they were opened, at multiples of their degree."""
    num_ranks = draw(st.sampled_from([2, 4, 8]))
    degrees = draw(st.lists(st.sampled_from([d for d in (1, 2, 4, 8) if d <= num_ranks]), min_size=1, max_size=12))
    return [PlacedGroup(d * draw(st.integers(0, num_ranks // d - 1)), d, (i,)) for i, d in enumerate(degrees)], num_ranks


@given(nested_groups())
def test_levels_keep_the_order_of_every_rank_and_hold_disjoint_groups(problem: tuple[list[PlacedGroup], int]) -> None:
    groups, num_ranks = problem
    placed = levels(groups, num_ranks)
    for rank in range(num_ranks):
        expected = [group for group in groups if rank in group.positions]
        assert [group for one in placed for group in one if rank in group.positions] == expected
    for place, one in enumerate(placed):
        taken = [rank for group in one for rank in group.positions]
        assert len(taken) == len(set(taken))
        # a group runs as early as its ranks allow: one of them was busy just before
        before = {rank for group in placed[place - 1] for rank in group.positions} if place else set(range(num_ranks))
        assert all(before & set(group.positions) for group in one)


@given(nested_groups(), st.sampled_from([0, 1, 2]))
def test_ranks_of_a_block_take_part_together_and_all_in_the_step(problem: tuple[list[PlacedGroup], int], block: int) -> None:
    groups, num_ranks = problem
    placed = levels(groups, num_ranks)
    whole = with_idle_ranks(placed, num_ranks, block)
    size = block or num_ranks
    for before, after in zip(placed, whole, strict=True):
        assert after[: len(before)] == before
        assert all(group.degree == 1 and not group.members for group in after[len(before) :])
        taken = [rank for group in after for rank in group.positions]
        assert len(taken) == len(set(taken))
        assert all({rank // size * size + i for i in range(size)} <= set(taken) for rank in taken)
    assert {rank for groups in whole for group in groups for rank in group.positions} == set(range(num_ranks))
