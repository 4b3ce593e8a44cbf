"""Counts the communicators that NCCL makes for a rank, and the device memory that they take.

The groups are those of `runtime/process_groups` and of sharded parameters; a test compares the count with the groups that a run
creates. With gloo, on CPU devices, they take no device memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_longctx.plan.core.settings import USABLE_SHARE

# bytes of one communicator: measured were 544 to 688 MB on four A100 (NVIDIA/nccl issue 964), and a single allocation of
# 512 MiB (issue 2363)
COMMUNICATOR_BYTES = 2**29
# hidden states and gradients, between neighbours and from one end of the pipeline to the other
_LANES_EACH_WAY = 2


def num_communicators(
    num_ranks: int, degrees: Sequence[int], shard_ranks: int = 1, num_stages: int = 1, lends: bool = False
) -> int:
    """Counts the groups of the rank with the most of them, including the default group; 0 for a single rank.

    degrees: those of groups that exchange heads (`cost_model.block_sizes`). shard_ranks: ranks that share one copy of the
    parameters; with 1, gradients are summed early in a separate group, unless stages lend ranks. lends: stages may lend ranks to
    each other.
    """
    if num_ranks == 1:
        return 0
    per_stage = num_ranks // num_stages
    most = max(
        len(_sequence_groups(stage, position, num_ranks, num_stages, degrees, lends)) + _num_links(stage, num_stages)
        for stage in range(num_stages)
        for position in range(per_stage)
    )
    # shards, and ranks with equal shards
    sharding = (1 + (shard_ranks < per_stage)) if shard_ranks > 1 else 0
    early_sums = shard_ranks == 1 and per_stage > 1 and not lends
    return 1 + most + sharding + early_sums


def usable_bytes(device_bytes: int, num_communicators: int) -> int:
    """Returns the bytes of a device that predicted bytes may fill.

    Communicators may take half of the rest; each further one lowers the result.
    """
    share = (1 + USABLE_SHARE) / 2
    return int(min(device_bytes * USABLE_SHARE, device_bytes * share - num_communicators * COMMUNICATOR_BYTES))


def _sequence_groups(
    stage: int, position: int, num_ranks: int, num_stages: int, degrees: Sequence[int], lends: bool
) -> set[tuple[int, ...]]:
    """Returns ranks of one rank's groups: of all ranks, of sequences and of lent slices; equal ranks share a group."""
    per_stage = num_ranks // num_stages
    found = {tuple(range(num_ranks))}
    for degree in (*degrees, per_stage):
        start = position // degree * degree
        if degree > 1 and start + degree <= per_stage:
            found.add(tuple(range(stage * per_stage + start, stage * per_stage + start + degree)))
    if lends:
        for first, last in [(first, num_stages - 1) for first in range(num_stages)] + [(0, last) for last in range(num_stages)]:
            if first < last and first <= stage <= last:
                found.add(tuple(each * per_stage + position for each in range(first, last + 1)))
    return found


def _num_links(stage: int, num_stages: int) -> int:
    """Counts a rank's groups for messages between stages, for sums over all stages, and over the first and the last."""
    if num_stages == 1:
        return 0
    is_end = stage in (0, num_stages - 1)
    neighbours = (stage > 0) + (stage < num_stages - 1)
    return _LANES_EACH_WAY * (neighbours + is_end) + 1 + is_end
