"""`full_determinism=True`: equal runs have equal bits, however long their steps take."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.trainers.stock_runs import quiet_config
from helpers.trainers.trainer_runs import LossRecorder, make_trainer, training_arguments
from transformers import DataCollatorWithFlattening, Trainer

from hf_longctx import LongContextCallback

CASE = ModelCase(dtype=torch.float32)
ROWS = random_rows([random.Random(1).randrange(3, 60) for _ in range(24)])
ARGUMENTS = {"max_steps": 8, "logging_steps": 1, "learning_rate": 0.1, "save_strategy": "steps", "save_steps": 4}


def slow(model: Any, seconds: float) -> None:
    """Makes every forward of a layer longer, so that other costs are measured."""
    model.model.layers[0].register_forward_pre_hook(lambda module, args: time.sleep(seconds))


def train_on_rank(
    folder: str, seconds: float, door: str, is_determined: bool, resume: str | None = None
) -> tuple[list[Any], list[str], dict[str, torch.Tensor], int]:
    """Logged losses and norms, layouts, weights, and number of fits of a run whose forwards take `seconds` longer."""
    num_fits = 0
    arguments, recorder = {**ARGUMENTS, "full_determinism": is_determined}, LossRecorder()
    config = {"tokens_per_rank": 64, "calibration_steps": 1}
    try:
        if door == "trainer":
            trainer: Any = make_trainer(CASE, ROWS, folder, config, arguments)
            slow(trainer.model, seconds)
            recorder.attach(trainer)
        else:
            model, callback = build_model(CASE), LongContextCallback(quiet_config(**config))
            slow(model, seconds)
            args = training_arguments(folder, **{**arguments, "per_device_train_batch_size": 8 // dist.get_world_size()})
            rows, collator = datasets.Dataset.from_list(ROWS), DataCollatorWithFlattening()
            trainer = Trainer(model, args, collator, rows, callbacks=[callback] if door == "alone" else None)
            if door == "attached":
                callback.attach(trainer)
                recorder.attach(trainer)
        report = trainer.longctx_run.report if door != "alone" else None
        trainer.train(resume_from_checkpoint=resume)
        num_fits = 0 if report is None else report._refit.num_fits
    finally:
        torch.use_deterministic_algorithms(False)
    logged = [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]
    weights = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    return logged, recorder.layouts, weights, num_fits


def same(first: Any, second: Any) -> bool:
    return all(
        one[:2] == other[:2] and all(torch.equal(one[2][name], other[2][name]) for name in one[2])
        for one, other in zip(first, second, strict=True)
    )


@pytest.mark.wide
@pytest.mark.parametrize("door", ["trainer", "attached", "alone"])
def test_equal_runs_have_equal_bits_at_any_speed(ranks, tmp_path: Path, door: str) -> None:
    first, second = (
        ranks(2).run(train_on_rank, str(tmp_path / str(number)), seconds, door, True)
        for number, seconds in enumerate((0.0, 0.02))
    )
    assert same(first, second)
    resumed = ranks(2).run(train_on_rank, str(tmp_path / "1"), 0.0, door, True, str(tmp_path / "1" / "checkpoint-4"))
    assert all(one[0] == other[0] for one, other in zip(first, resumed, strict=True))
    assert same([(0, 0, run[2]) for run in first], [(0, 0, run[2]) for run in resumed])


def test_without_it_costs_are_fitted_to_measured_seconds(ranks, tmp_path: Path) -> None:
    for is_determined in (True, False):
        for _, _, _, num_fits in ranks(2).run(train_on_rank, str(tmp_path / str(is_determined)), 0.0, "trainer", is_determined):
            assert (num_fits == 0) == is_determined
