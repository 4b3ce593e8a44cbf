"""The callback attached with pipeline stages: trains as LongContextTrainer does, and gives the trainer a whole model back."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
from helpers.models.chats import word_tokenizer
from helpers.models.reference import relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.versions import resuming
from helpers.trainers.stock_runs import make_stock_trainer, quiet_config
from helpers.trainers.trainer_runs import LossRecorder, make_trainer, plain_training, train_with_norms, training_arguments
from helpers.trainers.trl_runs import rows_of, trl_arguments
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Trainer, TrainerCallback

from hf_longctx import LongContextCallback, LongContextConfig, load_pipeline_stage
from hf_longctx.hf.models.attention import attention_name

NUM_STEPS = 6
ARGUMENTS = {"max_steps": NUM_STEPS, "logging_steps": 1}
# an evaluation and a checkpoint every other step, the best of which is loaded at the end
SAVING = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
STAGES = {"stages": 2, "tokens_per_rank": 64}
TIED = ModelCase(promoted=True, num_layers=4, tied=True)
ADAPTED = ModelCase(promoted=True, num_layers=4, lora=(("r", 2), ("target_modules", ["q_proj", "down_proj"])))

# name -> (ranks, model, settings)
RUNS: dict[str, tuple[int, ModelCase, dict[str, Any]]] = {
    "two stages": (2, TIED, STAGES),
    "two stages of two ranks": (4, TIED, {"stages": 2, "tokens_per_rank": 32}),
    "four stages": (4, TIED, {"stages": 4, "tokens_per_rank": 64}),
    "adapters, interleaved": (2, ADAPTED, {**STAGES, "interleave": 2}),
    "adapters, lent": (2, ADAPTED, {**STAGES, "lend_stages": True}),
}

Rows = list[dict[str, list[int]]]


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def attributes_of(model: Any) -> dict[str, set[str]]:
    """Names of the attributes of every module."""
    return {name: set(vars(module)) for name, module in model.named_modules()}


def differing(found: dict[str, set[str]], expected: dict[str, set[str]]) -> dict[str, set[str]]:
    """Attributes by which modules differ."""
    names = found.keys() | expected.keys()
    return {name: each for name in names if (each := found.get(name, set()) ^ expected.get(name, set()))}


def all_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


class Observer(TrainerCallback):
    """Notes how many weights this rank has in a training."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.num_weights = sum(parameter.numel() for parameter in model.parameters())


def train(case: ModelCase, rows: Rows, folder: str, config: dict[str, Any]) -> dict[str, Any]:
    """An attached training in stages, and a training of the same trainer afterwards."""
    extra = {"eval_dataset": datasets.Dataset.from_list(rows[:7])}
    trainer = make_stock_trainer(case, rows, folder, ARGUMENTS, **extra)
    num_weights, known = sum(parameter.numel() for parameter in trainer.model.parameters()), list(trainer.model.parameters())
    callback, recorder, observer = LongContextCallback(quiet_config(**config)), LossRecorder(), Observer()
    callback.attach(trainer)
    trainer.add_callback(observer)
    recorder.attach(trainer)
    trainer.train()
    trainer.remove_callback(observer)
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    trainer.save_model(f"{folder}/after")
    # an evaluation before a training would leave a stock trainer without DDP
    judge, stock = (make_stock_trainer(case, rows, folder, ARGUMENTS, **extra) for _ in range(2))
    for other in (judge, stock):
        other.model.load_state_dict(trainer.model.state_dict())
    weights, losses = weights_of(trainer.model), [each.evaluate()["eval_loss"] for each in (trainer, judge)]
    trainer.train()
    stock.train()
    return {
        "losses": recorder.losses,
        "norms": norms,
        "weights": weights,
        "share": observer.num_weights / num_weights,
        "is same": all(a is b for a, b in zip(known, trainer.model.parameters(), strict=True)),
        "left": (type(trainer) is Trainer, attention_name(trainer.model), set(vars(trainer)) ^ set(vars(stock))),
        "differs": differing(attributes_of(trainer.model), attributes_of(stock.model)),
        "evaluates": losses[0] == losses[1],
        "goes on": all_equal(weights_of(trainer.model), weights_of(stock.model)),
    }


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_attached_stages_train_as_one_process_and_give_a_whole_model_back(ranks, rows, tmp_path: Path, name: str) -> None:
    num_ranks, case, config = RUNS[name]
    losses, expected = plain_training(case, rows, NUM_STEPS)
    ours = ranks(num_ranks).run(train_with_norms, case, rows, str(tmp_path / "ours"), config, ARGUMENTS)
    found = ranks(num_ranks).run(train, case, rows, str(tmp_path / "attached"), config)
    for each, (our_losses, our_norms, our_weights) in zip(found, ours, strict=True):
        # to the last bits, since ranks of a group may add in another order
        assert each["losses"] == pytest.approx(our_losses, rel=1e-12)
        assert each["norms"] == pytest.approx(our_norms, rel=1e-12) and max(our_norms) > 0.5
        assert each["losses"] == pytest.approx(losses, rel=1e-10)
        weights = each["weights"]
        # a tied head has its own name on the last stage
        tied = weights.get("model.embed_tokens.weight")
        assert max(relative_error(weights.get(key, tied), weight) for key, weight in our_weights.items()) <= 1e-12
        assert weights.keys() == expected.keys()
        assert max(relative_error(weights[key], weight) for key, weight in expected.items()) <= 1e-10
        assert config.get("lend_stages") or each["share"] < 0.75
        assert each["is same"] and each["left"] == (True, "sdpa", set()) and each["differs"] == {}
        assert each["evaluates"] and each["goes on"]
    if not case.lora:
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "attached/after", dtype=torch.float64)
        assert all_equal(weights_of(saved), found[0]["weights"])


