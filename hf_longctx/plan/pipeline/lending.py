"""Decides whether ranks are lent to the first slices of a long sequence, the last, both or none.

Predictions assume that every rank has the weights of all stages, as with adapters, whose frozen base weights every rank can keep;
the runtime executes no other case. Lending in the first slices alone is tried too, since only the last slices need the keys and
values of the whole sequence so far sent to the lent ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hf_longctx.plan.core.lending import lent_order, running_stages
from hf_longctx.plan.core.orders import families
from hf_longctx.plan.core.types import MicroBatch, SequenceGroup, StepPlan
from hf_longctx.plan.groups.placement import PlacedGroup, with_idle_ranks
from hf_longctx.plan.pipeline.candidates import Candidate, Candidates
from hf_longctx.plan.pipeline.search import PipelineSearch
from hf_longctx.plan.pipeline.staged_step import CUTS
from hf_longctx.plan.predict.evaluate import Evaluation
from hf_longctx.plan.predict.lending import lent_group

# the predicted run of a plan; raises ValueError for a plan that cannot be evaluated
Predict = Callable[[StepPlan], Evaluation]
# whether every rank has room for a plan, given its predicted run
Fits = Callable[[StepPlan, Evaluation], bool]


@dataclass(frozen=True, slots=True)
class LendingConstants:
    """Constants of the search for plans with lent ranks."""

    # sequences of a step that may get a micro-batch of their own to be lent ranks
    most_alone: int = 2
    # most slices per stage; with more, idle time is too small a share to save
    most_slices: int = 4


# repeat the stages table of `recipes/bench/cpu/planner.py` when one of these changes
_LENDING = LendingConstants()


@dataclass(frozen=True, slots=True)
class Lending:
    """A plan that lends stages if it pays. lent_s: predicted seconds of the step. num_lent: groups with lent ranks."""

    plan: StepPlan
    lent_s: float
    num_lent: int


def lent_plans(search: PipelineSearch, plan: StepPlan) -> Iterator[StepPlan]:
    """Plans with lent ranks to compare with `plan`, which has none: lent to its own groups, or to long sequences apart.

    There are none unless `lend_stages` is set. A group of several sequences cannot be lent ranks, so the longest sequences get a
    micro-batch each, one more in every plan, before the micro-batches of the others.
    """
    if not search.config.lend_stages:
        return
    predict = search.planning.predict
    yield lend(plan, predict, search.fits).plan
    order = search.staged.by_length(range(len(search.staged.lengths)))
    alone: list[MicroBatch] = []
    for count, sequence in enumerate(order[: _LENDING.most_alone], 1):
        tried = [replace(plan, micro_batches=(each.micro_batch,)) for each in _alone(search.candidates, sequence)]
        lent = [found for found in (lend(each, predict, search.fits) for each in tried) if found.num_lent]
        if not lent:
            return
        alone += min(lent, key=lambda found: found.lent_s).plan.micro_batches
        others = tuple(sorted(order[count:]))
        yield replace(plan, micro_batches=(*alone, *(search.micro_batches(others) if others else ())))


def _alone(candidates: Candidates, sequence: int) -> list[Candidate]:
    """Pipelines of this sequence alone on the largest group, in few slices. Their seconds are not estimated (nan)."""
    staged, degree = candidates.staged, candidates.staged.degrees[-1]
    group, length = PlacedGroup(0, degree, (sequence,)), int(staged.lengths[sequence])
    [groups] = with_idle_ranks([[group]], staged.ranks_per_stage, 0)
    can_lend = staged.shapes[degree].num_blocks == 1 and length <= staged.longest[degree]
    most = min(length // degree, _LENDING.most_slices * staged.num_stages) if can_lend else 0
    return candidates.sliced(groups, [count for count in CUTS.slice_counts if staged.num_stages - 1 <= count <= most])


def lend(plan: StepPlan, predict: Predict, fits: Fits = lambda plan, run: True) -> Lending:
    """Lends ranks to every group if this saves predicted seconds of the step; tries three ways per group, takes the best.

    fits: plans for which it returns False are left out.
    """
    best_s = predict(plan).step_s
    num_lent = 0
    for place, micro_batch in enumerate(plan.micro_batches):
        for index, group in enumerate(micro_batch.groups):
            base = plan
            is_lent = False
            for candidate in _candidates(plan, group):
                tried = _with_group(base, place, index, candidate)
                found = predict(tried)
                if found.step_s < best_s and fits(tried, found):
                    plan, best_s, is_lent = tried, found.step_s, True
            num_lent += is_lent
    return Lending(plan, best_s, num_lent)


def _candidates(plan: StepPlan, group: SequenceGroup) -> Iterator[SequenceGroup]:
    """Ways to lend ranks to a group that the runtime can execute.

    There are none for packs, rings, several layer ranges per stage, activation policies, or passes in another order.
    """
    can_lend = (
        plan.parameters == "replicated"
        and not plan.turns
        and 1 < len(group.stages) <= len(group.chunks) + 1
        and group.shape.num_blocks == 1
        and all(len(stage.layer_ranges) == 1 and not stage.activations for stage in group.stages)
        and all(len(chunk.spans) == 1 for chunk in group.chunks)
        and len(families(group.chunks)) == 1
    )
    for front, back in ((True, True), (True, False), (False, True)) if can_lend else ():
        lent = lent_group(group, front, back)
        if _keeps_order(lent) and _has_tokens(lent):
            yield lent


def _keeps_order(group: SequenceGroup) -> bool:
    """Whether every stage's own passes are in the only order in which ranks can be lent to them."""
    return all(
        [action for action in row if action.stage == stage.stage] == [a for a in stage.actions if a.kind in ("F", "B")]
        for row, stage in zip(lent_order(group), group.stages, strict=True)
    )


def _has_tokens(group: SequenceGroup) -> bool:
    """Whether every rank gets a token of every slice that it runs."""
    return all(
        group.chunks[action.chunk].num_tokens >= len(running_stages(action)) * group.degree
        for stage in group.stages
        for action in stage.actions
        if action.lenders
    )


def _with_group(plan: StepPlan, place: int, index: int, group: SequenceGroup) -> StepPlan:
    groups = list(plan.micro_batches[place].groups)
    groups[index] = group
    batches = list(plan.micro_batches)
    batches[place] = MicroBatch(tuple(groups))
    return replace(plan, micro_batches=tuple(batches))
