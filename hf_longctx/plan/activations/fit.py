"""Makes a group fit: propose policies, predict the run, and reduce the memory offered until the prediction fits its limits.

Two callers decide what to propose and how to predict a group: one for groups on one stage, one for pipelines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from hf_longctx.plan.core.types import SequenceGroup

Room = TypeVar("Room")


@dataclass(frozen=True, slots=True)
class Trial:
    """A group under some policies, and its prediction.

    seconds: predicted for the group alone. over_bytes: bytes above the device limit on each stage, negative where room is left;
    over_host_bytes: bytes above the host limit. counted_s, counted_bytes: added seconds and device bytes that the policy program
    expected. reason: why it chose these policies; empty if not asked for.
    """

    group: SequenceGroup
    seconds: float
    over_bytes: tuple[float, ...]
    over_host_bytes: float = 0.0
    counted_s: float = 0.0
    counted_bytes: float = 0.0
    reason: str = ""

    @property
    def fits(self) -> bool:
        return max(self.over_bytes) <= 0 and self.over_host_bytes <= 0


def first_fitting(ways: Iterable[Callable[[], Iterable[Trial]]]) -> list[Trial]:
    """Returns the fitting trials of the first way that has any, without trying later ways; empty if nothing fits."""
    for way in ways:
        if fitting := [trial for trial in way() if trial.fits]:
            return fitting
    return []


def search_room(
    propose: Callable[[Room], Trial | None], next_room: Callable[[Room, Trial], Room | None], room: Room, attempts: int
) -> Trial | None:
    """Returns the fastest trial that fits; None if none does.

    `propose` makes a trial for some room, or None where there is no solution. `next_room` gives less room after a trial that
    does not fit, and more room, or None to stop, after one that does.
    """
    best: Trial | None = None
    for _ in range(attempts):
        trial = propose(room)
        if trial is None or (best is not None and not trial.fits):
            break
        if trial.fits and (best is None or trial.seconds < best.seconds):
            best = trial
        following = next_room(room, trial)
        if following is None:
            break
        room = following
    return best
