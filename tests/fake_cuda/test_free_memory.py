"""Memory that plans leave free on the fake device: a step that runs out of it is planned again, and what a run may use."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import TrainerCallback, TrainingArguments

from fake_cuda.machine.computing import Computing
from fake_cuda.machine.device import FakeDevice
from fake_cuda.test_training import slow_hardware, small_model
from hf_longctx import LongContextConfig, LongContextTrainer
from hf_longctx.hf.run import free_memory
from hf_longctx.runtime.execution.executor import StepExecutor

LENGTHS, STEPS, PLANS_PER_STEP = (1024, 512, 256), 3, 2


class Weights(TrainerCallback):
    """Notes the weights after every step."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def on_step_end(self, *arguments: Any, model: Any, **keywords: Any) -> None:
        self.found.append(torch.cat([parameter.detach().float().cpu().flatten() for parameter in model.parameters()]))


def trained(folder: Path, hardware: str, **settings: Any) -> tuple[list[torch.Tensor], LongContextTrainer]:
    """Trains a small model; returns the weights after every step, and the trainer."""
    row = torch.randint(0, 128, (max(LENGTHS),), generator=torch.Generator().manual_seed(1)).tolist()
    data = datasets.Dataset.from_dict({"input_ids": [row[:length] for length in LENGTHS] * STEPS * PLANS_PER_STEP})
    arguments = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=len(LENGTHS), gradient_accumulation_steps=PLANS_PER_STEP,
        optim="sgd", learning_rate=0.5, max_grad_norm=0.0, logging_steps=100, report_to="none", save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    config = LongContextConfig(
        timeline_steps=0, calibration_steps=0, host_gib=0.05, device_gib=0.0065, hardware=hardware, self_test=False, **settings
    )
    weights = Weights()
    trainer = LongContextTrainer(
        model=small_model(), args=arguments, train_dataset=data, longctx_config=config, callbacks=[weights]
    )
    trainer.train()
    return weights.found, trainer


def check_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Compares trainings whose plans round otherwise; gradients that were counted twice would double an update."""
    error, moved = (found[-1] - wanted[-1]).norm(), (wanted[0] - wanted[-1]).norm()
    print(f"error {error:.2e} of {moved:.2e}")
    assert moved > 0 and error < 0.1 * moved


def fails_once(plan_number: int, after: Callable[[], None] = lambda: None) -> Callable[..., Any]:
    """A `StepExecutor._run` whose call number `plan_number` runs its plan, then says that memory has run out."""
    run, calls = StepExecutor._run, [0]

    def failing(executor: StepExecutor, *arguments: Any, **keywords: Any) -> Any:
        calls[0] += 1
        result = run(executor, *arguments, **keywords)
        if calls[0] == plan_number:
            after()
            raise torch.OutOfMemoryError("planted")
        return result

    return failing


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_plan_that_runs_out_of_memory_is_planned_again(
    number: int, tmp_path: Path, device: FakeDevice, computing: Computing, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    hardware = slow_hardware(tmp_path)
    wanted, _ = trained(tmp_path / "plain", hardware)
    capsys.readouterr()
    monkeypatch.setattr(StepExecutor, "_run", fails_once(number))
    found, trainer = trained(tmp_path / "failing", hardware)
    said = capsys.readouterr().out
    assert re.search(r"memory: less is free than was assumed, so plans fill at most 0\.\d+ of", said), said
    free = trainer._steps.free
    assert free.limit_bytes < free.setup.memory.usable_bytes and trainer.longctx_run.source.tighter is not None
    check_equal(found, wanted)


@pytest.mark.parametrize("compares", [False, True], ids=["", "comparing"])
def test_a_plan_that_needs_more_than_was_predicted_lowers_the_limit(
    compares: bool, tmp_path: Path, device: FakeDevice, computing: Computing, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    # the device is as small as this training needs, and peaks are far above the prediction
    active = free_memory.active_bytes
    limit = int(0.0065 * 2**30)
    monkeypatch.setattr(free_memory, "active_bytes", lambda device: (0, int(3 * active(device)[1])))
    monkeypatch.setattr(free_memory.FreeMemory, "_shares", lambda free: (int(limit / 0.92), 0))
    saw, run = free_memory.FreeMemory.saw, StepExecutor._run
    judged = []

    def comparing(executor: StepExecutor, *arguments: Any, **keywords: Any) -> Any:
        # a verdict on documents that were compared during the plan, whose memory no plan needs
        verdicts = executor.pool.stacks.verdicts
        verdicts[len(verdicts)] = False
        return run(executor, *arguments, **keywords)

    def watched(free: free_memory.FreeMemory, plan: Any) -> None:
        saw(free, plan)
        judged.append(free.is_short)

    if compares:
        monkeypatch.setattr(StepExecutor, "_run", comparing)
    monkeypatch.setattr(free_memory.FreeMemory, "saw", watched)
    _, trainer = trained(tmp_path, slow_hardware(tmp_path))
    assert ("memory: less is free" in capsys.readouterr().out) != compares
    assert (trainer._steps.free.limit_bytes < limit) != compares and judged and any(judged) != compares
