"""Runs kernels of packages for scans in Triton's interpreter, in a process of its own, where the packages are installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from helpers.measures.triton_runs import needs_triton, run_interpreted

needs_package = pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="flash-linear-attention is not installed")


@needs_triton
@needs_package
def test_kernels_of_packages_pass_the_check() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_scans.py"))
