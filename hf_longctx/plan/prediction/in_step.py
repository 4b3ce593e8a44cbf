"""Times of groups that wait for one another at every action, because their ranks gather weights together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hf_longctx.plan.prediction.pipeline_run import StageRun


def in_step(runs: Sequence[StageRun], start_s: float = 0.0) -> tuple[StageRun, ...]:
    """The runs of groups, each predicted by itself from second 0, as they run from `start_s` on if all wait for the slowest.

    All have equally many actions. An action begins when every group has ended the one before; a group that waited for copies
    before it waits as long from then on.
    """
    times: list[list[tuple[float, float]]] = [[] for _ in runs]
    shift_s = [start_s] * len(runs)
    for actions in zip(*(run.times for run in runs), strict=True):
        for place, (begin_s, end_s) in enumerate(actions):
            times[place].append((begin_s + shift_s[place], end_s + shift_s[place]))
        last_s = max(own[-1][1] for own in times)
        shift_s = [last_s - end_s for _, end_s in actions]
    return tuple(replace(run, times=tuple(own)) for run, own in zip(runs, times, strict=True))
