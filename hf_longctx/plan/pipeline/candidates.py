"""Candidates for one micro-batch on several stages: layouts of a stage, sequences on their groups, and the chunks of every group.

Every group of a stage's layout is a pipeline of its own, so its number of slices is chosen independently of other groups. With
one slice the pipeline runs whole sequences; with more it runs slices of them (InfiniPipe, arXiv 2509.21275, section 3). A formula
compares numbers of slices first (`StagedStep.cuts`); the best few are then simulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hf_longctx.plan.chunks.elastic import elastic_chunks
from hf_longctx.plan.core.types import Chunk, GroupShape, MicroBatch, SequenceGroup, Span
from hf_longctx.plan.groups.placement import PlacedGroup, with_idle_ranks
from hf_longctx.plan.pipeline.layouts import dealt_groups, dealt_layouts
from hf_longctx.plan.pipeline.messages import MessagedPasses
from hf_longctx.plan.pipeline.orders import pipelined
from hf_longctx.plan.pipeline.staged_step import CUTS, Cut, StagedStep


@dataclass(frozen=True, slots=True)
class _CandidateSearch:
    """Constants of the search for candidates.

    doubt: a layout is not simulated if this share of its estimate is more than the fastest simulated time, since estimates are
    that accurate. most_layouts: layouts that are simulated. fitting_cuts, most_cuts: for each group, cuts that fit before the
    simulation stops, and cuts that it tries before it gives up.

    least_memory_slices: numbers of slices to try where memory is short. lent_slices: most slices per stage where stages lend
    ranks; with more slices, idle time is too small a share to save.
    """

    doubt: float = 0.95
    most_layouts: int = 4
    fitting_cuts: int = 2
    most_cuts: int = 5
    least_memory_slices: tuple[int, ...] = (1, 2, 4, 8, 16)
    lent_slices: int = 4


# repeat the stages table of `recipes/bench/cpu/planner.py` when one of these changes
_CANDIDATES = _CandidateSearch()


@dataclass(frozen=True, slots=True)
class Candidate:
    """Pipelines that run side by side, and the seconds of the slowest of them.

    The seconds include an estimate of recomputation where not everything can be kept; nan: they are not estimated.
    """

    seconds: float
    micro_batch: MicroBatch


class LeastMemory:
    """Candidates of the same groups in ever more slices, each made when it is asked for.

    Their seconds are not estimated (nan).
    """

    def __init__(self, candidates: Candidates, groups: Sequence[PlacedGroup], counts: Sequence[int]) -> None:
        self.counts, self._candidates, self._groups = counts, candidates, groups
        self._made: dict[int, Candidate] = {}

    def __iter__(self) -> Iterator[Candidate]:
        return map(self.of, self.counts)

    def of(self, count: int) -> Candidate:
        """The candidate with the longest sequence in so many slices, one of `counts`."""
        if count not in self._made:
            [self._made[count]] = self._candidates.sliced(self._groups, [count])
        return self._made[count]


class Candidates:
    """Makes candidates for any subset (`members`) of the step's sequences."""

    def __init__(self, staged: StagedStep) -> None:
        self.staged = staged
        self.passes = MessagedPasses()
        self._pipelines: dict[tuple[GroupShape, tuple[Chunk, ...]], SequenceGroup] = {}
        self._runs: dict[tuple[int, tuple[int, ...], int, float], tuple[float, tuple[Chunk, ...]]] = {}

    def fastest(self, members: Sequence[int]) -> list[Candidate]:
        """Fastest pipelines for these sequences, one for each of the most promising layouts, fastest first.

        The list is empty if no layout holds all of them.
        """
        estimated = []
        for groups in dealt_layouts(self.staged, members):
            estimate_s = max((self.staged.cuts(group)[0].estimate_s for group in groups if group.members), default=0.0)
            estimated.append((estimate_s, groups))
        estimated.sort(key=lambda item: item[0])
        found: list[Candidate] = []
        for estimate_s, groups in estimated:
            least_s = min((candidate.seconds for candidate in found), default=math.inf)
            if len(found) == _CANDIDATES.most_layouts or _CANDIDATES.doubt * estimate_s > least_s or math.isinf(estimate_s):
                break
            candidate = self._in_step(groups) if self._share_blocks(groups) else self._simulated(groups)
            if candidate is not None:
                found.append(candidate)
        return sorted(found, key=lambda candidate: candidate.seconds)

    def _share_blocks(self, groups: Sequence[PlacedGroup]) -> bool:
        """Whether two groups have ranks that share parameters, so that both must run forwards and backwards in one order."""
        if self.staged.costs.parameters != "sharded":
            return False
        size = self.staged.block_ranks
        blocks = [block for group in groups for block in {position // size for position in group.positions}]
        return len(blocks) > len(set(blocks))

    def _simulated(self, groups: Sequence[PlacedGroup]) -> Candidate | None:
        """Groups with the chunks that are fastest in simulation; None where they do not fit."""
        cuts = {group: self.staged.cuts(group) for group in groups if group.members}
        chunks: dict[PlacedGroup, tuple[Chunk, ...]] = {}
        slowest_s = 0.0
        for group in sorted(cuts, key=lambda group: -cuts[group][0].estimate_s):
            best_s, num_fitting = math.inf, 0
            for cut in cuts[group][: _CANDIDATES.most_cuts]:
                seconds, made = self._run(group, cut)
                num_fitting += seconds < math.inf
                if seconds < best_s:
                    best_s, chunks[group] = seconds, made
                # a group faster than the slowest one gains nothing
                if best_s <= slowest_s or num_fitting == _CANDIDATES.fitting_cuts:
                    break
            if math.isinf(best_s):
                return None
            slowest_s = max(slowest_s, best_s)
        return Candidate(slowest_s, self.micro_batch(groups, chunks))

    def _run(self, group: PlacedGroup, cut: Cut) -> tuple[float, tuple[Chunk, ...]]:
        """Seconds and chunks of one way to cut a group's sequences; equal groups are computed once."""
        key = group.degree, group.members, cut.num_slices, cut.target_s
        if key not in self._runs:
            chunks = self._chunks(group, cut.num_slices, cut.target_s)
            self._runs[key] = self.staged.group_s(group, chunks), chunks
        return self._runs[key]

    def _chunks(self, group: PlacedGroup, num_slices: int, target_s: float = 0.0) -> tuple[Chunk, ...]:
        """Cuts the group's longest sequence into slices of equal time; packs of others may take `target_s` if that is more."""
        staged = self.staged
        lengths = {i: int(staged.lengths[i]) for i in group.members}
        capacity = group.degree * staged.config.tokens_per_rank
        return elastic_chunks(lengths, num_slices, staged.rates[group.degree].spans, capacity, target_s)

    def _in_step(self, groups: Sequence[PlacedGroup]) -> Candidate | None:
        """Groups with whole sequences in equally many chunks, so that all run forwards and backwards in one order.

        Returns None where a sequence has to be cut, since all groups would need slices at the same places.
        """
        busy = [group for group in groups if group.members]
        best: tuple[float, dict[PlacedGroup, tuple[Chunk, ...]]] | None = None
        for count in CUTS.chunks_per_stage:
            made = {group: self._chunks(group, 1, self.staged.work_s(group) / (count * self.staged.num_stages)) for group in busy}
            if any(chunk.prefix_tokens for chunks in made.values() for chunk in chunks):
                return None
            most = max(map(len, made.values()), default=1)
            padded = {group: _padded(made.get(group, ()), most) for group in groups}
            seconds = max((self.staged.group_s(group, padded[group]) for group in busy), default=0.0)
            if best is None or seconds < best[0]:
                best = seconds, padded
        return Candidate(best[0], self.micro_batch(groups, best[1])) if best is not None and best[0] < math.inf else None

    def least_memory(self, members: Sequence[int]) -> LeastMemory:
        """Pipelines that need little memory: the largest groups, with the longest sequence in ever more slices.

        There are none if these groups cannot hold all sequences or cannot run concurrently.
        """
        degree = self.staged.degrees[-1]
        try:
            groups = dealt_groups(self.staged, (degree,) * (self.staged.ranks_per_stage // degree), members)
        except ValueError:
            return LeastMemory(self, (), ())
        if self._share_blocks(groups):
            return LeastMemory(self, (), ())
        longest = int(self.staged.lengths[list(members)].max())
        return LeastMemory(self, groups, [count for count in _CANDIDATES.least_memory_slices if count <= longest])

    def fewest_bytes(self, sequence: int) -> Iterator[SequenceGroup]:
        """Groups that run this sequence in several chunks with little memory: in many slices, or whole after a dummy chunk.

        They have the largest degree. Slices are left out where groups side by side have to run in one order.
        """
        staged, degree = self.staged, self.staged.degrees[-1]
        own, length = PlacedGroup(0, degree, (sequence,)), int(staged.lengths[sequence])
        most = min(length, _CANDIDATES.least_memory_slices[-1])
        if most > 1 and not self._share_blocks([own, *([own] if degree < staged.ranks_per_stage else [])]):
            yield self.micro_batch([own], {own: self._chunks(own, most)}).groups[0]
        yield self.micro_batch([own], {own: (Chunk(0), Chunk(1, (Span(sequence, 0, length),)))}).groups[0]

    def alone(self, sequence: int) -> list[Candidate]:
        """Pipelines of this sequence alone on the largest group, in few slices, for stages that lend ranks.

        Their seconds are not estimated (nan).
        """
        staged, degree = self.staged, self.staged.degrees[-1]
        group, length = PlacedGroup(0, degree, (sequence,)), int(staged.lengths[sequence])
        [groups] = with_idle_ranks([[group]], staged.ranks_per_stage, 0)
        can_lend = staged.shapes[degree].num_blocks == 1 and length <= staged.longest[degree]
        most = min(length // degree, _CANDIDATES.lent_slices * staged.num_stages) if can_lend else 0
        return self.sliced(groups, [count for count in CUTS.slice_counts if staged.num_stages - 1 <= count <= most])

    def sliced(self, groups: Sequence[PlacedGroup], counts: Sequence[int]) -> list[Candidate]:
        """Candidates with the longest sequence of every group in each of these numbers of slices; equal ones are made once."""
        busy = [group for group in groups if group.members]
        found = dict.fromkeys(tuple(self._chunks(group, count) for group in busy) for count in counts)
        return [Candidate(math.nan, self.micro_batch(groups, dict(zip(busy, each, strict=True)))) for each in found]

    def micro_batch(self, placed: Sequence[PlacedGroup], chunks: Mapping[PlacedGroup, tuple[Chunk, ...]]) -> MicroBatch:
        """The placed groups with schedules, messages and stages; groups without chunks get one dummy chunk."""
        groups = []
        for each in placed:
            shape, own = self.staged.shapes[each.degree] if each.members else GroupShape(1), chunks.get(each, (Chunk(0),))
            # pipelines of equal groups, such as idle ranks, differ in their positions only
            if (shape, own) not in self._pipelines:
                group = SequenceGroup.of(shape, each.positions, own)
                self._pipelines[shape, own] = pipelined(group, self.staged.parts, self.staged.schedule, self.passes)
            groups.append(replace(self._pipelines[shape, own], positions=tuple(each.positions)))
        return MicroBatch(tuple(groups))


def _padded(chunks: Sequence[Chunk], count: int) -> tuple[Chunk, ...]:
    """Appends dummy chunks until there are `count` chunks."""
    return (*chunks, *(Chunk(index) for index in range(len(chunks), count)))
