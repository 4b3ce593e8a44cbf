"""Stages that the user left open: chosen on several nodes, one stage wherever something speaks against more, never an error."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import pytest
import torch
import torch.distributed as dist
from helpers.models.chats import word_tokenizer
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.trainers.stock_runs import quiet_config
from helpers.trainers.trainer_runs import SKEWED, LossRecorder, make_trainer, plain_training, training_arguments
from helpers.trainers.trl_runs import models_of, rows_of, trl_arguments
from transformers import DataCollatorWithFlattening, PrinterCallback, Trainer, TrainerCallback
from transformers.integrations.integration_utils import DVCLiveCallback, WandbCallback

from hf_longctx import LongContextCallback, LongContextConfig, LongContextMixin, LongContextTrainer
from hf_longctx.hf.trainer.open_stages import _own_code, _saving_tracker, _share_folder
from hf_longctx.plan.core.settings import HardwareSpec
from hf_longctx.plan.cost.profiles import HardwareProfile, profile_to_json

NUM_STEPS = 4
ROWS = random_rows(SKEWED)
CASE = ModelCase(promoted=True, num_layers=4)
# nodes are linked so slowly that gathers of weights across them take longer than a pipeline waits
HARDWARE = HardwareSpec("slow network", 1e12, 1e12, 2**33, 1e9, 1e4, 1e-7)
CHOSEN, KEPT = "pipeline stages are as many as are predicted to be fastest", "one pipeline stage, although ranks are on several"


class Plain(LongContextMixin, Trainer):
    """A class without code of its own."""


class Own(LongContextTrainer):
    """A class with code of its own, which may use the model."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        super().log(*args, **kwargs)


class OwnProperty(LongContextTrainer):
    """A class whose only code is a property."""

    @property
    def width(self) -> int:
        return int(self.model.config.hidden_size)


class OnlyValues(LongContextMixin, Trainer):
    """A class that runs nothing of its own."""

    args_class, limit = LongContextConfig, 3


class Mine(TrainerCallback):
    """A callback of a user."""


def of_trl(name: str) -> type:
    return type(name, (TrainerCallback,), {"__module__": "trl.trainer.callbacks"})


def profile(folder: Path) -> str:
    (folder / "hardware.json").write_text(profile_to_json(HardwareProfile(HARDWARE, ())))
    return str(folder / "hardware.json")


