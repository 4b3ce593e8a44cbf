"""Computes when every action of a pipeline starts and stops, given the seconds of each action.

The seconds do not change which action waits for which: `Wiring` finds that once, for every set of seconds.

The layer ranges of all stages form a chain: range 0 of every stage, then range 1 of every stage. A forward waits until the
result of the layer range before it arrives; a backward waits for its own forward, and for the gradient from the layer range after
it. A stage runs one action at a time in its own order. Sends do not block, receives do; neither takes the stage any time of its
own. If the actions contain no messages, a result is sent as soon as it is made, and the action that needs it waits.

Each stage has one channel to the host and one back; each serves copies in the order of their requests. A copy out is requested
when its layers have run forward. As the runtime does it, the next layers take at least as long as that copy, and what follows a
forward's layers waits for the last one. Under a policy with several `leaving_layers`, copies lag behind by as many layers, and
the last ones end beside the next pass of layers: its end waits for them if it is a backward, its begin if it is a forward. A copy
back is requested when the backward of the layers above begins, and starts when its copy out is done; its own layers wait for it.
The topmost layers have none above them: their copy back is requested when their backward begins. With `runs_ahead`, as SPPO does
it (arXiv 2503.10377), nothing waits for copies out, and the topmost layers' copy back is requested when the stage begins its
previous backward, both of which need more device memory.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from hf_longctx.plan.core.orders import ACTION_CODES
from hf_longctx.plan.core.types import Action, FloatArray, IntArray
from hf_longctx.plan.core.validate import PlanError

# (start, stop) of every action of a stage
Times = tuple[tuple[float, float], ...]

_HEAD = ACTION_CODES["H"]


class CopyStep(NamedTuple):
    """Consecutive layers of one pass: seconds to compute them, and seconds to copy what they save over the link.

    In forward the copy out starts after the last of these layers; in backward the copy back ends before the first of them begins.
    leaving_layers: copies out of the pass that may run or wait at once (`ActivationPolicy.leaving_layers`).
    """

    compute_s: float
    copy_s: float
    leaving_layers: int = 1


class CopiedOut(NamedTuple):
    """Times at which the copies out of one forward's steps end. A stage's entries are in the order of its forwards."""

    stage: int
    steps: tuple[CopyStep, ...]
    stops_s: tuple[float, ...]


class Wiring:
    """The actions of all stages in order, with the result for which each of them waits, and the one that it hands over.

    Actions are numbered stage after stage. units: each action's index into a table of seconds, ((layer range * stages + stage) *
    chunks + chunk) * 2, plus 1 for a backward and its messages; results are numbered like the pass that needs them. The output
    head of a chunk, on whatever stage it runs (H), counts as stage 0 of a further layer range. is_pass, hands_over: whether each
    action is an F, B or H, and whether it hands over a result.
    """

    def __init__(
        self, kinds: Sequence[IntArray], chunks: Sequence[IntArray], ranges: Sequence[IntArray], num_ranges: int
    ) -> None:
        """Takes each stage's actions in order, as three arrays: codes from `ACTION_CODES`, chunks and layer ranges."""
        self.num_stages, self.num_ranges = len(kinds), num_ranges
        self.num_chunks = 1 + max((int(of_stage.max(initial=-1)) for of_stage in chunks), default=-1)
        keys = [
            (np.minimum(layer_range * self.num_stages + stage, num_ranges * self.num_stages)) * self.num_chunks + chunk
            for stage, (layer_range, chunk) in enumerate(zip(ranges, chunks, strict=True))
        ]
        self.starts = [0, *accumulate(map(len, kinds))]
        all_kinds, all_keys = np.concatenate(kinds), np.concatenate(keys)
        is_head = all_kinds == _HEAD
        self.is_pass, is_back, is_send = (all_kinds < 2) | is_head, all_kinds % 2 == 1, (all_kinds == 4) | (all_kinds == 5)
        self.units: IntArray = 2 * all_keys + is_back
        # only passes of layers have copies
        self._copying: list[int] = np.where(all_kinds < 2, self.units, -1).tolist()
        self._kinds, self._keys = all_kinds, all_keys
        self.has_heads = bool(is_head.any())
        # numbers after those of results: of one that is there, of one that is never made, and of one without readers
        places = self.num_ranges * self.num_stages
        self._size = size = (places + self.has_heads) * self.num_chunks
        there, never, unneeded = 2 * size, 2 * size + 1, 2 * size + 2
        # the first layer range needs no result forward, and the last one none backward for chunks whose head it runs
        ends = 2 * np.arange(size)
        own_heads = np.ones(self.num_chunks, dtype=bool)
        own_heads[all_keys[is_head] - places * self.num_chunks] = False
        last = ends[(places - 1) * self.num_chunks : places * self.num_chunks]
        self._given: list[int] = [*ends[: self.num_chunks].tolist(), *(last[own_heads] + 1).tolist(), there]
        # a backward waits for its own forward, which comes before it
        own, begins = np.arange(len(all_kinds)), np.full(size, len(all_kinds))
        forwards = np.flatnonzero(all_kinds == 0)[::-1]
        begins[all_keys[forwards]] = forwards
        is_early = (all_kinds == 1) & (begins[all_keys] > own)
        self._needs: list[int] = np.where(is_send, there, np.where(is_early, never, self.units)).tolist()
        goes_back = is_back | is_head
        goes_to = all_keys + np.where(goes_back, -self.num_chunks, self.num_chunks)
        self.hands_over = (
            (is_send | (self.is_pass & (self.num_stages == 1 or not is_send.any()))) & (goes_to >= 0) & (goes_to < size)
        )
        self._gives: list[int] = np.where(self.hands_over, 2 * goes_to + goes_back, unneeded).tolist()

    @classmethod
    def of_actions(cls, stages: Sequence[Sequence[Action]], num_ranges: int = 1) -> Wiring:
        """Builds the wiring."""
        kinds, chunks, ranges = zip(*map(_codes, stages), strict=True)
        return cls(kinds, chunks, ranges, num_ranges)

    @classmethod
    def of_passes(cls, stages: Sequence[Sequence[Action]], num_ranges: int = 1) -> Wiring | None:
        """Builds the wiring of only F, B and H, with the same times, if messages stand beside them; None if not.

        This also holds if no action is a message.
        """
        found: list[tuple[IntArray, IntArray, IntArray]] = []
        away = {action.chunk for actions in stages for action in actions if action.kind == "H"}
        for stage, actions in enumerate(stages):
            kinds, chunks, ranges = _codes(actions)
            is_pass = (kinds < 2) | (kinds == _HEAD)
            if not is_pass.all() and not _stand_beside(kinds, chunks, ranges, stage, len(stages), num_ranges, away):
                return None
            found.append((kinds[is_pass], chunks[is_pass], ranges[is_pass]))
        all_kinds, all_chunks, all_ranges = zip(*found, strict=True)
        return cls(all_kinds, all_chunks, all_ranges, num_ranges)

    def seconds(self, units: FloatArray) -> list[float]:
        """Seconds of every action, looked up in a (layer ranges, stages, chunks, F/B) table; messages take 0.

        With output heads on several stages, the table has one more layer range, of which only stage 0 and F count.
        """
        return np.where(self.is_pass, units.ravel()[self.units], 0.0).tolist()  # type: ignore[no-any-return]

    def hops(self, hop_s: FloatArray) -> list[float]:
        """Seconds of the message after every action, looked up in a (stages, chunks, F/B) table; 0 for a single stage.

        With output heads on several stages, the table has one more stage: F of the last stage counts for messages to a head, and
        F of the one more for messages from it.
        """
        if self.num_stages == 1:
            return [0.0] * len(self.units)
        return hop_s.ravel()[self.units % (2 * (self.num_stages + self.has_heads) * self.num_chunks)].tolist()  # type: ignore[no-any-return]

    def run(
        self,
        seconds: Sequence[float],
        hop_s: Sequence[float],
        start_s: Sequence[float] = (),
        copies: Sequence[tuple[CopyStep, ...]] = (),
        runs_ahead: bool = False,
    ) -> tuple[tuple[Times, ...], tuple[CopiedOut, ...]]:
        """Returns (start, stop) of every action of every stage, messages included, with no length, and the copies to the host.

        seconds, hop_s, copies: of every action, in the order of their numbers. hop_s: seconds from the end of an action to the
        arrival of its result at another stage. start_s: when each stage is free. copies: steps in the order in which they run,
        () for a pass without saved tensors on the host; a pass also takes the seconds it waits for its copies. Raises PlanError
        if no stage can continue, naming the action at which each of them waits.
        """
        begun, ended, copied = self._walk(seconds, hop_s, start_s, copies, runs_ahead)
        times = tuple(tuple(zip(begun[start:stop], ended[start:stop], strict=True)) for start, stop in pairwise(self.starts))
        return times, tuple(copied)

    def stop_s(self, seconds: Sequence[float], hop_s: Sequence[float]) -> float:
        """Second at which the last action of a `run` without copies from second 0 stops."""
        return max(self._walk(seconds, hop_s)[1])

    def _walk(
        self,
        seconds: Sequence[float],
        hop_s: Sequence[float],
        start_s: Sequence[float] = (),
        copies: Sequence[tuple[CopyStep, ...]] = (),
        runs_ahead: bool = False,
    ) -> tuple[list[float], list[float], list[CopiedOut]]:
        """Times of all actions, and the copies to the host, as in `run`: runs each ready stage until it has to wait."""
        begun, ended, clocks = [0.0] * len(seconds), [0.0] * len(seconds), list(start_s) or [0.0] * self.num_stages
        links = [HostLinks(runs_ahead) for _ in clocks]
        copied: list[CopiedOut] = []
        # seconds at which results arrive
        arrived: list[float | None] = [None] * (2 * self._size + 3)
        for result in self._given:
            arrived[result] = 0.0
        needs, gives, done, ready = self._needs, self._gives, self.starts[:-1], list(range(self.num_stages))
        # stages that wait, by the result
        waiting: dict[int, int] = {}
        while ready:
            stage = ready.pop()
            clock_s, end = clocks[stage], self.starts[stage + 1]
            for number in range(done[stage], end):
                arrived_s = arrived[needs[number]]
                if arrived_s is None:
                    waiting[needs[number]] = stage
                    end = number
                    break
                if arrived_s > clock_s:
                    clock_s = arrived_s
                begun[number] = clock_s
                if copies and ((steps := copies[number]) or runs_ahead or links[stage].left_s > clock_s):
                    clock_s = self._copy(number, stage, clock_s, seconds[number], steps, links[stage], copied)
                else:
                    clock_s += seconds[number]
                ended[number] = clock_s
                result = gives[number]
                arrived[result] = clock_s + hop_s[number]
                if result in waiting:
                    ready.append(waiting.pop(result))
            clocks[stage], done[stage] = clock_s, end
        left = [(stage, place) for stage, (place, stop) in enumerate(zip(done, self.starts[1:], strict=True)) if place < stop]
        if left:
            sizes = self.num_stages, self.num_chunks
            texts = (_action_text(stage, int(self._kinds[place]), int(self._keys[place]), *sizes) for stage, place in left)
            raise PlanError(f"deadlock: {', '.join(texts)} wait for what no stage will make")
        return begun, ended, copied

    def _copy(
        self,
        number: int,
        stage: int,
        start_s: float,
        seconds: float,
        steps: tuple[CopyStep, ...],
        links: HostLinks,
        copied: list[CopiedOut],
    ) -> float:
        """Queues the copies of a pass; returns when the pass stops."""
        unit = self._copying[number]
        if unit < 0:
            return start_s + seconds
        chunk, is_backward = divmod(unit, 2)
        if is_backward:
            return links.backward(chunk, start_s, seconds, steps)
        stop_s, stops_s = links.forward(chunk, start_s, seconds, steps)
        if steps:
            copied.append(CopiedOut(stage, steps, stops_s))
        return stop_s


