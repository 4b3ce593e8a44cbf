"""Trainers on interleaved stages: every loss and gradient of one plain process, and one ordinary checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from helpers.models.reference import random_rows, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.versions import resuming
from helpers.trainers.trainer_runs import (
    PLAIN_DESCENT,
    Rows,
    StepRecorder,
    make_trainer,
    plain_steps,
    training_arguments,
)
from transformers import AutoModelForCausalLM

from hf_longctx import LongContextConfig, LongContextTrainer, load_pipeline_stage

NUM_STEPS = 3
ARGUMENTS = {**PLAIN_DESCENT, "max_steps": NUM_STEPS}
LENGTHS = [40, 33, 30, 26, 21, 13, 8, 5]
CASE = ModelCase(promoted=True, num_layers=8, tied=True)
STAGES = {"stages": 2, "interleave": 2, "tokens_per_rank": 128}


@pytest.fixture(scope="module")
def rows() -> Rows:
    return random_rows(LENGTHS)


def train(rows: Rows, folder: str, config: dict[str, Any], arguments: dict[str, Any], resume: str | None = None) -> Any:
    """Recorded steps of a run on this rank; the model is saved."""
    trainer = make_trainer(CASE, rows, folder, config, {**ARGUMENTS, **arguments})
    recorder = StepRecorder()
    recorder.attach(trainer)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    return recorder.steps


def assert_same_steps(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    for step, (loss, gradients) in zip(found, expected, strict=True):
        assert step.loss == pytest.approx(loss, rel=1e-12)
        # a tied head is a weight of its own on the last stage
        whole = {**gradients, "lm_head.weight": gradients["model.embed_tokens.weight"]}
        assert step.gradients and max(relative_error(g, whole[name]) for name, g in step.gradients.items()) <= 1e-12


@pytest.mark.wide
@pytest.mark.parametrize(
    ("num_ranks", "config"),
    [(2, {}), (4, {"tokens_per_rank": 64})],
    ids=["two stages", "two stages of two ranks"],
)
def test_losses_and_gradients_are_those_of_one_plain_process(ranks, rows, tmp_path: Path, num_ranks: int, config: Any) -> None:
    expected, weights = plain_steps(CASE, rows, NUM_STEPS)
    results = ranks(num_ranks).run(train, rows, str(tmp_path), {**STAGES, **config}, {})
    for steps in results:
        assert_same_steps(steps, expected)
        assert all(step.layer_ranges == {0, 1} for step in steps)
    # together the ranks have the gradients of all weights
    assert {name for steps in results for name in steps[0].gradients} == {*weights, "lm_head.weight"}
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).state_dict()
    assert saved.keys() - {"lm_head.weight"} == weights.keys()
    assert max(relative_error(saved[name], weight) for name, weight in weights.items()) <= 1e-12


@pytest.mark.wide
@resuming
def test_a_run_resumes_with_and_without_interleaving(ranks, rows, tmp_path: Path) -> None:
    expected, _ = plain_steps(CASE, rows, 4)
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    ranks(2).run(train, rows, str(tmp_path / "first"), STAGES, saving)
    checkpoint = str(tmp_path / "first" / "checkpoint-2")
    for name, config, layer_ranges in (("again", STAGES, {0, 1}), ("plain", {**STAGES, "interleave": 1}, {0})):
        for steps in ranks(2).run(train, rows, str(tmp_path / name), config, saving, checkpoint):
            assert_same_steps(steps, expected[2:])
            assert all(step.layer_ranges == layer_ranges for step in steps)


def evaluated(rows: Rows, checkpoint: str, folder: str, stages: int, interleave: int) -> tuple[float, list[int]]:
    """The loss of a held-out set on stages that every rank loaded alone, and the layers that this rank holds."""
    args = training_arguments(folder)
    settings = {"report_steps": False, "timeline_steps": 0}
    config = LongContextConfig(stages=stages, interleave=interleave, tokens_per_rank=128, **settings)
    model = load_pipeline_stage(checkpoint, config, dtype=torch.float64)
    dataset = datasets.Dataset.from_list(rows)
    trainer = LongContextTrainer(model=model, args=args, eval_dataset=dataset, longctx_config=config)
    layers = {int(name.split(".")[2]) for name, _ in model.named_parameters() if ".layers." in name}
    return trainer.evaluate()["eval_loss"], sorted(layers)


def test_interleaved_stages_are_loaded_alone(ranks, rows, tmp_path: Path) -> None:
    build_model(CASE).save_pretrained(tmp_path / "checkpoint")
    arguments = rows, str(tmp_path / "checkpoint"), str(tmp_path)
    ((whole_loss, _),) = ranks(1).run(evaluated, *arguments, 1, 1)
    (first_loss, first), (last_loss, last) = ranks(2).run(evaluated, *arguments, 2, 2)
    assert [first_loss, last_loss] == pytest.approx([whole_loss] * 2, rel=1e-12)
    assert sorted(first + last) == list(range(8))
    # two ranges each
    assert first != list(range(len(first))) and first[0] == 0 and last[-1] == 7


def self_tested(rows: Rows, folder: str) -> set[int]:
    """Layer ranges in the plans of a run that began with the self-test."""
    trainer = make_trainer(CASE, rows, folder, {**STAGES, "self_test": True}, {**ARGUMENTS, "max_steps": 1})
    recorder = StepRecorder()
    recorder.attach(trainer)
    trainer.train()
    return recorder.steps[0].layer_ranges


@pytest.mark.wide
def test_the_self_test_runs_interleaved_plans(ranks, rows, tmp_path: Path) -> None:
    assert ranks(2).run(self_tested, rows, str(tmp_path)) == [{0, 1}] * 2


def refused(rows: Rows, folder: str, config: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as error:
        make_trainer(CASE, rows, folder, config, ARGUMENTS)
    return str(error.value)


@pytest.mark.daily("config1-are more than the model's 8 layers; use interleave=4 or less")
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"interleave": 2}, "divides pipeline stages into layer ranges, but stages is 1; set stages=2 or more"),
        ({"stages": 2, "interleave": 5}, "are more than the model's 8 layers; use interleave=4 or less"),
        ({"stages": 2, "interleave": 2, "parameters": "gathered_per_round"}, "use 'sharded', 'gathered_per_step' or"),
    ],
)
def test_what_does_not_go_with_interleaving_is_refused_on_every_rank(ranks, rows, tmp_path: Path, config, message) -> None:
    for text in ranks(2).run(refused, rows, str(tmp_path), config):
        assert message in text


def refused_after_loading(rows: Rows, checkpoint: str, folder: str) -> str:
    """Why a trainer without interleaving refuses a stage of two layer ranges."""
    args = training_arguments(folder)
    model = load_pipeline_stage(checkpoint, LongContextConfig(stages=2, interleave=2), dtype=torch.float64)
    dataset, config = datasets.Dataset.from_list(rows), LongContextConfig(stages=2)
    with pytest.raises(ValueError) as error:
        LongContextTrainer(model=model, args=args, train_dataset=dataset, longctx_config=config)
    return str(error.value)


def test_a_stage_that_was_loaded_in_other_ranges_is_refused(ranks, rows, tmp_path: Path) -> None:
    build_model(CASE).save_pretrained(tmp_path / "checkpoint")
    for message in ranks(2).run(refused_after_loading, rows, str(tmp_path / "checkpoint"), str(tmp_path)):
        assert "the model was loaded in 2 layer range(s) per stage, but interleave is 1; load it with the same number" in message
