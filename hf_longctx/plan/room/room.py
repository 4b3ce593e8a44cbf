"""Makes a plan fit: groups that cannot keep everything get activation policies, and on one stage perhaps slices.

One loop serves groups on one stage and pipelines (`Room.for_group`). A group has *ways* to run, each a list of programs. A
program proposes policies and predicts the run of the group under them. The first program with a trial that fits ends its way, the
trials so far decide whether another way is tried, and the group gets the fitting trial with the fewest predicted seconds.

On one stage (`GroupRoom`) the programs of a chunk are the loss in tiles, the linear program of `policies/fill.py`, which chooses
the tensors of each layer to keep, offload or recompute, and least memory. Slices are another way: the longest sequence is cut,
with a K/V book, so that a layer works on fewer tokens at a time, and the program chooses for whole slices. Groups whose ranks
gather weights together run one order of actions, so all of them are cut into equally many slices, or none is.

On several stages (`PipelineRoom`) the programs are the levels of `policies/levels.py`, which say for every chunk and stage what
to offload and recompute, first with attention outputs and inputs on the device, then with both on the host, and least memory;
after these, the same with attention recomputed. No program is tried for a group that exceeds the limit even with every layer
recomputed and all inputs on the host. Stages that fit with everything kept stay as they are.

Programs estimate workspace and copies only roughly, so a program is solved again with less room while its prediction is over the
limit, and with more if much room is left.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np

from hf_longctx.plan.chunks import SLICE_COUNTS, slice_counts, sliced_in_step
from hf_longctx.plan.core.settings import ActivationBudget, NoRoom
from hf_longctx.plan.core.sharding import fullest_share
from hf_longctx.plan.core.types import (
    Action,
    ActivationPolicy,
    Blocks,
    FloatArray,
    GroupShape,
    LayerPolicy,
    LayerRange,
    MicroBatch,
    SequenceGroup,
    StagePlan,
    StepPlan,
    TensorShare,
)
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.cost.traffic import group_shapes, plainest_shape
from hf_longctx.plan.cost.weight_traffic import whole_gathers
from hf_longctx.plan.memory.capacity import may_rerun
from hf_longctx.plan.memory.saved_tensors import layer_class_bytes
from hf_longctx.plan.memory.stage import message_bytes, most_in_flight
from hf_longctx.plan.model.attention_pairs import SpanRates
from hf_longctx.plan.model.layers import ATTENTION
from hf_longctx.plan.policies.fill import MemoryLimits, choose_policy
from hf_longctx.plan.policies.fit import (
    WAYS,
    FittedGroups,
    Program,
    Trial,
    first_fitting,
    in_equal_slices,
    in_tiles,
    least_memory_group,
    search_room,
    with_layers,
    with_stages_of,
)
from hf_longctx.plan.policies.levels import choose_levels
from hf_longctx.plan.policies.slots import Slot, SlotTable, chunk_slot
from hf_longctx.plan.predict.evaluate import in_step
from hf_longctx.plan.predict.pipeline_run import (
    PredictionCache,
    StageRun,
    run_alone,
    run_pipeline,
)
from hf_longctx.plan.predict.planning import Planning
from hf_longctx.plan.room.cells import GroupCells, recomputed_layer


@dataclass(frozen=True, slots=True)
class RoomConstants:
    """Constants of the search for room."""

    # solutions of one program, each with another room
    attempts: int = 6
    # share of the limit that must be free to try again with more room, and how much of the free bytes is given back then
    worth: float = 0.02
    regain: float = 0.8

    # one stage. Answers for different groups and slices of a step up to which programs are solved and slices tried; from then on
    # the greedy order chooses
    most_programs: int = 128
    # share of the device's room that gradients may take while slices run, for slices to be tried where a whole chunk fits
    most_waiting: float = 0.5

    # pipelines. How many times the excess of a stage is taken off its room, and the share of the limit that is taken off besides,
    # since copies that wait for each other add up
    shrink: float = 1.2
    margin: float = 0.004
    # share of a group's seconds below which a better solution is not searched for
    tolerance: float = 0.001
    # factor on the group's seconds with everything kept, and with what it recomputes, beyond which it is tried without offloading
    slack: float = 1.005
    # share of the limit by which the least bytes of a group may exceed it for anything to be tried, since policies of the program
    # may need slightly less workspace
    hopeless: float = 0.001
    # factor on the seconds with everything kept beyond which a program's answer is compared with recomputing every layer but for
    # attention: where little room is left, attention outputs on the host may take less time than to recompute some of them
    much_lost: float = 1.2


# repeat `recipes/bench/cpu/memory.py`, `recipes/bench/papers/sppo.py`, `recipes/bench/papers/infinipipe.py` and the tables stages
# and policies of `recipes/bench/cpu/planner.py` when one of these changes
_ROOM = RoomConstants()

# turns the shares of all slots into the layer policies of each chunk
_Layers = Callable[[Sequence[tuple[TensorShare, ...]]], list[tuple[LayerPolicy, ...]]]
# device bytes of every stage for saved tensors and workspace, and host bytes
_StageRoom = tuple[tuple[float, ...], float]
# makes a group with every layer recomputed, given whether attention outputs are kept, and the host bytes for inputs
_LeastMemory = Callable[[bool, int], SequenceGroup]


def make_room(plan: StepPlan, planning: Planning) -> StepPlan:
    """Gives policies, and on one stage perhaps slices, to every group that does not fit as it is.

    Without a budget the plan is returned unchanged. `device_bytes` of the budget is the room of the stage with the most weights
    and optimizer states; other stages have more. Raises NoRoom for the first group for which nothing fits.
    """
    for made in steps_of_room(plan, planning):
        plan = made
    return plan


def steps_of_room(plan: StepPlan, planning: Planning) -> Iterator[StepPlan]:
    """Yields the plan after each of its micro-batches has got the room of `make_room`."""
    budget = planning.config.activations
    if budget is None:
        return
    costs, caches = planning.costs, (planning.known, planning.fitted)
    room: GroupRoom | PipelineRoom
    if plan.num_stages == 1:
        room = GroupRoom(costs, budget, not planning.config.one_micro_batch, *caches, plan.blocks)
    else:
        room = PipelineRoom(plan, costs, budget, True, *caches)
    made = list(plan.micro_batches)
    for place, each in enumerate(plan.micro_batches):
        made[place] = MicroBatch(room.fitting(plan, each))
        yield replace(plan, micro_batches=tuple(made))


def policy_reason(group: SequenceGroup, costs: CostModel, budget: ActivationBudget) -> str:
    """Explains in one sentence why a group on one stage that `make_room` fitted keeps, offloads or recomputes its tensors."""
    (stage,) = group.stages
    if not stage.activations:
        return "nothing is offloaded: everything fits on the device"
    if not any(policy.layers for policy in stage.activations):
        return "nothing is offloaded: everything but logits fits on the device"
    return GroupRoom(costs, budget).reason(group)


class Room(ABC):
    """The loop that makes groups fit. Subclasses define the ways, and predict the seconds of a group.

    known, fitted: caches of the step: bytes and runs that were counted and predicted before, and groups that were solved.
    """

    def __init__(
        self, costs: CostModel, budget: ActivationBudget, known: PredictionCache | None, fitted: FittedGroups | None
    ) -> None:
        self.costs, self.budget = costs, budget
        self.predictions = PredictionCache() if known is None else known
        self.fitted = FittedGroups() if fitted is None else fitted
        self.byte_model = self.predictions.byte_model(costs.model)

    def for_group(self, group: SequenceGroup) -> SequenceGroup:
        """Gives the group the policies that it needs to fit; raises NoRoom if nothing fits."""
        return self.fitted.fit(group, self._search, self._nothing_fits, self._variant(group))

    def _search(self, group: SequenceGroup) -> list[Trial]:
        """Trials that fit, of the group's ways one after the other."""
        found: list[Trial] = []
        for programs in self._ways(group, found):
            found += first_fitting(programs)
        return found

    def trial(self, group: SequenceGroup, **counted: Any) -> Trial:
        """Predicts the run of the group alone and compares it with the limits; `counted`: fields of `Trial`.

        Groups that do not fit get no seconds, which saves planning time.
        """
        on_host = max(self.byte_model.moments(group, stage).most.host for stage in group.stages)
        trial = Trial(group, math.inf, self.over_bytes(group), float(on_host - self.budget.host_bytes), **counted)
        if not trial.fits:
            return trial
        seconds, gathers_s = self._run_s(group)
        return replace(trial, seconds=seconds, gathers_s=gathers_s)

    def _least_memory_group(
        self, group: SequenceGroup, host_bytes: int, keeps_attention: bool = False, reruns: bool = False, head_pieces: int = 1
    ) -> SequenceGroup:
        """The group with every layer of every chunk recomputed, see `least_memory_group`.

        Host bytes are divided in proportion to tokens times layers, relative to the most that are in flight at once.
        """
        tokens = self.predictions.seconds(group, self.costs).tokens

        def layer_tokens(action: Action) -> int:
            return tokens[action.chunk] * group.stages[action.stage].layer_ranges[action.layer_range].num_layers

        @cache
        def in_flight() -> int:
            return max(most_in_flight(stage.actions, layer_tokens) for stage in group.stages)

        def host_share(num_tokens: int, num_layers: int) -> int:
            return int(host_bytes * num_tokens * num_layers / max(1, in_flight())) if host_bytes else 0

        ways = keeps_attention, reruns, head_pieces
        return least_memory_group(group, self.costs.model, self.budget.tile_tokens, host_share, *ways)

    @abstractmethod
    def over_bytes(self, group: SequenceGroup) -> tuple[float, ...]:
        """Bytes above the limit on each stage of a group under its policies."""

    @abstractmethod
    def _ways(self, group: SequenceGroup, found: list[Trial]) -> Iterator[Iterable[Program]]:
        """Programs of each way to run the group. found: the trials that fit of all ways before."""

    @abstractmethod
    def _run_s(self, group: SequenceGroup) -> tuple[float, float]:
        """Predicted seconds of the group alone, and of gathers that a whole chunk would not need."""

    @abstractmethod
    def _nothing_fits(self, group: SequenceGroup) -> str:
        """The error if no way fits."""

    def _variant(self, group: SequenceGroup) -> Any:
        """Key of the facts that decide the answer for a group, besides its chunks, shape and actions."""
        return None


