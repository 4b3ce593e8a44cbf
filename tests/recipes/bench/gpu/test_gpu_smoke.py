"""The GPU smoke table is skipped with a reason if there is no GPU; its checks pass on the CPU, and planted errors fail them."""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import TrainingArguments

from hf_longctx.recipes.bench.gpu import smoke, smoke_memory
from hf_longctx.recipes.bench.gpu.rows import read_rows
from hf_longctx.runtime.activations import host_tier
from hf_longctx.runtime.tiles import tile

CPU = torch.device("cpu")
TOKENS = 96


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [smoke.__file__])
    with pytest.raises(SystemExit) as done:
        runpy.run_path(smoke.__file__, run_name="__main__")
    assert not done.value.code
    assert capsys.readouterr().out == "skipped: torch sees no CUDA device, and all rows need one\n"


def few_steps(*arguments: Any, max_steps: int, **settings: Any) -> TrainingArguments:
    """Arguments of a training of six steps, which lower the loss of its one document enough."""
    assert max_steps > 6
    return TrainingArguments(*arguments, max_steps=6, **settings)


@pytest.mark.wide(
    "planned step, bf16 weights, fp32 gradients",
    "training, 20 steps, bf16 autocast",
    "tile of more than 65,535 heads",
    "policy: attention kept on the device",
    "policy: attention and inputs on the host",
    "policy: shares recomputed, on host, on device",
    "policy: part of the MLP kept",
    "policy: part of queries, keys and values kept",
    "policy: kept layer above one on the host",
    "policy: loss in tiles, everything kept",
    "policy: four slices, everything kept",
    "policy: four slices, attention kept on the host",
    "callback attached to a stock trainer",
)
@pytest.mark.parametrize("name", [n for n in smoke.checks(TOKENS, CPU) if "cuDNN" not in n and "stream" not in n])
def test_checks_hold_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (smoke, smoke_memory):
        monkeypatch.setattr(module, "TrainingArguments", few_steps)
    check, tolerance = smoke.checks(TOKENS, CPU)[name]
    if "efficient" in name or "in one call" in name:
        pytest.skip("an operator of CUDA")
    error, _ = check()
    assert error <= tolerance


def test_rows_are_chosen_by_words_and_written_as_they_are_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    assert smoke.main(["--toy", "--tokens", "64", "--only", "layout", "slab", "--json", str(file)]) == 0
    rows = read_rows(file)
    assert len(rows) == 2 and all(row["is_good"] for row in rows) and "2 of 2 rows are ok" in capsys.readouterr().out
    assert smoke.main(["--toy", "--tokens", "64", "--only", "layout", "--budget-s", "-1"]) == 1
    assert "1 were not run: the time is up" in capsys.readouterr().out


def test_a_wrong_last_row_of_a_long_tile_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    through = smoke_memory._through_tile

    def wrong(gradient: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        out, *others = through(gradient, *arguments)
        return (out if gradient.shape[1] == 100 else out.roll(1, 1), *others)

    assert smoke_memory.check_long_tile(CPU, 300, 4, 16)[0] <= smoke.TOLERANCE
    assert smoke_memory.check_long_tile(CPU, 2**22)[1].startswith("skipped: needs ")
    monkeypatch.setattr(smoke_memory, "_through_tile", wrong)
    assert not smoke_memory.check_long_tile(CPU, 300, 4, 16)[0] <= smoke.TOLERANCE


def test_a_wrong_merge_fails_the_ring() -> None:
    with patch.object(smoke, "accumulate_attention_", lambda out, lse, other, other_lse: out.copy_(other)):
        error, _ = smoke.check_tiles(TOKENS, CPU, 2)
    assert not error <= smoke.TOLERANCE


def test_a_row_of_the_table_with_a_wrong_gradient_fails() -> None:
    row = next(row for row in tile.BACKENDS if row.name == "cpu_flash")

    def backward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = row.backward(*inputs)
        return dq, dk * 1.05, dv

    wrong = tuple(replace(r, backward=backward) if r is row else r for r in tile.BACKENDS)
    with patch.object(tile, "BACKENDS", wrong), patch.object(smoke_memory, "BACKENDS", wrong):
        error, _ = smoke_memory.check_backend(TOKENS, CPU, "cpu_flash")
    assert not error <= smoke.TOLERANCE


def test_blocks_of_the_slab_that_overlap_fail_the_tier() -> None:
    take = host_tier.HostSlab.take

    def overlapping(slab: Any, num_rows: int, row_bytes: int) -> Any:
        return [(count, replace(run, offset=0)) for count, run in take(slab, num_rows, row_bytes)]

    with patch.object(host_tier.HostSlab, "take", overlapping):
        error, _ = smoke_memory.check_tier(TOKENS, CPU)
    assert error > 0


@pytest.mark.daily("attention and inputs on the host")
@pytest.mark.parametrize("name", ["attention and inputs on the host", "four slices, attention kept on the host"])
def test_a_wrong_value_back_from_the_host_fails_a_policy(name: str) -> None:
    fetch = host_tier.HostTensor.fetch
    with patch.object(host_tier.HostTensor, "fetch", lambda self: fetch(self) * 1.5):
        error, _ = smoke_memory.check_policy(TOKENS, CPU, *smoke_memory.POLICIES[name])
    assert not error <= smoke_memory.POLICY_TOLERANCE
