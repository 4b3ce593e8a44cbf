"""Trainings with optimizers that need whole weights: those of one plain process, with whole weights and shards, over restarts."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase
from helpers.models.versions import resuming
from helpers.ranks.rank_steps import whole
from helpers.trainers.trainer_runs import make_trainer, plain_training_with
from safetensors.torch import load_file
from torch import Tensor, nn

from hf_longctx import MuonWithAdamW
from hf_longctx.runtime.parameters.master_weights import MASTER_WEIGHT

CASE = ModelCase(promoted=True)
ROWS = random_rows([40, 22, 9, 31, 5, 12, 17, 8] * 2)
NUM_STEPS = 4
MUON = {"lr": 1e-2, "weight_decay": 0.1, "adamw": {"lr": 1e-2, "weight_decay": 0.1}}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    weights = list(model.parameters())
    return [
        {"params": [weight for weight in weights if weight.dim() > 1], "weight_decay": 0.1},
        {"params": [weight for weight in weights if weight.dim() <= 1], "weight_decay": 0.0},
    ]


def adafactor(model: nn.Module) -> Any:
    return transformers.Adafactor(groups_of(model), lr=1e-2, scale_parameter=False, relative_step=False)


def muon(model: nn.Module) -> Any:
    return MuonWithAdamW()(model, **MUON)


def schedule_free(model: nn.Module) -> Any:
    import schedulefree

    optimizer = schedulefree.AdamWScheduleFree(groups_of(model), lr=1e-2)
    optimizer.train()
    return optimizer


# name -> the optimizer on one process, arguments and further arguments of the trainer, and its package
KINDS: dict[str, tuple[Callable[[nn.Module], Any], dict[str, Any], dict[str, Any], str]] = {
    "adafactor": (adafactor, {"optim": "adafactor"}, {}, "torch"),
    "Muon": (muon, {}, {"optimizer_cls_and_kwargs": (MuonWithAdamW, MUON)}, "torch"),
    "schedule-free": (schedule_free, {"optim": "schedule_free_adamw"}, {}, "schedulefree"),
}
NAMES = [name for name, (*_, package) in KINDS.items() if find_spec(package) is not None]
# (parameters, parameters of the run from whose second step it goes on, or "")
RUNS = [("replicated", ""), ("sharded", ""), ("sharded", "sharded"), ("replicated", "sharded"), ("sharded", "replicated")]


def train(folder: str, name: str) -> list[dict[str, Tensor]]:
    """Last weights of every run; those that `save_model` writes come last."""
    _, arguments, more, _ = KINDS[name]
    settings = {"max_steps": NUM_STEPS, "save_strategy": "steps", "save_steps": 2, "warmup_steps": 0}
    settings |= {"lr_scheduler_type": "constant", **arguments}
    found = []
    for number, (parameters, before) in enumerate(RUNS):
        config = {"tokens_per_rank": 64, "parameters": parameters}
        run = Path(folder, str(number) if before else parameters)
        trainer = make_trainer(CASE, ROWS, str(run), config, {**settings, "save_only_model": False}, **more)
        trainer.train(str(Path(folder, before, "checkpoint-2")) if before else None)
        if callable(switch := getattr(trainer._plain_optimizer, "train", None)):
            # the last step was saved
            switch()
        found.append({key: whole(weight.detach()).clone() for key, weight in trainer.model.named_parameters()})
    trainer.save_model(str(Path(folder, "last")))
    found.append(load_file(Path(folder, "last", "model.safetensors")))
    return found


@pytest.mark.wide("adafactor")
@resuming
@pytest.mark.parametrize("name", NAMES)
def test_trainings_are_those_of_one_process_whole_in_shards_and_resumed(ranks, tmp_path: Path, name: str) -> None:
    make, made = KINDS[name][0], []

    def optimizer_of(model: nn.Module, step: int) -> torch.optim.Optimizer | None:
        if step:
            return None
        made.append((make(model), model))
        return made[0][0]

    _, expected = plain_training_with(optimizer_of, CASE, ROWS, NUM_STEPS)
    optimizer, model = made[0]
    if callable(switch := getattr(optimizer, "eval", None)):
        switch()
    to_save = {key: weight.detach() for key, weight in model.named_parameters()}
    for *runs, saved in ranks(2).run(train, str(tmp_path), name):
        for run, weights in zip(RUNS, runs, strict=True):
            for key, weight in weights.items():
                assert (weight - expected[key]).abs().max() <= 1e-9 * expected[key].abs().max(), (run, key)
        for key, weight in saved.items():
            assert (weight - to_save[key]).abs().max() <= 1e-6 * to_save[key].abs().max(), key


def refusal(folder: str, config: dict[str, Any]) -> str:
    try:
        make_trainer(CASE, ROWS, folder, config, {"optim": "adafactor"})
    except ValueError as error:
        return str(error)
    return ""


def test_no_whole_weights_in_stages_and_on_the_host(ranks, tmp_path: Path) -> None:
    for config in ({"parameters": "gathered_per_round", "stages": 2}, {"parameters": "sharded", "optimizer_states": "host"}):
        for found in ranks(2).run(refusal, str(tmp_path), config):
            assert "optim='adafactor' updates whole weights, which parameters=" in found


def train_in_bf16(folder: str) -> list[dict[str, Tensor]]:
    """Weights and their fp32 copies after four steps, in one go and resumed after two."""
    settings = {"max_steps": NUM_STEPS, "save_strategy": "steps", "save_steps": 2, "warmup_steps": 0, "optim": "adafactor"}
    found = []
    for before in ("", "checkpoint-2"):
        case = ModelCase(dtype=torch.bfloat16)
        run = str(Path(folder, "again" if before else "first"))
        trainer = make_trainer(case, ROWS, run, {"tokens_per_rank": 64, "parameters": "sharded"}, settings)
        trainer.train(str(Path(folder, "first", before)) if before else None)
        states = trainer._plain_optimizer.state
        values = {name: whole(weight.detach()).clone() for name, weight in trainer.model.named_parameters()}
        values |= {
            f"{name} copy": whole(states[weight][MASTER_WEIGHT]).clone() for name, weight in trainer.model.named_parameters()
        }
        found.append(values)
    return found


@pytest.mark.wide
@resuming
def test_fp32_copies_of_bf16_weights_stay_shards_and_pass_through_checkpoints(ranks, tmp_path: Path) -> None:
    for first, again in ranks(2).run(train_in_bf16, str(tmp_path)):
        assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)
        copies = [name for name in first if name.endswith(" copy")]
        # updates that bf16 cannot hold are in the copies
        assert len(copies) == len(first) // 2
        assert any(not torch.equal(first[name], first[name].bfloat16().float()) for name in copies)
