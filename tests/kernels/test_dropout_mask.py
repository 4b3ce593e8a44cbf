"""The kernel of dropout masks compiles for Hopper; `interpreted_dropout_mask.py` compares it with plain torch."""

from __future__ import annotations

import pytest
import torch
from helpers.measures.triton_runs import compile_only, needs_triton

from hf_longctx.kernels import dropout_mask as op


@needs_triton
def test_the_kernel_compiles_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    ptx = compile_only(op, monkeypatch)
    tokens = torch.zeros(33, dtype=torch.int64)
    op.launch_keep_mask(tokens, tokens.clone(), 1, [5, 2**32 - 1], 2**31 + 5, 4096)
    (found,) = ptx
    # high words of products; no counter is read from memory
    assert "mul.hi.u32" in found and found.count("ld.global") <= 8
