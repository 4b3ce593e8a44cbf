"""Predicts one sequence group on its pipeline stages: when every action runs, and how many bytes every stage holds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, compress, groupby, pairwise

import numpy as np

from hf_longctx.plan.core.orders import joined_stages
from hf_longctx.plan.core.sharding import fullest_share
from hf_longctx.plan.core.types import (
    Action,
    ActivationPolicy,
    BoolArray,
    Chunk,
    FloatArray,
    GroupShape,
    LayerPolicy,
    MicroBatch,
    SequenceGroup,
    StagePlan,
    StepPlan,
)
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.cost.weight_traffic import (
    StageGathers,
    StagePasses,
    counted_passes_s,
    ends_s,
    keeping_passes,
    stage_collectives,
    summed_head_s,
    to_nodes_s,
)
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.stage import Passes, layer_shard_bytes, message_bytes, most_tokens_at_once
from hf_longctx.plan.model.attention_pairs import AttentionPairs
from hf_longctx.plan.model.layers import ATTENTION, LayerKind
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.plan.policies.slots import SavedClass, Slot, kind_slot
from hf_longctx.plan.predict.event_loop import CopyStep, Times, Wiring


@dataclass(frozen=True, slots=True)
class StageRun:
    """Run of a group on one stage."""

    # its passes, with (start, stop) of each and the communication inside each
    actions: tuple[Action, ...]
    times: Times
    exchange_s: tuple[float, ...]
    # most bytes on the device, including states
    peak_bytes: int
    # saved tensors on the host
    host_bytes: int
    # most tokens that wait for their backward on the fullest rank
    peak_tokens: int
    # seconds that a step of several stages counts before and after this run for gathers and sums, if it begins or ends with it
    ends_s: tuple[float, float] = (0.0, 0.0)
    # seconds from the step's start for which its first pass waits for copies of nodes
    to_nodes_s: float = 0.0

    @property
    def passes(self) -> list[tuple[bool, float]]:
        """Whether each action is a backward, and for how long it computes. Exchanges need the links of gathers."""
        return [
            (action.kind == "B", stop_s - start_s - inside_s)
            for action, (start_s, stop_s), inside_s in zip(self.actions, self.times, self.exchange_s, strict=True)
        ]

    def later(self, seconds: float) -> StageRun:
        """Returns this run, started later."""
        if not seconds:
            return self
        return replace(self, times=tuple((start_s + seconds, stop_s + seconds) for start_s, stop_s in self.times))


def check_action(action: Action, stage: StagePlan) -> None:
    """Raises ValueError naming an action that cannot be evaluated: one with lenders, or of a layer range that does not exist."""
    last = len(stage.layer_ranges) - (action.kind not in ("H", "RF", "SB"))
    if action.lenders or action.layer_range > last:
        raise ValueError(
            f"action {action} cannot be evaluated yet; use only messages, and passes of the stage's {len(stage.layer_ranges)} "
            f"layer range(s) without lenders"
        )


def near_ranks(ranks: Sequence[int], ranks_per_node: int) -> int:
    """Number of these ranks on the node that has the fewest; these receive the most over the network, from other nodes."""
    if ranks[0] // ranks_per_node == ranks[-1] // ranks_per_node:
        return len(ranks)
    return min(Counter(rank // ranks_per_node for rank in ranks).values())


class PredictionCache:
    """Cache for all plans of one step under one cost model: bytes and seconds of chunks, and predicted runs of groups.

    counts_gathers: passes of pipelines take the seconds that count for gathers of weights and sums of gradients, too.
    """

    def __init__(self, counts_gathers: bool = False) -> None:
        self.counts_gathers = counts_gathers
        self._gathers: dict[tuple[int, int, bool, bool], StageGathers] = {}
        self._bytes: ByteModel | None = None
        # runs by ids of chunks and stages; the group is stored with them, so that these ids are not reused
        self.runs: dict[tuple[int, int, int, tuple[int, ...], tuple[float, ...]], tuple[SequenceGroup, tuple[StageRun, ...]]] = {}
        self._wirings: dict[tuple[int, ...], tuple[SequenceGroup, Wiring]] = {}
        self._heads: dict[tuple[int, ...], tuple[SequenceGroup, dict[int, int]]] = {}
        # whether a pipeline needs more bytes above the limit than these, by ids of chunks and stages, and by shape
        self.over: dict[tuple[int, int, GroupShape, float], tuple[SequenceGroup, bool]] = {}
        self._seconds: dict[tuple[int, int, GroupShape], tuple[tuple[Chunk, ...], ChunkSeconds]] = {}
        self._under: dict[tuple[int, int, tuple[LayerKind, ...]], PolicySeconds] = {}
        # seconds and exchanges of both passes of a group's only chunk without policies, and its tokens on every rank
        self.kept_chunks: dict[
            tuple[int, int, GroupShape, int], tuple[SequenceGroup, list[float], list[float], tuple[int, ...]]
        ] = {}
        # layers that stay gathered in plans with turns, by the ids of these plans, which are stored with them
        self._turned: dict[int, tuple[StepPlan, BoolArray, list[int]]] = {}
        # pipelines without policies, by ids of chunks and stages, and by positions
        self._kept: dict[tuple[int, int, int, tuple[int, ...]], tuple[SequenceGroup, float, FloatArray]] = {}

    def without_gathers(self) -> PredictionCache:
        """Returns a cache that counts no gathers, and shares what does not depend on them."""
        found = PredictionCache()
        found._bytes, found._wirings, found._heads = self._bytes, self._wirings, self._heads
        found._seconds, found._under = self._seconds, self._under
        return found

    def byte_model(self, model: ModelSpec) -> ByteModel:
        """Returns the byte model of this model, made once."""
        if self._bytes is None or self._bytes.model != model:
            self._bytes = ByteModel(model)
        return self._bytes

    def gathers(self, plan: StepPlan, costs: CostModel, num_layers: int, is_first: bool, is_last: bool) -> StageGathers:
        """Returns the collectives of a part of the model, with the embedding if first and the head if last."""
        key = plan.block_ranks, num_layers, is_first, is_last
        if key not in self._gathers:
            self._gathers[key] = plan_gathers(plan, costs, num_layers, is_first, is_last)
        return self._gathers[key]

    def wiring(self, group: SequenceGroup) -> Wiring:
        """Returns the wiring of the group's passes, or of all its actions if messages do not stand beside these.

        It does not depend on policies. Raises ValueError like `check_action`.
        """
        key = tuple(id(stage.actions) for stage in group.stages)
        if key not in self._wirings:
            for stage in group.stages:
                for action in stage.actions:
                    if action.lenders or action.layer_range:
                        check_action(action, stage)
            way = [stage.actions for stage in group.stages], len(group.stages[0].layer_ranges)
            self._wirings[key] = group, Wiring.of_passes(*way) or Wiring.of_actions(*way)
        return self._wirings[key][1]

    def heads(self, group: SequenceGroup) -> dict[int, int]:
        """Returns the stages of the group's output heads that are not on the last stage, which do not depend on policies."""
        key = tuple(id(stage.actions) for stage in group.stages)
        if key not in self._heads:
            self._heads[key] = group, group.head_stages
        return self._heads[key][1]

    def keeps_in_turns(self, plan: StepPlan) -> tuple[BoolArray, list[int]]:
        """Returns `keeping_passes` of all micro-batches, which run in turns, and the first chunk of each among all."""
        if id(plan) not in self._turned:
            joined = _in_order(map(Passes, joined_stages(plan.micro_batches, plan.turns)))
            firsts = list(accumulate((len(each.groups[0].chunks) for each in plan.micro_batches), initial=0))
            num_ranges = len(plan.micro_batches[0].groups[0].stages[0].layer_ranges)
            self._turned[id(plan)] = plan, keeping_passes(joined, num_ranges, firsts[-1]), firsts
        return self._turned[id(plan)][1:]

    def seconds(self, group: SequenceGroup, costs: CostModel) -> ChunkSeconds:
        """Returns the seconds of the group's chunks, which depend neither on policies nor on positions."""
        key = id(group.chunks), id(group.towers), group.shape
        if key not in self._seconds:
            self._seconds[key] = group.chunks, ChunkSeconds(group, costs)
        return self._seconds[key][1]

    def under(self, chunks: ChunkSeconds, near: int, kinds: tuple[LayerKind, ...]) -> PolicySeconds:
        """Returns the seconds that policies add to chunks on layers of these kinds. near: see `near_ranks`."""
        key = id(chunks), near, kinds
        if key not in self._under:
            self._under[key] = PolicySeconds(chunks, near, kinds)
        return self._under[key]

    def kept(self, plan: StepPlan, group: SequenceGroup, costs: CostModel) -> tuple[float, FloatArray]:
        """Returns when a group that recomputes and moves nothing stops, from second 0, and for how long every stage works.

        Bytes are not counted. A stage works at most as long in the group's `run_pipeline`.
        """
        key = id(group.chunks), id(group.stages), id(group.towers), group.positions
        if key not in self._kept:
            wiring, seconds = self.wiring(group), StageSeconds(plan, group, costs, self)
            stop_s = wiring.stop_s(wiring.seconds(seconds.table), wiring.hops(seconds.hops()))
            self._kept[key] = group, stop_s, seconds.on_stages(seconds.table)
        return self._kept[key][1:]


