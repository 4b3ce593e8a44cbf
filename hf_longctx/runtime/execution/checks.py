"""Checks of a rank's plan before it runs."""

from __future__ import annotations

from dataclasses import replace

from hf_longctx.plan.core.sharding import is_shared
from hf_longctx.plan.core.types import RankPlan
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.execution.lent_round import check_lending, without_helpers
from hf_longctx.runtime.execution.round import layers_of

# moves to the host and back are part of F and B, as activation policies say; keys and values go with their last reader
_EXECUTED = ("F", "B", "SF", "RF", "SB", "RB")


def forward_only(plan: RankPlan) -> RankPlan:
    """The plan without what policies do for a backward, of which their tiles are left, and without helpers."""
    rounds = tuple(
        (without_helpers(group), replace(stage, activations=tuple(replace(policy, layers=()) for policy in stage.activations)))
        for group, stage in plan.rounds
    )
    return replace(plan, rounds=rounds)


def refuse_unsupported(plan: RankPlan, engine: ActivationEngine | None = None, has_all_stages: bool = False) -> None:
    """Raises ValueError naming the first part of the plan that this version does not execute, with `engine` or without.

    has_all_stages: whether this rank has what it takes to help other stages.
    """
    for group, stage in plan.rounds:
        if engine is not None:
            for policy in stage.activations:
                engine.check(policy, layers_of(stage, policy.part))
        elif any(policy.layers or policy.tile_tokens for policy in stage.activations):
            raise ValueError("activation policies (recompute, offload, tiles) are not executed yet; everything is kept")
        for chunk in group.chunks:
            if group.shape.num_blocks > 1 and any(span.start for span in chunk.spans):
                raise ValueError(
                    f"chunk {chunk.index} is a slice of a sequence in a {group.method} group; slices are executed in local and "
                    f"ulysses groups only"
                )
        for action in (action for each in group.stages for action in each.actions):
            if action.kind not in _EXECUTED:
                raise ValueError(f"action {action} is not executed yet; only {', '.join(_EXECUTED)} are")
        if is_shared(group):
            check_lending(plan, group, has_all_stages)
