"""Every row of `recipes/bench/gpu/smoke.py` on the fake device."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from fake_cuda.machine.computing import Computing
from transformers import TrainingArguments

from hf_longctx.recipes.bench.gpu import smoke, smoke_memory

ROWS = smoke.checks(128, torch.device("cuda", 0))


def few_steps(*arguments: Any, max_steps: int, **settings: Any) -> TrainingArguments:
    """Arguments of a training of six steps, which lower the loss of its one document enough."""
    return TrainingArguments(*arguments, max_steps=min(6, max_steps), **settings)


@pytest.mark.parametrize("name", ROWS)
def test_row(name: str, computing: Computing, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (smoke, smoke_memory):
        monkeypatch.setattr(module, "TrainingArguments", few_steps)
    if "sanitizer" in name:
        pytest.skip("its process would not compute for the fake device; test_races.py runs policies under the sanitizer")
    check = ROWS[name]
    if "2^31" in name:
        # the fake device's memory is the host's
        check = partial(smoke_memory.check_long_tile, torch.device("cuda", 0), 300, 4, 16), check[1]
    row = smoke.timed(name, *check)
    assert row.is_good, row
    assert not computing.plans.misread