def on_two_nodes() -> Any:
    return patch.dict(os.environ, LOCAL_WORLD_SIZE=str(dist.get_world_size() // 2))


# name -> settings, arguments, trainer's arguments, and what the line says ("": there is none)
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "chosen": ({}, {}, CHOSEN),
    "one stage": ({"stages": 1}, {}, ""),
    "asked for": ({"stages": "auto"}, {}, ""),
    "no checkpoint": (
        {},
        {"save_strategy": "no"},
        f"{KEPT} nodes: save_strategy='no' leaves the trained weights in trainer.model",
    ),
    "a solver": ({"solver": "lp"}, {}, "solver='lp' has no effect on pipeline stages"),
    "every node saves": ({}, {"save_on_each_node": True}, "save_on_each_node=True would need every stage on every node"),
    "an optimizer of whole weights": (
        {"parameters": "sharded"},
        {"optim": "adafactor"},
        "optim='adafactor' updates whole weights",
    ),
    "own class": ({}, {}, "Own may use trainer.model, of which each rank would hold a part"),
    "own callback": ({}, {}, "Mine may use trainer.model"),
    "own optimizer": ({}, {}, "the trainer argument optimizers holds weights of all stages"),
    "a stream": ({}, {}, "the lengths of the training set are unknown"),
    "a frozen layer": ({}, {}, "layer 1 has no weight that is trained"),
    "a weight outside of the layers": ({}, {}, "cannot be cut into pipeline stages"),
    "an earlier checkpoint": ({}, {}, "whose states have no names"),
    "an earlier checkpoint of whole weights": ({}, {}, "the states of an optimizer that updates whole weights"),
    "a damaged checkpoint": ({}, {}, CHOSEN),
    "folders of their own": ({}, {}, "do not see one folder"),
    "class without code": ({}, {}, CHOSEN),
}


def start(folder: str, hardware: str, name: str) -> tuple[int, tuple[str, ...]]:
    """The number of stages with which a run starts, and its lines about settings."""
    settings, arguments, _ = SETTINGS[name]
    given, trainer = dict[str, Any](), LongContextTrainer
    rows: Any = datasets.Dataset.from_list(ROWS)
    folder = f"{folder}/{dist.get_rank()}" if name == "folders of their own" else folder
    args = training_arguments(folder, **{"save_strategy": "steps", "per_device_train_batch_size": 2, "max_steps": 2, **arguments})
    model = build_model(CASE)
    if name == "own class":
        trainer = Own
    elif name == "class without code":
        trainer = Plain
    elif name == "own callback":
        given["callbacks"] = [Mine()]
    elif name == "own optimizer":
        given["optimizers"] = (torch.optim.SGD(model.parameters(), 0.1), None)
    elif name == "a stream":
        rows = rows.to_iterable_dataset()
    elif name == "a weight outside of the layers":
        model.model.extra = torch.nn.Linear(2, 2).double()
    elif name == "a frozen layer":
        model.model.layers[1].requires_grad_(False)
    quiet = {"self_test": False, "report_steps": False, "timeline_steps": 0}
    config = LongContextConfig(**{"hardware": hardware, "tokens_per_rank": 32, **quiet, **settings})
    with on_two_nodes():
        made = trainer(model=model, args=args, train_dataset=rows, longctx_config=config, **given)
        return made.longctx_run.setup.num_stages, made._lines


@pytest.mark.parametrize(
    "trainer,callback,found",
    [
        (LongContextTrainer, PrinterCallback(), ""),
        (LongContextTrainer, PrinterCallback, ""),
        (LongContextTrainer, Mine(), "Mine"),
        (LongContextTrainer, Mine, "Mine"),
        (LongContextTrainer, of_trl("BEMACallback")(), "BEMACallback"),
        (LongContextTrainer, of_trl("RichProgressCallback")(), ""),
        (OwnProperty, PrinterCallback, "OwnProperty"),
        (OnlyValues, PrinterCallback, ""),
        (type("SFTTrainer", (Own,), {"__module__": "trl.sft"}), PrinterCallback, "Own"),
    ],
)
def test_code_of_the_users_own_is_seen(trainer: type, callback: Any, found: str) -> None:
    assert _own_code(trainer, {"callbacks": [callback]}) == found


def test_a_tracker_that_saves_the_model_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    live = DVCLiveCallback.__new__(DVCLiveCallback)
    live._log_model = True
    assert "DVCLiveCallback" in _saving_tracker([], [live])
    for name, cls, variable, value in (
        ("wandb", WandbCallback, "WANDB_LOG_MODEL", "end"),
        ("dvclive", DVCLiveCallback, "HF_DVCLIVE_LOG_MODEL", "True"),
    ):
        assert not _saving_tracker([name], [cls])
        with monkeypatch.context() as patched:
            patched.setenv(variable, value)
            assert variable in _saving_tracker([name], []) and variable in _saving_tracker("none", [cls])
            assert not _saving_tracker(["tensorboard"], [Mine])
            patched.setenv(variable, "false")
            assert not _saving_tracker([name], [cls])


def start_unlike(folder: str, hardware: str, first: Any, other: Any) -> str:
    """The error of a rank at the start if the first one has another `stages`; empty if there is none."""
    settings = {"stages": first if dist.get_rank() == 0 else other, "hardware": hardware, "tokens_per_rank": 32}
    try:
        with on_two_nodes():
            make_trainer(CASE, ROWS, folder, settings, {"save_strategy": "steps"})
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.wide("None-auto")
@pytest.mark.parametrize("first,other", [(None, "auto"), (None, 1), (2, None)])
def test_stages_that_differ_between_ranks_are_refused_by_name(ranks, tmp_path: Path, first: Any, other: Any) -> None:
    for error in ranks(4).run(start_unlike, str(tmp_path), profile(tmp_path), first, other):
        assert f"stages differs between ranks (rank 0: {first!r}, rank 1: {other!r}" in error


def touches_folder(folder: str, hardware: str, name: str) -> bool:
    """Whether a start writes to the folder to see whether ranks share it."""
    with patch("hf_longctx.hf.trainer.open_stages._share_folder", return_value=True) as shared:
        start(folder, hardware, name)
    return bool(shared.called)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["one stage", "asked for", "no checkpoint", "chosen"])
def test_a_folder_is_touched_only_if_stages_are_open(ranks, tmp_path: Path, name: str) -> None:
    found = ranks(4).run(touches_folder, str(tmp_path / "run"), profile(tmp_path), name)
    assert found == [name == "chosen"] * 4


def folder_under(path: str) -> bool:
    return _share_folder(Path(path), dist.group.WORLD)