def _in_order(stages: Iterable[Passes]) -> list[StagePasses]:
    return [(own.is_forward, own.chunks, own.layer_ranges) for own in stages]


def plan_gathers(plan: StepPlan, costs: CostModel, num_layers: int, is_first: bool, is_last: bool) -> StageGathers:
    """Collectives of a part of the model under a plan, with the embedding if first and the head if last."""
    host_bytes = layer_shard_bytes(costs.model, num_layers, plan.parameters, plan.block_ranks)
    costs = replace(costs, parameters=plan.parameters)
    return StageGathers.of(costs, plan.block_ranks, (num_layers, is_first, is_last), plan.num_stages, host_bytes)


def run_pipeline(
    plan: StepPlan, group: SequenceGroup, costs: CostModel, start_s: Sequence[float], known: PredictionCache | None = None
) -> tuple[StageRun, ...]:
    """Predicts a group whose stages are free at `start_s`; returns one run per stage."""
    known = PredictionCache() if known is None else known
    if len(group.stages) == 1:
        # a group without stages does not depend on others while it runs, so its run may start at any time and place
        near = near_ranks(group.positions, costs.cluster.ranks_per_node)
        alone = id(group.chunks), id(group.stages), id(group.towers), (near,), (0.0,)
        if alone not in known.runs:
            known.runs[alone] = group, _run_pipeline(plan, group, costs, (0.0,), known)
        return tuple(run.later(start_s[0]) for run in known.runs[alone][1])
    key = id(group.chunks), id(group.stages), id(group.towers), group.positions, tuple(start_s)
    if key not in known.runs:
        known.runs[key] = group, _run_pipeline(plan, group, costs, start_s, known)
    return known.runs[key][1]


