"""What torch really allocates: the most bytes that are alive at one moment, as its own profiler records every allocation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def measure(run: Callable[[], Any]) -> tuple[int, int, Any]:
    """(peak, left, result): bytes beyond what was there before, at most and when `run` has returned."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    peak = held = 0
    for _, num_bytes in changes:
        held += num_bytes
        peak = max(peak, held)
    return peak, held, result
