"""Shows where the device's time goes in one step of a training of `trainings.py`: products, attention, copies, waits.

    python recipes/bench/gpu/step_profile.py [--method "hf_longctx, not compiled"] [--layers 32] [--tokens 131072] [--limit 32768]

The second step is profiled, without the host's operations, which would slow it down. Printed are the seconds and number of calls
of each kind of work, the seconds in which nothing computes (by length of the pause: short ones mean that the host is too slow,
long ones that it waits), how busy computing and copying were in each fortieth of the step, the kernels that take most time, and
the longest pauses with what the host did in them: calls of CUDA, and Python's garbage collector.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from hf_longctx.recipes.bench.gpu import trainings

_PARTS = 40
# lengths of pauses, in microseconds
_PAUSES_US = (5, 20, 100, 1_000, 10_000)
_LONGEST = 12
_COPIES = {"dtoh": "copies to the host", "htod": "copies from the host"}


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel or copy on the device, or one call on the host, in nanoseconds since 1970."""

    start: int
    stop: int
    name: str

    @property
    def kind(self) -> str:
        """The kind of work, as far as the name of a kernel tells."""
        name = self.name.lower()
        if "memcpy" in name:
            return next((kind for word, kind in _COPIES.items() if word in name), "copies on the device")
        if any(word in name for word in ("flash", "cudnn", "fmha")):
            which = "cuDNN" if "cudnn" in name else "FlashAttention"
            return f"attention {'backward' if 'bwd' in name or 'bprop' in name else 'forward'}, {which}"
        return "products" if any(word in name for word in ("nvjet", "gemm", "cutlass")) else "other kernels"

    @property
    def computes(self) -> bool:
        """Whether it occupies the device, not only its link to the host."""
        return self.kind not in _COPIES.values()


class Profiled(trainings.DeviceTimes):
    """Profiles the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0
        self._profile: Any = None
        self._collections: list[Work] = []
        self._began = 0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.num_steps += 1
        if self.num_steps == 2 and torch.cuda.is_available():
            torch.cuda.synchronize()
            gc.callbacks.append(self._collected)
            self._profile = profile(activities=[ProfilerActivity.CUDA])
            self._profile.__enter__()
        super().on_step_begin(*args, **kwargs)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_step_end(*args, **kwargs)
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            gc.callbacks.remove(self._collected)
            works: dict[bool, list[Work]] = {True: [], False: []}
            for event in self._profile.profiler.kineto_results.events():
                work = Work(event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
                works[event.device_type() == torch.autograd.DeviceType.CUDA].append(work)
            print("\n".join(report(works[True], [*works[False], *self._collections])), flush=True)
            self._profile = None

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.time_ns()
        else:
            self._collections.append(Work(self._began, time.time_ns(), f"garbage of generation {info['generation']}"))


def report(found: Iterable[Work], calls_of_host: Sequence[Work] = ()) -> list[str]:
    """Lines that sum up all work of a step on the device.

    calls_of_host: names what the host did in the longest pauses.
    """
    works = sorted((work for work in found if work.stop > work.start), key=lambda work: work.start)
    if not works:
        return ["the profiler saw nothing on the device"]
    start, stop = works[0].start, max(work.stop for work in works)
    seconds, calls, names = Counter[str](), Counter[str](), Counter[str]()
    for work in works:
        seconds[work.kind] += work.stop - work.start
        calls[work.kind] += 1
        names[work.name] += work.stop - work.start
    computing = [(work.start, work.stop) for work in works if work.computes]
    copying = [(work.start, work.stop) for work in works if not work.computes]
    gaps = pauses(computing)
    computed = max(end for _, end in computing) - computing[0][0] - sum(gaps) if computing else 0
    by_length = (f"{sum(gap for gap in gaps if gap > 1e3 * least) / 1e9:.3f} s longer than {least:,} us" for least in _PAUSES_US)
    return [
        f"{(stop - start) / 1e9:.3f} s, in which something computes for {computed / 1e9:.3f} s",
        *(f"  {nanoseconds / 1e9:8.3f} s {calls[kind]:8,} calls  {kind}" for kind, nanoseconds in seconds.most_common()),
        f"pauses of computing: {'; '.join(by_length)}",
        "computing " + " ".join(f"{share:.2f}" for share in busy(computing, start, stop)),
        "copying   " + " ".join(f"{share:.2f}" for share in busy(copying, start, stop)),
        *(f"  {nanoseconds / 1e6:9.1f} ms  {name[:100]}" for name, nanoseconds in names.most_common(16)),
        *explained([work for work in works if work.computes], calls_of_host),
    ]


def explained(works: Sequence[Work], calls: Sequence[Work]) -> list[str]:
    """Lines on the longest pauses of works sorted by their start: when, between which works, in which calls of the host."""
    found = [(works[before], works[after]) for before, after in _gaps([(work.start, work.stop) for work in works])]
    longest = sorted(found, key=lambda pair: pair[1].start - pair[0].stop)[-_LONGEST:]
    lines = []
    for before, after in sorted(longest, key=lambda pair: pair[0].stop):
        gap, inside = after.start - before.stop, Counter[str]()
        for call in calls:
            inside[call.name] += max(min(call.stop, after.start) - max(call.start, before.stop), 0)
        named = ", ".join(f"{name} {of / 1e6:.1f} ms" for name, of in inside.most_common(4) if of >= gap / 50)
        lines.append(
            f"  pause of {gap / 1e6:.1f} ms after {(before.stop - works[0].start) / 1e9:.3f} s, "
            f"{before.name[:40]} to {after.name[:40]}: {named or 'no call of CUDA'}"
        )
    return lines


def pauses(intervals: Sequence[tuple[int, int]]) -> list[int]:
    """Lengths of the gaps between intervals, which are sorted by their start and may overlap."""
    return [intervals[after][0] - intervals[before][1] for before, after in _gaps(intervals)]


def _gaps(intervals: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Places of the intervals before and after each gap: the one before ends last of all that begin before it."""
    found, last = [], 0
    for place, (start, stop) in enumerate(intervals):
        if start > intervals[last][1]:
            found.append((last, place))
        if stop > intervals[last][1]:
            last = place
    return found


def busy(intervals: Iterable[tuple[int, int]], start: int, stop: int) -> list[float]:
    """Sum of the intervals in each part of the time, as shares of it; above 1 where they overlap."""
    width = (stop - start) / _PARTS
    shares = [0.0] * _PARTS
    for begin, end in intervals:
        part = int((begin - start) / width)
        while begin < end and part < _PARTS:
            until = min(float(end), start + (part + 1) * width)
            shares[part] += (until - begin) / width
            begin, part = int(until) if until < end else end, part + 1
    return shares


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains two steps and prints what the device did in the second."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--method", default="hf_longctx", choices=trainings.METHODS, help="default: hf_longctx")
    trainings.add_job_arguments(parser)
    parser.set_defaults(layers=32, tokens=131072)
    options = parser.parse_args(arguments)
    if (job := trainings.job_of(options, steps=1)) is None:
        return 0
    print(trainings.train(job, options.method, Profiled()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
