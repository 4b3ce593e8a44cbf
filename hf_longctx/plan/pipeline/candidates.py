"""Candidates for one micro-batch on several stages: layouts of a stage, sequences on their groups, and the chunks of every group.

A layout divides a stage's ranks into sequence groups, of one degree or of different degrees. Sequences go longest first, each to
the group that would finish it first (Graham 1969, section 4: within 4/3 - 1/(3m) of the optimum for m equal groups). So faster
groups get more work, and a group never gets a sequence that is too long for it.

Every group is its own pipeline, so its number of slices does not depend on other groups, unless both have ranks that share
weights: such groups run one order of equally many chunks, with slices in the same slots (`aligned_chunks`). With one slice the
pipeline runs whole sequences; with more it runs slices of them (InfiniPipe, arXiv 2509.21275, section 3). A formula compares
numbers of slices first (`StagedStep.cuts`); the best few are then simulated, and the fastest again with chunks that grow at the
beginning and shrink at the end, for which stages wait less. If memory is short, the search makes room for several of them.

Sequences that no pipeline of several chunks can hold get micro-batches whose groups run one chunk each (`SingleChunks`). If ranks
sum gradients over their shards once per micro-batch, the gradients of a stage wait whole on each of its ranks from the first
backward to the last one. A group of one chunk has only one backward, so none wait. Its stages run one after the other, which
takes as many times longer as there are stages, but less memory than any pipeline. The choice of sequences that run together is
the grouping problem of a single stage.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from heapq import heapreplace

import numpy as np
from numpy.typing import ArrayLike

from hf_longctx.plan.chunks import aligned_chunks, elastic_chunks
from hf_longctx.plan.core.orders import MessagedPasses, in_turns, pipelined
from hf_longctx.plan.core.types import (
    Chunk,
    FloatArray,
    GroupShape,
    IntArray,
    MicroBatch,
    SequenceGroup,
    Span,
    meets_in_every_pass,
)
from hf_longctx.plan.groups.greedy import plan_greedy
from hf_longctx.plan.groups.placement import PlacedGroup, PlacedLayout, place_layout, renumber, with_idle_ranks
from hf_longctx.plan.groups.problem import GroupingProblem
from hf_longctx.plan.pipeline.staged_step import CUTS, Cut, StagedRun, StagedStep
from hf_longctx.plan.room.room import PipelineRoom

# degrees of the groups of a stage, the largest first; ranks that they leave over are idle
StageLayout = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _LayoutSearch:
    """Constants of the search for layouts."""

    # most ranks for which layouts may have three different degrees; beyond it two, or there would be thousands of layouts
    few_ranks: int = 16
    # layouts of mixed degrees that are tried
    most_mixed: int = 12


# repeat the stages table of `recipes/bench/cpu/planner.py` when one of these changes
_LAYOUTS = _LayoutSearch()


def dealt_layouts(staged: StagedStep, members: Sequence[int]) -> Iterator[list[PlacedGroup]]:
    """Concurrent groups for these sequences, placed on the ranks of a stage, for each of the most promising layouts."""
    layouts = stage_layouts(staged.ranks_per_stage, staged.degrees)
    chosen = np.array(members, dtype=np.int64)
    seconds = {degree: each[chosen] for degree, each in staged.seconds.items()}
    for layout in promising(layouts, seconds, staged.lengths[chosen], staged.longest, _LAYOUTS.most_mixed):
        yield dealt_groups(staged, layout, members)


def dealt_groups(staged: StagedStep, layout: StageLayout, members: Sequence[int]) -> list[PlacedGroup]:
    """Deals sequences to the groups of a layout and places these on positions; groups without sequences become idle ranks.

    Raises ValueError for a sequence that no group can hold.
    """
    chosen = np.array(members, dtype=np.int64)
    seconds = [staged.seconds[degree][chosen] for degree in layout]
    dealt = deal_sequences(staged.lengths[chosen], seconds, [staged.longest[degree] for degree in layout])
    groups = [(degree, tuple(members[i] for i in part)) for degree, part in zip(layout, dealt, strict=True)]
    nodes, num_ranks = staged.costs.cluster.ranks_per_node, staged.ranks_per_stage
    placed = place_layout([groups], num_ranks, nodes, staged.config.node_aligned)
    return with_idle_ranks(placed, num_ranks, staged.block_ranks)[0]


def stage_layouts(num_ranks: int, degrees: Sequence[int]) -> list[StageLayout]:
    """All layouts of at most three different degrees (at most two for more than 16 ranks) in which no further group fits."""
    most = 3 if num_ranks <= _LAYOUTS.few_ranks else 2
    usable = [degree for degree in sorted(degrees, reverse=True) if degree <= num_ranks]
    return list(_layouts(num_ranks, usable, most)) if usable else []


def _layouts(num_ranks: int, degrees: Sequence[int], most: int) -> Iterator[StageLayout]:
    """Layouts of `num_ranks` ranks that use at most `most` of the degrees, which are given in descending order."""
    if not degrees or degrees[-1] > num_ranks:
        yield ()
        return
    if not most:
        return
    for place, degree in enumerate(degrees):
        for count in range(num_ranks // degree, 0, -1):
            for rest in _layouts(num_ranks - count * degree, degrees[place + 1 :], most - 1):
                # a degree that was skipped must not fit into the remaining ranks
                if num_ranks - count * degree - sum(rest) < degrees[-1]:
                    yield (*(degree,) * count, *rest)


def promising(
    layouts: Sequence[StageLayout], seconds: Mapping[int, FloatArray], lengths: IntArray, longest: Mapping[int, int], most: int
) -> list[StageLayout]:
    """Layouts that hold every sequence: all with one degree, and the `most` with mixed degrees whose lower bounds are least.

    seconds[d][i]: seconds of sequence i on a group of d ranks. longest[d]: the most tokens of one sequence on d ranks. The lower
    bound of a layout is the larger of two times: that of its slowest sequence, and that of all work spread evenly over its
    ranks, each sequence counted on the degree where it costs the fewest rank-seconds.
    """
    bounds: dict[StageLayout, float] = {}
    alone = {degree: np.where(lengths <= longest[degree], each, np.inf) for degree, each in seconds.items()}
    for layout in layouts:
        used = sorted(set(layout))
        longest_s = np.min([alone[degree] for degree in used], axis=0).max(initial=0.0)
        work = np.min([alone[degree] * degree for degree in used], axis=0).sum() / sum(layout)
        bounds[layout] = float(max(longest_s, work))
    held = [layout for layout in layouts if bounds[layout] < np.inf]
    mixed = sorted((layout for layout in held if len(set(layout)) > 1), key=lambda layout: (bounds[layout], layout))
    return [layout for layout in held if len(set(layout)) == 1] + mixed[:most]


def deal_sequences(
    lengths: Sequence[int] | IntArray,
    seconds: ArrayLike,
    longest: Sequence[int],
    capacity: Sequence[int] | None = None,
) -> tuple[tuple[int, ...], ...]:
    """Sequences of every group, longest first, dealt so that the slowest group finishes early.

    seconds[g][i]: seconds that sequence i adds to group g. longest[g]: the most tokens of one sequence that group g can run.
    capacity[g]: the most tokens of all its sequences (None: any number). Raises ValueError for a sequence without a place.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    seconds_GN = np.asarray(seconds, dtype=np.float64).reshape(len(longest), len(tokens))
    order = np.lexsort((np.arange(len(tokens)), -tokens)).tolist()
    room = list(capacity) if capacity is not None else [int(tokens.sum())] * len(longest)
    is_equal = len(set(longest)) == 1 and capacity is None and bool((seconds_GN == seconds_GN[:1]).all())
    if is_equal and (not len(tokens) or tokens.max() <= longest[0]):
        return _deal_equal(order, seconds_GN[0], len(longest))
    columns = seconds_GN.T.tolist()
    done_s = [0.0] * len(longest)
    taken: list[list[int]] = [[] for _ in longest]
    for i in order:
        length = int(tokens[i])
        fitting = [g for g, most in enumerate(longest) if length <= most and length <= room[g]]
        if not fitting:
            raise ValueError(
                f"sequence {i} has {length} tokens, but of {len(longest)} groups side by side none takes more than "
                f"{max(map(min, longest, room))}; allow larger groups or plan several micro-batches"
            )
        # ties go to the group that takes least time for the sequence: a larger one may lose time by sharing
        group = min(fitting, key=lambda g: (done_s[g] + columns[i][g], columns[i][g], g))
        done_s[group] += columns[i][group]
        room[group] -= length
        taken[group].append(i)
    return tuple(map(tuple, taken))


