"""Tiles: every backend gives the output, LSE and gradients of plain matrices; CUDA operators are called as torch declares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.measures.allocations import measure
from helpers.measures.cudnn_plans import cudnn_on_the_cpu
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_longctx.plan.core import sharding
from hf_longctx.runtime.tiles import cuda, plain
from hf_longctx.runtime.tiles import tile as tile_module
from hf_longctx.runtime.tiles.plain import Scores, TileDropout, TileInputs, WeightDropout
from hf_longctx.runtime.tiles.tile import (
    BACKENDS,
    accepting,
    attention_backend,
    choose_backend,
    first_of,
    tile_backward,
    tile_forward,
)

SCALE = 0.3
SCORES = Scores(SCALE)
HALF = [torch.bfloat16, torch.float16]
HOPPER, AMPERE, TURING = (9, 0), (8, 0), (7, 5)


@pytest.fixture(autouse=True)
def cudnn_is_installed() -> Iterator[None]:
    with patch.object(cuda, "cudnn_version", lambda: 91600):
        yield


def tile(num_queries: int, num_keys: int, dtype: torch.dtype, num_kv: int = 6) -> list[Tensor]:
    """Gradient, q, k and v of one tile of six query heads of size 8."""
    generator = torch.Generator().manual_seed(num_queries * num_keys)
    sizes = ((6, num_queries), (6, num_queries), (num_kv, num_keys), (num_kv, num_keys))
    return [torch.randn(*size, 8, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def run(tensors: list[Tensor], causal: bool, backend: str = "", scores: Scores = SCORES) -> list[Tensor]:
    """Output, LSE and gradients of a tile; the gradients as if another tile had been merged in."""
    gradient, q, k, v = tensors
    inputs = TileInputs(q, k, v, scores, causal)
    out, lse = tile_forward(inputs, backend)
    # merging raises the LSE and changes the output
    merged_out, merged_lse = (out * 0.7 + 0.1).to(q.dtype), lse + 0.3
    return [out, lse, *tile_backward(gradient, inputs, merged_out, merged_lse, backend)]


TILES = [(7, 7, True), (7, 7, False), (1, 1, True), (5, 9, False), (9, 1, False)]
DTYPES = [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]


@pytest.mark.parametrize("num_queries,num_keys,causal", TILES)
@pytest.mark.parametrize("dtype,tolerance", DTYPES, ids=str)
@pytest.mark.parametrize("num_kv", [1, 2, 6])
def test_operator_of_the_cpu_is_plain_matrices(
    num_queries: int, num_keys: int, causal: bool, dtype: torch.dtype, tolerance: float, num_kv: int
) -> None:
    tensors = tile(num_queries, num_keys, dtype, num_kv)
    assert attention_backend(tensors[1].device, dtype, 8) == "cpu_flash"
    found, forced = run(tensors, causal), run(tensors, causal, "cpu_flash")
    assert all(torch.equal(x, y) for x, y in zip(found, forced, strict=True))
    for ours, expected in zip(found, run(tensors, causal, "plain"), strict=True):
        torch.testing.assert_close(ours.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_queries,num_keys,causal", TILES)
@pytest.mark.parametrize("backend", ["cpu_flash", "plain"])
@pytest.mark.parametrize("num_kv", [1, 2, 3])
def test_grouped_heads_are_heads_that_are_repeated(
    num_queries: int, num_keys: int, causal: bool, backend: str, num_kv: int
) -> None:
    gradient, q, k, v = tile(num_queries, num_keys, torch.float64, num_kv)
    found = run([gradient, q, k, v], causal, backend)
    repeated = [gradient, q, *(x.repeat_interleave(6 // num_kv, 0) for x in (k, v))]
    out, lse, dq, *per_head = run(repeated, causal, backend)
    folded = [x.unflatten(0, (num_kv, -1)).sum(1) for x in per_head]
    for ours, expected in zip(found, [out, lse, dq, *folded], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("softcap", [0.0, 0.7])
def test_plain_matrices_are_autograd_over_one_softmax(softcap: float) -> None:
    gradient, *inputs = tile(6, 6, torch.float64)
    q, k, v = (x.requires_grad_() for x in inputs)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    scores = q @ k.transpose(1, 2) * SCALE
    scores = softcap * (scores / softcap).tanh() if softcap else scores
    expected = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
    expected.backward(gradient)
    detached = TileInputs(q.detach(), k.detach(), v.detach(), Scores(SCALE, softcap), True)
    out, lse = tile_forward(detached, "plain")
    found = tile_backward(gradient, detached, out, lse, "plain")
    torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-12)
    for ours, leaf in zip(found, (q, k, v), strict=True):
        torch.testing.assert_close(ours, leaf.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_queries,num_keys,causal", TILES)
@pytest.mark.parametrize("num_kv", [2, 6])
@pytest.mark.parametrize("softcap", [0.0, 0.7])
def test_blocks_of_queries_are_one_matrix(num_queries: int, num_keys: int, causal: bool, num_kv: int, softcap: float) -> None:
    tensors, scores = tile(num_queries, num_keys, torch.float64, num_kv), Scores(SCALE, softcap)
    whole = run(tensors, causal, "plain", scores)
    # three rows at a time, over all heads
    most, scored, sizes = 3 * 6 * num_keys + 1, plain._scored, []

    def counted(*arguments: Any) -> Any:
        found = scored(*arguments)
        sizes.append(found[0].numel())
        return found

    with patch.object(plain, "_BLOCK_VALUES", most), patch.object(plain, "_scored", counted):
        blocks = run(tensors, causal, "plain", scores)
    assert max(sizes) <= most
    for found, expected in zip(blocks, whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("causal", [False, True])
def test_capped_scores_take_three_matrices_of_a_block(causal: bool) -> None:
    gradient, q, k, v = tile(200, 200, torch.float32, 2)
    scores, block_bytes = Scores(SCALE, 0.7), 6 * 200 * 40 * 4
    with patch.object(plain, "_BLOCK_VALUES", block_bytes // 4):
        inputs = TileInputs(q, k, v, scores, causal)
        out, lse = tile_forward(inputs)
        forward, _, _ = measure(lambda: tile_forward(inputs))
        backward, _, _ = measure(lambda: tile_backward(gradient, inputs, out, lse))
    # three matrices of a block, the results, and copies of a block's inputs
    assert 2.5 * block_bytes <= min(forward, backward) <= max(forward, backward) <= 3 * block_bytes + 3 * q.nbytes


def test_a_softcap_is_computed_by_a_backend_that_supports_it() -> None:
    assert attention_backend(torch.device("cpu"), torch.float32, 8, is_capped=True) == "plain"
    assert choose_backend("cuda", HOPPER, torch.bfloat16, 64, is_capped=True).name == "plain"
    _, q, k, v = tile(3, 3, torch.float32)
    with pytest.raises(ValueError, match="attention backend 'cpu_flash' does not support capped scores"):
        tile_forward(TileInputs(q, k, v, Scores(SCALE, 0.7), True), "cpu_flash")


@pytest.mark.parametrize("num_queries,num_keys,causal", [(16, 16, True), (16, 24, False), (1, 24, False), (16, 2, False)])
@pytest.mark.parametrize("backend", ["cudnn", "flash_attention_2"])
@pytest.mark.parametrize("num_kv", [1, 2, 8])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_operators_of_cuda_are_called_as_torch_declares_them(
    num_queries: int, num_keys: int, causal: bool, backend: str, num_kv: int, dtype: torch.dtype
) -> None:
    # fake and meta tensors run no kernel: they check names, number and types of arguments, and give shapes and dtypes
    for device, mode in (("cuda", FakeTensorMode()), ("meta", nullcontext())):
        with mode:
            # tokens outermost: the memory layout of the K/V book and of heads received from other ranks
            gradient, q = (torch.empty(num_queries, 8, 64, dtype=dtype, device=device).transpose(0, 1) for _ in range(2))
            k, v = (torch.empty(num_keys, num_kv, 64, dtype=dtype, device=device).transpose(0, 1) for _ in range(2))
            inputs = TileInputs(q, k, v, SCORES, causal)
            out, lse = tile_forward(inputs, backend)
            assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, dtype, (8, num_queries), torch.float32)
            if device == "meta":
                # backward gets the LSE as a view of a whole row's; fake tensors on CUDA cannot make such strides without CUDA
                lse = torch.empty(8, num_queries + 5, device=device)[:, 5:]
            found = tile_backward(gradient, inputs, out, lse, backend)
            assert [x.shape for x in found] == [q.shape, k.shape, v.shape]
            assert {x.device.type for x in (out, lse, *found)} == {device}


class Calls(TorchDispatchMode):
    """Collects the calls of attention operators, with their arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, Any]] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in operator.name():
            # torch leaves out arguments that equal their default
            call = {argument.name: argument.default_value for argument in operator._schema.arguments}
            self.found.append(call | dict(zip(call, args, strict=False)) | (kwargs or {}))
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", ["cudnn", "flash_attention_2"])
@pytest.mark.parametrize("causal", [False, True])
def test_arguments_of_operators_of_cuda_are_at_their_places(backend: str, causal: bool) -> None:
    gradient, q, out = (torch.empty(8, 16, 64, dtype=torch.bfloat16, device="meta") for _ in range(3))
    k, v = (torch.empty(2, 16 if causal else 24, 64, dtype=torch.bfloat16, device="meta") for _ in range(2))
    lse = torch.empty(8, 16, device="meta")
    inputs = TileInputs(q, k, v, SCORES, causal)
    with Calls() as calls:
        tile_forward(inputs, backend)
        tile_backward(gradient, inputs, out, lse, backend)
    forward, backward = calls.found
    tensors = {"query": q, "key": k, "value": v}
    for call, expected in (forward, tensors), (backward, tensors | {"grad_out": gradient, "out": out, "logsumexp": lse}):
        for name, tensor in expected.items():
            assert call[name]._base is tensor, name
        assert (call["is_causal"], call["dropout_p"], call["scale"]) == (causal, 0.0, SCALE)
    assert (backward["max_q"], backward["max_k"], backward["cum_seq_q"], backward["cum_seq_k"]) == (16, k.shape[1], None, None)
    assert backward["logsumexp"].shape == ((1, 8, 16, 1) if backend == "cudnn" else (1, 8, 16))
    if backend == "cudnn":
        assert (forward["attn_bias"], forward["compute_log_sumexp"], backward["attn_bias"]) == (None, True, None)


