"""Gradients that leave for the host during the last backward: the bits of copies after it, whatever a step consists of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.measures.late_copies import LateCopies
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.token_losses import total_weight
from helpers.plans.layouts import plan_of
from helpers.plans.policies import replayed, same_policy
from helpers.plans.sliced_plans import cut, sliced_plan
from helpers.ranks.rank_steps import rank_inputs
from torch import Tensor, nn

from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.layers import layer_modules, output_head
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.plan.core.types import StepPlan
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.activations.output_head import OutputHead
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.parameters import host_steps
from hf_longctx.runtime.parameters.gradients import AT_END, LayerOrder
from hf_longctx.runtime.parameters.host_steps import HostSteps
from hf_longctx.runtime.parameters.master_weights import MASTER_WEIGHT, host_steps_of, keep_master_weights
from hf_longctx.runtime.process_groups import GroupPool

CPU = torch.device("cpu")
LAYERS, STEPS = 4, 3
CASE = ModelCase(num_layers=LAYERS, dtype=torch.bfloat16)
PLANS: dict[str, StepPlan] = {
    "one backward": plan_of([[(1, (0, 1))]], [9, 12], 1),
    "micro-batches": plan_of([[(1, (0,))], [(1, (1,))], [(1, (2,))]], [9, 12, 5], 1),
    "slices": sliced_plan([19, 6], [*([span] for span in cut(0, [8, 6, 5])), [(1, 0, 6)]], num_ranks=1),
    "replays": same_policy(plan_of([[(1, (0,))], [(1, (1,))]], [9, 12], 1), *[replayed(1.0)] * LAYERS, tile_tokens=4),
}
Meddle = Callable[[nn.Module], None]


def share_weight(model: Any) -> None:
    for layer in model.model.layers[1:3]:
        layer.mlp.up_proj.weight = model.model.layers[LAYERS - 1].mlp.up_proj.weight


def freeze(model: nn.Module) -> None:
    for name, weight in model.named_parameters():
        weight.requires_grad_("layers.2" in name or "layers.1.mlp" in name)


def use_late(model: Any) -> None:
    """Lets the first layer also use a weight of the last one, which no module of the first layer holds."""
    weight = model.model.layers[-1].self_attn.q_proj.weight

    def add(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + weight.sum() * 1e-3

    model.model.layers[0].mlp.register_forward_hook(add)


class Run:
    """A training of a tiny model on one rank, with states on the host.

    is_early: gradients may leave early. is_late: they then arrive as late as may be, else at once.
    """

    def __init__(
        self, case: ModelCase, plan: StepPlan, is_early: bool, change: Meddle = lambda model: None, is_late: bool = True
    ) -> None:
        self.model, self.plan = build_model(case), plan
        change(self.model)
        patch_model(self.model)
        stage = whole_model(self.model, num_attention_layers(self.model))
        self.executor = StepExecutor(stage, GroupPool((1,), 60.0), CPU, case.fp32_gradients)
        batch = plan.micro_batches[0].groups[0]
        self.engine = None
        if any(stage.activations for stage in batch.stages):
            self.engine = ActivationEngine(layer_modules(self.model), head=OutputHead(output_head(self.model)))
        self.rows = random_rows(list(plan.lengths))
        self.optimizer = torch.optim.AdamW([w for w in self.model.parameters() if w.requires_grad], lr=1e-2)
        keep_master_weights(self.optimizer, True, LateCopies(is_late))
        host = host_steps_of(self.optimizer)
        assert host is not None
        self.host: HostSteps = host
        self.executor.early_updates = self.host if is_early else None
        self.num_early: list[int] = []
        self.gradients: list[dict[str, Tensor]] = []

    def backward(self, plan: StepPlan | None = None, reduce: bool = True) -> None:
        plan = plan or self.plan
        batch = rank_inputs(plan, self.rows, 0)
        self.executor.run(plan.for_rank(0), batch["chunks"], total_weight(self.rows), reduce, engine=self.engine)

    def step(self, max_norm: float, meddle: Meddle = lambda model: None) -> None:
        self.backward()
        self.num_early.append(len(self.host._early))
        self.gradients.append({name: w.grad.clone() for name, w in self.model.named_parameters() if w.grad is not None})
        self.host.clipped(lambda: torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm), max_norm)
        meddle(self.model)
        self.optimizer.step()
        self.model.zero_grad(set_to_none=True)

    def found(self) -> dict[str, Tensor]:
        values = {f"{step} {name}": value for step, each in enumerate(self.gradients) for name, value in each.items()}
        for name, weight in self.model.named_parameters():
            values[name] = weight.detach()
            values |= {f"{name} {key}": torch.as_tensor(value) for key, value in self.optimizer.state.get(weight, {}).items()}
        assert any(MASTER_WEIGHT in name for name in values)
        return values


def compared(
    case: ModelCase, plan: StepPlan, max_norm: float = 1e-3, change: Meddle = lambda model: None, **meddle: Meddle
) -> Run:
    """Asserts that trainings with and without early copies have the same bits; returns the one with them."""
    runs = [Run(case, plan, *each) for each in ((True, change, True), (True, change, False), (False, change))]
    for run in runs:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host_steps, "UPDATE_PART_BYTES", 4096)
            for _ in range(STEPS):
                run.step(max_norm, **meddle)
    *early, expected = (run.found() for run in runs)
    for found in early:
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert runs[0].num_early == runs[1].num_early
    assert runs[2].num_early == [0] * STEPS
    return runs[0]


@pytest.mark.daily("one backward-no clipping")
@pytest.mark.parametrize("max_norm", [1e-3, 1e3, float("inf")], ids=["clipped", "below the limit", "no clipping"])
@pytest.mark.parametrize("name", PLANS)
def test_early_copies_give_the_bits_of_late_ones(name: str, max_norm: float) -> None:
    run = compared(CASE, PLANS[name], max_norm)
    levels = LayerOrder(run.model).levels
    # all but the embedding, which gets its gradient last
    num_layers = sum(level > AT_END for level in levels.values())
    assert run.num_early == [0, *[num_layers] * (STEPS - 1)] and num_layers == len(levels) - 1


CASES = {
    "in bf16": replace(CASE, fp32_gradients=False),
    "in fp32": replace(CASE, dtype=torch.float32),
    "tied": replace(CASE, tied=True),
    "experts": replace(CASE, family="qwen3_moe"),
}


@pytest.mark.daily("in fp32")
@pytest.mark.parametrize("name", CASES)
def test_other_models(name: str) -> None:
    assert min(compared(CASES[name], PLANS["micro-batches"]).num_early[1:]) > 0


@pytest.mark.daily("freeze")
@pytest.mark.parametrize("change", [freeze, share_weight, use_late])
def test_frozen_shared_and_late_weights(change: Meddle) -> None:
    run = compared(CASE, PLANS["micro-batches"], 1e3, change)
    assert min(run.num_early[1:]) > 0
    if change is use_late:
        own = run.model.get_submodule("model.layers")[-1].self_attn.q_proj.weight
        assert run.executor.parameters.gradients._late == {own}


def test_a_gradient_that_comes_late_for_the_first_time_is_added() -> None:
    runs = [Run(CASE, PLANS["micro-batches"], is_early) for is_early in (True, False)]
    for run in runs:
        for step in range(3):
            if step == 2:
                use_late(run.model)
            run.step(float("inf"))
    early, late = (run.gradients[2]["model.layers.3.self_attn.q_proj.weight"].float() for run in runs)
    # rounded once more
    assert float((early - late).norm() / late.norm()) < 2**-7
    assert float((early - runs[0].gradients[1]["model.layers.3.self_attn.q_proj.weight"].float()).norm() / late.norm()) > 0.1


def scale_gradients(model: nn.Module) -> None:
    for weight in list(model.parameters())[::2]:
        if weight.grad is not None:
            weight.grad.mul_(3.0)


def replace_gradients(model: nn.Module) -> None:
    for weight in list(model.parameters())[::2]:
        weight.grad = None if weight.grad is None else weight.grad * -1.0


@torch.no_grad()
def move_weights(model: nn.Module) -> None:
    for weight in list(model.parameters())[::3]:
        weight.add_(0.25)


def place_weights(model: nn.Module) -> None:
    for weight in list(model.parameters())[::3]:
        weight.data = weight.detach() * 2.0


@pytest.mark.daily("0.001-place_weights")
@pytest.mark.parametrize("meddle", [scale_gradients, replace_gradients, move_weights, place_weights])
@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_what_changes_before_the_update_is_seen(meddle: Meddle, max_norm: float) -> None:
    assert min(compared(CASE, PLANS["one backward"], max_norm, meddle=meddle).num_early[1:]) > 0


def test_only_the_last_plan_of_a_step_sends() -> None:
    runs = [Run(CASE, PLANS["micro-batches"], is_early) for is_early in (True, False)]
    for run in runs:
        run.step(float("inf"))
        run.backward(reduce=False)
        assert not run.host._early
        run.step(float("inf"))
    assert runs[0].num_early[1] > 0
    early, late = (run.found() for run in runs)
    assert all(torch.equal(early[name], late[name]) for name in late)


def test_a_step_that_is_left_out_holds_no_gradient() -> None:
    run = Run(CASE, PLANS["one backward"], True)
    run.step(1.0)
    run.backward()
    assert run.host._early
    run.model.zero_grad(set_to_none=True)
    run.host.clipped(lambda: torch.zeros(()), 1.0)
    assert not run.host._early
    run.step(1.0)
    assert run.num_early[-1] > 0


def test_a_step_that_broke_leaves_nothing() -> None:
    run = Run(CASE, PLANS["one backward"], True)
    run.step(1.0)

    def fail(*_: Any) -> None:
        raise KeyError("broken")

    broken = run.model.get_submodule("model.layers")[1].register_full_backward_hook(fail)
    with pytest.raises(KeyError):
        run.backward()
    broken.remove()
    assert not run.executor.parameters.gradients._settled