def _codes(actions: Sequence[Action]) -> tuple[IntArray, IntArray, IntArray]:
    """Codes from `ACTION_CODES`, chunks and layer ranges of actions."""
    kinds = np.array([ACTION_CODES[action.kind] for action in actions], dtype=np.int64)
    chunks, ranges = (np.array([getattr(each, name) for each in actions], dtype=np.int64) for name in ("chunk", "layer_range"))
    return kinds, chunks, ranges


def _stand_beside(
    kinds: IntArray, chunks: IntArray, ranges: IntArray, stage: int, num_stages: int, num_ranges: int, away: Collection[int]
) -> bool:
    """Whether a receive stands right before and a send right after every pass whose neighbour is on another stage.

    away: chunks whose output head another stage than the last one runs.
    """
    is_head, is_backward, place = kinds == _HEAD, kinds % 2, ranges * num_stages + stage
    last = num_stages * num_ranges - 1
    has_front, has_behind = place > 0, (place < last) | ((place == last) & np.isin(chunks, [*away]))
    receives, sends = np.flatnonzero((kinds == 2) | (kinds == 3)), np.flatnonzero((kinds == 4) | (kinds == 5))
    if (len(receives) and receives[-1] == len(kinds) - 1) or (len(sends) and sends[0] == 0):
        return False
    for message, beside, of_head in ((receives, receives + 1, 0), (sends, sends - 1, 1)):
        # a head receives hidden states and sends a gradient
        same = np.where(is_head[beside], is_backward[message] == of_head, is_backward[beside] == is_backward[message])
        same &= is_head[beside] | (kinds[beside] < 2)
        if not (same & (chunks[beside] == chunks[message]) & (ranges[beside] == ranges[message])).all():
            return False
    # no pass has two of a kind, so that numbers tell whether all have theirs
    needed = [(kinds == kind) & has for kind in (0, 1) for has in (has_front, has_behind)]
    given = [np.count_nonzero(kinds == kind) for kind in (2, 4, 5, 3)]
    of_heads = int(is_head.sum())
    heads = (of_heads, 0, of_heads, 0)
    return [int(each.sum()) + head for each, head in zip(needed, heads, strict=True)] == given


