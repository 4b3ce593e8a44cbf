"""Gradients of a training leave for the host early where nothing of the user's may change them, with equal weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase
from helpers.trainers.trainer_runs import make_trainer

from hf_longctx.hf.rules.user_code import changes_before_updates
from hf_longctx.hf.trainer.parameters import ParameterMixin
from hf_longctx.runtime.parameters.host_steps import HostSteps

CASE = ModelCase(dtype=torch.bfloat16, tied=True)
ARGUMENTS = {"max_steps": 3, "learning_rate": 1e-3, "warmup_steps": 0, "save_strategy": "no"}
CONFIG = {"tokens_per_rank": 64, "optimizer_states": "host"}


class Doubling(transformers.TrainerCallback):
    """Doubles gradients where no version counter sees it."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for weight in model.parameters():
            weight.grad.data.mul_(2.0)


class Watching(transformers.TrainerCallback):
    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        return


def trained(folder: str, arguments: dict[str, Any], callback: Any, is_early: bool) -> tuple[int, dict[str, torch.Tensor]]:
    """How many gradients left early, and the weights after a training."""
    counted, send = [], HostSteps.send_early
    trainer = make_trainer(CASE, random_rows([40, 22, 9, 31]), folder, CONFIG, {**ARGUMENTS, **arguments})
    trainer.add_callback(callback)
    with patch.object(HostSteps, "send_early", lambda *each: (counted.append(each[1]), send(*each))[1]):
        if is_early:
            trainer.train()
        else:
            with patch.object(ParameterMixin, "_early_updates", lambda self: None):
                trainer.train()
    return len(counted), {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}


@pytest.mark.daily("clipped-Doubling")
@pytest.mark.parametrize("callback", [Watching, Doubling])
@pytest.mark.parametrize(
    "arguments",
    [{"max_grad_norm": 1e-2}, {"max_grad_norm": 1e4}, {"max_grad_norm": 0.0, "gradient_accumulation_steps": 2}],
    ids=["clipped", "below the limit", "no clipping"],
)
def test_trainings_with_and_without_early_copies_are_equal(
    ranks, tmp_path: Path, arguments: dict[str, Any], callback: Any
) -> None:
    results = [ranks(1).run(trained, str(tmp_path), arguments, callback, is_early)[0] for is_early in (True, False)]
    (num_early, early), (none, late) = results
    # the first step only looks
    assert none == 0 and (num_early > 0) == (callback is Watching)
    assert all(torch.equal(early[name], late[name]) for name in late)


def answers(folder: str) -> list[bool]:
    """Whether something may change gradients, for a plain trainer and with code of the user's in several places."""
    trainer = make_trainer(CASE, random_rows([12, 9]), folder, CONFIG, ARGUMENTS)
    trainer.create_optimizer_and_scheduler(3)
    trainer.optimizer = trainer.accelerator.prepare(trainer.optimizer)
    plain = trainer._plain_optimizer
    found = [changes_before_updates(trainer, plain)]
    for owner, name in (
        (trainer, "training_step"),
        (trainer, "_clip_grad_norm"),
        (trainer.accelerator, "clip_grad_norm_"),
        (trainer.optimizer, "step"),
        (plain, "step"),
    ):
        own = getattr(owner, name)

        def wrapped(*args: Any, own: Any = own, **kwargs: Any) -> Any:
            return own(*args, **kwargs)

        wrapped.__module__ = "torch"
        with patch.object(owner, name, wrapped):
            found.append(changes_before_updates(trainer, plain))
    return [*found, changes_before_updates(trainer, plain)]


def test_code_of_the_user_is_found(ranks, tmp_path: Path) -> None:
    assert ranks(1).run(answers, str(tmp_path)) == [[False, True, True, True, True, True, False]]
