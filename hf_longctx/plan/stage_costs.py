"""Seconds of many chunks on pipeline stages at once: for planners that compare hundreds of pipelines before one is judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_longctx.plan.cost import CostModel, FloatArray, num_tiles
from hf_longctx.plan.event_loop import run_actions
from hf_longctx.plan.pipeline import Schedule, compute_actions
from hf_longctx.plan.sharding import shard_tokens
from hf_longctx.plan.stage_memory import most_tokens_in_flight
from hf_longctx.plan.types import Action, Chunk, GroupShape, LayerRange

# the layer ranges of every stage's parts
Parts = tuple[tuple[LayerRange, ...], ...]


@dataclass(frozen=True, slots=True)
class StageRates:
    """Forward plus backward on one stage of a group: seconds of a causal pair, of a token, of a document and of a chunk."""

    pair_s: float
    token_s: float
    document_s: float
    chunk_s: float

    def sequences_s(self, tokens: FloatArray) -> FloatArray:
        """Seconds that whole sequences of so many tokens add."""
        return self.pair_s * tokens * tokens / 2 + self.token_s * tokens + self.document_s


def busiest_rates(costs: CostModel, shape: GroupShape, parts: Parts, tokens: FloatArray) -> StageRates:
    """Rates of the stage that works longest on sequences of so many tokens, which is where chunks have to be balanced."""
    rates = [
        _rates(costs, shape, sum(part.num_layers for part in of_stage), place == len(parts) - 1)
        for place, of_stage in enumerate(parts)
    ]
    return max(rates, key=lambda each: float(each.sequences_s(tokens).sum()))


def _rates(costs: CostModel, shape: GroupShape, num_layers: int, has_head: bool) -> StageRates:
    share = num_layers / costs.model.num_layers
    head = costs.model.head_share
    pair_s = token_s = document_s = chunk_s = 0.0
    for is_backward in (False, True):
        each = costs.coefficients.backward if is_backward else costs.coefficients.forward
        fixed_s, sent_s = costs.exchange_line(shape, is_backward)
        pair_s += share * each.pair_s / shape.degree
        token_s += share * (each.token_s * (1 - head) / shape.degree + sent_s) + has_head * head * each.token_s / shape.degree
        document_s += share * each.tile_s * num_tiles(shape, 1.0)
        chunk_s += share * (each.chunk_s + fixed_s)
    return StageRates(pair_s, token_s, document_s, chunk_s)


def pipeline_s(
    chunks: Sequence[Chunk],
    shape: GroupShape,
    costs: CostModel,
    parts: Parts,
    schedule: Schedule,
    leaves_node: Sequence[bool],
) -> tuple[float, tuple[int, ...]]:
    """Seconds of a group's chunks on all stages, everything kept, and the most tokens that a rank of each stage holds at once.

    What the judge says of groups that leave no node without need.

    leaves_node: of every stage, whether its messages to the next one (of the last stage: to the first) cross nodes.
    """
    on_rank = [max(shard_tokens(chunk, shape)) for chunk in chunks]
    tokens = np.array([max(chunk.num_tokens, shape.degree) for chunk in chunks], dtype=np.float64)
    pairs = np.array([chunk.num_pairs for chunk in chunks])
    documents = np.array([len(chunk.spans) for chunk in chunks], dtype=np.float64)
    seconds: dict[tuple[str, int, int], list[float]] = {}
    for kind, is_backward in (("F", False), ("B", True)):
        layer_s, head_s = _layer_and_head_s(costs, shape, is_backward, tokens, pairs, documents)
        for stage, of_stage in enumerate(parts):
            for place, part in enumerate(of_stage):
                has_head = stage == len(parts) - 1 and place == len(of_stage) - 1
                seconds[kind, stage, place] = (layer_s * part.num_layers + (head_s if has_head else 0.0)).tolist()
    hops = {leaves: [costs.hop_s(count, leaves) for count in on_rank] for leaves in set(leaves_node)}

    def hop_s(action: Action) -> float:
        return hops[leaves_node[action.stage if action.kind == "F" else action.stage - 1]][action.chunk]

    def action_s(action: Action) -> float:
        return seconds[action.kind, action.stage, action.part][action.chunk]

    actions = compute_actions(chunks, len(parts), schedule, len(parts[0]))
    seconds_of_all = max(times[-1][1] for times in run_actions(actions, action_s, hop_s, len(parts[0])))
    return seconds_of_all, tuple(most_tokens_in_flight(of_stage, on_rank) for of_stage in actions)


def _layer_and_head_s(
    costs: CostModel, shape: GroupShape, is_backward: bool, tokens: FloatArray, pairs: FloatArray, documents: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Seconds of one layer and of the output head for every chunk, as `CostModel.part_s` counts them."""
    each = costs.coefficients.backward if is_backward else costs.coefficients.forward
    fixed_s, sent_s = costs.exchange_line(shape, is_backward)
    head_s = each.token_s * costs.model.head_share * tokens / shape.degree
    whole_s = (each.pair_s * pairs + each.token_s * tokens) / shape.degree + each.chunk_s
    whole_s = whole_s + each.tile_s * num_tiles(shape, 1.0) * documents + fixed_s + sent_s * tokens
    return (whole_s - head_s) / costs.model.num_layers, head_s
