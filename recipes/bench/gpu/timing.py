"""Times calls on a device, for the benchmarks of this folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

_WARM_UP_CALLS = 3
# a little more than GPUs of today have
_CYCLES_PER_S = 2e9
_LONGEST_SLEEP_S = 0.1


def median_s(function: Callable[[], Any], device: torch.device, repetitions: int) -> float:
    """Median seconds of a call, after three that do not count; measured by the device's own clock on CUDA.

    There the device sleeps first, until the host has started all calls, so that it never waits for a slow host between them.
    """
    for _ in range(_WARM_UP_CALLS):
        start_s = time.perf_counter()
        function()
        host_s = time.perf_counter() - start_s
    if device.type != "cuda":
        return median(wall_s(function) for _ in range(repetitions))
    torch.cuda.synchronize(device)
    torch.cuda._sleep(int(_CYCLES_PER_S * min(_LONGEST_SLEEP_S, 2 * repetitions * host_s)))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repetitions)]
    for start, stop in events:
        start.record()
        function()
        stop.record()
    torch.cuda.synchronize(device)
    return median(start.elapsed_time(stop) for start, stop in events) / 1e3


def wall_s(function: Callable[[], Any]) -> float:
    """Wall-clock seconds of one call and of everything that it starts on a CUDA device."""
    start_s = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start_s
