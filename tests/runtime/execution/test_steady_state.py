"""Inside a step nothing waits for the device, no process group is made and no memory is pinned."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.measures.planted import replaced
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.plans.layouts import plan_of
from helpers.ranks import rank_steps
from helpers.ranks.rank_steps import group_pool, rank_inputs
from torch.utils._python_dispatch import TorchDispatchMode

from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.runtime.execution import round as round_module
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.stage_model import whole_model

# operators whose result has to come to the host, or that pin memory
WAITING = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "_pin_memory", "masked_select", "unique")


class Recorder(TorchDispatchMode):
    """Names of all operators that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def operators_of_a_step(plan: StepPlan, rows: list[dict[str, list[int]]], bug: bool) -> set[str]:
    """Actions of this rank in the second step of a run; making a group or waiting for a device raises."""
    pool, model = group_pool(), build_model(ModelCase())
    patch_model(model)
    runner = StepExecutor(whole_model(model, num_attention_layers(model)), pool, torch.device("cpu"))
    chunks, rank_plan = rank_inputs(plan, rows, pool.rank)["chunks"], plan.for_rank(pool.rank)
    runner.run(rank_plan, chunks, 10)

    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a step made a process group or waited for the device")

    original = round_module.step_loss

    def waiting(loss: torch.Tensor, count: int) -> torch.Tensor:
        return original(loss, count + int(loss.detach() < 0))

    with (
        patch.object(dist, "new_group", forbidden),
        patch.object(torch.cuda, "synchronize", forbidden),
        # the end of a plan asks once whether memory ran out on a rank
        patch.object(StepExecutor, "_others_wait", lambda *_: "no rank tells"),
        replaced(round_module, "step_loss", waiting if bug else original),
        Recorder() as recorder,
    ):
        runner.run(rank_plan, chunks, 10)
    return recorder.names


@pytest.mark.daily("ulysses")
@pytest.mark.parametrize("ulysses", [4, 2, 1], ids=["ulysses", "hybrid", "ring"])
def test_no_operator_of_a_step_waits_for_the_device(ranks, ulysses: int) -> None:
    lengths = [37, 14, 9, 8]
    plan = plan_of([[(4, (0, 1))], [(2, (2,)), (1, (3,))]], lengths, 4, ulysses)
    for names in ranks(4).run(operators_of_a_step, plan, random_rows(lengths), False):
        assert "mm" in names
        assert not names & set(WAITING)


def test_a_step_that_waits_is_noticed() -> None:
    plan = plan_of([[(1, (0,))]], [9], 1)
    with (
        patch.object(rank_steps.dist, "get_world_size", lambda: 1),
        patch.object(rank_steps.dist, "new_group", lambda **kwargs: None),
    ):
        assert "_local_scalar_dense" in operators_of_a_step(plan, random_rows([9]), True)
