"""axolotl's own example files run under the plugin on several ranks, with the losses of axolotl's trainer on one process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.trainers.axolotl_runs import EXAMPLES, NUM_RANKS, settings_of, write_inputs

from hf_longctx.hf.ranks.launch import LaunchEnvironment
from hf_longctx.hf.rules.axolotl import from_axolotl

TESTS = Path(__file__).parents[1]
needs_axolotl = pytest.mark.skipif(importlib.util.find_spec("axolotl") is None, reason="needs axolotl (docs/guides/axolotl.md)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which all examples were trained by both."""
    made = tmp_path_factory.mktemp("axolotl")
    write_inputs(made)
    program = ["-m", "helpers.trainers.axolotl_runs", str(made)]
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={NUM_RANKS}"]
    variables = {**os.environ, "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    for command in ([*program, "stock"], [*ranks, *program, "plans"]):
        run = subprocess.run([sys.executable, *command], cwd=TESTS, env=variables, capture_output=True, text=True)
        (made / f"{command[-1]}.log").write_text(run.stdout + run.stderr)
    return made


def outcome(folder: Path, name: str, how: str) -> dict[str, Any]:
    """Losses and norms of a case, or its error."""
    file = folder / f"{name.replace('/', '_')}.{how}.json"
    found: dict[str, Any] = (
        json.loads(file.read_text()) if file.exists() else {"error": (folder / f"{how}.log").read_text()[-4000:]}
    )
    return found


@pytest.mark.quick("llama-3/lora-1b")
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_axolotl_is_translated(tmp_path: Path, name: str) -> None:
    """Without axolotl: as many rows or tokens per step as before, and nothing left that would divide ranks twice."""
    given = settings_of(name, tmp_path, "plans")
    found = from_axolotl(given, replace(LaunchEnvironment.read(), num_ranks=NUM_RANKS, ranks_per_node=NUM_RANKS))
    num_rows = given["micro_batch_size"] * given.get("gradient_accumulation_steps", 1) * NUM_RANKS
    num_rows //= given.get("context_parallel_size", 1)
    if given["sample_packing"]:
        assert found.config.tokens_per_step == num_rows * given["sequence_len"]
    else:
        assert found.changes["micro_batch_size"] * found.changes["gradient_accumulation_steps"] * NUM_RANKS == num_rows
    asked = {
        "fsdp_config",
        "deepspeed",
        "context_parallel_size",
        "gradient_checkpointing",
        "activation_offloading",
    } & given.keys()
    assert {found.changes[each] for each in asked} <= {None}
    stage = given.get("deepspeed", {}).get("zero_optimization", {}).get("stage", 3 if "fsdp_config" in given else 0)
    assert found.config.parameters == {0: "replicated", 2: "gathered_per_round", 3: "sharded"}[stage]


@needs_axolotl
@pytest.mark.oracle
@pytest.mark.wide
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_axolotl_has_the_losses_of_its_own_trainer(folder: Path, name: str) -> None:
    stock, plans = outcome(folder, name, "stock"), outcome(folder, name, "plans")
    assert "error" not in stock and "error" not in plans, (stock, plans)
    assert len(plans["loss"]) == len(stock["loss"]) >= 3 and plans["learning_rate"] == pytest.approx(stock["learning_rate"])
    # single precision, and gradients that an optimizer has divided by their size once or more
    assert plans["loss"] == pytest.approx(stock["loss"], rel=2e-4)
    assert plans["grad_norm"] == pytest.approx(stock["grad_norm"], rel=5e-3)
    # weights were saved, whatever shards they trained in
    saved = folder / f"out_plans_{name.replace('/', '_')}"
    assert [*saved.glob("*model.safetensors")]
