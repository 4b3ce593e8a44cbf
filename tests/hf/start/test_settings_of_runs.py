"""Whole runs with settings that other trainers obey: those without effect, FSDP, activation checkpointing, `model_init`."""

from __future__ import annotations

import importlib
import logging
import os
import re
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from accelerate import DistributedType
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.ranks.rank_steps import whole
from helpers.trainers.stock_runs import quiet_config
from helpers.trainers.trainer_runs import make_trainer, training_arguments
from torch import Tensor
from transformers import Trainer, TrainerCallback
from transformers.hyperparameter_search import OptunaBackend
from transformers.integrations import integration_utils
from transformers.trainer_utils import BestRun, HPSearchBackend

from hf_longctx import LongContextCallback, LongContextTrainer, from_deepspeed
from hf_longctx.hf.rules.training_arguments import SETTINGS
from hf_longctx.hf.trainer import trainer as trainer_module

CASE = ModelCase(dtype=torch.float32)
ROWS = random_rows([40, 22, 9, 31, 5, 12, 17, 8])
STEPS = {"max_steps": 2, "learning_rate": 1e-2, "warmup_steps": 0}


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def run(folder: str, config: dict[str, Any], arguments: dict[str, Any], variables: dict[str, str]) -> dict[str, Any]:
    """Trains and evaluates under an environment; returns weights, loss, kind of parameters, and warnings about settings."""
    heard = Warnings()
    logging.getLogger("hf_longctx").addHandler(heard)
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        trainer = make_trainer(CASE, ROWS, folder, config, {**STEPS, **arguments}, eval_dataset=ROWS[:4])
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        asked = bool(trainer.args.gradient_checkpointing)
        is_left = [os.environ.get(name) for name in variables] == list(variables.values())
    finally:
        os.environ.clear()
        os.environ.update(before)
        logging.getLogger("hf_longctx").removeHandler(heard)
    about = [each for each in heard.messages if "effect" in each or "becomes" in each or "is replaced by" in each]
    return {
        "weights": {name: whole(weight.detach()).clone() for name, weight in trainer.model.named_parameters()},
        "loss": loss,
        "parameters": trainer.longctx_run.setup.costs.parameters,
        "recomputes": any(getattr(module, "gradient_checkpointing", False) for module in trainer.model.modules()),
        "asked": asked,
        "is_left": is_left,
        "said": about,
    }


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


IDLE: dict[str, Any] = {
    **{"ddp_find_unused_parameters": True, "ddp_bucket_cap_mb": 5, "ddp_broadcast_buffers": True, "ddp_static_graph": True},
    **{"eval_accumulation_steps": 1, "label_names": ["labels"], "eval_use_gather_object": True, "eval_do_concat_batches": False},
    **{"batch_eval_metrics": True, "include_for_metrics": ["inputs"], "logging_nan_inf_filter": False},
    **{"remove_unused_columns": False, "length_column_name": "size", "train_sampling_strategy": "group_by_length"},
    "accelerator_config": {"split_batches": True, "even_batches": False},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict[str, Any]:
    return run(str(tmp_path_factory.mktemp("plain")), {}, {}, {})


def test_settings_without_effect_change_nothing_and_are_one_warning(plain, tmp_path: Path) -> None:
    found = run(str(tmp_path), {}, IDLE, {})
    assert equal(found["weights"], plain["weights"]) and found["loss"] == plain["loss"]
    (warning,) = found["said"]
    assert all(name in warning for name in IDLE)
    # every setting of which the table says that it has no effect was changed
    assert {name for name, setting in SETTINGS.items() if setting.state == "no effect"} <= set(IDLE)
    assert plain["said"] == []


FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}


@pytest.mark.wide
@pytest.mark.parametrize("origin", ["accelerate", "arguments"])
def test_an_fsdp_configuration_becomes_our_setting(ranks, tmp_path: Path, origin: str) -> None:
    pool = ranks(2)
    own = pool.run(run, str(tmp_path / "own"), {"parameters": "sharded"}, {}, {})
    arguments = {} if origin == "accelerate" else {"fsdp": True}
    found = pool.run(run, str(tmp_path / "fsdp"), {}, arguments, FSDP if origin == "accelerate" else {})
    for rank, (sharded, translated) in enumerate(zip(own, found, strict=True)):
        assert sharded["parameters"] == translated["parameters"] == "sharded"
        assert equal(sharded["weights"], translated["weights"])
        assert translated["is_left"]
        assert len(translated["said"]) == (rank == 0) and "becomes LongContextConfig(parameters='sharded')" in "".join(
            found[0]["said"]
        )