def with_heads(table: FloatArray, head_s: FloatArray, heads: Mapping[int, int], more_s: float = 0.0) -> FloatArray:
    """Adds output heads to a table of all passes, (layer ranges, stages, chunks, F/B): one more layer range for `Wiring`.

    head_s: seconds of the head, (chunks, F/B). Those of chunks that are not in `heads` belong to the last layer range, and
    without any heads there is no further one. more_s: seconds that each head takes beside these, in its backward.
    """
    away = list(heads)
    own_s = head_s + np.array([0.0, more_s])
    own_s[away] = 0.0
    found = np.concatenate([table, np.zeros((1, *table.shape[1:]))]) if heads else table.copy()
    found[len(table) - 1, -1] += own_s
    if heads:
        found[-1, 0, away, 0] = head_s[away].sum(axis=1) + more_s
    return found


def seconds_on_stages(table: FloatArray, heads: Mapping[int, int]) -> FloatArray:
    """Sums a table `with_heads` for every stage, shape (stages,). heads: stages of output heads by chunk."""
    if not heads:
        found: FloatArray = table.sum(axis=(0, 2, 3))
        return found
    found = table[:-1].sum(axis=(0, 2, 3))
    np.add.at(found, list(heads.values()), table[-1, 0, list(heads), 0])
    return found


def hops_with_heads(
    hops: FloatArray, leaves: Sequence[bool], heads: Mapping[int, int], hop_s: Callable[[bool], Sequence[float]]
) -> FloatArray:
    """Adds messages to and from output heads on other stages, if there are any, for `Wiring.hops`.

    hops: seconds of messages between neighbours, (stages, chunks, F/B). leaves: for every stage, whether its messages to the next
    stage cross nodes. heads: stages of these heads by chunk. hop_s: seconds of every chunk's message, across nodes or not.
    """
    if not heads:
        return hops
    found = np.concatenate([hops, np.zeros((1, *hops.shape[1:]))])
    seconds = {stage: hop_s(any(leaves[stage:-1])) for stage in set(heads.values())}
    for chunk, stage in heads.items():
        found[-2:, chunk, 0] = seconds[stage][chunk]
    return found


def run_alone(group: SequenceGroup, costs: CostModel, known: PredictionCache | None = None) -> StageRun:
    """Predicts a group on one stage that runs by itself from second 0."""
    plan = StepPlan(0, (), 1, group.degree, costs.parameters, (MicroBatch((group,)),))
    (run,) = run_pipeline(plan, group, costs, [0.0], known)
    return run


