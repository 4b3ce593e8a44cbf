"""Accumulated partial results against attention computed in one piece; the kernel against the reference."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from helpers.measures.triton_runs import compile_only, memory_instructions, needs_triton
from torch import Tensor

from hf_longctx.kernels import merge_attention as op
from hf_longctx.kernels.merge_attention import accumulate_attention_

# both sides work in fp64 on sums of at most a dozen terms
TOLERANCE = 1e-14

Result = tuple[Tensor, Tensor]


def attention(q_HTD: Tensor, k_HSD: Tensor, v_HSD: Tensor, visible_TS: Tensor) -> Result:
    """Output and LSE of attention over the visible keys; 0 and -inf for tokens that see none."""
    scores_HTS = (q_HTD @ k_HSD.transpose(1, 2)).masked_fill(~visible_TS, float("-inf"))
    is_blind_T1 = ~visible_TS.any(1, keepdim=True)
    weights_HTS = scores_HTS.masked_fill(is_blind_T1, 0.0).softmax(-1).masked_fill(is_blind_T1, 0.0)
    lse_HT = scores_HTS.masked_fill(is_blind_T1, 0.0).logsumexp(-1).masked_fill(is_blind_T1[:, 0], float("-inf"))
    return weights_HTS @ v_HSD, lse_HT


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def results_of(num_results: int, dtype: torch.dtype = torch.float64) -> list[Result]:
    """Random partial results of 2 heads, 5 tokens and head size 3."""
    wide = torch.promote_types(dtype, torch.float32)
    return [(random(2, 5, 3, seed=i).to(dtype), random(2, 5, seed=10 + i).to(wide)) for i in range(num_results)]


def nothing_yet(dtype: torch.dtype = torch.float64) -> Result:
    """An accumulator that has seen no key, with an uninitialised output."""
    return torch.full((2, 5, 3), float("nan"), dtype=dtype), torch.full((2, 5), float("-inf"), dtype=dtype)


def accumulated(results: list[Result], dtype: torch.dtype = torch.float64) -> Result:
    total = nothing_yet(dtype)
    for result in results:
        accumulate_attention_(*total, *result)
    return total


@pytest.mark.parametrize("bounds", [[0, 9], [0, 4, 9], [0, 0, 9], [0, 1, 2, 8, 9]], ids=str)
def test_accumulated_results_are_attention_over_all_keys(bounds: list[int]) -> None:
    num_heads, num_tokens, head_dim = 2, 5, 3
    # token t sees keys 0 to t + 1, except token 0, which sees none
    visible_TS = torch.ones(num_tokens, bounds[-1], dtype=torch.bool).tril(1)
    visible_TS[0] = False
    q, k, v = (random(num_heads, n, head_dim, seed=i) for i, n in enumerate((num_tokens, bounds[-1], bounds[-1])))
    pieces = [slice(start, stop) for start, stop in pairwise(bounds) if stop > start]
    found = accumulated([attention(q, k[:, keys], v[:, keys], visible_TS[:, keys]) for keys in pieces])
    for ours, expected in zip(found, attention(q, k, v, visible_TS), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=TOLERANCE)


def test_a_result_without_keys_is_ignored_whatever_it_holds() -> None:
    results = results_of(3)
    results[1][0][:, 2:], results[1][1][:, 2:] = float("nan"), float("-inf")
    found, expected = accumulated(results), accumulated([results[0], results[2]])
    for ours, without in zip(found, expected, strict=True):
        torch.testing.assert_close(ours[:, 2:], without[:, 2:], rtol=0, atol=TOLERANCE)


def test_without_any_key_the_output_is_zero() -> None:
    results = results_of(2)
    for _, lse in results:
        lse[0, 3] = float("-inf")
    out, lse = accumulated(results)
    assert (out[0, 3] == 0).all() and lse[0, 3] == float("-inf") and lse.isinf().sum() == 1
    assert not out.isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_half_precision_results_are_not_rounded_again(dtype: torch.dtype) -> None:
    results = results_of(3, dtype)
    exact = accumulated([(out.double(), lse.double()) for out, lse in results])
    for found, expected in zip(accumulated(results, torch.float32), exact, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_views_are_accumulated_in_place_and_nothing_else_changes(dtype: torch.dtype) -> None:
    results = results_of(4, dtype)
    results[2][1][1, 3] = float("-inf")
    wide = results[0][1].dtype
    expected, expected_lse = accumulated(results, wide)
    # the middle tokens of a longer row, and an output that nobody has written yet
    whole, whole_lse = torch.full((2, 9, 3), float("nan"), dtype=wide), torch.full((2, 9), float("-inf"), dtype=wide)
    out, lse = whole[:, 2:7], whole_lse[:, 2:7]
    for other, other_lse in results:
        accumulate_attention_(out, lse, other.transpose(0, 1).contiguous().transpose(0, 1), other_lse)
    eps = torch.finfo(out.dtype).eps
    torch.testing.assert_close(out, expected, rtol=8 * eps, atol=8 * eps)
    torch.testing.assert_close(lse, expected_lse, rtol=8 * eps, atol=8 * eps)
    assert whole[:, :2].isnan().all() and whole[:, 7:].isnan().all() and whole_lse.isinf().sum() == 8


def test_no_tokens_are_fine() -> None:
    out, lse = torch.zeros(2, 0, 3), torch.zeros(2, 0)
    accumulate_attention_(out, lse, out.clone(), lse.clone())
    assert out.shape == (2, 0, 3) and lse.shape == (2, 0)


@pytest.mark.daily("torch.float32")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_operator_keeps_the_rules_of_torch(dtype: torch.dtype) -> None:
    (out, lse), (other, other_lse) = results_of(2, dtype)
    torch.library.opcheck(op._accumulate, (out.float(), lse, other, other_lse))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda other, lse: (other[:, :2], lse), r"shape \[2, 2, 3\]"),
        (lambda other, lse: (other, lse.transpose(0, 1)), r"LSE of shape \[5, 2\]"),
    ],
)
def test_results_that_do_not_fit_are_named(change, message) -> None:
    own, other = results_of(2)
    with pytest.raises(ValueError, match=message):
        accumulate_attention_(*own, *change(*other))


def test_an_output_in_half_precision_is_refused() -> None:
    own, other = results_of(2, torch.bfloat16)
    with pytest.raises(ValueError, match="make both float32, or both float64"):
        accumulate_attention_(*own, *other)


@needs_triton
def test_the_kernel_compiles_for_hopper_with_wide_memory_access(monkeypatch: pytest.MonkeyPatch) -> None:
    ptx = compile_only(op, monkeypatch)
    out, lse = torch.zeros(4, 32, 128, dtype=torch.bfloat16), torch.zeros(4, 32)
    op.launch_accumulate(out.float(), lse, out, lse.clone())
    assert len(ptx) == 1
    for found in map(memory_instructions, ptx):
        # 16 bytes per instruction for outputs; LSEs are one value per token
        assert {kind.split(".")[0] for kind in found if kind.endswith("v4.b32")} == {"ld", "st"}, found
