"""Offloading, activation policies and updates on the host under torch's CUDA sanitizer; `test_races.py` gives it its own process.

Importing torch's sanitizer switches its hooks on. They stay in the process, and fail in any checkpoint that stops early.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch.cuda._sanitizer as sanitizer
from torch.utils.checkpoint import set_checkpoint_early_stop

from fake_cuda.machine.removals import Removal, removed
from fake_cuda.machine.scenarios import CUDA, SIZE
from fake_cuda.test_host_updates import num_wrong
from fake_cuda.test_offload import dropped_unread, leave_beside_a_pass, many_leave
from fake_cuda.test_sharded_step import sharded_model, steps_of
from hf_longctx.recipes.bench.gpu import smoke_memory
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.parameters.gradients import GradientSum, local_shard


@pytest.fixture(scope="module")
def traced() -> sanitizer.CUDASanitizerDispatchMode:
    """torch's sanitizer, which records allocations and events from the first use on."""
    return sanitizer.CUDASanitizerDispatchMode()


@contextlib.contextmanager
def sanitised(traced: sanitizer.CUDASanitizerDispatchMode) -> Iterator[None]:
    """Context that raises if two streams use a tensor without an order, on top of `Computing`."""
    # its hooks fail while the exception that ends a checkpoint early is in flight
    with traced, set_checkpoint_early_stop(False), contextlib.redirect_stderr(io.StringIO()):
        yield


def test_no_copy_races_with_computation(traced: sanitizer.CUDASanitizerDispatchMode) -> None:
    with sanitised(traced):
        for scenario in (many_leave, leave_beside_a_pass, dropped_unread):
            assert scenario(HostTier.on(CUDA, 4 * SIZE * 4)) == 0


def test_updates_on_the_host_race_with_nothing(traced: sanitizer.CUDASanitizerDispatchMode) -> None:
    with sanitised(traced):
        assert num_wrong() == 0


def test_planted_copies_that_do_not_follow_computation_race(traced: sanitizer.CUDASanitizerDispatchMode) -> None:
    unordered = Removal("runtime.core.host_copies", "stream.wait_stream(torch.cuda.current_stream(self._device))")
    with removed(unordered), sanitised(traced), pytest.raises(sanitizer.CUDASanitizerErrors):
        many_leave(HostTier.on(CUDA, 4 * SIZE * 4))


@pytest.mark.parametrize(
    "name", ["attention and inputs on the host", "part of the MLP kept", "four slices, attention kept on the host"]
)
def test_policies_run_without_races(name: str, traced: sanitizer.CUDASanitizerDispatchMode) -> None:
    with sanitised(traced):
        error, _ = smoke_memory.check_policy(64, CUDA, *smoke_memory.POLICIES[name])
    assert error <= smoke_memory.POLICY_TOLERANCE


@contextlib.contextmanager
def reading_shards() -> Iterator[None]:
    """Context in which sums read shards of gradients one by one, since the sanitizer does not look into a `DTensor`."""
    absorb = GradientSum.absorb

    def read_and_absorb(sums: GradientSum) -> None:
        for total in (*(parameter.grad for parameter in sums.parameters), *sums._wide.values()):
            if total is not None:
                local_shard(total).clone()
        absorb(sums)

    with patch.object(GradientSum, "absorb", read_and_absorb):
        yield


SEVERAL_CHUNKS = "0F0 0F1 0B1 0F2 0B0 0B2"


def test_sums_of_every_backward_race_with_nothing(traced: sanitizer.CUDASanitizerDispatchMode, two_ranks: None) -> None:
    with steps_of(sharded_model(), "gathered_per_step", SEVERAL_CHUNKS) as run, reading_shards(), sanitised(traced):
        run()


def test_planted_sums_that_do_not_follow_their_reduction_race(
    traced: sanitizer.CUDASanitizerDispatchMode, two_ranks: None
) -> None:
    unordered = Removal("runtime.parameters.sums", "group.device_handle.current_stream().wait_event(end)")
    with (
        steps_of(sharded_model(), "gathered_per_step", SEVERAL_CHUNKS) as run,
        reading_shards(),
        removed(unordered),
        sanitised(traced),
        pytest.raises(sanitizer.CUDASanitizerErrors),
    ):
        run()
