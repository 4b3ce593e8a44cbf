"""Arguments that are changed on a built trainer: obeyed as a stock trainer obeys them, or refused by name."""

from __future__ import annotations

import dataclasses
import tempfile
from typing import Any

import pytest
import torch
from datasets import Dataset
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.trainers.stock_runs import make_stock_trainer, quiet_config
from helpers.trainers.trainer_runs import make_trainer, training_arguments

from hf_longctx import LongContextCallback, LongContextTrainer

CASE = ModelCase(num_layers=1, promoted=True)
# one row a batch, so that a stock trainer needs no padding, and steps of two batches
ROWS = random_rows([9, 5, 13, 7, 11, 6])
BATCHES = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 3}
ARGUMENTS: dict[str, Any] = {**BATCHES, "train_sampling_strategy": "sequential", "warmup_steps": 1}
# field -> the value to which it is set late, which trains something else
OBEYED: dict[str, Any] = {
    "learning_rate": 3e-2,
    "weight_decay": 0.5,
    "adam_beta1": 0.5,
    "adam_epsilon": 0.1,
    "max_grad_norm": 0.01,
    "gradient_accumulation_steps": 3,
    "max_steps": 2,
    "lr_scheduler_type": "constant",
    "warmup_steps": 3,
    "optim": "sgd",
}


def weights_after(trainer: Any, late: dict[str, Any]) -> torch.Tensor:
    """All trained weights, flat, of a training whose arguments are changed after the trainer was made."""
    for name, value in late.items():
        setattr(trainer.args, name, value)
    trainer.train()
    return torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])


def ours(late: dict[str, Any], **arguments: Any) -> torch.Tensor:
    with tempfile.TemporaryDirectory() as folder:
        return weights_after(make_trainer(CASE, ROWS, folder, {}, {**ARGUMENTS, **arguments}), late)


def stock(late: dict[str, Any], **arguments: Any) -> torch.Tensor:
    with tempfile.TemporaryDirectory() as folder:
        return weights_after(make_stock_trainer(CASE, ROWS, folder, {**ARGUMENTS, **arguments}), late)


@pytest.fixture(scope="module")
def unchanged() -> torch.Tensor:
    """Weights of a training without any change."""
    return ours({})


@pytest.mark.daily("optim")
@pytest.mark.parametrize("name", OBEYED)
def test_what_a_stock_trainer_reads_late_is_obeyed_as_there(unchanged: torch.Tensor, name: str) -> None:
    found, expected = ours({name: OBEYED[name]}), stock({name: OBEYED[name]})
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert not torch.allclose(found, unchanged, rtol=1e-6, atol=1e-8)


@pytest.mark.wide
def test_epochs_set_late_are_those_that_are_trained() -> None:
    late = {"num_train_epochs": 2.0}
    found, expected = ours(late, max_steps=-1, num_train_epochs=1.0), stock(late, max_steps=-1, num_train_epochs=1.0)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


# field -> the late value, part of the message
REFUSED: dict[str, tuple[Any, str]] = {
    "seed": (4, "seed is 4 now, but was 3 when the trainer was made, which chose random states and the order of steps"),
    "data_seed": (4, "data_seed is 4 now, but was None when the trainer was made"),
    "per_device_train_batch_size": (2, "per_device_train_batch_size is 2 now, but was 1 when the trainer was made"),
    "bf16": (True, "bf16 is True now, but was False when the trainer was made"),
    "use_liger_kernel": (True, "use_liger_kernel is True now, but was False when the trainer was made"),
    "fp16": (True, "fp16=True is not supported yet"),
    "average_tokens_across_devices": (False, "average_tokens_across_devices=False is not supported yet"),
}


@pytest.mark.parametrize("kind", ["ours", "attached"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_be_obeyed_is_refused_by_name(name: str, kind: str) -> None:
    value, message = REFUSED[name]
    with tempfile.TemporaryDirectory() as folder:
        if kind == "ours":
            trainer: Any = make_trainer(CASE, ROWS, folder, {}, ARGUMENTS)
        else:
            trainer = make_stock_trainer(CASE, ROWS, folder, ARGUMENTS)
            LongContextCallback(quiet_config()).attach(trainer)
        with pytest.raises(ValueError) as caught:
            weights_after(trainer, {name: value})
    assert message in str(caught.value) and trainer.state.global_step == 0


def test_a_batch_size_that_was_changed_before_a_callback_is_attached_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_stock_trainer(CASE, ROWS, folder, ARGUMENTS)
        trainer.args.per_device_train_batch_size = 2
        LongContextCallback(quiet_config()).attach(trainer)
        with pytest.raises(ValueError, match="per_device_train_batch_size is 2 now, but was 1 when"):
            trainer.train()


@pytest.mark.wide
def test_a_run_that_begins_anew_takes_the_batch_size_that_was_set_late() -> None:
    settings = {**ARGUMENTS, "gradient_accumulation_steps": 1}
    with tempfile.TemporaryDirectory() as folder:
        args = training_arguments(folder, **settings)
        trainer = LongContextTrainer(
            model_init=lambda: build_model(CASE), args=args, train_dataset=Dataset.from_list(ROWS), longctx_config=quiet_config()
        )
        found = weights_after(trainer, {"per_device_train_batch_size": 2})
    torch.testing.assert_close(found, ours({}, per_device_train_batch_size=2, gradient_accumulation_steps=1))
    assert not torch.allclose(found, ours({}, gradient_accumulation_steps=1), rtol=1e-6, atol=1e-8)


def test_other_arguments_in_place_of_the_first_are_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(CASE, ROWS, folder, {}, ARGUMENTS)
        trainer.args = dataclasses.replace(trainer.args, learning_rate=3e-2)
        with pytest.raises(ValueError, match=r"trainer\.args was replaced by another object"):
            trainer.train()