@pytest.mark.parametrize(
    "capability,dtype,head_dim,backend",
    [
        (HOPPER, torch.bfloat16, 128, "cudnn"),
        (HOPPER, torch.float16, 8, "cudnn"),
        ((10, 3), torch.bfloat16, 64, "cudnn"),
        ((12, 0), torch.bfloat16, 64, "flash_attention_2"),
        (HOPPER, torch.bfloat16, 136, "flash_attention_2"),
        (HOPPER, torch.bfloat16, 256, "flash_attention_2"),
        (AMPERE, torch.bfloat16, 128, "flash_attention_2"),
        ((8, 9), torch.float16, 64, "flash_attention_2"),
        (HOPPER, torch.float32, 128, "plain"),
        (HOPPER, torch.float64, 128, "plain"),
        (HOPPER, torch.bfloat16, 60, "plain"),
        (HOPPER, torch.bfloat16, 512, "plain"),
        (TURING, torch.float16, 64, "plain"),
    ],
)
def test_the_first_backend_that_accepts_a_tile_computes_it(
    capability: tuple[int, int], dtype: torch.dtype, head_dim: int, backend: str
) -> None:
    assert choose_backend("cuda", capability, dtype, head_dim).name == backend


def test_a_tile_of_one_key_is_none_for_cudnn() -> None:
    assert choose_backend("cuda", HOPPER, torch.bfloat16, 64, num_keys=1).name == "flash_attention_2"


