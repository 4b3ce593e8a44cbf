"""Trainings whose nodes keep copies of the weights: the trajectory of one plain process, with other settings and resumed.

Four ranks are two nodes of two.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import pytest
import torch
from helpers.models.reference import random_rows, reference_step, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.versions import resuming
from helpers.ranks.rank_steps import whole
from helpers.trainers.trainer_runs import SKEWED, LossRecorder, make_trainer, plain_training

from hf_longctx.runtime.parameters.master_weights import MASTER_WEIGHT

NUM_STEPS, NUM_EVALUATED = 4, 9
ROWS = random_rows(SKEWED)
PLAIN = ModelCase(promoted=True, num_layers=4)
NODES = {"parameters": "gathered_per_node", "tokens_per_rank": 64}
LORA = (("r", 2), ("target_modules", "all-linear"))
# name -> (model, settings)
RUNS: dict[str, tuple[ModelCase, dict[str, Any]]] = {
    "tied weights": (replace(PLAIN, tied=True), {"self_test": True}),
    "adapters": (replace(PLAIN, lora=LORA), {"self_test": True}),
    "states on the host": (PLAIN, {"optimizer_states": "host"}),
    "experts": (ModelCase("qwen3_moe", promoted=True, num_layers=2), {}),
}
# name -> (model, arguments, distance from steps on shards that every pass gathers)
AS_SHARDED: dict[str, tuple[ModelCase, dict[str, Any], float]] = {
    "accumulation": (PLAIN, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}, 1e-10),
    "whole updates": (PLAIN, {"optim": "adafactor", "learning_rate": 1e-3}, 1e-10),
    "fp32 copies of bf16 weights": (replace(PLAIN, promoted=False, dtype=torch.bfloat16), {}, 2e-3),
}
# other layouts to resume in and from: (ranks, settings)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"tokens_per_rank": 256}),
    "whole": (2, {"tokens_per_rank": 128}),
    "sharded": (2, {"tokens_per_rank": 128, "parameters": "sharded"}),
    "stages": (4, {"tokens_per_rank": 64, "stages": 2, "parameters": "sharded"}),
}


def train(
    case: ModelCase, folder: str, config: dict[str, Any], arguments: dict[str, Any], ranks_per_node: int = 2
) -> tuple[list[float], dict[str, torch.Tensor], float, str]:
    """Losses, final weights, the loss of the first rows after training, and how weights are shared."""
    rows = datasets.Dataset.from_list(ROWS[:NUM_EVALUATED])
    resume, given = arguments.get("resume"), {name: value for name, value in arguments.items() if name != "resume"}
    with patch.dict(os.environ, LOCAL_WORLD_SIZE=str(ranks_per_node)):
        trainer = make_trainer(case, ROWS, folder, config, {"max_steps": NUM_STEPS, **given}, eval_dataset=rows)
        recorder = LossRecorder()
        recorder.attach(trainer)
        trainer.train(resume_from_checkpoint=resume)
        evaluated = trainer.evaluate()["eval_loss"]
    if case.dtype == torch.bfloat16:
        assert any(MASTER_WEIGHT in state for state in trainer._plain_optimizer.state.values())
    weights = {name: whole(weight.detach()).clone() for name, weight in trainer.model.named_parameters()}
    return recorder.losses, weights, evaluated, trainer.longctx_run.setup.costs.parameters


@pytest.mark.daily("tied weights", "adapters")
@pytest.mark.parametrize("name", RUNS)
def test_clipped_steps_and_an_evaluation_follow_one_plain_process(ranks, tmp_path: Path, name: str) -> None:
    case, config = RUNS[name]
    losses, weights = plain_training(case, ROWS, NUM_STEPS)
    trained = build_model(case).eval()
    trained.load_state_dict(weights, strict=False)
    evaluated, _ = reference_step(trained, ROWS[:NUM_EVALUATED])
    for found, final, loss, sharing in ranks(4).run(train, case, str(tmp_path), {**NODES, **config}, {}, timeout_s=300.0):
        assert sharing == "gathered_per_node"
        assert found == pytest.approx(losses, rel=1e-10)
        assert max(relative_error(weight, weights[key]) for key, weight in final.items()) <= 1e-10
        assert loss == pytest.approx(evaluated, rel=1e-10)


@pytest.mark.daily("accumulation")
@pytest.mark.parametrize("name", AS_SHARDED)
def test_steps_are_those_of_shards(ranks, tmp_path: Path, name: str) -> None:
    case, arguments, distance = AS_SHARDED[name]
    found, expected = (
        ranks(4).run(train, case, str(tmp_path / way), {**NODES, "parameters": way}, arguments, timeout_s=300.0)
        for way in ("gathered_per_node", "sharded")
    )
    for (losses, weights, evaluated, _), (other_losses, other_weights, other, _) in zip(found, expected, strict=True):
        assert losses == pytest.approx(other_losses, rel=distance) and evaluated == pytest.approx(other, rel=distance)
        assert max(relative_error(weight.double(), other_weights[key].double()) for key, weight in weights.items()) <= distance


@pytest.mark.wide("stages")
@resuming
@pytest.mark.parametrize("name", LAYOUTS)
def test_checkpoints_resume_to_and_from_other_layouts(ranks, tmp_path: Path, name: str) -> None:
    losses, weights = plain_training(PLAIN, ROWS, NUM_STEPS)
    layouts = (4, NODES), LAYOUTS[name]
    saving = {"save_strategy": "steps", "save_steps": 2}
    for place, ((num_ranks, config), (others, other)) in enumerate((layouts, layouts[::-1])):
        folder = tmp_path / str(place)
        ranks(num_ranks).run(train, PLAIN, str(folder), config, saving, timeout_s=300.0)
        resumed = {"resume": str(folder / "checkpoint-2")}
        for found, final, *_ in ranks(others).run(train, PLAIN, str(folder / "on"), other, resumed, timeout_s=300.0):
            assert found == pytest.approx(losses[2:], rel=1e-10)
            assert max(relative_error(weight, weights[key]) for key, weight in final.items()) <= 1e-10


def test_one_node_is_refused(tmp_path: Path, ranks) -> None:
    message = (
        "the 2 rank.s. that share them are not several whole nodes of 2 rank.s.; use 'sharded', or share them over more ranks"
    )

    for refusal in ranks(2).run(_refusal, str(tmp_path)):
        assert re.search(message, refusal)


def _refusal(folder: str) -> str:
    with pytest.raises(ValueError) as error:
        train(PLAIN, folder, NODES, {})
    return str(error.value)
