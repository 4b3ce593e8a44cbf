"""Decides where lending ranks pays (`lent_slices.py`): in the first slices of a long sequence, the last, both or none.

Predictions assume that every rank has the weights of all stages, as with adapters, whose frozen base weights every rank can keep;
the runtime executes no other case. Lending in the first slices alone is tried too, since only the last slices need the keys and
values of the whole sequence so far sent to the lent ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hf_longctx.plan.core.sharding import lent_order, running_stages
from hf_longctx.plan.core.types import MicroBatch, SequenceGroup, StepPlan
from hf_longctx.plan.pipeline.lent_slices import lent_group
from hf_longctx.plan.pipeline.orders import families
from hf_longctx.plan.prediction.evaluate import Evaluation

# the predicted run of a plan; raises ValueError for a plan that cannot be evaluated
Predict = Callable[[StepPlan], Evaluation]
# whether every rank has room for a plan, given its predicted run
Fits = Callable[[StepPlan, Evaluation], bool]


@dataclass(frozen=True, slots=True)
class Lending:
    """A plan that lends stages where it pays. plain_s, lent_s: predicted seconds of the step without and with lending.

    num_lent: groups with lent ranks. num_able: groups that could be lent ranks.
    """

    plan: StepPlan
    plain_s: float
    lent_s: float
    num_lent: int
    num_able: int

    @property
    def gain(self) -> float:
        """Share of the plain plan's time that lending saves."""
        return 1 - self.lent_s / self.plain_s if self.plain_s else 0.0

    def __str__(self) -> str:
        return (
            f"lent stages: {self.lent_s:.3f} s for {self.plain_s:.3f} s ({self.gain:.1%} saved), in {self.num_lent} of "
            f"{self.num_able} group(s) that can be lent ranks"
        )


def lend(plan: StepPlan, predict: Predict, fits: Fits = lambda plan, run: True) -> Lending:
    """Lends ranks to every group where this saves predicted seconds of the step; tries three ways per group, takes the best.

    fits: plans for which it returns False are left out.
    """
    plain_s = best_s = predict(plan).step_s
    num_lent = num_able = 0
    for place, micro_batch in enumerate(plan.micro_batches):
        for index, group in enumerate(micro_batch.groups):
            candidates = list(_candidates(plan, group))
            num_able += bool(candidates)
            base = plan
            is_lent = False
            for candidate in candidates:
                tried = _with_group(base, place, index, candidate)
                found = predict(tried)
                if found.step_s < best_s and fits(tried, found):
                    plan, best_s, is_lent = tried, found.step_s, True
            num_lent += is_lent
    return Lending(plan, plain_s, best_s, num_lent, num_able)


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
