"""The kernel of dropout masks in Triton's interpreter against plain torch; `test_interpreted.py` runs this file."""

from __future__ import annotations

import pytest
import torch

from hf_longctx.kernels.dropout_mask import WORD, keep_mask, launch_keep_mask

# tokens, channels: one of everything, counters that are cut off, more tokens and counters than one program takes
SHAPES = [(1, 1), (3, 7), (9, 64), (5, 1030)]


@pytest.mark.parametrize("key", [5, 0xFEDCBA9876543210])
@pytest.mark.parametrize("rate", [0.0, 0.05, 0.9, 1.0])
@pytest.mark.parametrize("num_tokens,num_channels", SHAPES)
def test_the_kernel_draws_the_same_mask(num_tokens: int, num_channels: int, rate: float, key: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    documents, positions = torch.randint(0, WORD + 1, (2, num_tokens), generator=generator)
    threshold = round(rate * (WORD + 1))
    for step in (1, 123456):
        found = launch_keep_mask(documents, positions, step, [key & WORD, key >> 32], threshold, num_channels)
        assert torch.equal(found, keep_mask(documents, positions, step, key, rate, num_channels))
