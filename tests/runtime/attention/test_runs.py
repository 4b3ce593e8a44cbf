"""Short documents share attention calls: results are those of single documents, calls are few, and torch's schemas are kept."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from helpers.measures.flash_packs import FlashPacks, flash_on_the_cpu
from helpers.measures.masked_attention import SCALE, error_of, readers_of
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase
from helpers.plans.layouts import plan_of
from helpers.ranks.lone_steps import check_lone_step
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_longctx.plan.core import sharding
from hf_longctx.plan.core.sharding import PACKED_ROWS, PACKED_TOKENS
from hf_longctx.plan.core.types import TensorShare
from hf_longctx.runtime.activations.records import AttentionRecord
from hf_longctx.runtime.attention import chunk
from hf_longctx.runtime.attention.chunk import ChunkAttention, Document, documents_of, packed_runs
from hf_longctx.runtime.attention.kv_book import KVBook, Slice
from hf_longctx.runtime.attention.rows import AttentionRule
from hf_longctx.runtime.tiles import packs as packs_module
from hf_longctx.runtime.tiles import stacks
from hf_longctx.runtime.tiles.packs import PackBounds, PackInputs, pack_backward, pack_forward, takes_packs
from hf_longctx.runtime.tiles.patterns import CAUSAL, AttentionPattern
from hf_longctx.runtime.tiles.plain import Scores
from hf_longctx.runtime.tiles.stacks import StackChecks, stack_forward, stackable

# fp64 on both sides, sums of at most some 30 terms
TOLERANCE = 1e-12
BOUNDS = (0, 1, 10, 11, 12, 29, 30)
CUDA = torch.device("cuda")


@pytest.fixture
def flash() -> Iterator[FlashPacks]:
    with flash_on_the_cpu() as packs:
        yield packs


def results(
    bounds: PackBounds | None,
    heads: tuple[int, int, int],
    pattern: AttentionPattern,
    recompute: float | None = None,
    value_dim: int = 8,
    has_sinks: bool = False,
) -> list[Tensor]:
    """Output and gradients of packed documents. bounds: None for one call per document."""
    readers, generator = readers_of(*heads), torch.Generator().manual_seed(sum(heads))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    num_heads, num_tokens = heads[0] - heads[2], BOUNDS[-1]
    # tokens outermost, the memory layout of a model's projections
    q, k, v = (
        draw(num_tokens, num, size).transpose(0, 1).requires_grad_()
        for num, size in ((num_heads, 8), (readers.num_kv, 8), (readers.num_kv, value_dim))
    )
    sinks = draw(num_heads).requires_grad_() if has_sinks else None
    record = None if recompute is None else AttentionRecord(TensorShare("attention_output", recompute, device=1 - recompute))
    rule = AttentionRule(readers, Scores(SCALE), pattern, bounds=bounds, stacks=StackChecks())
    attend = ChunkAttention(rule, documents_of(BOUNDS, ()), record, KVBook(), "layer")
    output = attend(q, k, v, sinks)
    if record is not None:
        record.is_replay = True
        output = attend(q, k, v, sinks)
    leaves = [q, k, v, *([] if sinks is None else [sinks])]
    return [output, *torch.autograd.grad(output, leaves, draw(num_tokens, num_heads, value_dim))]


PATTERNS = [CAUSAL, *(AttentionPattern(window=size) for size in (1, 5, 40)), AttentionPattern(chunk=4)]


@pytest.mark.parametrize("heads", [(2, 2, 0), (4, 2, 0), (3, 1, 0), (6, 2, 2), (4, 2, 1)], ids=str)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_one_call_is_every_document_on_its_own(flash: FlashPacks, heads: tuple[int, int, int], pattern: AttentionPattern) -> None:
    found, expected = results(PackBounds(), heads, pattern), results(None, heads, pattern)
    if pattern.window == 1:
        # a token that sees itself alone has a weight of 1 whatever its query and key are: no gradient but rounding
        assert max(float(gradient.abs().max()) for gradient in (*found[1:3], *expected[1:3])) <= TOLERANCE
        del found[1:3], expected[1:3]
    assert error_of(found, expected) <= TOLERANCE
    assert len(flash.forwards) == len(flash.backwards) == 1
    if not pattern.chunk:
        assert flash.forwards == [[stop - start for start, stop in pairwise(BOUNDS)]]


@pytest.mark.parametrize("recompute", [0.0, 0.1, 0.4, 1.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("value_dim", [8, 6, 11])
def test_records_sinks_and_values_of_another_size(flash: FlashPacks, recompute: float, has_sinks: bool, value_dim: int) -> None:
    for pattern in (CAUSAL, AttentionPattern(window=5)):
        arguments = ((4, 2, 0), pattern, recompute, value_dim, has_sinks)
        assert error_of(results(PackBounds(), *arguments), results(None, *arguments)) <= TOLERANCE
    # the first run computes everything, its replay the first rows
    replayed = [round(30 * recompute)] if recompute else []
    assert [sum(lengths) for lengths in flash.forwards] == 2 * [30, *replayed]


def test_the_comparison_notices_a_window_that_is_one_token_off(flash: FlashPacks) -> None:
    pattern = AttentionPattern(window=5)
    expected = results(None, (4, 2, 0), pattern)
    with patch.object(PackInputs, "windows", {"window_size_left": 5, "window_size_right": 0}):
        found = results(PackBounds(), (4, 2, 0), pattern)
    assert min(error_of([ours], [theirs]) for ours, theirs in zip(found, expected, strict=True)) > 1e-3


def test_boundaries_are_made_once_for_all_layers(flash: FlashPacks) -> None:
    bounds = PackBounds()
    for _ in range(3):
        results(bounds, (4, 2, 0), CAUSAL)
    assert list(bounds.known) == [BOUNDS]


@pytest.mark.parametrize("heads", [(2, 2, 0), (4, 2, 0), (6, 2, 2), (4, 2, 1)], ids=str)
@pytest.mark.parametrize("recompute", [None, 0.0, 0.3, 1.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_documents_of_one_length_share_a_call(
    flash: FlashPacks, heads: tuple[int, int, int], recompute: float | None, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "BOUNDS", (0, 9, 19, 30, 42, 45, 65, 83, 84))
    monkeypatch.setattr(sharding, "LEAST_LENGTH_STEP", 4)
    for module in (chunk, stacks):
        monkeypatch.setattr(module, "PACKED_TOKENS", 4)
    calls: list[list[int]] = []

    def forward(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scores: Scores) -> tuple[Tensor, Tensor]:
        calls.append(lengths)
        return stack_forward(q, k, v, lengths, scores)

    monkeypatch.setattr(chunk, "stack_forward", forward)
    monkeypatch.setattr(chunk, "stack_counts", lambda q, k, v, lengths, scores, checks: stackable(lengths, lambda num_tokens: 4))
    arguments = heads, CAUSAL, recompute, 8, has_sinks
    assert error_of(results(PackBounds(), *arguments), results(None, *arguments)) <= TOLERANCE
    stacked = [[9, 10, 11, 12], [20, 18]]
    # a replay of the first rows reaches the first stack, of which it needs two documents and a part
    assert calls == (stacked * 2 if recompute == 1.0 else stacked)
    calls.clear()
    results(PackBounds(), heads, AttentionPattern(window=5))
    assert not calls


def test_runs_by_hand() -> None:
    packed = [100, *[2048] * 7, 1]
    lengths = [2049, *packed, 2000, 9000, 30, 30]
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    documents = [Document(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    # a slice between short documents
    last = len(documents) - 2
    documents[last] = Document(documents[last].start, documents[last].stop, Slice(last, 0, 0, 30, 90))
    runs = [([each.num_tokens for each in run.documents], run.is_packed) for run in packed_runs(documents)]
    # with 128 rows more for each document these are 15,589 rows, and 2000 tokens more would be 17,717
    assert runs == [([2049], False), (packed, True), ([2000], True), ([9000], False), ([30], False), ([30], True)]
    assert packed_runs(documents)[1].lengths(2049 + 104) == [100, 4]


def test_a_run_of_short_documents_has_a_bounded_number_of_rows() -> None:
    documents = [Document(start, start + 1) for start in range(1000)]
    runs = packed_runs(documents)
    assert {len(run.documents) for run in runs[:-1]} == {PACKED_ROWS // 129} and sum(len(run.documents) for run in runs) == 1000
    assert PACKED_TOKENS + 128 <= PACKED_ROWS


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_step_of_packed_rows_is_one_plain_process(flash: FlashPacks, family: str, checkpointed: bool) -> None:
    lengths = [31, 13, 7, 1, 1]
    plan, rows = plan_of([[(1, tuple(range(len(lengths))))]], lengths, 1), random_rows(lengths)
    case = ModelCase(family, promoted=True)
    check_lone_step(case, plan, rows)
    # one call per layer, forward and backward
    assert len(flash.forwards) == len(flash.backwards) == 2
    assert {sum(each) for each in (*flash.forwards, *flash.backwards)} == {sum(lengths)}


DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_kv", [8, 2])
@pytest.mark.parametrize("window", [0, 16])
def test_the_operators_take_and_return_what_torch_declares(dtype: torch.dtype, num_kv: int, window: int) -> None:
    for device, mode in (("cuda", FakeTensorMode()), ("meta", nullcontext())):
        with mode:
            for is_tokens_first in (True, False):
                shapes = ((8, 130), (8, 130), (num_kv, 130), (num_kv, 130))
                gradient, q, k, v = (
                    torch.empty(130, num, 64, dtype=dtype, device=device).transpose(0, 1)
                    if is_tokens_first
                    else torch.empty(num, 130, 64, dtype=dtype, device=device)
                    for num, _ in shapes
                )
                pack = PackInputs(q, k, v, torch.empty(4, dtype=torch.int32, device=device), 100, SCALE, window)
                out, lse = pack_forward(pack)
                assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, dtype, (8, 130), torch.float32)
                # no copy where tokens come first, and none of the output that a model then joins
                assert out.transpose(0, 1).is_contiguous() == is_tokens_first
                found = pack_backward(gradient, pack, out, lse)
                assert [x.shape for x in found] == [q.shape, k.shape, v.shape] and {x.dtype for x in found} == {dtype}
                assert {x.device.type for x in (out, lse, *found)} == {device}


@pytest.mark.parametrize(
    "capability,dtype,head_dim,is_taken",
    [
        ((9, 0), torch.bfloat16, 128, True),
        ((8, 0), torch.float16, 256, True),
        ((10, 0), torch.bfloat16, 64, True),
        ((8, 9), torch.bfloat16, 192, True),
        ((8, 9), torch.bfloat16, 256, False),
        ((12, 0), torch.bfloat16, 200, False),
        ((7, 5), torch.float16, 64, False),
        ((9, 0), torch.float32, 64, False),
        ((9, 0), torch.bfloat16, 60, False),
        ((9, 0), torch.bfloat16, 264, False),
    ],
)
def test_devices_and_heads_that_share_calls(
    capability: tuple[int, int], dtype: torch.dtype, head_dim: int, is_taken: bool
) -> None:
    with patch.object(packs_module, "device_capability", lambda device: capability):
        assert takes_packs(CUDA, dtype, head_dim, is_capped=False) == is_taken
        assert not takes_packs(CUDA, dtype, head_dim, is_capped=True)
        assert not takes_packs(torch.device("cpu"), dtype, head_dim, is_capped=False)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            assert not takes_packs(CUDA, dtype, head_dim, is_capped=False)
