"""Checks of a rank's plan before it runs."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from hf_longctx.plan.core.lending import check_lending, is_lent, without_lending
from hf_longctx.plan.core.types import LEAST_TILE_TOKENS, Action, ActivationPolicy, RankPlan, SequenceGroup, StagePlan
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.execution.round import layers_of
from hf_longctx.runtime.execution.stage_model import StageModel
from hf_longctx.runtime.process_groups import GroupPool


def forward_only(plan: RankPlan, tiles_heads: bool = True) -> RankPlan:
    """Returns the plan for an evaluation: forwards alone, one micro-batch after the other.

    No stage lends ranks, the last stage runs all output heads, and activation policies make tiles but save nothing. tiles_heads:
    the last stage runs heads of other stages in tiles, as these do, since the plan left it no room for their logits.
    """
    rounds = []
    for group, stage in plan.rounds:
        group, stage = _without_spread_heads(without_lending(group), stage, tiles_heads)
        actions = tuple(action for action in stage.actions if action.kind in ("F", "SF", "RF"))
        tiles = tuple(replace(policy, layers=()) for policy in stage.activations)
        rounds.append((group, replace(stage, actions=actions, activations=tiles)))
    return replace(plan, rounds=tuple(rounds), turns=())


def _without_spread_heads(group: SequenceGroup, stage: StagePlan, tiles_heads: bool) -> tuple[SequenceGroup, StagePlan]:
    """Returns a group and one of its stages without output heads on stages before the last, and without their messages.

    tiles_heads: see `forward_only`.
    """
    if not (heads := group.head_stages):
        return group, stage
    last, num_ranges = len(group.stages) - 1, len(stage.layer_ranges)

    def is_kept(action: Action) -> bool:
        to_head = action.stage == last and action.kind in ("SF", "RB") and action.chunk in heads
        return action.layer_range < num_ranges and not to_head

    def kept(each: StagePlan) -> StagePlan:
        return replace(each, actions=tuple(filter(is_kept, each.actions)))

    if tiles_heads and stage.stage == last:
        own = {(policy.chunk, policy.layer_range): policy for policy in stage.activations}
        for key in ((chunk, num_ranges - 1) for chunk in heads):
            policy = own.get(key, ActivationPolicy(*key))
            own[key] = replace(policy, tile_tokens=policy.tile_tokens or LEAST_TILE_TOKENS)
        stage = replace(stage, activations=tuple(own.values()))
    return replace(group, stages=tuple(map(kept, group.stages))), kept(stage)


def refuse_unsupported(
    plan: RankPlan, engine: ActivationEngine | None = None, has_all_stages: bool = False, head_stages: Collection[int] = ()
) -> None:
    """Raises ValueError naming the first part of the plan that cannot be executed with `engine` (or without one).

    has_all_stages: whether this rank has the weights of all stages, which a rank lent to another stage needs. head_stages: stages
    before the last that can run output heads.
    """
    for group, stage in plan.rounds:
        if others := {*group.head_stages.values()} - {*head_stages}:
            raise ValueError(
                f"the plan has output heads on stage {min(others)}, but of the stages before the last only {[*head_stages]} can "
                f"run them: those that were cut with a head, and none beside a teacher, whose states are on the last stage; plan "
                f"with the output_shares for which the model was cut, or with spread_head=False"
            )
        if engine is not None:
            for policy in stage.activations:
                engine.check(policy, layers_of(stage, policy.layer_range))
        elif any(policy.layers or policy.tile_tokens for policy in stage.activations):
            raise ValueError(
                "the plan has activation policies (recompute, offload, tiles), which need an activation engine; pass one, or "
                "plan without them"
            )
        if is_lent(group):
            check_lending(plan, group, has_all_stages)


def hooked_weights(model: nn.Module) -> list[str]:
    """Returns the names of parameters with users' hooks, which autograd would call for each chunk or tile."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    ]


