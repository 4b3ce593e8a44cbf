"""The table of kernel times has a row for every operation, and says when no kernel ran."""

from __future__ import annotations

import pytest
import torch

from hf_longctx.recipes.bench.gpu.kernel_speed import main


@pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA the kernels run too")
def test_on_the_cpu_only_references_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--tokens", "16", "--degree", "2", "--heads", "4", "--kv-heads", "2", "--head-dim", "8"])
    lines = capsys.readouterr().out.splitlines()
    assert "no kernel is timed" in lines[1]
    assert len(lines) == 3 + 7 + 2 + 7 and all("reference" in line for line in lines[3:10])
    assert lines[11].split() == ["host", "us", "per", "call", "direct", "dispatcher"]
    assert all(float(line.split()[-1]) > 0 for line in lines[12:])
