"""Bytes of the ranks of one pipeline stage: weights and optimizer states of its layers, and how many chunks are in flight.

The first stage has the embeddings, the last one the output head. Tied ones are on both: each holds its own copy and state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hf_longctx.plan.specs import ModelSpec
from hf_longctx.plan.types import Action, StagePlan, StepPlan


def stage_state_bytes(model: ModelSpec, stage: StagePlan, plan: StepPlan) -> int:
    """Bytes on a rank of the stage of weights, gradients and two fp32 Adam moments, as `ModelSpec.state_bytes` counts them."""
    outside = _outside_parameters(model, stage.stage == 0, stage.stage == plan.num_stages - 1)
    num_parameters = stage.num_layers * model.layer_parameters + outside
    whole = num_parameters * (2 * model.bytes_per_element + 8)
    if plan.parameters == "replicated":
        return whole
    unit = min(2, stage.num_layers) * model.layer_parameters + outside
    gathered = unit if plan.parameters == "sharded" else num_parameters
    return -(-whole // plan.block_ranks) + (gathered + unit) * model.bytes_per_element


def _outside_parameters(model: ModelSpec, is_first: bool, is_last: bool) -> int:
    """Matrix parameters of a stage that are in no layer."""
    table = model.vocab_size * model.hidden_size
    positions = model.max_positions * model.hidden_size if model.learned_positions and is_first else 0
    num_tables = 1 if model.tied_embeddings and is_first and is_last else is_first + is_last
    return num_tables * table + positions


def most_in_flight(actions: Iterable[Action]) -> int:
    """The most forwards of a stage that wait for their backward at one time."""
    count = most = 0
    for action in actions:
        count += (action.kind == "F") - (action.kind == "B")
        most = max(most, count)
    return most


def most_tokens_in_flight(actions: Iterable[Action], tokens: Sequence[int]) -> int:
    """The most tokens of chunks that wait for a backward on any part at one time; `tokens` of each chunk."""
    waiting = [0] * len(tokens)
    count = most = 0
    for action in actions:
        if action.kind == "F":
            count += 0 if waiting[action.chunk] else tokens[action.chunk]
            waiting[action.chunk] += 1
            most = max(most, count)
        elif action.kind == "B":
            waiting[action.chunk] -= 1
            count -= 0 if waiting[action.chunk] else tokens[action.chunk]
    return most