def _run_pipeline(
    plan: StepPlan, group: SequenceGroup, costs: CostModel, start_s: Sequence[float], known: PredictionCache
) -> tuple[StageRun, ...]:
    wiring = known.wiring(group)
    seconds = StageSeconds(plan, group, costs, known)
    _, steps = seconds.under_policies
    # messages and output heads copy nothing
    with_copies = wiring.is_pass & (wiring.units < len(steps) - 1)
    copies = [steps[unit] for unit in np.where(with_copies, wiring.units, -1).tolist()] if any(steps) else []
    times, _ = wiring.run(wiring.seconds(seconds.table), wiring.hops(seconds.hops()), start_s, copies)
    exchange_s = wiring.seconds(seconds.exchanges())
    runs = []
    for place, (stage, (start, stop)) in enumerate(zip(group.stages, pairwise(wiring.starts), strict=True)):
        is_pass = wiring.is_pass[start:stop]
        when, exchanges = tuple(compress(times[place], is_pass)), tuple(compress(exchange_s[start:stop], is_pass))
        runs.append(_stage_run(plan, seconds, stage, when, exchanges, known))
    return tuple(runs)


def _stage_run(
    plan: StepPlan,
    seconds: StageSeconds,
    stage: StagePlan,
    when: Times,
    exchange_s: tuple[float, ...],
    known: PredictionCache,
) -> StageRun:
    """Run of one stage, given the times of its passes and the exchanges inside each of them."""
    byte_model = known.byte_model(seconds.costs.model)
    passes = byte_model.passes(stage)
    model, group = seconds.costs.model, seconds.group
    is_alone = plan.num_stages == 1
    waiting = 0 if is_alone else byte_model.stage_waiting(stage, plan)
    found = byte_model.moments(group, stage, waiting=waiting).most
    messages = message_bytes(model, stage, len(group.stages), max(seconds.tokens))
    if is_alone:
        sharing = seconds.costs.parameters, seconds.costs.shard_ranks
        state_bytes = byte_model.states(*sharing) + (byte_model.accumulated(*sharing) if len(group.chunks) > 1 else 0)
    else:
        state_bytes = byte_model.stage_states(stage, plan)
    return StageRun(
        passes.with_heads,
        when,
        exchange_s,
        state_bytes + found.peak + messages,
        found.host,
        most_tokens_at_once(passes.is_forward, passes.chunks, seconds.tokens, len(stage.layer_ranges)),
        *seconds.ends[stage.stage],
    )


class ChunkSeconds:
    """Seconds of a group's chunks on one layer; each number is computed once."""

    def __init__(self, group: SequenceGroup, costs: CostModel) -> None:
        self.group, self.costs = group, costs
        shape = group.shape
        self.tokens = [fullest_share(chunk, shape) for chunk in group.chunks]
        self._passes: dict[tuple[bool, int, AttentionPairs], FloatArray] = {}
        # seconds that exchanges hide in all layers
        self._hidden: dict[bool, list[float]] = {}
        self._hops: dict[bool, list[float]] = {}
        self._slots: dict[tuple[int, LayerKind], Slot] = {}
        # these are known by ids of policies, which are stored with them, so that these ids are not reused
        self._layers: dict[tuple[int, int, LayerKind, LayerKind], tuple[LayerPolicy, tuple[float, float] | None]] = {}
        self._moves: dict[int, tuple[tuple[LayerPolicy, ...], bool]] = {}

    def passes(self, is_backward: bool, near: int, pairs: AttentionPairs) -> FloatArray:
        """Seconds of every chunk, shape (chunks, 3): one layer (with these pairs), the head, communication in one layer.

        near: see `near_ranks`.
        """
        key = is_backward, near, pairs
        if key not in self._passes:
            costs, shape, found = self.costs, self.group.shape, []
            fixed_s, token_s = costs.exchange_line(shape, is_backward, near)
            if is_backward not in self._hidden:
                self._hidden[is_backward] = costs.chunks_hidden_s(self.group.chunks, shape, is_backward)
            for chunk, hidden_s in zip(self.group.chunks, self._hidden[is_backward], strict=True):
                exchange_s = fixed_s + token_s * max(chunk.num_tokens, shape.degree)
                pass_s = costs.layer_and_head_s(chunk, shape, is_backward, exchange_s, pairs, hidden_s)
                found.append((*pass_s, exchange_s / costs.model.num_layers))
            self._passes[key] = np.array(found)
        return self._passes[key]

    @cached_property
    def towers(self) -> FloatArray:
        """Seconds of towers in every pass of the first stage, shape (chunks, F/B)."""
        both, group = (False, True), self.group
        return np.array(
            [[self.costs.chunk_towers_s(group, chunk, is_backward) for is_backward in both] for chunk in group.chunks]
        )

    def hops(self, leaves: bool) -> list[float]:
        """Seconds of the message that takes each chunk to the next stage. leaves: whether that stage is on another node."""
        if leaves not in self._hops:
            self._hops[leaves] = [self.costs.hop_s(count, leaves) for count in self.tokens]
        return self._hops[leaves]

    def layer(self, chunk: int, layer: LayerPolicy, kind: LayerKind, before: LayerKind) -> tuple[float, float] | None:
        """Seconds recomputed and seconds copied in a layer of this kind; None if the layer keeps everything.

        before: kind of the layer before it, whose other run makes a layer input that is recomputed.
        """
        key = chunk, id(layer), kind, before
        if key not in self._layers:
            found = None
            if not layer.keeps_everything:
                slot = self.slot(chunk, kind)
                shares = [(item, layer.share(item.tensor_class)) for item in slot.saved]
                again_s = slot.replay_s
                again_s += sum(item.recompute_part_s(share.recompute) for item, share in shares[1:])
                again_s += self.saved(chunk, before)[0].recompute_part_s(shares[0][1].recompute)
                again_s += self._pieces_s(chunk, layer.head_pieces, shares[2][0].recompute_s)
                copied = sum(item.num_bytes * share.host for item, share in shares)
                found = again_s, copied / self.costs.cluster.hardware.copy_bytes_per_s
            self._layers[key] = layer, found
        return self._layers[key][1]

    def _pieces_s(self, chunk: int, head_pieces: int, projections_s: float) -> float:
        """Seconds that pieces of heads add to a layer: projections and their exchange once more, and messages of every piece.

        A forward, a replay and a backward exchange each piece by itself.
        """
        if head_pieces == 1:
            return 0.0
        costs, shape, tokens = self.costs, self.group.shape, self.group.chunks[chunk].num_tokens
        (fixed_s, token_s), (back_s, _) = (costs.exchange_line(shape, is_backward) for is_backward in (False, True))
        exchange_s = fixed_s + token_s * max(tokens, shape.degree) + (head_pieces - 1) * (2 * fixed_s + back_s)
        return projections_s + exchange_s / costs.model.num_layers

    def moves(self, layers: tuple[LayerPolicy, ...]) -> bool:
        """Whether a chunk's layer policies have copies to the host."""
        key = id(layers)
        if key not in self._moves:
            self._moves[key] = layers, any(share.host > 0 for layer in layers for share in layer.shares)
        return self._moves[key][1]

    def saved(self, chunk: int, kind: LayerKind) -> tuple[SavedClass, ...]:
        """Tensors that a layer saves for a chunk."""
        return self.slot(chunk, kind).saved

    def slot(self, chunk: int, kind: LayerKind) -> Slot:
        """The slot of a layer of this kind for a chunk."""
        if (chunk, kind) not in self._slots:
            pairs = self.costs.pairs_of((kind,))
            forward_s, backward_s = (float(self.passes(is_backward, 0, pairs)[chunk, 0]) for is_backward in (False, True))
            seconds = forward_s, backward_s
            self._slots[chunk, kind] = kind_slot(self.costs, self.group.chunks[chunk], self.group.shape, kind, seconds)
        return self._slots[chunk, kind]


