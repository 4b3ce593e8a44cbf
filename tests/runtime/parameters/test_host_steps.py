"""Updates on the host in parts: bit-equal to one update of everything, however late copies are, through foreign changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.measures.late_copies import LateCopies
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_longctx.runtime.core.host_copies import CopyEngine, PlainCopies
from hf_longctx.runtime.parameters import host_steps, master_weights
from hf_longctx.runtime.parameters.host_steps import HostSteps, updates_weight_by_weight
from hf_longctx.runtime.parameters.master_weights import MASTER_WEIGHT, keep_master_weights

STEPS = 4
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-3),
    "fused AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-3, fused=True),
    "many at once": lambda groups: torch.optim.AdamW(groups, lr=1e-3, foreach=True, amsgrad=True),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=1e-3),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-3, momentum=0.9, nesterov=True),
    "plain SGD": lambda groups: torch.optim.SGD(groups, lr=1e-3),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-3),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, centered=True),
    "Adadelta": lambda groups: torch.optim.Adadelta(groups),
    "Adamax": lambda groups: torch.optim.Adamax(groups),
    "ASGD": lambda groups: torch.optim.ASGD(groups),
    "NAdam": lambda groups: torch.optim.NAdam(groups),
    "RAdam": lambda groups: torch.optim.RAdam(groups),
    "Rprop": lambda groups: torch.optim.Rprop(groups),
}
ENGINES: dict[str, Callable[[], CopyEngine]] = {
    "at once": PlainCopies,
    "back late": lambda: LateCopies(False),
    "all late": lambda: LateCopies(True),
}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of one large weight or a few small ones."""
    monkeypatch.setattr(host_steps, "UPDATE_PART_BYTES", 128)


def some_weights() -> list[nn.Parameter]:
    """Weights of both dtypes, one transposed and one empty, more than fit into one part."""
    generator = torch.Generator().manual_seed(0)
    shapes = (40, 30), (30,), (7, 5), (3,), (0, 4), (11, 2)
    found = [torch.randn(shape, generator=generator) for shape in shapes]
    found[2] = found[2].t()
    return [nn.Parameter(weight if place % 3 == 1 else weight.bfloat16()) for place, weight in enumerate(found)]


