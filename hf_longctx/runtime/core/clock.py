"""Times the actions of one rank without synchronising inside a step (wall clock on CPU, events on CUDA); group time limits.

The executor measures every action; step reports, calibration and refits read the intervals after the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Interval:
    """One timed action. round: index of its micro-batch, -1 outside all. Seconds count from the start of the step."""

    round: int
    kind: str
    name: str
    start_s: float
    stop_s: float


class StepClock:
    """Collects the intervals of one step. Call `intervals()` only after the step: on CUDA it waits for the last event.

    now_s: clock of the CPU. `time.process_time` excludes time that other processes take from a process with one thread.
    """

    def __init__(self, device: torch.device, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._is_cuda, self._now_s = device.type == "cuda", now_s
        self._marks: list[tuple[int, str, str, int, int]] = []
        self._ticks: list[float | torch.cuda.Event] = []
        self._tick()

    @contextmanager
    def measure(self, round_index: int, kind: str, name: str) -> Iterator[None]:
        """Context that is timed as one interval."""
        start = self._tick()
        yield
        self._marks.append((round_index, kind, name, start, self._tick()))

    def intervals(self) -> list[Interval]:
        """Returns all intervals so far, in order of their ends."""
        return [
            Interval(index, kind, name, self._seconds(start), self._seconds(stop))
            for index, kind, name, start, stop in self._marks
        ]

    def _tick(self) -> int:
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._ticks.append(event)
        else:
            self._ticks.append(self._now_s())
        return len(self._ticks) - 1

    def _seconds(self, tick: int) -> float:
        start, stop = self._ticks[0], self._ticks[tick]
        if isinstance(start, float):
            assert isinstance(stop, float)
            return stop - start
        assert isinstance(stop, torch.cuda.Event)
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1000


# on NCCL the limit counts from the call on the host, which may run many kernels ahead of the device
_ON_DEVICE_S = 600.0


def group_limit(timeout_s: float, backend: str | None = None) -> timedelta:
    """Returns the time limit of a group's collectives if healthy ranks may be `timeout_s` seconds late.

    On gloo, `timeout_s`. On NCCL at least ten minutes, because its watchdog ends the whole process and would end healthy runs
    with long kernels. backend: the default group's by default.
    """
    if backend is None:
        backend = dist.get_backend() if dist.is_initialized() else "gloo"
    return timedelta(seconds=timeout_s if backend == "gloo" else max(_ON_DEVICE_S, timeout_s))
