"""Functions of flash-linear-attention itself, in Triton's interpreter: they pass the check of `runtime.states.kernels`."""

from __future__ import annotations

import builtins
import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch
from triton.runtime.autotuner import Autotuner

from hf_longctx.runtime.states.kernels import GATED_DELTA_RULE, HeadSizes, worst_error

# the tile of these kernels, so that documents cross it
SIZES = HeadSizes(16, 32, 2)


class LoopCount(int):
    """Counter of a loop, which kernels convert as if it were a tensor."""

    def to(self, dtype: Any) -> LoopCount:
        return self


def counts(*bounds: Any) -> list[LoopCount]:
    return [LoopCount(each) for each in builtins.range(*bounds)]


def test_the_package_passes_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    # without a device there is nothing to measure: every configuration is as good as the first
    monkeypatch.setattr(Autotuner, "_bench", lambda *args, **keywords: [0.0, 0.0, 0.0])
    assert GATED_DELTA_RULE.function is not None
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.ops"):
            monkeypatch.setitem(vars(module), "range", counts)
    with patch.object(GATED_DELTA_RULE, "device_type", "cpu"):
        worst, error = worst_error(GATED_DELTA_RULE, torch.device("cpu"), torch.float32, SIZES, (True,))
    assert error <= 1e-5, worst
