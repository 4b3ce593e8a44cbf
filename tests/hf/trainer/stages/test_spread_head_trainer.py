"""Trainings whose stages share the output head: the trajectory of one plain process, over saves, restarts and evaluations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from helpers.models.reference import random_rows, reference_step, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.versions import resuming
from helpers.ranks.rank_steps import whole
from helpers.trainers.trainer_runs import ARGUMENTS, SKEWED, LossRecorder, make_trainer, plain_training, training_arguments

from hf_longctx import LongContextConfig, LongContextTrainer, load_pipeline_stage

CASE = ModelCase(promoted=True, num_layers=4)
ROWS = random_rows(SKEWED)
NUM_STEPS, NUM_SAVED, NUM_EVALUATED = 4, 2, 9
# (ranks, settings)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "2 x 1": (2, {"stages": 2}),
    "4 x 1": (4, {"stages": 4}),
    "2 x 2, replicated": (4, {"stages": 2}),
    "2 x 2, gathered per micro-batch": (4, {"stages": 2, "parameters": "gathered_per_round"}),
    "2 x 2, gathered per step": (4, {"stages": 2, "parameters": "gathered_per_step"}),
    "2 x 2, sharded": (4, {"stages": 2, "parameters": "sharded"}),
    "one head": (2, {"stages": 2, "spread_head": False}),
    "one stage": (2, {"parameters": "sharded"}),
}
SPREAD = [name for name, (_, settings) in LAYOUTS.items() if "stages" in settings and "spread_head" not in settings]


def count_heads(trainer: LongContextTrainer) -> list[int]:
    """Makes a list that gets the number of heads on stages before the last in the plan of every step."""
    original, found = trainer.longctx_run.report.step_done, []

    def step_done(plan: Any, result: Any) -> None:
        found.append(sum(len(group.head_stages) for each in plan.micro_batches for group in each.groups))
        original(plan, result)

    trainer.longctx_run.report.step_done = step_done  # type: ignore[method-assign]
    return found


def train(
    case: ModelCase, folder: str, config: dict[str, Any], arguments: dict[str, Any], resume: str | None = None
) -> tuple[list[float], dict[str, torch.Tensor], float, list[int]]:
    """Losses, final weights of this rank's stage, the loss of the first rows after training, and heads of each step's plan."""
    settings = {"tokens_per_rank": 32, **config}
    rows = datasets.Dataset.from_list(ROWS[:NUM_EVALUATED])
    trainer = make_trainer(case, ROWS, folder, settings, {**ARGUMENTS, "max_steps": NUM_STEPS, **arguments}, eval_dataset=rows)
    recorder, heads = LossRecorder(), count_heads(trainer)
    recorder.attach(trainer)
    trainer.train(resume_from_checkpoint=resume)
    weights = {name: whole(weight.detach()).clone() for name, weight in trainer.model.named_parameters()}
    return recorder.losses, weights, trainer.evaluate()["eval_loss"], heads


def check(case: ModelCase, results: list[Any], first: int = 0) -> None:
    """Asserts that results of all ranks are those of one plain process from step `first` on."""
    losses, weights = plain_training(case, ROWS, NUM_STEPS)
    model = build_model(case)
    model.load_state_dict(weights, strict=False)
    evaluated, _ = reference_step(model, ROWS[:NUM_EVALUATED])
    of_whole = {"lm_head.weight": weights["model.embed_tokens.weight"], **weights}
    for found, own, eval_loss, _ in results:
        assert found == pytest.approx(losses[first:], rel=1e-10)
        assert max(relative_error(weight, of_whole[name]) for name, weight in own.items()) <= 1e-10
        assert eval_loss == pytest.approx(evaluated, rel=1e-10)


@pytest.mark.daily("2 x 2, sharded-tied")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", SPREAD)
def test_clipped_steps_and_an_evaluation_follow_one_plain_process(ranks, tmp_path: Path, name: str, tied: bool) -> None:
    num_ranks, config = LAYOUTS[name]
    case = replace(CASE, tied=tied)
    results = ranks(num_ranks).run(train, case, str(tmp_path), {**config, "self_test": True}, {})
    check(case, results)
    # without turns, a micro-batch of one chunk has its head on the last stage
    assert all((sum(heads) > 0) == (name != "2 x 2, gathered per micro-batch") for *_, heads in results)


@pytest.mark.wide
@pytest.mark.slow
@resuming
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", ["2 x 2, sharded", "4 x 1", "one head"])
def test_checkpoints_resume_to_and_from_every_layout(ranks, tmp_path: Path, name: str, tied: bool) -> None:
    case, saving = replace(CASE, tied=tied), {"save_strategy": "steps", "save_steps": NUM_SAVED}
    num_ranks, config = LAYOUTS[name]
    check(case, ranks(num_ranks).run(train, case, str(tmp_path / "first"), config, saving))
    checkpoint = str(tmp_path / "first" / f"checkpoint-{NUM_SAVED}")
    for place, (other_ranks, other) in enumerate(LAYOUTS.values()):
        check(case, ranks(other_ranks).run(train, case, str(tmp_path / str(place)), other, {}, checkpoint), NUM_SAVED)
    _, weights = plain_training(case, ROWS, NUM_STEPS)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first" / f"checkpoint-{NUM_STEPS}").state_dict()
    assert max(relative_error(saved[name], weight) for name, weight in weights.items()) <= 1e-10


def train_loaded(folder: str, is_loaded: bool) -> tuple[list[float], float, list[int]]:
    """Losses of a run whose model every rank had whole, or loaded a stage of; the loss on some rows after it, and heads."""
    args = training_arguments(f"{folder}/out", max_steps=3, per_device_train_batch_size=4)
    config = LongContextConfig(stages=2, tokens_per_rank=96, report_steps=False, timeline_steps=0)
    model = load_pipeline_stage(folder, config) if is_loaded else transformers.AutoModelForCausalLM.from_pretrained(folder)
    rows = datasets.Dataset.from_list(ROWS)
    trainer = LongContextTrainer(
        model=model, args=args, train_dataset=rows, eval_dataset=rows.select(range(7)), longctx_config=config
    )
    recorder, heads = LossRecorder(), count_heads(trainer)
    recorder.attach(trainer)
    trainer.train()
    return recorder.losses, trainer.evaluate()["eval_loss"], heads


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_model_loaded_stage_by_stage_trains_as_a_whole_one(ranks, tmp_path: Path, tied: bool) -> None:
    build_model(replace(CASE, tied=tied)).save_pretrained(tmp_path)
    found = ranks(2).run(train_loaded, str(tmp_path), True)
    assert found == ranks(2).run(train_loaded, str(tmp_path), False)
    assert sum(found[0][2]) > 0


@pytest.mark.wide
@pytest.mark.parametrize("name", ["2 x 1", "2 x 2, sharded"])
def test_a_frozen_head_is_spread_beside_adapters_and_one_with_an_adapter_is_not(ranks, tmp_path: Path, name: str) -> None:
    num_ranks, config = LAYOUTS[name]
    for target, is_spread in (("q_proj", True), ("lm_head", False)):
        case = replace(CASE, lora=(("r", 2), ("target_modules", ["q_proj", target])))
        results = ranks(num_ranks).run(train, case, str(tmp_path / target), config, {})
        losses, _ = plain_training(case, ROWS, NUM_STEPS)
        for found, _, _, heads in results:
            assert found == pytest.approx(losses, rel=1e-10)
            assert (sum(heads) > 0) == is_spread
