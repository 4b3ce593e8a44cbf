"""Steps whose loss or gradients are not finite: stopped on all ranks before the update and explained, or left out and counted."""

from __future__ import annotations

import json
import logging
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models.any_model import build_any
from helpers.models.tiny_models import ModelCase, build_model, with_lora
from helpers.models.versions import resuming
from helpers.ranks.rank_steps import whole
from helpers.trainers.stock_runs import make_stock_trainer, quiet_config
from helpers.trainers.trainer_runs import Rows, make_trainer
from torch import nn
from transformers import AutoModelForCausalLM, TrainerCallback

from hf_longctx import LongContextCallback
from hf_longctx.cli.main import main

NUM_STEPS, BAD_STEP = 4, 2
ARGUMENTS = {"max_steps": NUM_STEPS, "logging_steps": 1, "learning_rate": 1e-2, "warmup_steps": 0}


def poison(model: nn.Module, what: str) -> None:
    """Makes the next step's loss or gradients NaN or infinite; does nothing on stages without the module."""
    layers = dict(model.named_modules())
    if what == "output":
        # a module of layer 1, wherever that is
        layer = layers.get("model.layers.1.mlp.down_proj")
        if layer is not None:
            handle = layer.register_forward_hook(lambda module, args, output: output * math.nan)
            model.poison = handle  # type: ignore[assignment]
    elif what == "weight":
        for name, parameter in model.named_parameters():
            if name == "model.layers.1.self_attn.o_proj.weight":
                (parameter.to_local() if hasattr(parameter, "to_local") else parameter).data.view(-1)[:1] = math.inf
    else:
        # under adapters and in a multimodal model the name begins otherwise
        layer = next((module for name, module in layers.items() if name.endswith("layers.0.mlp.down_proj")), None)
        # finite in fp64, but the square is not
        factor = math.inf if what == "backward" else 1e200
        if layer is not None:
            model.poison = layer.register_full_backward_hook(lambda module, grads, _: (grads[0] * factor,))  # type: ignore[assignment]


