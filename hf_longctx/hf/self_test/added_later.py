"""Finds code that users put on a model after the start of a run, when nothing looks at it any more.

A hook may do anything to the tokens that it gets: under plans these are packs, slices or shards of documents. The self-test
compares a copy with all hooks and forwards that the model has at the start. Those that come between the start and a training are
compared when that begins, if the model is still whole on every rank. All others are refused, on all ranks, and so is a loss
function, which plans never call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hf_longctx.hf.models.adapters import base_of
from hf_longctx.hf.self_test.reduced_copy import is_user_function, package_of, user_functions
from hf_longctx.hf.start.losses import model_loss_problems

# packages whose hooks only read; transformers' own callbacks put them on a model when a training begins
_WATCHERS = ("wandb",)


class CodeAtStart:
    """Functions that users had put on the modules of a model, forwards of its classes, and its loss, when this was made.

    is_compared: whether a self-test compares them; without one, users answer for hooks and forwards. device: where the loss
    is probed, if plans train the model's own; else None.
    """

    def __init__(self, model: nn.Module, is_compared: bool, device: torch.device | None) -> None:
        self._is_compared, self._device, self._loss = is_compared, device, _own_loss(model)
        self.accept(model)

    def accept(self, model: nn.Module) -> None:
        """Takes the functions that are on `model` now for those of its start, since a self-test has compared them."""
        # the objects themselves, since the number of one that is gone may come again; a forward of a class belongs to no module
        self._known: dict[tuple[int, int], tuple[nn.Module | None, Any]] = {
            (key := _key(module, function)): (module if key[0] else None, function) for module, _, function in _functions(model)
        }

    def forget_others(self, model: nn.Module) -> None:
        """Lets go of modules that `model` has no more since it was cut, whose weights would stay in memory."""
        kept = set(map(id, model.modules()))
        self._known = {key: known for key, known in self._known.items() if not key[0] or key[0] in kept}

    def problem(self, model: nn.Module) -> str:
        """Problem with the first function that a user has put on `model` since; empty if there is none."""
        if self._device is not None and (loss := _own_loss(model)) is not self._loss:
            if problems := model_loss_problems(model, self._device):
                return problems[0]
            self._loss = loss
        for module, kind, function in _functions(model) if self._is_compared else ():
            if _key(module, function) not in self._known and package_of(function) not in _WATCHERS:
                name = next((name for name, each in model.named_modules() if each is module), "")
                return (
                    f"{name or 'the model'} ({type(module).__name__}) got {kind} ({_words(function)}) after the start, so the "
                    f"self-test has not compared what it does to packs and slices of documents; put it there before the trainer "
                    f"is made, or set self_test=False if it treats every token alone"
                )
        return ""


def _own_loss(model: nn.Module) -> Any:
    """The loss that was set on a model in place of that of its class; None if there is none."""
    return vars(base_of(model)).get("_loss_function")


def _functions(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    yield from user_functions(model)
    # one module of each class is enough
    for module in {type(each): each for each in model.modules()}.values():
        if is_user_function(function := type(module).forward):
            yield module, "another forward of its class", function


def _key(module: nn.Module, function: Any) -> tuple[int, int]:
    is_of_class = getattr(type(module), "forward", None) is function
    return 0 if is_of_class else id(module), id(function)


def _words(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))
