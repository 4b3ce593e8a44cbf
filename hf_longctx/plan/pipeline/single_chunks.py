"""Micro-batches whose groups run one chunk each, for sequences that no pipeline of several chunks can hold.

Where ranks sum gradients over their shards once per micro-batch, those of a stage wait whole on each of its ranks from the first
backward to the last one. A group of one chunk has only one backward, so that nothing waits. Its stages run one after the other,
which takes as many times longer as there are stages, but less memory than any pipeline. Which sequences run together is the
grouping problem of a single stage, whose ranks are those of every stage.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from hf_longctx.plan.core.types import Chunk, MicroBatch, SequenceGroup, Span
from hf_longctx.plan.groups.greedy import plan_greedy
from hf_longctx.plan.groups.placement import PlacedGroup, PlacedLayout, place_layout, renumber, with_idle_ranks
from hf_longctx.plan.groups.problem import GroupingProblem
from hf_longctx.plan.pipeline.activations.fit_pipeline import PipelineRoom
from hf_longctx.plan.pipeline.candidates import Candidates
from hf_longctx.plan.pipeline.orders import pipelined

# share of the tokens of one document that fit, with which ranks are filled: several documents need more workspace
_FILLED = 0.95
# share up to which the tokens that fit are searched for
_PRECISION = 0.02


class SingleChunks:
    """Makes micro-batches of single chunks for the sequences of a step; `room` tells what fits."""

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
        """Micro-batches with ranks as full as they can be with everything kept, and with every layer recomputed.

        What probably takes fewer seconds comes first: full micro-batches recompute, and others gather weights more often.
        Sequences that the largest group cannot keep are in micro-batches without others where everything is kept. There are no
        steps where a sequence does not fit.
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
        """Whether recomputing what does not fit costs less than the further micro-batches that keep everything."""
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
            return may_fit(pipelined(group, staged.parts, staged.schedule, self.candidates.passes))

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
