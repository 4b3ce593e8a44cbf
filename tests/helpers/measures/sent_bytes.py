"""Count exactly the bytes that every rank of a sequence group sends in a pass: the oracle for `mean_traffic`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hf_longctx.plan.core.sharding import (
    Piece,
    block_pieces,
    held_tokens,
    longest_document,
    rank_pieces,
    seen_pieces,
    slice_pieces,
    travelling_pieces,
)
from hf_longctx.plan.core.types import Chunk, GroupShape
from hf_longctx.plan.cost.traffic import HeadCounts
from hf_longctx.plan.model.model_spec import ModelSpec


def sent_bytes(model: ModelSpec, shape: GroupShape, chunk: Chunk, chunks: tuple[Chunk, ...] = ()) -> tuple[tuple[int, int], ...]:
    """Bytes that every rank of a group sends to others in one forward and one backward of a chunk over all layers, exactly.

    chunks: all chunks of the group, if the chunk begins with a slice.
    """
    element = model.bytes_sent_per_element or model.bytes_per_element
    # gradients travel around a ring in at least fp32
    gradient = max(4, element)
    heads = HeadCounts.of(model.num_heads, model.num_kv_heads, shape.ulysses)
    tokens, blocks = held_tokens(rank_pieces(chunk, shape)), block_pieces(chunk, shape)
    # elements per token that each rank receives as queries, keys and values, and elements that it returns
    sent = [q * model.head_dim + kv * model.kv_head_size for q, kv in zip(heads.queries, heads.kv, strict=True)]
    returned_heads = [q * (model.kv_head_size - model.head_dim) for q in heads.queries]
    block_tokens = held_tokens(blocks)
    passed, returned = _ring_tokens(model, blocks, _earlier_pieces(chunk, chunks, shape.num_blocks))
    result = []
    for rank, own in enumerate(tokens):
        block, inside = divmod(rank, shape.ulysses)
        others = block_tokens[block] - own
        forward = (own * (sum(sent) - sent[inside]) + others * returned_heads[inside]) * element * model.num_layers
        backward = (others * sent[inside] + own * (sum(returned_heads) - returned_heads[inside])) * element * model.num_layers
        values = heads.kv[inside] * model.kv_head_size
        forward += passed[block] * values * element
        backward += (passed[block] * element + returned[block] * gradient) * values
        result.append((forward, backward))
    return tuple(result)


def _earlier_pieces(chunk: Chunk, chunks: tuple[Chunk, ...], num_blocks: int) -> tuple[tuple[Piece, ...], ...]:
    """Pieces of the slices before the one with which a chunk begins, for every block; they end at position 0."""
    start = chunk.prefix_tokens
    if not start:
        return ((),) * num_blocks
    held = slice_pieces(chunks, chunk.spans[0].sequence, num_blocks)
    return tuple(
        tuple(replace(p, start=p.start - start, stop=p.stop - start) for p in pieces if p.stop <= start) for pieces in held
    )


def _ring_tokens(
    model: ModelSpec, blocks: tuple[tuple[Piece, ...], ...], earlier: tuple[tuple[Piece, ...], ...]
) -> tuple[list[int], list[int]]:
    """For every block, tokens whose keys and values it sends in a pass, and tokens whose gradients it sends, over all layers."""
    passed, returned = [0] * len(blocks), [0] * len(blocks)
    num_earlier = sum(held_tokens(earlier))
    # documents beside a slice count from the start of their own
    slice_tokens = max((piece.stop for block in blocks for piece in block if not piece.document), default=0)
    longest = max(longest_document(blocks), num_earlier + slice_tokens)
    for window, num_layers in Counter(model.windows or (None,) * model.num_layers).items():
        if window and window < longest:
            keys = [(*before, *own) for before, own in zip(earlier, blocks, strict=True)]
            sent = [
                [0 if q is own else _seen_tokens(k, q, window, -num_earlier) for q in blocks]
                for k, own in zip(keys, blocks, strict=True)
            ]
            counts = [(sum(row), sum(column)) for row, column in zip(sent, zip(*sent, strict=True), strict=True)]
        else:
            # a block passes on keys and values of all blocks except its successor, and gradients of all except itself
            own_tokens = held_tokens(travelling_pieces(blocks))
            travelling = [sum(both) for both in zip(held_tokens(earlier), own_tokens, strict=True)]
            counts = [
                (sum(travelling) - travelling[(block + 1) % len(blocks)], sum(travelling) - own)
                for block, own in enumerate(travelling)
            ]
        for block, (keys, gradients) in enumerate(counts):
            passed[block] += num_layers * keys
            returned[block] += num_layers * gradients
    return passed, returned


def _seen_tokens(keys: tuple[Piece, ...], queries: tuple[Piece, ...], window: int, first: int) -> int:
    """Number of tokens of a block whose keys are seen through a window by the queries of another block.

    first: position of the first token of a document.
    """
    return sum(piece.num_tokens for piece in seen_pieces(keys, queries, lambda position: max(first, position - window + 1)))