def refused(action: Any) -> str:
    """Why an action is refused."""
    with pytest.raises((RuntimeError, ValueError)) as raised:
        action()
    return str(raised.value)


def live_as_loaded_stage(rows: Rows, checkpoint: str, folder: str, resume: bool) -> dict[str, Any]:
    """A stock trainer whose model every rank loaded one stage of, beside LongContextTrainer on such a model."""
    args = training_arguments(folder, per_device_train_batch_size=4, **ARGUMENTS, **SAVING)
    config = quiet_config(**STAGES)
    sets = {"train_dataset": datasets.Dataset.from_list(rows), "eval_dataset": datasets.Dataset.from_list(rows[:7])}
    model = load_pipeline_stage(checkpoint, config, dtype=torch.float64)
    trainer = Trainer(model=model, args=args, data_collator=DataCollatorWithFlattening(), **sets)
    words = [refused(trainer.evaluate), refused(lambda: model.save_pretrained(f"{folder}/part"))]
    callback, recorder = LongContextCallback(config), LossRecorder()
    callback.attach(trainer)
    recorder.attach(trainer)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resume else None)
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    # the trainer goes on with plans, since no rank could have the whole model
    found = {"losses": recorder.losses, "eval": [*losses, trainer.evaluate()["eval_loss"]]}
    words.append(refused(lambda: trainer.predict(sets["eval_dataset"])))
    words.append(refused(lambda: trainer.model.save_pretrained(f"{folder}/part")))
    trainer.save_model(f"{folder}/after")
    callback.detach()
    assert type(trainer) is Trainer, type(trainer)
    assert not Path(folder, "part").exists()
    words.append(refused(trainer.evaluate))
    if dist.get_rank() == 0:
        words.append(refused(lambda: trainer.save_model(f"{folder}/stock")))
    callback.attach(trainer)
    found["again"] = trainer.evaluate()["eval_loss"]
    callback.detach()
    return {**found, "words": words}


def train_ours(rows: Rows, checkpoint: str, folder: str) -> tuple[list[float], list[float]]:
    """Losses of the same training by LongContextTrainer on the whole model, and of its evaluations."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    held_out = datasets.Dataset.from_list(rows[:7])
    trainer: Any = make_trainer(TIED, rows, folder, STAGES, {**ARGUMENTS, **SAVING}, model=model, eval_dataset=held_out)
    recorder = LossRecorder()
    recorder.attach(trainer)
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return recorder.losses, [*losses, trainer.evaluate()["eval_loss"]]


@resuming
def test_a_loaded_stage_keeps_its_plans_until_detach_and_then_refuses_by_name(ranks, rows, tmp_path: Path) -> None:
    build_model(TIED).save_pretrained(tmp_path / "base")
    folder = tmp_path / "attached"
    ours = ranks(2).run(train_ours, rows, str(tmp_path / "base"), str(tmp_path / "ours"))
    for first, resume in ((0, False), (2, True)):
        found = ranks(2).run(live_as_loaded_stage, rows, str(tmp_path / "base"), str(folder), resume)
        for rank, (each, (losses, eval_losses)) in enumerate(zip(found, ours, strict=True)):
            assert each["losses"] == pytest.approx(losses[first:], rel=1e-12)
            assert each["eval"] == pytest.approx(eval_losses, rel=1e-12)
            # measured seconds may change the plan
            assert each["again"] == pytest.approx(each["eval"][-1], rel=1e-12)
            predicts = each["words"].pop(2)
            assert "predict() of a stock trainer returns whole logits" in predicts
            assert all(f"this rank holds only stage {rank} of 2 of LlamaForCausalLM" in text for text in each["words"])
    best = AutoModelForCausalLM.from_pretrained(folder / "after", dtype=torch.float64)
    names = {min(range(3), key=lambda place: ours[0][1][place])}
    saved = AutoModelForCausalLM.from_pretrained(folder / f"checkpoint-{2 * names.pop() + 2}", dtype=torch.float64)
    assert all_equal(weights_of(best), weights_of(saved))


class Failing(TrainerCallback):
    """Ends a training by an error."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise RuntimeError("planted failure")


