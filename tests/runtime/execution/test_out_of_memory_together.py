"""Memory that runs out on one of several ranks, whose passes need no other rank: all ranks learn of it, and repeat the step."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.models.reference import random_rows, relative_error
from helpers.models.teachers import teacher_beside
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.token_losses import TOKEN_LOSSES
from helpers.plans.layouts import plan_of
from helpers.ranks.rank_steps import rank_inputs
from torch import Tensor

from hf_longctx.hf.models.patch import patch_model
from hf_longctx.plan.core.serialize import plan_from_json, plan_to_json
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.round import OutOfMemoryTogether
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.parameters import gradients
from hf_longctx.runtime.process_groups import GroupPool

LENGTHS = [13, 5, 9, 7]
ROWS = random_rows(LENGTHS)
CPU = torch.device("cpu")
ALONE = plan_of([[(1, (0,)), (1, (1,))], [(1, (2,)), (1, (3,))]], LENGTHS, 2)


class Failing(torch.nn.Module):
    """Runs out of memory while `is_failing`, in the forward or the backward of some number of tokens."""

    def __init__(self, inner: torch.nn.Module, num_tokens: int, in_backward: bool) -> None:
        super().__init__()
        self.inner, self.num_tokens, self.in_backward, self.is_failing = inner, num_tokens, in_backward, False

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.is_failing and x.shape[1] == self.num_tokens:
            if not self.in_backward:
                self.fail()
            y.register_hook(self.fail)
        return y

    def fail(self, gradient: Any = None) -> None:
        raise torch.OutOfMemoryError("planted")


def gradients_on_rank(plan_json: str, failing_rank: int, num_tokens: int, place: str) -> Any:
    """Runs four steps on this rank, of which the third fails; returns its error, and the gradients of the others.

    place: "forward", "backward", "sum": the one in fp32 that a gradient in bf16 is added to, "teacher": the forward of one, or
    "evaluation": the same, where the third step only evaluates.
    """
    plan, rank = plan_from_json(plan_json), dist.get_rank()
    case = ModelCase(loss="jsd", teacher="qwen3") if place in ("teacher", "evaluation") else ModelCase()
    model = build_model(case)
    patch_model(model)
    absorb, weight = gradients.GradientSum._absorb, model.model.embed_tokens.weight
    if place == "sum":
        model.bfloat16()

    def absorbed(self: Any, parameter: Any) -> None:
        if failing.is_failing and parameter is weight and parameter.grad is not None:
            failing.is_failing = False
            failing.fail()
        absorb(self, parameter)

    pool = GroupPool((1, 2), timeout_s=60.0, sums_early=True)
    executor = StepExecutor(whole_model(model, 2), pool, CPU, token_loss=TOKEN_LOSSES[case.loss])
    executor.teacher = teacher_beside(case, plan, pool)
    # in the first layer, whose backward is the last, when sums of the others have started
    layer = (model if executor.teacher is None else executor.teacher.executor.model).model.layers[0]
    failing = layer.mlp = Failing(layer.mlp, num_tokens, place == "backward").train(layer.training)
    chunks = rank_inputs(plan, ROWS, rank)["chunks"]
    found, error = [], None
    with mock.patch.object(gradients, "_EARLY_BUCKET_BYTES", 4096), mock.patch.object(gradients.GradientSum, "_absorb", absorbed):
        for step in range(4):
            model.zero_grad(set_to_none=True)
            failing.is_failing = step == 2 and rank == failing_rank
            try:
                if step == 2 and place == "evaluation":
                    executor.evaluate(plan.for_rank(rank), chunks)
                executor.run(plan.for_rank(rank), chunks, sum(LENGTHS) - len(LENGTHS))
                found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
            except torch.OutOfMemoryError as raised:
                error = type(raised).__name__, str(raised)
    has_early = pool.early is not None
    pool.close()
    return error, found, has_early


PLACES = [(5, "forward"), (7, "backward"), (0, "sum"), (7, "teacher"), (5, "evaluation")]


@pytest.mark.daily("7-backward", "0-sum")
@pytest.mark.parametrize(("num_tokens", "place"), PLACES)
def test_all_ranks_raise_at_the_end_of_the_plan_and_go_on_with_equal_gradients(ranks: Any, num_tokens: int, place: str) -> None:
    # rank 1 runs documents 1 and 3
    results = ranks(2).run(gradients_on_rank, plan_to_json(ALONE), 1, num_tokens, place, timeout_s=60.0)
    (error, found, has_early), (own_error, own, _) = results
    what = "evaluation" if place == "evaluation" else "step"
    assert error == (OutOfMemoryTogether.__name__, f"{what} 0: 1 other rank(s) ran out of device memory")
    assert own_error[0] == OutOfMemoryTogether.__name__ and "The device said: planted" in own_error[1]
    assert own_error[1].startswith("teacher 0, round") == (place in ("teacher", "evaluation"))
    assert has_early and len(found) == len(own) == 3
    for first, last, other in zip((found[0], found[1]), (found[2], found[2]), (own[2], own[2]), strict=True):
        assert first.keys() == last.keys() == other.keys() and first
        assert max(relative_error(last[name], each) for name, each in first.items()) <= 1e-14
        assert all(torch.equal(other[name], each) for name, each in last.items())
