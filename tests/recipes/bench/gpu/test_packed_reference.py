"""The reference of packed attention against the definition, written out token by token."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hf_longctx.recipes.bench.gpu.packed_reference import packed_causal_attention

# both sides work in fp64; the sums are at most 12 terms long
TOLERANCE = 1e-14


def by_definition(q_HSD: Tensor, k_GSD: Tensor, v_GSD: Tensor, bounds: list[int], scale: float) -> Tensor:
    """Softmax attention with Python loops over heads, documents and tokens."""
    num_heads, num_kv_heads = q_HSD.shape[0], k_GSD.shape[0]
    output = torch.zeros_like(q_HSD)
    for head in range(num_heads):
        kv_head = head * num_kv_heads // num_heads
        for start, stop in pairwise(bounds):
            for token in range(start, stop):
                seen = range(start, token + 1)
                weights = [math.exp(float(q_HSD[head, token] @ k_GSD[kv_head, j]) * scale) for j in seen]
                values = [weight * v_GSD[kv_head, j] for weight, j in zip(weights, seen, strict=True)]
                output[head, token] = sum(values) / sum(weights)
    return output


def heads(num_heads: int, num_kv_heads: int, num_tokens: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, num_tokens, 5, dtype=torch.float64, generator=generator) for n in (num_heads, *[num_kv_heads] * 2)]


@pytest.mark.parametrize("num_heads,num_kv_heads", [(1, 1), (4, 4), (4, 2), (6, 3), (6, 1)])
@pytest.mark.parametrize("bounds", [[0, 1], [0, 7], [0, 1, 2, 12], [0, 5, 11, 12]])
def test_reference_is_the_definition(num_heads: int, num_kv_heads: int, bounds: list[int]) -> None:
    q, k, v = heads(num_heads, num_kv_heads, bounds[-1])
    found = packed_causal_attention(q, k, v, torch.tensor(bounds), 0.3)
    assert torch.allclose(found, by_definition(q, k, v, bounds, 0.3), rtol=0, atol=TOLERANCE)


def test_a_document_of_one_token_is_its_own_value() -> None:
    q, k, v = heads(4, 2, 3)
    found = packed_causal_attention(q, k, v, torch.tensor([0, 1, 2, 3]), 0.3)
    assert torch.equal(found, v.repeat_interleave(2, 0))


def test_gradients_are_those_of_finite_differences() -> None:
    inputs = [t.requires_grad_() for t in heads(4, 2, 6)]
    assert torch.autograd.gradcheck(lambda q, k, v: packed_causal_attention(q, k, v, torch.tensor([0, 2, 6]), 0.3), inputs)


def test_no_gradient_crosses_a_document_or_goes_to_the_future() -> None:
    q, k, v = (t.requires_grad_() for t in heads(2, 1, 9))
    found = packed_causal_attention(q, k, v, torch.tensor([0, 4, 9]), 0.3)
    # token 6 is the third token of the second document: it sees tokens 4, 5 and 6
    found[:, 6].sum().backward()
    for gradient in (k.grad, v.grad):
        seen = gradient.abs().sum(dim=(0, 2)) > 0
        assert seen.tolist() == [False] * 4 + [True] * 3 + [False] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtype_of_the_inputs_is_kept(dtype: torch.dtype) -> None:
    q, k, v = (t.to(dtype) for t in heads(2, 1, 4))
    assert packed_causal_attention(q, k, v, torch.tensor([0, 4]), 0.3).dtype == dtype
