"""Predicts groups that wait for one another inside a schedule: micro-batches that run in turns, or groups that share weights.

Each position of a stage runs the passes of its groups in the order of the plan's turns. A pass begins when all ranks of its
group are free, and what it needs has arrived. Groups that run in step (`StepPlan.in_step`) begin a pass that gathers weights at
once: what one of them waits for, all wait for. If only backwards meet, since they sum gradients, the groups begin passes as they
can, and each backward ends with the slowest. A *lane* has the positions whose groups are equal
in all micro-batches.

On a rank, chunks of several micro-batches may be in flight at once. Their bytes are added up, pass by pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from hf_longctx.plan.core.orders import layer_turns
from hf_longctx.plan.core.types import Action, IntArray, MicroBatch, SequenceGroup, StepPlan, gathers_every_pass
from hf_longctx.plan.core.validate import PlanError
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.memory.stage import joined_moments, message_bytes, most_tokens_at_once
from hf_longctx.plan.predict.event_loop import CopyStep, HostLinks
from hf_longctx.plan.predict.pipeline_run import PredictionCache, StageRun, StageSeconds, check_action

# result that a pass waits for: micro-batch, group in it, whether it is a backward, layer range in the chain of all stages, chunk
_Result = tuple[int, int, bool, int, int]


@dataclass(frozen=True, slots=True)
class LaneRun:
    """Run of a group on one stage, on those of its ranks that are in the same groups throughout the schedule.

    in_flight: most chunks of all micro-batches that wait for their backward on each of these ranks at one time.
    """

    group: SequenceGroup
    ranks: tuple[int, ...]
    run: StageRun
    in_flight: int


@dataclass(slots=True)
class _Member:
    """A group of one micro-batch: its seconds, and the lanes of its positions."""

    group: SequenceGroup
    seconds: StageSeconds
    lanes: tuple[int, ...]
    # passes of every stage, with the seconds of each, of its exchange and of the message after it, and its copies
    passes: list[list[tuple[Action, float, float, float, tuple[CopyStep, ...]]]]
    # (start, stop) of each of these
    times: list[list[tuple[float, float]]] = field(default_factory=list)


def run_schedule(
    plan: StepPlan,
    micro_batches: Sequence[MicroBatch],
    turns: Sequence[Sequence[int]],
    costs: CostModel,
    free_s: Sequence[float],
    known: PredictionCache,
) -> Iterator[LaneRun]:
    """Predicts micro-batches whose ranks are free at `free_s`. turns: micro-batch of every pass of each stage, in running order.

    Raises PlanError if no stage can continue.
    """
    lanes = _lanes(micro_batches)
    members = [
        [
            _member(plan, group, costs, known, tuple(place for place, own in enumerate(lanes) if own[0] in group.positions))
            for group in micro_batch.groups
        ]
        for micro_batch in micro_batches
    ]
    in_step = [plan.in_step(micro_batch) for micro_batch in micro_batches]
    _Loop(plan, members, in_step, turns, lanes, free_s).run()
    for place, positions in enumerate(lanes):
        # (micro-batch, group) of this lane, in order
        own = [(m, member) for m, of_batch in enumerate(members) for member in of_batch if place in member.lanes]
        for stage in range(plan.num_stages):
            ranks = tuple(stage * plan.ranks_per_stage + position for position in positions)
            local = {m: index for index, (m, _) in enumerate(own)}
            own_turns = [local[m] for m in turns[stage] if m in local]
            # output heads hold nothing when they have ended
            order: IntArray = np.array(layer_turns([each.group.stages[stage] for _, each in own], own_turns), dtype=np.int64)
            peak_bytes, host_bytes, peak_tokens, in_flight = _most(plan, [each for _, each in own], stage, order, costs, known)
            for _, member in own:
                actions, _, exchange_s, _, _ = zip(*member.passes[stage], strict=True)
                held = peak_bytes, host_bytes, peak_tokens
                run = StageRun(actions, tuple(member.times[stage]), exchange_s, *held, *member.seconds.ends[stage])
                yield LaneRun(member.group, ranks, run, in_flight)


def _lanes(micro_batches: Sequence[MicroBatch]) -> list[tuple[int, ...]]:
    """Returns the positions of every lane."""
    groups_of: dict[int, list[tuple[int, int]]] = {}
    for index, micro_batch in enumerate(micro_batches):
        for place, group in enumerate(micro_batch.groups):
            for position in group.positions:
                groups_of.setdefault(position, []).append((index, place))
    lanes: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for position in sorted(groups_of):
        lanes.setdefault(tuple(groups_of[position]), []).append(position)
    return list(map(tuple, lanes.values()))


def _member(plan: StepPlan, group: SequenceGroup, costs: CostModel, known: PredictionCache, lanes: tuple[int, ...]) -> _Member:
    seconds = StageSeconds(plan, group, costs, known)
    of_pass, exchanges, hops = seconds.table.tolist(), seconds.exchanges().tolist(), seconds.hops().tolist()
    passes = []
    for stage in group.stages:
        own = []
        for action in known.byte_model(costs.model).passes(stage).with_heads:
            check_action(action, stage)
            is_head = action.kind == "H"
            # output heads come after all stages, see `Wiring`
            place = action.layer_range, 0 if is_head else stage.stage, action.chunk, int(action.kind == "B")
            hop_s = hops[plan.num_stages if is_head else stage.stage][action.chunk][place[3]]
            own.append((action, _at(of_pass, place), _at(exchanges, place), hop_s, seconds.copies(action)))
        passes.append(own)
    return _Member(group, seconds, lanes, passes, [[] for _ in group.stages])


def _at(table: list[list[list[list[float]]]], place: tuple[int, int, int, int]) -> float:
    layer_range, stage, chunk, is_backward = place
    return table[layer_range][stage][chunk][is_backward]


class _Loop:
    """Runs every stage in its order until it has to wait for another stage, until all are done."""

    def __init__(
        self,
        plan: StepPlan,
        members: list[list[_Member]],
        in_step: Sequence[tuple[tuple[int, ...], ...]],
        turns: Sequence[Sequence[int]],
        lanes: Sequence[tuple[int, ...]],
        free_s: Sequence[float],
    ) -> None:
        self.members, self.in_step, self.turns, self.num_stages = members, in_step, turns, plan.num_stages
        self.gathers_every_pass = gathers_every_pass(plan.parameters)
        self.last = plan.num_stages * len(members[0][0].group.stages[0].layer_ranges) - 1
        per_stage = plan.ranks_per_stage
        self.clocks = [
            [max(free_s[stage * per_stage + position] for position in own) for own in lanes] for stage in range(plan.num_stages)
        ]
        self.links = [[HostLinks(False) for _ in lanes] for _ in range(plan.num_stages)]
        self.arrived_s: dict[_Result, float] = {}

    def run(self) -> None:
        """Fills the times of all members."""
        waiting: dict[_Result, int] = {}
        done = [0] * self.num_stages
        ready = list(range(self.num_stages))
        while ready:
            stage = ready.pop()
            while done[stage] < len(self.turns[stage]):
                index = self.turns[stage][done[stage]]
                missing = next((need for need in self._needs(stage, index) if need not in self.arrived_s), None)
                if missing is not None:
                    waiting[missing] = stage
                    break
                made = self._run_pass(stage, index)
                ready += [waiting.pop(result) for result in made if result in waiting]
                done[stage] += 1
        left = [stage for stage, (place, turns) in enumerate(zip(done, self.turns, strict=True)) if place < len(turns)]
        if left:
            raise PlanError(f"deadlock: stages {left} wait for what no stage will make")

    def _needs(self, stage: int, index: int) -> Iterator[_Result]:
        """Results of other layer ranges that the next pass of this micro-batch waits for."""
        for place, member in enumerate(self.members[index]):
            need = self._need(stage, index, place, member)
            if need is not None:
                yield need

    def _need(self, stage: int, index: int, place: int, member: _Member) -> _Result | None:
        action = member.passes[stage][len(member.times[stage])][0]
        where, is_backward = self._where(action), action.kind == "B"
        is_end = where == self.last and action.chunk not in member.seconds.heads if is_backward else not where
        return None if is_end else (index, place, is_backward, where, action.chunk)

    def _where(self, action: Action) -> int:
        """Place of a pass in the chain of all layer ranges, after which output heads come that are not on the last stage."""
        return self.last + 1 if action.kind == "H" else action.layer_range * self.num_stages + action.stage

    def _begin_s(self, stage: int, index: int, place: int) -> float:
        """Second from which on a group can begin its next pass: its ranks are free, and what it needs is there."""
        member = self.members[index][place]
        need = self._need(stage, index, place, member)
        free_s = max(self.clocks[stage][lane] for lane in member.lanes)
        return free_s if need is None else max(free_s, self.arrived_s[need])

    def _run_pass(self, stage: int, index: int) -> list[_Result]:
        """Runs the next pass of all groups of a micro-batch; returns the results that they send."""
        made: list[_Result] = []
        clocks, of_batch = self.clocks[stage], self.members[index]
        for places in self.in_step[index]:
            begins_s, stops_s = [self._begin_s(stage, index, place) for place in places], []
            if self.gathers_every_pass:
                begins_s = [max(begins_s)] * len(places)
            for place, begin_s in zip(places, begins_s, strict=True):
                member = of_batch[place]
                action, seconds, _, _, steps = member.passes[stage][len(member.times[stage])]
                stop_s = begin_s + seconds
                links = [self.links[stage][lane] for lane in member.lanes]
                if steps or (action.kind != "H" and max(each.left_s for each in links) > begin_s):
                    key = index, action.layer_range, action.chunk
                    if action.kind == "F":
                        stop_s = max(each.forward(key, begin_s, seconds, steps)[0] for each in links)
                    else:
                        stop_s = max(each.backward(key, begin_s, seconds, steps) for each in links)
                member.times[stage].append((begin_s, stop_s))
                stops_s.append(stop_s)
            for place, stop_s in zip(places, stops_s, strict=True):
                member = of_batch[place]
                action, _, _, hop_s, _ = member.passes[stage][len(member.times[stage]) - 1]
                goes_back = action.kind != "F"
                if goes_back and not self.gathers_every_pass:
                    # sums of gradients end with the slowest
                    stop_s = max(stops_s)
                for lane in member.lanes:
                    clocks[lane] = stop_s
                there = self._where(action) + (-1 if goes_back else 1)
                if 0 <= there <= self.last + (action.chunk in member.seconds.heads):
                    made.append((index, place, goes_back, there, action.chunk))
                    self.arrived_s[made[-1]] = stop_s + hop_s
        return made


def _most(
    plan: StepPlan, members: Sequence[_Member], stage: int, order: IntArray, costs: CostModel, known: PredictionCache
) -> tuple[int, int, int, int]:
    """Most bytes on the device, states included, and on the host, most tokens at once, and most chunks in flight.

    members: the groups of one lane. order: the place in `members` of every pass.
    """
    byte_model, firsts = known.byte_model(costs.model), list(accumulate((len(m.group.chunks) for m in members), initial=0))
    is_forward, chunks = np.zeros(len(order), dtype=bool), np.zeros(len(order), dtype=np.int64)
    moments = []
    for place, member in enumerate(members):
        own = member.group.stages[stage]
        passes, here = byte_model.passes(own), order == place
        is_forward[here], chunks[here] = passes.is_forward, passes.chunks + firsts[place]
        moments.append(byte_model.moments(member.group, own))
    found = (moments[0] if len(moments) == 1 else joined_moments(moments, order)).most
    first, num_stages = members[0].group.stages[stage], plan.num_stages
    messages = message_bytes(costs.model, first, num_stages, max(max(member.seconds.tokens) for member in members))
    tokens = [count for member in members for count in member.seconds.tokens]
    at_once = most_tokens_at_once(is_forward, chunks, tokens, len(first.layer_ranges))
    in_flight = int(np.cumsum(np.where(is_forward, 1, -1)).max(initial=0))
    return byte_model.stage_states(first, plan) + found.peak + messages, found.host, at_once, in_flight
