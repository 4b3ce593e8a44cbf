"""Fixtures of all tests: one persistent pool of gloo ranks per world size and session."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from helpers.ranks.rank_pool import RankPool
from hypothesis import settings

# no deadline, since a busy machine is not a failure; derandomized, since a failing run must fail again
settings.register_profile("longctx", deadline=None, derandomize=True)
settings.load_profile("longctx")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """Function that returns the pool of a world size; a pool that failed is replaced by a new one."""
    pools: dict[int, RankPool] = {}

    def pool(num_ranks: int) -> RankPool:
        if num_ranks not in pools or not pools[num_ranks].is_alive:
            pools[num_ranks] = RankPool(num_ranks)
        return pools[num_ranks]

    yield pool
    for made in pools.values():
        made.close()


def pytest_collection_finish() -> None:
    """Keeps the collected tests out of every later garbage collection, which trainings and self-tests begin with."""
    gc.freeze()
