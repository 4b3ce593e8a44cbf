"""Attention of slices and rings whose lengths change in every step: results of plain matrices, and few new plans of cuDNN."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.measures.cudnn_plans import cudnn_on_the_cpu
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_longctx.plan.chunks import slice_bounds
from hf_longctx.plan.core import sharding
from hf_longctx.plan.core.sharding import HeadShare, Piece, block_pieces
from hf_longctx.plan.core.types import Chunk, GroupShape, Span
from hf_longctx.plan.model.attention_pairs import SpanRates
from hf_longctx.runtime.attention.chunk import ChunkAttention, Document
from hf_longctx.runtime.attention.context import visible_tiles
from hf_longctx.runtime.attention.heads import KVReaders
from hf_longctx.runtime.attention.kv_book import KVBook, Slice
from hf_longctx.runtime.attention.rows import AttentionRule, KeyPiece, merge_tile, no_keys_yet, rows_backward
from hf_longctx.runtime.tiles import cuda
from hf_longctx.runtime.tiles import tile as tile_module
from hf_longctx.runtime.tiles.patterns import Mask, PatternTile
from hf_longctx.runtime.tiles.plain import Scores
from hf_longctx.runtime.tiles.tile import BACKENDS

STEPS = 50
# values are compared at a 128th of the size
LEAST_PAIRS = cuda._LEAST_PAIRS // 128**2
HEADS, KV_HEADS, DIM = 2, 1, 8
RULE = AttentionRule(KVReaders.of(HeadShare(0, HEADS, 0, KV_HEADS), HEADS // KV_HEADS, torch.device("cpu")), Scores(0.3))
# seconds of Llama-3.1-8B on a device of 600 TFLOP/s
RATES = SpanRates(4 * 4096 * 32 / 6e14, 16e9 / 6e14)


@pytest.fixture
def small_steps() -> Iterator[None]:
    with patch.object(sharding, "LEAST_LENGTH_STEP", 1):
        yield


def inputs(num_tokens: int, device: str) -> list[Tensor]:
    """Gradient, q, k and v, tokens first in memory as projections leave them."""
    sizes = (HEADS, HEADS, KV_HEADS, KV_HEADS)
    if device == "meta":
        return [torch.empty(num_tokens, size, DIM, dtype=torch.bfloat16, device=device).transpose(0, 1) for size in sizes]
    generator = torch.Generator().manual_seed(num_tokens)
    return [torch.randn(num_tokens, size, DIM, generator=generator, dtype=torch.float64).transpose(0, 1) for size in sizes]


def in_slices(num_tokens: int, device: str = "cpu", slice_tokens: int = 64) -> list[Tensor]:
    """Output and gradients of a document in slices of equal time."""
    gradient, *tensors = inputs(num_tokens, device)
    leaves = [x.detach().requires_grad_() for x in tensors]
    book, outputs = KVBook(), []
    for start, stop in pairwise(slice_bounds(num_tokens, max(2, num_tokens // slice_tokens), RATES, rounds=True)):
        document = Document(0, stop - start, Slice(0, 0, start, stop, num_tokens))
        outputs.append(ChunkAttention(RULE, (document,), None, book, "layer")(*(x[:, start:stop] for x in leaves)))
    if not torch.is_grad_enabled():
        return outputs
    parts = gradient.transpose(0, 1).split([len(out) for out in outputs])
    for out, part in reversed(list(zip(outputs, parts, strict=True))):
        out.backward(part)
    return [torch.cat(outputs).detach().transpose(0, 1), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _mask(query: Piece, key: Piece) -> Mask:
    return "full" if query.start > key.start else "causal"


def in_a_ring(num_tokens: int, device: str = "cpu", slice_tokens: int = 0, num_blocks: int = 4) -> list[Tensor]:
    """Output and gradients of a document in the pieces of a ring, block after block."""
    gradient, q, k, v = inputs(num_tokens, device)
    blocks = block_pieces(Chunk(0, (Span(0, 0, num_tokens),)), GroupShape(num_blocks))
    places = [torch.cat([torch.arange(piece.start, piece.stop) for piece in block]) for block in blocks]
    out, (dq, dk, dv) = torch.zeros_like(q), (torch.zeros_like(x) for x in (q, k, v))
    for mine, own in enumerate(places):
        merged, lse = no_keys_yet(q[:, own], DIM)
        # heads first, as messages of a ring arrive
        keys = [(k[:, place].contiguous(), v[:, place].contiguous()) for place in places]
        tiles = [
            (source, query.tokens, PatternTile(slice(0, query.num_tokens), key.tokens, _mask(query, key)))
            for source in range(num_blocks)
            for query, key in visible_tiles(blocks[mine], blocks[source])
        ]
        for source, rows, tile in tiles:
            merge_tile(merged[:, rows], lse[:, rows], q[:, own][:, rows], KeyPiece(keys[source], (tile,)), tile, RULE)
        out[:, own] = merged
        for source, rows, tile in tiles if torch.is_grad_enabled() else ():
            sums = [torch.zeros_like(x) for x in keys[source]]
            row_inputs = [x[:, rows] for x in (gradient[:, own], q[:, own], merged, lse)]
            dq[:, own[rows]] += rows_backward(*row_inputs, (KeyPiece(keys[source], (tile,), sums),), RULE)
            for total, part in zip((dk, dv), sums, strict=True):
                total.index_add_(1, places[source], part)
    return [out, dq, dk, dv]


class Plans(TorchDispatchMode):
    """Collects what cuDNN makes a plan for: shapes and strides of queries, keys and values, and whether there is a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[Any] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator is torch.ops.aten._scaled_dot_product_cudnn_attention.default:
            self.found.add((*((x.shape, x.stride()) for x in args[:3]), args[6:7]))
        return operator(*args, **(kwargs or {}))