def _action_text(stage: int, kind: int, key: int, num_stages: int, num_chunks: int) -> str:
    names = {code: name for name, code in ACTION_CODES.items()}
    return str(Action(names[kind], stage, key % num_chunks, key // num_chunks // num_stages))


@dataclass(slots=True)
class HostLinks:
    """Channels between one stage and the host."""

    runs_ahead: bool
    # times at which the channels become free
    out_s: float = 0.0
    back_s: float = 0.0
    # start of the stage's latest backward
    begun_s: float = 0.0
    # when the last copies of a forward are done that end beside the pass after it
    left_s: float = 0.0
    # for each chunk, the times at which its copies out are done, in the order of the forward
    done: dict[Hashable, list[float]] = field(default_factory=dict)

    def forward(
        self, chunk: Hashable, start_s: float, seconds: float, steps: tuple[CopyStep, ...]
    ) -> tuple[float, tuple[float, ...]]:
        """Queues the copies out of a forward that starts at `start_s`; returns when it stops, and when each of them is done."""
        done: list[float] = []
        clock_s, out_s, waits = max(start_s, self.left_s), self.out_s, not self.runs_ahead
        if not steps:
            return clock_s + seconds, ()
        # the head, and layers without copies, run after the last copy step
        rest_s, most = seconds - sum([compute_s for compute_s, _, _ in steps]), steps[0].leaving_layers
        for compute_s, copy_s, _ in steps:
            clock_s += compute_s
            if waits and len(done) >= most and done[-most] > clock_s:
                clock_s = done[-most]
            if clock_s > out_s:
                out_s = clock_s
            out_s += copy_s
            done.append(out_s)
        self.out_s = out_s
        self.done[chunk] = done
        if waits and most > 1:
            self.left_s = out_s
        return (max(clock_s, out_s) if waits and most == 1 else clock_s) + rest_s, tuple(done)

    def backward(self, chunk: Hashable, start_s: float, seconds: float, steps: tuple[CopyStep, ...]) -> float:
        """Queues the copies back of a backward that starts at `start_s`; returns when it stops."""
        # the head, and layers without copies, run before the first copy step
        clock_s = start_s + seconds - sum([compute_s for compute_s, _, _ in steps])
        sent_s = self.begun_s if self.runs_ahead else clock_s
        self.begun_s = start_s
        back_s = self.back_s
        for (compute_s, copy_s, _), out_s in zip(steps, reversed(self.done.pop(chunk, ())), strict=True):
            if copy_s:
                back_s = max(back_s, out_s, sent_s) + copy_s
                if back_s > clock_s:
                    clock_s = back_s
            # the next step's copy is requested when this step begins
            sent_s = clock_s
            clock_s += compute_s
        self.back_s = back_s
        return max(clock_s, self.left_s)
