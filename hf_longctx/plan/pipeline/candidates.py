"""Candidates for one step on several stages: layouts of a stage, sequences on their groups, and the chunks of every group.

Every group of a stage's layout is a pipeline of its own, so its number of slices is chosen independently of other groups. With
one slice the pipeline runs whole sequences; with more it runs slices of them (InfiniPipe, arXiv 2509.21275, section 3). A formula
compares numbers of slices first (the slowest stage's work plus the bubble); the best few are then simulated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hf_longctx.plan.chunks.elastic import elastic_chunks
from hf_longctx.plan.core.arrays import IntArray
from hf_longctx.plan.core.planner_config import PlannerConfig
from hf_longctx.plan.core.types import Chunk, GroupShape, MicroBatch, SequenceGroup
from hf_longctx.plan.cost.cost_model import CostModel
from hf_longctx.plan.cost.traffic import group_shapes
from hf_longctx.plan.groups.placement import PlacedGroup, place_layout, with_idle_ranks
from hf_longctx.plan.memory.saved_tensors import layer_class_bytes
from hf_longctx.plan.pipeline.deal import deal_sequences
from hf_longctx.plan.pipeline.layouts import StageLayout, promising, stage_layouts
from hf_longctx.plan.pipeline.orders import Schedule, families, pipelined
from hf_longctx.plan.pipeline.stage_seconds import Parts, StageRates, busiest_rates, pipeline_s

SLICE_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# chunks per stage where packs may take longer than the longest sequence
_CHUNKS_PER_STAGE = (1, 2, 3, 4, 6, 8, 12, 16)
# most chunks of all concurrent groups together: more cost more in messages, small kernels and planning than they save
_MOST_CHUNKS = 512
# most layouts of mixed degrees that are estimated; most layouts that are simulated; for each group, cuts that fit before the
# search stops, and cuts tried before it gives up
_MIXED_LAYOUTS = 12
_SIMULATED_LAYOUTS = 4
_SIMULATED_CUTS, _MOST_CUTS = 2, 5
# a layout is not simulated if this share of its estimate is more than the fastest simulated time: estimates are that accurate
_DOUBT = 0.95
# numbers of slices to try where memory is short
_LEAN_SLICES = (1, 4, 16)
# most slices per stage where stages lend ranks: with more slices, idle time is too small a share to save
_LENT_SLICES = 4
# share of a pipeline's seconds within which cuts count as equally fast, so that fewer chunks win
_SAME = 0.01
# factor by which the formula's held tokens may exceed the room, since the formula is rough
_ROUGH = 1.3


@dataclass(frozen=True, slots=True)
class Cut:
    """A way to make chunks of a group's sequences; `estimate_s` is roughly its pipeline's seconds, recomputation included."""

    estimate_s: float
    num_chunks: float
    num_slices: int
    target_s: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """Concurrent pipelines: groups on the positions of every stage with their chunks, and the seconds of the slowest group.

    The seconds include an estimate of recomputation where not everything can be kept.
    """

    seconds: float
    groups: tuple[PlacedGroup, ...]
    chunks: tuple[tuple[Chunk, ...], ...]


class StageRoom:
    """Estimates how much fits on a rank of every stage, and how many seconds it costs to make room for more."""

    def __init__(self, costs: CostModel, parts: Parts, config: PlannerConfig) -> None:
        self.layers = [sum(part.num_layers for part in of_stage) for of_stage in parts]
        num_layers, budget = costs.model.num_layers, config.activations
        # a stage has only some of the layers, so its ranks can hold proportionally more tokens
        self.longest_tokens = config.tokens_per_rank * num_layers // max(self.layers)
        self.can_recompute = budget is not None
        # room of a rank, in tokens times layers
        self.room = budget.device_bytes / layer_class_bytes(costs.model) if budget else float(config.tokens_per_rank * num_layers)
        forward, backward = costs.coefficients.forward, costs.coefficients.backward
        self.forward_share = forward.token_s / max(forward.token_s + backward.token_s, 1e-300)

    def added_s(self, held_tokens: Sequence[float], work_s: float) -> float:
        """Seconds that recomputation adds to a stage's `work_s`; infinity if it is needed but not allowed.

        held_tokens: most tokens that a rank holds at once, for each of the first stages.
        """
        over = max(1 - self.room / max(held * layers, 1e-300) for held, layers in zip(held_tokens, self.layers, strict=False))
        if over <= 0:
            return 0.0
        return over * self.forward_share * work_s if self.can_recompute else math.inf


class PipelineStep:
    """Rates a step's sequences on several pipeline stages and proposes candidates for any subset of them."""

    def __init__(self, lengths: Sequence[int], costs: CostModel, parts: Parts, config: PlannerConfig, schedule: Schedule) -> None:
        num_stages, cluster = len(parts), costs.cluster
        self.parts, self.config, self.num_stages = parts, config, num_stages
        # stages with several layer ranges support only the interleaved schedule
        self.schedule: Schedule = schedule if len(parts[0]) == 1 else "interleaved"
        self.ranks_per_stage = per_stage = cluster.num_ranks // num_stages
        # groups lie inside a stage
        self.costs = costs = replace(costs, cluster=replace(cluster, num_ranks=per_stage))
        self.lengths: IntArray = np.array(lengths, dtype=np.int64)
        self.degrees = tuple(degree for degree in config.degrees if degree <= per_stage)
        self.shapes = {degree: self._shape(degree) for degree in self.degrees}
        tokens = self.lengths.astype(np.float64)
        self.rates = {degree: busiest_rates(costs, shape, parts, tokens) for degree, shape in self.shapes.items()}
        self.seconds = {degree: rates.sequences_s(tokens) for degree, rates in self.rates.items()}
        self.room = StageRoom(costs, parts, config)
        self.longest = {
            degree: degree * (self.room.longest_tokens if shape.num_blocks == 1 else config.tokens_per_rank)
            for degree, shape in self.shapes.items()
        }
        per_node, ranks = cluster.ranks_per_node, range(per_stage)
        self.leaves_node = [
            any((stage * per_stage + p) // per_node != ((stage + 1) % num_stages * per_stage + p) // per_node for p in ranks)
            for stage in range(num_stages)
        ]
        self._runs: dict[tuple[int, tuple[int, ...], int, float], tuple[float, tuple[Chunk, ...]]] = {}

    @property
    def block_ranks(self) -> int:
        """Number of consecutive positions that share parameters, and so enter and leave a micro-batch together."""
        return 1 if self.costs.parameters == "replicated" else self.costs.shards or self.ranks_per_stage

    def candidates(self, members: Sequence[int]) -> list[Candidate]:
        """Fastest pipelines for these sequences, one for each of the most promising layouts, fastest first.

        The list is empty if no layout holds all of them.
        """
        layouts = stage_layouts(self.ranks_per_stage, self.degrees)
        chosen = np.array(members, dtype=np.int64)
        seconds = {degree: each[chosen] for degree, each in self.seconds.items()}
        estimated = []
        for layout in promising(layouts, seconds, self.lengths[chosen], self.longest, _MIXED_LAYOUTS):
            groups = self._dealt(layout, members)
            estimated.append((max((self._cuts(group)[0].estimate_s for group in groups), default=0.0), groups))
        estimated.sort(key=lambda item: item[0])
        found: list[Candidate] = []
        for estimate_s, groups in estimated:
            least_s = min((candidate.seconds for candidate in found), default=math.inf)
            if len(found) == _SIMULATED_LAYOUTS or _DOUBT * estimate_s > least_s or math.isinf(estimate_s):
                break
            if (candidate := self._simulated(groups)) is not None:
                found.append(candidate)
        return sorted(found, key=lambda candidate: candidate.seconds)

    def lean_candidates(self, members: Sequence[int]) -> list[Candidate]:
        """Pipelines that need little memory: the largest groups, with the longest sequence in ever more slices.

        Their seconds are not estimated (nan). The list is empty if these groups cannot hold all sequences or cannot run
        concurrently.
        """
        count = self.ranks_per_stage // self.degrees[-1]
        try:
            groups = self._dealt(self.degrees[-1:] * count, members)
        except ValueError:
            return []
        [placed] = with_idle_ranks([groups], self.ranks_per_stage, self.block_ranks)
        if self.costs.parameters == "sharded" and _share_blocks(placed, self.block_ranks):
            return []
        longest = int(self.lengths[list(members)].max())
        can_slice = self.shapes[self.degrees[-1]].num_blocks == 1
        found: list[Candidate] = []
        for num_slices in _LEAN_SLICES if can_slice else (1,):
            if num_slices <= longest:
                chunks = {group: self._chunks(group, num_slices, 0.0) for group in groups}
                found.append(Candidate(math.nan, tuple(placed), tuple(chunks.get(group, (Chunk(0),)) for group in placed)))
        return found

    def lone_candidates(self, sequence: int) -> list[Candidate]:
        """Pipelines of this sequence alone on the largest group, in few slices, for stages that lend ranks.

        Their seconds are not estimated (nan).
        """
        degree, length = self.degrees[-1], int(self.lengths[sequence])
        group = PlacedGroup(0, degree, (sequence,))
        [placed] = with_idle_ranks([[group]], self.ranks_per_stage, 0)
        can_slice = self.shapes[degree].num_blocks == 1 and length <= self.longest[degree]
        most = min(length // degree, _LENT_SLICES * self.num_stages) if can_slice else 0
        made = dict.fromkeys(self._chunks(group, count, 0.0) for count in SLICE_COUNTS if self.num_stages - 1 <= count <= most)
        return [Candidate(math.nan, tuple(placed), (chunks, *((Chunk(0),) for _ in placed[1:]))) for chunks in made]

    def _shape(self, degree: int) -> GroupShape:
        """Chooses how groups of a degree share attention: in one block where possible, since a ring cannot run slices."""
        shapes = group_shapes(degree, self.costs.method, self.costs.model, self.costs.cluster)
        num_tokens = float(min(self.lengths.sum() / self.ranks_per_stage, self.config.tokens_per_rank) * degree)
        return next((s for s in shapes if s.num_blocks == 1), None) or self.costs.best_shape(degree, num_tokens)

    def micro_batch(self, candidate: Candidate) -> MicroBatch:
        """The candidate's groups with schedules, messages and stages."""
        groups = []
        for placed, chunks in zip(candidate.groups, candidate.chunks, strict=True):
            shape = self.shapes[placed.degree] if placed.members else GroupShape(1)
            groups.append(pipelined(SequenceGroup.of(shape, placed.positions, chunks), self.parts, self.schedule))
        return MicroBatch(tuple(groups))

    def _dealt(self, layout: StageLayout, members: Sequence[int]) -> list[PlacedGroup]:
        """Deals sequences to the groups of a layout and places these groups on positions; idle ranks are left out."""
        chosen = np.array(members, dtype=np.int64)
        seconds = [self.seconds[degree][chosen] for degree in layout]
        dealt = deal_sequences(self.lengths[chosen], seconds, [self.longest[degree] for degree in layout])
        groups = [(degree, tuple(members[i] for i in part)) for degree, part in zip(layout, dealt, strict=True)]
        nodes = self.costs.cluster.ranks_per_node
        return place_layout([groups], self.ranks_per_stage, nodes, self.config.node_aligned)[0]

    def _cuts(self, group: PlacedGroup) -> list[Cut]:
        """Ways to make chunks of a group's sequences, at least one, sorted by estimated seconds."""
        rates, lengths = self.rates[group.degree], self.lengths[list(group.members)]
        work_s = float(self.seconds[group.degree][list(group.members)].sum())
        longest, tokens = int(lengths.max()), int(lengths.sum())
        longest_s = rates.spans.of_span(0, longest)
        # fewest chunks that memory allows
        fewest = -(-tokens // (group.degree * self.config.tokens_per_rank))
        can_slice = self.shapes[group.degree].num_blocks == 1
        targets = [(count, longest_s / count) for count in SLICE_COUNTS if count == 1 or (can_slice and count <= longest)]
        packs = [(1, work_s / (count * self.num_stages)) for count in _CHUNKS_PER_STAGE]
        found: list[Cut] = []
        for num_slices, target_s in [*targets, *(pack for pack in packs if pack[1] > longest_s)]:
            num_chunks = max(fewest, work_s / target_s if target_s > 0 else num_slices)
            if num_chunks * self.ranks_per_stage > _MOST_CHUNKS * group.degree and found:
                continue
            slot_s = min(target_s, work_s / num_chunks) + rates.chunk_s
            # a stage of several layer ranges waits for chunks on one of them
            estimate_s = work_s + num_chunks * rates.chunk_s + (self.num_stages - 1) * slot_s / len(self.parts[0])
            held = min(tokens, longest + (self.num_stages - 1) * tokens / num_chunks) / group.degree
            estimate_s += self.room.added_s([held / _ROUGH], work_s)
            found.append(Cut(estimate_s, num_chunks, num_slices, target_s))
        # fewest chunks first among equally fast cuts: small kernels and messages cost more than any model says
        alike_s = (1 + _SAME) * min(cut.estimate_s for cut in found)
        return sorted(found, key=lambda cut: (max(alike_s, cut.estimate_s), cut.num_chunks))

    def _simulated(self, groups: Sequence[PlacedGroup]) -> Candidate | None:
        """Groups with the chunks that are fastest in simulation; None where they cannot run concurrently or do not fit."""
        [placed] = with_idle_ranks([list(groups)], self.ranks_per_stage, self.block_ranks)
        if self.costs.parameters == "sharded" and _share_blocks(placed, self.block_ranks):
            return self._in_step(placed)
        cuts = {group: self._cuts(group) for group in groups}
        chunks: dict[PlacedGroup, tuple[Chunk, ...]] = {}
        slowest_s = 0.0
        for group in sorted(groups, key=lambda group: -cuts[group][0].estimate_s):
            best_s, num_fitting = math.inf, 0
            for cut in cuts[group][:_MOST_CUTS]:
                seconds, made = self._run(group, cut)
                num_fitting += seconds < math.inf
                if seconds < best_s:
                    best_s, chunks[group] = seconds, made
                # a group faster than the slowest one gains nothing
                if best_s <= slowest_s or num_fitting == _SIMULATED_CUTS:
                    break
            if math.isinf(best_s):
                return None
            slowest_s = max(slowest_s, best_s)
        return Candidate(slowest_s, tuple(placed), tuple(chunks.get(group, (Chunk(0),)) for group in placed))

    def _in_step(self, placed: Sequence[PlacedGroup]) -> Candidate | None:
        """Groups with whole sequences in equally many chunks, so that all run forwards and backwards in one order.

        Returns None where a sequence has to be cut, since all groups would need slices at the same places.
        """
        busy = [group for group in placed if group.members]
        best: Candidate | None = None
        for count in _CHUNKS_PER_STAGE:
            made = {}
            for group in busy:
                work_s = float(self.seconds[group.degree][list(group.members)].sum())
                made[group] = self._chunks(group, 1, work_s / (count * self.num_stages))
            if any(len(family) > 1 for chunks in made.values() for family in families(chunks)):
                return None
            most = max(map(len, made.values()), default=1)
            padded = tuple(_padded(made.get(group, ()), most) for group in placed)
            slowest = [self._seconds(group, padded[place]) for place, group in enumerate(placed) if group.members]
            seconds = max(slowest, default=0.0)
            if best is None or seconds < best.seconds:
                best = Candidate(seconds, tuple(placed), padded)
        return best if best is None or best.seconds < math.inf else None

    def _run(self, group: PlacedGroup, cut: Cut) -> tuple[float, tuple[Chunk, ...]]:
        """Seconds and chunks of one way to cut a group's sequences; equal groups are computed once."""
        key = group.degree, group.members, cut.num_slices, cut.target_s
        if key not in self._runs:
            chunks = self._chunks(group, cut.num_slices, cut.target_s)
            self._runs[key] = self._seconds(group, chunks), chunks
        return self._runs[key]

    def _chunks(self, group: PlacedGroup, num_slices: int, target_s: float) -> tuple[Chunk, ...]:
        rates: StageRates = self.rates[group.degree]
        lengths = {i: int(self.lengths[i]) for i in group.members}
        capacity = group.degree * self.config.tokens_per_rank
        return elastic_chunks(lengths, num_slices, rates.spans, capacity, target_s)

    def _seconds(self, group: PlacedGroup, chunks: Sequence[Chunk]) -> float:
        """Seconds of a pipeline, including recomputation where memory is short; infinite where it cannot fit."""
        shape = self.shapes[group.degree]
        if shape.num_blocks > 1 and any(chunk.prefix_tokens for chunk in chunks):
            return math.inf
        seconds, held = pipeline_s(chunks, shape, self.costs, self.parts, self.schedule, self.leaves_node)
        return seconds + self.room.added_s(held, float(self.seconds[group.degree][list(group.members)].sum()))


def _share_blocks(groups: Sequence[PlacedGroup], block_ranks: int) -> bool:
    """Whether two groups have ranks in the same block."""
    blocks = [block for group in groups for block in {position // block_ranks for position in group.positions}]
    return len(blocks) > len(set(blocks))


def _padded(chunks: Sequence[Chunk], count: int) -> tuple[Chunk, ...]:
    """Appends dummy chunks until there are `count` chunks."""
    return (*chunks, *(Chunk(index) for index in range(len(chunks), count)))