def test_what_fsdp_alone_can_do_is_refused_on_every_rank(ranks, tmp_path: Path) -> None:
    for found in ranks(2).run(refusal, str(tmp_path), {**FSDP, "FSDP_OFFLOAD_PARAMS": "true"}):
        assert "offloads parameters to the CPU (cpu_offload, FSDP_OFFLOAD_PARAMS), which is not supported" in found


def refusal(folder: str, variables: dict[str, str]) -> str:
    try:
        run(folder, {}, {}, variables)
    except ValueError as error:
        return str(error)
    return ""


# stage and offloading of a DeepSpeed configuration -> our settings
ZEROS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stage 2": ({"stage": 2, "overlap_comm": True}, {"parameters": "gathered_per_round"}),
    "stage 3": ({"stage": 3}, {"parameters": "sharded"}),
    "on the host": (
        {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        {"parameters": "sharded", "optimizer_states": "host", "layer_weights": "host"},
    ),
}
# the blocks of optimizer and schedule, with the rate of STEPS and a schedule that is not the arguments' own
DEEPSPEED: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 2}},
    "gradient_clipping": 0.5,
}
OURS: dict[str, Any] = {
    **{"weight_decay": 0.1, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2, "max_grad_norm": 0.5},
    **{"max_steps": 4, "optim": "adamw_torch_fused"},
}
# values that DeepSpeed's configuration replaces, whatever the arguments say
OTHERS = {"lr_scheduler_type": "linear", "optim": "adafactor"}


def run_of_dictionary(folder: str, source: dict[str, Any]) -> dict[str, Any]:
    """Trains with the settings that a DeepSpeed configuration becomes."""
    found = from_deepspeed(source)
    return run(folder, found.config, {**found.arguments, "max_steps": 4}, {})


def run_with_field(folder: str, source: dict[str, Any], mark: bool) -> tuple[dict[str, Tensor], list[str]]:
    """Trains with the field `deepspeed`, set on finished arguments as if DeepSpeed were installed; returns weights and warnings.

    mark: the state of accelerate says DeepSpeed, as on CUDA after `TrainingArguments(deepspeed=...)`.
    """
    args = training_arguments(folder, per_device_train_batch_size=4, **{**STEPS, **OURS, **OTHERS})
    args.deepspeed = source
    kind = args.distributed_state.distributed_type
    if mark:
        args.distributed_state.distributed_type = DistributedType.DEEPSPEED
    rows, heard = datasets.Dataset.from_list(ROWS), Warnings()
    logging.getLogger("hf_longctx").addHandler(heard)
    try:
        trainer = LongContextTrainer(build_model(CASE), args, train_dataset=rows, longctx_config=quiet_config())
    finally:
        logging.getLogger("hf_longctx").removeHandler(heard)
    assert args.deepspeed == source and trainer.accelerator.distributed_type == kind and not trainer.is_deepspeed_enabled
    trainer.train()
    assert args.deepspeed == source and {name: getattr(args, name) for name in OTHERS} == OTHERS
    return {name: whole(weight.detach()).clone() for name, weight in trainer.model.named_parameters()}, heard.messages


@pytest.mark.wide("stage 2")
@pytest.mark.parametrize("name", ZEROS)
def test_a_deepspeed_configuration_becomes_our_settings(ranks, tmp_path: Path, name: str) -> None:
    zero, config = ZEROS[name]
    source, pool = {**DEEPSPEED, "zero_optimization": zero}, ranks(2)
    own = pool.run(run, str(tmp_path / "own"), config, OURS, {})
    found = pool.run(run_of_dictionary, str(tmp_path / "translated"), source)
    by_field = pool.run(run_with_field, str(tmp_path / "field"), source, name == "stage 3")
    for rank, (ours, theirs, (weights, said)) in enumerate(zip(own, found, by_field, strict=True)):
        assert ours["parameters"] == theirs["parameters"] == config["parameters"]
        assert equal(ours["weights"], theirs["weights"]) and ours["loss"] == theirs["loss"]
        assert equal(ours["weights"], weights)
        assert sum("becomes LongContextConfig(parameters=" in line for line in said) == (rank == 0)


