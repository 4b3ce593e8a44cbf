"""Ring attention: exact at any degree, balanced in token pairs, computes no masked tile, sends each KV head once per hop.

Messages travel while tiles are computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.models.reference import TOLERANCE, random_rows, reference_step, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.layouts import LAYOUTS, plan_of
from helpers.plans.sliced_plans import cut
from helpers.ranks.rank_steps import check_layout_step
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.plan.core.sharding import block_pieces, slice_pieces
from hf_longctx.plan.core.types import Chunk, GroupShape, SequenceGroup, Span
from hf_longctx.runtime.attention import context
from hf_longctx.runtime.attention import rows as rows_module
from hf_longctx.runtime.attention.context import DirectBlocks, Ring, visible_tiles
from hf_longctx.runtime.attention.kv_book import slices_of
from hf_longctx.runtime.tiles import tile as tile_module
from hf_longctx.runtime.tiles.patterns import AttentionPattern, PatternTile

RINGS = {
    **{name: LAYOUTS[name] for name in LAYOUTS if any(d > 1 for mb in LAYOUTS[name][1] for d, _ in mb)},
    "<3,1> of three": (4, [[(3, (0, 1)), (1, (2,))], [(3, (3,)), (1, (4,))]], [43, 7, 11, 29, 3]),
}


@pytest.mark.daily("fewer tokens than ranks-llama")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", RINGS)
def test_ring_matches_one_plain_process(ranks, name: str, family: str) -> None:
    num_ranks, layout, lengths = RINGS[name]
    check_layout_step(ranks(num_ranks), ModelCase(family), layout, lengths, ulysses=1)


def test_ring_and_ulysses_stand_beside_each_other(ranks) -> None:
    num_ranks, layout, lengths = LAYOUTS["<4>,<2,2>,<1,1,1,1>"]
    check_layout_step(ranks(num_ranks), ModelCase(), layout, lengths, rings="second")


@pytest.mark.daily("1-1")
@pytest.mark.parametrize("num_heads,num_kv_heads", [(4, 1), (4, 4), (6, 2), (1, 1)])
def test_ring_asks_nothing_of_the_heads(ranks, num_heads: int, num_kv_heads: int) -> None:
    num_ranks, layout, lengths = RINGS["<4>"]
    check_layout_step(ranks(num_ranks), ModelCase(num_heads=num_heads, num_kv_heads=num_kv_heads), layout, lengths, ulysses=1)


def test_plain_matrices_match_too(ranks) -> None:
    num_ranks, layout, lengths = RINGS["<2>"]
    rows = random_rows(lengths)
    _, expected = reference_step(build_model(ModelCase()), rows)
    results = ranks(num_ranks).run(step_with_plain_blocks, plan_of(layout, lengths, num_ranks, 1), rows)
    for gradients in results:
        assert max(relative_error(gradients[name], expected[name]) for name in expected) <= TOLERANCE


def step_with_plain_blocks(plan: Any, rows: Any) -> dict[str, torch.Tensor]:
    """One step whose blocks run as on a device without the CPU's operator."""
    from helpers.ranks.rank_steps import step_on_rank

    from hf_longctx.plan.core.serialize import plan_to_json

    with patch.object(tile_module, "BACKENDS", tile_module.BACKENDS[-1:]):
        return step_on_rank(ModelCase(), plan_to_json(plan), rows)[1]


