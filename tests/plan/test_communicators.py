"""The communicators that are counted are the groups that a run creates; enough of them lower the bytes of a device."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from hf_longctx.plan.setup import COMMUNICATOR_BYTES, num_communicators, usable_bytes
from hf_longctx.runtime.parameters.sharded import shard_mesh
from hf_longctx.runtime.process_groups import GroupPool

GIB = 2**30
# ranks, degrees, ranks that share one copy of the parameters, stages, whether stages lend ranks, stages with the head
RUNS: dict[str, tuple[int, tuple[int, ...], int, int, bool, int]] = {
    "replicated": (4, (1, 2, 4), 1, 1, False, 1),
    "odd degrees": (4, (1, 2, 3), 1, 1, False, 1),
    "sharded": (4, (1, 2, 4), 4, 1, False, 1),
    "copies of shards": (4, (1, 2), 2, 1, False, 1),
    "stages": (4, (1, 2), 1, 2, False, 1),
    "sharded stages": (4, (1, 2), 2, 2, False, 1),
    "four stages": (4, (1,), 1, 4, False, 1),
    "two of four stages with the head": (4, (1,), 1, 4, False, 2),
    "all stages with the head": (4, (1,), 1, 4, False, 4),
    "lent stages": (4, (1,), 1, 4, True, 1),
    "two lent stages": (4, (1, 2), 1, 2, True, 1),
}


def groups_of_a_run(
    number: int, degrees: tuple[int, ...], shard_ranks: int, num_stages: int, lends: bool, num_head_stages: int
) -> int:
    """Number of groups that this rank is in, the default group included."""
    found: list[Any] = []
    new_group = dist.new_group

    def counted(*arguments: Any, **settings: Any) -> Any:
        group = new_group(*arguments, **settings)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            found.append(group)
        return group

    # meshes are kept for equal arguments
    timeout_s = 60.0 + number / 100
    with patch.object(dist, "new_group", counted):
        if shard_ranks > 1:
            shard_mesh("cpu", shard_ranks, timeout_s, num_stages)
        # settings of `open_plan_source`
        ways = num_stages, lends, shard_ranks == 1 and not lends
        heads = tuple(range(num_stages - num_head_stages, num_stages - 1))
        pool = GroupPool(degrees, timeout_s, None, *ways, head_stages=heads)
    dist.barrier()
    pool.close()
    return 1 + len(found)


@pytest.mark.parametrize("name", RUNS)
def test_communicators_are_the_groups_that_a_run_creates(ranks, name: str) -> None:
    num_ranks, degrees, *ways = RUNS[name]
    found = ranks(num_ranks).run(groups_of_a_run, list(RUNS).index(name), degrees, *ways)
    assert num_communicators(num_ranks, degrees, *ways) == max(found)


def test_one_rank_has_no_communicator() -> None:
    assert num_communicators(1, (1,)) == 0


def test_half_of_what_is_not_usable_is_for_communicators() -> None:
    # four fifths of 40 GiB are usable, so eight communicators of half a GiB fill half of the rest
    assert COMMUNICATOR_BYTES == GIB // 2
    assert usable_bytes(40 * GIB, 0) == usable_bytes(40 * GIB, 8) == 32 * GIB
    assert usable_bytes(40 * GIB, 12) == 30 * GIB


def test_less_is_left_free_with_expandable_segments() -> None:
    assert usable_bytes(100 * GIB, 0, is_expandable=True) == 92 * GIB
    # 4 GiB for eight communicators fill half of the 8 that are free, and another one takes from plans
    assert usable_bytes(100 * GIB, 8, is_expandable=True) == 92 * GIB
    assert usable_bytes(100 * GIB, 9, is_expandable=True) == 100 * GIB * 96 // 100 - 9 * COMMUNICATOR_BYTES
    # 8 % of small devices are less than a process needs, and tiny ones keep what they had
    assert usable_bytes(16 * GIB, 0, is_expandable=True) == 14 * GIB
    assert usable_bytes(4 * GIB, 0, is_expandable=True) == usable_bytes(4 * GIB, 0)
