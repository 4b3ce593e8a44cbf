"""Methods bound to one instance of a module."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


def bound(module: nn.Module, function: Callable[..., Any]) -> MethodType:
    """`function` as a method of `module` alone: a copy of the module, which takes it along, runs as its class does."""

    def method(this: nn.Module, *args: Any, **keywords: Any) -> Any:
        if this is not module:
            return type(this).forward(this, *args, **keywords)
        return function(*args, **keywords)

    return MethodType(method, module)
