"""The GPU matrix at toy size: what can run on the CPU runs and agrees, and the rest says why it cannot."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from hf_longctx.plan.core.types import LayerPolicy
from hf_longctx.plan.cost.cost_model import elementwise_bytes
from hf_longctx.recipes.bench.gpu import cases, matrix
from hf_longctx.recipes.bench.gpu.cases import Case, run_case
from hf_longctx.recipes.bench.gpu.ceilings import sizes_of
from hf_longctx.recipes.bench.gpu.rows import read_rows

HAS_TRL = importlib.util.find_spec("trl") is not None

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="what a CPU leaves out is named here")


def same_tokens(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["case"]["num_tokens"] == other["case"]["num_tokens"]


@pytest.mark.wide
@pytest.mark.slow
def test_what_can_run_on_the_cpu_runs_and_agrees(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    matrix.main(["--toy", "--json", str(file)])
    rows = read_rows(file)
    assert {row["case"]["section"] for row in rows} == {"B", "C", "D", "E"}
    assert {row["case"]["method"] for row in rows if row["case"]["section"] == "B"} == set(cases.METHODS)
    for row in rows:
        method = row["case"]["method"]
        if any(word in method for word in ("Liger", "flash-attn", "offload")) or ("TRL" in method and not HAS_TRL):
            assert row["state"].startswith("skipped: ")
            continue
        assert row["state"] == "ok", row
        assert (
            row["step_s"] > 0
            and row["predicted_s"] > 0
            and row["kernel"].startswith("_scaled_dot_product_flash_attention_for_cpu")
        )
        predicted = row["predicted_device"] + row["predicted_host"]
        # besides their layers, plain models save the tables of the rotary embedding
        assert "sliced" in method or "selective" in method or row["measured"] == pytest.approx(predicted, rel=0.02), row
        # with an optimizer, the loss is that of the second step
        like = [r["loss"] for r in rows if r["case"]["section"] == row["case"]["section"] and same_tokens(r, row)]
        assert row["loss"] == pytest.approx(like[0], rel=1e-5)
    split, kept = (next(r for r in rows if r["case"]["method"] == method) for method in (cases.SPLIT, cases.OURS))
    assert kept["predicted_device"] > split["predicted_device"] + split["predicted_host"] > kept["predicted_device"] / 2
    ceilings = read_rows(file.with_suffix(".ceilings.json"))
    assert all(math.isfinite(row["value"]) and row["value"] > 0 for row in ceilings), ceilings
    assert {row["name"].split()[0] for row in ceilings} == {"product", "copy", "tile", "torch's", "slices"}


@pytest.mark.parametrize("pin_gib", [0.5, 1.0, 8.0])
def test_copies_of_both_ways_fit_into_what_is_pinned(pin_gib: float) -> None:
    sizes = sizes_of("llama-3.1-8b", False, pin_gib)
    assert 0 < 2 * sizes.copy_bytes <= sizes.pin_bytes


@pytest.mark.wide
def test_a_case_in_its_own_process_comes_to_the_same() -> None:
    case = Case("B", cases.OURS, 64, is_toy=True, steps=1)
    here, there = run_case(case), matrix.in_process(case, 120.0)
    assert (here.state, there.state) == ("ok", "ok")
    assert there.loss == pytest.approx(here.loss, rel=1e-6) and there.measured == here.measured


@pytest.mark.wide
def test_methods_are_chosen_by_words_and_rows_come_as_they_are_done(tmp_path: Path) -> None:
    file, words = tmp_path / "rows.json", ["selective", "tiled MLP", "HF plain"]
    matrix.main(["--toy", "--sections", "B", "--methods", *words, "--json", str(file)])
    rows = read_rows(file)
    names = [name for name in cases.METHODS if any(word in name for word in words)]
    assert [row["case"]["method"] for row in rows] == names and len(names) == 5
    losses = [row["loss"] for row in rows if row["state"] == "ok"]
    assert len(losses) == 3 + HAS_TRL and losses == pytest.approx([losses[0]] * 3, rel=1e-5)


@pytest.mark.parametrize(
    "method", ["selective checkpointing, tiled loss", "tiled MLP and loss", *(["TRL selective, tiled loss"] if HAS_TRL else [])]
)
def test_peers_have_the_gradients_of_the_plain_model(method: str) -> None:
    case, found = Case("B", method, 80, is_toy=True, tile_tokens=32), []
    for name in ("HF plain", method):
        model = cases.build(case, torch.device("cpu"))
        runner = cases.METHODS[name](model, cases.tokens(case, 80, torch.device("cpu")), case)
        runner.step()
        runner.close()
        found.append([parameter.grad for parameter in model.parameters()])
    for ours, plain in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)


def test_the_row_of_flash_attn_runs_in_the_environment_of_the_peer(tmp_path: Path) -> None:
    case = Case("B", "HF checkpointing, flash-attn", 64, steps=1)
    here = matrix.Section("B", 60.0, matrix.parse([])).run(case)
    assert here.state == "skipped: flash-attn is not installed; --peer-venv names an environment that has it"
    options = matrix.parse(["--peer-venv", str(tmp_path)])
    assert matrix.Section("B", 60.0, options).run(case).state.startswith(f"failed: {tmp_path}/bin/python does not start")


def test_a_case_that_would_outlast_its_section_does_not_start() -> None:
    # all layers on a million tokens
    case = Case("C", cases.OURS, 2**20, num_layers=10**6)
    state = matrix.Section("C", 530.0).run(case).state
    assert state.startswith("skipped: takes ") and "by estimate" in state
    # Llama-3.1-8B: three operations per parameter and direction, at 0.6 of 550 TFLOP/s
    short = Case("C", cases.OURS, 2**15, num_layers=10**6, steps=1)
    assert 25 < cases.estimated_s(short) < 60 < cases.estimated_s(case)


def test_predicted_seconds_follow_what_a_method_recomputes() -> None:
    case, spec = Case("B", cases.OURS, 2**17), Case("B", cases.OURS, 2**17).spec
    hardware = cases.case_costs(case).cluster.hardware
    ids_1T = torch.empty(1, case.num_tokens, dtype=torch.long, device="meta")
    plain, ours, checkpointed = (
        cases.predicted_s(policy, ids_1T, case)
        for policy in (LayerPolicy(), cases.replayed(), cases.replayed(attention_recompute=1.0))
    )
    # another forward of attention: four operations for each element of a head and pair of tokens
    attention_s = 2 * spec.num_layers * spec.num_heads * spec.head_dim * case.num_tokens**2 / hardware.attention_flops_per_s
    assert plain < ours < checkpointed == pytest.approx(ours + attention_s, rel=0.01)
    frozen = cases.predicted_s(LayerPolicy(), ids_1T, replace(case, is_frozen=True))
    matrices = spec.num_layers * spec.layer_parameters + spec.vocab_size * spec.hidden_size
    # gradients of what is trained beside frozen matrices are added to theirs
    moved = [elementwise_bytes(each.spec)[1] for each in (case, replace(case, is_frozen=True))]
    added_s = spec.num_layers * case.num_tokens * (moved[1] - moved[0]) / hardware.elementwise_bytes_per_s
    products_s = 2 * matrices * case.num_tokens / hardware.matmul_flops_per_s
    assert plain - frozen == pytest.approx(products_s - added_s, rel=0.02)


@pytest.mark.skipif(HAS_TRL, reason="TRL is installed")
def test_the_row_of_trl_says_what_to_install() -> None:
    case = Case("B", "TRL selective, tiled loss", 64, is_toy=True)
    assert run_case(case).state == "skipped: trl is not installed (pip install trl==1.16.0)"


@pytest.mark.wide
def test_failures_are_rows() -> None:
    case = Case("B", "ours, all on the host", 64, is_toy=True, host_gib=0.0)
    assert "failed: ValueError: 0.0 GiB would go to the host, but --host-gib allows 0" in run_case(case).state
    assert matrix.in_process(case, 0.01).state.startswith("stopped: ")
    section = matrix.Section("B", -1.0)
    assert section.run(case).state == "skipped: the section's time is up"
    assert matrix.in_process(replace(case, method="no such"), 120.0).state == "failed: KeyError: 'no such'"


def test_models_with_other_norms_are_measured_as_llamas() -> None:
    assert not Case("B", cases.OURS, 64, model="qwen3-8b").spec.qk_norms


def test_operations_count_causal_pairs_once() -> None:
    case = Case("B", cases.OURS, 1000, num_layers=1, is_toy=True)
    # one layer has queries and output of 64 x 64 each, keys and values of 64 x 32 each, and three MLP matrices
    matrices = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 64 * 256
    attention = 3 * 4 * 64 * (1000 * 1000 / 2)
    assert cases.model_operations(case) == pytest.approx(1000 * 6 * matrices + attention, rel=1e-3)
    frozen = replace(case, is_frozen=True)
    # weights of norms count as those of matrices
    assert cases.model_operations(case) - cases.model_operations(frozen) == pytest.approx(2000 * matrices, rel=1e-2)


def test_without_cuda_it_is_skipped_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    matrix.main([])
    assert capsys.readouterr().out.startswith("skipped: torch sees no CUDA device")


def test_a_script_that_is_told_to_end_takes_its_process_along(tmp_path: Path) -> None:
    number_of = tmp_path / "number"
    inner = f"import os, pathlib, time; pathlib.Path({str(number_of)!r}).write_text(str(os.getpid())); time.sleep(60)"
    outer = (
        "import subprocess, sys; from hf_longctx.recipes.bench.gpu.rows import end_with_children\n"
        f"end_with_children(); subprocess.run([sys.executable, '-c', {inner!r}], capture_output=True)"
    )
    script = subprocess.Popen([sys.executable, "-c", outer])
    wait_for(lambda: number_of.exists() and number_of.read_text() != "")
    number = int(number_of.read_text())
    script.terminate()
    assert script.wait(timeout=30) == 143
    wait_for(lambda: not psutil.pid_exists(number))


def wait_for(happened: Callable[[], bool], timeout_s: float = 30.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.05)
