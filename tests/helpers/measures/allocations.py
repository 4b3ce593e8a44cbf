"""Memory that torch really allocates: the most bytes alive at one moment, from its profiler's record of every allocation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def measure(run: Callable[[], Any]) -> tuple[int, int, Any]:
    """(peak, left, result) of `run`: the most bytes and the last bytes above those allocated at its start, and its result."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    peak = held = 0
    for _, num_bytes in changes:
        held += num_bytes
        peak = max(peak, held)
    return peak, held, result