def test_torch_s_own_switches_keep_cudnn_out() -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert choose_backend("cuda", HOPPER, torch.bfloat16, 64).name == "flash_attention_2"
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    torch.use_deterministic_algorithms(True)
    try:
        assert choose_backend("cuda", HOPPER, torch.bfloat16, 64).name == "flash_attention_2"
    finally:
        torch.use_deterministic_algorithms(False)
    assert choose_backend("cuda", HOPPER, torch.bfloat16, 64).name == "cudnn"


def test_a_cudnn_with_wrong_results_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in (0, 90501, 91500):
        with patch.object(cuda, "cudnn_version", lambda version=version: version):
            assert choose_backend("cuda", HOPPER, torch.bfloat16, 64).name == "flash_attention_2"
    # its LSE would have another layout
    monkeypatch.setenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")
    assert choose_backend("cuda", HOPPER, torch.bfloat16, 64).name == "flash_attention_2"


def in_layout(x_HTD: Tensor, tokens_first: bool) -> Tensor:
    return x_HTD.transpose(0, 1).contiguous().transpose(0, 1) if tokens_first else x_HTD.contiguous()


def test_layouts_of_output_and_gradient_do_not_change_what_cudnn_computes() -> None:
    tensors = tile(7, 7, torch.float64, 2)
    inputs = TileInputs(*tensors[1:], SCORES, True)
    out, lse = tile_forward(inputs)
    expected = tile_backward(tensors[0], inputs, out, lse, "plain")
    with cudnn_on_the_cpu() as plans:
        torch.testing.assert_close(tile_forward(inputs)[0], out, rtol=1e-13, atol=1e-13)
        for layouts in ((False, False), (True, False), (False, True), (True, True)):
            gradient, merged = (in_layout(x, layout) for x, layout in zip((tensors[0], out), layouts, strict=True))
            for ours, plain_one in zip(tile_backward(gradient, inputs, merged, lse), expected, strict=True):
                torch.testing.assert_close(ours, plain_one, rtol=1e-12, atol=1e-12)
    assert (plans.calls, plans.misread) == (5, 0)