def unweighted_merge(out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
    # the output is uninitialised memory until the first tile is merged into it
    unfilled = torch.isneginf(lse).unsqueeze(-1)
    out.copy_(torch.where(unfilled, other, out + other))
    lse.copy_(torch.logaddexp(lse, other_lse))


PLANTED = {
    "wrong merge": (rows_module, "accumulate_attention_", unweighted_merge),
    "wrong zigzag order": (
        context,
        "visible_tiles",
        lambda queries, keys: [(q, k) for q in queries for k in keys if q.document == k.document and k.start >= q.start],
    ),
}


def step_with_bug(name: str, plan: Any, rows: Any) -> dict[str, torch.Tensor]:
    from helpers.ranks.rank_steps import step_on_rank

    from hf_longctx.plan.core.serialize import plan_to_json

    module, function, replacement = PLANTED[name]
    with patch.object(module, function, replacement):
        return step_on_rank(ModelCase(), plan_to_json(plan), rows)[1]


@pytest.mark.daily("wrong merge")
@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug_is_noticed(ranks, name: str) -> None:
    num_ranks, layout, lengths = RINGS["<2>"]
    rows = random_rows(lengths)
    _, expected = reference_step(build_model(ModelCase()), rows)
    for gradients in ranks(num_ranks).run(step_with_bug, name, plan_of(layout, lengths, num_ranks, 1), rows):
        assert max(relative_error(gradients[key], expected[key]) for key in expected) > 1e-3


class Recorded:
    """A message on its way that records when somebody waits for it."""

    def __init__(self, work: Any, events: list[str]) -> None:
        self.work, self.events = work, events

    def wait(self) -> None:
        self.events.append("wait")
        self.work.wait()


def recorded_step(plan: Any, rows: Any) -> list[str]:
    """Order in which a step on this rank posts messages, computes tiles and waits; repetitions count once."""
    from helpers.ranks.rank_steps import step_on_rank

    from hf_longctx.plan.core.serialize import plan_to_json

    events: list[str] = []
    batch, forward, backward = dist.batch_isend_irecv, rows_module.tile_forward, rows_module.tile_backward

    def post(operations: Any) -> list[Recorded]:
        events.append("post")
        return [Recorded(work, events) for work in batch(operations)]

    def computing(tile: Any) -> Any:
        return lambda *arguments: (events.append("compute"), tile(*arguments))[1]

    with (
        patch.object(dist, "batch_isend_irecv", post),
        patch.object(rows_module, "tile_forward", computing(forward)),
        patch.object(rows_module, "tile_backward", computing(backward)),
    ):
        step_on_rank(ModelCase(num_layers=1), plan_to_json(plan), rows)
    return [event for event, _ in itertools.groupby(events)]


def test_messages_travel_while_tiles_are_computed(ranks) -> None:
    lengths, hop = [67], ["post", "compute", "wait"]
    found = ranks(3).run(recorded_step, plan_of([[(3, (0,))]], lengths, 3, 1), random_rows(lengths))
    # the last gradients come home when all tiles are done
    assert found == [[*hop, *hop, "compute", *hop, *hop, *hop, "post", "wait"]] * 3


lengths_of_documents = st.lists(st.integers(1, 90), min_size=1, max_size=6)


@pytest.mark.quick
@settings(max_examples=50)
@given(lengths_of_documents, st.integers(2, 5))
def test_every_visible_pair_is_computed_once_and_no_masked_tile(lengths: list[int], degree: int) -> None:
    chunk = Chunk(0, tuple(Span(number, 0, length) for number, length in enumerate(lengths)))
    pieces = block_pieces(chunk, GroupShape(degree))
    seen = set()
    for queries in pieces:
        for keys in pieces:
            for query, key in visible_tiles(queries, keys):
                assert query in queries and key in keys
                tile = {
                    (query.document, i, j)
                    for i in range(query.start, query.stop)
                    for j in range(key.start, key.stop)
                    if query != key or j <= i
                }
                assert tile and not tile & seen
                assert all(j <= i for _, i, j in tile)
                seen |= tile
    expected = {(document, i, j) for document, length in enumerate(lengths) for i in range(length) for j in range(i + 1)}
    assert {pair for pair in seen if pair[0] < len(lengths)} == expected


def pairs_of(tile: PatternTile) -> Iterator[tuple[int, int]]:
    """Pairs of a row and a key of a tile."""
    for block in range(tile.num_blocks):
        for row, key in itertools.product(range(tile.num_rows), range(tile.keys.stop - tile.keys.start)):
            if tile.mask == "full" or (key <= row if tile.mask == "causal" else key >= row):
                yield tile.rows.start + block * tile.stride + row, tile.keys.start + block * tile.stride + key


def positions(pieces: Any) -> list[int]:
    """Positions in their document of the tokens of a tensor that consists of these pieces."""
    return [position for piece in pieces for position in range(piece.start, piece.stop)]


@pytest.mark.wide
@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=5), st.integers(2, 4), st.integers(0, 30), st.booleans())
def test_every_visible_pair_of_slices_is_computed_once(sizes: list[int], degree: int, window: int, needs_positions: bool) -> None:
    chunks = tuple(Chunk(index, (Span(*span),)) for index, span in enumerate(cut(0, sizes)))
    group, pattern = SequenceGroup(tuple(range(degree)), "ring", chunks, ()), AttentionPattern(window)
    held = slice_pieces(chunks, 0, degree)
    for chunk, index in itertools.product(chunks, range(degree)):
        (slice_,) = slices_of(group, chunk, index)
        pieces = block_pieces(chunk, group.shape)
        ring = Ring.of(None, index, tuple(range(degree)), pieces, slice_, held)
        own = [p for p in ring.pieces if p.document == 0]
        queries, seen = positions(own), []
        for block in range(degree):
            # dummy tokens are documents of their own
            others = (ring.direct(pattern) or DirectBlocks(ring.travelling, ())).incoming
            arriving = (ring.keys(pattern) if block == index else others)[block]
            keys = positions(p for p in arriving if p.document == 0)
            assert all(p.first == first for p, first in zip(arriving, held_before(arriving), strict=True))
            for query, key in ring.tiles(block, pattern, needs_positions):
                if query.document == 0:
                    tiles = pattern.tiles(query.start, query.num_tokens, key.start, key.num_tokens)
                    pairs = (pair for tile in tiles for pair in pairs_of(tile))
                    seen += [(queries[query.first + i], keys[key.first + j]) for i, j in pairs]
        assert len(seen) == len(set(seen))
        assert set(seen) == {(i, j) for i in queries for j in range(pattern.first_seen(i), i + 1)}


def held_before(pieces: Any) -> list[int]:
    """Tokens before each piece of a tensor."""
    return [0, *itertools.accumulate(piece.num_tokens for piece in pieces)][: len(pieces)]
