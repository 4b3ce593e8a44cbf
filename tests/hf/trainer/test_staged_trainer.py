"""The trainer's own work where ranks hold pipeline stages: clipped steps, norms, token counts, checkpoints and resuming."""

from __future__ import annotations

import re
from pathlib import Path
from types import MethodType
from typing import Any

import datasets
import pytest
import torch
import transformers
from helpers.models.reference import random_rows, relative_error
from helpers.models.staged_models import family_model
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.versions import resuming
from helpers.ranks.rank_steps import whole
from helpers.trainers.stage_training import random_gradient, sharded_like, whole_training
from helpers.trainers.trainer_runs import SKEWED, LossRecorder, plain_training, train_with_norms, training_arguments
from torch import Tensor

from hf_longctx import LongContextConfig, LongContextTrainer, load_pipeline_stage
from hf_longctx.runtime.parameters.gradients import GradientSum, TiedWeight

MAX_NORM, NUM_STEPS, ROW_TOKENS = 50.0, 4, 12
# (stages, how parameters live inside a stage), on four ranks
LAYOUTS: list[tuple[int, Any]] = [
    (2, "gathered_per_round"),
    (4, "replicated"),
    (2, "sharded"),
    (2, "replicated"),
    (2, "gathered_per_step"),
]
WHOLE_STAGES = LAYOUTS[3]


