"""Trainings beside a teacher end with the weights of a plain loop, through every placement, and resume; others are refused."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from helpers.models.reference import random_rows, reference_step, relative_error
from helpers.models.teachers import build_teacher
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.token_losses import DISTANCES, with_weights
from helpers.ranks.rank_steps import whole
from helpers.trainers.trainer_runs import PLAIN_DESCENT, make_trainer, plain_steps, training_arguments
from safetensors.torch import load_file

from hf_longctx import LongContextConfig, LongContextTrainer
from hf_longctx.runtime.core.loss import Distillation

LENGTHS = [61, 13, 50, 5, 44, 8, 21, 34]
CASE = ModelCase(num_layers=4, promoted=True, loss="jsd", teacher="qwen3")
ARGUMENTS = {**PLAIN_DESCENT, "max_steps": 3, "logging_steps": 1}
# settings and arguments of each run
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "packs": ({"tokens_per_rank": 64}, {}),
    "tiles": ({"tokens_per_rank": 64, "tile_tokens": 8, "device_gib": 0.0015}, {}),
    "shards": ({"tokens_per_rank": 128, "parameters": "sharded"}, {}),
    "gathered": ({"tokens_per_rank": 128, "parameters": "gathered_per_step"}, {}),
    "stages": ({"tokens_per_rank": 64, "stages": 2}, {}),
    "accumulated": ({"tokens_per_rank": 64}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
}


def settings_of(loss: str) -> dict[str, Any]:
    return {f"distillation_{name}": getattr(DISTANCES[loss], name) for name in ("beta", "temperature", "weight", "top_k")}


def train(
    case: ModelCase, rows: Any, config: dict[str, Any], arguments: dict[str, Any], self_test: bool = False
) -> tuple[list[float], dict[str, torch.Tensor], float]:
    """Losses of all steps, this rank's weights, and the loss of an evaluation before."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            case,
            rows,
            folder,
            {**settings_of(case.loss), **config, "self_test": self_test},
            {**ARGUMENTS, **arguments},
            teacher=build_teacher(case),
            eval_dataset=datasets.Dataset.from_list(rows),
        )
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: whole(p.detach()).clone() for name, p in trainer.model.named_parameters()}, before


@pytest.mark.daily("shards-False")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", RUNS)
def test_a_training_beside_a_teacher_equals_a_plain_loop(ranks, name: str, weighted: bool) -> None:
    rows = random_rows(LENGTHS)
    rows = with_weights(rows) if weighted else rows
    steps, weights = plain_steps(CASE, rows, 3)
    for losses, found, before in ranks(2).run(train, CASE, rows, *RUNS[name], name == "stages"):
        # the trainer adds losses up in fp32
        assert losses == pytest.approx([loss for loss, _ in steps], rel=1e-6)
        assert before == pytest.approx(steps[0][0], rel=1e-12)
        errors = {key: relative_error(value, weights[key]) for key, value in found.items() if key in weights}
        assert errors and max(errors.values()) <= 1e-12, errors


def resumed(folder: str, rows: Any) -> tuple[list[float], list[float], list[str]]:
    """Losses of four steps in one go, those of two steps and two more after a restart, and names of weights in the checkpoint."""
    arguments = {**ARGUMENTS, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 3}
    found = []
    for place, checkpoint in (("first", None), ("first", str(Path(folder) / "first" / "checkpoint-2"))):
        teacher = build_teacher(CASE)
        trainer = make_trainer(CASE, rows, str(Path(folder) / place), settings_of(CASE.loss), arguments, teacher=teacher)
        trainer.train(resume_from_checkpoint=checkpoint)
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    names = list(load_file(str(Path(folder) / "first" / "checkpoint-2" / "model.safetensors")))
    return *found, names


@pytest.mark.wide
def test_a_resumed_training_goes_on_and_its_checkpoints_hold_no_teacher(ranks, tmp_path) -> None:
    for whole_run, halves, names in ranks(2).run(resumed, str(tmp_path), random_rows(LENGTHS)):
        assert halves == pytest.approx(whole_run, rel=1e-12)
        assert set(names) == set(build_model(CASE).state_dict())


