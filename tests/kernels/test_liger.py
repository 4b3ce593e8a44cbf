"""Liger's kernels, where the package is installed; in one other process, since Triton's interpreter is chosen at its import."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from helpers.measures.triton_runs import needs_triton, run_interpreted


@needs_triton
@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel is not installed")
def test_what_is_taken_from_liger_is_exact() -> None:
    run_interpreted(Path(__file__).parent / "liger_in_interpreter.py")
