"""Finds code that users put on a model after the start of a run, when it is no longer tested.

A hook may do anything to its tokens, which under plans are packs, slices or shards of documents. The self-test compares a copy
with all hooks and forwards that the model has at the start. Those added between the start and a training are compared when the
training begins, if the model is still whole on every rank. All others are refused, on all ranks, and so is a loss function, which
plans never call.

Without a self-test, users are responsible for hooks and forwards. But in some modules (adapters, MLPs, norms, projections, heads,
dropout, ...) plans replace the forward. If another one is set there afterwards, or in the class, or if the module is replaced,
one of both forwards would be lost. So that is always refused.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_longctx.hf.models.facts import ModelFacts
from hf_longctx.hf.models.refusing import refuses
from hf_longctx.hf.self_test.reduced_copy import is_user_function, package_of, user_functions
from hf_longctx.hf.start.losses import model_loss_problems
from hf_longctx.runtime.core.binding import HOOKS, PUT, global_hooks, is_ours, lost_method, own_forward, runs_inside

# packages whose hooks only read; transformers' own callbacks set them when a training begins
_WATCHERS = ("wandb",)


class CodeAtStart:
    """Functions that users had put on a model's modules, forwards of its classes, and its loss, at the start.

    is_compared: whether a self-test compares them; otherwise users are responsible for hooks and forwards. device: device for
    probing the loss, if plans train the model's own; else None.
    """

    def __init__(self, facts: ModelFacts, is_compared: bool, device: torch.device | None) -> None:
        self._is_compared, self._device, self._facts, self._loss = is_compared, device, facts, _own_loss(facts)
        self.accept(facts.model)

    def accept(self, model: nn.Module) -> None:
        """Accepts all code now on `model` as present at the start, since a self-test has compared it."""
        # keeps the objects, since ids of deleted ones may be reused; a forward of a class belongs to no module
        self._known: dict[tuple[int, int], tuple[nn.Module | None, Any]] = {
            (key := _key(module, function)): (module if key[0] else None, function) for module, _, function in _functions(model)
        }
        self._seen = _Seen(model)

    def forget_others(self, model: nn.Module) -> None:
        """Drops references to modules that were cut from `model`, whose weights would stay in memory."""
        kept = set(map(id, model.modules()))
        self._known = {key: known for key, known in self._known.items() if not key[0] or key[0] in kept}
        self._seen = _Seen(model)

    def problem(self, model: nn.Module) -> str:
        """Problem with the first function that a user has put on `model` since; empty if there is none."""
        if self._device is not None and (loss := _own_loss(self._facts)) is not self._loss:
            if problems := model_loss_problems(self._facts, self._device):
                return problems[0]
            self._loss = loss
        if self._seen.modules[0] is not model:
            # the reference model of a loss of log-probabilities
            return self._added(model)
        if self._seen.is_unchanged():
            return ""
        problem = self._added(model) or self._seen.lost() or self._seen.replaced()
        if not problem:
            # our functions were set or removed, or something outside of plans has changed
            self._seen = _Seen(model)
        return problem

    def _added(self, model: nn.Module) -> str:
        """Describes the first function that the self-test has not compared."""
        for module, kind, function in _functions(model) if self._is_compared else ():
            if _key(module, function) not in self._known and package_of(function) not in _WATCHERS:
                name = next((name for name, each in model.named_modules() if each is module), "")
                return (
                    f"{name or 'the model'} ({type(module).__name__}) got {kind} ({_words(function)}) after the start, so the "
                    f"self-test has not compared what it does to packs and slices of documents; put it there before the trainer "
                    f"is made, or set self_test=False if it treats every token alone"
                )
        return ""


class _Seen:
    """Snapshot of a model's modules with their forwards, classes and hooks, for a quick check of changes."""

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_modules())
        self.names, self.modules = list(named), list(named.values())
        self._own = [vars(module) for module in self.modules]
        self._forwards = self._forwards_now()
        self._kinds: list[type[nn.Module]] = [type(module) for module in self.modules]
        # our forwards that stay for the whole run, unlike those set by `put`, and those of unused stages
        self._is_kept = [
            forward is not None and is_ours(forward) and PUT not in own and not refuses(module)
            for module, own, forward in zip(self.modules, self._own, self._forwards, strict=True)
        ]
        self._of_class: dict[type[nn.Module], Any] = {kind: kind.forward for kind in dict.fromkeys(self._kinds)}
        self._parents = [place for place, own in enumerate(self._own) if own["_modules"]]
        self._inner = [self._own[place]["_modules"] for place in self._parents]
        self._before, self._children = [dict(children) for children in self._inner], self._children_now()
        self._hooks = [own[name] for own in self._own for name in HOOKS]
        self._filled = [hooks for hooks in self._hooks if hooks]
        self._counts, self._keys = list(map(len, self._hooks)), self._keys_now()

    def is_unchanged(self) -> bool:
        """Whether the same functions still run in the same modules."""
        return (
            _are(self._forwards_now(), self._forwards)
            and list(map(type, self.modules)) == self._kinds
            and all(kind.forward is forward for kind, forward in self._of_class.items())
            and _are(self._children_now(), self._children)
            and list(map(len, self._hooks)) == self._counts
            and self._keys_now() == self._keys
        )

    def lost(self) -> str:
        """Describes the first module in which our forward must run but no longer does; empty if there is none."""
        seen = zip(self.names, self.modules, self._kinds, self._forwards, self._is_kept, strict=True)
        for name, module, kind, before, is_kept in seen:
            now = own_forward(module)
            is_lost = is_kept and not (is_ours(now) or runs_inside(now, before))
            is_other = is_kept and type(module).forward is not self._of_class[kind]
            if is_lost or is_other or lost_method(module):
                return (
                    f"the forward of {name or 'the model'} ({type(module).__name__}) was replaced after the start, where plans "
                    f"run their own, so one of both would be left out; put it there before the trainer is made, or use "
                    f"register_forward_hook"
                )
        return ""

    def replaced(self) -> str:
        """Describes the first module that replaced one in or around which our forward runs; empty if there is none."""
        for place, before, now in zip(self._parents, self._before, self._inner, strict=True):
            for name in (name for name in before if now.get(name) is not before[name] and before[name] is not None):
                old, new = before[name], now.get(name)
                is_bound = PUT in self._own[place] or any(map(_is_bound, old.modules()))
                if is_bound or any(isinstance(weight, DTensor) for weight in old.parameters()):
                    return (
                        f"{f'{self.names[place]}.{name}'.lstrip('.')} ({type(old).__name__}) was replaced by a "
                        f"{type(new).__name__} after the start, where plans run a forward of their own or hold its weights; "
                        f"replace it before the trainer is made"
                    )
        return ""

    def _forwards_now(self) -> list[Any]:
        return [own.get("forward") for own in self._own]

    def _children_now(self) -> list[Any]:
        return [child for children in self._inner for child in children.values()]

    def _keys_now(self) -> list[Any]:
        of_all = [(kind, id(hook)) for kind, hook in global_hooks()]
        return [*of_all, *(key for hooks in self._filled for key in hooks)]


def _is_bound(module: nn.Module) -> bool:
    own = vars(module)
    return PUT in own or ("forward" in own and is_ours(own["forward"]))


def _are(found: list[Any], known: list[Any]) -> bool:
    return len(found) == len(known) and all(map(operator.is_, found, known))


def _own_loss(facts: ModelFacts) -> Any:
    """The loss that was set on a model in place of that of its class; None if there is none."""
    return vars(facts.base).get("_loss_function")


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