class PolicySeconds:
    """Seconds that policies add to the passes of a group's chunks over layers of these kinds; each number is computed once.

    near: see `near_ranks`.
    """

    def __init__(self, chunks: ChunkSeconds, near: int, kinds: tuple[LayerKind, ...]) -> None:
        self.chunks, self.near, self.kinds = chunks, near, kinds
        # equal numbers for layers of equal kinds after layers of equal kinds
        pairs: dict[tuple[LayerKind, LayerKind], int] = {}
        self._kind_ids = [pairs.setdefault(pair, len(pairs)) for pair in zip(kinds, (*kinds[:1], *kinds), strict=False)]
        # results by chunk and id of its policies, which are stored with them, so that these ids are not reused
        self._known: dict[tuple[int, bool, int, int], tuple[tuple[LayerPolicy, ...], tuple[float, tuple[CopyStep, ...]]]] = {}
        self._of_layers: dict[tuple[int, int], list[tuple[tuple[float, float] | None, LayerKind, int]]] = {}
        self._kinds: dict[tuple[int, bool], dict[LayerKind, float]] = {}

    def of(self, policy: ActivationPolicy, is_backward: bool) -> tuple[float, tuple[CopyStep, ...]]:
        """Seconds of recomputation, and copies, that a policy adds to a pass."""
        key = policy.chunk, is_backward, policy.leaving_layers, id(policy.layers)
        if key not in self._known:
            if self.chunks.moves(policy.layers):
                found = self._with_copies(policy, is_backward)
            else:
                again = self._layers(policy) if is_backward else ()
                found = sum([of_layer[0] for of_layer, _, count in again if of_layer for _ in range(count)]), ()
            self._known[key] = policy.layers, found
        return self._known[key][1]

    def _with_copies(self, policy: ActivationPolicy, is_backward: bool) -> tuple[float, tuple[CopyStep, ...]]:
        pass_s = self._kind_seconds(policy.chunk, is_backward)
        again_s = plain_s = 0.0
        steps: list[CopyStep] = []
        has_copies = moves_below = False
        for of_layer, kind, count in self._layers(policy):
            own_s = pass_s[kind]
            if of_layer is None:
                if moves_below:
                    # while the first of them runs, tensors of the layer below leave or come
                    steps.append(CopyStep(own_s, 0.0, policy.leaving_layers))
                # other layers that keep everything belong to the step above them
                for _ in range(count - moves_below):
                    plain_s += own_s
            else:
                layer_s, copy_s = of_layer if is_backward else (0.0, of_layer[1])
                for _ in range(count):
                    again_s += layer_s
                steps.append(CopyStep(own_s + layer_s + plain_s, copy_s, policy.leaving_layers))
                steps += [CopyStep(own_s + layer_s, copy_s, policy.leaving_layers)] * (count - 1)
                plain_s, has_copies = 0.0, has_copies or copy_s > 0
            moves_below = of_layer is not None
        if not has_copies:
            return again_s, ()
        return again_s, tuple(reversed(steps) if is_backward else steps)

    @cached_property
    def _pairs(self) -> AttentionPairs:
        return self.chunks.costs.pairs_of(self.kinds)

    def _kind_seconds(self, chunk: int, is_backward: bool) -> dict[LayerKind, float]:
        """Seconds of a layer of each kind; those of all layers sum to what a pass takes without its head."""
        key = chunk, is_backward
        if key not in self._kinds:
            whole_s = len(self.kinds) * float(self.chunks.passes(is_backward, self.near, self._pairs)[chunk, 0])
            slots = {kind: self.chunks.slot(chunk, kind) for kind in dict.fromkeys(self.kinds)}
            own_s = {kind: slot.backward_s if is_backward else slot.forward_s for kind, slot in slots.items()}
            sum_s = sum(own_s[kind] for kind in self.kinds)
            self._kinds[key] = {kind: seconds * whole_s / sum_s if sum_s else 0.0 for kind, seconds in own_s.items()}
        return self._kinds[key]

    def _layers(self, policy: ActivationPolicy) -> list[tuple[tuple[float, float] | None, LayerKind, int]]:
        """`ChunkSeconds.layer` of all layers, which both passes need, with the kind and the number of equal layers in a row."""
        key = policy.chunk, id(policy.layers)
        if key not in self._of_layers:
            # equal layers are mostly one object, and so are their kinds
            layers, found, start = policy.layers, [], 0
            for _, same in groupby(zip(map(id, layers), self._kind_ids, strict=False)):
                count, kind = len(list(same)), self.kinds[start]
                # the first layer counts as if the one before it was of its own kind
                found.append((self.chunks.layer(policy.chunk, layers[start], kind, self.kinds[max(0, start - 1)]), kind, count))
                start += count
            self._of_layers[key] = found + [(None, kind, 1) for kind in self.kinds[start:]]
        return self._of_layers[key]