def test_a_teacher_in_another_precision_gives_its_own_distribution(tmp_path) -> None:
    rows, teacher = random_rows(LENGTHS), build_teacher(ModelCase(teacher="qwen3", dtype=torch.float32))
    expected, _ = reference_step(build_model(CASE), rows, "forward", teacher)
    settings = settings_of("forward")
    trainer = make_trainer(CASE, rows, str(tmp_path), settings, ARGUMENTS, teacher=teacher, eval_dataset=from_rows(rows))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_a_teacher_in_four_bits_gives_its_own_distribution(tmp_path) -> None:
    pytest.importorskip("bitsandbytes")
    # in evaluation mode, a plain forward would repack these weights for inference on this CPU
    teacher = build_model(ModelCase("qwen3", four_bit="nf4", dtype=torch.float32, num_layers=3))
    rows, case = random_rows(LENGTHS), ModelCase(dtype=torch.float32)
    expected, _ = reference_step(build_model(case), rows, "forward", teacher)
    teacher.eval()
    settings = {**settings_of("forward"), "self_test": True}
    trainer = make_trainer(case, rows, str(tmp_path), settings, ARGUMENTS, teacher=teacher, eval_dataset=from_rows(rows))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-4)


def from_rows(rows: Any) -> datasets.Dataset:
    return datasets.Dataset.from_list(rows)


def refused(folder: str, lone: bool) -> str:
    """The message with which a run refuses to start if only rank 0 has a teacher, or if ranks have different ones."""
    rank = torch.distributed.get_rank()
    teachers = [build_teacher(ModelCase(teacher="qwen3")), None if lone else build_teacher(ModelCase(teacher="llama"))]
    with pytest.raises(ValueError) as error:
        make_trainer(ModelCase(), random_rows(LENGTHS), folder, {}, ARGUMENTS, teacher=teachers[rank])
    return str(error.value)


@pytest.mark.daily("True")
@pytest.mark.parametrize("lone", [True, False])
def test_ranks_with_different_teachers_are_refused_together(ranks, tmp_path, lone: bool) -> None:
    for message in ranks(2).run(refused, str(tmp_path), lone):
        assert "teacher" in message


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a name": ({"teacher": "org/model"}, "teacher is 'org/model'"),
    "training mode": ({"teacher": build_model(ModelCase("qwen3"))}, "training mode"),
    "other tokens": ({"teacher": build_model(ModelCase("qwen3"))}, "and the model 64"),
    "no teacher": ({"longctx_config": LongContextConfig(distillation_beta=1.0)}, "distillation_beta=1.0 has no effect"),
    "a loss": ({"token_loss": print}, "teacher and token_loss were given"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_teachers_are_refused_by_name(name: str, tmp_path) -> None:
    given, message = BAD[name]
    given = dict(given)
    if name == "other tokens":
        given["teacher"].resize_token_embeddings(72)
        given["teacher"].eval()
    if name == "a loss":
        given["teacher"] = build_teacher(ModelCase(teacher="qwen3"))
    with pytest.raises(ValueError, match=message):
        LongContextTrainer(
            build_model(ModelCase()), training_arguments(str(tmp_path)), train_dataset=from_rows(random_rows([5, 9])), **given
        )


def test_a_teacher_that_is_put_into_training_mode_later_is_refused(tmp_path) -> None:
    teacher = build_teacher(CASE)
    trainer = make_trainer(CASE, random_rows(LENGTHS), str(tmp_path), settings_of("jsd"), ARGUMENTS, teacher=teacher)
    teacher.train()
    with pytest.raises(ValueError, match="put into training mode"):
        trainer.train()


def test_a_hook_that_is_put_on_the_teacher_later_is_refused(tmp_path) -> None:
    teacher = build_teacher(CASE)
    trainer = make_trainer(
        CASE, random_rows(LENGTHS), str(tmp_path), {**settings_of("jsd"), "self_test": True}, ARGUMENTS, teacher=teacher
    )
    teacher.model.layers[0].register_forward_hook(lambda module, args, output: output)
    with pytest.raises(ValueError, match=r"the teacher: .* got a hook"):
        trainer.train()


@pytest.mark.trl
@pytest.mark.parametrize("beta,temperature", [(0.0, 2.0), (1.0, 1.0), (0.3, 0.7)])
def test_distances_are_those_of_trl(beta: float, temperature: float) -> None:
    gkd = pytest.importorskip("trl.experimental.gkd")
    logits_TV, teacher_TV = torch.randn(2, 5, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = Distillation(beta, temperature).losses(logits_TV, teacher_TV, torch.zeros(5, dtype=torch.int64))
    given = {"beta": beta, "temperature": temperature, "reduction": "none"}
    expected = gkd.GKDTrainer.generalized_jsd_loss(logits_TV, teacher_TV, **given)
    torch.testing.assert_close(found, expected.sum(dim=-1), rtol=1e-12, atol=1e-14)
