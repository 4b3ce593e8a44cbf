"""The pass that makes room on one stage: chunks too large to keep everything get activation policies, layer-first or slice-first.

Layer-first keeps a group's one chunk: every layer runs over all its tokens once, and linear programs choose for each layer what
is kept, offloaded or recomputed. Slice-first cuts the longest sequence into slices with a K/V book, so that a layer works on
fewer tokens at a time; the program then chooses for whole slices. Each answer is predicted as the run of a pipeline of one stage,
and each group gets the way with the fewest predicted seconds among those whose bytes fit.

Groups whose ranks gather weights together run one order of actions. So they are all cut, into equally many slices, or none is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from hf_longctx.plan.chunks import SLICE_COUNTS, slice_counts, sliced_group, sliced_in_step
from hf_longctx.plan.core.settings import ActivationBudget
from hf_longctx.plan.core.sharding import shard_tokens
from hf_longctx.plan.core.types import (
    ActivationPolicy,
    GroupShape,
    LayerPolicy,
    LayerRange,
    SequenceGroup,
    StepPlan,
    TensorShare,
)
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.cost.traffic import group_shapes, plainest_shape
from hf_longctx.plan.cost.weight_traffic import COUNTED_SHARE, round_gather_s
from hf_longctx.plan.memory.capacity import may_rerun
from hf_longctx.plan.memory.saved_tensors import class_bytes, layer_class_bytes
from hf_longctx.plan.memory.stage import RoundBytes
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
    lean_group,
    search_room,
    with_layers,
)
from hf_longctx.plan.policies.slots import Slot, SlotTable, chunk_slot
from hf_longctx.plan.predict.evaluate import in_step
from hf_longctx.plan.predict.pipeline_run import PredictionCache, run_alone
from hf_longctx.plan.predict.planning import Planning
from hf_longctx.plan.room.cells import recomputed_layer


@dataclass(frozen=True, slots=True)
class FitConstants:
    """Constants of the search for room.

    attempts: solutions of one program, each with less room, where the prediction exceeds what the program counted, or with more
    where it left much. most_programs: different groups in one step for which programs are solved and slices tried; for more, the
    greedy order chooses layer-first policies. least_waits: share of the seconds that waits for copies must take to be worth
    another try. most_waiting: share of the device's room that gradients may take while slices run, for slices to be tried where a
    whole chunk fits. worth: share of the device's room that must be free to try again with more; regain: how much of it is given
    back.
    """

    attempts: int = 4
    most_programs: int = 64
    worth: float = 0.02
    least_waits: float = 1e-2
    most_waiting: float = 0.5
    regain: float = 0.8
    returned: float = 0.5


# repeat `recipes/bench/cpu/memory.py` and `recipes/bench/papers/sppo.py` when one of these changes
_ROOM = FitConstants()

# turns the shares of all slots into the layer policies of each chunk
_Layers = Callable[[Sequence[tuple[TensorShare, ...]]], list[tuple[LayerPolicy, ...]]]


def policy_reason(group: SequenceGroup, costs: CostModel, budget: ActivationBudget) -> str:
    """Explains in one sentence why a group that `RoomMaker` fitted keeps, offloads or recomputes its tensors."""
    (stage,) = group.stages
    if not stage.activations:
        return "nothing is offloaded: everything fits on the device"
    if not any(policy.layers for policy in stage.activations):
        return "nothing is offloaded: everything but logits fits on the device"
    return RoomMaker(costs, budget).reason(group)


def make_room(plan: StepPlan, planning: Planning) -> StepPlan:
    """Gives policies, and perhaps slices, to every group of a one-stage plan whose chunk is too large to keep everything.

    Without a budget the plan is returned unchanged. Raises ValueError naming the first group for which nothing fits.
    """
    budget = planning.config.activations
    if budget is None:
        return plan
    allows_slices = not planning.config.one_micro_batch
    return RoomMaker(planning.costs, budget, allows_slices, planning.known, planning.fitted).for_plan(plan)


def replayed_together(groups: tuple[SequenceGroup, ...]) -> tuple[SequenceGroup, ...]:
    """The groups of a micro-batch with replays, in each of them, of every layer that one of them replays.

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
        return groups
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