def groups_of(weights: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": weights[:3], "weight_decay": 0.1}, {"params": [weights[3]]}, {"params": weights[4:], "lr": 2e-3}]


def set_gradients(weights: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for place, weight in enumerate(weights):
        gradient = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        # one weight gets a gradient in one step only
        weight.grad = gradient if place != 3 or step == 1 else None


def kept_optimizer(name: str, weights: list[nn.Parameter], copies: CopyEngine | None) -> torch.optim.Optimizer:
    """An optimizer with states on the host, in parts if there is an engine for their copies, else all at once."""
    optimizer = OPTIMIZERS[name](groups_of(weights))
    with pytest.MonkeyPatch.context() as patch:
        if copies is None:
            patch.setattr(master_weights, "updates_weight_by_weight", lambda optimizer: False)
        keep_master_weights(optimizer, True, copies)
    return optimizer


def trained(name: str, copies: CopyEngine | None, meddle: Callable[[list[nn.Parameter]], None] = lambda weights: None) -> Any:
    """Weights and states after some steps under a schedule, with a save and a load in between."""
    weights = some_weights()
    optimizer = kept_optimizer(name, weights, copies)
    schedule = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    for step in range(STEPS):
        set_gradients(weights, step)
        if step == 2:
            meddle(weights)
            saved, factor = copy.deepcopy(optimizer.state_dict()), schedule.state_dict()
            optimizer = kept_optimizer(name, weights, copies)
            optimizer.load_state_dict(saved)
            schedule = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
            schedule.load_state_dict(factor)
        torch.nn.utils.clip_grad_norm_(weights, 0.5)
        optimizer.step()
        schedule.step()
    states = [{key: value for key, value in optimizer.state[weight].items() if key != MASTER_WEIGHT} for weight in weights]
    return [weight.detach() for weight in weights], [optimizer.state[weight][MASTER_WEIGHT] for weight in weights], states


def assert_equal(found: Any, expected: Any) -> None:
    for values, others in zip(found[:2], expected[:2], strict=True):
        assert all(value.dtype == other.dtype and torch.equal(value, other) for value, other in zip(values, others, strict=True))
    for state, other in zip(found[2], expected[2], strict=True):
        assert state.keys() == other.keys()
        assert all(torch.equal(torch.as_tensor(state[key]), torch.as_tensor(other[key])) for key in state)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parts_give_the_bits_of_one_update(name: str) -> None:
    expected = trained(name, None)
    for engine in ENGINES.values():
        assert_equal(trained(name, engine()), expected)


def test_a_weight_that_something_else_changed_goes_on_from_there() -> None:
    def meddle(weights: list[nn.Parameter]) -> None:
        with torch.no_grad():
            weights[0][3] = 7.0
            # unseen by version counters
            weights[1].data.mul_(2.0)
            weights[2].data = torch.ones_like(weights[2])

    expected = trained("AdamW", None, meddle)
    assert not torch.equal(expected[0][0], trained("AdamW", None)[0][0])
    assert_equal(trained("AdamW", LateCopies(True), meddle), expected)


def test_gradients_that_a_callback_changed_are_used() -> None:
    def meddle(weights: list[nn.Parameter]) -> None:
        for weight in weights:
            if weight.grad is not None:
                weight.grad.data.clamp_(-0.1, 0.1)

    assert_equal(trained("SGD", LateCopies(True), meddle), trained("SGD", None, meddle))


class Counting(PlainCopies):
    """Notes the order of copies and waits."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def to_host(self, source: Tensor, target: Tensor, after: tuple[Any, ...], is_kept: bool = False) -> Any:
        target.copy_(source)
        self.log.append("out")
        return len(self.log)

    def to_device(self, source: Tensor, target: Tensor, after: tuple[Any, ...], beside: bool = False) -> Any:
        target.copy_(source)
        self.log.append("back")
        return len(self.log)

    def wait_on_host(self, ticket: Any) -> None:
        self.log.append("arrives")

    def wait(self, ticket: Any) -> None:
        self.log.append("used")


def test_a_part_is_sent_back_before_the_next_is_waited_for() -> None:
    weights, copies = some_weights(), Counting()
    optimizer = kept_optimizer("AdamW", weights, copies)
    set_gradients(weights, 1)
    optimizer.step()
    # bytes: 2400 | 120 | 70, 6, 0, 44; a weight and its gradient leave for each
    assert [len(part) for part in host_steps._parts(weights)] == [1, 1, 4]
    parts = ["arrives"] * 2 + ["back"], ["arrives"] * 2 + ["back"], ["arrives"] * 8 + ["back"] * 4
    assert copies.log == ["out"] * 12 + [each for part in parts for each in part] + ["used"] * 6


def test_memory_is_made_once_and_holds_what_plans_count() -> None:
    weights = some_weights()
    optimizer = kept_optimizer("AdamW", weights, PlainCopies())
    host: HostSteps = vars(optimizer)["longctx_master_weights"].host
    (memory,) = host._memory
    own = sum(weight.numel() * weight.element_size() for weight in weights)
    assert 2 * own <= memory.memory.numel() <= 2 * (own + 64 * len(weights))
    for step in range(3):
        set_gradients(weights, step)
        optimizer.step()
    assert host._memory == [memory]
    # a weight that joined later gets memory of its own
    later = nn.Parameter(torch.ones(5))
    optimizer.add_param_group({"params": [later]})
    set_gradients([*weights, later], 3)
    optimizer.step()
    assert len(host._memory) == 2 and not torch.equal(later.detach(), torch.ones(5))


def test_a_frozen_weight_and_one_of_another_dtype_are_as_in_one_update() -> None:
    found = []
    for copies in (None, LateCopies(True)):
        weights = some_weights()
        optimizer = kept_optimizer("AdamW", weights, copies)
        for step in range(3):
            if step == 1:
                weights[0].requires_grad_(False)
                weights[1].data = weights[1].data.bfloat16()
            set_gradients(weights, step)
            if step:
                weights[0].grad = None
            optimizer.step()
        found.append([weight.detach() for weight in weights])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Summing(torch.optim.SGD):
    """Counts its steps."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


def test_other_optimizers_get_all_weights_at_once() -> None:
    weights = some_weights()
    optimizer = Summing(weights, lr=0.1)
    assert not updates_weight_by_weight(optimizer)
    keep_master_weights(optimizer, on_host=True)
    set_gradients(weights, 1)
    optimizer.step()
    assert optimizer.steps == 1
    wrapped = torch.optim.SGD(weights, lr=0.1)
    wrapped.step = Summing.step.__get__(wrapped)  # type: ignore[method-assign]
    assert not updates_weight_by_weight(wrapped)


def test_what_looks_at_every_step_sees_one() -> None:
    weights = some_weights()
    optimizer = kept_optimizer("SGD", weights, PlainCopies())
    seen: list[int] = []
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(len(seen)))
    try:
        set_gradients(weights, 1)
        optimizer.step()
    finally:
        hook.remove()
    assert seen == [0]


def test_a_sparse_gradient_goes_the_other_way() -> None:
    found = []
    for copies in (None, LateCopies(True)):
        table = nn.Embedding(6, 3, sparse=True, _weight=torch.ones(6, 3))
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        keep_master_weights(optimizer, True, copies)
        table(torch.tensor([1, 4])).sum().backward()
        optimizer.step()
        found.append(table.weight.detach())
    assert torch.equal(*found) and float(found[0][1, 0]) == pytest.approx(0.9)


class FailingOnce(LateCopies):
    """Fails on the third weight that leaves for the device."""

    num_back = 0

    def to_device(self, source: Tensor, target: Tensor, after: tuple[Any, ...], beside: bool = False) -> Any:
        self.num_back += 1
        if self.num_back == 3:
            raise RuntimeError("the link is down")
        return super().to_device(source, target, after, beside)


def test_a_step_that_failed_leaves_groups_and_weights_whole() -> None:
    weights = some_weights()
    optimizer = kept_optimizer("AdamW", weights, FailingOnce(True))
    held = [list(group["params"]) for group in optimizer.param_groups]
    set_gradients(weights, 1)
    with pytest.raises(RuntimeError, match="the link is down"):
        optimizer.step()
    assert [group["params"] for group in optimizer.param_groups] == held
    assert all(bool(torch.isfinite(weight).all()) for weight in weights)
    assert set(optimizer.state) <= set(weights)


def sharded_steps(name: str) -> tuple[list[Tensor], list[Tensor]]:
    """This rank's shards after some steps, in parts and at once."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for copies in (None, LateCopies(True)):
        weights = [nn.Parameter(distribute_tensor(w.detach(), mesh, [Shard(0)])) for w in some_weights() if w.numel()]
        optimizer = OPTIMIZERS[name](weights)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host_steps, "UPDATE_PART_BYTES", 256)
            if copies is None:
                patch.setattr(master_weights, "updates_weight_by_weight", lambda optimizer: False)
            keep_master_weights(optimizer, True, copies)
            for step in range(STEPS):
                generator = torch.Generator().manual_seed(step)
                for weight in weights:
                    gradient = torch.randn(weight.shape, generator=generator).to(weight.dtype)
                    weight.grad = distribute_tensor(gradient, mesh, [Shard(0)])
                torch.nn.utils.clip_grad_norm_(weights, 0.5)
                optimizer.step()
        assert all(isinstance(optimizer.state[weight][MASTER_WEIGHT], DTensor) for weight in weights)
        tensors = [weight.detach() for weight in weights]
        tensors += [optimizer.state[weight][MASTER_WEIGHT] for weight in weights]
        found.append([tensor.to_local() for tensor in tensors])
    return found[0], found[1]


@pytest.mark.daily("fused AdamW")
@pytest.mark.parametrize("name", ["AdamW", "fused AdamW"])
def test_shards_give_the_bits_of_one_update(ranks: Any, name: str) -> None:
    for at_once, in_parts in ranks(2).run(sharded_steps, name):
        assert all(torch.equal(a, b) for a, b in zip(at_once, in_parts, strict=True))
