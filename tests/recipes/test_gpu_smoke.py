"""The smoke table of a GPU: skipped with its reason without one; its checks, which are right on the CPU, can fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from hf_longctx.recipes import gpu_smoke

CPU = torch.device("cpu")
TOKENS = 96


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_is_skipped_with_the_reason() -> None:
    script = Path(gpu_smoke.__file__)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert done.stdout == "skipped: torch sees no CUDA device, and every row here runs on one\n"


@pytest.mark.parametrize("name", [n for n in gpu_smoke.checks(TOKENS, CPU) if "cuDNN" not in n and "stream" not in n])
def test_checks_hold_on_the_cpu(name: str) -> None:
    check, tolerance = gpu_smoke.checks(TOKENS, CPU)[name]
    if "efficient" in name:
        pytest.skip("an operator of CUDA")
    error, _ = check()
    assert error <= tolerance


def test_a_wrong_merge_fails_the_ring() -> None:
    with patch.object(gpu_smoke, "accumulate_attention_", lambda out, lse, other, other_lse: out.copy_(other)):
        error, _ = gpu_smoke.check_tiles(TOKENS, CPU, 2)
    assert not error <= gpu_smoke.TOLERANCE
