"""Bytes of the ranks of one pipeline stage: weights and optimizer states of its layers, and how many chunks are in flight.

The first stage has the embeddings, the last one the output head. Tied ones are on both: each holds its own copy and state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from hf_longctx.plan.core.arrays import BoolArray, IntArray
from hf_longctx.plan.core.model_spec import ModelSpec
from hf_longctx.plan.core.types import Action, LayerRange, Parameters, StagePlan, StepPlan


def stage_state_bytes(model: ModelSpec, stage: StagePlan, plan: StepPlan) -> int:
    """Bytes on a rank of the stage of weights, gradients and two fp32 Adam moments, as `ModelSpec.state_bytes` counts them."""
    return held_state_bytes(model, stage.num_layers, stage.stage, plan.num_stages, plan.parameters, plan.block_ranks)


def held_state_bytes(
    model: ModelSpec, num_layers: int, stage: int, num_stages: int, parameters: Parameters, shard_ranks: int
) -> int:
    """The same for `num_layers` layers on stage `stage` of `num_stages`, before there is a plan."""
    return model.part_state_bytes(num_layers, stage == 0, stage == num_stages - 1, parameters, shard_ranks)


def most_held_bytes(model: ModelSpec, ranges: Sequence[Sequence[LayerRange]], parameters: Parameters, shard_ranks: int) -> int:
    """The same of the stage with the most, for the layers of every stage."""
    return max(
        held_state_bytes(model, sum(part.num_layers for part in own), stage, len(ranges), parameters, shard_ranks)
        for stage, own in enumerate(ranges)
    )


def stage_parameters(model: ModelSpec, stage: StagePlan, num_stages: int) -> int:
    """Matrix parameters of one of `num_stages` stages."""
    return held_parameters(model, stage.num_layers, stage.stage, num_stages)


def held_parameters(model: ModelSpec, num_layers: int, stage: int, num_stages: int) -> int:
    """Matrix parameters of `num_layers` layers on stage `stage` of `num_stages`, embeddings and head included."""
    return model.part_parameters(num_layers, stage == 0, stage == num_stages - 1)


def most_in_flight(actions: Iterable[Action]) -> int:
    """The most forwards of a stage that wait for their backward at one time."""
    count = most = 0
    for action in actions:
        count += (action.kind == "F") - (action.kind == "B")
        most = max(most, count)
    return most


def most_tokens_in_flight(actions: Iterable[Action], tokens: Sequence[int]) -> int:
    """The most tokens of chunks that wait for a backward on any part at one time; `tokens` of each chunk."""
    passes = [(action.kind == "F", action.chunk, action.part) for action in actions if action.kind in ("F", "B")]
    if not passes:
        return 0
    is_forward, chunks, parts = zip(*passes, strict=True)
    return most_at_once(np.array(is_forward), np.array(chunks, dtype=np.int64), tokens, 1 + max(parts))


def most_at_once(is_forward: BoolArray, chunks: IntArray, tokens: Sequence[int], num_parts: int = 1) -> int:
    """The same for forwards and backwards of these chunks in order, each of which passes all parts."""
    change = np.array(tokens, dtype=np.int64)[chunks]
    if num_parts == 1:
        return int(np.cumsum(np.where(is_forward, change, -change)).max(initial=0))
    # a chunk comes with its first forward and goes with its last backward
    first, last = np.unique(chunks, return_index=True)[1], len(chunks) - 1 - np.unique(chunks[::-1], return_index=True)[1]
    ends = np.zeros(len(chunks), dtype=np.int64)
    ends[first], ends[last] = change[first], -change[last]
    return int(np.cumsum(ends).max(initial=0))


def message_bytes(model: ModelSpec, stage: StagePlan, num_stages: int, num_tokens: int) -> int:
    """Bytes of messages that no chunk in flight holds, where a chunk has at most `num_tokens` tokens on the rank.

    The next message of each direction has its room before it comes; a gradient that came stays while its backward runs, one that
    leaves until the next does.
    """
    if num_stages == 1:
        return 0
    has_parts = len(stage.parts) > 1
    has_before, has_behind = stage.stage > 0 or has_parts, stage.stage < num_stages - 1 or has_parts
    return (2 * has_before + 2 * has_behind) * num_tokens * model.hidden_size * model.bytes_per_element
