"""Trainers whose stages lend their ranks: every loss and gradient of one plain process, and one ordinary adapter folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import peft
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

from hf_longctx import LongContextConfig, LongContextTrainer, load_pipeline_stage
from hf_longctx.hf.models.spec import model_spec
from hf_longctx.plan.core.settings import GENERIC_CPU
from hf_longctx.plan.cost.profiles import HardwareProfile, profile_to_json
from hf_longctx.plan.memory.byte_model import ByteModel
from hf_longctx.plan.memory.saved_tensors import saved_token_bytes

NUM_STEPS = 3
ARGUMENTS = {**PLAIN_DESCENT, "max_steps": NUM_STEPS, "logging_steps": 1}
LORA = (("r", 2), ("lora_alpha", 8), ("target_modules", ["q_proj", "v_proj", "down_proj"]))
CASE = ModelCase(promoted=True, num_layers=4, lora=LORA)
EXPERTS = ModelCase("mixtral", balance=0.02, lora=(("r", 2), ("target_modules", ["q_proj"])))
LENGTHS = [160, 40, 33, 26, 21, 13, 8, 5]
# measurements on a busy machine must not change the plans
STAGES = {"stages": 2, "lend_stages": True, "tokens_per_rank": 256, "calibration_steps": 0}


@pytest.fixture(scope="module")
def rows() -> Rows:
    return random_rows(LENGTHS)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of a run on a machine where messages cost next to nothing, so that lending pays for short sequences too."""
    file = tmp_path_factory.mktemp("hardware") / "quick.json"
    # a backward without gradients of weights has half of the products left
    rates = {"message_s": 1e-7, "kernel_s": 1e-6, "link_bytes_per_s": 1e11, "backward_matmul": 4.0}
    profile = HardwareProfile(replace(GENERIC_CPU, **rates), source="quick messages")
    file.write_text(profile_to_json(profile))
    return {**STAGES, "hardware": str(file)}


def train(rows: Rows, folder: str, config: dict[str, Any], arguments: dict[str, Any], resume: str | None = None) -> Any:
    """Recorded steps of a run on this rank, the logged norms, and the loss of an evaluation; the adapters are saved."""
    trainer = make_trainer(CASE, rows, folder, config, {**ARGUMENTS, **arguments})
    recorder = StepRecorder()
    recorder.attach(trainer)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return recorder.steps, norms, trainer.evaluate(trainer.train_dataset)["eval_loss"]


