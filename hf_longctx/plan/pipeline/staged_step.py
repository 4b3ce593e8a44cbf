"""States the planning problem of one step on pipeline stages: seconds and room of its sequences on groups of every degree.

The search for micro-batches starts from `StagedStep`, as it starts from `GroupingProblem` on one stage. `StagedStep` rates whole
pipelines without a full prediction, since the search compares hundreds of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike

from hf_longctx.plan.core.orders import Schedule, deal_output_heads, families, family_orders
from hf_longctx.plan.core.settings import PlannerConfig, check_degrees
from hf_longctx.plan.core.sharding import fullest_share, sequence_ends
from hf_longctx.plan.core.types import Chunk, FloatArray, GroupShape, IntArray, LayerRange, Ranges
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.cost.traffic import group_shapes
from hf_longctx.plan.cost.weight_traffic import StageGathers, counted_passes_s, keeping_passes, stage_collectives, summed_head_s
from hf_longctx.plan.groups.placement import PlacedGroup
from hf_longctx.plan.memory.saved_tensors import class_bytes, layer_class_bytes
from hf_longctx.plan.memory.stage import accumulated_bytes, tokens_at_once
from hf_longctx.plan.model.attention_pairs import SpanRates
from hf_longctx.plan.predict.event_loop import Wiring
from hf_longctx.plan.predict.pipeline_run import hops_with_heads, seconds_on_stages, with_heads


@dataclass(frozen=True, slots=True)
class CutConstants:
    """Constants of the search for ways to cut a group's sequences."""

    # numbers of slices of the longest sequence to try
    slice_counts: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64)
    # numbers of chunks per stage to try if packs may take longer than the longest sequence
    chunks_per_stage: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16)
    # most chunks of all concurrent groups; more cost more in messages, small kernels and planning than they save
    most_chunks: int = 512
    # share of a pipeline's seconds within which cuts count as equally fast, so that fewer chunks win
    equal: float = 0.01
    # factor by which the estimate's held tokens may exceed the room, since it is rough
    rough: float = 1.3
    # leads to try (`compute_orders`), in ascending order, and the share of the seconds that a longer one has to save
    leads: tuple[float, ...] = (1.0, 1.25, 1.5, 1.75, 2.0)
    least_gain: float = 0.002
    # chunks at both ends grow and shrink by this share of themselves, divided by the number of stages
    growth: float = 1.2


# repeat the stages table of `recipes/bench/cpu/planner.py` when one of these changes
CUTS = CutConstants()


@dataclass(frozen=True, slots=True)
class Cut:
    """A way to make chunks of a group's sequences; `estimate_s` is roughly its pipeline's seconds, recomputation included."""

    estimate_s: float
    num_chunks: float
    num_slices: int
    target_s: float
    # factor by which chunks grow at the beginning and shrink at the end (`elastic_chunks`)
    growth: float = 0.0

    @classmethod
    def slices(cls, num_slices: int) -> Cut:
        """The cut of the longest sequence into so many slices, whose seconds are not estimated."""
        return cls(math.nan, math.nan, num_slices, 0.0)


@dataclass(frozen=True, slots=True)
class StagedRun:
    """A run of groups with a lead (`compute_orders`).

    is_short: memory is short, so that not everything is kept. longer_is_short: it is short with this lead, or with a longer one
    that was tried.
    """

    seconds: float
    lead: float
    is_short: bool
    longer_is_short: bool