@pytest.fixture
def few_lengths() -> Iterator[None]:
    """Plans of cuDNN for 24, 28, 32, 40, 48, 56 and 64 tokens between 20 and 64."""
    with patch.object(sharding, "LEAST_LENGTH_STEP", 4), patch.object(sharding, "LENGTHS_PER_OCTAVE", 4):
        yield


@pytest.mark.parametrize("num_kv", [2, 6])
def test_causal_tiles_of_many_lengths_have_few_plans_and_the_results_of_plain_matrices(few_lengths: None, num_kv: int) -> None:
    with cudnn_on_the_cpu() as plans:
        for num_tokens in range(21, 53):
            for is_tokens_first in (True, False):
                tensors = [in_layout(x, is_tokens_first) for x in tile(num_tokens, num_tokens, torch.float64, num_kv)]
                for ours, plain_one in zip(run(tensors, True, "cudnn"), run(tensors, True, "plain"), strict=True):
                    torch.testing.assert_close(ours, plain_one, rtol=1e-12, atol=1e-12)
        # six lengths in two layouts
        assert (len(plans.layouts), plans.misread) == (12, 0)


def test_queries_of_tiles_without_a_mask_are_filled_up_and_their_keys_are_not(few_lengths: None) -> None:
    with cudnn_on_the_cpu() as plans:
        for num_queries in range(25, 29):
            tensors = tile(num_queries, 30, torch.float64, 2)
            for ours, plain_one in zip(run(tensors, False, "cudnn"), run(tensors, False, "plain"), strict=True):
                torch.testing.assert_close(ours, plain_one, rtol=1e-12, atol=1e-12)
        assert {(layout[0][0][2], layout[1][0][2]) for layout in plans.layouts} == {(28, 30)}


