"""The kernel of masks of attention weights in Triton's interpreter against plain torch; `test_interpreted.py` runs this file."""

from __future__ import annotations

import pytest
import torch

from hf_longctx.kernels.dropout_mask import WORD
from hf_longctx.kernels.weight_mask import dropped_weights, launch_dropped_weights

# blocks, rows, keys: one of everything, tiles that are cut off, more rows and keys than one program takes
SHAPES = [(1, 1, 1), (3, 7, 5), (1, 40, 70)]


@pytest.mark.parametrize("key", [5, 0xFFFFFFFF76543210])
@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("heads", [(0, 4), (3, 2), (6, 7)])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_draws_the_same_mask(shape: tuple[int, int, int], heads: tuple[int, int], rate: float, key: int) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    num_blocks, num_rows, num_keys = shape
    rows = torch.randint(0, WORD + 1, (num_blocks, num_rows), generator=generator)
    keys = torch.randint(0, WORD + 1, (num_blocks, num_keys), generator=generator)
    threshold = round(rate * (WORD + 1))
    for document, step in ((0, 1), (-1, 123456)):
        found = launch_dropped_weights(rows, keys, list(heads), document, step, [key & WORD, key >> 32], threshold)
        assert torch.equal(found, dropped_weights(rows, keys, heads, document, step, key, rate))
