"""Plans several pipeline stages: finds the micro-batches that are predicted fastest among those that fit.

    lengths -> `StagedStep` -> `Candidates`: layouts of a stage, sequences to their groups, chunks, schedules, the fastest by
            simulation -> `PipelineSearch`: predictions, activation policies for what does not fit

Sequences that fit no pipeline of several chunks get micro-batches of single chunks (`candidates.SingleChunks`). If these do not
fit either, long sequences get their own micro-batch, and the others a later one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import numpy as np

from hf_longctx.plan.core.orders import in_turns
from hf_longctx.plan.core.settings import NoRoom
from hf_longctx.plan.core.types import FloatArray, MicroBatch, StepPlan, frees_every_round
from hf_longctx.plan.cost.weight_traffic import ends_s, to_nodes_s
from hf_longctx.plan.groups.placement import PlacedGroup
from hf_longctx.plan.pipeline.candidates import Candidate, Candidates, LeastMemory, SingleChunks, dealt_groups, padded
from hf_longctx.plan.pipeline.staged_step import StagedStep
from hf_longctx.plan.predict.evaluate import Evaluation
from hf_longctx.plan.predict.planning import Planning
from hf_longctx.plan.room.room import PipelineRoom, make_room


@dataclass(frozen=True, slots=True)
class SearchConstants:
    """Constants of the search among candidates."""

    # candidates within this factor of the fastest seconds count as equal
    equal: float = 1.03
    # number of candidates that get room among those that may fit, the quickest first
    most_fits: int = 3
    # if nothing fits, so many of the quickest layouts get room with the longest sequence in these numbers of slices
    most_layouts: int = 2
    slices: tuple[int, ...] = (1, 2, 4, 8)
    # factor on the seconds with everything kept beyond which a plan is compared with finer chunks, of which fewer need to
    # be recomputed
    much_lost: float = 1.05
    # share of the best candidate's excess over its estimate by which others are expected to exceed theirs at least
    lost_share: float = 0.5
    # share of the device's room for waiting gradients from which the least bytes of sequences are counted before candidates
    # are made
    much_waiting: float = 0.5
    # sequences for each of the largest groups that are counted in place of all
    few: int = 4
    # factor on the least seconds of sequences whose stages run one after the other beyond which a pipeline is slower: these
    # mostly take 1.15 to 1.25 times as long
    in_turn: float = 1.3
    # forwards for each stage by which one schedule through all micro-batches may reach into later ones (`in_turns`), at least
    # one in all, if it does not fit without a limit
    reaches: tuple[float, ...] = (2.0, 1.0, 0.5, 0.0)
    # chunks per stage up to which idle stages may make two parts faster
    few_chunks: int = 2
    # factor on the least seconds of the sequences beyond which two parts are tried
    much_idle: float = 1.5


# repeat the stages table of `recipes/bench/cpu/planner.py` when one of these changes
_CHOICE = SearchConstants()


@dataclass(frozen=True, slots=True)
class _Row:
    """A plan of some of the sequences in one micro-batch, and its predicted run."""

    plan: StepPlan
    run: Evaluation


class NotFaster(Exception):
    """The search finds no plan that takes less than it must. least_s: seconds that each plan takes that it would find."""

    def __init__(self, least_s: float) -> None:
        super().__init__(f"every plan takes at least {least_s:.4g} s")
        self.least_s = least_s


class PipelineSearch:
    """Finds micro-batches that fit: tries candidates in the order of their seconds and makes room where they need it.

    most_s: seconds that the plan must beat; the search raises NotFaster when it finds that it cannot.
    """

    def __init__(self, step: int, lengths: Sequence[int], planning: Planning, most_s: float = math.inf) -> None:
        self.step, self.planning, self.most_s = step, planning, most_s
        self.costs, self.config = planning.costs, planning.config
        self.staged = StagedStep(lengths, self.costs, self.config)
        self.candidates = Candidates(self.staged)
        self._least_of: dict[tuple[int, ...], LeastMemory] = {}

    def plan(self) -> StepPlan:
        """Plans all sequences; raises NoRoom for a sequence for which nothing fits, and NotFaster."""
        if self.most_s < math.inf and (least_s := self.bound_s()) >= self.most_s:
            raise NotFaster(least_s)
        return self._in_turns(self._plan_of(self.micro_batches(tuple(range(len(self.staged.lengths))))))

    def bound_s(self) -> float:
        """Lower bound on the seconds of any plan, gathers counted: the stage that works longest is always busy.
        If gradients that wait whole leave no room, groups run one chunk each, for which stages take turns. Stages that lend their
        ranks have only the bound of all ranks together.
        """
        staged, members = self.staged, range(len(self.staged.lengths))
        if self.config.lend_stages or not len(members):
            return staged.lower_bound_s()
        once_s = np.array([sum(ends_s(own)) for own in staged.gathers])
        # later stages may have their copies before their first message
        once_s[0] += to_nodes_s(staged.gathers[0])
        # the stage with the most states has no more room than the budget says
        takes_turns = self._room is not None and min(staged.room.waiting) >= max(1, self._room.budget.device_bytes)
        least_s = float(np.sum(staged.stages_s(members))) if takes_turns else staged.busiest_s(members, once_s)
        return least_s + self.costs.coefficients.step_s

    def _in_turns(self, plan: StepPlan) -> StepPlan:
        """The plan with one schedule through its micro-batches, if that is predicted to be faster and fits."""
        if len(plan.micro_batches) == 1 or frees_every_round(plan.parameters):
            return plan
        even = []
        for micro_batch in plan.micro_batches:
            most = max(len(group.chunks) for group in micro_batch.groups)
            even.append(MicroBatch(tuple(replace(group, chunks=padded(group.chunks, most)) for group in micro_batch.groups)))
        reaches = [None, *(max(1, math.ceil(share * plan.num_stages)) for share in _CHOICE.reaches)]
        for reach in reaches if len(self.staged.ranges[0]) == 1 else reaches[:1]:
            how = self.staged.schedule, self.candidates.passes
            made, turns = in_turns(even, self.staged.ranges, *how, reach=reach, output_shares=self.config.output_shares)
            tried = replace(plan, micro_batches=tuple(map(_with_policies, made, plan.micro_batches)), turns=turns)
            if self.fits(tried, self.planning.predict(tried)):
                # forwards that reach less far ahead save memory and no time
                return min(plan, tried, key=self.planning.counted_s)
        return plan

    def micro_batches(self, members: tuple[int, ...]) -> list[MicroBatch]:
        """Micro-batches for these sequences, in running order: as few as fit, those of the longest sequences first."""
        # with one backward no gradients wait; a search for pipelines of these sequences would find none
        apart = self._single_only(members)
        others = tuple(i for i in members if i not in set(apart))
        if apart and self.most_s < math.inf and len(members) == len(self.staged.lengths):
            # stages take turns at single chunks
            least_s = float(np.sum(self.staged.stages_s(apart))) + self.staged.busiest_s(others)
            if least_s >= self.most_s:
                raise NotFaster(least_s)
        try:
            may_leave = self._waiting_bytes > 0 and bool(members)
            found, left = self._in_pipelines(others, may_leave) if others or not members else ([], ())
            single = self._in_single_chunks(tuple(sorted((*apart, *left)))) if apart or left else ()
            if single is None:
                # the search for pipelines of all sequences raises for the one that does not fit
                return self._in_pipelines(members, False)[0]
            return [*single, *found]
        except ValueError:
            # sequences that fit no pipeline may fit in micro-batches of one chunk each
            whole = self._in_single_chunks(members)
            if whole is None:
                raise
            return [*whole]

    def _in_pipelines(self, members: tuple[int, ...], may_leave: bool) -> tuple[list[MicroBatch], tuple[int, ...]]:
        """Micro-batches of several chunks in which these sequences fit, and the sequences that are left.

        may_leave: leave sequences for which a pipeline takes longer than stages that run one after the other, and all longer
        ones.
        Raises NoRoom for a sequence for which nothing fits.
        """
        found: list[MicroBatch] = []
        waiting, work_s = [members], np.zeros(self.staged.num_stages)
        must_beat = self.most_s < math.inf and len(members) == len(self.staged.lengths)
        while waiting:
            together = waiting.pop()
            # a stage may get no output head of its share
            left = [i for part in waiting for i in part]
            others_s = work_s + self.staged.stages_s(left, not self.config.output_shares) if must_beat else None
            most_s = _CHOICE.in_turn * self.staged.num_stages * self.staged.least_s(together) if may_leave else math.inf
            row, is_slow = None, False
            if not self._is_hopeless(together):
                row = self._fastest(together, others_s)
                is_slow = row is None and self._is_slow(together, most_s)
                row = row or (None if is_slow else self._least_memory(together, not may_leave))
            if is_slow or (row is not None and row.run.step_s - row.run.once_s > most_s):
                return found, tuple(i for each in (together, *waiting) for i in each)
            if row is None:
                if together is members:
                    # splitting is useless if the longest does not fit even alone
                    longest = (self._longest(members),)
                    _ = self._fastest(longest) or self._least_memory(longest)
                waiting += self._apart(together)
            else:
                made = self._or_apart(together, row)
                found = [*made.micro_batches, *found]
                work_s = work_s + np.reshape(self.planning.predict(made).busy_s, (self.staged.num_stages, -1)).mean(axis=1)
        return found, ()

    def _or_apart(self, members: tuple[int, ...], row: _Row) -> StepPlan:
        """The plan of these sequences in one micro-batch, or a faster one in several if stages idle for lack of chunks."""
        num_chunks = min((len(group.chunks) for group in row.plan.micro_batches[0].groups if group.num_tokens), default=0)
        is_short = self._room is not None and len(members) > 1 and num_chunks <= _CHOICE.few_chunks * self.staged.num_stages
        if not is_short or row.run.step_s - row.run.once_s <= _CHOICE.much_idle * self.staged.least_s(members):
            return row.plan
        try:
            plan = self._plan_of([each for part in self._apart(members) for each in self._in_pipelines(part, False)[0]])
        except ValueError:
            return row.plan
        return min(row.plan, plan, key=lambda each: self.planning.predict(each).step_s)

    @property
    def _waiting_bytes(self) -> int:
        """Most bytes of gradients that wait whole on a rank for the last of several backwards."""
        return 0 if self._room is None else self._room.waiting_bytes

    def _single_only(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """Sequences that do not fit in several chunks; only gradients that wait for the last backward make a difference."""
        if self._room is None or not self._waiting_bytes or not members:
            return ()
        return SingleChunks(self.candidates, self._room).needed_for(members)

    def _in_single_chunks(self, members: tuple[int, ...]) -> tuple[MicroBatch, ...] | None:
        """Micro-batches of these sequences with one chunk for each group; None if a sequence does not fit in this way."""
        if self._room is None:
            return None
        plans = map(self._plan_of, SingleChunks(self.candidates, self._room).steps(members))
        row = next(filter(None, map(self._with_room, plans)), None)
        return None if row is None else row.plan.micro_batches

    @cached_property
    def _room(self) -> PipelineRoom | None:
        """Room of every stage; None without a budget."""
        if self.config.activations is None:
            return None
        idle = self._plan_of([self.candidates.micro_batch([PlacedGroup(0, 1, ())], {})])
        return PipelineRoom(idle, self.costs, self.config.activations, known=self.planning.known)

    def _is_hopeless(self, members: tuple[int, ...]) -> bool:
        """Whether several sequences need more than there is even on the largest groups in many slices.

        Called only if waiting gradients leave little room: the search for pipelines would then find none.
        """
        if self._room is None or len(members) < 2:
            return False
        if self._room.waiting_bytes < _CHOICE.much_waiting * self._room.budget.device_bytes:
            return False
        few = self._least_memory_of(self._few(members))
        return bool(few.counts) and not self._may_fit(few.of(few.counts[-1]))

    def _few(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """The longest of these sequences, which mostly need as much memory as all of them if memory is short."""
        count = _CHOICE.few * -(-self.staged.ranks_per_stage // self.staged.degrees[-1])
        return members if len(members) <= count else tuple(sorted(self.staged.by_length(members)[:count]))

    def _least_memory_of(self, members: tuple[int, ...]) -> LeastMemory:
        """`Candidates.least_memory` of these sequences, made once."""
        if members not in self._least_of:
            self._least_of[members] = self.candidates.least_memory(members)
        return self._least_of[members]

    def _least(self, members: tuple[int, ...]) -> Iterator[Candidate]:
        """Candidates of least memory that may fit, with ever more slices; skips those in which a few sequences do not fit."""
        every = self._least_memory_of(members)
        # without gradients that wait, sequences mostly fit in few slices
        few = self._least_memory_of(self._few(members)) if self._waiting_bytes else every
        counts = (count for count in every.counts if every is few or self._may_fit(few.of(count)))
        return filter(self._may_fit, map(every.of, counts))

    def _may_fit(self, candidate: Candidate) -> bool:
        """Whether there is no group in the candidate that no policy fits."""
        return self._room is None or not any(map(self._room.is_hopeless, candidate.micro_batch.groups))

    def _may_keep(self, candidate: Candidate) -> bool:
        """Whether the candidate may fit as it is; only its prediction decides."""
        return self._room is None or not any(map(self._room.exceeds, candidate.micro_batch.groups))

    def _takes(self, candidate: Candidate, seconds: float) -> bool:
        """Whether a candidate takes at least `seconds` even with everything kept; assumed without a budget."""
        return self._room is None or any(self._room.takes(group, seconds) for group in candidate.micro_batch.groups)

    def _as_it_is(self, candidate: Candidate) -> _Row | None:
        """The candidate's prediction; None if it does not fit as it is."""
        if not self._may_keep(candidate):
            return None
        row = self._row(candidate)
        return row if self.fits(row.plan, row.run) else None

    def _fastest(self, members: tuple[int, ...], others_s: FloatArray | None = None) -> _Row | None:
        """Finds the fastest single micro-batch of these sequences that fits; None if none does. others_s: see `_faster`."""
        candidates = self.candidates.fastest(members)
        candidates = candidates if others_s is None else self._faster(candidates, others_s)
        equal = [each for each in candidates if each.seconds <= _CHOICE.equal * candidates[0].seconds]
        # making room takes the planner longest, so a candidate that fits as it is beats one that is only slightly faster
        row = next(filter(None, map(self._as_it_is, equal)), None)
        if row is not None:
            return row
        best = self._made_fastest(self._quickest(equal))
        for candidate in candidates[len(equal) :]:
            if best is not None and candidate.seconds + self.costs.coefficients.step_s >= best.run.step_s:
                break
            fitting = self._as_it_is(candidate)
            if fitting is None and best is None and self._may_fit(candidate):
                fitting = self._made_to_fit(candidate)
            if fitting is not None and (best is None or fitting.run.step_s < best.run.step_s):
                best = fitting
        if best is None and len(members) > 1:
            best = self._made_fastest(self._in_other_slices(candidates, members))
        if best is not None and self._loses_much(best):
            most_tokens = _most_tokens(best.plan.micro_batches[0])
            finer = (each for each in self._least(members) if _most_tokens(each.micro_batch) < most_tokens)
            best = self._made_fastest(finer, best)
        return best

    def _in_other_slices(self, candidates: Sequence[Candidate], members: tuple[int, ...]) -> list[Candidate]:
        """The quickest layouts of these candidates in all numbers of slices that may fit, the quickest first.

        Slices hold keys, values and gradients for one another, so that whole sequences may fit where no slices do.
        """
        if self._room is None:
            return []
        degrees = (tuple(group.degree for group in each.micro_batch.groups if group.num_tokens) for each in candidates)
        found = [
            each
            for layout in [*dict.fromkeys(degrees)][: _CHOICE.most_layouts]
            for each in self.candidates.sliced(dealt_groups(self.staged, layout, members), _CHOICE.slices)
            if self._may_fit(each)
        ]
        room = self._room
        return sorted(found, key=lambda each: max(map(room.kept_s, each.micro_batch.groups)))

    def _faster(self, candidates: list[Candidate], others_s: FloatArray) -> list[Candidate]:
        """The candidates with which the step may beat `most_s`, since room only adds seconds; raises NotFaster if none does.

        others_s: seconds of every stage for the sequences of other micro-batches, the mean of its ranks. Candidates of few chunks
        stay if none does, since two parts may be faster (`_or_apart`).
        """
        chunks_s = self.most_s - self.costs.coefficients.step_s
        bounds_s = [self._kept_s(each, others_s) for each in candidates]
        found = [each for each, bound_s in zip(candidates, bounds_s, strict=True) if bound_s < chunks_s]
        if found or not candidates:
            return found
        num_chunks = max(len(group.chunks) for group in candidates[0].micro_batch.groups)
        if num_chunks > _CHOICE.few_chunks * self.staged.num_stages:
            raise NotFaster(min(bounds_s) + self.costs.coefficients.step_s)
        return candidates

    def _kept_s(self, candidate: Candidate, others_s: FloatArray) -> float:
        """Least seconds of a step with a candidate that keeps everything; others_s: see `_faster`."""
        if self._room is None:
            return candidate.seconds
        groups = candidate.micro_batch.groups
        work_s = sum((group.degree * self._room.busy_s(group) for group in groups), np.zeros(self.staged.num_stages))
        alone_s = max(map(self._room.kept_s, groups)) if not others_s.any() else 0.0
        return max(alone_s, float(np.max(work_s / self.staged.ranks_per_stage + others_s)))

    def _loses_much(self, row: _Row) -> bool:
        """Whether a plan of one micro-batch takes much longer than with everything kept, so that others may recompute less."""
        if self._room is None:
            return False
        groups = row.plan.micro_batches[0].groups
        kept = [replace(group, stages=tuple(replace(stage, activations=()) for stage in group.stages)) for group in groups]
        return row.run.step_s - row.run.once_s > _CHOICE.much_lost * max(map(self._room.kept_s, kept))

    def _quickest(self, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
        """The quickest of these candidates that may fit, quickest first."""
        return iter(()) if self._room is None else islice(filter(self._may_fit, candidates), _CHOICE.most_fits)

    def _made_fastest(self, candidates: Iterable[Candidate], best: _Row | None = None) -> _Row | None:
        """The fastest of `best` and of these candidates with room made; None if none fits.

        Candidates are left out if they are slower than the best so far even with everything kept, or by their estimate and what
        they are expected to lose beyond it.
        """
        lost_s = 0.0
        for candidate in candidates:
            must_beat_s = math.inf if best is None else best.run.step_s - best.run.once_s
            # without an estimate, nan compares false
            if candidate.seconds + lost_s >= must_beat_s or (best is not None and self._takes(candidate, must_beat_s)):
                continue
            made = self._as_it_is(candidate) or self._made_to_fit(candidate)
            if made is not None and (best is None or made.run.step_s < best.run.step_s):
                best = made
                lost_s = _CHOICE.lost_share * max(0.0, made.run.step_s - made.run.once_s - candidate.seconds)
        return best

    def _row(self, candidate: Candidate) -> _Row:
        plan = self._plan_of([candidate.micro_batch])
        return _Row(plan, self.planning.predict(plan))

    def _plan_of(self, micro_batches: Sequence[MicroBatch]) -> StepPlan:
        """Builds the step plan of these micro-batches."""
        return StepPlan(
            step=self.step,
            lengths=tuple(self.staged.lengths.tolist()),
            num_stages=self.staged.num_stages,
            ranks_per_stage=self.staged.ranks_per_stage,
            parameters=self.costs.parameters,
            micro_batches=tuple(micro_batches),
            shard_ranks=self.staged.costs.shards,
            node_ranks=self.staged.costs.node_ranks,
        )

    def fits(self, plan: StepPlan, run: Evaluation) -> bool:
        """Whether every rank stays within the budget in bytes.

        Without a budget, tokens times layers of a rank are limited to `tokens_per_rank` times the model's layers.
        """
        stages = plan.micro_batches[0].groups[0].stages
        budget = self.config.activations
        if budget is not None:
            return max(run.peak_bytes) <= self.planning.limit_bytes(plan) and max(run.host_bytes) <= budget.host_bytes
        most = self.config.tokens_per_rank * self.costs.model.num_layers
        return all(rank.peak_tokens * stages[rank.rank // plan.ranks_per_stage].num_layers <= most for rank in run.ranks)

    def _made_to_fit(self, candidate: Candidate) -> _Row | None:
        """Makes room in a candidate; None if it does not fit even then, or without a budget."""
        return self._with_room(self._plan_of([candidate.micro_batch]))

    def _with_room(self, plan: StepPlan) -> _Row | None:
        """The plan with room; None if it does not fit even then, or without a budget."""
        if self.config.activations is None:
            return None
        try:
            plan = make_room(plan, self.planning)
        except NoRoom:
            return None
        made = _Row(plan, self.planning.predict(plan))
        return made if self.fits(made.plan, made.run) else None

    def _least_memory(self, members: tuple[int, ...], tries_longest: bool = True) -> _Row | None:
        """Finds a fitting micro-batch of the largest groups with as few slices as possible; None if there is none.

        Raises NoRoom for a single sequence that does not fit; tries_longest: also if the longest does not fit even alone.
        """
        longest = self._longest(members)
        for tried in dict.fromkeys([members, (longest,)]) if tries_longest or len(members) == 1 else [members]:
            row = self._made_fastest(self._least(tried))
            if row is not None:
                return row if tried == members else None
        if tried != (longest,):
            return None
        raise NoRoom(self._nothing_fits(longest))

    def _longest(self, members: Sequence[int]) -> int:
        """The longest of these sequences."""
        return max(members, key=lambda i: (self.staged.lengths[i], -i))

    def _is_slow(self, members: tuple[int, ...], most_s: float) -> bool:
        """Whether a stage works more than `most_s` seconds in all pipelines of these sequences with little memory."""
        if self._room is None or math.isinf(most_s):
            return False
        is_busy = [False]
        for candidate in self._least(members):
            is_busy = [self._room.is_busy(group, most_s) for group in candidate.micro_batch.groups]
            if not any(is_busy):
                break
        return any(is_busy)

    def _nothing_fits(self, sequence: int) -> str:
        budget = self.config.activations
        room = f"{budget.device_bytes / 2**30:.3g} GiB beside the model" if budget else f"{self.config.tokens_per_rank} tokens"
        return (
            f"sequence {sequence} has {self.staged.lengths[sequence]} tokens and fits no pipeline of "
            f"{self.staged.num_stages} stages of {self.staged.ranks_per_stage} rank(s) with {room} on each; allow "
            f"larger degrees, more tokens_per_rank, more room or recomputation (activations)"
        )

    def _apart(self, members: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sequences longer than half of the longest, and the others; two halves if all are that long."""
        lengths = self.staged.lengths
        ordered = self.staged.by_length(members)
        num_long = sum(2 * int(lengths[i]) > lengths[ordered[0]] for i in ordered)
        num_long = num_long if num_long < len(ordered) else -(-num_long // 2)
        return tuple(ordered[:num_long]), tuple(ordered[num_long:])


def _with_policies(made: MicroBatch, planned: MicroBatch) -> MicroBatch:
    """The groups of `made` with the policies of `planned`, whose chunks are the first of theirs."""
    groups = []
    for group, like in zip(made.groups, planned.groups, strict=True):
        pairs = zip(group.stages, like.stages, strict=True)
        groups.append(replace(group, stages=tuple(replace(own, activations=other.activations) for own, other in pairs)))
    return MicroBatch(tuple(groups))


def _most_tokens(micro_batch: MicroBatch) -> float:
    """Tokens of the largest chunk on a rank."""
    return max(chunk.num_tokens / group.degree for group in micro_batch.groups for chunk in group.chunks)
