"""Replaces methods, or functions that they call, for one instance of a module; the activation engine and `hf.models` use it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_modules

_MARK = "_longctx_bound"
# attributes of a module that hold hooks
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def global_hooks() -> list[tuple[str, Any]]:
    """Hooks of all modules of the process, with the kind of each."""
    # read from the module each time, since torch gives some of them new dictionaries
    own = vars(torch_modules)
    return [(kind[1:-1], hook) for kind in HOOKS for hook in dict(own.get(f"_global{kind}", {})).values()]


def bound(module: nn.Module, function: Callable[..., Any]) -> MethodType:
    """Makes `function` a method of `module` alone.

    A deep copy of the module carries the method along; there it falls back to the forward of the class.
    """

    def method(this: nn.Module, *args: Any, **keywords: Any) -> Any:
        if this is not module:
            return type(this).forward(this, *args, **keywords)
        return function(*args, **keywords)

    vars(method)[_MARK] = True
    return MethodType(method, module)


def is_bound(function: Any) -> bool:
    """Whether `bound` or `replace_forward` made this function or method."""
    return hasattr(function, _MARK)


def replace_forward(module: nn.Module, function: Callable[..., Any]) -> Callable[[], None]:
    """Lets calls of `module` run `function`, until the returned function puts the forward back that is there now.

    The new forward has the signature of the present one, which trainers and `generate` read. A deep copy of the module falls
    back to the forward of its class.
    """
    before, own = module.forward, vars(module).get("forward")

    @functools.wraps(getattr(before, "__func__", before))
    def forward(this: nn.Module, *args: Any, **keywords: Any) -> Any:
        if this is not module:
            return type(this).forward(this, *args, **keywords)
        return function(*args, **keywords)

    vars(forward)[_MARK] = True
    vars(module)["forward"] = MethodType(forward, module)

    def undo() -> None:
        if own is None:
            vars(module).pop("forward", None)
        else:
            vars(module)["forward"] = own

    return undo


def with_globals(function: Any, functions: dict[str, Any]) -> FunctionType:
    """The code of `function` with other functions under these names of its module, which stays as it is."""
    names = {**function.__globals__, **functions}
    renamed = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    renamed.__kwdefaults__ = function.__kwdefaults__
    return renamed
