"""Checks of a rank's plan before it runs."""

from __future__ import annotations

from dataclasses import replace

from hf_longctx.plan.core.sharding import is_lent
from hf_longctx.plan.core.types import RankPlan
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.execution.lent_round import check_lending, without_helpers
from hf_longctx.runtime.execution.round import layers_of


def forward_only(plan: RankPlan) -> RankPlan:
    """The plan as an evaluation runs it: without helpers, and with policies that make tiles but save nothing."""
    rounds = tuple(
        (without_helpers(group), replace(stage, activations=tuple(replace(policy, layers=()) for policy in stage.activations)))
        for group, stage in plan.rounds
    )
    return replace(plan, rounds=rounds)


def refuse_unsupported(plan: RankPlan, engine: ActivationEngine | None = None, has_all_stages: bool = False) -> None:
    """Raises ValueError naming the first part of the plan that this version does not execute with `engine`, or without one.

    has_all_stages: whether this rank has the weights of all stages, which helping other stages needs.
    """
    for group, stage in plan.rounds:
        if engine is not None:
            for policy in stage.activations:
                engine.check(policy, layers_of(stage, policy.part))
        elif any(policy.layers or policy.tile_tokens for policy in stage.activations):
            raise ValueError(
                "the plan has activation policies (recompute, offload, tiles), which need an activation engine; pass one, or "
                "plan without them"
            )
        for chunk in group.chunks:
            if group.shape.num_blocks > 1 and any(span.start for span in chunk.spans):
                raise ValueError(
                    f"chunk {chunk.index} is a slice of a sequence in a {group.method} group; only local and ulysses groups "
                    f"execute slices: plan them with one of these methods"
                )
        if is_lent(group):
            check_lending(plan, group, has_all_stages)
