"""Seconds of many chunks on pipeline stages at once, for planners that compare hundreds of pipelines before a full prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_longctx.plan.core.arrays import FloatArray
from hf_longctx.plan.core.attention_pairs import SpanRates
from hf_longctx.plan.core.sharding import shard_tokens
from hf_longctx.plan.core.types import Chunk, GroupShape, LayerRange
from hf_longctx.plan.cost.cost_model import CostModel, num_tiles
from hf_longctx.plan.memory.stage import most_tokens_at_once
from hf_longctx.plan.pipeline.orders import Schedule, compute_orders
from hf_longctx.plan.prediction.event_loop import Wiring

# the layer ranges of every stage's parts
Parts = tuple[tuple[LayerRange, ...], ...]


@dataclass(frozen=True, slots=True)
class StageRates:
    """Seconds of forward plus backward on one stage of a group: per pair and token (`spans`), per document and per chunk."""

    spans: SpanRates
    document_s: float
    chunk_s: float

    def sequences_s(self, tokens: FloatArray) -> FloatArray:
        """Seconds that each whole sequence adds, given its tokens."""
        rates = self.spans
        return rates.pair_s * tokens * rates.pairs.seen(np.zeros_like(tokens), tokens) + rates.token_s * tokens + self.document_s


def busiest_rates(costs: CostModel, shape: GroupShape, parts: Parts, tokens: FloatArray) -> StageRates:
    """Rates of the stage that works longest on sequences of these lengths, since chunks are balanced for that stage."""
    rates = [_rates(costs, shape, of_stage, place == len(parts) - 1) for place, of_stage in enumerate(parts)]
    return max(rates, key=lambda each: float(each.sequences_s(tokens).sum()))


def _rates(costs: CostModel, shape: GroupShape, layers: Sequence[LayerRange], has_head: bool) -> StageRates:
    share = sum(part.num_layers for part in layers) / costs.model.num_layers
    head = costs.model.head_share
    pair_s = token_s = document_s = chunk_s = 0.0
    for is_backward in (False, True):
        each = costs.coefficients.backward if is_backward else costs.coefficients.forward
        fixed_s, sent_s = costs.exchange_line(shape, is_backward)
        pair_s += share * each.pair_s / shape.degree
        token_s += share * (each.token_s * (1 - head) / shape.degree + sent_s) + has_head * head * each.token_s / shape.degree
        document_s += share * each.tile_s * num_tiles(shape, 1.0)
        chunk_s += share * (each.chunk_s + fixed_s)
    return StageRates(SpanRates(pair_s, token_s, costs.model.attention_pairs(layers)), document_s, chunk_s)


def pipeline_s(
    chunks: Sequence[Chunk],
    shape: GroupShape,
    costs: CostModel,
    parts: Parts,
    schedule: Schedule,
    leaves_node: Sequence[bool],
) -> tuple[float, tuple[int, ...]]:
    """Seconds of a group's chunks on all stages with everything kept, and the most tokens a rank of each stage holds at once.

    The seconds equal the full prediction for groups that do not cross nodes unnecessarily.

    leaves_node: for every stage, whether its messages to the next stage cross nodes (for the last stage: to the first).
    """
    on_rank = [max(shard_tokens(chunk, shape)) for chunk in chunks]
    tokens = np.array([max(chunk.num_tokens, shape.degree) for chunk in chunks], dtype=np.float64)
    pairs_of = [[costs.model.attention_pairs((part,)) for part in of_stage] for of_stage in parts]
    # pairs are counted once per mix of layers, since most stages have the same mix
    num_pairs = {
        pairs: np.array([pairs.of_chunk(chunk) for chunk in chunks])
        for pairs in dict.fromkeys(pairs for of_stage in pairs_of for pairs in of_stage)
    }
    documents = np.array([len(chunk.spans) for chunk in chunks], dtype=np.float64)
    num_stages, num_parts = len(parts), len(parts[0])
    seconds = np.empty((num_parts, num_stages, len(chunks), 2))
    for is_backward in (False, True):
        found = {
            pairs: _layer_and_head_s(costs, shape, is_backward, tokens, counts, documents) for pairs, counts in num_pairs.items()
        }
        for stage, of_stage in enumerate(parts):
            for place, part in enumerate(of_stage):
                has_head = stage == num_stages - 1 and place == num_parts - 1
                layer_s, head_s = found[pairs_of[stage][place]]
                seconds[place, stage, :, int(is_backward)] = layer_s * part.num_layers + (head_s if has_head else 0.0)
    hops = {leaves: [costs.hop_s(count, leaves) for count in on_rank] for leaves in set(leaves_node)}
    # forwards send to the next stage, backwards to the previous one
    hop_s = np.array([[hops[leaves_node[stage]], hops[leaves_node[stage - 1]]] for stage in range(num_stages)]).swapaxes(1, 2)
    orders = compute_orders(chunks, num_stages, schedule, num_parts)
    kinds, of_chunks, of_parts = zip(*orders, strict=True)
    wiring = Wiring(kinds, of_chunks, of_parts, num_parts)
    times, _ = wiring.run(wiring.seconds(seconds), wiring.hops(hop_s))
    held = tuple(most_tokens_at_once(kind == 0, chunk, on_rank, num_parts) for kind, chunk, _ in orders)
    return max(of_stage[-1][1] for of_stage in times), held


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
