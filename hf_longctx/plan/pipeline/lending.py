"""Decides where lending ranks pays (`lent_slices.py`): in the first slices of a long sequence, the last, both or none.

Predictions assume that every rank has the weights of all stages, as with adapters, whose frozen base weights every rank can keep;
the runtime executes no other case. Lending in the first slices alone is tried too, since only the last slices need the keys and
values of the whole sequence so far sent to the lent ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hf_longctx.plan.core.orders import families
from hf_longctx.plan.core.sharding import lent_order, running_stages
from hf_longctx.plan.core.types import MicroBatch, SequenceGroup, StepPlan
from hf_longctx.plan.predict.evaluate import Evaluation
from hf_longctx.plan.predict.lending import lent_group

# the predicted run of a plan; raises ValueError for a plan that cannot be evaluated
Predict = Callable[[StepPlan], Evaluation]
# whether every rank has room for a plan, given its predicted run
Fits = Callable[[StepPlan, Evaluation], bool]


@dataclass(frozen=True, slots=True)
class Lending:
    """A plan that lends stages where it pays. lent_s: predicted seconds of the step. num_lent: groups with lent ranks."""

    plan: StepPlan
    lent_s: float
    num_lent: int


def lend(plan: StepPlan, predict: Predict, fits: Fits = lambda plan, run: True) -> Lending:
    """Lends ranks to every group where this saves predicted seconds of the step; tries three ways per group, takes the best.

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
        and 1 < len(group.stages) <= len(group.chunks) + 1
        and group.shape.num_blocks == 1
        and all(len(stage.parts) == 1 and not stage.activations for stage in group.stages)
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