def test_heads_of_a_longer_chunk_have_the_plans_of_its_document(few_lengths: None) -> None:
    with cudnn_on_the_cpu() as plans:
        for num_others in (0, 5, 9):
            tensors = [x[:, : 28 if num_others else None] for x in tile(28 + num_others, 28 + num_others, torch.float64, 2)]
            for ours, plain_one in zip(run(tensors, True, "cudnn"), run(tensors, True, "plain"), strict=True):
                torch.testing.assert_close(ours, plain_one, rtol=1e-12, atol=1e-12)
        assert (len(plans.layouts), plans.misread) == (1, 0)


def test_tiles_that_repay_no_plan_go_to_an_operator_without_plans() -> None:
    def name(num_queries: int, num_keys: int, causal: bool, head_dim: int = 64) -> str:
        is_planned = cuda.repays_plan(num_queries, num_keys, causal)
        return first_of(accepting("cuda", HOPPER, torch.bfloat16, head_dim, num_keys), is_planned).name

    assert [name(n, n, True) for n in (2047, 2048, 9001)] == ["flash_attention_2", "cudnn", "cudnn"]
    assert [name(4096, n, False) for n in (4096, 8191, 8192, 8193)] == ["flash_attention_2"] * 2 + ["cudnn", "flash_attention_2"]
    # if there is no such operator, any plan is better than plain matrices
    flash = next(row for row in BACKENDS if row.name == "flash_attention_2")
    without = tuple(replace(row, takes=lambda *tile: False) if row is flash else row for row in BACKENDS)
    with patch.object(tile_module, "BACKENDS", without):
        assert (name(16, 16, True), name(16, 16, True, head_dim=256)) == ("cudnn", "plain")


def test_lengths_of_plans_by_hand() -> None:
    lengths = (1, 2048, 2049, 8192, 8193, 9000, 131_073)
    assert [cuda.planned_tokens(length) for length in lengths] == [1, 2048, 2176, 8192, 8448, 9216, 135_168]
    found = {cuda.planned_tokens(n) for n in range(8193, 2**17 + 1)}
    assert len(found) == 4 * 32 and all(n <= cuda.planned_tokens(n) <= n * 17 / 16 for n in range(2048, 40_000))
    lengths = (0, 127, 128, 2047, 2048, 8703, 8704, 131_071, 139_263)
    assert [cuda.planned_keys(length) for length in lengths] == [0, 0, 128, 1920, 2048, 8192, 8704, 126_976, 131_072]
    # every second length to which queries are filled up is one at which keys are split
    assert {cuda.planned_keys(n) for n in range(8192, 2**17 + 1)} == {8192, *sorted(found)[1::2]}
    assert all(n * 15 / 16 <= cuda.planned_keys(n) <= n for n in range(2048, 40_000))


@pytest.mark.parametrize("num_kv", [1, 2, 6])
def test_heads_beyond_the_grid_of_a_kernel_are_computed_in_parts(num_kv: int) -> None:
    gradient, *qkv = tile(5, 5, torch.float64, num_kv)
    inputs = TileInputs(*qkv, SCORES, True)
    expected = (*tile_forward(inputs), *tile_backward(gradient, inputs, *tile_forward(inputs)))
    # two heads at a time, but never less than those that read one KV head
    with patch.object(tile_module, "MOST_HEADS", max(2, 6 // num_kv)):
        out, lse = tile_forward(inputs)
        found = (out, lse, *tile_backward(gradient, inputs, out, lse))
    for ours, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("backend", ["cpu_flash", "plain"])
@pytest.mark.parametrize("num_kv,most,calls", [(1, 1, 6), (1, 2, 3), (2, 2, 6), (2, 4, 2), (6, 4, 2), (6, 1, 6), (2, 6, 1)])
@pytest.mark.parametrize("num_queries,num_keys,causal", [(7, 7, True), (5, 9, False)])
def test_a_long_backward_takes_few_heads_at_once(
    num_queries: int, num_keys: int, causal: bool, num_kv: int, most: int, calls: int, backend: str
) -> None:
    tensors = tile(num_queries, num_keys, torch.float64, num_kv)
    expected = run(tensors, causal, backend)
    elements = patch.object(sharding, "PART_ELEMENTS", most * max(num_queries, num_keys) * 8)
    with elements, patch.object(tile_module, "_backward", wraps=tile_module._backward) as spied:
        found = run(tensors, causal, backend)
    assert spied.call_count == calls
    for ours, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("num_kv,most", [(1, 2), (2, 2), (6, 4)])
def test_few_heads_at_once_drop_the_weights_of_their_own_heads(num_kv: int, most: int) -> None:
    gradient, *qkv = tile(7, 7, torch.float64, num_kv)
    # the layer has two heads, so the tile has three blocks of a window
    drop = WeightDropout(0.5, 3, 1, (5,), first_head=0, num_heads=2)
    inputs = TileInputs(*qkv, SCORES, True, dropout=TileDropout(drop, 0, 0, 7, 7, num_blocks=3, stride=7))
    out, lse = tile_forward(inputs)
    expected = tile_backward(gradient, inputs, out, lse)
    with patch.object(sharding, "PART_ELEMENTS", most * 7 * 8):
        found = tile_backward(gradient, inputs, out, lse)
    for ours, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("device_type", ["cpu", "cuda", "meta"])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64], ids=str)