def assert_same_steps(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    for step, (loss, gradients) in zip(found, expected, strict=True):
        assert step.loss == pytest.approx(loss, rel=1e-12)
        # every rank has the gradients of all stages
        assert step.gradients.keys() == gradients.keys()
        assert max(relative_error(step.gradients[name], gradient) for name, gradient in gradients.items()) <= 1e-12


@pytest.mark.daily("measured")
@pytest.mark.parametrize(
    ("num_ranks", "config"),
    [(2, {}), (4, {"tokens_per_rank": 128}), (2, {"calibration_steps": 1, "self_test": True, "report_steps": True})],
    ids=["two stages", "two stages of two ranks", "measured"],
)
def test_losses_and_gradients_are_those_of_one_plain_process(ranks, rows, quick, tmp_path, num_ranks: int, config: Any) -> None:
    expected, weights = plain_steps(CASE, rows, NUM_STEPS)
    results = ranks(num_ranks).run(train, rows, str(tmp_path), {**quick, **config}, {})
    squares = [sum(float(gradient.square().sum()) for gradient in gradients.values()) for _, gradients in expected]
    model = build_model(CASE)
    model.load_state_dict(weights, strict=False)
    for steps, norms, eval_loss in results:
        assert_same_steps(steps, expected)
        assert steps[0].num_lent > 0
        assert norms == pytest.approx([square**0.5 for square in squares], rel=1e-12)
        assert eval_loss == pytest.approx(plain_steps(CASE, rows, NUM_STEPS + 1)[0][-1][0], rel=1e-12)
    saved = peft.PeftModel.from_pretrained(build_model(replace(CASE, lora=())), tmp_path, autocast_adapter_dtype=False)
    found = dict(saved.named_parameters())
    assert max(relative_error(found[name].detach(), weight) for name, weight in weights.items() if "lora_" in name) <= 1e-12


@pytest.mark.wide
def test_policies_are_executed_on_each_stages_own_layers(ranks, rows, quick, tmp_path: Path) -> None:
    expected, _ = plain_steps(CASE, rows, NUM_STEPS)
    spec = model_spec(build_model(CASE))
    # the longest sequence cannot keep everything
    room = {"device_gib": (ByteModel(spec).states() + 60 * saved_token_bytes(spec)) / 2**30, "tile_tokens": 8}
    for steps, *_ in ranks(2).run(train, rows, str(tmp_path), {**quick, **room}, {}):
        assert_same_steps(steps, expected)
        assert steps[0].num_policies > 0


@pytest.mark.wide
@resuming
def test_a_run_resumes_with_and_without_lending(ranks, rows, quick, tmp_path: Path) -> None:
    expected, _ = plain_steps(CASE, rows, 4)
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    ranks(2).run(train, rows, str(tmp_path / "first"), quick, saving)
    checkpoint = str(tmp_path / "first" / "checkpoint-2")
    for steps, *_ in ranks(2).run(train, rows, str(tmp_path / "again"), quick, saving, checkpoint):
        assert_same_steps(steps, expected[2:])
        assert all(step.num_lent for step in steps)
    alone = {"tokens_per_rank": 256, "calibration_steps": 0}
    for steps, *_ in ranks(2).run(train, rows, str(tmp_path / "plain"), alone, saving, checkpoint):
        assert_same_steps(steps, expected[2:])
        assert not any(step.num_lent for step in steps)


def refused_stage(rows: Rows, checkpoint: str, folder: str) -> str:
    """The message that refuses a model of which this rank loaded its own stage alone."""
    # joins the launch, which loading needs
    args = training_arguments(folder, **ARGUMENTS)
    model = load_pipeline_stage(checkpoint, LongContextConfig(stages=2), dtype=torch.float64)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **dict(LORA)))
    config = LongContextConfig(**STAGES)
    with pytest.raises(ValueError) as error:
        LongContextTrainer(model=adapted, args=args, train_dataset=datasets.Dataset.from_list(rows), longctx_config=config)
    return str(error.value)


def test_a_stage_that_was_loaded_alone_is_refused(ranks, rows, tmp_path: Path) -> None:
    build_model(replace(CASE, lora=())).save_pretrained(tmp_path / "checkpoint")
    for text in ranks(2).run(refused_stage, rows, str(tmp_path / "checkpoint"), str(tmp_path)):
        assert "lend_stages=True needs the whole model on every rank, but the model was loaded as one stage" in text


def refused(rows: Rows, folder: str, case: ModelCase, config: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as error:
        make_trainer(case, rows, folder, config, ARGUMENTS)
    return str(error.value)


@pytest.mark.daily("all weights")
@pytest.mark.parametrize(
    ("case", "config", "message"),
    [
        (CASE, {"lend_stages": True}, "lends ranks of idle pipeline stages, but stages is 1; set stages=2 or more"),
        (replace(CASE, lora=()), STAGES, "lend_stages=True needs adapters (LoRA)"),
        (CASE, {**STAGES, "parameters": "gathered_per_round"}, "lend_stages=True needs parameters='replicated'"),
        (EXPERTS, STAGES, "lend_stages=True does not support the load-balancing loss of experts"),
    ],
    ids=["no stages", "all weights", "shards", "experts"],
)
def test_what_does_not_go_with_lending_is_refused_on_every_rank(ranks, rows, tmp_path: Path, case, config, message) -> None:
    for text in ranks(2).run(refused, rows, str(tmp_path), case, config):
        assert message in text
