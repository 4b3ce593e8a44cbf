"""The step clock: one interval per measured action, in the order of their ends, in seconds since the start of the step."""

from __future__ import annotations

import time

import pytest
import torch

from hf_longctx.runtime.core.clock import StepClock


def test_intervals_carry_what_was_measured() -> None:
    clock = StepClock(torch.device("cpu"))
    with clock.measure(0, "F", "0F0"):
        pass
    with clock.measure(-1, "reduce", "gradients"):
        pass
    assert [(i.round, i.kind, i.name) for i in clock.intervals()] == [(0, "F", "0F0"), (-1, "reduce", "gradients")]


def test_seconds_are_those_of_the_wall_clock_from_the_start_of_the_step() -> None:
    before = time.perf_counter()
    clock = StepClock(torch.device("cpu"))
    time.sleep(0.02)
    with clock.measure(0, "F", "0F0"):
        time.sleep(0.03)
    with clock.measure(0, "B", "0B0"):
        time.sleep(0.01)
    elapsed_s = time.perf_counter() - before
    forward, backward = clock.intervals()
    assert forward.start_s >= 0.02 and forward.stop_s - forward.start_s >= 0.03
    assert backward.start_s >= forward.stop_s and backward.stop_s - backward.start_s >= 0.01
    assert backward.stop_s <= elapsed_s


def test_nested_measurements_come_in_the_order_in_which_they_end() -> None:
    clock = StepClock(torch.device("cpu"))
    with clock.measure(0, "step", "outer"), clock.measure(0, "F", "inner"):
        pass
    inner, outer = clock.intervals()
    assert (inner.name, outer.name) == ("inner", "outer")
    assert outer.start_s <= inner.start_s <= inner.stop_s <= outer.stop_s


def test_a_step_without_actions_has_no_intervals() -> None:
    assert StepClock(torch.device("cpu")).intervals() == []


def test_a_failed_action_is_not_an_interval() -> None:
    clock = StepClock(torch.device("cpu"))
    with pytest.raises(ZeroDivisionError), clock.measure(0, "F", "0F0"):
        raise ZeroDivisionError
    assert clock.intervals() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_intervals_time_the_device_not_the_host() -> None:
    device = torch.device("cuda")
    matrix = torch.randn(4096, 4096, device=device)
    clock = StepClock(device)
    with clock.measure(0, "F", "0F0"):
        started = time.perf_counter()
        for _ in range(20):
            matrix = matrix @ matrix
        launched_s = time.perf_counter() - started
    (interval,) = clock.intervals()
    assert interval.stop_s - interval.start_s > launched_s