def check_weights(
    stage: StageModel,
    pool: GroupPool,
    summed: Collection[nn.Parameter],
    has_all_stages: bool = False,
    added_code: str = "",
) -> None:
    """Raises ValueError on every rank if users changed the model between steps so that gradients would be wrong.

    All ranks of a stage must train the same weights, or gradients of different weights would be summed; the stages of a tied
    weight must agree; no weight may have a hook or be new, that is, missing in `summed`, the weights whose gradients are summed
    over ranks. has_all_stages: whether every rank holds all stages. added_code: problem with code added to this rank's model
    since the start; empty if there is none. Collective over the pool. With a control group, nothing waits for the device.
    """
    weights = list(stage.model.named_parameters())
    known = {id(parameter) for parameter in summed}
    added = [name for name, parameter in weights if id(parameter) not in known]
    trains, hooked = [parameter.requires_grad for _, parameter in weights], hooked_weights(stage.model)
    own, num_stages = (0, 1) if has_all_stages else (pool.stage, pool.num_stages)
    device = weights[0][1].device
    # one column per stage, and one each for the tied weight, hooks, new weights and code
    values = {own: zlib.crc32(bytes(trains)), num_stages + 1: int(bool(hooked)), num_stages + 2: int(bool(added))}
    values[num_stages + 3] = int(bool(added_code))
    if stage.tied and not has_all_stages:
        values[num_stages] = int(stage.model.get_parameter(stage.tied).requires_grad)
    is_alike = _alike_over_ranks(values, num_stages + 4, pool, device if pool.control is None else torch.device("cpu"))
    if added_code or not is_alike[-1]:
        raise ValueError(added_code or "the model of another rank got code after the start, which the message of that rank names")
    if added or not is_alike[-2]:
        raise ValueError(
            f"{f'the weight {added[0]}' if added else 'a weight of another rank'} is new: it was added to the model, or put in "
            f"place of another weight, during training, and gradients of such weights are not summed over ranks; change the "
            f"model before the trainer is made, and change weights in place"
        )
    if hooked or not is_alike[-3]:
        raise ValueError(
            f"{f'the weight {hooked[0]}' if hooked else 'a weight of another rank'} got a hook in training, which would see the "
            f"gradients of single chunks and tiles; remove it, and change `.grad` in the method on_pre_optimizer_step of a "
            f"TrainerCallback"
        )
    if not all(is_alike[:num_stages]):
        names = []
        if not is_alike[own]:
            flags = torch.tensor([trains, [not each for each in trains]], dtype=torch.uint8, device=device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=pool.everyone if has_all_stages else pool.stage_group)
            names = [name for (name, _), both in zip(weights, flags.min(dim=0).values.tolist(), strict=True) if both]
        which = f"{len(names)} weights, such as {names[0]}," if names else f"weights of stage {is_alike.index(False)}"
        raise ValueError(
            f"{which} are trained on some ranks and frozen on others; set requires_grad alike on every rank, in the same step "
            f"(look for a callback that asks for the rank)"
        )
    if not is_alike[num_stages]:
        raise ValueError(
            f"{stage.tied or 'the tied weight of embedding and head'} is trained on some stages of the pipeline and frozen on "
            f"others; freeze or unfreeze the embedding and the head together, and on all stages"
        )


def _alike_over_ranks(values: Mapping[int, int], num_columns: int, pool: GroupPool, device: torch.device) -> list[bool]:
    """Returns for each column whether all ranks with a value for it have the same value. Collective over the pool.

    device: device for the comparison; must suit the pool's control group, or the pool without one.
    """
    if pool.everyone is None:
        return [True] * num_columns
    none = -(2**40)
    # rows: values, and their negatives, whose maximum gives the minimum
    marks = torch.full((2, num_columns), none, dtype=torch.int64)
    for column, value in values.items():
        marks[0, column], marks[1, column] = value, -value
    marks = marks.to(device)
    dist.all_reduce(marks, op=dist.ReduceOp.MAX, group=pool.everyone if pool.control is None else pool.control)
    largest, negated = marks.tolist()
    return [high == -low or high == none for high, low in zip(largest, negated, strict=True)]