def leave_early(rows: Rows, folder: str) -> None:
    """Trainers that are detached before a training, fail at start, fail in a training, or have an optimizer already."""
    extra = {"eval_dataset": datasets.Dataset.from_list(rows[:7])}
    trainer = make_stock_trainer(TIED, rows, folder, ARGUMENTS, **extra)
    before, attributes = weights_of(trainer.model), attributes_of(trainer.model)
    callback = LongContextCallback(quiet_config(**STAGES))
    callback.attach(trainer)
    callback.detach()
    assert type(trainer) is Trainer and all_equal(weights_of(trainer.model), before)
    assert (left := differing(attributes_of(trainer.model), attributes)) == {}, left
    # all of stage 0 is frozen, which is found when the model is cut
    frozen = [*trainer.model.model.embed_tokens.parameters(), *trainer.model.model.layers[:3].parameters()]
    for parameter in frozen:
        parameter.requires_grad_(False)
    assert "stage 0 has no weight that is trained" in refused(lambda: callback.attach(trainer))
    assert type(trainer) is Trainer and all_equal(weights_of(trainer.model), before)
    assert (left := differing(attributes_of(trainer.model), attributes)) == {}, left
    for parameter in frozen:
        parameter.requires_grad_(True)
    trainer.add_callback(Failing())
    callback.attach(trainer)
    with pytest.raises(RuntimeError, match="planted failure"):
        trainer.train()
    # a rank that failed cannot send its weights to others
    assert type(trainer) is Trainer and "this rank holds only stage" in refused(trainer.evaluate)
    other = make_stock_trainer(TIED, rows, folder, {"max_steps": 2}, **extra)
    other.train()
    assert "set trainer.optimizer = trainer.lr_scheduler = None before attach" in refused(lambda: callback.attach(other))
    other.optimizer = other.lr_scheduler = None
    callback.attach(other)
    other.train()


def test_without_a_whole_training_the_trainer_is_as_before_or_refuses_by_name(ranks, rows, tmp_path: Path) -> None:
    ranks(2).run(leave_early, rows, str(tmp_path))


def evaluate_in_bf16(rows: Rows, folder: str) -> tuple[float, float]:
    """The loss of a stock evaluation after an attached training under autocast, and that of a stock trainer on its weights."""
    case, arguments = ModelCase(dtype=torch.float32), {"max_steps": 2, "bf16": True}
    extra = {"eval_dataset": datasets.Dataset.from_list(rows[:7]), "exact_loss": False}
    trainer = make_stock_trainer(case, rows, folder, arguments, **extra)
    LongContextCallback(quiet_config(**STAGES)).attach(trainer)
    trainer.train()
    stock = make_stock_trainer(case, rows, folder, arguments, **extra)
    stock.model.load_state_dict(trainer.model.state_dict())
    return trainer.evaluate()["eval_loss"], stock.evaluate()["eval_loss"]


@pytest.mark.wide
def test_the_trainer_evaluates_under_autocast_afterwards(ranks, rows, tmp_path: Path) -> None:
    for found, expected in ranks(2).run(evaluate_in_bf16, rows, str(tmp_path)):
        assert found == expected


def train_loaded_stage_by_trl(checkpoint: str, folder: str) -> tuple[list[float], list[float]]:
    """Losses of SFTTrainer with an attached callback, on a stage that this rank loaded, and of its evaluations."""
    import trl

    args = trl_arguments(trl.SFTConfig, folder, eval_strategy="steps", eval_steps=2)
    config = LongContextConfig(stages=2, tokens_per_rank=96, report_steps=False, timeline_steps=0)
    is_loaded = "loaded" in folder
    model = (load_pipeline_stage if is_loaded else AutoModelForCausalLM.from_pretrained)(checkpoint, *[config] * is_loaded)
    sets = {"train_dataset": rows_of("text"), "eval_dataset": rows_of("text").select(range(5))}
    trainer = trl.SFTTrainer(model=model, args=args, processing_class=word_tokenizer(), **sets)
    recorder, callback = LossRecorder(), LongContextCallback(config)
    callback.attach(trainer)
    recorder.attach(trainer)
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    callback.detach()
    return recorder.losses, losses


@pytest.mark.trl
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL (pip install trl==1.16.0)")
def test_trl_trains_a_loaded_stage_as_a_whole_model(ranks, tmp_path: Path) -> None:
    build_model(ModelCase(dtype=torch.float32)).save_pretrained(tmp_path / "base")
    runs = [ranks(2).run(train_loaded_stage_by_trl, str(tmp_path / "base"), str(tmp_path / how)) for how in ("loaded", "whole")]
    assert runs[0] == runs[1] and len(runs[0][0][1]) == 2
