"""Messages of stages while receives occupy the device and first launches wait for an idle one: no rank waits for itself."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.pipeline_plans import pipeline_plan
from helpers.ranks.rank_steps import rank_inputs
from torch.testing._internal.distributed.fake_pg import FakeStore

from fake_cuda.machine.communicator import BACKEND, Peer, register
from fake_cuda.machine.computing import Computing
from fake_cuda.machine.device import FakeDevice
from hf_longctx.hf.models.cutting import cut_model, stage_model
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.process_groups import GroupPool, few_multiprocessors

CUDA = torch.device("cuda", 0)
LENGTHS = [12, 9, 7]


@pytest.fixture
def peer(device: FakeDevice) -> Iterator[Peer]:
    """The peer of rank 0 of 2."""
    peer = Peer(device)
    register(peer)
    dist.init_process_group(BACKEND, rank=0, world_size=2, store=FakeStore())
    device.set_patience(0.2)
    yield peer
    device.set_patience(5.0)
    dist.destroy_process_group()


@pytest.mark.parametrize("is_posted_early", [False, True])
def test_a_stage_never_waits_for_its_own_message(
    peer: Peer, computing: Computing, device: FakeDevice, is_posted_early: bool
) -> None:
    chunks = [[(index, 0, length)] for index, length in enumerate(LENGTHS)]
    plan = pipeline_plan(LENGTHS, [[(1, chunks)]], 2)
    model = build_model(ModelCase(num_layers=4))
    patch_model(model)
    ranges = [stage.layer_ranges for stage in plan.micro_batches[0].groups[0].stages]
    pool = GroupPool((1,), 60.0, num_stages=2)
    assert pool.links is not None
    cut_model(model, ranges, pool.stage)
    executor = StepExecutor(stage_model(model.to(CUDA), ranges, pool.stage), pool, CUDA)
    inputs = rank_inputs(plan, random_rows(LENGTHS), 0)["chunks"]
    torch.cuda.synchronize()
    computing.loads_lazily = peer.only_answers = True
    if not is_posted_early:
        with device.waits() as waits:
            executor.run(plan.for_rank(0), inputs, sum(LENGTHS) - len(LENGTHS))
        assert peer.num_sent == len(peer.posted) == len(LENGTHS)
        assert not [wait for wait in waits if "process_groups.py" in wait.place]
        return
    lane = pool.links.lanes[("B", "next"), 1]
    dist.irecv(torch.zeros(12, 32, device=CUDA), 1, group=lane)
    with pytest.raises(RuntimeError, match="a message that nobody sends"):
        executor.run(plan.for_rank(0), inputs, sum(LENGTHS) - len(LENGTHS))


def test_lanes_occupy_few_multiprocessors(device: FakeDevice) -> None:
    limit = timedelta(seconds=7)
    with patch.object(dist, "get_backend", lambda: "nccl"):
        options = few_multiprocessors(limit)
    assert isinstance(options, dist.ProcessGroupNCCL.Options)
    assert options.config.max_ctas == 4 and options._timeout == limit
    assert dist.ProcessGroupNCCL.Options().config.max_ctas != 4
