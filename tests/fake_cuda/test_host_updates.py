"""Updates on the host on late copies: the values of updates on the CPU, and no memory of the device."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fake_cuda.machine.computing import Computing
from fake_cuda.machine.device import FakeDevice
from hf_longctx.runtime.parameters import host_steps
from hf_longctx.runtime.parameters.master_weights import host_steps_of, keep_master_weights

CUDA = torch.device("cuda", 0)
SIZES, STEPS = (5000, 300, 40, 7000), 3


def made_weights(device: Any) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(size, generator=generator) for size in SIZES]
    # one in fp32, as norms may be
    return [nn.Parameter((weight if place == 1 else weight.bfloat16()).to(device)) for place, weight in enumerate(found)]


def set_gradients(weights: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype).to(weight.device)


def updated(device: Any, is_early: bool = False) -> list[torch.Tensor]:
    """Weights after each of some steps, as computations on the device find them. is_early: all leave before they are clipped."""
    weights = made_weights(device)
    optimizer = torch.optim.AdamW(weights, lr=0.1)
    keep_master_weights(optimizer, on_host=True)
    host = host_steps_of(optimizer)
    assert host is not None
    found = []
    for step in range(STEPS):
        set_gradients(weights, step)
        host.forget_early()
        for weight in weights[::-1] if is_early else []:
            assert weight.grad is not None
            host.send_early(weight, weight.grad)
        # the second step clips, and the others do not
        limit = 1.0 if step == 1 else 1e9
        host.clipped(partial(torch.nn.utils.clip_grad_norm_, weights, limit), limit)
        optimizer.step()
        for weight in weights:
            # memory of gradients is used again at once
            weight.grad = None
        found += [weight.detach() + 0.0 for weight in weights]
    torch.cuda.synchronize()
    return [weight.cpu() for weight in found]


def num_wrong() -> int:
    """Values that differ from those of updates on the CPU; `test_waits.py` takes the waits out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_steps, "UPDATE_PART_BYTES", 1024)
        expected, found = updated("cpu"), updated(CUDA)
    gc.collect()
    return sum(int((a != b).sum()) for a, b in zip(found, expected, strict=True))


def test_no_value_is_wrong_however_late_copies_are() -> None:
    assert num_wrong() == 0


def num_wrong_early() -> int:
    """Values that differ where copies begin early."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_steps, "UPDATE_PART_BYTES", 1024)
        expected, found = updated("cpu"), updated(CUDA, is_early=True)
    gc.collect()
    return sum(int((a != b).sum()) for a, b in zip(found, expected, strict=True))


def test_copies_that_begin_early_give_the_same_values() -> None:
    assert num_wrong_early() == 0


def test_early_copies_let_the_device_go_on(device: FakeDevice) -> None:
    """No kernel that follows waits for a copy, and neither does the host; gradients are not held beyond their step."""
    weights = made_weights(CUDA)
    optimizer = torch.optim.AdamW(weights, lr=0.1)
    keep_master_weights(optimizer, on_host=True)
    host = host_steps_of(optimizer)
    assert host is not None
    set_gradients(weights, 0)
    held = torch.cuda.memory_allocated()
    with device.waits() as waits:
        before = device.count("cudaStreamWaitEvent")
        for weight in weights:
            assert weight.grad is not None
            host.send_early(weight, weight.grad)
        # each copy follows the work before it, and nothing follows the copies
        assert device.count("cudaStreamWaitEvent") - before == 2 * len(weights)
    assert not waits and torch.cuda.memory_allocated() == held
    optimizer.step()
    for weight in weights:
        weight.grad = None
    assert torch.cuda.memory_allocated() < held


def test_an_update_takes_no_memory_of_the_device_and_pins_none(device: FakeDevice, computing: Computing) -> None:
    taken = {}
    for on_host in (False, True):
        weights = made_weights(CUDA)
        optimizer = torch.optim.AdamW(weights, lr=0.1)
        before = device.count("cudaHostRegister")
        keep_master_weights(optimizer, on_host)
        pinned = device.count("cudaHostRegister")
        # gradients and weights lie in one allocation
        assert pinned - before == on_host
        temporaries = computing.num_temporaries
        for step in range(STEPS):
            set_gradients(weights, step)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            if step == 0:
                start = held
            optimizer.step()
            peak = torch.cuda.max_memory_allocated()
        taken[on_host] = peak - start
        assert device.count("cudaHostRegister") == pinned
        assert not on_host or computing.num_temporaries == temporaries
        del optimizer, weights
        gc.collect()
    # masters, moments and gradients in fp32, of what is in half precision
    assert taken[False] >= 12 * sum(SIZES)
    assert taken[True] == 0


def test_the_host_waits_for_copies_only(device: FakeDevice) -> None:
    weights = made_weights(CUDA)
    optimizer = torch.optim.AdamW(weights, lr=0.1)
    keep_master_weights(optimizer, on_host=True)
    set_gradients(weights, 0)
    with device.waits() as waits:
        optimizer.step()
    assert {wait.place.split(":")[0] for wait in waits} == {"runtime/core/host_copies.py"}
    assert len(waits) <= 2 * len(SIZES)
