"""Looks at the functions that the forward of a module consists of.

Accelerate wraps the forward of a model for mixed precision, and decorators wrap that of a class, each under the name and often
with the attributes of what it wraps. So a forward is recognised by its code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def wrapped(function: Any) -> Iterator[Any]:
    """A function and those that it wraps, outermost first; none for None."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def is_made_by(maker: Callable[..., Any], function: Any) -> bool:
    """Whether `function`, or the method's function, is the `forward` that is defined inside `maker`, wrapped by nothing."""
    code, own = getattr(getattr(function, "__func__", function), "__code__", None), maker.__code__
    return code is not None and (code.co_filename, code.co_qualname) == (own.co_filename, f"{own.co_qualname}.<locals>.forward")


def holds(maker: Callable[..., Any], function: Any) -> bool:
    """Whether `function` is the `forward` that is defined inside `maker`, or wraps it."""
    return any(is_made_by(maker, each) for each in wrapped(function))


def is_of_transformers(kind: Any) -> bool:
    """Whether the forward of a class of models is one of transformers, inside decorators of transformers and torch alone."""
    modules = [str(getattr(each, "__globals__", {}).get("__name__", "")) for each in wrapped(kind.forward)]
    return all(each.split(".")[0] in ("transformers", "torch") for each in modules)