class Poison(TrainerCallback):
    """Poisons the step after `BAD_STEP` steps, and keeps the weights before each step."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.weights: list[dict[str, torch.Tensor]] = []
        self.num_steps = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == BAD_STEP:
            poison(model, self.what)
        self.weights.append({name: whole(p.detach()).clone() for name, p in model.named_parameters()})

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.num_steps += 1
        if (handle := vars(model).pop("poison", None)) is not None:
            handle.remove()


def train(
    rows: Rows,
    config: dict[str, Any],
    what: str,
    folder: str,
    arguments: dict[str, Any] | None = None,
    slow_s: float = 0.0,
    rate: float = 0.0,
    base: str = "",
) -> tuple[str, list[Any], Any, Any, list[Any]]:
    """Message of the error that stops the run, weights before each step, the last weights, finished steps, and the log.

    rate: share of values that dropout drops. slow_s: seconds by which rank 0 is slower to write a model. With it, the message
    ends in what the rank finds written.
    base: saved model whose adapters are trained, two if the folder is called "named", or name of a multimodal class.
    """
    case = ModelCase("phi3" if rate else "llama", promoted=True, num_layers=4 if "interleave" in config else 2)
    settings = {"tokens_per_rank": 96, **config}, {**ARGUMENTS, **(arguments or {})}
    if rate:
        model = build_model(case)
        model = type(model)(type(model.config)(**{**model.config.to_dict(), "resid_pdrop": rate})).double()
        trainer = make_trainer(case, rows, folder, *settings, model=model)
    elif base:
        is_folder = Path(base).is_dir()
        names = ("first", "second") if base.endswith("named") else ("default",)
        model = with_lora(AutoModelForCausalLM.from_pretrained(base), names) if is_folder else build_any(base, "sdpa")
        trainer = make_trainer(case, rows, folder, *settings, model=model)
    else:
        trainer = make_trainer(case, rows, folder, *settings)
    callback, message = Poison(what), ""
    trainer.add_callback(callback)
    if slow_s and trainer.args.process_index == 0:
        save = trainer._save
        trainer._save = lambda *args, **keywords: (time.sleep(slow_s), save(*args, **keywords))
    try:
        trainer.train()
    except FloatingPointError as error:
        message = str(error)
        if slow_s:
            message += f" written: {sorted(path.name for path in Path(folder).glob('nonfinite-step-*/model/*'))}"
    last = {name: whole(p.detach()).clone() for name, p in trainer.model.named_parameters()}
    return message, callback.weights, last, callback.num_steps, trainer.state.log_history


BAD_WEIGHT = "weights that are not finite: model.layers.1.self_attn.o_proj.weight"
# name -> (ranks, settings, what is poisoned, what is said)
STOPS: dict[str, tuple[int, dict[str, Any], str, str]] = {
    "one rank": (1, {}, "output", "first output that is not finite: model.layers.1.mlp.down_proj, on rank 0"),
    "replicated": (2, {}, "output", "first output that is not finite: model.layers.1.mlp.down_proj"),
    "sharded": (2, {"parameters": "sharded"}, "output", "first output that is not finite: model.layers.1.mlp.down_proj"),
    "stages": (2, {"stages": 2}, "output", "first output that is not finite: model.layers.1.mlp.down_proj, on rank 1"),
    "interleaved": (2, {"stages": 2, "interleave": 2}, "output", "first output that is not finite: model.layers.1.mlp.down_proj"),
    "weight": (2, {}, "weight", BAD_WEIGHT),
    "weight in shards": (
        2,
        {"parameters": "sharded"},
        "weight",
        "weights that are not finite: model.layers.1.self_attn.o_proj.weight",
    ),
    "backward": (2, {}, "backward", "gradients that are not: model.layers.0."),
    "norm": (2, {}, "norm", "the norm of the gradients overflows"),
    "norm of shards": (2, {"parameters": "sharded"}, "norm", "the norm of the gradients overflows"),
}


@pytest.mark.daily("one rank")
@pytest.mark.parametrize("name", STOPS)
def test_all_ranks_stop_before_the_update_and_say_where(ranks, rows: Rows, tmp_path: Path, name: str) -> None:
    num_ranks, config, what, said = STOPS[name]
    for message, weights, last, num_steps, _ in ranks(num_ranks).run(train, rows, config, what, str(tmp_path)):
        assert num_steps == BAD_STEP
        assert f"step {BAD_STEP + 1}: the loss is" in message and "no weight was changed" in message
        assert said in message, message
        assert "row " in message and f"nonfinite-step-{BAD_STEP + 1}" in message
        kept = [key for key in last if what != "weight" or "o_proj" not in key]
        assert all(torch.equal(last[key], weights[BAD_STEP][key]) for key in kept)


@pytest.mark.daily("config0")
@pytest.mark.parametrize("config", [{}, {"parameters": "sharded"}])
def test_a_full_disk_does_not_hide_the_refusal(ranks, rows: Rows, tmp_path: Path, config: dict[str, Any]) -> None:
    # a file in the folder's place fails like a disk without room
    (tmp_path / f"nonfinite-step-{BAD_STEP + 1}").write_text("")
    for message, _, _, num_steps, _ in ranks(2).run(train, rows, config, "output", str(tmp_path)):
        assert num_steps == BAD_STEP and "first output that is not finite: model.layers.1.mlp.down_proj" in message
        assert "could not be written to" in message and "rank 0: FileExistsError" in message


class Blowing(TrainerCallback):
    """Makes a weight of the last rank infinite after the third step, as an update could."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 3:
            poison(model, "weight")