def random_step(trainer: LongContextTrainer, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
    """A step whose gradients come from the parameters' names, so that the model's whole training is known without a run."""
    stage = trainer.longctx_run.stage
    # a plan's tokens pass all stages
    inputs["input_ids"] = torch.zeros(1, ROW_TOKENS, dtype=torch.int64)
    for name, parameter in stage.model.named_parameters():
        gradient = random_gradient(name, parameter.shape, trainer.state.global_step)
        parameter.grad = sharded_like(parameter, gradient)
    shared = trainer.longctx_run.pool.links.shared
    tied = TiedWeight(stage.model.get_parameter(stage.tied), shared[stage.tied_stages]) if stage.tied else None
    GradientSum(list(stage.model.parameters())).reduce(None, tied)
    return torch.tensor(1.0 + trainer.state.global_step)


def trainer_of(
    folder: str, layout: tuple[int, Any], is_tied: bool, self_test: bool = False, **changes: Any
) -> LongContextTrainer:
    num_stages, parameters = layout
    settings = {"max_steps": NUM_STEPS, "max_grad_norm": MAX_NORM, "weight_decay": 0.0, "warmup_steps": 0, "logging_steps": 1}
    more = {"lr_scheduler_type": "constant", "include_num_input_tokens_seen": "all", "per_device_train_batch_size": 2}
    trainer = LongContextTrainer(
        model=family_model("llama", is_tied),
        args=training_arguments(folder, **{**settings, **more, **changes}),
        train_dataset=datasets.Dataset.from_list(random_rows([ROW_TOKENS] * 64)),
        longctx_config=LongContextConfig(
            stages=num_stages,
            parameters=parameters,
            tokens_per_rank=96,
            report_steps=False,
            timeline_steps=0,
            self_test=self_test,
        ),
    )
    trainer.training_step = MethodType(random_step, trainer)  # type: ignore[method-assign]
    return trainer


def run(
    folder: str, layout: tuple[int, Any], is_tied: bool, checkpoint: str | None = None
) -> tuple[dict[str, Tensor], list[Any], list[float], int]:
    """Final weights of this rank's stage, logged norms and losses, and tokens seen."""
    saving = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    trainer = trainer_of(folder, layout, is_tied, self_test=checkpoint is None, **saving)
    trainer.train(resume_from_checkpoint=checkpoint)
    logs = trainer.state.log_history
    weights = {name: whole(p.detach()).clone() for name, p in trainer.longctx_run.stage.model.named_parameters()}
    norms = [entry["grad_norm"] for entry in logs if "grad_norm" in entry]
    return weights, norms, [entry["loss"] for entry in logs if "loss" in entry], trainer.state.num_input_tokens_seen


def expected_training(is_tied: bool) -> tuple[Any, list[float]]:
    return whole_training(range(NUM_STEPS), is_tied, MAX_NORM, weight_decay=0.0)


def assert_same(weights: dict[str, Tensor], expected: Any) -> None:
    of_whole = dict(expected.named_parameters(remove_duplicate=False))
    assert max(relative_error(weight, of_whole[name].detach()) for name, weight in weights.items()) <= 1e-12


@pytest.mark.wide
@resuming
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_run_of_stages_is_clipped_saved_and_resumed_as_the_whole_model(ranks, tmp_path: Path, is_tied: bool) -> None:
    expected, expected_norms = expected_training(is_tied)
    first = str(tmp_path / "first")
    results = ranks(4).run(run, first, LAYOUTS[0], is_tied)
    for weights, norms, losses, num_tokens in results:
        assert_same(weights, expected)
        assert all(type(norm) is float for norm in norms)
        assert norms == pytest.approx(expected_norms, rel=1e-12)
        assert min(norms) > MAX_NORM
        assert losses == [1.0, 2.0, 3.0, 4.0]
        # tokens of the two ranks of one stage
        assert num_tokens == NUM_STEPS * 2 * ROW_TOKENS
    # one checkpoint is left, of the last step, which anybody can load
    (checkpoint,) = (tmp_path / "first").glob("checkpoint-*")
    assert {"training_args.bin", "config.json", "scheduler.pt", "trainer_state.json"} <= {
        file.name for file in checkpoint.iterdir()
    }
    assert_same(transformers.AutoModelForCausalLM.from_pretrained(checkpoint).state_dict(), expected)


def run_to(folder: str, layout: tuple[int, Any], is_tied: bool) -> None:
    trainer_of(folder, layout, is_tied, self_test=True, max_steps=2, save_strategy="steps", save_steps=2).train()


@pytest.mark.wide
@pytest.mark.slow
@resuming
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_resumes_at_any_number_of_stages(ranks, tmp_path: Path, layout: tuple[int, Any]) -> None:
    expected, expected_norms = expected_training(True)
    ranks(4).run(run_to, str(tmp_path), layout, True)
    for other in (layout, LAYOUTS[LAYOUTS.index(layout) - 1]):
        folder = tmp_path / f"{other[0]} {other[1]}"
        for weights, norms, _, _ in ranks(4).run(run, str(folder), other, True, str(tmp_path / "checkpoint-2")):
            assert_same(weights, expected)
            assert norms[-2:] == pytest.approx(expected_norms[-2:], rel=1e-12)


def without_clipping(folder: str) -> tuple[dict[str, Tensor], list[Any]]:
    """Weights after two steps without clipping, the norms, and the weights after the best model is loaded again."""
    trainer = trainer_of(folder, LAYOUTS[0], True, max_steps=2, max_grad_norm=0.0)
    trainer.train()
    weights = {name: whole(p.detach()).clone() for name, p in trainer.longctx_run.stage.model.named_parameters()}
    trainer.save_model()
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.zero_()
    trainer.state.best_model_checkpoint = folder
    trainer._load_best_model()
    loaded = {name: whole(p.detach()) for name, p in trainer.longctx_run.stage.model.named_parameters()}
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())
    return weights, [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]


@pytest.mark.wide
def test_norms_are_logged_without_clipping_and_the_best_model_is_loaded(ranks, tmp_path: Path) -> None:
    expected, norms = whole_training(range(2), True, float("inf"), weight_decay=0.0)
    for weights, found in ranks(4).run(without_clipping, str(tmp_path)):
        assert_same(weights, expected)
        assert found == pytest.approx(norms, rel=1e-12)
    assert_same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict(), expected)


