"""Master weights: half-precision weights are updated as fp32 ones are, through saves, foreign changes and errors."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_longctx.runtime.parameters.master_weights import (
    MASTER_WEIGHT,
    drop_master_weights,
    keep_master_weights,
    why_no_master_weights,
)

RATE, NUM_STEPS = 1e-5, 30
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=RATE, weight_decay=0.1),
    "fused AdamW": lambda weights: torch.optim.AdamW(weights, lr=RATE, fused=True),
    "one by one": lambda weights: torch.optim.AdamW(weights, lr=RATE, foreach=False),
    "SGD": lambda weights: torch.optim.SGD(weights, lr=RATE),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=RATE, momentum=0.9),
    "Adagrad": lambda weights: torch.optim.Adagrad(weights, lr=RATE),
    "RMSprop": lambda weights: torch.optim.RMSprop(weights, lr=RATE),
}


def half_weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in ((40, 30), (30,))]


def set_gradients(weights: list[nn.Parameter], step: int) -> None:
    """Gradients that bf16 can hold, equal for weights of any dtype."""
    generator = torch.Generator().manual_seed(100 + step)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator).bfloat16().to(weight.dtype)


def train(weights: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(weights, step)
        optimizer.step()
        for weight in weights:
            weight.grad = None


def masters(weights: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [optimizer.state[weight][MASTER_WEIGHT] for weight in weights]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_fp32_weights(name: str) -> None:
    weights = half_weights()
    wide = [nn.Parameter(weight.detach().float()) for weight in weights]
    optimizer, plain = OPTIMIZERS[name](weights), OPTIMIZERS[name](wide)
    keep_master_weights(optimizer)
    train(weights, optimizer, range(NUM_STEPS))
    train(wide, plain, range(NUM_STEPS))
    for weight, master, expected in zip(weights, masters(weights, optimizer), wide, strict=True):
        assert torch.equal(master, expected.detach())
        assert torch.equal(weight.detach(), expected.detach().bfloat16())
    assert all(value.dtype == torch.float32 for state in optimizer.state.values() for value in state.values())


def test_without_them_most_updates_are_rounded_away() -> None:
    before = half_weights()[0].detach().float()
    moved = {}
    for is_kept in (False, True):
        weights = half_weights()
        optimizer = OPTIMIZERS["AdamW"](weights)
        if is_kept:
            keep_master_weights(optimizer)
        train(weights, optimizer, range(NUM_STEPS))
        found = masters(weights, optimizer)[0] if is_kept else weights[0].detach().float()
        moved[is_kept] = float((found != before).float().mean())
    assert moved[False] < 0.25 and moved[True] > 0.99


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_training_goes_on_bit_by_bit(name: str) -> None:
    weights, optimizer = half_weights(), None
    optimizer = OPTIMIZERS[name](weights)
    keep_master_weights(optimizer)
    train(weights, optimizer, range(10))
    saved = copy.deepcopy(optimizer.state_dict())
    resumed = [nn.Parameter(weight.detach().clone()) for weight in weights]
    other = OPTIMIZERS[name](resumed)
    keep_master_weights(other)
    other.load_state_dict(saved)
    for trained, used in ((weights, optimizer), (resumed, other)):
        train(trained, used, range(10, 20))
    for found, expected in zip(masters(resumed, other), masters(weights, optimizer), strict=True):
        assert torch.equal(found, expected)


def test_states_of_a_run_without_them_are_taken_and_the_other_way_round() -> None:
    weights = half_weights()
    optimizer = OPTIMIZERS["AdamW"](weights)
    train(weights, optimizer, range(3))
    other = OPTIMIZERS["AdamW"](weights)
    keep_master_weights(other)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(torch.equal(master, weight.float()) for master, weight in zip(masters(weights, other), weights, strict=True))
    train(weights, other, range(3, 5))
    plain = OPTIMIZERS["AdamW"](weights)
    plain.load_state_dict(copy.deepcopy(other.state_dict()))
    drop_master_weights(plain)
    drop_master_weights(other)
    assert [set(state) for state in plain.state.values()] == [{"step", "exp_avg", "exp_avg_sq"}] * 2
    assert MASTER_WEIGHT in other.state[weights[0]], "an optimizer that keeps them loses none"


def test_a_weight_that_something_else_changed_goes_on_from_there() -> None:
    weights = half_weights()
    optimizer = OPTIMIZERS["SGD"](weights)
    keep_master_weights(optimizer)
    train(weights, optimizer, range(5))
    before = [master.clone() for master in masters(weights, optimizer)]
    with torch.no_grad():
        weights[0][3] = 7.0
    set_gradients(weights, 5)
    gradients = [weight.grad.float() for weight in weights]
    optimizer.step()
    before[0][3] = 7.0
    for master, old, gradient in zip(masters(weights, optimizer), before, gradients, strict=True):
        assert torch.equal(master, old - RATE * gradient)


def test_a_weight_without_a_gradient_stays() -> None:
    weights = half_weights()
    optimizer = OPTIMIZERS["AdamW"](weights)
    keep_master_weights(optimizer)
    train(weights, optimizer, range(2))
    kept = [weight.detach().clone() for weight in weights]
    set_gradients(weights, 2)
    weights[0].grad = None
    optimizer.step()
    assert torch.equal(weights[0].detach(), kept[0])
    assert int(optimizer.state[weights[0]]["step"]) == 2 and int(optimizer.state[weights[1]]["step"]) == 3


def test_weights_in_fp32_have_none() -> None:
    weights = [half_weights()[0], nn.Parameter(torch.ones(4))]
    optimizer = OPTIMIZERS["AdamW"](weights)
    keep_master_weights(optimizer)
    train(weights, optimizer, range(2))
    assert MASTER_WEIGHT in optimizer.state[weights[0]] and MASTER_WEIGHT not in optimizer.state[weights[1]]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_on_the_host_are_the_same(name: str) -> None:
    found = []
    for on_host in (False, True):
        weights = [*half_weights(), nn.Parameter(torch.ones(5))]
        optimizer = OPTIMIZERS[name](weights)
        keep_master_weights(optimizer, on_host)
        train(weights, optimizer, range(5))
        saved = copy.deepcopy(optimizer.state_dict())
        weights = [nn.Parameter(weight.detach().clone()) for weight in weights]
        optimizer = OPTIMIZERS[name](weights)
        keep_master_weights(optimizer, on_host)
        optimizer.load_state_dict(saved)
        train(weights, optimizer, range(5, 8))
        found.append([*masters(weights[:2], optimizer), weights[2].detach()])
        assert (MASTER_WEIGHT in optimizer.state[weights[2]]) == on_host
        assert all(master.data_ptr() != weight.data_ptr() for weight, master in zip(weights, found[-1][:2], strict=False))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("on_host", [False, True])
def test_a_gradient_in_another_layout_belongs_to_its_own_elements(on_host: bool) -> None:
    found = []
    for is_fused in (False, True):
        weights = [nn.Parameter(half_weights()[0].t())]
        optimizer = torch.optim.AdamW(weights, lr=0.1, fused=is_fused)
        keep_master_weights(optimizer, on_host)
        for step in range(2):
            weights[0].grad = torch.randn(30, 40, generator=torch.Generator().manual_seed(step)).bfloat16()
            optimizer.step()
        found.append(weights[0].detach().float())
    # the order of rounding differs
    assert torch.allclose(*found, rtol=1e-2, atol=1e-3)


class FailingOnce(torch.optim.SGD):
    fails = True

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            self.fails = False
            raise RuntimeError("out of memory")
        return super().step(closure)


def test_a_step_that_failed_can_be_tried_again() -> None:
    weights = half_weights()
    optimizer = FailingOnce(weights, lr=RATE)
    keep_master_weights(optimizer)
    set_gradients(weights, 0)
    expected = [weight.detach().float() - RATE * weight.grad.float() for weight in weights]
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    optimizer.step()
    assert optimizer.param_groups[0]["params"] == weights
    assert all(torch.equal(a, b) for a, b in zip(masters(weights, optimizer), expected, strict=True))


class ZeroingFirst(torch.optim.AdamW):
    """Changes gradients in its step, and calls the step of its parent, for which torch runs hooks once more."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                weight.grad.zero_()
        return super().step(closure)


