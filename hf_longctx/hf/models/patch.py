"""Looks at the functions that the forward of a module consists of.

Accelerate wraps the forward of a model for mixed precision, and decorators wrap that of a class, each under the name and often
with the attributes of what it wraps. So a forward is recognised by its code.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from hf_longctx.runtime.core.binding import is_written_by, wrapped

# parameters by which forwards of transformers take a cache; 5.24 calls it `cache` in most classes
CACHES = ("cache", "past_key_values", "cache_params", "layer_past", "state")
# module of the decorator that gives parameters their new names
_RENAMES = "transformers.utils.deprecation"


def without_renames(function: Any) -> Any:
    """`function` without the decorators of transformers that only take a parameter by its old name too."""
    while getattr(function, "__globals__", {}).get("__name__") == _RENAMES and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


# every attention of some classes asks in every forward
@functools.cache
def cache_parameter(function: Callable[..., Any]) -> str:
    """Name of the parameter by which a forward of transformers takes a cache; empty if it takes none."""
    names = inspect.signature(function).parameters
    return next((name for name in CACHES if name in names), "")


def is_made_by(maker: Callable[..., Any], function: Any) -> bool:
    """Whether `function`, or the method's function, is the `forward` that is defined inside `maker`, wrapped by nothing."""
    code, own = getattr(getattr(function, "__func__", function), "__code__", None), maker.__code__
    return code is not None and (code.co_filename, code.co_qualname) == (own.co_filename, f"{own.co_qualname}.<locals>.forward")


def holds(maker: Callable[..., Any], function: Any) -> bool:
    """Whether `function` is the `forward` that is defined inside `maker`, or wraps it."""
    return any(is_made_by(maker, each) for each in wrapped(function))


def is_of_transformers(kind: Any) -> bool:
    """Whether the forward of a class of models is one of transformers, inside decorators of transformers and torch alone."""
    return is_written_by(kind.forward, "transformers", "torch")
