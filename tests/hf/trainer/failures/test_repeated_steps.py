"""A step that runs out of memory on one of two ranks: planned again on both, with the weights of a training that did not fail."""

from __future__ import annotations

import tempfile
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.models.reference import random_rows, relative_error
from helpers.models.tiny_models import ModelCase
from helpers.trainers.trainer_runs import make_trainer

from hf_longctx.hf.run.free_memory import FreeMemory
from hf_longctx.runtime.execution import executor

CASE = ModelCase()
ROWS = random_rows([256, 190, 256, 120, 201, 256, 64, 256] * 4)
# two plans in each of two steps
ARGUMENTS = {"max_steps": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-2}
CONFIG = {"tokens_per_rank": 1024, "degrees": [1], "host_gib": 0.05, "device_gib": 0.1}


def train_on_rank(failing_call: int, is_watched: bool = True, parameters: str = "replicated") -> Any:
    """Trains on this rank; returns final weights, the limit of memory before and after, peaks of plans, and the error."""
    run, calls, error = executor.run_rounds, [0], ""

    def failing(*arguments: Any, **keywords: Any) -> Any:
        memory = run(*arguments, **keywords)
        calls[0] += 1
        # a rank for which another waits would leave it to a limit of time
        if calls[0] == failing_call and (parameters != "replicated" or dist.get_rank() == 1):
            raise torch.OutOfMemoryError("planted")
        return memory

    peaks: list[int] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(executor, "run_rounds", failing),
        # on the CPU nothing measures what is free
        mock.patch.object(FreeMemory, "is_watched", property(lambda free: is_watched, lambda free, value: None), create=True),
        mock.patch.object(FreeMemory, "saw", lambda free, plan: peaks.append(plan.estimate.peak_bytes)),
    ):
        trainer = make_trainer(CASE, ROWS, folder, {**CONFIG, "parameters": parameters}, ARGUMENTS)
        before = trainer.longctx_run.setup.memory.usable_bytes
        try:
            trainer.train()
        except torch.OutOfMemoryError as raised:
            error = str(raised)
        after = trainer._steps.free.limit_bytes
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}, before, after, peaks, error


@pytest.mark.parametrize("failing_call", [2, 3])
def test_both_ranks_plan_the_step_again_and_reach_the_same_weights(ranks: Any, failing_call: int) -> None:
    pair = ranks(2)
    (expected, before, unchanged, _, _), _ = pair.run(train_on_rank, 0, timeout_s=280.0)
    results = pair.run(train_on_rank, failing_call, timeout_s=280.0)
    assert before == unchanged
    for weights, _, after, peaks, error in results:
        assert not error and after == results[0][2] < before
        assert len(peaks) == 4 and max(peaks[failing_call - 1 :]) <= after < peaks[0]
        assert max(relative_error(weights[name], each) for name, each in expected.items()) <= 1e-9


def test_a_step_that_cannot_run_again_ends_on_both_ranks(ranks: Any) -> None:
    (*_, other), (*_, own) = ranks(2).run(train_on_rank, 3, False, timeout_s=280.0)
    assert "1 other rank(s) ran out of device memory" in other and "planted" in own
    for error in (other, own):
        assert "cannot run again: its plan may not depend on what was measured" in error and "device_gib=0.0" in error


def test_a_rank_for_which_others_wait_says_why_the_step_ends(ranks: Any) -> None:
    (*_, own), _ = ranks(2).run(train_on_rank, 1, True, "sharded", timeout_s=280.0)
    assert "planted" in own and "weights are sharded" in own and "device_gib=0.0" in own
