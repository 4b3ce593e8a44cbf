"""Predicts the run of a plan under a cost model: seconds of the step and of every rank, bytes, and the timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hf_longctx.plan.core.lending import is_lent
from hf_longctx.plan.core.sharding import shard_tokens
from hf_longctx.plan.core.types import (
    PASSES,
    Action,
    Chunk,
    GroupShape,
    MicroBatch,
    Parameters,
    SequenceGroup,
    StepPlan,
    gathers_every_pass,
    meets_in_every_pass,
)
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.cost.weight_traffic import StageGathers, ends_s, to_nodes_s
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.stage import most_in_flight
from hf_longctx.plan.memory.teacher import TeacherBytes
from hf_longctx.plan.memory.towers import TowerBytes
from hf_longctx.plan.predict.lending import run_lent_pipeline
from hf_longctx.plan.predict.pipeline_run import PredictionCache, StageRun, near_ranks, run_pipeline
from hf_longctx.plan.predict.schedule_run import run_schedule
from hf_longctx.timeline import TimelineEvent


def in_step(runs: Sequence[StageRun], parameters: Parameters, start_s: float = 0.0) -> tuple[StageRun, ...]:
    """Runs of groups that meet in passes from `start_s` on: after every one in which they meet, all wait for the slowest.

    They meet in backwards, whose gradients they sum, and in forwards too if these gather weights. runs: each group's prediction
    alone from second 0, all with the same kinds of actions. Waits for copies before an action keep their length.
    """
    times: list[list[tuple[float, float]]] = [[] for _ in runs]
    shift_s = [start_s] * len(runs)
    for action, passes in zip(runs[0].actions, zip(*(run.times for run in runs), strict=True), strict=True):
        for place, (begin_s, end_s) in enumerate(passes):
            times[place].append((begin_s + shift_s[place], end_s + shift_s[place]))
        if action.kind == "B" or gathers_every_pass(parameters):
            last_s = max(own[-1][1] for own in times)
            shift_s = [last_s - end_s for _, end_s in passes]
    return tuple(replace(run, times=tuple(own)) for run, own in zip(runs, times, strict=True))


@dataclass(frozen=True, slots=True)
class RankUse:
    """Seconds that one rank spends on the chunks of a step, and the most tokens that it holds at once.

    compute_s + exchange_s + idle_s is the step's time without `Evaluation.once_s`.
    """

    rank: int
    compute_s: float
    exchange_s: float
    idle_s: float
    peak_tokens: int

    @property
    def busy_s(self) -> float:
        return self.compute_s + self.exchange_s


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Predicted seconds and bytes of a plan."""

    step_s: float
    # seconds that a step spends once, on the optimizer and everything else that is not part of a chunk
    once_s: float
    ranks: tuple[RankUse, ...]
    # one entry per rank
    peak_bytes: tuple[int, ...]
    host_bytes: tuple[int, ...]
    # every pass of every rank, and the communication inside each
    events: tuple[TimelineEvent, ...]
    exchange_s: tuple[float, ...]
    # seconds that count for gathers of weights and reduce-scatters of gradients beside `step_s`: with several stages, only those
    # before a stage's first pass and after its last one
    gathers_s: float
    # for each stage, the most chunks that wait for their backward at one time; a chunk counts once for each layer range
    # where it waits
    in_flight: tuple[int, ...]
    # bytes of every group on a rank of the first stage, without towers, by the id of its chunks and its positions
    text_bytes: Mapping[tuple[int, tuple[int, ...]], int] = field(compare=False)

    @property
    def busy_s(self) -> tuple[float, ...]:
        return tuple(rank.busy_s for rank in self.ranks)


