"""Gradients that an optimizer must not use: NaN, infinite, or finite ones whose norm is infinite."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hf_longctx.runtime.parameters.gradients import has_nonfinite_gradient

# value of a gradient's elements, their type, ranks -> whether it counts as not finite
CASES = [
    (1.0, torch.float32, 1, False),
    (math.nan, torch.float32, 1, True),
    (math.inf, torch.float64, 1, True),
    (1e18, torch.float32, 1, False),
    # finite, but torch's clip_grad_norm_ would divide by infinity
    (1e30, torch.float32, 1, True),
    (1e30, torch.bfloat16, 1, True),
    (1e30, torch.float64, 1, False),
    (1e200, torch.float64, 1, True),
    # finite on each rank, but not summed over the ranks of a shard group
    (1e18, torch.float32, 64, True),
]


@pytest.mark.parametrize("value,dtype,num_ranks,is_bad", CASES)
def test_what_clipping_would_turn_to_zeros_counts_as_not_finite(
    value: float, dtype: torch.dtype, num_ranks: int, is_bad: bool
) -> None:
    good, bad, frozen = (nn.Parameter(torch.zeros(10, dtype=dtype)) for _ in range(3))
    good.grad, bad.grad = torch.ones_like(good), torch.full_like(bad, value)
    assert bool(has_nonfinite_gradient([good, bad, frozen], torch.device("cpu"), num_ranks)) == is_bad
    if dtype == torch.float32 and num_ranks == 1 and math.isfinite(value):
        nn.utils.clip_grad_norm_([good, bad], 1.0)
        assert bool((bad.grad == 0).all()) == is_bad