class StagedStep:
    """Whole sequences to run on the stages of `config.stages`, with their seconds and room on groups of every degree.

    costs: prices groups of one stage, inside which every group lies. shapes: how groups of each degree share attention.
    seconds[d][i]: seconds that sequence i adds to the busiest stage of a group of d ranks. longest[d]: most tokens of one
    sequence there. leaves_node: for every stage, whether its messages to the next stage cross nodes. Raises ValueError for ranks
    that cannot form the stages and for empty sequences.
    """

    def __init__(self, lengths: Sequence[int], costs: CostModel, config: PlannerConfig, schedule: Schedule = "elastic") -> None:
        ranges, cluster = config.stages, costs.cluster
        check_stages(len(ranges), costs, config)
        for index, length in enumerate(lengths):
            if length < 1:
                raise ValueError(f"sequence {index} has {length} tokens; remove empty sequences before planning")
        self.ranges, self.num_stages, self.config = ranges, len(ranges), config
        self.output_shares = _output_shares(config.output_shares, len(ranges))
        # stages with several layer ranges support only the interleaved schedule
        self.schedule: Schedule = schedule if len(ranges[0]) == 1 else "interleaved"
        self.ranks_per_stage = per_stage = cluster.num_ranks // self.num_stages
        self.costs = costs = replace(costs, cluster=replace(cluster, num_ranks=per_stage))
        self.lengths: IntArray = np.array(lengths, dtype=np.int64)
        self.degrees = tuple(degree for degree in config.degrees if degree <= per_stage)
        self.shapes = {degree: self._shape(degree) for degree in self.degrees}
        tokens = self.lengths.astype(np.float64)
        self.gathers = stage_gathers(costs, ranges, self.block_ranks)
        of_head = StageGathers.of(costs, self.block_ranks, (0, False, True), len(ranges))
        # seconds in which the gradients of an output head are summed, if several stages have it
        self.head_sum_s = summed_head_s(of_head, costs.parameters) if costs.model.num_head_stages > 1 else 0.0
        self.rates = {
            degree: busiest_rates(costs, shape, ranges, tokens, self.gathers, self.output_shares)
            for degree, shape in self.shapes.items()
        }
        # the first stage has the towers
        towers_s = costs.sequence_towers_s(len(tokens))
        self.seconds = {degree: rates.sequences_s(tokens) + towers_s / degree for degree, rates in self.rates.items()}
        self.room = StageRoom(costs, ranges, config)
        self.longest = {degree: degree * self.room.longest_tokens for degree in self.degrees}
        per_node, ranks = cluster.ranks_per_node, range(per_stage)
        self.leaves_node = [
            any((stage * per_stage + p) // per_node != ((stage + 1) % self.num_stages * per_stage + p) // per_node for p in ranks)
            for stage in range(self.num_stages)
        ]

    def by_length(self, members: Sequence[int]) -> list[int]:
        """Sorts these sequences, the longest first."""
        return sorted(members, key=lambda i: (-self.lengths[i], i))

    @property
    def growth(self) -> float:
        """Factor by which chunks at the ends of a pipeline may grow and shrink; 0 if this gains nothing."""
        return 1 + CUTS.growth / self.num_stages if self.num_stages > 1 and self.schedule == "elastic" else 0.0

    @property
    def block_ranks(self) -> int:
        """Number of consecutive positions that share parameters, and so enter and leave a micro-batch together."""
        return 1 if self.costs.parameters == "replicated" else self.costs.shards or self.ranks_per_stage

    def _shape(self, degree: int) -> GroupShape:
        """Chooses how groups of a degree share attention: in one block if possible, since rings send earlier slices again."""
        shapes = group_shapes(degree, self.costs.method, self.costs.model, self.costs.cluster)
        num_tokens = float(min(self.lengths.sum() / self.ranks_per_stage, self.config.tokens_per_rank) * degree)
        return next((s for s in shapes if s.num_blocks == 1), None) or self.costs.best_shape(degree, num_tokens)

    def work_s(self, group: PlacedGroup) -> float:
        """Seconds of the group's sequences on its busiest stage, without the fixed seconds of chunks."""
        return float(self.seconds[group.degree][list(group.members)].sum())

    def cuts(self, group: PlacedGroup) -> list[Cut]:
        """Ways to make chunks of a group's sequences, at least one, sorted by estimated seconds.

        The estimate is the work of the busiest stage, the time that the pipeline takes to fill and to drain, and recomputation.
        """
        rates, lengths, work_s = self.rates[group.degree], self.lengths[list(group.members)], self.work_s(group)
        longest, tokens = int(lengths.max()), int(lengths.sum())
        longest_s = rates.spans.of_span(0, longest)
        # fewest chunks that memory allows
        fewest = -(-tokens // (group.degree * self.config.tokens_per_rank))
        targets = [(count, longest_s / count) for count in CUTS.slice_counts if count <= longest]
        packs = [(1, work_s / (count * self.num_stages)) for count in CUTS.chunks_per_stage]
        found: list[Cut] = []
        for num_slices, target_s in [*targets, *(pack for pack in packs if pack[1] > longest_s)]:
            num_chunks = max(fewest, work_s / target_s if target_s > 0 else num_slices)
            if num_chunks * self.ranks_per_stage > CUTS.most_chunks * group.degree and found:
                continue
            slot_s = min(target_s, work_s / num_chunks) + rates.chunk_s
            # a stage of several layer ranges waits for chunks on one of them
            estimate_s = work_s + num_chunks * rates.chunk_s + (self.num_stages - 1) * slot_s / len(self.ranges[0])
            held = min(tokens, longest + (self.num_stages - 1) * tokens / num_chunks) / group.degree
            chunks = tokens / num_chunks / group.degree, (num_slices > 1) * longest / group.degree
            estimate_s += self.room.added_s([held / CUTS.rough], work_s, tokens / group.degree, [rates.spare * work_s], *chunks)
            found.append(Cut(estimate_s, num_chunks, num_slices, target_s))
        # fewest chunks first among equally fast cuts: small kernels and messages cost more than any model says
        equal_s = (1 + CUTS.equal) * min(cut.estimate_s for cut in found)
        return sorted(found, key=lambda cut: (max(equal_s, cut.estimate_s), cut.num_chunks))

    def longest_s(self, group: PlacedGroup) -> float:
        """Seconds of the group's longest sequence on its busiest stage."""
        return self.rates[group.degree].spans.of_span(0, int(self.lengths[list(group.members)].max()))

    def fastest_run(self, chunks: Mapping[PlacedGroup, Sequence[Chunk]], lead: float) -> StagedRun | None:
        """Finds the fastest run of groups that follow one order of equally many chunks and wait for one another.

        None if none fits. lead: the one of `CUTS.leads` that is probably best. The search starts at the faster of it and the
        longest, since leads in between may save nothing if messages are slow. It goes on to longer ones while each saves at least
        `CUTS.least_gain`; if none does, to shorter ones while each loses at most that. The result is the shortest lead tried that
        is within `CUTS.least_gain` of the fastest. The seconds include recomputation if memory is short.
        """
        work_s = max(map(self.work_s, chunks))
        tokens = max(sum(chunk.num_tokens for chunk in own) / group.degree for group, own in chunks.items())
        most = max(chunk.num_tokens / group.degree for group, own in chunks.items() for chunk in own)
        sliced = max(longest_sliced(own) / group.degree for group, own in chunks.items())
        groups = [(own, self.shapes[group.degree]) for group, own in chunks.items()]
        how = self.ranges, self.schedule, self.leaves_node, self.config.output_shares
        pipeline = pipeline_by_lead(groups, self.costs, *how, gathers=self.gathers, head_sum_s=self.head_sum_s)
        found: dict[float, StagedRun] = {}

        def seconds(lead: float) -> float:
            if lead not in found:
                kept_s, held, busy_s = pipeline(lead)
                added_s = self.room.stages_added_s(held, work_s, tokens, most, sliced)
                # a stage that works less than the busiest one may recompute meanwhile
                again_s = [added - (max(busy_s) - own_s) for added, own_s in zip(added_s, busy_s, strict=True)]
                is_short = max(added_s) > 0
                found[lead] = StagedRun(kept_s + max(0.0, *again_s), lead, is_short, is_short)
            return found[lead].seconds

        leads = CUTS.leads if self.schedule == "elastic" and self.num_stages > 1 else CUTS.leads[:1]
        start = min(lead, leads[-1], key=seconds)
        least_s, kept_share = seconds(start), 1 - CUTS.least_gain
        for longer in leads[leads.index(start) + 1 :]:
            before_s, least_s = least_s, min(least_s, seconds(longer))
            if least_s >= kept_share * before_s:
                break
        for shorter in reversed(leads[: leads.index(start)] if least_s >= kept_share * seconds(start) else ()):
            if kept_share * seconds(shorter) > least_s:
                break
            least_s = min(least_s, seconds(shorter))
        # longer leads hold more chunks, and have to save some time for that
        best = min((run for run in found.values() if kept_share * run.seconds <= least_s), key=lambda run: run.lead)
        longer_is_short = any(run.is_short for run in found.values() if run.lead >= best.lead)
        return replace(best, longer_is_short=longer_is_short) if best.seconds < math.inf else None

    def lower_bound_s(self) -> float:
        """Lower bound on the seconds of any plan."""
        return self.least_s(range(len(self.lengths))) + self.costs.coefficients.step_s

    def stages_s(self, members: Sequence[int], with_heads: bool = True) -> FloatArray:
        """Lower bounds on the seconds in which every stage runs these sequences, with everything kept and gathers counted.

        Each sequence counts at the degree of fewest rank-seconds, and chunks are as few as `tokens_per_rank` allows. with_heads:
        output heads count, too, by the stages' shares of them.
        """
        tokens = self.lengths[list(members)].astype(np.float64)
        fewest = math.ceil(float(tokens.sum()) / (self.ranks_per_stage * self.config.tokens_per_rank))
        found = []
        for place, own in enumerate(self.ranges):
            share = sum(each.num_layers for each in own) / self.costs.model.num_layers
            head_share = with_heads * self.output_shares[place]
            rates = {each: _rates(self.costs, shape, own, head_share) for each, shape in self.shapes.items()}
            work = [
                degree * (each.sequences_s(tokens) - share * self._hidden_s(tokens, degree)) for degree, each in rates.items()
            ]
            fixed_s = fewest * min(each.chunk_s for each in rates.values())
            fixed_s += sum(each.least_s(fewest) for each in self.gathers[place]) if fewest else 0.0
            found.append(float(np.min(work, axis=0).sum()) / self.ranks_per_stage + fixed_s)
        return np.array(found)

    def busiest_s(self, members: Sequence[int], once_s: FloatArray | float = 0.0) -> float:
        """Lower bound on the seconds in which the busiest stage runs these sequences, as in `stages_s`.

        Stages that share the output head may get less of it than their share, so the mean and layers alone are the bounds then.
        once_s: seconds of every stage beside its passes.
        """
        stages_s = self.stages_s(members) + once_s
        if not self.config.output_shares:
            return float(np.max(stages_s))
        return float(max(np.mean(stages_s), np.max(self.stages_s(members, with_heads=False) + once_s)))

    def _hidden_s(self, tokens: FloatArray, degree: int) -> FloatArray:
        """Seconds in which groups of a degree compute while they send, in all layers, for each of these sequences."""
        shape = self.shapes[degree]
        found: FloatArray = np.sum([self.costs.hidden_s(tokens, shape, is_back) for is_back in (False, True)], axis=0)
        return found

    def least_s(self, members: Sequence[int]) -> float:
        """Seconds of these sequences, each at the degree of fewest rank-seconds, spread over all ranks."""
        tokens, num_ranks = self.lengths[list(members)].tolist(), self.num_stages * self.ranks_per_stage
        work = [degree * self.costs.sequences_s(tokens, shape) for degree, shape in self.shapes.items()]
        return float(np.min(work, axis=0).sum()) / num_ranks


def check_stages(num_stages: int, costs: CostModel, config: PlannerConfig) -> None:
    """Raises ValueError unless the ranks divide evenly into `num_stages` stages and an allowed degree fits into a stage."""
    num_ranks = costs.cluster.num_ranks
    if num_stages < 1 or num_ranks % num_stages:
        fitting = [count for count in range(1, num_ranks + 1) if num_ranks % count == 0 and count <= costs.model.num_layers]
        raise ValueError(f"{num_ranks} ranks cannot form {num_stages} stages of equal size; use one of {fitting}")
    per_stage = num_ranks // num_stages
    degrees = tuple(degree for degree in config.degrees if degree <= per_stage)
    if not degrees:
        raise ValueError(
            f"no degree of {config.degrees} fits into a stage of {per_stage} rank(s) ({num_ranks} ranks in {num_stages} "
            f"stages); allow smaller degrees or use fewer stages"
        )
    check_degrees(degrees, per_stage, costs.model.num_heads, costs.method)


def longest_sliced(chunks: Sequence[Chunk]) -> int:
    """Most tokens of a sequence that is in several of these chunks; 0 if all are whole."""
    ends = sequence_ends(chunks)
    spans = (span for chunk in chunks for span in chunk.spans)
    return max((ends[span.sequence] for span in spans if span.num_tokens < ends[span.sequence]), default=0)


# workspace of a layer's backward, in the bytes that a layer saves for a chunk
_WORKSPACE = 2.0


class StageRoom:
    """Estimates the room on a rank of every stage, and the seconds that recomputation adds to get more."""

    def __init__(self, costs: CostModel, ranges: Ranges, config: PlannerConfig) -> None:
        model, forward, backward = costs.model, costs.coefficients.forward, costs.coefficients.backward
        self.layers = [sum(each.num_layers for each in own) for own in ranges]
        self.budget = config.activations
        # a stage has only some of the layers, so its ranks can hold proportionally more tokens
        self.longest_tokens = config.tokens_per_rank * model.num_layers // max(self.layers)
        self.layer_bytes = layer_class_bytes(model)
        # room of a rank without a budget, in tokens times layers
        self.room = config.tokens_per_rank * model.num_layers
        # bytes of gradients that wait on a rank of each stage
        self.waiting = [0] * len(ranges)
        if self.budget is not None:
            block_ranks = costs.shards or costs.cluster.num_ranks
            for stage, count in enumerate(self.layers):
                part = count, stage == 0, model.has_head(stage, len(ranges)), costs.parameters, block_ranks
                self.waiting[stage] = accumulated_bytes(model, *part)
        self.forward_share = forward.token_s / max(forward.token_s + backward.token_s, 1e-300)
        # a recomputed layer keeps its input, and the attention output if that fits
        self.input_bytes, output_bytes = (class_bytes(model, name) for name in ("layer_input", "attention_output"))
        # keys, values and their gradients of a token of a sliced sequence, as a mean over layers
        self.book_bytes = sum(
            share * own.num_kv_heads * own.kv_head_size * (model.bytes_per_element + max(4, model.bytes_per_element))
            for own, share in ((model.of_kind(kind), share) for kind, share in model.kind_shares() if kind.window is None)
        )
        self.freed_bytes = self.layer_bytes - self.input_bytes - output_bytes
        # seconds to recompute all but attention, for a token of a layer
        self.again_s = forward.token_s * (1 - costs.head_share(is_backward=False)) / model.num_layers
        # nothing hides the copies of the last layer of a range
        self.most_moved = [(count - len(own)) / count for count, own in zip(self.layers, ranges, strict=True)]
        self.copy_bytes_per_s = costs.cluster.hardware.copy_bytes_per_s

    def added_s(
        self,
        held_tokens: Sequence[ArrayLike],
        work_s: float,
        tokens: float,
        spare_s: Sequence[float] = (),
        chunk_tokens: float = 0,
        sliced_tokens: float = 0,
    ) -> float:
        """Seconds that recomputation adds to the busiest stage's `work_s`, with arguments as in `stages_added_s`.

        spare_s: seconds by which each of these stages works less than the busiest one, in which it may recompute.
        """
        added_s = self.stages_added_s(held_tokens, work_s, tokens, chunk_tokens, sliced_tokens)
        return max(0.0, *(each - spare for each, spare in zip(added_s, spare_s or [0.0] * len(added_s), strict=False)))

    def stages_added_s(
        self,
        held_tokens: Sequence[ArrayLike],
        work_s: float,
        tokens: float,
        chunk_tokens: float = 0,
        sliced_tokens: float = 0,
    ) -> list[float]:
        """Seconds that recomputation adds to a stage's `work_s`; infinity if it is needed but not allowed, or not enough.

        held_tokens: tokens that a rank holds at once, for each of the first stages: the most, or those after every forward.
        tokens: of a rank in all chunks. chunk_tokens: most of a rank in one chunk, for which the backward of a layer needs
        workspace. sliced_tokens: most of a rank in one sliced sequence, whose keys, values and gradients of these stay on the
        device. Copies to the host that hide come first: they come back beside backwards, and leave beside forwards and the
        backwards between these. Then all but attention runs again, then attention too.
        """
        chunks = work_s, tokens, chunk_tokens, sliced_tokens
        return [
            self._added_s(stage, np.atleast_1d(np.asarray(held, dtype=np.float64)), *chunks)
            for stage, held in enumerate(held_tokens)
        ]

    def _added_s(
        self, stage: int, held: FloatArray, work_s: float, tokens: float, chunk_tokens: float, sliced_tokens: float
    ) -> float:
        """The `stages_added_s` of one stage."""
        layers, moved = self.layers[stage], self.most_moved[stage]
        if self.budget is None:
            return math.inf if held.max() * layers > self.room else 0.0
        forward_s, backward_s = self.forward_share * work_s, (1 - self.forward_share) * work_s
        device_bytes = self.budget.device_bytes - self.waiting[stage] - _WORKSPACE * chunk_tokens * self.layer_bytes
        device_bytes -= sliced_tokens * layers * self.book_bytes
        held_bytes, all_bytes = held * layers * self.layer_bytes, max(1.0, tokens * layers * self.layer_bytes)
        hidden_bytes = min(1.0, self.copy_bytes_per_s * backward_s / all_bytes) * moved * held_bytes
        over = held_bytes - np.minimum(hidden_bytes, self.budget.host_bytes) - device_bytes
        if over.max() <= 0:
            return 0.0
        if held.max() * layers * self.input_bytes > device_bytes + self.budget.host_bytes:
            return math.inf
        # a chunk recomputes what the fullest of the moments needs in which it is in flight
        share = np.maximum(0.0, over) / (held * layers * self.freed_bytes)
        in_flight = min(len(held), math.ceil(held.max() * len(held) / max(1.0, tokens)))
        share = sliding_window_view(np.pad(share, (0, in_flight - 1)), in_flight).max(axis=1)
        return float(np.mean(np.where(share <= 1, share * tokens * layers * self.again_s, forward_s)))


@dataclass(frozen=True, slots=True)
class StageRates:
    """Seconds of forward plus backward on one stage of a group: per pair and token (`spans`), per document and per chunk."""

    spans: SpanRates
    document_s: float
    chunk_s: float
    # share by which the first stage works less than the busiest one
    spare: float = 0.0

    def sequences_s(self, tokens: FloatArray) -> FloatArray:
        """Seconds that each whole sequence adds, given its tokens."""
        rates = self.spans
        return rates.pair_s * tokens * rates.pairs.seen(np.zeros_like(tokens), tokens) + rates.token_s * tokens + self.document_s


def stage_gathers(costs: CostModel, ranges: Ranges, block_ranks: int) -> list[list[StageGathers]]:
    """Collectives of every layer range of every stage, among blocks of `block_ranks` ranks."""

    def collectives(*part: Any) -> StageGathers:
        return StageGathers.of(costs, block_ranks, part, len(ranges))

    return stage_collectives(collectives, ranges, costs.parameters, costs.model)


def _output_shares(output_shares: Sequence[float], num_stages: int) -> Sequence[float]:
    """Share of the output head's work that each stage does. output_shares: (): the last stage does all of it."""
    return output_shares or (*(num_stages - 1) * (0.0,), 1.0)


def busiest_rates(
    costs: CostModel,
    shape: GroupShape,
    ranges: Ranges,
    tokens: FloatArray,
    gathers: Sequence[Sequence[StageGathers]] = (),
    output_shares: Sequence[float] = (),
) -> StageRates:
    """Rates of the stage that works longest on sequences of these lengths, since chunks are balanced for that stage.

    gathers: see `stage_gathers`; what every chunk counts for them beside any computing is part of `chunk_s`. output_shares: see
    `_output_shares`.
    """
    output_shares = _output_shares(output_shares, len(ranges))
    rates = [_rates(costs, shape, *each) for each in zip(ranges, output_shares, strict=True)]
    work_s = [float(each.sequences_s(tokens).sum()) for each in rates]
    place = max(range(len(rates)), key=lambda place: work_s[place])
    busiest, spare = rates[place], 1 - work_s[0] / work_s[place] if work_s[place] else 0.0
    added_s = sum(each.least_s(2) - each.least_s() for each in gathers[place]) if gathers else 0.0
    return replace(busiest, chunk_s=busiest.chunk_s + added_s, spare=spare)


def _rates(costs: CostModel, shape: GroupShape, layers: Sequence[LayerRange], head_share: float) -> StageRates:
    share = sum(layer_range.num_layers for layer_range in layers) / costs.model.num_layers
    pair_s = token_s = document_s = chunk_s = 0.0
    for is_backward in (False, True):
        each = costs.coefficients.backward if is_backward else costs.coefficients.forward
        head = costs.head_share(is_backward)
        fixed_s, sent_s = costs.exchange_line(shape, is_backward)
        pair_s += share * each.pair_s / shape.degree
        token_s += share * (each.token_s * (1 - head) / shape.degree + sent_s) + head_share * head * each.token_s / shape.degree
        document_s += share * costs.document_s(shape, is_backward)
        chunk_s += share * (each.chunk_s + fixed_s)
    return StageRates(SpanRates(pair_s, token_s, costs.attention_pairs(layers)), document_s, chunk_s)


def pipeline_by_lead(
    groups: Sequence[tuple[Sequence[Chunk], GroupShape]],
    costs: CostModel,
    ranges: Ranges,
    schedule: Schedule,
    leaves_node: Sequence[bool],
    output_shares: Sequence[float] = (),
    *,
    gathers: Sequence[Sequence[StageGathers]] = (),
    head_sum_s: float = 0.0,
) -> Callable[[float], tuple[float, list[IntArray], tuple[float, ...]]]:
    """Returns a function that takes a lead (`compute_orders`) and predicts the pipeline with everything kept.

    The function returns the seconds of chunks on all stages, the tokens that a rank of each stage holds after every forward, and
    each stage's seconds of work. The seconds equal the full prediction for a group that does not cross nodes unnecessarily.

    groups: chunks and shape of a group, or of several with equally many chunks, which run one order and wait for one another in
    every pass. leaves_node: for every stage, whether its messages to the next stage cross nodes (for the last stage: to the
    first). output_shares: see `family_orders`. gathers, head_sum_s: see `StagedStep`.
    """
    num_stages, num_ranges = len(ranges), len(ranges[0])
    heads = deal_output_heads(len(groups[0][0]), output_shares)
    passes = [_passes_s(*group, costs, ranges) for group in groups]
    on_rank = [[fullest_share(chunk, shape) for chunk in chunks] for chunks, shape in groups]
    most = [max(of_slot) for of_slot in zip(*on_rank, strict=True)]
    hops = {leaves: [costs.hop_s(count, leaves) for count in most] for leaves in set(leaves_node)}
    # forwards send to the next stage, backwards to the previous one
    hop_s = np.array([[hops[leaves_node[stage]], hops[leaves_node[stage - 1]]] for stage in range(num_stages)]).swapaxes(1, 2)
    hop_s = hops_with_heads(hop_s, leaves_node, heads, hops.__getitem__)
    members = families(*(chunks for chunks, _ in groups))

    def table(gathers_s: Sequence[FloatArray | float]) -> FloatArray:
        """Seconds of all passes, with these of the gathers of each group."""
        own = zip(passes, gathers_s, strict=True)
        # a pass of groups that wait for one another takes as long as that of the slowest
        found: FloatArray = np.max(
            [with_heads(own_s + beside_s, head_s, heads, head_sum_s) for (own_s, _, head_s), beside_s in own], axis=0
        )
        return found

    has_gathers = bool(gathers and gathers[0][0].passes)
    plain = None if has_gathers else table([0.0] * len(passes))

    def of_lead(lead: float) -> tuple[float, list[IntArray], tuple[float, ...]]:
        orders = family_orders(members, num_stages, schedule, num_ranges, lead, (), output_shares)
        kinds, of_chunks, of_ranges = zip(*orders, strict=True)
        seconds = plain
        if seconds is None:
            last_chunks = [int(chunk[-1]) for chunk in of_chunks]
            passed = [(kind[kind < 2] == 0, chunk[kind < 2], layer_range[kind < 2]) for kind, chunk, layer_range in orders]
            keeps = keeping_passes(passed, num_ranges, len(groups[0][0]))
            seconds = table([counted_passes_s(gathers, compute_s, last_chunks, keeps) for _, compute_s, _ in passes])
        wiring = Wiring(kinds, of_chunks, of_ranges, num_ranges)
        stop_s = wiring.stop_s(wiring.seconds(seconds), wiring.hops(hop_s))
        held = []
        for kind, chunk, _ in orders:
            holds = kind < 2
            at_once = [tokens_at_once(kind[holds] == 0, chunk[holds], own, num_ranges) for own in on_rank]
            held.append(np.max(at_once, axis=0)[kind[holds] == 0])
        return stop_s, held, tuple(seconds_on_stages(seconds, heads).tolist())

    return of_lead


def _passes_s(
    chunks: Sequence[Chunk], shape: GroupShape, costs: CostModel, ranges: Ranges
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Seconds of every pass of a group's chunks over layers, and how many of them compute: (layer ranges, stages, chunks, F/B).

    Third, those of output heads: (chunks, F/B).
    """
    tokens = np.array([max(chunk.num_tokens, shape.degree) for chunk in chunks], dtype=np.float64)
    pairs_of = [[costs.attention_pairs((each,)) for each in own] for own in ranges]
    # pairs are counted once per mix of layers, since most stages have the same mix
    num_pairs = {
        pairs: np.array([pairs.of_chunk(chunk) for chunk in chunks])
        for pairs in dict.fromkeys(pairs for stage_pairs in pairs_of for pairs in stage_pairs)
    }
    documents = np.array([len(chunk.spans) for chunk in chunks], dtype=np.float64)
    num_stages, num_ranges = len(ranges), len(ranges[0])
    seconds = np.empty((num_ranges, num_stages, len(chunks), 2))
    compute_s, heads_s = np.empty_like(seconds), np.empty((len(chunks), 2))
    for is_backward in (False, True):
        fixed_s, sent_s = costs.exchange_line(shape, is_backward)
        exchange_s = (fixed_s + sent_s * tokens) / costs.model.num_layers
        hidden_s = np.array(costs.chunks_hidden_s(chunks, shape, is_backward))
        found = {
            pairs: _layer_and_head_s(costs, shape, is_backward, tokens, counts, documents, hidden_s)
            for pairs, counts in num_pairs.items()
        }
        for stage, own in enumerate(ranges):
            for place, layer_range in enumerate(own):
                layer_s, heads_s[:, int(is_backward)] = found[pairs_of[stage][place]]
                seconds[place, stage, :, int(is_backward)] = layer_s * layer_range.num_layers
                compute_s[place, stage, :, int(is_backward)] = (layer_s - exchange_s) * layer_range.num_layers
    return seconds, compute_s, heads_s


def _layer_and_head_s(
    costs: CostModel,
    shape: GroupShape,
    is_backward: bool,
    tokens: FloatArray,
    pairs: FloatArray,
    documents: FloatArray,
    hidden_s: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """Seconds of one layer and of the output head for every chunk, as `CostModel.part_s` counts them."""
    each = costs.coefficients.backward if is_backward else costs.coefficients.forward
    fixed_s, sent_s = costs.exchange_line(shape, is_backward)
    head_s = each.token_s * costs.head_share(is_backward) * tokens / shape.degree
    whole_s = (each.pair_s * pairs + each.token_s * tokens) / shape.degree + each.chunk_s
    whole_s = whole_s + costs.document_s(shape, is_backward) * documents + fixed_s + sent_s * tokens - hidden_s
    if is_backward:
        whole_s = whole_s + costs.rescan_s(tokens / shape.degree)
    return (whole_s - head_s) / costs.model.num_layers, head_s
