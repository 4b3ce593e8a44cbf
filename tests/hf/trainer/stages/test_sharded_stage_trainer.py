"""Weights sharded inside stages, with every other setting that concerns weights: the trajectory of one plain process.

Four ranks are two stages of two ranks, which meet in every pass ("sharded") or in every backward ("gathered_per_step").
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from helpers.models.reference import random_rows, reference_step, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.ranks.rank_steps import whole
from helpers.trainers.trainer_runs import SKEWED, LossRecorder, make_trainer, plain_training

from hf_longctx.runtime.execution.experts import spread_group
from hf_longctx.runtime.parameters.master_weights import MASTER_WEIGHT
from hf_longctx.runtime.parameters.sharded import layer_shards

MODES = ["sharded", "gathered_per_step"]
NUM_STEPS, NUM_EVALUATED = 4, 9
ROWS = random_rows(SKEWED)
PLAIN = ModelCase(promoted=True, num_layers=4)
EXPERTS = ModelCase("qwen3_moe", promoted=True, num_layers=4)
DORA = (
    ("r", 2),
    ("use_dora", True),
    ("lora_dropout", 0.1),
    ("target_modules", ["q_proj", "v_proj", "down_proj"]),
    ("modules_to_save", ["lm_head"]),
)
# name -> (model, settings)
RUNS: dict[str, tuple[ModelCase, dict[str, Any]]] = {
    "adapters": (replace(PLAIN, lora=DORA), {"self_test": True}),
    "states on the host": (replace(PLAIN, tied=True), {"optimizer_states": "host"}),
    "rings": (PLAIN, {"method": "ring", "self_test": True}),
    "hybrids": (PLAIN, {"method": "hybrid"}),
    "more ranks than heads": (replace(PLAIN, num_heads=1, num_kv_heads=1), {}),
    "windows": (ModelCase("mistral_window", promoted=True, num_layers=4), {}),
}
# settings that need "sharded"
ALONE: dict[str, tuple[ModelCase, dict[str, Any]]] = {
    "layers on the host": (PLAIN, {"layer_weights": "host", "optimizer_states": "host", "self_test": True}),
    "layers under adapters on the host": (replace(PLAIN, lora=DORA), {"layer_weights": "host"}),
    "spread experts": (EXPERTS, {"expert_ranks": 2, "optimizer_states": "host", "self_test": True}),
}
EVERY_RUN = [*((name, mode) for name in RUNS for mode in MODES), *((name, "sharded") for name in ALONE)]


def train(
    case: ModelCase, folder: str, config: dict[str, Any], arguments: dict[str, Any]
) -> tuple[list[float], dict[str, torch.Tensor], float, set[str]]:
    """Losses, final weights of this rank's stage, the loss of the first rows after training, and what the settings led to."""
    settings = {"stages": 2, "tokens_per_rank": 32, **config}
    rows = datasets.Dataset.from_list(ROWS[:NUM_EVALUATED])
    trainer = make_trainer(case, ROWS, folder, settings, {"max_steps": NUM_STEPS, **arguments}, eval_dataset=rows)
    recorder = LossRecorder()
    recorder.attach(trainer)
    trainer.train()
    assert {"<1,1>", "<2>"} <= set(recorder.layouts)
    states = trainer._plain_optimizer.state.values()
    facts = {
        "layers on the host": layer_shards(trainer.model) is not None,
        "spread experts": spread_group(trainer.model) is not None,
        "master weights": all(state[MASTER_WEIGHT].dtype == torch.float32 for state in states if MASTER_WEIGHT in state)
        and any(MASTER_WEIGHT in state for state in states),
    }
    weights = {name: whole(weight.detach()).clone() for name, weight in trainer.model.named_parameters()}
    return recorder.losses, weights, trainer.evaluate()["eval_loss"], {fact for fact, holds in facts.items() if holds}


@pytest.mark.daily("rings-sharded", "spread experts-sharded")
@pytest.mark.parametrize("name,parameters", EVERY_RUN)
def test_clipped_steps_and_an_evaluation_follow_one_plain_process(ranks, tmp_path: Path, name: str, parameters: str) -> None:
    case, config = (RUNS | ALONE)[name]
    losses, weights = plain_training(case, ROWS, NUM_STEPS)
    trained = build_model(case).eval()
    trained.load_state_dict(weights, strict=False)
    evaluated, _ = reference_step(trained, ROWS[:NUM_EVALUATED])
    settings = {**config, "parameters": parameters}
    for found, final, loss, facts in ranks(4).run(train, case, str(tmp_path), settings, {}, timeout_s=300.0):
        assert found == pytest.approx(losses, rel=1e-10)
        of_whole = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]} if case.tied else weights
        assert max(relative_error(weight, of_whole[key]) for key, weight in final.items()) <= 1e-10
        assert loss == pytest.approx(evaluated, rel=1e-10)
        assert ("layers on the host" in facts, "spread experts" in facts) == ("layer_weights" in config, "expert_ranks" in config)


@pytest.mark.wide
def test_bf16_weights_with_fp32_copies_follow_whole_ones(ranks, tmp_path: Path) -> None:
    case, pool = replace(PLAIN, promoted=False, dtype=torch.bfloat16), ranks(4)
    (losses, *_), *_ = pool.run(train, case, str(tmp_path), {"parameters": "replicated"}, {}, timeout_s=300.0)
    on_host = {"parameters": "sharded", "layer_weights": "host"}
    for settings in (*({"parameters": each} for each in MODES), {"parameters": "sharded", "optimizer_states": "host"}, on_host):
        for found, _, _, facts in pool.run(train, case, str(tmp_path), settings, {}, timeout_s=300.0):
            assert "master weights" in facts, settings
            # sums over ranks round differently
            assert found == pytest.approx(losses, rel=2e-3), settings


def refused(folder: str, case: ModelCase, config: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as error:
        make_trainer(case, ROWS, folder, {"stages": 2, **config})
    return str(error.value)


REFUSED: list[tuple[ModelCase, dict[str, Any], str]] = [
    (
        PLAIN,
        {"parameters": "sharded", "shard_ranks": 4},
        "shard_ranks 4 does not divide the 2 ranks of a stage",
    ),
    (EXPERTS, {"parameters": "sharded", "expert_ranks": 4}, "expert_ranks 4 does not divide the 2 ranks of a stage"),
    (EXPERTS, {"parameters": "gathered_per_step", "expert_ranks": 2}, "expert_ranks is 2 but parameters are 'gathered_per_step'"),
    (PLAIN, {"parameters": "gathered_per_step", "layer_weights": "host"}, "there are parameters='gathered_per_step' over 2"),
    (PLAIN, {"parameters": "sharded", "layer_weights": "host", "stages": 4}, "there are parameters='sharded' over 1"),
]


@pytest.mark.wide
def test_what_does_not_go_with_shards_of_a_stage_is_refused_on_every_rank(ranks, tmp_path: Path) -> None:
    for case, config, message in REFUSED:
        for text in ranks(4).run(refused, str(tmp_path), case, config):
            assert message in text
