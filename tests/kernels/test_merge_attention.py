"""Merged parts against attention computed in one piece; the kernels against the reference."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from helpers.measures.triton_runs import compile_only, memory_instructions, needs_triton
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_longctx.kernels import merge_attention as op
from hf_longctx.kernels.merge_attention import accumulate_attention_, merge_attention

# both sides work in fp64 on sums of at most a dozen terms
TOLERANCE = 1e-14


def attention(q_HTD: Tensor, k_HSD: Tensor, v_HSD: Tensor, visible_TS: Tensor) -> tuple[Tensor, Tensor]:
    """Output and LSE of attention over the visible keys; 0 and -inf where there are none."""
    scores_HTS = (q_HTD @ k_HSD.transpose(1, 2)).masked_fill(~visible_TS, float("-inf"))
    is_blind_T1 = ~visible_TS.any(1, keepdim=True)
    weights_HTS = scores_HTS.masked_fill(is_blind_T1, 0.0).softmax(-1).masked_fill(is_blind_T1, 0.0)
    lse_HT = scores_HTS.masked_fill(is_blind_T1, 0.0).logsumexp(-1).masked_fill(is_blind_T1[:, 0], float("-inf"))
    return weights_HTS @ v_HSD, lse_HT


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def parts_of(num_parts: int, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], list[Tensor]]:
    wide = torch.promote_types(dtype, torch.float32)
    outputs = [random(2, 5, 3, seed=i).to(dtype) for i in range(num_parts)]
    return outputs, [random(2, 5, seed=10 + i).to(wide) for i in range(num_parts)]


@pytest.mark.parametrize("bounds", [[0, 9], [0, 4, 9], [0, 0, 9], [0, 1, 2, 8, 9]], ids=str)
def test_merged_parts_are_attention_over_all_keys_with_its_gradients(bounds: list[int]) -> None:
    num_heads, num_tokens, head_dim = 3, 6, 5
    # token t sees keys 0 to t + 1 but for token 0, which sees none
    visible_TS = torch.ones(num_tokens, bounds[-1], dtype=torch.bool).tril(1)
    visible_TS[0] = False
    weights = random(num_heads, num_tokens, head_dim, seed=7)
    gradients = []
    for is_merged in (False, True):
        lengths = (num_tokens, bounds[-1], bounds[-1])
        q, k, v = (random(num_heads, n, head_dim, seed=i).requires_grad_() for i, n in enumerate(lengths))
        if is_merged:
            pieces = [slice(start, stop) for start, stop in pairwise(bounds) if stop > start]
            parts = [attention(q, k[:, keys], v[:, keys], visible_TS[:, keys]) for keys in pieces]
            out, lse = merge_attention([part[0] for part in parts], [part[1] for part in parts])
        else:
            out, lse = attention(q, k, v, visible_TS)
        loss = (out * weights).sum() + (lse[:, 1:] ** 2).sum()
        gradients.append([out, lse, *torch.autograd.grad(loss, (q, k, v))])
    for expected, found in zip(*gradients, strict=True):
        # the gradients are sums of about a hundred terms
        torch.testing.assert_close(found, expected, rtol=0, atol=10 * TOLERANCE)


@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_gradients_are_those_of_finite_differences(num_parts: int) -> None:
    outputs, lses = parts_of(num_parts)
    inputs = [part.requires_grad_() for part in (*outputs, *lses)]
    assert torch.autograd.gradcheck(lambda *x: merge_attention(x[:num_parts], x[num_parts:]), inputs)


def test_a_part_without_keys_is_ignored_whatever_it_holds() -> None:
    outputs, lses = parts_of(3)
    outputs[1][:, 2:], lses[1][:, 2:] = float("nan"), float("-inf")
    results = []
    for chosen in ((0, 1, 2), (0, 2)):
        leaves = [part.clone().requires_grad_() for part in (*[outputs[i] for i in chosen], *[lses[i] for i in chosen])]
        out, lse = merge_attention(leaves[: len(chosen)], leaves[len(chosen) :])
        ((out[:, 2:] ** 2).sum() + (lse[:, 2:] ** 2).sum()).backward()
        results.append((out[:, 2:].detach(), lse[:, 2:].detach(), *(leaves[i].grad for i in (0, len(chosen) - 1))))
        if len(chosen) == 3:
            assert (leaves[1].grad == 0).all() and (leaves[4].grad == 0).all()
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_without_any_key_the_output_is_zero_and_no_gradient_is_nan() -> None:
    outputs, lses = parts_of(2)
    for lse in lses:
        lse[0, 3] = float("-inf")
    leaves = [part.requires_grad_() for part in (*outputs, *lses)]
    out, lse = merge_attention(outputs, lses)
    assert (out[0, 3] == 0).all() and lse[0, 3] == float("-inf") and lse.isinf().sum() == 1
    (out.sum() + lse.sum()).backward()
    for leaf in leaves:
        assert not leaf.grad.isnan().any() and (leaf.grad[0, 3] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_only_the_output_is_rounded(dtype: torch.dtype) -> None:
    outputs, lses = parts_of(3, dtype)
    out, lse = merge_attention(outputs, lses)
    exact, exact_lse = merge_attention([part.double() for part in outputs], [part.double() for part in lses])
    assert out.dtype == dtype and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_parts_accumulate_to_their_merge_in_any_memory(dtype: torch.dtype) -> None:
    outputs, lses = parts_of(4, dtype)
    lses[2][1, 3] = float("-inf")
    expected, expected_lse = merge_attention([part.to(lses[0].dtype) for part in outputs], lses)
    # the middle tokens of a longer row, and an output that nobody has written yet
    whole, whole_lse = (
        torch.full((2, 9, 3), float("nan"), dtype=lses[0].dtype),
        torch.full((2, 9), float("-inf"), dtype=lses[0].dtype),
    )
    out, lse = whole[:, 2:7], whole_lse[:, 2:7]
    for other, other_lse in zip(outputs, lses, strict=True):
        accumulate_attention_(out, lse, other.transpose(0, 1).contiguous().transpose(0, 1), other_lse)
    eps = torch.finfo(out.dtype).eps
    torch.testing.assert_close(out, expected, rtol=8 * eps, atol=8 * eps)
    torch.testing.assert_close(lse, expected_lse, rtol=8 * eps, atol=8 * eps)
    assert whole[:, :2].isnan().all() and whole[:, 7:].isnan().all() and whole_lse.isinf().sum() == 8


def test_no_tokens_are_fine() -> None:
    out, lse = merge_attention([torch.zeros(2, 0, 3)] * 2, [torch.zeros(2, 0)] * 2)
    assert out.shape == (2, 0, 3) and lse.shape == (2, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_parts", [1, 3])
def test_operators_keep_the_rules_of_torch(num_parts: int, dtype: torch.dtype) -> None:
    outputs, lses = parts_of(num_parts, dtype)
    leaves = [part.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for part in outputs]
    torch.library.opcheck(op._merge, (leaves, [lse.requires_grad_() for lse in lses]))
    with torch.no_grad():
        merged, lse = merge_attention(outputs, lses)
        torch.library.opcheck(op._merge_backward, (merged, lse, outputs, lses, lse))
        torch.library.opcheck(op._accumulate, (outputs[0].float(), lses[0], outputs[-1].clone(), lses[-1].clone()))


def merged_sum(*parts: Tensor) -> Tensor:
    half = len(parts) // 2
    out, lse = merge_attention(parts[:half], parts[half:])
    return (out**2).sum() + lse.sin().sum()


def test_it_compiles_and_checkpoints_with_the_same_gradients() -> None:
    compiled = torch.compile(merged_sum, backend="aot_eager", fullgraph=True)
    ways = (merged_sum, compiled, lambda *parts: checkpoint(merged_sum, *parts, use_reentrant=False))
    outputs, lses = parts_of(3)
    leaves = [part.requires_grad_() for part in (*outputs, *lses)]
    eager, *others = (torch.autograd.grad(way(*leaves), leaves) for way in ways)
    for gradients in others:
        assert all(torch.equal(found, expected) for found, expected in zip(gradients, eager, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda outs, lses: (outs, lses[:1]), "2 outputs and 1 LSEs"),
        (lambda outs, lses: ([], []), "0 outputs"),
        (lambda outs, lses: ([outs[0], outs[1][:, :2]], lses), r"\[2, 2, 3\]"),
        (lambda outs, lses: (outs, [lses[0], lses[1].transpose(0, 1)]), r"LSE \[5, 2\]"),
        (lambda outs, lses: ([outs[0], outs[1].float()], lses), "torch.float32"),
        (lambda outs, lses: (outs, [lses[0], lses[1].float()]), "a LSE of torch.float32"),
    ],
)
def test_parts_that_do_not_fit_are_named(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        merge_attention(*change(*parts_of(2)))


def test_a_sum_in_half_precision_is_refused() -> None:
    outputs, lses = parts_of(2, torch.bfloat16)
    with pytest.raises(ValueError, match="both must be float32"):
        accumulate_attention_(outputs[0], lses[0], outputs[1], lses[1])


@needs_triton
def test_kernels_compile_for_hopper_with_wide_memory_access(monkeypatch: pytest.MonkeyPatch) -> None:
    ptx = compile_only(op, monkeypatch)
    outputs, lses = [torch.zeros(4, 32, 128, dtype=torch.bfloat16)] * 2, [torch.zeros(4, 32)] * 2
    op.launch_merge(outputs, lses)
    op.launch_merge_backward(outputs[0], lses[0], outputs, lses, lses[0])
    op.launch_accumulate(outputs[0].float(), lses[0], outputs[1], lses[1])
    assert len(ptx) == 3
    for found in map(memory_instructions, ptx):
        # 16 bytes per instruction for outputs; LSEs are one value per token
        assert {kind.split(".")[0] for kind in found if kind.endswith("v4.b32")} == {"ld", "st"}, found