def new_plans(attend: Callable[[int], Any], least_tokens: int) -> list[int]:
    """Plans that each of 50 steps with a document of at least `least_tokens` tokens makes, with a long tail.

    Tensors have no values, only the shapes that a device would get.
    """
    rows = {row.name: row for row in BACKENDS}
    taking = tuple(replace(rows[name], takes=lambda *tile: True) for name in ("cudnn", "flash_attention_2", "plain"))
    found = []
    with patch.object(tile_module, "BACKENDS", taking), torch.no_grad(), Plans() as plans:
        for seed in range(STEPS):
            before, drawn = len(plans.found), math.exp(random.Random(seed).gauss(0.9, 0.6))
            attend(int(min(10, max(1, drawn)) * least_tokens))
            found.append(len(plans.found) - before)
    return found


@pytest.mark.parametrize("attend", [in_slices, in_a_ring])
def test_parts_of_tiles_have_the_results_of_plain_matrices(small_steps: None, attend: Any) -> None:
    for num_tokens in (384, 701):
        expected = attend(num_tokens)
        with cudnn_on_the_cpu(LEAST_PAIRS) as plans:
            found = attend(num_tokens)
        assert plans.num_layouts and not plans.misread
        for ours, plain in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-11)


@pytest.mark.wide
@pytest.mark.parametrize("attend,least_tokens,most", [(in_slices, 49_152, 7.0), (in_a_ring, 32_768, 2.0)])
def test_documents_of_skewed_lengths_need_few_new_plans(attend: Any, least_tokens: int, most: float) -> None:
    run = partial(attend, device="meta", slice_tokens=8192)
    found = new_plans(run, least_tokens)
    all_planned = patch.object(cuda, "_LEAST_PAIRS", 0)
    with patch.object(sharding, "LENGTHS_PER_OCTAVE", 2**30), patch.object(sharding, "LEAST_LENGTH_STEP", 1), all_planned:
        without = new_plans(run, least_tokens)
    print(f"{attend.__name__}: {sum(found) / STEPS} new plans per step, {sum(found[25:]) / 25} in the last half; "
          f"lengths as they are: {sum(without) / STEPS}, {sum(without[25:]) / 25}")  # fmt: skip
    assert sum(found[25:]) < min(25 * most, 0.5 * sum(without[25:]))
