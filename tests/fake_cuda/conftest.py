"""Fixtures of the tests on the fake device, which are skipped on any other."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.ranks.rank_pool import RankPool
from torch.testing._internal.distributed.fake_pg import FakeStore

from fake_cuda.machine import mail
from fake_cuda.machine.computing import Computing
from fake_cuda.machine.device import FakeDevice, is_present

_REASON = (
    "needs torch for CUDA on the fake device: python tests/fake_cuda/make_venv.py outputs/fake_cuda "
    "&& outputs/fake_cuda/bin/python -m pytest tests/fake_cuda"
)


@pytest.fixture(scope="session")
def device() -> FakeDevice:
    """The fake device; without it the test is skipped."""
    if not is_present():
        pytest.skip(_REASON)
    torch.set_num_threads(1)
    return FakeDevice()


@pytest.fixture(autouse=True)
def computing(device: FakeDevice) -> Iterator[Computing]:
    """Computes for the device during a test."""
    with Computing(device) as mode:
        yield mode
        # unpin here what the test leaves behind, because that waits for the device
        gc.collect()
        torch.cuda.synchronize()


@pytest.fixture(scope="session")
def pools() -> Iterator[list[RankPool]]:
    """Pools of two processes so far, the last of them perhaps alive."""
    made: list[RankPool] = []
    yield made
    for pool in made:
        pool.close()


@pytest.fixture
def two_devices(device: FakeDevice, pools: list[RankPool], tmp_path: Path) -> RankPool:
    """Two processes, each with a fake device, that exchange messages; new ones after a failure."""
    if not pools or not pools[-1].is_alive:
        pools.append(RankPool(2, begin=partial(mail.begin, str(tmp_path))))
    return pools[-1]


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """Makes this process rank 0 of 2, whose collectives move nothing."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()