def test_a_folder_that_cannot_be_read_is_not_shared(ranks, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert ranks(2).run(folder_under, str(tmp_path / "new")) == [True, True]
    for bad in ("file/run", "x" * 300):
        assert ranks(2).run(folder_under, str(tmp_path / bad)) == [False, False]


@pytest.mark.daily(
    "chosen",
    "one stage",
    "own callback",
    "a stream",
    "a frozen layer",
    "an earlier checkpoint",
    "folders of their own",
)
@pytest.mark.parametrize("name", SETTINGS)
def test_one_reason_keeps_one_stage_and_is_said_in_one_line(ranks, tmp_path: Path, name: str) -> None:
    if name == "an earlier checkpoint":
        (tmp_path / "run" / "checkpoint-2").mkdir(parents=True)
        (tmp_path / "run" / "checkpoint-2" / "optimizer.pt").touch()
    if name in ("an earlier checkpoint of whole weights", "a damaged checkpoint"):
        folder = tmp_path / "run" / "checkpoint-2" / "optimizer"
        folder.mkdir(parents=True)
        index = {"kind": "whole", "optimizer": "Adafactor", "weights": {}, "groups": []}
        (folder / "index.json").write_text(json.dumps(index) if "whole" in name else "")
    for num_stages, lines in ranks(4).run(start, str(tmp_path / "run"), profile(tmp_path), name):
        said = [line for line in lines if "stages" in line or "stage," in line]
        wanted = SETTINGS[name][2]
        assert len(said) == bool(wanted) and wanted in "".join(said)
        if KEPT in "".join(said):
            assert num_stages == 1


def train(folder: str, hardware: str, resumes: bool, config: dict[str, Any]) -> tuple[int, list[float]]:
    """The number of stages of a training on two nodes, and its losses."""
    settings = {"hardware": hardware, "parameters": "sharded", "tokens_per_rank": 32, **config}
    arguments = {"max_steps": NUM_STEPS, "save_strategy": "steps", "save_steps": NUM_STEPS // 2}
    with on_two_nodes():
        trainer = make_trainer(CASE, ROWS, folder, settings, arguments)
        recorder = LossRecorder()
        recorder.attach(trainer)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{NUM_STEPS // 2}" if resumes else None)
    return trainer.longctx_run.setup.num_stages, recorder.losses


@pytest.mark.wide
def test_a_run_on_two_nodes_makes_stages_and_resumes_with_them_or_without(ranks, tmp_path: Path) -> None:
    expected, _ = plain_training(CASE, ROWS, NUM_STEPS)
    folder, hardware = str(tmp_path / "run"), profile(tmp_path)
    for num_stages, losses in ranks(4).run(train, folder, hardware, False, {}):
        assert num_stages == 2 and losses == pytest.approx(expected, rel=1e-10)
    for config in ({}, {"stages": 1}):
        for num_stages, losses in ranks(4).run(train, folder, hardware, True, config):
            assert num_stages == config.get("stages", 2) and losses == pytest.approx(expected[NUM_STEPS // 2 :], rel=1e-10)


def start_trl(folder: str, hardware: str, name: str) -> tuple[int, tuple[str, ...]]:
    """The number of stages with which a trainer of TRL starts, and its lines about settings."""
    import trl

    base, kind = getattr(trl, f"{name}Trainer"), {"SFT": "text", "DPO": "preference"}[name]
    args = trl_arguments(getattr(trl, f"{name}Config"), folder, save_strategy="steps")
    config = quiet_config(hardware=hardware, parameters="sharded", tokens_per_rank=64)
    planned: Any = type("Planned", (LongContextMixin, base), {})
    given = {"args": args, "train_dataset": rows_of(kind), "processing_class": word_tokenizer(), "longctx_config": config}
    with on_two_nodes():
        trainer = planned(**models_of(kind, ModelCase(num_layers=4), {}), **given)
    return trainer.longctx_run.setup.num_stages, trainer._lines


@pytest.mark.trl
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL (pip install trl==1.16.0)")
@pytest.mark.parametrize("name,wanted", [("SFT", CHOSEN), ("DPO", "Planned draws its own batches, whose lengths are unknown")])
def test_trainers_of_trl_choose_where_plans_draw_the_batches(ranks, tmp_path: Path, name: str, wanted: str) -> None:
    for num_stages, lines in ranks(4).run(start_trl, str(tmp_path), profile(tmp_path), name):
        assert wanted in "".join(lines) and (num_stages > 1) == (name == "SFT")


def lines_of_callback(folder: str, is_attached: bool) -> list[str]:
    """Warnings about stages of a callback on two nodes, on each rank."""
    args = training_arguments(folder, max_steps=1, per_device_train_batch_size=2)
    config = LongContextConfig(tokens_per_rank=96, self_test=False, report_steps=False, timeline_steps=0)
    callback, found = LongContextCallback(config), list[str]()
    rows, model = datasets.Dataset.from_list(random_rows([20] * 8)), build_model(CASE)
    callbacks = [] if is_attached else [callback]
    trainer = Trainer(model, args, DataCollatorWithFlattening(), rows, callbacks=callbacks)
    with on_two_nodes(), patch.object(logging.Logger, "warning", lambda self, text, *words: found.append(text % words)):
        if is_attached:
            callback.attach(trainer)
        trainer.train()
    return [line for line in found if KEPT in line]


@pytest.mark.parametrize("is_attached", [False, True])
def test_a_callback_keeps_one_stage_and_says_so_once(ranks, tmp_path: Path, is_attached: bool) -> None:
    why = "plans are attached to a trainer" if is_attached else "a callback that is not attached"
    (first,), second = ranks(2).run(lines_of_callback, str(tmp_path), is_attached)
    assert why in first and not second