class GroupRoom(Room):
    """Makes room for groups on one stage: policies, and slices if `allows_slices`. blocks: those of every sequence."""

    def __init__(
        self,
        costs: CostModel,
        budget: ActivationBudget,
        allows_slices: bool = True,
        known: PredictionCache | None = None,
        fitted: FittedGroups | None = None,
        blocks: Sequence[Blocks] = (),
    ) -> None:
        super().__init__(costs, budget, known, fitted)
        self.allows_slices = allows_slices
        self.blocks = blocks
        self._gathers = whole_gathers(costs)
        self._accumulated_bytes = self.byte_model.accumulated(costs.parameters, costs.shard_ranks)

    def fitting(self, plan: StepPlan, micro_batch: MicroBatch) -> tuple[SequenceGroup, ...]:
        """The groups of a micro-batch with room; raises NoRoom naming the first one for which nothing fits."""
        found = list(micro_batch.groups)
        for places in plan.in_step(micro_batch):
            groups = [found[place] for place in places]
            made = self._in_step(groups) if len(groups) > 1 else [self._alone(groups[0])]
            for place, group in zip(places, made, strict=True):
                found[place] = group
        return replayed_together(found) if self.costs.model.experts.are_spread else tuple(found)

    def _alone(self, group: SequenceGroup) -> SequenceGroup:
        """Makes room for a group that waits for no other; an equal earlier group gives the answer."""
        if self._is_kept(group):
            return group

        def search(group: SequenceGroup) -> list[Trial]:
            with suppress(NoRoom):
                return [Trial(made, 0.0, (0.0,)) for made in self._in_step([group])]
            return []

        return self.fitted.fit(group, search, self._nothing_fits, ("alone", self._blocks_in(group)))

    def _blocks_in(self, group: SequenceGroup) -> tuple[Blocks, ...]:
        """The blocks of every sequence of a group, on which its slices depend."""
        return tuple(self.blocks[span.sequence] for chunk in group.chunks for span in chunk.spans) if self.blocks else ()

    def _in_step(self, groups: Sequence[SequenceGroup]) -> list[SequenceGroup]:
        """Makes room for groups that run one order of actions: all keep their one chunk, or all are cut in step.

        Raises NoRoom naming the first group whose chunk does not fit, if slices do not fit either.
        """
        best: list[SequenceGroup] = []
        # the error itself would hold this frame by its traceback, and so itself
        refusal = ""
        try:
            best = self._whole_chunks(groups)
        except NoRoom as error:
            refusal = str(error)
        is_crowded = self._accumulated_bytes > _ROOM.most_waiting * self.budget.device_bytes
        if best and (is_crowded or not self.allows_slices or not any(group.stages[0].activations for group in best)):
            return best
        best_s = self._together_s(best) if best else math.inf
        tries = self.allows_slices and (self._solves or not best)
        # a rank without sequences runs a dummy chunk, which cannot be cut
        busy = [group for group in groups if group.num_tokens]
        for count in sorted({count for group in busy for count in self._slice_counts(group)}) if tries else ():
            if max(self._least_sliced_s(group, count) for group in busy) >= best_s:
                break
            made = self._cut(sliced_in_step(groups, count, self._rates, self.blocks))
            seconds = self._together_s(made) if made else math.inf
            if seconds < best_s:
                best, best_s = made, seconds
            elif made:
                # more slices need less room, which no longer pays for their gathers
                break
        best = best or [trial.group for trial in self._in_equal_slices(groups, WAYS[1:] if self.allows_slices else ())]
        if not best:
            raise NoRoom(refusal)
        return best

    def _whole_chunks(self, groups: Sequence[SequenceGroup]) -> list[SequenceGroup]:
        """Policies of groups that keep their one chunk and wait for the slowest of them.

        Memory is filled greedily first. Programs are solved for the groups for which others wait, until none of these gets
        faster: elsewhere they would save no time. Raises NoRoom for the first group that does not fit.
        """
        is_kept = [self._is_kept(group) for group in groups]
        found = [group if kept else self._filled(group) for group, kept in zip(groups, is_kept, strict=True)]
        is_solved = list(is_kept)
        while True:
            runs = [run_alone(group, self.costs, self.predictions) for group in found]
            passes_s = [(*(stop_s - start_s for start_s, stop_s in run.times), run.times[-1][1]) for run in runs]
            longest_s = [max(seconds) for seconds in zip(*passes_s, strict=True)]
            is_slowest = [any(map(operator.ge, seconds, longest_s)) for seconds in passes_s]
            waited_for = [place for place, slowest in enumerate(is_slowest) if slowest and not is_solved[place]]
            if not waited_for:
                return found
            for place in waited_for:
                is_solved[place] = True
                solved = self.for_group(groups[place])
                found[place] = min(found[place], solved, key=lambda group: self._run_s(group)[0])

    def _filled(self, group: SequenceGroup) -> SequenceGroup:
        """The group with memory filled greedily, or as `for_group` makes it fit if that is too much."""

        def search(group: SequenceGroup) -> list[Trial]:
            return first_fitting(self._programs(group, fills=True)) or [Trial(self.for_group(group), 0.0, (0.0,))]

        return self.fitted.filled.fit(group, search, self._nothing_fits)

    def _is_kept(self, group: SequenceGroup) -> bool:
        """Whether a group has at most `kept_tokens` on a rank, and its bytes fit with everything kept.

        Groups of equal tokens need different bytes: exchanges and attention of several documents have workspace of their own.
        """
        is_small = fullest_share(group.chunks[0], group.shape) <= self.budget.kept_tokens
        return is_small and self.byte_model.kept_peak(group) <= self.budget.device_bytes

    def _cut(self, sliced: Sequence[SequenceGroup]) -> list[SequenceGroup]:
        """Makes room for groups of several chunks; empty if one does not fit."""
        found = list(sliced)
        # those that may take longest first
        for place in sorted(range(len(sliced)), key=lambda place: -self._kept_s(sliced[place])):
            try:
                found[place] = self.for_group(sliced[place])
            except NoRoom:
                return []
        return found

    def _ways(self, group: SequenceGroup, found: list[Trial]) -> Iterator[Iterable[Program]]:
        """The group's own shape, or else the first other shape of its ranks that holds its chunks, or else least memory.

        A ring that fits in slices alone is compared with that other shape, since every slice sends earlier ones around again.
        """
        yield self._programs(group)
        if any(trial.group.shape.num_blocks == 1 or len(trial.group.chunks) == 1 for trial in found):
            return
        # rings are chosen by seconds alone, but need more bytes than Ulysses
        num_found = len(found)
        for shape in group_shapes(group.degree, self.costs.method, self.costs.model, self.costs.cluster):
            if shape != group.shape and len(found) == num_found:
                yield self._programs(SequenceGroup.of(shape, group.positions, group.chunks, group.stages))
        if not found and len(group.chunks) == 1:
            # up to `longest_alone` tokens, one of these ways fits
            yield [lambda: self._in_equal_slices([group], WAYS[:1])]

    def _programs(self, group: SequenceGroup, fills: bool = False) -> list[Program]:
        """The loss in tiles, policies of the linear program, and least memory, in the group's own shape.

        fills: memory is filled greedily in place of the last two.
        """
        slots, layers = self._slots(group)
        table = SlotTable(slots)
        programs: list[Program] = [partial(self._programmed, group, table, layers, fills=fills)]
        # a layer without a policy holds at least what its classes hold
        if table.num_bytes.sum() <= self.budget.device_bytes:
            programs.insert(0, lambda: [self.trial(in_tiles(group, self.budget.tile_tokens))])
        if fills:
            return programs
        ways: list[tuple[bool, int]] = [(False, 1)]
        if len(group.chunks) == 1:
            # the cheaper first; with another run of layers, slices would write their keys and values again
            most = self.costs.model.head_pieces(group.shape.ulysses)
            reruns = (False, True) if may_rerun(self.costs.model, self.costs.parameters) else (False,)
            ways = [(again, pieces) for again in reruns for pieces in sorted({1, most})]
        return [*programs, *(partial(self._least_memory_trials, group, *way) for way in ways)]

    def _least_memory_trials(self, group: SequenceGroup, reruns: bool, head_pieces: int) -> list[Trial]:
        """The group in least memory, with the host and without it, since copies need device memory too."""
        hosts = (self.budget.host_bytes, 0)
        return [self.trial(self._least_memory_group(group, host_bytes, False, reruns, head_pieces)) for host_bytes in hosts]

    def _in_equal_slices(self, groups: Sequence[SequenceGroup], ways: Sequence[int]) -> list[Trial]:
        """Groups that run one order of actions in the first of these numbers of equal slices in which they fit, or none.

        None if there is more than one sequence. Ranks share attention in the plainest shape, in which room is counted.
        """
        costs, place = self.costs, (self.costs.method, self.costs.model, self.costs.cluster)
        if sum(len(group.chunks[0].spans) for group in groups) != 1:
            return []
        shapes = [plainest_shape(group.degree, *place) for group in groups]
        pairs = zip(shapes, groups, strict=True)
        plain = [SequenceGroup.of(shape, group.positions, group.chunks, group.stages) for shape, group in pairs]
        for num_slices in ways:
            trials = [self.trial(group) for group in in_equal_slices(plain, costs.model, self.budget, num_slices, self.blocks)]
            if all(trial.fits for trial in trials):
                return trials
        return []

    @property
    def _solves(self) -> bool:
        return len(self.fitted) < _ROOM.most_programs

    def _together_s(self, groups: Sequence[SequenceGroup]) -> float:
        """Seconds of groups that wait for one another in passes, with gathers that a whole chunk would not need."""
        runs = [run_alone(group, self.costs, self.predictions) for group in groups]
        seconds = max(run.times[-1][1] for run in in_step(runs, self.costs.parameters))
        return seconds + self._gathers_s(runs)

    def _run_s(self, group: SequenceGroup) -> tuple[float, float]:
        run = run_alone(group, self.costs, self.predictions)
        return run.times[-1][1], self._gathers_s([run])

    def _gathers_s(self, runs: Sequence[StageRun]) -> float:
        """Seconds that count for gathers of weights which one chunk would not need, in a round of several chunks.

        runs: of groups that gather together.
        """
        if len(runs[0].actions) == 2:
            return 0.0
        passes = [max(pair) for pair in zip(*(run.passes for run in runs), strict=True)]
        return self._gathers.counted_s(passes) - self._gathers.least_s()

    def _kept_s(self, group: SequenceGroup) -> float:
        """Seconds of a group that keeps everything."""
        num_layers = self.costs.model.num_layers
        passes = (self.costs.forward_s, self.costs.backward_s)
        return sum(seconds(chunk, group.shape, num_layers) for chunk in group.chunks for seconds in passes)

    def _least_sliced_s(self, group: SequenceGroup, count: int) -> float:
        """Lower bound on the seconds of a group whose longest sequence is cut into `count` slices, without cutting it.

        Slices have all pairs and tokens of the chunk, and each adds what any chunk takes. There is no bound for models with
        states, since slices may run scans once that the whole chunk runs twice.
        """
        if not self.costs.model.states.is_empty:
            return 0.0
        gathers_s = self._gathers.least_s(count) - self._gathers.least_s()
        return self._kept_s(group) + (count - 1) * self.costs.group_s(group.shape) + gathers_s

    @cached_property
    def _rates(self) -> SpanRates:
        """Seconds of a forward and a backward by tokens and pairs, by which slices are cut."""
        forward, backward = self.costs.coefficients.forward, self.costs.coefficients.backward
        return SpanRates(forward.pair_s + backward.pair_s, forward.token_s + backward.token_s, self.costs.attention_pairs())

    def _slice_counts(self, group: SequenceGroup) -> Iterator[int]:
        """Numbers of slices to try for the group's longest sequence, fewest first."""
        counts = slice_counts(max(span.num_tokens for span in group.chunks[0].spans), group.degree)
        return (count for count in SLICE_COUNTS if count in counts)

    def _slots(self, group: SequenceGroup) -> tuple[Sequence[Slot], _Layers]:
        """Slots of the program, and the function that turns their shares into policies.

        There is one slot for each layer of a group's only chunk, or else one for each chunk with all of its layers.
        """
        num_layers = self.costs.model.num_layers

        def of_slices(shares: Sequence[tuple[TensorShare, ...]]) -> list[tuple[LayerPolicy, ...]]:
            return [(_layer_policy(chosen, group.shape),) * num_layers for chosen in shares]

        def of_layers(shares: Sequence[tuple[TensorShare, ...]]) -> list[tuple[LayerPolicy, ...]]:
            # equal layers share one object, which is counted once
            known = {id(layer): _layer_policy(layer, group.shape) for layer in {id(layer): layer for layer in shares}.values()}
            return [tuple(known[id(layer)] for layer in shares)]

        if len(group.chunks) > 1:
            return [chunk_slot(self.costs, chunk, group.shape) for chunk in group.chunks], of_slices
        # predictions price policies by the same slots
        seconds = self.predictions.seconds(group, self.costs)
        kinds = self.costs.model.layer_kinds(LayerRange(0, num_layers)) or (ATTENTION,) * num_layers
        return [seconds.slot(group.chunks[0].index, kind) for kind in kinds], of_layers

    def reason(self, group: SequenceGroup) -> str:
        """Explains the policies of a fitted group: solves the program again and returns its reason."""
        slots, layers = self._slots(group)
        for solved in self._programmed(group, SlotTable(slots), layers, explains=True):
            return solved.reason
        return "layer inputs alone are kept: the program found nothing else that fits"

    def _programmed(
        self, group: SequenceGroup, table: SlotTable, layers: _Layers, explains: bool = False, fills: bool = False
    ) -> list[Trial]:
        """The group with the program's policies, and the reason if `explains`; empty if no answer of the program fits.

        fills: the greedy order takes the place of the program, and its first answer that fits is returned.
        """
        model, device_bytes = self.costs.model, self.budget.device_bytes
        # workspace beside saved tensors hardly depends on the policy
        lean = self._least_memory_group(group, 0)
        needed = self.byte_model.moments(lean, lean.stages[0]).most
        room_bytes = float(device_bytes - self._waiting_bytes(group) - needed.peak + needed.saved)
        # host bytes less two tokens per layer and chunk, since the host slab cannot grow: one for rounding shares to tokens,
        # one for uneven shards
        token_bytes = len(group.chunks) * model.num_layers * layer_class_bytes(model)
        host_bytes = max(0.0, self.budget.host_bytes - 2.0 * token_bytes)

        def propose(room_bytes: float) -> Trial | None:
            try:
                limits = MemoryLimits(max(0.0, room_bytes), host_bytes, self.costs.cluster.hardware.copy_bytes_per_s)
                choice = choose_policy(table, limits, explains=explains, solves=self._solves and not fills)
            except NoRoom:
                return None
            chosen = {(0, chunk, 0): own for chunk, own in enumerate(layers(choice.shares))}
            counted = {"counted_s": choice.outcome.cost_s, "counted_bytes": choice.outcome.device_bytes, "reason": choice.reason}
            return self.trial(with_layers(group, chosen, self.budget.tile_tokens), **counted)

        def next_room(room_bytes: float, trial: Trial) -> float | None:
            (over_bytes,) = trial.over_bytes
            if trial.fits:
                # more room helps only if it can save seconds
                has_more = not fills and trial.counted_s > 0 and over_bytes < -_ROOM.worth * device_bytes
                return room_bytes - _ROOM.regain * over_bytes if has_more else None
            if over_bytes <= 0:
                # the host alone lacks room, and the program already leaves all that rounding can take of it
                return None
            # shares are rounded to whole tokens of every layer
            return min(room_bytes, trial.counted_bytes) - over_bytes - token_bytes

        solved = search_room(propose, next_room, room_bytes, _ROOM.attempts)
        return [] if solved is None else [solved]

    def over_bytes(self, group: SequenceGroup) -> tuple[float, ...]:
        # ranks of a group hold as much as the first, which holds the most
        peak = self.byte_model.moments(group, group.stages[0]).most.peak
        return (float(peak + self._waiting_bytes(group) - self.budget.device_bytes),)

    def _waiting_bytes(self, group: SequenceGroup) -> int:
        """Bytes of gradients that wait whole for the last backward of a group of several chunks."""
        return self._accumulated_bytes if len(group.chunks) > 1 else 0

    def _nothing_fits(self, group: SequenceGroup) -> str:
        return (
            f"{group.num_tokens} tokens on {group.degree} ranks do not fit beside the model in "
            f"{self.budget.device_bytes / 2**30:.2f} GiB of a device and {self.budget.host_bytes / 2**30:.2f} GiB of the "
            f"host for each rank, even if every layer is recomputed; allow larger degrees, shorter sequences or more host "
            f"memory (host_gib), or set tile_tokens"
        )


