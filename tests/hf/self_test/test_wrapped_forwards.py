"""A replaced forward, on the model or on a module, is part of what the self-test runs; one that it cannot run is refused."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from functools import partial, wraps
from types import MethodType
from typing import Any

import pytest
import torch
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase, build_model
from helpers.trainers.trainer_runs import problems_at_start, training_arguments
from torch import nn

from hf_longctx import LongContextConfig, LongContextTrainer
from hf_longctx.hf.self_test.independent import independent_copy

ROWS = random_rows([61, 13, 5, 8, 21, 34, 3, 9] * 3)
# forward that a wrapper refers to by a global name
HELD: Any = None


class Wrapper:
    """An object that holds the original forward, with state that cannot be copied."""

    def __init__(self, module: nn.Module) -> None:
        self.run, self.lock, self.num_calls = module.forward, threading.Lock(), 0

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        self.num_calls += 1
        return self.run(*args, **keywords)

    def call(self, *args: Any, **keywords: Any) -> Any:
        return self(*args, **keywords)


class Plain(Wrapper):
    """A wrapper that could be copied."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        del self.lock


class Slotted:
    """A wrapper whose reference to the model cannot be replaced."""

    __slots__ = ("run",)

    def __init__(self, module: nn.Module) -> None:
        self.run = module.forward

    def call(self, *args: Any, **keywords: Any) -> Any:
        return self.run(*args, **keywords)


def closure(module: nn.Module) -> Callable[..., Any]:
    run = module.forward

    def forward(*args: Any, **keywords: Any) -> Any:
        return run(*args, **keywords)

    return forward


def method(module: nn.Module) -> Callable[..., Any]:
    """Wraps a forward as TRL's fused head does."""
    run = module.forward

    @wraps(type(module).forward)
    def forward(self: nn.Module, *args: Any, **keywords: Any) -> Any:
        return run(*args, **keywords)

    return MethodType(forward, module)


def by_default(module: nn.Module) -> Callable[..., Any]:
    def forward(*args: Any, run: Any = module.forward, **keywords: Any) -> Any:
        return run(*args, **keywords)

    return forward


def by_global(module: nn.Module) -> Callable[..., Any]:
    global HELD
    HELD = module.forward
    return lambda *args, **keywords: HELD(*args, **keywords)


def by_container(module: nn.Module) -> Callable[..., Any]:
    state = {"models": [module], "runs": (module.forward,)}
    return lambda *args, **keywords: state["runs"][0](*args, **keywords)


def nested(module: nn.Module) -> Callable[..., Any]:
    module.forward = closure(module)
    module.forward = partial(module.forward)
    module.forward = method(module)
    return Plain(module).call


WRAPPERS: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "closure": closure,
    "method": method,
    "partial": lambda module: partial(module.forward),
    "partial of a closure": lambda module: partial(closure(module)),
    "method of a wrapper": lambda module: Plain(module).call,
    "wrapper that cannot be copied": lambda module: Wrapper(module).call,
    "callable object": Plain,
    "default of an argument": by_default,
    "global name": by_global,
    "container": by_container,
    "nested": nested,
}
PLACES = {"model": "", "decoder": "model", "layer": "model.layers.1", "mlp": "model.layers.0.mlp", "head": "lm_head"}


def wrapped(kind: str, place: str = "", case: ModelCase | None = None) -> Any:
    model = build_model(case or ModelCase())
    module = model.get_submodule(place)
    module.forward = WRAPPERS[kind](module)
    return model


def opening(model: Any, **config: Any) -> str:
    """Opening line of a trainer with default settings, or the error that keeps it from starting."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            trainer = LongContextTrainer(
                model=model,
                args=training_arguments(folder, per_device_train_batch_size=4),
                train_dataset=ROWS,
                longctx_config=LongContextConfig(**config),
            )
        except ValueError as error:
            return str(error)
        return trainer.longctx_run.report.opening


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_copy_of_a_wrapped_module_runs_the_wrapper_on_the_copy(kind: str, place: str) -> None:
    model = wrapped(kind, PLACES[place])
    ids = torch.tensor([ROWS[0]["input_ids"]])
    expected = model(input_ids=ids).logits
    copied = independent_copy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(float("nan"))
    assert torch.equal(copied(input_ids=ids).logits, expected)
    assert "forward" in vars(copied.get_submodule(PLACES[place]))


@pytest.mark.daily("global name")
@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_run_with_a_wrapped_forward_starts_with_default_settings(kind: str) -> None:
    assert "self-test passed" in opening(wrapped(kind))


def start_on_rank(kind: str, place: str, config: dict[str, Any]) -> str:
    return opening(wrapped(kind, place), **config)


@pytest.mark.daily("{'stages': 2}")
@pytest.mark.parametrize("config", [{}, {"parameters": "sharded"}, {"stages": 2}], ids=str)
def test_wrapped_forwards_start_on_two_ranks_too(ranks, config: dict[str, Any]) -> None:
    for message in ranks(2).run(start_on_rank, "method", "", {"tokens_per_rank": 96, **config}):
        assert "self-test passed" in message, message


def smoothing(module: nn.Module) -> Callable[..., Any]:
    """A wrapper that mixes the tokens of its input, which plans would divide."""
    run = module.forward
    return lambda hidden_1TC, *args, **keywords: run(hidden_1TC - hidden_1TC.mean(1, keepdim=True), *args, **keywords)


@pytest.mark.wide
@pytest.mark.parametrize("place", ["model.layers.1", "model.layers.1.mlp"])
def test_a_wrapper_that_mixes_tokens_is_seen(place: str) -> None:
    model = build_model(ModelCase(num_layers=4))
    module = model.get_submodule(place)
    module.forward = smoothing(module)
    message = opening(model)
    assert message.startswith("the parity self-test failed before step 1"), message
    assert "layer 1 (full_attention) is the first that differs" in message


def test_a_wrapper_that_cannot_be_moved_is_refused_by_name() -> None:
    model = build_model(ModelCase())
    model.forward = Slotted(model).call
    message = opening(model)
    assert "something in the copy ran the module 'model" in message
    assert "forward of LlamaForCausalLM is Slotted.call (" in message and "types.MethodType(function, module)" in message
    # the original runs as before
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_what_cannot_be_copied_is_refused_by_name() -> None:
    model = build_model(ModelCase())
    model.model.layers[1].guard = threading.Lock()
    message = opening(model)
    assert "model.layers.1.guard cannot be copied (TypeError: cannot pickle '_thread.lock' object)" in message


def test_a_forward_that_drops_keywords_is_refused_at_start() -> None:
    model = build_model(ModelCase())
    run = model.forward

    def forward(input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        return run(input_ids=input_ids, attention_mask=attention_mask, labels=labels)

    model.forward = forward
    (problem,) = problems_at_start(model)
    assert (
        problem.startswith("the forward of LlamaForCausalLM was replaced by a function of (input_ids") and "**keywords" in problem
    )
