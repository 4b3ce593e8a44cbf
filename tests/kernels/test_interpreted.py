"""Every kernel in Triton's interpreter is its reference; all of them in one other process, whose start takes seconds."""

from __future__ import annotations

from pathlib import Path

from helpers.measures.triton_runs import needs_triton, run_interpreted


@needs_triton
def test_kernels_are_the_reference() -> None:
    files = sorted((Path(__file__).parent / "interpreted").glob("interpreted_*.py"))
    assert len(files) == 6
    run_interpreted(*files)