def refused_resume(folder: str) -> str:
    trainer = trainer_of(folder, WHOLE_STAGES, False)
    trainer.create_optimizer()
    try:
        trainer._load_optimizer_and_scheduler(folder)
    except ValueError as error:
        return str(error)
    return ""


def test_optimizer_states_without_names_are_refused(ranks, tmp_path: Path) -> None:
    (tmp_path / "optimizer.pt").touch()
    for error in ranks(4).run(refused_resume, str(tmp_path)):
        assert "without stages and with replicated parameters, whose states have no names; resume with stages=1" in error


# two layers, so two stages; (ranks, how parameters live, rank's tokens)
REAL: dict[str, tuple[int, dict[str, Any]]] = {
    "a rank per stage": (2, {"stages": 2, "tokens_per_rank": 96}),
    "two ranks per stage": (4, {"stages": 2, "tokens_per_rank": 48, "parameters": "gathered_per_round"}),
}
REAL_STEPS = 8
# every layout: (ranks, settings)
EVERY: dict[str, tuple[int, dict[str, Any]]] = {
    "one stage, whole": (2, {"tokens_per_rank": 96}),
    "one stage, sharded": (2, {"tokens_per_rank": 96, "parameters": "sharded"}),
    "one stage, gathered per step": (2, {"tokens_per_rank": 96, "parameters": "gathered_per_step"}),
    "two stages, whole": (2, {"stages": 2, "tokens_per_rank": 96}),
    "two stages, gathered per micro-batch": (4, {"stages": 2, "tokens_per_rank": 48, "parameters": "gathered_per_round"}),
    "two stages, gathered per step": (4, {"stages": 2, "tokens_per_rank": 48, "parameters": "gathered_per_step"}),
    "two stages, sharded": (4, {"stages": 2, "tokens_per_rank": 48, "parameters": "sharded"}),
}


@pytest.mark.wide
@resuming
@pytest.mark.slow
@pytest.mark.parametrize("name", ["two stages, sharded", "two stages, gathered per step", "one stage, sharded"])
def test_checkpoints_of_sharded_stages_resume_to_and_from_every_layout(ranks, tmp_path: Path, name: str) -> None:
    case, rows = ModelCase(promoted=True, tied=True), random_rows(SKEWED)
    losses, weights = plain_training(case, rows, REAL_STEPS)
    saving = {"max_steps": REAL_STEPS, "save_strategy": "steps", "save_steps": 4}
    num_ranks, config = EVERY[name]
    ranks(num_ranks).run(train_with_norms, case, rows, str(tmp_path / "first"), config, saving)
    checkpoint = str(tmp_path / "first" / "checkpoint-4")
    of_whole = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    for place, (other_ranks, other) in enumerate(EVERY.values()):
        folder = str(tmp_path / str(place))
        for found, _, final in ranks(other_ranks).run(
            train_with_norms, case, rows, folder, other, {"max_steps": REAL_STEPS, "resume": checkpoint}
        ):
            assert found == pytest.approx(losses[4:], rel=1e-10)
            assert max(relative_error(weight, of_whole[key]) for key, weight in final.items()) <= 1e-10