def _deal_equal(order: Sequence[int], seconds_N: FloatArray, num_groups: int) -> tuple[tuple[int, ...], ...]:
    """Deals sequences to equal groups; a heap finds the next group without comparing all of them."""
    taken: list[list[int]] = [[] for _ in range(num_groups)]
    heap = [(0.0, group) for group in range(num_groups)]
    seconds = seconds_N.tolist()
    for i in order:
        done_s, group = heap[0]
        taken[group].append(i)
        heapreplace(heap, (done_s + seconds[i], group))
    return tuple(map(tuple, taken))


@dataclass(frozen=True, slots=True)
class _CandidateSearch:
    """Constants of the search for candidates."""

    # a layout is not simulated if this share of its estimate exceeds the fastest simulated time, since estimates are that
    # accurate
    doubt: float = 0.95
    # layouts that are simulated
    most_layouts: int = 4
    # for each group: cuts that fit before the simulation stops, unless memory is short and one of the last ones was the fastest;
    # cuts tried before it gives up
    fitting_cuts: int = 3
    most_cuts: int = 5
    # cuts by which one may be the last that was the fastest
    last_cuts: int = 2
    # ways to run a layout for which room is made if memory is short
    most_options: int = 3
    # numbers of slices to try if memory is short
    least_memory_slices: tuple[int, ...] = (1, 2, 4, 8, 16)