def test_every_tile_has_a_backend(device_type: str, dtype: torch.dtype) -> None:
    for capability in ((0, 0), TURING, AMPERE, HOPPER):
        for head_dim in (1, 60, 64, 512):
            for num_keys in (1, 2):
                assert choose_backend(device_type, capability, dtype, head_dim, num_keys) in BACKENDS


def test_an_unknown_backend_is_refused_by_name() -> None:
    _, q, k, v = tile(3, 3, torch.float32)
    with pytest.raises(
        ValueError,
        match=r"no attention backend 'xformers'; choose one of cudnn, flash_attention_2, flash_attn_4, .*, cpu_flash, plain",
    ):
        tile_forward(TileInputs(q, k, v, SCORES, True), "xformers")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("num_kv", [1, 2, 6])
def test_chosen_keys_are_a_mask_over_one_softmax(causal: bool, num_kv: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # several blocks of queries
    monkeypatch.setattr(plain, "_BLOCK_VALUES", 6 * 7 * 3)
    gradient, q, k, v = tile(7, 7, torch.float64, num_kv)
    # -1 and 9 are outside of the tile; the third query sees no key at all, twice the same key counts once
    chosen = torch.tensor([[0, -1, 3], [1, 1, 0], [-1, 9, -1], [2, 3, 0], [4, 0, -1], [5, 5, 5], [6, 0, 9]], dtype=torch.int32)
    inputs = TileInputs(q, k, v, SCORES, causal, chosen)
    out, lse = tile_forward(inputs)
    seen = torch.zeros(7, 7, dtype=torch.bool)
    for row, keys in enumerate(chosen.tolist()):
        seen[row, [key for key in keys if 0 <= key < 7 and (key <= row or not causal)]] = True
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    wide_k, wide_v = (x.repeat_interleave(6 // num_kv, 0) for x in leaves[1:])
    scores = (SCALE * leaves[0] @ wide_k.transpose(1, 2)).masked_fill(~seen, float("-inf"))
    weights = scores.softmax(-1).nan_to_num()
    expected = weights @ wide_v
    assert torch.allclose(out, expected, atol=1e-13) and not out[:, 2].any()
    assert torch.allclose(lse, scores.logsumexp(-1), atol=1e-13) and lse[:, 2].isneginf().all()
    # other tiles have given the third query keys
    merged = lse.clone()
    merged[:, 2] = 0.5
    found = tile_backward(gradient, inputs, out, merged)
    rows = [row for row in range(7) if row != 2]
    (expected[:, rows] * gradient[:, rows]).sum().backward()
    for gradient_of, leaf in zip(found, leaves, strict=True):
        assert torch.allclose(gradient_of, leaf.grad.nan_to_num(), atol=1e-13)
    with pytest.raises(ValueError, match="chosen keys"):
        tile_forward(inputs, "cpu_flash")
