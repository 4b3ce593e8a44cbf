"""When every action of a pipeline starts and stops, for given seconds of each: a loop over what waits for what.

Stages and their parts make a chain of places: part 0 of every stage, then part 1 of every stage. A forward waits until what the
place before it made has arrived, a backward for its own forward and for the gradient of the place behind it. A stage runs one
action at a time in its own order. Sends do not block, receives do; neither takes the stage any seconds of its own. Without
messages among the actions a result leaves when it is made, and whoever needs it waits.

The host's link has a channel for each direction and stage, both first come, first served. A copy out is queued when its layers
have run forward and makes nobody wait. A copy back is sent for when the step above it begins its backward, as the runtime does,
not before its copy out is done; the step waits for it. The uppermost step's is sent for when its own turn comes, or, with
`fetches_ahead`, when the stage begins the backward before, as SPPO does (arXiv 2503.10377), for more room on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hf_longctx.plan.schedule import PlanError
from hf_longctx.plan.types import Action

# (start, stop) of every action of a stage
Times = tuple[tuple[float, float], ...]

_MESSAGES = ("SF", "RF", "SB", "RB")


@dataclass(frozen=True, slots=True)
class CopyStep:
    """A run of layers of one pass, in the order in which they run, and seconds of the link for what they save.

    Forward: copied out when all of them are done. Backward: copied back before the first of them begins.
    """

    compute_s: float
    copy_s: float


# steps of a pass whose saved tensors go to the host; () for one that has nothing there
Copies = Callable[[Action], tuple[CopyStep, ...]]


@dataclass(frozen=True, slots=True)
class CopiedOut:
    """When the copies out of each step of a forward were done; these are in the order of the stage's forwards."""

    stage: int
    steps: tuple[CopyStep, ...]
    stops_s: tuple[float, ...]


def run_actions(
    stages: Sequence[Sequence[Action]],
    seconds: Callable[[Action], float],
    hop_s: Callable[[Action], float],
    num_parts: int = 1,
    start_s: Sequence[float] = (),
) -> tuple[Times, ...]:
    """(start, stop) of every action of every stage, messages of no length included.

    seconds: of F and B, once each. hop_s: from the end of an F or B (or of the SF or SB that sends its result) to the arrival at
    another stage. start_s: when each stage is free. Raises PlanError naming what every stage waits for when none can go on.
    """
    return _Loop(stages, num_parts).run(seconds, hop_s, start_s, None)[0]


def run_copying(
    stages: Sequence[Sequence[Action]],
    seconds: Callable[[Action], float],
    hop_s: Callable[[Action], float],
    copies: Copies,
    num_parts: int = 1,
    start_s: Sequence[float] = (),
    fetches_ahead: bool = False,
) -> tuple[tuple[Times, ...], tuple[CopiedOut, ...]]:
    """As `run_actions`, with copies to the host and back; a backward is longer than its seconds by what it waits for them."""
    return _Loop(stages, num_parts, fetches_ahead).run(seconds, hop_s, start_s, copies)


@dataclass(slots=True)
class _Links:
    """The channels between one stage and the host, and when each chunk's copies out were done, in the order of the forward.

    begun_s: when the stage began its last backward.
    """

    fetches_ahead: bool
    out_s: float = 0.0
    back_s: float = 0.0
    begun_s: float = 0.0
    done: dict[tuple[int, int], list[float]] = field(default_factory=dict)

    def forward(self, action: Action, start_s: float, steps: tuple[CopyStep, ...]) -> tuple[float, ...]:
        """Queues the copies out of a forward; when each of them is done."""
        done = []
        clock_s = start_s
        for step in steps:
            clock_s += step.compute_s
            self.out_s = max(self.out_s, clock_s) + step.copy_s
            done.append(self.out_s)
        self.done[action.part, action.chunk] = done
        return tuple(done)

    def backward(self, action: Action, start_s: float, seconds: float, steps: tuple[CopyStep, ...]) -> float:
        """When a backward that starts at `start_s` stops."""
        # what runs before the first step that has something on the host, the head for one
        clock_s = start_s + seconds - sum(step.compute_s for step in steps)
        sent_s = self.begun_s if self.fetches_ahead else clock_s
        self.begun_s = start_s
        for step, out_s in zip(steps, reversed(self.done.pop((action.part, action.chunk), ())), strict=True):
            if step.copy_s:
                self.back_s = max(self.back_s, out_s, sent_s) + step.copy_s
                clock_s = max(clock_s, self.back_s)
            # the next step's copy is sent for when this one begins
            sent_s = clock_s
            clock_s += step.compute_s
        return clock_s