@pytest.mark.daily("changes1-fsdp or deepspeed was changed after the trainer was made")
@pytest.mark.parametrize(
    "changes,message",
    [
        ({"max_grad_norm": 1.0}, "asks for max_grad_norm=0.5, but max_grad_norm is 1.0"),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, "fsdp or deepspeed was changed after the trainer was made"),
        ({"deepspeed": {"stage": 3}}, "stage is unknown; did you mean zero_optimization.stage?"),
        ({"fsdp": True}, "fsdp or deepspeed was changed after the trainer was made"),
    ],
)
def test_what_is_translated_cannot_change_after_the_trainer_was_made(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    args = training_arguments(str(tmp_path), per_device_train_batch_size=4, max_steps=1)
    args.deepspeed = {"gradient_clipping": 0.5}
    rows = datasets.Dataset.from_list(ROWS)
    trainer = LongContextTrainer(build_model(CASE), args, train_dataset=rows, longctx_config=quiet_config())
    before = {name: getattr(args, name) for name in changes}
    for name, value in changes.items():
        setattr(args, name, value)
    with pytest.raises(ValueError, match=re.escape(message)):
        trainer.train()
    for name, value in before.items():
        setattr(args, name, value)
    assert trainer.train().global_step == 1


def test_checkpointing_becomes_a_line_and_trains_as_without(plain, tmp_path: Path) -> None:
    arguments = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    found = run(str(tmp_path), {}, arguments, {})
    assert equal(found["weights"], plain["weights"])
    (line,) = found["said"]
    assert "gradient_checkpointing=True becomes LongContextConfig(activations='auto')" in line
    # the model is not switched, and the arguments are the user's again
    assert not found["recomputes"] and found["asked"]


class Tracker(TrainerCallback):
    def on_train_begin(self, args: Any, *others: Any, **kwargs: Any) -> None:
        self.seen = args.to_dict()


@pytest.mark.wide
@pytest.mark.parametrize("is_stock", [False, True], ids=["ours", "callback alone"])
def test_checkpoints_and_trackers_have_the_arguments_of_the_user(tmp_path: Path, is_stock: bool) -> None:
    arguments = {**STEPS, "gradient_checkpointing": True, "save_strategy": "steps", "save_steps": 1}
    if is_stock:
        args = training_arguments(str(tmp_path), **arguments, per_device_train_batch_size=2)
        collator = transformers.DataCollatorWithFlattening()
        callbacks = [LongContextCallback(quiet_config())]
        Trainer(build_model(CASE), args, collator, train_dataset=ROWS, callbacks=callbacks).train()
    else:
        trainer = make_trainer(CASE, ROWS, str(tmp_path), {}, {**arguments, "fsdp": True})
        trainer.add_callback(tracker := Tracker())
        trainer.train()
        assert tracker.seen["gradient_checkpointing"] and tracker.seen["fsdp"]
    saved = torch.load(tmp_path / "checkpoint-1" / "training_args.bin", weights_only=False)
    assert saved.gradient_checkpointing and bool(saved.fsdp) != is_stock


class Watching(TrainerCallback):
    def on_step_begin(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        self.recomputes = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


@pytest.mark.daily("alone")
@pytest.mark.parametrize("mode", ["attached", "alone"])
def test_a_stock_trainer_leaves_recomputing_to_plans_until_its_training_ends(tmp_path: Path, mode: str, caplog: Any) -> None:
    watching, callback = Watching(), LongContextCallback(quiet_config())
    args = training_arguments(str(tmp_path), **STEPS, gradient_checkpointing=True, per_device_train_batch_size=2)
    callbacks = [watching, *([callback] if mode == "alone" else [])]
    collator = transformers.DataCollatorWithFlattening()
    trainer = Trainer(model=build_model(CASE), args=args, train_dataset=ROWS, data_collator=collator, callbacks=callbacks)
    if mode == "attached":
        callback.attach(trainer)
    trainer.train()
    assert watching.recomputes is False and trainer.args.gradient_checkpointing
    assert sum("becomes LongContextConfig(activations='auto')" in each for each in caplog.messages) == 1


def test_caches_are_emptied_as_often_as_asked_for(tmp_path: Path, monkeypatch: Any) -> None:
    counted: list[int] = []
    monkeypatch.setattr(trainer_module, "clear_device_cache", lambda: counted.append(1))
    make_trainer(CASE, ROWS, str(tmp_path), {}, {**STEPS, "max_steps": 4, "torch_empty_cache_steps": 2}).train()
    assert len(counted) == 2


def test_a_loader_has_the_settings_of_the_arguments(tmp_path: Path) -> None:
    arguments = {"dataloader_num_workers": 1, "dataloader_multiprocessing_context": "fork", "dataloader_prefetch_factor": 3}
    arguments |= {"dataloader_persistent_workers": True, "dataloader_pin_memory": True}
    loader = make_trainer(CASE, ROWS, str(tmp_path), {}, arguments).get_train_dataloader()
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (1, 3, True)
    assert loader.multiprocessing_context.get_start_method() == "fork"
    # memory is pinned for a GPU alone
    assert loader.pin_memory is False


def fresh(folder: str, config: dict[str, Any], arguments: dict[str, Any]) -> tuple[LongContextTrainer, list[Any]]:
    """A trainer that makes its models itself, and the trials for which it made them."""
    asked: list[Any] = []
    made: list[weakref.ref[Any]] = []

    def model_init(trial: Any) -> Any:
        assert not any(model() is not None for model in made), "an old model stays beside the new one"
        asked.append(trial)
        model = build_model(CASE)
        made.append(weakref.ref(model))
        return model

    args = training_arguments(folder, **{**STEPS, "per_device_train_batch_size": 8, **arguments})
    rows = datasets.Dataset.from_list(ROWS)
    trainer = LongContextTrainer(
        model_init=model_init, args=args, train_dataset=rows, eval_dataset=rows, longctx_config=quiet_config(**config)
    )
    return trainer, asked


def weights_of(trainer: Any) -> dict[str, Tensor]:
    return {name: whole(weight.detach()).clone() for name, weight in trainer.model.named_parameters()}


def train_twice(folder: str) -> list[dict[str, Tensor]]:
    trainer, asked = fresh(folder, {"parameters": "sharded"}, {"per_device_train_batch_size": 4})
    found = []
    for _ in range(2):
        trainer.train()
        trainer.evaluate()
        found.append(weights_of(trainer))
    assert len(asked) == 3
    return found


@pytest.mark.wide
def test_every_training_starts_anew_on_a_fresh_model(ranks, tmp_path: Path) -> None:
    pool = ranks(2)
    expected = pool.run(run, str(tmp_path / "plain"), {"parameters": "sharded"}, {}, {})[0]["weights"]
    for first, second in pool.run(train_twice, str(tmp_path / "fresh")):
        assert equal(first, expected) and equal(second, expected)


@pytest.mark.wide
def test_every_training_on_a_fresh_model_prints_its_logs_and_evaluations(tmp_path: Path, capsys: Any) -> None:
    trainer, _ = fresh(str(tmp_path), {"report_steps": True}, {"logging_steps": 1})
    for _ in range(2):
        trainer.train()
        trainer.evaluate()
        said = capsys.readouterr().out
        assert said.count(" | lr ") == 2 and "trained up to step 2" in said and "evaluation after step 2" in said


def test_a_training_whose_fresh_model_could_not_be_made_can_be_tried_again(tmp_path: Path) -> None:
    trainer, asked = fresh(str(tmp_path), {}, {})
    make, trainer.model_init = trainer.model_init, broken_init
    with pytest.raises(OSError, match="no such model"):
        trainer.train()
    trainer.model_init = make
    trainer.train()
    assert trainer.state.global_step == 2 and len(asked) == 2


def broken_init() -> Any:
    raise OSError("no such model")


class Trial(dict[str, Any]):
    """A trial as transformers takes one: a mapping of settings, with the number and the settings that optuna's have."""

    def __init__(self, number: int, params: dict[str, Any]) -> None:
        super().__init__(params)
        self.number, self.params = number, params


TRIALS = [{"learning_rate": 1e-2}, {"learning_rate": 3e-2, "per_device_train_batch_size": 4}, {"optim": "sgd"}]


@pytest.mark.wide
def test_a_search_trains_each_trial_as_a_run_of_its_own(tmp_path: Path, monkeypatch: Any) -> None:
    trained: list[dict[str, Tensor]] = []
    # its first import keeps the calls above it alive, and with them the model of a training
    with suppress(ImportError):
        importlib.import_module("optuna")

    class Backend(OptunaBackend):
        @staticmethod
        def is_available() -> bool:
            return True

        def run(self, trainer: Any, n_trials: int, direction: str, **kwargs: Any) -> BestRun:
            losses = []
            for number, params in enumerate(TRIALS[:n_trials]):
                trainer.train(trial=Trial(number, params))
                losses.append(trainer.compute_objective(trainer.evaluate()))
                trained.append(weights_of(trainer))
                # optuna's loop does this
                trainer.model_wrapped = trainer.model = None
                trainer.accelerator.clear()
            best = min(range(n_trials), key=losses.__getitem__)
            return BestRun(str(best), losses[best], TRIALS[best])

    # a package that is not installed would have to know the kind of the trial
    monkeypatch.setattr(integration_utils, "is_ray_tune_available", lambda: True)
    monkeypatch.setitem(transformers.trainer.ALL_HYPERPARAMETER_SEARCH_BACKENDS, HPSearchBackend.OPTUNA, Backend)
    trainer, asked = fresh(str(tmp_path / "search"), {}, {})
    best = trainer.hyperparameter_search(hp_space=lambda trial: trial.params, n_trials=3, backend="optuna")
    assert [trial and trial.number for trial in asked] == [None, 0, 1, 2] and best.run_id in ("0", "1", "2")
    # settings of one trial stay for the next, as in `Trainer`
    settings: dict[str, Any] = {}
    for number, params in enumerate(TRIALS):
        settings |= params
        assert equal(trained[number], run(str(tmp_path / str(number)), {}, settings, {})["weights"]), number


def search(folder: str) -> tuple[str, dict[str, Any], list[int | None], float]:
    """A search with optuna on this rank: the best trial, its settings, trials for which models were made, the objective."""
    trainer, asked = fresh(folder, {}, {"per_device_train_batch_size": 4})
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True)},
        **{"n_trials": 2, "backend": "optuna", "direction": "minimize"},
    )
    numbers = [getattr(trial, "number", None) for trial in asked]
    # other ranks follow the first one, which alone knows the result
    return ("", {}, numbers, 0.0) if best is None else (best.run_id, best.hyperparameters, numbers, best.objective)


@pytest.mark.wide
def test_optuna_searches_on_one_rank_and_on_two(ranks, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    alone = search(str(tmp_path / "alone"))
    together = ranks(2).run(search, str(tmp_path / "together"))
    for run_id, settings, numbers, objective in (alone, together[0]):
        assert run_id in ("0", "1") and 1e-4 <= settings["learning_rate"] <= 1e-2
        # the loss, not the sum of perplexity, accuracy and entropy, which would be near 100
        assert numbers == [None, 0, 1] and 3 < objective < 6
    # every rank made a model for every trial
    assert len(together[1][2]) == 3


def test_a_model_and_its_maker_are_not_both_taken(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model and model_init were given; pass one of them"):
        LongContextTrainer(build_model(CASE), training_arguments(str(tmp_path)), model_init=lambda: build_model(CASE))
    stock = Trainer(model_init=lambda: build_model(CASE), args=training_arguments(str(tmp_path)), train_dataset=ROWS)
    with pytest.raises(ValueError, match="the trainer argument model_init is not supported; pass a model"):
        LongContextCallback(quiet_config()).attach(stock)
