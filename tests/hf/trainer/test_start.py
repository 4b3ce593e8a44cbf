"""The start of a trainer: models by name, models that are none, and methods of subclasses that plans would never call."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from helpers.models.reference import random_rows, reference_step
from helpers.models.tiny_models import ModelCase, build_model
from helpers.trainers.trainer_runs import make_trainer, training_arguments
from torch import nn
from transformers import Trainer

from hf_longctx import LongContextMixin, LongContextTrainer

ROWS = random_rows([9, 5, 14, 7, 12, 6, 4, 10])


def loaded_on_rank(name: Any, folder: str, config: dict[str, Any]) -> tuple[str, float, Any]:
    """The class and the data type of a model that was loaded by its name, and its loss before any training."""
    trainer = make_trainer(ModelCase(), ROWS, folder, config, model=name, eval_dataset=datasets.Dataset.from_list(ROWS))
    loss = trainer.evaluate()["eval_loss"]
    trainer.train()
    return type(trainer.model).__name__, loss, next(trainer.model.parameters()).dtype


@pytest.mark.daily("replicated")
@pytest.mark.parametrize("config", [{}, {"parameters": "sharded"}, {"stages": 2}], ids=["replicated", "sharded", "staged"])
def test_a_model_loads_by_its_folder_as_trl_loads_it(ranks, tmp_path: Path, config: dict[str, Any]) -> None:
    model = build_model(ModelCase())
    model.save_pretrained(tmp_path / "model")
    expected, _ = reference_step(model, ROWS)
    for name in (str(tmp_path / "model"), tmp_path / "model"):
        for kind, loss, dtype in ranks(2).run(loaded_on_rank, name, str(tmp_path / "out"), config):
            # in fp32, whatever the file holds
            assert (kind.removeprefix("FSDP"), dtype) == ("LlamaForCausalLM", torch.float32)
            assert loss == pytest.approx(expected, abs=1e-5)


def refusal(model: Any, cls: type = LongContextTrainer, **kwargs: Any) -> str:
    """Why a trainer with this model does not start."""
    rows = datasets.Dataset.from_list(ROWS)
    with tempfile.TemporaryDirectory() as folder, pytest.raises(ValueError, match="this run cannot start") as refused:
        cls(model=model, args=training_arguments(folder), train_dataset=rows, **kwargs)
    return str(refused.value)


@pytest.mark.parametrize(
    "model,message",
    [
        (None, "the trainer has no model and no model_init; pass one of them"),
        ("no/such-folder/here", "model is 'no/such-folder/here', which cannot be loaded"),
        (7, "model is int; pass a loaded transformers model (PreTrainedModel), or its folder or name as text"),
        (nn.Linear(2, 2), "model is Linear; pass a loaded transformers model"),
        (build_model, "model is function; pass a loaded transformers model"),
    ],
)
def test_what_is_no_model_is_refused_by_its_kind(model: Any, message: str) -> None:
    assert message in refusal(model)
    if model is None:
        assert "model is str; pass a loaded" in refusal(None, model_init=lambda: "name")
        assert "model and model_init were given" in refusal(build_model(ModelCase()), model_init=lambda: "name")


def overriding(name: str, does: Any = None) -> type:
    """A trainer that overrides one method."""
    return type("Mine", (LongContextTrainer,), {name: does or (lambda self, *args, **kwargs: None)})


NEVER_CALLED = {
    "compute_loss": "pass the loss of a token as token_loss=...",
    "_get_train_sampler": "train_sampling_strategy='sequential'",
    "_get_eval_sampler": "order the rows of the set",
    "prediction_step": "use compute_metrics or predict()",
    "_prepare_inputs": "do its work on the rows",
    "_get_num_items_in_batch": "a column 'loss_weights'",
}
WITHOUT_SUPER = [
    *("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "training_step", "get_batch_samples"),
    *("evaluation_loop", "predict"),
]


@pytest.mark.parametrize("name", NEVER_CALLED)
def test_a_method_that_plans_never_call_is_refused_with_what_to_do(name: str) -> None:
    message = refusal(build_model(ModelCase()), overriding(name))
    assert f"Mine.{name} would never be called: " in message and NEVER_CALLED[name] in message


@pytest.mark.parametrize("name", WITHOUT_SUPER)
def test_an_override_that_cannot_call_ours_is_refused(name: str) -> None:
    assert f"Mine.{name} never calls super().{name}()" in refusal(build_model(ModelCase()), overriding(name))


@pytest.mark.wide
def test_overrides_that_may_call_ours_start() -> None:
    class Mine(LongContextTrainer):
        def get_train_dataloader(self) -> Any:
            return super().get_train_dataloader()

        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            return LongContextTrainer.evaluation_loop(self, *args, **kwargs)

        def predict(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(super(), "predict")(*args, **kwargs)  # noqa: B009

    def logged(method: Any) -> Any:
        return lambda self, *args: method(self, *args)

    # a wrapper may call anything
    Mine.training_step = logged(LongContextTrainer.training_step)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Mine(
            build_model(ModelCase()), training_arguments(folder, max_steps=1), train_dataset=datasets.Dataset.from_list(ROWS)
        )
        trainer.train()


def test_stock_loops_by_hand_have_the_models_own_loss(tmp_path: Path) -> None:
    trainer = make_trainer(ModelCase(), ROWS, str(tmp_path))
    batch = {name: torch.tensor([ROWS[0][name]]) for name in ("input_ids", "labels")}
    expected = float(trainer.model(**batch).loss)
    assert float(trainer.compute_loss(trainer.model, batch)) == pytest.approx(expected)
    loss, _, _ = trainer.prediction_step(trainer.model, batch, prediction_loss_only=True)
    assert float(loss) == pytest.approx(expected)


def test_a_class_behind_the_mixin_is_asked_to_move(tmp_path: Path) -> None:
    class OwnSet(Trainer):
        def get_test_dataloader(self, test_dataset: Any) -> Any:
            return None

    class Behind(LongContextMixin, OwnSet):
        pass

    assert "Behind inherits get_test_dataloader from a class after LongContextMixin" in refusal(build_model(ModelCase()), Behind)
