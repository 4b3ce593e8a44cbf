"""Patterns: tiles cover every visible pair exactly once, and attention made of them equals one masked softmax, with gradients."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from helpers.measures.flash_packs import flash_on_the_cpu
from helpers.measures.masked_attention import HEAD_DIM, SCALE, error_of, masked_softmax, readers_of, visible
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_longctx.plan.core.settings import CPU_TILE_KEYS
from hf_longctx.plan.core.types import TensorShare
from hf_longctx.plan.model.attention_pairs import AttentionPairs, masked_keys
from hf_longctx.runtime.activations.records import AttentionRecord
from hf_longctx.runtime.attention.chunk import ChunkAttention, Document
from hf_longctx.runtime.attention.kv_book import KVBook, Slice
from hf_longctx.runtime.attention.rows import AttentionRule
from hf_longctx.runtime.tiles.packs import PackBounds
from hf_longctx.runtime.tiles.patterns import AttentionPattern, PatternTile
from hf_longctx.runtime.tiles.plain import Scores, TileInputs
from hf_longctx.runtime.tiles.tile import tile_forward

# fp64 on both sides, sums of at most some 50 terms
TOLERANCE = 1e-12
# softcap as large as typical scores, so that it bends many of them
SOFTCAP = 0.8


@pytest.fixture(autouse=True, scope="module")
def flash() -> Iterator[None]:
    with flash_on_the_cpu():
        yield


def times_seen(tiles: tuple[PatternTile, ...], num_queries: int, num_keys: int) -> Tensor:
    """Number of tiles that contain each query-key pair, [queries, keys]."""
    counts = torch.zeros(num_queries, num_keys, dtype=torch.int64)
    for tile in tiles:
        for block in range(tile.num_blocks):
            first_row, first_key = tile.rows.start + block * tile.stride, tile.keys.start + block * tile.stride
            square = torch.ones(tile.num_rows, tile.keys.stop - tile.keys.start, dtype=torch.int64)
            assert tile.mask == "full" or square.shape[0] == square.shape[1]
            square = square.tril() if tile.mask == "causal" else square.triu() if tile.mask == "reversed" else square
            counts[first_row : first_row + square.shape[0], first_key : first_key + square.shape[1]] += square
    return counts


patterns = st.one_of(
    st.integers(0, 9).map(lambda size: AttentionPattern(window=size)),
    st.integers(0, 9).map(lambda size: AttentionPattern(chunk=size)),
)


@settings(max_examples=300)
@given(patterns, st.integers(0, 20), st.integers(1, 24))
def test_tiles_of_tokens_among_themselves_have_each_visible_pair_once(
    pattern: AttentionPattern, start: int, num_tokens: int
) -> None:
    tokens = range(start, start + num_tokens)
    tiles = pattern.own_tiles(start, num_tokens)
    assert torch.equal(times_seen(tiles, num_tokens, num_tokens), visible(pattern, tokens, tokens).long())
    assert tiles[0].mask == "causal"


@settings(max_examples=300)
@given(patterns, st.integers(0, 20), st.integers(1, 24), st.integers(0, 20), st.integers(0, 20))
def test_tiles_of_earlier_keys_have_each_visible_pair_once(
    pattern: AttentionPattern, first_key: int, num_tokens: int, num_keys: int, gap: int
) -> None:
    start = first_key + num_keys + gap
    tiles = pattern.front_tiles(start, num_tokens, first_key, num_keys)
    expected = visible(pattern, range(start, start + num_tokens), range(first_key, first_key + num_keys)).long()
    assert torch.equal(times_seen(tiles, num_tokens, num_keys), expected)


def computed_pairs(tile: PatternTile, tile_keys: int) -> int:
    """Pairs that a device computes for a tile, hidden ones included: the keys of a row of a square up to a multiple of these."""
    num_keys = tile.keys.stop - tile.keys.start
    if tile.mask == "full":
        return tile.num_blocks * tile.num_rows * num_keys
    return tile.num_blocks * sum(min(num_keys, -(-row // tile_keys) * tile_keys) for row in range(1, num_keys + 1))


@given(st.integers(1, 90), st.integers(1, 6), st.integers(0, 89), st.sampled_from([1, 16, 64]))
def test_the_planner_counts_the_pairs_that_tiles_of_a_window_compute(window: int, blocks: int, rest: int, tile_keys: int) -> None:
    num_tokens = blocks * window + rest % window
    tiles = AttentionPattern(window=window).own_tiles(0, num_tokens)
    computed = sum(computed_pairs(tile, tile_keys) for tile in tiles)
    # the planner counts what squares on the diagonal hide as seconds per token, as in layers without a window
    squares = [tile for tile in tiles if tile.mask == "causal"]
    diagonal = sum(tile.num_blocks * tile.num_rows * masked_keys(tile.num_rows, tile_keys) for tile in squares)
    counted = AttentionPairs.of((window,), tile_keys).of_span(0, num_tokens) + diagonal
    # squares at the far side are a row shorter than the window; those of the rest have its size
    slack = 2 * num_tokens + (rest % window) * min(window, tile_keys) / 2
    assert abs(counted - computed) <= slack
    if not rest % window:
        one = PatternTile(slice(0, window), slice(0, window), "causal")
        assert counted == pytest.approx((2 * blocks - 1) * computed_pairs(one, tile_keys))


@pytest.mark.parametrize("num_tokens", [20, 600, 1100])
def test_the_operator_of_cpus_computes_as_many_keys_at_once_as_the_planner_counts(num_tokens: int) -> None:
    q, k, v = (torch.randn(1, num_tokens, 8) for _ in range(3))
    for key in (0, num_tokens // 2, num_tokens - 1):
        # a hidden pair has a weight of zero, which times this value is no number: so it shows in every row that computes the pair
        values = v.clone()
        values[:, key] = float("nan")
        out, _ = tile_forward(TileInputs(q, k, values, Scores(SCALE), causal=True), "cpu_flash")
        first = key // CPU_TILE_KEYS * CPU_TILE_KEYS
        assert out.isnan().any(2)[0].tolist() == [row >= first for row in range(num_tokens)]


@pytest.mark.parametrize("pattern", [AttentionPattern(window=16), AttentionPattern(chunk=16)])
def test_a_longer_document_has_no_more_tiles_but_more_blocks(pattern: AttentionPattern) -> None:
    short, long = pattern.own_tiles(0, 5 * 16 + 3), pattern.own_tiles(0, 500 * 16 + 3)
    assert len(short) == len(long) <= 6
    assert max(tile.num_blocks for tile in long) == 500


def test_a_pattern_has_a_window_or_chunks() -> None:
    with pytest.raises(ValueError, match="a window of 4 tokens and chunks of 8 tokens; only one of them is supported"):
        AttentionPattern(window=4, chunk=8)
    with pytest.raises(ValueError, match=r"AttentionPattern\(window=-1.* has a negative setting"):
        AttentionPattern(window=-1)


def tokens_held(pattern: AttentionPattern, cuts: list[int], num_forward: int, is_kept: bool, waiting: int | None) -> int:
    """Number of tokens whose keys and values, or their gradients, the K/V kv_book holds, by the definition.

    num_forward: slices that have run forward. is_kept: their backward runs without a replay. waiting: tokens before the slice
    that ran backward last, None before the first backward.
    """
    end = cuts[-1]

    def seen(keys: range, first_query: int) -> int:
        return int(visible(pattern, range(first_query, end), keys).any(0).sum()) if keys and first_query < end else 0

    stop = end if waiting is None else waiting
    slices = [one for one in list(pairwise(cuts))[:num_forward] if one[1] <= stop]
    if bool(visible(pattern, range(end - 1, end), range(1)).all()):
        gradients = 0 if waiting is None else cuts[-2]
        return (end if slices else 0) + (gradients if slices else 0)
    held = sum(last - first if is_kept else seen(range(first, last), last) for first, last in slices)
    return held + (seen(range(waiting), waiting) if waiting and slices else 0)


@pytest.mark.wide
@settings(max_examples=250)
@given(
    patterns,
    st.lists(st.integers(1, 17), min_size=1, max_size=4),
    st.lists(st.integers(1, 20), max_size=2),
    # query heads, KV heads, query heads of earlier ranks
    st.sampled_from([(1, 1, 0), (2, 2, 0), (4, 2, 0), (3, 1, 0), (4, 2, 1), (6, 2, 2), (4, 2, 3)]),
    st.sampled_from([None, 0.0, 0.4, 1.0]),
    st.booleans(),
    st.sampled_from([0.0, SOFTCAP]),
    st.sampled_from([HEAD_DIM, HEAD_DIM - 1, HEAD_DIM + 2]),
    # short documents share calls of an operator, which takes no capped scores
    st.booleans(),
)
def test_slices_and_documents_are_one_masked_softmax(
    pattern: AttentionPattern,
    sizes: list[int],
    lengths: list[int],
    heads: tuple[int, int, int],
    recompute: float | None,
    has_sinks: bool,
    softcap: float,
    value_dim: int,
    shares_calls: bool,
) -> None:
    num_heads, _, dropped = heads
    readers = readers_of(*heads)
    shapes = (num_heads - dropped, readers.num_kv, readers.num_kv)
    generator = torch.Generator().manual_seed(sum(sizes))

    def draw(num: int, num_tokens: int, size: int = HEAD_DIM) -> Tensor:
        return torch.randn(num, num_tokens, size, dtype=torch.float64, generator=generator)

    # a sequence in slices, the last of them packed with whole documents after it
    widths = (HEAD_DIM, HEAD_DIM, value_dim)
    sequence, *documents = (
        [draw(num, length, width).requires_grad_() for num, width in zip(shapes, widths, strict=True)]
        for length in (sum(sizes), *lengths)
    )
    sinks = torch.randn(shapes[0], dtype=torch.float64, generator=generator).requires_grad_() if has_sinks else None
    leaves = [leaf for one in (sequence, *documents) for leaf in one] + ([] if sinks is None else [sinks])
    gradient = draw(shapes[0], sum(sizes) + sum(lengths), value_dim).transpose(0, 1)
    expanded = ([q, *(x.index_select(0, readers.index) for x in kv)] for q, *kv in (sequence, *documents))
    expected = torch.cat([masked_softmax(*one, pattern, sinks, softcap) for one in expanded])
    expected_gradients = torch.autograd.grad(expected, leaves, gradient)

    bounds = PackBounds() if shares_calls and not softcap else None
    kv_book, runs, outputs = KVBook(), [], []
    token_bytes = 8 * readers.num_kv * (HEAD_DIM + value_dim)
    cuts = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    for start, stop in pairwise(cuts):
        row = [x[:, start:stop] for x in sequence]
        row_documents = [Document(0, stop - start, Slice(0, 0, start, stop, cuts[-1]))]
        if stop == cuts[-1]:
            for document in documents:
                row = [torch.cat(pair, dim=1) for pair in zip(row, document, strict=True)]
                row_documents.append(Document(row_documents[-1].stop, row[0].shape[1]))
        record = None if recompute is None else AttentionRecord(TensorShare("attention_output", recompute, device=1 - recompute))
        rule = AttentionRule(readers, Scores(SCALE, softcap), pattern, bounds=bounds)
        attend = ChunkAttention(rule, tuple(row_documents), record, kv_book, "layer")
        runs.append((attend, row, attend(*row, sinks)))
        assert kv_book.num_bytes == token_bytes * tokens_held(pattern, cuts, len(runs), record is None, None)
    found = [torch.zeros_like(leaf) for leaf in leaves]
    output_gradients = gradient.split([len(output) for _, _, output in runs])
    for (attend, row, output), own_gradient, start in zip(runs[::-1], output_gradients[::-1], cuts[-2::-1], strict=True):
        if attend.record is not None:
            attend.record.is_replay = True
            output = attend(*row, sinks)
        outputs.insert(0, output)
        added = torch.autograd.grad(output, leaves, own_gradient, allow_unused=True)
        found = [total if new is None else total + new for total, new in zip(found, added, strict=True)]
        assert kv_book.num_bytes == token_bytes * tokens_held(pattern, cuts, len(runs), attend.record is None, start)
    assert error_of([torch.cat(outputs), *found], [expected, *expected_gradients]) <= TOLERANCE


@settings(max_examples=100)
@given(patterns, st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_forwards_alone_hold_what_the_next_token_sees(pattern: AttentionPattern, sizes: list[int]) -> None:
    kv_book, cuts = KVBook(has_backward=False), [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    keys_1TD = torch.arange(float(cuts[-1])).view(1, -1, 1)
    for start, stop in pairwise(cuts):
        own = keys_1TD[:, start:stop]
        front = kv_book.write("layer", Slice(0, 0, start, stop, cuts[-1]), own, own, pattern, keeps_own=False)
        seen = visible(pattern, range(start, stop), range(start)).any(0) if start else torch.zeros(0, dtype=torch.bool)
        found = [key for run in front for key in run.kv_GUW[0, :, 0].tolist()]
        assert found == [float(key) for run in front for key in range(run.first, run.stop)] == seen.nonzero()[:, 0].tolist()
        is_whole = pattern.first_seen(cuts[-1] - 1) == 0
        left = 0 if stop == cuts[-1] else cuts[-1] if is_whole else stop - pattern.first_seen(stop)
        assert kv_book.num_bytes == 2 * 4 * left