# share of a number of slices that comes from rounding
_ROUNDING = 1e-9

# repeat the stages table of `recipes/bench/cpu/planner.py` when one of these changes
_CANDIDATES = _CandidateSearch()


@dataclass(frozen=True)
class Candidate:
    """Pipelines that run side by side, and the seconds of the slowest of them.

    The seconds include an estimate of recomputation if not everything can be kept; nan: they are not estimated. make: makes the
    micro-batch, since most candidates are too slow to be asked for it.
    """

    seconds: float
    make: Callable[[], MicroBatch]

    @cached_property
    def micro_batch(self) -> MicroBatch:
        return self.make()


@dataclass(frozen=True, slots=True)
class _Option:
    """A way to run groups in one order, with the estimated run of the slowest."""

    run: StagedRun
    chunks: Mapping[PlacedGroup, tuple[Chunk, ...]]

    @property
    def seconds(self) -> float:
        return self.run.seconds


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
        self._pipelines: dict[tuple[GroupShape, tuple[Chunk, ...], float], SequenceGroup] = {}
        self._runs: dict[
            tuple[tuple[tuple[int, tuple[int, ...]], ...], Cut, float], tuple[list[tuple[Chunk, ...]], StagedRun | None]
        ] = {}

    def fastest(self, members: Sequence[int]) -> list[Candidate]:
        """Fastest pipelines for these sequences, of the most promising layouts, fastest first.

        The list is empty if no layout holds all of them.
        """
        estimated = []
        for groups in dealt_layouts(self.staged, members):
            estimated.append((self._estimate_s(groups), groups))
        estimated.sort(key=lambda item: item[0])
        found: list[Candidate] = []
        num_layouts = 0
        for estimate_s, groups in estimated:
            least_s = min((candidate.seconds for candidate in found), default=math.inf)
            if num_layouts == _CANDIDATES.most_layouts or _CANDIDATES.doubt * estimate_s > least_s or math.isinf(estimate_s):
                break
            candidates = self._simulated(groups)
            num_layouts += bool(candidates)
            found += candidates
        return sorted(found, key=lambda candidate: candidate.seconds)

    def _share_blocks(self, groups: Sequence[PlacedGroup]) -> bool:
        """Whether two groups have ranks that share parameters, so that both must run forwards and backwards in one order."""
        if not meets_in_every_pass(self.staged.costs.parameters):
            return False
        size = self.staged.costs.node_ranks or self.staged.block_ranks
        blocks = [block for group in groups for block in {position // size for position in group.positions}]
        return len(blocks) > len(set(blocks))

    def _simulated(self, groups: Sequence[PlacedGroup]) -> list[Candidate]:
        """Groups with the chunks that are fastest in simulation, and with the next ones if memory is short; none if none fits."""
        busy = [group for group in groups if group.members]
        runs_together = self._share_blocks(groups) and len(busy) > 0
        parts = [tuple(busy)] if runs_together else sorted(((group,) for group in busy), key=lambda part: -self._estimate_s(part))
        options: list[list[_Option]] = []
        slowest_s = 0.0
        for part in parts:
            found = self._options(part, slowest_s)
            if not found:
                return []
            options.append(found)
            slowest_s = max(slowest_s, found[0].seconds)
        most = max((len(found) for found in options), default=1) if slowest_s > 0 else 1
        return [
            self._candidate(groups, [found[min(place, len(found) - 1)] for found in options], runs_together)
            for place in range(most)
        ]

    def _candidate(self, groups: Sequence[PlacedGroup], options: Sequence[_Option], runs_together: bool) -> Candidate:
        """The groups with the chunks of these options, one for each part."""
        seconds = max((option.seconds for option in options), default=0.0)
        chunks = {group: own for option in options for group, own in option.chunks.items()}
        if not runs_together:
            leads = {group: option.run.lead for option in options for group in option.chunks}
            return Candidate(seconds, partial(self.micro_batch, groups, chunks, leads))
        (option,) = options
        idle = padded((), max(map(len, chunks.values())))
        own = {group: chunks.get(group, idle) for group in groups}
        return Candidate(seconds, partial(self._one_order, groups, own, option.run.lead))

    def _estimate_s(self, groups: Sequence[PlacedGroup]) -> float:
        """Roughly the seconds of the slowest of these groups."""
        return max((self.staged.cuts(group)[0].estimate_s for group in groups if group.members), default=0.0)

    def _options(self, groups: tuple[PlacedGroup, ...], least_s: float) -> list[_Option]:
        """Fastest ways to cut the sequences of groups that run one order, in the order of their seconds; none if none fits.

        Only the first one unless memory is short. least_s: seconds below which nothing is gained.
        """
        cuts = self.staged.cuts(max(groups, key=lambda group: self.staged.cuts(group)[0].estimate_s))
        found: list[_Option] = []
        best: _Option | None = None
        best_cut, since_best = cuts[0], 0
        for num_tried, cut in enumerate(cuts, 1):
            # the best lead hardly depends on the cut
            option = self._run(groups, cut, best.run.lead if best else CUTS.leads[0])
            since_best += 1
            if option is not None:
                found.append(option)
                if best is None or option.seconds < best.seconds:
                    best, best_cut, since_best = option, cut, 0
            if best and best.seconds <= least_s:
                break
            # estimates count no messages: where these are slow, more chunks are in flight, so that smaller ones save memory
            goes_on = since_best < _CANDIDATES.last_cuts and option is not None and option.run.longer_is_short
            if (len(found) >= _CANDIDATES.fitting_cuts or num_tried >= _CANDIDATES.most_cuts) and not goes_on:
                break
        if best and best.seconds > least_s and self.staged.growth:
            grown = self._run(groups, replace(best_cut, growth=self.staged.growth), best.run.lead)
            # growing chunks need about as much memory, so they are worth making room for only if they are faster
            found += [grown] if grown is not None and grown.seconds < best.seconds else []
        found.sort(key=lambda option: option.seconds)
        return found[: _CANDIDATES.most_options if found and found[0].run.is_short else 1]

    def _run(self, groups: tuple[PlacedGroup, ...], cut: Cut, lead: float) -> _Option | None:
        """The fastest way to run the chunks of a cut; None if none fits. lead: see `StagedStep.fastest_run`.

        Equal groups are computed once for each cut and lead.
        """
        key = tuple((group.degree, group.members) for group in groups), cut, lead
        if key not in self._runs:
            made = self._slots(groups, cut.target_s, cut.growth) if len(groups) > 1 else [self._chunks(groups[0], cut)]
            self._runs[key] = made, self.staged.fastest_run(dict(zip(groups, made, strict=True)), lead)
        made, run = self._runs[key]
        return None if run is None else _Option(run, dict(zip(groups, made, strict=True)))

    def _chunks(self, group: PlacedGroup, cut: Cut, longest: int = 0) -> tuple[Chunk, ...]:
        """Cuts the group's longest sequence into slices of equal time; packs of others may take the target if that is more.

        longest: see `elastic_chunks`.
        """
        staged = self.staged
        lengths = {i: int(staged.lengths[i]) for i in group.members}
        capacity, spans = group.degree * staged.config.tokens_per_rank, staged.rates[group.degree].spans
        return elastic_chunks(lengths, cut.num_slices, spans, capacity, cut.target_s, cut.growth, longest)

    def _slots(self, groups: Sequence[PlacedGroup], slot_s: float, growth: float = 0.0) -> list[tuple[Chunk, ...]]:
        """Equally many chunks of about so many seconds for groups that run one order; those of idle ranks are dummies.

        Groups of a degree cut all sequences at the bounds of the longest one, so that slices in one slot take about equal
        seconds. growth: see `elastic_chunks`.
        """
        longest: dict[int, int] = {}
        for group in groups:
            longest[group.degree] = max(longest.get(group.degree, 0), *(int(self.staged.lengths[i]) for i in group.members), 0)
        made: list[tuple[Chunk, ...]] = []
        for group in groups:
            if not group.members:
                made.append(())
                continue
            longest_s = self.staged.rates[group.degree].spans.of_span(0, longest[group.degree])
            num_slices = max(1, math.ceil(longest_s / slot_s * (1 - _ROUNDING))) if slot_s > 0 else 1
            made.append(self._chunks(group, Cut(math.nan, math.nan, num_slices, slot_s, growth), longest[group.degree]))
        return aligned_chunks(made)

    def _one_order(
        self, groups: Sequence[PlacedGroup], chunks: Mapping[PlacedGroup, tuple[Chunk, ...]], lead: float = 1.0
    ) -> MicroBatch:
        """The placed groups with one order of actions. lead: see `compute_orders`."""
        shapes = [self.staged.shapes[group.degree] if group.members else GroupShape(1) for group in groups]
        plain = [SequenceGroup.of(shape, group.positions, chunks[group]) for group, shape in zip(groups, shapes, strict=True)]
        ((made,), _) = in_turns(
            [MicroBatch(tuple(plain))],
            self.staged.ranges,
            self.staged.schedule,
            self.passes,
            lead,
            None,
            self.staged.config.output_shares,
        )
        return made

    def least_memory(self, members: Sequence[int]) -> LeastMemory:
        """Pipelines that need little memory: the largest groups, with the longest sequence in ever more slices.

        There are none if these groups cannot hold all sequences or cannot run concurrently.
        """
        degree = self.staged.degrees[-1]
        try:
            groups = dealt_groups(self.staged, (degree,) * (self.staged.ranks_per_stage // degree), members)
        except ValueError:
            return LeastMemory(self, (), ())
        longest = int(self.staged.lengths[list(members)].max())
        return LeastMemory(self, groups, [count for count in _CANDIDATES.least_memory_slices if count <= longest])

    def fewest_bytes(self, sequence: int) -> Iterator[SequenceGroup]:
        """Groups that run this sequence in several chunks with little memory: in many slices, or whole after a dummy chunk.

        They have the largest degree.
        """
        staged, degree = self.staged, self.staged.degrees[-1]
        own, length = PlacedGroup(0, degree, (sequence,)), int(staged.lengths[sequence])
        most = min(length, _CANDIDATES.least_memory_slices[-1])
        if most > 1:
            yield self.micro_batch([own], {own: self._chunks(own, Cut.slices(most))}).groups[0]
        yield self.micro_batch([own], {own: (Chunk(0), Chunk(1, (Span(sequence, 0, length),)))}).groups[0]

    def sliced(self, groups: Sequence[PlacedGroup], counts: Sequence[int]) -> list[Candidate]:
        """Candidates with the longest sequence of every group in each of these numbers of slices; equal ones are made once."""
        busy = [group for group in groups if group.members]
        if self._share_blocks(groups):
            longest_s = max(self.staged.longest_s(group) for group in busy)
            slots = dict.fromkeys(tuple(self._slots(groups, longest_s / count)) for count in counts)
            return [Candidate(math.nan, partial(self._one_order, groups, dict(zip(groups, each, strict=True)))) for each in slots]
        found = dict.fromkeys(tuple(self._chunks(group, Cut.slices(count)) for group in busy) for count in counts)
        return [Candidate(math.nan, partial(self.micro_batch, groups, dict(zip(busy, each, strict=True)))) for each in found]

    def micro_batch(
        self,
        placed: Sequence[PlacedGroup],
        chunks: Mapping[PlacedGroup, tuple[Chunk, ...]],
        leads: Mapping[PlacedGroup, float] | None = None,
    ) -> MicroBatch:
        """The placed groups with schedules, messages and stages; groups without chunks get one dummy chunk.

        leads: of groups that are more than one forward ahead of the next stage (`compute_orders`).
        """
        groups, leads = [], leads or {}
        for each in placed:
            shape, own = self.staged.shapes[each.degree] if each.members else GroupShape(1), chunks.get(each, (Chunk(0),))
            # pipelines of equal groups, such as idle ranks, differ in their positions only
            key = shape, own, leads.get(each, 1.0)
            if key not in self._pipelines:
                group = SequenceGroup.of(shape, each.positions, own)
                how = self.staged.schedule, self.passes, key[2], self.staged.config.output_shares
                self._pipelines[key] = pipelined(group, self.staged.ranges, *how)
            groups.append(replace(self._pipelines[key], positions=tuple(each.positions)))
        return MicroBatch(tuple(groups))


def padded(chunks: Sequence[Chunk], count: int) -> tuple[Chunk, ...]:
    """Appends dummy chunks until there are `count` chunks."""
    return (*chunks, *(Chunk(index) for index in range(len(chunks), count)))


# share of the fitting tokens of one document with which ranks are filled: several documents need more workspace
_FILLED = 0.95
# precision of the search for the fitting tokens, as a share
_PRECISION = 0.02


class SingleChunks:
    """Makes micro-batches of single chunks for the sequences of a step; `room` decides which ones fit."""

    def __init__(self, candidates: Candidates, room: PipelineRoom) -> None:
        self.candidates, self.staged, self.room = candidates, candidates.staged, room

    def needed_for(self, members: Sequence[int]) -> tuple[int, ...]:
        """Sequences that do not fit in several chunks even alone with every layer recomputed: the longest, none or all."""
        ordered = self.staged.by_length(members)
        # mostly the longest fits, and so do all others
        if self._fits_in_several(ordered[0]):
            return ()
        return tuple(sorted(ordered[: bisect_left(ordered, True, key=self._fits_in_several)]))

    def steps(self, members: Sequence[int]) -> Iterator[list[MicroBatch]]:
        """Micro-batches with ranks as full as possible, once with everything kept and once with every layer recomputed.

        The probably faster ones come first: full micro-batches recompute, and others gather weights more often. If everything is
        kept, sequences that the largest group cannot keep are alone in micro-batches. There are no steps if a sequence does not
        fit.
        """
        lengths, degree = self.staged.lengths, self.staged.degrees[-1]
        longest = -(-max(int(lengths[i]) for i in members) // degree)
        least = self._most_tokens(self.room.may_recompute)
        if longest > least:
            return
        problem = self._problem(members)
        kept = int(_FILLED * self._most_tokens(self.room.may_keep))
        least = max(longest, int(_FILLED * least))
        long = [place for place, i in enumerate(members) if lengths[i] > kept * degree]
        others = [place for place, i in enumerate(members) if lengths[i] <= kept * degree]
        ways = [[(long, longest), (others, kept)], [([*range(len(members))], least)]]
        if not others or self._prefers_full(problem.subproblem(others), kept, least):
            ways.reverse()
        for parts in ways:
            layouts = [
                self._placed(problem.subproblem(own), capacity, [members[i] for i in own]) for own, capacity in parts if own
            ]
            yield [self._micro_batch(groups) for layout in layouts for groups in layout]

    def _problem(self, members: Sequence[int]) -> GroupingProblem:
        """Groups of whole sequences on the ranks of a stage; each of them gathers the weights of its stage only."""
        staged = self.staged
        config = replace(staged.config, degrees=staged.degrees)
        problem = GroupingProblem.build([int(staged.lengths[i]) for i in members], staged.costs, config)
        return replace(problem, micro_batch_s=problem.micro_batch_s / staged.num_stages)

    def _prefers_full(self, problem: GroupingProblem, kept: int, least: int) -> bool:
        """Whether recomputation costs less than the further micro-batches that keep everything."""
        tokens, ranks = sum(problem.lengths), problem.num_ranks
        more = tokens / ranks * (1 / kept - 1 / least)
        work_s = float((problem.seconds * [[degree] for degree in problem.degrees]).min(axis=0).sum()) / ranks
        again_s = (1 - kept / least) * self.staged.room.forward_share * work_s
        return again_s < more * (problem.micro_batch_s + min(problem.group_s))

    def _fits_in_several(self, sequence: int) -> bool:
        return any(map(self.room.may_recompute, self.candidates.fewest_bytes(sequence)))

    def _most_tokens(self, may_fit: Callable[[SequenceGroup], bool]) -> int:
        """Most tokens of one document on a rank of the largest group that fit as one chunk; 0 if not even one does."""
        staged, degree = self.staged, self.staged.degrees[-1]

        def fits(tokens: int) -> bool:
            chunk = Chunk(0, (Span(0, 0, tokens * degree),))
            group = SequenceGroup.of(staged.shapes[degree], range(degree), (chunk,))
            return may_fit(
                pipelined(group, staged.ranges, staged.schedule, self.candidates.passes, 1.0, staged.config.output_shares)
            )

        low, high = 0, staged.config.tokens_per_rank
        if fits(high):
            return high
        while high - low > max(1, _PRECISION * high):
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _placed(self, problem: GroupingProblem, capacity: int, numbers: Sequence[int]) -> PlacedLayout:
        """Groups of every micro-batch with at most `capacity` tokens on a rank, placed on the positions of a stage."""
        staged, config = self.staged, self.staged.config
        ordered, order = replace(problem, capacity=capacity).longest_first()
        layout = plan_greedy(ordered, config.micro_batch_trials, config.time_aware)
        num_ranks, nodes = staged.ranks_per_stage, staged.costs.cluster.ranks_per_node
        placed = place_layout(layout, num_ranks, nodes, config.node_aligned)
        return renumber(with_idle_ranks(placed, num_ranks, staged.block_ranks), [numbers[place] for place in order])

    def _micro_batch(self, placed: Sequence[PlacedGroup]) -> MicroBatch:
        lengths = self.staged.lengths
        spans = {group: tuple(Span(i, 0, int(lengths[i])) for i in group.members) for group in placed if group.members}
        return self.candidates.micro_batch(placed, {group: (Chunk(0, own),) for group, own in spans.items()})