class RoomMaker:
    """Makes room for the groups of all plans of one step: policies, and slices if `allows_slices`.

    known, fitted: caches of the step: bytes and runs that were counted and predicted before, and groups that were solved.
    """

    def __init__(
        self,
        costs: CostModel,
        budget: ActivationBudget,
        allows_slices: bool = True,
        known: PredictionCache | None = None,
        fitted: FittedGroups | None = None,
    ) -> None:
        self.costs, self.budget, self.allows_slices = costs, budget, allows_slices
        self._predictions = PredictionCache() if known is None else known
        self._byte_model = self._predictions.byte_model(costs.model)
        self._known = FittedGroups() if fitted is None else fitted
        # bytes that groups of a degree, whole or in slices, need beside what their layers hold, as far as trials have told
        self._beside_room: dict[tuple[int, bool], float] = {}
        # seconds of the gathers of a micro-batch by its number of chunks
        self._round_gathers_s: dict[int, float] = {}
        self._accumulated_bytes = self._byte_model.accumulated(costs.parameters, costs.shard_ranks)
        self._limit_bytes = self._byte_model.states(costs.parameters, costs.shard_ranks) + budget.device_bytes

    def for_plan(self, plan: StepPlan) -> StepPlan:
        """Makes room for every group that has more tokens on a rank than `kept_tokens`, or whose bytes exceed the budget.

        Raises ValueError naming the first group for which nothing fits.
        """
        micro_batches = tuple(
            replace(each, groups=self._side_by_side(each.groups, plan.in_step(each))) for each in plan.micro_batches
        )
        if self.costs.model.experts.are_spread:
            micro_batches = tuple(replace(each, groups=replayed_together(each.groups)) for each in micro_batches)
        return replace(plan, micro_batches=micro_batches)

    def _side_by_side(self, groups: Sequence[SequenceGroup], in_step: Sequence[Sequence[int]]) -> tuple[SequenceGroup, ...]:
        """The groups of a micro-batch with room. in_step: places of those that run one order of actions."""
        found = list(groups)
        for places in in_step:
            own = [groups[place] for place in places]
            made = self._together(own) if len(own) > 1 else [self.for_group(own[0], self.allows_slices)]
            for place, group in zip(places, made, strict=True):
                found[place] = group
        return tuple(found)

    @property
    def _solves(self) -> bool:
        return len(self._known) < _ROOM.most_programs

    def for_group(self, group: SequenceGroup, allows_slices: bool) -> SequenceGroup:
        """Gives the group the policies and slices that it needs to fit; raises ValueError where nothing fits."""
        (chunk,) = group.chunks
        is_small = max(shard_tokens(chunk, group.shape)) <= self.budget.kept_tokens
        # groups of equal tokens need different bytes: exchanges and attention of several documents have workspace of their own
        if is_small and self._byte_model.kept_peak(group) <= self.budget.device_bytes:
            return group

        def search(group: SequenceGroup) -> list[Trial]:
            return self._fitting(partial(self._fitting_shape, allows_slices), group) or self._fitting_alone(group, allows_slices)

        return self._known.fit(group, search, self._nothing_fits, allows_slices)

    def _together(self, groups: Sequence[SequenceGroup]) -> Sequence[SequenceGroup]:
        """Makes room for groups that run one order of actions: all keep their one chunk, or all are cut in step.

        Raises ValueError naming the first group whose chunk does not fit, if slices do not fit either.
        """
        error: ValueError | None = None
        whole: list[SequenceGroup] = []
        try:
            whole = [self.for_group(group, False) for group in groups]
        except ValueError as reason:
            error = reason
        is_crowded = self._accumulated_bytes > _ROOM.most_waiting * self.budget.device_bytes
        if whole and (is_crowded or not self.allows_slices or not any(group.stages[0].activations for group in whole)):
            return whole
        best, best_s = whole, self._together_s(whole) if whole else math.inf
        busy = [group for group in groups if group.num_tokens]
        tries = self.allows_slices and (self._solves or not whole)
        for count in sorted({count for group in busy for count in self._slice_counts(group)} if tries else ()):
            if max(self._least_sliced_s(group, count) for group in busy) >= best_s:
                break
            made = self._in_step(sliced_in_step(groups, count, self._rates), best_s)
            if not made:
                continue
            seconds = self._together_s(made)
            if seconds >= best_s:
                # more slices need less room, which no longer pays for their gathers
                break
            best, best_s = made, seconds
        if error is not None and not best:
            trials = next(self._ways_in_step(groups, WAYS[1:] if self.allows_slices else ()), [])
            if not trials:
                raise error
            best = [trial.group for trial in trials]
        return best

    def _in_step(self, sliced: Sequence[SequenceGroup], limit_s: float) -> list[SequenceGroup]:
        """Makes room for groups of several chunks; none where one does not fit, or takes `limit_s` or more by itself."""
        found = list(sliced)
        # those that may take longest first
        for place in sorted(range(len(sliced)), key=lambda place: -self._kept_s(sliced[place])):
            if self._least_s(sliced[place], self._slice_way(sliced[place])[0]) >= limit_s:
                return []
            try:
                search = partial(self._fitting, self._fitting_cut)
                found[place] = self._known.fit(sliced[place], search, lambda group: f"{group.num_tokens} tokens in slices")
            except ValueError:
                return []
        return found

    def _together_s(self, groups: Sequence[SequenceGroup]) -> float:
        """Seconds of groups that wait for one another at every action, with gathers that a whole chunk would not need."""
        runs = [run_alone(group, self.costs, self._predictions) for group in groups]
        seconds = max(run.times[-1][1] for run in in_step(runs))
        exchange_s = max(sum(run.exchange_s) for run in runs)
        return seconds + self._gathers_s(len(groups[0].chunks), seconds, exchange_s)

    def _gathers_s(self, num_chunks: int, seconds: float = math.inf, exchange_s: float = 0.0) -> float:
        """Seconds that count for gathers of weights which one chunk would not need, beside `seconds` with these exchanges.

        All fit beside infinitely many seconds, which gives the least that counts.
        """
        if num_chunks == 1:
            return 0.0
        for count in (1, num_chunks):
            if count not in self._round_gathers_s:
                self._round_gathers_s[count] = round_gather_s(self.costs, count)
        once_s, all_s = self._round_gathers_s[1], self._round_gathers_s[num_chunks]
        # gathers that keep links busy after all computing count in full
        after_s = max(0.0, exchange_s + all_s - seconds)
        return after_s + COUNTED_SHARE * (all_s - after_s) - COUNTED_SHARE * once_s

    def _fitting(self, fitting_shape: Callable[[SequenceGroup], list[Trial]], group: SequenceGroup) -> list[Trial]:
        """Trials that fit: in the group's shape, or else in the first other shape of its ranks that holds its chunks.

        A ring that fits in slices alone is compared with that other shape, since every slice sends earlier ones around again.
        """
        found = fitting_shape(group)
        if any(trial.group.shape.num_blocks == 1 or len(trial.group.chunks) == 1 for trial in found):
            return found
        # rings are chosen by seconds alone, but need more bytes than Ulysses
        others = group_shapes(group.degree, self.costs.method, self.costs.model, self.costs.cluster)
        reshaped = (SequenceGroup.of(shape, group.positions, group.chunks, group.stages) for shape in others)
        fitting = (fitting_shape(other) for other in reshaped if other.shape != group.shape)
        return found + next(filter(None, fitting), [])

    def _fitting_shape(self, allows_slices: bool, group: SequenceGroup) -> list[Trial]:
        """Trials that fit in the group's own shape: of the whole chunk, and of its slices if they are allowed."""
        slots, layers = self._layer_way(group)
        table = SlotTable(slots)
        programs: list[Program] = [partial(self._programmed, group, table, layers)]
        # a layer without a policy holds at least what its classes hold
        if table.num_bytes.sum() <= self.budget.device_bytes:
            tiled = in_tiles(group, self.budget.tile_tokens)
            programs.insert(0, lambda: [self._trial(tiled)])
        found = first_fitting(programs, self._lean(group), self._trial)
        # a rank without sequences runs a dummy chunk, which cannot be cut
        is_sliceable = bool(group.chunks[0].spans)
        if found and self._accumulated_bytes > _ROOM.most_waiting * self.budget.device_bytes:
            return found
        if allows_slices and is_sliceable and (self._solves or not found):
            for count, cut in self._sliced(group):
                best_s = min((trial.all_s for trial in found), default=math.inf)
                if self._least_sliced_s(group, count) >= best_s:
                    break
                sliced = cut()
                slots, layers = self._slice_way(sliced)
                table = SlotTable(slots)
                if self._least_s(sliced, slots) >= best_s:
                    continue
                found += first_fitting([partial(self._programmed, sliced, table, layers)], self._lean(sliced), self._trial)
        return found

    def _fitting_cut(self, group: SequenceGroup) -> list[Trial]:
        """Trials of a group of several chunks that fit: with everything kept in tiles, or else with policies."""
        slots, layers = self._slice_way(group)
        tiled = in_tiles(group, self.budget.tile_tokens)
        programs: list[Program] = [lambda: [self._trial(tiled)], partial(self._programmed, group, SlotTable(slots), layers)]
        return first_fitting(programs, self._lean(group), self._trial)

    def _fitting_alone(self, group: SequenceGroup, allows_slices: bool) -> list[Trial]:
        """The first way to run a sequence alone that fits, in a list: up to `longest_alone` tokens, there is one."""
        return next(self._ways_in_step([group], WAYS if allows_slices else WAYS[:1]), [])

    def _ways_in_step(self, groups: Sequence[SequenceGroup], ways: Sequence[int]) -> Iterator[list[Trial]]:
        """Trials, in those of these numbers of equal slices in which they fit, of groups that run one order of actions.

        None if there is more than one sequence. Ranks share attention in the plainest shape, in which room is counted.
        """
        costs, place = self.costs, (self.costs.method, self.costs.model, self.costs.cluster)
        if sum(len(group.chunks[0].spans) for group in groups) != 1:
            return
        shapes = [plainest_shape(group.degree, *place) for group in groups]
        plain = [
            SequenceGroup.of(shape, group.positions, group.chunks, group.stages)
            for shape, group in zip(shapes, groups, strict=True)
        ]
        for num_slices in ways:
            trials = [self._trial(group) for group in in_equal_slices(plain, costs.model, self.budget, num_slices)]
            if all(trial.fits for trial in trials):
                yield trials

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
        return self._kept_s(group) + (count - 1) * self.costs.group_s(group.shape) + self._gathers_s(count)

    def _least_s(self, sliced: SequenceGroup, slots: Sequence[Slot]) -> float:
        """Seconds of slices that no policy of their program can beat, even if they had all of the device.

        Packs run after the backward of all slices, so their bytes are not added to these.
        """
        # dummy chunks have no sequence
        sequences = [chunk.spans[0].sequence if chunk.spans else -1 for chunk in sliced.chunks]
        first = next((sequence for sequence in sequences if sequence >= 0), -1)
        own = [slot for slot, sequence in zip(slots, sequences, strict=True) if sequence == first]
        rate = self.costs.cluster.hardware.copy_bytes_per_s
        room_bytes = max(0.0, float(self.budget.device_bytes - self._beside_bytes(sliced)))
        added_s = SlotTable(own).least_cost_s(room_bytes, float(self.budget.host_bytes), 1 / rate)
        return self._kept_s(sliced) + added_s + self._gathers_s(len(sliced.chunks))

    def _nothing_fits(self, group: SequenceGroup) -> str:
        (chunk,) = group.chunks
        return (
            f"{chunk.num_tokens} tokens on {group.degree} ranks do not fit beside the model in "
            f"{self.budget.device_bytes / 2**30:.2f} GiB of a device and {self.budget.host_bytes / 2**30:.2f} GiB of the "
            f"host for each rank, even if every layer is recomputed; allow larger degrees, shorter sequences or more host "
            f"memory (host_gib), or set tile_tokens"
        )

    def _layer_way(self, group: SequenceGroup) -> tuple[Sequence[Slot], _Layers]:
        """Slots for the layers of the group's one chunk, and the function that turns their shares into its policies."""
        (chunk,) = group.chunks

        def layers(shares: Sequence[tuple[TensorShare, ...]]) -> list[tuple[LayerPolicy, ...]]:
            # equal layers share one object, which is counted once
            known = {id(layer): _layer_policy(layer, group.shape) for layer in {id(layer): layer for layer in shares}.values()}
            return [tuple(known[id(layer)] for layer in shares)]

        # predictions price policies by the same slots
        seconds, num_layers = self._predictions.seconds(group, self.costs), self.costs.model.num_layers
        kinds = self.costs.model.layer_kinds(LayerRange(0, num_layers)) or (ATTENTION,) * num_layers
        return [seconds.slot(chunk.index, kind) for kind in kinds], layers

    @cached_property
    def _rates(self) -> SpanRates:
        """Seconds of a forward and a backward by tokens and pairs, by which slices are cut."""
        forward, backward = self.costs.coefficients.forward, self.costs.coefficients.backward
        return SpanRates(forward.pair_s + backward.pair_s, forward.token_s + backward.token_s, self.costs.attention_pairs())

    def _slice_counts(self, group: SequenceGroup) -> Iterator[int]:
        """Numbers of slices to try for the group's longest sequence, fewest first."""
        counts = slice_counts(max(span.num_tokens for span in group.chunks[0].spans), group.degree)
        return (count for count in SLICE_COUNTS if count in counts)

    def _sliced(self, group: SequenceGroup) -> Iterator[tuple[int, Callable[[], SequenceGroup]]]:
        """Ever larger numbers of slices, each with the function that cuts the group's longest sequence into so many."""
        return ((count, partial(sliced_group, group, count, self._rates)) for count in self._slice_counts(group))

    def _slice_way(self, sliced: SequenceGroup) -> tuple[Sequence[Slot], _Layers]:
        """One slot per chunk for all of its layers, and the function that turns their shares into policies."""

        def layers(shares: Sequence[tuple[TensorShare, ...]]) -> list[tuple[LayerPolicy, ...]]:
            return [(_layer_policy(chosen, sliced.shape),) * self.costs.model.num_layers for chosen in shares]

        return [chunk_slot(self.costs, part, sliced.shape) for part in sliced.chunks], layers

    def reason(self, group: SequenceGroup) -> str:
        """Explains the policies of a fitted group: solves the program again and returns its reason."""
        slots, layers = self._slice_way(group) if len(group.chunks) > 1 else self._layer_way(group)
        solved = self._program(group, SlotTable(slots), layers, explains=True)
        return solved.reason if solved else "layer inputs alone are kept: the program found nothing else that fits"

    def _programmed(self, group: SequenceGroup, table: SlotTable, layers: _Layers) -> list[Trial]:
        solved = self._program(group, table, layers)
        return [] if solved is None else [solved]

    def _program(self, group: SequenceGroup, table: SlotTable, layers: _Layers, explains: bool = False) -> Trial | None:
        """The group with the program's policies, and the reason if `explains`; None where no answer of the program fits."""
        alike = group.degree, len(group.chunks) > 1
        # another group's room is off by up to 2 % of the device, which plans of sharded runs accept to be made faster, but not
        # where groups that were cut in step have chunks of all sizes
        if alike not in self._beside_room or self.costs.parameters == "replicated" or len(group.chunks) > 1:
            needed = self._bytes(self._lean_group(group, 0))
            # workspace beside saved tensors hardly depends on the policy
            self._beside_room[alike] = float(self._beside_bytes(group) + needed.peak - needed.saved)
        room_bytes = self.budget.device_bytes - self._beside_room[alike]
        # host bytes less two tokens per layer and chunk, since the host slab cannot grow: one for rounding shares to tokens,
        # one for uneven shards
        model, num_chunks = self.costs.model, len(group.chunks)
        token_bytes = num_chunks * model.num_layers * layer_class_bytes(model)
        host_bytes = max(0.0, self.budget.host_bytes - 2.0 * token_bytes)
        rate = self.costs.cluster.hardware.copy_bytes_per_s

        def propose(room: tuple[float, float]) -> Trial | None:
            room_bytes, back_bytes = room
            try:
                limits = MemoryLimits(max(0.0, room_bytes), host_bytes, rate)
                choice = choose_policy(table, limits, explains=explains, solves=self._solves, back_bytes=back_bytes)
            except ValueError:
                return None
            chosen = {(0, chunk, 0): own for chunk, own in enumerate(layers(choice.shares))}
            trial = self._trial(with_layers(group, chosen, self.budget.tile_tokens))
            return replace(
                trial, counted_s=choice.outcome.cost_s, counted_bytes=choice.outcome.device_bytes, reason=choice.reason
            )

        def next_room(room: tuple[float, float], trial: Trial) -> tuple[float, float] | None:
            (room_bytes, _), (over_bytes,) = room, trial.over_bytes
            if not math.isfinite(trial.seconds) or over_bytes > 0:
                # the next group needs as much beside its tensors
                beside_room = self.budget.device_bytes + over_bytes - trial.counted_bytes
                self._beside_room[alike] = max(self._beside_room[alike], beside_room)
            if trial.fits:
                if over_bytes >= -_ROOM.worth * self.budget.device_bytes:
                    return None
                if trial.counted_s == 0 and trial.seconds <= self._kept_s(group) * (1 + _ROOM.least_waits):
                    # more room could save hardly anything
                    return None
                if trial.counted_s > 0:
                    # more room helps only if it can save seconds
                    return room_bytes - _ROOM.regain * over_bytes, 0.0
                # fewer copies wait for one another less than the program knows
                return room_bytes, trial.counted_bytes - _ROOM.returned * over_bytes
            if over_bytes <= 0:
                # the host alone lacks room, and the program already leaves all that rounding can take of it
                return None
            # shares are rounded to whole tokens of every layer
            return min(room_bytes, trial.counted_bytes) - over_bytes - token_bytes, 0.0

        return search_room(propose, next_room, (room_bytes, 0.0), _ROOM.attempts)

    def _lean(self, group: SequenceGroup) -> Iterator[list[SequenceGroup]]:
        """The group in least memory, with the host and without it, since copies need device memory too."""
        ways: list[tuple[bool, int]] = [(False, 1)]
        if len(group.chunks) == 1:
            # the cheaper first; with another run of layers, slices would write their keys and values again
            most = self.costs.model.head_pieces(group.shape.ulysses)
            reruns = (False, True) if may_rerun(self.costs.model, self.costs.parameters) else (False,)
            ways = [(again, pieces) for again in reruns for pieces in sorted({1, most})]
        for way in ways:
            yield [self._lean_group(group, host_bytes, *way) for host_bytes in (self.budget.host_bytes, 0)]

    def _lean_group(self, group: SequenceGroup, host_bytes: int, reruns: bool = False, head_pieces: int = 1) -> SequenceGroup:
        left_bytes = host_bytes

        def host_share(num_tokens: int, num_layers: int) -> int:
            """Host bytes left by earlier chunks, which take as many as they need, since their backward runs last."""
            nonlocal left_bytes
            share = left_bytes
            left_bytes = max(0, share - num_layers * num_tokens * class_bytes(self.costs.model, "layer_input"))
            return share

        ways: dict[str, Any] = {"reruns": reruns, "head_pieces": head_pieces}
        return lean_group(group, self.costs.model, self.budget.tile_tokens, host_share, **ways)

    def _trial(self, group: SequenceGroup) -> Trial:
        """Predicts the run of the group alone and compares it with the budget.

        What does not fit gets no seconds, which saves planning time.
        """
        counted = self._bytes(group)
        over_bytes = counted.peak + self._beside_bytes(group) - self.budget.device_bytes
        over_host_bytes = float(counted.host - self.budget.host_bytes)
        if max(over_bytes, over_host_bytes) > 0:
            return Trial(group, math.inf, (float(over_bytes),), over_host_bytes)
        run = run_alone(group, self.costs, self._predictions)
        seconds = run.times[-1][1]
        gathers_s = self._gathers_s(len(group.chunks), seconds, sum(run.exchange_s))
        return Trial(group, seconds, (float(run.peak_bytes - self._limit_bytes),), over_host_bytes, gathers_s=gathers_s)

    def _beside_bytes(self, group: SequenceGroup) -> int:
        """Bytes of gradients that wait whole for the last backward of a group of several chunks."""
        return self._accumulated_bytes if len(group.chunks) > 1 else 0

    def _bytes(self, group: SequenceGroup) -> RoundBytes:
        # ranks of a group hold as much as the first, which holds the most
        return self._byte_model.moments(group, group.stages[0]).most


def _all_or_none(share: TensorShare) -> TensorShare:
    """The share, with all tokens of an attention output recomputed where some of them are."""
    is_partial = share.tensor_class == "attention_output" and share.recompute > 0
    return TensorShare("attention_output", recompute=1.0) if is_partial else share


def _layer_policy(shares: tuple[TensorShare, ...], shape: GroupShape) -> LayerPolicy:
    """Policy of a layer with these shares; classes that stay on the device are left out.

    A ring recomputes attention for all of its tokens or for none.
    """
    shares = shares if shape.num_blocks == 1 else tuple(map(_all_or_none, shares))
    return LayerPolicy(tuple(share for share in shares if share.device != share.total))
