"""A run that resumes with other frozen weights or groups than its checkpoint's is refused by name, before it reads any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.ranks.rank_steps import whole
from helpers.trainers.trainer_runs import make_trainer

from hf_longctx import LongContextTrainer

CASE = ModelCase()
FROZEN = "model.layers.1.mlp.up_proj.weight"
ROWS = random_rows([13, 5, 8, 21] * 4)
ARGUMENTS = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}
# name -> ranks, settings
PLACEMENTS: dict[str, tuple[int, dict[str, Any]]] = {
    "replicated": (1, {}),
    "states on the host": (1, {"optimizer_states": "host"}),
    "sharded": (2, {"parameters": "sharded"}),
    "stages": (2, {"stages": 2}),
}


def freeze(model: Any) -> None:
    model.get_parameter(FROZEN).requires_grad_(False)


class Regrouped(LongContextTrainer):
    """Gives its optimizer the same weights in other groups, or in another order."""

    way = "moved"

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(model)
        first, second = optimizer.param_groups[0]["params"], optimizer.param_groups[1]["params"]
        if self.way == "moved":
            second.append(first.pop())
        elif self.way == "swapped":
            first[:2] = reversed(first[:2])
        return optimizer


def train(
    folder: str, config: dict[str, Any], is_frozen: bool, is_resumed: bool, way: str = ""
) -> tuple[str, bool, dict[str, Any]]:
    """The message of a refusal, whether the model is as it was before the training, and this rank's weights after it."""
    model: Any = build_model(CASE)
    if is_frozen:
        freeze(model)
    trainer: Any = make_trainer(CASE, ROWS, folder, config, ARGUMENTS, model=model)
    if way:
        trainer.__class__ = type("Own", (Regrouped,), {"way": way})
    # a model in stages has a part of these
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    try:
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if is_resumed else None)
    except ValueError as error:
        if way:
            # groups are known when the weights were read, and perhaps sharded
            return str(error), False, {}
        now = {name: weight.detach() for name, weight in model.named_parameters()}
        return str(error), all(torch.equal(now[name], before[name]) for name in now), {}
    return "", False, {name: whole(weight.detach()).clone() for name, weight in trainer.model.named_parameters()}


def runs(folder: str, config: dict[str, Any]) -> tuple[list[tuple[str, bool]], bool]:
    """Refusals of runs that resume with a weight frozen and no longer frozen, and whether one with the same weights goes on."""
    ends, found = [], []
    for was_frozen in (False, True):
        own = f"{folder}/{was_frozen}"
        _, _, uninterrupted = train(own, config, was_frozen, is_resumed=False)
        found.append(train(own, config, not was_frozen, is_resumed=True)[:2])
        message, _, resumed = train(own, config, was_frozen, is_resumed=True)
        is_equal = {name: torch.equal(weight, uninterrupted[name]) for name, weight in resumed.items()}
        ends.append(not message and is_equal.keys() == uninterrupted.keys() and all(is_equal.values()))
    if dist.is_initialized():
        dist.barrier()
    return found, all(ends)


@pytest.mark.wide
@pytest.mark.parametrize("name", PLACEMENTS)
def test_other_frozen_weights_are_refused_by_name_and_equal_ones_go_on(ranks, tmp_path: Path, name: str) -> None:
    num_ranks, config = PLACEMENTS[name]
    for (frozen, thawed), is_exact in ranks(num_ranks).run(runs, str(tmp_path), config):
        for (message, is_unchanged), words in (
            (frozen, f"1 of the model's weights were trained then and are frozen or missing now ({FROZEN})"),
            (thawed, f"1 of the model's weights were frozen or missing then and are trained now ({FROZEN})"),
        ):
            assert words in message and "freeze and group weights as in that run" in message, message
            assert is_unchanged
        assert is_exact


def regrouped(folder: str, config: dict[str, Any]) -> list[str]:
    train(folder, config, False, is_resumed=False)
    return [train(folder, config, False, is_resumed=True, way=way)[0] for way in ("moved", "swapped")]


@pytest.mark.daily("replicated")
@pytest.mark.parametrize("name", ["replicated", "sharded"])
def test_other_groups_are_refused_and_another_order_where_states_are_numbered(ranks, tmp_path: Path, name: str) -> None:
    num_ranks, config = PLACEMENTS[name]
    for moved, swapped in ranks(num_ranks).run(regrouped, str(tmp_path), config):
        assert "1 weights were in other groups of its optimizer" in moved and "in group 0, now in group 1" in moved
        assert ("had its weights in another order" in swapped) == (name == "replicated"), swapped


def without_record(folder: str) -> str:
    train(folder, {}, False, is_resumed=False)
    checkpoint = Path(folder, "checkpoint-2")
    # leaves the files of a checkpoint of plain transformers
    for name in ("longctx_trained.json", "longctx_checkpoint.json"):
        (checkpoint / name).unlink()
    return train(folder, {}, True, is_resumed=True)[0]


def test_a_checkpoint_without_names_is_refused_in_our_words(ranks, tmp_path: Path) -> None:
    (message,) = ranks(1).run(without_record, str(tmp_path))
    assert "are those of other weights (loaded state dict contains a parameter group that doesn't match" in message


class AllWeights(LongContextTrainer):
    """Gives its optimizer frozen weights, too."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        return self.optimizer


def of_all_weights(folder: str) -> bool:
    """Whether a run whose optimizer has a frozen weight goes on where it was left."""
    ends = []
    for checkpoint in (None, f"{folder}/checkpoint-2"):
        model: Any = build_model(CASE)
        freeze(model)
        trainer: Any = make_trainer(CASE, ROWS, folder, {}, ARGUMENTS, model=model)
        trainer.__class__ = AllWeights
        trainer.train(resume_from_checkpoint=checkpoint)
        ends.append([weight.detach().clone() for weight in model.parameters()])
    return all(map(torch.equal, *ends))


def test_frozen_weights_in_an_optimizer_are_no_others_when_it_resumes(ranks, tmp_path: Path) -> None:
    assert ranks(1).run(of_all_weights, str(tmp_path)) == [True]