class StageSeconds:
    """Seconds of a group's actions; each number is computed once."""

    def __init__(self, plan: StepPlan, group: SequenceGroup, costs: CostModel, known: PredictionCache | None = None) -> None:
        self.plan, self.group, self.costs, self.known = plan, group, costs, known
        caches = PredictionCache() if known is None else known
        self.chunks = caches.seconds(group, costs)
        self.tokens = self.chunks.tokens
        per_node, per_stage = costs.cluster.ranks_per_node, plan.ranks_per_stage
        ranks = [[stage.stage * per_stage + position for position in group.positions] for stage in group.stages]
        self.near = [near_ranks(of_stage, per_node) for of_stage in ranks]
        # whether any rank's next stage is on another node, for each stage: one message across nodes makes the whole group wait
        self.leaves = [
            any(one // per_node != other // per_node for one, other in zip(of_stage, [*ranks[1:], ranks[0]][place], strict=True))
            for place, of_stage in enumerate(ranks)
        ]
        self.pairs = [[costs.attention_pairs((layer_range,)) for layer_range in stage.layer_ranges] for stage in group.stages]
        self.under = [
            [
                caches.under(self.chunks, near, costs.model.layer_kinds(owned) or (ATTENTION,) * owned.num_layers)
                for owned in stage.layer_ranges
            ]
            for near, stage in zip(self.near, group.stages, strict=True)
        ]
        self.policies = [
            {(policy.chunk, policy.layer_range): policy for policy in stage.activations if policy.layers}
            for stage in group.stages
        ]

    @cached_property
    def table(self) -> FloatArray:
        """Seconds of every pass, as `of` returns them, shape (layer ranges, stages, chunks, F/B); input of `Wiring.seconds`.

        If other stages than the last one run output heads, one more layer range follows, with these as F of stage 0.
        """
        table = self._by_layer(0)
        table[0, 0] += self.chunks.towers
        return with_heads(table + self.under_policies[0] + self.gathers, self._head_s, self.heads, self._head_sum_s)

    @cached_property
    def heads(self) -> dict[int, int]:
        """Stages of the output heads that are not on the last stage, by chunk."""
        return self.group.head_stages if self.known is None else self.known.heads(self.group)

    @cached_property
    def _head_s(self) -> FloatArray:
        """Seconds of the output head, shape (chunks, F/B)."""
        last = self.near[-1], self.pairs[-1][-1]
        return np.stack([self.chunks.passes(is_backward, *last)[:, 1] for is_backward in (False, True)], axis=1)

    def on_stages(self, table: FloatArray) -> FloatArray:
        """Sums a table of all passes for every stage, shape (stages,)."""
        return seconds_on_stages(table, self.heads)

    @cached_property
    def under_policies(self) -> tuple[FloatArray, list[tuple[CopyStep, ...]]]:
        """Seconds that policies add to every pass, in the shape of `table`, and its copies, by `Wiring.units`, () at the end."""
        shape = len(self.under[0]), len(self.under), len(self.group.chunks), 2
        seconds = [0.0] * math.prod(shape)
        steps: list[tuple[CopyStep, ...]] = [()] * (len(seconds) + 1)
        for stage, policies in enumerate(self.policies):
            for (chunk, layer_range), policy in policies.items():
                under, unit = self.under[stage][layer_range], 2 * ((layer_range * shape[1] + stage) * shape[2] + chunk)
                seconds[unit], steps[unit] = under.of(policy, False)
                seconds[unit + 1], steps[unit + 1] = under.of(policy, True)
        return np.array(seconds, dtype=np.float64).reshape(shape), steps

    @cached_property
    def gathers(self) -> FloatArray:
        """Seconds that every pass of layers counts for gathers and sums, shape (layer ranges, stages, chunks, F/B).

        Sums of an output head's gradients are not part of it if several stages have the head and every pass sums its own.
        """
        if not self._collectives:
            return np.zeros_like(self._compute_s)
        return counted_passes_s(self._collectives, self._compute_s, self._last_chunks, self._keeps_first)

    @cached_property
    def _keeps_first(self) -> BoolArray:
        """Passes that begin with a layer that is still gathered, see `keeping_passes`."""
        assert self.known is not None
        stages, num_ranges, num_chunks = self.group.stages, len(self.group.stages[0].layer_ranges), len(self.group.chunks)
        if not self.plan.turns:
            byte_model = self.known.byte_model(self.costs.model)
            return keeping_passes(_in_order(map(byte_model.passes, stages)), num_ranges, num_chunks)
        keeps, firsts = self.known.keeps_in_turns(self.plan)
        # by identity, since plans of micro-batches may be equal
        index = next(i for i, each in enumerate(self.plan.micro_batches) if any(group is self.group for group in each.groups))
        return keeps[:, :, firsts[index] : firsts[index] + num_chunks]

    @cached_property
    def counted_gathers(self) -> FloatArray:
        """Seconds that every pass counts for gathers and sums, in the shape of `table`."""
        return with_heads(self.gathers, np.zeros_like(self._head_s), self.heads, self._head_sum_s)

    @cached_property
    def _head_sum_s(self) -> float:
        """Seconds in which the gradients of an output head are summed, if several stages have it and every pass sums its own."""
        if not self._collectives or self.costs.model.num_head_stages == 1:
            return 0.0
        assert self.known is not None
        return summed_head_s(self.known.gathers(self.plan, self.costs, 0, False, True), self.plan.parameters)

    @cached_property
    def ends(self) -> list[tuple[tuple[float, float], float]]:
        """Seconds that a step counts on every stage before the group's first pass and after its last one.

        See `ends_s` and `to_nodes_s`.
        """
        if not self._collectives:
            return [((0.0, 0.0), 0.0)] * len(self.group.stages)
        first_s = self._compute_s[0, :, 0, 0].tolist()
        last_s = [float(self._compute_s[0, stage, chunk, 1]) for stage, chunk in enumerate(self._last_chunks)]
        return [
            (ends_s(own, *beside_s), to_nodes_s(own, beside_s[0]))
            for own, *beside_s in zip(self._collectives, first_s, last_s, strict=True)
        ]

    @cached_property
    def _collectives(self) -> list[list[StageGathers]]:
        """Collectives of every layer range of every stage; empty if passes do not count them."""
        if self.known is None or not self.known.counts_gathers or self.plan.num_stages == 1:
            return []
        known = partial(self.known.gathers, self.plan, self.costs)
        ranges = [stage.layer_ranges for stage in self.group.stages]
        return stage_collectives(known, ranges, self.plan.parameters, self.costs.model)

    @cached_property
    def _compute_s(self) -> FloatArray:
        """Seconds that every pass computes layers, shape (layer ranges, stages, chunks, F/B)."""
        found: FloatArray = self._by_layer(0) - self._by_layer(2)
        return found

    @cached_property
    def _last_chunks(self) -> list[int]:
        """Chunk of every stage's last backward."""
        return [next(each.chunk for each in reversed(stage.actions) if each.kind == "B") for stage in self.group.stages]

    def exchanges(self) -> FloatArray:
        """Seconds of communication in every pass, as `exchange_s` returns them, in the shape of `table`."""
        return with_heads(self._by_layer(2), np.zeros_like(self._head_s), self.heads)

    def hops(self) -> FloatArray:
        """Seconds of messages, shape (sending stage, chunk, F/B); input of `Wiring.hops`."""
        ways = [(leaves, self.leaves[stage - 1]) for stage, leaves in enumerate(self.leaves)]
        found: FloatArray = np.array([[self.chunks.hops(leaves) for leaves in of_stage] for of_stage in ways]).swapaxes(1, 2)
        return hops_with_heads(found, self.leaves, self.heads, self.chunks.hops)

    def _by_layer(self, column: int) -> FloatArray:
        """A column of `ChunkSeconds.passes` times the layers of every range; shape (layer ranges, stages, chunks, F/B)."""
        stages = self.group.stages
        per_layer = np.array(
            [
                [
                    [self.chunks.passes(is_backward, near, pairs)[:, column] for is_backward in (False, True)]
                    for near, pairs in zip(self.near, of_range, strict=True)
                ]
                for of_range in zip(*self.pairs, strict=True)
            ]
        ).swapaxes(2, 3)
        num_layers = np.array(
            [[layer_range.num_layers for layer_range in stage.layer_ranges] for stage in stages], dtype=np.float64
        ).T
        table: FloatArray = num_layers[:, :, None, None] * per_layer
        return table

    def of(self, action: Action) -> float:
        """Seconds of a pass, with recomputation but without waits for copies."""
        if action.kind == "H":
            return float(self._head_s[action.chunk].sum()) + self._head_sum_s
        body_s, head_s, _ = self._body(action)
        stage = self.group.stages[action.stage]
        is_last = action.stage == len(self.group.stages) - 1 and action.layer_range == len(stage.layer_ranges) - 1
        has_head = is_last and action.chunk not in self.heads
        seconds = body_s * stage.layer_ranges[action.layer_range].num_layers + (head_s if has_head else 0.0)
        seconds += float(self.gathers[action.layer_range, action.stage, action.chunk, int(action.kind == "B")])
        seconds += self._head_sum_s if has_head and action.kind == "B" else 0.0
        seconds += 0.0 if action.stage or action.layer_range else float(self.chunks.towers[action.chunk, int(action.kind == "B")])
        return seconds + self._policy(action)[0] if self.policies[action.stage] else seconds

    def exchange_s(self, action: Action) -> float:
        """Seconds of a pass that are communication between the ranks of the group."""
        if action.kind == "H":
            return 0.0
        return self._body(action)[2] * self.group.stages[action.stage].layer_ranges[action.layer_range].num_layers

    def hop_s(self, action: Action) -> float:
        """Seconds of the message that carries an action's result to another stage."""
        if action.kind == "H" or (
            action.kind == "F" and action.stage == len(self.group.stages) - 1 and action.chunk in self.heads
        ):
            return self.costs.hop_s(self.tokens[action.chunk], any(self.leaves[self.heads[action.chunk] : -1]))
        is_forward = action.kind == "F" or action.kind == "SF"
        leaves = self.leaves[action.stage] if is_forward else self.leaves[action.stage - 1]
        return self.costs.hop_s(self.tokens[action.chunk], leaves)

    def copies(self, action: Action) -> tuple[CopyStep, ...]:
        return self._policy(action)[1] if self.policies[action.stage] and action.kind != "H" else ()

    def _body(self, action: Action) -> tuple[float, float, float]:
        """Seconds of one layer, of the head, and of the communication in one layer."""
        pairs = self.pairs[action.stage][action.layer_range]
        passes = self.chunks.passes(action.kind == "B", self.near[action.stage], pairs)
        layer_s, head_s, exchange_s = passes[action.chunk].tolist()
        return layer_s, head_s, exchange_s

    def _policy(self, action: Action) -> tuple[float, tuple[CopyStep, ...]]:
        """Seconds recomputed in an action, and its copies."""
        policy = self.policies[action.stage].get((action.chunk, action.layer_range))
        if policy is None:
            return 0.0, ()
        return self.under[action.stage][action.layer_range].of(policy, action.kind == "B")
