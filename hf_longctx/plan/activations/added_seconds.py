"""Seconds that an activation policy adds to a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hf_longctx.plan.activations.shares import slot_seconds
from hf_longctx.plan.activations.slots import SavedClass, Slot, layer_slot, layer_slots
from hf_longctx.plan.core.types import (
    ActivationPolicy,
    Chunk,
    GroupShape,
    LayerPolicy,
    SequenceGroup,
    StagePlan,
    TensorShare,
)
from hf_longctx.plan.cost.cost_model import CostModel


def group_seconds(costs: CostModel, group: SequenceGroup) -> float:
    """Seconds of a group's chunks, forward and backward, including those that its policies add."""
    (stage,) = group.stages
    shape, layers = group.shape, stage.num_layers
    passes_s = sum(costs.forward_s(c, shape, layers) + costs.backward_s(c, shape, layers) for c in group.chunks)
    return passes_s + sum(sum(added) for added in added_seconds(costs, group, stage).values())


def added_seconds(costs: CostModel, group: SequenceGroup, stage: StagePlan) -> dict[int, tuple[float, float]]:
    """Seconds that policies add to (forward, backward) of each chunk: recomputation, and copies that compute does not hide."""
    policies = {policy.chunk: policy for policy in stage.activations if policy.layers}
    if not policies:
        return {}
    slots: list[Slot] = []
    shares: list[tuple[TensorShare, ...]] = []
    owners: list[int] = []
    is_sliced = len(group.chunks) > 1
    for chunk in group.chunks:
        policy = policies.get(chunk.index, ActivationPolicy(chunk.index))
        of_layers = layer_slots(costs, chunk, group.shape)
        chosen = [_shares_of(policy, place, slot) for place, slot in enumerate(of_layers)]
        # a slice is one slot, whose shares are the mean over its layers
        slots += [one_slot(costs, chunk, group.shape)] if is_sliced else of_layers
        shares += [_mean(chosen)] if is_sliced else chosen
        owners += [chunk.index] * (1 if is_sliced else len(of_layers))
    array = np.array([(share.recompute, share.host) for chosen in shares for share in chosen])
    added: dict[int, tuple[float, float]] = {}
    seconds = slot_seconds(slots, array, costs.cluster.hardware.copy_bytes_per_s)
    for owner, again_s, out_s, back_s in zip(owners, *(way.tolist() for way in seconds), strict=True):
        forward_s, backward_s = added.get(owner, (0.0, 0.0))
        added[owner] = forward_s + out_s, backward_s + back_s + again_s
    return added


def _shares_of(policy: ActivationPolicy, layer: int, slot: Slot) -> tuple[TensorShare, ...]:
    """Shares that a policy gives to one layer's classes, in the order of the slot."""
    chosen = policy.layers[layer] if layer < len(policy.layers) else LayerPolicy()
    return tuple(chosen.share(item.tensor_class) for item in slot.saved)


def one_slot(costs: CostModel, chunk: Chunk, shape: GroupShape) -> Slot:
    """Joins all layers of a chunk into one slot."""
    num_layers, layer = costs.model.num_layers, layer_slot(costs, chunk, shape, costs.model.attention_pairs())
    return Slot(
        sum([layer.forward_s] * num_layers),
        sum([layer.backward_s] * num_layers),
        tuple(_scaled(item, num_layers) for item in layer.saved),
    )


def _scaled(item: SavedClass, count: int) -> SavedClass:
    return replace(item, num_bytes=item.num_bytes * count, recompute_s=item.recompute_s * count)


def _mean(layers: Sequence[tuple[TensorShare, ...]]) -> tuple[TensorShare, ...]:
    """Averages each class's shares over the layers."""
    count = len(layers)
    return tuple(
        TensorShare(
            of_class[0].tensor_class,
            recompute=sum(share.recompute for share in of_class) / count,
            host=sum(share.host for share in of_class) / count,
            device=sum(share.device for share in of_class) / count,
        )
        for of_class in zip(*layers, strict=True)
    )