class _Loop:
    """The state of one run. Arrivals are kept for every (place, chunk), flat."""

    def __init__(self, stages: Sequence[Sequence[Action]], num_parts: int, fetches_ahead: bool = False) -> None:
        self.stages, self.num_stages = stages, len(stages)
        self.num_places = num_parts * self.num_stages
        self.num_chunks = 1 + max((action.chunk for stage in stages for action in stage), default=-1)
        self.links = [_Links(fetches_ahead) for _ in stages]
        self.sends = any(action.kind in _MESSAGES for stage in stages for action in stage)
        size = self.num_places * self.num_chunks
        # when activations from before and gradients from behind are there; None: not yet
        self.forwards: list[float | None] = [0.0] * self.num_chunks + [None] * (size - self.num_chunks)
        self.backwards: list[float | None] = [None] * (size - self.num_chunks) + [0.0] * self.num_chunks
        self.has_run = bytearray(size)
        self.times: list[list[tuple[float, float]]] = [[] for _ in stages]
        # what a stage waits for: ~index of a forward's arrival, index of a backward's
        self.waits_for: list[int | None] = [None] * self.num_stages
        self.ready = list(range(self.num_stages))

    def run(
        self,
        seconds: Callable[[Action], float],
        hop_s: Callable[[Action], float],
        start_s: Sequence[float],
        copies: Copies | None,
    ) -> tuple[tuple[Times, ...], tuple[CopiedOut, ...]]:
        clocks = list(start_s) or [0.0] * self.num_stages
        copied: list[CopiedOut] = []
        while self.ready:
            stage = self.ready.pop()
            clocks[stage] = self._advance(stage, clocks[stage], seconds, hop_s, copies, copied)
        waiting = [
            str(actions[len(times)]) for actions, times in zip(self.stages, self.times, strict=True) if len(times) < len(actions)
        ]
        if waiting:
            raise PlanError(f"deadlock: {', '.join(waiting)} wait for what no stage will make")
        return tuple(map(tuple, self.times)), tuple(copied)

    def _advance(
        self,
        stage: int,
        clock_s: float,
        seconds: Callable[[Action], float],
        hop_s: Callable[[Action], float],
        copies: Copies | None,
        copied: list[CopiedOut],
    ) -> float:
        """Runs a stage until it is done or waits; its clock then."""
        actions, times = self.stages[stage], self.times[stage]
        forwards, backwards, has_run, num_chunks = self.forwards, self.backwards, self.has_run, self.num_chunks
        for place in range(len(times), len(actions)):
            action = actions[place]
            kind = action.kind
            key = (action.part * self.num_stages + stage) * num_chunks + action.chunk
            if kind == "F" or kind == "RF":
                arrived_s = forwards[key]
                if arrived_s is None:
                    self.waits_for[stage] = ~key
                    return clock_s
            elif kind == "B" or kind == "RB":
                arrived_s = backwards[key]
                if arrived_s is None or (kind == "B" and not has_run[key]):
                    self.waits_for[stage] = key
                    return clock_s
            else:
                arrived_s = clock_s
            start_s = arrived_s if arrived_s > clock_s else clock_s
            clock_s = start_s
            if kind == "F" or kind == "B":
                clock_s += seconds(action)
                if copies is not None:
                    clock_s = self._copy(action, start_s, clock_s, copies(action), copied)
                if kind == "F":
                    has_run[key] = 1
            times.append((start_s, clock_s))
            if kind != "RF" and kind != "RB":
                self._hand_over(stage, action, key, clock_s, hop_s)
        return clock_s

    def _copy(self, action: Action, start_s: float, stop_s: float, steps: tuple[CopyStep, ...], copied: list[CopiedOut]) -> float:
        """Adds the copies of a pass; when it stops with them."""
        links = self.links[action.stage]
        if action.kind == "B":
            return links.backward(action, start_s, stop_s - start_s, steps)
        if steps:
            copied.append(CopiedOut(action.stage, steps, links.forward(action, start_s, steps)))
        return stop_s

    def _hand_over(self, stage: int, action: Action, key: int, clock_s: float, hop_s: Callable[[Action], float]) -> None:
        """Lets the next place know when it will have an action's result, if this action is what hands it over."""
        is_forward = action.kind == "F" or action.kind == "SF"
        there = key + self.num_chunks if is_forward else key - self.num_chunks
        if not 0 <= there < len(self.has_run):
            return
        stays = self.num_stages == 1
        if self.sends and not stays and (action.kind == "F" or action.kind == "B"):
            return
        arrival_s = clock_s if stays else clock_s + hop_s(action)
        other = (stage + (1 if is_forward else -1)) % self.num_stages
        if is_forward:
            self.forwards[there] = arrival_s
            there = ~there
        else:
            self.backwards[there] = arrival_s
        if self.waits_for[other] == there:
            self.waits_for[other] = None
            self.ready.append(other)