def evaluate_plan(plan: StepPlan, costs: CostModel, with_events: bool = True, known: PredictionCache | None = None) -> Evaluation:
    """Predicts the plan's run. A rank waits for its group; ranks that hold one copy of the shards end every micro-batch together.

    Each group is a pipeline through its positions on all stages. `with_events=False` leaves `events` empty, which is faster.
    known: cache for plans of the same model, so that the bytes of equal chunks are computed once. Raises ValueError naming what
    cannot be predicted yet: lent ranks together with interleaving, policies or packs. Raises PlanError for a deadlock.
    """
    if plan.media:
        costs = replace(costs, media=plan.media)
    run = _Run(plan, costs, with_events, PredictionCache() if known is None else known)
    if plan.turns:
        run.enter_schedule(plan.micro_batches, plan.turns)
        run.leave_together()
    for micro_batch in plan.micro_batches if not plan.turns else ():
        run.enter_all(micro_batch)
        run.leave_together()
    return run.result()


# actions of one chunk on one stage: its forward, then its backward
_KEPT_ACTIONS = (Action("F", 0, 0), Action("B", 0, 0))


class _Run:
    """Clocks of all ranks, and the seconds, bytes and events that have been added up so far."""

    def __init__(self, plan: StepPlan, costs: CostModel, with_events: bool, known: PredictionCache) -> None:
        self.plan, self.costs, self.with_events, self.known = plan, costs, with_events, known
        # ranks that gather layers together
        self.block_ranks = plan.meeting_ranks
        self.clocks = [0.0] * plan.num_ranks
        self.busy, self.exchanging = [0.0] * plan.num_ranks, [0.0] * plan.num_ranks
        self.tokens, self.host_bytes = [0] * plan.num_ranks, [0] * plan.num_ranks
        self.state_bytes = state_bytes(plan, costs, known.byte_model(costs.model))
        self.peak_bytes = _with_teacher(plan, costs, self.state_bytes)
        self.in_flight = [0] * plan.num_stages
        self.text_bytes: dict[tuple[int, tuple[int, ...]], int] = {}
        self.towers = TowerBytes(plan, known.byte_model(costs.model))
        self.events: list[TimelineEvent] = []
        self.exchange_s: list[float] = []
        # (shape, near ranks, is backward) -> seconds of an exchange, fixed and per token; many groups have equal keys
        self.exchanges: dict[tuple[GroupShape, int, bool], tuple[float, float]] = {}
        whole = known.gathers(plan, costs, costs.model.num_layers, True, True) if plan.num_stages == 1 else StageGathers()
        # passes of every block in the present micro-batch (see `StageGathers.counted_s`), the slowest group's in each place
        self.gathers, self.passes = whole, [list[tuple[bool, float]]() for _ in range(plan.num_ranks // self.block_ranks)]
        self.counted_s = [0.0] * len(self.passes)
        # seconds that the first and the last pass of every block compute
        self.ends: dict[int, tuple[float, float]] = {}
        # seconds that every stage counts before its first pass, since it gathers when its message is there; those for which
        # copies of its nodes arrive later than the message; and those that every rank counts after its last pass
        self.before_s, self.late_s, self.after_s = [0.0] * plan.num_stages, [0.0] * plan.num_stages, dict[int, float]()

    def enter_all(self, micro_batch: MicroBatch) -> None:
        """Runs all groups of a micro-batch; those that share weights run in step.

        On one stage only those of several chunks: one forward and one backward take about the same shares of every group's
        seconds, so that waits inside do not count.
        """
        groups = micro_batch.groups
        has_waits = self.plan.num_stages > 1 or any(len(group.chunks) > 1 for group in groups)
        for places in self.plan.in_step(micro_batch) if has_waits else [range(len(groups))]:
            own = [groups[place] for place in places]
            if self.plan.num_stages > 1 and len(own) > 1:
                turns = [[0] * sum(action.kind in PASSES for action in stage.actions) for stage in own[0].stages]
                self.enter_schedule((MicroBatch(tuple(own)),), turns)
            elif has_waits and len(own) > 1 and len(own[0].chunks) > 1:
                self._enter_in_step(own)
            else:
                for group in own:
                    self.enter(group)

    def enter(self, group: SequenceGroup) -> None:
        """Runs all actions of a group; each stage starts when the last of its ranks is free."""
        per_stage = self.plan.ranks_per_stage
        ranks = [[stage.stage * per_stage + position for position in group.positions] for stage in group.stages]
        starts = [max(self.clocks[rank] for rank in of_stage) for of_stage in ranks]
        for place, stage in enumerate(group.stages):
            self.in_flight[place] = max(self.in_flight[place], most_in_flight(stage.actions))
        if keeps_whole_chunk(group, self.costs):
            self._enter_kept(group, starts[0])
            return
        run = run_lent_pipeline if is_lent(group) and len(group.stages) > 1 else run_pipeline
        for of_stage, stage_run in zip(ranks, run(self.plan, group, self.costs, starts, self.known), strict=True):
            self._add_run(group, of_stage, stage_run)

    def enter_schedule(self, micro_batches: Sequence[MicroBatch], turns: Sequence[Sequence[int]]) -> None:
        """Runs micro-batches in turns, and groups in step."""
        for each in run_schedule(self.plan, micro_batches, turns, self.costs, tuple(self.clocks), self.known):
            place = each.ranks[0] // self.plan.ranks_per_stage
            self.in_flight[place] = max(self.in_flight[place], each.in_flight)
            self._add_run(each.group, each.ranks, each.run)

    def _enter_in_step(self, groups: Sequence[SequenceGroup]) -> None:
        """Runs groups on one stage that meet in passes, and so wait for one another."""
        start_s = max(self.clocks[position] for group in groups for position in group.positions)
        runs = [run_pipeline(self.plan, group, self.costs, [0.0], self.known)[0] for group in groups]
        for group, run in zip(groups, in_step(runs, self.plan.parameters, start_s), strict=True):
            self.in_flight[0] = max(self.in_flight[0], most_in_flight(group.stages[0].actions))
            self._add_run(group, group.positions, run)

    def _add_run(self, group: SequenceGroup, ranks: Sequence[int], run: StageRun) -> None:
        """Adds the run of one stage of a group to its ranks."""
        self._add(ranks, run.times, run.exchange_s)
        self._note_passes(ranks, run)
        if ranks[0] not in self.after_s:
            stage = ranks[0] // self.plan.ranks_per_stage
            self.before_s[stage] = max(self.before_s[stage], run.ends_s[0])
            # nodes gather their copies from the start of the step on
            self.late_s[stage] = max(self.late_s[stage], run.to_nodes_s - run.times[0][0])
        for rank in ranks:
            self.tokens[rank] = max(self.tokens[rank], run.peak_tokens)
            self.peak_bytes[rank] = max(self.peak_bytes[rank], run.peak_bytes)
            self.host_bytes[rank] = max(self.host_bytes[rank], run.host_bytes)
            self.after_s[rank] = run.ends_s[1]
        if ranks[0] < self.plan.ranks_per_stage:
            self._add_towers(group, run.peak_bytes)
        self._record(group, ranks, run.actions, run.times, run.exchange_s)

    def _add_towers(self, group: SequenceGroup, text_bytes: int) -> None:
        """Adds bytes of towers to those that a group needs on the first stage without them."""
        self.text_bytes[id(group.chunks), group.positions] = text_bytes
        for place, position in enumerate(group.positions if self.plan.media else ()):
            self.peak_bytes[position] = max(self.peak_bytes[position], text_bytes + self.towers.above(group, place))

    def _enter_kept(self, group: SequenceGroup, start_s: float) -> None:
        """Runs a chunk that keeps everything by formulas for the whole model; most groups without stages need no event loop."""
        (stage,), (chunk,) = group.stages, group.chunks
        near = near_ranks(group.positions, self.costs.cluster.ranks_per_node)
        key = id(group.chunks), id(group.towers), group.shape, near
        if key not in self.known.kept_chunks:
            inside_s = [self._exchange_s(chunk, group.shape, near, is_backward) for is_backward in (False, True)]
            passes_s = [
                self.costs.local_s(chunk, group.shape, bool(is_backward))
                + exchange_s
                + self.costs.chunk_towers_s(group, chunk, bool(is_backward))
                for is_backward, exchange_s in enumerate(inside_s)
            ]
            self.known.kept_chunks[key] = group, passes_s, inside_s, shard_tokens(chunk, group.shape)
        _, (forward_s, backward_s), inside, shards = self.known.kept_chunks[key]
        middle_s = start_s + forward_s
        times = [(start_s, middle_s), (middle_s, middle_s + backward_s)]
        self._add(group.positions, times, inside)
        self._note_passes(group.positions, StageRun(stage.actions, tuple(times), tuple(inside), 0, 0, 0))
        chunk_bytes = self.known.byte_model(self.costs.model).kept_peak(group)
        for position, tokens in zip(group.positions, shards, strict=True):
            self.tokens[position] = max(self.tokens[position], tokens)
            self.peak_bytes[position] = max(self.peak_bytes[position], self.state_bytes[position] + chunk_bytes)
        self._add_towers(group, self.state_bytes[group.positions[0]] + chunk_bytes)
        self._record(group, group.positions, stage.actions, times, inside)

    def _exchange_s(self, chunk: Chunk, shape: GroupShape, near: int, is_backward: bool) -> float:
        """Seconds of communication in one pass of a chunk over the whole model."""
        key = shape, near, is_backward
        if key not in self.exchanges:
            self.exchanges[key] = self.costs.exchange_line(shape, is_backward, near)
        fixed_s, token_s = self.exchanges[key]
        # a group with fewer tokens than ranks runs dummy tokens
        return fixed_s + token_s * max(chunk.num_tokens, shape.degree)

    def _add(self, ranks: Sequence[int], times: Sequence[tuple[float, float]], exchange_s: Sequence[float]) -> None:
        """Adds the passes of one stage to the clocks of its ranks."""
        busy_s, exchanging_s = sum(stop_s - start_s for start_s, stop_s in times), sum(exchange_s)
        for rank in ranks:
            self.clocks[rank] = max(self.clocks[rank], times[-1][1])
            self.busy[rank] += busy_s
            self.exchanging[rank] += exchanging_s

    def _note_passes(self, ranks: Sequence[int], run: StageRun) -> None:
        """Notes for how long the passes of a group compute, if gathers run beside them."""
        if not self.gathers.passes:
            return
        passes = run.passes
        if not meets_in_every_pass(self.plan.parameters):
            # groups of a block may have different numbers of chunks, of which only the first and the last one meet
            passes = [passes[0], passes[-1]]
        for block in {rank // self.block_ranks for rank in ranks}:
            known = self.passes[block] or passes
            self.passes[block] = [max(pair) for pair in zip(known, passes, strict=True)]

    def _record(
        self,
        group: SequenceGroup,
        ranks: Sequence[int],
        actions: Sequence[Action],
        times: Sequence[tuple[float, float]],
        exchange_s: Sequence[float],
    ) -> None:
        for action, time, inside_s in zip(actions, times, exchange_s, strict=True) if self.with_events else ():
            chunk = group.chunks[action.chunk]
            detail = f"<{group.degree}> {chunk.num_tokens} tokens in {len(chunk.spans)} sequence(s)"
            self.events += [TimelineEvent(rank, action.kind, str(action), *time, detail) for rank in ranks]
            self.exchange_s += [inside_s] * len(ranks)

    def leave_together(self) -> None:
        """Ends a micro-batch: ranks that gather layers together wait for the last of them."""
        block = self.block_ranks
        for place, passes in enumerate(self.passes):
            self.counted_s[place] += self.gathers.counted_s(passes)
            if passes:
                (_, first_s), *_, (_, last_s) = passes
                self.ends[place] = self.ends.get(place, (first_s, 0.0))[0], last_s
            self.passes[place] = []
        if block > 1:
            for first in range(0, len(self.clocks), block):
                self.clocks[first : first + block] = [max(self.clocks[first : first + block])] * block

    def result(self) -> Evaluation:
        chunks_s = max(self.clocks)
        counted_s = [
            self.counted_s[place] + sum(ends_s([self.gathers], *own)) + to_nodes_s([self.gathers], own[0])
            for place, own in self.ends.items()
        ]
        last_s = max((self.clocks[rank] + after_s for rank, after_s in self.after_s.items()), default=0.0)
        once_s, starts_s = self.costs.coefficients.step_s, 0.0
        for before_s, late_s in zip(self.before_s, self.late_s, strict=True):
            # the message is as late as what the stages before it have counted
            starts_s += before_s + max(0.0, late_s - starts_s)
        ranks = tuple(
            # rounding must not make a wait negative
            RankUse(rank, busy_s - exchanged_s, exchanged_s, max(0.0, chunks_s - busy_s), tokens)
            for rank, (busy_s, exchanged_s, tokens) in enumerate(zip(self.busy, self.exchanging, self.tokens, strict=True))
        )
        return Evaluation(
            step_s=chunks_s + once_s,
            once_s=once_s,
            ranks=ranks,
            peak_bytes=tuple(self.peak_bytes),
            host_bytes=tuple(self.host_bytes),
            events=tuple(self.events),
            exchange_s=tuple(self.exchange_s),
            gathers_s=starts_s + max(0.0, last_s - chunks_s) + max(counted_s, default=0.0),
            in_flight=tuple(self.in_flight),
            text_bytes=self.text_bytes,
        )


def keeps_whole_chunk(group: SequenceGroup, costs: CostModel) -> bool:
    """Whether the group runs one chunk over the whole model on one stage, forward and backward, and keeps everything."""
    first = group.stages[0]
    return (
        len(group.stages) == len(group.chunks) == len(first.layer_ranges) == 1
        and not first.activations
        and first.num_layers == costs.model.num_layers
        and first.actions == _KEPT_ACTIONS
    )


def state_bytes(plan: StepPlan, costs: CostModel, byte_model: ByteModel) -> list[int]:
    """Bytes of weights, gradients and optimizer states on every rank, and of the weights of a teacher."""
    taught = 0 if costs.teacher is None else _teacher_bytes(costs.teacher, costs).held(plan.num_stages)
    if plan.num_stages == 1:
        return [byte_model.states(costs.parameters, costs.shard_ranks) + taught] * plan.num_ranks
    stages = plan.micro_batches[0].groups[0].stages if plan.micro_batches else ()
    return [byte_model.stage_states(stage, plan) + taught for stage in stages for _ in range(plan.ranks_per_stage)]


def _teacher_bytes(teacher: CostModel, costs: CostModel) -> TeacherBytes:
    return TeacherBytes(teacher.model, costs.parameters, costs.shard_ranks)


def _with_teacher(plan: StepPlan, costs: CostModel, held_bytes: Sequence[int]) -> list[int]:
    """Peak bytes of every rank before its own passes: held ones, and those of the forwards of a teacher, if there is one."""
    peaks = list(held_bytes)
    if costs.teacher is None:
        return peaks
    taught = _teacher_bytes(costs.teacher, costs)
    for group in (group for micro_batch in plan.micro_batches for group in micro_batch.groups):
        for place, position in enumerate(group.positions):
            work = taught.forward(group, place, plan.num_stages)
            for rank in range(position, plan.num_ranks, plan.ranks_per_stage):
                peaks[rank] = max(peaks[rank], held_bytes[rank] + work)
    return peaks
