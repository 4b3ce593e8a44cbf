"""The bench itself: copies come late but in the declared order, results are the CPU's, waits of the host are counted."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fake_cuda.machine.computing import Computing
from fake_cuda.machine.device import FakeDevice
from hf_longctx.plan.core.types import Action, Chunk, SequenceGroup, Span
from hf_longctx.runtime.execution.round import active_bytes, explained

CUDA = torch.device("cuda", 0)


def test_a_copy_is_made_when_somebody_waits_for_it() -> None:
    source, target = torch.arange(64.0, device=CUDA), torch.zeros(64).pin_memory()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        target.copy_(source, non_blocking=True)
    ticket = side.record_event()
    assert not ticket.query() and not target.any()
    ticket.synchronize()
    assert ticket.query() and torch.equal(target, torch.arange(64.0))


def test_computation_waits_for_the_streams_that_its_own_waits_for() -> None:
    source = torch.ones(64).pin_memory()
    side = torch.cuda.Stream()
    for is_ordered in (False, True):
        target = torch.zeros(64, device=CUDA)
        with torch.cuda.stream(side):
            target.copy_(source, non_blocking=True)
        if is_ordered:
            torch.cuda.current_stream().wait_stream(side)
        assert bool((target + 0).cpu().any()) == is_ordered
        torch.cuda.synchronize()


def test_memory_is_used_again_in_the_order_of_its_stream(device: FakeDevice) -> None:
    # the address of a freed tensor, while a copy on another stream still reads it
    target, side = torch.zeros(1000).pin_memory(), torch.cuda.Stream()
    for is_recorded in (False, True):
        source = torch.ones(1000, device=CUDA)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            target.copy_(source, non_blocking=True)
        if is_recorded:
            source.record_stream(side)
        address = source.data_ptr()
        del source
        other = torch.full((1000,), 7.0, device=CUDA)
        assert (other.data_ptr() == address) != is_recorded
        torch.cuda.synchronize()
        assert bool((target == 1).all()) == is_recorded


def test_reports_count_memory_that_a_stream_still_reads() -> None:
    # two tensors of 4 MB that are gone, of which a copy under way still reads one
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    target, side = torch.zeros(2**20).pin_memory(), torch.cuda.Stream()
    start, tensors = active_bytes(CUDA)[0], torch.cuda.memory_allocated()
    for _ in range(2):
        source = torch.ones(2**20, device=CUDA)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            target.copy_(source, non_blocking=True)
        source.record_stream(side)
        del source
    now, most = active_bytes(CUDA)
    assert torch.cuda.memory_allocated() == tensors and torch.cuda.max_memory_allocated() == tensors + 2**22
    assert now == most == start + 2 * 2**22
    group = SequenceGroup((0,), "ulysses", (Chunk(0, (Span(0, 0, 8),)),), ())
    with (
        pytest.raises(torch.OutOfMemoryError, match=rf"{now / 2**30:.2f} GiB are in use \(tensors: {tensors / 2**30:.2f} GiB\)"),
        explained("step 1, round 0", Action("F", 0, 0), group, CUDA),
    ):
        raise torch.OutOfMemoryError("no room")
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    def losses(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        linear = torch.nn.Linear(32, 16, dtype=dtype).to(device)
        x = torch.randn(5, 32, dtype=dtype).to(device).requires_grad_()
        y = linear(x).relu()
        loss = F.cross_entropy(y.float(), torch.arange(5, device=device)) + y[:, ::2].square().sum() + y.t().contiguous()[0].sum()
        loss.backward()
        torch.optim.AdamW(linear.parameters(), fused=True).step()
        assert x.grad is not None
        return [each.detach().cpu() for each in (loss, x.grad, linear.weight, linear.bias)]

    for found, expected in zip(losses(CUDA), losses(torch.device("cpu")), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("to_device", [False, True])
def test_copies_between_layouts_and_dtypes(to_device: bool) -> None:
    base = torch.arange(60.0).view(3, 5, 4)
    for source in (base, base.transpose(0, 1), base[:, 1:3], base[0, 0, :1].expand(4)):
        for dtype in (torch.float32, torch.float64):
            here, there = ("cpu", CUDA) if to_device else (CUDA, "cpu")
            given = source.to(here)
            expected = source.to(dtype)
            assert torch.equal(given.to(there, dtype).cpu(), expected)
            gaps = torch.zeros(*source.shape, 2, dtype=dtype, device=there)[..., 0]
            assert torch.equal(gaps.copy_(given).cpu(), expected)


def test_copies_to_the_host_take_memory_of_the_device_only_for_gaps_and_other_dtypes(computing: Computing) -> None:
    base = torch.arange(60.0, device=CUDA).view(3, 5, 4)
    for source, dtype, temporaries in (
        (base, torch.float32, 0),
        (base.transpose(0, 1), torch.float32, 0),
        (base, torch.float64, 1),
    ):
        before = computing.num_temporaries
        source.to("cpu", dtype)
        assert computing.num_temporaries == before + temporaries
    before = computing.num_temporaries
    torch.empty(3, 2, 4).copy_(base[:, 1:3])
    assert computing.num_temporaries == before + 1


def test_waits_of_the_host_are_counted_with_their_places(device: FakeDevice) -> None:
    x = torch.arange(4.0, device=CUDA)
    with device.waits() as waits:
        x.sum().add_(1)
        x.to("cpu", non_blocking=True)
        torch.ones(4).pin_memory().to(CUDA, non_blocking=True)
    assert waits == []
    with device.waits() as waits:
        float(x[0])
        x[x > 1]
        torch.ones(4).to(CUDA)
        torch.cuda.synchronize()
    assert len(waits) == 4 + 1, waits
    assert all("test_device.py" in wait.place for wait in waits)
    assert waits[-1].function == "cudaDeviceSynchronize"


def test_a_kernel_past_the_dispatch_mode_is_an_error() -> None:
    with _disable_current_modes(), pytest.raises(RuntimeError, match="runs no kernels"):
        torch.ones(4, device=CUDA)
