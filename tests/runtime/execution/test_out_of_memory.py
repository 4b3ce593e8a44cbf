"""Where the device runs out of memory, the error says what ran, what was predicted and what to change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.layouts import plan_of
from helpers.ranks.rank_steps import rank_inputs

from hf_longctx.hf.models.patch import patch_model
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.process_groups import GroupPool

LENGTHS = [13, 5, 9]
PLAN = plan_of([[(1, (0,))], [(1, (1, 2))]], LENGTHS, 1)
CPU = torch.device("cpu")


class Exhausted(torch.nn.Module):
    """Raises what CUDA raises, in forward or backward, from `num_tokens` tokens on."""

    def __init__(self, inner: torch.nn.Module, num_tokens: int, in_backward: bool) -> None:
        super().__init__()
        self.inner, self.num_tokens, self.in_backward = inner, num_tokens, in_backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if x.shape[1] == self.num_tokens:
            if not self.in_backward:
                self.fail()
            y.register_hook(self.fail)
        return y

    def fail(self, gradient: Any = None) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB.")


def executor_that_fails(num_tokens: int, in_backward: bool) -> StepExecutor:
    model = build_model(ModelCase())
    patch_model(model)
    model.model.layers[1].mlp = Exhausted(model.model.layers[1].mlp, num_tokens, in_backward)
    return StepExecutor(whole_model(model, 2), GroupPool((1,), timeout_s=1.0), CPU)


@pytest.mark.parametrize("in_backward,action", [(False, "0F0"), (True, "0B0")])
def test_a_step_names_what_ran_and_what_to_change(in_backward: bool, action: str) -> None:
    # the round that packs 5 and 9 tokens
    round_index = next(i for i, batch in enumerate(PLAN.micro_batches) if batch.num_tokens == 14)
    executor, chunks = executor_that_fails(14, in_backward), rank_inputs(PLAN, random_rows(LENGTHS), 0)["chunks"]
    with pytest.raises(torch.OutOfMemoryError) as found:
        executor.run(PLAN.for_rank(0), chunks, 10, predicted_bytes=3 * 2**29)
    assert str(found.value) == (
        f"step 0, round {round_index}, action {action}: out of device memory with chunk 0 of 14 tokens in 2 documents on 1 "
        "rank(s); the plan was predicted to take 1.50 GiB; lower tokens_per_rank, set activations='auto', or allow more host "
        "memory. The device said: CUDA out of memory. Tried to allocate 7.00 GiB."
    )
    assert "Tried to allocate 7.00 GiB" in str(found.value.__cause__)


def test_an_evaluation_does_too_and_says_nothing_that_it_does_not_know() -> None:
    executor, chunks = executor_that_fails(13, False), rank_inputs(PLAN, random_rows(LENGTHS), 0)["chunks"]
    with pytest.raises(
        torch.OutOfMemoryError, match=r"^evaluation 0, round \d, action 0F0: .*13 tokens in 1 documents on 1 rank\(s\); lower"
    ):
        executor.evaluate(PLAN.for_rank(0), chunks)
