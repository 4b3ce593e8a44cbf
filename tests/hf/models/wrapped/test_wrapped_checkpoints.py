"""Checkpoints of multimodal models on several ranks hold towers bit for bit, load into plain transformers, and resume."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from helpers.models.any_model import build_any, wide_floats
from helpers.models.reference import random_rows, reference_step, relative_error
from helpers.models.versions import resuming
from helpers.trainers.trainer_runs import training_arguments

from hf_longctx import LongContextConfig, LongContextTrainer

ROWS = random_rows([30, 7, 17, 1])
NUM_STEPS, SAVED_STEP = 4, 2
STEPS: dict[str, Any] = {
    **{"max_steps": NUM_STEPS, "per_device_train_batch_size": 2, "max_grad_norm": 0.0, "warmup_steps": 0, "learning_rate": 1e-2},
    **{"lr_scheduler_type": "constant", "save_strategy": "steps", "save_steps": SAVED_STEP, "weight_decay": 0.1},
}
# name -> (class, settings); AutoModelForCausalLM builds no LLaVA, and files name the weights of both in another way
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "sharded": ("Gemma3", {"parameters": "sharded"}),
    "stages": ("Gemma3", {"stages": 2}),
    "sharded LLaVA": ("Llava", {"parameters": "sharded"}),
}


def build(name: str) -> Any:
    return build_any(f"{name}ForConditionalGeneration", "sdpa")


def train(name: str, folder: str, config: dict[str, Any], resume_from: str | None = None) -> None:
    """Trains on this rank, and leaves checkpoints in the folder."""
    model = build(name)
    # a resumed run is the same model under the same plans
    settings = LongContextConfig(
        tokens_per_rank=64, report_steps=False, timeline_steps=0, self_test=resume_from is None, **config
    )
    with wide_floats():
        LongContextTrainer(
            model=model,
            args=training_arguments(folder, **STEPS),
            train_dataset=datasets.Dataset.from_list(ROWS),
            longctx_config=settings,
        ).train(resume_from_checkpoint=resume_from)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def loaded(name: str, folder: Path, step: int) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint as plain transformers loads them."""
    model, report = getattr(transformers, f"{name}ForConditionalGeneration").from_pretrained(
        folder / f"checkpoint-{step}", dtype=torch.float64, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    return weights_of(model)


@functools.cache
def plain(name: str) -> dict[str, torch.Tensor]:
    """The weights after all steps of plain transformers and torch's AdamW, each on all rows."""
    model = build(name)
    decay, rest = ([p for p in model.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)
    with wide_floats():
        for _ in range(NUM_STEPS):
            reference_step(model, ROWS)
            optimizer.step()
    return weights_of(model)


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest, ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """Class and settings of a training on two ranks, and the folder with its checkpoints."""
    name, config = RUNS[request.param]
    folder = tmp_path_factory.mktemp("run")
    ranks(2).run(train, name, str(folder), config)
    return name, config, folder


@pytest.mark.wide
@pytest.mark.slow
def test_checkpoints_hold_towers_bit_for_bit_and_load_into_plain_transformers(run: Any) -> None:
    name, _, folder = run
    before, expected = weights_of(build(name)), plain(name)
    towers = [key for key in before if "vision_tower" in key or "multi_modal_projector" in key]
    assert len(towers) > 10
    for step in (SAVED_STEP, NUM_STEPS):
        saved = loaded(name, folder, step)
        assert saved.keys() == before.keys()
        assert not [key for key in towers if not torch.equal(saved[key], before[key])]
        assert not [key for key in before if key not in towers and torch.equal(saved[key], before[key])]
    assert max(relative_error(saved[key], expected[key]) for key in saved) <= 1e-10


@pytest.mark.daily("sharded LLaVA")
@resuming
def test_a_resumed_training_ends_with_the_same_weights(run: Any, ranks: Any, tmp_path: Path) -> None:
    name, config, folder = run
    ranks(2).run(train, name, str(tmp_path), config, str(folder / f"checkpoint-{SAVED_STEP}"))
    whole, resumed = loaded(name, folder, NUM_STEPS), loaded(name, tmp_path, NUM_STEPS)
    assert not (tmp_path / f"checkpoint-{SAVED_STEP}").exists()
    assert max(relative_error(resumed[key], whole[key]) for key in whole) <= 1e-12