def _layer_policy(shares: tuple[TensorShare, ...], shape: GroupShape) -> LayerPolicy:
    """Policy of a layer with these shares; classes that stay on the device are left out.

    A ring recomputes attention for all of its tokens or for none.
    """
    if shape.num_blocks > 1:
        again = TensorShare("attention_output", recompute=1.0)
        shares = tuple(again if share.tensor_class == again.tensor_class and share.recompute else share for share in shares)
    return LayerPolicy(tuple(share for share in shares if share.device != share.total))


def replayed_together(groups: Sequence[SequenceGroup]) -> tuple[SequenceGroup, ...]:
    """The groups of a micro-batch after each of them replays every layer that any of them replays.

    Ranks that share experts replay layers together, or not at all. A layer that a group would have kept keeps its attention.
    """
    replays = {
        place
        for group in groups
        for policy in group.stages[0].activations
        for place, layer in enumerate(policy.layers)
        if not layer.keeps_everything
    }
    if not replays:
        return tuple(groups)
    num_layers = groups[0].stages[0].num_layers
    again = recomputed_layer(keeps_attention=True)

    def joined(group: SequenceGroup) -> SequenceGroup:
        (stage,), policies = group.stages, {policy.chunk: policy for policy in group.stages[0].activations}
        found = []
        for chunk in group.chunks:
            policy = policies.get(chunk.index, ActivationPolicy(chunk.index))
            own = [*policy.layers, *[LayerPolicy()] * (num_layers - len(policy.layers))]
            layers = (again if place in replays and each.keeps_everything else each for place, each in enumerate(own))
            found.append(replace(policy, layers=tuple(layers)))
        return replace(group, stages=(replace(stage, activations=tuple(found)),))

    return tuple(map(joined, groups))