@pytest.mark.wide
@resuming
@pytest.mark.parametrize("name", REAL)
def test_real_training_in_stages_follows_one_plain_process_over_a_restart(ranks, tmp_path: Path, name: str) -> None:
    case, rows = ModelCase(promoted=True, tied=True), random_rows(SKEWED)
    num_ranks, config = REAL[name]
    losses, weights = plain_training(case, rows, REAL_STEPS)
    saving = {"max_steps": REAL_STEPS, "save_strategy": "steps", "save_steps": 4}
    whole_run = ranks(num_ranks).run(train_with_norms, case, rows, str(tmp_path / "whole"), config, saving)
    checkpoint = str(tmp_path / "whole" / "checkpoint-4")
    resumed = ranks(num_ranks).run(
        train_with_norms, case, rows, str(tmp_path / "again"), config, {**saving, "resume": checkpoint}
    )
    # and without stages
    alone = {"tokens_per_rank": 96, "parameters": "gathered_per_round"}
    single = ranks(2).run(train_with_norms, case, rows, str(tmp_path / "single"), alone, {**saving, "resume": checkpoint})
    for start, results in ((0, whole_run), (4, resumed), (4, single)):
        for found, norms, final in results:
            assert found == pytest.approx(losses[start:], rel=1e-10)
            assert norms == results[0][1]
            of_whole = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
            assert max(relative_error(weight, of_whole[key]) for key, weight in final.items()) <= 1e-10
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / f"checkpoint-{REAL_STEPS}").state_dict()
    assert max(relative_error(saved[key], weight) for key, weight in weights.items()) <= 1e-10


def losses_of(folder: str, rows: Any, is_loaded: bool, arguments: dict[str, Any]) -> tuple[list[float], float, set[Any]]:
    """Losses of a run whose model every rank had whole, or loaded a stage of; the loss on the rows after it, and dtypes."""
    args = training_arguments(f"{folder}/out", max_steps=3, per_device_train_batch_size=4, **arguments)
    config = LongContextConfig(stages=2, tokens_per_rank=96, report_steps=False, timeline_steps=0)
    model = load_pipeline_stage(folder, config) if is_loaded else transformers.AutoModelForCausalLM.from_pretrained(folder)
    recorder = LossRecorder()
    trainer = LongContextTrainer(
        model=model,
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
        eval_dataset=datasets.Dataset.from_list(rows[:7]),
        longctx_config=config,
    )
    recorder.attach(trainer)
    trainer.train()
    return recorder.losses, trainer.evaluate()["eval_loss"], {parameter.dtype for parameter in trainer.model.parameters()}


@pytest.mark.wide
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_loaded_stage_by_stage_trains_and_evaluates_as_a_whole_one(ranks, tmp_path: Path, dtype: torch.dtype) -> None:
    build_model(ModelCase(dtype=dtype, tied=True)).save_pretrained(tmp_path)
    rows = random_rows(SKEWED)
    found = ranks(2).run(losses_of, str(tmp_path), rows, True, {"bf16": True})
    expected = ranks(2).run(losses_of, str(tmp_path), rows, False, {"bf16": True})
    # the layers are the same, since they are dealt out by the same costs
    assert found == expected
    assert found[0] == found[1]
    assert found[0][2] == {dtype}


def refused_freezing(folder: str, frozen: str, is_loaded: bool) -> str:
    """Why a model does not start, of which some weights are frozen, on the stage that has them or on the whole model."""
    # first, since it says how many ranks there are
    args = training_arguments(f"{folder}/out")
    config = LongContextConfig(stages=2, tokens_per_rank=96)
    model = load_pipeline_stage(folder, config) if is_loaded else transformers.AutoModelForCausalLM.from_pretrained(folder)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not re.search(frozen, name))
    rows = datasets.Dataset.from_list(random_rows([9] * 16))
    try:
        LongContextTrainer(model=model, args=args, train_dataset=rows, longctx_config=config)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.wide("embed_tokens-False-")
@pytest.mark.parametrize(
    ("frozen", "is_loaded", "message"),
    [
        ("embed_tokens", True, "only one of them is frozen; freeze both or neither"),
        ("embed_tokens|[.]0[.]", False, "stage 0 has no weight that is trained"),
        ("embed_tokens", False, ""),
    ],
)
def test_weights_frozen_on_one_stage_are_refused_on_every_rank(
    ranks, tmp_path: Path, frozen: str, is_loaded: bool, message: str
) -> None:
    build_model(ModelCase(tied=True)).save_pretrained(tmp_path)
    for error in ranks(2).run(refused_freezing, str(tmp_path), frozen, is_loaded):
        assert message in error and bool(message) == bool(error)