def train_to_a_save(rows: Rows, config: dict[str, Any], folder: str) -> tuple[str, list[str]]:
    """Message of the error that stops a run whose weights become infinite, and the checkpoints it leaves."""
    arguments = {**ARGUMENTS, "max_steps": 6, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    trainer = make_trainer(ModelCase(promoted=True), rows, folder, {"tokens_per_rank": 96, **config}, arguments)
    trainer.add_callback(Blowing())
    with pytest.raises(FloatingPointError) as stopped:
        trainer.train()
    return str(stopped.value), sorted(path.name for path in Path(folder).glob("checkpoint-*"))


@pytest.mark.daily("config0")
@pytest.mark.parametrize("config", [{}, {"parameters": "sharded"}, {"stages": 2}, {"on_nonfinite": "skip"}])
def test_infinite_weights_never_replace_a_good_checkpoint(ranks, rows: Rows, tmp_path: Path, config: dict[str, Any]) -> None:
    for message, checkpoints in ranks(2).run(train_to_a_save, rows, config, str(tmp_path)):
        assert message.startswith("after step 3, weights are not finite: model.layers.1.self_attn.o_proj.weight")
        assert checkpoints == ["checkpoint-2"]


@pytest.mark.wide
def test_steps_are_not_left_out_for_ever(ranks, rows: Rows, tmp_path: Path) -> None:
    for message, _, _, num_steps, _ in ranks(2).run(train, rows, {"on_nonfinite": "skip"}, "weight", str(tmp_path)):
        assert num_steps == BAD_STEP and BAD_WEIGHT in message


@pytest.mark.wide
def test_no_rank_fails_before_everything_is_written(ranks, rows: Rows, tmp_path: Path) -> None:
    # a launcher would end rank 0 in the middle of it
    for message, *_ in ranks(2).run(train, rows, {}, "output", str(tmp_path), None, 1.0):
        assert "model.safetensors" in message.split("written: ")[1]


@pytest.mark.daily("False")
@pytest.mark.parametrize("nan_filter", [True, False])
def test_the_mean_loss_of_a_run_leaves_skipped_steps_out(ranks, rows: Rows, tmp_path: Path, nan_filter: bool) -> None:
    arguments = {"logging_nan_inf_filter": nan_filter}
    for *_, log in ranks(1).run(train, rows, {"on_nonfinite": "skip"}, "output", str(tmp_path), arguments):
        losses = [float(entry["loss"]) for entry in log if "loss" in entry]
        used = [loss for loss in losses if math.isfinite(loss)]
        assert len(used) == NUM_STEPS - 1
        assert log[-1]["train_loss"] == pytest.approx(sum(used) / len(used), rel=1e-3)


def train_twice(rows: Rows, folder: str) -> list[Any]:
    """Log of a second training of one trainer, whose first one left a step out."""
    config = {"tokens_per_rank": 96, "on_nonfinite": "skip"}
    trainer = make_trainer(ModelCase(promoted=True), rows, folder, config, ARGUMENTS)
    callback = Poison("output")
    trainer.add_callback(callback)
    trainer.train()
    trainer.remove_callback(callback)
    trainer.train()
    return trainer.state.log_history


def test_a_second_training_counts_its_own_steps(ranks, rows: Rows, tmp_path: Path) -> None:
    for log in ranks(1).run(train_twice, rows, str(tmp_path)):
        assert not [entry for entry in log if "skipped_steps" in entry]


def train_and_resume(rows: Rows, folder: str) -> list[Any]:
    """Log of a training that goes on after the checkpoint of one that left a step out."""
    config = {"tokens_per_rank": 96, "on_nonfinite": "skip"}
    for resume in (False, True):
        saving = {"save_strategy": "steps", "save_steps": BAD_STEP + 1}
        trainer = make_trainer(ModelCase(promoted=True), rows, folder, config, {**ARGUMENTS, **saving})
        if not resume:
            trainer.add_callback(Poison("output"))
        trainer.train(resume_from_checkpoint=str(Path(folder, f"checkpoint-{BAD_STEP + 1}")) if resume else None)
    return trainer.state.log_history


@pytest.mark.wide
@resuming
def test_a_resumed_training_goes_on_counting_skipped_steps(ranks, rows: Rows, tmp_path: Path) -> None:
    for log in ranks(1).run(train_and_resume, rows, str(tmp_path)):
        assert log[-1]["skipped_steps"] == log[-2]["skipped_steps"] == 1
        # a mean over no step of this training would be NaN
        assert math.isfinite(log[-1]["train_loss"]) and log[-2]["loss"] > 0


@pytest.mark.daily("config0-1")
@pytest.mark.parametrize("config,num_ranks", [({}, 1), ({}, 2), ({"parameters": "sharded"}, 2), ({"stages": 2}, 2)])
def test_a_skipped_step_changes_nothing_and_is_counted(
    ranks, rows: Rows, tmp_path: Path, config: dict[str, Any], num_ranks: int
) -> None:
    results = ranks(num_ranks).run(train, rows, {**config, "on_nonfinite": "skip"}, "output", str(tmp_path))
    for message, weights, last, num_steps, log in results:
        assert not message and num_steps == NUM_STEPS
        before, after = weights[BAD_STEP], weights[BAD_STEP + 1]
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert not all(torch.equal(last[name], after[name]) for name in last)
        steps = [entry for entry in log if "loss" in entry]
        assert math.isnan(float(steps[BAD_STEP]["loss"])) and steps[BAD_STEP]["skipped_steps"] == 1
        assert math.isnan(float(steps[BAD_STEP]["grad_norm"]))
        others = [float(entry["loss"]) for place, entry in enumerate(steps) if place != BAD_STEP]
        assert all(math.isfinite(loss) and loss > 0 for loss in others)


def train_alone(rows: Rows, action: str, what: str = "output") -> tuple[str, int, bool, list[str]]:
    """Message, finished steps, whether the bad step moved a weight, and warnings, for the callback alone in a stock trainer."""
    callback, message, warnings = Poison(what), "", []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hf_longctx.hf.callback.callback").addHandler(handler)
    # without the self-test, with which hooks that come later are refused
    config = quiet_config(tokens_per_rank=96, on_nonfinite=action)
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [LongContextCallback(config), callback]
        trainer = make_stock_trainer(ModelCase(promoted=True), rows, folder, ARGUMENTS, callbacks=callbacks)
        try:
            trainer.train()
        except FloatingPointError as error:
            message = str(error)
            callbacks[0].detach()
        finally:
            logging.getLogger("hf_longctx.hf.callback.callback").removeHandler(handler)
    last = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    after = callback.weights[BAD_STEP + 1] if len(callback.weights) > BAD_STEP + 1 else last
    has_moved = not all(torch.equal(weight, after[name]) for name, weight in callback.weights[BAD_STEP].items())
    return message, callback.num_steps, has_moved, warnings


@pytest.mark.parametrize("action", ["stop", "skip"])
def test_the_callback_alone_checks_gradients_too(ranks, rows: Rows, action: str) -> None:
    for message, num_steps, has_moved, _ in ranks(2).run(train_alone, rows, action):
        assert not has_moved
        assert num_steps == (BAD_STEP if action == "stop" else NUM_STEPS)
        assert ("step 3: gradients are not finite" in message) == (action == "stop")


def test_the_callback_alone_tells_that_clipping_left_no_gradient(ranks, rows: Rows) -> None:
    for message, num_steps, _, warnings in ranks(2).run(train_alone, rows, "stop", "norm"):
        assert not message and num_steps == NUM_STEPS
        assert [text.split(":")[0] for text in warnings if "all gradients are zero" in text] == [f"step {BAD_STEP + 1}"]


def test_the_saved_step_is_replayed_alone(ranks, rows: Rows, tmp_path: Path, capsys) -> None:
    ranks(2).run(train, rows, {"parameters": "sharded"}, "weight", str(tmp_path))
    folder = str(tmp_path / f"nonfinite-step-{BAD_STEP + 1}")
    assert main(["replay", folder]) == 1
    said = capsys.readouterr().out
    assert "first output that is not finite: model.layers.1.self_attn.o_proj" in said
    assert "sequence 0:" in said


def test_a_replay_drops_the_values_that_the_run_dropped(ranks, rows: Rows, tmp_path: Path, capsys) -> None:
    # the loss of the step is finite, so that it can be compared
    accumulated = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    ranks(2).run(train, rows, {}, "norm", str(tmp_path), accumulated, 0.0, 0.4)
    folder = tmp_path / f"nonfinite-step-{BAD_STEP + 1}"
    assert main(["replay", str(folder)]) == 0
    losses = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines() if "summed loss" in line]
    saved = json.loads((folder / "step.json").read_text())
    labels = [label for plan in saved["plans"] for each in plan["sequences"] for label in each["shift_labels"]]
    assert len(saved["plans"]) == 2 and len(losses) == 8
    assert sum(losses) / sum(label >= 0 for label in labels) == pytest.approx(float(saved["loss"]), rel=1e-5)


