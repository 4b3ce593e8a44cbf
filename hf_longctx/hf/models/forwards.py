"""Puts methods on single modules in place of those of their classes, and finds the functions inside wrappers of a forward.

Accelerate wraps the forward of a model for mixed precision, and decorators wrap that of a class; a wrapper has the name and often
the attributes of the function inside. So a method is recognised by its code.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from hf_longctx.runtime.attention.context import GroupContext
from hf_longctx.runtime.core.binding import is_written_by, wrapped

# parameters by which forwards of transformers take a cache; 5.24 calls it `cache` in most classes
CACHES = ("cache", "past_key_values", "cache_params", "layer_past", "state")
# module of the decorator that gives parameters their new names
_RENAMES = "transformers.utils.deprecation"
# attribute of a method that `give` has made: the function that it runs
_GIVEN = "_longctx_given"
# attribute of a module: the plan's context of the forward that is running, for modules to which no argument brings it
_CONTEXT = "_longctx_context"


def without_renames(function: Any) -> Any:
    """`function` without decorators of transformers that only accept old names of parameters."""
    while getattr(function, "__globals__", {}).get("__name__") == _RENAMES and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


# cached, since in some classes every attention calls this in every forward
@functools.cache
def cache_parameter(function: Callable[..., Any]) -> str:
    """Name of the parameter by which a forward of transformers takes a cache; empty if it takes none."""
    names = inspect.signature(function).parameters
    return next((name for name in CACHES if name in names), "")


def give(module: nn.Module, function: Callable[..., Any], name: str = "forward") -> None:
    """Puts `function` on one module in place of its class's method `name`, with that method's signature, which trainers read.

    Idempotent; leaves `function` in place if accelerate has wrapped it since. A deep copy of the module has the method, too.
    Raises ValueError if other code has replaced the method.
    """
    if has(module, function, name):
        return
    if name in vars(module):
        raise ValueError(
            f"the {name} of {type(module).__name__} was replaced, and plans run their own there; remove it, or hook the module "
            f"(register_forward_hook)"
        )

    @functools.wraps(getattr(type(module), name))
    def method(this: nn.Module, *args: Any, **keywords: Any) -> Any:
        return function(this, *args, **keywords)

    vars(method)[_GIVEN] = function
    # a plain method, so that it works on a copy of the model too
    vars(module)[name] = MethodType(method, module)


def take(module: nn.Module, function: Callable[..., Any], name: str = "forward") -> bool:
    """Undoes `give`, and returns whether there was anything to undo. Leaves a method that has been wrapped since."""
    is_there = _is_given(vars(module).get(name), function)
    if is_there:
        del vars(module)[name]
    return is_there


def has(module: nn.Module, function: Callable[..., Any], name: str = "forward") -> bool:
    """Whether the method of a module is `function` from `give`, or wraps it."""
    return any(_is_given(each, function) for each in wrapped(vars(module).get(name)))


def is_replaced(module: nn.Module, function: Callable[..., Any], name: str = "forward") -> bool:
    """Whether a module has a method of its own that is not exactly `function` from `give`."""
    own = vars(module).get(name)
    return own is not None and not _is_given(own, function)


def _is_given(method: Any, function: Callable[..., Any]) -> bool:
    own: Any = getattr(method, "__func__", method)
    code, place = getattr(own, "__code__", None), give.__code__
    # a wrapper has the attributes of the function inside, but other code
    is_ours = code is not None and (code.co_filename, code.co_qualname) == (place.co_filename, "give.<locals>.method")
    return is_ours and vars(own)[_GIVEN] is function


def inner_dropout(module: nn.Module, where: str) -> str:
    """Returns why dropout inside a module fails that plans call with other tokens than it gets without them; empty if none drops.

    where: the module's name and class.
    """
    found = [(name, each) for name, each in module.named_modules() if isinstance(each, _DropoutNd) and each.p]
    if not found:
        return ""
    name, dropout = found[0]
    if adapter := name.partition(".lora_dropout")[0] if ".lora_dropout" in name else "":
        remedy = f"set lora_dropout=0, or leave {adapter.rpartition('.')[2]} out of target_modules"
    else:
        remedy = "set its rate to 0"
    return f"{where} has dropout inside ({name}, rate {dropout.p}), whose masks cannot follow tokens there; {remedy}"


def is_of_transformers(kind: Any) -> bool:
    """Whether the forward of a class of models is one of transformers, inside decorators of transformers and torch alone."""
    return is_written_by(kind.forward, "transformers", "torch")


@contextmanager
def carrying(modules: Iterable[nn.Module], context: GroupContext) -> Iterator[None]:
    """Context in which these modules find a plan's context, by `carried`."""
    carriers = list(modules)
    for module in carriers:
        vars(module)[_CONTEXT] = context
    try:
        yield
    finally:
        for module in carriers:
            vars(module).pop(_CONTEXT, None)


def carried(module: nn.Module) -> GroupContext | None:
    """The plan's context that a module carries; None outside of `carrying`."""
    return vars(module).get(_CONTEXT)