class PipelineRoom(Room):
    """Makes room for the groups of a plan of several stages.

    keeps_attention: recomputed layers keep the attention output wherever that fits. waiting_bytes: most bytes of gradients that
    wait whole on a rank while a group runs several backwards. Equal groups on equal stages are solved once, on whichever ranks
    and nodes.
    """

    def __init__(
        self,
        plan: StepPlan,
        costs: CostModel,
        budget: ActivationBudget,
        keeps_attention: bool = True,
        known: PredictionCache | None = None,
        fitted: FittedGroups | None = None,
    ) -> None:
        super().__init__(costs, budget, known, fitted)
        self.plan, self.keeps_attention = plan, keeps_attention
        stages = plan.micro_batches[0].groups[0].stages
        states = [self.byte_model.stage_states(stage, plan) for stage in stages]
        self.limit_bytes = max(states) + budget.device_bytes
        self.room_bytes = tuple(float(self.limit_bytes - state) for state in states)
        self.waiting_bytes = max(self.byte_model.stage_waiting(stage, plan) for stage in stages)
        # a stage holds at least as many chunks as any after it, so that of equal ones the first needs most; ends hold more
        sizes = {
            tuple(layer_range.num_layers for layer_range in stage.layer_ranges): stage.stage for stage in reversed(stages[1:-1])
        }
        self._fullest = sorted({0, *sizes.values(), len(stages) - 1})
        # predictions of the latest group in least memory, which a refusal describes
        self._least: list[Trial] = []
        # the latest answer of a program for that group, which may fit on some stages only
        self._latest: Trial | None = None

    def fitting(self, plan: StepPlan, micro_batch: MicroBatch) -> tuple[SequenceGroup, ...]:
        """The groups of a micro-batch with their policies; raises NoRoom if nothing fits one of them.

        Those whose ranks have most tokens of one sequence come first: where nothing fits, it is mostly for them, and the program
        need not be solved for others.
        """
        found = list(micro_batch.groups)
        for place in sorted(range(len(found)), key=lambda place: -_longest_share(found[place])):
            found[place] = self.for_group(found[place])
        return tuple(found)

    def _variant(self, group: SequenceGroup) -> Any:
        return self.plan.ranks_per_stage, tuple(stage.layer_ranges for stage in group.stages)

    def _run_s(self, group: SequenceGroup) -> tuple[float, float]:
        runs = run_pipeline(self.plan, group, self.costs, [0.0] * len(group.stages), self.predictions)
        return max(run.times[-1][1] for run in runs), 0.0

    def over_bytes(self, group: SequenceGroup) -> tuple[float, ...]:
        return tuple(next(of_stage) for of_stage in self._over_bytes(group, [group]))

    def kept_s(self, group: SequenceGroup) -> float:
        """Predicted seconds of a group alone that recomputes and moves nothing."""
        return self.predictions.kept(self.plan, group, self.costs)[0]

    def takes(self, group: SequenceGroup, seconds: float) -> bool:
        """Whether a group takes at least `seconds` even if it recomputes and moves nothing."""
        return self.is_busy(group, seconds) or self.kept_s(group) >= seconds

    def is_busy(self, group: SequenceGroup, seconds: float) -> bool:
        """Whether a stage works at least so many seconds on a group that recomputes and moves nothing."""
        return float(np.max(self.busy_s(group))) >= seconds

    def busy_s(self, group: SequenceGroup) -> FloatArray:
        """Seconds that every stage works on a group that recomputes and moves nothing."""
        return self.predictions.kept(self.plan, group, self.costs)[1]

    def _ways(self, group: SequenceGroup, found: list[Trial]) -> Iterator[Iterable[Program]]:
        """The group as it is, in tiles alone, and then with levels of recomputation and offloading, or in least memory."""
        if not self.exceeds(group):
            yield [lambda: [self.trial(group)]]
        if found:
            return
        self._least, self._latest = [], None
        if self.is_hopeless(group):
            self._least.append(Trial(group, math.inf, self.least_over_bytes(group)))
            return
        kept = self._kept_trial(group)
        if kept.fits:
            yield [lambda: [self.trial(kept.group)]]
            return
        lean = self._lean(kept)
        hosts = tuple(dict.fromkeys((0, self.budget.host_bytes)))
        programs: list[Program] = []
        # attention runs again only where its outputs have room neither on the device nor on the host
        for keeps_attention in (True, False) if self.keeps_attention else (False,):
            programs += [partial(self._programmed, kept, keeps_attention, host_bytes > 0) for host_bytes in hosts]
            programs += [partial(self._least_trials, lean, keeps_attention, host_bytes) for host_bytes in hosts]
        yield programs
        is_slow = min((trial.seconds for trial in found), default=0.0) > _ROOM.much_lost * kept.seconds
        if is_slow and self.budget.host_bytes:
            yield [partial(self._least_trials, lean, True, self.budget.host_bytes)]

    def _kept_trial(self, group: SequenceGroup) -> Trial:
        """The group in tiles with everything kept, as a trial that is not run.

        The last stage has no tiles where it fits only so: for chunks of few tokens, those of its loss take more than they save.
        """
        tiled = in_tiles(group, self.budget.tile_tokens)
        over, last = self.over_bytes(tiled), len(group.stages) - 1
        if over[last] > 0:
            plain = next(next(self._over_bytes(group, [group], [last])))
            if plain <= 0:
                tiled, over = with_stages_of(tiled, group, [last]), (*over[:last], plain)
        return Trial(tiled, self.kept_s(group), over)

    def least_over_bytes(self, group: SequenceGroup) -> tuple[float, ...]:
        """Bytes above the limit on each stage of a group without policies in the least memory.

        Every layer of every chunk is recomputed, as if the host had all of its bytes for each of them, or none is: chunks of few
        tokens hold little, and need less workspace without replays and tiles.
        """
        return tuple(min(of_stage) for of_stage in self._over_bytes(group, self._least_ways(group)))

    def may_recompute(self, group: SequenceGroup) -> bool:
        """Whether a group without policies is within the limit in the least memory, as `least_over_bytes` counts it."""
        found = self._over_bytes(group, self._least_ways(group), self._fullest)
        return all(any(over <= 0 for over in of_stage) for of_stage in found)

    def may_keep(self, group: SequenceGroup) -> bool:
        """Whether a group is within the limit under its policies."""
        return all(next(of_stage) <= 0 for of_stage in self._over_bytes(group, [group], self._fullest))

    def _least_ways(self, group: SequenceGroup) -> list[SequenceGroup]:
        """The group under each of the policies of `least_over_bytes`."""
        model, tile_tokens = self.costs.model, self.budget.tile_tokens
        least = least_memory_group(group, model, tile_tokens, lambda *_: self.budget.host_bytes)
        return [least, in_tiles(group, tile_tokens), group]

    def _over_bytes(
        self,
        group: SequenceGroup,
        ways: Sequence[SequenceGroup],
        places: Sequence[int] = (),
        peak: Callable[[SequenceGroup, StagePlan, int], int] | None = None,
    ) -> Iterator[Iterator[float]]:
        """Bytes above the limit for every stage under each of the policies of `ways`, counted when asked for.

        When actions run does not matter. places: stages to count, all by default. peak: what counts the bytes of a stage, all of
        its passes by default.
        """
        model, tokens = self.costs.model, max(self.predictions.seconds(group, self.costs).tokens)
        peak = self._peak if peak is None else peak
        for place in places or range(len(group.stages)):
            stage = group.stages[place]
            waiting = self.byte_model.stage_waiting(stage, self.plan)
            beside = message_bytes(model, stage, len(group.stages), tokens) - self.room_bytes[place]
            yield (peak(group, way.stages[place], waiting) + beside for way in ways)

    def _least_over(self, group: SequenceGroup, ways: Sequence[SequenceGroup]) -> Iterator[Iterator[float]]:
        """Lower bounds on the bytes above the limit, on those stages that probably need most, as in `_over_bytes`."""
        return self._over_bytes(group, ways, self._fullest, self.byte_model.least_peak)

    def _peak(self, group: SequenceGroup, stage: StagePlan, waiting: int) -> int:
        return self.byte_model.moments(group, stage, waiting=waiting).most.peak

    def exceeds(self, group: SequenceGroup) -> bool:
        """Whether a bound proves that the group does not fit as it is."""
        return self._is_over(group, lambda: [group], 0.0)

    def is_hopeless(self, group: SequenceGroup) -> bool:
        """Whether a bound proves that no policy makes the group fit: some stage needs clearly more in every way."""
        return self._is_over(group, lambda: self._least_ways(group), _ROOM.hopeless * self.limit_bytes)

    def _is_over(self, group: SequenceGroup, ways: Callable[[], list[SequenceGroup]], most: float) -> bool:
        """Whether some stage needs more than `most` bytes above the limit in each of these ways, by `ByteModel.least_peak`."""
        key = id(group.chunks), id(group.stages), group.shape, most
        if key not in self.predictions.over:
            is_over = any(all(over > most for over in of_stage) for of_stage in self._least_over(group, ways()))
            # the group is stored too, so that its ids are not reused
            self.predictions.over[key] = group, is_over
        return self.predictions.over[key][1]

    def _least_trials(self, lean: _LeastMemory, keeps_attention: bool, host_bytes: int) -> list[Trial]:
        """Predicts a group in least memory, unless a bound proves that it does not fit, and keeps it for a refusal.

        Also predicts it with the latest program's answer on those stages where that fits, which recomputes less.
        """
        group = lean(keeps_attention, host_bytes)
        over_bytes = tuple(next(of_stage) for of_stage in self._least_over(group, [group]))
        self._least.append(Trial(group, math.inf, over_bytes) if max(over_bytes) > 0 else self.trial(group))
        found = self._least[-1:]
        if self._latest is not None and found[0].fits and (places := _fitting_places(self._latest)):
            found.append(self.trial(with_stages_of(group, self._latest.group, places)))
        return found

    def _programmed(self, kept: Trial, keeps_attention: bool, moves_needed: bool) -> list[Trial]:
        """The group with layers recomputed and shares offloaded, and without offloading if that may be faster, if they fit.

        moves_needed: see `GroupCells`.
        """

        def solved(offloads: bool) -> Trial | None:
            known, tile_tokens = self.predictions, self.budget.tile_tokens
            cells = GroupCells(
                kept.group,
                self.costs,
                tile_tokens,
                keeps_attention,
                known,
                host_bytes=self.budget.host_bytes if offloads else 0,
                kept=_fitting_places(kept),
                moves_needed=moves_needed,
            )
            return self._solve(cells, kept.seconds, self.budget.host_bytes if offloads else 0)

        both = solved(bool(self.budget.host_bytes))
        found = [both]
        # copies seem to save more than they do
        is_slow = both is not None and both.seconds > _ROOM.slack * (kept.seconds + both.counted_s)
        if is_slow and self.budget.host_bytes and not moves_needed:
            found.append(solved(False))
        return [trial for trial in found if trial is not None]

    def _solve(self, cells: GroupCells, plain_s: float, host_bytes: float) -> Trial | None:
        """The fastest answer of the program whose prediction fits. plain_s: seconds of the group with everything kept."""
        group, tolerance_s = cells.group, _ROOM.tolerance * plain_s

        def propose(room: _StageRoom) -> Trial | None:
            levels = choose_levels(cells.cells, cells.moments(room[0]), room[1])
            if levels is None:
                return None
            again_s = (levels.layers * cells.cells.layer_s).reshape(len(group.stages), -1).sum(axis=1).max()
            self._latest = self.trial(cells.under(levels.layers, levels.offload), counted_s=float(again_s))
            return self._latest

        def next_room(room: _StageRoom, trial: Trial) -> _StageRoom | None:
            device_bytes, host_bytes = room
            if trial.fits:
                # more room helps only if it can save recomputation
                most_over = max(over for place, over in enumerate(trial.over_bytes) if place not in cells.kept)
                if trial.counted_s <= 5 * tolerance_s or most_over > -_ROOM.worth * self.limit_bytes:
                    return None
                taken = [_ROOM.regain * over for over in trial.over_bytes]
            else:
                margin_bytes = _ROOM.margin * self.limit_bytes
                taken = [_ROOM.shrink * over + margin_bytes if over > 0 else 0.0 for over in trial.over_bytes]
                host_bytes = max(0.0, host_bytes - max(0.0, trial.over_host_bytes))
            return tuple(num_bytes - less for num_bytes, less in zip(device_bytes, taken, strict=True)), host_bytes

        free_bytes = []
        for room_bytes, stage in zip(self.room_bytes, group.stages, strict=True):
            waiting = self.byte_model.stage_waiting(stage, self.plan) if len(group.chunks) > 1 else 0
            free_bytes.append(room_bytes - message_bytes(self.costs.model, stage, len(group.stages), max(cells.tokens)) - waiting)
        room = tuple(free_bytes), host_bytes
        if choose_levels(cells.cells, cells.least_moments(room[0]), host_bytes) is None:
            return None
        return search_room(propose, next_room, room, _ROOM.attempts)

    def _lean(self, kept: Trial) -> _LeastMemory:
        """Versions of a group with every layer of every chunk recomputed on the stages that do not fit if everything is kept."""

        @cache
        def lean(keeps_attention: bool, host_bytes: int) -> SequenceGroup:
            return with_stages_of(
                self._least_memory_group(kept.group, host_bytes, keeps_attention), kept.group, _fitting_places(kept)
            )

        return lean

    def _nothing_fits(self, group: SequenceGroup) -> str:
        least = min(self._least, key=lambda trial: max(trial.over_bytes))
        over_bytes = self.over_bytes(least.group) if any(stage.activations for stage in least.group.stages) else least.over_bytes
        place = max(range(len(over_bytes)), key=lambda stage: over_bytes[stage])
        needed = self.limit_bytes + over_bytes[place]
        return (
            f"stage {place} of {len(group.stages)} needs {needed / 2**30:.2f} GiB on a rank for {len(group.chunks)} chunks of up "
            f"to {max(chunk.num_tokens for chunk in group.chunks)} tokens on {group.degree} rank(s) even if every layer is "
            f"recomputed, and {self.limit_bytes / 2**30:.2f} GiB are usable; use smaller chunks, more ranks per stage, shorter "
            f"sequences or more host memory (host_gib)"
        )


def _longest_share(group: SequenceGroup) -> float:
    return max((span.stop for chunk in group.chunks for span in chunk.spans), default=0) / group.degree


def _fitting_places(kept: Trial) -> frozenset[int]:
    """Stages of a group with everything kept on which it fits."""
    return frozenset(place for place, over in enumerate(kept.over_bytes) if over <= 0)
