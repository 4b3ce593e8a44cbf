"""Checks of a rank's plan before it runs."""

from __future__ import annotations

import zlib
from dataclasses import replace

import torch
import torch.distributed as dist

from hf_longctx.plan.core.sharding import is_lent
from hf_longctx.plan.core.types import RankPlan
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.execution.lent_round import check_lending, without_helpers
from hf_longctx.runtime.execution.round import layers_of
from hf_longctx.runtime.execution.stage_model import StageModel
from hf_longctx.runtime.process_groups.pool import GroupPool


def forward_only(plan: RankPlan) -> RankPlan:
    """The plan as an evaluation runs it: no stage lends ranks, and activation policies make tiles but save nothing."""
    rounds = tuple(
        (without_helpers(group), replace(stage, activations=tuple(replace(policy, layers=()) for policy in stage.activations)))
        for group, stage in plan.rounds
    )
    return replace(plan, rounds=rounds)


def refuse_unsupported(plan: RankPlan, engine: ActivationEngine | None = None, has_all_stages: bool = False) -> None:
    """Raises ValueError naming the first part of the plan that this version does not execute with `engine`, or without one.

    has_all_stages: whether this rank has the weights of all stages; a rank lent to another stage needs that stage's weights.
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


def check_trained_alike(stage: StageModel, pool: GroupPool, has_all_stages: bool = False) -> None:
    """Raises ValueError on every rank unless all ranks of a stage train the same weights, and both stages of a tied weight agree.

    Users may freeze and unfreeze weights between steps. If only some ranks did, gradients of different weights would be summed.
    has_all_stages: whether every rank holds all stages. Collective over the pool; waits for the device.
    """
    if pool.everyone is None:
        return
    weights = list(stage.model.named_parameters())
    trains = [parameter.requires_grad for _, parameter in weights]
    device = weights[0][1].device
    num_stages, own, group = (1, 0, pool.everyone) if has_all_stages else (pool.num_stages, pool.stage, pool.stage_group)
    # columns: one for each stage, and one for the tied weight; rows: values, and their negatives, whose maximum gives the minimum
    marks = torch.full((2, num_stages + 1), -(2**40), dtype=torch.int64)
    columns = [(own, zlib.crc32(bytes(trains)))]
    if stage.tied and not has_all_stages:
        columns.append((num_stages, int(stage.model.get_parameter(stage.tied).requires_grad)))
    for column, value in columns:
        marks[:, column] = torch.tensor([value, -value])
    marks = marks.to(device)
    dist.all_reduce(marks, op=dist.ReduceOp.MAX, group=pool.everyone)
    largest, negated = marks.tolist()
    is_alike = [high == -low or high == -(2**40) for high, low in zip(largest, negated, strict=True)]
    if all(is_alike):
        return
    if not all(is_alike[:-1]):
        names = []
        if not is_alike[own]:
            flags = torch.tensor([trains, [not each for each in trains]], dtype=torch.uint8, device=device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
            names = [name for (name, _), both in zip(weights, flags.min(dim=0).values.tolist(), strict=True) if both]
        which = f"{len(names)} weights, such as {names[0]}," if names else f"weights of stage {is_alike.index(False)}"
        raise ValueError(
            f"{which} are trained on some ranks and frozen on others; set requires_grad alike on every rank, in the same step "
            f"(look for a callback that asks for the rank)"
        )
    raise ValueError(
        f"{stage.tied or 'the tied weight of embedding and head'} is trained on one end of the pipeline and frozen on the other; "
        f"freeze or unfreeze the embedding and the head together"
    )
