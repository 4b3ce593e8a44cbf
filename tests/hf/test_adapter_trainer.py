"""LoRA under the trainer: the trajectory of a plain loop, and one ordinary adapter folder, however the ranks share the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
import transformers
from helpers.models import ModelCase, build_model, random_rows, reference_step, relative_error
from helpers.training import plain_training
from test_sharded_trainer import train
from test_trainer import SKEWED

NUM_STEPS = 10
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = (("r", 2), ("lora_alpha", 8), ("target_modules", ["q_proj", "v_proj", "down_proj"]))
RICH = (*(("r", 2), ("use_rslora", True), ("use_dora", True), ("target_modules", PROJECTIONS), ("modules_to_save", ["lm_head"])),)
ROWS = random_rows(SKEWED)

# name -> (ranks, settings, adapters)
RUNS: dict[str, tuple[int, dict[str, Any], Any]] = {
    "replicated": (2, {"tokens_per_rank": 64}, LORA),
    "sharded": (2, {"tokens_per_rank": 64, "parameters": "sharded"}, RICH),
    "gathered": (2, {"tokens_per_rank": 64, "parameters": "gathered_per_round"}, LORA),
    "stages": (2, {"tokens_per_rank": 96, "stages": 2}, RICH),
    "sharded stages": (4, {"tokens_per_rank": 48, "stages": 2, "parameters": "gathered_per_round"}, LORA),
}


@pytest.mark.parametrize("name", RUNS)
def test_clipped_steps_follow_one_plain_process(ranks, tmp_path: Path, name: str) -> None:
    num_ranks, config, lora = RUNS[name]
    case = ModelCase(promoted=True, lora=lora)
    losses, weights = plain_training(case, ROWS, NUM_STEPS)
    saving = {"max_steps": NUM_STEPS, "save_strategy": "steps", "save_steps": 5}
    results = ranks(num_ranks).run(train, case, ROWS, str(tmp_path / "whole"), config, saving)
    checkpoint = str(tmp_path / "whole" / "checkpoint-5")
    resumed = ranks(num_ranks).run(train, case, ROWS, str(tmp_path / "again"), config, {**saving, "resume": checkpoint})
    for start, found in ((0, results), (5, resumed)):
        for l, norms, w in found:
            print(
                max(abs(a - b) for a, b in zip(l, losses[start:], strict=True)), max(relative_error(w[n], weights[n]) for n in w)
            )
