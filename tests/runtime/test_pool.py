"""The group pool: which groups exist, that they join the right ranks, and how requests for others are refused."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.ranks.rank_steps import group_pool
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx.plan.core.sharding import Piece
from hf_longctx.plan.core.types import Action, Chunk, Method, SequenceGroup, Span
from hf_longctx.runtime.attention.context import Block, GroupContext, Ring
from hf_longctx.runtime.process_groups import GroupPool, StageMessages, aligned_groups

CHUNK = Chunk(0, (Span(0, 0, 8),))


def sequence_group(*positions: int, method: Method = "ulysses") -> SequenceGroup:
    blocks = 2 if method == "hybrid" else 0
    return SequenceGroup(positions, "local" if len(positions) == 1 else method, (CHUNK,), (), ulysses_degree=blocks)


def test_aligned_groups_of_four_ranks() -> None:
    assert aligned_groups(4, (1, 2, 4)) == [(0, 1), (2, 3), (0, 1, 2, 3)]


def test_aligned_groups_leave_a_rest_without_a_group() -> None:
    assert aligned_groups(6, (1, 2, 4, 6)) == [(0, 1), (2, 3), (4, 5), (0, 1, 2, 3), (0, 1, 2, 3, 4, 5)]


def test_one_rank_has_no_groups() -> None:
    assert aligned_groups(1, (1,)) == []


@given(st.integers(1, 65), st.lists(st.integers(1, 65), max_size=4))
def test_groups_start_at_a_multiple_of_their_degree_and_stay_inside(num_ranks: int, degrees: list[int]) -> None:
    groups = aligned_groups(num_ranks, tuple(degrees))
    for positions in groups:
        assert positions[0] % len(positions) == 0 and positions[-1] < num_ranks
        assert list(positions) == list(range(positions[0], positions[0] + len(positions)))
    for degree in (d for d in set(degrees) if d > 1):
        of_degree = {positions for positions in groups if len(positions) == degree}
        assert len(of_degree) == num_ranks // degree


def test_creation_order_does_not_depend_on_the_order_of_degrees() -> None:
    assert aligned_groups(8, (4, 1, 2)) == aligned_groups(8, (1, 2, 4))


def test_a_process_without_a_launcher_is_one_rank() -> None:
    pool = GroupPool((1,), timeout_s=1.0)
    assert (pool.rank, pool.num_ranks, pool.everyone, pool.control) == (0, 1, None, None)
    assert pool.group((0,)) is None


@pytest.mark.quick
def test_context_of_one_rank() -> None:
    context = GroupPool((1,), timeout_s=1.0).context(sequence_group(0), CHUNK)
    assert (context.num_tokens, context.block.num_ranks, context.ring.num_blocks, context.calls.count) == (8, 1, 1, 0)
    assert context.cu_seqlens == (0, 8)


@pytest.mark.quick
def test_shards_that_do_not_cover_the_chunk_are_refused() -> None:
    ring = Ring(None, 0, (0,), ((Piece(0, 0, 8, 0),),), ((),))
    with pytest.raises(ValueError, match=r"\(7,\) tokens do not add up to the 8 tokens of the chunk"):
        GroupContext(Block(None, 0, (7,)), ring, (0, 8))


def sums_of_ranks(groups: list[tuple[int, ...]]) -> list[int]:
    """For every group in turn: the sum of its members' ranks, computed through this rank's handle; -1 outside the group."""
    pool = group_pool()
    sums = []
    for positions in groups:
        total = torch.tensor(pool.rank if pool.rank in positions else -1)
        if pool.rank in positions:
            dist.all_reduce(total, group=pool.group(positions))
        sums.append(int(total))
    return sums


@pytest.mark.quick
def test_handles_join_exactly_their_ranks(ranks) -> None:
    groups = [(0, 1), (2, 3), (0, 1, 2, 3)]
    for rank, sums in enumerate(ranks(4).run(sums_of_ranks, groups)):
        assert sums == [sum(positions) if rank in positions else -1 for positions in groups]


def message_about(positions: tuple[int, ...]) -> str:
    try:
        group_pool().group(positions)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("positions", [(1, 2), (0, 2), (0, 1, 2), (1, 0)])
def test_a_group_outside_the_pool_is_refused_with_the_known_ones(ranks, positions: tuple[int, ...]) -> None:
    for message in ranks(4).run(message_about, positions):
        assert f"positions {positions} are not an aligned group of this run" in message
        assert "known: [(0, 1), (0, 1, 2, 3), (2, 3)]" in message
        assert "starting at a multiple of its degree" in message


def context_facts(method: Method) -> tuple[int, tuple[int, ...], int, tuple[int, ...]]:
    pool = group_pool()
    group = sequence_group(0, 1, 2, 3, method=method)
    context = pool.context(group, CHUNK)
    if context.block.num_ranks > 1:
        assert dist.get_world_size(context.block.process_group) == context.block.num_ranks
        assert dist.get_rank(context.block.process_group) == context.block.index
    return context.block.index, context.block.tokens, context.ring.index, context.ring.ranks


def test_contexts_know_their_block_and_their_ring(ranks) -> None:
    everyone = (0, 1, 2, 3)
    assert ranks(4).run(context_facts, "ulysses") == [(rank, (2, 2, 2, 2), 0, (rank,)) for rank in everyone]
    assert ranks(4).run(context_facts, "ring") == [(0, (2,), rank, everyone) for rank in everyone]
    # blocks (0, 1) and (2, 3): heads of each block's first rank travel between 0 and 2, those of the second between 1 and 3
    assert ranks(4).run(context_facts, "hybrid") == [
        (0, (2, 2), 0, (0, 2)),
        (1, (2, 2), 0, (1, 3)),
        (0, (2, 2), 1, (0, 2)),
        (1, (2, 2), 1, (1, 3)),
    ]


def num_groups_made_by_contexts() -> int:
    pool = group_pool()
    before = len(dist.distributed_c10d._world.pg_map)
    for positions in ((0, 1), (2, 3), (0, 1, 2, 3)):
        if pool.rank in positions:
            pool.context(sequence_group(*positions), CHUNK)
    return len(dist.distributed_c10d._world.pg_map) - before


def test_no_group_is_made_after_construction(ranks) -> None:
    assert ranks(4).run(num_groups_made_by_contexts) == [0, 0, 0, 0]


def collectives_of_a_new_pool(degrees: tuple[int, ...]) -> list[list[int]]:
    """The ranks of the group of every collective of a new pool."""
    calls: list[dist.ProcessGroup] = []
    original = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["group"])
        return original(tensor, *args, **kwargs)

    with patch.object(dist, "all_reduce", all_reduce):
        pool = GroupPool(degrees, timeout_s=60.0)
    found = [dist.get_process_group_ranks(group) for group in calls]
    pool.close()
    return found


def test_ranks_of_a_group_meet_before_its_first_step(ranks) -> None:
    # NCCL: the first use connects all ranks of a group; rings send messages between only some of all ranks
    everyone, pairs = [0, 1, 2, 3], [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert ranks(4).run(collectives_of_a_new_pool, (1, 2)) == [[everyone, pair] for pair in pairs]


def receives_posted_by_a_stage() -> list[int]:
    """Receives that were posted when messages of a micro-batch were made, and after each of two had been received."""
    pool = GroupPool((1,), timeout_s=60.0, num_stages=2)
    posted, original = [0], dist.irecv

    def irecv(*args: Any, **kwargs: Any) -> Any:
        posted[-1] += 1
        return original(*args, **kwargs)

    with patch.object(dist, "irecv", irecv):
        messages = StageMessages(pool.links, torch.float64, torch.device("cpu"))
        for chunk in range(2):
            posted.append(posted[-1])
            if pool.stage:
                found = messages.receive(Action("RF", 1, chunk), (2,))
                assert found.tolist() == [chunk, chunk]
            else:
                messages.send(Action("SF", 0, chunk), torch.full((2,), float(chunk), dtype=torch.float64))
        messages.finish()
    dist.barrier()
    pool.close()
    return posted


def test_a_receive_is_posted_by_its_action_and_not_before(ranks) -> None:
    # NCCL: a posted receive occupies the device until its message comes
    assert ranks(2).run(receives_posted_by_a_stage) == [[0, 0, 0], [0, 1, 2]]