def test_a_step_that_changes_gradients_is_followed() -> None:
    torch.optim.AdamW(half_weights())
    weights = half_weights()
    optimizer = ZeroingFirst(weights, lr=1.0, weight_decay=0.0)
    keep_master_weights(optimizer)
    train(weights, optimizer, range(2))
    assert all(torch.equal(weight, before) for weight, before in zip(weights, half_weights(), strict=True))


class Caching(torch.optim.SGD):
    def __init__(self, weights: Any, lr: float) -> None:
        super().__init__(weights, lr)
        self.cached = list(self.param_groups[0]["params"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for weight in self.cached:
            weight.sub_(weight.grad, alpha=0.1)


def test_an_optimizer_that_passes_its_groups_over_is_refused() -> None:
    weights = half_weights()
    optimizer = Caching(weights, lr=0.1)
    keep_master_weights(optimizer)
    with pytest.raises(RuntimeError, match="Caching changed a weight that its step did not find in param_groups"):
        train(weights, optimizer, range(1))


def test_step_hooks_and_closures_are_refused_by_name() -> None:
    weights = half_weights()
    optimizer = OPTIMIZERS["SGD"](weights)
    keep_master_weights(optimizer)
    set_gradients(weights, 0)
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: 0.0)
    hook = optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(ValueError, match="register_step_post_hook"):
        optimizer.step()
    hook.remove()
    optimizer.step()


def test_schedulers_count_the_steps() -> None:
    weights = half_weights()
    optimizer = OPTIMIZERS["SGD"](weights)
    keep_master_weights(optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_gradients(weights, 0)
        optimizer.step()
        scheduler.step()
    assert MASTER_WEIGHT in optimizer.state[weights[0]]


class OwnReader(torch.optim.SGD):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


class ScheduleFree(torch.optim.SGD):
    def train(self) -> None: ...


@pytest.mark.parametrize("kind,reason", [(OwnReader, "reads states"), (ScheduleFree, "outside its step")])
def test_optimizers_that_would_lose_them_are_refused_by_name(kind: Any, reason: str) -> None:
    optimizer = kind(half_weights(), lr=RATE)
    assert kind.__name__ in why_no_master_weights(optimizer) and reason in why_no_master_weights(optimizer)
    with pytest.raises(ValueError, match=reason):
        keep_master_weights(optimizer)