@pytest.mark.wide("LlavaForConditionalGeneration")
@pytest.mark.parametrize("base", ["adapters", "named", "LlavaForConditionalGeneration"])
def test_a_replay_finds_adapters_and_the_text_model_of_a_multimodal_one(
    ranks, rows: Rows, tmp_path: Path, capsys, base: str
) -> None:
    if base in ("adapters", "named"):
        build_model(ModelCase("llama")).save_pretrained(tmp_path / base)
        base = str(tmp_path / base)
    (message, *_) = ranks(1).run(train, rows, {}, "norm", str(tmp_path), None, 0.0, 0.0, base)[0]
    folder = tmp_path / f"nonfinite-step-{BAD_STEP + 1}"
    assert f"step {BAD_STEP + 1}: the loss is" in message, message
    assert main(["replay", str(folder)]) == 0
    losses = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines() if "summed loss" in line]
    saved = json.loads((folder / "step.json").read_text())
    labels = [label for plan in saved["plans"] for each in plan["sequences"] for label in each["shift_labels"]]
    assert sum(losses) / sum(label >= 0 for label in labels) == pytest.approx(float(saved["loss"]), rel=1e-5)


@pytest.mark.wide
def test_a_step_that_is_finite_alone_says_so(ranks, rows: Rows, tmp_path: Path, capsys) -> None:
    ranks(2).run(train, rows, {}, "output", str(tmp_path))
    assert main(["replay", str(tmp_path / f"nonfinite-step-{BAD_STEP + 1}")]) == 0
    assert "every loss and gradient is finite" in capsys.readouterr().out


def test_a_folder_without_a_step_is_refused(tmp_path: Path, capsys) -> None:
    assert main(["replay", str(tmp_path)]) == 1
    assert "or nonfinite-step-N in it" in capsys.readouterr().err
    for content in ("[" * 10**5, "{}", "nonsense"):
        (tmp_path / "step.json").write_text(content)
        assert main(["replay", str(tmp_path)]) == 1
        assert "is no saved step" in capsys.readouterr().err
